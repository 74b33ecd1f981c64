"""Sampling in the engine: whatever the layout and batching, each decision is what plain Python makes of the logits."""

from __future__ import annotations

import os
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.microbatch import pack
from hybridflow.rollout import runner
from hybridflow.rollout import session as session_module
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.paged import block_bytes
from hybridflow.rollout.request import Request, Response, SamplingParams
from hybridflow.rollout.sampling import FAILURES, NOT_FINITE
from hybridflow.rollout.texts import text_before_stop
from tests.multi.models import VOCAB, layouts_of, make_model
from tests.support.ranks import run_ranks
from tests.support.sampling_truth import choice_by_hand, log_probs_by_hand

SEED, LONGEST = 11, 28
PIECES = [b"", *(bytes([letter]) for letter in b"abcdefghijklmnopqrst "), b"\xc3", b"\xa9", b"ab", b"ba", b" t", b"the"]


class Bytes:
    """Pieces of text: two of them are halves of an é, the first is no text, and the last id has none."""

    path, vocab_size, eos_id, stop_ids, pad_id, bos_id = Path("bytes"), len(PIECES), 0, (0,), 0, None

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(bytes([byte])) for byte in text.encode()]

    def decode(self, ids) -> str:
        return b"".join(PIECES[index] for index in ids if index < len(PIECES)).decode(errors="replace")

    def pieces(self) -> dict[int, str]:
        return {index: piece.decode("latin-1") for index, piece in enumerate(PIECES)}

    def special_id(self, name: str) -> None:
        return None


def requests() -> list[Request]:
    """Three samples of each of five prompts, some longer than a block, every one with parameters of its own."""
    rng = random.Random(4)

    def maybe(value, default, share=0.3):
        return value if rng.random() < share else default

    ids = range(VOCAB)
    found = []
    for prompt_index, length in enumerate((3, 20, 1, 18, 5)):
        prompt = torch.tensor(rng.choices(ids, k=length))
        for index in range(3):
            params = SamplingParams(
                max_new_tokens=LONGEST,
                min_new_tokens=maybe(rng.randint(1, 7), 0),
                temperature=maybe(rng.uniform(0.5, 1.5), 1.0),
                top_k=maybe(rng.randint(1, 12), 0),
                top_p=maybe(rng.uniform(0.5, 1), 1.0),
                min_p=maybe(rng.uniform(0, 0.5), 0.0),
                repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
                presence_penalty=maybe(rng.uniform(-1, 1), 0.0),
                frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
                logit_bias=maybe(tuple((token, rng.uniform(-2, 2)) for token in rng.sample(ids, 4)), ()),
                bad_ids=maybe(tuple((rng.randrange(VOCAB), token) for token in range(0, VOCAB, 2)), ()),
                stop_ids=maybe((2, 5), ()),
                stop=maybe(("é", "ab", "the", " t"), (), 0.4),
                bad=maybe(("a", "th", "st", "b ", "e", "o"), (), 0.3),
                greedy=rng.random() < 0.1,
                seed=maybe(rng.randrange(2**40), None),
                with_prompt_log_probs=rng.random() < 0.4,
                num_top_log_probs=maybe(rng.randint(1, 20), 0),
            )
            found.append(Request(prompt=prompt, params=params, prompt_index=100 + prompt_index, index=index))
    return found


def plain(got: Response) -> Response:
    """With numpy's arrays, which can be sent from rank to rank."""
    return replace(
        got,
        **{
            field.name: getattr(got, field.name).numpy()
            for field in fields(got)
            if isinstance(getattr(got, field.name), torch.Tensor)
        },
    )


