"""Conversations with an environment: the same in every layout, the log-probabilities of training, and what may fail."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybridflow.config.rewards import RewardConfig
from hybridflow.config.rollout import EnvironmentConfig
from hybridflow.data.prompts import Example
from hybridflow.errors import ConfigError, RewardError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import pack
from hybridflow.models.training import forward_only
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import Advantage, KLCoefficient
from hybridflow.roles.reward import Reward
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.environment import Conversation, Environments, find_environment
from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams
from hybridflow.rollout.sampling import gumbel_noise, row_keys, sequence_key
from tests.multi.jobs import make_job, tiny_recipe
from tests.multi.models import VOCAB, layouts_of, make_model
from tests.support.ranks import run_ranks

SEED, TEMPERATURE = 11, 0.8
LETTERS = "abcdefghijklmnopqrstuvwxyzABC"
STOPS = (2, 5, 9, 14)
CHARACTERS = SimpleNamespace(
    stop_ids=STOPS,
    encode=lambda text: [LETTERS.index(each) for each in text],
    decode=lambda ids: "".join(LETTERS[each] for each in ids),
    pieces=lambda: dict(enumerate(LETTERS)),
    special_id=lambda name: None,
)
"""A token for each letter."""
PARAMS = SamplingParams(max_new_tokens=30, temperature=TEMPERATURE, stop_ids=STOPS)


class Echo:
    """Says what it heard, backwards, between an A and a B; pays for each letter; ends where an x was said."""

    def reset(self, prompt, answer):
        return f"C{answer}" if "a" in prompt else None

    def step(self, response):
        return heard(response), len(response) / 4, "x" in response


def heard(response: str) -> str:
    return f"A{response[::-1][:4]}B"


GATE = threading.Event()


class Held(Echo):
    """Begins when the gate is open."""

    def reset(self, prompt, answer):
        GATE.wait()
        return super().reset(prompt, answer)


class Faulty(Echo):
    """Fails in the way that the answer names."""

    def reset(self, prompt, answer):
        self.way = answer
        if answer == "no reset":
            raise RuntimeError("cannot begin")
        if answer == "odd reset":
            return 7
        return None

    def step(self, response):
        ways = {
            "raises": lambda: int("nothing"),
            "leaves": lambda: (_ for _ in ()).throw(SystemExit(1)),
            "hangs": lambda: threading.Event().wait(),
            "says nothing": lambda: None,
            "says two": lambda: ("a", 1.0),
            "says bytes": lambda: (b"a", 1.0, False),
            "pays nan": lambda: ("a", float("nan"), False),
            "pays inf": lambda: ("a", float("inf"), True),
            "pays text": lambda: ("a", "1", False),
            "odd end": lambda: ("a", 1.0, "no"),
            "unknown letters": lambda: ("é\ud800", 1.0, False),
            "huge": lambda: ("a" * 50_000_000, 0.5, False),
            "long": lambda: ("a" * 30, 0.5, False),
        }
        return ways[self.way]() if self.way in ways else super().step(response)


WAYS_TO_FAIL = {
    "no reset": "RuntimeError: cannot begin",
    "odd reset": "TypeError: the observation is int 7",
    "raises": "ValueError: invalid literal for int()",
    "leaves": "SystemExit: 1",
    "hangs": "no answer within 3 s",
    "says nothing": "TypeError: step gave None",
    "says two": "TypeError: step gave ('a', 1.0)",
    "says bytes": "TypeError: the observation is bytes",
    "pays nan": "ValueError: the reward is nan",
    "pays inf": "ValueError: the reward is inf",
    "pays text": "TypeError: the reward is str '1'",
    "odd end": "TypeError: done is str 'no'",
    "unknown letters": "ValueError: substring not found",
}


def problems() -> tuple[list[Request], list[Example]]:
    """Three samples of each of six prompts, of 3 to 15 tokens; what follows still fits the context of 48."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (3, 9, 15, 5, 7, 4)]
    requests = [
        Request(prompt=prompts[prompt_index], params=PARAMS, prompt_index=100 + prompt_index, index=index)
        for prompt_index in range(6)
        for index in range(3)
    ]
    examples = [
        Example(prompt=CHARACTERS.decode(ask.prompt.tolist()), answer="bcd", place=f"f:{ask.prompt_index}")
        for ask in requests
    ]
    return requests, examples


