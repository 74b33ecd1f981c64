"""The engine of conversions: what is written, what a kill leaves, what several ranks do, what is refused."""

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridflow.checkpoint import tensor_file
from hybridflow.checkpoint.convert import engine
from hybridflow.checkpoint.convert import write as convert_write
from hybridflow.checkpoint.convert.engine import Place, deal
from hybridflow.checkpoint.convert.journal import FILES, ConversionJournal, Part, part_folder, read_journals
from hybridflow.checkpoint.convert.ranks import FOLDER, Ranks
from hybridflow.checkpoint.formats.torch_archive import ArchivesWriter
from hybridflow.checkpoint.tensor_file import TensorFileWriter, cast
from hybridflow.errors import CheckpointError, ConfigError, WriteError
from hybridflow.observe.files import replace_file
from tests.support.convert_doubles import PEER_FAILED, fork, make_tensors, run_plain, wait_for
from tests.support.waiting import with_more_time

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_tensor_at_a_time(monkeypatch):
    """The tensors of these tests are small, and stand for such as are not written several at a time."""
    monkeypatch.setattr(convert_write, "_FLYING_BYTES", 0)


@pytest.fixture
def source(tmp_path):
    make_tensors(tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def check(source: Path, out: Path, num_files: int = 2) -> None:
    """The files hold the source's rows, and nothing of the conversion is left."""
    files = [load_file(out / f"rows-{index}.safetensors") for index in range(num_files)]
    for name, values in load_file(source).items():
        assert torch.equal(torch.cat([file[name] for file in files]), values), name
    assert {path.name for path in out.iterdir()} == {f"rows-{i}.safetensors" for i in range(num_files)} | {
        "hashes.json"
    }
    hashes = json.loads((out / "hashes.json").read_text())
    for index, file in enumerate(files):
        for name, values in file.items():
            assert hashes[f"rows-{index}.safetensors"][name] == hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert not part_folder(out).exists()


def test_parts_that_another_user_has_prepared_are_refused(source, tmp_path, monkeypatch):
    """In a directory that all may write to: the plan of this conversion, and a link to a file of this user."""
    out, victim = tmp_path / "shared/out", tmp_path / "victim"
    victim.write_text("precious")
    out.parent.mkdir(mode=0o777)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_complete", lambda job: (_ for _ in ()).throw(CheckpointError("ended")))
        with pytest.raises(CheckpointError, match="ended"):
            run_plain(source, out)
    folder = part_folder(out)
    assert folder.stat().st_mode & 0o777 == 0o700
    file = folder / FILES / "rows-0.safetensors"
    file.unlink()
    (folder / "journal-00000.jsonl").unlink()
    file.symlink_to(victim)
    with pytest.raises(WriteError, match=r"rows-0\.safetensors: is a link, and hybridflow has made none there"):
        run_plain(source, out)
    file.unlink()
    folder.chmod(0o777)
    with pytest.raises(WriteError, match=r"out\.part: other users may write there \(mode 777\); remove it"):
        run_plain(source, out)
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(WriteError, match=r"out\.part: belongs to user 65534, not to user 0"):
            run_plain(source, out)
        os.chown(folder, 0, 0)
    assert victim.read_text() == "precious"
    run_plain(source, out)
    check(source, out)


def test_a_file_is_not_written_through_a_link(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "rows.safetensors"
    victim.write_text("precious")
    link.symlink_to(victim)
    for write in (lambda: TensorFileWriter(link, {}), lambda: ArchivesWriter(link, {})):
        with pytest.raises(OSError, match="symbolic links"):
            write()
    for name in ("rows", ".rows.tmp"):
        (tmp_path / name).symlink_to(victim)
    replace_file(tmp_path / "rows", b"new")
    assert victim.read_text() == "precious" and (tmp_path / "rows").read_bytes() == b"new"


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(1, 6))
def test_files_are_dealt_once_each_and_evenly(sizes, num_ranks):
    files = {f"f{index}": size for index, size in enumerate(sizes)}
    dealt = deal(files, num_ranks)
    assert sorted(name for mine in dealt for name in mine) == sorted(files)
    assert sum(map(bool, dealt)) == min(len(files), num_ranks)
    loads = [sum(files[name] + 1 for name in mine) for mine in dealt]
    assert max(loads) - min(loads) <= max(sizes, default=0) + 1


def test_casting_rounds_to_the_nearest_even_and_refuses_new_infinities():
    # bf16 keeps 7 bits behind the leading one: above 1 it steps by 2^-7; half a step rounds to the even neighbour.
    step = 2.0**-7
    values = torch.tensor([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -0.0, math.inf, math.nan])
    expected = torch.tensor([1, 1 + 2 * step, 1 + step, -0.0, math.inf, math.nan], dtype=torch.bfloat16)
    assert torch.equal(cast("t", values, torch.bfloat16).view(torch.int16)[:5], expected.view(torch.int16)[:5])
    assert cast("t", values, torch.bfloat16)[5].isnan()
    assert cast("t", values, torch.float32) is values
    assert cast("t", values[:0].view(2, 0), torch.bfloat16).shape == (2, 0)
    # 65504 is the largest of fp16; 65520 is half a step above, and rounds to infinity.
    assert cast("t", torch.tensor([65504.0, math.inf]), torch.float16)[0] == 65504
    with pytest.raises(ConfigError, match=r"layers\.0\.weight: holds 65520, beyond 65504, .* fp16; choose another"):
        cast("layers.0.weight", torch.tensor([[1.0, 65520.0]]).t(), torch.float16)
    many = torch.zeros(tensor_file._CAST_ELEMENTS + 3)
    many[-1] = 1e6
    with pytest.raises(ConfigError, match="holds 1e\\+06"):
        cast("t", many, torch.float16)


def test_writes_everything_once_and_tells(source, tmp_path):
    done = run_plain(source, tmp_path / "out", log=tmp_path / "log", dtype="fp32")
    check(source, tmp_path / "out")
    assert len((tmp_path / "log").read_text().splitlines()) == 24
    assert (done.num_tensors, done.num_cast, done.found_parts, done.total_bytes) == (12, 0, 0, 12 * 8 * 64 * 4)
    assert done.hashes == json.loads((tmp_path / "out/hashes.json").read_text())
    assert run_plain(source, tmp_path / "half", dtype="bf16").num_cast == 12


def test_single_file(source, tmp_path):
    run_plain(source, tmp_path / "one.bin", num_files=1, is_single_file=True, can_go_on=False)
    assert load_file(tmp_path / "one.bin").keys() == load_file(source).keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.bin", "source.safetensors"]


@pytest.mark.parametrize("can_go_on", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_killed_at_any_moment_nothing_complete_is_redone(source, tmp_path, monkeypatch, can_go_on, num_ranks):
    monkeypatch.setattr(convert_write, "_COMMIT_BYTES", 4096)
    chance, out, log = random.Random(7), tmp_path / "out", tmp_path / "log"

    def attempt(rank):
        place = Place(rank=rank, size=num_ranks, deadline_s=60)
        slowly = {"before_write": lambda file, key: time.sleep(0.04)}
        return lambda: run_plain(source, out, place=place, num_files=4, can_go_on=can_go_on, log=log, **slowly)

    kills = redone = 0
    while not out.exists():
        folder = part_folder(out)
        before = {(part.file, part.key) for part in read_journals(folder)} if folder.exists() else set()
        log.write_text("")
        children = [fork(attempt(rank)) for rank in range(num_ranks)]
        if kills < 5:
            time.sleep(chance.uniform(0.02, 0.35))
            for child in children:
                os.kill(child, signal.SIGKILL)
        codes = wait_for(children)
        assert set(codes) <= {0, -9}
        kills += -9 in codes
        written = [tuple(line.split()) for line in log.read_text().splitlines()]
        redone += len(written)
        assert not before & set(written)
        assert len(written) == len(set(written))
    if -9 in codes:
        # Killed when all was done but tidying up.
        shutil.rmtree(part_folder(out), ignore_errors=True)
    check(source, out, num_files=4)
    assert kills >= 2 and redone >= 48


def test_line_that_a_crash_cut_is_none(tmp_path):
    journal = ConversionJournal(tmp_path, 0)
    journal.append([Part("f", "a", "0"), Part("f", "b", "1")])
    journal.close()
    path = tmp_path / "journal-00000.jsonl"
    path.write_bytes(path.read_bytes() + b'["f", "c"')
    assert [part.key for part in read_journals(tmp_path)] == ["a", "b"]
    journal = ConversionJournal(tmp_path, 0)
    journal.append([Part("f", "d", "2")])
    journal.close()
    assert [part.key for part in read_journals(tmp_path)] == ["a", "b", "d"]
    path.write_bytes(b"\0\0\0\0\n" + path.read_bytes())
    assert [part.key for part in read_journals(tmp_path)] == ["a", "b", "d"]


def test_file_that_was_removed_is_written_anew(source, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_write, "_COMMIT_BYTES", 1)
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="t06: is damaged"):
        run_plain(source, out, damaged="t06")
    (part_folder(out) / FILES / "rows-1.safetensors").unlink()
    assert run_plain(source, out).found_parts == 6
    check(source, out)


def test_what_a_kill_left_half_written_beside_the_tensors_is_not_kept(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="t06: is damaged"):
        run_plain(source, out, damaged="t06")
    (part_folder(out) / FILES / ".hashes.json.4711.part").write_text("{")
    run_plain(source, out)
    check(source, out)


def test_ended_right_after_renaming_is_done(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(engine.shutil, "rmtree", lambda *args, **kwargs: None)
        run_plain(source, out)
    assert part_folder(out).exists()
    done = run_plain(source, out)
    assert done.found_parts == 24
    check(source, out)
    with pytest.raises(WriteError, match="is there already, and nothing is overwritten"):
        run_plain(source, out)


def test_what_another_conversion_left_is_named_and_discarded_on_request(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="t06"):
        run_plain(source, out, damaged="t06", what={"to": "rows", "dtype": "fp16"})
    with pytest.raises(WriteError, match=r"found \[plain .*dtype fp16.*expected \[plain .*to rows;.*--restart"):
        run_plain(source, out)
    run_plain(source, out, restart=True)
    check(source, out)


def test_folder_of_someone_else_is_left_alone(source, tmp_path):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part/thesis.txt").write_text("mine")
    with pytest.raises(WriteError, match=r"out\.part: found thesis\.txt .* not left by a conversion"):
        run_plain(source, tmp_path / "out")
    assert (tmp_path / "out.part/thesis.txt").read_text() == "mine"


def test_two_conversions_do_not_write_one_target(source, tmp_path):
    def meanwhile(file, key):
        if key == "t03" and file == "rows-0.safetensors":
            with pytest.raises(WriteError, match="another conversion is writing there"):
                run_plain(source, tmp_path / "out")

    run_plain(source, tmp_path / "out", before_write=meanwhile)
    check(source, tmp_path / "out")


def test_source_that_changes_meanwhile_is_an_error(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"source\.safetensors: its files were changed"):
        run_plain(source, tmp_path / "out", before_write=lambda file, key: os.utime(source, (1, 1)))
    assert not (tmp_path / "out").exists()


def test_target_where_nothing_can_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"out\.part: cannot be written: \S+/file: File exists; choose another OUT$"):
        run_plain(source, tmp_path / "file/out")
    with pytest.raises(WriteError, match=r"x\.part: cannot be written: File name too long; choose another OUT$"):
        run_plain(source, tmp_path / ("x" * 300))


def test_directories_above_the_target_are_made(source, tmp_path):
    run_plain(source, tmp_path / "none/inner/out")
    assert (tmp_path / "none/inner/out").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk_then_room(source, small_disk, monkeypatch):
    monkeypatch.setattr(convert_write, "_COMMIT_BYTES", 4096)
    out, other = small_disk / "out", small_disk / "other"

    def fill(file, key):
        if key == "t05":
            with contextlib.suppress(OSError):
                other.write_bytes(bytes(60_000))

    other.write_bytes(bytes(50_000))
    with pytest.raises(WriteError, match="GB are free; make room"):
        run_plain(source, out)
    other.unlink()
    with pytest.raises(WriteError, match="No space left on device; make room"):
        run_plain(source, out, before_write=fill)
    assert not out.exists()
    with pytest.raises(WriteError, match="make room"):
        run_plain(source, out)
    other.unlink()
    assert 0 < run_plain(source, out).found_parts < 24
    check(source, out)


def test_ranks_share_the_files_and_surplus_ranks_leave(source, tmp_path):
    out = tmp_path / "out"

    def rank(index):
        log = tmp_path / f"log-{index}"
        log.write_text("")
        return lambda: run_plain(source, out, place=Place(rank=index, size=4, deadline_s=60), num_files=3, log=log)

    make_tensors(source, rows=9)
    assert wait_for([fork(rank(index)) for index in range(4)]) == [0, 0, 0, 0]
    check(source, out, num_files=3)
    wrote = [{line.split()[0] for line in (tmp_path / f"log-{index}").read_text().splitlines()} for index in range(4)]
    assert [len(files) for files in wrote] == [1, 1, 1, 0]
    assert len(set.union(*wrote)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_rank_that_is_killed_ends_the_others_in_time(source, tmp_path, lost):
    out = tmp_path / "out"

    def rank(index, deadline_s):
        def slowly(file, key):
            if index == lost and key == "t04":
                os.kill(os.getpid(), signal.SIGKILL)
            # The others would go on for long.
            time.sleep(0 if index == lost else deadline_s / 3)

        place = Place(rank=index, size=3, deadline_s=deadline_s)
        return lambda: run_plain(source, out, place=place, num_files=4, before_write=slowly)

    def lose(deadline_s):
        shutil.rmtree(part_folder(out), ignore_errors=True)
        began = time.monotonic()
        codes = wait_for([fork(rank(index, deadline_s)) for index in range(3)])
        assert codes.pop(lost) == -9 and all(code in (1, PEER_FAILED) for code in codes)
        assert time.monotonic() - began < 50
        assert not out.exists()

    with_more_time(lose, 1.5, 10.0)
    assert wait_for([fork(lambda: run_plain(source, out, num_files=4))]) == [0]
    check(source, out, num_files=4)


def test_rank_that_fails_ends_the_others_at_once(source, tmp_path):
    def rank(index):
        place = Place(rank=index, size=3, deadline_s=60)
        slowly = {"before_write": lambda file, key: time.sleep(0.5)}
        damaged = {"damaged": "t03"} if index == 2 else slowly
        return lambda: run_plain(source, tmp_path / "out", place=place, num_files=4, **damaged)

    began = time.monotonic()
    assert wait_for([fork(rank(index)) for index in range(3)]) == [PEER_FAILED, PEER_FAILED, 3]
    assert time.monotonic() - began < 50 and not (tmp_path / "out").exists()
    # What the ranks left of themselves does not mislead the next ones, who are fewer.
    left = list((part_folder(tmp_path / "out") / FOLDER).iterdir())
    assert left

    def again(index):
        return lambda: run_plain(source, tmp_path / "out", place=Place(rank=index, size=2, deadline_s=60), num_files=4)

    assert wait_for([fork(again(index)) for index in range(2)]) == [0, 0]
    check(source, tmp_path / "out", num_files=4)


def test_no_room_for_what_ranks_tell_each_other(source, tmp_path, monkeypatch):
    def no_room(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ranks, "tell", no_room)
    with pytest.raises(WriteError, match=r"out\.part: cannot be written: No space left on device"):
        run_plain(source, tmp_path / "out")


def test_ranks_that_do_not_come_or_ask_for_something_else(source, tmp_path):
    def alone():
        run_plain(source, tmp_path / "out", place=Place(rank=1, size=2, deadline_s=0.5))

    assert wait_for([fork(alone)]) == [1]

    def rank(index):
        place = Place(rank=index, size=2, deadline_s=2)
        return lambda: run_plain(source, tmp_path / "two", place=place, what={"to": f"rows {index}"})

    codes = wait_for([fork(rank(index)) for index in range(2)])
    # Who comes second finds the other's plan, before or after they have met.
    assert 4 in codes and set(codes) <= {1, 4, PEER_FAILED}
    assert not (tmp_path / "two").exists()
