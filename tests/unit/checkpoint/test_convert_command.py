"""``hybridflow convert`` as a user, a pipeline or a launcher meets it."""

import contextlib
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hybridflow import cli
from hybridflow.checkpoint.convert import command as convert_command
from hybridflow.checkpoint.convert import ranks as convert_ranks
from hybridflow.checkpoint.convert import write as convert_write
from hybridflow.checkpoint.convert.journal import part_folder
from hybridflow.checkpoint.convert.progress import rss_anon_bytes
from hybridflow.checkpoint.formats import registry
from hybridflow.checkpoint.formats.torch_archive import ArchivesWriter
from hybridflow.checkpoint.tensor_file import TensorFileWriter
from hybridflow.errors import CheckpointError
from tests.e2e.commands import fork_ranks
from tests.support.convert_doubles import fork, wait_for
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
HIDDEN = 16

torch.set_num_threads(1)


def write_llama(path: Path, *, hidden: int = HIDDEN, ffn: int = 24, layers: int = 2, vocab: int = 31) -> None:
    """A Llama of random numbers: 4 heads and 2 groups."""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    write_model(path, seed=1, **sizes)
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')


def write_adapter(path: Path) -> dict[str, torch.Tensor]:
    """An adapter of rank 2 for one projection, as PEFT would save it; gives what it adds to which tensor."""
    generator, name = torch.Generator().manual_seed(2), "model.layers.1.self_attn.o_proj"
    a, b = torch.randn((2, HIDDEN), generator=generator), torch.randn((HIDDEN, 2), generator=generator)
    path.mkdir(parents=True)
    save_file(
        {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b},
        path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "models/llama"}))
    # lora_alpha / r = 3
    return {f"{name}.weight": 3.0 * (b @ a)}


@pytest.fixture(autouse=True)
def one_tensor_at_a_time(monkeypatch):
    """The tensors of these tests are small, and stand for such as are not written several at a time."""
    monkeypatch.setattr(convert_write, "_FLYING_BYTES", 0)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a model."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "models/llama")
    (tmp_path / "out").mkdir()
    return tmp_path


def convert(*words: str) -> int:
    return cli.main(["convert", *words])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


TO_MEGATRON = ("models/llama", "out/m", "--to", "megatron", "--layout", "tp2.pp2")


