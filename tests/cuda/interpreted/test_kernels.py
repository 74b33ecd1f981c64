"""The engine's kernels one by one, in Triton's interpreter, next to plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu, softplus
from triton.runtime.interpreter import InterpreterBuilder

from hybridflow.models.delta_rule import Recurrence, State, recur
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu import ops
from hybridflow.rollout.gpu.cache import tiles_of
from hybridflow.rollout.gpu.recurrence import plan_recurrence
from hybridflow.rollout.gpu.sampling_kernels import _mixed, gumbel
from hybridflow.rollout.sampling import gumbel_noise, row_keys

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [pytest.param(each, id=str(each)[6:]) for each in (FP32, BF16, FP16)]


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, steps: int = 4) -> None:
    """Compare with a result in fp32, to some steps of a number format."""
    tolerance = 5e-6 if dtype is FP32 else steps * torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


GATES = [(0, 0.0, 0.0), (1, 0.0, 0.0), (2, 0.7, 1.0)]
"""Gates of Llama, Gemma and GPT-OSS: activation, bound and offset; many values are out of the bound."""


def gate_parts(mixed: Tensor, how: tuple[int, float, float]) -> tuple[Tensor, Tensor]:
    """Return the activated gate and the other half, ``[..., inner]`` each."""
    kind, bound, offset = how
    gates, others = mixed.chunk(2, -1)
    if bound:
        gates, others = gates.clamp(max=bound), others.clamp(-bound, bound)
    active = [silu(gates), gelu(gates, approximate="tanh"), gates * (1.702 * gates).sigmoid()][kind]
    return active, others + offset


def normalized(values: Tensor, weight: Tensor, eps: float, centre: float) -> Tensor:
    values = values.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * (weight.float() + centre)


@triton.jit
def _add_to_next(values):
    program = tl.program_id(0)
    tl.store(values + program + 1, tl.load(values + program) + 1)


def test_what_a_program_reads_of_one_before_it_is_not_there_yet():
    values = torch.zeros(5)
    _add_to_next[(4,)](values)
    assert values.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 96), (2, 130)])
@pytest.mark.parametrize("kind", ["no product", "product", "normalized product", "scaled sum"])
def test_sums_are_normalized(kind, rows, width, dtype):
    hidden, product = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=2)
    weight, post = random(width, dtype=dtype, seed=3), random(width, dtype=dtype, seed=4)
    expected = hidden.float()
    if kind != "no product":
        added = normalized(product, post, 1e-5, 1.0).to(dtype) if kind == "normalized product" else product
        expected = (expected + added.float()).to(dtype).float()
    factor = torch.tensor([0.7], dtype=dtype) if kind == "scaled sum" else None
    if factor is not None:
        expected = (expected * factor.float()).to(dtype).float()
    normed = torch.empty_like(hidden)
    given = None if kind == "no product" else product
    post = post if kind == "normalized product" else None
    if given is not None:
        alone = hidden.clone()
        ops.add_norm(alone, None, given, post, None, 1e-5, 1.0, factor)
        close(alone, expected, dtype)
    ops.add_norm(hidden, normed, given, post, weight, 1e-5, 1.0, factor)
    close(hidden, expected, dtype)
    close(normed, normalized(expected, weight, 1e-5, 1.0), dtype, steps=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (3, 100), (2, 1025)])
@pytest.mark.parametrize("how", GATES)
def test_gates(how, rows, inner, dtype):
    mixed, result = random(rows, 2 * inner, dtype=dtype), torch.empty(rows, inner, dtype=dtype)
    ops.gate(result, mixed, *how)
    active, others = gate_parts(mixed.float(), how)
    close(result, active.to(dtype).float() * others, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_experts_are_chosen_by_their_shares(is_normalized, dtype):
    logits = random(5, 11, dtype=dtype)
    chosen, shares = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, 3)
    ops.route(chosen, shares, logits, None, 1.0, True, is_normalized)
    expected, experts = logits.float().softmax(-1).topk(3)
    assert chosen.tolist() == experts.tolist()
    close(shares, expected / expected.sum(-1, keepdim=True) if is_normalized else expected, dtype)


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_are_chosen_by_sigmoids_and_a_bias_that_is_in_no_share(has_bias, is_normalized):
    logits, bias = random(5, 11), random(11, seed=2)
    chosen, shares = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, 3)
    ops.route(chosen, shares, logits, bias if has_bias else None, 2.5, False, is_normalized)
    scores = logits.sigmoid()
    experts = (scores + has_bias * bias).topk(3).indices
    assert chosen.tolist() == experts.tolist()
    expected = scores.gather(1, experts)
    close(shares, 2.5 * (expected / expected.sum(-1, keepdim=True) if is_normalized else expected), torch.float32)


@pytest.mark.parametrize(("experts", "groups", "most"), [(12, 3, 2), (8, 4, 1), (10, 2, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_are_chosen_from_the_groups_with_the_best_two(has_bias, experts, groups, most):
    logits, bias = random(7, experts), random(experts, seed=2)
    chosen, shares = torch.empty(7, 2, dtype=torch.int32), torch.empty(7, 2)
    ops.route(chosen, shares, logits, bias if has_bias else None, 1.0, False, False, groups, most)
    scores = logits.sigmoid() + has_bias * bias
    for row in range(7):
        parts = scores[row].view(groups, -1)
        best = sorted(range(groups), key=lambda group: -float(parts[group].topk(2).values.sum()))[:most]
        open_to = [each for each in range(experts) if each // (experts // groups) in best]
        assert chosen[row].tolist() == sorted(open_to, key=lambda each: -float(scores[row, each]))[:2]
    close(shares, logits.sigmoid().gather(1, chosen.long()), FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "num_chosen", "hidden", "ffn", "how", "has_bias"),
    [
        pytest.param(1, 4, 2, 16, 24, GATES[0], False, id="one token"),
        pytest.param(7, 5, 2, 70, 100, GATES[1], False, id="an expert without tokens, odd widths"),
        pytest.param(45, 2, 2, 33, 65, GATES[0], False, id="more tokens than a block"),
        pytest.param(7, 3, 2, 33, 65, GATES[2], True, id="biases, and bounds of the gate"),
    ],
)
def test_pairs_meet_the_matrices_of_their_experts(tokens, experts, num_chosen, hidden, ffn, how, has_bias, dtype):
    first = [random(2 * ffn, hidden, dtype=dtype, seed=each) / hidden**0.5 for each in range(experts)]
    second = [random(hidden, ffn, dtype=dtype, seed=9 + each) / ffn**0.5 for each in range(experts)]
    biases = [[random(len(each), dtype=dtype, seed=len(each)) for each in weights] for weights in (first, second)]
    tensors = [first, second, *(biases if has_bias else ())]
    matrices, *of_biases = torch.tensor([[each.data_ptr() for each in kind] for kind in tensors]).split(2)
    first_bias, last_bias = of_biases[0] if has_bias else (None, None)
    given, shares = random(tokens, hidden, dtype=dtype), random(tokens, num_chosen).abs() + 0.5
    # All but the last expert, where there are more than are chosen.
    chosen = random(tokens, max(experts - 1, num_chosen), seed=5).argsort(1)[:, :num_chosen]
    pairs = torch.empty(tokens * num_chosen, dtype=torch.int64), torch.empty(experts + 1, dtype=torch.int64)
    ops.sort_pairs(*pairs, chosen.to(torch.int32))
    inner = torch.full((tokens * num_chosen, ffn), torch.nan, dtype=dtype)
    ops.expert_product(inner, given, matrices[0], *pairs, shares, first_bias, num_chosen, True, *how)
    output = torch.full((tokens * num_chosen, hidden), torch.nan, dtype=dtype)
    ops.expert_product(output, inner, matrices[1], *pairs, shares, last_bias, num_chosen, False, *how)
    for token in range(tokens):
        for place, expert in enumerate(chosen[token].tolist()):
            upper, lower = (has_bias * kind[expert].float() for kind in biases)
            active, others = gate_parts(given[token].float() @ first[expert].float().T + upper, how)
            pair, share = token * num_chosen + place, shares[token, place]
            close(inner[pair], active * others * share, dtype, steps=8)
            close(output[pair], inner[pair].float() @ second[expert].float().T + lower * share, dtype, steps=8)


@pytest.mark.parametrize(("num_pairs", "experts"), [(1, 1), (20, 7), (2048, 3), (5000, 16)])
def test_pairs_are_in_order_by_expert_and_then_as_they_came(num_pairs, experts):
    # None has the last but one.
    chosen = torch.randint(0, experts, (num_pairs,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)
    chosen[chosen == experts - 2] = experts - 1
    order, bounds = torch.full((num_pairs,), -1), torch.full((experts + 1,), -1)
    ops.sort_pairs(order, bounds, chosen)
    found, expected = chosen.sort(stable=True)
    assert order.tolist() == expected.tolist()
    assert bounds.tolist() == torch.searchsorted(found, torch.arange(experts + 1, dtype=torch.int32)).tolist()
    # A rank that has the last experts alone.
    first = max(experts - 2, 0)
    begin, end = bounds[first], bounds[-1]
    own, ends = torch.full((num_pairs,), -1), torch.full((experts - first + 1,), -1)
    ops.sort_pairs(own, ends, chosen, first)
    assert ends.tolist() == bounds[first:].tolist()
    assert own[begin:end].tolist() == order[begin:end].tolist() and (own[:begin] == -1).all()


@dataclass
class Paged:
    """A cache of two layers whose memory held NaN, of sequences with so many tokens in scattered blocks."""

    lengths: list[int]
    groups: int
    head: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        per_sequence = -(-max(self.lengths) // BLOCK_TOKENS)
        num_blocks = len(self.lengths) * per_sequence + 1
        shape = (2, 2, num_blocks, BLOCK_TOKENS, self.groups, self.head)
        self.memory = torch.full(shape, torch.nan, dtype=self.dtype)
        self.addresses = torch.tensor([[each.data_ptr() for each in layer] for layer in self.memory])
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = order.int().view(len(self.lengths), per_sequence)

    def rows(self, kind: int, sequence: int, count: int) -> Tensor:
        """View the first tokens of a sequence in layer 1, ``[tokens, groups, head]``; keys are kind 0, values 1."""
        blocks = self.memory[1, kind, self.tables[sequence].long()]
        return blocks.flatten(0, 1)[:count]

    def fill(self) -> tuple[list[Tensor], list[Tensor]]:
        """Write random keys and values, and return them by sequence, in fp32."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for sequence, length in enumerate(self.lengths):
            for kind in (0, 1):
                values = random(length, self.groups, self.head, dtype=self.dtype, seed=10 * sequence + kind)
                for position in range(length):
                    block = self.tables[sequence, position // BLOCK_TOKENS]
                    self.memory[1, kind, block, position % BLOCK_TOKENS] = values[position]
                found[kind].append(values.float())
        return found


def turned(values: Tensor, table: Tensor, positions: Tensor, is_interleaved: bool) -> Tensor:
    """Rotate the first dims of ``[rows, …, head]``; the table is ``[context, 2, turned pairs]``."""
    shape = (len(positions), *(1,) * (values.dim() - 2), -1)
    turn = torch.complex(*(table[positions, part].view(shape) for part in (0, 1)))
    values, rest = values.split([2 * table.shape[2], values.shape[-1] - 2 * table.shape[2]], -1)
    low, high = (values[..., ::2], values[..., 1::2]) if is_interleaved else values.chunk(2, -1)
    pairs = torch.view_as_real(torch.complex(low, high) * turn)
    return torch.cat([(pairs if is_interleaved else pairs.transpose(-1, -2)).flatten(-2), rest], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("groups", "sharers", "head", "pairs", "is_gated"),
    [(2, 3, 16, 8, False), (1, 1, 12, 6, True), (3, 8, 6, 1, False), (2, 3, 12, 3, True)],
)
@pytest.mark.parametrize("normed", ["", "each head", "all heads"])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_keys_and_values_are_written_where_the_table_says(
    is_interleaved, normed, groups, sharers, head, pairs, is_gated, dtype
):
    cache = Paged([40, 1, 18], groups, head, dtype)
    sequences, positions = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([16, 39, 0, 17, -1])
    mixed = random(5, groups, sharers + 2, head, dtype=dtype)
    given = mixed
    if is_gated:
        gates = random(5, groups, sharers, head, dtype=dtype, seed=7)
        both = torch.stack([mixed[:, :, :sharers], gates], 3).flatten(2, 3)
        given = torch.cat([both, mixed[:, :, sharers:]], 2)
    angles = torch.outer(torch.arange(48.0), torch.arange(1, pairs + 1).float() ** -1)
    rotary = torch.stack([angles.cos(), angles.sin()], 1)
    norms, squares = (None, None), None
    if normed == "each head":
        norms = random(head, dtype=dtype, seed=5), random(head, dtype=dtype, seed=6)
    elif normed:
        squares = torch.empty(5, 2)
        ops.mean_squares(squares, mixed, 1)
        norms = random(groups, sharers, head, dtype=dtype, seed=5), random(groups, head, dtype=dtype, seed=6)
    query = torch.empty(5, groups, sharers, head, dtype=dtype)
    where = cache.addresses, cache.tables, sequences, positions
    values, has_value_norm = mixed[:, :, sharers + 1], normed == "each head"
    # As behind images, and one that is too large for a row of padding.
    shifts = torch.tensor([-3, -7, 0, 2, -9]) if is_gated else None
    ops.store(query, given, *where, rotary, *norms, squares, 1, 1e-5, 0.0, is_interleaved, has_value_norm, shifts)
    if has_value_norm:
        values = normalized(values, torch.ones(head), 1e-5, 0.0)
    queries, keys = mixed[:, :, :sharers].float(), mixed[:, :, sharers].float()
    if normed:
        # Over the dims that a norm has weights for.
        queries, keys = (
            normalized(each.reshape(5, -1, weight.numel()), weight.flatten(), 1e-5, 0.0).view(each.shape)
            for each, weight in zip((queries, keys), norms, strict=True)
        )
    turns = (positions if shifts is None else positions + shifts).clamp(min=0)
    queries, keys = (turned(each, rotary, turns, is_interleaved) for each in (queries, keys))
    close(query, queries, dtype, steps=16)
    written = torch.zeros(cache.memory[1, 0].shape[:2], dtype=torch.bool)
    for row in range(4):
        sequence, position = int(sequences[row]), int(positions[row])
        block, token = int(cache.tables[sequence, position // BLOCK_TOKENS]), position % BLOCK_TOKENS
        written[block, token] = True
        close(cache.memory[1, 0, block, token], keys[row], dtype, steps=16)
        close(cache.memory[1, 1, block, token], values[row], dtype, steps=16 if has_value_norm else 0)
    # The padding row and the other layer wrote nothing.
    assert cache.memory[1][:, ~written].isnan().all() and cache.memory[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "sharers", "head"), [(1, 1, 12), (2, 3, 16)])
def test_contexts_are_multiplied_by_the_sigmoids_of_their_gates(groups, sharers, head, dtype):
    context, mixed = (random(5, groups, heads, head, dtype=dtype, seed=heads) for heads in (sharers, 2 * sharers + 2))
    expected = context.float() * mixed[:, :, 1 : 2 * sharers : 2].float().sigmoid()
    ops.gate_heads(context, mixed)
    close(context, expected, dtype)


def attended(query: Tensor, keys: list[Tensor], values: list[Tensor], where, scoring, sinks=None) -> Tensor:
    """Attend row by row: ``[rows, groups, sharers, head]``."""
    (scale, softcap, window), expected = scoring, torch.zeros(*query.shape[:-1], values[0].shape[-1])
    for row, (sequence, position) in enumerate(zip(*(each.tolist() for each in where), strict=True)):
        if position < 0:
            continue
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        scores = torch.einsum("gsh,tgh->gst", query[row].float(), keys[sequence][seen]) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        shares = scores.exp() / (
            scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks.float().exp()[..., None])
        )
        expected[row] = torch.einsum("gst,tgh->gsh", shares, values[sequence][seen])
    return expected


STEP = ([0, 1, 2, 0, 2], [39, 0, 17, -1, -1])
"""Sequence and position of rows of a decoding step, two of them padding."""
PREFILL = ([0] * 39 + [1] + [2] * 5, [*range(1, 40), 0, *range(13, 18)])
"""A prompt but for its first token, a prompt of one token, and the end of a third."""


SCORINGS = [(0.0, 0), (1.5, 0), (0.0, 5), (1.5, 20), (0.0, 1)]
SHAPES = [
    *(pytest.param(FP32, 2, 3, 16, *each, False, id=f"fp32, cap {each[0]}, window {each[1]}") for each in SCORINGS),
    pytest.param(FP32, 1, 7, 12, 1.5, 20, False, id="12 dims, 7 sharers"),
    pytest.param(BF16, 2, 1, 64, 1.5, 20, False, id="bf16"),
    pytest.param(FP16, 1, 4, 40, 0.0, 5, False, id="fp16, 40 dims"),
    pytest.param(BF16, 1, 2, 300, 0.0, 5, False, id="bf16, 300 dims"),
    pytest.param(FP32, 2, 3, 16, 0.0, 0, True, id="sinks"),
    pytest.param(FP32, 3, 2, 16, 1.5, 5, True, id="sinks, cap and window"),
    pytest.param(BF16, 2, 4, 64, 0.0, 5, True, id="sinks, bf16"),
]


@pytest.mark.parametrize(("dtype", "groups", "sharers", "head", "softcap", "window", "has_sinks"), SHAPES)
@pytest.mark.parametrize(
    "kind", ["a step", "a step, keys split", "tiles", pytest.param("tiles, keys split", marks=pytest.mark.long)]
)
def test_rows_attend_to_their_own_sequence(kind, dtype, groups, sharers, head, softcap, window, has_sinks):
    cache = Paged([40, 1, 18], groups, head, dtype)
    keys, values = cache.fill()
    where = tuple(map(torch.tensor, PREFILL if kind.startswith("tiles") else STEP))
    query = random(len(where[0]), groups, sharers, head, dtype=dtype, seed=7)
    tiles, most = (None, None), 1
    if kind.startswith("tiles"):
        most = 4
        tiles = tuple(torch.from_numpy(tiles_of(where[0].numpy(), most)))
    context, partial, sums = torch.full_like(query, torch.nan), None, None
    if kind.endswith("split"):
        # More shares than there are keys for some rows.
        partial, sums = torch.full((5, *query.shape), torch.nan), torch.full((2, 5, *query.shape[:-1]), torch.nan)
    scoring, sinks = (0.3, softcap, window), random(groups, sharers, dtype=dtype, seed=3) if has_sinks else None
    ops.attend(context, partial, sums, query, cache.addresses, cache.tables, *where, *tiles, sinks, 1, most, *scoring)
    if partial is not None:
        ops.combine(context, partial, sums)
    close(context, attended(query, keys, values, where, scoring, sinks), dtype, steps=8)


@pytest.mark.parametrize(
    ("dtype", "heads", "plain", "pairs", "latent"),
    [(FP32, 5, 10, 3, 20), (BF16, 1, 16, 8, 64), (FP16, 17, 6, 1, 12)],
)
def test_compressed_vectors_are_normalized_turned_and_written(dtype, heads, plain, pairs, latent):
    cache = Paged([40, 1, 18], 1, latent + 2 * pairs, dtype)
    sequences, positions = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([16, 39, 0, 17, -1])
    query, given = random(5, heads, plain + 2 * pairs, dtype=dtype), random(5, latent + 2 * pairs, dtype=dtype, seed=2)
    weight = random(latent, dtype=dtype, seed=5)
    angles = torch.outer(torch.arange(48.0), torch.arange(1, pairs + 1).float() ** -1)
    rotary = torch.stack([angles.cos(), angles.sin()], 1)
    found = torch.full((5, heads, 2 * pairs), torch.nan, dtype=dtype)
    where = cache.addresses, cache.tables, sequences, positions
    ops.store_latent(found, query, given, *where, rotary, weight, 1, 1e-5, 1.0)

    def apart(values: Tensor) -> Tensor:
        both = turned(values, rotary, positions.clamp(min=0), True)
        return torch.cat([both[..., ::2], both[..., 1::2]], -1)

    close(found, apart(query[..., plain:].float()), dtype, steps=8)
    expected = torch.cat([normalized(given[:, :latent], weight, 1e-5, 1.0), apart(given[:, latent:].float())], 1)
    written = torch.zeros(cache.memory[1, 0].shape[:2], dtype=torch.bool)
    for row in range(4):
        place = int(cache.tables[sequences[row], positions[row] // BLOCK_TOKENS]), int(positions[row] % BLOCK_TOKENS)
        close(cache.memory[1, 0][place][0], expected[row], dtype, steps=16)
        written[place] = True
    assert cache.memory[1, 0][~written].isnan().all() and cache.memory[0].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "heads", "latent", "rotary", "softcap", "window"),
    [
        pytest.param(FP32, 5, 20, 6, 0.0, 0, id="fp32"),
        pytest.param(FP32, 20, 12, 2, 1.5, 5, id="cap and window, heads of two programs"),
        pytest.param(BF16, 16, 64, 16, 0.0, 0, id="bf16"),
    ],
)
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("rows", [STEP, PREFILL], ids=["a step", "a prefill"])
def test_rows_attend_to_compressed_vectors(rows, splits, dtype, heads, latent, rotary, softcap, window):
    cache = Paged([40, 1, 18], 1, latent + rotary, dtype)
    keys, _ = cache.fill()
    where = tuple(map(torch.tensor, rows))
    query = random(heads, len(where[0]), latent, dtype=dtype, seed=7)
    turning = random(len(where[0]), heads, rotary, dtype=dtype, seed=8)
    context, partial, sums = torch.full_like(query, torch.nan), None, None
    if splits > 1:
        partial, sums = (
            torch.full((splits, *query.shape), torch.nan),
            torch.full((2, splits, *query.shape[:2]), torch.nan),
        )
    scoring = 0.3, softcap, window
    ops.attend_latent(context, partial, sums, query, turning, cache.addresses, cache.tables, *where, 1, *scoring)
    if partial is not None:
        ops.combine(context, partial, sums)
    whole = torch.cat([query.transpose(0, 1), turning], -1)[:, None]
    values = [each[..., :latent] for each in keys]
    expected = attended(whole, keys, values, where, scoring)
    close(context.transpose(0, 1)[:, None], expected, dtype, steps=8)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_cache_may_have_more_numbers_than_32_bits_count(is_compressed):
    """A place that wraps around is in memory too, where nothing was written. What nobody touches takes no memory."""
    groups, head, pairs = (1, 26, 3) if is_compressed else (2, 16, 8)
    memory = torch.empty(2**32 + 2**16, dtype=FP16)
    middle, places = memory.data_ptr() + 2**32, torch.arange(20)
    far, rotary, sequences = 2**31 // (BLOCK_TOKENS * groups * head) + 1, random(20, 2, pairs), torch.zeros_like(places)
    addresses = torch.tensor([[middle, middle + 2**14]])
    query, found = random(20, 3, head, dtype=FP16), []
    for first in (0, far):
        where = addresses, torch.tensor([[first + 1, first]], dtype=torch.int32), sequences, places
        if is_compressed:
            turned, of_latent = query.new_empty(20, 3, 2 * pairs), random(3, 20, 20, dtype=FP16, seed=3)
            ops.store_latent(turned, query, query[:, 0].clone(), *where, rotary, query[0, 0, :20], 0, 1e-5, 1.0)
            context = torch.empty_like(of_latent)
            ops.attend_latent(context, None, None, of_latent, turned, *where, 0, 0.3, 0.0, 0)
        else:
            turned, mixed = query.new_empty(20, groups, 3, head), random(20, groups, 5, head, dtype=FP16, seed=3)
            ops.store(turned, mixed, *where, rotary, None, None, None, 0, 1e-5, 1.0, False)
            context = torch.empty_like(turned)
            ops.attend(context, None, None, turned, *where, None, None, None, 0, 1, 0.3, 0.0, 0)
        found.append(context)
    assert torch.equal(*found) and found[0].isfinite().all()


def test_rows_are_cut_into_tiles_of_one_sequence():
    first, counts = tiles_of(np.array([4, 4, 4, 4, 4, 7, 2, 2]), 2).tolist()
    assert (first, counts) == ([0, 2, 4, 5, 6], [2, 2, 1, 1, 2])
    assert tiles_of(np.array([], np.int64), 2).shape == (2, 0)


@dataclass
class Linear:
    """Linear attention of two layers whose states held NaN, in seven slots, with random weights."""

    key_heads: int
    sharers: int
    key: int
    value: int
    taps: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        values = self.sharers * self.value
        self.parts = [self.key, self.key, values, values, self.sharers, self.sharers]
        self.channels = self.key_heads * (2 * self.key + values)
        self.heads = self.key_heads * self.sharers
        self.inputs = torch.full((2, 7, self.taps - 1, self.channels), torch.nan)
        self.matrices = torch.full((2, 7, self.heads, self.key, self.value), torch.nan)
        both = zip(self.inputs, self.matrices, strict=True)
        self.addresses = torch.tensor([[each.data_ptr() for each in layer] for layer in both])
        self.conv, self.norm = self.random(self.channels, self.taps), self.random(self.value)
        self.bias, self.log = self.random(self.heads), self.random(self.heads)

    def random(self, *shape: int) -> Tensor:
        return random(*shape, dtype=self.dtype, seed=sum(shape))

    def rows(self, count: int, seed: int) -> Tensor:
        return random(count, self.key_heads * sum(self.parts), dtype=self.dtype, seed=seed)

    def step(self, mixed: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Return what the kernel gives with the states of layer 1, ``[rows, value_heads, value]``."""
        context = torch.full((len(mixed), self.key_heads, self.sharers, self.value), torch.nan, dtype=self.dtype)
        weights = self.conv, self.bias, self.log, self.norm
        ops.delta_step(context, mixed, *weights, self.addresses, slots, positions, 1, self.key, 1e-3)
        return context.flatten(1, 2)

    def expected(self, mixed: Tensor, before: State) -> tuple[Tensor, State]:
        """Return what a token of each of some sequences gives, by operators of torch."""
        grouped = mixed.unflatten(1, (self.key_heads, -1)).split(self.parts, dim=2)
        gate, beta, decay = (each.flatten(1) for each in grouped[3:])
        channels = torch.cat([each.flatten(1) for each in grouped[:3]], dim=1)
        conv = torch.cat([each.flatten(0, 1) for each in self.conv.unflatten(0, (self.key_heads, -1)).split(
            self.parts[:3], dim=1)])  # fmt: skip
        decay = -self.log.float().exp() * softplus(decay.float() + self.bias.float())
        recurrence = Recurrence(conv, self.key_heads, self.heads, self.key, self.value)
        given = (each[:, None] for each in (channels, decay, beta.sigmoid()))
        found, after = recur(*given, recurrence, before)
        normed = rms_norm(found[:, 0].float(), (self.value,), eps=1e-3).to(self.dtype)
        return self.norm * normed * silu(gate.float()).view(normed.shape), after


LINEAR_SHAPES = [
    pytest.param(2, 3, 5, 7, 4, id="odd widths"),
    pytest.param(1, 1, 16, 16, 2, id="one head"),
    pytest.param(3, 2, 4, 5, 4, id="a rank's three heads"),
    pytest.param(1, 2, 128, 80, 3, id="several blocks of columns"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "sharers", "key", "value", "taps"), LINEAR_SHAPES)
def test_a_step_of_linear_attention_takes_the_state_of_its_slot_on(key_heads, sharers, key, value, taps, dtype):
    linear = Linear(key_heads, sharers, key, value, taps, dtype)
    inputs, matrices = linear.inputs[1], linear.matrices[1]
    begun = 4
    inputs[begun], matrices[begun] = random(*inputs.shape[1:]), random(*matrices.shape[1:], seed=2)
    # One has begun, one begins where another has left NaN; rows of padding name slots that are live, and one
    # that is not.
    slots, first = torch.tensor([begun, 2, begun, 2, 5]), torch.tensor([9, 0, -1, -1, -1])
    state = State(inputs[[begun, 2]].clone(), matrices[[begun, 2]].clone())
    for each in state:
        each[1] = 0
    for step in range(3):
        mixed = linear.rows(5, seed=step)
        found = linear.step(mixed, slots, torch.where(first < 0, first, first + step))
        wanted, state = linear.expected(mixed[:2], state)
        close(found[:2], wanted, dtype, steps=16)
        assert not found[2:].any()
        for kept, expected in ((inputs, state.inputs), (matrices, state.matrix)):
            # The interpreter cuts what is rounded to bf16.
            close(kept[[begun, 2]], expected, dtype, steps=8)
    # A single row.
    wanted, _ = linear.expected(mixed[:1], State(*(each[:1] for each in state)))
    close(linear.step(mixed[:1], slots[:1], torch.tensor([20])), wanted, dtype, steps=16)
    assert all(each[1, [0, 1, 3, 5, 6]].isnan().all() for each in (linear.inputs, linear.matrices))
    assert linear.inputs[0].isnan().all() and linear.matrices[0].isnan().all()


def test_a_step_of_linear_attention_reads_and_writes_each_number_of_its_states_once(monkeypatch):
    linear = Linear(2, 2, 128, 70, 4, FP32)
    memory = linear.inputs, linear.matrices
    for each in memory:
        each.zero_()
    counts = {kind: [torch.zeros(each.shape, dtype=torch.int32) for each in memory] for kind in ("load", "store")}

    def note(kind: str, places: np.ndarray, is_there: np.ndarray) -> None:
        for states, count in zip(memory, counts[kind], strict=True):
            at = (places[is_there.astype(bool)].astype(np.int64) - states.data_ptr()) // 4
            at = torch.from_numpy(at[(at >= 0) & (at < states.numel())])
            count.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def noted_load(self, places, mask, *rest):
        note("load", places.data, mask.data)
        return load(self, places, mask, *rest)

    def noted_store(self, places, value, mask, *rest):
        note("store", places.data, mask.data)
        return store(self, places, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", noted_store)
    linear.step(linear.rows(3, seed=1), torch.tensor([3, 6, 0]), torch.tensor([1, 0, -1]))
    for kind, slots in (("load", {3}), ("store", {3, 6})):
        for count in counts[kind]:
            assert [int(count[1, slot].min()) for slot in range(7)] == [int(slot in slots) for slot in range(7)]
            assert int(count.max()) == 1 and not count[0].any()


class Delta:
    """A layer whose rows are what its recurrence takes, and whose context is what that gives."""

    local_sizes = 2, 2, 5, 7

    def __init__(self) -> None:
        self.recurrence = Recurrence(random(2 * 10 + 28, 4), 2, 4, 5, 7)

    def context(self, rows: Tensor, recur) -> Tensor:
        return recur(*rows.split([48, 4, 4], dim=1), self.recurrence).flatten(1)


def test_prompts_of_like_length_go_through_linear_attention_together():
    lengths, begins = [70, 12, 12, 64, 90, 3, 80], [0, 0, 9, 9, 0, 0, 0]
    slots = [4, 2, 7, 1, 0, 6, 3]
    delta, state = Delta(), State(random(8, 3, 48), random(8, 4, 5, 7))
    rows = torch.cat([random(sum(lengths), 48), -random(sum(lengths), 8, seed=2).sigmoid()], dim=1)
    expected = []
    for part, begin, slot in zip(rows.split(lengths), begins, slots, strict=True):
        before = State(*(each[[slot]].clone() for each in state)) if begin else None
        given = (each[None] for each in part.split([48, 4, 4], dim=1))
        expected.append(recur(*given, delta.recurrence, before))
    places = np.concatenate([begin + np.arange(each) for begin, each in zip(begins, lengths, strict=True)])
    plan = plan_recurrence(torch.empty(0), {1: state}, np.repeat(slots, lengths), places, torch.device("cpu"))
    # Short ones, long ones, and those that go on.
    assert len(plan._spans) == 3
    close(plan.context(1, rows, delta), torch.cat([found[0].flatten(1) for found, _ in expected]), FP32)
    for slot, (_, after) in zip(slots, expected, strict=True):
        close(state.inputs[slot], after.inputs[0], FP32)
        close(state.matrix[slot], after.matrix[0], FP32)


def sampled(logits: Tensor, keys: Tensor, lengths: Tensor | None, temperatures: Tensor, quiet: Tensor, num_real: int):
    rows, parts = len(logits), ops.num_parts(logits.shape[1])
    terms, ids = torch.empty(5, rows, parts), torch.empty(rows, parts, dtype=torch.int32)
    ops.sample_part(terms, ids, logits, None, keys, lengths, temperatures, quiet, None, 0, num_real, 0.0)
    found = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
    ops.settle(*found, terms, ids, quiet)
    return found


def test_many_rows_have_the_tokens_of_the_reference(monkeypatch):
    # The interpreter takes milliseconds for each program, of whatever width.
    monkeypatch.setattr(ops, "PART_COLUMNS", 64)
    rows, width, num_real = 120, 64, 57
    generator = torch.Generator().manual_seed(5)
    logits = random(rows, width) * 3
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    lengths = torch.randint(1, 1000, (rows,), generator=generator)
    temperatures, quiet = torch.rand(rows, generator=generator) + 0.5, torch.zeros(rows, dtype=torch.uint8)
    quiet[::5] = 1
    tokens, log_probs, proposed = sampled(logits, keys, lengths, temperatures, quiet, num_real)
    scaled = logits[:, :num_real] / temperatures[:, None]
    noise = gumbel_noise(row_keys(keys, lengths), 0, num_real) * (1 - quiet[:, None])
    assert torch.equal(tokens, (scaled + noise).argmax(-1))
    expected = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(proposed, expected.masked_fill(quiet.bool(), 0), atol=2e-6, rtol=1e-6)


@triton.jit
def noise_of_rows(noise, keys, lengths, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    key = _mixed(_mixed(tl.load(keys + row).to(tl.uint64)) + tl.load(lengths + row).to(tl.uint64))
    tl.store(noise + row[:, None] * WIDTH + column[None, :], gumbel(key[:, None], column[None, :]))


def test_the_noise_of_sixteen_thousand_rows_gives_the_tokens_of_the_reference():
    rows, width = 1 << 14, 1 << 6
    generator = torch.Generator().manual_seed(6)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    lengths = torch.randint(1, 1 << 20, (rows,), generator=generator)
    logits, noise = random(rows, width) * 3, torch.empty(rows, width)
    noise_of_rows[(1,)](noise, keys, lengths, ROWS=rows, WIDTH=width)
    expected = gumbel_noise(row_keys(keys, lengths), 0, width)
    torch.testing.assert_close(noise, expected, atol=5e-7, rtol=5e-7)
    assert torch.equal((logits + noise).argmax(-1), (logits + expected).argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_over_several_parts_of_the_vocabulary(dtype):
    rows, width = 6, 2 * ops.PART_COLUMNS + 13
    logits = random(rows, width, dtype=dtype) * 2
    keys, temperatures = torch.arange(rows) * 977, torch.full((rows,), 0.8)
    quiet = torch.tensor([0, 1] * 3, dtype=torch.uint8)
    tokens, log_probs, _ = sampled(logits, keys, None, temperatures, quiet, width - 5)
    scaled = logits[:, : width - 5].float() / temperatures[:, None]
    noise = gumbel_noise(keys, 0, width - 5) * (1 - quiet[:, None])
    assert torch.equal(tokens, (scaled + noise).argmax(-1))
    expected = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=5e-6, rtol=1e-6)


def test_what_cannot_be_sampled_is_told():
    logits = torch.zeros(4, 8)
    logits[1, 3], logits[2] = torch.nan, -torch.inf
    logits[3, 2] = torch.inf
    quiet = torch.zeros(4, dtype=torch.uint8)
    tokens, _, _ = sampled(logits, torch.arange(4), None, torch.ones(4), quiet, 8)
    assert tokens[0] >= 0 and tokens[1:].tolist() == [-1, -1, -1]


def test_tokens_are_taken_up_and_rows_end():
    # Goes on; ends by a stop token; a stop token that comes too early; ends by length; failed; had ended before.
    tokens = torch.tensor([5, 7, 7, 5, -1, 5])
    state = {
        "token_in": torch.zeros(6, dtype=torch.int64),
        "lengths": torch.tensor([4, 4, 4, 9, 4, 4]),
        "positions": torch.tensor([3, 3, 3, 8, 3, -1]),
        "counts": torch.tensor([1, 0, 0, 2, 1, 3]),
        "failures": torch.zeros(6, dtype=torch.int64),
    }
    history, log_probs = torch.full((4, 6), -9), torch.full((2, 4, 6), -9.0)
    chosen = torch.arange(6) / 8
    stops = torch.tensor([[7, -1, 8]] * 6, dtype=torch.int32)
    ends, no_stop_before = torch.full((6,), 10), torch.tensor([0, 5, 6, 0, 0, 0])
    ops.advance(*state.values(), history, *log_probs, tokens, chosen, chosen + 1, ends, no_stop_before, stops)
    assert {name: each.tolist() for name, each in state.items()} == {
        "token_in": [5, 7, 7, 5, 0, 0],
        "lengths": [5, 5, 5, 10, 4, 4],
        "positions": [4, -1, 4, -1, -1, -1],
        "counts": [2, 1, 1, 3, 1, 3],
        "failures": [0, 0, 0, 0, -1, 0],
    }
    written = {(1, 0): 5, (0, 1): 7, (0, 2): 7, (2, 3): 5}
    assert {(step, row): int(history[step, row]) for step, row in (history != -9).nonzero().tolist()} == written
    assert all(log_probs[:, step, row].tolist() == [row / 8, row / 8 + 1] for step, row in written)
    assert int((log_probs != -9).sum()) == 2 * len(written)


@pytest.mark.parametrize("operator", ["add_norm", "gate", "attend", "sample_part"])
def test_no_rows(operator):
    none, longs = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    quiet = torch.empty(0, dtype=torch.uint8)
    if operator == "add_norm":
        ops.add_norm(none, none.clone(), none.clone(), None, torch.ones(8), 1e-5, 0.0)
    elif operator == "gate":
        ops.gate(torch.empty(0, 4), none, *GATES[0])
    elif operator == "attend":
        cache = Paged([1], 1, 16, FP32)
        query = torch.empty(0, 1, 2, 16)
        where = cache.addresses, cache.tables, longs, longs
        ops.attend(torch.empty_like(query), None, None, query, *where, None, None, None, 0, 1, 1.0, 0.0, 0)
    else:
        assert [len(each) for each in sampled(none, longs, longs, torch.empty(0), quiet, 8)] == [0, 0, 0]
