"""Classes and functions that programs know from elsewhere: each does here what it says, or tells what does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.api.roles import Actor
from hybridflow.config.roles import LoRAConfig
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
        settings: As of ``Actor``.

    Raises:
        ConfigError: ``llm`` is a ``vllm.LLM``, which has read weights of its own; or as of ``Actor``.
    """

    def __init__(self, llm: Any, tokenizer: Any = None, *, lora: LoRAConfig | None = None, **settings: Any) -> None:
        path = getattr(getattr(llm, "model_config", None), "model", None)
        if path is not None or type(llm).__module__.partition(".")[0] == "vllm":
            raise ConfigError(
                f"vLLMActor: found {type(llm).__name__}, whose weights nothing could bring up to date while the policy "
                f"is trained; give the model's directory: vLLMActor({path or 'models/policy'!r})"
            )
        super().__init__(llm, tokenizer, lora=lora, **settings)
        self.settings["rollout"] = {"engine": {"kind": "vllm"}}


class _Elsewhere:
    """A name whose meaning others have here."""

    instead = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"{type(self).__name__}: {self.instead}")


class RolloutManager(_Elsewhere):
    """Raises ConfigError: a trainer makes its rollouts, and ``RolloutWorker`` makes them without one."""

    instead = (
        "a trainer makes its own rollouts: PPOTrainer(…).rollout(batch); without training RolloutWorker(model, …) "
        "does, and HybridActor.generate"
    )


class DataParallelTrainer(_Elsewhere):
    """Raises ConfigError: every trainer is data parallel."""

    instead = (
        "every trainer is data parallel, by actor={'data_parallel_size': n} or by the number of ranks that the program "
        "is started on, with Megatron's distributed optimizer as its strategy: take PPOTrainer, GRPOTrainer, "
        "DPOTrainer or SFTTrainer"
    )
