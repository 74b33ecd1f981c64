"""All kernels compile for three generations of GPUs, spill at most a few registers, and fit their shared memory."""

from __future__ import annotations

import pytest
import torch

from hybridflow.models import layer_kernels
from hybridflow.models.attention_kernels import packed_attention
from hybridflow.models.recurrence_kernels import recurred
from hybridflow.models.vocab_kernels import vocab_gradient, vocab_terms
from hybridflow.reshard import copy_kernel
from hybridflow.rollout.gpu import ops
from hybridflow.rollout.gpu.cache import rows_per_tile
from tests.cuda.compiled.compiling import compiled, recording

SHARED_BYTES = 99 * 1024
"""What a program may use on every GPU from sm_80 on; those of data centers have more."""

STACK_BYTES = 40
"""Ten registers of a thread: so many the compiler gives up where one more program then fits on a multiprocessor."""

BF16, FP32 = torch.bfloat16, torch.float32
QWEN2_7B = dict(head=128, groups=4, sharers=7, hidden=3584, ffn=18944)
GEMMA2_9B = dict(head=256, groups=8, sharers=2, hidden=3584, ffn=14336)
PHI3_MINI = dict(head=96, groups=32, sharers=1, hidden=3072, ffn=8192)
QWEN3_235B = dict(head=128, groups=4, sharers=16, hidden=4096, ffn=1536)
LLAMA3_70B = dict(head=128, groups=8, sharers=8, hidden=8192, ffn=28672)
SEED_OSS = dict(head=128, groups=8, sharers=10, hidden=5120, ffn=27648)
GPT_OSS = dict(head=64, groups=8, sharers=8, hidden=2880, ffn=2880)
GLM4_9B = dict(head=128, groups=2, sharers=16, hidden=4096, ffn=13696)
QWEN3_5_9B = dict(head=256, groups=4, sharers=4, pairs=32)
OLMO2_7B = dict(head=128, groups=32, sharers=1)
MINIMAX_M2 = dict(head=128, groups=8, sharers=6)
GEMMA4_31B = dict(head=512, groups=4, sharers=8)
GELU = (1, 0.0, 0.0)
LLAMA3_1B = dict(head=64, groups=8, sharers=4, hidden=2048, ffn=8192)


