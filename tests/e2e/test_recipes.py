"""Recipes of algorithms as shipped, but shorter: they run from warm start to summary, and are validated with pass@k."""

import json

import pytest

from hybridflow.recipe.load import load_recipe
from tests.e2e.commands import fork_ranks

SHORT = [
    *("warm_start.steps=20", "trainer.steps=2", "trainer.global_batch_size=64", "trainer.num_validation=16"),
    *("trainer.validate_every=1", "trainer.validation_samples=4", "trainer.pass_k=2", "trainer.keep_best=true"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, mini", [("dapo", 32), ("remax", 32), ("gspo", 64), ("split", 32)])
def test_a_shipped_recipe_runs(name, mini, tmp_path):
    num_ranks = load_recipe(name).cluster.ranks
    argv = ["train", name, *SHORT, f"trainer.mini_batch_size={mini}"]
    done = fork_ranks(argv, tmp_path, num_ranks=num_ranks, within_s=300)
    assert done.codes == (0,) * num_ranks, done.out[-2000:] + done.err[-2000:]
    run_dir = tmp_path / "runs" / name
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["actor/grad_norm"] >= 0 for row in rows)
    assert all(0 <= row["validation/pass_at_1"] <= row["validation/pass_at_k"] <= 1 for row in rows)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["best_step"] in (0, 1, 2)
    assert (run_dir / "checkpoints/best").read_text() == f"step_{summary['best_step']:06d}\n"
