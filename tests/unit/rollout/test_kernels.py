"""The compiled kernels against torch in fp64, and that a row's result depends on no other row."""

from __future__ import annotations

import ctypes
import math
import shutil
from dataclasses import replace
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.cpu import kernels, transformer
from hybridflow.rollout.cpu.kernels import find_kernels, load_kernels
from hybridflow.rollout.cpu.transformer import runs_on_cpu
from hybridflow.rollout.sampling import gumbel_noise
from tests.multi.models import MIXTURE, TINY, make_model
from tests.support.ranks import run_ranks

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="the compiled kernels, see README")
at_each_width = pytest.mark.usefixtures("width_of_vectors")


@pytest.fixture(params=[16, 32, 64])
def width_of_vectors(request):
    """The kernels with vectors of so many bytes; skips what this processor does not have."""
    if load_kernels().hf_choose(request.param) != request.param:
        pytest.skip(f"this processor has no vectors of {request.param} bytes")
    yield
    load_kernels().hf_choose(64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(name: str, *arguments: object) -> None:
    getattr(load_kernels(), name)(*(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments))


def add_norm(hidden: Tensor, product: Tensor | None, *norms: Tensor | None, centre: float, rows=None) -> Tensor:
    """Norms: of the product, and of the sum."""
    out = torch.full((len(hidden) if rows is None else len(rows), hidden.shape[1]), torch.nan)
    call("hf_add_norm", out, hidden, product, *norms, rows, *out.shape, 1e-5, centre)
    return out


def normed(hidden: Tensor, weight: Tensor | None, centre: float) -> Tensor:
    wide = hidden.double()
    if weight is None:
        return wide
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + centre)


@needs_kernels
@at_each_width
@pytest.mark.parametrize("rows, width", [(1, 16), (3, 40), (67, 256), (9, 2049), (5, 7)])
@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_add_norm(rows, width, centre):
    hidden, product = 3 * randn(rows, width), 2 * randn(rows, width, seed=3)
    weights = randn(width, seed=1), randn(width, seed=2)
    close = dict(atol=4e-6, rtol=4e-6)
    chosen = torch.tensor([rows - 1, 0])
    for added, inner, outer in [(None, None, 1), (product, None, 1), (product, 0, 1), (product, None, None)]:
        norms = [None if which is None else weights[which] for which in (inner, outer)]
        total = hidden.double() + (0 if added is None else normed(added, norms[0], centre))
        expected, residual = normed(total, norms[1], centre), hidden.clone()
        picked = add_norm(residual, added, *norms, centre=centre, rows=chosen)
        assert torch.equal(residual, hidden), "rows that are chosen leave all as it is"
        found = add_norm(residual, added, *norms, centre=centre)
        torch.testing.assert_close(found.double(), expected, **close)
        torch.testing.assert_close(residual.double(), total, **close)
        assert torch.equal(picked, found[chosen])


SILU, GELU = 1, 2


def gated(outputs: Tensor, form: int) -> Tensor:
    gate, up = outputs.chunk(2, dim=-1)
    return {SILU: F.silu, GELU: partial(F.gelu, approximate="tanh")}[form](gate) * up


@needs_kernels
@at_each_width
@pytest.mark.parametrize(
    "rows, inputs, outputs", [(1, 16, 32), (3, 40, 16), (67, 256, 100), (8, 7, 33), (130, 64, 48), (2, 3, 1)]
)
@pytest.mark.parametrize("form", [0, SILU, GELU])
def test_multiply(rows, inputs, outputs, form):
    x, weight = randn(rows, inputs), randn((2 if form else 1) * outputs, inputs, seed=1) / inputs**0.5
    bias = None if form else randn(outputs, seed=2)
    laid_out = transformer.pack_gated(weight) if form else transformer.pack(weight)
    padded = None if bias is None else F.pad(bias, (0, -outputs % transformer.PANEL))

    def multiply(x: Tensor) -> Tensor:
        out = torch.full((len(x) + 1, outputs), 7.0)
        call("hf_multiply", out, x, laid_out, padded, len(x), inputs, outputs, form)
        assert (out[-1] == 7).all(), "nothing is written behind the end"
        return out[:-1]

    products = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = multiply(x)
    torch.testing.assert_close(found.double(), gated(products, form) if form else products, atol=4e-6, rtol=4e-6)
    for row in range(rows):
        assert torch.equal(multiply(x[row : row + 1].clone())[0], found[row])
    damaged = x.clone()
    damaged[0] = torch.nan
    found[0] = torch.nan
    assert torch.equal(multiply(damaged).nan_to_num(5.0), found.nan_to_num(5.0)), "and harms no other row"


