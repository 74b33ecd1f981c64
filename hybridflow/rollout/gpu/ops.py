"""The kernels as operators of torch: one launch each, with shapes that can be followed without a GPU.

An operator that writes takes what it writes to as its first arguments. See the kernels for the other arguments.
"""

# torch reads the annotations of an operator, so they are no strings here.
from typing import Any

import torch
import triton
from torch import Tensor

from hybridflow.models import layer_kernels
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu import (
    delta_kernels,
    edit_kernels,
    expert_kernels,
    kernels,
    latent_kernels,
    sampling_kernels,
)

PART_COLUMNS = 4096
"""Columns of the logits that a program reads."""

LATENT_HEADS = 16
"""Heads for which a program of latent attention reads the keys."""


def _operator(*, mutates: tuple[str, ...]) -> Any:
    """Make an operator of a function that writes to some arguments and returns nothing."""

    def make(function: Any) -> Any:
        operator = torch.library.custom_op(f"hybridflow::{function.__name__}", function, mutates_args=mutates)
        operator.register_fake(lambda *_, **__: None)
        return operator

    return make


def _power(number: int, least: int = 1) -> int:
    return max(least, 1 << max(number - 1, 0).bit_length())


@_operator(mutates=("hidden", "normed"))
def add_norm(
    hidden: Tensor,
    normed: Tensor | None,
    product: Tensor | None,
    post_weight: Tensor | None,
    weight: Tensor | None,
    eps: float,
    centre: float,
    factor: Tensor | None = None,
) -> None:
    rows, width = hidden.shape
    kernels.add_norm[(rows,)](
        *(hidden, *(hidden if each is None else each for each in (product, post_weight, factor, weight, normed))),
        *(width, eps, centre),
        HAS_PRODUCT=product is not None,
        HAS_POST=post_weight is not None,
        HAS_FACTOR=factor is not None,
        HAS_NORM=weight is not None,
        BLOCK=_power(width),
        num_warps=4 if width <= 2048 else 8,
    )


@_operator(mutates=("squares",))
def mean_squares(squares: Tensor, mixed: Tensor, ranks: int) -> None:
    rows, groups, width, head = mixed.shape
    kernels.mean_squares[(rows,)](
        *(squares, mixed, ranks),
        GROUPS=groups,
        SHARERS=width - 2,
        HEAD=head,
        HEADS=_power(width - 1),
        WIDTH=_power(head),
        num_warps=4,
    )


@_operator(mutates=("query",))
def store(
    query: Tensor,
    mixed: Tensor,
    caches: Tensor,
    tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    rotary: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    squares: Tensor | None,
    layer: int,
    eps: float,
    centre: float,
    is_interleaved: bool,
    has_value_norm: bool = False,
    shifts: Tensor | None = None,
) -> None:
    rows, groups, sharers, head = query.shape
    turned = rotary.shape[2]
    kernels.store[(rows, groups)](
        *(query, mixed, caches, tables, sequences, positions, rotary, positions if shifts is None else shifts),
        *(query if each is None else each for each in (query_weight, key_weight, squares)),
        *(layer, tables.shape[1], eps, centre),
        GROUPS=groups,
        SHARERS=sharers,
        HEAD=head,
        TURNED=turned,
        BLOCK_TOKENS=BLOCK_TOKENS,
        HEADS=_power(sharers + 1),
        HALF=_power(turned),
        REST=_power(head - 2 * turned) if 2 * turned < head else 0,
        WIDTH=_power(head),
        HAS_NORM=query_weight is not None,
        IS_WIDE=squares is not None,
        HAS_VALUE_NORM=has_value_norm,
        HAS_GATE=mixed.shape[2] > sharers + 2,
        IS_INTERLEAVED=is_interleaved,
        HAS_SHIFTS=shifts is not None,
        num_warps=2 if head <= 256 else 4,
    )


@_operator(mutates=("context",))
def gate_heads(context: Tensor, mixed: Tensor) -> None:
    rows, groups, sharers, head = context.shape
    kernels.gate_heads[(rows * groups,)](
        context, mixed, SHARERS=sharers, HEAD=head, HEADS=_power(sharers), WIDTH=_power(head), num_warps=4
    )