def test_there_and_back_bit_for_bit_with_a_report(here, capsys):
    before = rss_anon_bytes()
    assert convert(*TO_MEGATRON, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"]["format"] == "hf" and found["source"]["family"] == "llama"
    assert found["target"] == {"path": str(here / "out/m"), "format": "megatron", "layout": "tp2.pp2", "dtype": None}
    original = weights(here / "models/llama")
    assert found["bytes"] == sum(value.nbytes for value in original.values())
    assert found["num_cast"] == found["found_parts"] == 0 and found["seconds"] > 0 and found["mb_per_s"] > 0
    assert 50e6 < found["peak_rss_anon_bytes"] < before + 500e6
    assert sorted(found["files"]) == [f"tp0{tp}-pp0{pp}.safetensors" for tp in (0, 1) for pp in (0, 1)]
    assert all(re.fullmatch("[0-9a-f]{64}", sha) for file in found["files"].values() for sha in file["sha256"].values())
    assert convert("out/m", "out/back", "--to", "hf") == 0
    table = capsys.readouterr().out
    assert re.search(r"^from +megatron out/m, tp2\.pp2", table, re.MULTILINE) and re.search(
        r"^memory +[\d.]+ [MG]B at the peak", table, re.MULTILINE
    )
    assert same(weights(here / "out/back"), original)
    assert (here / "out/back/tokenizer_config.json").read_bytes() == (
        here / "models/llama/tokenizer_config.json"
    ).read_bytes()
    assert sorted(path.name for path in (here / "out").iterdir()) == ["back", "m"]


def test_dtype_is_cast_on_the_way(here, capsys):
    assert (
        convert("models/llama", "out/h", "--to", "hf", "--dtype", "bf16", "--max-shard-gb", "0.000004", "--json") == 0
    )
    found, original = json.loads(capsys.readouterr().out), weights(here / "models/llama")
    assert found["num_cast"] == found["num_tensors"] > 0 and len(found["files"]) > 1
    assert same(weights(here / "out/h"), {name: value.bfloat16() for name, value in original.items()})


def test_adapter_is_merged_and_converted(here, capsys):
    added = write_adapter(here / "adapters/math")
    assert convert("models/llama", "out/merged", "--to", "hf", "--merge-lora", "adapters/math") == 0
    assert f"adapter     {here / 'adapters/math'}, added to the weights\n" in capsys.readouterr().out
    original, merged = weights(here / "models/llama"), weights(here / "out/merged")
    for name, value in original.items():
        assert torch.allclose(merged[name], value + added.get(name, 0), rtol=1e-6, atol=1e-6), name
    assert not torch.equal(
        merged["model.layers.1.self_attn.o_proj.weight"], original["model.layers.1.self_attn.o_proj.weight"]
    )
    assert convert("adapters/math", "out/cut", "--to", "megatron", "--layout", "tp2", "--base", "models/llama") == 0
    capsys.readouterr()
    assert convert("out/cut", "out/adapter", "--to", "peft") == 0
    # No config.json, which lies with the base alone.
    (listed,) = re.findall("small files (.*)", capsys.readouterr().out)
    written = {path.name for path in (here / "out/adapter").iterdir()}
    assert {*listed.split(", ")} == written - {"adapter_model.safetensors"}
    assert same(weights(here / "out/adapter"), weights(here / "adapters/math"))
    capsys.readouterr()
    assert convert("adapters/math", "out/hf", "--to", "hf") == 2
    assert "adapter" in capsys.readouterr().err


OF_BASE = {"tokenizer.json": "base", "tokenizer_config.json": "base", "chat_template.jinja": "base"}
WHOLE = {"tokenizer.model": "own", "chat_template.jinja": "own"}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, OF_BASE),
        ({"chat_template.jinja": "own"}, {**OF_BASE, "chat_template.jinja": "own"}),
        (WHOLE, WHOLE),
        ({"tokenizer_config.json": "own"}, OF_BASE),
    ],
)
def test_what_lies_beside_an_adapter_goes_into_the_merged_model(here, own, expected):
    """A fine-tuned tokenizer and chat template lie beside the adapter; a tokenizer comes from one of the two alone."""
    write_adapter(here / "adapters/math")
    for folder, files in (("models/llama", OF_BASE), ("adapters/math", own)):
        for name, text in files.items():
            (here / folder / name).write_text(text)
    assert convert("models/llama", "out/merged", "--to", "hf", "--merge-lora", "adapters/math") == 0
    found = {path.name: path for path in (here / "out/merged").iterdir() if path.suffix != ".safetensors"}
    assert json.loads(found.pop("config.json").read_text())["model_type"] == "llama"
    found.pop("generation_config.json", None)
    assert {name: path.read_text() for name, path in found.items()} == expected


def test_formats_of_others_there_and_back(here, capsys):
    for words in (("hdf5",), ("hdf5", "--layout", "tp2.pp2"), ("megatron-dist",)):
        assert convert("models/llama", "out/x", "--to", *words) == 0, capsys.readouterr().err
        assert (here / "out/x").is_dir() == (words != ("hdf5",))
        assert convert("out/x", "out/back", "--to", "hf", "--family", "llama") == 0, capsys.readouterr().err
        assert same(weights(here / "out/back"), weights(here / "models/llama"))
        shutil.rmtree(here / "out/back")
        (shutil.rmtree if (here / "out/x").is_dir() else os.remove)(here / "out/x")


