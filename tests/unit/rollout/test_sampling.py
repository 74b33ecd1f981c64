"""Sampling: every rule against plain Python, the distribution, the noise; on one rank and with the vocabulary split."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from hybridflow.data.images import image_ids
from hybridflow.errors import DataError
from hybridflow.models.log_probs import Columns
from hybridflow.parallel.world import World
from hybridflow.rollout import edits, sampling
from hybridflow.rollout.request import PURPOSES, Request, SamplingParams, expand, model_refusal
from hybridflow.rollout.sampling import (
    BAD_TEXT,
    MAX_TRIES,
    NOT_FINITE,
    NOTHING_LEFT,
    Sampler,
    gumbel_noise,
    row_keys,
    sequence_key,
)
from tests.support.ranks import run_ranks
from tests.support.sampling_truth import choice_by_hand, log_probs_by_hand

VOCAB, PADDED = 13, 20
"""Two ranks hold ten columns each, of which the second has seven of padding; the last of four has nothing else."""
PROBABLE = 1e-4
"""Samples less probable than this under the right distribution are a failure; keys are fixed, so a pass is for ever."""
SEED = 7


def logits_of(rows: int, std: float = 1.5, seed: int = 0, vocab: int = VOCAB, padded: int = PADDED) -> Tensor:
    """Random logits; the padding is the largest, so that whoever reads it is caught."""
    logits = std * torch.randn(rows, padded, generator=torch.Generator().manual_seed(seed))
    logits[:, vocab:] = 50.0
    return logits


def sampled(world: World, logits: Tensor, asked: list, bad: frozenset[int], is_quick: bool, vocab: int):
    """What every rank, with its own columns, finds for rows of (parameters, prompt, response)."""
    everyone = tuple(range(world.size))
    world.make_groups([everyone, *((rank,) for rank in everyone)])
    if not is_quick:
        sampling.load_kernels = edits.load_kernels = lambda: None
    group, width = world.group(everyone), logits.shape[1] // world.size
    first = Columns(width, group, vocab).first
    sampler = Sampler(len(asked), group, vocab, torch.device("cpu"))
    known = np.zeros((len(asked), max(len(prompt) + len(response) for _, prompt, response in asked) + 1), np.int32)
    for slot, (params, prompt, response) in enumerate(asked):
        known[slot, : len(prompt) + len(response)] = [*prompt, *response]
        seed = SEED if params.seed is None else params.seed
        sampler.seat(slot, params, sequence_key(seed, "rollout", slot, 0), len(prompt))
    lengths = torch.tensor([len(prompt) + len(response) for _, prompt, response in asked])
    # Slots and rows are not the same.
    slots = torch.arange(len(asked) - 1, -1, -1)
    got = sampler.sample(
        logits[slots, first : first + width].contiguous(), slots, lengths[slots], known, lambda _, token: token in bad
    )
    return [each[slots].numpy() for each in vars(got).values()]


def sample(logits: Tensor, asked: list, size: int = 1, bad=frozenset(), is_quick: bool = True, vocab: int = VOCAB):
    """Tokens and both log-probabilities, of which all ranks have the same."""
    found = run_ranks(sampled, size, logits, asked, bad, is_quick, vocab)
    assert all(
        np.array_equal(one, other, equal_nan=True) for each in found for one, other in zip(each, found[0], strict=True)
    )
    return found[0]


def same(count: int, **params) -> list:
    """The same parameters for many rows."""
    return [(SamplingParams(max_new_tokens=9, **params), [0], [])] * count


def any_params(rng: random.Random) -> SamplingParams:
    """Parameters of which each is now and then not the default."""

    def maybe(value, default):
        return value if rng.random() < 0.35 else default

    ids = range(VOCAB)
    return SamplingParams(
        max_new_tokens=9,
        min_new_tokens=maybe(rng.randint(1, 6), 0),
        temperature=maybe(rng.uniform(0.3, 2), 1),
        top_k=maybe(rng.choice([1, 2, 5, VOCAB, 1000]), 0),
        top_p=maybe(rng.choice([1e-6, 0.3, 0.8, 0.95, 1 - 1e-9]), 1.0),
        min_p=maybe(rng.choice([0.05, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(tuple((token, rng.uniform(-5, 5)) for token in rng.sample(ids, 3)), ()),
        bad_ids=maybe(tuple(tuple(rng.choices(range(3), k=rng.randint(1, 3))) for _ in range(4)), ()),
        stop_ids=maybe((2, 11), ()),
        greedy=rng.random() < 0.15,
        seed=maybe(rng.randrange(-(2**63), 2**63), None),
    )


@pytest.mark.parametrize("is_quick", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_all_kinds_side_by_side_are_those_of_plain_python(size, is_quick):
    rng = random.Random(size)
    asked = [
        (any_params(rng), rng.choices(range(VOCAB), k=rng.randint(1, 6)), rng.choices(range(4), k=rng.randint(0, 6)))
        for _ in range(600)
    ]
    logits = logits_of(len(asked))
    tokens, log_probs, of_sampled = sample(logits, asked, size, is_quick=is_quick)
    num_near = 0
    for row, (params, prompt, response) in enumerate(asked):
        values = logits[row, :VOCAB].tolist()
        best, margin = choice_by_hand(values, prompt, response, params, seed=SEED, prompt_index=row, index=0)
        if tokens[row] != best:
            assert margin < 1e-4, (row, params, margin)
            num_near += 1
            continue
        trained, left = log_probs_by_hand(values, prompt, response, params)
        assert abs(log_probs[row] - trained[best]) <= 1e-5, (row, params)
        assert margin < 1e-4 or abs(of_sampled[row] - left[best]) <= 1e-5, (row, params)
    assert num_near <= 2 and len(set(tokens.tolist())) == VOCAB


def test_what_others_ask_for_and_where_one_stands_changes_no_bit():
    rng = random.Random(1)
    asked = [(any_params(rng), [1, 2], [0, 1]) for _ in range(60)]
    logits = logits_of(60)
    whole = sample(logits, asked)
    for row in range(0, 60, 7):
        # Alone with plain rows: only the prompt index, which the noise comes from, stays what it is.
        plain = same(60)
        plain[row] = asked[row]
        for one, other in zip(whole, sample(logits, plain), strict=True):
            assert one[row].tobytes() == other[row].tobytes(), asked[row]


def is_distributed(tokens: np.ndarray, probabilities: Tensor) -> bool:
    """Whether counts fit the probabilities; those of zero must not occur at all."""
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = probabilities.numpy() * len(tokens)
    assert not counts[expected == 0].any(), "a token that was cut off was chosen"
    return chisquare(counts[expected > 0], expected[expected > 0]).pvalue > PROBABLE


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
        {"logit_bias": ((3, 2.0), (5, -1.0)), "bad_ids": ((7,),)},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_samples_follow_the_distribution(params):
    settings = SamplingParams(max_new_tokens=9, **params)
    logits = logits_of(1, seed=3)
    prompt, response = [1, 4], [2, 2, 6]
    tokens, _, _ = sample(logits.expand(10_000, -1), [(settings, prompt, response)] * 10_000)
    _, left = log_probs_by_hand(logits[0, :VOCAB].tolist(), prompt, response, settings)
    assert is_distributed(tokens, torch.tensor(left, dtype=torch.float64).exp())
    assert not is_distributed(tokens, (1.25 * torch.tensor(left, dtype=torch.float64)).softmax(-1)), "sees nothing"


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_that_would_complete_a_bad_text_are_sampled_anew(size):
    """One of the three likeliest is bad: what remains keeps its proportions, as by rejection."""
    logits = logits_of(1, seed=3)
    likeliest = logits[0, :VOCAB].topk(3).indices.tolist()
    bad = frozenset([*likeliest[1:], 12])
    asked = [*same(6000, bad=("x",)), *same(200)]
    tokens, log_probs, of_sampled = sample(logits.expand(len(asked), -1), asked, size, bad)
    scaled = logits[0, :VOCAB].double()
    left = scaled.clone()
    left[list(bad)] = -torch.inf
    assert is_distributed(tokens[:6000], left.softmax(-1))
    assert set(tokens[6000:].tolist()) & bad, "rows without bad texts have not been asked about"
    assert np.abs(log_probs - scaled.log_softmax(-1)[tokens].numpy()).max() <= 1e-5
    # The last draw's distribution: of all but what was refused before it, which is some of the bad ones.
    low = scaled.log_softmax(-1)[tokens[:6000]].numpy()
    high = left.log_softmax(-1)[tokens[:6000]].numpy()
    assert (of_sampled[:6000] >= low - 1e-5).all() and (of_sampled[:6000] <= high + 1e-5).all()
    assert (np.abs(of_sampled[:6000] - low) < 1e-5).any() and (np.abs(of_sampled[:6000] - high) < 1e-5).any()


def test_what_cannot_be_sampled_is_said_and_harms_no_other_row():
    logits = logits_of(6, vocab=80, padded=80)
    logits[0, 3], logits[1, 40], logits[2] = torch.nan, torch.inf, torch.nan
    every = tuple((token,) for token in range(80))
    asked = [*same(3), *same(1, bad_ids=every), *same(1, bad=("x",)), *same(1)]
    for size, is_quick in itertools.product((1, 2), (True, False)):
        tokens, *_ = sample(logits, asked, size, frozenset(range(80)), is_quick, vocab=80)
        assert tokens[:5].tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, BAD_TEXT]
        assert (
            tokens[5] == choice_by_hand(logits[5].tolist(), [0], [], asked[5][0], seed=SEED, prompt_index=5, index=0)[0]
        )
    special = [*same(1, top_p=0.5), *same(1, top_k=3), *same(1, min_p=0.1), *same(2), *same(1, top_p=0.5)]
    tokens, *_ = sample(logits, special, vocab=80)
    assert tokens[:3].tolist() == [NOT_FINITE] * 3 and tokens[5] >= 0
    # All but the last candidate are refused.
    few = frozenset(logits[4].topk(MAX_TRIES - 1).indices.tolist())
    tokens, *_ = sample(logits, [*same(4), *same(1, bad=("x",), greedy=True), *same(1)], bad=few, vocab=80)
    assert tokens[4] == logits[4].topk(MAX_TRIES).indices[-1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.2}, {"min_p": 1.0}], ids=str)
def test_ties_at_an_edge_are_kept_together(params, size):
    tokens, *_ = sample(torch.zeros(1500, PADDED), same(1500, **params), size)
    assert set(tokens.tolist()) == set(range(VOCAB)), "no order among equals, so that no layout can have another"


def test_single_rules_are_those_of_transformers():
    process = pytest.importorskip("transformers").generation.logits_process
    rows, vocab = 40, 90
    logits = logits_of(rows, vocab=vocab, padded=vocab, std=3)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randint(0, 12, (rows, 8), generator=generator)
    bad = [[5], [1, 7], [2, 0, 3], inputs[0, -2:].tolist() + [4]]
    cases = [
        ({"repetition_penalty": 1.7}, process.RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.6}, process.RepetitionPenaltyLogitsProcessor(0.6)),
        ({"top_k": 7}, process.TopKLogitsWarper(7)),
        ({"top_p": 0.8}, process.TopPLogitsWarper(0.8)),
        ({"min_p": 0.03}, process.MinPLogitsWarper(0.03)),
        ({"bad_ids": tuple(map(tuple, bad))}, process.NoBadWordsLogitsProcessor(bad, eos_token_id=99)),
        # Theirs counts what stands before the stop token, ours all.
        (
            {"min_new_tokens": 7, "stop_ids": (1, 2)},
            process.MinNewTokensLengthLogitsProcessor(3, 7 - 1, torch.tensor([1, 2])),
        ),
        ({"logit_bias": ((3, 4.0), (8, -2.0))}, process.SequenceBiasLogitsProcessor([[[3], 4.0], [[8], -2.0]])),
    ]
    for params, rule in cases:
        settings = SamplingParams(max_new_tokens=9, **params)
        asked = [(settings, row[:3].tolist(), row[3:].tolist()) for row in inputs]
        tokens, log_probs, of_sampled = sample(logits, asked, vocab=vocab)
        left = rule(inputs, logits.clone())
        assert (left != logits).any(), params
        keys = torch.tensor([sequence_key(SEED, "rollout", row, 0) for row in range(rows)])
        scores = left + gumbel_noise(row_keys(keys, torch.full((rows,), 8)), 0, vocab)
        assert tokens.tolist() == scores.argmax(-1).tolist(), params
        expected = left.double().log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
        assert np.abs(of_sampled - expected.numpy()).max() <= 1e-5, params
        expected = logits.double().log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
        assert np.abs(log_probs - expected.numpy()).max() <= 1e-5, params


def test_every_part_of_a_key_matters():
    keys = [
        sequence_key(seed, purpose, prompt_index, index)
        for seed, purpose, prompt_index, index in itertools.product(range(4), PURPOSES, range(12), range(12))
    ]
    rows = torch.cat([row_keys(torch.tensor(keys), torch.tensor(position)) for position in range(12)])
    assert len(rows.unique()) == len(rows) == 4 * len(PURPOSES) * 12**3
    # Far draws and seeds too; and the coordinates do not stand for each other.
    far = [0, 1, 2**31, 2**40, 2**62]
    assert (
        len({sequence_key(seed, "rollout", prompt_index, 0) for seed in (-(2**63), 2**63 - 1) for prompt_index in far})
        == 10
    )
    assert len({sequence_key(1, "rollout", *each) for each in itertools.permutations([3, 8])}) == 2


@pytest.mark.parametrize("part", ["seed", "prompt_index", "index", "position"])
def test_neighbouring_keys_are_independent(part):
    """Pairs of samples whose keys differ by one in one part: their joint counts are products."""
    count, logits = 10_000, logits_of(1, std=0.8, seed=2)[:, :VOCAB]
    pair = []
    for step in (0, 1):
        at = {each: step if part == each else 0 for each in ("seed", "prompt_index", "index", "position")}
        keys = torch.tensor(
            [
                sequence_key(5 + at["seed"], "rollout", 2 * prompt_index + at["prompt_index"], at["index"])
                for prompt_index in range(count)
            ]
        )
        noise = gumbel_noise(row_keys(keys, torch.tensor(at["position"])), 0, VOCAB)
        pair.append((logits + noise).argmax(-1).numpy())
    joint = np.bincount(pair[0] * VOCAB + pair[1], minlength=VOCAB**2)
    alone = logits[0].double().softmax(-1)
    expected = torch.outer(alone, alone).flatten().numpy() * count
    assert chisquare(joint, expected).pvalue > PROBABLE


def test_noise_is_gumbels_to_its_tails_and_a_function_of_key_and_vocabulary_id():
    keys = row_keys(torch.arange(50), torch.tensor(3))
    whole = gumbel_noise(keys, 0, 64)
    assert (torch.cat([gumbel_noise(keys, first, 16) for first in range(0, 64, 16)], dim=1) == whole).all()
    noise = torch.cat([gumbel_noise(row_keys(torch.arange(1000), torch.tensor(step)), 0, 2000) for step in range(4)])
    assert noise.isfinite().all()
    # P(noise ≤ x) = exp(-exp(-x)); with 8 million draws the last bin expects 3e-7 times that many... but is merged.
    edges = np.array([-2.5, -2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 8.0, 9.0, 10.0, 11.0])
    counts, _ = np.histogram(noise.numpy(), [-np.inf, *edges, np.inf])
    shares = np.diff([0.0, *np.exp(-np.exp(-edges)), 1.0])
    assert shares.min() * noise.numel() > 40
    assert chisquare(counts, shares * noise.numel()).pvalue > PROBABLE


def unmixed(value: int) -> int:
    """What ``_mix`` makes ``value`` of; the finalizer of SplitMix64 backwards."""
    mask = (1 << 64) - 1
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = value
        for _ in range(3):
            undone = value ^ (undone >> shift)
        value = undone * pow(factor, -1, 1 << 64) & mask
    return value


def extreme(world: World) -> list[tuple[float, float]]:
    """Noise of the least and the most bits: by torch, and by the kernel."""
    world.make_groups([(0,)])
    columns = Columns(16, world.group((0,)), 16)
    found = []
    for bits in (0, 1, 0xFFFFFFFE, 0xFFFFFFFF):
        key = (unmixed(bits << 32) - 6 * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        keys = torch.tensor([key - (1 << 64) if key >= 1 << 63 else key])
        # Only this column may be chosen, so that the best score is its noise.
        logits = torch.full((1, 16), -1e30)
        logits[0, 5] = 0
        best = sampling._find(logits, keys, torch.ones(1), torch.zeros(1, dtype=torch.uint8), columns)
        found.append((float(gumbel_noise(keys, 5, 1)), float(best[0])))
    return found


def test_noise_ends_where_the_bits_end_and_never_is_infinite():
    # -log(-log(1 - u)) of u = (bits + ½) / 2³², which fp32 rounds below 1.
    expected = [22.8739, 21.7753, -2.8115, -2.8115]
    for (by_torch, by_kernel), value in zip(run_ranks(extreme, 1)[0], expected, strict=True):
        assert abs(by_torch - value) < 1e-3 and abs(by_kernel - value) < 1e-3


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: found 0, expected an integer of at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens: found True"),
        ({"min_new_tokens": 10}, "min_new_tokens: found 10, expected at most max_new_tokens=9"),
        ({"min_new_tokens": -1}, "min_new_tokens: found -1"),
        ({"temperature": 0}, "temperature: found 0, expected a number from 0.0001 to 10000; for 0 set greedy"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"temperature": "1"}, "temperature: found '1'"),
        ({"top_k": -1}, "top_k: found -1"),
        ({"top_k": 2.0}, "top_k: found 2.0"),
        ({"top_k": 2**40}, "top_k: found 1099511627776"),
        ({"top_p": 0}, "top_p: found 0, expected a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p: found 1.5"),
        ({"min_p": -0.1}, "min_p: found -0.1, expected a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: found 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty: found inf"),
        ({"frequency_penalty": 1e39}, "frequency_penalty: found 1e+39"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "logit_bias: found ((1, 2.0), (1, 3.0)), expected .* each once"),
        ({"logit_bias": {1: 2.0}}, "logit_bias: found {1: 2.0}"),
        ({"logit_bias": ((-1, 2.0),)}, "logit_bias: found"),
        ({"bad_ids": ((),)}, "bad_ids: found ((),), expected"),
        ({"bad_ids": (3,)}, "bad_ids: found"),
        ({"stop_ids": [1]}, "stop_ids: found [1], expected a tuple"),
        ({"stop": "x"}, "stop: found 'x', expected a tuple"),
        ({"stop": ("",)}, "stop: found ('',)"),
        ({"bad": ("a\ufffd",)}, "bad: found"),
        ({"stop": ("x",) * 5000}, "stop: found"),
        ({"greedy": 1}, "greedy: found 1, expected true or false"),
        ({"seed": 2**64}, "seed: found 18446744073709551616, expected a 64-bit integer"),
    ],
    ids=range(28),
)
def test_parameters_that_make_no_sense_are_named(params, says):
    field, _, rest = says.partition(": found")
    with pytest.raises(DataError) as caught:
        SamplingParams(**{"max_new_tokens": 9, **params})
    message = str(caught.value)
    assert message.startswith(f"SamplingParams.{field}: found ") and len(message) < 400
    assert all(part in message for part in rest.split(" .* "))


def test_n_samples_of_a_request():
    request = Request(prompt=torch.tensor([1]), params=SamplingParams(max_new_tokens=3), prompt_index=5, index=2)
    assert [(each.prompt_index, each.index) for each in expand(request, 3)] == [(5, 2), (5, 3), (5, 4)]


@pytest.mark.parametrize("text", [[], [3], [7]])
def test_of_a_prompt_with_images_the_text_is_looked_at(text: list[int]) -> None:
    """There may be none."""
    prompt, params = torch.tensor([*image_ids(1, 4), *text]), SamplingParams(max_new_tokens=1)
    reason = model_refusal(Request(prompt=prompt, params=params, prompt_index=0, index=0), 9, 7)
    assert reason == ("it has token 7; expected 0 to 6, as the model's tokenizer makes them" if text == [7] else None)
