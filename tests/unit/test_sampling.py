"""Sampling: the distribution, the cuts, and the keys of the noise; on one rank, and with the vocabulary on two."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from hybridflow.models.log_probs import Columns
from hybridflow.parallel.world import World
from hybridflow.rollout.sampling import PURPOSES, SamplingParams, gumbel_noise, row_keys, sample_tokens
from tests.ranks import run_ranks

VOCAB, PADDED = 13, 20
"""Two ranks hold ten columns each, of which the second has seven of padding."""
PROBABLE = 1e-4
"""Samples less probable than this under the right distribution are a failure; keys are fixed, so a pass is for ever."""


def keys_of(count: int, seed: int = 1) -> Tensor:
    """Keys of many draws at one position."""
    zeros = torch.zeros(count, dtype=torch.int64)
    return row_keys(seed, "rollout", torch.arange(count), zeros, zeros)


def logits_of(rows: int, std: float = 1.5, seed: int = 0) -> Tensor:
    """Random logits; the padding is the largest, so that whoever reads it is caught."""
    logits = std * torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed))
    logits[:, VOCAB:] = 50.0
    return logits


def sampled(world: World, logits: Tensor, keys: Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """What every rank, with its own columns, finds for whole logits."""
    world.make_groups([tuple(range(world.size)), *((rank,) for rank in range(world.size))])
    width = PADDED // world.size
    columns = Columns(width, world.group(tuple(range(world.size))), VOCAB)
    local = logits[:, columns.first : columns.first + width].contiguous()
    tokens, log_probs = sample_tokens(local, keys, columns, params)
    return tokens.numpy(), log_probs.numpy()


def sample(logits: Tensor, keys: Tensor, size: int = 1, **params) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities; checks that all ranks agree, and that the log-probabilities are the trainer's."""
    settings = SamplingParams(max_new_tokens=1, **params)
    found = run_ranks(sampled, size, logits, keys, settings)
    tokens, log_probs = found[0]
    assert all((tokens == other).all() and (log_probs == same).all() for other, same in found)
    assert tokens.max() < VOCAB, "padding was chosen"
    scaled = (logits[:, :VOCAB].double() / settings.temperature).log_softmax(-1)
    expected = scaled.gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
    assert np.abs(log_probs - expected.numpy()).max() <= 2e-6
    return tokens, log_probs


def is_distributed(tokens: np.ndarray, probabilities: Tensor) -> bool:
    """Whether counts fit the probabilities; those of zero must not occur at all."""
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = probabilities.numpy() * len(tokens)
    assert not counts[expected == 0].any(), "a token that was cut off was chosen"
    return chisquare(counts[expected > 0], expected[expected > 0]).pvalue > PROBABLE


def kept_by_hand(logits: Tensor, top_k: int, top_p: float) -> list[bool]:
    """Which tokens may be chosen: the k likeliest, then the fewest of these that have top_p of what is left."""
    order = sorted(range(VOCAB), key=lambda token: -logits[token].item())
    order = order[:top_k] if top_k else order
    mass = logits[:VOCAB].double().softmax(-1)
    total, reached = sum(mass[token].item() for token in order), 0.0
    kept = [False] * VOCAB
    for token in order:
        if top_p < 1.0 and reached >= top_p * total:
            break
        kept[token] = True
        reached += mass[token].item()
    return kept


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_follow_the_softmax(size, temperature):
    logits = logits_of(1)
    tokens, _ = sample(logits.expand(40_000, -1), keys_of(40_000), size, temperature=temperature)
    scaled = logits[0, :VOCAB].double() / temperature
    assert is_distributed(tokens, scaled.softmax(-1))
    assert not is_distributed(tokens, (1.05 * scaled).softmax(-1)), "the test sees nothing"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("top_k, top_p", [(4, 1.0), (0, 0.7), (6, 0.8)])
def test_cut_samples_follow_what_is_left(size, top_k, top_p):
    logits = logits_of(1, seed=3)
    tokens, _ = sample(logits.expand(40_000, -1), keys_of(40_000), size, top_k=top_k, top_p=top_p)
    kept = torch.tensor(kept_by_hand(logits[0], top_k, top_p))
    assert 1 < kept.sum() < VOCAB
    masked = logits[0, :VOCAB].double().masked_fill(~kept, -torch.inf)
    assert is_distributed(tokens, masked.softmax(-1))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("top_k, top_p", [(1, 1.0), (5, 1.0), (20, 1.0), (0, 0.35), (0, 0.9), (7, 0.6), (0, 1e-6)])