def generated(world, layouts: list[ParallelLayout], variants: list[dict]):
    """Of each layout and variant: this replica's responses, by (draw, index), how often one was preempted, and whether
    this is the last stage, which alone knows log-probabilities."""
    found = []
    for layout in layouts:
        model, mesh, groups, _ = make_model(world, layout)
        for variant in variants:
            session_module.STEP_TOKENS = variant.get("step_tokens", 2048)
            runner.runs_on_cpu = RUNS_ON_CPU if variant.get("is_quick", True) else lambda model: False
            blocks = variant.get("blocks")
            engine = MegatronEngine(
                model,
                groups,
                vocab_size=VOCAB,
                seed=SEED,
                max_concurrent=variant.get("max_concurrent", 256),
                cache_memory=0.5 if blocks is None else blocks * block_bytes(model),
                tokenizer=Bytes(),
            )
            mine = requests()[mesh.coordinate(world.rank).dp :: layout.dp]
            waves = [[each] for each in mine] if variant.get("is_alone") else [mine]
            responses, num_preempted = {}, 0
            for wave in waves:
                with torch.inference_mode():
                    session = engine.open(wave)
                    session.add(wave)
                    while not session.is_idle:
                        for ask, got in session.step():
                            responses[ask.prompt_index, ask.index] = plain(got)
                num_preempted += session.num_preempted
            found.append((str(layout), responses, num_preempted, model.post_process))
    return found


RUNS_ON_CPU = runner.runs_on_cpu


def logits_of(world, sequences: list[list[int]]) -> list[np.ndarray]:
    """What one rank's training model says about each next token of each sequence, ``[tokens, vocab]``."""
    model, *_ = make_model(world, ParallelLayout())
    found = []
    for sequence in sequences:
        batch = pack([0], [torch.tensor([*sequence, 0])], [1], world.device)
        found.append(model(batch.tokens, batch.attention, batch.rows).detach()[:, :VOCAB].numpy())
    return found


def has_new(before: list[int], token: int, strings: tuple[str, ...]) -> bool:
    """Whether a token completes one of the strings, by decoding all there is."""
    old, new = Bytes().decode(before), Bytes().decode([*before, token])
    num_same = len(os.path.commonprefix([old, new]))
    return any(string in new[max(num_same - len(string) + 1, 0) :] for string in strings)


def decisions(ask: Request, tokens: list[int], logits: np.ndarray) -> list[tuple[int, float, Any, Any]]:
    """At each token what plain Python chooses, by how much, and both kinds of log-probabilities."""
    params, prompt, found = ask.params, ask.prompt.tolist(), []
    for place in range(len(tokens)):
        values = logits[len(prompt) - 1 + place].tolist()
        before = tokens[:place]
        forbidden: list[int] = []
        while True:
            told = SamplingParams(**{**vars(params), "bad_ids": params.bad_ids + tuple((each,) for each in forbidden)})
            best, margin = choice_by_hand(
                values, prompt, before, told, seed=SEED, prompt_index=ask.prompt_index, index=ask.index
            )
            if not has_new(before, best, params.bad):
                break
            forbidden.append(best)
        found.append((best, margin, *log_probs_by_hand(values, prompt, before, told)))
    return found


def check(ask: Request, got: Response, logits: np.ndarray, decided: list[tuple[int, float, Any, Any]]) -> int:
    """Hold a response to plain Python, decision by decision; returns how many were too near to another to be held."""
    params, prompt, tokens = ask.params, ask.prompt.tolist(), got.tokens.tolist()
    assert got.error is None and len(got.log_probs) == len(got.sampled_log_probs) == len(tokens) <= LONGEST
    num_near = 0
    for place, (token, (best, margin, trained, left)) in enumerate(zip(tokens, decided, strict=True)):
        before = tokens[:place]
        where = (ask.prompt_index, ask.index, place, params)
        assert token == best or margin < 1e-4, (where, margin)
        assert not has_new(before, token, params.bad), where
        assert abs(float(got.log_probs[place]) - trained[token]) <= 1e-5, where
        assert margin < 1e-4 or abs(float(got.sampled_log_probs[place]) - left[token]) <= 1e-5, where
        num_near += margin < 1e-4
        may_end = place + 1 >= params.min_new_tokens
        is_end = may_end and (token in params.stop_ids or has_new(before, token, params.stop))
        assert is_end == (place + 1 == len(tokens) and got.finish == "stop"), where
    assert got.finish == "stop" or (got.finish == "length" and len(tokens) == LONGEST)
    assert (got.prompt_log_probs is not None) == params.with_prompt_log_probs
    trained = np.array([each for _, _, each, _ in decided])
    check_top(params, got.top_log_probs, tokens, got.log_probs, trained)
    if got.prompt_log_probs is None:
        assert got.prompt_top_log_probs is None
    else:
        scored = torch.from_numpy(logits[: len(prompt) - 1]).double().log_softmax(-1)
        expected = scored.gather(1, ask.prompt[1:, None])[:, 0].numpy()
        assert len(expected) == len(got.prompt_log_probs) and not (np.abs(expected - got.prompt_log_probs) > 1e-5).any()
        check_top(params, got.prompt_top_log_probs, prompt[1:], got.prompt_log_probs, scored.numpy())
    return num_near


