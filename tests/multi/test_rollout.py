"""Rollout: the same text in every layout, and the log-probabilities that training computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import pack, split_by_tokens
from hybridflow.models.training import forward_only
from hybridflow.rollout import engine as engine_module
from hybridflow.rollout import session as session_module
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.paged import PagedCache, block_bytes, state_bytes
from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams
from hybridflow.rollout.sampling import gumbel_noise, row_keys, sequence_key
from tests.multi.models import CAPPED, DEEP, LINEAR, MIXTURE, SHARED, TINY, VOCAB, layouts_of, make_model
from tests.support.ranks import run_ranks

PARAMS = {
    "plain": SamplingParams(max_new_tokens=8, stop_ids=(2, 5)),
    "cut": SamplingParams(max_new_tokens=8, temperature=0.7, top_k=9, top_p=0.8, stop_ids=(2,)),
    "greedy": SamplingParams(max_new_tokens=8, greedy=True, stop_ids=(2,)),
}
SEED = 11
LOOK_STEPS = 10
"""Of the engine in this file's ranks: fewer than usual."""
EIGHT = ParallelLayout(pp=8)
LARGE_HEADS = ParallelLayout(), ParallelLayout(tp=2)
"""Layouts of a model that the kernels of a CPU compute."""


def requests(params: SamplingParams = PARAMS["plain"]) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (3, 9, 1, 5, 5)]
    return [
        Request(prompt=prompts[prompt_index], params=params, prompt_index=100 + prompt_index, index=index)
        for prompt_index in range(5)
        for index in range(3)
    ]


def rollout(
    world, layouts: list[ParallelLayout], max_concurrent: int, kinds: tuple[str, ...], shape: ModelConfig = TINY
):
    """Responses of every layout, gathered on every rank, with the sampler's and the trainer's log-probabilities."""
    found = {}
    for layout in layouts:
        model, mesh, groups, _ = make_model(world, layout, model=shape)
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=max_concurrent)
        num_linear = sum(layer.layer_number - 1 in shape.linear_layers for layer in model.decoder.layers)
        cached = (len(model.decoder.layers) - num_linear) * shape.cached_size(layout.tp) * BLOCK_TOKENS * 4
        # Three inputs of each channel, and a matrix for each value head.
        state = num_linear * (3 * (2 * 2 * 4 + 4 * 5) + 4 * 4 * 5) * 4 // layout.tp
        assert (block_bytes(model), state_bytes(model)) == (cached, state)
        assert PagedCache(model, 1, world.device, num_slots=5).num_bytes == cached + 5 * state
        for name in kinds:
            params = PARAMS[name]
            mine = requests(params)[mesh.coordinate(world.rank).dp :: layout.dp]
            responses = engine.generate(mine)
            sequences = [torch.cat([ask.prompt, got.tokens]) for ask, got in zip(mine, responses, strict=True)]
            prompts = [len(ask.prompt) for ask in mine]
            batches = [
                pack(samples, sequences, prompts, world.device)
                for samples in split_by_tokens([len(each) for each in sequences], 40)
            ]

            def compute(output, batch, temperature=params.temperature, group=groups.tp):
                log_probs, _ = vocab_parallel_log_probs(
                    output, batch.targets, group=group, vocab_size=VOCAB, temperature=temperature
                )
                return dict(zip(batch.samples, log_probs.split(batch.response_lengths), strict=True))

            trained = {}
            for part in forward_only(model, groups, batches, compute):
                trained.update(part)
            for index, (ask, got) in enumerate(zip(mine, responses, strict=True)):
                if trained:
                    found[str(layout), name, ask.prompt_index, ask.index] = (
                        got.tokens.tolist(),
                        got.log_probs.tolist(),
                        trained[index].tolist(),
                    )
    return found


def merged(
    size: int, layouts: list[ParallelLayout], max_concurrent: int, kinds: tuple[str, ...] = tuple(PARAMS), *shape
):
    found: dict = {}
    for part in run_ranks(rollout, size, layouts, max_concurrent, kinds, *shape):
        found.update(part)
    return found


def logits_at(world, sequence: list[int], shape: ModelConfig) -> torch.Tensor:
    """The next token's logits by one rank: what a margin is measured in."""
    model, *_ = make_model(world, ParallelLayout(), model=shape)
    batch = pack([0], [torch.tensor([*sequence, 0])], [len(sequence)], world.device)
    return model(batch.tokens, batch.attention, batch.rows)[0].detach()


