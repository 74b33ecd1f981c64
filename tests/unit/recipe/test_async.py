"""Working ahead: what is refused, who waits for whom, the buffer, and memory of ranks that only generate."""

from __future__ import annotations

import pytest

from hybridflow.dataflow.schedule import Branch, Call, Move, Phase, walk
from hybridflow.errors import ConfigError, DataError, LayoutError
from hybridflow.mapping.memory import job_memory
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.rollout.buffer import AsyncRolloutBuffer
from hybridflow.trainer.plan import plan_job

PPO = ("algorithm=ppo", "critic={layout: {dp: 2}, optimizer: {lr: 1.0e-3}}")


@pytest.mark.parametrize(
    "overrides, error, words",
    [
        (
            ["actor.rollout_ranks=null", "actor.update={dp: 4}", "actor.rollout=null"],
            ConfigError,
            "actor.rollout_ranks",
        ),
        (["actor.ranks=[1, 2]"], LayoutError, r"\[2\] are among actor.ranks"),
        (["actor.ranks=[1, 4]"], LayoutError, "not among ranks 0 to 3"),
        (["actor.rollout_ranks=[1]"], LayoutError, "actor.update"),
        (["actor.offload=true"], ConfigError, "makes no room"),
        (["rollout.engine={kind: vllm}"], ConfigError, "actor.rollout_ranks: with rollout.engine.kind=vllm"),
        (["reference={ranks: [0, 3]}"], LayoutError, r"ranks \[3\] are in reference.*reference.ranks"),
        (["reward.ranks=[0]"], LayoutError, r"ranks \[0\] are in actor.update.*reward.ranks"),
        ([*PPO, "critic.ranks=[2, 1]"], LayoutError, r"ranks \[2\] are in critic.*critic.ranks or actor.rollout_ranks"),
        (["rollout.engine={kind: openai, urls: ['http://h:1'], off_policy: true}"], ConfigError, "do not follow"),
        (["algorithm=remax"], ConfigError, "for its baseline"),
        (
            ["rollout.partial_rollouts=true", "algorithm=dapo", "trainer.max_staleness=0"],
            ConfigError,
            "partial_rollouts.*until its",
        ),
        (
            ["rollout.partial_rollouts=true", "rollout.environment={name: 'my:Tool'}"],
            ConfigError,
            "or change rollout.env",
        ),
    ],
)
def test_what_cannot_work_ahead_is_refused(overrides, error, words):
    with pytest.raises(error, match=words):
        load_recipe("async", overrides)


def test_ranks_that_are_not_named_are_those_that_do_not_generate():
    meshes = role_meshes(load_recipe("async", PPO))
    assert {name: mesh.ranks for name, mesh in meshes.items()} == {
        "actor.update": (0, 1),
        "actor.rollout": (2, 3),
        "critic": (0, 1),
        "reference": (0, 1),
        "reward": (2, 3),
    }


CRITIC = "{layout: {tp: 2}, optimizer: {lr: 1.0e-3}}"
ALGORITHMS = {
    "grpo": [],
    "opo": ["loss.epochs=2"],
    "reinforce++": ["kl.place=reward"],
    "ppo": [f"critic={CRITIC}", "actor.update={pp: 2, dp: 1}"],
    "safe-rlhf": [f"critic={CRITIC}", f"cost_critic={CRITIC}", "cost={function: 'mine:cost'}"],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_within_a_step_nobody_who_learns_waits_for_the_rollout(algorithm):
    plan = plan_job(load_recipe("async", [f"algorithm={algorithm}", *ALGORITHMS[algorithm]]))
    (loop,) = plan.train
    (step,) = loop.body
    assert isinstance(step, Branch)
    validate = next(at for at, each in enumerate(step.then) if isinstance(each, Branch) and each.decision == "validate")
    work = list(walk(step.then[:validate]))
    sample = next(at for at, each in enumerate(work) if isinstance(each, Call) and each.call == "sample")
    take = next(at for at, each in enumerate(work) if isinstance(each, Call) and each.call == "take")
    phase = work.index(Phase("actor", "rollout"))
    assert take < phase < sample
    learning, sampling = {0, 1}, {2, 3}
    for each in work[sample:]:
        if isinstance(each, Move):
            ends = {*plan.meshes[each.source].ranks, *plan.meshes[each.destination].ranks}
            assert ends <= learning or ends <= sampling, each
    moved = [each for each in work[:sample] if isinstance(each, Move)]
    assert moved and all(each.source == "actor.rollout" for each in moved)
    # Whose age is checked where they are taken need not travel.
    assert not any("versions" in each.columns for each in moved)
    names = [each.name for each in work if isinstance(each, Call)]
    order = [
        names.index(each) for each in ("buffer.take", "actor.sample", "reward.score", "buffer.put", "actor.update")
    ]
    assert order == sorted(order)


def test_without_working_ahead_there_is_no_buffer():
    calls = {
        each.role
        for each in walk(plan_job(load_recipe("async", ["trainer.max_staleness=0"])).whole)
        if isinstance(each, Call)
    }
    assert "actor" in calls and "buffer" not in calls


def test_correction_is_on_by_itself():
    assert load_recipe("async").correction_kind == "truncate"
    assert load_recipe("async", ["trainer.max_staleness=0"]).correction_kind == "none"


def test_buffers_flip_in_order_and_are_no_more_than_was_said():
    buffer = AsyncRolloutBuffer(max_buffers=3)
    assert (buffer.current(), len(buffer)) == (None, 0)
    with pytest.raises(DataError, match="no batch waits"):
        buffer.flip()
    buffer.put("first")
    buffer.put("second")
    with pytest.raises(DataError, match="3 buffers"):
        buffer.put("third")
    assert (buffer.next(), buffer.flip(), buffer.current(), buffer.next()) == ("first", "first", "first", "second")
    buffer.put("third")
    assert [buffer.flip(), buffer.flip(), len(buffer), buffer.current()] == ["second", "third", 0, "third"]
    with pytest.raises(DataError, match="max_buffers=1"):
        AsyncRolloutBuffer(max_buffers=1)


def test_a_buffer_that_nobody_put_is_a_list_to_be_filled():
    buffer = AsyncRolloutBuffer(max_buffers=2)
    filled = buffer.next()
    filled.append("sample")
    assert buffer.next() is filled and buffer.flip() is filled and buffer.current() == ["sample"]
    assert buffer.next() == []
    # An empty one makes room for a batch.
    buffer.put("batch")
    assert (buffer.flip(), buffer.current(), len(buffer)) == ("batch", "batch", 0)


def test_ranks_that_only_generate_keep_the_weights_while_others_learn():
    recipe = load_recipe("async")
    needed = job_memory(recipe, role_meshes(recipe))
    (rollout,) = needed[2].meshes
    assert rollout.mesh == "actor.rollout"
    # Two layers of 4 · 128² and 3 · 128 · 512, two norms each, the last norm, embeddings and outputs of 64 · 128.
    parameters = 2 * (4 * 128**2 + 3 * 128 * 512 + 2 * 128) + 128 + 2 * 64 * 128
    assert needed[2].update == rollout.weights >= 4 * parameters
    assert needed[2].rollout == rollout.weights + rollout.cache + rollout.activations
    assert [part.mesh for part in needed[0].meshes] == ["actor.update", "reference"]
