"""The timeline's file is what trace viewers read, after each step, each kill and each start, and stays bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe import timeline_file
from hybridflow.observe.timeline import Span
from hybridflow.observe.timeline_file import RankSpan, TimelineFile, read_timeline

SAMPLE = Span("call", "actor.sample", 1.5, 1000.25)
MOVE = ["move", 'from "a"\nto b', 0.000002, 1002.000001]  # as a message leaves it


def open_file(run_dir: Path, num_ranks: int = 3) -> TimelineFile:
    return TimelineFile(run_dir, num_ranks=num_ranks, ranks_per_node=2)


def events(run_dir: Path, name: str = "timeline.json") -> list[dict[str, Any]]:
    """Strictly JSON: https://ui.perfetto.dev takes nothing less."""
    found = json.loads((run_dir / "trace" / name).read_text(), parse_constant=pytest.fail)
    assert isinstance(found, list)
    return found


def spans(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == "X"]


def test_each_span_is_a_complete_event_of_its_rank_and_node(tmp_path: Path):
    file = open_file(tmp_path)
    file.add(7, 1000.0, 2.5, [[SAMPLE], [], [MOVE, SAMPLE]])
    step, first, move, last = spans(events(tmp_path))
    # Microseconds. Ranks 0 and 1 are on node 0, rank 2 on node 1; pid 1 is that of the steps, tids count from 1.
    sample = {"name": "actor.sample", "cat": "call", "ph": "X", "ts": 1000250000, "dur": 1500000, "args": {"step": 7}}
    assert step == {**sample, "name": "step 7", "cat": "step", "ts": 1000000000, "dur": 2500000, "pid": 1, "tid": 1}
    assert first == {**sample, "pid": 2, "tid": 1}
    assert last == {**sample, "pid": 3, "tid": 3}
    assert move == {**last, "name": 'from "a"\nto b', "cat": "move", "ts": 1002000001, "dur": 2}


def test_nodes_and_ranks_have_names(tmp_path: Path):
    open_file(tmp_path)
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events(tmp_path)]
    assert names == [
        ("process_name", 1, 1, "steps"),
        ("process_name", 2, 1, "node 0"),
        ("process_name", 3, 1, "node 1"),
        ("thread_name", 2, 1, "rank 0"),
        ("thread_name", 2, 2, "rank 1"),
        ("thread_name", 3, 3, "rank 2"),
    ]


def test_a_later_start_adds_to_it(tmp_path: Path):
    open_file(tmp_path).add(1, 1000.0, 1.0, [[SAMPLE]] * 3)
    open_file(tmp_path, num_ranks=2).add(2, 2000.0, 1.0, [[SAMPLE]] * 2)
    assert [(e["args"]["step"], e["tid"]) for e in spans(events(tmp_path)) if e["cat"] == "call"] == [
        *((1, 1), (1, 2), (1, 3)),
        *((2, 1), (2, 2)),
    ]


def test_wherever_a_kill_cuts_it_the_next_start_mends_it(tmp_path: Path):
    open_file(tmp_path).add(1, 1000.0, 1.0, [[SAMPLE], [MOVE], []])
    path = tmp_path / "trace" / "timeline.json"
    whole, before = path.read_bytes(), events(tmp_path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        open_file(tmp_path)
        found = events(tmp_path)
        kept, names = found[:-6], found[-6:]
        assert names == before[:6], length  # the new start's
        assert kept == before[: len(kept)], length
        # All lines that are there whole, but the last, which may go on.
        assert len(kept) >= whole[:length].count(b"}}\n") + whole[:length].count(b"}},\n") - 1, length


def test_what_is_no_timeline_is_begun_anew(tmp_path: Path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "timeline.json").write_bytes(b"\xff\x00 garbage},\n more")
    open_file(tmp_path)
    assert len(events(tmp_path)) == 6


def test_it_takes_no_more_than_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_file, "LARGEST_BYTES", 2000)
    file = open_file(tmp_path)
    for step in range(1, 51):
        file.add(step, 1000.0 + step, 1.0, [[SAMPLE]] * 3)
    names = sorted(path.name for path in (tmp_path / "trace").iterdir())
    assert names == ["timeline-before.json", "timeline.json"]
    steps = [e["args"]["step"] for name in names for e in spans(events(tmp_path, name)) if e["cat"] == "step"]
    # The last ones, none missing.
    assert len(steps) > 2 and steps == list(range(51 - len(steps), 51))
    assert all((tmp_path / "trace" / name).stat().st_size < 3000 for name in names)
    assert events(tmp_path)[1]["args"]["name"] == "node 0"


def test_chosen_steps_are_read_from_both_files_and_a_repeated_one_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_file, "LARGEST_BYTES", 1500)
    file = open_file(tmp_path)
    for step in (1, 2, 3, 4):
        file.add(step, 1000.0 * step, 2.5, [[SAMPLE._replace(start_s=1000.0 * step + 0.25)], [], [MOVE]])
    # After a kill step 3 is made again.
    open_file(tmp_path).add(3, 9000.0, 1.0, [[], [SAMPLE._replace(start_s=9000.5)], []])
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["timeline-before.json", "timeline.json"]
    with (tmp_path / "trace/timeline.json").open("a") as cut:
        cut.write('{"name":"actor.sample","cat":"call","ts":9000600000,"du,"args":{"step":3}},\n')
    found = read_timeline(tmp_path, {2, 3, 7})
    assert found.keys() == {2, 3}
    assert found[2].seconds == 2.5 and found[2].spans[0] == RankSpan(0, "call", "actor.sample", 0.25, 1.5)
    assert [span.rank for span in found[2].spans] == [0, 2] and found[2].spans[1].name == MOVE[1]
    assert found[3] == (1.0, [RankSpan(1, "call", "actor.sample", 0.5, 1.5)])
    assert read_timeline(tmp_path / "elsewhere", {1}) == {}
