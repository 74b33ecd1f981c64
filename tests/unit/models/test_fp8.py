"""Weights rounded as FP8 training rounds them, against numbers worked out by hand and e4m3 taken apart bit by bit."""

from __future__ import annotations

import pytest
import torch

from hybridflow.families.fp8 import LAYERS
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import fp8, gpt
from hybridflow.models.fp8 import check_device, is_rounded, rounded
from tests.support.complaints import complains

E4M3 = sorted(
    {(8 + mantissa) / 8 * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)} - {480.0}
    | {mantissa / 8 * 2.0**-6 for mantissa in range(8)}
)
"""All magnitudes of e4m3: 4 bits of exponent with bias 7, 3 of mantissa, subnormals; the largest pattern is NaN."""


def nearest(value: float) -> float:
    """The e4m3 number nearest to a value, of two the one whose last bit is 0, as IEEE 754 rounds."""
    distance = [abs(abs(value) - each) for each in E4M3]
    closest = [index for index, each in enumerate(distance) if each == min(distance)]
    index = min(closest, key=lambda each: each % 2)
    return E4M3[index] * (1 if value >= 0 else -1)


def test_a_block_by_hand():
    # The largest magnitude of the first 32 numbers is 3: 3 / 448 = 0.0067, above 2^-8 = 0.0039, so s = 2^-7.
    # 3 / s = 384 is e4m3. 1.03 / s = 131.84, between 128 and 144: 128, so 1.0. -0.1 / s = -12.8: -13, so -0.1015625.
    # 1e-5 / s = 0.00128; the step is 2^-9 = 0.00195: 0.00195, so 2^-16.
    row = torch.zeros(1, 64)
    row[0, :4] = torch.tensor([3.0, 1.03, -0.1, 1e-5])
    # The second 32 have 448 · 2^-3 = 56 as their largest, so s = 2^-3 exactly: 56 stays, and 5.2 / s = 41.6 is 40.
    row[0, 32:34] = torch.tensor([56.0, 5.2])
    expected = torch.zeros(1, 64)
    expected[0, :4] = torch.tensor([3.0, 1.0, -0.1015625, 2.0**-16])
    expected[0, 32:34] = torch.tensor([56.0, 5.0])
    assert torch.equal(rounded(row, "mxfp8"), expected)
    assert torch.equal(rounded(row.bfloat16(), "mxfp8"), rounded(row.bfloat16().float(), "mxfp8").bfloat16())


@pytest.mark.parametrize(("kind", "rows", "columns"), [("blockwise", 128, 128), ("mxfp8", 1, 32)])
def test_every_number_is_the_nearest_in_its_block(kind, rows, columns):
    generator = torch.Generator().manual_seed(0)
    # Blocks of very different sizes, one of zeros.
    weight = torch.randn(256, 256, generator=generator) * 10 ** torch.linspace(-6, 2, 256)
    weight[:128, :128] = 0
    weight = weight.bfloat16()
    found = rounded(weight, kind)
    assert found.dtype == torch.bfloat16 and found.shape == weight.shape
    chosen = torch.randint(0, 256, (300, 2), generator=generator).tolist() + [[0, 0], [255, 255]]
    for row, column in chosen:
        top, left = row // rows * rows, column // columns * columns
        largest = float(weight[top : top + rows, left : left + columns].float().abs().max())
        scale = 2.0**-140
        while scale < largest / 448:
            scale *= 2
        value = float(weight[row, column])
        # Exactly: a number of four bits times a power of two is there in bf16.
        assert float(found[row, column]) == (nearest(value / scale) * scale if largest else 0.0), (row, column)
    assert torch.equal(rounded(found, kind), found)


def test_what_rounding_changes_is_at_most_a_sixteenth_of_a_normal_number():
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, wide = rounded(weight, "blockwise").float(), weight.float()
    # The scale is at most 4 / 448 or so; numbers above its 2^-6th part are normal, with steps of at most an eighth.
    normal = wide.abs() > 2.0**-6 * 2.0**-6
    assert ((found - wide).abs() <= wide.abs() / 16)[normal].all() and normal.float().mean() > 0.99
    assert (found != wide).float().mean() > 0.5


def test_linear_layers_between_the_embeddings_are_rounded():
    names = ["decoder.layers.3.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"]
    others = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers.0.mlp.linear_fc1.bias"]
    others += ["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "value_head.weight"]
    assert all(map(is_rounded, names)) and not any(map(is_rounded, others)) and len(LAYERS) == 4


MODEL = ModelConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=128, num_attention_heads=2, max_context=8, dtype="bf16"
)


@pytest.mark.parametrize("kind", ["none", "blockwise", "mxfp8"])
def test_megatron_core_is_told(kind):
    config = gpt.transformer_config(MODEL, ParallelLayout(), torch.device("cuda"), kind)
    if kind == "none":
        assert config.fp8 is None
        return
    assert (config.fp8, config.fp8_recipe) == ("e4m3", kind)
    # Weights stay in bf16, attention and its products too.
    assert not config.fp8_param and not config.fp8_dot_product_attention and not config.fp8_multi_head_attention
    assert config.fp8_wgrad and not config.first_last_layers_bf16


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(fp8, "transformer_engine_fault", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    for switch in fp8._SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    return monkeypatch


GPU = torch.device("cuda", 0)


def test_a_cpu_is_refused_before_a_model_is_built():
    says = ["actor.fp8=blockwise", "this rank computes on a CPU, whose layers would ignore it", "set actor.fp8 to none"]
    complains(lambda: check_device("blockwise", torch.device("cpu")), says)
    complains(
        lambda: gpt.build_transformer(
            MODEL, ParallelLayout(), None, torch.device("cpu"), vocab_size=8, fp8="blockwise"
        ),
        says,
    )


def test_a_gpu_of_another_generation_or_an_older_cuda_is_refused(hopper):
    check_device("blockwise", GPU)
    complains(lambda: check_device("mxfp8", GPU), ["actor.fp8=mxfp8", "sm_100", "this one is sm_90"])
    hopper.setattr(torch.version, "cuda", "12.8")
    complains(lambda: check_device("blockwise", GPU), ["CUDA 12.9 or newer", "built for 12.8"])
    hopper.setattr(torch.version, "cuda", "13.0")
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        hopper.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        complains(lambda: check_device("blockwise", GPU), ["sm_90 (Hopper)", "sm_{}{}".format(*capability)])
        if capability[0] != 10:
            complains(lambda: check_device("mxfp8", GPU), ["sm_100", "sm_{}{}".format(*capability)])
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    check_device("mxfp8", GPU)


def test_layers_that_would_ignore_it_or_round_otherwise_are_refused(hopper):
    for switch, value in (("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"), ("NVTE_FP8_BLOCK_AMAX_EPSILON", "1e-4")):
        with pytest.MonkeyPatch.context() as inside:
            inside.setenv(switch, value)
            complains(lambda: check_device("blockwise", GPU), [f"{switch}={value}", "no powers of two"])
    hopper.setattr(fp8, "transformer_engine_fault", lambda: "it is not installed")
    complains(lambda: check_device("blockwise", GPU), ["needs Transformer Engine, and it is not installed"])