def test_the_cuts_are_exact(size, top_k, top_p):
    """Many rows of flat logits, each with many keys: every token that may come does, and no other."""
    rows, repeats = 60, 250
    logits = logits_of(rows, std=0.3, seed=5)
    # The likeliest tokens stand anywhere, also in a row of equals but for one.
    logits[0, :VOCAB] = 0.0
    logits[0, 7] = 0.1
    tokens, _ = sample(logits.repeat_interleave(repeats, 0), keys_of(rows * repeats), size, top_k=top_k, top_p=top_p)
    for row in range(1, rows):
        chosen = set(tokens[row * repeats : (row + 1) * repeats].tolist())
        kept = kept_by_hand(logits[row], top_k, top_p)
        assert chosen == {token for token in range(VOCAB) if kept[token]}, row


def test_ties_at_the_edge_are_kept_together():
    logits = torch.zeros(2000, PADDED)
    tokens, _ = sample(logits, keys_of(2000), top_k=3)
    assert set(tokens.tolist()) == set(range(VOCAB)), "no order among equals, so that no layout can have another"


@pytest.mark.parametrize("size", [1, 2])
def test_greedy_takes_the_likeliest_whatever_the_key(size):
    logits = logits_of(500)
    tokens, _ = sample(logits, keys_of(500), size, greedy=True)
    assert (tokens == logits[:, :VOCAB].argmax(-1).numpy()).all()
    again, _ = sample(logits, keys_of(500, seed=9), size, greedy=True, top_k=2, top_p=0.1)
    assert (tokens == again).all()


def test_two_ranks_choose_what_one_does():
    logits, keys = logits_of(3000), keys_of(3000)
    for params in ({}, {"top_k": 3}, {"top_p": 0.6, "temperature": 0.7}, {"greedy": True}):
        alone, together = (sample(logits, keys, size, **params)[0] for size in (1, 2))
        assert (alone == together).all(), params


def test_every_part_of_a_key_matters():
    grid = torch.tensor(list(itertools.product(range(12), repeat=3)))
    keys = torch.cat([row_keys(seed, purpose, *grid.unbind(1)) for seed in range(5) for purpose in PURPOSES])
    assert len(keys.unique()) == len(keys) == 5 * len(PURPOSES) * 12**3
    # Far draws, seeds and positions too; and the three coordinates do not stand for each other.
    far = torch.tensor([0, 1, 2**31, 2**40, 2**62])
    assert len(row_keys(2**63 - 1, "rollout", far, far.flip(0), torch.zeros_like(far)).unique()) == 5
    one, two = torch.tensor([3]), torch.tensor([8])
    assert len({int(row_keys(1, "rollout", *each)) for each in itertools.permutations([one, two, one + two])}) == 6


@pytest.mark.parametrize("part", ["seed", "draw", "index", "position"])
def test_neighbouring_keys_are_independent(part):
    """Pairs of samples whose keys differ by one in one part: their joint counts are products."""
    count, logits = 20_000, logits_of(1, std=0.8, seed=2)
    fixed = torch.arange(count) * 2
    zeros = torch.zeros_like(fixed)
    pair = []
    for step in (0, 1):
        draws = fixed + (step if part == "draw" else 0)
        indices, positions = (zeros + (step if part == each else 0) for each in ("index", "position"))
        pair.append(row_keys(5 + (step if part == "seed" else 0), "rollout", draws, indices, positions))
    first, second = (sample(logits.expand(count, -1), keys)[0] for keys in pair)
    joint = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    alone = logits[0, :VOCAB].double().softmax(-1)
    expected = torch.outer(alone, alone).flatten().numpy() * count
    assert chisquare(joint, expected).pvalue > PROBABLE


def test_noise_is_a_function_of_key_and_vocabulary_id():
    keys = keys_of(50)
    whole = gumbel_noise(keys, 0, 64)
    assert (torch.cat([gumbel_noise(keys, first, 16) for first in range(0, 64, 16)], dim=1) == whole).all()
    many = gumbel_noise(keys_of(2000), 0, 64).double()
    # A standard Gumbel variable has mean 0.57722 and variance pi^2 / 6 = 1.64493.
    assert abs(many.mean() - 0.57722) < 0.02 and abs(many.var() - 1.64493) < 0.05
    assert torch.isfinite(many).all()
    assert (np.abs(np.corrcoef(many.T.numpy()) - np.eye(64)) < 0.12).all()
