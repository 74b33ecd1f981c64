"""A job with PyTorch FSDP in some roles learns what it learns without, and goes on after a stop."""

from __future__ import annotations

import pytest

from tests.e2e.commands import lasting_metrics, run_well, without_validations, write_recipe

PPO = ["train", "tiny.yaml", "algorithm=ppo", "trainer.save_every=1", "critic.optimizer.lr=1e-2", "kl.coef=0.1"]
MIXED = [
    *("cluster.ranks=4", "actor.ranks=[0, 1]", "actor.update={fsdp: 2}", "actor.rollout={tp: 2}"),
    *("critic.ranks=[0, 1]", "critic.layout={tp: 2}", "reference.ranks=[2, 3]", "reference.layout={fsdp: 2}"),
    "reference.offload=always",
]
MEGATRON = ["cluster.ranks=2", "actor.update={tp: 2}", "actor.rollout={tp: 2}", "critic.layout={tp: 2}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Metrics of four steps on Megatron's layouts."""
    folder = tmp_path_factory.mktemp("megatron")
    write_recipe(folder)
    run_well([*PPO, *MEGATRON, "trainer.steps=4"], folder)
    return lasting_metrics(folder / "run")


@pytest.mark.slow
def test_actor_and_reference_on_fsdp_critic_on_megatron(tmp_path, whole):
    write_recipe(tmp_path)
    run_well([*PPO, *MIXED, "trainer.steps=2"], tmp_path, num_ranks=4)
    before = lasting_metrics(tmp_path / "run")
    for row, expected in zip(before, whole, strict=False):
        for name in ("actor/loss", "critic/loss", "kl/ref", "actor/grad_norm", "reward/mean"):
            assert row[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-6), name
        assert row["rollout/logprob_abs_diff"] < 1e-5

    # On half of the ranks, from a checkpoint of four, with the critic sharded and the reference not.
    fewer = ["cluster.ranks=2", "actor.update={dp: 2, zero: 2}", "actor.rollout={dp: 2}", "critic.layout={fsdp: 2}"]
    fewer += ["actor.offload=always", "critic.offload=always"]
    done = run_well([*PPO, *fewer, "reference.layout={tp: 2}", "trainer.steps=4", "--resume"], tmp_path)
    assert "resumed from run/checkpoints/step_000002" in done.out
    rows = lasting_metrics(tmp_path / "run")
    assert len(rows) == 4 and rows[:2] == before
    for row, expected in zip(rows, whole, strict=True):
        assert row["actor/loss"] == pytest.approx(expected["actor/loss"], rel=2e-3, abs=2e-5)


@pytest.mark.slow
def test_a_stop_changes_no_bit(tmp_path):
    settings = [*PPO, "actor.update={fsdp: 2}", "actor.rollout={dp: 2}", "critic.layout={fsdp: 2}"]
    settings += ["actor.recompute=full", "critic.recompute=full", "actor.offload=true"]
    found = []
    for name, stops in (("whole", ["4"]), ("stopped", ["2", "4"])):
        folder = tmp_path / name
        folder.mkdir()
        write_recipe(folder)
        for number, steps in enumerate(stops):
            run_well([*settings, f"trainer.steps={steps}", *(["--resume"] if number else [])], folder)
        step = folder / "run/checkpoints/step_000004"
        found.append(
            (lasting_metrics(folder / "run"), [each.read_bytes() for each in sorted(step.rglob("*.safetensors"))])
        )
    rows, others = (without_validations(each) for each, _ in found)
    assert rows == others and len(rows) == 4
    assert len(found[0][1]) == 4 and found[0][1] == found[1][1]