def environments(world, mesh, name: str = "Echo", **settings) -> Environments:
    found = EnvironmentConfig(name=f"{__name__}:{name}", **{"max_turns": 4, "step_deadline_s": 60.0, **settings})
    return Environments(found, CHARACTERS, world.coordinator(mesh.group_of(world.rank, "tp", "pp")))


def conversations(world, layouts: list[ParallelLayout], max_concurrent: int):
    """Of every layout: conversations, and the trainer's log-probabilities on the ranks that have them."""
    found = {}
    for layout in layouts:
        model, mesh, groups, _ = make_model(world, layout)
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=max_concurrent)
        engine.version = 7
        requests, examples = (each[mesh.coordinate(world.rank).dp :: layout.dp] for each in problems())
        talks = environments(world, mesh).converse(engine, requests, examples)
        sequences = [torch.cat([ask.prompt, got.response.tokens]) for ask, got in zip(requests, talks, strict=True)]
        batch = pack(list(range(len(requests))), sequences, [len(ask.prompt) for ask in requests], world.device)

        def compute(output, batch, group=groups.tp):
            log_probs, _ = vocab_parallel_log_probs(
                output, batch.targets, group=group, vocab_size=VOCAB, temperature=TEMPERATURE
            )
            return log_probs.split(batch.response_lengths)

        trained = forward_only(model, groups, [batch], compute)
        for ask, got, expected in zip(requests, talks, trained[0] if trained else [], strict=bool(trained)):
            found[str(layout), ask.prompt_index, ask.index] = plain(got), expected.tolist()
    return found


def merged(size: int, max_concurrent: int = 256) -> dict:
    found: dict = {}
    for part in run_ranks(conversations, size, layouts_of(size), max_concurrent):
        found.update(part)
    return found


def plain(talk: Conversation) -> SimpleNamespace:
    """Without tensors, so that it can go from one process to another."""
    names = ("tokens", "log_probs", "sampled_log_probs", "versions")
    numbers = {name: getattr(talk.response, name).tolist() for name in names}
    return SimpleNamespace(
        **numbers,
        mask=talk.mask.tolist(),
        reward=talk.reward,
        num_turns=talk.num_turns,
        last_turn=talk.last_turn,
        finish=talk.response.finish,
        kept_versions=talk.kept().versions.tolist(),
        error=talk.error,
    )


def turns_of(talk: SimpleNamespace) -> list[tuple[bool, list[int]]]:
    """What was said and what was observed, in turn."""
    turns: list[tuple[bool, list[int]]] = []
    for token, is_said in zip(talk.tokens, [each > 0 for each in talk.mask], strict=True):
        if not turns or turns[-1][0] != is_said or (is_said and turns[-1][1][-1] in STOPS):
            turns.append((is_said, []))
        turns[-1][1].append(token)
    return turns


def spoken(tokens: list[int]) -> str:
    return CHARACTERS.decode(tokens[:-1] if tokens[-1] in STOPS else tokens)


@pytest.fixture(scope="module")
def reference() -> dict:
    """The conversations of one rank, all at once."""
    return {key[1:]: value[0] for key, value in merged(1).items()}


