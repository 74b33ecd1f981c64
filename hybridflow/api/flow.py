"""Flows that a program writes: ``actor.sample() >> reward_model.score() >> ppo.update()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybridflow.api.parts import Part, objects_of, tokenizer_of
from hybridflow.api.session import Session, problems_of, prompts_per_step
from hybridflow.api.settings import merge, recipe_values
from hybridflow.api.world import find_world
from hybridflow.dataflow.batch import Batch, Column
from hybridflow.dataflow.graph import Node, Step, step
from hybridflow.dataflow.role import Role
from hybridflow.errors import ConfigError, DataError, GraphError
from hybridflow.rewards.arguments import function_name
from hybridflow.trainer.roles import NODE

_STAGES = tuple(item.name for item in fields(Step))
"""In the order in which a step runs them."""


@dataclass(frozen=True, kw_only=True)
class RoleFlow:
    """Nodes, and what takes part in them.

    Attributes:
        step: The nodes, by stage.
        parts: What they need, each once.
        algorithm: Whose update it has; None: it has none.
    """

    step: Step
    parts: tuple[Part, ...]
    algorithm: str | None = None
    _run_dirs: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    def __rshift__(self, other: RoleFlow | FlowNode) -> RoleFlow:
        if isinstance(other, FlowNode):
            other = other.as_flow()
        if not isinstance(other, RoleFlow):
            raise GraphError(
                f"{other!r:.60} cannot be joined with >>; give what sample(), score(), update() or node(...) return"
            )
        if self.algorithm is not None and other.algorithm is not None:
            raise GraphError(f"two updates, of {self.algorithm} and of {other.algorithm}; a flow has one")
        if other.algorithm is None:
            # Algorithms bring nodes of several stages.
            _check_order(self.step, other.step)
        return RoleFlow(
            step=self.step >> other.step,
            parts=tuple(dict.fromkeys((*self.parts, *other.parts))),
            algorithm=self.algorithm or other.algorithm,
        )

    def run(
        self, prompts: Any, steps: int | None = None, *, resume: bool = False, **settings: Any
    ) -> list[dict[str, float]]:
        """Train. Collective: all ranks, with the same prompts.

        A second call goes on from ``run_dir`` if ``resume`` is set, and fails otherwise.

        Args:
            prompts: Texts, rows ``{"prompt": …, "answer": …}``, or token ids, from which each step draws in an order
                that ``seed`` decides; or a ``DataProvider``.
            steps: How many, with those before a resume; None: as many as use each prompt. The last of these is filled
                up with prompts of the next turn.
            resume: Go on from the last checkpoint of ``run_dir``, if there is one.
            settings: As ``PPOTrainer`` takes them in its config: ``batch_size``, ``lr``, ``run_dir``, ….

        Returns:
            The metrics of each step.

        Raises:
            HybridflowError: Whatever is wrong, with a message for the user.
        """
        if self.algorithm is None:
            raise ConfigError("this flow learns nothing; end it with the update() of an algorithm, such as PPO()")
        merged = merge([*(part.settings for part in self.parts), settings])
        if steps is not None:
            merged["trainer"] = {"steps": steps, **merged.get("trainer", {})}
        values = recipe_values(merged, algorithm=self.algorithm, num_ranks=find_world().size)
        if self._run_dirs and not (resume and values.get("run_dir") in self._run_dirs):
            raise ConfigError(
                "flow.run: was called before, and would begin with the initial models again; go on with resume=True, "
                f"run_dir={self._run_dirs[-1]!r} and more steps, or make another flow"
            )
        with Session(
            values,
            tokenizer=tokenizer_of(self.parts),
            objects=objects_of(self.parts),
            step=self.step,
            make_problems=problems_of(prompts),
            num_prompts=prompts_per_step(values, prompts),
            resume=resume,
        ) as session:
            self._run_dirs.append(session.recipe.run_dir)
            return session.run(epochs=1) if steps is None else session.run(max(0, steps - session.step))


def _check_order(before: Step, after: Step) -> None:
    """Refuse nodes that run before others which the flow has on their left: a step runs stage by stage.

    Raises:
        GraphError: Names the stages.
    """
    last = next((stage for stage in reversed(_STAGES) if getattr(before, stage).elements), None)
    first = next((stage for stage in _STAGES if getattr(after, stage).elements), None)
    if last is not None and first is not None and _STAGES.index(first) < _STAGES.index(last):
        raise GraphError(
            f"the stage {first} stands behind the stage {last}, and runs before it; write the flow in the order "
            "actor.sample() >> reward.score() >> ppo.update()"
        )


class FlowNode:
    """What stands in a flow without a call: ``RolloutWorker(…) >> RewardModel(…) >> ReplayBuffer() >> PPO()``."""

    def as_flow(self) -> RoleFlow:
        """Return the node as a flow of its own."""
        raise NotImplementedError

    def __rshift__(self, other: RoleFlow | FlowNode) -> RoleFlow:
        return self.as_flow() >> other


class _Called(Role):
    """A function as a role of its own."""

    call_names = ("call",)

    def __init__(self, function: Callable[[Batch], Mapping[str, Column] | None]) -> None:
        super().__init__()
        self._function = function

    def call(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Call the function on the columns that it reads, and return its columns."""
        found = self._function(batch)
        if found is not None and not isinstance(found, Mapping):
            raise DataError(
                f"node {function_name(self._function)}: returned {type(found).__name__}; expected the columns that it "
                "writes, {'name': column}, or None if it writes none"
            )
        return Batch(batch.ids, {} if found is None else dict(found))


def node(
    function: Callable[[Batch], Mapping[str, Column] | None], *, reads: tuple[str, ...], writes: tuple[str, ...]
) -> RoleFlow:
    """Return a flow node that calls a function on the actor's ranks with their share of the samples.

    Args:
        function: Takes a ``Batch`` with the columns that it reads, gives those that it writes, a row for each sample;
            None if it writes none.
        reads: Columns that are there before: ``tokens``, ``prompt_lengths``, ``response_mask``, ``scores``, ….
        writes: New columns; what comes later can read them, ``ppo.update(scores="shaped")`` for instance.

    Raises:
        GraphError: It writes columns and reads none.
    """
    name = getattr(function, "__name__", "function")
    made = Node(name=name, role=name, call="call", mesh="actor.update", reads=reads, writes=writes)
    return RoleFlow(step=step(experience=made), parts=(Part({}, {f"{NODE}{name}": _Called(function)}),))
