"""Classes and functions that programs know from elsewhere: each does here what it says, or tells what does it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridflow.api.device_mesh import DeviceMesh
from hybridflow.api.flow import FlowNode, RoleFlow, node
from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.api.roles import Actor
from hybridflow.api.rollout_worker import Generated, RolloutWorker
from hybridflow.api.settings import check_count, read_config
from hybridflow.api.switches import LORA_RANK
from hybridflow.api.trainers import OnlineTrainer
from hybridflow.config.roles import LoRAConfig
from hybridflow.data.provider import DataProvider
from hybridflow.dataflow.batch import Batch
from hybridflow.errors import ConfigError


def LoraConfig(
    rank: int | None = None,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] | str | None = None,
    *,
    r: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float | None = None,
    target_modules: Sequence[str] | str | None = None,
    task_type: str = "CAUSAL_LM",
    bias: str = "none",
    **more: Any,
) -> LoRAConfig:
    """Return adapter settings, by our names or PEFT's: ``LoraConfig(rank=8)``, ``LoraConfig(r=8, lora_alpha=16)``.

    Args:
        rank: Rows of A and columns of B.
        alpha: The update is ``alpha / rank * B A``; None: twice the rank (PEFT's own default is 8).
        dropout: Share of each adapter's inputs that is dropped while gradients are computed.
        targets: Layers that have one, by their names in Hugging Face; None or ``all-linear``: all linear ones of a
            layer.
        r: As ``rank``.
        lora_alpha: As ``alpha``.
        lora_dropout: As ``dropout``.
        target_modules: As ``targets``.
        task_type: ``CAUSAL_LM``.
        bias: ``none``: biases are not trained.
        more: As a recipe's ``actor.lora``: ``merge_every``, ``path``.

    Raises:
        ConfigError: There is no rank, or something is asked for that is not computed here.

    Paper: arXiv 2106.09685.
    """
    found = {"rank": (rank, r), "alpha": (alpha, lora_alpha), "targets": (targets, target_modules)}
    for name, (ours, theirs) in found.items():
        if ours is not None and theirs is not None:
            raise ConfigError(
                f"LoraConfig: {name} is given twice, as {ours!r} and as {theirs!r}; remove one of the two"
            )
    rank = rank if r is None else r
    alpha = alpha if lora_alpha is None else lora_alpha
    targets = targets if target_modules is None else target_modules
    if rank is None:
        raise ConfigError("LoraConfig: rank (r) is missing; give 8, say")
    for name, value, computed in (("task_type", task_type, "CAUSAL_LM"), ("bias", bias, "none")):
        if getattr(value, "value", value) != computed:
            raise ConfigError(f"LoraConfig: {name}={value!r} is not computed here; {computed!r} is, leave it out")
    strange = sorted(more.keys() - {"merge_every", "path"})
    if strange:
        raise ConfigError(f"LoraConfig: {strange[0]} is not known here; leave it out (docs/lora.md tells what is)")
    if targets is not None and targets != "all-linear":
        more["targets"] = (targets,) if isinstance(targets, str) else tuple(targets)
    return LoRAConfig(rank=rank, alpha=alpha, dropout=dropout if lora_dropout is None else lora_dropout, **more)


class vLLMActor(Actor):
    """A policy whose responses vLLM samples, in this process, with the weights that are trained.

    Args:
        llm: The model, as ``Actor`` takes it. vLLM is made by us, since weights have to find their way into it.
        tokenizer: As of ``Actor``.
        lora: As of ``Actor``.
        tensor_parallel_size: Ranks that share each matrix of the weights that learn. vLLM has the whole model on each
            rank.
        quantization: None: vLLM samples with the weights that are trained.
        enable_lora: Train adapters alone, of rank 8 unless ``lora`` says otherwise.
        settings: As of ``Actor``.

    Raises:
        ConfigError: ``llm`` is a ``vllm.LLM``, which has read weights of its own; quantization is asked for; or as of
            ``Actor``.
    """

    def __init__(
        self,
        llm: Any,
        tokenizer: Any = None,
        *,
        lora: LoRAConfig | None = None,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        enable_lora: bool = False,
        **settings: Any,
    ) -> None:
        path = getattr(getattr(llm, "model_config", None), "model", None)
        if path is not None or type(llm).__module__.partition(".")[0] == "vllm":
            raise ConfigError(
                f"vLLMActor: found {type(llm).__name__}, whose weights nothing could bring up to date while the policy "
                f"is trained; give the model's directory: vLLMActor({path or 'models/policy'!r})"
            )
        if quantization is not None:
            raise ConfigError(
                f"vLLMActor: quantization={quantization!r}: vLLM samples with the weights that are trained, in their "
                "own number format; leave it out, or serve a quantized model by vLLM and set rollout.engine.kind=openai"
            )
        if enable_lora and lora is None:
            lora = LoraConfig(rank=LORA_RANK)
        if tensor_parallel_size != 1:
            settings["tensor_parallel_size"] = tensor_parallel_size
        super().__init__(llm, tokenizer, lora=lora, **settings)
        self.settings["rollout"] = {"engine": {"kind": "vllm"}}
        if tensor_parallel_size != 1:
            self.settings["hybrid_engine"] = {"rollout_tensor_parallel_size": 1}


class RolloutManager(RolloutWorker):
    """Generates with an actor: ``RolloutManager(actor).rollout(["1+1="], max_new_tokens=8)``.

    Args:
        actor: As the model of ``RolloutWorker``: a ``HybridActor``, an ``Actor``, a directory or a model.
        options: As there.
    """

    def __init__(self, actor: Any, **options: Any) -> None:
        if isinstance(actor, vLLMActor):
            options.setdefault("engine", "vllm")
        super().__init__(actor, **options)

    def rollout(self, prompts: Any, max_new_tokens: int = 128, **sampling: Any) -> list[Generated]:
        """Return responses to prompts, as ``generate`` does. Collective: all ranks, with the same arguments.

        Args:
            prompts: As of ``generate``.
            max_new_tokens: As there.
            sampling: As there.
        """
        return self.generate(prompts, max_new_tokens, **sampling)


class DataParallelTrainer(OnlineTrainer):
    """``OnlineTrainer`` by another name: each rank of the mesh trains a replica, with GRPO unless it is told otherwise.

    Args:
        model: The policy, as ``actor_model`` there.
        device_mesh: As there.
        strategy: ``megatron``: Megatron's distributed optimizer cuts the optimizer's state over the replicas. ``fsdp``:
            PyTorch FSDP cuts weights, gradients and optimizer state.
        config: As there.
        options: As there: ``reward``, ``tokenizer``, ``data_provider``, ``algorithm``, ….

    Raises:
        ConfigError: The strategy is unknown; or as there.
    """

    def __init__(
        self,
        model: Any,
        device_mesh: DeviceMesh | None = None,
        strategy: Literal["fsdp", "megatron"] = "megatron",
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        **options: Any,
    ) -> None:
        if strategy not in ("fsdp", "megatron"):
            raise ConfigError(f"DataParallelTrainer: strategy={strategy!r}; expected 'fsdp' or 'megatron'")
        settings = read_config(config)
        if strategy == "fsdp":
            settings.setdefault("fsdp_sharding", "FULL_SHARD")
        super().__init__(settings, actor_model=model, device_mesh=device_mesh, **options)


@dataclass(frozen=True, kw_only=True)
class SwitchOverhead:
    """What it costs to switch a ``HybridActor``, as attributes and as keys: ``found["latency_ms"]``.

    Attributes:
        latency_ms: Milliseconds of the switch, on the slowest rank.
        mem_increase_mb: Memory beside the weights that learn while it generates, in 10^6 bytes, on the rank that needs
            most; 0 for the switch to training, which frees it.
    """

    latency_ms: float
    mem_increase_mb: float

    def __getitem__(self, name: str) -> float:
        return float(getattr(self, name))


_MODES = {
    **dict.fromkeys(("generate", "rollout", "eval", "inference"), "generate"),
    **dict.fromkeys(("train", "training", "update"), "train"),
}
"""Names of what an actor is switched to."""


def measure_switch_overhead(actor: HybridActor, mode: str = "generate") -> SwitchOverhead:
    """Measure a switch of an actor, which is afterwards in the phase in which it was. Collective: all ranks.

    Args:
        actor: The actor.
        mode: To where: ``generate`` (``rollout``, ``eval``, ``inference``), or ``train`` (``training``, ``update``).

    Raises:
        ConfigError: The mode is unknown, or the actor is no ``HybridActor``.
    """
    if not isinstance(actor, HybridActor):
        raise ConfigError(
            f"measure_switch_overhead: found {type(actor).__name__}; give a HybridActor (of a trainer the metrics "
            "time/reshard_s and reshard/extra_bytes tell it)"
        )
    if mode not in _MODES:
        raise ConfigError(f"measure_switch_overhead: mode={mode!r}; expected one of {', '.join(_MODES)}")
    cost = actor.switch_cost()
    if _MODES[mode] == "train":
        return SwitchOverhead(latency_ms=cost.back_ms, mem_increase_mb=0.0)
    return SwitchOverhead(latency_ms=cost.ms, mem_increase_mb=cost.extra_mb)


class ReplayBuffer(FlowNode):
    """Keeps the newest samples of a flow for the program: ``… >> RewardModel(path) >> ReplayBuffer(1000) >> PPO()``.

    The update learns from the samples of its own step, all of which go on.

    Args:
        capacity: Most samples that each rank keeps, of its own share.

    Attributes:
        samples: The samples, oldest first: ``prompt`` and ``response`` (token ids, ``[tokens]`` int64),
            ``log_probs`` (the sampler's, ``[response]``) and ``score`` each.

    Raises:
        ConfigError: ``capacity`` is no count.
    """

    def __init__(self, capacity: int = 1024) -> None:
        check_count(capacity, "ReplayBuffer: capacity", more=", in samples")
        self.samples: deque[dict[str, Any]] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, count: int, seed: int | None = None) -> list[dict[str, Any]]:
        """Return some of the samples, each at most once, all if there are fewer.

        Args:
            count: How many.
            seed: Seed of the choice; None: another one each time.
        """
        return random.Random(seed).sample(list(self.samples), min(count, len(self.samples)))

    def as_flow(self) -> RoleFlow:
        """Return the node of a flow that keeps what comes."""

        def replay_buffer(batch: Batch) -> dict[str, Any]:
            self._keep(batch)
            return {}

        return node(replay_buffer, reads=("tokens", "prompt_lengths", "rollout_log_probs", "scores"), writes=())

    def _keep(self, batch: Batch) -> None:
        columns = (
            batch.ragged("tokens").to_list(),
            batch.dense("prompt_lengths").tolist(),
            batch.ragged("rollout_log_probs").to_list(),
            batch.dense("scores").tolist(),
        )
        for tokens, length, log_probs, score in zip(*columns, strict=True):
            self.samples.append(
                {"prompt": tokens[:length], "response": tokens[length:], "log_probs": log_probs, "score": score}
            )


DataLoader = DataProvider
