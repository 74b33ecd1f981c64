"""Weights in 8 and 4 bits: as worked out by hand, as ``transformers`` decodes them, and box by box."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import struct
from inspect import signature

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.checkpoint.formats.quantized import coded_tensors
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.tensor_file import TensorFile
from hybridflow.cli import main
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.quantization import Quantization
from hybridflow.layout.mesh import Coordinate
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import shard
from tests.support.checkpoint_cases import edit_json, make_model, same_bits, save, tensors_of
from tests.support.conversions import convert
from tests.support.quantized import write_fp8, write_mxfp4

transformers = pytest.importorskip("transformers")
from transformers.integrations import mxfp4  # noqa: E402

LINEAR = "model.layers.1.self_attn.q_a_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
DTYPES = (torch.bfloat16, torch.float32)


def coded(path, tensors, block=None):
    """The only tensor of a file."""
    save_file(tensors, path)
    how = Quantization(kind="mxfp4") if block is None else Quantization(kind="fp8", block=block)
    (tensor,) = coded_tensors({"f": TensorFile(path, has_codes=True)}, how, "bf16").values()
    return tensor


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def boxes(shape):
    """Every box of a shape."""
    sides = [list(itertools.combinations(range(size + 1), 2)) for size in shape]
    return itertools.product(*sides)


def test_fp8_by_hand(tmp_path):
    # Sign, 4 bits of exponent less 7, 3 bits of fraction: 0x38 is 1, 0x40 is 2, 0xbc is -1.5, 0x7e is 1.75 * 2^8.
    # An exponent of 0 stands for 2^-6 without the leading 1: 0x01 is 2^-9.
    codes = torch.tensor([[0x38, 0x40, 0xBC], [0x7E, 0x01, 0x80], [0xC0, 0x38, 0x40]], dtype=torch.uint8)
    factors = torch.tensor([[0.5, 3.0], [10.0, 0.25]])
    tensor = coded(tmp_path / "f", {"w": codes.view(torch.float8_e4m3fn), "w_scale_inv": factors}, (2, 2))
    expected = [[0.5, 1.0, -4.5], [224.0, 2.0**-10, -0.0], [-20.0, 10.0, 0.5]]
    for dtype in DTYPES:
        found = tensor.read_box(((0, 3), (0, 3)), dtype)
        assert found.dtype == dtype and torch.equal(bits(found), bits(torch.tensor(expected, dtype=dtype)))


def test_mxfp4_by_hand(tmp_path):
    # Sign, 2 bits of exponent, 1 bit of fraction: 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8 more is the negative.
    # The low half comes first: 0x21 is 0.5 then 1, 0xf7 is 6 then -6.
    codes = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    codes[0, 0, 0, :2] = torch.tensor([0x21, 0xF7])
    codes[0, 1, 0, 15] = 0x93
    scales = torch.tensor([[[128], [126]]], dtype=torch.uint8)  # times 2, times 0.5
    tensor = coded(tmp_path / "f", {"w_blocks": codes, "w_scales": scales})
    expected = torch.zeros(1, 32, 2)
    expected[0, :4, 0] = torch.tensor([1.0, 2.0, 12.0, -12.0])
    expected[0, 30:, 1] = torch.tensor([0.75, -0.25])
    assert tensor.entries["w"].shape == (1, 32, 2)
    for dtype in DTYPES:
        found = tensor.read_box(((0, 1), (0, 32), (0, 2)), dtype)
        assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


def test_factors_of_fp8_may_be_powers_of_two(tmp_path):
    codes = torch.tensor([[0x38, 0x40], [0xBC, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    powers = torch.tensor([[130], [126]], dtype=torch.uint8).view(torch.float8_e8m0fnu)  # times 8, times 0.5
    tensor = coded(tmp_path / "f", {"w": codes, "w_scale_inv": powers}, (1, 2))
    for dtype in DTYPES:
        found = tensor.read_box(((0, 2), (0, 2)), dtype)
        assert torch.equal(found, torch.tensor([[8.0, 16.0], [-0.75, 0.5]], dtype=dtype))


@pytest.mark.parametrize("factor_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_what_transformers_makes_of_it(dtype, factor_dtype, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (384, 256), generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN, which no two computations give the same bits of
    factors = (torch.rand(3, 2, generator=generator) * 1e-2).to(factor_dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(codes.view(torch.float8_e4m3fn), factors, dtype)
    tensor = coded(tmp_path / "f", {"w": codes.view(torch.float8_e4m3fn), "w_scale_inv": factors}, (128, 128))
    assert torch.equal(bits(tensor.read_box(((0, 384), (0, 256)), dtype)), bits(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_what_transformers_makes_of_it(dtype, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(256, (2, 255, 3, 16), generator=generator, dtype=torch.uint8)
    # Every exponent whose weights are finite: 6 * 2^(253 - 127) is below 2^128 * 1.5, 6 * 2^(252 - 127) below 2^128.
    scales = torch.arange(253, dtype=torch.uint8).repeat(7)[: 2 * 255 * 3].view(2, 255, 3).contiguous()
    theirs = convert_moe_packed_tensors(codes, scales, dtype=dtype)
    tensor = coded(tmp_path / "f", {"w_blocks": codes, "w_scales": scales})
    found = tensor.read_box(((0, 2), (0, 96), (0, 255)), dtype)
    assert bool(found.isfinite().all()) and torch.equal(bits(found), bits(theirs))


def test_every_box_of_fp8_is_right_wherever_its_blocks_end(tmp_path):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0x70, (7, 8), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    factors = torch.rand(3, 3, generator=generator)
    tensor = coded(tmp_path / "f", {"w": codes, "w_scale_inv": factors}, (3, 3))
    expected = torch.empty(7, 8)
    for row, column in itertools.product(range(7), range(8)):
        # A product of two fp32 numbers is exact in Python's 64 bits, and rounded once here.
        expected[row, column] = float(codes[row, column].float()) * float(factors[row // 3, column // 3])
    for rows, columns in boxes((7, 8)):
        found = tensor.read_box((rows, columns), torch.float32)
        assert torch.equal(found, expected[slice(*rows), slice(*columns)]), (rows, columns)


def test_every_box_of_mxfp4_is_right_wherever_its_groups_end(tmp_path):
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(256, (2, 3, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 3, 2), generator=generator, dtype=torch.uint8)
    tensor = coded(tmp_path / "f", {"w_blocks": codes, "w_scales": scales})
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    expected = torch.empty(2, 64, 3)
    for expert, column, row in itertools.product(range(2), range(64), range(3)):
        byte = int(codes[expert, row, column // 32, column % 32 // 2])
        code = byte >> 4 if column % 2 else byte & 15
        value = math.ldexp(magnitudes[code & 7], int(scales[expert, row, column // 32]) - 127)
        expected[expert, column, row] = -value if code & 8 else value
    sides = itertools.combinations((0, 1, 2, 31, 32, 33, 63, 64), 2)
    for experts, columns, rows in itertools.product([(0, 1), (1, 2), (0, 2)], sides, [(0, 3), (1, 3), (2, 3)]):
        found = tensor.read_box((experts, columns, rows), torch.float32)
        assert torch.equal(found, expected[slice(*experts), slice(*columns), slice(*rows)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """DeepSeek and Qwen3 in ``fp8``, GPT-OSS in ``mxfp4``. Blocks of 4 divide all sizes, as transformers needs."""
    folder = tmp_path_factory.mktemp("quantized")
    write_fp8(save(make_model("deepseek_v3"), folder / "deepseek_v3"), (4, 4))
    write_fp8(save(make_model("qwen3"), folder / "qwen3"), (4, 4))
    write_mxfp4(save(make_model("gpt_oss", intermediate_size=64), folder / "gpt_oss"))
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "gpt_oss"])
def test_a_written_directory_is_the_model_that_transformers_loads(family, dtype, saved, tmp_path):
    pytest.importorskip("accelerate")
    if (
        family == "gpt_oss"
        and dtype != torch.bfloat16
        and "dtype" not in signature(mxfp4.dequantize_convertops).parameters
    ):
        pytest.skip("this release of transformers decodes mxfp4 to bf16, whatever it is asked for")
    word = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    arguments = ["convert", str(saved / family), str(tmp_path / "ours"), "--to", "hf", "--dtype", word, "--quiet"]
    assert main(arguments) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved / family, dtype=dtype)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())
    assert same_bits(dict(ours.state_dict()), dict(theirs.state_dict()))
    # Without --dtype the few fp32 tensors of DeepSeek stay so.
    assert main(["convert", str(saved / family), str(tmp_path / "again"), "--to", "hf", "--quiet"]) == 0
    assert main(["diff", str(saved / family), str(tmp_path / "again")]) == 0


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "gpt_oss"])
def test_a_rank_decodes_its_box_alone_and_rightly(family, saved, tmp_path):
    source = open_source(saved / family)
    plain = open_source(convert(saved / family, "hf", tmp_path / "plain"))
    spec = model_spec(source.model)
    cuts = 0
    for layout in (ParallelLayout(tp=2), ParallelLayout(tp=4), ParallelLayout(ep=2, dp=2)):
        for tensor, tp in itertools.product(spec.tensors, range(layout.tp)):
            held = shard(tensor, layout, Coordinate(tp=tp, pp=0, dp=0, cp=0), spec.num_layers)
            if held is None:
                continue
            cuts += 1
            expected = plain.read(tensor.name)[tuple(slice(*side) for side in held.box)]
            found = source.read_box(tensor.name, held.box, torch.bfloat16)
            assert torch.equal(found, expected), (tensor.name, layout)
    assert cuts > 3 * len(spec.tensors)


def change(path, **tensors):
    file = path / "model.safetensors"
    merged = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, file)


def rename_dtype(path, name, dtype):
    """Call a tensor's bytes another dtype of as many bits, in the header alone."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


