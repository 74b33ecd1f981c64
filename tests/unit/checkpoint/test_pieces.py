"""Tensors that lie scattered in memory are written, and hashed, in their row-major order."""

import hashlib
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.checkpoint import tensor_file
from hybridflow.checkpoint.tensor_file import TensorFileWriter, entry_of


@pytest.mark.parametrize("piece_bytes", [4, 24, 100, 1 << 20])
def test_any_view_is_written_in_order(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", piece_bytes)
    whole = torch.arange(2 * 6 * 5, dtype=torch.float32).view(2, 6, 5)
    views = {
        "whole": whole,
        "rows": whole[:, 2:4],
        "columns": whole[0, :, 1:3],
        "turned": whole.permute(2, 0, 1),
        "line": whole[0, :, 3],
        "steps": whole[1, 0, ::2],
        "scalar": whole[1, 2, 3],
        "empty": whole[:, :, :0],
        "half": whole[:, 1:, 2].bfloat16().t(),
    }
    writer = TensorFileWriter(tmp_path / "f", {name: entry_of(view) for name, view in views.items()})
    hashes = {name: writer.write(name, view) for name, view in views.items()}
    writer.close()
    found = load_file(tmp_path / "f")
    for name, view in views.items():
        assert torch.equal(found[name], view), name
        raw = view.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if view.numel() else b""
        assert hashes[name] == hashlib.sha256(raw).hexdigest(), name


def test_tensors_that_follow_each_other_are_one_view(tmp_path):
    ones, twos, more = torch.ones(3, 2), torch.full((3, 2), 2.0), torch.zeros(4)
    save_file({"a": ones, "b": twos, "c": more, "d": ones + 2}, tmp_path / "f")
    file = tensor_file.TensorFile(tmp_path / "f")
    assert torch.equal(file.read_stacked(["a", "b"]), torch.stack([ones, twos]))
    for keys in (["b", "a"], ["b", "d"], ["b", "c"], ["a", "x"], ["x", "y"]):
        assert file.read_stacked(keys) is None, keys


@pytest.mark.parametrize("has_direct", [True, False])
@pytest.mark.parametrize("buffer_bytes", [8 << 10, 12 << 10])
def test_tensors_larger_than_the_buffer_are_written_whole(tmp_path, monkeypatch, buffer_bytes, has_direct):
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 4 << 10)
    monkeypatch.setattr(tensor_file, "_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(tensor_file, "_OF_THREAD", threading.local())
    if not has_direct:
        monkeypatch.setattr(tensor_file, "_open_direct", lambda path: None)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(size): torch.randn(size, generator=generator).to(dtype)
        for size, dtype in ((3, torch.bfloat16), (1024, torch.float32), (5001, torch.bfloat16), (40_007, torch.float32))
    }
    writer = TensorFileWriter(tmp_path / "f", {name: entry_of(t) for name, t in tensors.items()})
    for name in sorted(tensors):
        assert writer.write(name, tensors[name]) == hashlib.sha256(tensor_file.bytes_of(tensors[name])).hexdigest()
    writer.close()
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
