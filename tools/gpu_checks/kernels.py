"""The Triton kernels at the sizes of a 7B model in bf16, each beside plain torch on the same device."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from gpu_checks.common import find_device, make_world, relative_gap, result, run, runs_kernels, tell

_BF16, _FP32 = 2.0**-6, 1e-4
"""Largest difference over the largest value: of what is rounded to bf16 a few times, and of sums in fp32."""


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Run every kernel of the decode engine, and those of training."""
    import torch

    if not runs_kernels():
        return result("Triton is not installed: nothing was run", {}, {})
    if is_dry:
        # Triton's interpreter has no products of matrices in bf16.
        sizes = dict(dtype=torch.float32, rows=3, hidden=96, ffn=160, groups=2, sharers=3, head=16, vocab=5000)
    else:
        sizes = dict(dtype=torch.bfloat16, rows=64, hidden=3584, ffn=18944, groups=4, sharers=7, head=128, vocab=152064)
    apart: dict[str, tuple[float, float]] = {}
    checks = (
        *(_check_layer, _check_between_products, _check_weights, _check_experts, _check_grouped),
        *(_check_attention, _check_latent_attention, _check_linear_attention, _check_recurrence, _check_log_probs),
    )
    for check in checks:
        try:
            apart |= check(SimpleNamespace(**sizes, context=40 if is_dry else 2000))
        except Exception:  # the others tell more
            traceback.print_exc()
            apart[f"{check.__name__}, which failed"] = (math.inf, 0.0)
        # What is known if time runs out.
        tell(_result(apart))
    return _result(apart)