NAN = float("nan")
DAMAGED = {
    "no factors": ("deepseek_v3", lambda p: change(p, **{LINEAR + "_scale_inv": None}), [LINEAR, "scales", "missing"]),
    "few factors": (
        "deepseek_v3",
        lambda p: change(p, **{LINEAR + "_scale_inv": torch.ones(5, 7)}),
        [LINEAR + "_scale_inv", "found shape [5, 7], expected [5, 8]", "[4, 4]"],
    ),
    "factors that are no numbers": (
        "deepseek_v3",
        lambda p: change(p, **{LINEAR + "_scale_inv": torch.full((5, 8), NAN)}),
        [LINEAR + "_scale_inv", "not a number"],
    ),
    "powers that are no numbers": (
        "deepseek_v3",
        lambda p: change(p, **{LINEAR + "_scale_inv": torch.full((5, 8), 255).byte().view(torch.float8_e8m0fnu)}),
        [LINEAR + "_scale_inv", "not a number"],
    ),
    "powers alone": (
        "deepseek_v3",
        lambda p: change(p, spare_scale_inv=torch.full((5, 8), 127).byte().view(torch.float8_e8m0fnu)),
        ["spare_scale_inv: its codes spare are missing"],
    ),
    "bytes as factors": (
        "deepseek_v3",
        lambda p: change(p, **{LINEAR + "_scale_inv": torch.full((5, 8), 127).byte()}),
        [LINEAR + "_scale_inv", "found U8, expected floats or F8_E8M0"],
    ),
    "factors alone": (
        "deepseek_v3",
        lambda p: change(p, **{LINEAR: torch.ones(20, 32).bfloat16()}),
        ["not expected: " + LINEAR + "_scale_inv"],
    ),
    "integers": ("deepseek_v3", lambda p: rename_dtype(p, LINEAR, "U8"), [LINEAR, "found U8", "expected F8_E4M3"]),
    "another float": ("deepseek_v3", lambda p: rename_dtype(p, LINEAR, "F8_E5M2"), [LINEAR, "F8_E5M2"]),
    "wrong shape": (
        "deepseek_v3",
        lambda p: change(
            p,
            **{LINEAR: torch.ones(32, 20).to(torch.float8_e4m3fn), LINEAR + "_scale_inv": torch.ones(8, 5)},
        ),
        [LINEAR, "found shape [32, 20], expected [20, 32]"],
    ),
    "three dims": (
        "deepseek_v3",
        lambda p: change(p, **{LINEAR: torch.ones(2, 10, 32).to(torch.float8_e4m3fn)}),
        [LINEAR, "F8_E4M3 [2, 10, 32]", "2 dims"],
    ),
    "no settings": (
        "deepseek_v3",
        lambda p: edit_json(p / "config.json", quantization_config=None),
        ["F8_E4M3", "expected one of F32"],
    ),
    "no scales": ("gpt_oss", lambda p: change(p, **{EXPERTS + "_scales": None}), [EXPERTS, "scales", "missing"]),
    "no codes": ("gpt_oss", lambda p: change(p, **{EXPERTS + "_blocks": None}), [EXPERTS + "_blocks are missing"]),
    "few scales": (
        "gpt_oss",
        lambda p: change(p, **{EXPERTS + "_scales": torch.ones(4, 128, 2, dtype=torch.uint8)}),
        [EXPERTS + "_scales", "[4, 128, 2], expected U8 [4, 128, 1]"],
    ),
    "scales that are no numbers": (
        "gpt_oss",
        lambda p: change(p, **{EXPERTS + "_scales": torch.full((4, 128, 1), 255, dtype=torch.uint8)}),
        [EXPERTS + "_scales", "not a number"],
    ),
    "groups of 8": (
        "gpt_oss",
        lambda p: change(p, **{EXPERTS + "_blocks": torch.ones(4, 128, 4, 8, dtype=torch.uint8)}),
        [EXPERTS + "_blocks", "[4, 128, 4, 8]", "in / 32, 16"],
    ),
    "too few experts": (
        "gpt_oss",
        lambda p: change(
            p,
            **{
                EXPERTS + "_blocks": torch.ones(3, 128, 1, 16, dtype=torch.uint8),
                EXPERTS + "_scales": torch.ones(3, 128, 1, dtype=torch.uint8),
            },
        ),
        [EXPERTS, "found shape [3, 32, 128], expected [4, 32, 128]"],
    ),
    "another name": (
        "gpt_oss",
        lambda p: change(p, spare=torch.ones(2, dtype=torch.uint8)),
        ["spare", "found U8 [2]", "_blocks"],
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_codes_are_refused_by_name(case, saved, tmp_path):
    family, spoil, messages = DAMAGED[case]
    path = tmp_path / "model"
    shutil.copytree(saved / family, path)
    spoil(path)
    with pytest.raises(CheckpointError) as caught:
        source = open_source(path)
        for name in source.tensors:
            source.read(name)
    for message in [str(path), *messages]:
        assert message in str(caught.value)


def test_codes_and_scales_may_lie_in_two_files(saved, tmp_path):
    tensors = tensors_of(saved / "deepseek_v3")
    path = tmp_path / "model"
    shutil.copytree(saved / "deepseek_v3", path)
    (path / "model.safetensors").unlink()
    one = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    other = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    places = {}
    for file, held in (("model-1.safetensors", one), ("model-2.safetensors", other)):
        save_file(held, path / file)
        places |= dict.fromkeys(held, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    again = convert(path, "hf", tmp_path / "again")
    assert same_bits(tensors_of(again), tensors_of(convert(saved / "deepseek_v3", "hf", tmp_path / "whole")))


@pytest.mark.parametrize(
    ("family", "scales"), [("deepseek_v3", LINEAR + "_scale_inv"), ("gpt_oss", EXPERTS + "_scales")]
)
def test_what_fp16_cannot_hold_is_refused_in_codes_too(family, scales, saved, tmp_path):
    shutil.copytree(saved / family, tmp_path / "model")
    tensors = tensors_of(tmp_path / "model")
    tensors[scales][...] = 147 if family == "gpt_oss" else 1e5  # 2^20 by its exponent
    save_file(tensors, tmp_path / "model/model.safetensors")
    source, name = open_source(tmp_path / "model"), scales.rpartition("_scale")[0]
    logical = next(each for each in source.tensors if name in source.names(each))
    assert float(source.read_as(logical, torch.float32).abs().max()) > 65504
    with pytest.raises(ConfigError, match="beyond 65504, the largest number of fp16"):
        source.read_as(logical, torch.float16)


def test_small_files_beside_decoded_weights_tell_of_no_codes(saved, tmp_path):
    for family in ("deepseek_v3", "gpt_oss"):
        ours = convert(saved / family, "megatron", tmp_path / family, layout=ParallelLayout(tp=2))
        values = json.loads((ours / "assets/config.json").read_text())
        assert "quantization_config" not in values and values["dtype"] == "bfloat16"
