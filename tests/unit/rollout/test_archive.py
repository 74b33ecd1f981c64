"""The archive of rollouts: segments joined by virtual datasets; what is missing or damaged is seen."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hybridflow import cli
from hybridflow.rollout.archive import (
    SegmentName,
    drop_segments,
    is_behind,
    join_segments,
    list_segments,
    read_places,
    read_rows,
    read_segment,
    write_segment,
)
from hybridflow.rollout.log_file import LoggedSample
from tests.support.report_runs import write_archive

NAMES = [SegmentName(first, first + 1, rank) for first in (1, 3) for rank in (0, 1)]


def rows(name):
    """Three samples of each step of a segment, not in order; the last has no tokens."""
    return [
        (
            step,
            LoggedSample(
                prompt_index=10 * step + name.rank,
                index=index,
                tokens=np.arange(3 - index, dtype=np.int32) + 100 * step + 10 * name.rank + index,
                log_probs=-np.arange(3 - index, dtype=np.float32) - step,
                sampled_log_probs=-np.arange(3 - index, dtype=np.float32) - step - 0.5,
                versions=np.full(3 - index, step - 1, np.int32),
                finish="length" if index == 0 else "stop",
            ),
        )
        for step in (name.last, name.first)
        for index in (2, 0, 3, 1)
        if index != 2
    ]


def prompts(name):
    return {10 * step + name.rank: list(range(step + 1)) for step in (name.first, name.last)}


def scores(name):
    """Of all samples but the last of each step."""
    return {(step, each.prompt_index, each.index): step - each.index / 4 for step, each in rows(name) if each.index < 3}


def write(folder):
    for name in NAMES:
        write_segment(folder, name, rows(name), prompts(name), scores(name))
    assert join_segments(folder) == []


def read(folder):
    with h5py.File(folder / "all.h5") as file:
        return {name: file[name][:] for name in file}


def expected(names=NAMES):
    """What a person would write down: by segment, and in one by step, draw, index."""
    found = {
        name: [] for name in ("step", "prompt_index", "index", "finish", "prompt_length", "response_length", "score")
    }
    found |= {name: [] for name in ("prompt_tokens", "response_tokens", "log_probs", "sampled_log_probs", "versions")}
    for name in names:
        for step in (name.first, name.last):
            for index in (0, 1, 3):
                length = max(0, 3 - index)
                found["step"].append(step)
                found["prompt_index"].append(10 * step + name.rank)
                found["index"].append(index)
                found["finish"].append(int(index == 0))
                found["prompt_length"].append(step + 1)
                found["response_length"].append(length)
                found["score"].append(None if index == 3 else step - index / 4)
                found["prompt_tokens"] += range(step + 1)
                found["response_tokens"] += [100 * step + 10 * name.rank + index + place for place in range(length)]
                found["log_probs"] += [-float(place) - step for place in range(length)]
                found["sampled_log_probs"] += [-float(place) - step - 0.5 for place in range(length)]
                found["versions"] += [step - 1] * length
    return found


def plain(found):
    """With None for NaN, which equals nothing."""
    return {name: [None if value != value else value for value in values.tolist()] for name, values in found.items()}


def test_all_segments_are_joined_in_order(tmp_path):
    write(tmp_path)
    assert list_segments(tmp_path) == NAMES
    assert plain(read(tmp_path)) == expected()
    with h5py.File(tmp_path / "all.h5") as file:
        assert json.loads(file.attrs["parts"]) == [f"segments/{name}" for name in NAMES]
        assert all(file[name].is_virtual for name in file)
        assert file["response_tokens"].dtype == np.int32 and file["log_probs"].dtype == np.float32
    # It goes where it is taken, with its segments.
    (tmp_path / "kept").mkdir()
    for name in ("all.h5", "segments"):
        (tmp_path / name).rename(tmp_path / "kept" / name)
    assert plain(read(tmp_path / "kept")) == expected()


def test_missing_segment_is_seen_and_left_out_of_the_next(tmp_path):
    write(tmp_path)
    (tmp_path / "segments" / str(NAMES[2])).unlink()
    found = read(tmp_path)
    assert found["step"].tolist() == [1, 1, 1, 2, 2, 2] * 2 + [-1] * 6 + [3, 3, 3, 4, 4, 4]
    assert np.isnan(found["log_probs"]).sum() == sum(max(0, 3 - index) for index in (0, 1, 3)) * 2
    assert join_segments(tmp_path) == []
    assert plain(read(tmp_path)) == expected([NAMES[0], NAMES[1], NAMES[3]])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda data: data[: len(data) // 2], r"truncated file"),
        (lambda data: b"", r"."),
        (lambda data: b"\0" * len(data), r"signature"),
    ],
    ids=["cut", "empty", "zeros"],
)
def test_damaged_segment_is_left_out_with_a_message(tmp_path, content, says):
    write(tmp_path)
    path = tmp_path / "segments" / str(NAMES[1])
    path.write_bytes(content(path.read_bytes()))
    (line,) = join_segments(tmp_path)
    assert re.match(
        rf"{re.escape(str(path))}: cannot be read as HDF5 .*{says}.*{tmp_path}/all.h5 does without it", line
    )
    assert plain(read(tmp_path)) == expected([NAMES[0], *NAMES[2:]])


def test_foreign_file_is_left_out_with_a_message(tmp_path):
    write(tmp_path)
    path = tmp_path / "segments" / str(NAMES[1])
    with h5py.File(path, "w") as file:
        file.attrs["format"] = "other"
    (line,) = join_segments(tmp_path)
    assert "is of the format other, expected hybridflow-rollouts-3" in line


def test_a_flipped_byte_never_gives_a_wrong_number(tmp_path):
    write(tmp_path)
    right = expected()
    path = tmp_path / "segments" / str(NAMES[0])
    data = path.read_bytes()
    num_seen = 0
    for place in range(0, len(data), 61):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        with contextlib.suppress(OSError):
            found = read(tmp_path)
            for name, values in found.items():
                wrong = values != np.asarray(right[name])
                missing = np.isnan(values) if values.dtype.kind == "f" else values == -1
                assert not (wrong & ~missing).any(), (place, name)
            num_seen -= not any((values == -1).any() for values in found.values())
        num_seen += 1
    # Most of such a small file is not in use; where it is, a flip is seen.
    assert num_seen > 20


def test_what_a_killed_writer_left_is_never_taken_and_removed(tmp_path):
    write(tmp_path)
    (tmp_path / "segments/.step-000005-000006-rank-00000.h5.tmp").write_bytes(b"half")
    (tmp_path / ".all.h5.tmp").write_bytes(b"half")
    assert join_segments(tmp_path) == [] and plain(read(tmp_path)) == expected()
    (tmp_path / ".all.h5.tmp").write_bytes(b"half")
    drop_segments(tmp_path, after=4)
    assert not list(tmp_path.rglob("*.tmp")) and (tmp_path / "all.h5").exists()
    drop_segments(tmp_path, after=2)
    assert list_segments(tmp_path) == NAMES[:2] and not (tmp_path / "all.h5").exists()
    drop_segments(tmp_path, after=None)
    assert list_segments(tmp_path) == []


def test_a_long_run_joins_its_segments_seldom_and_never_lacks_more_than_a_tenth(tmp_path):
    names = [SegmentName(step, step, 0) for step in range(1, 101)]
    num_joined = num_written = 0
    for number, name in enumerate(names, 1):
        write_segment(tmp_path, name, rows(name)[:1], prompts(name), {})
        if is_behind(tmp_path):
            assert join_segments(tmp_path) == []
            num_joined += 1
            num_written += number
        with h5py.File(tmp_path / "all.h5") as file:
            assert 11 * len(json.loads(file.attrs["parts"])) >= 10 * number
    # Each of the first 10; then 12, 14, 16, 18, 20, 23, 26, 29, 32, 36, 40, 45, 50, 56, 62, 69, 76, 84, 93. All: 5050.
    assert (num_joined, num_written) == (10 + 19, 55 + 801)
    (tmp_path / "all.h5").write_bytes(b"damaged")
    assert is_behind(tmp_path)


def test_nothing_sampled_makes_no_file(tmp_path):
    write_segment(tmp_path, NAMES[0], [], {}, {})
    assert join_segments(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_example_of_the_docs_reads_an_archive(tmp_path):
    page = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    write(tmp_path / "runs/grpo/rollouts")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["20 0 [200 201 202] -3.0", "20 1 [201 202] -2.5"] and len(lines) == 6
    (tmp_path / "runs/grpo/rollouts/segments" / str(NAMES[0])).unlink()
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "a segment is missing" in done.stderr


def test_some_samples_are_read_without_the_tokens_of_the_others(tmp_path):
    write(tmp_path)
    name = NAMES[2]
    every = list(read_segment(tmp_path, name))
    places = read_places(tmp_path, name)
    assert places["score"].tolist()[:2] == [every[0].score, every[1].score] and "versions" not in places
    for rows_ in ([], [4], [5, 0, 2]):
        assert [repr(each) for each in read_rows(tmp_path, name, places, rows_)] == [repr(every[row]) for row in rows_]


def test_the_command_shows_the_last_step_with_samples(tmp_path, capsys):
    write_archive(tmp_path, range(1, 4), num_groups=1, group_size=2, num_tokens=3)
    segments = tmp_path / "rollouts/segments"
    # Of a long run steps 4 and 5 were logged, and not kept.
    (segments / "step-000001-000003-rank-00000.h5").rename(segments / "step-000001-000005-rank-00000.h5")
    assert cli.main(["rollouts", str(tmp_path)]) == 0
    assert re.findall(r"^step \d+", capsys.readouterr().out, flags=re.MULTILINE) == ["step 3", "step 3"]


def test_log_probs_that_an_engine_does_not_tell_are_null(tmp_path, capsys):
    write_archive(tmp_path, [1], num_groups=1, group_size=1, num_tokens=3)
    unknown = LoggedSample(
        prompt_index=7,
        index=0,
        tokens=np.array([4], np.int32),
        log_probs=np.array([-0.5], np.float32),
        sampled_log_probs=np.array([np.nan], np.float32),
        versions=np.zeros(1, np.int32),
    )
    write_segment(tmp_path / "rollouts", SegmentName(2, 2, 0), [(2, unknown)], {7: [4]}, {})
    assert cli.main(["rollouts", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["log_probs"], row["sampled_log_probs"], row["score"]) == ([-0.5], [None], None)
