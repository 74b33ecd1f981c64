"""Generating is paused anywhere and goes on as if it had not been, or with other weights, as these would have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.microbatch import pack
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.paged import block_bytes, state_bytes
from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams
from hybridflow.rollout.sampling import gumbel_noise, row_keys, sequence_key
from tests.multi.models import LINEAR, TINY, VOCAB, layouts_of, make_model
from tests.support.ranks import run_ranks

SEED = 11
STEPS = (1, 3, 7, 17, 35)
PARAMS = SamplingParams(max_new_tokens=30, temperature=0.8, stop_ids=(2,))
LAYOUTS = [ParallelLayout(), *layouts_of(2)]
CASES = [(layout, shape) for shape in (TINY, LINEAR) for layout in LAYOUTS]


def cases(is_slow: Callable[[ParallelLayout, ModelConfig], bool]) -> pytest.MarkDecorator:
    """All layouts and models, of which some are slow."""
    return pytest.mark.parametrize(
        ("layout", "shape"),
        [pytest.param(*case, marks=[pytest.mark.slow] * is_slow(*case)) for case in CASES],
        ids=[f"{layout}-{'linear' if shape is LINEAR else 'attention'}" for layout, shape in CASES],
    )


def requests(params: SamplingParams = PARAMS) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (3, 17, 9, 1)]
    return [
        Request(prompt=prompt, params=params, prompt_index=100 + prompt_index, index=index)
        for prompt_index, prompt in enumerate(prompts)
        for index in range(2)
    ]


def go_on(left: list[tuple[Request, Response]]) -> list[Request]:
    return [replace(ask, begun=got) for ask, got in left]


def key(ask: Request) -> tuple[int, int]:
    return ask.prompt_index, ask.index


def plain(got: Response) -> dict:
    return {
        "tokens": got.tokens.tolist(),
        "log_probs": got.log_probs.numpy(),
        "sampled_log_probs": got.sampled_log_probs.numpy(),
        "versions": got.versions.tolist(),
        "finish": got.finish,
    }


def make_engine(
    world, layout: ParallelLayout, max_concurrent: int, num_blocks: int | None = None, shape: ModelConfig = TINY
):
    """An engine, this rank's requests, and whether it knows log-probabilities."""
    model, mesh, groups, _ = make_model(world, layout, model=shape)
    budget = num_blocks and num_blocks * block_bytes(model) + max_concurrent * state_bytes(model)
    cache_memory = 0.5 if budget is None else budget
    engine = MegatronEngine(
        model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=max_concurrent, cache_memory=cache_memory
    )
    place = mesh.coordinate(world.rank)
    return engine, requests()[place.dp :: layout.dp], place.pp == layout.pp - 1


def drain(engine: MegatronEngine, asked: list[Request], num_steps: int | None = None):
    """So many steps of a session, or until a sequence loses its blocks.

    Returns:
        What ended, what did not, and how many of these had lost their blocks.
    """
    session = engine.open(asked)
    session.add(asked)
    ended: list[tuple[Request, Response]] = []
    num_aside = 0
    while not session.is_idle and num_steps != 0 and not num_aside:
        ended += session.step()
        num_steps = None if num_steps is None else num_steps - 1
        num_aside = sum(len(lane.records._aside) for lane in session._lanes)
    waiting = {
        key(session._requests[job.number]): job.tokens[job.num_prompt :].tolist()
        for lane in session._lanes
        for job in lane.scheduler.waiting
    }
    pairs = ended + session.pause()
    # Sampled anew it would be the same: that it is kept is seen here alone.
    assert all(got.tokens.tolist() == waiting.get(key(ask), got.tokens.tolist()) for ask, got in pairs)
    assert session.is_idle
    done = [pair for pair in pairs if pair[1].finish != "paused"]
    return done, [pair for pair in pairs if pair[1].finish == "paused"], num_aside


