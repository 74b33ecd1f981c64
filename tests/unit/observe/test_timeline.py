"""The timeline adds up what was measured, and tells what is being done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybridflow.observe import activity
from hybridflow.observe.timeline import Span, Timeline


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """A timeline whose clock ticks 1, 2, 4, 8, … seconds, so that a difference tells which two ticks it came from.

    Its first tick, at which it is 1000 s in Unix time, belongs to the timeline itself.
    """
    ticks = iter(2.0**i for i in range(20))
    monkeypatch.setattr("hybridflow.observe.timeline.perf_counter", lambda: next(ticks))
    monkeypatch.setattr("hybridflow.observe.timeline.time", lambda: 1000.0)
    return Timeline()


def test_spans_and_totals(timeline: Timeline):
    with timeline.span("rollout", "actor.sample"):
        pass
    with timeline.span("update", "actor.update"), timeline.span("move", "advantages"):
        pass
    with timeline.span("rollout", "actor.sample again"):
        pass
    # Ticks 2-4 (2 s), the move 16-32 (16 s) inside the update 8-64 (56 s), 128-256 (128 s); tick 1 is 1000 s.
    assert timeline.spans == [
        Span("rollout", "actor.sample", 2, 1001),
        Span("move", "advantages", 16, 1015),
        Span("update", "actor.update", 56, 1007),
        Span("rollout", "actor.sample again", 128, 1127),
    ]
    assert timeline.totals() == {"rollout": 130, "move": 16, "update": 56}


def test_what_is_being_done_is_the_innermost(timeline: Timeline, monkeypatch: pytest.MonkeyPatch):
    clock = iter((50.0, 60.0))
    monkeypatch.setattr("time.time", lambda: next(clock))
    assert activity.now() in ("start", "the work between calls") and activity.since_s() is None
    with timeline.span("update", "actor.update"):
        assert (activity.now(), activity.since_s()) == ("actor.update", 50)
        with timeline.span("move", "advantages"):
            assert (activity.now(), activity.since_s()) == ("advantages (actor.update)", 60)
        assert (activity.now(), activity.since_s()) == ("actor.update", 50)
    assert activity.since_s() is None


def test_a_span_that_is_open_over_a_reset_keeps_its_start(timeline: Timeline):
    with timeline.span("call", "finish_step"):  # from tick 2
        timeline.reset()  # tick 4 is now 1000 s
    assert timeline.spans == [Span("call", "finish_step", 6, 998)]


def test_each_span_is_marked(timeline: Timeline):
    marks: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        marks.append(f"begin {name}")
        yield
        marks.append(f"end {name}")

    timeline.mark = mark
    with timeline.span("call", "outer"), timeline.span("call", "inner"):
        # One that is open stays as it began.
        timeline.mark = None
    assert marks == ["begin outer", "begin inner", "end inner", "end outer"]


def test_a_body_that_raises_is_measured_and_raises(timeline: Timeline):
    with pytest.raises(KeyError), timeline.span("reward", "score"):
        raise KeyError
    assert timeline.totals() == {"reward": 2} and activity.since_s() is None


def test_reset_forgets(timeline: Timeline):
    with timeline.span("reward", "score"):
        pass
    timeline.reset()
    assert timeline.spans == [] and timeline.totals() == {}


def test_the_clocks_are_in_seconds():
    from time import sleep, time

    before = time()
    timeline = Timeline()
    with timeline.span("sleep", "20 ms"):
        sleep(0.02)
    assert 0.02 <= timeline.totals()["sleep"] < 60
    assert before - 1e-3 <= timeline.spans[0].start_s <= time() - 0.02 + 1e-3
