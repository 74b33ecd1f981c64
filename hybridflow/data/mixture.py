"""Which source each prompt index of a mixture comes from: a pure function, in exact proportion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the proportion of the given weights: (0.7, 0.3) gives (7, 3).

    Args:
        weights: Above 0.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


def source_of(prompt_index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the source of a prompt index, and how many earlier prompt indices came from that source.

    The weights are those of ``whole_weights``.

    The sources are halved, and halved again. When a half with the weights ``a`` and ``b`` has had n prompts, its first
    half has had the whole part of ``n a / (a + b)``. So among the first n prompts each source has had its share to
    within 1 for each halving, and any window of prompt indices has it to within twice that.
    """
    low, high, count = 0, len(weights), prompt_index
    while high - low > 1:
        middle = (low + high) // 2
        first, both = sum(weights[low:middle]), sum(weights[low:high])
        before = count * first // both
        if (count + 1) * first // both > before:
            high, count = middle, before
        else:
            low, count = middle, count - before
    return low, count
