"""The compiled kernels against torch in fp64, and that a row's result depends on no other row."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.families.model import Model
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.rollout import cpu_transformer, kernels
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.cpu_transformer import runs_on_cpu
from hybridflow.rollout.kernels import find_kernels, load_kernels
from hybridflow.rollout.sampling import gumbel_noise
from tests.multi.models import MIXTURE, TINY, make_model
from tests.ranks import run_ranks

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="the compiled kernels, see README")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(name: str, *arguments: object) -> None:
    getattr(load_kernels(), name)(*(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments))


def rms_norm(hidden: Tensor, weight: Tensor, centre: float) -> Tensor:
    out = torch.empty_like(hidden)
    call("hf_rms_norm", out, hidden, weight, *hidden.shape, 1e-5, centre)
    return out


@needs_kernels
@pytest.mark.parametrize("rows, width", [(1, 16), (3, 40), (67, 256), (9, 2049), (5, 7)])
@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_rms_norm(rows, width, centre):
    hidden, weight = 3 * randn(rows, width), randn(width, seed=1)
    wide = hidden.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + centre)
    found = rms_norm(hidden, weight, centre)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    for row in range(rows):
        assert torch.equal(rms_norm(hidden[row : row + 1].clone(), weight, centre)[0], found[row])


def turned(heads: Tensor, cosines: Tensor, sines: Tensor, weight: Tensor | None, centre: float) -> Tensor:
    """Heads of a row, ``[groups, n, head]``, normalized and turned, in fp64."""
    heads = heads.double()
    if weight is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + centre)
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


@needs_kernels
@pytest.mark.parametrize("groups, sharers, head", [(1, 1, 16), (3, 2, 32), (2, 7, 64), (4, 9, 48)])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_store(groups, sharers, head, with_norms, centre):
    rows, num_blocks = 21, 6
    mixed, angles = randn(rows, groups, sharers + 2, head), randn(50, head // 2, seed=1)
    rotary = torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()
    norms = (randn(head, seed=2), randn(head, seed=3)) if with_norms else (None, None)
    positions = torch.randperm(50, generator=torch.Generator().manual_seed(4))[:rows]
    places = torch.randperm(num_blocks * BLOCK_TOKENS, generator=torch.Generator().manual_seed(5))[:rows]
    queries = torch.empty(rows, groups, sharers, head)
    keys = torch.full((num_blocks, groups, head, BLOCK_TOKENS), torch.nan)
    values = torch.full((num_blocks, groups, BLOCK_TOKENS, head), torch.nan)
    sizes = (rows, groups, sharers, head)
    call("hf_store", queries, keys, values, mixed, rotary, positions, places, *sizes, *norms, 1e-5, centre)
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
@pytest.mark.parametrize(
    "groups, sharers, head", [(1, 1, 16), (2, 2, 32), (1, 3, 48), (1, 4, 64), (2, 5, 16), (1, 6, 80)]
)
@pytest.mark.parametrize("how", HOWS)
def test_attend(groups, sharers, head, how):
    check_attention(groups, sharers, head, how)


@needs_kernels
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
def test_noise_is_that_of_torch_in_its_tails_too():
    """Logits that are all alike leave the noise: its largest of a million, of every row."""
    rows, width = 4, 1 << 18
    keys = torch.arange(rows)
    found = sample(torch.zeros(rows, width), keys, torch.ones(rows), torch.zeros(rows, dtype=torch.uint8), width, 0)
    noise = gumbel_noise(keys, 0, width)
    assert torch.equal(found[1].long(), noise.argmax(-1))
    torch.testing.assert_close(found[0].float(), noise.amax(-1), atol=2e-6, rtol=1e-6)


DENSE = replace(TINY, num_layers=2, head_dim=16)
MODELS: dict[str, tuple[Model, bool]] = {
    "dense": (DENSE, True),
    "capped": (replace(DENSE, attention_softcap=2.0, window=3, zero_centered_norms=True, post_norms=True), True),
    "head of 8": (TINY, False),
    "bf16": (replace(DENSE, dtype="bf16"), False),
    "mixture": (replace(MIXTURE, head_dim=16), False),
}


def which_run(world, shapes: dict[str, Model], tp: int) -> dict[str, bool]:
    layout = ParallelLayout(tp=tp)
    return {name: runs_on_cpu(make_model(world, layout, model=shape)[0]) for name, shape in shapes.items()}


@needs_kernels
def test_the_quick_path_refuses_what_it_does_not_compute():
    found = run_ranks(which_run, 1, {name: shape for name, (shape, _) in MODELS.items()}, 1)[0]
    assert found == {name: runs for name, (_, runs) in MODELS.items()}
    shared = {"enough groups": replace(DENSE, num_query_groups=2), "too few": replace(DENSE, num_query_groups=1)}
    assert run_ranks(which_run, 2, shared, 2) == [{"enough groups": True, "too few": False}] * 2


def test_nothing_runs_on_kernels_that_are_not_there(monkeypatch):
    monkeypatch.setattr(cpu_transformer, "load_kernels", lambda: None)
    assert run_ranks(which_run, 1, {"dense": DENSE}, 1) == [{"dense": False}]


@needs_kernels
def test_kernels_that_do_not_fit_the_source_are_not_loaded(monkeypatch, tmp_path):
    folder = Path(kernels.__file__).parent
    (library,) = (path for each in EXTENSION_SUFFIXES if (path := folder / f"_kernels{each}").exists())
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    assert "not built" in find_kernels()
    shutil.copy(folder / "kernels.c", tmp_path)
    copy = shutil.copy(library, tmp_path)
    assert not isinstance(find_kernels(), str)
    with open(tmp_path / "kernels.c", "a") as source:
        source.write("/* something else */")
    assert f"{copy} was built from another kernels.c" in find_kernels()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(kernels, "__file__", str(other / "kernels.py"))
    (other / library.name).write_bytes(b"of another machine")
    assert f"{other / library.name} cannot be used" in find_kernels()