def margin(sequence: list[int], prompt_index: int, index: int, params: SamplingParams, shape: ModelConfig) -> float:
    """How far the decision was from another one: the perturbed top-two gap, or the distance to the nucleus edge."""
    logits = run_ranks(logits_at, 1, sequence, shape)[0][:VOCAB] / params.temperature
    if params.greedy:
        top = logits.topk(2).values
        return float(top[0] - top[1])
    key = row_keys(torch.tensor([sequence_key(SEED, "rollout", prompt_index, index)]), torch.tensor([len(sequence)]))
    top = (logits + gumbel_noise(key, 0, VOCAB)[0]).topk(2).values
    ordered = logits.softmax(-1).sort(descending=True).values
    edge = float((ordered.cumsum(0) - params.top_p).abs().min()) if params.top_p < 1 else 1.0
    return min(float(top[0] - top[1]), edge)


def assert_same_text(found: dict, by_request: dict, shape: ModelConfig = TINY) -> None:
    """The reference's tokens but where rounding decides, and the log-probabilities of training."""
    for (layout, kind, prompt_index, index), (tokens, sampled, trained) in found.items():
        where = (layout, kind, prompt_index, index)
        difference = (torch.tensor(sampled) - torch.tensor(trained)).abs().max().item()
        assert difference <= 1e-5, (where, difference)
        expected = by_request[kind, prompt_index, index][0]
        if tokens != expected:
            pairs = enumerate(zip(tokens, expected, strict=False))
            first = next(place for place, (token, other) in pairs if token != other)
            prompt = next(ask.prompt.tolist() for ask in requests() if ask.prompt_index == prompt_index)
            gap = margin([*prompt, *tokens[:first]], prompt_index, index, PARAMS[kind], shape)
            assert gap < 1e-4, (where, first, gap)


def rollout_of_uneven_shares(world, layouts: list[ParallelLayout]):
    """Responses of a mixture whose experts replicas share, where one replica has nearly all requests, or all."""
    found = {}
    for layout in layouts:
        model, mesh, groups, _ = make_model(world, layout, model=MIXTURE)
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=4)
        replica = mesh.coordinate(world.rank).dp
        for name, first in (("most", 13), ("all", 15)):
            first = 15 if layout.dp == 1 else first
            mine = requests()[:first] if replica == layout.dp - 1 else requests()[first:] if replica == 0 else []
            for ask, got in zip(mine, engine.generate(mine), strict=True):
                if model.post_process:
                    found[str(layout), name, ask.prompt_index, ask.index] = got.tokens.tolist(), got.log_probs.tolist()
    return found


@pytest.fixture(scope="module")
def reference():
    """What one rank samples, all requests at once."""
    return merged(1, [ParallelLayout()], 256)


def test_the_samples_differ_and_have_the_log_probs_of_training(reference):
    by_request = {key[1:]: value for key, value in reference.items()}
    assert len(by_request) == len(PARAMS) * 15
    assert len({tuple(tokens) for tokens, _, _ in by_request.values()}) > 20, "samples are all alike"
    assert {len(tokens) for tokens, _, _ in by_request.values()} > {8}, "some must stop early, some must not"
    assert_same_text(reference, by_request)


