"""The benchmark of double buffering: its arithmetic by hand, and a run of it on two ranks."""

import json

import bench_async
import pytest


def event(kind, name, rank, step, seconds):
    return {"cat": kind, "name": name, "tid": rank + 1, "dur": seconds * 1e6, "args": {"step": step}}


def test_times_are_those_of_the_busiest_rank_and_medians_over_the_steps():
    events = [{"name": "thread_name", "ph": "M", "args": {"name": "rank 0"}}]
    for step, longer in ((1, 100.0), (2, 0.0), (3, 1.0), (4, 0.5), (5, 100.0)):
        events += [
            event("step", f"step {step}", 0, step, 6.0 + longer),
            event("call", "actor.log_probs", 0, step, 1.0),
            event("call", "actor.update", 0, step, 3.0 + longer),
            event("call", "actor.update", 1, step, 3.5),
            event("call", "trainer.finish_step", 1, step, 50.0),
            event("phase", "phase actor rollout", 0, step, 50.0),
            event("call", "actor.sample", 2, step, 2.0),
            event("call", "reward.score", 2, step, 0.5),
            event("call", "actor.sample", 3, step, 2.25),
            event("call", "buffer.take", 3, step, 50.0),
        ]
    # Steps 2 to 4: updates of 4, 5 and 4.5 s on rank 0, rollouts of 2.5 s on rank 2.
    times = bench_async.times_of(events, range(2, 5))
    assert times == (6.5, 2.5, 4.5) and times.ratio == pytest.approx(6.5 / 4.5)
    assert "6.500" in bench_async.table({"1 ahead": times}) and "1.44" in bench_async.table({"1 ahead": times})


@pytest.mark.slow
def test_it_measures_both_runs_and_refuses_a_recipe_that_does_not_work_ahead(tmp_path, capsys):
    tiny = [
        *("cluster.ranks=2", "actor.rollout_ranks=[1]", "actor.update={}", "actor.rollout={}", "model.hidden_size=32"),
        *("trainer.global_batch_size=16", "trainer.mini_batch_size=8", "data.arithmetic.num_train=64"),
        *("model.max_context=16", "rollout.max_new_tokens=4", "rollout.min_new_tokens=4"),
    ]
    code = bench_async.main(["--steps", "4", "--json", str(tmp_path / "found.json"), "--override", *tiny])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["one after the other", "1 ahead"] and "of rollout and update: " in shown.out
    for times in found.values():
        assert 0 < max(times["rollout_s"], times["update_s"]) <= times["step_s"]
        assert times["ratio"] == pytest.approx(times["step_s"] / max(times["rollout_s"], times["update_s"]))
    assert bench_async.main(["--recipe", "grpo"]) == 2
    assert "trainer.max_staleness=0" in capsys.readouterr().err
