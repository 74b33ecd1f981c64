"""``data`` and ``tokenizer``: where prompts come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from hybridflow.config.types import Server, Variable
from hybridflow.errors import ConfigError
from hybridflow.sections import MAY_CHANGE, Bounds, Count, ListedCount, Positive, Seconds, Seed, Share

FileFormat = Literal["jsonl", "parquet", "hdf5", "datasets"]


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Generate arithmetic problems with ``hybridflow.data.arithmetic``.

    Attributes:
        num_train: Number of training problems.
        num_held_out: Number of held-out problems. No held-out problem is a training problem.
        seed: Seed of the problems.
        max_operand: Largest operand. The smallest is 0.
        operation: Operation on the operands.
        mistake_share: Expected share of training problems whose solution is wrong. Only additions can have mistakes.
        tool_share: Expected share of training problems whose solution asks the calculator.
    """

    num_train: Count
    num_held_out: Count
    seed: Seed = 1
    max_operand: Count = 99
    operation: Literal["add", "multiply"] = "add"
    mistake_share: Share = 0.0
    tool_share: Share = 0.0


@dataclass(frozen=True, kw_only=True)
class DataSourceConfig:
    """Name one of several training sources. Each source has its own epochs.

    Attributes:
        path: File, pattern, directory or address, as ``data.train``.
        weight: How often training draws from the source, relative to the others. Give all sources a weight, or none.
            Without weights, sources are drawn in proportion to their rows, so that they have epochs as one file.
        file_format: Format of this source. None means ``data.file_format``.
    """

    path: str
    weight: Positive | None = None
    file_format: FileFormat | None = None