# A wave of 5 cuts the 15 requests differently from one of 256. Many ranks, being slow here, sample one kind.
@pytest.mark.parametrize(
    ("size", "wave", "kinds"),
    [
        (2, 5, tuple(PARAMS)),
        pytest.param(4, 256, ("cut",), marks=pytest.mark.slow),
        pytest.param(8, 256, ("cut",), marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_same_text_in_every_layout_and_batching_and_the_log_probs_of_training(reference, size, wave, kinds):
    layouts = [*layouts_of(size), *([ParallelLayout(pp=2, layers=(3, 1))] if size == 2 else [])]
    found = merged(size, layouts, wave, kinds)
    assert len(found) == 15 * len(kinds) * len(layouts)
    assert_same_text(found, {key[1:]: value for key, value in reference.items()})


def test_fast_kernels_decode_after_a_training_pass_that_split_the_tokens():
    shape = dataclasses.replace(TINY, head_dim=16)
    reference, found = (merged(each.world_size, [each], 3, ("plain", "cut"), shape) for each in LARGE_HEADS)
    assert len(found) == len(reference) == 30
    assert_same_text(found, {key[1:]: value for key, value in reference.items()}, shape)


@pytest.mark.slow
def test_same_text_in_eight_stages():
    reference, found = (merged(each.world_size, [each], 256, ("cut",), DEEP) for each in (ParallelLayout(), EIGHT))
    assert {str(each) for each in layouts_of(8, DEEP)} - {str(each) for each in layouts_of(8)} == {str(EIGHT)}
    assert len(found) == len(reference) == 15
    assert_same_text(found, {key[1:]: value for key, value in reference.items()}, DEEP)


@pytest.mark.parametrize(
    "shape",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (CAPPED, MIXTURE)), SHARED, LINEAR],
    ids=["capped", "mixture", "latent", "linear"],
)
def test_other_attention_and_experts_give_the_same_text_in_layouts_and_the_log_probs_of_training(shape):
    texts = ["tp2.pp2.dp1", "tp1.pp2.dp2", *(["tp2.pp2.layers1-3"] if shape.num_layers == 4 else [])]
    layouts = [ParallelLayout.parse(text) for text in texts]
    reference = merged(1, [ParallelLayout()], 256, ("plain",), shape)
    found = merged(4, layouts, 7, ("plain",), shape)
    assert len(reference) == 15 and len(found) == 15 * len(layouts)
    for (_, *request), (tokens, sampled, trained) in {**reference, **found}.items():
        # These seeds meet no near-tie.
        assert tokens == reference[("tp1.pp1.dp1", *request)][0]
        assert (torch.tensor(sampled) - torch.tensor(trained)).abs().max() <= 1e-5


class Noting:
    """Notes what it is handed; says to stop when asked for the ``stop_at``-th time."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at, self.num_asked = stop_at, 0
        self.handed: list[tuple[tuple[int, int], list[int], list[float]]] = []

    def finished(self, pairs: list[tuple[Request, Response]]) -> None:
        assert pairs
        self.handed += [
            ((ask.prompt_index, ask.index), got.tokens.tolist(), got.log_probs.tolist()) for ask, got in pairs
        ]

    def is_stopping(self) -> bool:
        self.num_asked += 1
        return self.num_asked == self.stop_at


def stopped(world, layouts: list[ParallelLayout], stops: tuple[int | None, ...]):
    """Of each layout and stop: how often it was asked, what was handed over, what came back, what was left."""
    engine_module.LOOK_STEPS = session_module.LOOK_STEPS = LOOK_STEPS
    # So that not all has ended when it is asked for the third time.
    params = SamplingParams(max_new_tokens=2 * LOOK_STEPS + 4, stop_ids=(2,))
    found = []
    for layout in layouts:
        model, mesh, groups, _ = make_model(world, layout)
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=4)
        mine = requests(params)[mesh.coordinate(world.rank).dp :: layout.dp]
        for stop_at in stops:
            progress, responses, left = Noting(stop_at), None, []
            try:
                responses = engine.generate(mine, progress=progress)
            except RolloutStopped as stopped:
                assert stop_at is not None
                left = [((ask.prompt_index, ask.index), got.tokens.tolist()) for ask, got in stopped.unfinished]
            whole = responses and [
                ((ask.prompt_index, ask.index), got.tokens.tolist(), got.log_probs.tolist())
                for ask, got in zip(mine, responses, strict=True)
            ]
            found.append((progress.num_asked, progress.handed, whole, left))
    return found


@pytest.mark.slow
def test_finished_responses_are_handed_over_once_and_generating_stops_where_it_is_told_to():
    stops = (None, 1, 2, 3)
    for results in run_ranks(stopped, 2, layouts_of(2), stops):
        for start in range(0, len(results), len(stops)):
            num_asked, handed, whole, _ = results[start]
            assert sorted(handed) == sorted(whole)
            # More steps than the longest has tokens, since not all fit at once.
            assert num_asked > max(len(one[1]) for one in whole) / LOOK_STEPS and num_asked >= max(stops[1:])
            texts = {name: tokens for name, tokens, _ in whole}
            numbers = [len(handed)]
            for stop_at, (asked, before, nothing, left) in zip(stops[1:], results[start + 1 :], strict=False):
                assert asked == stop_at and nothing is None
                names = [name for name, *_ in before] + [name for name, _ in left]
                assert sorted(names) == sorted(texts)
                # Some of those handed over last have ended in the very step that was under way.
                assert sorted(before) == sorted(
                    each for each in handed if each[0] in dict.fromkeys(names[: len(before)])
                )
                assert all(tokens == texts[name][: len(tokens)] for name, tokens in left)
                numbers.append(len(before))
            assert numbers[1] == 0 and numbers[1:] == sorted(numbers[1:]) and 0 < numbers[-1] < numbers[0]


@pytest.mark.parametrize(
    ("size", "texts"),
    [
        (2, ["dp2.ep2"]),
        pytest.param(
            4, ["dp4.ep4", "tp2.dp2.ep2", "tp4.ep2.etp2", "tp2.dp2.ep4.etp1", "pp2.dp2.ep2"], marks=pytest.mark.slow
        ),
    ],
)
def test_replicas_that_share_experts_sample_the_same_with_uneven_shares(size, texts):
    (expected,) = run_ranks(rollout_of_uneven_shares, 1, [ParallelLayout()])
    expected = {key[1:]: value for key, value in expected.items()}
    found: dict = {}
    for part in run_ranks(rollout_of_uneven_shares, size, [ParallelLayout.parse(text) for text in texts]):
        found.update(part)
    assert len(found) == len(texts) * 2 * 15
    for (layout, *key), (tokens, log_probs) in found.items():
        wanted, wanted_log_probs = expected[tuple(key)]
        assert tokens == wanted, (layout, key)
        assert max(abs(one - other) for one, other in zip(log_probs, wanted_log_probs, strict=True)) < 1e-5, layout
