"""Servers that speak OpenAI's ``/v1/completions`` with token ids as prompt; vLLM's additions where they are offered."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any

from hybridflow.config.rollout import SamplingEngineConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import EngineError
from hybridflow.rollout.engines.answers import (
    Answer,
    LogProbsKind,
    known_tokens,
    num_before_stop,
    num_left,
    range_refusal,
)
from hybridflow.rollout.engines.http_engine import ask_once
from hybridflow.rollout.engines.wire import BadAnswer, Lines, Refused
from hybridflow.rollout.request import Request

_NEUTRAL = {"min_new_tokens": 0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "with_prompt_log_probs": False}
"""Parameters that only vLLM knows, and the values that ask for nothing."""

_TOKEN_ID = re.compile(r"token_id:([0-9]{1,18})")


@dataclass(frozen=True, kw_only=True)
class OpenAi:
    """See ``http_engine.Api``.

    A server that is not vLLM, and does not tell token ids unasked as ours does, gives text: its tokens are those of the
    tokenizer, where their number is right, and their texts are those that the server tells, if any; and where it
    stopped, the end of sequence is put behind, with an unknown log-probability if it told none.

    Attributes:
        model: The server's name for the model.
        is_vllm: Whether it takes vLLM's additions.
        log_probs: Distribution of its log-probabilities.
        tokenizer: The model's own; None: a server that is not vLLM is refused.
    """

    path = "/v1/completions"
    model: str
    is_vllm: bool
    log_probs: LogProbsKind
    tokenizer: Tokenizer | None = None

    def refusal(self, request: Request) -> str | None:
        """See ``Api``."""
        params = request.params
        if params.bad_ids or params.bad:
            return "bad_ids, bad: an OpenAI-compatible server does not keep them out exactly; leave them out"
        if not self.is_vllm:
            for name, neutral in _NEUTRAL.items():
                if getattr(params, name) != neutral:
                    return f"{name}={getattr(params, name)}: OpenAI's interface does not know it, and this is not vLLM"
            if params.stop:
                return "stop: OpenAI's interface does not tell the tokens of what stopped it, and this is not vLLM"
            if self.tokenizer is None:
                return "the server tells no token ids, and there is no tokenizer to find them by; serve with vLLM"
            if others := sorted(set(params.stop_ids) - set(self.tokenizer.stop_ids)):
                return (
                    f"stop_ids: OpenAI's interface has no stop tokens, and this is not vLLM: found {others} beyond the "
                    "tokenizer's ends; remove their names from rollout.stop, or serve with vLLM"
                )
        return range_refusal(params)

    def body(self, request: Request, seed: int) -> dict[str, Any]:
        """See ``Api``."""
        params = request.params
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": known_tokens(request),
            "max_tokens": num_left(request),
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "seed": seed,
            "logprobs": 0 if self.is_vllm else 1,
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
        if self.is_vllm:
            body |= {
                "top_k": params.top_k,
                "min_p": params.min_p,
                "repetition_penalty": params.repetition_penalty,
                "min_tokens": num_before_stop(request),
                "stop_token_ids": list(params.stop_ids),
                "ignore_eos": True,
                "stop": list(params.stop),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            if params.with_prompt_log_probs:
                body["prompt_logprobs"] = 0
        return body

    def read(self, request: Request, answer: Any) -> Answer:
        """See ``Api``."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise BadAnswer("found no choice, or several; expected one completion with 'choices'")
        choice = choices[0]
        finish, told = choice.get("finish_reason"), choice.get("logprobs")
        if finish not in ("stop", "length"):
            raise BadAnswer(f"finish_reason={finish!r}: expected 'stop' or 'length'")
        if not isinstance(told, dict):
            raise BadAnswer("logprobs: found none, expected those of the sampled tokens; does the server allow them?")
        tokens, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
        if not self.is_vllm and not _is_whole(tokens, finish, request):
            return self._read_text(request, choice, told, finish)
        if prompt is not None and prompt != known_tokens(request):
            raise BadAnswer("prompt_token_ids: found another prompt than was sent; does the server cut or add to it?")
        return Answer(
            tokens=_ids(told.get("tokens")) if tokens is None else tokens,
            log_probs=told.get("token_logprobs"),
            finish=finish,
            kind=self.log_probs,
            prompt_log_probs=_prompt_log_probs(request, choice) if request.params.with_prompt_log_probs else None,
        )

    def _read_text(self, request: Request, choice: dict[str, Any], told: dict[str, Any], finish: Any) -> Answer:
        text, log_probs = choice.get("text"), told.get("token_logprobs")
        if not isinstance(text, str) or not isinstance(log_probs, list):
            raise BadAnswer("text, token_logprobs: found none, expected both")
        assert self.tokenizer is not None, "refused before"
        pieces = told.get("tokens") if isinstance(told.get("tokens"), list) else []
        tokens, ends = self.tokenizer.encode(text), request.params.stop_ids
        is_ended = finish == "stop" and len(ends) > 0
        if is_ended:
            named = [each for each in ends if pieces and self._names.get(each) == pieces[-1]]
            tokens.append((*named, *ends)[0])
        lacks_last = is_ended and len(log_probs) == len(tokens) - 1
        if len(log_probs) != len(tokens) - lacks_last:
            raise BadAnswer(
                f"found {len(log_probs)} log-probabilities for a text of {len(tokens)} tokens of "
                f"{self.tokenizer.path}; is it the model's tokenizer? vLLM tells the ids themselves"
            )
        if pieces:
            self._check_pieces(tokens[: len(log_probs)], pieces)
        return Answer(tokens=tokens, log_probs=log_probs, finish=finish, kind=self.log_probs, lacks_last=lacks_last)

    def _check_pieces(self, tokens: list[int], pieces: list[Any]) -> None:
        """Refuse tokens that cut the text elsewhere than the server did, whose log-probabilities are of others."""
        assert self.tokenizer is not None, "refused before"
        for at, (token, piece) in enumerate(itertools.zip_longest(tokens, pieces)):
            if token is None or not self._may_be(token, piece):
                text = "nothing" if token is None else repr(self.tokenizer.decode([token]))
                raise BadAnswer(
                    f"tokens: found {piece!r:.40} at {at}, and {self.tokenizer.path} has {text} there, whose "
                    "log-probability was not told; is it the model's tokenizer? vLLM tells the ids themselves"
                )

    def _may_be(self, token: int, piece: Any) -> bool:
        """Return whether a server may tell of a token by this piece: its text, its name, or its id."""
        if not isinstance(piece, str):
            return bool(piece == token)
        if named := _TOKEN_ID.fullmatch(piece):
            return int(named[1]) == token
        assert self.tokenizer is not None, "refused before"
        text = self.tokenizer.decode([token])
        # Servers differ in how they tell parts of a character, and in whether a text begins with its space.
        is_part = "\ufffd" in text
        return is_part or piece.removeprefix(" ") == text.removeprefix(" ") or piece == self._names.get(token)

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        assert self.tokenizer is not None, "refused before"
        return self.tokenizer.pieces()


