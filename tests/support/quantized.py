"""Directories of Hugging Face whose weights lie in codes, as DeepSeek-V3 and GPT-OSS are published."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoint_cases import edit_json

NOT_LINEAR = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "norm.weight")
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def as_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes ``[rows, columns]`` and factors of a weight: the largest of each block becomes 448."""
    rows, columns = (-(-size // width) for size, width in zip(weight.shape, block, strict=True))
    factors = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            factors[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / factors[row, column]).to(torch.float8_e4m3fn)
    return codes, factors


def write_fp8(path: Path, block: tuple[int, int] = (128, 128)) -> Path:
    """Turn the linear layers of a directory into 8-bit floats; all else becomes bf16."""
    coded: dict[str, Tensor] = {}
    for name, value in load_file(path / "model.safetensors").items():
        if value.dim() == 2 and not name.endswith(NOT_LINEAR):
            coded[name], coded[f"{name}_scale_inv"] = as_fp8(value.float(), block)
        else:
            coded[name] = value if name.endswith("e_score_correction_bias") else value.bfloat16()
    save_file(coded, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", dtype="bfloat16", quantization_config={**FP8, "weight_block_size": list(block)})
    return path


def write_mxfp4(path: Path, seed: int = 0) -> Path:
    """Put random codes in place of a directory's experts; all else becomes bf16."""
    generator = torch.Generator().manual_seed(seed)
    coded: dict[str, Tensor] = {}
    for name, value in load_file(path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = value.shape
            shape = (experts, outer, inner // 32)
            coded[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            coded[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        else:
            coded[name] = value.bfloat16()
    save_file(coded, path / "model.safetensors", {"format": "pt"})
    # The published file names no dtype.
    edit_json(path / "config.json", dtype=None, torch_dtype=None, quantization_config=MXFP4)
    return path