def test_a_tokenizer_that_did_not_come_along_is_told(here, capsys):
    """As of a checkpoint of Megatron-LM, beside which none lies."""

    def told(source, out):
        assert convert(source, out, "--to", "megatron-dist") == 0
        (line,) = re.findall(r"^small files (.+)$", capsys.readouterr().out, re.MULTILINE)
        return line

    assert "config.json" in told("models/llama", "out/a") and "no tokenizer: copy it beside" in told("out/a", "out/b")
    shutil.rmtree(here / "out/b/assets")
    assert told("out/b", "out/c") == "none; no tokenizer: copy it beside, and set eos_token_id in config.json"
    write_tokenizer(here / "out/b/assets")
    assert told("out/b", "out/d") == "tokenizer.json, tokenizer_config.json"
    assert convert("out/b", "out/e", "--to", "hf", "--json") == 0
    assert json.loads(capsys.readouterr().out)["small_files"] == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("form", ["megatron", "hdf5", "megatron-dist", "hf"])
def test_all_that_a_tokenizer_needs_travels_along(here, capsys, form):
    """Its code, where it is made by code of its own, and each of its chat templates."""
    model = here / "models/llama"
    write_tokenizer(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}{{ messages }}"}
    tokenizer.save_pretrained(model)
    assert (model / "additional_chat_templates/tool_use.jinja").is_file()
    (model / "other.py").write_text("raise SystemExit")
    assert convert("models/llama", "out/plain", "--to", form) == 0, capsys.readouterr().err
    assert convert("out/plain", "out/back", "--to", "hf", "--family", "llama") == 0, capsys.readouterr().err
    assert AutoTokenizer.from_pretrained(here / "out/back").chat_template == tokenizer.chat_template
    assert not [*(here / "out/back").glob("*.py")]
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", None]}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "tokenization_own.py").write_text("import other")
    assert convert("models/llama", "out/coded", "--to", form) == 0, capsys.readouterr().err
    assert convert("out/coded", "out/again", "--to", "hf", "--family", "llama") == 0, capsys.readouterr().err
    for name in ("tokenization_own.py", "other.py"):
        assert (here / "out/again" / name).read_bytes() == (model / name).read_bytes()


def test_dry_run_prints_the_mapping_and_writes_nothing(here, capsys):
    before = names(here)
    assert convert(*TO_MEGATRON, "--dry-run") == 0
    text = capsys.readouterr().out
    names_of_qkv = ", ".join(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    line = next(line for line in text.splitlines() if names_of_qkv in line)
    logical = line.split("  <- ")[0]
    # Two query groups of (2 + 1 + 1) * 4 rows, one on each tensor parallel rank; layer 1 is on the second stage.
    assert f"{line}\n    tp00-pp01.safetensors  {logical}  fp32 [16, 16]  1024 B\n" in text
    assert "nothing was written" in text
    assert convert(*TO_MEGATRON, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == sum(at["bytes"] for row in found["tensors"] for at in row["to"])
    assert names(here) == before


def test_reader_that_goes_away_is_no_failure(here):
    code = "import sys; from hybridflow import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "convert", *TO_MEGATRON, "--json"]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "megatron", "--layout", "tp3"), "tp=3"),
        (("--to", "megatron", "--layout", "two"), "layout 'two'"),
        (("--to", "hf", "--layout", "tp2"), "--layout: format hf has no such option"),
        (("--to", "megatron", "--max-shard-gb", "1"), "--max-shard-gb: format megatron has no such option"),
        (("--to", "hf", "--max-shard-gb", "0"), "--max-shard-gb 0"),
        (("--to", "hf", "--max-shard-gb", "1e-12"), "--max-shard-gb 1e-12"),
        (("--to", "hf", "--max-shard-gb", "1e300"), "--max-shard-gb 1e+300"),
        (("--to", "hf", "--base", "models/llama"), "is of format hf; leave --base out"),
        (("--to", "hf", "--max-shard-gb", "inf"), "--max-shard-gb inf"),
        (("--to", "hf", "--deadline", "nan"), "--deadline nan"),
        (("--to", "hf", "--family", "gpt5"), "--family gpt5: not known"),
        # Its norms are around 1, which a model directory would tell no one before it is exported.
        (("--to", "megatron", "--family", "gemma"), "family gemma has no models with zero_centered_norms=False"),
        (("--to", "hf", "--from", "peft"), "is of format hf; leave --from out"),
    ],
)
def test_request_that_cannot_be_met(here, capsys, words, message):
    before = names(here)
    assert convert("models/llama", "out/x", *words) == 2
    assert message in capsys.readouterr().err
    assert names(here) == before


