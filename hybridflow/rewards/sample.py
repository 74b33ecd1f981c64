"""What is scored, and what a score may be. No torch."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Set, Sized
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridflow.data.prompts import as_text

LARGEST = 1e30
"""No score is further from 0, so that no sum of them leaves the range of fp32."""


class Sample(NamedTuple):
    """A response to a problem.

    Attributes:
        prompt: The problem's text.
        response: What the policy said.
        answer: The right answer, or what tells it from a wrong one; JSON, empty text where there is none.
        place: File and line of the problem, for messages.
        fields: All fields of the problem's row, by name.
    """

    prompt: str
    response: str
    answer: Any
    place: str
    fields: Mapping[str, Any] = MappingProxyType({})

    @property
    def answer_text(self) -> str:
        """Return the answer as text: text as it is, other JSON as it is written."""
        return as_text(self.answer)


class Unscored(Exception):
    """Why a sample, or all of a call, has no score.

    Attributes:
        is_final: Trying again would change nothing.
        is_passing: Who scores is away. It may be there when the job begins again.
        is_form: The function asks for what no row has, or returned a wrong type or length: its form is wrong.
        after_s: Who was asked wants to be left alone for so long; None: it did not say.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_final: bool = False,
        is_passing: bool = False,
        is_form: bool = False,
        after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.is_passing = is_passing
        self.is_final = is_final
        self.is_form = is_form
        self.after_s = after_s


Outcome = float | Unscored
"""Score of a sample, or why it has none."""


def as_score(value: Any) -> Outcome:
    """Return a number as a score, or the reason why a value is none."""
    try:
        score = None if isinstance(value, (str, bytes, bytearray)) else float(value)
    # What a user's function gave may do anything when it is asked for its number.
    except Exception:
        score = None
    if score is None or math.isnan(score) or abs(score) > LARGEST:
        expected = f"expected a finite number of at most {LARGEST:g}"
        return Unscored(f"returned {_shown(value)}; {expected}", is_form=score is None)
    return score


def as_scores(value: Any, count: int) -> list[Outcome]:
    """Return one outcome for each sample, from the result of a call for several samples.

    Raises:
        Unscored: It is no list, or one of another length.
    """
    is_list = isinstance(value, Iterable) and isinstance(value, Sized)
    if not is_list or isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        raise Unscored(
            f"returned {_shown(value)}; expected a list of {count} scores, one for each sample", is_form=True
        )
    try:
        if len(value) != count:
            raise Unscored(f"returned {len(value)} scores for {count} samples; expected one for each", is_form=True)
        return [as_score(each) for each in value]
    except TypeError as error:  # of an array without dimensions
        raise Unscored(f"returned {_shown(value)}: {error}; expected a list of {count} scores", is_form=True) from None


def _shown(value: Any) -> str:
    """Return the beginning of a value's representation."""
    try:
        return reprlib.repr(value)
    except Exception:  # of an integer with too many digits
        return type(value).__name__
