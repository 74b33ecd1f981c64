"""The readers that are fuzzed. Each is given files that are valid, so that a change reaches its depths."""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import pickle
import signal
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import tokenizers
import torch
from pyarrow import parquet

from hybridflow.checkpoint.contents import look
from hybridflow.checkpoint.contents_text import as_text
from hybridflow.checkpoint.formats.hdf5 import HDF5Source
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.formats.unpickle import MappedFile, StoredTensor, TorchArchive, read_pickle
from hybridflow.checkpoint.manifest import NAME, digest
from hybridflow.checkpoint.store import complete_role, complete_step, load_latest, open_role, role_path
from hybridflow.checkpoint.tensor_file import TensorFile
from hybridflow.config.data import DataConfig
from hybridflow.data import fast, hdf5, trial
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.foreign import limit_process
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.load import load_recipe
from hybridflow.shipped import shipped
from tests.fuzz.harness import Case, Target
from tests.support.checkpoint_formats import SMALL, MemorySource
from tests.support.complaints import status_bytes
from tests.support.conversions import convert
from tests.support.row_files import examples_of_file, read_file, write_rows

SEEDS = Path(__file__).parent / "seeds"
_MODEL = replace(SMALL, num_layers=1)
_ROWS = [
    {"prompt": f"{number}+é=☃", "answer": str(number), "level": number, "share": number / 4} for number in range(9)
]
_TEXTS = ("12+34=46", " aé☃ <s> b\n", "a" * 300)


def seeds(name: str) -> list[Case]:
    """The files of a reader that failed once: ``LABEL--NAME`` goes in the place of NAME."""
    found = sorted((SEEDS / name).glob("*--*"))
    return [Case(path.name.partition("--")[2].replace("+", "/"), path.read_bytes()) for path in found]


def _write_recipes(folder: Path) -> Sequence[str]:
    names = ("quickstart.yaml", "grpo.yaml")
    for name in names:
        (folder / name).write_bytes((shipped("launch/recipes") / name).read_bytes())
    return names


def _read_recipe(folder: Path, name: str) -> None:
    load_recipe(folder / name)


def _mended(content: bytes) -> bytes:
    """JSON with the sha256 of itself."""
    try:
        body = json.loads(content)
        del body["sha256"]
        return json.dumps({"sha256": digest(body), **body}).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return content


def _inspected(path: Path) -> None:
    as_text(look(path, base=None, verify=lambda found: found), every_tensor=True)


def _write_manifest(folder: Path) -> Sequence[str]:
    convert(MemorySource(_MODEL), "megatron", folder / "model", layout=ParallelLayout.parse("tp2"))
    return [f"model/{NAME}"]


def _read_manifest(folder: Path, name: str) -> None:
    _inspected(folder / "model")
    source = open_source(folder / "model")
    for tensor in source.tensors:
        source.read(tensor)


def _write_job(folder: Path) -> Sequence[str]:
    convert(MemorySource(_MODEL), "megatron", role_path(folder, 7, "actor", is_frozen=False))
    record = complete_role(folder, 7, "actor", 1000, is_frozen=False)
    complete_step(folder, 7, {"position": 4, "versions": {"torch": "2"}}, {"actor": record}, keep_last=1)
    return ["checkpoints/latest", "checkpoints/step_000007/job.json"]


def _read_job(folder: Path, name: str) -> None:
    checkpoint = load_latest(folder)
    if checkpoint is not None:
        for role in checkpoint.roles:
            open_role(checkpoint, role)
    _inspected(folder)