def paused_everywhere(world, layout: ParallelLayout, shape: ModelConfig):
    """Unbroken; then paused after each number of steps; then again and again, with too little memory for all."""
    engine, mine, knows = make_engine(world, layout, 4, shape=shape)
    whole = {key(ask): plain(got) for ask, got in zip(mine, engine.generate(mine), strict=True)}
    ways: dict[str, dict] = {}
    for num_steps in STEPS:
        done, left, _ = drain(engine, mine, num_steps)
        for ask, got in left:
            assert got.tokens.tolist() == whole[key(ask)]["tokens"][: len(got.tokens)], (num_steps, key(ask))
        rest, none, _ = drain(engine, go_on(left))
        assert not none
        ways[f"after {num_steps} steps"] = {key(ask): plain(got) for ask, got in done + rest}
    short, _, _ = make_engine(world, layout, 4, num_blocks=4, shape=shape)
    num_lost = 0
    for seed in range(2):
        counts = np.random.default_rng(seed)
        done, asked = [], mine
        while asked:
            ended, left, lost = drain(short, asked, int(counts.integers(1, (40, 150)[seed])))
            done, asked, num_lost = done + ended, go_on(left), num_lost + lost
        ways[f"often, {seed}"] = {key(ask): plain(got) for ask, got in done}
    return whole, ways, knows, num_lost


