"""Contract tests of what generates: an actor's own ``generate``, and engines that ask a server or vLLM."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import HybridflowError
from hybridflow.models.user_model import said
from hybridflow.rollout.request import Request, SamplingParams, expand
from hybridflow.testing.subject import Fail, Subject, largest, sequences

NUM_SAMPLES = 512
"""Tokens that are sampled to see whether ``generate`` samples from what ``forward`` says."""


def check_generate(
    subject: Subject, tried: list[Tensor], vocab_size: int, max_new_tokens: int, tolerance: float
) -> None:
    """Check ``generate`` of a user-defined class, as ``models.user_model.ActorModel`` describes it.

    See ``check_actor``.

    Args:
        subject: The actor.
        tried: Prompts, ``[tokens]`` each.
        vocab_size: Token ids that it knows.
        max_new_tokens: Of the responses that are asked for.
        tolerance: Largest difference of log-probabilities.
    """
    pad_id, most = vocab_size - 1, max_new_tokens
    greedy, told = _generate(subject, tried, most, pad_id)
    wanted = _likeliest(subject, tried, most, vocab_size)
    if greedy.shape != wanted.shape or not torch.equal(greedy, wanted):
        subject.fail(
            "greedy",
            f"found {greedy.tolist()}",
            f"{wanted.tolist()}, what forward says is likeliest",
            "heed attention_mask (padding comes before the prompt and has no position); end at eos_token_id alone",
        )
    if told is not None:
        _check_told(subject, tried, greedy, told, vocab_size, tolerance)
    first = int(greedy[0, 0])
    ended, _ = _generate(subject, tried, most, pad_id, eos_token_id=[first])
    if int(ended[0, 0]) != first or not (ended[0, 1:] == pad_id).all():
        found = f"after eos_token_id={first} came {ended[0, 1:].tolist()}"
        subject.fail("eos", found, f"padding alone, {pad_id}", "end a response at an end of sequence")
    _check_distribution(subject, tried[0], pad_id, vocab_size)


def _generate(
    subject: Subject, prompts: list[Tensor], most: int, pad_id: int, **sampling: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the new tokens, ``[samples, new]``, with their log-probabilities if they are reported."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    device = next(subject.module.parameters()).device
    asked = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": [], **sampling}
    with torch.no_grad():
        output = subject.module.generate(  # type: ignore[operator]
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=most, pad_token_id=pad_id, **asked
        )
    rows, log_probs = output if isinstance(output, tuple) else (output, None)
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(ids) or rows.is_floating_point():
        wanted = f"[samples, tokens + new] of ids, {len(ids)} samples"
        subject.fail("generate", f"found {said(rows)}", wanted, "return prompts and responses in one tensor")
    rows = rows.cpu()
    if not torch.equal(rows[:, :width], ids):
        remedy = "return prompts and responses, with the padding that the prompts came with"
        subject.fail("generate", "rows do not begin with what was given", "the prompts first", remedy)
    if not 0 < rows.shape[1] - width <= most:
        found = f"found {rows.shape[1] - width} new tokens"
        subject.fail("max_new_tokens", found, f"1 to {most}", "stop after max_new_tokens")
    return rows[:, width:], None if log_probs is None else log_probs.cpu()


def _likeliest(subject: Subject, prompts: list[Tensor], count: int, vocab_size: int) -> Tensor:
    """Return the tokens of greedy decoding by ``forward``, ``[samples, count]``."""
    found = []
    with torch.no_grad():
        for prompt in prompts:
            known = prompt
            for _ in range(count):
                logits = subject.ask(known[None])
                known = torch.cat([known, logits[0, -1, :vocab_size].argmax().cpu()[None]])
            found.append(known[len(prompt) :])
    return torch.stack(found)


@torch.no_grad()
def _check_told(
    subject: Subject, prompts: list[Tensor], new: Tensor, told: Tensor, vocab_size: int, tolerance: float
) -> None:
    """Check that log-probabilities from ``generate`` equal those of ``forward``."""
    if not isinstance(told, Tensor) or told.shape != new.shape:
        wanted = f"[samples, new] = {[*new.shape]}"
        subject.fail("log_probs", f"found {said(told)}", wanted, "tell one for each new token")
    for row, prompt in enumerate(prompts):
        logits = subject.ask(torch.cat([prompt, new[row]])[None])[0, :, :vocab_size].float().cpu()
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, new[row][:, None])[:, 0]
        if not ((told[row].float() - expected).abs() <= tolerance).all():
            found = f"those of generate differ by {largest(told[row].float(), expected)} from those of forward"
            remedy = "tell log softmax(logits / temperature) of the token, before cuts"
            subject.fail("log_probs", found, f"at most {tolerance}", remedy)


def _check_distribution(subject: Subject, prompt: Tensor, pad_id: int, vocab_size: int) -> None:
    """Check that first tokens are sampled as often as ``forward`` says."""
    with torch.no_grad():
        logits = subject.ask(prompt[None])[0, -1, :vocab_size].float().cpu()
    for temperature in (1.0, 0.5):
        expected = (logits / temperature).softmax(-1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sampled, _ = _generate(subject, [prompt] * NUM_SAMPLES, 1, pad_id, do_sample=True, temperature=temperature)
        counts = torch.bincount(sampled[:, 0], minlength=vocab_size)[:vocab_size]
        distance = float((counts / NUM_SAMPLES - expected).abs().sum() / 2)
        # What chance gives is 0.4 of the sum on average.
        allowed = float((expected * (1 - expected) / NUM_SAMPLES).sqrt().sum()) + 0.02
        if distance > allowed:
            subject.fail(
                "distribution",
                f"first tokens sampled at temperature {temperature} are {distance:.3f} in total variation from forward",
                f"at most {allowed:.3f}",
                "sample from softmax(logits / temperature), without cuts where top_k=0 and top_p=1",
            )


def check_engine(engine: Any, vocab_size: int, max_new_tokens: int, seed: int, fail: Fail) -> None:
    """Check an engine as ``rollout.request.Engine``: one that asks a server, or vLLM; see ``check_actor``.

    Args:
        engine: The engine.
        vocab_size: Token ids that its model knows.
        max_new_tokens: Of the responses that are asked for.
        seed: Of the prompts.
        fail: See ``subject.failing``.
    """
    if not callable(getattr(engine, "generate", None)):
        wanted = "a torch.nn.Module, or an engine with generate(requests)"
        fail("settings", f"found {type(engine).__name__}", wanted, "see docs/extend.md")

    def ask(**sampling: Any) -> list[Any]:
        params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
        requests = [
            each
            for prompt_index, prompt in enumerate(sequences(vocab_size, seed))
            for each in expand(Request(prompt=prompt, params=params, prompt_index=prompt_index), 2)
        ]
        try:
            responses = list(engine.generate(requests))
        except HybridflowError as error:
            fail("response", str(error), "a response to each request", "see what the engine says")
        if len(responses) != len(requests):
            fail(
                "length", f"found {len(responses)} responses", f"{len(requests)}", "answer each request once, in order"
            )
        for each in responses:
            _check_response(each, params, vocab_size, fail)
        return responses

    greedy, again = ask(greedy=True), ask(greedy=True)
    for one, other in zip(greedy, again, strict=True):
        if one.tokens.tolist() != other.tokens.tolist():
            found = f"the likeliest tokens are {one.tokens.tolist()}, then {other.tokens.tolist()}"
            fail("determinism", found, "the same twice", "ask for temperature 0 where a request is greedy")
    ask()
    first = int(greedy[0].tokens[0])
    ended = ask(greedy=True, stop_ids=(first,))[0].tokens.tolist()
    if ended != [first]:
        fail("eos", f"found {ended} with stop_ids=({first},)", f"[{first}]", "pass on stop_ids, and end there")


def _check_response(each: Any, params: SamplingParams, vocab_size: int, fail: Fail) -> None:
    if each.finish == "failed":
        fail("response", f"failed: {each.error}", "tokens", "see what the engine says")
    tokens, log_probs = each.tokens.tolist(), each.log_probs.tolist()
    if not 1 <= len(tokens) <= params.max_new_tokens:
        fail("max_new_tokens", f"found {len(tokens)} tokens", f"1 to {params.max_new_tokens}", "pass on max_new_tokens")
    if not all(0 <= token < vocab_size for token in tokens):
        fail("tokens", f"found {tokens}", f"ids from 0 to {vocab_size - 1}", "serve the model that vocab_size is of")
    stops = [at for at, token in enumerate(tokens) if token in params.stop_ids]
    if stops and stops[0] != len(tokens) - 1:
        fail("eos", f"found {tokens}, with an end at {stops[0]}", "nothing behind it", "pass on stop_ids")
    if (each.finish == "stop") != bool(stops) or (each.finish == "length" and len(tokens) != params.max_new_tokens):
        fail("finish", f"found {each.finish!r} of {tokens}", "'stop' at an end, else 'length'", "tell why it ended")
    if len(log_probs) != len(tokens):
        fail("log_probs", f"found {len(log_probs)}", f"{len(tokens)}, one for each token", "tell them all")
    if not all(math.isnan(each) or each <= 1e-3 for each in log_probs) or any(map(math.isinf, log_probs)):
        fail("log_probs", f"found {log_probs}", "finite numbers of at most 0", "tell natural logarithms")