def test_conversations_are_what_was_said_and_heard_in_turn(reference):
    assert len(reference) == 18
    numbers = {talk.num_turns for talk in reference.values()}
    assert {1, 2, 3, 4} <= numbers, "some must end early, some by the most turns"
    assert any(len(talk.mask) == 30 for talk in reference.values()), "some must use all tokens"
    assert any(talk.finish == "length" and talk.tokens[-1] in STOPS for talk in reference.values()), "and some be full"
    _, examples = problems()
    for talk, example in zip(reference.values(), examples, strict=True):
        turns = turns_of(talk)
        if "a" in example.prompt:
            assert turns.pop(0) == (False, CHARACTERS.encode("Cbcd"))
        said, observed = [each for is_said, each in turns if is_said], [each for is_said, each in turns if not is_said]
        assert [is_said for is_said, _ in turns] == [place % 2 == 0 for place in range(len(turns))]
        assert len(said) == talk.num_turns == len(observed) + 1
        assert [CHARACTERS.decode(each) for each in observed] == [heard(spoken(each)) for each in said[:-1]]
        assert talk.reward == sum(len(spoken(each)) / 4 for each in said)
        is_over, is_full = "x" in spoken(said[-1]), len(talk.mask) + len(heard(spoken(said[-1]))) >= 30
        assert is_over or talk.num_turns == 4 or is_full
        assert [version < 0 for version in talk.kept_versions] == [mask == 0 for mask in talk.mask]
        is_cut = said[-1][-1] not in STOPS or (is_full and not is_over)
        assert (talk.finish, talk.last_turn) == ("length" if is_cut else "stop", len(said[-1]))
        assert not any("x" in spoken(each) for each in said[:-1]) and talk.error is None
        # Of what was observed too: a sample's age is that of its oldest token.
        assert set(talk.versions) == {7}


# Few at a time, so that conversations wait for each other.
@pytest.mark.parametrize(
    ("size", "max_concurrent", "count"),
    [(1, 4, 18), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 3, 54), (4, 256, 108)))],
)
def test_conversations_are_the_same_in_every_layout_with_the_log_probs_of_training(
    reference, size, max_concurrent, count
):
    case = merged(size, max_concurrent)
    assert len(case) == count
    for (layout, *request), (talk, trained) in case.items():
        # These seeds meet no near-tie.
        expected = reference[tuple(request)]
        assert (talk.tokens, talk.mask, talk.reward) == (expected.tokens, expected.mask, expected.reward), layout
        for mask, sampled, cut, own in zip(talk.mask, talk.log_probs, talk.sampled_log_probs, trained, strict=True):
            assert abs(sampled - own) <= 1e-5 if mask else sampled == cut == 0, layout


def one_by_one(world):
    """Every conversation alone: the tokens that logits and noise by position give, and what went through the model."""
    model, mesh, groups, _ = make_model(world, ParallelLayout())
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=1)
    sessions = []
    begin = engine.open
    engine.open = lambda *args: sessions.append(begin(*args)) or sessions[-1]
    led, found = environments(world, mesh), []
    for request, example in zip(*problems(), strict=True):
        (talk,) = led.converse(engine, [request], [example])
        sequence = torch.cat([request.prompt, talk.response.tokens])
        batch = pack([0], [sequence], [len(request.prompt)], world.device)
        logits = model(batch.tokens, batch.attention, batch.rows)[:, :VOCAB].detach() / TEMPERATURE
        key = torch.tensor([sequence_key(SEED, "rollout", request.prompt_index, request.index)])
        positions = torch.arange(len(request.prompt), len(sequence))
        best = torch.stack(
            [
                row + gumbel_noise(row_keys(key, position[None]), 0, VOCAB)[0]
                for row, position in zip(logits, positions, strict=True)
            ]
        ).argmax(-1)
        found.append((plain(talk), len(request.prompt), best.tolist(), sessions[-1].num_computed))
    return found


def test_noise_goes_by_position_and_what_was_computed_is_kept_between_turns():
    saved = 0
    for talk, num_prompt, best, num_computed in run_ranks(one_by_one, 1)[0]:
        triples = zip(talk.tokens, best, talk.mask, strict=True)
        assert all(token == other for token, other, is_said in triples if is_said)
        # A turn computes all but its last token, and full blocks of turns before are there.
        expected, end, at = 0, 1, num_prompt
        for said, turn in turns_of(talk):
            at += len(turn)
            if said:
                kept = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                expected, end, saved = expected + at - 1 - kept, at, saved + kept
        assert num_computed == expected
    assert saved > 100