@pytest.mark.parametrize(
    "words", [(), ("a",), ("a", "b"), ("a", "b", "--to", "word"), ("a", "b", "--to", "hf", "--fast")]
)
def test_arguments_that_are_not_understood(here, words):
    with pytest.raises(SystemExit) as ended:
        convert(*words)
    assert ended.value.code == 2


def test_number_beyond_fp16_and_unknown_family(here, capsys):
    values = weights(here / "models/llama")
    values["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    save_file(values, here / "models/llama/model.safetensors")
    assert convert(*TO_MEGATRON, "--dtype", "fp16") == 2
    assert re.search(r"layers\.1\..*: holds 70000, beyond 65504", capsys.readouterr().err)
    assert not (here / "out/m").exists()
    config = json.loads((here / "models/llama/config.json").read_text())
    (here / "models/llama/config.json").write_text(
        json.dumps({**config, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    assert convert("models/llama", "out/y", "--to", "megatron") == 2
    assert "mamba" in capsys.readouterr().err.lower()


def test_damaged_sources(here, capsys):
    assert convert(*TO_MEGATRON) == 0
    file = here / "out/m/tp01-pp00.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert convert("out/m", "out/back", "--to", "hf") == 3
    message = capsys.readouterr().err
    assert "tp01-pp00.safetensors: " in message and "sha256" in message and len(message.splitlines()) == 1
    file = here / "models/llama/model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert convert("models/llama", "out/x", "--to", "megatron") == 3
    assert "model.safetensors" in capsys.readouterr().err
    assert convert("models/none", "out/x", "--to", "megatron") == 3
    capsys.readouterr()
    assert convert("m" * 300, "out/x", "--to", "megatron") == 3
    message = capsys.readouterr().err
    assert "File name too long: 'mmm" in message and len(message.splitlines()) == 1
    assert not (here / "out/x").exists() and not (here / "out/back").exists()


def test_targets_that_cannot_be_written(here, capsys):
    (here / "out/m").mkdir()
    assert convert(*TO_MEGATRON) == 4
    assert "out/m: is there already" in capsys.readouterr().err
    assert convert("models/llama", "nowhere/m", "--to", "megatron", "--quiet") == 0
    assert (here / "nowhere/m").is_dir()
    capsys.readouterr()
    assert convert("models/llama", "models/llama/config.json/m", "--to", "megatron") == 4
    assert convert("models/llama", "/", "--to", "megatron") == 4
    assert not list((here / "out/m").iterdir())


def test_file_size_limit_then_none(here):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        os._exit(convert(*TO_MEGATRON, "--quiet"))

    assert wait_for([fork(limited)]) == [4]
    assert not (here / "out/m").exists() and part_folder(here / "out/m").exists()
    assert convert(*TO_MEGATRON) == 0


@contextlib.contextmanager
def open_files(soft: int, hard: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_files_than_the_usual_limit(here, capfd):
    """As of a run of a thousand ranks; every tensor has a file of its own here."""
    write_llama(here / "models/deep", layers=12)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = len(os.listdir("/proc/self/fd")) + 50
    shards = ("--to", "hf", "--max-shard-gb", "1e-9", "--quiet")
    with open_files(few, hard):
        assert convert("models/deep", "out/shards", *shards) == 0
    with open_files(few, hard):
        assert cli.main(["inspect", "out/shards", "--verify"]) == 0
    with open_files(few, hard):
        assert cli.main(["diff", "out/shards", "models/deep"]) == 0

    def limited(source, out, *words):
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        os._exit(convert(source, out, *words))

    capfd.readouterr()
    for source, out, status in (("models/deep", "out/more", 4), ("out/shards", "out/back", 3)):
        assert wait_for([fork(lambda: limited(source, out, *shards))]) == [status]  # noqa: B023
        (line,) = capfd.readouterr().err.splitlines()
        assert "Too many open files" in line and "; raise ulimit -n" in line


def slow_writes(seconds: float, monkeypatch, most: int | None = None) -> None:
    """Take so long for each tensor, and no more of them than so many, until a signal comes."""
    write, count = TensorFileWriter.write, itertools.count()

    def slowly(self, key, tensor):
        time.sleep(600 if next(count) == most else seconds)
        return write(self, key, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", slowly)
    monkeypatch.setattr(convert_write, "_COMMIT_BYTES", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_leaves_what_is_complete(here, capfd, monkeypatch, number):
    assert convert("models/llama", "out/whole", "--to", "megatron", "--layout", "tp2.pp2") == 0
    capfd.readouterr()
    with monkeypatch.context() as patch:
        slow_writes(0.0, patch, most=8)
        child = fork(lambda: os._exit(convert(*TO_MEGATRON)))
        journal = part_folder(here / "out/m") / "journal-00000.jsonl"
        wait_until(lambda: journal.exists() and journal.read_text().count("\n") > 3, what="a journal of some lines")
        os.kill(child, number)
        assert wait_for([child]) == [128 + number]
    message = capfd.readouterr().err
    assert f"ended by {number.name}; {here}/out/m.part is kept, and the same command goes on" in message
    assert convert(*TO_MEGATRON, "--json") == 0
    assert json.loads(capfd.readouterr().out)["found_parts"] > 3
    for path in (here / "out/whole").iterdir():
        if path.suffix == ".safetensors":
            assert (here / "out/m" / path.name).read_bytes() == path.read_bytes(), path


def test_megatron_dist_goes_on_where_it_was(here, capfd, monkeypatch):
    words = ("models/llama", "out/d", "--to", "megatron-dist", "--max-shard-gb", "0.000004")
    assert convert("models/llama", "out/whole", *words[2:]) == 0
    with monkeypatch.context() as patch:
        write, count = ArchivesWriter.write, []

        def dies(self, key, tensor):
            count.append(key)
            if len(count) == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
            return write(self, key, tensor)

        patch.setattr(ArchivesWriter, "write", dies)
        patch.setattr(convert_write, "_COMMIT_BYTES", 1)
        assert wait_for([fork(lambda: os._exit(convert(*words)))]) == [-9]
    capfd.readouterr()
    assert convert(*words, "--json") == 0
    assert json.loads(capfd.readouterr().out)["found_parts"] > 3
    assert names(here / "out/d") == names(here / "out/whole")
    for name in names(here / "out/whole"):
        if name.endswith(".distcp"):
            assert (here / "out/d" / name).read_bytes() == (here / "out/whole" / name).read_bytes()


def test_ranks_of_a_launcher(here):
    done = fork_ranks(["convert", *TO_MEGATRON, "--json"], here, num_ranks=6)
    assert done.codes == (0,) * 6, done.err
    assert len(json.loads(done.out)["files"]) == 4
    assert "rank 4: 4 file(s) need no more ranks" in done.err and "Traceback" not in done.err
    assert convert("out/m", "out/back", "--to", "hf") == 0
    assert same(weights(here / "out/back"), weights(here / "models/llama"))


def test_rank_that_is_killed(here, monkeypatch):
    def hook(rank):
        slow_writes(0.3, monkeypatch)
        if rank == 1:
            monkeypatch.setattr(TensorFileWriter, "write", lambda *args: os.kill(os.getpid(), signal.SIGKILL))

    done = fork_ranks(["convert", *TO_MEGATRON, "--deadline", "2"], here, num_ranks=3, hook=hook)
    assert done.codes[1] == -9 and done.codes[0] == 1 and done.codes[2] in (0, 1), done.err
    assert "rank 1 has made no progress for 2 s" in done.err and "Traceback" not in done.err
    assert not (here / "out/m").exists()
    assert convert(*TO_MEGATRON) == 0


def test_rank_that_does_not_see_the_source_ends_those_that_wait_for_it(here, monkeypatch):
    def hook(rank):
        if rank == 1:
            message = "models/llama: found nothing, expected a checkpoint"
            monkeypatch.setattr(
                registry, "open_source", lambda *args, **kwargs: (_ for _ in ()).throw(CheckpointError(message))
            )

    done = fork_ranks(["convert", *TO_MEGATRON], here, num_ranks=3, hook=hook)
    assert done.codes == (3, 3, 3), done.err
    assert done.err == "hybridflow: rank 1: models/llama: found nothing, expected a checkpoint\n"
    assert not (here / "out/m").exists()


def test_other_job_that_fails_does_not_end_the_one_that_writes(here, monkeypatch, capfd):
    slow_writes(0.1, monkeypatch)
    monkeypatch.setattr(convert_ranks, "_REFUSAL_S", 0.5)
    ranks = [
        fork(lambda rank=rank: (os.environ.update(as_rank(rank, 2)), os._exit(convert(*TO_MEGATRON))))
        for rank in range(2)
    ]
    wait_until((part_folder(here / "out/m") / ".ranks/begin").exists)
    other = fork(lambda: (os.environ.update(as_rank(1, 2)), os._exit(convert(*TO_MEGATRON, "--dtype", "bf16"))))
    assert wait_for([*ranks, other]) == [0, 0, 4], capfd.readouterr().err


def as_rank(rank: int, size: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}


def test_error_of_all_ranks_is_told_by_rank_0_first(here, monkeypatch):
    monkeypatch.setattr(convert_ranks, "_REFUSAL_S", 0.5)
    (here / "out/m").mkdir()
    done = fork_ranks(["convert", *TO_MEGATRON], here, num_ranks=2)
    assert done.codes == (4, 4) and done.err.startswith("hybridflow: ")


def test_examples_of_the_help_run(here, capsys):
    lines = [line.strip() for line in convert_command.EXAMPLES.splitlines() if "hybridflow convert " in line]
    assert len(lines) >= 4
    write_adapter(here / "adapters/math")
    for line in lines:
        words = shlex.split(line.removeprefix("srun "))
        # This model has four heads, two groups and two layers.
        words = [word.replace("tp8.pp4", "tp4.pp2") for word in words]
        assert cli.main(words[1:]) == 0, (line, capsys.readouterr().err)


def test_batch_script(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s|" "$@"; exit 9\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    batch = ["bash", str(ROOT / "slurm/convert.sbatch"), "a b", "out", "--to", "hf"]
    done = subprocess.run(batch, capture_output=True, text=True, check=False)
    assert done.returncode == 9 and done.stdout == "--kill-on-bad-exit=1|hybridflow|convert|a b|out|--to|hf|"


@pytest.mark.slow
def test_memory_stays_within_its_bound(tmp_path):
    """Seen from outside; and the command's own figure is no smaller."""
    write_llama(tmp_path / "llama", hidden=2048, ffn=8192, layers=8, vocab=32000)
    largest = 32000 * 2048 * 4
    words = ["llama", "out", "--to", "megatron", "--layout", "tp2.pp2", "--dtype", "bf16", "--json"]
    command = [sys.executable, "-m", "hybridflow", "convert", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        status = Path(f"/proc/{child.pid}/status").read_text()
        peak = max(peak, int((re.search(r"RssAnon:\s+(\d+)", status) or [0, 0])[1]) * 1024)
        time.sleep(0.005)
    found = json.load(child.stdout)
    assert child.returncode == 0 and peak > 100e6
    assert max(peak, found["peak_rss_anon_bytes"]) <= 2 * largest + 500e6
    assert found["peak_rss_anon_bytes"] >= 0.8 * peak
