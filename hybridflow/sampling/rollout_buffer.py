"""Scored samples between the ranks that generate and those that learn, on the former."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.role import Role
from hybridflow.errors import DataError
from hybridflow.placement.job import Job
from hybridflow.rollout.buffer import AsyncRolloutBuffer

ASKED_BY = ("fill_buffer", "sample_ahead", "train_step")
"""Decisions that say what is to be sampled; the first one that was taken counts."""


class _Waiting(NamedTuple):
    """This rank's samples for a step; None where it holds none."""

    step: int
    batch: Batch | None


class RolloutBuffer(Role):
    """Keeps batches until their step comes, and sees to it that their weights are not too old then."""

    call_names = ("put", "take")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._mesh = job.meshes["actor.rollout"]
        self._bound = job.recipe.staleness_bound
        self._buffer = AsyncRolloutBuffer(max_buffers=job.recipe.trainer.max_staleness + 1)

    def put(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Keep the samples of a step that is still to come."""
        has_outputs = self._mesh.has_outputs(self._job.world.rank)
        self._buffer.put(_Waiting(asked(decided)["step"], batch if has_outputs else None))

    def take(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Return the samples of this step. A source of all columns that ``put`` was given.

        Collective: the rollout mesh.

        Raises:
            DataError: The weights that sampled one of them are further behind than ``Recipe.staleness_bound``.
        """
        step = decided["train_step"]["step"]
        waiting: _Waiting = self._buffer.flip()
        assert waiting.step == step, f"the samples of step {waiting.step} were taken for step {step}"
        found = measure_staleness(self._job, [] if waiting.batch is None else _behind(waiting.batch, step))
        self.metrics |= found
        if found["rollout/staleness_max"] > self._bound:
            raise DataError(
                f"step {step}: samples of weights that are {found['rollout/staleness_max']:.0f} updates behind, and "
                f"trainer.max_staleness={self._job.recipe.trainer.max_staleness}; this is a defect, please report it "
                "with the recipe"
            )
        return waiting.batch


def measure_staleness(job: Job, behind: list[int]) -> dict[str, float]:
    """Return how many updates the samples' weights are behind, over all replicas; empty when there are no samples.

    Collective: the rollout mesh.
    """
    mesh = job.meshes["actor.rollout"]
    shares = job.world.coordinator(mesh.ranks).gather(behind, "versions of the weights")
    # A replica may have several holders, with the same samples each.
    by_rank = dict(zip(mesh.ranks, shares, strict=True))
    told = [number for rank in mesh.speakers for number in by_rank[rank]]
    if not told:
        return {}
    return {"rollout/staleness_mean": sum(told) / len(told), "rollout/staleness_max": float(max(told))}


def asked(decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request to ``Rollouts.sample``, whichever decision made it; several rollouts of one step differ."""
    found = {**next(decided[name] for name in ASKED_BY if name in decided), **decided.get("fill", {})}
    keys = [key for key in ("step", "first_prompt_index", "num_prompts", "version", "is_greedy") if key in found]
    # The step's own weights, if nothing else is said.
    return {"version": found["step"] - 1, **{key: found[key] for key in keys}}


def _behind(batch: Batch, step: int) -> list[int]:
    """Return how many updates each sample's weights are behind those of the step's beginning."""
    return [step - 1 - version for version in batch.dense("versions").tolist()]
