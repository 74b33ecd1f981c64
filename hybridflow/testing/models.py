"""Contract tests of models: what an actor's ``forward`` and a critic's ``values`` compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from hybridflow.checkpoint.formats.in_memory import in_memory_info, is_model
from hybridflow.errors import ConfigError, ContractError
from hybridflow.models.user_model import said
from hybridflow.testing.generating import check_engine, check_generate
from hybridflow.testing.subject import LENGTHS, Fail, Subject, failing, largest, sequences, side_by_side

Told = Callable[[Tensor], Tensor]
"""From what a model computes to what is compared."""


def check_actor(
    actor: Any,
    *,
    vocab_size: int | None = None,
    max_new_tokens: int = 5,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> None:
    """Refuse an actor that a job could not train, or would train wrongly.

    A model is checked for: shape, number format and finiteness of its logits; equal results of two calls; no effect on
    a token of what follows it or of what else is in the batch; probabilities that add up to 1; a gradient for every
    parameter. ``generate``, where it has one, is checked for: answers that begin with the prompts, and end at
    ``max_new_tokens`` or at an end of sequence; the likeliest token without sampling; samples from the distribution of
    ``forward``; and its log-probabilities. An engine (``HttpEngine``, ``VllmEngine``) is checked like ``generate``.

    Args:
        actor: A class of one's own (``models.user_model.ActorModel``), a causal language model of ``transformers``, a
            ``GPTModel``, or an engine.
        vocab_size: Token ids to try; None: the actor's own.
        max_new_tokens: Of the responses that are asked for, at least 2.
        tolerance: Largest difference of log-probabilities that is rounding.
        seed: Of the tokens that are tried.

    Raises:
        ContractError: Something is wrong; names the check.
    """
    fail = failing("check_actor", type(actor).__name__)
    if not isinstance(actor, nn.Module):
        check_engine(actor, _vocabulary(actor, vocab_size, fail), max_new_tokens, seed, fail)
        return
    _check_known(actor, fail)
    vocab_size = _vocabulary(actor, vocab_size, fail)
    subject, tried = Subject(actor, fail, _ask_logits(actor)), sequences(vocab_size, seed)
    _check_logits(subject, tried, vocab_size)
    _check_computed(subject, tried, tolerance, lambda logits: logits[..., :vocab_size].float().log_softmax(-1))
    if not is_model(actor) and callable(getattr(actor, "generate", None)):
        check_generate(subject, tried, vocab_size, max_new_tokens, tolerance)


def check_critic(critic: Any, *, vocab_size: int | None = None, tolerance: float = 1e-4, seed: int = 0) -> None:
    """Refuse a critic that a job could not train, or would train wrongly.

    The checks are those of ``check_actor``, on values: one finite number for each token.

    Args:
        critic: A class of one's own (``models.user_model.CriticModel``), a scorer or a language model of
            ``transformers``, or a ``GPTModel``; of a language model, which gets a new head, the logits are looked at.
        vocab_size: Token ids to try; None: the critic's own, or 32.
        tolerance: Largest difference of values that is rounding.
        seed: Of the tokens that are tried.

    Raises:
        ContractError: Something is wrong; names the check.
    """
    fail = failing("check_critic", type(critic).__name__)
    if not isinstance(critic, nn.Module):
        fail("settings", f"found {type(critic).__name__}", "a torch.nn.Module", "subclass hybridflow.CriticModel")
    _check_known(critic, fail)
    known = _own_vocabulary(critic) or 32
    tried = sequences(known if vocab_size is None else vocab_size, seed)
    subject = Subject(critic, fail, _ask_values(critic))
    ids, mask = side_by_side(tried)
    with torch.no_grad():
        found = subject.ask(ids, mask)
    # A language model gives logits.
    dims = 3 if is_model(critic) and not hasattr(critic, "score") else 2
    if not isinstance(found, Tensor) or found.dim() != dims or found.shape[:2] != ids.shape:
        wanted = f"[samples, tokens] = {[*ids.shape]}"
        fail("shape", f"values are {said(found)}", wanted, "return one value for each token")
    _check_numbers(subject, found, "values")
    _check_computed(subject, tried, tolerance, lambda values: values.float())


def _check_known(given: nn.Module, fail: Fail) -> None:
    """Check that settings can be read off the model."""
    try:
        found = in_memory_info({"actor": given})
    except ConfigError as error:
        raise ContractError(f"settings: {error}") from error
    if not found:
        wanted = "a PreTrainedModel, a GPTModel, or a module of your own"
        fail("settings", f"found {type(given).__name__}", wanted, "subclass hybridflow.ActorModel or CriticModel")


def _own_vocabulary(model: Any) -> int | None:
    """Return the vocabulary size of a user-defined class, a GPTModel, or a model of transformers."""
    known = getattr(model, "vocab_size", None)
    known = getattr(getattr(model, "config", None), "vocab_size", None) if known is None else known
    return known if isinstance(known, int) else None


def _vocabulary(actor: Any, vocab_size: int | None, fail: Fail) -> int:
    known = _own_vocabulary(actor) if vocab_size is None else vocab_size
    if known is None:
        fail("vocab_size", "is not known of it", "a number", "give it: check_actor(…, vocab_size=…)")
    return known


def _ask_logits(actor: Any) -> Callable[[Tensor, Tensor], Any]:
    if isinstance(actor, GPTModel):
        return lambda ids, mask: actor(ids, torch.arange(ids.shape[1], device=ids.device)[None], _unseen(ids))
    if is_model(actor):
        return lambda ids, mask: actor(ids, attention_mask=mask, use_cache=False).logits
    return lambda ids, mask: actor(ids)


def _unseen(ids: Tensor) -> Tensor:
    """Return which tokens each does not see, ``[1, 1, tokens, tokens]``, as megatron-core has masks."""
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)[None, None]


def _ask_values(critic: Any) -> Callable[[Tensor, Tensor], Any]:
    if not is_model(critic):
        return lambda ids, mask: critic.values(ids, mask)
    if not hasattr(critic, "score"):
        return _ask_logits(critic)

    def values(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = critic.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        found: Tensor = critic.score(hidden)[..., 0]
        return found

    return values


def _check_logits(subject: Subject, tried: list[Tensor], vocab_size: int) -> None:
    ids, mask = side_by_side(tried)
    with torch.no_grad():
        found = subject.ask(ids, mask)
    wanted = f"[samples, tokens, vocab] = {[*ids.shape, vocab_size]}"
    is_right = isinstance(found, Tensor) and found.dim() == 3 and found.shape[:2] == ids.shape
    if not is_right or found.shape[2] < vocab_size:
        subject.fail("shape", f"logits are {said(found)}", wanted, "return logits, batch first, of every place")
    _check_numbers(subject, found, "logits")
    probabilities = found[..., :vocab_size].float().log_softmax(-1).exp().sum(-1)
    if not torch.allclose(probabilities, torch.ones_like(probabilities), atol=1e-4):
        told = f"probabilities add up to {float(probabilities.min()):.6g} to {float(probabilities.max()):.6g}"
        subject.fail("normalised", told, "1", "return logits in a format that can tell them apart")


def _check_numbers(subject: Subject, found: Tensor, what: str) -> None:
    if not found.is_floating_point():
        subject.fail("dtype", f"{what} are {found.dtype}", "a floating type", f"return {what} as they are computed")
    if not found.isfinite().all():
        count = int((~found.isfinite()).sum())
        subject.fail("finite", f"{count} of {found.numel()} {what} are not", "finite numbers", "look for overflows")


def _check_computed(subject: Subject, tried: list[Tensor], tolerance: float, told: Told) -> None:
    """Check what holds of logits and values alike."""
    ids, mask = side_by_side(tried)
    with torch.no_grad():
        found, again = told(subject.ask(ids, mask)), told(subject.ask(ids, mask))
        if not _are_equal(found, again, tolerance):
            told_difference = f"two calls differ by {largest(found, again)}"
            subject.fail("determinism", told_difference, f"at most {tolerance}", "draw no random numbers in eval()")
        _check_causal(subject, tried, found, tolerance, told)
        _check_batching(subject, tried, found, tolerance, told)
    _check_gradient(subject, ids, mask, told)


def _are_equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool(((one - other).abs() <= tolerance).all())


def _check_causal(subject: Subject, tried: list[Tensor], found: Tensor, tolerance: float, told: Told) -> None:
    """Check that another end of the longest sequence does not change its beginning."""
    ids, mask = side_by_side(tried)
    row = max(range(len(LENGTHS)), key=LENGTHS.__getitem__)
    cut = LENGTHS[row] // 2
    ids[row, cut:] = (ids[row, cut:] + 1) % (ids.max() + 1)
    changed = told(subject.ask(ids, mask))
    before, after = found[row, :cut], changed[row, :cut]
    if not _are_equal(before, after, tolerance):
        subject.fail(
            "causality",
            f"tokens from {cut} on change what is computed before them by {largest(before, after)}",
            f"at most {tolerance}",
            "let each token see itself and those before it alone (a causal attention mask)",
        )


def _check_batching(subject: Subject, tried: list[Tensor], found: Tensor, tolerance: float, told: Told) -> None:
    """Check that each sequence gives in a batch what it gives alone, whatever its padding."""
    filled = told(subject.ask(*side_by_side(tried, fill=1)))
    for row, sequence in enumerate(tried):
        here = found[row, : len(sequence)]
        other = filled[row, : len(sequence)]
        if not _are_equal(here, other, tolerance):
            difference = f"another padding id changes what is computed by {largest(here, other)}"
            subject.fail("padding", difference, f"at most {tolerance}", "let tokens see those before them alone")
        alone = told(subject.ask(*side_by_side([sequence])))[0]
        if not _are_equal(here, alone, tolerance):
            subject.fail(
                "batching",
                f"{len(sequence)} tokens alone differ by {largest(here, alone)} from the same in a batch",
                f"at most {tolerance}",
                "let neither padding nor other samples change them: positions count from the first token",
            )


def _check_gradient(subject: Subject, ids: Tensor, mask: Tensor, told: Told) -> None:
    parameters = {name: each for name, each in subject.module.named_parameters() if each.requires_grad}
    if not parameters:
        subject.fail("gradient", "no parameter requires one", "some that are trained", "call requires_grad_(True)")
    # Gradients that the program has are not its business.
    before = {name: each.grad for name, each in parameters.items()}
    try:
        for each in parameters.values():
            each.grad = None
        computed = told(subject.ask(ids, mask))
        if not computed.requires_grad:
            remedy = "compute it without torch.no_grad, detach or numpy"
            subject.fail("gradient", "what is computed has none", "a graph back to the parameters", remedy)
        weights = torch.linspace(-1, 1, computed.numel(), device=computed.device).view_as(computed)
        (computed * weights).sum().backward()  # type: ignore[no-untyped-call]
        lacking = [name for name, each in parameters.items() if each.grad is None]
        if lacking:
            told_names = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
            remedy = "use them without detach, or freeze them with requires_grad_(False)"
            subject.fail("gradient", f"none reaches {told_names}", "one for each parameter", remedy)
        wrong = [name for name, each in parameters.items() if each.grad is None or not each.grad.isfinite().all()]
        if wrong:
            subject.fail("gradient", f"that of {wrong[0]} is not finite", "finite numbers", "look for a division by 0")
    finally:
        for name, each in parameters.items():
            each.grad = before[name]