@_operator(mutates=("context", "partial", "sums"))
def attend(
    context: Tensor,
    partial: Tensor | None,
    sums: Tensor | None,
    query: Tensor,
    caches: Tensor,
    tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    firsts: Tensor | None,
    counts: Tensor | None,
    sinks: Tensor | None,
    layer: int,
    rows_per_tile: int,
    scale: float,
    softcap: float,
    window: int,
) -> None:
    rows, groups, sharers, head = query.shape
    tiles, splits = rows if firsts is None else len(firsts), 1 if partial is None else len(partial)
    queries = _power(rows_per_tile * sharers, 16)
    kernels.attend[(tiles, groups, splits)](
        *(context, context if partial is None else partial, context if sums is None else sums, query, caches, tables),
        *(sequences, positions, positions if firsts is None else firsts, positions if counts is None else counts),
        *(query if sinks is None else sinks, layer, rows, tables.shape[1], scale, softcap, window),
        GROUPS=groups,
        SHARERS=sharers,
        HEAD=head,
        BLOCK_TOKENS=BLOCK_TOKENS,
        SPLITS=splits,
        HAS_TILES=firsts is not None,
        HAS_CAP=softcap > 0,
        HAS_WINDOW=window > 0,
        HAS_SINKS=sinks is not None,
        QUERIES=queries,
        # On an H100 attention takes 7 to 12 percent longer in decoding with 32 keys at a time.
        KEYS=16 if query.dtype.itemsize == 4 or head > 256 else 64 if queries == 16 and head <= 128 else 32,
        WIDTH=_power(head, 16),
        num_warps=4 if (queries == 16 and head <= 256) or head <= 64 else 8,
        num_stages=2,
    )


@_operator(mutates=("turned",))
def store_latent(
    turned: Tensor,
    query: Tensor,
    compressed: Tensor,
    caches: Tensor,
    tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    rotary: Tensor,
    weight: Tensor,
    layer: int,
    eps: float,
    centre: float,
) -> None:
    (rows, heads, width), pairs, latent = query.shape, rotary.shape[2], len(weight)
    latent_kernels.store_latent[(rows,)](
        *(turned, query, compressed, caches, tables, sequences, positions, rotary, weight),
        *(layer, tables.shape[1], eps, centre),
        NUM_HEADS=heads,
        PLAIN=width - 2 * pairs,
        PAIRS=pairs,
        LATENT=latent,
        BLOCK_TOKENS=BLOCK_TOKENS,
        HEADS=_power(heads),
        HALF=_power(pairs),
        WIDTH=_power(latent),
        num_warps=4,
    )


@_operator(mutates=("context", "partial", "sums"))
def attend_latent(
    context: Tensor,
    partial: Tensor | None,
    sums: Tensor | None,
    query: Tensor,
    turned: Tensor,
    caches: Tensor,
    tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    layer: int,
    scale: float,
    softcap: float,
    window: int,
) -> None:
    (heads, rows, latent), rotary, splits = query.shape, turned.shape[2], 1 if partial is None else len(partial)
    latent_kernels.attend_latent[(rows, triton.cdiv(heads, LATENT_HEADS), splits)](
        *(context, context if partial is None else partial, context if sums is None else sums, query, turned),
        *(caches, tables, sequences, positions, layer, rows, tables.shape[1], scale, softcap, window),
        NUM_HEADS=heads,
        ROTARY=rotary,
        LATENT=latent,
        BLOCK_TOKENS=BLOCK_TOKENS,
        SPLITS=splits,
        HAS_CAP=softcap > 0,
        HAS_WINDOW=window > 0,
        HEADS=LATENT_HEADS,
        KEYS=16 if query.dtype.itemsize == 4 else 32,
        TURNING=_power(rotary, 16),
        WIDTH=_power(latent, 16),
        num_warps=8,
        num_stages=2,
    )


@_operator(mutates=("context",))
def combine(context: Tensor, partial: Tensor, sums: Tensor) -> None:
    num_heads, head = context[..., 0].numel(), context.shape[-1]
    kernels.combine[(num_heads,)](
        *(context, partial, sums, num_heads),
        HEAD=head,
        SPLITS=len(partial),
        PARTS=_power(len(partial)),
        WIDTH=_power(head),
        num_warps=2,
    )