def _write_pickles(folder: Path) -> Sequence[str]:
    args = argparse.Namespace(hidden_size=16, dtype=torch.float32, names=["a", "b"] * 3, nested={"x": (1, 2.5, None)})
    plain = {"ordered": collections.OrderedDict(a=1), "text": ("é", b"bytes", 10**18), 7: {(1, 2): [None, 2.5]}}
    for protocol, value in ((0, plain), (2, {**plain, "args": args}), (4, {**plain, "args": args, "set": {1, 2}})):
        (folder / f"plain{protocol}.pkl").write_bytes(pickle.dumps(value, protocol))
    tensors = {"w": torch.arange(6.0), "half": torch.ones(2, 2, dtype=torch.bfloat16), "args": args}
    torch.save(tensors, folder / "model.pt")
    with zipfile.ZipFile(folder / "model.pt") as archive:
        (member,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
        (folder / "data.pkl").write_bytes(archive.read(member))
    convert(MemorySource(_MODEL), "megatron-dist", folder / "dist")
    names = ["data.pkl", "model.pt", *(f"plain{protocol}.pkl" for protocol in (0, 2, 4))]
    return [*names, *(f"dist/{path.name}" for path in (folder / "dist").iterdir() if path.is_file())]


def _read_pickle(folder: Path, name: str) -> None:
    path = folder / name
    if name.startswith("dist/"):
        _read_checkpoint(folder / "dist", name)
        return
    if name == "data.pkl":
        # The members of ``model.pt`` with this pickle, and the checksum that it has now.
        path = folder / "wrapped.pt"
        with zipfile.ZipFile(folder / "model.pt") as old, zipfile.ZipFile(path, "w") as new:
            for info in old.infolist():
                new.writestr(info, (folder / name).read_bytes() if info.filename.endswith(name) else old.read(info))
    elif path.suffix == ".pkl":
        read_pickle(path.read_bytes(), name)
        return
    found = TorchArchive(MappedFile(path)).load()
    for value in found.values() if isinstance(found, dict) else ():
        if isinstance(value, StoredTensor):
            value.read().sum()


def _read_checkpoint(path: Path, name: str) -> None:
    source = open_source(path)
    source.assets()
    for tensor in source.tensors:
        source.read(tensor)


def _write_safetensors(folder: Path) -> Sequence[str]:
    convert(MemorySource(_MODEL), "hf", folder / "hf")
    return ["hf/config.json", *(f"hf/{path.name}" for path in (folder / "hf").glob("*.safetensors"))]


def _read_safetensors(folder: Path, name: str) -> None:
    if name.endswith(".safetensors"):
        file = TensorFile(folder / name)
        for key in file.entries:
            file.sha256(key)
            file.read(key).sum()
    _read_checkpoint(folder / "hf", name)


def _write_hdf5(folder: Path) -> Sequence[str]:
    convert(MemorySource(_MODEL), "hdf5", folder / "one.h5")
    convert(MemorySource(_MODEL), "hdf5", folder / "cut", layout=ParallelLayout.parse("tp2"))
    write_rows(folder / "rows", _ROWS, "hdf5")
    return ["one.h5", "cut/model.h5", "cut/tp00-pp00.h5", "rows.h5"]


def _read_hdf5(folder: Path, name: str) -> None:
    hdf5._CPU_S = 1  # of the process that looks through files first
    if name == "rows.h5":
        read_file(folder / name)
        return
    source = HDF5Source(folder / "cut" if name.startswith("cut") else folder / name)
    source.assets()
    for tensor in source.tensors:
        source.read(tensor)


def _write_parquet(folder: Path) -> Sequence[str]:
    messages = [[{"role": "user", "content": row["prompt"]}] * 2 for row in _ROWS]
    table = pyarrow.table({"messages": messages, "answer": [row["answer"] for row in _ROWS]})
    for name, compression in (("plain", "none"), ("snappy", "snappy"), ("zstd", "zstd")):
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=4, compression=compression)
    write_rows(folder / "rows", _ROWS, "parquet")
    return ["plain.parquet", "snappy.parquet", "zstd.parquet", "rows.parquet"]


def _read_rows(folder: Path, name: str) -> None:
    read_file(folder / name)


def _write_lines(folder: Path) -> Sequence[str]:
    content = write_rows(folder / "rows", _ROWS, "jsonl").read_bytes()
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    return ["rows.jsonl", "rows.jsonl.gz"]


