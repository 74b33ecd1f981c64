"""What a program names as actor, critic, reference and reward: a model or a function, and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.api.flow import FlowNode, RoleFlow
from hybridflow.api.parts import Part
from hybridflow.checkpoint.model_info import latest_actor
from hybridflow.config.roles import LoRAConfig
from hybridflow.dataflow.graph import step
from hybridflow.errors import ConfigError
from hybridflow.families.hub_cache import find_model
from hybridflow.flows import nodes
from hybridflow.rewards.functions import Function
from hybridflow.sections import to_dict


def split_model(model: Any, role: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a role's model into its settings, where it is no object, and the object by role, where it is one.

    Args:
        model: Directory of Hugging Face or of ours, or a name in Hugging Face's cache; an actor's may be a run;
            settings of a model whose weights are made up; an object: a model of transformers, a megatron-core
            ``GPTModel``, or one of the user's own class.
        role: Whose it is.
    """
    if isinstance(model, str | Path):
        folder = find_model(str(model))
        return {"path": str(latest_actor(folder) if role == "actor" else folder)}, {}
    if isinstance(model, Mapping):
        return dict(model), {}
    from hybridflow.checkpoint.formats.in_memory import in_memory_info

    if not in_memory_info({"actor": model}):
        raise ConfigError(
            f"model: found {type(model).__name__}; give a directory, a PreTrainedModel of transformers, a GPTModel of "
            "megatron-core, or a class of your own (docs/extend.md)"
        )
    # What it says of itself the session reads off it.
    return {}, {role: model}


class Actor(Part, FlowNode):
    """The policy.

    Args:
        model: As ``split_model`` takes it.
        tokenizer: Path, or tokenizer of transformers; None: the one that lies beside the model.
        lora: Train adapters alone.
        settings: Sizes and ``devices`` as in a section ``actor`` of ``PPOTrainer``'s config, and a recipe's own keys of
            that section.

    Raises:
        ConfigError: The model is of no kind that is known.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, lora: LoRAConfig | None = None, **settings: Any) -> None:
        section, objects = split_model(model, "actor")
        if lora is not None:
            if not isinstance(lora, LoRAConfig):
                raise ConfigError(
                    f"lora: found {type(lora).__name__}; give LoraConfig(rank=8), which takes PEFT's names too"
                )
            settings["lora"] = to_dict(lora)
        super().__init__({"model": section, "actor": settings}, objects)
        self.tokenizer = tokenizer

    def set_device_mesh(self, tp: int = 1, pp: int = 1) -> Actor:
        """Set the tensor and pipeline parallelism; replicas fill its ranks. Call it before a job begins.

        Args:
            tp: Tensor-parallel size.
            pp: Pipeline stages.
        """
        kept = {
            key: value for key, value in self.settings["actor"].items() if key not in ("data_parallel_size", "update")
        }
        self.settings["actor"] = {**kept, "tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        return self

    def sample(self, **sampling: Any) -> RoleFlow:
        """Return the source of a flow: responses to prompts.

        Args:
            sampling: Keys of a recipe's ``rollout``: ``group_size``, ``max_new_tokens``, ``temperature``, ….
        """
        return RoleFlow(step=step(sample=nodes.SAMPLE), parts=(self, Part({"rollout": sampling})))

    def as_flow(self) -> RoleFlow:
        """Return ``sample()``."""
        return self.sample()


class Critic(Part):
    """The value model.

    Args:
        model: As ``Actor`` takes it; None: it begins as a copy of the actor.
        settings: Sizes and ``devices``, and a recipe's own keys of ``critic``.
    """

    def __init__(self, model: Any = None, **settings: Any) -> None:
        section, objects = ({}, {}) if model is None else split_model(model, "critic")
        if section:
            settings["model"] = section
        super().__init__({"critic": settings}, objects)


class Reward(Part, FlowNode):
    """What scores responses.

    Args:
        function: ``(prompt, response, answer) -> score`` or another signature of docs/rewards.md, the name of one that
            is built in, or ``module:function``.
        model: A scorer, as ``Actor`` takes a model; one of the two.
        settings: Keys of a recipe's ``reward``; of a model sizes and ``devices``.

    Raises:
        ConfigError: Neither or both are given.
    """

    def __init__(
        self, function: Callable[..., Any] | Function | str | None = None, *, model: Any = None, **settings: Any
    ) -> None:
        if (function is None) == (model is None):
            raise ConfigError("Reward: give a function, or model=…; one of the two")
        objects: dict[str, Any] = {}
        if isinstance(function, str):
            settings["function"] = function
        elif function is not None:
            objects["reward"] = function
        elif hasattr(model, "scores"):
            objects["reward"] = model
        else:
            section, objects = split_model(model, "reward")
            if not objects:
                settings["model"] = section
        super().__init__({"reward": settings}, objects)

    def score(self) -> RoleFlow:
        """Return the flow node that scores samples."""
        return RoleFlow(step=step(score=nodes.SCORE), parts=(self,))

    def as_flow(self) -> RoleFlow:
        """Return ``score()``."""
        return self.score()


class RewardModel(Reward):
    """A model, or an object with ``scores(prompts, responses, answers)``, that scores responses.

    Args:
        model: As ``Reward`` takes it.
        settings: As there.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model=model, **settings)