def _result(apart: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the result of some kernels, from the difference of each and its bound."""
    bounds = {f"difference of {name}": (gap, "<=", bound) for name, (gap, bound) in apart.items()}
    text = ", ".join(f"{name} {gap:.2g}" for name, (gap, _) in apart.items())
    return result(f"largest relative differences: {text}", bounds, {name: gap for name, (gap, _) in apart.items()})


def _random(sizes: Any, *shape: int) -> Any:
    """Return normal numbers, the same for the same shape."""
    import torch

    generator = torch.Generator(device=find_device()).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=find_device()).to(sizes.dtype)


def _norm(values: Any, weight: Any, eps: float) -> Any:
    import torch

    values = values.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()


def _check_layer(sizes: Any) -> dict[str, tuple[float, float]]:
    """Norms and the gate of a feed-forward block."""
    import torch
    from torch.nn.functional import silu

    from hybridflow.rollout.gpu import ops

    hidden, product = _random(sizes, sizes.rows, sizes.hidden), _random(sizes, sizes.rows, sizes.hidden).flip(0)
    weight, both = _random(sizes, sizes.hidden), _random(sizes, sizes.rows, 2 * sizes.ffn)
    total = hidden + product
    normed, inner = torch.empty_like(hidden), both.new_empty(sizes.rows, sizes.ffn)
    ops.add_norm(hidden, normed, product, None, weight, 1e-6, 0.0)
    ops.gate(inner, both, 0, 0.0, 0.0)
    gate, up = both.float().chunk(2, dim=1)
    return {
        "sum": (relative_gap(hidden, total), _BF16),
        "norm": (relative_gap(normed, _norm(total, weight, 1e-6)), _BF16),
        "gate": (relative_gap(inner, silu(gate) * up), _BF16),
    }


def _check_between_products(sizes: Any) -> dict[str, tuple[float, float]]:
    """Gates, rotations, and rows that several samples take, in training; with their gradients."""
    import torch
    from torch.nn.functional import silu

    from hybridflow.models import layer_kernels
    from hybridflow.models.rotary import rotary_table

    device, head, heads = find_device(), sizes.head, sizes.groups * sizes.sharers
    frequencies = 1e4 ** -(torch.arange(0, head, 2, device=device) / head)
    table = rotary_table(frequencies, sizes.rows)
    taken = torch.arange(3 * sizes.rows, device=device) % sizes.rows
    order = layer_kernels.order_of(taken, sizes.rows)

    def gate(mixed: Any) -> Any:
        active, other = mixed.chunk(2, dim=-1)
        return silu(active) * other

    cases = {
        "gates in training": (lambda each: layer_kernels.gated(each, 0, 0.0, 0.0), gate, (sizes.rows, 2 * sizes.ffn)),
        "rotations": (
            lambda each: layer_kernels.turned(each, table.flatten(1), 1.0, False),
            lambda each: _turn(each, table.double()),
            (sizes.rows, heads, head),
        ),
        "taken rows": (
            lambda each: layer_kernels.taken_rows(each, taken, *order),
            lambda each: each[taken],
            (sizes.rows, sizes.hidden),
        ),
    }
    found = {}
    for name, (ours, theirs, shape) in cases.items():
        given = _random(sizes, *shape).requires_grad_()
        exact = given.detach().double().requires_grad_()
        outputs = ours(given), theirs(exact)
        weight = _random(sizes, *outputs[0].shape).flip(0)
        gradients = (
            torch.autograd.grad(outputs[0], given, weight),
            torch.autograd.grad(outputs[1], exact, weight.double()),
        )
        gaps = relative_gap(*outputs), relative_gap(gradients[0][0], gradients[1][0])
        found[name] = max(gaps), _BF16
    return found


def _check_weights(sizes: Any) -> dict[str, tuple[float, float]]:
    """A gradient of weights that is added to fp32 sums."""
    import torch

    from hybridflow.parallel.accelerators import add_weight_gradient

    inputs, gradients = _random(sizes, sizes.rows, sizes.hidden), _random(sizes, sizes.rows, sizes.ffn)
    sums = torch.ones(sizes.ffn, sizes.hidden, device=find_device())
    add_weight_gradient(inputs, gradients, sums)
    return {"gradients of weights": (relative_gap(sums, 1 + gradients.t().double() @ inputs.double()), _FP32)}


def _check_experts(sizes: Any) -> dict[str, tuple[float, float]]:
    """Two of eight experts for each row, and the products with their matrices, then with biases and bounds too."""
    import torch
    from torch.nn.functional import silu

    from hybridflow.rollout.gpu import ops

    num_experts, num_chosen, device = 8, 2, find_device()
    given, logits = _random(sizes, sizes.rows, sizes.hidden), _random(sizes, sizes.rows, num_experts)
    first = _random(sizes, num_experts, 2 * sizes.ffn, sizes.hidden) / math.sqrt(sizes.hidden)
    second = _random(sizes, num_experts, sizes.hidden, sizes.ffn) / math.sqrt(sizes.ffn)
    chosen = torch.zeros(sizes.rows, num_chosen, dtype=torch.int32, device=device)
    shares = torch.zeros(sizes.rows, num_chosen, device=device)
    ops.route(chosen, shares, logits, None, 1.0, True, True)
    pairs = chosen.new_empty(chosen.numel(), dtype=torch.int64), chosen.new_empty(num_experts + 1, dtype=torch.int64)
    ops.sort_pairs(*pairs, chosen)
    order, (experts, expected) = pairs[0], chosen.flatten().sort(stable=True)
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=torch.int32, device=device))
    misplaced = int((order != expected).sum() + (pairs[1] != bounds).sum())
    biases = _random(sizes, num_experts, 2 * sizes.ffn), _random(sizes, num_experts, sizes.hidden)
    tensors = first, second, *biases
    where = torch.tensor([[each.data_ptr() for each in kind] for kind in tensors], device=device)
    largest = logits.float().topk(num_chosen).values.softmax(-1)
    found = {"experts' pairs": (misplaced, 0), "experts' shares": (relative_gap(shares, largest), _BF16)}
    for name, is_plain in {"": True, ", biases and bounds": False}.items():
        how = (0, 0.0, 0.0) if is_plain else (2, 1.5, 1.0)
        first_bias, last_bias = (None, None) if is_plain else where[2:]
        inner = given.new_empty(len(order), sizes.ffn)
        ops.expert_product(inner, given, where[0], *pairs, shares, first_bias, num_chosen, True, *how)
        output = given.new_empty(len(order), sizes.hidden)
        ops.expert_product(output, inner, where[1], *pairs, shares, last_bias, num_chosen, False, *how)
        wanted_inner, wanted = (torch.empty_like(each, dtype=torch.float32) for each in (inner, output))
        for expert in range(num_experts):
            row = (chosen.flatten() == expert).nonzero()[:, 0]
            share = shares.flatten()[row, None]
            mixed = given[row // num_chosen].float() @ first[expert].float().T
            wanted[row] = inner[row].float() @ second[expert].float().T
            if is_plain:
                gate, up = mixed.chunk(2, dim=1)
                wanted_inner[row] = silu(gate) * up * share
            else:
                gate, up = (mixed + biases[0][expert].float()).chunk(2, dim=1)
                gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5) + 1
                wanted_inner[row] = gate * (1.702 * gate).sigmoid() * up * share
                wanted[row] += biases[1][expert].float() * share
        found[f"experts' gates{name}"] = relative_gap(inner, wanted_inner), _BF16
        found[f"experts{name}"] = relative_gap(output, wanted), _BF16
    return found


def _check_grouped(sizes: Any) -> dict[str, tuple[float, float]]:
    """Experts in training, some of which have no pair; with all gradients, matrices apart and side by side."""
    import torch
    from torch.nn.functional import silu

    from hybridflow.models.gated import gated
    from hybridflow.models.grouped import grouped_experts

    num_experts, num_chosen = 6, 2
    hidden, scales = _random(sizes, sizes.rows, sizes.hidden), _random(sizes, sizes.rows, num_chosen).abs()
    # Of experts 0, 3 and 5 there is no pair.
    chosen = torch.tensor([1, 2, 4], device=hidden.device)[torch.arange(sizes.rows * num_chosen) % 3].view(scales.shape)
    chosen[: sizes.rows // 2] = torch.tensor([1, 4], device=hidden.device)
    first = [_random(sizes, 2 * sizes.ffn, sizes.hidden) / math.sqrt(sizes.hidden) for _ in range(num_experts)]
    second = [_random(sizes, sizes.hidden, sizes.ffn) / math.sqrt(sizes.ffn) for _ in range(num_experts)]
    counts, order = chosen.flatten().bincount(minlength=num_experts), chosen.flatten().argsort(stable=True)
    found: dict[str, tuple[float, float]] = {}
    for name, matrices in {"": [first, second], ", side by side": _side_by_side(first, second)}.items():
        one, two = ([each.detach().requires_grad_() for each in kind] for kind in matrices)
        given = [hidden.detach().requires_grad_(), scales.detach().requires_grad_(), *one, *two]
        sums = _side_by_side(*([torch.zeros_like(each, dtype=torch.float32) for each in kind] for kind in matrices))
        for matrix, total in zip((*one, *two), (*sums[0], *sums[1]), strict=True):
            matrix.main_grad = total
        gate = functools.partial(gated, activation=silu)
        output = grouped_experts(given[0], order, counts, given[1], one, two, gate, adds_gradients=True)
        expected = torch.zeros_like(output, dtype=torch.float32)
        for expert, (upper, lower) in enumerate(zip(one, two, strict=True)):
            active, up = (given[0].float() @ upper.float().T).chunk(2, dim=-1)
            share = (given[1] * (chosen == expert)).float().sum(1, keepdim=True)
            expected = expected + share * (silu(active) * up) @ lower.float().T
        gradient = _random(sizes, *output.shape).flip(0)
        both = (torch.autograd.grad(each, given, gradient.to(each.dtype)) for each in (output, expected))
        pairs = list(zip(*both, strict=True))
        pairs += [(each.main_grad, wanted) for each, (_, wanted) in zip(given[2:], pairs[2:], strict=True)]
        empty = [float(ours.abs().max().nan_to_num(math.inf)) for ours, wanted in pairs if not wanted.any()]
        found |= {
            f"grouped experts{name}": (relative_gap(output, expected), _BF16),
            f"their gradients{name}": (max(relative_gap(*pair) for pair in pairs if pair[1].any()), 2 * _BF16),
            f"those of experts without pairs{name}": (max(empty), 0.0),
        }
    return found


def _side_by_side(*kinds: list[Any]) -> list[list[Any]]:
    """Return matrices as DDP lays them: those of an expert one behind the other, the last expert first."""
    import torch

    flat = torch.cat([each.flatten() for pair in zip(*kinds, strict=True) for each in pair][::-1])
    found: list[list[Any]] = [[] for _ in kinds]
    at = len(flat)
    for pair in zip(*kinds, strict=True):
        for kind, each in zip(found, pair, strict=True):
            at -= each.numel()
            kind.append(flat[at : at + each.numel()].view(each.shape))
    return found


def _check_attention(sizes: Any) -> dict[str, tuple[float, float]]:
    """Prefill in tiles, then a decode step with whole and split keys, and with shifts; window, cap and sinks."""
    import numpy as np
    import torch

    from hybridflow.models.rotary import rotary_table
    from hybridflow.models.scoring import Scoring
    from hybridflow.rollout.blocks import BLOCK_TOKENS
    from hybridflow.rollout.gpu.cache import GpuAttention, rows_per_tile, tiles_of

    device, num_sequences = find_device(), 2
    groups, sharers, head, context = sizes.groups, sizes.sharers, sizes.head, sizes.context
    # Blocks in an order that is not that of the tokens.
    per_sequence = -(-context // BLOCK_TOKENS)
    tables = (
        torch.arange(num_sequences * per_sequence, dtype=torch.int32, device=device).flip(0).view(num_sequences, -1)
    )
    cache = torch.zeros(2, tables.numel(), BLOCK_TOKENS, groups, head, dtype=sizes.dtype, device=device)
    addresses = torch.tensor([[each.data_ptr() for each in cache]], device=device)
    frequencies = 1e4 ** -(torch.arange(0, head, 2, device=device) / head)
    rotary, norms = rotary_table(frequencies, context), (_random(sizes, head), _random(sizes, head).flip(0))
    mixed = _random(sizes, num_sequences * context, groups, sharers + 2, head)
    rows = torch.arange(len(mixed), device=device)
    is_last = rows % context == context - 1
    most = rows_per_tile(sizes.dtype, sharers, head)
    found: dict[str, tuple[float, float]] = {}
    scorings = {
        "": Scoring(scale=head**-0.5),
        ", window and cap": Scoring(scale=head**-0.5, softcap=20.0, window=17),
        ", sinks": Scoring(scale=head**-0.5, sinks=_random(sizes, groups * sharers)),
    }
    for name, scoring in scorings.items():
        expected = _attend(mixed.view(num_sequences, context, groups, sharers + 2, head), rotary, norms, scoring)
        for kind in ("prefill", "decode", "split decode", "shifted decode"):
            chosen = ~is_last if kind == "prefill" else is_last
            sequences, positions = rows[chosen] // context, rows[chosen] % context
            tiles = torch.from_numpy(tiles_of(sequences.cpu().numpy().astype(np.int64), most)).to(device)
            how: dict[str, Any] = {
                **{"prefill": {"tiles": {most: tiles}}, "split decode": {"splits": 4}},
                **{"decode": {}, "shifted decode": {"shifts": torch.full_like(positions, 3)}},
            }[kind]
            attention = GpuAttention(addresses, tables, sequences, positions, **how)
            # With a shift of 3 each row turns as it would without.
            table = torch.cat([0 * rotary[:3], rotary]) if "shifts" in how else rotary
            output = attention.attend_mixed(0, mixed[chosen].contiguous(), table, norms, scoring, 1e-6, 0.0)
            found[f"{kind}{name}"] = relative_gap(output, expected[chosen]), _BF16
    return found


def _attend(mixed: Any, rotary: Any, norms: tuple[Any, Any], scoring: Any) -> Any:
    """Return what the kernels must, in fp32, ``[rows, groups * sharers * head]``, a group at a time."""
    import torch

    num_sequences, context, groups, width, head = mixed.shape
    places = torch.arange(context, device=mixed.device)
    behind = places[:, None] - places
    is_hidden = (behind < 0) | (behind >= (scoring.window or context))
    outputs = []
    for group in range(groups):
        query, key, value = mixed[:, :, group].split([width - 2, 1, 1], dim=2)
        query, key = (
            _turn(_norm(each, weight, 1e-6), rotary).to(mixed.dtype).float()
            for each, weight in zip((query, key), norms, strict=True)
        )
        scores = scoring.scale * torch.einsum("bqsh,bkh->bsqk", query, key[:, :, 0])
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores.masked_fill_(is_hidden, -math.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.view(groups, -1, 1, 1)[group].float()
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., :context]
        outputs.append(torch.einsum("bsqk,bkh->bqsh", weights, value[:, :, 0].float()))
    return torch.stack(outputs, dim=2).reshape(num_sequences * context, -1)


def _check_latent_attention(sizes: Any) -> dict[str, tuple[float, float]]:
    """Steps of decoding at all places of one sequence, with whole and with split keys."""
    import torch

    from hybridflow.models.rotary import rotary_table
    from hybridflow.models.scoring import Scoring
    from hybridflow.rollout.blocks import BLOCK_TOKENS
    from hybridflow.rollout.gpu.cache import GpuAttention

    device, context, heads, plain = find_device(), sizes.context, sizes.groups * sizes.sharers, sizes.head
    latent, rotary = 4 * plain, plain // 2
    tables = torch.arange(-(-context // BLOCK_TOKENS), dtype=torch.int32, device=device).flip(0)[None]
    cache = torch.zeros(tables.numel(), BLOCK_TOKENS, latent + rotary, dtype=sizes.dtype, device=device)
    addresses = torch.tensor([[cache.data_ptr()] * 2], device=device)
    table = rotary_table(1e4 ** -(torch.arange(0, rotary, 2, device=device) / rotary), context)
    query, compressed = _random(sizes, context, heads, plain + rotary), _random(sizes, context, latent + rotary)
    of_keys, norm = _random(sizes, heads, plain, latent) / math.sqrt(plain), _random(sizes, latent)
    scoring = Scoring(scale=(plain + rotary) ** -0.5)

    def turn(values: Any) -> Any:
        return _turn(torch.cat([values[..., ::2], values[..., 1::2]], dim=-1).float(), table).to(sizes.dtype).float()

    vectors = _norm(compressed[:, :latent], norm, 1e-6).to(sizes.dtype).float()
    keys, turned = turn(compressed[:, None, latent:])[:, 0], turn(query[..., plain:])
    narrow = torch.bmm(query[..., :plain].transpose(0, 1).float(), of_keys.float()).to(sizes.dtype).float()
    scores = narrow @ vectors.t() + torch.einsum("thr,kr->htk", turned, keys)
    is_hidden = torch.ones(context, context, dtype=torch.bool, device=device).triu(1)
    expected = (scoring.scale * scores).masked_fill_(is_hidden, -math.inf).softmax(-1) @ vectors
    places, found = torch.arange(context, device=device), {}
    for name, splits in {"": 1, ", split": 4}.items():
        attention = GpuAttention(addresses, tables, torch.zeros_like(places), places, splits=splits)
        rotated = attention.store_latent(0, query, compressed, table, norm, 1e-6, 0.0)
        narrowed = torch.bmm(query[..., :plain].transpose(0, 1), of_keys)
        output = attention.attend_latent(0, narrowed, rotated, scoring)
        found[f"latent attention{name}"] = relative_gap(output, expected), _BF16
    return found


def _turn(values: Any, rotary: Any) -> Any:
    import torch

    low, high = values.chunk(2, dim=-1)
    cosine, sine = rotary[:, None].unbind(2)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def _check_linear_attention(sizes: Any) -> dict[str, tuple[float, float]]:
    """A step of linear attention, of which every other row begins; two value heads share a key."""
    import torch
    from torch.nn.functional import rms_norm, silu, softplus

    from hybridflow.models.delta_rule import Recurrence, State, recur
    from hybridflow.rollout.gpu import ops

    rows, heads, size, device = sizes.rows, sizes.groups, sizes.head, find_device()
    parts = [size, size, 2 * size, 2 * size, 2, 2]
    conv, norm = _random(sizes, heads, 4 * size, 4) / 2, _random(sizes, size)
    bias, log = _random(sizes, 2 * heads), _random(sizes, 2 * heads).flip(0)
    mixed = _random(sizes, rows, heads, sum(parts))
    inputs, matrix = (
        _random(sizes, rows, 3, heads * 4 * size).float(),
        _random(sizes, rows, 2 * heads, size, size).float(),
    )
    slots, positions = torch.arange(rows, device=device).flip(0), torch.arange(rows, device=device) % 2
    is_first = (positions == 0)[:, None, None]
    before = State(inputs[slots].masked_fill(is_first, 0), matrix[slots].masked_fill(is_first[..., None], 0))
    context = mixed.new_empty(rows, heads, 2, size)
    states = torch.tensor([[inputs.data_ptr(), matrix.data_ptr()]], device=device)
    ops.delta_step(context, mixed, conv.flatten(0, 1), bias, log, norm, states, slots, positions, 0, size, 1e-6)
    *channels, gate, beta, decay = mixed.split(parts, dim=2)
    laid_out = torch.cat([each.flatten(0, 1) for each in conv.split(parts[:3], dim=1)])
    decay = -log.float().exp() * softplus(decay.flatten(1).float() + bias.float())
    given = torch.cat([each.flatten(1) for each in channels], dim=1), decay, beta.flatten(1).sigmoid()
    recurrence = Recurrence(laid_out, heads, 2 * heads, size, size)
    found, after = recur(*(each[:, None] for each in given), recurrence, before)
    normed = rms_norm(found[:, 0].float(), (size,), eps=1e-6) * norm.float()
    return {
        "linear attention": (
            relative_gap(context.flatten(1, 2), normed * silu(gate.float()).view(normed.shape)),
            _BF16,
        ),
        "its states": (relative_gap(matrix[slots], after.matrix), _BF16),
        "its last inputs": (relative_gap(inputs[slots], after.inputs), 0.0),
    }


def _check_recurrence(sizes: Any) -> dict[str, tuple[float, float]]:
    """Linear attention of prompts and training beside a CPU's in fp32, with gradients; without a state and from one."""
    import torch

    from hybridflow.models.delta_rule import Recurrence, State, recur

    heads, size, tokens = sizes.groups, sizes.head, sizes.context + 3
    channels = heads * 4 * size
    mixed, conv = _random(sizes, 2, tokens, channels), _random(sizes, channels, 4) / 2
    decay = -0.1 * _random(sizes, 2, tokens, 2 * heads).float().abs()
    beta = _random(sizes, 2, tokens, 2 * heads).sigmoid()
    before = State(_random(sizes, 2, 3, channels).float(), _random(sizes, 2, 2 * heads, size, size).float())
    weights = _random(sizes, 2, tokens, 2 * heads, size)
    found: dict[str, tuple[float, float]] = {}
    for name, state in {"": None, " behind a state": before}.items():
        results = []
        for place, dtype in ((mixed.device, sizes.dtype), (torch.device("cpu"), torch.float32)):
            given = [each.to(place, dtype).detach().requires_grad_() for each in (mixed, conv, decay, beta)]
            given[2] = decay.to(place).detach().requires_grad_()
            start = None if state is None else State(*(each.to(place) for each in state))
            output, after = recur(
                given[0], given[2], given[3], Recurrence(given[1], heads, 2 * heads, size, size), start
            )
            gradients = torch.autograd.grad(output, given, weights.to(place, dtype))
            results.append([each.cpu() for each in (output, after.matrix, after.inputs, *gradients)])
        gaps = [relative_gap(ours, theirs) for ours, theirs in zip(*results, strict=True)]
        found[f"recurrence{name}"] = gaps[0], 2 * _BF16
        found[f"its states{name}"], found[f"its last inputs{name}"] = (gaps[1], 2 * _BF16), (gaps[2], 0.0)
        found[f"its gradients{name}"] = max(gaps[3:]), 5 * _BF16
    return found


def _check_log_probs(sizes: Any) -> dict[str, tuple[float, float]]:
    """Log-probabilities, entropy and their gradient."""
    import torch

    from hybridflow.models import log_probs

    if find_device().type == "cpu":
        log_probs.uses_kernels = lambda logits: True
    world = make_world()
    world.make_groups([(0,)])
    tokens, temperature = 4 * sizes.rows, 0.7
    logits = (3 * _random(sizes, tokens, sizes.vocab)).requires_grad_()
    targets = torch.arange(tokens, device=logits.device) * 37 % (sizes.vocab - 3)
    found = log_probs.vocab_parallel_log_probs(
        logits, targets, group=world.group((0,)), vocab_size=sizes.vocab - 3, temperature=temperature
    )
    (found[0].sum() + 0.3 * found[1].sum()).backward()
    exact = logits.detach().double().requires_grad_()
    log_p = (exact[:, : sizes.vocab - 3] / temperature).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (expected[0].sum() + 0.3 * expected[1].sum()).backward()
    return {
        "log-probabilities": (relative_gap(found[0], expected[0]), _FP32),
        "entropies": (relative_gap(found[1], expected[1]), _FP32),
        "their gradient": (relative_gap(logits.grad, exact.grad), _BF16),
    }


if __name__ == "__main__":
    run(main)