def with_failures(world, layout: ParallelLayout):
    model, mesh, groups, _ = make_model(world, layout)
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=256)
    requests, examples = problems()
    well = environments(world, mesh, "Faulty").converse(engine, requests, examples)
    ways = [*WAYS_TO_FAIL, "huge", "long"]
    ill_requests = [replace(requests[0], prompt_index=200 + number) for number in range(len(ways))]
    ill_examples = [replace(examples[0], answer=way) for way in ways]
    led = environments(world, mesh, "Faulty", step_deadline_s=3.0, failure_reward=-0.5)
    both = led.converse(engine, [*requests, *ill_requests], [*examples, *ill_examples])
    texts = [[talk.response.tokens.tolist() for talk in talks] for talks in (well, both)]
    ends = [(talk.error, talk.reward, talk.num_turns, talk.mask.tolist()) for talk in both[len(well) :]]
    return texts, ends, [talk.error for talk in both[: len(well)]], len(well)


def line_of(method) -> int:
    return method.__code__.co_firstlineno


@pytest.mark.slow
def test_an_environment_that_fails_ends_its_own_sample_alone():
    one, two = run_ranks(with_failures, 2, ParallelLayout(tp=2))
    assert one == two, "all ranks of a replica know the same"
    (well, both), ends, errors, num_well = one
    assert both[:num_well] == well and errors == [None] * num_well
    for (way, message), (error, reward, num_turns, mask) in zip(WAYS_TO_FAIL.items(), ends, strict=False):
        method = Faulty.reset if "reset" in way else Faulty.step
        where = rf"environment '{__name__}:Faulty' \(tests/multi/test_environment.py:{line_of(method)}\) on f:100"
        said = "" if "reset" in way else " with response '[^']*'"
        assert error is not None and re.match(f"{where}{said}: {re.escape(message)}", error), (way, error)
        assert reward == -0.5, way
        assert num_turns == ("reset" not in way) and all(mask) and bool(mask) == ("reset" not in way)
    # There is no room for what these say, which is no fault of theirs.
    assert [each[:3] for each in ends[-2:]] == [(None, 0.5, 1), (None, 0.5, 1)]


def stopping(world, layout: ParallelLayout):
    model, mesh, groups, _ = make_model(world, layout)
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=4)
    few = [each[:6] for each in problems()]
    led, asked = environments(world, mesh, "Held"), []
    with pytest.raises(RolloutStopped):
        led.converse(engine, *few, "rollout", lambda: bool(asked.append(0)) or len(asked) == 3)
    # What those say now that nobody waits for is not heard.
    GATE.set()
    whole = led.converse(engine, *few)
    with pytest.raises(RolloutStopped):
        led.converse(engine, *few, "rollout", lambda: bool(asked.append(0)) or len(asked) == 6)
    again = led.converse(engine, *few)
    requests, examples = few
    patient = [replace(ask, params=replace(PARAMS, min_new_tokens=13)) for ask in requests]
    for talk in led.converse(engine, patient, examples):
        said = [turn for is_said, turn in turns_of(plain(talk)) if is_said]
        # What is left of the 30 tokens may be fewer.
        assert all(len(turn) >= 13 for turn in said[:-1]) and (len(said[-1]) >= 13 or len(talk.mask) == 30)
    known = environments(world, mesh).converse(engine, *few)
    assert [talk.response.tokens.tolist() for talk in known] == [talk.response.tokens.tolist() for talk in whole]
    greedy = led.converse(engine, *few, "validation")
    return [[talk.response.tokens.tolist() for talk in talks] for talks in (whole, again, greedy)]


@pytest.mark.slow
def test_conversations_that_were_stopped_begin_anew_as_they_were():
    one, two = run_ranks(stopping, 2, ParallelLayout(pp=2))
    assert one == two
    assert one[0] == one[1] and one[2] != one[0], "another purpose, another noise"


