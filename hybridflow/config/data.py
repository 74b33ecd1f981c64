"""``data`` and ``tokenizer``: where prompts come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from hybridflow.config.types import Server, Variable
from hybridflow.errors import ConfigError
from hybridflow.sections import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    Positive,
    Share,
)

FileFormat = Literal["jsonl", "parquet", "hdf5", "datasets"]


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Made-up problems, as ``hybridflow.data.arithmetic`` makes them.

    Attributes:
        num_train: Problems to train on.
        num_held_out: Problems held out, none of which is among those to train on.
        seed: Another seed, other problems.
        max_operand: Operands go from 0 to this.
        operation: What is done with them.
        mistake_share: Expected share of the training problems whose solution to imitate is wrong; of additions.
        tool_share: Expected share of the training problems whose solution to imitate asks the calculator.
    """

    num_train: Count
    num_held_out: Count
    seed: CountOrZero = 1
    max_operand: Count = 99
    operation: Literal["add", "multiply"] = "add"
    mistake_share: Share = 0.0
    tool_share: Share = 0.0


@dataclass(frozen=True, kw_only=True)
class DataSourceConfig:
    """One of several sources that training draws from, each in epochs of its own.

    Attributes:
        path: As ``data.train``.
        weight: How often it is drawn from, in proportion to the others; None, of all of them: as often as it has rows,
            so that together they have epochs as one file.
        file_format: As ``data.file_format``, of this source alone; None: that one.
    """

    path: str
    weight: Positive | None = None
    file_format: FileFormat | None = None


@dataclass(frozen=True, kw_only=True)
class SpoolConfig:
    """A directory into which other programs rename JSONL files while the job runs; each row is used once, in order.

    Attributes:
        path: The directory; of this run alone.
        deadline_s: Longest wait for the next row.
        poll_s: How often the lowest rank looks for new files.
    """

    path: str
    deadline_s: Positive = field(default=900.0, metadata=MAY_CHANGE)
    poll_s: Positive = field(default=1.0, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """A topic to which other programs write while the job runs, a row of JSON in each message; each is used once.

    Attributes:
        servers: Brokers to ask first, ``host:port`` each.
        topic: The topic; a new run begins with the oldest message that the brokers still have.
        options: Settings of the client, librdkafka, by its own names, such as ``security.protocol``. Secrets
            are refused here, since a recipe is kept with the run.
        options_env: Settings of the client that are secret, such as ``sasl.password``: for each the name of the
            environment variable that holds it.
        on_lost: What becomes of a run when the brokers have dropped messages before it took them: it stops and says how
            many, or goes on without them and says so.
        deadline_s: Longest wait for the next row, also where the brokers are away.
        poll_s: How long the lowest rank gathers messages before it passes them on.
    """

    servers: tuple[Server, ...] = field(metadata=MAY_CHANGE)
    topic: Annotated[str, re.compile(r"[A-Za-z0-9._-]{1,249}")]
    options: dict[str, str] = field(default_factory=dict, metadata=MAY_CHANGE)
    options_env: dict[str, Variable] = field(default_factory=dict, metadata=MAY_CHANGE)
    on_lost: Literal["error", "skip"] = field(default="error", metadata=MAY_CHANGE)
    deadline_s: Positive = field(default=900.0, metadata=MAY_CHANGE)
    poll_s: Positive = field(default=1.0, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from.

    Attributes:
        train: File with one problem on each line, or one preference; or a directory that ``datasets`` has saved. A
            pattern with ``*`` means the files of such names in their order, and an address such as ``s3://…`` is read
            by fsspec.
        mixture: Several such, in the place of ``train``.
        spool: A directory that is filled while the job runs, in the place of ``train``.
        kafka: A topic that is filled while the job runs, in the place of ``train``.
        held_out: File of problems, or preferences, for validation; as ``train``.
        file_format: What files are; None: what their names tell, ``.parquet``, ``.h5`` or ``.hdf5``, and else JSONL.
        prompt_field: Field that holds the prompt: text, or messages as ``messages_field`` holds.
        answer_field: Field that holds the right answer; None: rows have none, the reward needs none.
        solution_field: Field that holds the text to imitate in the warm start; rows without it give their answer. A
            list of texts is a conversation with an environment: what to write, what is then observed, what to write, …
        messages_field: Field that holds a conversation, of rows without a prompt: a list of messages with ``role`` and
            ``content``, or that list as JSON text. A last one of the assistant is the solution, and the answer where
            there is no other.
        chosen_field: Of preferences: field that holds the better of two responses.
        rejected_field: Field that holds the other.
        margin_field: Field that holds by how much the first is better, a number; rows without it have 0. Read by
            ``reward-model``.
        completion_field: Of ``kto``: field that holds a response, of rows that have one and not two.
        wanted_field: Field that tells whether it is wanted, true or false.
        chat_template: File of the jinja template that messages become text by; None: the tokenizer's own.
        prompt_as_message: Whether a prompt that is text is put into that template too, as what the user says.
        max_prompt_tokens: Rows with a longer prompt are left out; None: none are, one that is too long is a bad row.
        on_bad_row: What becomes of a row that cannot be used: the training stops with its place, or goes on without it
            and tells how many were skipped.
        max_row_bytes: Longest line of JSONL.
        num_workers: Processes of each rank that prepare the rows of large files.
        cache_dir: Where prepared rows are kept, for runs that share them; None: in ``run_dir``.
        arithmetic: Make the two files, when they are absent, from these numbers.
    """

    train: str | None = None
    mixture: tuple[DataSourceConfig, ...] = ()
    spool: SpoolConfig | None = None
    kafka: KafkaConfig | None = None
    held_out: str
    file_format: FileFormat | None = None
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    solution_field: str = "solution"
    messages_field: str = "messages"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    margin_field: str = "margin"
    completion_field: str = "completion"
    wanted_field: str = "wanted"
    chat_template: str | None = None
    prompt_as_message: bool = False
    max_prompt_tokens: Count | None = None
    on_bad_row: Literal["error", "skip"] = field(default="error", metadata=MAY_CHANGE)
    max_row_bytes: Count = field(default=16777216, metadata=MAY_CHANGE)
    num_workers: Count = field(default=1, metadata=MAY_CHANGE)
    cache_dir: str | None = field(default=None, metadata=MAY_CHANGE)
    arithmetic: ArithmeticConfig | None = None

    @property
    def sources(self) -> tuple[DataSourceConfig, ...]:
        """What training draws from, also where it is one."""
        if self.train is None:
            return tuple(replace(each, file_format=each.file_format or self.file_format) for each in self.mixture)
        return (DataSourceConfig(path=self.train, file_format=self.file_format),)

    @property
    def title(self) -> str:
        """What messages call that."""
        if self.kafka is not None:
            return f"topic {self.kafka.topic}"
        return ", ".join(source.path for source in self.sources) if self.spool is None else self.spool.path


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to token ids and back.

    Attributes:
        path: A sentencepiece ``.model``, a ``tokenizer.json``, or a directory that holds either; None: that of
            ``model.path``, or without one a sentencepiece model trained on the training file and kept in ``run_dir``.
        vocab_size: Upper limit of the vocabulary of a trained tokenizer.
    """

    path: str | None = None
    vocab_size: Count = 64


_PLACES = ("train", "mixture", "spool", "kafka")


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
