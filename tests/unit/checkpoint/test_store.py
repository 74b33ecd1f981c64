"""Checkpoints are complete or absent, whatever is killed or damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.checkpoint import store
from hybridflow.checkpoint.manifest import OptimizerProgress, read_manifest
from hybridflow.checkpoint.model_dir import Share
from hybridflow.checkpoint.saver import RolePart, Saver, Step
from hybridflow.checkpoint.store import (
    best_step,
    choices,
    clear_leftovers,
    complete_step,
    latest_step,
    load_latest,
    naming_others,
    open_role,
)
from hybridflow.errors import CheckpointError
from hybridflow.exit_status import FAILURE, exit_status
from hybridflow.families.model import ModelConfig
from hybridflow.foreign import read_small
from hybridflow.reshard.spec import ModelSpec, TensorSpec

STATE = {"position": 40, "config": {"lr": 1e-3, "layers": [1, 2]}, "versions": {"torch": "2"}, "none": None}
MODEL = ModelConfig(num_layers=1, hidden_size=4, ffn_hidden_size=4, num_attention_heads=2, max_context=8, vocab_size=6)
SPEC = ModelSpec(
    tensors=(
        TensorSpec(name="weight", shape=(6, 4), dtype="fp32", tp_dim=0, place=0),
        TensorSpec(name="half", shape=(5,), dtype="bf16", tp_dim=None, place=0),
    ),
    num_layers=1,
)


def values(step: int, role: str) -> dict[tuple[str, str], torch.Tensor]:
    """What a role holds at a step, whole: kind and tensor -> values."""
    generator = torch.Generator().manual_seed(100 * step + len(role))
    kinds = ["weight", "exp_avg", "exp_avg_sq"] if role == "actor" else ["weight"]
    found = {
        (kind, tensor.name): torch.randn(tensor.shape, generator=generator) for kind in kinds for tensor in SPEC.tensors
    }
    if role == "actor":
        found["master", "half"] = torch.randn(5, generator=generator)
    found["weight", "half"] = found["weight", "half"].bfloat16()
    return found


def part(step: int, role: str) -> RolePart:
    """All of a role, on one rank: of the weight in two pieces."""
    shares = []
    for (kind, name), tensor in values(step, role).items():
        boxes = [((0, 2), (0, 4)), ((2, 6), (0, 4))] if tensor.dim() == 2 else [((0, 5),)]
        shares += [Share(kind, name, box, tensor[tuple(slice(*edge) for edge in box)]) for box in boxes]
    is_trained = role == "actor"
    return RolePart(
        ranks=(0,),
        model=MODEL,
        has_value_head=False,
        layout="tp1.pp1.dp1",
        spec=SPEC,
        shares=tuple(shares),
        trained=("weight", "half") if is_trained else (),
        progress=OptimizerProgress(step, 1e-3) if is_trained else None,
        is_frozen=role == "reference",
    )


def saver(run_dir: Path, keep_last: int = 3, keep_every: int = 0) -> Saver:
    """One as a job has it that goes on from the latest checkpoint, or begins."""
    clear_leftovers(run_dir)
    latest = load_latest(run_dir)
    frozen = {} if latest is None else {"reference": latest.roles["reference"]}
    keep = {"keep_last": keep_last, "keep_every": keep_every}
    return Saver(run_dir, 0, dist.HashStore(), deadline_s=5.0, frozen=frozen, **keep)


def save(run_dir: Path, *steps: int, **keep: int) -> Path:
    """Save these steps one after the other, the reference only with the first of a run."""
    writer = saver(run_dir, **keep)
    has_reference = latest_step(run_dir) is not None
    for step in steps:
        roles = ["actor"] if has_reference else ["actor", "reference"]
        parts = {role: part(step, role) for role in roles}
        writer.save(Step(number=step, state=STATE, leads=dict.fromkeys(roles, 0), parts=parts))
        has_reference = True
    writer.finish(print)
    return run_dir / f"checkpoints/step_{steps[-1]:06d}"


def assert_is(run_dir: Path, step: int, first: int) -> None:
    """The latest checkpoint is this one, with the reference of the run's first."""
    checkpoint = load_latest(run_dir)
    assert checkpoint is not None and checkpoint.step == step and checkpoint.state == STATE
    assert checkpoint.roles.keys() == {"actor", "reference"}
    for role, of_step in (("actor", step), ("reference", first)):
        found = open_role(checkpoint, role)
        expected = values(of_step, role)
        assert {(kind, name) for kind, tensors in found.manifest.tensors.items() for name in tensors} == expected.keys()
        for (kind, name), tensor in expected.items():
            read = found.read(kind, name)
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), (role, kind, name)
    assert open_role(checkpoint, "actor").manifest.progress == OptimizerProgress(step, 1e-3)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None and latest_step(tmp_path) is None
    path = save(tmp_path, 10)
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*")) == [
        "actor",
        "actor/manifest.json",
        "actor/rank-00000.safetensors",
        "job.json",
    ]
    assert_is(tmp_path, 10, first=10)
    reference = (tmp_path / "checkpoints/reference/rank-00000.safetensors").stat()
    save(tmp_path, 20)
    assert_is(tmp_path, 20, first=10)
    assert names(tmp_path) == ["latest", "reference", "step_000010", "step_000020"]
    assert (tmp_path / "checkpoints/reference/rank-00000.safetensors").stat() == reference, "it was written anew"


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 2}, [6, 1_000_000]),
        ({"keep_last": 1}, [1_000_000]),
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 1_000_000]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6, 1_000_000]),
    ],
)
def test_which_stay(keep: dict[str, int], left: list[int], tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, **keep)
    save(tmp_path, 5, 6, 1_000_000, **keep)
    assert names(tmp_path) == sorted(["latest", "reference", *(f"step_{step:06d}" for step in left)])
    assert_is(tmp_path, 1_000_000, first=1)


