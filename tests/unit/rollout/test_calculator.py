"""The calculator's arithmetic against fractions, its limits, and what it says as an environment."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rollout.calculator import Calculator, calculate

_LEAVES = st.integers(0, 99).map(lambda number: (str(number), Fraction(number)))


def _joined(children):
    """Texts with their values: two joined, one negated, one in brackets; every one of them in brackets if need be."""

    def join(left, sign, right):
        text = f"({left[0]}) {sign} ({right[0]})"
        if sign == "/":
            return text, None if None in (left[1], right[1]) or right[1] == 0 else left[1] / right[1]
        if None in (left[1], right[1]):
            return text, None
        return text, {"+": left[1] + right[1], "-": left[1] - right[1], "*": left[1] * right[1]}[sign]

    return st.builds(join, children, st.sampled_from("+-*/"), children) | children.map(
        lambda each: (f"-({each[0]})", None if each[1] is None else -each[1])
    )


@given(st.recursive(_LEAVES, _joined, max_leaves=6))
def test_values_are_those_of_fractions(problem):
    text, value = problem
    if value is None:
        with pytest.raises(ValueError, match="division by 0"):
            calculate(text)
    elif value.denominator == 1:
        assert calculate(text) == str(value)
    else:
        assert float(calculate(text)) == pytest.approx(float(value), rel=1e-11)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("17*23", "391"),
        ("2+3*4", "14"),
        ("20-3-4", "13"),
        ("24/4/3", "2"),
        ("-2*-3", "6"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("2000000/3", "666666.666667"),
        ("10/4*2", "5"),
        ("100000000000000.5", "100000000000000.5"),
        ("-1/100000", "-0.00001"),
        ("1/3/1000000", "0.000000333333333333"),
        # 2**-34, whose decimals end at the 34th.
        ("1/131072/131072", "0.0000000000582076609134674072265625"),
        (" 7 ", "7"),
        ("123456789012345678901234567890-1", "123456789012345678901234567889"),
    ],
)
def test_order_and_form(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found 'nothing'"),
        ("2+", "found 'nothing'"),
        ("(2", "not closed"),
        ("2)", "found '\\)' where it should end"),
        ("2 3", "found '3' where it should end"),
        ("2**3", "found '\\*'"),
        ("__import__('os')", "cannot be read from character 1"),
        ("٣+1", "cannot be read"),
        ("1" * 201, "201 characters"),
        ("1" * 31, "30 digits"),
        ("(9999999999*9999999999)*9999999999*10", "30 digits"),
        ("(" * 60 + "1" + ")" * 60, "more than 20 brackets"),
        ("-" * 100 + "1", "more than 20 brackets"),
        ("1/0.0", "division by 0"),
    ],
)
def test_what_is_no_expression_or_too_large_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        calculate(text)


def test_it_answers_until_the_policy_does():
    calculator = Calculator()
    calculator.reset("", 391)
    assert calculator.step("391") == ("", 1.0, True)
    assert calculator.reset("17*23=", "391") is None
    assert calculator.step("hm [17*23] and [1]") == ("391;", 0.0, False)
    assert calculator.step("[17*]") == ("error;", 0.0, False)
    assert calculator.step(" 391")[1:] == (1.0, True)
    assert calculator.step("392")[1:] == (0.0, True)
