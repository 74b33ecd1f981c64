"""The pass over the data: what is stored is what was read, however the work is shared; bad rows as the policy says."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from hybridflow.api.feed import GivenProblems
from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.data import prepare as prepare_module
from hybridflow.data import readers
from hybridflow.data.order import permuted
from hybridflow.data.part import Given, ReadRows, make_part
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.prepare import prepare
from hybridflow.data.problems import StoredProblems, Stores, example_in, open_problems
from hybridflow.data.prompts import encode_prompt, encode_solution
from hybridflow.data.rows import HERE
from hybridflow.data.shaping import Shape
from hybridflow.errors import DataError, WriteError
from hybridflow.exit_status import FAILURE, exit_status
from tests.support.disks import no_room
from tests.support.ranks import run_ranks
from tests.support.row_files import ENDINGS, examples_of_file, write_rows
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
DATA = DataConfig(train="rows", held_out="none")
SHAPE = Shape(data=DATA, kind="problems")
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "level": number % 3} for number in range(60)]


def store_of(path, folder, shape=SHAPE, **options):
    said = []
    return prepare(DataSourceConfig(path=str(path)), shape, folder, say=said.append, **options), said


def small_pieces(monkeypatch, size=100):
    monkeypatch.setattr(readers, "_PIECE_BYTES", size)
    monkeypatch.setattr(readers, "_PIECE_ROWS", max(1, size // 20))


@pytest.mark.parametrize("file_format", ENDINGS)
def test_a_store_holds_the_rows_of_the_file_in_its_order(tmp_path, file_format):
    path = write_rows(tmp_path / "rows", ROWS, file_format)
    store, _ = store_of(path, tmp_path / "stores")
    assert [store[number].row for number in range(len(store))] == ROWS
    assert tuple(example_in(store[number], SHAPE) for number in range(60)) == examples_of_file(path, DATA)
    assert sorted(each.name for each in (tmp_path / "stores").iterdir()) == [store.folder.name], "nothing is left over"


def test_of_a_small_file_the_hash_and_the_order_are_those_of_the_rows_in_memory(tmp_path):
    """So that checkpoints go on, which were written when rows were kept in memory."""
    path = write_rows(tmp_path / "rows", [{**row, "solution": "7"} for row in ROWS], "jsonl")
    tokenizer = train_tokenizer(path.read_text().splitlines(), path=tmp_path / "tokenizer.model", vocab_size=64)
    shape = replace(SHAPE, tokenizer=str(tokenizer.path), max_new_tokens=3, max_context=40, is_imitating=True)
    examples = examples_of_file(path, DATA)
    given = GivenProblems(examples=examples, prompts=(), seed=5)
    problems = open_problems([DataSourceConfig(path=str(path))], shape, tokenizer, tmp_path / "stores", seed=5)
    assert problems.sha256 == given.sha256
    prompts = [encode_prompt(each, tokenizer, max_new_tokens=3, max_context=40) for each in examples]
    solutions = [encode_solution(each, tokenizer, max_context=40) for each in examples]
    for prompt_index in range(150):
        row = permuted(prompt_index % 60, size=60, key=(5, prompt_index // 60))
        assert problems.example(prompt_index) == examples[row] and problems.prompt(prompt_index) == prompts[row]
        assert problems.solution(prompt_index) == solutions[row] and problems.responses(prompt_index) == ()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_store_does_not_depend_on_who_makes_it(tmp_path, monkeypatch, num_workers):
    small_pieces(monkeypatch)
    path = write_rows(tmp_path / "rows", ROWS, "jsonl")
    store, _ = store_of(path, tmp_path / "stores", num_workers=num_workers)
    assert [store[number].row for number in range(60)] == ROWS
    assert [store[number].place for number in range(60)] == [f"{path}:{number + 1}" for number in range(60)]
    assert len(store.facts["parts"]) == num_workers
    # Of several pieces, that of theirs; by hand, from the lines that begin in each stretch of 100 bytes.
    starts = [0, *(end for end in _line_ends(path))][:-1]
    pieces = [[ROWS[row] for row, start in enumerate(starts) if start // 100 == number] for number in range(99)]
    digests = [
        hashlib.sha256(json.dumps([[row["prompt"], row["answer"], None] for row in piece]).encode()).hexdigest()
        for piece in pieces
        if piece
    ]
    assert store.sha256 == hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _line_ends(path):
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        yield end


def prepared_by(world, path, folder, num_workers):
    """Prepare with all ranks, and tell which pieces this rank has read."""
    world.make_groups([tuple(range(world.size))])
    readers._PIECE_BYTES = 100
    store = prepare(
        DataSourceConfig(path=path),
        SHAPE,
        Path(folder),
        everyone=world.coordinator(tuple(range(world.size))),
        num_workers=num_workers,
        say=lambda text: None,
    )
    return store.sha256, len(store), [store[row].row["prompt"] for row in range(len(store))], store.folder.name


def test_ranks_share_the_work_and_have_one_store(tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    path = write_rows(tmp_path / "rows", ROWS, "jsonl")
    alone, _ = store_of(path, tmp_path / "alone")
    expected = alone.sha256, 60, [row["prompt"] for row in ROWS], alone.folder.name
    for size, num_workers in ((3, 1), (2, 2)):
        folder = tmp_path / f"{size}"
        assert run_ranks(prepared_by, size, str(path), str(folder), num_workers) == [expected] * size
        orders = json.loads((folder / alone.folder.name / "manifest.json").read_text())["parts"]
        assert sum(part["num_rows"] for part in orders) == 60 and len(orders) == size * num_workers


def failing(world, path, folder):
    world.make_groups([tuple(range(world.size))])
    readers._PIECE_BYTES = 100
    try:
        prepare(DataSourceConfig(path=path), SHAPE, Path(folder), everyone=world.coordinator(tuple(range(world.size))))
    except DataError as error:
        return str(error)


def test_all_ranks_have_the_same_error(tmp_path):
    path = write_rows(tmp_path / "rows", ROWS, "jsonl")
    with path.open("a") as file:
        file.write('{"prompt": "no answer"}\n')
    found = run_ranks(failing, 3, str(path), str(tmp_path / "stores"))
    assert len(set(found)) == 1 and f"{path}:61: no field 'answer'" in found[0]
    assert list((tmp_path / "stores").iterdir()) == []
    found = run_ranks(failing, 2, str(tmp_path / "none.jsonl"), str(tmp_path / "stores"))
    assert len(set(found)) == 1 and "none.jsonl: cannot be read: No such file" in found[0]


def test_bad_rows_are_skipped_and_told_of(tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    lines = [json.dumps(row) for row in ROWS]
    lines[7], lines[20], lines[21], lines[59] = "{", '{"prompt": "1"}', "", '{"prompt": "2"}'
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"rows\.jsonl:8: not valid JSON.*; data\.on_bad_row=skip leaves such"):
        store_of(path, tmp_path / "stores")
    first = tmp_path / "first.jsonl"
    first.write_text('{"question": "1"}\n')
    with pytest.raises(DataError, match="set data.prompt_field to its name here$"):
        store_of(first, tmp_path / "stores")
    shape = replace(SHAPE, data=replace(DATA, on_bad_row="skip"))
    kept = [(f"{path}:{number + 1}", row) for number, row in enumerate(ROWS) if number not in (7, 20, 21, 59)]
    for num_workers in (1, 4):
        store, said = store_of(path, tmp_path / f"{num_workers}", shape, num_workers=num_workers)
        assert [(store[row].place, store[row].row) for row in range(len(store))] == kept
        (line,) = said
        assert "3 bad rows skipped" in line and "2 x no field 'answer'" in line and "rows.jsonl:8: not valid" in line
    assert tuple(each.place for each in _examples(path, shape)) == tuple(place for place, _ in kept)


def _examples(path, shape):
    return examples_of_file(path, shape.data)


def test_of_many_bad_rows_a_part_keeps_few_messages_and_few_reasons(tmp_path):
    """Reasons that differ in their numbers alone are one; the 21st and those after it are counted together."""
    reasons = [f"of kind {chr(97 + number)}" for number in range(24)]
    errors = [DataError(f"{HERE}: {reason}; mend it") for reason in reasons]
    errors += [DataError(f"{HERE}: found {number} of {7 * number}; mend it") for number in (3, 45)]
    shape = replace(SHAPE, data=replace(DATA, on_bad_row="skip"))
    told = make_part(tmp_path, 0, shape, [ReadRows(errors[-2:] + errors, lambda row: f"given: row {row}")])
    assert told["shown"] == [
        "given: row 0: found 3 of 21; mend it",
        "given: row 1: found 45 of 315; mend it",
        *(f"given: row {row}: {reasons[row - 2]}; mend it" for row in (2, 3, 4)),
    ]
    assert told["bad"] == {"found N of N": 4, **dict.fromkeys(reasons[:19], 1), "other reasons": 5}
    assert told["num_rows"] == 0 and told["pieces"][0]["num_read"] == 28


def test_where_no_row_is_left_there_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n[\n')
    shape = replace(SHAPE, data=replace(DATA, on_bad_row="skip"))
    with pytest.raises(
        DataError, match=r"none of its rows can be used, 2 are bad; the first: .*rows\.jsonl:1: no field"
    ):
        store_of(path, tmp_path / "stores", shape)
    assert list((tmp_path / "stores").iterdir()) == []


def test_long_prompts_are_bad_rows_or_left_out_if_asked(tmp_path):
    path = write_rows(tmp_path / "rows", [*ROWS, {**ROWS[0], "prompt": "1+1+1+1+1="}], "jsonl")
    tokenizer = train_tokenizer(path.read_text().splitlines(), path=tmp_path / "tokenizer.model", vocab_size=40)
    limits = replace(SHAPE, tokenizer=str(tokenizer.path), max_new_tokens=4, max_context=14)
    with pytest.raises(DataError, match=r"rows\.jsonl:61: prompt of 11 tokens.*exceeds model\.max_context=14"):
        store_of(path, tmp_path / "stores", limits)
    asked = replace(limits, data=replace(DATA, max_prompt_tokens=10))
    store, said = store_of(path, tmp_path / "stores", asked)
    assert len(store) == 60 and "1 rows left out, whose prompts are longer" in said[0]
    with pytest.raises(DataError, match=r"the prompts of all its 61 rows are longer than data\.max_prompt_tokens=2"):
        store_of(path, tmp_path / "stores", replace(limits, data=replace(DATA, max_prompt_tokens=2)))


@pytest.mark.parametrize("file_format", ["jsonl", "datasets"])
def test_a_store_is_found_again_until_something_changes(tmp_path, file_format):
    path = write_rows(tmp_path / "rows", ROWS, file_format)
    first, _ = store_of(path, tmp_path / "stores")
    before = (first.folder / "manifest.json").stat().st_mtime_ns
    again, _ = store_of(path, tmp_path / "stores")
    assert again.folder == first.folder and (first.folder / "manifest.json").stat().st_mtime_ns == before
    assert store_of(path, tmp_path / "stores", replace(SHAPE, template="x"))[0].folder != first.folder
    folders = {first.folder}
    # What counts of a tokenizer is what it is, not where; and nothing of how the work is shared.
    for name, size in (("one", 64), ("other", 48), ("same", 64)):
        tokenizer = train_tokenizer(map(str, ROWS), path=tmp_path / name / "tokenizer.model", vocab_size=size)
        data = replace(DATA, num_workers=size)
        shape = replace(SHAPE, data=data, tokenizer=str(tokenizer.path), max_new_tokens=3, max_context=40)
        folders.add(store_of(path, tmp_path / "stores", shape)[0].folder)
    assert len(folders) == 3
    # In a directory the same files are written anew.
    write_rows(tmp_path / "rows", ROWS + ROWS, file_format)
    changed, _ = store_of(path, tmp_path / "stores")
    assert changed.folder != first.folder and len(changed) == 120


def test_rows_that_a_program_has(tmp_path):
    store = prepare(Given(ROWS, "mine"), SHAPE, tmp_path / "stores")
    assert [store[number].row for number in range(60)] == ROWS and store[3].place == "mine: row 3"
    assert store.sha256 == store_of(write_rows(tmp_path / "rows", ROWS, "jsonl"), tmp_path / "stores")[0].sha256
    with pytest.raises(DataError, match=r"mine: row 1: expected a row of named fields, found int 7"):
        prepare(Given([ROWS[0], 7], "mine"), SHAPE, tmp_path / "stores")

    def broken():
        yield ROWS[0]
        raise OSError("gone")

    with pytest.raises(DataError, match="mine: cannot be read: gone; look at what"):
        prepare(Given(broken(), "mine"), SHAPE, tmp_path / "stores")


@pytest.mark.parametrize("make", [list, iter], ids=["list", "iterator"])
def test_rows_that_a_program_has_are_found_again(tmp_path, make):
    """Those that can be read but once are written, and dropped where a store has them."""
    stores = tmp_path / "stores"

    def store_of_rows(rows, shape=SHAPE):
        return prepare(Given(make(rows), "mine"), shape, stores)

    first = store_of_rows(ROWS)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    again = store_of_rows([dict(row) for row in ROWS])
    assert again.folder == first.folder and [*stores.iterdir()] == [first.folder]
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    others = [store_of_rows(ROWS[::-1]), store_of_rows(ROWS[:-1]), store_of_rows([{**ROWS[0], "level": 5}, *ROWS[1:]])]
    others += [store_of_rows(ROWS, replace(SHAPE, template="x")), prepare(Given(make(ROWS), "yours"), SHAPE, stores)]
    folders = {each.folder for each in (first, *others)}
    assert len(folders) == 6 and {*stores.iterdir()} == folders
    assert others[2][0].row["level"] == 5 and others[4][3].place == "yours: row 3"


def test_a_list_that_is_there_already_is_not_written(tmp_path, monkeypatch):
    store = prepare(Given(ROWS, "mine"), SHAPE, tmp_path / "stores")
    monkeypatch.delattr(prepare_module, "_work")
    assert prepare(Given(tuple(ROWS), "mine"), SHAPE, tmp_path / "stores").folder == store.folder
    # What is wrong with them is told by who writes them.
    with pytest.raises(NameError, match="_work"):
        prepare(Given([ROWS[0], 7, {"prompt": object()}], "mine"), SHAPE, tmp_path / "stores")


@pytest.mark.parametrize("spoil", ["cut", "manifest", "lost"])
def test_a_damaged_store_is_told_of(tmp_path, spoil):
    path = write_rows(tmp_path / "rows", ROWS, "jsonl")
    store, _ = store_of(path, tmp_path / "stores")
    part = store.folder / "part-00000.rows"
    if spoil == "cut":
        part.write_bytes(part.read_bytes()[:-5])
    elif spoil == "manifest":
        (store.folder / "manifest.json").write_text("{}")
    else:
        part.unlink()
    with pytest.raises(DataError, match=r"is no complete store of rows.*remove the directory"):
        store_of(path, tmp_path / "stores")


def test_a_process_that_dies_is_told_of(tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    path = write_rows(tmp_path / "rows", ROWS, "jsonl")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(DataError, match=r"part-0000\d: the process that prepares it died"):
        store_of(path, tmp_path / "stores", num_workers=2)


def test_processes_that_do_nothing_are_ended_and_told_of(tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    path, idle = write_rows(tmp_path / "rows", ROWS, "jsonl"), tmp_path / "python"
    idle.write_text("#!/bin/sh\nexec sleep 600\n")
    idle.chmod(0o755)
    begun = []

    class Kept(subprocess.Popen):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            begun.append(self)

    monkeypatch.setattr(sys, "executable", str(idle))
    monkeypatch.setattr(subprocess, "Popen", Kept)
    monkeypatch.setattr(prepare_module, "_STALLED_S", 0.1)
    with pytest.raises(DataError, match=r"no row in 0\.1 s; look at the file system"):
        store_of(path, tmp_path / "stores", num_workers=2)
    assert list((tmp_path / "stores").iterdir()) == []
    assert [(each.returncode, each.stdin.closed) for each in begun] == [(-signal.SIGKILL, True)] * 2


def test_a_file_that_changes_while_it_is_read_is_told_of(tmp_path, monkeypatch):
    path, work = write_rows(tmp_path / "rows", ROWS, "jsonl"), prepare_module._work

    def changing(*args):
        work(*args)
        with path.open("a") as file:
            file.write(json.dumps(ROWS[0]) + "\n")

    monkeypatch.setattr(prepare_module, "_work", changing)
    with pytest.raises(DataError, match=r"rows\.jsonl: was changed while it was read; let nothing write there"):
        store_of(path, tmp_path / "stores")
    assert list((tmp_path / "stores").iterdir()) == []


KILLED = """
import json, sys
from pathlib import Path
from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.data.part import Given
from hybridflow.data.prepare import prepare
from hybridflow.data.shaping import Shape
source = DataSourceConfig(path=sys.argv[1])
if sys.argv[3] == "memory":
    source = Given([json.loads(line) for line in open(sys.argv[1])], "mine")