def test_the_best_stays_until_there_is_a_better_one(tmp_path: Path) -> None:
    for step, best in ((0, None), (1, 0), (2, 2), (3, 2), (4, 7), (5, None)):
        complete_step(tmp_path, step, {}, {}, keep_last=1, best=best)
        # Of step 7 there is no checkpoint; to name none changes nothing.
        expected = {0: None, 1: 0}.get(step, 2)
        assert best_step(tmp_path) == expected
        notes = ["latest"] if expected is None else ["best", "latest"]
        assert names(tmp_path) == [*notes, *(f"step_{each:06d}" for each in sorted({expected, step} - {None}))]


class Killed(BaseException):
    """Ends a save as a kill would: no handler of ours runs."""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each system call of a save that changes a name or syncs a file is in turn the one before which the job dies."""
    calls: list[str] = []
    limit = 0
    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "pwrite", "ftruncate"):
        real = getattr(os, name)

        def counting(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            if len(calls) == limit:
                raise Killed
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, counting)
    limit = 10**9
    for first, second in ((None, 10), (10, 20)):
        whole = tmp_path / f"whole {second}"
        if first is not None:
            save(whole, first, keep_last=1)
        calls.clear()
        save(whole, second, keep_last=1)
        num_calls = len(calls)
        assert num_calls >= 20 and calls.count("fsync") == (13 if first is None else 8), calls
        for moment in range(num_calls):
            run_dir = tmp_path / f"{second} {moment}"
            if first is not None:
                save(run_dir, first, keep_last=1)
            calls.clear()
            limit = moment
            with pytest.raises(Killed):
                save(run_dir, second, keep_last=1)
            limit = 10**9
            reached = latest_step(run_dir)
            assert reached in (first, second)
            if reached is not None:
                assert_is(run_dir, reached, first=reached if first is None else first)
            if reached != second:
                save(run_dir, second, keep_last=1)
            save(run_dir, 30, keep_last=1)
            assert_is(run_dir, 30, first=second if first is None else first)
            assert names(run_dir) == ["latest", "reference", "step_000030"]


def test_what_killed_writers_left_goes_before_the_next_write(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    stale = folder / "step_000010.tmp/actor/rank-00007.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of a job of more ranks")
    (folder / ".latest.17.part").write_text("step_000010\n")
    assert load_latest(tmp_path) is None
    save(tmp_path, 10)
    assert names(tmp_path) == ["latest", "reference", "step_000010"]
    assert not (folder / "step_000010/actor/rank-00007.safetensors").exists()


def test_a_manifest_may_be_larger_than_other_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts has a million pieces; it is written without an indent for each."""
    monkeypatch.setattr(read_small, "__defaults__", (1000,))
    path = save(tmp_path, 10) / "actor/manifest.json"
    assert_is(tmp_path, 10, first=10)
    text = path.read_text()
    assert len(text) > 1000 and text.count("\n") == len(json.loads(text)) + 2
    path.write_text(json.dumps(json.loads(text), indent=1))  # as it was written before
    assert read_manifest(path.parent).progress == OptimizerProgress(10, 1e-3)


