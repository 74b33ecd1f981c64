"""The benchmark of telling metrics: its arithmetic by hand, and a run of it."""

import json

import bench_metrics
import pytest
from bench_metrics import BLOCK, SKIPPED, Row


def test_the_cost_by_hand():
    """A step takes 1 s, and 0.1 s longer where it is told, of which 0.02 s are its end; senders take 0.03 s each."""
    rows, at_s, cpu_s = [], 0.0, 5.0
    for step in range(1, SKIPPED + 2 * BLOCK + 2):
        told = bench_metrics.is_telling(step)
        # The first of five is of those before it, and those at the beginning are of nothing.
        strange_s = 7.0 if step <= SKIPPED or (step - 1) % BLOCK == 0 else 0.0
        cpu_s += 0.03 * told
        rows.append(Row(step, told, at_s, 0.005 + 0.02 * told + strange_s, cpu_s))
        at_s += 1.0 + 0.1 * told + strange_s
    assert [row.step for row in rows if row.is_telling][:6] == [1, 2, 3, 4, 5, 11]
    found = bench_metrics.cost_of(rows)
    assert found == pytest.approx((1.0, 1.1, 0.02, 0.03))
    assert found.share == pytest.approx(found.held_s + found.cpu_s)
    assert "100.00" in bench_metrics.table({"alive": found})


@pytest.mark.slow
def test_it_measures_a_run_with_dashboards_and_one_whose_gateway_is_gone(tmp_path, capfd):
    tiny = [
        *("cluster.ranks=1", "actor.update={}", "actor.rollout={}", "critic.layout={}", "model.hidden_size=32"),
        *("trainer.global_batch_size=16", "trainer.mini_batch_size=8", "data.arithmetic.num_train=64"),
    ]
    report = tmp_path / "found.json"
    words = ["--cases", "alive", "refused", "--steps", "20", "--json", str(report), "--override", *tiny]
    assert bench_metrics.main(words) == 0
    shown = capfd.readouterr()
    assert "refused" in shown.out and "of a step: " in shown.out
    assert "metrics to Prometheus: step 0: " in shown.err + shown.out
    found = json.loads(report.read_text())
    assert list(found) == ["alive", "refused"]
    for cost in found.values():
        assert cost["without_s"] > 0 and cost["share"] == pytest.approx(
            (cost["held_s"] + cost["cpu_s"]) / cost["without_s"]
        )
    assert found["alive"]["cpu_s"] > 0
