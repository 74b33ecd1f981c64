"""One step's metrics from what ranks say, by hand: phases, operations, what devices could do, memory."""

from __future__ import annotations

import math
import mmap
import time

import numpy as np
import pytest
import torch

from hybridflow.observe.timeline import Timeline
from hybridflow.observe.work import add_work
from hybridflow.trainer import meter
from hybridflow.trainer.meter import RankMeter, known_peak_flops, peak_flops
from hybridflow.trainer.step_metrics import Share, merge_metrics, step_metrics
from tests.support.waiting import with_more_time

METRICS = {"batch/num_tokens": 100.0, "actor/loss": 0.5}


def shares(peaks: tuple[float, float] = (1000.0, 3000.0)) -> list[Share]:
    """Two ranks: both sample, the second alone learns."""
    return [
        Share(
            METRICS,
            spans=[["call", "actor.sample", 1.0], ["control", "train_step", 0.5], ["phase", "to update", 0.25]],
            costs=[["call", "actor.sample", 200.0, 8.0, 5000], ["phase", "to update", 0.0, 0.0, 9000]],
            peak_flops=peaks[0],
        ),
        Share(
            METRICS,
            spans=[["call", "actor.sample", 2.0], ["call", "actor.update", 1.0], ["call", "trainer.finish_step", 0.5]],
            costs=[
                ["call", "actor.sample", 300.0, 12.0, 4000],
                ["call", "actor.update", 900.0, 30.0, 7000],
                ["call", "critic.update", 300.0, 30.0, 8000],
                ["call", "trainer.finish_step", 0.0, 0.0, 10000],
            ],
            peak_flops=peaks[1],
        ),
    ]


def test_what_phases_computed_by_hand():
    found = step_metrics(shares(), 4.0)
    assert found["time/rollout_s"] == 2.0 and found["time/update_s"] == 1.0
    # 20 tokens in the 2 s of the slower rank; 500 operations of (1000 + 3000) · 2 s.
    assert found["throughput/rollout_tokens_per_s"] == 10.0 and found["mfu/rollout"] == 500 / 8000
    # The rank that does not learn is not asked what it could have done.
    assert found["throughput/update_tokens_per_s"] == 60.0 and found["mfu/update"] == 1200 / 3000
    assert found["throughput/flop_per_s"] == 1700 / 4 and found["mfu/step"] == 1700 / 4 / 4000
    memory = {name: value for name, value in found.items() if name.startswith("memory/")}
    assert memory == {"memory/rollout_bytes": 5000, "memory/reshard_bytes": 9000, "memory/update_bytes": 8000}


def test_what_is_left_of_a_step_and_what_ranks_wait_for_is_overhead():
    one = [["call", "actor.sample", 1.0], ["move", "tokens", 0.5], ["move", "tokens", 0.25], ["control", "save", 0.5]]
    other = [["call", "actor.sample", 2.0], ["call", "actor.update", 0.5], ["move", "tokens", 0.25]]
    both = [Share(METRICS, spans=spans) for spans in (one, [*other, ["call", "trainer.finish_step", 0.125]])]
    found = step_metrics(both, 4.0)
    # The quickest participant of each, 0.25 + 0.5 + 0.125, and what the busiest rank has left of 4: 4 - 2.5 - 0.375.
    assert found["time/control_s"] == 2.0 and found["control/overhead_share"] == 0.5 and found["time/step_s"] == 4.0
    assert found["time/update_s"] == 0.5
    assert {name for name in found if name.startswith("time/")} == {
        f"time/{name}_s" for name in ("control", "step", "rollout", "update")
    }
    # Clocks differ: nothing is left then.
    assert step_metrics(both, 2.5)["time/control_s"] == 0.875


def test_single_samples_of_all_ranks_are_summarized():
    found = step_metrics([Share(METRICS, sample_stats={"length": [each]}) for each in (1.0, 3.0)], 1.0)
    assert (found["response/length_min"], found["response/length_max"], found["response/length_std"]) == (1, 3, 1)


def test_of_a_device_of_unknown_speed_there_is_no_share():
    found = step_metrics(shares((0.0, 3000.0)), 4.0)
    assert "mfu/step" not in found and "mfu/rollout" not in found and found["mfu/update"] == 1200 / 3000
    assert found["throughput/flop_per_s"] == 1700 / 4