def check_top(params: SamplingParams, top: Any, own: list[int], log_probs: np.ndarray, expected: np.ndarray) -> None:
    """Hold the likeliest tokens of each place to all log-probabilities there, ``[tokens, vocab]``."""
    if not params.num_top_log_probs:
        assert top is None
        return
    assert len(top) == len(own) == len(expected)
    for told, token, log_prob, row in zip(top, own, log_probs, expected, strict=True):
        ids, values = [each for each, _ in told], [value for _, value in told]
        assert len(set(ids)) == min(params.num_top_log_probs, VOCAB)
        assert np.abs(np.sort(row)[::-1][: len(ids)] - values).max() <= 1e-5
        assert np.abs(row[ids] - values).max() <= 1e-5
        assert token not in ids or dict(told)[token] == log_prob, "to the bit"


def check_all(runs: list[tuple[str, dict, int, bool]]) -> None:
    """Hold all responses to plain Python, of logits that are computed once for each text."""
    asked = {(ask.prompt_index, ask.index): ask for ask in requests()}
    texts = {
        (*asked[key].prompt.tolist(), *got.tokens.tolist()): None
        for _, responses, *_ in runs
        for key, got in responses.items()
    }
    logits = dict(zip(texts, run_ranks(logits_of, 1, list(texts))[0], strict=True))
    decided: dict[Any, list[tuple[int, float, Any, Any]]] = {}
    num_near = 0
    for _, responses, *_ in runs:
        for key, got in responses.items():
            tokens = got.tokens.tolist()
            of_text = logits[(*asked[key].prompt.tolist(), *tokens)]
            # Most runs make the same text.
            if (key, *tokens) not in decided:
                decided[(key, *tokens)] = decisions(asked[key], tokens, of_text)
            num_near += check(asked[key], got, of_text, decided[(key, *tokens)])
    assert num_near <= sum(len(responses) for _, responses, *_ in runs) / 5


def test_every_batching_makes_the_decisions_of_plain_python():
    variants = [
        {},
        {},
        {"max_concurrent": 3},
        {"step_tokens": 7},
        {"blocks": 4},
        {"is_alone": True},
        {"is_quick": False},
    ]
    runs = run_ranks(generated, 1, [ParallelLayout()], variants)[0]
    assert all(len(responses) == 15 for _, responses, *_ in runs)
    assert [num > 0 for *_, num, _ in runs] == [False, False, False, False, True, False, False]
    check_all(runs)
    reasons = {
        (got.finish, bool(asked.params.stop)) for asked, got in zip(requests(), runs[0][1].values(), strict=True)
    }
    assert {finish for finish, _ in reasons} == {"stop", "length"}
    for key, got in runs[0][1].items():
        other = runs[1][1][key]
        for name in ("tokens", "log_probs", "sampled_log_probs"):
            assert (getattr(got, name) == getattr(other, name)).all(), "the same batching is equal to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_layout_makes_the_decisions_of_plain_python(size):
    layouts = layouts_of(size)
    by_rank = run_ranks(generated, size, layouts, [{"max_concurrent": 6}, {"step_tokens": 9, "blocks": 8}])
    check_all([run for found in by_rank for run in found if run[-1]])
    for number, (layout, *_) in enumerate(by_rank[0]):
        texts: dict = {}
        for found in by_rank:
            for key, got in found[number][1].items():
                mine = got.tokens.tolist(), got.finish
                assert texts.setdefault(key, mine) == mine, layout
        assert len(texts) == 15


def damaged(world, layout: ParallelLayout, token: int):
    """Responses of a model that has no numbers for a token, and of a sound one."""
    model, _, groups, _ = make_model(world, layout)
    found = []
    for is_damaged in (False, True):
        if is_damaged and model.pre_process:
            weight = model.embedding.word_embeddings.weight
            local = token - groups.tp.rank() * len(weight)
            if 0 <= local < len(weight):
                weight.data[local] = torch.nan
        for is_quick in (True, False):
            runner.runs_on_cpu = RUNS_ON_CPU if is_quick else lambda model: False
            # Few blocks, so that what one that failed leaves behind is used by others.
            engine = MegatronEngine(
                model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=4, cache_memory=8 * block_bytes(model)
            )
            found.append([plain(got) for got in engine.generate(plain_requests())])
    return found


