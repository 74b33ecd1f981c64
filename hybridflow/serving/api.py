"""Requests and answers in the form of OpenAI's interface. No torch, no sockets.

What is asked for and not computed is refused rather than passed over, but for names that say nothing about the text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.data.chat import KWARGS, chat_template, read_kwargs
from hybridflow.data.images import Image, with_images
from hybridflow.data.tokenizer import Tokenizer, split_stop
from hybridflow.errors import ContextError, DataError
from hybridflow.rollout.request import MOST_TOP
from hybridflow.rollout.texts import text_before_stop
from hybridflow.serving.images import Looker, addressed
from hybridflow.serving.options import Options, check_ids, check_together, is_int, read_options
from hybridflow.serving.prompts import encode_chat, encode_text
from hybridflow.serving.scores import Scored, Tops, chat_scores, text_scores
from hybridflow.serving.tools import numbered, read_tools, split_calls

_MOST_SAMPLES = 256
_FEWEST_TOKENS = 16
"""``max_tokens`` of a completion that names none, as OpenAI has it."""

_TOO_LONG = "context_length_exceeded"
"""By this code harnesses tell a prompt that does not fit from a wrong request, and go on with the others."""

_PASSED_OVER = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
_NEUTRAL = {"response_format": {"type": "text"}, "modalities": ["text"], "top_k": -1}
"""Values that ask for what is done anyhow."""

# Name here -> name in the interface, where they differ.
_SAMPLING: dict[str, tuple[str, ...]] = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
    "stop_ids": ("stop_token_ids",),
    "bad": ("bad_words",),
    **{
        name: (name,)
        for name in (
            *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "logit_bias", "stop", "seed"),
        )
    },
}
_THEIRS = {name: theirs[0] for name, theirs in _SAMPLING.items()} | {"bad_ids": "bad_words"}
_COMMON = frozenset({"model", "stream", "stream_options", "logprobs", "ignore_eos"})
_COMPLETION = frozenset({"prompt", "echo", "best_of", "suffix"})
_CHAT = frozenset({"messages", "top_logprobs", KWARGS, "reasoning_effort", "tools", "tool_choice"})


class ApiError(Exception):
    """A request that is refused.

    Attributes:
        status: Of HTTP.
        code: Names what clients look for; None: nothing.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients expect it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, checked.

    Attributes:
        is_chat: Whether it is a conversation.
        prompts: Tokens of each prompt.
        images: Those of the only prompt of a conversation.
        image_row: The number that the ids of their tokens have.
        count: Samples of each.
        params: Fields of ``SamplingParams``, as JSON.
        is_streamed: Whether pieces are sent as they come.
        with_usage: Whether a stream ends with the counts.
        with_log_probs: Whether log-probabilities are sent.
        echo: Whether the prompt is part of the text.
        has_tools: Whether calls of tools are looked for.
        is_prompt_alone: Whether nothing but the prompt is wanted; a token is sampled all the same.
    """

    is_chat: bool
    prompts: list[list[int]]
    images: tuple[Image, ...]
    image_row: int
    count: int
    params: Options
    is_streamed: bool
    with_usage: bool
    with_log_probs: bool
    echo: bool
    has_tools: bool
    is_prompt_alone: bool

    @property
    def stop(self) -> Sequence[str]:
        """Return the texts that end a sample."""
        stop: Sequence[str] = self.params.get("stop", ())
        return stop


@dataclass(frozen=True, kw_only=True)
class Served:
    """Model that is served.

    Attributes:
        name: What clients call it.
        tokenizer: None: it takes and gives token ids alone.
        vocab_size: True vocabulary.
        max_context: Longest sequence, in the model's context and the key-value cache.
        chat_template_kwargs: Variables of the chat template where a request has no others.
        looker: Looks at images; None: messages are text.
    """

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_context: int
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    looker: Looker | None = None


def read_ask(body: bytes, served: Served, *, is_chat: bool) -> Ask:
    """Read and check a request's body.

    Raises:
        ApiError: It is malformed, or asks for what is not there.
    """
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body is {type(fields).__name__}, expected a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None and name not in _PASSED_OVER}
    fields = {name: value for name, value in fields.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
    try:
        return _ask(fields, served, is_chat=is_chat)
    except ContextError as error:
        raise ApiError(400, str(error), _TOO_LONG) from None
    except DataError as error:
        raise ApiError(400, _renamed(str(error))) from None


def check_name(name: Any, served: Served) -> None:
    """Refuse another model than the one that is served.

    Raises:
        ApiError: It is another.
    """
    if name != served.name:
        raise ApiError(404, f"no model {name!r:.80} here; the one that is served is {served.name!r}", "model_not_found")


def _renamed(message: str) -> str:
    """Return what is wrong with a sampling parameter, with the interface's names in the place of the engine's."""
    return re.sub(r"(?<=^request: )\w+|max_new_tokens(?==)", lambda name: _THEIRS.get(name[0], name[0]), message)


def _ask(fields: Mapping[str, Any], served: Served, *, is_chat: bool) -> Ask:
    known = _COMMON | (_CHAT if is_chat else _COMPLETION) | {name for names in _SAMPLING.values() for name in names}
    if "response_format" in fields:
        raise ApiError(400, "response_format: no form is enforced; leave it out, and ask for the form in a message")
    if strangers := sorted(set(fields) - known):
        raise ApiError(400, f"unknown parameters {', '.join(strangers)}; known are {', '.join(sorted(known))}")
    check_name(fields.get("model", served.name), served)
    if fields.get("suffix"):
        raise ApiError(400, "suffix is not computed; leave it out")
    echo = _flag(fields, "echo")
    is_prompt_alone = echo and fields.get("max_tokens") == 0
    if is_prompt_alone:
        fields = {**fields, "max_tokens": 1}
    options = _sampling(fields, served)
    count = options.pop("n", 1)
    if "best_of" in fields and fields["best_of"] != count:
        raise ApiError(400, f"best_of={fields['best_of']!r:.20} is not computed; leave it out")
    template = None if served.tokenizer is None or not is_chat else chat_template(served.tokenizer)
    tools = read_tools(fields, template)
    image_row, images = 0, tuple[Image, ...]()
    if is_chat:
        prompt, image_row, images = _chat_prompt(fields, tools, served)
        prompts = [prompt]
    else:
        prompts = _text_prompts(fields, served)
    if not all(prompts):
        raise ApiError(400, "a prompt has no tokens; give at least one")
    if len(prompts) * count > _MOST_SAMPLES:
        raise ApiError(400, f"{len(prompts)} prompts of n={count} samples: at most {_MOST_SAMPLES} samples a request")
    _limit_lengths(options, prompts, served, is_chat=is_chat)
    if served.tokenizer is None and (options.get("stop") or options.get("bad")):
        raise ApiError(400, "stop and bad_words are texts, and the model has no tokenizer; use stop_token_ids")
    num_top = _num_top(fields, is_chat=is_chat)
    with_log_probs = num_top is not None
    is_streamed = _flag(fields, "stream")
    if is_streamed and echo:
        raise ApiError(400, "echo cannot be streamed; leave one of them out")
    if with_log_probs:
        options |= {"num_top_log_probs": num_top, "with_prompt_log_probs": echo}
    return Ask(
        is_chat=is_chat,
        prompts=prompts,
        images=images,
        image_row=image_row,
        count=count,
        params=options,
        is_streamed=is_streamed,
        with_usage=_with_usage(fields),
        with_log_probs=with_log_probs,
        echo=echo,
        has_tools=bool(tools),
        is_prompt_alone=is_prompt_alone,
    )


def _limit_lengths(options: Options, prompts: Sequence[list[int]], served: Served, *, is_chat: bool) -> None:
    """Set the length limits as the engine counts them; the parameters are checked together.

    Raises:
        ApiError: The context is too short for it.
        DataError: The parameters contradict each other.
    """
    longest = max(map(len, prompts))
    if "max_new_tokens" not in options:
        options["max_new_tokens"] = max(1, served.max_context - longest) if is_chat else _FEWEST_TOKENS
        options["max_new_tokens"] = max(1, min(options["max_new_tokens"], served.max_context - longest))
    if longest + options["max_new_tokens"] > served.max_context:
        raise ApiError(
            400,
            f"a prompt of {longest} tokens with max_tokens={options['max_new_tokens']} exceeds the context of "
            f"{served.max_context} tokens; shorten the prompt, or ask for fewer",
            _TOO_LONG,
        )
    check_together(options, served.vocab_size, "request")
    if options.get("min_new_tokens"):
        # Elsewhere the token that stops is not counted.
        options["min_new_tokens"] = min(options["min_new_tokens"] + 1, options["max_new_tokens"])


def _sampling(fields: Mapping[str, Any], served: Served) -> Options:
    sampling: Options = {}
    for name, theirs in _SAMPLING.items():
        values = [fields[each] for each in theirs if each in fields]
        if len(values) > 1:
            raise ApiError(400, f"{' and '.join(theirs)} mean the same; give one")
        if values:
            sampling[name] = values[0]
    options = read_options(sampling, "request")
    ends = () if served.tokenizer is None or _flag(fields, "ignore_eos") else served.tokenizer.stop_ids
    # A special token is in no text, so a text that names it stands for the token.
    texts, named = split_stop(options.get("stop", ()), served.tokenizer)
    options["stop_ids"] = tuple(dict.fromkeys((*ends, *options.get("stop_ids", ()), *named)))
    if named:
        options["stop"] = texts
    texts, named = split_stop(options.get("bad", ()), served.tokenizer)
    if named:
        options |= {"bad": texts, "bad_ids": tuple((token,) for token in named)}
    return options


def _chat_prompt(
    fields: Mapping[str, Any], tools: list[Any], served: Served
) -> tuple[list[int], int, tuple[Image, ...]]:
    """Return a conversation's tokens, and its images with their number."""
    messages = addressed(_given(fields, "messages"))
    if served.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer, so it takes no messages; use /v1/completions with token ids")
    effort = {name: fields[name] for name in ("reasoning_effort",) if name in fields}
    kwargs = {**served.chat_template_kwargs, **effort, **read_kwargs(fields.get(KWARGS, {}), KWARGS)}
    ids, addresses = encode_chat(messages, served.tokenizer, served.max_context, tools or None, kwargs)
    if not addresses:
        return ids, 0, ()
    if served.looker is None:
        raise ApiError(400, "messages: have images, and the model is served without; send text")
    row, images = served.looker.look(addresses)
    return with_images(ids, images, row, "messages"), row, images


