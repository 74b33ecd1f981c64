"""Checkpoints are complete or absent, whatever is killed or damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hybridflow.checkpoint import store
from hybridflow.checkpoint.store import (
    begin_step,
    complete_step,
    latest_step,
    load_latest,
    read_shard,
    write_shard,
)
from hybridflow.errors import CheckpointError

STATE = {"position": 40, "config": {"lr": 1e-3, "layers": [1, 2]}, "versions": {"torch": "2"}, 1: None}


def tensors(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "weight": torch.randn(3, 4, generator=generator),
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(step),
        "none": torch.empty(0, 4),
    }


def save(run_dir: Path, step: int, keep_last: int = 3) -> Path:
    begin_step(run_dir, step)
    records = [write_shard(run_dir, step, "actor", rank, tensors(step, rank)) for rank in range(2)]
    # Between ranks the records travel as JSON.
    return complete_step(run_dir, step, STATE, json.loads(json.dumps(records)), keep_last)


def assert_is(run_dir: Path, step: int) -> None:
    checkpoint = load_latest(run_dir)
    assert checkpoint is not None and checkpoint.step == step
    for rank in range(2):
        found, expected = read_shard(checkpoint, "actor", rank), tensors(step, rank)
        assert found.keys() == expected.keys()
        for name in found:
            assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None and latest_step(tmp_path) is None
    path = save(tmp_path, 10)
    assert path == tmp_path / "checkpoints" / "step_000010"
    assert sorted(each.name for each in path.iterdir()) == [
        "actor-00000.safetensors",
        "actor-00001.safetensors",
        "state.json",
    ]
    assert_is(tmp_path, 10)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None and checkpoint.state == json.loads(json.dumps(STATE))
    save(tmp_path, 20)
    assert_is(tmp_path, 20)
    assert names(tmp_path) == ["latest", "step_000010", "step_000020"]


def test_views_and_aliases_are_written_apart(tmp_path: Path) -> None:
    flat = torch.arange(12.0, requires_grad=True)
    given = {"all": flat, "tied": flat, "first": flat[:4], "second": flat[4:8], "columns": flat.view(3, 4).T}
    begin_step(tmp_path, 1)
    record = write_shard(tmp_path, 1, "critic", 0, {name: given[name] for name in ("first", "second", "columns")})
    tied = write_shard(tmp_path, 1, "actor", 0, {"all": given["all"], "tied": given["tied"]})
    complete_step(tmp_path, 1, {}, [record, tied], 1)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    found = read_shard(checkpoint, "critic", 0) | read_shard(checkpoint, "actor", 0)
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor), name


def test_the_oldest_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step_000003", "step_1000000"]
    assert_is(tmp_path, 1_000_000)


class Killed(BaseException):
    """Ends a save as a kill would: no handler of ours runs."""


def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each system call of a save that changes a name or syncs a file is in turn the one before which the job dies."""
    calls: list[str] = []
    limit = 0
    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        real = getattr(os, name)

        def counting(*args: object, name: str = name, real: object = real, **kwargs: object) -> object:
            if len(calls) == limit:
                raise Killed
            calls.append(name)
            return real(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(os, name, counting)
    limit = 10**9
    save(tmp_path / "whole", 10, keep_last=1)
    calls.clear()
    save(tmp_path / "whole", 20, keep_last=1)
    num_calls = len(calls)
    # mkdir; 2 shards, state, its folder; rename, folder; latest, replace, folder; the old one: rename, 3 files, folder.
    assert num_calls >= 15 and calls.count("fsync") == 7
    for moment in range(num_calls):
        run_dir = tmp_path / str(moment)
        limit = 10**9
        save(run_dir, 10, keep_last=1)
        calls.clear()
        limit = moment
        with pytest.raises(Killed):
            save(run_dir, 20, keep_last=1)
        assert_is(run_dir, 20 if "replace" in calls else 10)
        limit = 10**9
        if latest_step(run_dir) == 10:
            save(run_dir, 20, keep_last=1)
        save(run_dir, 30, keep_last=1)
        assert_is(run_dir, 30)
        assert names(run_dir) == ["latest", "step_000030"]


def test_a_partial_write_is_ignored_and_cleaned(tmp_path: Path) -> None:
    begin_step(tmp_path, 10)
    write_shard(tmp_path, 10, "actor", 0, tensors(10, 0))
    assert load_latest(tmp_path) is None
    begin_step(tmp_path, 12)
    assert names(tmp_path) == ["step_000012.tmp"]


def test_an_earlier_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for step in (9, 10):
        with pytest.raises(CheckpointError, match=rf"found step 10, asked to save step {step}; expected a later one"):
            begin_step(tmp_path, step)


def test_a_run_dir_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"actor-00001\.safetensors: cannot be written: .*all ranks share"):
        write_shard(tmp_path, 10, "actor", 1, tensors(10, 1))


def damaged(run_dir: Path) -> str:
    """The message that a resumed job ends with."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = load_latest(run_dir)
        assert checkpoint is not None
        read_shard(checkpoint, "actor", 1)
    return str(caught.value)


def test_damage_is_named(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    remedy = (
        f"restore it from a copy, or write one of step_000010 into {tmp_path}/checkpoints/latest to resume from there"
    )
    shard, state = path / "actor-00001.safetensors", path / "state.json"
    content, size = shard.read_bytes(), shard.stat().st_size

    shard.write_bytes(content[:-1])
    assert damaged(tmp_path) == f"{shard}: found {size - 1} bytes, expected {size} bytes; {remedy}"

    flipped = bytearray(content)
    flipped[size // 2] ^= 1
    shard.write_bytes(flipped)
    message = damaged(tmp_path)
    assert message.startswith(f"{shard}: found sha256 ") and message.endswith(remedy)

    shard.unlink()
    assert damaged(tmp_path) == f"{shard}: found no such file, expected {size} bytes; {remedy}"
    shard.write_bytes(content)

    text = state.read_text()
    state.write_text(text.replace('"position": 40', '"position": 41'))
    assert damaged(tmp_path).startswith(f"{state}: found sha256 ")
    for broken in ("", text[:-10], "[]", "{}"):
        state.write_text(broken)
        assert damaged(tmp_path).startswith(f"{state}: found ")
    state.unlink()
    assert "FileNotFoundError" in damaged(tmp_path)
    state.write_text(text)
    assert_is(tmp_path, 20)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 10)
    monkeypatch.setattr(store, "FORMAT", 2)
    assert damaged(tmp_path).startswith(f"{path / 'state.json'}: found format 1, expected 2")


def test_latest_points_to_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    latest = tmp_path / "checkpoints" / "latest"
    latest.write_text("step_000030\n")
    expected = (
        "names step_000030, expected that directory beside it, found none; restore it from a copy, or write one of"
    )
    assert expected in damaged(tmp_path)
    latest.write_text("../elsewhere\n")
    assert "found '../elsewhere', expected a name such as 'step_000010'" in damaged(tmp_path)
    # The remedy works.
    latest.write_text("step_000010\n")
    assert_is(tmp_path, 10)


def test_another_rank_or_role_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    for role, rank in (("actor", 2), ("critic", 0)):
        with pytest.raises(CheckpointError, match="not part of this checkpoint, which has actor-00000"):
            read_shard(checkpoint, role, rank)