@needs_kernels
@at_each_width
@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_a_team_of_threads_computes_the_same_bits(rows):
    width, outputs = 48, 100
    hidden, norm, weight = randn(rows, width), randn(width, seed=1), randn(outputs, width, seed=2)
    weight = transformer.pack(weight)
    shape, chosen = kernels.Shape(hidden=width, eps=1e-5), torch.arange(rows).flip(0)
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, sums = torch.empty(rows, outputs), torch.empty(rows, width)
            behind = kernels.Vocabulary(norm=norm.data_ptr(), output=weight.data_ptr(), outputs=outputs)
            described = map(ctypes.addressof, (shape, behind))
            call("hf_output", out, sums, *described, hidden, hidden, chosen, rows)
            found.append(out)
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(each, found[0]) for each in found)
    normed_rows = add_norm(hidden.clone(), hidden, None, norm, centre=0.0, rows=chosen)
    expected = torch.empty(rows, outputs)
    call("hf_multiply", expected, normed_rows, weight, None, rows, width, outputs, 0)
    assert torch.equal(found[0], expected)


def turned(heads: Tensor, cosines: Tensor, sines: Tensor, weight: Tensor | None, centre: float) -> Tensor:
    """Heads of a row, ``[groups, n, head]``, normalized and turned, in fp64."""
    heads = heads.double()
    if weight is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + centre)
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