class Paid(Echo):
    """Ends after its second turn, which alone is paid for; the first is answered."""

    def reset(self, prompt, answer):
        self.num_turns = 0

    def step(self, response):
        self.num_turns += 1
        if self.num_turns == 1 and response.startswith("a"):
            raise RuntimeError("does not like an a")
        return "bcd", float(self.num_turns == 2) * len(response), self.num_turns == 2


def last_letters(prompt: str, response: str, answer: str) -> float:
    """How many letters the response has, and ten for each of the answer."""
    return len(response) + 10 * len(answer)


class Silent(Paid):
    """As that, but there is nothing to observe."""

    def step(self, response):
        return "", *super().step(response)[1:]


class Broken(Paid):
    """Fails in its first call, in a way of its own for each problem."""

    def reset(self, prompt, answer):
        raise KeyError(prompt)


def job_with(world, name: str, function: str | None):
    """A job whose samples are conversations."""
    recipe = tiny_recipe(ParallelLayout(dp=world.size), "grpo", group_size=3, mini_batch_size=12)
    recipe = replace(
        recipe,
        seed=SEED,
        reward=RewardConfig(function=function),
        rollout=replace(
            recipe.rollout,
            max_new_tokens=30,
            environment=EnvironmentConfig(name=f"{__name__}:{name}", step_deadline_s=60.0),
        ),
    )
    job, _ = make_job(world, recipe)
    _, examples = problems()
    prompts = [CHARACTERS.encode(example.prompt) for example in examples[::3]]
    train = SimpleNamespace(
        prompt=lambda prompt_index: prompts[prompt_index], example=lambda prompt_index: examples[3 * prompt_index]
    )
    tokenizer = SimpleNamespace(**{**vars(job.tokenizer), **vars(CHARACTERS)})
    held_out = tuple(zip(examples[::3], prompts, strict=True))
    return replace(job, train=train, tokenizer=tokenizer, held_out=held_out)


