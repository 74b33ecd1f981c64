"""Algorithms as a program names them, and those of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hybridflow.api.flow import FlowNode, RoleFlow
from hybridflow.api.parts import Part
from hybridflow.api.roles import Critic
from hybridflow.dataflow.graph import Flow, Step
from hybridflow.errors import ConfigError, did_you_mean
from hybridflow.flows import nodes
from hybridflow.flows.registry import ALGORITHMS

_OVERRIDABLE = ("advantages", "loss")
_SAMPLING_ONCE = [name for name, each in ALGORITHMS.items() if each.step.sample.elements == (nodes.SAMPLE,)]


class BaseAlgorithm(Part, FlowNode):
    """How a policy learns from scores. A subclass overrides ``advantages``, ``loss``, or both.

    Args:
        critic: The value model, of algorithms that have one; None: a copy of the actor.
        settings: As ``PPOTrainer`` takes them: ``lr``, ``kl_coef``, ``batch_size``, ….

    Attributes:
        name: The algorithm whose graph and settings it has, but for what it overrides.

    Raises:
        ConfigError: The algorithm called ``name`` does not sample once in a step, as flows do; or a subclass overrides
            nothing, or has a public method whose name is nearly that of one to override.
    """

    name = "grpo"

    def __init__(self, critic: Critic | None = None, **settings: Any) -> None:
        if self.name not in _SAMPLING_ONCE:
            raise ConfigError(
                f"{type(self).__name__}: name={self.name!r}: a flow samples once in a step, which {self.name} does "
                f"not; set name to one of {', '.join(_SAMPLING_ONCE)}, or train with GRPOTrainer(algorithm=…) or a "
                "recipe"
            )
        self._check_overrides()
        super().__init__(settings, {"algorithm": self} if self.is_user_class else {})
        self.critic = critic
        if critic is None and "critic" in ALGORITHMS[self.name].traits.needs:
            self.critic = Critic()

    def advantages(self, scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        """Return the advantage of each sample of the global batch, ``[samples]``; all its response tokens have it.

        Args:
            scores: ``[samples]``, less the KL penalty where it is paid in the reward.
            groups: Number of each sample's prompt, ``[samples]``: equal numbers are one group.
            lengths: Response tokens of each, ``[samples]``.
        """
        raise NotImplementedError

    def loss(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return each token's loss, ``[samples, tokens]`` as all arguments, with a gradient to ``log_probs``.

        Args:
            log_probs: Of the weights in training.
            old_log_probs: Of the weights at the start of the update.
            advantages: Of each token.
            mask: 1 on tokens that count.
        """
        raise NotImplementedError

    @property
    def is_user_class(self) -> bool:
        """Return whether a subclass overrides something."""
        return self.has_user_method("advantages") or self.has_user_method("loss")

    def has_user_method(self, method: str) -> bool:
        """Return whether a subclass overrides a method."""
        return getattr(type(self), method) is not getattr(BaseAlgorithm, method)

    def _check_overrides(self) -> None:
        """Refuse a user's subclass that would train the plain algorithm in its place."""
        own: dict[str, Any] = {}
        for each in type(self).__mro__:
            own |= {} if issubclass(BaseAlgorithm, each) else vars(each)
        where = type(self).__name__
        for name in own:
            hint = did_you_mean(name, _OVERRIDABLE)
            if hint and callable(own[name]) and not (name.startswith("_") or hasattr(BaseAlgorithm, name)):
                raise ConfigError(f"{where}.{name}: is never called; {hint}let the name of a helper begin with _")
        if own and not {*_OVERRIDABLE, "name", "update", "as_flow", "__init__"} & {*own}:
            raise ConfigError(
                f"{where}: overrides nothing, and would train plain {self.name}; define "
                f"{' or '.join(_OVERRIDABLE)}, or use {self.name} itself"
            )

    def update(self, scores: str = "scores") -> RoleFlow:
        """Return the flow after the scores: log-probabilities, values, advantages, updates.

        Args:
            scores: The column to learn from.
        """
        step = ALGORITHMS[self.name].step
        step = Step(experience=step.experience, update=step.update)
        if self.has_user_method("advantages"):
            own = nodes.advantages("user_algorithm")
            step = step.map(lambda flow: nodes.each_node(flow, lambda node: own if node.role == "advantage" else node))
        parts = [self, *(() if self.critic is None else (self.critic,))]
        if scores != "scores":
            step = step.map(lambda flow: _reading(flow, scores))
            parts.append(Part({}, {"scores": scores}))
        return RoleFlow(step=step, parts=tuple(parts), algorithm=self.name)

    def as_flow(self) -> RoleFlow:
        """Return ``update()``."""
        return self.update()


class PPO(BaseAlgorithm):
    """PPO with a critic (arXiv 1707.06347)."""

    name = "ppo"


class GRPO(BaseAlgorithm):
    """GRPO (arXiv 2402.03300); sample in groups, as by ``actor.sample(group_size=8)``."""

    name = "grpo"


class RLOO(BaseAlgorithm):
    """RLOO (arXiv 2402.14740); sample in groups."""

    name = "rloo"


def _reading(flow: Flow, scores: str) -> Flow:
    """Return the flow in which what reads the scores reads another column in their place."""
    return nodes.each_node(
        flow,
        lambda node: replace(node, reads=tuple(scores if name == "scores" else name for name in node.reads)),
    )
