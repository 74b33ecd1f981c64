"""What a recipe is said to need in memory is what its ranks hold: exactly, but for activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping import activations, memory
from hybridflow.models.gpt import build_transformer
from hybridflow.models.layers import recompute_activations
from hybridflow.models.microbatch import pack
from hybridflow.models.shapes import model_spec
from hybridflow.models.training import Trainable
from hybridflow.models.weights import initialize
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.optimizer import OptimizerHoldings
from hybridflow.reshard.plan import held_bytes
from hybridflow.rollout.cpu import kernels
from hybridflow.rollout.cpu.transformer import CpuTransformer
from tests.multi.models import CAPPED, MIXTURE, TINY, VOCAB, make_model, place
from tests.support.described import describe_model
from tests.support.ranks import run_ranks

CASES = [
    (TINY, "bf16", True, False, None),
    (TINY, "fp32", True, True, 5000),
    (TINY, "bf16", False, True, None),
    (CAPPED, "bf16", True, False, 3000),
    (CAPPED, "fp32", False, False, None),
    (MIXTURE, "bf16", False, False, None),
    (MIXTURE, "bf16", True, False, 3000),
]
LAYOUT = ParallelLayout(tp=2, pp=2, dp=2)


def held(
    world, model: ModelConfig, dtype: str, distributed: bool, has_value_head: bool, bucket_size: int | None
) -> tuple[list[int], list[int]]:
    """Bytes of weights, gradients and optimizer state of this rank: as they are, and as arithmetic has them."""
    model, settings = replace(model, dtype=dtype, vocab_size=VOCAB), OptimizerConfig(lr=1e-3, distributed=distributed)
    built, mesh, groups, _ = make_model(world, LAYOUT, model=model, has_value_head=has_value_head)
    trainable = Trainable(built, groups, settings, bucket_size=bucket_size)
    state = trainable.state()
    found = [
        sum(parameter.nbytes for parameter in built.parameters()),
        sum(parameter.main_grad.nbytes for parameter in built.parameters()),
        sum(tensor.nbytes for kind in ("exp_avg", "exp_avg_sq", "master") for tensor in state[kind].values()),
    ]
    spec = model_spec(model, has_value_head=has_value_head)
    weights = held_bytes(spec, WeightHoldings(spec, mesh), world.rank)
    states = OptimizerHoldings(spec, mesh, bucket_size) if distributed else None
    optimizer = memory.optimizer_bytes(states, world.rank, model, weights)
    return found, [weights, memory.gradient_bytes(weights, model), optimizer]


def all_held(world):
    return [held(world, *case) for case in CASES]


def test_weights_gradients_and_optimizer_state_are_counted_to_the_byte():
    by_rank = run_ranks(all_held, LAYOUT.world_size)
    for index, case in enumerate(CASES):
        for rank, cases in enumerate(by_rank):
            found, expected = cases[index]
            assert found == expected, (case[1:], rank)
    # Stages and replicas differ, so that equal numbers are no accident.
    assert len({tuple(cases[0][0]) for cases in by_rank}) > 2


WIDE = ModelConfig(
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=704,
    num_attention_heads=8,
    num_query_groups=2,
    max_context=64,
    vocab_size=VOCAB,
)


LENGTHS = [48, 44, 44]


def kept_by_layers(
    world,
    model: ModelConfig,
    lora: LoRAConfig | None = None,
    layout: ParallelLayout | None = None,
    recompute: str = "none",
    recompute_layers: int | None = None,
) -> tuple[int, int]:
    """Bytes that the layers of a model keep for the backward pass, weights aside: as they are, and as estimated."""
    mesh, groups = place(world, ParallelLayout() if layout is None else layout)
    built = build_transformer(model, mesh.layout, groups, world.device, vocab_size=VOCAB, lora=lora)
    initialize(built, describe_model(world, model, vocab_size=VOCAB, lora=lora), mesh, world.rank, seed=3, std=0.1)
    recompute_activations(built, "model", recompute, recompute_layers)
    micro_batch = pack(
        [0, 1, 2],
        [(torch.arange(each) + place) % VOCAB for place, each in enumerate(LENGTHS)],
        [1, 1, 1],
        world.device,
        groups.cp,
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def all_kept(rows):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = built(micro_batch.tokens, micro_batch.attention, rows)
        assert output.requires_grad  # what is kept stays alive until here
        return sum(kept.values())

    tokens = -(-sum(LENGTHS) // mesh.layout.cp)
    estimated = activations.training_bytes(
        model, mesh, world.rank, tokens, lora, recompute=recompute, recompute_layers=recompute_layers
    )
    return all_kept(torch.tensor([0])), estimated


def kept_in_each_way(world, models: list[ModelConfig]) -> list[list[tuple[int, int]]]:
    """For each model and way to recompute what ``kept_by_layers`` finds."""
    return [[kept_by_layers(world, model, None, None, *way) for way in WAYS] for model in models]


WAYS: list[tuple[str, int | None]] = [("none", None), ("selective", None), ("full", None), ("full", 1)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_what_is_kept_for_the_backward_pass(dtype):
    ((found, estimated),) = run_ranks(kept_by_layers, 1, replace(WIDE, dtype=dtype))
    # A CPU does not fuse norms. In fp32 it keeps x / rms(x) besides; from bf16 x and x / rms(x) in fp32, and x in bf16
    # only where no norm follows. There are two norms in a layer, and one behind the last, with its output.
    unfused = {"fp32": 4, "bf16": 8 - 2}[dtype] * 2 * WIDE.num_layers
    last = {"fp32": 4 + 4, "bf16": 4 + 4}[dtype]
    expected = estimated + sum(LENGTHS) * WIDE.hidden_size * (unfused + last)
    # Sequences are padded to the longest for the kernel, which also keeps a number for each head. Of queries, keys and
    # values that are laid out for it, only that copy is kept.
    assert 0.9 * expected <= found <= 1.05 * expected, (found, estimated)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_attention_keeps_what_its_rule_takes_and_gives(dtype):
    hybrid = replace(
        WIDE,
        **dict(num_layers=5, linear_layers=(0, 1, 2, 3), attention_output_gate=True, qk_norm=True, dtype=dtype),
        **dict(linear_key_heads=4, linear_value_heads=8, linear_conv_kernel=4),
        **dict(linear_key_head_dim=64, linear_value_head_dim=96),
    )
    ((found, estimated),) = run_ranks(kept_by_layers, 1, hybrid)
    # Norms as above.
    unfused = {"fp32": 4, "bf16": 8 - 2}[dtype] * 2 * hybrid.num_layers + {"fp32": 4 + 4, "bf16": 4 + 4}[dtype]
    expected = estimated + sum(LENGTHS) * hybrid.hidden_size * unfused
    assert 0.8 * expected <= found <= 1.05 * expected, (found, estimated)


def test_what_is_recomputed_is_not_kept():
    short = replace(WIDE, num_layers=3)
    ((plain, capped),) = run_ranks(kept_in_each_way, 1, [short, replace(CAPPED, vocab_size=VOCAB)])
    tokens, width = sum(LENGTHS), short.hidden_size
    (whole, all_of_it), (selective, as_much), (full, least), (first, some) = plain
    # The fused kernel keeps what it takes and gives, with or without being computed again.
    assert all_of_it == as_much and abs(selective - whole) < 0.01 * whole
    layer, inputs = all_of_it // short.num_layers, tokens * width * 4
    gradients = 6 * tokens * short.ffn_hidden_size * 4
    assert least == short.num_layers * inputs + layer + gradients
    # When the first layer is computed again, the other two are done with.
    assert some == inputs + 2 * layer
    # No layer is computed again yet, and the inputs are arguments, of which nothing is noted. Behind the last layer
    # comes a norm, and others are unfused, as above.
    assert 0.98 <= full / (2 * inputs) <= 1.05
    assert 0.9 <= first / (2 * layer + 4 * inputs + 2 * inputs) <= 1.05
    # Soft-capped scores are there for every pair of tokens.
    assert capped[1][0] < 0.85 * capped[0][0] and capped[2][0] < capped[1][0]


SPLITS = {"tp2": 2, "cp2": 2, "tp2.cp2": 4}
"""Layout -> parts into which what norms keep is cut."""


def kept_where_split(world) -> dict[str, tuple[int, int]]:
    found = {}
    for text in SPLITS:
        layout = ParallelLayout.parse(text)
        if layout.world_size == world.size:
            found[text] = kept_by_layers(world, WIDE, None, layout)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_activations_are_split_by_tokens_as_estimated(size):
    for found in run_ranks(kept_where_split, size):
        for text, (kept, estimated) in found.items():
            # As above, of a CPU that does not fuse norms.
            unfused = sum(LENGTHS) * WIDE.hidden_size * (4 * 2 * WIDE.num_layers + 8) / SPLITS[text]
            assert 0.9 * (estimated + unfused) <= kept <= 1.05 * (estimated + unfused), (text, kept, estimated)


def test_adapters_keep_no_more_than_is_estimated():
    found, estimated = zip(
        *(run_ranks(kept_by_layers, 1, WIDE, LoRAConfig(rank=8, dropout=dropout))[0] for dropout in (0.0, 0.3)),
        strict=True,
    )
    # As without adapters, and the factors A of layers that share an input, side by side.
    unfused = sum(LENGTHS) * WIDE.hidden_size * (4 * 2 * WIDE.num_layers + 8)
    factors = WIDE.num_layers * 8 * (7 * WIDE.hidden_size + WIDE.ffn_hidden_size) * 4
    assert found[0] <= estimated[0] + unfused + factors and found[1] <= estimated[1] + unfused + factors
    # The masks; what is left of the inputs is kept in place of these.
    assert 0.8 * (estimated[1] - estimated[0]) < found[1] - found[0] <= estimated[1] - estimated[0]


PACKED = [replace(WIDE, num_layers=4), replace(WIDE, num_layers=4, tied_embeddings=True)]


def packed(world) -> list[tuple[int, int]]:
    """Bytes of the matrices laid out for decoding, as they are and as arithmetic has them."""
    found = []
    for model in PACKED:
        built, mesh, groups, _ = make_model(world, ParallelLayout(tp=2, pp=2), model=model)
        quick = CpuTransformer(built, groups.tp, VOCAB)
        spec = model_spec(replace(model, vocab_size=VOCAB), has_value_head=False)
        sizes = memory.packed_bytes(spec, model, mesh, world.rank)
        found.append((sum(each.nbytes for each in quick.matrices), sizes))
    return found


@pytest.mark.skipif(kernels.load_kernels() is None, reason="needs the compiled kernels: python setup.py build_ext")
def test_the_copy_that_a_cpu_generates_with_is_counted():
    for found in run_ranks(packed, 4):
        for is_there, counted in found:
            assert is_there == counted > 0
