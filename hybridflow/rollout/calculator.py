"""A calculator for the policy to call, and problems that it helps with: the worked example of an environment.

No torch. Expressions are parsed here, exactly and within limits, so that no text makes it run for long or raise.
"""

from __future__ import annotations

import re
from decimal import Context
from fractions import Fraction
from typing import Any

from hybridflow.data.prompts import as_text

MAX_CHARACTERS = 200
MAX_DIGITS = 30
"""Of a number that is written, or comes out."""
MAX_DEPTH = 20
"""Of brackets and signs within each other."""
_TOKENS = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))", re.ASCII)
_LARGEST = 10**MAX_DIGITS


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, ``+ - * /`` and brackets.

    The value is exact if its decimals end, else it has 12 significant digits. It has no exponent, which an expression
    may not have either.

    Raises:
        ValueError: It is not such an expression, divides by 0, or exceeds a limit.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"expression of {len(expression)} characters; at most {MAX_CHARACTERS} are read")
    tokens, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise ValueError(f"expression {text!r}: cannot be read from character {at + 1}")
        tokens.append(found[1] or found[2])
        at = found.end()
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.tokens:
        raise ValueError(f"expression {text!r}: found {parser.tokens[-1]!r} where it should end")
    return _as_text(value)


def _as_text(value: Fraction) -> str:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    # Where only 2 and 5 divide it, the decimals end, within as many places as the denominator has bits.
    digits = value.denominator.bit_length() + MAX_DIGITS if rest == 1 else 12
    quotient = Context(prec=digits).divide(value.numerator, value.denominator)
    text = f"{quotient:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Parser:
    """Reads tokens from the left; those that are left stand in ``tokens``, the next one last."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._next() in ("+", "-"):
            sign = 1 if self.tokens.pop() == "+" else -1
            value = _bounded(value + sign * self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._next() in ("*", "/"):
            is_product = self.tokens.pop() == "*"
            other = self._factor(depth)
            if not is_product and other == 0:
                raise ValueError("division by 0")
            value = _bounded(value * other if is_product else value / other)
        return value

    def _factor(self, depth: int) -> Fraction:
        token = self.tokens.pop() if self.tokens else "nothing"
        if depth == MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} brackets and signs within each other")
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._next() != ")":
                raise ValueError("a bracket is not closed")
            self.tokens.pop()
            return value
        if not token[0].isdigit():
            raise ValueError(f"found {token!r} where a number should stand")
        return _bounded(Fraction(token))

    def _next(self) -> str | None:
        return self.tokens[-1] if self.tokens else None


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= _LARGEST:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return value


class Calculator:
    """Computes what stands between square brackets; a response without any is the answer, and is right or wrong.

    ``[17*23]`` is answered ``391;``, and what cannot be computed ``error;``.
    """

    def reset(self, prompt: str, answer: Any) -> None:
        """Remember the right answer."""
        self._answer = as_text(answer).strip()

    def step(self, response: str) -> tuple[str, float, bool]:
        """Return the calculator's display; at the end score 1 if the response is the answer, ignoring outer spaces."""
        called = re.search(r"\[([^\[\]]*)\]", response)
        if called is None:
            return "", float(response.strip() == self._answer), True
        try:
            return f"{calculate(called[1])};", 0.0, False
        except ValueError:
            return "error;", 0.0, False
