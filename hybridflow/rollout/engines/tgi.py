"""Servers that speak ``/generate`` of text-generation-inference, which takes text and tells token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.data.tokenizer import Tokenizer, start_of
from hybridflow.rollout.engines.answers import Answer, num_begun, num_left
from hybridflow.rollout.engines.wire import BadAnswer
from hybridflow.rollout.request import Request, SamplingParams

_UNKNOWN = {
    "min_new_tokens": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    # It has one, of another meaning: it counts the prompt too.
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "bad_ids": (),
    "bad": (),
}
"""Parameters that it does not know, and the values that ask for nothing."""

_FINISH: dict[str, Literal["stop", "length"]] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclass(frozen=True)
class Tgi:
    """See ``http_engine.Api``. Its log-probabilities are those of the distribution sampled from.

    Attributes:
        tokenizer: The model's own: a prompt is sent as text, which must be read as the same tokens.
    """

    path = "/generate"
    tokenizer: Tokenizer

    def refusal(self, request: Request) -> str | None:
        """See ``Api``."""
        for name, neutral in _UNKNOWN.items():
            if getattr(request.params, name) != neutral:
                return f"{name}={getattr(request.params, name)}: TGI's interface does not know it"
        if num_begun(request) > 0:
            return "TGI takes text, and does not go on from tokens"
        tokens, start = request.prompt.tolist(), start_of(self.tokenizer)
        if start + self.tokenizer.encode(self._text(request)) != tokens:
            return "TGI takes text, and that of the prompt is not read as the same tokens"
        return None

    def body(self, request: Request, seed: int) -> dict[str, Any]:
        """See ``Api``."""
        params = request.params
        asked: dict[str, Any] = {
            "max_new_tokens": num_left(request),
            "do_sample": not params.greedy,
            "seed": seed,
            "stop": self._stop(params),
            "details": True,
            "decoder_input_details": params.with_prompt_log_probs,
            "return_full_text": False,
        }
        # It refuses the values that cut nothing.
        neutral: dict[str, float] = {"repetition_penalty": 1}
        if not params.greedy:
            # With any of these it samples, whatever do_sample says.
            asked["temperature"] = params.temperature
            neutral |= {"top_k": 0, "top_p": 1}
        asked |= {name: getattr(params, name) for name, none in neutral.items() if getattr(params, name) != none}
        return {"inputs": self._text(request), "parameters": asked}

    def read(self, request: Request, answer: Any) -> Answer:
        """See ``Api``."""
        answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
        details = answer.get("details") if isinstance(answer, dict) else None
        if not isinstance(details, dict):
            raise BadAnswer("details: found none, expected those of the sampled tokens")
        finish = _FINISH.get(str(details.get("finish_reason")))
        if finish is None:
            raise BadAnswer(f"finish_reason={details.get('finish_reason')!r}: expected one of {', '.join(_FINISH)}")
        tokens, log_probs = _columns(details.get("tokens"), "tokens")
        prompt_log_probs = None
        if request.params.with_prompt_log_probs:
            prompt, scores = _columns(details.get("prefill"), "prefill")
            if prompt != request.prompt.tolist():
                raise BadAnswer("prefill: found another prompt than was sent; does the server cut or add to it?")
            prompt_log_probs = scores[1:]
        return Answer(
            tokens=tokens, log_probs=log_probs, finish=finish, kind="processed", prompt_log_probs=prompt_log_probs
        )

    def _stop(self, params: SamplingParams) -> list[str]:
        """Return the texts to end at: TGI knows its model's ends alone, and reads special tokens as their names."""
        others = [token for token in params.stop_ids if token not in self.tokenizer.stop_ids]
        pieces = self.tokenizer.pieces() if others else {}
        named = {token: pieces[token] for token in others if token in pieces}
        return [*params.stop, *(name for token, name in named.items() if self.tokenizer.special_id(name) == token)]

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.prompt.tolist()[len(start_of(self.tokenizer)) :])


def _columns(rows: Any, what: str) -> tuple[list[Any], list[Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadAnswer(f"{what}: found none, expected a list with ids and log-probabilities")
    return [row.get("id") for row in rows], [row.get("logprob") for row in rows]
