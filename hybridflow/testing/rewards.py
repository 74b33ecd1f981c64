"""Contract tests of rewards: functions, objects with ``scores``, and scorers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hybridflow.checkpoint.formats.in_memory import in_memory_info, is_model
from hybridflow.errors import ConfigError, ContractError
from hybridflow.models.user_model import said
from hybridflow.rewards.functions import as_function
from hybridflow.rewards.sample import Sample
from hybridflow.testing.models import check_critic
from hybridflow.testing.subject import Fail, failing

PROMPTS = ("1+1=", "2+2=", "What is three times three?")
RESPONSES = ("2", "5", "Nine.")
ANSWERS = ("2", "4", "9")

Rows = Sequence[tuple[str, str, str]]


def check_reward(
    reward: Any,
    prompts: Sequence[str] = PROMPTS,
    responses: Sequence[str] = RESPONSES,
    answers: Sequence[str] = ANSWERS,
    *,
    tolerance: float = 1e-6,
) -> None:
    """Refuse a reward that does not give one finite number for each response, the same whatever else it is asked.

    Args:
        reward: A function ``(prompt, response, answer) -> score``; an object with ``scores(prompts, responses,
            answers)``; either of them ``async def``, the function ``hybridflow.rewards.batched``; or a scorer of
            ``transformers`` with one label.
        prompts: What it is tried on, and the two below: at least two, none equal to the others.
        responses: One to each prompt.
        answers: The right answer of each.
        tolerance: Largest difference of two scores of the same response.

    Raises:
        ContractError: Something is wrong; names the check.
    """
    if is_model(reward):
        _check_scorer(reward)
        return
    ask = _ask_scores(reward)
    fail = failing("check_reward", getattr(reward, "__name__", type(reward).__name__))

    rows = list(zip(prompts, responses, answers, strict=True))
    scores = ask(rows)
    if not isinstance(scores, Sequence | Tensor) or isinstance(scores, str):
        fail("length", f"found {said(scores)}", f"a list of {len(rows)} numbers", "return one score for each response")
    if len(scores) != len(rows):
        fail("length", f"found {len(scores)} scores", f"{len(rows)}, one for each response", "drop none, and add none")
    for row, score in zip(rows, scores, strict=True):
        is_number = isinstance(score, int | float) or (isinstance(score, Tensor) and score.numel() == 1)
        if not is_number or not math.isfinite(score):
            remedy = "give a number where the response cannot be judged, too"
            fail("finite", f"found {score!r:.60} for response {row[1]!r}", "a finite number", remedy)
    _compare(ask(rows), scores, tolerance, fail, "determinism", "the second time", "use no random numbers or clocks")
    remedy = "judge each response by itself; where that cannot be, shape scores by the algorithm instead"
    alone = [ask([row])[0] for row in rows]
    _compare(alone, scores, tolerance, fail, "batching", "when asked alone", remedy)
    turned = list(ask(rows[::-1]))[::-1]
    _compare(turned, scores, tolerance, fail, "order", "in the reverse order", remedy)


def _ask_scores(reward: Any) -> Callable[[Rows], Any]:
    """Return a function from rows to scores, as training calls it, whatever form the reward has."""
    try:
        function = as_function(reward, "check_reward")
    except ConfigError as error:
        raise ContractError(str(error)) from error

    def ask(rows: Rows) -> Any:
        samples = [Sample(*row, place="") for row in rows]
        calls = [samples] if function.is_batched else [[each] for each in samples]
        found = [function.call(each) for each in calls]
        if function.is_async:
            found = asyncio.run(_awaited(found))
        return found[0] if function.is_batched else [score for (score,) in found]

    return ask


async def _awaited(found: Sequence[Any]) -> list[Any]:
    return [await each for each in found]


def _check_scorer(model: Any) -> None:
    """Check a scorer of ``transformers``: its settings, and its values."""
    try:
        (settings,) = in_memory_info({"reward": model}).values()
    except ConfigError as error:
        raise ContractError(f"check_reward: settings: {error}") from error
    if not settings.has_value_head:
        raise ContractError(
            f"check_reward: {type(model).__name__}: found a language model, expected a scorer; give a "
            "*ForSequenceClassification with one label"
        )
    check_critic(model)


def _compare(found: Any, scores: Any, tolerance: float, fail: Fail, check: str, when: str, remedy: str) -> None:
    for one, other in zip(found, scores, strict=True):
        if abs(float(one) - float(other)) > tolerance:
            fail(check, f"found {float(one)} {when}, {float(other)} before", "the same score", remedy)