def training(world, function: str | None):
    """The roles of a step on conversations, called as the schedule calls them."""
    job = job_with(world, "Paid", function)
    coefficient = KLCoefficient(job.recipe)
    actor, reward, advantage = Actor(job, coefficient), Reward(job), Advantage(job, coefficient)
    told = ("environment/turns_mean", "environment/failed")
    for first in (0, 2):
        actor.sample(None, {"train_step": {"step": 1, "first_prompt_index": first, "num_prompts": 2}})
    in_halves = [actor.metrics[name] for name in told]
    actor.metrics.clear()
    batch = actor.sample(None, {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": 4}})
    assert in_halves == [actor.metrics[name] for name in told], "a step's rollouts are told of together"
    batch = batch.with_columns(reward.score(batch, {}).columns)
    batch = batch.with_columns(actor.log_probs(batch, {}).columns)
    batch = batch.with_columns({"ref_log_probs": batch.columns["old_log_probs"]})
    batch = batch.with_columns(advantage.calls["grpo"](batch, {}).columns)
    # Of 12 samples with ids from 0 on, the order is the id.
    actor.update(batch.with_columns({"order": batch.ids}), {"actor_mini_batch": {"epoch": 0, "index": 0}})
    reward.score_validation(actor.sample_validation(None, {}), {})
    columns = {
        name: [row.tolist() for row in column.to_list()] if hasattr(column, "to_list") else column.tolist()
        for name, column in batch.columns.items()
    }
    return batch.ids.tolist(), columns, {**actor.metrics, **reward.metrics, **advantage.metrics}


@pytest.mark.parametrize("function", [None, f"{__name__}:last_letters"], ids=["paid", "function"])
def test_a_step_learns_from_what_was_said_alone(function):
    shares = run_ranks(training, 2, function)
    rows, num_turns, num_failed = [], 0, 0
    for ids, columns, _ in shares:
        for place, sample in enumerate(ids):
            row = {name: column[place] for name, column in columns.items()}
            tokens = row["tokens"][row["prompt_lengths"] :]
            mask = row["response_mask"]
            assert len(tokens) == len(mask) == len(row["advantages"]) == len(row["rollout_log_probs"])
            turns = turns_of(SimpleNamespace(tokens=tokens, mask=mask))
            said = [each for is_said, each in turns if is_said]
            is_failed = len(said) == 1 and spoken(said[0]).startswith("a")
            num_turns, num_failed = num_turns + len(said), num_failed + is_failed
            assert [each for is_said, each in turns if not is_said] == [CHARACTERS.encode("bcd")] * (len(said) - 1)
            paid = float(len(spoken(said[1]))) if len(said) == 2 else 0.0
            assert row["environment_rewards"] == paid
            assert row["scores"] == (paid if function is None else len(spoken(said[-1])) + 30)
            rows.append((sample, row))
    assert len(rows) == 12 and num_turns > 14
    for sample, row in rows:
        group = torch.tensor([other["scores"] for _, other in rows if other["prompt_indices"] == row["prompt_indices"]])
        assert sample // 3 == row["prompt_indices"] and len(group) == 3
        expected = (row["scores"] - group.mean()) / (group.std() + 1e-6)
        for mask, advantage in zip(row["response_mask"], row["advantages"], strict=True):
            assert advantage == pytest.approx(float(expected) * mask, abs=1e-5)
    masked = [
        [(old, sampled) for old, sampled, mask in zip(*each, strict=True) if mask]
        for each in ((row["old_log_probs"], row["rollout_log_probs"], row["response_mask"]) for _, row in rows)
    ]
    num_said = sum(map(len, masked))
    difference = sum(abs(old - sampled) for each in masked for old, sampled in each) / num_said
    for _, _, metrics in shares:
        assert metrics["environment/turns_mean"] == pytest.approx(num_turns / 12)
        assert metrics["environment/failed"] == num_failed
        assert metrics["response/length_mean"] == pytest.approx(num_said / 12)
        assert metrics["rollout/logprob_abs_diff"] == pytest.approx(difference, abs=1e-9) and difference < 1e-5
        assert metrics["reward/mean"] == pytest.approx(sum(row["scores"] for _, row in rows) / 12)
        assert metrics["validation/score"] >= (0 if function is None else 30)


def rollouts_of_a_step(world, name: str):
    """Responses, their masks, last turns and scores of a step's two rollouts, and what was measured after each.

    The archive gets the same responses and masks.
    """
    job = job_with(world, name, f"{__name__}:last_letters")
    actor, reward = Actor(job, KLCoefficient(job.recipe)), Reward(job)
    found, kept = [], []
    # A log that takes what is added.
    logged = SimpleNamespace(add=lambda samples: kept.extend(samples))
    actor.rollouts.log = SimpleNamespace(log=lambda step, prompts: contextlib.nullcontext(logged))
    for first in (0, 2):
        batch = actor.sample(None, {"train_step": {"step": 1, "first_prompt_index": first, "num_prompts": 2}})
        sequences = zip(batch.ragged("tokens").to_list(), batch.dense("prompt_lengths").tolist(), strict=True)
        columns = [
            [tokens[length:].tolist() for tokens, length in sequences],
            [mask.tolist() for mask in batch.ragged("response_mask").to_list()],
            batch.dense("last_turn_lengths").tolist(),
            reward.score(batch, {}).dense("scores").tolist(),
        ]
        found.append((list(zip(*columns, strict=True)), dict(actor.metrics)))
    told = [(each.tokens.tolist(), (each.versions >= 0).astype(float).tolist()) for each in kept]
    assert told == [(tokens, mask) for samples, _ in found for tokens, mask, *_ in samples]
    return found


def test_a_step_counts_the_conversations_of_all_its_rollouts():
    shares = run_ranks(rollouts_of_a_step, 2, "Paid")
    for (_, one), (_, both) in shares:
        assert one["rollout/prefill_share"] != both["rollout/prefill_share"]
    for number in (1, 2):
        rows = [row for share in shares for samples, _ in share[:number] for row in samples]
        num_turns = [1 + (0 in mask) for _, mask, _, _ in rows]
        failed = [
            count == 1 and spoken(tokens).startswith("a") for (tokens, *_), count in zip(rows, num_turns, strict=True)
        ]
        assert len(rows) == 6 * number and 1 < sum(num_turns) < 2 * len(rows)
        for _, metrics in (share[number - 1] for share in shares):
            assert metrics["environment/turns_mean"] == pytest.approx(sum(num_turns) / len(rows))
            assert metrics["environment/failed"] == sum(failed)


def test_what_says_nothing_still_ends_a_turn():
    rows = [row for samples, _ in run_ranks(rollouts_of_a_step, 1, "Silent")[0] for row in samples]
    for tokens, mask, last_turn, score in rows:
        assert all(mask) and score == len(spoken(tokens[-last_turn:])) + 30
    assert sum(last_turn < len(tokens) for tokens, _, last_turn, _ in rows) > 6, "some must have two turns"


def all_fail(world):
    job = job_with(world, "Broken", None)
    actor = Actor(job, KLCoefficient(job.recipe))
    greedy = {"number": 1, "first_prompt_index": 0, "num_prompts": 2, "is_greedy": True}
    # Of a baseline, which nothing is learned from, it is no error.
    actor.sample(None, {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": 2}, "fill": greedy})
    assert actor.metrics["environment/failed"] == 2
    with pytest.raises(RewardError) as failure:
        rollouts_of_a_step(world, "Broken")
    return str(failure.value)


def test_an_environment_that_fails_in_all_samples_ends_the_run():
    _, examples = problems()
    for said in run_ranks(all_fail, 2):
        assert said.startswith(
            "the environment failed in all 6 samples: environment 'tests.multi.test_environment:Broken'"
        )
        place = f"(tests/multi/test_environment.py:{line_of(Broken.reset)}) on f:100"
        assert f"{place}: KeyError: {examples[0].prompt!r}; mend it, there is nothing to learn from" in said


def test_an_environment_hears_special_tokens_but_the_one_at_the_end():
    names = {"m": "[CALL]", "q": "</s>", "s": "<pad>"}
    special = {LETTERS.index(letter): name for letter, name in names.items()}
    tokenizer = SimpleNamespace(
        stop_ids=(LETTERS.index("q"),),
        decode=lambda ids: "".join(LETTERS[each] for each in ids if each not in special),
        pieces=lambda: {**dict(enumerate(LETTERS)), **special},
        special_id={name: token for token, name in special.items()}.get,
    )
    led, heard_of = Environments(EnvironmentConfig(name="calculator"), tokenizer, SimpleNamespace(is_lead=False)), []
    for said in ("abmmcq", "mqb", "q", "ads"):
        tokens = torch.tensor([LETTERS.index(each) for each in said])
        none = torch.zeros(len(tokens))
        response = Response(tokens=tokens, log_probs=none, sampled_log_probs=none, versions=none.int(), finish="stop")
        heard_of.append(led._said(response))
    assert heard_of == ["ab[CALL][CALL]c", "[CALL]</s>b", "", "ad<pad>"]


def test_an_environment_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"rollout\.environment\.name='nowhere:It'.*give one of calculator or"):
        find_environment("nowhere:It")
    with pytest.raises(ConfigError, match=r"has no attribute 'It'"):
        find_environment(f"{__name__}:It")
    with pytest.raises(ConfigError, match=r"with reset|\"?reset\(prompt, answer\)"):
        find_environment(f"{__name__}:heard")


class Waiting(Echo):
    async def step(self, response):
        return "", 0.0, True


def test_an_environment_with_an_async_method_is_refused_before_it_is_asked():
    with pytest.raises(ConfigError, match=r"Waiting': step must not be async def; write def and wait inside"):
        find_environment(f"{__name__}:Waiting")