@needs_kernels
@at_each_width
@pytest.mark.parametrize("groups, sharers, head", [(1, 1, 16), (3, 2, 32), (2, 7, 64), (4, 9, 48)])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_store(groups, sharers, head, with_norms, centre):
    rows, num_blocks = 21, 6
    mixed, angles = randn(rows, groups, sharers + 2, head), randn(50, head // 2, seed=1)
    rotary = torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()
    norms = (randn(head, seed=2), randn(head, seed=3)) if with_norms else (None, None)
    # Two sequences, which have the pool's blocks in turn.
    positions = torch.randperm(3 * BLOCK_TOKENS, generator=torch.Generator().manual_seed(4))[:rows]
    sequences, tables = torch.arange(rows) % 2, torch.arange(num_blocks, dtype=torch.int32).view(3, 2).T.contiguous()
    places = tables[sequences, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    queries = torch.empty(rows, groups, sharers, head)
    keys = torch.full((num_blocks, groups, head, BLOCK_TOKENS), torch.nan)
    values = torch.full((num_blocks, groups, BLOCK_TOKENS, head), torch.nan)
    sizes = (rows, groups, sharers, head)
    owners = (tables, tables.shape[1], sequences, positions)
    call("hf_store", queries, keys, values, mixed, rotary, *owners, *sizes, *norms, 1e-5, centre)
    for row, (position, place) in enumerate(zip(positions.tolist(), places.tolist(), strict=True)):
        block, token = divmod(place, BLOCK_TOKENS)
        angle = rotary[position].double()
        expected = turned(mixed[row, :, :-2], *angle, norms[0], centre)
        torch.testing.assert_close(queries[row].double(), expected, atol=4e-6, rtol=0)
        expected = turned(mixed[row, :, -2:-1], *angle, norms[1], centre)[:, 0]
        torch.testing.assert_close(keys[block, :, :, token].double(), expected, atol=4e-6, rtol=0)
        assert torch.equal(values[block, :, token], mixed[row, :, -1])
    assert int((~values.isnan()).sum()) == int((~keys.isnan()).sum()) == rows * groups * head, "and nowhere else"


class Cached:
    """Keys and values of some sequences in a pool of blocks that lie anywhere; whatever else is there is NaN."""

    def __init__(self, lengths: list[int], groups: int, head: int) -> None:
        widths = [-(-length // BLOCK_TOKENS) for length in lengths]
        order = torch.randperm(sum(widths) + 1, generator=torch.Generator().manual_seed(9)).int()
        self.tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
        self.pool_keys = torch.full((len(order), groups, head, BLOCK_TOKENS), torch.nan)
        self.pool_values = torch.full((len(order), groups, BLOCK_TOKENS, head), torch.nan)
        self.keys = [randn(length, groups, head, seed=index) for index, length in enumerate(lengths)]
        self.values = [randn(length, groups, head, seed=100 + index) for index, length in enumerate(lengths)]
        for index, (width, blocks) in enumerate(zip(widths, order[: sum(widths)].split(widths), strict=True)):
            self.tables[index, :width] = blocks
            for place, block in enumerate(blocks.tolist()):
                part = slice(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS)
                key, value = self.keys[index][part], self.values[index][part]
                self.pool_keys[block, :, :, : len(key)] = key.permute(1, 2, 0)
                self.pool_values[block, :, : len(key)] = value.transpose(0, 1)

    def attend(self, queries: Tensor, owners: Tensor, positions: Tensor, *how: float) -> Tensor:
        """Queries ``[rows, groups, sharers, head]``; how: scale, cap, window, the last two 0 for none."""
        out = torch.full_like(queries, torch.nan)
        tables = self.tables
        call(
            *("hf_attend", out, queries, self.pool_keys, self.pool_values, tables, tables.shape[1], owners, positions),
            *(*queries.shape, *how),
        )
        return out

    def expected(self, query: Tensor, owner: int, position: int, scale: float, softcap: float, window: int) -> Tensor:
        """Of one row, in fp64."""
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        keys, values = self.keys[owner][seen].double(), self.values[owner][seen].double()
        scores = torch.einsum("gsd,tgd->gst", query.double(), keys) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        return torch.einsum("gst,tgd->gsd", scores.softmax(-1), values)


HOWS = [(0.2, 0.0, 0), (0.2, 0.0, 1), (0.3, 0.0, 37), (0.9, 2.5, 0), (0.5, 30.0, 130), (1.0, 0.0, 0)]


@needs_kernels
@at_each_width
@pytest.mark.parametrize(
    "groups, sharers, head", [(1, 1, 16), (2, 2, 32), (1, 3, 48), (1, 4, 64), (2, 5, 16), (1, 6, 80)]
)
@pytest.mark.parametrize("how", HOWS)
def test_attend(groups, sharers, head, how):
    check_attention(groups, sharers, head, how)


@needs_kernels
@at_each_width
@pytest.mark.parametrize("groups, sharers, head", [(1, 7, 128), (2, 8, 32), (1, 9, 16), (1, 17, 256)])
def test_attend_with_wide_heads_and_many_sharers(groups, sharers, head):
    for how in (HOWS[0], HOWS[4]):
        check_attention(groups, sharers, head, how)


def check_attention(groups: int, sharers: int, head: int, how: tuple[float, float, int]) -> None:
    lengths = [1, 16, 150, 700, 33]
    cached = Cached(lengths, groups, head)
    # Decoding: the last token of each; and pieces of prompts, across the borders of blocks, beside it.
    pieces = [(0, 0, 1), (1, 15, 16), (2, 120, 150), (3, 699, 700), (4, 10, 33)]
    owners = torch.tensor([owner for owner, begin, end in pieces for _ in range(begin, end)])
    positions = torch.cat([torch.arange(begin, end) for _, begin, end in pieces])
    queries = randn(len(owners), groups, sharers, head, seed=50)
    found = cached.attend(queries, owners, positions, *how)
    for row, (owner, position) in enumerate(zip(owners.tolist(), positions.tolist(), strict=True)):
        expected = cached.expected(queries[row], owner, position, *how)
        torch.testing.assert_close(found[row].double(), expected, atol=2e-5, rtol=0)
        alone = slice(row, row + 1)
        assert torch.equal(
            cached.attend(queries[alone].clone(), owners[alone].clone(), positions[alone].clone(), *how)[0], found[row]
        )


@needs_kernels
@at_each_width
def test_a_sequence_whose_cache_is_damaged_harms_itself_alone():
    cached = Cached([20, 20], 1, 16)
    cached.pool_values[cached.tables[0, 0]] = torch.nan
    found = cached.attend(randn(2, 1, 1, 16), torch.tensor([0, 1]), torch.tensor([19, 19]), 0.25, 0.0, 0)
    assert found[0].isnan().all() and found[1].isfinite().all()


def sample(logits: Tensor, keys: Tensor, temperatures: Tensor, greedy: Tensor, real: int, first: int) -> Tensor:
    found = torch.empty(6, len(logits), dtype=torch.float64)
    call("hf_sample", found, logits, keys, temperatures, greedy, *logits.shape, real, first)
    return found


@needs_kernels
@at_each_width
@pytest.mark.parametrize("width, real, first", [(16, 16, 0), (20, 13, 0), (1000, 999, 0), (512, 500, 2048), (8, 0, 64)])
def test_sample(width, real, first):
    rows = 40
    logits = 4 * randn(rows, width)
    logits[:, real:] = torch.inf
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(1))
    temperatures, greedy = (
        0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(2)),
        torch.arange(rows) % 5 == 0,
    )
    arguments = (logits, keys, temperatures, greedy.to(torch.uint8))
    best, ids, chosen, largest, totals, kept = found = sample(*arguments, real, first)
    if real == 0:
        # A rank that holds padding alone never wins, and adds nothing.
        assert best.max() == -math.inf and totals.max() == 0 and kept.max() == 0
        return
    scaled = logits[:, :real].double() / temperatures[:, None]
    scores = scaled + torch.where(greedy[:, None], 0.0, gumbel_noise(keys, first, real).double())
    top = scores.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-4, "these keys meet no near-tie"
    assert torch.equal(ids, scores.argmax(-1) + first)
    close = dict(atol=2e-5, rtol=0)
    torch.testing.assert_close(best, scores.amax(-1), **close)
    torch.testing.assert_close(chosen, scaled.gather(1, (ids.long() - first)[:, None])[:, 0], atol=2e-6, rtol=0)
    log_probs, expected = chosen - largest - totals.log(), scaled.log_softmax(-1)
    torch.testing.assert_close(log_probs, expected.gather(1, (ids.long() - first)[:, None])[:, 0], atol=2e-6, rtol=0)
    assert torch.equal(totals, kept)
    for row in range(rows):
        alone = [each[row : row + 1].clone() for each in arguments]
        assert torch.equal(sample(*alone, real, first)[:, 0], found[:, row])


@needs_kernels
@at_each_width
def test_noise_is_that_of_torch_in_its_tails_too():
    """Logits that are all alike leave the noise: its largest of a million, of every row."""
    rows, width = 4, 1 << 18
    keys = torch.arange(rows)
    found = sample(torch.zeros(rows, width), keys, torch.ones(rows), torch.zeros(rows, dtype=torch.uint8), width, 0)
    noise = gumbel_noise(keys, 0, width)
    assert torch.equal(found[1].long(), noise.argmax(-1))
    torch.testing.assert_close(found[0].float(), noise.amax(-1), atol=2e-6, rtol=1e-6)


DENSE = replace(TINY, num_layers=2, head_dim=16)
MODELS: dict[str, tuple[ModelConfig, bool]] = {
    "dense": (DENSE, True),
    "capped": (replace(DENSE, attention_softcap=2.0, window=3, zero_centered_norms=True, post_norms=True), True),
    "two rotary bases": (replace(DENSE, window=3, window_layers=(0,), local_rotary_base=100.0), True),
    "a layer without rotation": (replace(DENSE, no_rope_layers=(1,)), True),
    "neighboring dims turn": (replace(DENSE, rotary_interleaved=True), False),
    "a part of each head turns": (replace(DENSE, rotary_dim=8), False),
    "head of 8": (TINY, False),
    "bf16": (replace(DENSE, dtype="bf16"), False),
    "mixture": (replace(MIXTURE, head_dim=16), False),
}


def which_run(world, shapes: dict[str, ModelConfig], tp: int) -> dict[str, bool]:
    layout = ParallelLayout(tp=tp)
    return {name: runs_on_cpu(make_model(world, layout, model=shape)[0]) for name, shape in shapes.items()}


@needs_kernels
def test_the_quick_path_refuses_what_it_does_not_compute():
    found = run_ranks(which_run, 1, {name: shape for name, (shape, _) in MODELS.items()}, 1)[0]
    assert found == {name: runs for name, (_, runs) in MODELS.items()}
    shared = {"enough groups": replace(DENSE, num_query_groups=2), "too few": replace(DENSE, num_query_groups=1)}
    assert run_ranks(which_run, 2, shared, 2) == [{"enough groups": True, "too few": False}] * 2


def test_nothing_runs_on_kernels_that_are_not_there(monkeypatch):
    monkeypatch.setattr(transformer, "load_kernels", lambda: None)
    assert run_ranks(which_run, 1, {"dense": DENSE}, 1) == [{"dense": False}]


@needs_kernels
def test_kernels_that_do_not_fit_the_source_are_not_loaded(monkeypatch, tmp_path):
    folder = Path(kernels.__file__).parent
    (library,) = (path for each in EXTENSION_SUFFIXES if (path := folder / f"_kernels{each}").exists())
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    assert "not built" in find_kernels()
    for source in folder.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    copy = shutil.copy(library, tmp_path)
    assert not isinstance(find_kernels(), str)
    with open(tmp_path / "vectors.h", "a") as source:
        source.write("/* something else */")
    assert f"{copy} was built from other sources" in find_kernels()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(kernels, "__file__", str(other / "kernels.py"))
    (other / library.name).write_bytes(b"of another machine")
    assert f"{other / library.name} cannot be used" in find_kernels()