def _is_whole(tokens: Any, finish: str, request: Request) -> bool:
    """Return whether a server that was not asked for ids tells those of the whole response, its end included."""
    if not isinstance(tokens, list) or not tokens:
        return False
    return finish == "length" or tokens[-1] in request.params.stop_ids


def find_model(lines: Lines, settings: SamplingEngineConfig) -> tuple[str, bool]:
    """Return the servers' name for the model, and whether the servers are vLLM's.

    Raises:
        EngineError: They do not answer, have no such model, or several and none is named.
    """
    try:
        url, answer = ask_once(lines, "/v1/models", settings)
    except Refused as error:
        raise EngineError(f"{error}; look at rollout.engine.urls and auth_env") from None
    listed = answer.get("data") if isinstance(answer, dict) else None
    models = {each["id"]: each for each in listed or [] if isinstance(each, dict) and isinstance(each.get("id"), str)}
    if not models:
        raise EngineError(f"{url}/v1/models: found no model; is that an OpenAI-compatible server?")
    if settings.model is None and len(models) > 1:
        raise EngineError(f"{url}: found models {', '.join(models)}; name one of them in rollout.engine.model")
    chosen = next(iter(models)) if settings.model is None else settings.model
    if chosen not in models:
        raise EngineError(f"{url}: rollout.engine.model={chosen!r}: found {', '.join(models)}; name one of them")
    return chosen, models[chosen].get("owned_by") == "vllm"


def _ids(tokens: Any) -> list[int]:
    """Return the ids of tokens written as ``token_id:7``."""
    found = [_TOKEN_ID.fullmatch(each) for each in tokens or [] if isinstance(each, str)]
    if not found or not all(found) or len(found) != len(tokens):
        raise BadAnswer("token_ids: found none; this vLLM does not tell them: use a newer one")
    return [int(each[1]) for each in found if each is not None]


def _prompt_log_probs(request: Request, choice: dict[str, Any]) -> list[Any]:
    """Return log-probabilities of the prompt's tokens but the first, from a mapping of ids at each place."""
    places = choice.get("prompt_logprobs")
    tokens = request.prompt.tolist()
    if not isinstance(places, list) or len(places) != len(tokens):
        raise BadAnswer(f"prompt_logprobs: found none or others, expected {len(tokens)} places")
    try:
        return [place[str(token)]["logprob"] for place, token in zip(places[1:], tokens[1:], strict=True)]
    except (TypeError, KeyError):
        raise BadAnswer("prompt_logprobs: found a place without its token") from None
