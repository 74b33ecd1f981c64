"""Tensors that lie scattered in memory are written, and hashed, in their row-major order."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.checkpoint import tensor_file
from hybridflow.checkpoint.tensor_file import DTYPE_NAMES, Entry, TensorFileWriter


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
    writer = TensorFileWriter(
        tmp_path / "f", {name: Entry(DTYPE_NAMES[view.dtype], tuple(view.shape)) for name, view in views.items()}
    )
    hashes = {name: writer.write(name, view) for name, view in views.items()}
    writer.close()
    found = load_file(tmp_path / "f")
    for name, view in views.items():
        assert torch.equal(found[name], view), name
        raw = view.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if view.numel() else b""
        assert hashes[name] == hashlib.sha256(raw).hexdigest(), name
