"""Contract tests pass what is right, and each finds what is broken in the way that it is for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hybridflow.errors import ContractError
from hybridflow.rewards import batched
from hybridflow.rollout.request import Response
from hybridflow.testing import check_actor, check_critic, check_reward
from tests.support.user_models import Digits, SamplingActor, TinyActor, TinyCritic

NOISE = itertools.count(1)


class Altered(TinyActor):
    """Its logits are changed by ``change(logits, input_ids)``."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.change(super().forward(input_ids), input_ids)


class LooksAhead(TinyActor):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.trunk(input_ids)
        return self.head(hidden + hidden[:, -1:])


class HalfDetached(TinyActor):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.trunk(input_ids).detach())


class Endless(TinyActor):
    def __init__(self) -> None:
        super().__init__()
        del self.max_context


class Failing(SamplingActor):
    """Its ``generate`` is asked something else, or what it gives is changed by ``spoil(rows, told, width)``."""

    def __init__(
        self, spoil: Callable[[Tensor, Tensor, int], Any] = lambda rows, told, width: (rows, told), **asked: Any
    ):
        super().__init__()
        self.spoil, self.asked = spoil, asked

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **asked: Any) -> Any:
        if self.asked.get("mask") == "none":
            attention_mask = torch.ones_like(attention_mask)
        changed = {**asked, **{name: value for name, value in self.asked.items() if name != "mask"}}
        rows, told = super().generate(input_ids, attention_mask, **changed)
        return self.spoil(rows, told, input_ids.shape[1])


def rows_alone(rows: Tensor, told: Tensor, width: int) -> Tensor:
    return rows


BROKEN_ACTORS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "flat": (lambda: Altered(lambda logits, ids: logits.flatten(0, 1)), "shape"),
    "narrow": (lambda: Altered(lambda logits, ids: logits[..., :-1]), "shape"),
    "whole": (lambda: Altered(lambda logits, ids: (logits * 100).long()), "dtype"),
    "overflowing": (
        lambda: Altered(lambda logits, ids: logits.masked_fill(ids[..., None] == ids[0, 0], torch.inf)),
        "finite",
    ),
    "restless": (
        lambda: Altered(lambda logits, ids: logits + 0.01 * next(NOISE) * torch.arange(logits.shape[-1])),
        "determinism",
    ),
    "looks ahead": (LooksAhead, "causality"),
    # What a model does whose positions count in the batch's width.
    "counts from the end": (lambda: Altered(lambda logits, ids: logits * (1 + 0.01 * ids.shape[1])), "batching"),
    "sees its neighbours": (
        lambda: Altered(lambda logits, ids: logits + logits.mean(0, keepdim=True)),
        "causality|padding|batching",
    ),
    "detached": (lambda: Altered(lambda logits, ids: logits.detach()), "gradient"),
    "half detached": (HalfDetached, "gradient"),
    "frozen": (lambda: TinyActor().requires_grad_(False), "gradient"),
    "endless": (Endless, "settings"),
    "answers alone": (lambda: Failing(lambda rows, told, width: (rows[:, width:], told)), "generate"),
    "too many": (
        lambda: Failing(lambda rows, told, width: tuple(torch.cat([each, each[:, -1:]], 1) for each in (rows, told))),
        "max_new_tokens",
    ),
    "heeds no mask": (lambda: Failing(mask="none"), "greedy"),
    "goes on": (lambda: Failing(eos_token_id=[]), "eos"),
    "tells others": (lambda: Failing(lambda rows, told, width: (rows, told - 0.1)), "log_probs"),
    "always greedy": (lambda: Failing(rows_alone, do_sample=False), "distribution"),
    "no temperature": (lambda: Failing(rows_alone, temperature=1.0), "distribution"),
}


@pytest.mark.parametrize("actor", [TinyActor, SamplingActor])
def test_actors_that_are_right_pass(actor):
    check_actor(actor())


@pytest.mark.parametrize("name", BROKEN_ACTORS)
def test_each_broken_actor_fails_the_check_that_is_for_it(name):
    make, check = BROKEN_ACTORS[name]
    with pytest.raises(ContractError, match=rf"(^|: )({check}): ") as caught:
        check_actor(make())
    assert "; " in str(caught.value), "what to do about it"