def _text_prompts(fields: Mapping[str, Any], served: Served) -> list[list[int]]:
    value = _given(fields, "prompt")
    several = value if isinstance(value, list) and not all(map(is_int, value)) else [value]
    if len(several) > _MOST_SAMPLES:
        raise ApiError(400, f"{len(several)} prompts; at most {_MOST_SAMPLES} in a request")
    return [_prompt(each, served) for each in several]


def _given(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None or value == [] or value == "":
        raise ApiError(400, f"{name} is missing or empty")
    return value


def _prompt(value: Any, served: Served) -> list[int]:
    if isinstance(value, list) and value and all(map(is_int, value)):
        check_ids(value, served.vocab_size, "prompt")
        return list(value)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"prompt: found {value!r:.60}, expected text, a list of token ids, or a list of those")
    if served.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer; give token ids as the prompt")
    return encode_text(value, served.tokenizer, served.max_context)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name}: found {value!r:.60}, expected true or false")
    return value


def _num_top(fields: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """Return how many of the likeliest tokens to tell beside each token's log-probability; None: neither is wanted."""
    name = "top_logprobs" if is_chat else "logprobs"
    value = fields.get(name, 0 if is_chat and _flag(fields, "logprobs") else None)
    if value is None:
        return None
    if not is_int(value) or not 0 <= value <= MOST_TOP:
        raise ApiError(400, f"{name}: found {value!r:.60}, expected an integer from 0 to {MOST_TOP}")
    if is_chat and not _flag(fields, "logprobs"):
        if value:
            raise ApiError(400, f"top_logprobs={value} needs logprobs=true beside it")
        return None
    return int(value)


def _with_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise ApiError(400, f"stream_options: found {options!r:.60}, expected {{'include_usage': true or false}}")
    return _flag(options, "include_usage")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Outcome of one sample.

    Attributes:
        tokens: Of the response.
        log_probs: Of each of them.
        prompt_log_probs: Of the prompt's tokens but the first; None: not asked for.
        top_log_probs: The likeliest tokens in the place of each of ``tokens``; None: not asked for.
        prompt_top_log_probs: The same of the prompt's tokens but the first.
        finish: ``stop``, ``length`` or ``failed``.
        error: Why it failed.
        is_refused: Whether it failed since what was asked for cannot be had here.
    """

    tokens: list[int]
    log_probs: list[float | None]
    prompt_log_probs: list[float | None] | None
    finish: str
    error: str | None
    is_refused: bool = False
    top_log_probs: Tops | None = None
    prompt_top_log_probs: Tops | None = None


def failure(sample: Sample) -> ApiError:
    """Return the error for a sample that failed."""
    if sample.is_refused:
        said = re.sub(r"\w+_\w+", lambda name: _THEIRS.get(name[0], name[0]), str(sample.error))
        return ApiError(400, f"the request: {said}")
    return ApiError(500, f"generating failed: {sample.error}")


def completion(ask: Ask, served: Served, samples: Sequence[Sample], answer_id: str) -> dict[str, Any]:
    """Return the whole answer; samples prompt by prompt, none of which failed."""
    if ask.is_prompt_alone:
        samples = [_without_response(sample) for sample in samples]
    make = _chat_choice if ask.is_chat else _text_choice
    choices = [make(ask, served, sample, index) for index, sample in enumerate(samples)]
    return {**head(ask, served, answer_id), "choices": choices, "usage": usage(ask, samples)}


def _without_response(sample: Sample) -> Sample:
    tops: Tops | None = None if sample.top_log_probs is None else []
    return replace(sample, tokens=[], log_probs=[], top_log_probs=tops, finish="length")


def head(ask: Ask, served: Served, answer_id: str, *, is_piece: bool = False) -> dict[str, Any]:
    """Return the first fields of every answer, or piece of one."""
    kind = "chat.completion" if ask.is_chat else "text_completion"
    kind += ".chunk" if ask.is_chat and is_piece else ""
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": served.name}


def piece(
    ask: Ask, served: Served, text: str, new: Scored, index: int, finish: str | None, *, is_first: bool
) -> dict[str, Any]:
    """Return a choice in a piece of a stream, the first of that choice or a later one; with tools the only one.

    Args:
        ask: The request.
        served: What is served.
        text: What the piece adds to the choice's text.
        new: The tokens whose log-probabilities no earlier piece has.
        index: Of the choice.
        finish: Why the choice ends; None: it goes on.
        is_first: Whether this is the choice's first piece.
    """
    scores: dict[str, Any] | None = None
    if ask.with_log_probs:
        scores = (chat_scores if ask.is_chat else text_scores)(served.tokenizer, *new)
    if ask.is_chat:
        said, calls = split_calls(text) if ask.has_tools else (text, [])
        delta: dict[str, Any] = {"content": said} if said or is_first else {}
        delta = {"role": "assistant", **delta} if is_first else delta
        delta |= {"tool_calls": numbered(calls)} if calls else {}
        finish = "tool_calls" if calls else finish
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}


def usage(ask: Ask, samples: Sequence[Sample]) -> dict[str, int]:
    """Return the numbers of tokens."""
    asked, made = sum(map(len, ask.prompts)), sum(len(sample.tokens) for sample in samples)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def models(served: Served, since_s: int) -> dict[str, Any]:
    """Return the list of models: one."""
    model = {"id": served.name, "object": "model", "created": since_s, "owned_by": "hybridflow"}
    return {"object": "list", "data": [{**model, "max_model_len": served.max_context}]}


def text_of(ask: Ask, served: Served, tokens: Sequence[int]) -> str:
    """Return the text of a sample; empty without a tokenizer."""
    return "" if served.tokenizer is None else text_before_stop(tokens, ask.stop, served.tokenizer)


def _text_choice(ask: Ask, served: Served, sample: Sample, index: int) -> dict[str, Any]:
    prompt = ask.prompts[index // ask.count]
    text, tokens, log_probs = text_of(ask, served, sample.tokens), sample.tokens, list(sample.log_probs)
    tops = sample.top_log_probs
    if ask.echo:
        text = ("" if served.tokenizer is None else served.tokenizer.decode(prompt)) + text
        tokens = [*prompt, *tokens]
        log_probs = [None, *(sample.prompt_log_probs or ()), *log_probs]
        tops = None if tops is None else [None, *(sample.prompt_top_log_probs or ()), *tops]
    choice = {"index": index, "text": text, "token_ids": tokens, "finish_reason": sample.finish, "logprobs": None}
    if ask.with_log_probs:
        choice["logprobs"] = text_scores(served.tokenizer, tokens, log_probs, tops)
    return choice


def _chat_choice(ask: Ask, served: Served, sample: Sample, index: int) -> dict[str, Any]:
    text = text_of(ask, served, sample.tokens)
    text, calls = split_calls(text) if ask.has_tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    finish = "tool_calls" if calls else sample.finish
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": finish, "logprobs": None}
    choice["token_ids"] = sample.tokens
    if ask.with_log_probs:
        choice["logprobs"] = chat_scores(served.tokenizer, sample.tokens, sample.log_probs, sample.top_log_probs)
    return choice