@_operator(mutates=("context",))
def delta_step(
    context: Tensor,
    mixed: Tensor,
    conv: Tensor,
    bias: Tensor,
    log: Tensor,
    norm: Tensor,
    states: Tensor,
    slots: Tensor,
    positions: Tensor,
    layer: int,
    key_size: int,
    eps: float,
) -> None:
    rows, key_heads, sharers, value = context.shape
    keys, taps = _power(key_size), conv.shape[1]
    delta_kernels.delta_step[(rows, key_heads)](
        *(context, mixed, conv, bias, log, norm, states, slots, positions, layer, eps),
        KEY_HEADS=key_heads,
        SHARERS=sharers,
        KEY=key_size,
        VALUE=value,
        TAPS=taps,
        KEYS=keys,
        # A thread has 32 elements of a block, and reads as many ahead.
        BLOCK=min(_power(value), max(4096 // keys, 1)),
        WINDOW=_power(taps),
        HEADS=_power(sharers),
        VALUES=_power(value),
        num_warps=4,
    )


@_operator(mutates=("result",))
def gate(result: Tensor, mixed: Tensor, kind: int, clamp: float, offset: float) -> None:
    rows, inner = result.shape
    grid = rows, triton.cdiv(inner, layer_kernels.GATE_COLUMNS)
    how = dict(KIND=kind, CLAMP=clamp, OFFSET=offset)
    layer_kernels.gate[grid](result, mixed, inner, **how, BLOCK=layer_kernels.GATE_COLUMNS)


@_operator(mutates=("chosen", "shares"))
def route(
    chosen: Tensor,
    shares: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    scale: float,
    is_softmax: bool,
    is_normalized: bool,
    groups: int = 1,
    num_groups_chosen: int = 1,
) -> None:
    rows, num_experts = logits.shape
    expert_kernels.route[(rows,)](
        *(chosen, shares, logits, logits if bias is None else bias, num_experts, scale),
        NUM_CHOSEN=chosen.shape[1],
        SLOTS=_power(chosen.shape[1]),
        IS_SOFTMAX=is_softmax,
        HAS_BIAS=bias is not None,
        IS_NORMALIZED=is_normalized,
        GROUPS=groups,
        NUM_GROUPS_CHOSEN=num_groups_chosen,
        GROUP_SLOTS=_power(groups),
        BLOCK=_power(num_experts),
        num_warps=1,
    )


@_operator(mutates=("order", "bounds"))
def sort_pairs(order: Tensor, bounds: Tensor, chosen: Tensor, first: int = 0) -> None:
    num_pairs = chosen.numel()
    block = min(_power(num_pairs, 16), 2048)
    expert_kernels.sort_pairs[(len(bounds) - 1,)](order, bounds, chosen, num_pairs, first, BLOCK=block)


@_operator(mutates=("result",))
def expert_product(
    result: Tensor,
    source: Tensor,
    matrices: Tensor,
    order: Tensor,
    bounds: Tensor,
    shares: Tensor,
    biases: Tensor | None,
    num_chosen: int,
    is_gated: bool,
    kind: int,
    clamp: float,
    offset: float,
) -> None:
    (pairs, outputs), inputs, columns = result.shape, source.shape[1], 64
    is_half = source.dtype.itemsize == 2
    expert_kernels.expert_product[(len(matrices), triton.cdiv(outputs, columns))](
        *(result, source, matrices, order, bounds, shares, matrices if biases is None else biases),
        *(inputs, outputs, num_chosen),
        IS_GATED=is_gated,
        HAS_BIAS=biases is not None,
        KIND=kind,
        CLAMP=clamp,
        OFFSET=offset,
        # Twice as many as an expert has on average: one with more has its matrix read again.
        ROWS=min(_power(triton.cdiv(2 * pairs, len(matrices)), 16), 32),
        COLUMNS=columns,
        DEPTH=128 if is_half else 16,
        num_warps=4 if is_half else 8,
        num_stages=3,
    )


@_operator(mutates=("floors",))
def find_floors(
    floors: Tensor,
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    num_real: int,
    softcap: float,
) -> None:
    sampling_kernels.find_floors[(len(logits),)](
        *(floors, logits, temperatures, top_k, top_p, min_p, num_real, logits.shape[1], softcap),
        HAS_CAP=softcap > 0,
        # At 4096, registers do not suffice on sm_100.
        BLOCK=PART_COLUMNS // 2,
        num_warps=8,
    )


@_operator(mutates=("terms", "ids"))
def sample_part(
    terms: Tensor,
    ids: Tensor,
    logits: Tensor,
    edited: Tensor | None,
    keys: Tensor,
    lengths: Tensor | None,
    temperatures: Tensor,
    is_quiet: Tensor,
    floors: Tensor | None,
    first_id: int,
    num_real: int,
    softcap: float,
) -> None:
    rows, parts = ids.shape
    sampling_kernels.sample_part[(rows, parts)](
        *(terms, ids, logits, logits if edited is None else edited, keys, keys if lengths is None else lengths),
        *(temperatures, is_quiet, is_quiet if floors is None else floors, first_id, num_real, logits.shape[1], softcap),
        PARTS=parts,
        HAS_CAP=softcap > 0,
        HAS_LENGTHS=lengths is not None,
        HAS_FLOORS=floors is not None,
        HAS_EDITS=edited is not None,
        BLOCK=PART_COLUMNS,
        # With edits, registers of 8 warps do not suffice on sm_100.
        num_warps=8 if edited is None else 16,
    )


@_operator(mutates=("tokens", "log_probs", "sampled"))
def settle(tokens: Tensor, log_probs: Tensor, sampled: Tensor, terms: Tensor, ids: Tensor, is_quiet: Tensor) -> None:
    rows, parts = ids.shape
    sampling_kernels.settle[(rows,)](
        *(tokens, log_probs, sampled, terms, ids, is_quiet),
        PARTS=parts,
        HAS_EDITS=len(terms) == sampling_kernels.NUM_EDITED_TERMS,
        BLOCK=_power(parts),
        num_warps=2,
    )


@_operator(mutates=("seen",))
def count(
    seen: Tensor, known: Tensor, lengths: Tensor, num_prompt: Tensor, longest: int, first_id: int, num_real: int
) -> None:
    edit_kernels.count[(len(seen), triton.cdiv(longest, 1024))](
        *(seen, known, lengths, num_prompt, first_id, num_real, seen.shape[1], known.shape[1]), BLOCK=1024
    )


@_operator(mutates=("edited",))
def penalize(
    edited: Tensor,
    logits: Tensor,
    seen: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    num_real: int,
    softcap: float,
) -> None:
    rows, columns = logits.shape
    edit_kernels.penalize[(rows, triton.cdiv(columns, 1024))](
        *(edited, logits, seen, repetition, presence, frequency, num_real, columns, softcap),
        HAS_CAP=softcap > 0,
        BLOCK=1024,
        # Rounded after each operation, as the reference does.
        enable_fp_fusion=False,
    )


@_operator(mutates=("edited",))
def add_rules(
    edited: Tensor,
    rules: Tensor,
    amounts: Tensor,
    known: Tensor,
    lengths: Tensor,
    no_stop_before: Tensor,
    stops: Tensor,
    first_id: int,
    num_real: int,
) -> None:
    rows, columns = edited.shape
    edit_kernels.add_rules[(rows,)](
        *(edited, rules, amounts, known, lengths, no_stop_before, stops, first_id, num_real, columns),
        *(*rules.shape[1:], known.shape[1]),
        STOPS=stops.shape[1],
        STOPS_BLOCK=_power(stops.shape[1]),
        BLOCK=128,
    )


@_operator(mutates=("seen", "known"))
def remember(
    seen: Tensor, known: Tensor, tokens: Tensor, lengths: Tensor, positions: Tensor, first_id: int, num_real: int
) -> None:
    edit_kernels.remember[(len(tokens),)](
        *(seen, known, tokens, lengths, positions, first_id, num_real, seen.shape[1], known.shape[1]), num_warps=1
    )


@_operator(
    mutates=(
        *("token_in", "lengths", "positions", "counts", "failures"),
        *("history", "log_probs_history", "sampled_history"),
    )
)
def advance(
    token_in: Tensor,
    lengths: Tensor,
    positions: Tensor,
    counts: Tensor,
    failures: Tensor,
    history: Tensor,
    log_probs_history: Tensor,
    sampled_history: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    sampled: Tensor,
    ends: Tensor,
    no_stop_before: Tensor,
    stops: Tensor,
) -> None:
    sampling_kernels.advance[(len(tokens),)](
        *(token_in, lengths, positions, counts, failures, history, log_probs_history, sampled_history),
        *(tokens, log_probs, sampled, ends, no_stop_before, stops, history.shape[1]),
        STOPS=stops.shape[1],
        BLOCK=_power(stops.shape[1]),
        num_warps=1,
    )


def num_parts(columns: int) -> int:
    """Return the parts of a row of logits."""
    return max(-(-columns // PART_COLUMNS), 1)