class AlteredCritic(TinyCritic):
    """Its values are changed by ``change(values, attention_mask)``."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.change(super().values(input_ids, attention_mask), attention_mask)


BROKEN_CRITICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shape": lambda values, mask: values.sum(1),
    "finite": lambda values, mask: values.masked_fill(mask == 0, torch.nan),
    "causality": lambda values, mask: values + values.sum(1, keepdim=True),
    "gradient": lambda values, mask: values.detach(),
}


def test_critics_that_are_right_pass():
    check_critic(TinyCritic())


@pytest.mark.parametrize("check", BROKEN_CRITICS)
def test_each_broken_critic_fails_the_check_that_is_for_it(check):
    with pytest.raises(ContractError, match=f": {check}: "):
        check_critic(AlteredCritic(BROKEN_CRITICS[check]))


def by_answer(prompt: str, response: str, answer: str) -> float:
    return float(response == answer)


class Ranking(Digits):
    """Scores that depend on the others of the batch."""

    def scores(self, prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        found = super().scores(prompts, responses, answers)
        return [each - sum(found) / len(found) for each in found]


class ByPlace(Digits):
    def scores(self, prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        return [at / 2 for at in range(len(responses))] if len(responses) > 1 else [PLACES[responses[0]]]


PLACES = {"2": 0.0, "5": 0.5, "Nine.": 1.0}


class Dropping(Digits):
    def scores(self, prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        return super().scores(prompts, responses, answers)[1:]


class One(Digits):
    def scores(self, prompts: list[str], responses: list[str], answers: list[str]) -> Any:
        return 1.0


BROKEN_REWARDS: list[tuple[Any, str]] = [
    (Dropping(), "length"),
    (One(), "length"),
    (lambda prompt, response, answer: float("nan"), "finite"),
    (lambda prompt, response, answer: None, "finite"),
    (lambda prompt, response, answer: next(NOISE), "determinism"),
    (Ranking(), "batching"),
    (ByPlace(), "order"),
]


async def by_answer_later(prompt: str, response: str, answer: str) -> float:
    return by_answer(prompt, response, answer)


@batched
def by_answers(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    return list(map(by_answer, prompts, responses, answers))


@pytest.mark.parametrize("reward", [by_answer, by_answer_later, by_answers, Digits(), Digits])
def test_rewards_that_are_right_pass(reward):
    check_reward(reward)


@pytest.mark.parametrize(("broken", "check"), BROKEN_REWARDS, ids=lambda each: str(each)[:12])
def test_each_broken_reward_fails_the_check_that_is_for_it(broken, check):
    with pytest.raises(ContractError, match=f": {check}: "):
        check_reward(broken)


class Server:
    """Stands where an engine asks a server: answers by a model, with what a server may do wrong."""

    def __init__(self, spoil: Callable[[Response], Response] = lambda each: each, most: int | None = None) -> None:
        self._model, self._spoil, self._most = TinyActor(), spoil, most

    def generate(self, requests: list[Any], purpose: str = "rollout", progress: Any = None) -> list[Response]:
        return [self._spoil(self._answer(each)) for each in requests[: self._most]]

    @torch.no_grad()
    def _answer(self, request: Any) -> Response:
        known, told, params = request.prompt, [], request.params
        for _ in range(params.max_new_tokens):
            log_probs = self._model(known[None])[0, -1].log_softmax(-1)
            token = log_probs.argmax() if params.greedy else torch.multinomial(log_probs.exp(), 1)[0]
            known, told = torch.cat([known, token[None]]), [*told, float(log_probs[token])]
            if int(token) in params.stop_ids:
                break
        tokens = known[len(request.prompt) :]
        return Response(
            tokens=tokens,
            log_probs=torch.tensor(told),
            sampled_log_probs=torch.tensor(told),
            versions=torch.zeros(len(told), dtype=torch.int32),
            finish="stop" if int(tokens[-1]) in params.stop_ids else "length",
        )


def replaced(**other: Any) -> Callable[[Response], Response]:
    def spoil(each: Response) -> Response:
        return Response(**{**vars(each), **{name: make(each) for name, make in other.items()}})

    return spoil


BROKEN_SERVERS: dict[str, tuple[Any, str]] = {
    "drops": (Server(most=3), "length"),
    "fails": (Server(replaced(finish=lambda each: "failed", error=lambda each: "no room")), "response"),
    "other ids": (Server(replaced(tokens=lambda each: each.tokens + 29)), "tokens"),
    "too long": (Server(replaced(tokens=lambda each: each.tokens.repeat(2))), "max_new_tokens"),
    "positive": (Server(replaced(log_probs=lambda each: -each.log_probs)), "log_probs"),
    "some": (Server(replaced(log_probs=lambda each: each.log_probs[1:])), "log_probs"),
    "wrong end": (Server(replaced(finish=lambda each: "stop")), "finish"),
    "restless": (Server(replaced(tokens=lambda each: (each.tokens + next(NOISE)) % 29)), "determinism"),
}


def test_an_engine_that_is_right_passes():
    check_actor(Server(), vocab_size=29)


@pytest.mark.parametrize("name", BROKEN_SERVERS)
def test_each_broken_engine_fails_the_check_that_is_for_it(name):
    server, check = BROKEN_SERVERS[name]
    with pytest.raises(ContractError, match=f": {check}: "):
        check_actor(server, vocab_size=29)


def test_what_is_neither_model_nor_engine_is_refused():
    with pytest.raises(ContractError, match="expected a torch.nn.Module"):
        check_actor(object(), vocab_size=3)
    with pytest.raises(ContractError, match="vocab_size: found 0"):
        check_actor(ZeroWords())
    with pytest.raises(ContractError, match=re.escape("expected a function (prompt, response, answer)")):
        check_reward(3)


class ZeroWords(nn.Module):
    vocab_size, max_context = 0, 8


def test_a_check_leaves_gradients_and_weights_as_they_were():
    actor = TinyActor()
    before = {name: each.clone() for name, each in actor.state_dict().items()}
    actor.head.weight.grad = torch.ones_like(actor.head.weight)
    check_actor(actor)
    assert torch.equal(actor.head.weight.grad, torch.ones_like(actor.head.weight))
    assert all(torch.equal(each, before[name]) for name, each in actor.state_dict().items())


@pytest.fixture
def llama():
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=29)
    return transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=48, num_labels=1)


def test_models_of_transformers_pass(llama):
    check_actor(transformers.LlamaForCausalLM(llama))
    check_critic(transformers.LlamaForCausalLM(llama))
    llama.pad_token_id = 0
    scorer = transformers.LlamaForSequenceClassification(llama)
    check_critic(scorer)
    check_reward(scorer)
    with pytest.raises(ContractError, match="expected a scorer"):
        check_reward(transformers.LlamaForCausalLM(llama))