@cases(lambda layout, shape: layout.world_size > 1)
def test_paused_after_any_step_and_as_often_as_you_like_it_gives_the_same(layout, shape):
    size = layout.world_size
    num_texts, found_lost, kinds = 0, 0, set()
    for whole, ways, knows, num_lost in run_ranks(paused_everywhere, size, layout, shape):
        found_lost += num_lost
        kinds |= {got["finish"] for got in whole.values()}
        for way, found in ways.items():
            assert found.keys() == whole.keys(), way
            for name, got in found.items():
                expected = whole[name]
                # These seeds meet no near-tie.
                assert got["tokens"] == expected["tokens"] and got["finish"] == expected["finish"], (way, name)
                assert got["versions"] == [0] * len(got["tokens"])
                num_texts += 1
                for column in ("log_probs", "sampled_log_probs") if knows else ():
                    assert np.abs(got[column] - expected[column]).max() < 1e-5, (way, name, column)
    assert num_texts == len(requests()) * (len(STEPS) + 2) * (size // layout.dp)
    assert kinds == {"stop", "length"}
    assert found_lost or size > layout.tp, "no sequence was paused that had lost its blocks"


class Stopping:
    """Says to stop when asked for the second time in each call; keeps what is handed over."""

    def __init__(self) -> None:
        self.num_asked, self.handed = 0, []

    def finished(self, pairs):
        self.handed += pairs

    def is_stopping(self):
        self.num_asked += 1
        return self.num_asked % 2 == 0


def stopped_at_looks(world, layout: ParallelLayout):
    engine, mine, _ = make_engine(world, layout, 4)
    whole = {key(ask): plain(got)["tokens"] for ask, got in zip(mine, engine.generate(mine), strict=True)}
    progress, asked, num_stops = Stopping(), mine, 0
    while asked:
        try:
            engine.generate(asked, progress=progress)
            break
        except RolloutStopped as stopped:
            asked, num_stops = go_on(stopped.unfinished), num_stops + 1
            progress.num_asked = 0
    assert num_stops > 0
    assert len(progress.handed) == len(mine)
    return whole, {key(ask): got.tokens.tolist() for ask, got in progress.handed}


@pytest.mark.slow
def test_stopped_at_every_look_all_is_handed_over_once():
    for layout in LAYOUTS[1:]:
        for whole, found in run_ranks(stopped_at_looks, 2, layout):
            assert found == whole


def scale(model) -> None:
    """Other weights, in any shard the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def expected_by(model, world, ask: Request, got: Response) -> tuple[list[int], np.ndarray]:
    """At each token of a response what a whole model samples behind those before it, and its log-probability."""
    sequence = torch.cat([ask.prompt, got.tokens])
    batch = pack([0], [sequence], [len(ask.prompt)], world.device)
    with torch.no_grad():
        logits = model(batch.tokens, batch.attention, batch.rows)[:, :VOCAB] / ask.params.temperature
    positions = torch.arange(len(ask.prompt), len(sequence))
    keys = row_keys(torch.tensor([sequence_key(SEED, "rollout", ask.prompt_index, ask.index)]), positions)
    log_probs = logits.log_softmax(-1).gather(1, got.tokens[:, None])[:, 0]
    return (logits + gumbel_noise(keys, 0, VOCAB)).argmax(-1).tolist(), log_probs.numpy()


def changed(world, layout: ParallelLayout, is_in_place: bool, shape: ModelConfig):
    """Weights change twice on the way; every token against the weights that it says it is of."""
    engine, mine, knows = make_engine(world, layout, 4, num_blocks=9, shape=shape)
    truths = [make_model(world, ParallelLayout(dp=world.size), model=shape)[0] for _ in range(3)]
    for model in (truths[1], truths[2], truths[2]):
        scale(model)
    session = engine.open(mine)
    session.add(mine)
    ended: list[tuple[Request, Response]] = []
    for num_steps in (8, 8, -1):
        while num_steps and not session.is_idle:
            ended += session.step()
            num_steps -= 1
        if num_steps < 0:
            break
        if not is_in_place:
            pairs = session.pause()
            ended += [pair for pair in pairs if pair[1].finish != "paused"]
            asked = go_on([pair for pair in pairs if pair[1].finish == "paused"])
        scale(engine.model)
        engine.version += 1
        engine.weights_changed()
        if not is_in_place:
            session = engine.open(asked)
            session.add(asked)
    assert sorted(key(ask) for ask, _ in ended) == [key(ask) for ask in mine]
    kinds = set()
    for ask, got in ended:
        versions = got.versions.tolist()
        assert versions == sorted(versions)
        kinds.add(tuple(sorted(set(versions))))
        found = [expected_by(model, world, ask, got) for model in truths]
        for place, version in enumerate(versions):
            where = key(ask), place, version
            assert got.tokens[place] == found[version][0][place], where
            if knows:
                assert abs(float(got.log_probs[place]) - found[version][1][place]) < 1e-5, where
                assert got.sampled_log_probs[place] == got.log_probs[place]
    return kinds


@pytest.mark.parametrize("is_in_place", [False, True], ids=["paused", "in place"])
@cases(lambda layout, shape: layout.world_size > 1 and shape is LINEAR)
def test_after_new_weights_each_token_is_what_its_weights_give_behind_those_before_it(layout, shape, is_in_place):
    kinds = set().union(*run_ranks(changed, layout.world_size, layout, is_in_place, shape))
    assert set().union(*kinds) == {0, 1, 2} and any(0 in kind and len(kind) > 1 for kind in kinds), kinds


def ended_before(world):
    engine, mine, _ = make_engine(world, ParallelLayout(), 4)
    responses = engine.generate(mine[:3])
    shorter = [replace(ask, params=replace(PARAMS, max_new_tokens=2)) for ask in mine[3:5]]
    paused = [replace(got, finish="paused") for got in engine.generate(shorter)]
    again = [replace(ask, begun=got) for ask, got in zip([*mine[:3], *shorter], [*responses, *paused], strict=True)]
    return [
        (plain(before)["tokens"], plain(got))
        for before, got in zip([*responses, *paused], engine.generate(again), strict=True)
    ]


def test_what_had_ended_is_given_back_as_it_is():
    (pairs,) = run_ranks(ended_before, 1)
    assert [got["finish"] for _, got in pairs[3:]] == ["length"] * 2
    for before, got in pairs:
        assert got["tokens"] == before and got["finish"] != "paused"
