"""``hybridflow inspect`` and ``hybridflow diff``: what they print, and with which status they end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow import cli
from hybridflow.checkpoint import contents, differences, manifest
from hybridflow.checkpoint.contents_text import collapse
from hybridflow.checkpoint.differences import compare, differing_settings
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.inspect_command import _DIFF_EXAMPLES, _INSPECT_EXAMPLES
from hybridflow.checkpoint.manifest import Manifest, OptimizerProgress, TensorEntry, digest, overlap
from hybridflow.checkpoint.model_dir import Share, write_manifest, write_shares
from hybridflow.checkpoint.tensor_file import TensorFile, entry_of
from hybridflow.families.model import ModelConfig, RotaryScaling
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import model_spec
from tests.support.conversions import convert
from tests.support.lora_cases import make_adapter, make_model

MODEL = ModelConfig(
    num_layers=3, hidden_size=8, ffn_hidden_size=12, num_attention_heads=2, max_context=16, vocab_size=11, num_experts=2
)


def hybridflow(*words: Any) -> int:
    return cli.main([str(word) for word in words])


def write_role(folder: Path, *, seed: int = 1, has_value_head: bool = False, change: float = 0.0) -> Path:
    """A role of a run as its checkpoint has it: weights and moments, in two files."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    shares: list[Share] = []
    tensors: dict[str, dict[str, TensorEntry]] = {"weight": {}, "exp_avg": {}}
    for spec in model_spec(MODEL, has_value_head=has_value_head).tensors:
        for kind in tensors:
            tensors[kind][spec.name] = TensorEntry("fp32", spec.shape)
            values = torch.randn(spec.shape, generator=generator)
            if kind == "exp_avg" and spec.name == "decoder.final_layernorm.weight":
                values[3] += change
            shares.append(Share(kind, spec.name, tuple((0, size) for size in spec.shape), values))
    pieces, sizes = [], {}
    for rank in range(2):
        name = f"rank-0000{rank}.safetensors"
        found, sizes[name] = write_shares(folder, name, shares[rank::2])
        pieces += found
    write_manifest(
        folder,
        Manifest(
            model=MODEL,
            has_value_head=has_value_head,
            layout="tp1.pp1.dp2",
            tensors=tensors,
            pieces=tuple(pieces),
            file_bytes=sizes,
            progress=OptimizerProgress(num_steps=20, learning_rate=1e-6),
        ),
    )
    return folder


def write_run(run_dir: Path) -> Path:
    folder = run_dir / "checkpoints"
    write_role(folder / "reference")
    for step in (10, 20):
        path = folder / f"step_{step:06d}"
        write_role(path / "actor", seed=step)
        write_role(path / "critic", seed=step, has_value_head=True)
        places = {"actor": f"{path.name}/actor", "critic": f"{path.name}/critic", "reference": "reference"}
        roles = {
            role: {
                "directory": place,
                "sha256": hashlib.sha256((folder / place / "manifest.json").read_bytes()).hexdigest(),
                "num_bytes": 0,
            }
            for role, place in places.items()
        }
        body = {"format": "hybridflow-job-1", "step": step, "roles": roles, "state": {"step": step}}
        (path / "job.json").write_text(json.dumps({"sha256": digest(body), **body}))
    (folder / "latest").write_text("step_000020\n")
    (folder / "step_000030.tmp").mkdir()
    return run_dir


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_layers_and_experts_that_are_alike_share_a_row():
    one, other = TensorEntry("fp32", (4, 2)), TensorEntry("bf16", (4, 2))
    names = ["embedding.weight", "final.weight"]
    tensors = dict.fromkeys(names, one) | {f"layers.{layer}.fc.weight": one for layer in (0, 1, 2, 4, 5)}
    tensors |= {"layers.3.fc.weight": other, "layers.6.fc.weight": TensorEntry("fp32", (5, 2))}
    tensors |= {f"layers.{layer}.experts.{expert}.up.weight": one for layer in range(2) for expert in range(4)}
    # The third layer has the first three experts alone, so it is no part of the product.
    tensors |= {f"layers.2.experts.{expert}.up.weight": one for expert in range(3)}
    assert collapse(tensors) == [
        ("embedding.weight", one),
        ("final.weight", one),
        ("layers.0-2,4-5.fc.weight", one),
        ("layers.3.fc.weight", other),
        ("layers.6.fc.weight", TensorEntry("fp32", (5, 2))),
        ("layers.0-1.experts.0-3.up.weight", one),
        ("layers.2.experts.0-2.up.weight", one),
    ]