@dataclass(frozen=True, kw_only=True)
class SpoolConfig:
    """Read JSONL files that other programs rename into a directory during the job. Each row is used once, in order.

    Attributes:
        path: Directory, for this run alone.
        deadline_s: Longest wait for the next row, in seconds.
        poll_s: Time between two looks for new files, in seconds. The lowest rank looks.
    """

    path: str
    deadline_s: Seconds = field(default=900.0, metadata=MAY_CHANGE)
    poll_s: Seconds = field(default=1.0, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """Read rows of JSON that other programs send to a Kafka topic during the job. Each message is used once.

    Attributes:
        servers: Brokers to contact first, ``host:port`` each.
        topic: Topic to read. A new run begins with the oldest message that the brokers still have.
        options: Settings of the librdkafka client, by its own names, such as ``security.protocol``. Secrets are refused
            here, because the run directory keeps the recipe.
        options_env: Secret settings of the client, such as ``sasl.password``. Each value names the environment variable
            that holds the secret.
        on_lost: What a run does if the brokers dropped messages before the run read them. ``error`` stops the run and
            reports how many. ``skip`` goes on without them and reports it.
        deadline_s: Longest wait for the next row, in seconds. Time without reachable brokers counts.
        poll_s: Time for which the lowest rank collects messages before it passes them on, in seconds.
    """

    servers: tuple[Server, ...] = field(metadata=MAY_CHANGE)
    topic: Annotated[str, re.compile(r"[A-Za-z0-9._-]{1,249}")]
    options: dict[str, str] = field(default_factory=dict, metadata=MAY_CHANGE)
    options_env: dict[str, Variable] = field(default_factory=dict, metadata=MAY_CHANGE)
    on_lost: Literal["error", "skip"] = field(default="error", metadata=MAY_CHANGE)
    deadline_s: Seconds = field(default=900.0, metadata=MAY_CHANGE)
    poll_s: Seconds = field(default=1.0, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Set where prompts come from.

    Attributes:
        train: File with one problem or one preference per line, or a directory that ``datasets`` saved. A pattern with
            ``*`` stands for all files that match, in the order of their names. fsspec reads an address such as
            ``s3://…``.
        mixture: Several sources, in place of ``train``.
        spool: Directory that other programs fill during the job, in place of ``train``.
        kafka: Topic that other programs fill during the job, in place of ``train``.
        held_out: File of problems or preferences for validation. It takes the same forms as ``train``. None means no
            validation.
        file_format: Format of the files. None goes by the name: ``.parquet``, ``.h5`` or ``.hdf5``, else JSONL.
        prompt_field: Field of the prompt: text, or messages in the form of ``messages_field``. In all names of fields
            ``outer.inner`` is the field ``inner`` of the object ``outer``.
        answer_field: Field of the right answer, which may be any JSON value. A row without it has ``completion`` or
            ``response`` as its answer, or none. None means no row has one.
        solution_field: Field of the text that SFT and the warm start imitate. A row without it gives its
            ``completion`` or ``response``, else its answer. A list of texts is a conversation with an environment: text
            to write, observation, text to write, and so on.
        messages_field: Field of a conversation, for rows without a prompt. It holds a list of messages with ``role``
            and ``content``, or that list as JSON text. A last message of the assistant is the solution. It is also the
            answer if the row has no other.
        chosen_field: Field of the better response of a preference.
        rejected_field: Field of the worse response of a preference.
        images_field: Field of the images of a prompt: a path or a list of paths. Each has a place in the messages. None
            means prompts are text. See ``docs/images.md``.
        image_max_pixels: Most pixels of an image. A larger one is made smaller. None means as the model's own settings
            say.
        margin_field: Field of a number: by how much the chosen response is better. A row without it has 0. Only
            ``reward-model`` reads it.
        completion_field: Field of the response in a row that has one response instead of two. A row without it may
            have ``response``.
        wanted_field: Field that says whether that response is wanted, for ``kto``: true or false. A row without it may
            have ``label``.
        chat_template: File of the Jinja template that turns messages into text. None means the tokenizer's own.
        chat_template_kwargs: Variables of the chat template, such as ``{enable_thinking: false}`` for Qwen3. A row may
            have others in its field ``chat_template_kwargs``.
        learned_turns: Which messages of the assistant SFT and the warm start learn of a conversation: its ``last``, or
            ``all`` of them. Of a ``prompt`` with a ``completion``, those of the completion.
        prompt_as_message: Whether a text prompt goes through the chat template too, as a user message.
        max_prompt_tokens: Longest prompt, in tokens. Rows with a longer prompt are left out. None leaves out no row,
            and a prompt that is too long makes a bad row.
        on_bad_row: What training does with a row that it cannot use. ``error`` stops and names the place of the row.
            ``skip`` goes on and reports how many rows were skipped.
        max_row_bytes: Longest row, in bytes: of JSONL its line, else about what its values take.
        num_workers: Processes of each rank that prepare the rows of large files.
        cache_dir: Directory for prepared rows, for runs that share them. None means inside ``run_dir``.
        arithmetic: Generate ``train`` and ``held_out`` from these settings if the files are missing.
    """

    # A resume holds the rows of these against the checkpoint's, wherever they lie.
    train: str | None = field(default=None, metadata=MAY_CHANGE)
    mixture: tuple[DataSourceConfig, ...] = field(default=(), metadata=MAY_CHANGE)
    spool: SpoolConfig | None = None
    kafka: KafkaConfig | None = None
    held_out: str | None = field(default=None, metadata=MAY_CHANGE)
    file_format: FileFormat | None = None
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    solution_field: str = "solution"
    messages_field: str = "messages"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    images_field: str | None = None
    image_max_pixels: Count | None = None
    margin_field: str = "margin"
    completion_field: str = "completion"
    wanted_field: str = "wanted"
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    learned_turns: Literal["last", "all"] = "last"
    prompt_as_message: bool = False
    max_prompt_tokens: Count | None = None
    on_bad_row: Literal["error", "skip"] = field(default="error", metadata=MAY_CHANGE)
    max_row_bytes: Annotated[int, Bounds(low=1, high=1 << 30)] = field(default=16777216, metadata=MAY_CHANGE)
    num_workers: ListedCount = field(default=1, metadata=MAY_CHANGE)
    cache_dir: str | None = field(default=None, metadata=MAY_CHANGE)
    arithmetic: ArithmeticConfig | None = None

    @property
    def sources(self) -> tuple[DataSourceConfig, ...]:
        """Return the sources that training draws from, also if there is only one."""
        if self.train is None:
            return tuple(replace(each, file_format=each.file_format or self.file_format) for each in self.mixture)
        return (DataSourceConfig(path=self.train, file_format=self.file_format),)

    @property
    def title(self) -> str:
        """Return the name of the training data in messages."""
        if self.kafka is not None:
            return f"topic {self.kafka.topic}"
        return ", ".join(source.path for source in self.sources) if self.spool is None else self.spool.path


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Convert text to token ids and back.

    Attributes:
        path: A sentencepiece ``.model``, a ``tokenizer.json``, or a directory that holds either. None means the
            tokenizer of ``model.path``. Without ``model.path``, a sentencepiece model is trained on the training file
            and kept in ``run_dir``.
        vocab_size: Largest vocabulary of a trained tokenizer.
    """

    # A resume holds its tokens against the checkpoint's.
    path: str | None = field(default=None, metadata=MAY_CHANGE)
    vocab_size: Count = 64


_PLACES = ("train", "mixture", "spool", "kafka")


_SET_BY_US = frozenset({"messages", "tools", "add_generation_prompt"})


def check_kwargs(kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse variables of a chat template that are no choice. Raises ConfigError."""
    if taken := sorted(_SET_BY_US & {*kwargs}):
        raise ConfigError(f"{where}: {taken[0]} is set by hybridflow; remove it")


_OWN_OPTIONS = re.compile(
    r"bootstrap\.servers|metadata\.broker\.list|group\..*|partition\.assignment\.strategy|auto\.offset\.reset|"
    r"(enable\.)?auto\.(commit|offset\.store).*|enable\.auto\..*|enable\.partition\.eof|offset\.store\..*|.*_cb"
)


_RUN_OPTIONS = ("plugin.library.paths", "sasl.kerberos.kinit.cmd")


_SECRET_OPTIONS = re.compile(r"password|passphrase|secret|key\.pem|ssl_key|oauthbearer\.config|private\.key\.pem")


def check_data(data: DataConfig) -> None:
    """Refuse data that is nowhere, or in two places.

    Raises:
        ConfigError: It is, or what would make it has no place to go.
    """
    given = [name for name in _PLACES if getattr(data, name) not in (None, ())]
    if len(given) != 1:
        found = "missing" if not given else f"there are data.{' and data.'.join(given)}"
        raise ConfigError(f"data.train: {found}; give one of data.{', data.'.join(_PLACES)}")
    if len({source.weight is None for source in data.mixture}) > 1:
        raise ConfigError("data.mixture: some sources have a weight and some have none; give one to all, or to none")
    if data.arithmetic is not None and data.train is None:
        raise ConfigError("data.arithmetic: is written to data.train, which is missing; give it, or remove the section")
    check_kwargs(data.chat_template_kwargs, "data.chat_template_kwargs")
    if data.kafka is not None:
        _check_kafka(data.kafka)


def _check_kafka(kafka: KafkaConfig) -> None:
    if not kafka.servers:
        raise ConfigError("data.kafka.servers: is empty; give at least one broker, as host:port")
    for section in ("options", "options_env"):
        for name in getattr(kafka, section):
            if _OWN_OPTIONS.fullmatch(name):
                raise ConfigError(
                    f"data.kafka.{section}: {name} is not for the recipe: which messages a run takes is kept with the "
                    "run; remove it, and name brokers by data.kafka.servers"
                )
            if name in _RUN_OPTIONS:
                raise ConfigError(f"data.kafka.{section}: {name} would run a program on the lowest rank; remove it")
    for name in kafka.options:
        if _SECRET_OPTIONS.search(name):
            raise ConfigError(
                f"data.kafka.options: {name} is secret, and a recipe is kept with the run; put it into an environment "
                f"variable, and name that: data.kafka.options_env={{{name}: KAFKA_SECRET}}"
            )
        if name in kafka.options_env:
            raise ConfigError(f"data.kafka.options: {name} is in data.kafka.options_env too; remove one")