def plain_requests() -> list[Request]:
    """Of all kinds, but without texts."""
    kinds = [{}, {"top_p": 0.9}, {"greedy": True}, {"min_p": 0.01, "repetition_penalty": 1.2}, {"top_k": 5}]
    generator = torch.Generator().manual_seed(8)
    return [
        Request(
            prompt=torch.randint(0, VOCAB, (3 + number,), generator=generator),
            params=SamplingParams(max_new_tokens=12, **kinds[number % 5]),
            prompt_index=number,
        )
        for number in range(14)
    ]


@pytest.mark.parametrize(
    "layout", ["tp1.pp1.dp1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2.pp1.dp1", "tp1.pp2.dp1"))]
)
def test_a_damaged_embedding_fails_those_that_have_the_token_and_no_other(layout):
    parsed, token = ParallelLayout.parse(layout), 17
    for found in run_ranks(damaged, parsed.world_size, parsed, token):
        for sound, broken in ((found[0], found[2]), (found[1], found[3])):
            num_failed = 0
            for ask, whole, got in zip(plain_requests(), sound, broken, strict=True):
                tokens = whole.tokens.tolist()
                if token in ask.prompt:
                    expected = []
                else:
                    expected = tokens[: tokens.index(token) + 1] if token in tokens[:-1] else tokens
                assert got.tokens.tolist() == expected, (ask.prompt_index, got.error)
                if got.finish == "failed":
                    num_failed += 1
                    place = len(ask.prompt) + len(expected)
                    assert got.error == f"token {place}: {FAILURES[NOT_FINITE]}"
                else:
                    assert expected == tokens and np.abs(got.log_probs - whole.log_probs).max() <= 1e-5
            assert 3 <= num_failed <= 11


def refused(world):
    """What is said of requests that the model or the engine cannot meet."""
    model, _, groups, _ = make_model(world, ParallelLayout())
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=4)
    said = []
    for prompt, params in (
        ([1], {"stop": ("x",)}),
        ([1], {"bad": ("x",)}),
        ([VOCAB], {}),
        ([3, -1], {}),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}),
        ([1], {"bad_ids": ((2,), (3, 40))}),
    ):
        settings = SamplingParams(max_new_tokens=2, **params)
        ask = Request(prompt=torch.tensor(prompt), params=settings, prompt_index=0)
        session = engine.open()
        session.add([ask])
        [(_, got)] = session.step()
        assert got.finish == "failed" and session.is_idle
        with pytest.raises(DataError):
            engine.generate([ask])
        said.append(got.error)
    return said


def test_what_cannot_be_met_is_refused():
    no_tokenizer, none_either, high, low, biased, forbidden = run_ranks(refused, 1)[0]
    assert no_tokenizer == none_either and "no tokenizer to look for them" in no_tokenizer
    assert "token 29; expected 0 to 28" in high and "token -1" in low
    assert "name token 29; expected 0 to 28" in biased and "name token 40" in forbidden


def cut(world):
    """Texts of responses that a stop string ended, and the same texts by looking for it in the whole."""
    model, _, groups, _ = make_model(world, ParallelLayout())
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=64, tokenizer=Bytes())
    params = SamplingParams(max_new_tokens=40, stop=("é", "t", "ab"))
    asked = [
        Request(prompt=torch.tensor([prompt_index]), params=params, prompt_index=prompt_index)
        for prompt_index in range(20)
    ]
    found = []
    for got in engine.generate(asked):
        whole = Bytes().decode(got.tokens.tolist())
        places = [whole.find(string) for string in params.stop if string in whole]
        found.append((text_before_stop(got.tokens.tolist(), params.stop, Bytes()), whole, places, got.finish))
    return found


def test_text_before_the_stop_string_of_what_was_generated():
    found = run_ranks(cut, 1)[0]
    assert sum(bool(places) for _, _, places, _ in found) > 10
    for text, whole, places, finish in found:
        assert finish == ("stop" if places else "length")
        assert text == whole[: min(places, default=None)]
