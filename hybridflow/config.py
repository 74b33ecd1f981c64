"""What the user asks for: a recipe, read from YAML and dotted overrides. Torch-free, so that a login node can check it.

Each section is a frozen dataclass; a field without a default is required. ``load_recipe`` reads and checks a whole
recipe; every error names the file or override, the dotted key, what was found, what is allowed, and what to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from hybridflow.checkpoint.settings import Settings, read_settings
from hybridflow.errors import ConfigError, HybridflowError, LayoutError
from hybridflow.families.model import Model, check_model
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.presets import CHOSEN, PRESETS, Preset
from hybridflow.reshard.overlap import max_overlap
from hybridflow.sections import (
    Bounds,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Share,
    parse_yaml,
    put_over,
    read_section,
    to_dict,
)

Name = Annotated[str, re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")]
Plugin = Annotated[str, re.compile(r"[\w.]+:\w+")]
Variable = Annotated[str, re.compile(r"[A-Za-z_][A-Za-z0-9_]*")]
Score = Annotated[float, Bounds(low=-1e30, high=1e30)]
Server = Annotated[str, re.compile(r"([A-Z_]+://)?[\w.:\[\]-]+")]
StopText = Annotated[str, re.compile(r"[^\ufffd]{1,1024}", re.DOTALL)]

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
LoRATarget = Literal[
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"
]
FileFormat = Literal["jsonl", "parquet", "hdf5", "datasets"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Algorithm = Literal[tuple(PRESETS)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks of the job.

    Attributes:
        ranks: Number of ranks; started plainly, ``hybridflow train`` brings up so many on this machine.
        ranks_per_node: Ranks on each node; None: all on one node.
        deadline_s: Longest wait for another rank, in seconds; longer than any phase that some ranks take while others
            wait for them. A rank that dies or falls silent is seen much earlier.
        start_deadline_s: Longest wait for all ranks to join, in seconds.
        dead_after_s: A rank that has shown no sign of life for so long is taken for dead, in seconds.
        threads_per_rank: CPU threads of each rank.
        memory_budget_gb: Accelerator memory of each rank, in 1e9 bytes; a job that by our estimate
            (``hybridflow plan job``) needs more is refused before it begins. None: nothing is refused.
    """

    ranks: Count = 1
    ranks_per_node: Count | None = None
    deadline_s: Positive = 1800.0
    start_deadline_s: Positive = 120.0
    dead_after_s: Positive = 20.0
    threads_per_rank: Count = 1
    memory_budget_gb: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
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
class DataSource:
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
class Spool:
    """A directory into which other programs rename JSONL files while the job runs; each row is used once, in order.

    Attributes:
        path: The directory; of this run alone.
        deadline_s: Longest wait for the next row.
        poll_s: How often the lowest rank looks for new files.
    """

    path: str
    deadline_s: Positive = 900.0
    poll_s: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Kafka:
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

    servers: tuple[Server, ...]
    topic: Annotated[str, re.compile(r"[A-Za-z0-9._-]{1,249}")]
    options: dict[str, str] = field(default_factory=dict)
    options_env: dict[str, Variable] = field(default_factory=dict)
    on_lost: Literal["error", "skip"] = "error"
    deadline_s: Positive = 900.0
    poll_s: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Data:
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
    mixture: tuple[DataSource, ...] = ()
    spool: Spool | None = None
    kafka: Kafka | None = None
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
    on_bad_row: Literal["error", "skip"] = "error"
    max_row_bytes: Count = 16777216
    num_workers: Count = 1
    cache_dir: str | None = None
    arithmetic: Arithmetic | None = None

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """What training draws from, also where it is one."""
        if self.train is None:
            return tuple(replace(each, file_format=each.file_format or self.file_format) for each in self.mixture)
        return (DataSource(path=self.train, file_format=self.file_format),)

    @property
    def title(self) -> str:
        """What messages call that."""
        if self.kafka is not None:
            return f"topic {self.kafka.topic}"
        return ", ".join(source.path for source in self.sources) if self.spool is None else self.spool.path


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        path: A sentencepiece ``.model``, a ``tokenizer.json``, or a directory that holds either; None: that of
            ``model.path``, or without one a sentencepiece model trained on the training file and kept in ``run_dir``.
        vocab_size: Upper limit of the vocabulary of a trained tokenizer.
    """

    path: str | None = None
    vocab_size: Count = 64


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Adam with decoupled weight decay.

    Attributes:
        lr: Learning rate, once it is warm.
        schedule: What becomes of it from then to the last training step: nothing, or it falls to ``min_lr`` as a line
            or a half wave of the cosine.
        warmup_steps: Training steps in which it rises to ``lr`` as a line, the last of which has it.
        min_lr: Rate of the last training step.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of squared gradients.
        eps: What is added to the root of that mean.
        weight_decay: Pulls weights towards 0, times the learning rate.
        clip_grad: Largest global gradient norm; 0: no clipping.
        distributed: Whether optimizer state is cut over the data-parallel ranks.
    """

    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrZero = 0
    min_lr: NotNegative = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip_grad: NotNegative = 1.0
    distributed: bool = True


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised training of the actor before reinforcement learning, in the actor's update layout.

    Attributes:
        steps: Optimizer steps.
        batch_size: Samples in each.
        lr: Learning rate; the rest is as in ``actor.optimizer``.
    """

    steps: Count
    batch_size: Count
    lr: Positive


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters on the actor's linear layers, which are all that is trained of it; its own weights are frozen.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: The update is ``alpha / rank * B A``; None: twice the rank, so that its scale does not depend on it.
        dropout: Share of each adapter's inputs that is dropped while gradients are computed.
        targets: The layers that have one, by their names in Hugging Face; ``qkv_proj`` and ``gate_up_proj`` are those
            of families that fuse them, such as Phi-3.
        merge_every: After so many training steps the updates are put into the weights, and the adapters begin anew
            (arXiv 2307.05695); 0: never. The reference is then a model of its own.
        path: PEFT's directory of the adapters to begin with, of this rank, alpha and these targets; None: they begin
            as an update of zero.

    Paper: arXiv 2106.09685.
    """

    rank: Count
    alpha: Positive | None = None
    dropout: Annotated[float, Bounds(low=0, high=0.99)] = 0.0
    targets: tuple[LoRATarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    merge_every: CountOrZero = 0
    path: str | None = None

    @property
    def effective_alpha(self) -> float:
        """``alpha``, also where it was left out."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """What ``B A`` is multiplied by."""
        return self.effective_alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Actor:
    """The policy, which has a layout for each of its two phases.

    Attributes:
        ranks: Global ranks, in mesh order; None: all, but for ``rollout_ranks``.
        update: Layout in which it learns and computes log-probabilities.
        rollout: Layout in which it generates, on the same ranks, ordered so that each keeps what it can of its weights;
            None: that of the update.
        rollout_ranks: Other ranks to generate on, in mesh order, none of them among ``ranks``; None: the same.
            docs/async.md.
        optimizer: How it learns.
        reshard: How weights travel from the one layout to the other. ``shared``: ranks of a node read each other's
            memory; ``torch``: over torch.distributed; ``mpi``: over MPI, in a job that MPI started; ``auto``: shared
            where the system allows it, and the quickest of the others elsewhere.
        reshard_every: After so many training steps the weights that generate are brought up to date. Above 1 they are
            a copy of their own in the meantime, up to this less one updates old, which the correction takes into
            account.
        offload: During a rollout keep the optimizer's state in host memory, and free the gradients.
        lora: Train adapters instead of the weights; None: train the weights.
    """

    ranks: tuple[int, ...] | None = None
    update: ParallelLayout
    rollout: ParallelLayout | None = None
    rollout_ranks: tuple[int, ...] | None = None
    optimizer: Optimizer
    reshard: Literal["auto", "shared", "torch", "mpi"] = "auto"
    reshard_every: Count = 1
    offload: bool = False
    lora: LoRA | None = None


@dataclass(frozen=True, kw_only=True)
class Critic:
    """The value model of PPO.

    Attributes:
        ranks: Global ranks, in mesh order; None: all, but for ``actor.rollout_ranks``.
        layout: How it is cut.
        optimizer: How it learns.
        model: A model of its own, language model or scorer; None: it begins as a copy of the actor.
        value_clip: The loss stops rewarding a value that is further from the old one than this.
        warmup_steps: Training steps at the start in which it learns alone, the actor staying as it is.
    """

    ranks: tuple[int, ...] | None = None
    layout: ParallelLayout
    optimizer: Optimizer
    model: Model | None = None
    value_clip: Positive = 0.5
    warmup_steps: CountOrZero = 0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The frozen copy of the actor, taken after the warm start.

    Attributes:
        ranks: Global ranks, in mesh order; None: the actor's.
        layout: How it is cut; None: as the actor's update layout.
        offload: Keep its weights in host memory while it is not asked.
    """

    ranks: tuple[int, ...] | None = None
    layout: ParallelLayout | None = None
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class RewardService:
    """A service that scores, asked over HTTP. docs/rewards.md says what it is sent and answers.

    Attributes:
        urls: Where samples are posted, ``http://host:port/path`` each, asked in turn.
        auth_env: Environment variable that holds the token to show; None: none is asked for.
        batch_size: Most samples of one request.
        connect_timeout_s: Longest wait for a connection.
    """

    urls: tuple[str, ...]
    auth_env: Variable | None = None
    batch_size: Count = 64
    connect_timeout_s: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A language model that is asked for a score, at ``/v1/chat/completions`` of servers such as ``vllm serve``.

    Attributes:
        urls: Of servers of one model, ``http://host:port`` each, asked in turn.
        template: What it is asked: ``{prompt}``, ``{response}`` and ``{answer}`` stand for those of the sample.
        model: What the servers call the model; None: they have only one.
        auth_env: Environment variable that holds the token to show; None: none is asked for.
        pattern: Finds the number in what it says: the first group of the last match.
        low: The least score that it may give; another one is a failure.
        high: The most.
        max_new_tokens: Longest answer in tokens.
        temperature: Of its sampling.
        connect_timeout_s: Longest wait for a connection.
    """

    urls: tuple[str, ...]
    template: str
    model: str | None = None
    auth_env: Variable | None = None
    pattern: str = r"(?i)score\D{0,20}?([-+]?\d+(?:\.\d+)?)"
    low: Score = 0.0
    high: Score = 10.0
    max_new_tokens: Count = 512
    temperature: NotNegative = 0.0
    connect_timeout_s: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Limits of a program that a response is, and what it may see.

    Attributes:
        wall_s: Longest time, from when it is begun, waiting for a core included.
        cpu_s: Longest time of each of its processes on a core.
        memory_mib: Most memory, of each of its processes and of all together.
        processes: Most processes and threads.
        files_mib: Most room for files.
        output_kib: Most that it may print.
        readable: Directories that it may read, beside those of the system and of Python's standard library.
        allow_unprotected: Run it with limits alone where the machine cannot keep it apart: it then reads and writes
            what the job may, and the network is open to it.
    """

    wall_s: Positive = 10.0
    cpu_s: Count = 10
    memory_mib: Count = 512
    processes: Count = 16
    files_mib: Count = 64
    output_kib: Count = 256
    readable: tuple[str, ...] = ()
    allow_unprotected: bool = False


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What scores a response, or tells its cost: a function, a model, a service, or a judge. docs/rewards.md.

    Attributes:
        function: ``exact_match``; ``length`` in characters; ``regex``; ``maths``: whether response and answer are the
            same expression; ``code``: whether the response is a program that passes the answer's tests; or
            ``package.module:function`` of ``(prompt, response, answer)``, all text, which gives a finite number. With
            ``rollout.environment`` the response is that of the last turn. None, of the reward alone, where nothing else
            scores: the sum of the environment's rewards, ``exact_match`` without one.
        pattern: Of ``regex``: the first group of its last match in the response is to be the answer; without a group,
            it is to match.
        sandbox: Of ``code``: what the program may do.
        model: A scorer with one label, which ``path`` names; its number at the last token is the score.
        service: A service of yours.
        judge: A language model that is asked for a score.
        ranks: Global ranks, in mesh order; None: of a model the actor's, of all others those of the rollout. These
            need no accelerator: their ranks may be those of no model.
        layout: Of the model: how it is cut; None: as the actor's update layout.
        offload: Keep the model's weights in host memory while it is not asked.
        timeout_s: Longest time of a call, from its beginning; None: of a function none, 60 of a service or judge, 10 of
            ``maths``.
        retries: How often a call that failed is made again.
        on_failure: What becomes of a sample whose calls all failed. ``error``: the run ends; ``score``: it gets
            ``failure_score``; ``drop``: nothing is learned from it.
        failure_score: With ``on_failure=score``.
        cache: Scores that each rank keeps, by prompt, response and answer, so as not to ask twice; 0: none.
        max_in_flight: Calls that a rank has under way together; None: 64, one of a function without ``timeout_s``, and
            of ``maths`` and ``code`` its share of the node's cores.
    """

    function: str | None = None
    pattern: str | None = None
    sandbox: Sandbox | None = None
    model: Model | None = None
    service: RewardService | None = None
    judge: Judge | None = None
    ranks: tuple[int, ...] | None = None
    layout: ParallelLayout | None = None
    offload: bool = False
    timeout_s: Positive | None = None
    retries: CountOrZero = 0
    on_failure: Literal["error", "score", "drop"] = "error"
    failure_score: Score = 0.0
    cache: CountOrZero = 0
    max_in_flight: Count | None = None

    @property
    def kind(self) -> str | None:
        """What scores: a key of this section; None: nothing is named."""
        return next((name for name in REWARD_KINDS if getattr(self, name) is not None), None)


REWARD_KINDS = ("model", "service", "judge", "function")
"""Keys of ``Reward`` that name what scores."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What answers the policy's responses, so that a sample is a conversation of several turns.

    Attributes:
        name: ``calculator``, or ``package.module:Class`` of a ``hybridflow.rollout.environment.Environment``.
        max_turns: Most responses of a sample.
        step_deadline_s: Longest time that the environment may take to answer, in seconds.
        failure_reward: Reward of a turn in which the environment raises, does not answer in time, or answers something
            else than it should. The sample ends there, and is learned from like any other.
    """

    name: str
    max_turns: Count = 4
    step_deadline_s: Positive = 30.0
    failure_reward: Score = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingEngine:
    """What generates the responses. All but ours need ``actor.rollout`` with tp, pp and ep of 1.

    Attributes:
        kind: ``megatron``: our own, on the weights being trained. ``vllm``: vLLM within each rollout rank, which is
            given the weights before each rollout. ``openai``: a server that completes token ids at ``/v1/completions``,
            such as ``vllm serve``. ``tgi``: a server with ``/generate``. The weights of a server do not follow.
        urls: Of servers of one model, ``http://host:port`` each, asked in turn.
        model: What the servers call the model; None: they have only one.
        auth_env: Environment variable that holds the token to show to the servers; None: they ask for none.
        log_probs: What a server's log-probabilities are of: the model's own distribution, or the one that was sampled
            from, after temperature and cuts (vLLM: ``--logprobs-mode processed_logprobs``; TGI always).
        off_policy: Train on what a server samples, though its weights stay what they are.
        max_in_flight: Requests that a rank has at the servers at one time.
        retries: How often a request is sent again when a server fails.
        connect_timeout_s: Longest wait for a connection.
        read_timeout_s: Longest wait for an answer.
        deadline_s: Longest time for a request, all tries together.
        memory_share: With ``vllm`` on a GPU: share of its memory that vLLM takes.
    """

    kind: Literal["megatron", "vllm", "openai", "tgi"] = "megatron"
    urls: tuple[str, ...] = ()
    model: str | None = None
    auth_env: Variable | None = None
    log_probs: Literal["raw", "processed"] = "raw"
    off_policy: bool = False
    max_in_flight: Count = 64
    retries: CountOrZero = 5
    connect_timeout_s: Positive = 10.0
    read_timeout_s: Positive = 600.0
    deadline_s: Positive = 1800.0
    memory_share: Annotated[float, Bounds(low=0, high=1, above=True)] = 0.4

    @property
    def is_server(self) -> bool:
        """Whether it is asked over HTTP."""
        return self.kind in ("openai", "tgi")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How responses are sampled. Validation is greedy whatever stands here.

    Attributes:
        group_size: Responses to each prompt.
        max_new_tokens: Longest response in tokens, its end-of-sequence token included; with an ``environment`` all that
            follows the prompt, responses and observations.
        temperature: Divides the logits, in rollout and in training alike.
        top_k: Sample among so many of the likeliest tokens; 0: all.
        top_p: Sample among the likeliest tokens that together reach this probability.
        min_p: Sample among tokens at least this times as likely as the likeliest; 0: all.
        min_new_tokens: Shortest response in tokens, its end-of-sequence token included.
        repetition_penalty: Divides the logits of tokens of the prompt and the response if positive, else multiplies
            them. Penalties are the sampler's alone: training computes probabilities without them.
        presence_penalty: Taken from the logits of tokens that the response has.
        frequency_penalty: Taken from the logits of the response's tokens, times how often each stands there.
        stop: Texts that end a response, beside the end of sequence; it ends with the token that completes one.
        max_concurrent: Samples that one replica decodes together.
        cache_memory: Most memory of each rank's key-value cache: a share of what is free when generating begins, or,
            from 1 on, bytes. What has no room waits.
        carry_over: Begin responses of the next step where this step's leave room, and go on with them when they are
            all done and the weights have changed: no replica decodes a few long responses alone. Its weights may then
            be one more update behind than ``trainer.max_staleness`` says.
        archive: Keep what was sampled, in HDF5; what a killed job had sampled is kept until it is used in any case.
        replay: Directory of a run with an archive: learn from what it has sampled, and sample for validation alone.
        environment: What answers the responses; None: a sample is one response.
        engine: What generates them.
    """

    group_size: Count = 1
    max_new_tokens: Count
    temperature: Annotated[float, Bounds(low=1e-4, high=1e4)] = 1.0
    top_k: CountOrZero = 0
    top_p: Annotated[float, Bounds(low=0, high=1, above=True)] = 1.0
    min_p: Share = 0.0
    min_new_tokens: CountOrZero = 0
    repetition_penalty: Annotated[float, Bounds(low=1e-4, high=1e4)] = 1.0
    presence_penalty: Annotated[float, Bounds(low=-1e4, high=1e4)] = 0.0
    frequency_penalty: Annotated[float, Bounds(low=-1e4, high=1e4)] = 0.0
    stop: tuple[StopText, ...] = ()
    max_concurrent: Count = 256
    cache_memory: Positive = 0.5
    carry_over: bool = False
    archive: bool = False
    replay: str | None = None
    environment: Environment | None = None
    engine: SamplingEngine = SamplingEngine()


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weighs the loss of tokens by how much likelier they are to the trainer than they were to the sampler.

    ``w = exp(old_log_prob - rollout_log_prob)``, no gradient, times the clipped loss.

    Attributes:
        kind: ``truncate``: at most ``high``; ``icepop``: 0 outside of ``low`` to ``high``; ``none``; ``auto``: as
            ``truncate`` where another engine than ours samples, older weights or another run, ``none`` elsewhere.
        level: Of each token, or the product over its response.
        low: Of ``icepop``.
        high: Largest weight.
        reject: Which estimate of the KL between sampler and trainer decides on tokens that do not count; None: all do.
        reject_level: Of each token, or the sum, mean or largest of its response, all of which it then decides on.
        reject_low: Of ``k1``: smallest ratio.
        reject_high: Largest estimate; of ``k1``: largest ratio.

    Paper: truncation arXiv 1802.01561; IcePop arXiv 2510.18855.
    """

    kind: Literal["auto", "none", "truncate", "icepop"] = "auto"
    level: Literal["token", "sequence"] = "token"
    low: NotNegative = 0.5
    high: Positive = 2.0
    reject: Literal["k1", "k2", "k3"] | None = None
    reject_level: Literal["token", "sum", "mean", "max"] = "token"
    reject_low: NotNegative = 0.5
    reject_high: Positive = 2.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How the policy learns from advantages. Defaults are PPO's; other algorithms have their own.

    Attributes:
        kind: ``clip``: PPO's clipped ratio of each token; ``gspo``: that of the whole sequence; ``cispo``: the clipped
            ratio as a weight without gradient.
        clip_low: The probability ratio is clipped below ``1 - clip_low``.
        clip_high: The probability ratio is clipped above ``1 + clip_high``.
        dual_clip: Bound on the ratio where the advantage is negative; None: off.
        aggregation: How the losses of tokens become one number; the critic's is always their token mean.
        norm_tokens: What ``seq-mean-token-sum-norm`` divides by; None: ``rollout.max_new_tokens``.
        entropy_coef: Weight of the entropy, which the loss then rewards.
        epochs: Passes over each global batch, in the same order.

    Paper: arXiv 1707.06347; dual clip arXiv 1912.09729; GSPO arXiv 2507.18071; CISPO arXiv 2506.13585.
    """

    kind: Literal["clip", "gspo", "cispo"] = "clip"
    clip_low: Share = 0.2
    clip_high: NotNegative = 0.2
    dual_clip: Annotated[float, Bounds(low=1, above=True)] | None = None
    aggregation: Aggregation = "token-mean"
    norm_tokens: Count | None = None
    entropy_coef: NotNegative = 0.0
    epochs: Count = 1


@dataclass(frozen=True, kw_only=True)
class KL:
    """The distance to the reference that the policy pays for.

    Attributes:
        coef: Weight of the KL to the reference; 0: none, and no reference is made.
        estimator: How each token's KL is estimated; a ``+`` gives the estimate the gradient of ``k2``.
        place: Whether the KL penalty is part of the reward or of the loss.
        target: Where adaptive KL steers; None: ``coef`` stays fixed.
        horizon: Samples over which adaptive KL answers.

    Paper: arXiv 1909.08593.
    """

    coef: NotNegative = 0.0
    estimator: KLEstimator = "k1"
    place: Literal["reward", "loss"] = "reward"
    target: Positive | None = None
    horizon: Count = 10000


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How the rewards of tokens become advantages, where an algorithm has a choice.

    Attributes:
        gamma: Discount of rewards, for each token.
        gae_lambda: Of generalised advantage estimation: 1 is reward-to-go minus value, 0 the one-step error.

    Paper: arXiv 1506.02438.
    """

    gamma: Share = 1.0
    gae_lambda: Share = 1.0


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """What is added to scores before advantages are made of them.

    Attributes:
        overlong_buffer: The last so many tokens before ``rollout.max_new_tokens`` are paid for; 0: none.
        overlong_factor: What the longest response pays.

    Paper: arXiv 2503.14476.
    """

    overlong_buffer: CountOrZero = 0
    overlong_factor: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Groups whose scores, before shaping, are all equal teach nothing: others are sampled in their place.

    The batch is the first groups in the data order whose scores differ. What was sampled beyond them is not used, and
    the next step begins with the prompt behind the last of them.

    Attributes:
        max_tries: Most rollouts of one step.
        when_short: What to do when there are fewer groups than wanted after so many: end with an error, or train on
            those; where there are none at all it is an error in any case.

    Paper: arXiv 2503.14476.
    """

    max_tries: Count = 10
    when_short: Literal["error", "train"] = "error"


@dataclass(frozen=True, kw_only=True)
class Lagrange:
    """The price of cost, which rises while the mean cost is above its limit.

    Attributes:
        limit: Mean cost of a response that is allowed.
        init: The multiplier at the start.
        lr: How fast its logarithm moves, for each training step.
        max: Its upper bound.

    Paper: arXiv 2310.12773.
    """

    limit: Score = 0.0
    init: Positive = 1.0
    lr: Positive = 0.1
    max: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Learning from responses of which some are preferred.

    Attributes:
        beta: Of DPO and KTO: weight of the KL that is implied; of IPO its regularisation τ.
        label_smoothing: Of DPO: share of the preferences that are taken for wrong.
        reference_free: Of DPO: measure against no reference.
        desirable_weight: Of KTO: weight of the responses that are wanted.
        undesirable_weight: Of KTO: weight of the others.

    Paper: DPO arXiv 2305.18290; IPO arXiv 2310.12036; KTO arXiv 2402.01306.
    """

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Bounds(low=0, high=0.5)] = 0.0
    reference_free: bool = False
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The model that on-policy distillation learns from.

    Attributes:
        model: A language model with the actor's tokenizer, which ``path`` names.
        ranks: Global ranks, in mesh order; None: the actor's.
        layout: How it is cut; None: as the actor's update layout.
        top_k: Compare its likeliest tokens, so many, and all others as one; 0: the whole vocabulary, which takes 4
            bytes of host memory for each token of it and of the responses.
        offload: Keep its weights in host memory while it is not asked.
    """

    model: Model
    ranks: tuple[int, ...] | None = None
    layout: ParallelLayout | None = None
    top_k: CountOrZero = 0
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The loop.

    Attributes:
        steps: Training steps, each a rollout and the updates on it; 0: the warm start alone, if any, and validation.
        global_batch_size: Samples of one step.
        mini_batch_size: Samples of one optimizer step; None: the global batch.
        micro_batch_tokens: Token budget of one forward.
        save_every: Steps between checkpoints; 0: only at the end.
        keep_last: Newest checkpoints that stay; older ones are removed.
        keep_every: Checkpoints of steps that are a multiple of this stay beside them, for ever; 0: none.
        validate_every: Steps between validations; 0: only before and after.
        num_validation: Held-out problems used; None: the whole file.
        validation_samples: Responses to each of them that are sampled as in the rollout, beside the greedy one, to
            measure pass@1 and pass@k with; one is right if its score is at least 1.
        pass_k: The k of pass@k; None: all of these.
        keep_best: Save when a validation is the best so far, and keep that checkpoint beside the newest.
        patience: End the training after so many validations in a row without a better one; 0: never.
        max_staleness: How many updates the weights that sampled a batch may be behind those that learn from it. Above 0
            the next batches are generated while one is learned from, for which ``actor.rollout_ranks`` are needed.
        max_idle_starts: After so many starts in a row that went on from the same checkpoint and made no other, a run
            is not begun again: what stops it is not a matter of luck.
    """

    steps: CountOrZero
    global_batch_size: Count
    mini_batch_size: Count | None = None
    micro_batch_tokens: Count = 4096
    save_every: CountOrZero = 0
    keep_last: Count = 2
    keep_every: CountOrZero = 0
    validate_every: CountOrZero = 0
    num_validation: Count | None = None
    validation_samples: CountOrZero = 0
    pass_k: Count | None = None
    keep_best: bool = False
    patience: CountOrZero = 0
    max_staleness: CountOrZero = 0
    max_idle_starts: Count = 3


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps are looked at closely, and where.

    Attributes:
        steps: Training steps of which a trace of torch's profiler is written; none: nothing is traced.
        ranks: The ranks that write one.
    """

    steps: tuple[Count, ...] = ()
    ranks: tuple[CountOrZero, ...] = (0,)


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """Where Prometheus finds the numbers of the last step.

    Attributes:
        pushgateway_url: Of a Pushgateway, such as ``http://gateway:9091``.
        job_name: Prometheus' name of the job.
        textfile: A file for the node exporter, in its folder of textfiles; must end in ``.prom``.
    """

    pushgateway_url: str | None = None
    job_name: Name = "hybridflow"
    textfile: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """Weights & Biases. Its key comes from the environment or ``wandb login``, never from a recipe.

    Attributes:
        project: Where the run is filed.
        entity: Whose project it is; None: the user's own.
        offline: Keep the numbers in the run's directory, for ``wandb sync``.
    """

    project: Name
    entity: Name | None = None
    offline: bool = False


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where the numbers of each step go beside the run's directory. What fails there is told, and stops nothing.

    Attributes:
        prometheus: Prometheus; None: not there.
        wandb: Weights & Biases; None: not there.
        callbacks: Functions ``package.module:function``, called on rank 0 with ``(step, metrics)`` in a thread of
            their own.
    """

    prometheus: Prometheus | None = None
    wandb: Wandb | None = None
    callbacks: tuple[Plugin, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What to run with where other numbers of ranks come than ``cluster.ranks``: after a node was lost, for instance.

    Attributes:
        ranks: So many ranks are enough for it; of several fallbacks that one is taken that uses the most.
        overrides: ``key=value`` each, as on the command line: layouts that fill these ranks.
    """

    ranks: Count
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a training run is asked to do.

    Attributes:
        name: What the run is called.
        namespace: Of a project's runs: names of metrics begin with it, but for those in ``metrics.jsonl``, and so does
            the place of ``run_dir``.
        algorithm: Which flow a training step runs.
        seed: Of weights, order of the data, and sampling.
        run_dir: Where the run keeps its files; left out: ``runs/<name>``, or ``runs/<namespace>/<name>``.
        cluster: The ranks of the job.
        model: The language model: of the actor and the reference, and of a critic without one of its own.
        data: Where prompts come from.
        tokenizer: Text to token ids.
        warm_start: Supervised training before reinforcement learning; None: none.
        actor: The policy.
        critic: The value model, of algorithms that have one.
        reference: The frozen policy that drift is measured against.
        reward: What scores a response.
        cost: What tells a response's cost, of safe-rlhf; either of both as in ``reward``.
        cost_critic: The value model of costs.
        teacher: What distillation learns from.
        rollout: How responses are sampled.
        loss: How the policy learns from advantages.
        kl: The distance to the reference that it pays for.
        advantage: How rewards become advantages.
        shaping: What is added to scores.
        dynamic_sampling: What DAPO does about groups that teach nothing.
        lagrange: The price of cost.
        preference: Learning from preferences.
        correction: Weighs tokens whose sampler was not quite the policy that is trained.
        trainer: The loop.
        metrics: Where the numbers of each step go.
        profile: Which steps are looked at closely.
        fallbacks: What else to run with, where ``cluster.ranks`` ranks are not there.
    """

    name: Name
    namespace: Name | None = None
    algorithm: Algorithm
    seed: CountOrZero = 1
    run_dir: str = ""
    cluster: Cluster = Cluster()
    model: Model
    data: Data
    tokenizer: Tokenizer = Tokenizer()
    warm_start: WarmStart | None = None
    actor: Actor
    critic: Critic | None = None
    reference: Reference = Reference()
    reward: Reward = Reward()
    cost: Reward | None = None
    cost_critic: Critic | None = None
    teacher: Teacher | None = None
    rollout: Rollout
    loss: Loss = Loss()
    kl: KL = KL()
    advantage: Advantage = Advantage()
    shaping: Shaping = Shaping()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    lagrange: Lagrange = Lagrange()
    preference: Preference = Preference()
    correction: Correction = Correction()
    trainer: Trainer
    metrics: Metrics = Metrics()
    profile: Profile = Profile()
    fallbacks: tuple[Fallback, ...] = ()

    def __post_init__(self) -> None:
        if self.run_dir == "":
            object.__setattr__(self, "run_dir", f"runs/{self.title}")

    @property
    def title(self) -> str:
        """What the run is called among those of other namespaces."""
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"

    @property
    def correction_kind(self) -> Literal["none", "truncate", "icepop"]:
        """How tokens are weighed, once it is known what samples them."""
        if self.correction.kind != "auto":
            return self.correction.kind
        is_exact = self.rollout.engine.kind == "megatron" and self.rollout.replay is None and self.staleness_bound == 0
        return "none" if is_exact else "truncate"

    @property
    def staleness_bound(self) -> int:
        """Most updates that weights which sampled a token may be behind those that learn from it."""
        return self.trainer.max_staleness + self.rollout.carry_over + self.actor.reshard_every - 1

    @property
    def preset(self) -> Preset:
        """What the algorithm is made of."""
        return PRESETS[self.algorithm]

    @property
    def samples_per_draw(self) -> int:
        """Samples of the global batch that come of one row of the data."""
        return 2 if self.preset.is_paired else self.rollout.group_size

    @property
    def has_reference(self) -> bool:
        """Whether anything is measured against the frozen policy."""
        if self.preset.has_preferences:
            return not (self.preset.is_scorer or self.preference.reference_free)
        return "kl" in self.preset.reads and self.kl.coef > 0

    @property
    def drops_samples(self) -> bool:
        """Whether samples may be left out of learning, since what scores them failed."""
        return any(section is not None and section.on_failure == "drop" for section in (self.reward, self.cost))

    @property
    def is_on_policy(self) -> bool:
        """Whether the one update of a step sees the weights of its start, whose log-probabilities it then has itself.

        Not where these are needed before: for a penalty in the reward, or to know which tokens count.
        """
        trainer = self.trainer
        is_one = self.loss.epochs == 1 and trainer.mini_batch_size in (None, trainer.global_batch_size)
        needs_them = (self.kl.coef > 0 and self.kl.place == "reward") or self.correction.reject is not None
        return is_one and not needs_them

    def model_of(self, name: str) -> Model:
        """The settings of the model of a role or mesh."""
        sections = {
            "critic": self.critic,
            "reward": self.reward,
            "cost": self.cost,
            "cost_critic": self.cost_critic,
            "teacher": self.teacher,
        }
        section = sections.get(name)
        return self.model if section is None or section.model is None else section.model


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: an existing path, or the name of a recipe that comes with the package.

    Raises:
        ConfigError: There is neither such a file nor such a shipped recipe.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in _shipped_recipes()}
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(
        f"recipe {name}: no such file; give a YAML file or a shipped recipe: {', '.join(sorted(shipped))}"
    )


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, put overrides over it, and check the whole.

    Args:
        name: A YAML file, or the name of a shipped recipe.
        overrides: ``"dotted.key=value"`` each, the value in YAML; later ones win.

    Raises:
        ConfigError: A file that cannot be read, a key that is unknown, missing, ill-typed or at odds with another.
        LayoutError: A layout does not fit its ranks or its model.
    """
    path = find_recipe(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    return recipe_from_dict(parse_yaml(text, str(path)), source=str(path), overrides=overrides)


def recipe_for_ranks(recipe: Recipe, name: str | Path, overrides: Sequence[str], num_ranks: int) -> Recipe:
    """The recipe as it is run where ``num_ranks`` ranks have come: itself, or the fallback that uses the most of them.

    Args:
        recipe: From ``load_recipe`` with this name and these overrides.
        name: A YAML file, or the name of a shipped recipe; read once more where a fallback is taken.
        overrides: As for ``load_recipe``; those of the fallback come after them.
        num_ranks: Those that are there; where ``cluster.ranks`` of the result is less, the others have nothing to do.

    Raises:
        ConfigError: As for ``load_recipe``.
        LayoutError: As for ``load_recipe``; or too few ranks have come.
    """
    fitting = [fallback for fallback in recipe.fallbacks if fallback.ranks <= num_ranks]
    best = max(fitting, key=lambda fallback: fallback.ranks, default=None)
    if num_ranks == recipe.cluster.ranks or (
        # More ranks than the recipe's are idle only where it says that their number may vary.
        recipe.fallbacks and recipe.cluster.ranks <= num_ranks and (best is None or best.ranks < recipe.cluster.ranks)
    ):
        return recipe
    if best is None:
        least = min((fallback.ranks for fallback in recipe.fallbacks), default=None)
        remedy = f"or add a fallback for {num_ranks} ranks" if least is None else f"its smallest fallback needs {least}"
        raise LayoutError(
            f"cluster.ranks={recipe.cluster.ranks}, but {num_ranks} ranks were started; start {recipe.cluster.ranks}, "
            f"set cluster.ranks={num_ranks} with layouts that fit, {remedy}"
        )
    return load_recipe(name, [*overrides, *_overrides_of(best)])


def _overrides_of(fallback: Fallback) -> tuple[str, ...]:
    return (*fallback.overrides, f"cluster.ranks={fallback.ranks}")


def recipe_from_dict(
    values: object,
    *,
    source: str = "recipe",
    overrides: Sequence[str] = (),
    given: Mapping[str, Settings] | None = None,
) -> Recipe:
    """Build and check a recipe from nested mappings, as YAML or JSON give them; the inverse of ``to_dict``.

    Args:
        values: The mapping.
        source: What messages call it.
        overrides: As for ``load_recipe``.
        given: Section, such as ``model`` or ``critic.model`` -> what a model says of itself that a program has in
            memory; see ``models.given.given_settings``. As if a directory held it that the section names.

    Raises:
        ConfigError: As for ``load_recipe``.
        LayoutError: As for ``load_recipe``.
    """
    origins: Mapping[str, str] = {}
    if isinstance(values, Mapping):
        values, origins = put_over(values, overrides)
        values = _with_preset(values)
    given = {} if given is None else given
    try:
        found = _settings_of_paths(values, given)
    except HybridflowError as error:
        raise type(error)(f"{source}: {error}") from None
    recipe = read_section(Recipe, _with_settings(values, found), source=source, origins=origins)
    try:
        _check_settings(recipe, found)
        check_recipe(recipe, given)
    except (ConfigError, LayoutError) as error:
        raise type(error)(f"{source}: {error}") from None
    if isinstance(values, Mapping):
        for index, fallback in enumerate(recipe.fallbacks):
            # One that does not fit is found out now, and not when a node has died.
            alone = {key: value for key, value in values.items() if key != "fallbacks"}
            try:
                recipe_from_dict(alone, overrides=_overrides_of(fallback), given=given)
            except (ConfigError, LayoutError) as error:
                raise type(error)(f"{source}: fallbacks[{index}]: {error}") from None
    return recipe


_MODELS = ("model", "critic.model", "reward.model", "cost.model", "cost_critic.model", "teacher.model")
"""The sections of a recipe that are models."""

_FREE = ("path", "max_context", "vocab_divisible_by", "init_std", "dtype")
"""Settings that may be other than where the weights come from; with any other these would be misread."""


def _with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the algorithm's own defaults beneath them."""
    preset = PRESETS.get(str(values.get("algorithm")))
    found = dict(values)
    for key, section in ({} if preset is None else preset.defaults).items():
        given = values.get(key, {})
        if isinstance(given, Mapping):
            found[key] = {**section, **given}
    return found


def _settings_of_paths(values: Any, given: Mapping[str, Settings]) -> dict[str, Settings]:
    """What the directories that a recipe names, or models in memory, say, by dotted key of the section."""
    found = dict(given)
    for key in _MODELS:
        path = _inner(values, f"{key}.path")
        if key in given:
            if path is not None:
                raise ConfigError(f"{key}.path={path!r}: would not be read, a model was given in memory; give one")
            continue
        if key == "teacher.model" and path is None and _inner(values, "teacher") is not None:
            raise ConfigError(
                "teacher.model.path: missing; a model that was not trained teaches nothing, name its directory (of a "
                "run of ours: runs/NAME/checkpoints/STEP/actor)"
            )
        if isinstance(path, str):
            try:
                found[key] = read_settings(Path(path))
            except HybridflowError as error:
                raise type(error)(f"{key}.path={path!r}: {error}") from None
    return found


def _with_settings(values: Any, found: Mapping[str, Settings]) -> Any:
    """The values with what the directories say beneath what is given beside their paths."""
    for key, settings in found.items():
        section = values
        for name in key.split("."):
            # Of a model that was given the section may be left out.
            section[name] = {} if section.get(name) is None else section[name]
            if not isinstance(section[name], dict):
                raise ConfigError(f"{key}: expected a section with keys; found {section[name]!r}")
            section = section[name]
        given = dict(section)
        section.update(to_dict(settings.model))
        section.update(given)
    return values


def _inner(values: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none, or a section on the way is not one."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _check_settings(recipe: Recipe, found: Mapping[str, Settings]) -> None:
    for key, settings in found.items():
        model = recipe.model_of(key.removesuffix(".model"))
        whence = "the model that was given" if settings.assets is None else f"{key}.path={model.path!r}"
        for item in fields(Model):
            given, right = getattr(model, item.name), getattr(settings.model, item.name)
            if item.name not in _FREE and given != right:
                raise ConfigError(
                    f"{key}.{item.name}={given!r}: {whence} has {right!r}, and its weights mean "
                    f"nothing else; leave the key out (only {', '.join(_FREE[1:])} may differ)"
                )
    if "model" in found and found["model"].has_value_head and not recipe.preset.is_scorer:
        raise ConfigError(
            f"model.path={recipe.model.path!r}: is a scorer, which gives no text; choose a causal language model (a "
            "scorer is for critic.model.path or reward.model.path)"
        )
    if "teacher.model" in found and found["teacher.model"].has_value_head:
        raise ConfigError(
            f"teacher.model.path={recipe.model_of('teacher').path!r}: is a scorer, which gives no text; choose a "
            "causal language model"
        )
    for role in ("reward", "cost"):
        if f"{role}.model" in found and not found[f"{role}.model"].has_value_head:
            raise ConfigError(
                f"{role}.model.path={recipe.model_of(role).path!r}: is a language model, which gives no score; choose "
                "a *ForSequenceClassification with one label"
            )


def role_meshes(recipe: Recipe) -> dict[str, DeviceMesh]:
    """The meshes of all models: ``actor.update``, ``actor.rollout``, and those of the roles that the recipe has.

    The rollout takes the actor's ranks in the order in which they hold most of what it needs.

    Raises:
        LayoutError: A layout does not fill its ranks, or a rank is named twice.
        ReshardError: The layers cannot be dealt to the stages of the actor's layouts.
    """
    meshes = _meshes_as_given(recipe)
    update, rollout = meshes["actor.update"], meshes["actor.rollout"]
    if recipe.actor.rollout_ranks is None:
        meshes["actor.rollout"] = max_overlap(
            update, rollout.layout, rollout.ranks, num_layers=recipe.model.num_layers, name=rollout.name
        )
    return meshes


def _meshes_as_given(recipe: Recipe) -> dict[str, DeviceMesh]:
    """The meshes of all roles with their ranks in the recipe's order."""
    actor = recipe.actor
    everyone = tuple(range(recipe.cluster.ranks))
    per_node = recipe.cluster.ranks_per_node
    others = tuple(rank for rank in everyone if rank not in (actor.rollout_ranks or ()))
    actor_ranks = others if actor.ranks is None else actor.ranks
    rollout_ranks = actor_ranks if actor.rollout_ranks is None else actor.rollout_ranks
    placed: dict[str, tuple[ParallelLayout, tuple[int, ...]]] = {
        "actor.update": (actor.update, actor_ranks),
        "actor.rollout": (actor.update if actor.rollout is None else actor.rollout, rollout_ranks),
    }
    for name in ("critic", "cost_critic"):
        critic: Critic | None = getattr(recipe, name)
        if critic is not None:
            placed[name] = (critic.layout, others if critic.ranks is None else critic.ranks)
    frozen: dict[str, Reference | Reward | Teacher | None] = {
        "reference": recipe.reference if recipe.has_reference else None,
        "reward": recipe.reward if "reward" in recipe.preset.reads else None,
        "cost": recipe.cost,
        "teacher": recipe.teacher,
    }
    for name, section in frozen.items():
        if section is None:
            continue
        if isinstance(section, Reward) and section.model is None:
            # A function: each of its ranks scores on its own.
            ranks = rollout_ranks if section.ranks is None else section.ranks
            placed[name] = (ParallelLayout(dp=max(1, len(ranks))), ranks)
            continue
        layout = actor.update if section.layout is None else section.layout
        placed[name] = (layout, actor_ranks if section.ranks is None else section.ranks)
    return {
        name: DeviceMesh(
            name=name, layout=layout, ranks=ranks, ranks_per_node=len(everyone) if per_node is None else per_node
        )
        for name, (layout, ranks) in placed.items()
    }


def reference_is_base(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> bool:
    """Whether the actor without its adapters serves as the reference: they lie alike, and its weights never change."""
    lora = recipe.actor.lora
    is_fixed = lora is not None and lora.merge_every == 0
    return is_fixed and "reference" in meshes and meshes["reference"].key == meshes["actor.update"].key


def check_recipe(recipe: Recipe, given: Mapping[str, Settings] | None = None) -> None:
    """Refuse keys that are right one by one and wrong together.

    Args:
        recipe: The recipe.
        given: As for ``recipe_from_dict``.

    Raises:
        ConfigError: Two keys contradict each other.
        LayoutError: A layout does not fit its ranks or its model.
    """
    given = {} if given is None else given
    _check_algorithm(recipe)
    _check_reward(recipe.reward, "reward", is_given="reward.model" in given)
    if recipe.cost is not None:
        _check_reward(recipe.cost, "cost", is_given="cost.model" in given)
        if recipe.cost.kind is None:
            raise ConfigError("cost.function: missing; name what tells the cost of a response, or give cost.model.path")
    for key in _MODELS:
        model = recipe.model_of(key.removesuffix(".model"))
        check_model(model, key)
        if model.dtype == "fp16":
            raise ConfigError(f"{key}.dtype=fp16: is for generating alone, since gradients underflow; set bf16 or fp32")
    _check_contexts(recipe)
    _check_uncut(recipe, given)
    check_data(recipe.data)
    _check_live(recipe)
    _check_placement(recipe)
    _check_split(recipe)
    _check_carry_over(recipe)
    _check_reshard_every(recipe)
    _check_replay(recipe)
    _check_lora(recipe)
    _check_batches(recipe)
    _check_environment(recipe)
    _check_engine(recipe)
    _check_loss(recipe)
    _check_shaping(recipe)
    _check_correction(recipe.correction)
    _check_schedules(recipe)
    _check_validation(recipe)
    _check_offline(recipe)
    _check_profile(recipe)
    _check_metrics(recipe.metrics)


def _check_algorithm(recipe: Recipe) -> None:
    preset, name = recipe.preset, recipe.algorithm
    for key in preset.needs:
        if getattr(recipe, key) is None:
            raise ConfigError(f"{key}: missing; algorithm={name} needs this section, docs/algorithms.md shows one")
    defaults = {field.name: field.default for field in fields(Recipe)}
    for key in sorted(CHOSEN - preset.reads):
        if getattr(recipe, key) != defaults[key]:
            users = ", ".join(other for other in PRESETS if key in PRESETS[other].reads)
            raise ConfigError(
                f"{key}: algorithm={name} would ignore this section; remove it, or choose one that reads it: {users}"
            )
    if recipe.kl.target is not None and recipe.kl.coef == 0:
        raise ConfigError("kl.target: adaptive KL multiplies kl.coef, which is 0; set it above 0, say to 0.1")
    if name in _GROUPED and recipe.rollout.group_size == 1:
        raise ConfigError(
            f"rollout.group_size=1: algorithm={name} compares the responses to a prompt; set it to 2 or more, 8 say"
        )


_GROUPED = ("dapo",)
"""Algorithms to which a group of one tells nothing."""


def _check_reward(reward: Reward, key: str, *, is_given: bool = False) -> None:
    kind = reward.kind
    others = [name for name in REWARD_KINDS if getattr(reward, name) is not None and name != kind]
    for name in others:
        found = f"={reward.function!r}: would not be called" if name == "function" else ": would not be asked"
        raise ConfigError(f"{key}.{name}{found}, {key}.{kind} scores; remove one of the two")
    if kind != "model":
        for name in ("layout", "offload"):
            if getattr(reward, name) != getattr(Reward(), name):
                raise ConfigError(f"{key}.{name}: a function has no weights; remove the key, or give {key}.model.path")
    elif reward.model is not None and reward.model.path is None and not is_given:
        raise ConfigError(f"{key}.model.path: missing; a model that was not trained scores nothing, name its directory")
    _check_reward_policy(reward, key)
    _check_reward_function(reward, key)
    if reward.service is not None:
        _check_urls(reward.service.urls, f"{key}.service.urls")
    if reward.judge is not None:
        _check_judge(reward.judge, f"{key}.judge")


def _check_reward_policy(reward: Reward, key: str) -> None:
    """What calls that cannot fail, or are bounded elsewhere, would ignore."""
    what = "a model" if reward.model is not None else reward.function
    for name in REWARD_POLICY:
        is_given = getattr(reward, name) != getattr(Reward(), name)
        if is_given and what in ("a model", *SURE_FUNCTIONS):
            raise ConfigError(f"{key}.{name}: {what} neither waits nor fails; remove the key")
    if reward.function == "code" and reward.timeout_s is not None:
        raise ConfigError(f"{key}.timeout_s: {key}.sandbox.wall_s is the limit of a program; remove the key, set that")
    if reward.on_failure != "score" and reward.failure_score != Reward().failure_score:
        raise ConfigError(
            f"{key}.failure_score={reward.failure_score:g}: {key}.on_failure={reward.on_failure} gives none; set it to "
            "score, or remove the key"
        )


REWARD_POLICY = ("timeout_s", "retries", "on_failure", "failure_score", "cache", "max_in_flight")
"""Keys of ``Reward`` for what may wait or fail."""

SURE_FUNCTIONS = ("exact_match", "length", "regex")
"""Functions of ours that neither wait nor fail."""


def _check_reward_function(reward: Reward, key: str) -> None:
    for name, function in (("pattern", "regex"), ("sandbox", "code")):
        if getattr(reward, name) is not None and reward.function != function:
            raise ConfigError(f"{key}.{name}: only {function} reads it; remove it, or set {key}.function={function}")
    for path in () if reward.sandbox is None else reward.sandbox.readable:
        if not path.startswith("/") or not path.strip("/."):
            raise ConfigError(f"{key}.sandbox.readable: found {path!r}, expected a directory's path from / on")
    if reward.function == "regex":
        if reward.pattern is None:
            raise ConfigError(f"{key}.pattern: missing; {key}.function=regex needs one, such as 'answer is (.+)'")
        _check_pattern(reward.pattern, f"{key}.pattern")


def _check_judge(judge: Judge, key: str) -> None:
    _check_urls(judge.urls, f"{key}.urls")
    if "{response}" not in judge.template:
        raise ConfigError(f"{key}.template: has no {{response}}, so that it would judge none; say where it stands")
    if _check_pattern(judge.pattern, f"{key}.pattern") == 0:
        raise ConfigError(f"{key}.pattern={judge.pattern!r}: has no group; put parentheses around the number")
    if judge.low >= judge.high:
        raise ConfigError(f"{key}.low={judge.low:g} is not below {key}.high={judge.high:g}; no score would be right")


def _check_urls(urls: Sequence[str], key: str) -> None:
    if not urls:
        raise ConfigError(f"{key}: missing; give at least one, as http://host:port")
    for url in urls:
        check_url(url, key)


def _check_pattern(pattern: str, key: str) -> int:
    """The number of groups of a regular expression."""
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"{key}={pattern!r}: is no regular expression: {error}; mend it") from None


_PLACES = ("train", "mixture", "spool", "kafka")
_OWN_OPTIONS = re.compile(
    r"bootstrap\.servers|metadata\.broker\.list|group\..*|partition\.assignment\.strategy|auto\.offset\.reset|"
    r"(enable\.)?auto\.(commit|offset\.store).*|enable\.auto\..*|enable\.partition\.eof|offset\.store\..*|.*_cb"
)
_RUN_OPTIONS = ("plugin.library.paths", "sasl.kerberos.kinit.cmd")
_SECRET_OPTIONS = re.compile(r"password|passphrase|secret|key\.pem|ssl_key|oauthbearer\.config|private\.key\.pem")


def check_data(data: Data) -> None:
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


def _check_kafka(kafka: Kafka) -> None:
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


def _check_live(recipe: Recipe) -> None:
    data = recipe.data
    name, source = ("spool", data.spool) if data.spool is not None else ("kafka", data.kafka)
    if source is None:
        return
    if source.deadline_s >= recipe.cluster.deadline_s:
        raise ConfigError(
            f"data.{name}.deadline_s={source.deadline_s:g}: ranks wait for each other for cluster.deadline_s="
            f"{recipe.cluster.deadline_s:g} and would give up first; lower the first or raise the second"
        )
    if recipe.tokenizer.path is None and recipe.model.path is None:
        raise ConfigError(f"tokenizer.path: missing; data.{name} has no text yet to train a tokenizer on")
    if data.file_format not in (None, "jsonl"):
        raise ConfigError(f"data.file_format={data.file_format}: data.{name} takes JSONL; remove the key")


def _check_contexts(recipe: Recipe) -> None:
    for role in ("critic", "reward", "cost", "cost_critic", "teacher"):
        context = recipe.model_of(role).max_context
        if context < recipe.model.max_context:
            raise ConfigError(
                f"{role}.model.max_context={context} is shorter than model.max_context={recipe.model.max_context}; "
                "raise the first, or lower the second"
            )


def _check_uncut(recipe: Recipe, given: Mapping[str, Settings]) -> None:
    """A class of a user's own is on each of its ranks whole."""
    whole = {key.rpartition(".")[0] or "actor" for key, settings in given.items() if not settings.is_cut}
    if "actor" in whole:
        whole.add("reference")
    for name, mesh in _meshes_as_given(recipe).items() if whole else ():
        key = name if name in ("actor.update", "actor.rollout") else f"{name}.layout"
        for axis in ("tp", "pp"):
            if name.partition(".")[0] in whole and getattr(mesh.layout, axis) > 1:
                raise LayoutError(
                    f"{key}.{axis}={getattr(mesh.layout, axis)}: a class of your own is not cut; set {axis}=1, and dp "
                    f"to its {len(mesh.ranks)} ranks"
                )


def _check_placement(recipe: Recipe) -> None:
    given = {f"{role}.ranks": getattr(recipe, role) for role in _PLACED}
    named = {key: () if section is None else section.ranks or () for key, section in given.items()}
    named["actor.rollout_ranks"] = recipe.actor.rollout_ranks or ()
    for key, ranks in named.items():
        strangers = [rank for rank in ranks if not 0 <= rank < recipe.cluster.ranks]
        if strangers:
            raise LayoutError(
                f"{key}={list(ranks)}: {strangers} not among ranks 0 to {recipe.cluster.ranks - 1}; "
                f"set cluster.ranks to at least {max(ranks) + 1}, or name ranks that exist"
            )
    for name, mesh in _meshes_as_given(recipe).items():
        mesh.layout.check_trainable(name)
        check_cut(recipe.model_of(name), mesh.layout, name)


_PLACED = ("actor", "critic", "reference", "reward", "cost", "cost_critic", "teacher")
"""Sections that name ranks."""


def _check_split(recipe: Recipe) -> None:
    """Generating on ranks of its own, and while others learn."""
    actor, staleness = recipe.actor, recipe.trainer.max_staleness
    if actor.rollout_ranks is None:
        if staleness > 0:
            raise ConfigError(
                f"trainer.max_staleness={staleness}: the next batch is generated while one is learned from, on other "
                "ranks; name them in actor.rollout_ranks, or set max_staleness to 0"
            )
        return
    if not recipe.preset.generates:
        raise ConfigError(f"actor.rollout_ranks: algorithm={recipe.algorithm} generates nothing; remove the key")
    if recipe.rollout.engine.kind == "vllm":
        raise ConfigError(
            "actor.rollout_ranks: with rollout.engine.kind=vllm all ranks of the job generate, since vLLM starts on "
            "all of them together; remove the key, or set kind to megatron"
        )
    if actor.offload:
        raise ConfigError(
            "actor.offload=true: makes no room for a rollout on other ranks; set it to false, or remove "
            "actor.rollout_ranks"
        )
    meshes = _meshes_as_given(recipe)
    common = sorted({*meshes["actor.update"].ranks} & {*actor.rollout_ranks})
    if common:
        raise LayoutError(
            f"actor.rollout_ranks={list(actor.rollout_ranks)}: {common} are among actor.ranks too; give the rollout "
            "ranks of its own, or remove the key to generate where the actor learns"
        )
    if staleness > 0:
        _check_async(recipe, meshes)


def _check_carry_over(recipe: Recipe) -> None:
    rollout = recipe.rollout
    if not rollout.carry_over:
        return
    _check_ahead(recipe, "rollout.carry_over=true", off="false")
    if rollout.engine.kind != "megatron" or rollout.environment is not None:
        other = "rollout.environment" if rollout.engine.kind == "megatron" else "rollout.engine.kind"
        raise ConfigError(
            f"rollout.carry_over=true: only responses of the engine of kind megatron, without an environment, go on "
            f"after an update; set it to false, or change {other}"
        )


def _check_reshard_every(recipe: Recipe) -> None:
    every = recipe.actor.reshard_every
    if every == 1:
        return
    others = {
        "trainer.max_staleness": recipe.trainer.max_staleness > 0,
        "actor.lora": recipe.actor.lora is not None,
        "rollout.engine.kind": recipe.rollout.engine.kind != "megatron",
        "rollout.carry_over": recipe.rollout.carry_over,
    }
    for key, is_there in others.items():
        if is_there:
            raise ConfigError(
                f"actor.reshard_every={every}: the weights that generate stay behind on purpose, which does not go "
                f"together with {key}; set it to 1, or remove {key}"
            )
    if not recipe.preset.generates:
        raise ConfigError(f"actor.reshard_every: algorithm={recipe.algorithm} generates nothing; remove the key")


def _check_replay(recipe: Recipe) -> None:
    rollout = recipe.rollout
    if rollout.replay is None:
        return
    others = {
        "rollout.environment": (rollout.environment, None),
        "rollout.engine.kind": (rollout.engine.kind, "megatron"),
        "rollout.carry_over": (rollout.carry_over, False),
        "trainer.max_staleness": (recipe.trainer.max_staleness, 0),
        "actor.reshard_every": (recipe.actor.reshard_every, 1),
    }
    for key, (found, expected) in others.items():
        if found != expected:
            raise ConfigError(
                f"rollout.replay={rollout.replay}: nothing is sampled to learn from, and {key} says how; remove one of "
                "the two"
            )
    if Path(rollout.replay).absolute() == Path(recipe.run_dir).absolute():
        raise ConfigError(
            f"rollout.replay={rollout.replay}: is this run's own run_dir, whose archive a new start removes; set "
            "run_dir to another directory"
        )


def _check_async(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> None:
    staleness = f"trainer.max_staleness={recipe.trainer.max_staleness}"
    _check_ahead(recipe, staleness, off="0")
    if recipe.rollout.engine.is_server:
        raise ConfigError(
            f"{staleness}: the weights of rollout.engine.kind={recipe.rollout.engine.kind} do not follow, so nobody "
            "knows how old they are; set it to 0, or kind to megatron"
        )
    sampling = {name: mesh.ranks for name, mesh in meshes.items() if name in SAMPLING_MESHES}
    for name, mesh in meshes.items():
        for other, ranks in sampling.items():
            common = sorted({*mesh.ranks} & {*ranks})
            if name not in sampling and common:
                section = "actor.rollout_ranks" if other == "actor.rollout" else f"{other}.ranks"
                raise LayoutError(
                    f"{staleness}: ranks {common} are in {name}, which learns, and in {other}, which works on the next "
                    f"batch at the same time; take them out of one, with {name.split('.')[0]}.ranks or {section}"
                )


def _check_ahead(recipe: Recipe, asked: str, *, off: str) -> None:
    """Refuse a setting that begins samples before their step, where nobody knows yet which these are."""
    if recipe.algorithm in _NOT_AHEAD:
        raise ConfigError(
            f"{asked}: algorithm={recipe.algorithm} {_NOT_AHEAD[recipe.algorithm]}; set it to {off}, or choose another "
            "algorithm"
        )


_NOT_AHEAD = {
    "dapo": "samples until its batch is full, which is not known beforehand",
    "remax": "samples each prompt once more, for its baseline",
    "sft": "samples nothing to learn from",
}
"""Algorithms whose samples cannot be made ahead of the step that learns from them, and why."""

SAMPLING_MESHES = ("actor.rollout", "reward", "cost")
"""Those that work on the next batches, where ``trainer.max_staleness`` is above 0; all others learn."""


def _check_lora(recipe: Recipe) -> None:
    lora, key = recipe.actor.lora, "actor.lora.targets"
    if lora is None:
        return
    if recipe.preset.is_scorer:
        raise ConfigError(
            f"actor.lora: algorithm={recipe.algorithm} trains a scorer, whose head would be frozen; remove the section"
        )
    found, groups = list(lora.targets), recipe.model.query_groups
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{key}={found}: expected at least one layer, and each once")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for whole, pieces in parts.items():
        if whole in found and set(pieces) & set(found):
            raise ConfigError(f"{key}={found}: {whole} is {', '.join(pieces)} in one; name the one or the others")
    if recipe.model.num_experts is not None and {"gate_proj", "up_proj", "gate_up_proj", "down_proj"} & set(found):
        raise ConfigError(
            f"{key}={found}: the experts of a mixture have no adapters here; set it to [q_proj, k_proj, v_proj, o_proj]"
        )
    for name, layout in (("update", recipe.actor.update), ("rollout", recipe.actor.rollout)):
        if layout is not None and layout.tp > groups and {"q_proj", "k_proj", "v_proj"} & set(found):
            raise LayoutError(
                f"actor.{name}: tp={layout.tp} is above model.num_query_groups={groups}, and q_proj, k_proj, v_proj "
                f"have no adapters where ranks share a group; lower tp, or take them out of {key}"
            )
    if recipe.has_reference and recipe.reference.offload and reference_is_base(recipe, _meshes_as_given(recipe)):
        raise ConfigError(
            "reference.offload=true: the actor without its adapters is the reference, and stays where it is; remove it"
        )
    if lora.path is not None and recipe.warm_start is not None:
        raise ConfigError(
            f"actor.lora.path={lora.path!r}: a warm start ends with its adapters put into the weights, and these with "
            "them; remove warm_start, or the path"
        )


def check_cut(model: Model, layout: ParallelLayout, name: str) -> None:
    """Refuse a layout that does not cut a model into equal parts.

    Args:
        model: The settings.
        layout: How the model is to be cut.
        name: Whose layout this is, for the message.

    Raises:
        LayoutError: A part would be empty or not like the others.
    """
    tp, pp, ep, groups = layout.tp, layout.pp, layout.ep, model.query_groups
    for key in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(model, key) % tp:
            raise LayoutError(f"{name}: tp={tp} does not divide model.{key}={getattr(model, key)}; choose a divisor")
    if groups % tp and tp % groups:
        raise LayoutError(
            f"{name}: tp={tp} neither divides nor is a multiple of model.num_query_groups={groups}; change one"
        )
    if model.num_layers % pp:
        raise LayoutError(f"{name}: pp={pp} does not divide model.num_layers={model.num_layers}; choose a divisor")
    if ep > 1 and (model.num_experts is None or model.num_experts % ep):
        found = "null" if model.num_experts is None else model.num_experts
        raise LayoutError(f"{name}: ep={ep} does not divide model.num_experts={found}; choose a divisor, or set ep=1")


def _check_batches(recipe: Recipe) -> None:
    batch, mini, group = recipe.trainer.global_batch_size, recipe.trainer.mini_batch_size, recipe.rollout.group_size
    if batch % group:
        raise ConfigError(
            f"trainer.global_batch_size={batch} is not a multiple of rollout.group_size={group}; "
            f"set it to {math.ceil(batch / group) * group}"
        )
    if mini is not None and batch % mini:
        raise ConfigError(
            f"trainer.mini_batch_size={mini} does not divide trainer.global_batch_size={batch}; choose a divisor"
        )
    if recipe.rollout.min_new_tokens > recipe.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens={recipe.rollout.min_new_tokens} is above "
            f"rollout.max_new_tokens={recipe.rollout.max_new_tokens}; lower the first or raise the second"
        )
    if recipe.rollout.max_new_tokens >= recipe.model.max_context:
        raise ConfigError(
            f"rollout.max_new_tokens={recipe.rollout.max_new_tokens} leaves no token for the prompt within "
            f"model.max_context={recipe.model.max_context}; lower the first or raise the second"
        )


def _check_environment(recipe: Recipe) -> None:
    made = recipe.data.arithmetic
    if made is not None and made.operation != "add" and made.mistake_share > 0:
        raise ConfigError(
            f"data.arithmetic.mistake_share={made.mistake_share}: only additions have a wrong carry; set it to 0, or "
            "data.arithmetic.operation to add"
        )
    if recipe.rollout.environment is not None and recipe.rollout.engine.kind != "megatron":
        raise ConfigError(
            f"rollout.engine.kind={recipe.rollout.engine.kind}: rollout.environment needs our own engine; "
            "set it to megatron, or remove the environment"
        )
    if recipe.rollout.environment is not None and recipe.rollout.archive:
        raise ConfigError(
            "rollout.archive=true: the archive has no place for what an environment said; set it to false, or remove "
            "rollout.environment"
        )


def _check_engine(recipe: Recipe) -> None:
    engine, layout = recipe.rollout.engine, recipe.actor.rollout or recipe.actor.update
    if engine.kind != "megatron" and (layout.tp, layout.pp, layout.ep, layout.cp) != (1, 1, 1, 1):
        raise ConfigError(
            f"actor.rollout: rollout.engine.kind={engine.kind} takes no part of a model, found {layout}; set tp, pp, "
            "ep and cp to 1, and dp to the number of the actor's ranks"
        )
    if engine.kind == "vllm" and recipe.actor.ranks not in (None, tuple(range(recipe.cluster.ranks))):
        raise ConfigError(
            f"actor.ranks={list(recipe.actor.ranks or ())}: with rollout.engine.kind=vllm all ranks of the job must be "
            "the actor's, in their order, since vLLM starts on all of them together; leave the key out"
        )
    if engine.kind == "vllm" and recipe.rollout.stop:
        raise ConfigError(
            f"rollout.stop={list(recipe.rollout.stop)}: rollout.engine.kind=vllm works on tokens and ends at none; "
            "remove the key, or set kind to megatron"
        )
    if engine.kind != "megatron" and recipe.trainer.steps > 0:
        _check_known_log_probs(recipe.rollout)
    if not engine.is_server:
        for key in ("urls", "model", "auth_env", "log_probs", "off_policy"):
            if getattr(engine, key) != getattr(SamplingEngine(), key):
                raise ConfigError(
                    f"rollout.engine.{key}: kind={engine.kind} asks no server; remove it, or set kind to openai or tgi"
                )
        return
    if not engine.urls:
        raise ConfigError(f"rollout.engine.urls: missing; kind={engine.kind} needs at least one, as http://host:port")
    _check_urls(engine.urls, "rollout.engine.urls")
    if not engine.off_policy and (recipe.trainer.steps > 0 or recipe.warm_start is not None):
        raise ConfigError(
            f"rollout.engine.kind={engine.kind}: the server's weights do not follow those that are trained; set "
            "trainer.steps=0 without warm_start to validate alone, choose kind=vllm, or set "
            "rollout.engine.off_policy=true to train on its samples all the same"
        )


_CUTS = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What makes the distribution sampled from another than the tempered one, and the values that do not."""


def _check_known_log_probs(rollout: Rollout) -> None:
    """What an engine tells must be what the trainer computes: log-probabilities at the temperature, before cuts."""
    kind, cuts = rollout.engine.kind, [name for name in _CUTS if getattr(rollout, name) != _CUTS[name]]
    is_cut, named = len(cuts) > 0, ", ".join(f"rollout.{name}" for name in cuts)
    is_processed = kind == "tgi" or rollout.engine.log_probs == "processed" or (kind == "vllm" and not is_cut)
    if is_processed and is_cut:
        raise ConfigError(
            f"{named}: rollout.engine.log_probs=processed (TGI always) tells no log-probabilities but those after it, "
            "which the trainer does not compute; remove it"
        )
    if not is_processed and rollout.temperature != 1:
        if kind == "vllm":
            raise ConfigError(
                f"rollout.temperature={rollout.temperature:g} with {named}: vLLM tells log-probabilities before both "
                "or after both, and the trainer computes those between; set the temperature to 1, or drop the other"
            )
        raise ConfigError(
            f"rollout.temperature={rollout.temperature:g}: rollout.engine.log_probs=raw tells those at temperature 1; "
            "set it to 1, or start vLLM with --logprobs-mode processed_logprobs and set log_probs=processed"
        )


def check_url(url: str, key: str) -> None:
    """Refuse what is no plain address of a server.

    Raises:
        ConfigError: It has no host, another scheme, or a user, query or fragment; a secret is not repeated.
    """
    if "@" in url:
        raise ConfigError(
            f"{key}: an address has a user or password, which would be kept in the run's recipe; put the token into an "
            "environment variable, and name that in auth_env"
        )
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError(f"{key}: {url!r} is no address; expected http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or parts.query or parts.fragment:
        raise ConfigError(f"{key}: found {url!r}, expected http://host:port or https://host, with a path at most")


def _check_loss(recipe: Recipe) -> None:
    loss = recipe.loss
    if loss.kind != "clip" and loss.dual_clip is not None:
        raise ConfigError(f"loss.dual_clip={loss.dual_clip:g}: loss.kind={loss.kind} has none; leave the key out")
    if loss.kind == "gspo" and loss.aggregation != "seq-mean-token-mean":
        raise ConfigError(
            f"loss.aggregation={loss.aggregation}: loss.kind=gspo weighs each sequence the same; set it to "
            "seq-mean-token-mean"
        )
    if loss.norm_tokens is not None and loss.aggregation != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"loss.norm_tokens={loss.norm_tokens}: loss.aggregation={loss.aggregation} does not divide by it; leave it "
            "out, or set the aggregation to seq-mean-token-sum-norm"
        )
    if recipe.algorithm == "reinforce++" and recipe.advantage.gae_lambda != Advantage().gae_lambda:
        raise ConfigError(
            f"advantage.gae_lambda={recipe.advantage.gae_lambda:g}: algorithm=reinforce++ has no critic to be weighed "
            "against; leave it out, advantage.gamma alone counts"
        )


def _check_shaping(recipe: Recipe) -> None:
    shaping, longest = recipe.shaping, recipe.rollout.max_new_tokens
    if shaping.overlong_buffer > longest:
        raise ConfigError(
            f"shaping.overlong_buffer={shaping.overlong_buffer} is above rollout.max_new_tokens={longest}: it is part "
            "of it; lower the first or raise the second"
        )
    if not shaping.overlong_buffer and shaping.overlong_factor != Shaping().overlong_factor:
        raise ConfigError(
            f"shaping.overlong_factor={shaping.overlong_factor:g}: nothing is paid for without a buffer; set "
            "shaping.overlong_buffer, or leave it out"
        )


def _check_correction(correction: Correction) -> None:
    if correction.reject is None:
        for key in ("reject_level", "reject_low", "reject_high"):
            if getattr(correction, key) != getattr(Correction(), key):
                raise ConfigError(f"correction.{key}: nothing is rejected; set correction.reject, or leave it out")
    elif correction.reject != "k1" and correction.reject_low != Correction().reject_low:
        raise ConfigError(
            f"correction.reject_low={correction.reject_low:g}: {correction.reject} is never negative and has an upper "
            "bound alone; leave it out, or set correction.reject=k1"
        )
    if correction.reject == "k1" and correction.reject_level == "max":
        raise ConfigError(
            "correction.reject_level=max: a k1 near 0 may hide one far below it; set correction.reject to k2 or k3, or "
            "the level to token, sum or mean"
        )
    if correction.reject == "k1" and correction.reject_low >= correction.reject_high:
        raise ConfigError(
            f"correction.reject_low={correction.reject_low:g} is not below "
            f"correction.reject_high={correction.reject_high:g}; nothing would count"
        )
    if correction.kind == "icepop" and correction.low >= correction.high:
        raise ConfigError(
            f"correction.low={correction.low:g} is not below correction.high={correction.high:g}; nothing would count"
        )


def _check_schedules(recipe: Recipe) -> None:
    steps = recipe.trainer.steps
    for key in ("actor", "critic", "cost_critic"):
        section: Actor | Critic | None = getattr(recipe, key)
        if section is None:
            continue
        settings = section.optimizer
        if settings.min_lr > settings.lr:
            raise ConfigError(
                f"{key}.optimizer.min_lr={settings.min_lr:g} is above {key}.optimizer.lr={settings.lr:g}, from which "
                "the rate falls to it; lower it"
            )
        if settings.schedule == "constant" and settings.min_lr > 0:
            raise ConfigError(
                f"{key}.optimizer.min_lr={settings.min_lr:g}: {key}.optimizer.schedule=constant never comes down to "
                "it; set the schedule to linear or cosine, or remove the key"
            )
        if isinstance(section, Critic) and section.warmup_steps > steps > 0:
            raise ConfigError(
                f"{key}.warmup_steps={section.warmup_steps} is more than trainer.steps={steps}: the actor would "
                "never learn; lower the first or raise the second"
            )


def _check_validation(recipe: Recipe) -> None:
    trainer = recipe.trainer
    if trainer.validation_samples > 0 and not recipe.preset.generates:
        raise ConfigError(
            f"trainer.validation_samples={trainer.validation_samples}: algorithm={recipe.algorithm} generates no "
            "responses; remove it"
        )
    if trainer.pass_k is not None and trainer.pass_k > trainer.validation_samples:
        raise ConfigError(
            f"trainer.pass_k={trainer.pass_k} is more than trainer.validation_samples={trainer.validation_samples}, "
            "the samples that it is estimated from; lower the first or raise the second"
        )
    for name in ("keep_best", "patience"):
        if getattr(trainer, name) and trainer.validate_every == 0:
            raise ConfigError(
                f"trainer.{name}={str(getattr(trainer, name)).lower()}: trainer.validate_every=0 compares no steps; "
                "set it to 10, say"
            )


def _check_offline(recipe: Recipe) -> None:
    """What learns from given responses has keys of its own, and no use for those of sampling."""
    preset, name = recipe.preset, recipe.algorithm
    preference, rollout, made = recipe.preference, recipe.rollout, recipe.data.arithmetic
    if name == "sft" and rollout.group_size > 1:
        raise ConfigError(f"rollout.group_size={rollout.group_size}: a row has one solution to imitate; remove the key")
    for key in (each.name for each in fields(Preference)):
        if key not in preset.preference_keys and getattr(preference, key) != getattr(Preference(), key):
            users = ", ".join(other for other in PRESETS if key in PRESETS[other].preference_keys)
            raise ConfigError(f"preference.{key}: algorithm={name} would ignore it; remove it, or choose {users}")
    for key in _PREFERENCE_FIELDS:
        default = next(each.default for each in fields(Data) if each.name == key)
        if not preset.has_preferences and getattr(recipe.data, key) != default:
            raise ConfigError(f"data.{key}: algorithm={name} reads no preferences; remove the key")
    if not preset.has_preferences:
        return
    if made is not None and made.operation != "add":
        raise ConfigError(
            f"data.arithmetic.operation={made.operation}: the rejected response is a wrong carry, which only additions "
            "have; set it to add"
        )
    _check_mini_batches_of_preferences(recipe)
    _check_silent(recipe)
    if preset.is_scorer and recipe.warm_start is not None:
        raise ConfigError(f"warm_start: algorithm={name} trains a scorer, which writes no text; remove the section")


_PREFERENCE_FIELDS = ("chosen_field", "rejected_field", "margin_field", "completion_field", "wanted_field")


def _check_mini_batches_of_preferences(recipe: Recipe) -> None:
    batch = recipe.trainer.global_batch_size
    mini = batch if recipe.trainer.mini_batch_size is None else recipe.trainer.mini_batch_size
    for key, size in {"global_batch_size": batch, "mini_batch_size": mini}.items():
        if recipe.preset.is_paired and size % 2:
            raise ConfigError(
                f"trainer.{key}={size}: counts responses, of which a pair has two that belong together; set it to an "
                f"even number, {size + 1} say"
            )
    if not recipe.preset.is_paired and mini < 2:
        raise ConfigError(
            "trainer.mini_batch_size=1: algorithm=kto measures the KL with each prompt and another's completion; set "
            "it to 2 or more"
        )


def _check_silent(recipe: Recipe) -> None:
    """Nothing is sampled, so what says how would do nothing."""
    name, trainer = recipe.algorithm, recipe.trainer
    given: dict[str, tuple[Any, Any]] = {
        f"rollout.{each.name}": (getattr(recipe.rollout, each.name), each.default)
        for each in fields(Rollout)
        if each.name != "max_new_tokens"
    }
    given["rollout.max_new_tokens"] = recipe.rollout.max_new_tokens, 1
    given["actor.rollout"] = recipe.actor.rollout, None
    given["actor.rollout_ranks"] = recipe.actor.rollout_ranks, None
    given["actor.offload"] = recipe.actor.offload, False
    given["trainer.max_staleness"] = trainer.max_staleness, 0
    for key, (found, default) in given.items():
        if found != default:
            raise ConfigError(f"{key}={found}: algorithm={name} samples nothing; remove the key")


def _check_profile(recipe: Recipe) -> None:
    strangers = [rank for rank in recipe.profile.ranks if rank >= recipe.cluster.ranks]
    if strangers:
        raise ConfigError(
            f"profile.ranks={list(recipe.profile.ranks)}: {strangers} not among ranks 0 to {recipe.cluster.ranks - 1}; "
            "name ranks that exist (a fallback may set profile.ranks too)"
        )


def _check_metrics(metrics: Metrics) -> None:
    if metrics.prometheus is not None:
        check_prometheus(metrics.prometheus.pushgateway_url, metrics.prometheus.textfile, "metrics.prometheus")


def check_prometheus(pushgateway_url: str | None, textfile: str | None, where: str) -> None:
    """Refuse what Prometheus would not find, and a password in an address, which logs would show.

    Args:
        pushgateway_url: As in the recipe.
        textfile: As in the recipe.
        where: Whose settings they are, for the message.

    Raises:
        ConfigError: There is neither, or one of them is none.
    """
    if pushgateway_url is None and textfile is None:
        raise ConfigError(f"{where}: give pushgateway_url, textfile, or both")
    if textfile is not None and not textfile.endswith(".prom"):
        raise ConfigError(f"{where}.textfile={textfile!r}: the node exporter reads files that end in .prom alone")
    parts = urlsplit("" if pushgateway_url is None else pushgateway_url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"{where}.pushgateway_url: has a user or a password in it, which logs would show; give the address alone"
        )
    if pushgateway_url is not None and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise ConfigError(
            f"{where}.pushgateway_url={pushgateway_url!r}: expected an address such as http://gateway:9091"
        )


def _shipped_recipes() -> Iterator[Path]:
    folder = Path(str(resources.files("hybridflow.launch"))) / "recipes"
    return folder.glob("*.yaml")
