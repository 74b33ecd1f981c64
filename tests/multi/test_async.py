"""Generating on ranks of its own: the same numbers as beside learning; and ahead of it, with weights of known age."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.checkpoint.store import latest_step
from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.batch import Batch
from hybridflow.errors import DataError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.specs import logical_parameters
from hybridflow.parallel.world import World
from hybridflow.roles.actor import Actor
from hybridflow.rollout import engine, session
from hybridflow.sampling.rollout_buffer import RolloutBuffer
from hybridflow.sampling.rollouts import Rollouts
from hybridflow.trainer.stopping import Stopping
from hybridflow.trainer.trainer import train
from tests.multi.jobs import make_job, tiny_recipe
from tests.multi.test_placement import OF_THE_MACHINE, layout, recipe
from tests.support.complaints import complaint
from tests.support.ranks import run_ranks


def run(world: World, made: Recipe, resume: bool = False) -> bool:
    return train(made, world, resume=resume)


def rows(made: Recipe) -> list[dict[str, float]]:
    text = (Path(made.run_dir) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def assert_same(made: Recipe, other: Recipe, tolerance: float = 1e-5) -> None:
    for step, (expected, found) in enumerate(zip(rows(made), rows(other), strict=True), start=1):
        for metric, value in expected.items():
            if not metric.startswith(OF_THE_MACHINE):
                assert abs(found[metric] - value) <= tolerance * (abs(value) + 0.1), (other.name, step, metric)


@pytest.mark.slow
def test_a_rollout_on_ranks_of_its_own_gives_the_same_numbers(tmp_path):
    validating = {"validate_every": 1}
    together = recipe(tmp_path, "together", "grpo", 1, trainer=validating)
    run_ranks(run, 1, together)
    placements = {
        "apart": dict(ranks=2, rollout_ranks=(1,), update=layout()),
        "tp2": dict(ranks=4, rollout_ranks=(3, 2), update=layout(tp=2), rollout=layout(dp=2)),
        "pp2": dict(ranks=3, rollout_ranks=(0, 2), update=layout(), rollout=layout(pp=2), reference_ranks=(2,)),
    }
    apart = [recipe(tmp_path, name, "grpo", **placement, trainer=validating) for name, placement in placements.items()]
    for made in apart:
        run_ranks(run, made.cluster.ranks, made)
        # In the same layout, to the bit: loss and norm of the gradient of each step among them.
        assert_same(together, made, 0.0 if made.name == "apart" else 1e-5)
        # For the validation at its end, and no more for the next step.
        assert rows(made)[0]["reshard/bytes"] == rows(made)[0]["reshard/limit_bytes"] > 0


def remember_weights(world: World, made: Recipe, checked: Any) -> list[float]:
    """Run, and recompute what each batch was sampled with: the largest error at each step that learns."""
    update, errors, kept = Actor.update, [], {}

    def watched(self: Actor, batch: Batch, decided: dict[str, Any]) -> None:
        step, turn = decided["train_step"]["step"], decided["actor_mini_batch"]
        if turn == {"epoch": 0, "index": 0}:
            weights = logical_parameters(self.model.transformer)
            kept[step - 1] = {name: tensor.detach().clone() for name, tensor in weights.items()}
            with torch.no_grad():
                for name, tensor in kept[checked[step]].items():
                    weights[name].copy_(tensor)
                column = self.model.per_token(batch, lambda output, part: self.model.log_probs(output, part)[0])
                for name, tensor in kept[step - 1].items():
                    weights[name].copy_(tensor)
            pairs = zip(column.to_list(), batch.ragged("rollout_log_probs").to_list(), strict=True)
            errors.append(max(float((one - other).abs().max()) for one, other in pairs))
        update(self, batch, decided)

    Actor.update = watched
    train(made, world)
    return errors


CASES = {
    # Staleness: step -> updates behind, as the program has it: the first batches come of the weights of the start.
    1: ("grpo", {1: 0, 2: 1, 3: 1, 4: 1}, layout(dp=2)),
    2: ("ppo", {1: 0, 2: 1, 3: 2, 4: 2}, layout(pp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_batches_made_ahead_are_of_the_weights_that_they_say_in_every_layout(staleness, tmp_path):
    algorithm, behind, rollout = CASES[staleness]
    trainer = {"max_staleness": staleness, "steps": 4, "validate_every": 3, "save_every": 3}
    two = recipe(tmp_path, "two", algorithm, 2, update=layout(), rollout_ranks=(1,), trainer=trainer)
    errors, _ = run_ranks(remember_weights, 2, two, {step: step - 1 - behind[step] for step in behind})
    assert len(errors) == 4 and max(errors) < 1e-4
    found = rows(two)
    assert [row["rollout/staleness_mean"] for row in found] == list(behind.values())
    assert [row["rollout/staleness_max"] for row in found] == list(behind.values())
    # Older weights are not those in training; and what that does is corrected.
    assert found[0]["rollout/logprob_abs_diff"] < 1e-5
    assert all(row["rollout/logprob_abs_diff"] > 1e-4 and row["actor/grad_norm"] > 0.01 for row in found[1:])
    assert all("correction/effective_share" in row for row in found)

    placement = dict(actor_ranks=(0, 1), update=layout(tp=2), rollout_ranks=(3, 2), rollout=rollout)
    placement |= dict(critic_ranks=(1, 0), reference_ranks=(0, 1), reward_ranks=(4,))
    more = recipe(tmp_path, "more", algorithm, 5, **placement, trainer=trainer)
    # Few at a time, so that who is quicker takes from the other.
    more = replace(more, rollout=replace(more.rollout, max_concurrent=2))
    run_ranks(run, 5, more)
    assert_same(two, more)


def recompute(world: World, made: Recipe, look_steps: int) -> list[tuple[int, int, float]]:
    """Run; of each sample that is learned from: step, oldest weights, and the largest error of its log-probabilities.

    A token's are recomputed with the weights that it says it was sampled with.
    """
    update, columns, found, kept, sampled = Actor.update, Rollouts._columns, [], {}, {}
    engine.LOOK_STEPS = session.LOOK_STEPS = look_steps

    def seen(self: Rollouts, pairs: Any, id_of: Any) -> Batch | None:
        sampled.update({id_of(ask): got for ask, got in pairs})
        return columns(self, pairs, id_of)

    def watched(self: Actor, batch: Batch, decided: dict[str, Any]) -> None:
        version = decided["train_step"]["step"] - 1
        weights = logical_parameters(self.model.transformer)
        now = {name: tensor.detach().clone() for name, tensor in weights.items()}
        # Those of the step's beginning are what the rollout gets.
        kept.setdefault(version, now)
        errors = dict.fromkeys(batch.ids.tolist(), 0.0)
        for number, tensors in (*kept.items(), (None, now)):
            with torch.no_grad():
                for name, tensor in tensors.items():
                    weights[name].copy_(tensor)
                column = self.model.per_token(batch, lambda output, part: self.model.log_probs(output, part)[0])
            for each, row in zip(errors, column.to_list(), strict=True):
                distance = (row - sampled[each].log_probs).abs()[sampled[each].versions == number]
                errors[each] = max(errors[each], float(distance.max())) if len(distance) else errors[each]
        found.extend((version + 1, int(sampled[each].versions.min()), error) for each, error in errors.items())
        update(self, batch, decided)

    Actor.update, Rollouts._columns = watched, seen
    train(made, world)
    return found


def carried(tmp_path: Path, name: str, ranks: int, staleness: int, **placement: Any) -> Recipe:
    trainer = {"steps": 4, "max_staleness": staleness}
    made = recipe(tmp_path, name, "grpo", ranks, update=layout(), trainer=trainer, **placement)
    # So few at a time that those of the next step begin before the last of a step are done.
    return replace(made, rollout=replace(made.rollout, max_concurrent=3, partial_rollouts=True))


def test_responses_begun_a_step_before_go_on_with_new_weights(tmp_path):
    made = carried(tmp_path, "carried", 1, 0)
    ((first, *later),) = [[*steps_of(found).values()] for found in run_ranks(recompute, 1, made, 1)]
    assert all(error < 1e-5 for step in (first, *later) for _, error in step)
    assert {behind for behind, _ in first} == {0}
    # Some are older, by one update at most, and never all of a step.
    assert all({behind for behind, _ in step} == {0, 1} for step in later)
    found = rows(made)
    assert [row["rollout/staleness_max"] for row in found] == [0, 1, 1, 1]
    assert all(0 < row["rollout/continued"] < 1 for row in found[1:])
    # Older weights are corrected for without being asked.
    assert all("correction/effective_share" in row for row in found)


@pytest.mark.slow
def test_what_was_begun_is_dropped_when_a_run_stops_and_it_goes_on(tmp_path):
    made = carried(tmp_path, "stopped", 1, 0)
    run_ranks(run, 1, replace(made, trainer=replace(made.trainer, steps=2)))
    run_ranks(run, 1, made, True)
    assert [row["rollout/staleness_max"] for row in rows(made)] == [0, 1, 0, 1]


@pytest.mark.slow
def test_responses_are_carried_over_beside_learning_too(tmp_path):
    made = carried(tmp_path, "both", 2, 1, rollout_ranks=(1,))
    run_ranks(run, 2, made)
    # The batch of step 2 is begun beside that of step 1, before any update; the next one a step earlier than else.
    assert [row["rollout/staleness_max"] for row in rows(made)] == [0, 1, 2, 2]


def steps_of(found: list[tuple[int, int, float]]) -> dict[int, list[tuple[int, float]]]:
    """Step -> how far behind, and how wrong, each sample is."""
    steps: dict[int, list[tuple[int, float]]] = {}
    for step, oldest, error in found:
        steps.setdefault(step, []).append((step - 1 - oldest, error))
    return steps


def stopped(world: World, made: Recipe, decision: str, step: int) -> bool:
    """Run, and ask to stop while rank 1 samples for a step."""
    sample, local_reason, asked = Actor.sample, Stopping.local_reason, []

    def watched(self: Actor, batch: Batch, decided: dict[str, Any]) -> Batch | None:
        if decided.get(decision, {}).get("step") == step:
            asked.append("asked to")
        return sample(self, batch, decided)

    Actor.sample = watched
    Stopping.local_reason = lambda self, **named: asked[0] if asked else local_reason(self, **named)
    return train(made, world)


@pytest.mark.slow
def test_a_run_that_was_stopped_while_it_worked_ahead_goes_on(tmp_path):
    for decision, step, saved in (("fill_buffer", 1, 0), ("sample_ahead", 3, 2)):
        trainer = {"max_staleness": 1, "steps": 4}
        made = recipe(tmp_path, decision, "grpo", 2, update=layout(), rollout_ranks=(1,), trainer=trainer)
        assert run_ranks(stopped, 2, made, decision, step) == [False, False]
        # The update beside which it was asked is done; what was being sampled is not kept.
        assert latest_step(Path(made.run_dir)) == saved
        assert run_ranks(run, 2, made, True) == [True, True]
        found = rows(made)
        assert [row["step"] for row in found] == [1, 2, 3, 4]
        # After the restart the first batch is of the weights of the checkpoint.
        expected = [0, 1, 1, 1] if saved == 0 else [0, 1, 0, 1]
        assert [row["rollout/staleness_max"] for row in found] == expected
        assert found[saved]["rollout/logprob_abs_diff"] < 1e-5


def too_old(world: World) -> str | None:
    """What is said of samples that are two updates behind where one is allowed."""
    made = tiny_recipe(ParallelLayout(), "grpo")
    made = replace(
        made,
        cluster=replace(made.cluster, ranks=2),
        actor=replace(made.actor, rollout_ranks=(1,)),
        trainer=replace(made.trainer, max_staleness=1),
    )
    job, _ = make_job(world, made)
    if world.rank == 0:
        return None
    buffer = RolloutBuffer(job)
    buffer.put(Batch(torch.arange(2), {"versions": torch.tensor([1, 2])}), {"fill_buffer": {"step": 3}})
    # Version 2 is that of the beginning of step 3, version 1 one behind: no error; the next is.
    buffer.take(Batch.empty(), {"train_step": {"step": 3}})
    assert buffer.metrics == {"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0}
    buffer.put(Batch(torch.arange(2), {"versions": torch.tensor([1, 3])}), {"fill_buffer": {"step": 4}})
    return complaint(lambda: buffer.take(Batch.empty(), {"train_step": {"step": 4}}), DataError)


def test_older_weights_than_allowed_are_an_error():
    _, told = run_ranks(too_old, 2)
    assert "2 updates behind" in told and "trainer.max_staleness=1" in told