def _read_lines(folder: Path, name: str) -> None:
    read_file(folder / name)
    examples_of_file(folder / name, DataConfig(train="", held_out="", on_bad_row="skip"))


def _write_tokenizers(folder: Path) -> Sequence[str]:
    for name, made in {"bpe": _bpe(), "word": _word_piece(), "unigram": _unigram()}.items():
        (folder / name).mkdir()
        made.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text('{"eos_token": "<s>", "pad_token": {"content": "<s>"}}')
    (folder / "pieces").mkdir()
    train_tokenizer(["12+34=46", "a b c"], path=folder / "pieces/tokenizer.model", vocab_size=40)
    files = [f"{name}/tokenizer.json" for name in ("bpe", "word", "unigram")]
    return [*files, "bpe/tokenizer_config.json", "pieces/tokenizer.model"]


def _bpe() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"], show_progress=False)
    made.train_from_iterator([f"{a}+{b}={a + b}" for a in range(9) for b in range(9)], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def _word_piece() -> Any:
    vocabulary = {"<s>": 0, "[UNK]": 1, "a": 2, "##a": 3, "1": 4, "##2": 5, "b": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    replace_space = tokenizers.normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    made.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFKC(), replace_space])
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d{1,3}|\p{L}+"), "isolated")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, tokenizers.pre_tokenizers.BertPreTokenizer()])
    made.decoder = tokenizers.decoders.WordPiece()
    return made


def _unigram() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("<s>", 0.0), ("▁", -1.0), ("a", -2.0), ("12", -3.0)], 0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["<s>", "<pad>"])
    return made


def _read_tokenizer(folder: Path, name: str) -> None:
    # A case would take a quarter of a second if its process were started, and not forked.
    trial._problem = _problem_in_fork  # type: ignore[assignment]
    trial._note = lambda name: None  # type: ignore[assignment]
    tokenizer = open_tokenizer((folder / name).parent)
    tokenizer.pieces()
    for text in _TEXTS:
        tokenizer.decode(tokenizer.encode(text))


def _problem_in_fork(content: bytes) -> str | None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        limit_process(status_bytes("VmSize") + trial._MEMORY_BYTES, cpu_s=1)
        os._exit(1 if fast.complaint(content) else 0)
    _, status = os.waitpid(child, 0)
    return "its trial failed" if status else None


TARGETS = {
    "recipe": Target(
        _write_recipes, _read_recipe, (b"&a ", b"*a", b"<<: *a", b"!!python/name:os.system", b"[{", b": ")
    ),
    "manifest": Target(_write_manifest, _read_manifest, (b'"../x"', b'"fp32"', b'"box"', b"[[0, 1]]"), _mended),
    "job": Target(_write_job, _read_job, (b'"../x"', b"step_000007", b'"state"', b"{"), _mended),
    "pickle": Target(
        _write_pickles, _read_pickle, (b"}", b"]", b")", b"(", b"2", b"\x85", b"\x86", b"q\x00", b"h\x00")
    ),
    "safetensors": Target(_write_safetensors, _read_safetensors, (b'"F32"', b'"F64"', b'"data_offsets"', b"[0,0]")),
    "hdf5": Target(_write_hdf5, _read_hdf5, (b"OHDR", b"FRHP", b"BTHD", b"TREE", b"SNOD", b"HEAP", b"GCOL")),
    "parquet": Target(_write_parquet, _read_rows, (b"PAR1", b"\x15\x00", b"\x16\xff\xff\x7f", b"\x19\x1c", b"\x18")),
    "jsonl": Target(
        _write_lines, _read_lines, (b'{"prompt": "', b'"answer"', b'"messages": [{"role": "user"}]', b"\\u")
    ),
    "tokenizer": Target(
        _write_tokenizers,
        _read_tokenizer,
        (
            b'{"type": "Replace", "pattern": {"String": ""}, "content": "aa"}',
            b'"Regex"',
            b"(a+)+$",
            b'"merges": [["',
            b'""',
        ),
    ),
}