def longs(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def attend_in_cache(
    dtype, shape, *, has_tiles, splits=1, is_special=True, is_interleaved=False, has_sinks=False, is_wide=False, rows=4
):
    """Launch the kernels that rotate, cache and attend, for a step of decoding or a prefill."""
    head, groups, sharers = shape["head"], shape["groups"], shape["sharers"]
    most = rows_per_tile(dtype, sharers, head) if has_tiles else 1
    query = torch.zeros(rows, groups, sharers, head, dtype=dtype)
    mixed = torch.zeros(rows, groups, sharers + 2, head, dtype=dtype)
    where = longs(2, 2), ints(rows, 8), longs(rows), longs(rows)
    weights = (torch.zeros(groups * sharers * head, dtype=dtype),) * 2 if is_special else (None, None)
    norms = *weights, torch.zeros(rows, 2) if is_wide else None
    if is_wide:
        ops.mean_squares(norms[2], mixed, 1)
    turned = head // 4 if is_interleaved else head // 2
    how = 0, 1e-6, 0.0, is_interleaved, shape is GEMMA4_31B, longs(rows) if shape is QWEN2_7B else None
    ops.store(query, mixed, *where, torch.zeros(16, 2, turned), *norms, *how)
    partial = torch.zeros(splits, *query.shape) if splits > 1 else None
    sums = torch.zeros(2, splits, *query.shape[:-1]) if splits > 1 else None
    tiles = (ints(rows), ints(rows)) if has_tiles else (None, None)
    caps = (50.0, 4096) if is_special else (0.0, 0)
    sinks = torch.zeros(groups * sharers, dtype=dtype) if has_sinks else None
    ops.attend(torch.zeros_like(query), partial, sums, query, *where, *tiles, sinks, 0, most, 0.1, *caps)
    if partial is not None:
        ops.combine(torch.zeros_like(query), partial, sums)


def gated_attention(dtype, shape):
    """Launch what gates on attention's output change, where a part of each head turns, behind images too."""
    rows, head, groups, sharers = 4, shape["head"], shape["groups"], shape["sharers"]
    query, mixed = (torch.zeros(rows, groups, heads, head, dtype=dtype) for heads in (sharers, 2 * sharers + 2))
    where, norms = (longs(2, 2), ints(rows, 8), longs(rows), longs(rows)), (torch.zeros(head, dtype=dtype),) * 2
    ops.store(
        query, mixed, *where, torch.zeros(16, 2, shape["pairs"]), *norms, None, 0, 1e-6, 1.0, False, shifts=longs(rows)
    )
    ops.gate_heads(query, mixed)


def latent_attention(dtype, heads, *, splits=1, rows=4):
    """Launch the kernels of latent attention, at the sizes of DeepSeek-V3."""
    query, compressed = torch.zeros(rows, heads, 192, dtype=dtype), torch.zeros(rows, 576, dtype=dtype)
    turned, context = torch.zeros(rows, heads, 64, dtype=dtype), torch.zeros(heads, rows, 512, dtype=dtype)
    where = longs(2, 2), ints(rows, 8), longs(rows), longs(rows)
    ops.store_latent(turned, query, compressed, *where, torch.zeros(16, 2, 32), compressed[0, :512], 0, 1e-6, 0.0)
    partial = torch.zeros(splits, *context.shape) if splits > 1 else None
    sums = torch.zeros(2, splits, heads, rows) if splits > 1 else None
    ops.attend_latent(context, partial, sums, context.clone(), turned, *where, 0, 0.1, 0.0, 0)
    if partial is not None:
        ops.combine(context, partial, sums)


def around_attention(dtype, shape, vocabulary):
    """Launch the other kernels of a step."""
    rows, width = 4, shape["hidden"]
    hidden, weight = torch.zeros(rows, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    ops.add_norm(hidden, hidden.clone(), hidden.clone(), weight, weight, 1e-6, 1.0)
    ops.gate(torch.zeros(rows, shape["ffn"], dtype=dtype), torch.zeros(rows, 2 * shape["ffn"], dtype=dtype), *GELU)
    logits, parts = torch.zeros(rows, vocabulary, dtype=dtype), ops.num_parts(vocabulary)
    terms, ids, quiet = torch.zeros(5, rows, parts), ints(rows, parts), torch.zeros(rows, dtype=torch.uint8)
    floors, shares = ints(rows), torch.zeros(rows)
    ops.find_floors(floors, logits, shares, longs(rows), shares, shares, vocabulary, 30.0)
    chosen, noise = (longs(rows), torch.zeros(rows), torch.zeros(rows)), (longs(rows), longs(rows), torch.zeros(rows))
    ops.sample_part(terms, ids, logits, None, *noise, quiet, floors, 0, vocabulary, 30.0)
    ops.settle(*chosen, terms, ids, quiet)
    floats = torch.zeros(16, rows), torch.zeros(16, rows)
    ops.advance(
        *(longs(rows) for _ in range(5)), longs(16, rows), *floats, *chosen, longs(rows), longs(rows), ints(rows, 4)
    )


def linear_attention(dtype, key_heads, sharers, key, value):
    """Launch the step of linear attention."""
    rows, of_rows = 4, longs(4)
    channels = key_heads * (2 * key + sharers * value)
    mixed = torch.zeros(rows, channels + key_heads * sharers * (value + 2), dtype=dtype)
    context, conv = (torch.zeros(shape, dtype=dtype) for shape in ((rows, key_heads, sharers, value), (channels, 4)))
    heads, norm = torch.zeros(key_heads * sharers, dtype=dtype), torch.zeros(value, dtype=dtype)
    ops.delta_step(context, mixed, conv, heads, heads, norm, longs(2, 2), of_rows, of_rows, 0, key, 1e-6)


def recurrence(key_heads, sharers, key, value):
    """Launch linear attention over the tokens of a sequence, and its gradients."""
    tokens, heads = 8, key_heads * sharers
    query = torch.zeros(1, tokens, key_heads, key, requires_grad=True)
    values, numbers = torch.zeros(1, tokens, heads, value), torch.zeros(1, tokens, heads)
    found, _, after = recurred(query, query, values, numbers, numbers, torch.zeros(1, heads, key, value))
    (found.sum() + after.sum()).backward()


def experts(dtype, tokens, *, how=(0, 0.0, 0.0), has_bias=False):
    """Launch the kernels of 128 experts, of which each token has 8."""
    pairs = 8 * tokens
    logits, given, inner = (torch.zeros(rows, 128, dtype=dtype) for rows in (tokens, tokens, pairs))
    ops.route(ints(tokens, 8), torch.zeros(tokens, 8), logits, None, 1.0, True, True)
    ops.route(ints(tokens, 8), torch.zeros(tokens, 8), logits.float(), torch.zeros(logits.shape[1]), 2.5, False, True)
    ops.route(ints(tokens, 8), torch.zeros(tokens, 8), logits.float(), None, 2.5, False, True, 8, 4)
    where = longs(128), longs(pairs), longs(129)
    ops.sort_pairs(*where[1:], ints(tokens, 8))
    shares, biases = torch.zeros(tokens, 8), longs(128) if has_bias else None
    ops.expert_product(inner, given, *where, shares, biases, 8, True, *how)
    ops.expert_product(torch.zeros(pairs, 128, dtype=dtype), inner, *where, shares, biases, 8, False, *how)


def edited(dtype, vocabulary):
    """Launch the kernels that change logits, and those that sample from them."""
    rows, parts = 4, ops.num_parts(vocabulary)
    logits, floats, quiet = torch.zeros(rows, vocabulary, dtype=dtype), torch.zeros(rows), ints(rows).byte()
    seen, known, found = ints(rows, vocabulary), ints(rows, 16), torch.zeros(rows, vocabulary)
    ops.count(seen, known, longs(rows), longs(rows), 16, 0, vocabulary)
    ops.penalize(found, logits, seen, floats, floats, floats, vocabulary, 30.0)
    ops.add_rules(found, ints(rows, 4, 3), torch.zeros(rows, 4), known, longs(rows), longs(rows), ints(rows, 4), 0, 9)
    ops.remember(seen, known, longs(rows), longs(rows), longs(rows), 0, vocabulary)
    terms, ids = torch.zeros(7, rows, parts), ints(rows, parts)
    ops.sample_part(terms, ids, logits, found, longs(rows), longs(rows), floats, quiet, ints(rows), 0, vocabulary, 30.0)
    ops.settle(longs(rows), torch.zeros(rows), torch.zeros(rows), terms, ids, quiet)


def log_probs(dtype, vocabulary):
    logits, rows = torch.zeros(4, vocabulary, dtype=dtype), torch.zeros(4)
    vocab_terms(logits, longs(4), 0, vocabulary, 1.0)
    vocab_gradient(logits, longs(4), rows, rows, rows, rows, 0, vocabulary, 1.0)


def train(dtype, shape):
    """Launch attention on packed tokens and its gradients, with a cap and a window."""
    tokens, groups, head = 8, shape["groups"], shape["head"]
    query = torch.zeros(tokens, groups * shape["sharers"], head, dtype=dtype, requires_grad=True)
    key = torch.zeros(tokens, groups, head, dtype=dtype, requires_grad=True)
    context = packed_attention(query, key, key, ints(2), ints(2), tokens, tokens, 0.1, 50.0, 4096)[0]
    context.sum().backward()


def between_products(dtype, shape):
    """Launch the kernels between the products of a layer in training, and their gradients."""
    tokens, head, heads = 4, shape["head"], shape["groups"] * shape["sharers"]
    mixed = torch.zeros(tokens, 2 * shape["ffn"], dtype=dtype, requires_grad=True)
    query = torch.zeros(tokens, heads, head, dtype=dtype, requires_grad=True)
    taken = torch.tensor([0, 1, 0, 2, 3])
    rows = layer_kernels.taken_rows(query.flatten(1), taken, *layer_kernels.order_of(taken, tokens))
    for is_other in (False, True):
        table = torch.zeros(tokens, head // 2 if is_other else head)
        turned = layer_kernels.turned(query, table, 1.0, is_other)
        gated = layer_kernels.gated(mixed, *((2, 7.0, 1.0) if is_other else (1, 0.0, 0.0)))
        (gated.sum() + turned.sum() + rows.sum()).backward(retain_graph=True)


def copies():
    for columns in (1, 256):
        copy_kernel.carry(longs(4, 6), columns)


CASES = {
    "resharding": copies,
    "7B, a step": lambda: attend_in_cache(BF16, QWEN2_7B, has_tiles=False, is_special=False),
    "7B, a prefill": lambda: attend_in_cache(BF16, QWEN2_7B, has_tiles=True),
    "Gemma 2, a step with split keys": lambda: attend_in_cache(BF16, GEMMA2_9B, has_tiles=False, splits=8),
    "Gemma 2, the last row, with split keys": lambda: attend_in_cache(
        BF16, GEMMA2_9B, has_tiles=False, splits=8, rows=1
    ),
    "Gemma 2, a prefill": lambda: attend_in_cache(BF16, GEMMA2_9B, has_tiles=True),
    "Gemma 2, around attention": lambda: around_attention(BF16, GEMMA2_9B, 256000),
    "Gemma 2, edited logits": lambda: edited(BF16, 256000),
    "Qwen 3.5, attention with gates": lambda: gated_attention(BF16, QWEN3_5_9B),
    "Qwen 3.5, a step of linear attention": lambda: linear_attention(BF16, 16, 2, 128, 128),
    "Qwen 3.5, linear attention in training": lambda: recurrence(16, 2, 128, 128),
    "latent attention, a step": lambda: latent_attention(BF16, 16),
    "experts, a step": lambda: experts(BF16, 64),
    "experts, a prefill": lambda: experts(BF16, 2048),
    "GPT-OSS, a step with split keys": lambda: attend_in_cache(
        BF16, GPT_OSS, has_tiles=False, has_sinks=True, splits=8
    ),
    "GPT-OSS, a prefill": lambda: attend_in_cache(BF16, GPT_OSS, has_tiles=True, has_sinks=True),
    "experts with biases and bounds, a step": lambda: experts(BF16, 64, how=(2, 7.0, 1.0), has_bias=True),
    "experts with biases and bounds, a prefill": lambda: experts(BF16, 2048, how=(2, 7.0, 1.0), has_bias=True),
    "OLMo 2, a step": lambda: attend_in_cache(BF16, OLMO2_7B, has_tiles=False, is_wide=True),
    "Gemma 4, a step with split keys": lambda: attend_in_cache(BF16, GEMMA4_31B, has_tiles=False, splits=16),
    "Gemma 4, a prefill": lambda: attend_in_cache(BF16, GEMMA4_31B, has_tiles=True),
    "log-probabilities": lambda: log_probs(BF16, 152064),
    "Gemma 2, between the products of training": lambda: between_products(BF16, GEMMA2_9B),
    "Gemma 2, training": lambda: train(BF16, GEMMA2_9B),
}
MORE = {
    "Phi 3, a prefill": lambda: attend_in_cache(BF16, PHI3_MINI, has_tiles=True),
    "Qwen 3 235B, a step": lambda: attend_in_cache(BF16, QWEN3_235B, has_tiles=False),
    "Qwen 3 235B, a prefill": lambda: attend_in_cache(BF16, QWEN3_235B, has_tiles=True),
    "GLM-4, a step": lambda: attend_in_cache(BF16, GLM4_9B, has_tiles=False, is_special=False, is_interleaved=True),
    "Seed-OSS, a step": lambda: attend_in_cache(BF16, SEED_OSS, has_tiles=False, is_special=False),
    "Seed-OSS, a prefill": lambda: attend_in_cache(BF16, SEED_OSS, has_tiles=True, is_special=False),
    "GPT-OSS, training": lambda: train(BF16, GPT_OSS),
    "latent attention, a step with split keys": lambda: latent_attention(BF16, 128, splits=8),
    "latent attention in fp32, a step": lambda: latent_attention(FP32, 16),
    "MiniMax-M2, a step": lambda: attend_in_cache(BF16, MINIMAX_M2, has_tiles=False, is_wide=True),
    "Gemma 4, a step": lambda: attend_in_cache(BF16, GEMMA4_31B, has_tiles=False),
    "Gemma 4 in fp32, a step": lambda: attend_in_cache(FP32, GEMMA4_31B, has_tiles=False),
    "Gemma 4 in fp32, a prefill": lambda: attend_in_cache(FP32, GEMMA4_31B, has_tiles=True),
    "GPT-OSS, a step": lambda: attend_in_cache(BF16, GPT_OSS, has_tiles=False, has_sinks=True),
    "1B, a prefill": lambda: attend_in_cache(BF16, LLAMA3_1B, has_tiles=True),
    "7B in fp32, a prefill": lambda: attend_in_cache(FP32, QWEN2_7B, has_tiles=True),
    "Gemma 2 in fp32, a step": lambda: attend_in_cache(FP32, GEMMA2_9B, has_tiles=False),
    "four value heads for a key head, a step of linear attention": lambda: linear_attention(BF16, 2, 4, 128, 128),
    "attention with gates in fp32": lambda: gated_attention(FP32, QWEN3_5_9B),
    "linear attention in fp32, a step": lambda: linear_attention(FP32, 16, 2, 128, 128),
    "experts with GELU, a small prefill": lambda: experts(BF16, 512, how=GELU),
    "experts in fp32, a prefill": lambda: experts(FP32, 2048),
    "70B in fp32, between the products of training": lambda: between_products(FP32, LLAMA3_70B),
    "7B, training": lambda: train(BF16, QWEN2_7B),
    "Gemma 2 in fp32, training": lambda: train(FP32, GEMMA2_9B),
}


@pytest.mark.parametrize(
    ("capability", "name"),
    [*((capability, name) for capability in (80, 90, 100) for name in CASES), *((90, name) for name in MORE)],
)
def test_kernels_spill_next_to_nothing_and_fit_shared_memory(monkeypatch, tmp_path_factory, capability, name):
    with recording(monkeypatch) as launches:
        (CASES | MORE)[name]()
    assert launches
    used = [(each.name, compiled(each, capability, tmp_path_factory.getbasetemp())) for each in launches]
    assert not [(kernel, use) for kernel, use in used if use.stack_bytes > STACK_BYTES or use.local_bytes]
    assert not [(kernel, use) for kernel, use in used if use.shared_bytes > SHARED_BYTES]
    assert not [(kernel, use) for kernel, use in used if use.uses_tf32], "texts in fp32 are those of a CPU"


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("7B, a step", "attend"),
        ("7B, a prefill", "attend"),
        ("experts, a step", "expert_product"),
        ("latent attention, a step", "attend_latent"),
        ("resharding", "_copy_kernel"),
    ],
)
def test_what_is_found_by_address_is_read_16_bytes_at_a_time(monkeypatch, tmp_path_factory, name, kernel):
    """Triton reads element by element where it does not know that an address is a multiple of 16."""
    with recording(monkeypatch) as launches:
        CASES[name]()
    used = [compiled(each, 90, tmp_path_factory.getbasetemp()) for each in launches if each.name == kernel]
    assert used and all(use.wide_loads and not use.narrow_loads for use in used)