def test_role_of_a_run_is_shown_from_its_headers(tmp_path, capsys):
    path = write_role(tmp_path / "actor")
    assert hybridflow("inspect", path) == 0
    out = capsys.readouterr().out
    # 3 layers of attention 8*8 + 24*8, norms 2*8, router 2*8 and 2 experts of 3*8*12, two embeddings, a norm.
    count = 3 * (8 * 8 + 24 * 8 + 2 * 8 + 2 * 8 + 2 * 3 * 8 * 12) + 2 * 11 * 8 + 8
    assert f"{count:,} parameters in 30 tensors: {count * 4 / 1000:.1f} kB fp32" in out
    assert "cut by tp1.pp1.dp2" in out and "20 steps taken, next learning rate 1e-06" in out
    assert "num_experts=2" in out and "norm_eps" not in out
    assert "exp_avg     30 tensors" in out and "hybridflow 0." in out and "not known, giving logits" in out
    assert "decoder.layers.0-2.mlp.experts.0-1.linear_fc1.weight  [2, 12, 8]  fp32" in out
    assert max(map(len, out.splitlines())) <= 120
    assert hybridflow("inspect", path, "--tensors") == 0
    out = capsys.readouterr().out
    assert "  decoder.layers.2.mlp.experts.1.linear_fc2.weight " in out
    assert "  exp_avg:decoder.layers.2.mlp.experts.1.linear_fc2.weight " in out
    assert hybridflow("inspect", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == count and found["progress"] == {"num_steps": 20, "learning_rate": 1e-6}
    assert found["tensors"]["weight"]["decoder.final_layernorm.weight"] == {"dtype": "fp32", "shape": [8]}
    assert set(found["files"]) == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert found["verified"] is None and found["model"]["num_layers"] == 3


def test_run_is_shown_with_its_steps_and_roles(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    for path in (run_dir, run_dir / "checkpoints"):
        assert hybridflow("inspect", path) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == str(run_dir / "checkpoints")
        assert lines[1].startswith("  reference: ")
        assert lines[2] == "  step_000010" and lines[5] == "  step_000020 (latest)"
        assert lines[6].startswith("    actor: ") and lines[6].endswith("in files, 20 optimizer steps")
        assert lines[7].startswith("    critic: ")
        assert lines[8].startswith("  step_000030.tmp: incomplete")
        assert f"actor: {run_dir / 'checkpoints/step_000020/actor'}" in lines
    assert hybridflow("inspect", run_dir / "checkpoints/step_000010") == 0
    out = capsys.readouterr().out
    assert "giving values" in out and "step_000020" not in out
    assert hybridflow("inspect", run_dir, "--json", "--verify") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["latest"] == "step_000020" and found["incomplete"] == ["step_000030.tmp"]
    assert found["members"]["step_000010"]["members"]["critic"]["has_value_head"] is True
    assert found["members"]["step_000010"]["members"]["actor"]["verified"] == "every byte agrees with its hash"


def test_damage_in_a_run_is_told_beside_what_is_whole(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    flip_last_bit(run_dir / "checkpoints/step_000010/critic/rank-00001.safetensors")
    assert hybridflow("inspect", run_dir) == 0, "headers are whole"
    capsys.readouterr()
    assert hybridflow("inspect", run_dir, "--verify") == 3
    out = capsys.readouterr().out
    assert "critic: damaged: " in out and "rank-00001.safetensors: " in out and "has sha256" in out
    (run_dir / "checkpoints/step_000020/actor/rank-00000.safetensors").unlink()
    (run_dir / "checkpoints/step_000020/critic/manifest.json").unlink()
    (run_dir / "checkpoints/step_000010/job.json").write_text("{}")
    assert hybridflow("inspect", run_dir) == 3
    out = capsys.readouterr().out
    assert "rank-00000.safetensors: found no such file" in out and "step_000010: damaged: " in out
    assert "critic/manifest.json: found no such file, expected sha256" in out
    assert hybridflow("inspect", run_dir, "--json") == 3
    assert "no such file" in json.loads(capsys.readouterr().out)["members"]["step_000020"]["members"]["actor"]["error"]


def test_reference_that_a_step_shares_must_be_there(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    (run_dir / "checkpoints/reference/manifest.json").unlink()
    assert hybridflow("inspect", run_dir / "checkpoints/step_000020") == 3
    assert "reference: damaged: " in capsys.readouterr().out


def test_latest_that_names_nothing_is_told(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    (run_dir / "checkpoints/latest").write_bytes(b"step_\xff\n")
    assert hybridflow("inspect", run_dir) == 3
    assert "latest names step_\N{REPLACEMENT CHARACTER}, which is not there" in capsys.readouterr().out
    (run_dir / "checkpoints/latest").unlink()
    assert hybridflow("inspect", run_dir) == 0
    assert "(latest)" not in capsys.readouterr().out
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/latest").write_text("step_000020\n")
    assert hybridflow("inspect", run_dir) == 3
    assert "latest names step_000020, which is not there" in capsys.readouterr().out


def rewrite_manifest(folder: Path, change: Any) -> Path:
    """Change a manifest, whose hash then fits, as someone would who wants to be believed."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest(body), **body}))
    return folder


NAME = "decoder.final_layernorm.weight"
FILE = "rank-00000.safetensors"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["tensors"]["weight"].update({NAME: ["int4", 8]}), "is of dtype 'int4', expected one of"),
        (lambda body: body["tensors"]["weight"].update({NAME: [["fp32"], 8]}), "is malformed: TypeError"),
        (lambda body: body["tensors"]["weight"].update({NAME: ["fp32", -8]}), "found -8, expected an integer"),
        (lambda body: body["tensors"]["weight"].update({NAME: ["fp32", 1e3]}), "found 1000.0, expected an integer"),
        (lambda body: body["tensors"]["weight"].update({NAME: ["fp32", 10**30]}), "and at most 9007199254740992"),
        (lambda body: body["tensors"]["weight"].update({"\x1b]0;a\x07": ["fp32", 0]}), "expected text of printable"),
        (lambda body: body["tensors"].update({"\x9b31m": {}}), r"found '\x9b31m', expected text of printable"),
        (lambda body: body["files"].update({"../" + FILE: body["files"].pop(FILE)}), "expected a plain name of a file"),
        (lambda body: body["files"].update({"/etc/passwd": body["files"].pop(FILE)}), "expected a plain name"),
        (lambda body: body["files"].update({"..": body["files"].pop(FILE)}), "expected a plain name"),
        (lambda body: body["files"][FILE]["pieces"][0].pop(), "is malformed: ValueError"),
        (lambda body: body.update(family="\x1b[2J"), r"found '\x1b[2J', expected text"),
        (lambda body: body.update(written_by={"a": "\u202e"}), "expected text of printable letters"),
        (lambda body: body.update(progress={"num_steps": "7", "learning_rate": 1}), "found 7, expected an integer"),
        (lambda body: body.update(progress={"num_steps": 7, "learning_rate": "x"}), "expected a number"),
        (lambda body: body.update(has_value_head="yes"), "has_value_head is str, expected bool"),
        (lambda body: body.update(notes={"assets": {"../a": "b"}}), "expected a plain name"),
        (lambda body: body.update(notes=[]), "notes is list, expected dict"),
        (lambda body: body["model"].update(num_layers=10**9), "num_layers: expected an integer of at least 1 and at"),
        (lambda body: body["model"].update({"\x1b[31m": 1}), r"\u001b[31m: unknown key"),
    ],
)
def test_manifest_that_says_what_none_of_ours_does(change, words, tmp_path, capsys):
    path = rewrite_manifest(write_role(tmp_path / "actor"), change)
    for command in (("inspect", path), ("diff", path, path), ("convert", path, tmp_path / "out", "--to", "hf")):
        capsys.readouterr()
        assert hybridflow(*command) == 3
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("hybridflow: ") and words in err and err.count("\n") == 1
        assert len(err) < 2000 and err[:-1].isprintable()
    assert not (tmp_path / "out.part").exists()


def test_pieces_that_would_take_hours_to_compare_are_refused(monkeypatch):
    """Rows, and columns below them: in either dim half of the boxes are side by side."""
    boxes = [((row, row + 1), (0, 100)) for row in range(100)]
    boxes += [((100, 200), (column, column + 1)) for column in range(100)]
    assert overlap(boxes) is None
    monkeypatch.setattr(manifest, "_MOST_COMPARED", 1000)
    with pytest.raises(ValueError, match="200 pieces of a tensor lie as no layout cuts it"):
        overlap(boxes)


def test_what_is_printed_holds_no_command_for_a_terminal(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run\x1b[31m")
    (run_dir / "checkpoints/latest").write_text("step\x1b[2J\x9b\u202e\nok\x7f")
    assert hybridflow("inspect", run_dir) == 3
    out = capsys.readouterr().out
    assert r"latest names step\u001b[2J\u009b\u202e ok\u007f, which is not there" in out
    assert r"run\u001b[31m" in out and all(line.isprintable() for line in out.split("\n"))
    assert hybridflow("inspect", run_dir, "--json") == 3
    assert json.loads(capsys.readouterr().out)["latest"] == "step\x1b[2J\x9b\u202e\nok\x7f"
    assert hybridflow("inspect", tmp_path / "a\nhybridflow: all is well\x1b[0m") == 3
    assert capsys.readouterr().err.count("\n") == 2, "the second line is indented"


@pytest.mark.parametrize("name", ["manifest.json", "../job.json", "../../latest"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    path = run_dir / "checkpoints/step_000020/actor" / name
    path.unlink()
    os.mkfifo(path)
    assert hybridflow("inspect", run_dir) == 3


def test_model_directories_are_shown_without_torch(tmp_path):
    run_dir = write_run(tmp_path / "run")
    code = (
        "import sys\nfrom hybridflow import cli\n"
        f"assert cli.main(['inspect', {str(run_dir)!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reader_that_goes_away_is_no_failure(tmp_path):
    path = write_role(tmp_path / "actor")
    code = "import sys; from hybridflow import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "inspect", str(path), "--tensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


def test_a_pointer_of_another_program_makes_no_run_of_a_model(tmp_path, capsys):
    """DeepSpeed leaves such a file beside the model or the adapter that the trainer of transformers saves."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "hf")
    make_adapter(tmp_path / "peft", model, {"q_proj": 4}, {"base_model_name_or_path": str(tmp_path / "hf")})
    for name in ("hf", "peft"):
        (tmp_path / name / "latest").write_text("global_step10")
        assert hybridflow("diff", tmp_path / name, tmp_path / name) == 0
        capsys.readouterr()
        assert hybridflow("inspect", tmp_path / name) == 0
        assert f"{name}, not cut" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "diff"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_command_without_a_traceback(command, number, tmp_path, monkeypatch, capsys):
    path = write_role(tmp_path / "actor")

    def interrupted(*args: Any) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(TensorFile, "sha256", interrupted)
    words = (path, "--verify") if command == "inspect" else (path, path)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert hybridflow(command, *words) == 128 + number
    assert capsys.readouterr().err == f"hybridflow: ended by {number.name}\n"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_verifying_reads_every_byte_and_says_what_was_compared(tmp_path, capsys, monkeypatch):
    """A tensor of a mapped file is not read by asking for it."""
    make_model("llama").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", "megatron-dist", tmp_path / "dist")
    read_bytes, crc32 = [], zlib.crc32

    def counted(data: Any, *args: Any) -> int:
        read_bytes.append(len(data))
        return crc32(data, *args)

    monkeypatch.setattr(contents.zlib, "crc32", counted)
    assert hybridflow("inspect", tmp_path / "hf", "--verify") == 0
    assert sum(read_bytes) == 4 * 21_984
    capsys.readouterr()
    assert hybridflow("inspect", tmp_path / "dist", "--verify") == 0
    assert "every tensor agrees with its checksum, a CRC-32" in capsys.readouterr().out
    # Files of an iteration that is not the latest are not counted.
    (tmp_path / "dist/iter_0000001").mkdir()
    (tmp_path / "dist/iter_0000001/other").touch()
    assert hybridflow("inspect", tmp_path / "dist", "--json") == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert "release/.metadata" in files and "assets/config.json" in files and "iter_0000001/other" not in files


def test_verifying_compares_small_files_too(tmp_path, capsys):
    make_model("llama").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", "megatron", tmp_path / "cut")
    convert(tmp_path / "hf", "hdf5", tmp_path / "whole.h5")
    (tmp_path / "cut/assets/config.json").write_text("{}")
    with h5py.File(tmp_path / "whole.h5", "a") as file:
        file["assets/config.json"][0] ^= 1
    capsys.readouterr()
    for name, words in (("cut", "config.json: found other bytes"), ("whole.h5", "config.json has another sha256")):
        assert hybridflow("inspect", tmp_path / name) == 0
        assert hybridflow("inspect", tmp_path / name, "--verify") == 3
        assert words in capsys.readouterr().err
    assert hybridflow("inspect", tmp_path / "whole.h5", "--json") == 0
    size = (tmp_path / "whole.h5").stat().st_size
    assert json.loads(capsys.readouterr().out)["files"] == {"whole.h5": size}


def test_hugging_face_and_adapters_are_shown(tmp_path, capsys):
    model = make_model("reward")
    model.save_pretrained(tmp_path / "hf")
    make_adapter(tmp_path / "adapter", model, {"q_proj": 4}, {"base_model_name_or_path": str(tmp_path / "hf")})
    convert(tmp_path / "adapter", "megatron", tmp_path / "cut", layout=ParallelLayout(tp=2))
    capsys.readouterr()
    assert hybridflow("inspect", tmp_path / "hf", "--verify") == 0
    out = capsys.readouterr().out
    assert "hf, not cut" in out and "llama, giving values" in out and "value_head.weight" in out
    assert "hf has no hashes, so that only the structure" in " ".join(out.split())
    for name, cut in (("adapter", "peft, not cut"), ("cut", "megatron, cut by tp2.pp1.dp1")):
        assert hybridflow("inspect", tmp_path / name) == 0
        out = capsys.readouterr().out
        assert cut in out and "LoRA, r=4 lora_alpha=8" in out
        assert "decoder.layers.0-1.self_attention.linear_qkv.lora.q.B  [32, 4]  fp32" in out
    assert hybridflow("inspect", tmp_path / "cut", "--json", "--verify") == 0
    assert json.loads(capsys.readouterr().out)["adapter"]["target_modules"] == ["q_proj"]
    make_adapter(tmp_path / "bare", model, {"q_proj": 4}, {})
    assert hybridflow("inspect", tmp_path / "bare") != 0 and "--base" in capsys.readouterr().err
    assert hybridflow("inspect", tmp_path / "bare", "--base", tmp_path / "hf", "--verify") == 0


@pytest.mark.parametrize(
    ("spoil", "status", "words"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"\x08"), 3, "model.safetensors: cannot be read"),
        (lambda path: (path / "config.json").write_text("{"), 3, "config.json: found"),
        (lambda path: (path / "config.json").write_text('{"model_type": "bert"}'), 2, "model_type='bert'"),
        (lambda path: (path / "model.safetensors").unlink(), 3, "expected model.safetensors"),
        (lambda path: path.rename(path.with_name("gone")), 3, "found nothing, expected a checkpoint"),
    ],
)
def test_errors_have_their_status(spoil, status, words, tmp_path, capsys):
    path = tmp_path / "hf"
    for name in ("hf", "whole"):
        make_model("llama").save_pretrained(tmp_path / name)
    spoil(path)
    for command in (("inspect", path), ("diff", tmp_path / "whole", path), ("diff", path, tmp_path / "whole")):
        capsys.readouterr()
        assert hybridflow(*command) == status
        err = capsys.readouterr().err
        assert err.startswith("hybridflow: ") and words in err and "Traceback" not in err


def changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of a Hugging Face directory with other tensors."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_formats_and_layouts_are_equal(tmp_path, capsys):
    make_model("llama").save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    convert(source, "megatron", tmp_path / "cut", layout=ParallelLayout(tp=2, pp=2))
    convert(source, "megatron", tmp_path / "bf16", dtype="bf16")
    convert(tmp_path / "bf16", "hf", tmp_path / "fp32", dtype="fp32")
    capsys.readouterr()
    assert hybridflow("diff", tmp_path / "hf", tmp_path / "cut") == 0
    assert capsys.readouterr().out == "equal: 15 tensors, 21,984 parameters\n"
    assert hybridflow("diff", tmp_path / "bf16", tmp_path / "fp32") == 5
    assert capsys.readouterr().out == (
        "equal but for dtype: 15 tensors, 21,984 parameters; 15 of these tensors are bf16 and fp32\n"
    )
    assert hybridflow("diff", tmp_path / "hf", tmp_path / "bf16") == 5
    assert "15 of these tensors differ" in capsys.readouterr().out
    assert hybridflow("diff", tmp_path / "cut", tmp_path / "hf", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["num_parameters"] == 21984 and found["tensors"] == []


def test_the_worst_tensors_are_named_with_their_differences(tmp_path, capsys):
    make_model("llama").save_pretrained(tmp_path / "one")
    stem = "model.layers.{}.mlp.down_proj.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        for layer, (size, by) in enumerate([(4.0, 0.5), (2.0, -1.0)]):
            tensors[stem.format(layer)].clamp_(-1, 1)[3, 5] = size + by
        tensors["lm_head.weight"][100, 31] = math.nan

    changed(
        tmp_path / "one",
        tmp_path / "base",
        lambda tensors: [tensors[stem.format(layer)].clamp_(-1, 1)[3, 5].fill_(4.0 / (layer + 1)) for layer in (0, 1)],
    )
    changed(tmp_path / "base", tmp_path / "other", change)
    capsys.readouterr()
    assert hybridflow("diff", tmp_path / "base", tmp_path / "other", "--json") == 5
    found = json.loads(capsys.readouterr().out)
    assert [each["tensor"] for each in found["tensors"]] == [
        "output_layer.weight",
        "decoder.layers.1.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ]
    nan, second, first = found["tensors"]
    assert (nan["num_not_finite"], nan["num_unequal"], nan["max_abs"], nan["relative"]) == (1, 1, 0.0, 0.0)
    assert (second["max_abs"], second["relative"], second["num_unequal"]) == (1.0, 0.5, 1)
    assert (first["max_abs"], first["relative"]) == (0.5, 0.5 / 4.5)
    assert hybridflow("diff", tmp_path / "base", tmp_path / "other") == 5
    out = capsys.readouterr().out
    assert "3 of these tensors differ" in out and "1 of 1,536" in out and "1 where one is NaN or infinite" in out


def test_ten_are_listed_and_all_on_request(tmp_path, capsys):
    make_model("llama").save_pretrained(tmp_path / "one")
    make_model("llama", seed=6).save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert hybridflow("diff", tmp_path / "one", tmp_path / "other") == 5
    out = capsys.readouterr().out
    assert out.count(" of ") - 1 == 10 and "and 5 more: --all lists them" in out
    assert hybridflow("diff", tmp_path / "one", tmp_path / "other", "--all") == 5
    out = capsys.readouterr().out
    assert out.count(" of ") - 1 == 15 and "more" not in out


def test_what_one_has_alone_shapes_and_settings_are_told(tmp_path, capsys):
    make_model("llama").save_pretrained(tmp_path / "one")
    make_model("reward").save_pretrained(tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    make_model("qwen3").save_pretrained(tmp_path / "qwen3")
    capsys.readouterr()
    assert hybridflow("diff", tmp_path / "one", tmp_path / "other") == 5
    out = capsys.readouterr().out
    assert "setting has_value_head: false in A, true in B" in out and "setting norm_eps: 1e-06 in A, 0.5 in B" in out
    assert "only in A: output_layer.weight" in out and "only in B: value_head.weight" in out
    assert hybridflow("diff", tmp_path / "one", tmp_path / "qwen3", "--json") == 5
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["head_dim"] == [8, 12] and found["settings"]["qk_norm"] == [False, True]
    assert found["shapes"]["decoder.layers.0.self_attention.linear_proj.weight"] == [[32, 32], [32, 48]]
    assert "decoder.layers.1.self_attention.q_layernorm.weight" in found["only_in_other"]


def test_adapters_of_two_scales_are_different(tmp_path, capsys):
    """Their factors are equal, and what they add to the weights is not."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "hf")
    base = {"base_model_name_or_path": str(tmp_path / "hf")}
    changes = {"one": {}, "same": {"alpha_pattern": {"q_proj": 8}}, "stable": {"use_rslora": True}}
    for name, change in {**changes, "part": {"alpha_pattern": {"0.self_attn.q_proj": 4}}}.items():
        make_adapter(tmp_path / name, model, {"q_proj": 4}, {**base, **change})
    capsys.readouterr()
    assert hybridflow("diff", tmp_path / "one", tmp_path / "same") == 0
    assert hybridflow("diff", tmp_path / "one", tmp_path / "stable") == 5
    assert "setting lora_scale: 2.0 in A, 4.0 in B" in capsys.readouterr().out
    assert hybridflow("diff", tmp_path / "one", tmp_path / "part") == 5
    assert '0.self_attn.q_proj": 1.0' in capsys.readouterr().out


def test_settings_that_say_the_same_in_other_words_are_equal(tmp_path):
    one = open_source(write_role(tmp_path / "one"))
    other = open_source(write_role(tmp_path / "other"))
    same = dict(num_query_groups=2, head_dim=4, vocab_divisible_by=8, init_std=0.5, attention_scale=0.5)
    other.model = dataclasses.replace(MODEL, **same)
    assert differing_settings(one, other) == ()
    other.model = dataclasses.replace(MODEL, **{**same, "attention_scale": 0.25, "window": 4})
    assert differing_settings(one, other) == (
        ("attention_scale", 0.5, 0.25),
        ("window", None, 4),
        ("window_layers", None, [0, 1, 2]),
    )
    long = RotaryScaling(kind="longrope", original_context=16, short_factor=(1.0, 2.0), long_factor=(3.0, 4.0))
    for scaling, expected in ((None, ()), (long, (("max_context", 16, 17),))):
        one.model = dataclasses.replace(MODEL, rotary_scaling=scaling)
        other.model = dataclasses.replace(one.model, max_context=17)
        assert differing_settings(one, other) == expected


def test_moments_are_compared_on_request(tmp_path, capsys):
    one, same, other = (write_role(tmp_path / name, change=by) for name, by in (("a", 0), ("b", 0), ("c", 0.25)))
    assert hybridflow("diff", one, other) == 0
    assert hybridflow("diff", one, same, "--optimizer") == 0
    capsys.readouterr()
    assert hybridflow("diff", one, other, "--optimizer") == 5
    out = capsys.readouterr().out
    assert "exp_avg:decoder.final_layernorm.weight" in out and "1 of these tensors differ" in out
    make_model("llama").save_pretrained(tmp_path / "hf")
    assert hybridflow("diff", one, tmp_path / "hf", "--optimizer") == 2
    assert "has no optimizer's state to compare; leave --optimizer out" in capsys.readouterr().err


def test_damage_is_found_while_comparing(tmp_path, capsys):
    one, other = (write_role(tmp_path / name) for name in ("a", "b"))
    flip_last_bit(other / "rank-00001.safetensors")
    assert hybridflow("diff", one, other, "--optimizer") == 3
    assert "its bytes are not those that were written" in capsys.readouterr().err


class Held:
    """Tensors in memory."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors
        self.tensors = {name: entry_of(each) for name, each in tensors.items()}

    def read(self, tensor: str) -> Tensor:
        return self._tensors[tensor]

    def release(self) -> None:
        pass


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [  # unequal elements, those not finite, max|a - b|, over the largest magnitude
        ([1.0, 2.0], [1.0, 2.0], None),
        ([NAN, INF, -INF], [NAN, INF, -INF], None),
        ([0.0, 1.0], [-0.0, 1.0], (0, 0, 0.0, 0.0)),
        ([1.0, NAN], [1.0, 2.0], (1, 1, 0.0, 0.0)),
        ([INF, 4.0], [-INF, 3.0], (2, 1, 1.0, 0.25)),
        ([INF, 1.0], [5.0, 1.0], (1, 1, 0.0, 0.0)),
        ([16.0, 1.0], [NAN, 2.0], (2, 1, 1.0, 1 / 16)),
        ([0.0, 0.0], [0.0, 1e-30], (1, 0, 1e-30, 1.0)),
        ([3e38], [-3e38], (1, 0, 6e38, 2.0)),
        ([1.0, 8.0], [1.0 + 2**-20, 8.0], (1, 0, 2**-20, 2**-23)),
    ],
)
def test_differences_worked_out_by_hand(one, other, expected, monkeypatch):
    for block in (1 << 20, 1):
        monkeypatch.setattr(differences, "_BLOCK_ELEMENTS", block)
        found = compare(Held(w=torch.tensor(one)), Held(w=torch.tensor(other)))
        if expected is None:
            assert found.is_equal
            continue
        (w,) = found.compared
        assert (w.num_unequal, w.num_not_finite) == expected[:2]
        assert (w.max_abs, w.relative) == pytest.approx(expected[2:], rel=1e-6)
        assert not found.is_equal and not found.is_equal_but_for_dtype
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["tensors"][0]["max_abs"] == w.max_abs


def test_order_of_tensors_and_dtypes_make_no_difference_of_value():
    one = Held(a=torch.tensor([1.0, NAN]), b=torch.ones(0, 3), c=torch.ones(2))
    other = Held(c=torch.ones(2).half(), b=torch.ones(0, 3), a=torch.tensor([1.0, NAN]).bfloat16())
    found = compare(one, other)
    assert found.is_equal_but_for_dtype and not found.is_equal and len(found.compared) == 2


def test_examples_are_understood():
    page = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text(encoding="utf-8")
    lines = [
        line.strip().partition(" | ")[0]
        for text in (page, _INSPECT_EXAMPLES, _DIFF_EXAMPLES)
        for line in text.splitlines()
    ]
    commands = [shlex.split(line) for line in lines if re.match(r"hybridflow (inspect|diff|convert) ", line)]
    assert {words[1] for words in commands} == {"inspect", "diff", "convert"}
    for words in commands:
        assert callable(cli._parse(words[1:]).run)
