"""The benchmark of a step: its arithmetic against that done by hand, its bounds and its report."""

from __future__ import annotations

import bench_step
import pytest
from rollout_bench.cases import SIZES, Lengths, Shape
from step_bench.cases import SIZE, lengths_of, step_flops


def test_operations_are_those_worked_out_by_hand():
    shape = Shape(hidden=8, ffn=12, layers=2, heads=4, kv_heads=2, vocab=10)
    # Layers have 960 elements, the output 80. 3 + 2 and 1 + 4 tokens go through the layers, 6 of them to the output.
    forward = 2 * (10 * 960 + 6 * 80)
    # The last token of each response is sampled, and goes through no model.
    found = step_flops(shape, Lengths(prompts=(3, 1), responses=(2, 4)))
    assert found == {"log_probs": forward, "update": 3 * forward, "rollout": 2 * (8 * 960 + 6 * 80)}


def test_a_step_of_the_benchmark_is_276_gflop():
    found = {phase: round(flops / 1e9) for phase, flops in step_flops(SIZES[SIZE], lengths_of("equal")).items()}
    assert found == {"rollout": 55, "log_probs": 55, "update": 166}


def test_lengths_have_a_tail():
    lengths = lengths_of("tailed")
    assert len(lengths.responses) == len(lengths.prompts) == 64 and set(lengths.prompts) == {32}
    assert min(lengths.responses) >= 8 and 256 < max(lengths.responses) <= 512
    assert 40 < sorted(lengths.responses)[32] < 90


def a_run(step_s: float, **phases: float) -> dict:
    times = {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
    return {"step_s": step_s, "cpu_s": 2 * step_s, "num_tokens": 4096, "times": times}


def results() -> dict:
    flops = {"rollout": 60 * 10**9, "log_probs": 60 * 10**9, "update": 180 * 10**9}
    ours = [a_run(step_s, rollout=1.0, log_probs=0.4, update=1.2, control=0.1) for step_s in (2.5, 9.0, 3.0)]
    case = {"num_samples": 64, "num_tokens": 4096, "longest": 64, "flops": flops}
    rates = [{"flop_per_s": rate, "square_flop_per_s": 2e11} for rate in (1e11, 1.5e11)]
    return {
        **{"threads": 2, "ranks": 2, "repeats": 3, "cpus": 2, "load": 0.5, "versions": {"trl": "1"}, "rates": rates},
        "cases": {"equal": {**case, "runs": {"ours": ours, "trl": [a_run(step_s) for step_s in (8.0, 7.5, 1.0)]}}},
    }


def test_bounds_take_medians_and_the_best_rate():
    faster, limit, other = bench_step.bounds(results())
    assert (faster.found, faster.holds) == (pytest.approx(7.5 / 3.0), True)
    # 300 GFLOP at 150 GFLOP/s are 2 s.
    assert (limit.found, limit.holds) == (pytest.approx(1.5), True)
    assert (other.found, other.holds) == (pytest.approx(0.1 / 3.0), True)
    slow = results()
    for run in slow["cases"]["equal"]["runs"]["ours"]:
        run["step_s"] *= 2
        run["times"]["time/control_s"] = 0.7
    assert [bound.holds for bound in bench_step.bounds(slow)] == [False, False, False]


def test_the_report_has_every_trainer_and_phase():
    found = list(bench_step.markdown(results()))
    assert "| equal | ours | 3.00 | 21.3 | 6.00 |  | 1.50 |" in found
    assert "| equal | trl | 7.50 | 8.5 | 15.00 | 2.50 | 3.75 |" in found
    assert "| equal | update | 1.200 | 40.0% | 180 |" in found
    assert "| equal | control | 0.100 | 3.3% |  |" in found
