"""A spool: each row once and in order, whenever it is killed; and what is said when nothing comes."""

import contextlib
import itertools
import json
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig, SpoolConfig
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.queues import open_queue
from hybridflow.data.shaping import Shape
from hybridflow.data.spool import SpoolTaker, spooled
from hybridflow.errors import ConfigError, DataError
from hybridflow.recipe.load import recipe_from_dict
from tests.support.queues import Killed, kill_at, recipe_values
from tests.support.ranks import run_ranks

SHAPE = Shape(data=DataConfig(spool=SpoolConfig(path="spool"), held_out="none"), kind="problems")


def put(spool, name, *numbers, answer="answer"):
    """As another program does: written aside, then renamed."""
    aside = spool / f".{name}.tmp"
    aside.write_text("".join(json.dumps({"prompt": f"{number}", answer: "a"}) + "\n" for number in numbers))
    aside.rename(spool / name)


def taker(spool, folder, shape=SHAPE):
    return SpoolTaker(spool, folder, shape, 0.01, lambda text: None)


def drawn(folder, spool, count, deadline_s=60.0):
    rows = spooled(folder, spool, deadline_s)
    return [rows.stored(rows.place(prompt_index)).row["prompt"] for prompt_index in range(count)]


def test_files_are_taken_in_the_order_of_their_names_with_their_places(tmp_path):
    spool, folder = tmp_path / "spool", tmp_path / "run"
    spool.mkdir()
    put(spool, "b.jsonl", 3, 4)
    put(spool, "a.jsonl", 1, 2)
    for name in ("c.jsonl.part", ".c.jsonl"):
        (spool / name).write_text("{")
    one = taker(spool, folder)
    assert one.take() == 2 and one.take() == 0
    put(spool, "a.jsonl", 5)
    assert one.take() == 1, "another file of that name"
    assert drawn(folder, spool, 5) == ["1", "2", "3", "4", "5"]
    assert spooled(folder, spool, 1.0).stored((0, 3)).place == f"{spool}/b.jsonl:2"
    assert sorted(path.name for path in (spool / "taken").iterdir()) == ["a.jsonl", "b.jsonl"]
    first = json.loads((folder / "journal.jsonl").read_text().splitlines()[0])
    assert spooled(folder, spool, 1.0).sha256 == first["token"] and len(first["token"]) == 32
    (folder / "part-00001.rows").write_text("")
    with pytest.raises(DataError, match=r"part-00001: row 2 cannot be read: .*; restore it from a copy"):
        drawn(folder, spool, 4)


KILLS = ("none", "rows", "journal", "torn", "move")


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(KILLS)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_wherever_it_is_killed_each_row_comes_once_and_in_order(turns):
    """Each turn puts a file with some rows there, begins anew and takes, until it is killed at one of its places."""
    with tempfile.TemporaryDirectory() as made:
        spool, folder = Path(made, "spool"), Path(made, "run")
        spool.mkdir()
        numbers = itertools.count()
        seen: list[str] = []
        for turn, (count, kill) in enumerate(turns):
            put(spool, f"{turn:03d}.jsonl", *itertools.islice(numbers, count))
            with pytest.MonkeyPatch.context() as patch:
                kill_at(patch, kill)
                one = taker(spool, folder)
                with contextlib.suppress(Killed):
                    one.take()
            if kill == "torn":
                with (folder / "journal.jsonl").open("ab") as file:
                    file.write(b'{"file": ["x')
            # What was drawn once stays what it is.
            known = sum(entry["num_rows"] for entry in taker(spool, folder)._journal.entries)
            found = drawn(folder, spool, known)
            assert found[: len(seen)] == seen
            seen = found
        taker(spool, folder).take()
        total = next(numbers)
        assert drawn(folder, spool, total) == [str(number) for number in range(total)]
        assert not list(spool.glob("*.jsonl"))