def test_an_earlier_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for step in (9, 10):
        with pytest.raises(CheckpointError, match=rf"found step 10, asked to save step {step}; expected a later one"):
            save(tmp_path, step)
    assert_is(tmp_path, 10, first=10)


def test_going_on_from_an_older_one_drops_the_newer_when_it_saves(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    latest = tmp_path / "checkpoints/latest"
    latest.write_text("step_000010\n")
    saver(tmp_path)
    assert names(tmp_path) == ["latest", "reference", "step_000010", "step_000020", "step_000030"]
    save(tmp_path, 20)
    assert names(tmp_path) == ["latest", "reference", "step_000010", "step_000020"]
    assert_is(tmp_path, 20, first=10)


def test_going_on_from_an_older_one_forgets_a_best_that_is_newer(tmp_path: Path) -> None:
    """The step is made again, and another may be the best of this way."""
    for step in (1, 2, 3):
        complete_step(tmp_path, step, {}, {}, keep_last=2, best=3 if step == 3 else 1)
    (tmp_path / "checkpoints/latest").write_text("step_000002\n")
    complete_step(tmp_path, 3, {}, {}, keep_last=2, best=1)
    assert best_step(tmp_path) is None and names(tmp_path) == ["latest", "step_000002", "step_000003"]


def damaged(run_dir: Path) -> str:
    """The message that a resumed job ends with."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = load_latest(run_dir)
        assert checkpoint is not None
        for role in ("actor", "reference"):
            list(open_role(checkpoint, role).verify())
    return str(caught.value)


def test_damage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 10, 20)
    choice = f"write one of step_000010 into {tmp_path}/checkpoints/latest to resume from there"
    remedy = f"restore it from a copy, or {choice}"
    shard, job, manifest = path / "actor/rank-00000.safetensors", path / "job.json", path / "actor/manifest.json"
    content, size = shard.read_bytes(), shard.stat().st_size

    shard.write_bytes(content[:-1])
    message = damaged(tmp_path)
    assert message == (f"{shard}: found {size - 1} bytes, expected {size} bytes; restore it from a copy; or {choice}")

    flipped = bytearray(content)
    flipped[-1] ^= 1
    shard.write_bytes(flipped)
    message = damaged(tmp_path)
    assert message.startswith(f"{shard}: master:half has sha256 ") and "its bytes are not those" in message

    shard.write_bytes(content.replace(b'"weight"', b'"weighs"'))
    assert "rank-00000.safetensors: weighs: found fp32 [2, 4], expected no such tensor" in damaged(tmp_path)
    shard.write_bytes(content.replace(b"[2,4]", b"[4,2]", 1))
    assert "rank-00000.safetensors: weight: found fp32 [4, 2], expected fp32 [2, 4]" in damaged(tmp_path)
    shard.write_bytes(b"\x80\x04" + content[2:])
    assert "rank-00000.safetensors: cannot be read as safetensors" in damaged(tmp_path)

    shard.unlink()
    assert damaged(tmp_path).startswith(f"{shard}: found no such file, expected {size} bytes; ")
    shard.write_bytes(content)

    reference = tmp_path / "checkpoints/reference"
    reference.rename(tmp_path / "away")
    assert damaged(tmp_path) == (
        f"{reference}/manifest.json: found No such file or directory, expected a file; all checkpoints share it: "
        "restore it from a copy"
    )
    (tmp_path / "away").rename(reference)

    for file, word in ((job, '"position": 40'), (manifest, '"layout": "tp1')):
        text = file.read_text()
        assert word in text
        file.write_text(text.replace(word, word[:-1] + "2"))
        assert damaged(tmp_path).startswith(f"{file}: found sha256 ")
        for broken in ("", text[:-10], "[]", "{}"):
            file.write_text(broken)
            message = damaged(tmp_path)
            assert message.startswith(f"{file}: found ") and message.endswith(remedy)
        file.unlink()
        assert "o such file or directory" in damaged(tmp_path)
        file.write_text(text)
    assert_is(tmp_path, 20, first=10)


def test_a_checkpoint_of_another_format_or_without_a_role_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 10)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=r"job\.json: has no critic, .* it has actor, reference: resume with"):
        open_role(checkpoint, "critic")
    monkeypatch.setattr(store, "FORMAT", "hybridflow-job-2")
    assert damaged(tmp_path).startswith(
        f"{path / 'job.json'}: found format 'hybridflow-job-1', expected 'hybridflow-job-2'"
    )


def test_pieces_that_do_not_cover_their_tensor_are_never_called_a_checkpoint(tmp_path: Path) -> None:
    """A mistake of ours in who writes what would show here, and not at the next resume."""
    save(tmp_path, 10)
    whole = part(20, "actor")
    moved = [share._replace(box=((1, 3), (0, 4))) if share.box[0] == (0, 2) else share for share in whole.shares]
    twice = [*whole.shares, whole.shares[0]]
    for shares, says in (
        (whole.shares[1:], "the pieces of weight weight lack 8 elements"),
        (moved, r"the pieces of weight weight repeat \(\(2, 3\), \(0, 4\)\)"),
        (twice, r"the pieces of weight weight repeat \(\(0, 2\), \(0, 4\)\)"),
    ):
        writer = saver(tmp_path)
        wrong = RolePart(**{**vars(whole), "shares": tuple(shares)})
        writer.save(Step(number=20, state=STATE, leads={"actor": 0}, parts={"actor": wrong}))
        with pytest.raises(CheckpointError, match=says):
            writer.finish(print)
        assert_is(tmp_path, 10, first=10)


def test_a_model_that_no_checkpoint_names_gives_way(tmp_path: Path) -> None:
    """A kill before the first checkpoint that has it leaves one, as does a return to an older one."""
    save(tmp_path, 10)
    writer = saver(tmp_path)
    parts = {role: part(20, role) for role in ("actor", "reference")}
    writer.save(Step(number=20, state=STATE, leads=dict.fromkeys(parts, 0), parts=parts))
    writer.finish(print)
    assert_is(tmp_path, 20, first=20)
    assert names(tmp_path) == ["latest", "reference", "step_000010", "step_000020"]


def test_damage_names_the_checkpoints_that_are_not(tmp_path: Path) -> None:
    path = save(tmp_path, 10, 20)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    for damaged_path, says in (
        (path / "actor/rank-00000.safetensors", "; or write one of step_000010 into .*latest"),
        (tmp_path / "checkpoints/reference/rank-00000.safetensors", "; all checkpoints share it$"),
    ):
        content = bytearray(damaged_path.read_bytes())
        content[-1] ^= 255
        damaged_path.write_bytes(content)
        role = "actor" if "actor" in str(damaged_path) else "reference"
        with (
            pytest.raises(CheckpointError, match=f"restore the file from a copy{says}"),
            naming_others(checkpoint, role),
        ):
            found = open_role(checkpoint, role)
            for kind, tensors in found.manifest.tensors.items():
                for name in tensors:
                    found.read(kind, name)
    (tmp_path / "checkpoints/reference/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="all checkpoints share it: restore it from a copy"):
        open_role(checkpoint, "reference")


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
    latest.write_bytes(b"\xff\xfe")
    assert "expected a name such as 'step_000010'" in damaged(tmp_path)
    # The remedy works.
    latest.write_text("step_000010\n")
    assert_is(tmp_path, 10, first=10)
    assert choices(tmp_path) == f"restore it from a copy, or remove {tmp_path}/checkpoints to start the run anew"


def test_a_lost_latest_loses_no_checkpoint(tmp_path: Path) -> None:
    """Neither is the run begun anew, nor does its next save remove what nothing names any more."""
    save(tmp_path, 10, 20)
    (tmp_path / "checkpoints/latest").unlink()
    assert latest_step(tmp_path) == 20
    clear_leftovers(tmp_path)
    assert_is(tmp_path, 20, first=10)
    save(tmp_path, 30)
    assert names(tmp_path) == ["latest", "reference", "step_000010", "step_000020", "step_000030"]
    assert_is(tmp_path, 30, first=10)
    (tmp_path / "checkpoints/latest").unlink()
    (tmp_path / "checkpoints/step_000030/job.json").unlink()
    assert "write one of step_000010, step_000020 into" in damaged(tmp_path)


def test_an_old_one_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a directory is not empty while someone reads a file in it."""
    rmdir = os.rmdir

    def refuse(path: Any, **kwargs: Any) -> None:
        if str(path).endswith("actor"):
            raise OSError(39, "Directory not empty")
        rmdir(path, **kwargs)

    save(tmp_path, 10)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        save(tmp_path, 20, keep_last=1)
        left = [name for name in names(tmp_path) if name.endswith(".removed.tmp")]
        assert len(left) == 1 and left[0].startswith("step_000010.")
        assert names(tmp_path) == ["latest", "reference", *left, "step_000020"]
        assert_is(tmp_path, 20, first=10)
        # The file may be held still when the job begins again.
        clear_leftovers(tmp_path)
        assert left[0] in names(tmp_path)
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["latest", "reference", "step_000020"]


def test_the_state_is_checked_where_it_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    body = json.loads((path / "job.json").read_text())
    del body["sha256"], body["roles"]["actor"]["sha256"]
    (path / "job.json").write_text(json.dumps({"sha256": store.digest(body), **body}))
    assert "job.json: is malformed: TypeError" in damaged(tmp_path)


def rewrite_job(path: Path, **changes: Any) -> None:
    """Change ``job.json``, whose hash then fits, as someone would who wants to be believed."""
    body = {**json.loads((path / "job.json").read_text()), **changes}
    del body["sha256"]
    (path / "job.json").write_text(json.dumps({"sha256": store.digest(body), **body}))


def test_no_path_of_a_job_file_leaves_the_run(tmp_path: Path) -> None:
    """The weights elsewhere are whole, and their hash is the one that the job file names."""
    path = save(tmp_path / "run", 10)
    roles = json.loads((path / "job.json").read_text())["roles"]
    shutil.copytree(path / "actor", tmp_path / "run/actor")
    shutil.copytree(path / "actor", tmp_path / "elsewhere/actor")
    for place in (
        *("../actor", "../../elsewhere/actor", str(tmp_path / "elsewhere/actor"), "step_000010/../actor", "..", ""),
        *("step_000010/critic", "/actor", "./actor", "step_000010//actor", "step_1/actor", "step_000010/actor\n", 7),
    ):
        rewrite_job(path, roles={**roles, "actor": {**roles["actor"], "directory": place}})
        assert "job.json: is malformed: " in damaged(tmp_path / "run"), place
    for role in ("..", "a/b", "\x1b[31m", ""):
        rewrite_job(path, roles={role: {**roles["actor"], "directory": role}})
        assert "job.json: is malformed: ValueError: found" in damaged(tmp_path / "run"), role
    rewrite_job(path, roles=roles)
    (path / "actor").rename(tmp_path / "scratch")
    (path / "actor").symlink_to(tmp_path / "scratch")
    assert_is(tmp_path / "run", 10, first=10)


@pytest.mark.parametrize("step", [11, -1, "10", 10.0, True, None, 10**30, [10]])
def test_a_job_file_of_another_step_is_refused(tmp_path: Path, step: object) -> None:
    path = save(tmp_path, 10)
    rewrite_job(path, step=step)
    assert "job.json: is malformed: ValueError: found step" in damaged(tmp_path)


def test_whatever_latest_is_an_error_names_it(tmp_path: Path) -> None:
    save(tmp_path, 10)
    latest = tmp_path / "checkpoints/latest"
    for content in ("9" * 6000, "step_" + "9" * 6000, "step_" + "9" * 190, "../step_000010", "\x1b[31m", "", "\0"):
        latest.write_text(content)
        message = damaged(tmp_path)
        assert message.startswith(f"{latest}: ") and "expected a name such as" in message and len(message) < 600
    latest.unlink()
    os.mkfifo(latest)
    assert "latest: found 'is not a regular file'" in damaged(tmp_path)


@pytest.mark.parametrize("file", ["latest", "job.json", "manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ESHUTDOWN])
def test_a_file_server_that_is_away_says_nothing_of_the_checkpoint(
    number: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    open_file = os.open

    def away(path: Any, *how: Any, **more: Any) -> int:
        if str(path).endswith(file):
            raise OSError(number, os.strerror(number), str(path))
        return open_file(path, *how, **more)

    monkeypatch.setattr(os, "open", away)
    with pytest.raises(CheckpointError, match=f"{file}.*{os.strerror(number)}") as caught:
        checkpoint = load_latest(tmp_path)
        assert checkpoint is not None
        open_role(checkpoint, "actor").read("weight", "weight")
    assert exit_status(caught.value) == FAILURE