prepare(source, Shape(data=DataConfig(train="rows", held_out="none"), kind="problems"),
        Path(sys.argv[2]), num_workers=2)
"""


@pytest.mark.parametrize("source", ["file", "memory"])
def test_a_pass_that_was_killed_leaves_no_store_and_the_next_makes_it(tmp_path, source):
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(ROWS[number % 60]) + "\n" for number in range(20_000))
    # Where this process gets no time on a core, the pass may be over before it is killed.
    for attempt in range(5):
        stores = tmp_path / f"stores-{attempt}"
        killed = subprocess.Popen([sys.executable, "-c", KILLED, str(path), str(stores), source], cwd=ROOT)
        wait_until(lambda stores=stores: list(stores.glob(".*.tmp/*.places")) or list(stores.glob("*/manifest.json")))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        if not list(stores.glob("*/manifest.json")):
            break
    assert not list(stores.glob("*/manifest.json"))
    if source == "file":
        store, _ = store_of(path, stores)
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        store = prepare(Given(rows, "mine"), SHAPE, stores)
    assert len(store) == 20_000


def test_leftovers_are_removed_once_nobody_has_written_to_them_for_an_hour(tmp_path):
    path, stores = write_rows(tmp_path / "rows", ROWS, "jsonl"), tmp_path / "stores"
    # Minutes since the folder, and each file in it, was written.
    for name, ages in (("empty", [61]), ("old", [70, 65, 61]), ("new", [59]), ("busy", [70, 65, 1])):
        aside = stores / f".{name}.tmp"
        aside.mkdir(parents=True)
        files = [aside / f"part-{number}.rows" for number in range(len(ages) - 1)]
        for file in files:
            file.touch()
        for each, age in zip((aside, *files), ages, strict=True):
            os.utime(each, (time.time() - 60 * age,) * 2)
    store, _ = store_of(path, stores)
    assert {each.name for each in stores.iterdir()} == {".new.tmp", ".busy.tmp", store.folder.name}


def test_small_files_stay_in_memory_and_large_ones_do_not(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows", ROWS, "jsonl")
    tokenizer = train_tokenizer(path.read_text().splitlines(), path=tmp_path / "tokenizer.model", vocab_size=64)
    problems = open_problems([DataSourceConfig(path=str(path))], SHAPE, tokenizer, tmp_path / "stores", seed=5)
    read = []
    (store,) = problems._rows._stores
    monkeypatch.setattr(type(store), "__getitem__", _counted(type(store).__getitem__, read))
    for prompt_index in [*range(120)]:
        problems.prompt(prompt_index)
    assert len(read) == 60
    monkeypatch.setattr("hybridflow.data.problems._KEPT_BYTES", 8000)
    again = StoredProblems(Stores([store], [None], 5), SHAPE, tokenizer)
    read.clear()
    for prompt_index in range(120):
        assert again.prompt(prompt_index) == problems.prompt(prompt_index)
    assert len(read) > 100 and again._kept_bytes <= 8000


def _counted(inner, read):
    def counted(self, number):
        read.append(number)
        return inner(self, number)

    return counted


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_full_disk_is_told_as_one(tmp_path, monkeypatch, num_workers):
    small_pieces(monkeypatch, 4000)
    path = write_rows(tmp_path / "rows", ROWS * 20, "jsonl")
    with (
        no_room(12_000),
        pytest.raises(WriteError, match="cannot be written: .*File too large; make room there, or set data.cache_dir"),
    ):
        store_of(path, tmp_path / "stores", num_workers=num_workers)
    assert list((tmp_path / "stores").iterdir()) == []


STALE = """#!{python}
import errno, sys
from pathlib import Path
from hybridflow.data import part
replace_file = part.replace_file
def stale(path, content):
    if path.suffix == ".json":
        raise OSError(errno.ESTALE, "Stale file handle", str(path))
    replace_file(path, content)
part.replace_file = stale
sys.exit(part._work_here(Path(sys.argv[-2]), int(sys.argv[-1])))
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_file_server_that_is_away_ends_with_the_status_of_what_may_pass(tmp_path, monkeypatch, num_workers):
    small_pieces(monkeypatch, 4000)
    if num_workers == 1:
        refusal = OSError(errno.ESTALE, "Stale file handle")
        monkeypatch.setattr("hybridflow.data.part.replace_file", Mock(side_effect=refusal))
    else:
        stale = tmp_path / "python"
        stale.write_text(STALE.format(python=sys.executable))
        stale.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(stale))
    path = write_rows(tmp_path / "rows", ROWS * 20, "jsonl")
    with pytest.raises(WriteError, match="Stale file handle; start again once the file system") as caught:
        store_of(path, tmp_path / "stores", num_workers=num_workers)
    assert exit_status(caught.value) == FAILURE
