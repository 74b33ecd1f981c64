"""The timeline adds up what was measured."""

from __future__ import annotations

import pytest

from hybridflow.observe.timeline import Span, Timeline


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """A timeline whose clock ticks 1, 2, 4, 8, … seconds, so that a difference tells which two ticks it came from."""
    ticks = iter(2.0**i for i in range(20))
    monkeypatch.setattr("hybridflow.observe.timeline.perf_counter", lambda: next(ticks))
    return Timeline()


def test_spans_and_totals(timeline: Timeline):
    with timeline.span("rollout", "actor.sample"):
        pass
    with timeline.span("update", "actor.update"), timeline.span("move", "advantages"):
        pass
    with timeline.span("rollout", "actor.sample again"):
        pass
    # Ticks 1-2 (1 s), the move 8-16 (8 s) inside the update 4-32 (28 s), 64-128 (64 s).
    assert timeline.spans == [
        Span("rollout", "actor.sample", 1),
        Span("move", "advantages", 8),
        Span("update", "actor.update", 28),
        Span("rollout", "actor.sample again", 64),
    ]
    assert timeline.totals() == {"rollout": 65, "move": 8, "update": 28}


def test_a_body_that_raises_is_measured_and_raises(timeline: Timeline):
    with pytest.raises(KeyError), timeline.span("reward", "score"):
        raise KeyError
    assert timeline.totals() == {"reward": 1}


def test_reset_forgets(timeline: Timeline):
    with timeline.span("reward", "score"):
        pass
    timeline.reset()
    assert timeline.spans == [] and timeline.totals() == {}


def test_the_clock_is_in_seconds():
    from time import sleep

    timeline = Timeline()
    with timeline.span("sleep", "20 ms"):
        sleep(0.02)
    assert 0.02 <= timeline.totals()["sleep"] < 2