def test_a_row_is_waited_for_and_then_missed(tmp_path):
    spool, folder = tmp_path / "spool", tmp_path / "run"
    spool.mkdir()
    one = taker(spool, folder)
    one.start()
    late = threading.Timer(0.5, put, (spool, "a.jsonl", 1))
    late.start()
    assert drawn(folder, spool, 1) == ["1"]
    begin_s = time.monotonic()
    with pytest.raises(DataError, match=r"prompt 1 did not come within data\.spool\.deadline_s=0\.5; 1 rows were"):
        drawn(folder, spool, 2, deadline_s=0.5)
    assert 0.5 <= time.monotonic() - begin_s < 50
    one.stop()


def test_a_bad_row_stops_the_job_or_is_skipped(tmp_path):
    spool, folder = tmp_path / "spool", tmp_path / "run"
    spool.mkdir()
    put(spool, "a.jsonl", 1)
    put(spool, "b.jsonl", 2, answer="anwser")
    one = taker(spool, folder)
    one.start()
    assert drawn(folder, spool, 1) == ["1"]
    with pytest.raises(DataError, match=r"b\.jsonl:1: no field 'answer'.*mend the file, and resume"):
        drawn(folder, spool, 2)
    one.stop()
    assert [path.name for path in spool.glob("*.jsonl")] == ["b.jsonl"]
    said = []
    skipping = replace(SHAPE, data=replace(SHAPE.data, on_bad_row="skip"))
    again = SpoolTaker(spool, folder, skipping, 0.01, said.append)
    put(spool, "c.jsonl", 3)
    again.take()
    assert drawn(folder, spool, 2) == ["1", "3"] and "1 bad rows skipped" in said[0]


def test_a_spool_belongs_to_one_run(tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    taker(spool, tmp_path / "one")
    taker(spool, tmp_path / "one")
    with pytest.raises(DataError, match=r"one' takes from it; give each run a directory of its own"):
        taker(spool, tmp_path / "two")
    with pytest.raises(DataError, match=r"none'.* cannot be used: .*No such file"):
        taker(tmp_path / "none", tmp_path / "one")


def prompts_of(world, spool, folder, tokenizer):
    """Each rank reads its half of the prompt indices while the files come."""
    world.make_groups([tuple(range(world.size))])
    from hybridflow.data.tokenizer import open_tokenizer

    everyone = world.coordinator(tuple(range(world.size)))
    settings_ = SpoolConfig(path=spool, deadline_s=60.0, poll_s=0.05)
    problems = open_queue(settings_, SHAPE, open_tokenizer(tokenizer), Path(folder), everyone=everyone)
    if world.rank == 1:
        for number in range(4):
            put(Path(spool), f"{number}.jsonl", 2 * number, 2 * number + 1)
            time.sleep(0.1)
    return problems.sha256, [problems.example(prompt_index).prompt for prompt_index in range(world.rank, 8, world.size)]


def test_ranks_wait_for_what_the_lowest_takes(tmp_path):
    (tmp_path / "spool").mkdir()
    train_tokenizer(["0123456789"], path=tmp_path / "tokenizer.model", vocab_size=64)
    found = run_ranks(prompts_of, 2, str(tmp_path / "spool"), str(tmp_path / "rows"), str(tmp_path / "tokenizer.model"))
    assert found[0][0] == found[1][0]
    assert [each[1] for each in found] == [["0", "2", "4", "6"], ["1", "3", "5", "7"]]


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("data", "spool", {"path": "s", "deadline_s": 1800}, "lower the first or raise the second"),
        ("data", "file_format", "parquet", "data.spool takes JSONL"),
        ("tokenizer", "path", None, "data.spool has no text yet"),
    ],
)
def test_settings_that_do_not_go_with_a_spool(section, key, value, says):
    values = recipe_values(spool={"path": "s"})
    values[section][key] = value
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(values)
    assert says in str(caught.value)