def test_nothing_is_made_up_where_nothing_was_measured():
    found = step_metrics([Share(METRICS)], 4.0)
    assert not any(name.startswith(("memory/", "mfu/", "rollout/latency", "reward/")) for name in found)
    throughput = {"throughput/tokens_per_s": 25.0}
    assert {name: value for name, value in found.items() if name.startswith("throughput/")} == throughput
    # Servers compute for others; and what computes no model has no tokens of its own.
    calls = ("actor.sample", 0.0), ("advantage.grpo", 8.0)
    share = Share(
        METRICS,
        spans=[["call", name, 1.0] for name, _ in calls],
        costs=[["call", name, flops, 4.0, 0] for name, flops in calls],
    )
    found = step_metrics([share], 4.0)
    throughput["throughput/flop_per_s"] = 2.0
    assert {name: value for name, value in found.items() if name.startswith(("throughput/", "memory/"))} == throughput


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_gpus_are_known_by_their_whole_names(name: str, tflops: float | None):
    assert known_peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_a_cpu_is_measured_quickly_and_about_right(monkeypatch):
    torch.set_num_threads(1)
    one = np.full((512, 512), 0.5, np.float32)

    def check(measure_s):
        monkeypatch.setattr(meter, "_MEASURE_S", measure_s)
        began_s = time.process_time()
        found = peak_flops(torch.device("cpu"), torch.float32)
        assert time.process_time() - began_s < 1.0 + 10 * measure_s
        taken = []
        for _ in range(5):
            start_s = time.perf_counter()
            one @ one
            taken.append(time.perf_counter() - start_s)
        # Another library, on a machine that others use too.
        assert 0.1 < found / (2 * 512**3 / min(taken)) < 10

    with_more_time(check, meter._MEASURE_S, 2.0)


def test_a_meter_tells_the_peak_of_each_piece_of_work_and_what_it_computed():
    timeline = Timeline()
    timeline.meter = RankMeter(torch.device("cpu"))
    for name, num_bytes in (("large", 256 << 20), ("small", 1 << 20)):
        with timeline.span("call", name):
            add_work(3.0, 2.0)
            # Of the system itself: memory that this process has freed before may be taken again without a trace.
            with mmap.mmap(-1, num_bytes) as memory:
                for page in range(0, num_bytes, mmap.PAGESIZE):
                    memory[page] = 1
    with timeline.span("call", "small"):
        add_work(1.0, 0.5)
    with timeline.span("control", "not metered"):
        add_work(100.0, 100.0)
    large, small = timeline.costs
    assert large[:4] == ("call", "large", 3.0, 2.0) and small[:4] == ("call", "small", 4.0, 2.5)
    if large.peak_bytes:  # else this system does not tell
        assert 200 << 20 < large.peak_bytes - small.peak_bytes < 300 << 20
    timeline.reset()
    assert timeline.costs == []


def test_the_share_of_groups_that_teach_something_is_over_all_ranks():
    """Of three groups one lies on both ranks, and has different scores only there."""
    parts = [([7.0, 7.0, 8.0], [1.0, 1.0, 0.0]), ([8.0, 9.0, 9.0], [1.0, 0.0, 0.0])]
    each = [Share(METRICS, sample_stats={"prompt": prompts, "reward": scores}) for prompts, scores in parts]
    assert step_metrics(each, 1.0)["groups/kept_share"] == 1 / 3
    told = [share._replace(metrics={**METRICS, "groups/kept_share": 0.25}) for share in each]
    assert step_metrics(told, 1.0)["groups/kept_share"] == 0.25
    assert "groups/kept_share" not in step_metrics([Share(METRICS)], 1.0)


def test_what_is_no_number_on_one_rank_is_none_in_the_log():
    for ranks in ([1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]):
        assert math.isnan(merge_metrics({"kl/ref": each} for each in ranks)["kl/ref"])
    assert merge_metrics([{"a": 1.0, "b": -2.0}, {"a": 3.0}, {"a": 2.0}]) == {"a": 3.0, "b": -2.0}
