r"""What becomes of notations of maths, text by text, before an algebra system reads them."""

from __future__ import annotations

import pytest

from hybridflow.rewards.notation import formula_of, is_formula, is_marked, to_latex, with_marks

TRANSLATED = [
    # A root is over the number, the letter or the parentheses behind it.
    ("√12", r"\sqrt{12}"),
    ("√2.5", r"\sqrt{2.5}"),
    ("√x", r"\sqrt{x}"),
    ("∛ 8", r"\sqrt[3]{8}"),
    ("√(x + 1)", r"\sqrt{(x + 1)}"),
    ("√((a + b)c)d", r"\sqrt{((a + b)c)}d"),
    ("√{2}", r"\sqrt {2}"),
    ("√", r"\sqrt "),
    ("30°C", "30 "),
    (r"30^\circ F", "30 "),
    (r"30^{\circ}C", "30 "),
    ("x¹⁰y₁₂z²", "x^{10}y_{12}z^2"),
    ("3–5 and –2", "3–5 and -2"),
    ("答案是5元", "答案是 5 元"),
    ("Answer:-5, Answer:.5, a:b, 2:5, ::5", "Answer: -5, Answer: .5, a:b, 2:5, ::5"),
    # Dollars of prices go; those of maths stay.
    (r"\$5 and US\$6", "5 and 6"),
    (r"2 \\$x$", r"2 \\$x$"),
    ("from $5 to $10", "from 5 to 10"),
    ("from $5-$10", "from 5-10"),
    ("US$18, -$5", "18, -5"),
    ("it is $-5 or $.50", "it is -5 or .50"),
    ("$5$", "$5$"),
    ("$5 + x$ costs $3", "$5 + x$ costs 3"),
    ("$-5 x$", "$-5 x$"),
    ("$x$ for $3", "$x$ for 3"),
    ("$x $ for $3", "$x $ for 3"),
    ("$$x\n+ 1$$ for $3", "$$x\n+ 1$$ for 3"),
    (r"$9 \times n $", r"$9 \times n $"),
    ("$5, then $", "5, then $"),
    ("$5 or so $x", "5 or so $x"),
    # Digits in groups of three, and powers of ten.
    (r"1{,}000, 1~000, 1\ 000, 1 000 000", "1000, 1000, 1000, 1000000"),
    ("1 0000, 0.1 000, 012 000 and 1,2 000", "1 0000, 0.1 000, 012 000 and 1,2 000"),
    ("1e5, 2.5E-3", "100000, 0.0025"),
    (r"x1e5, 1e5x, 1e5.2, 1.1.1e5, \1e5", r"x1e5, 1e5x, 1e5.2, 1.1.1e5, \1e5"),
]


@pytest.mark.parametrize(("text", "expected"), TRANSLATED)
def test_what_is_translated(text, expected):
    assert to_latex(text) == expected


MARKED = [
    ("so x^2 + 1 holds", "so $x^2 + 1$ holds"),
    ("a 2^3 and 2^3 a day", "a $2^3$ and $2^3$ a day"),
    ("= 2^3.", "= $2^3$."),
    ("so. x^2", "so. $x^2$"),
    (r"2 + \frac{1}{2} x", r"$2 + \frac{1}{2} x$"),
    ("**2^3**", "**$2^3$**"),
    ("2^3*4 = 2^{3}4.5", "$2^3*4 = 2^{3}4.5$"),
    ("it is x^2 + and more", "it is $x^2$ + and more"),
    (r"so \frac{1}{2}, or", r"so $\frac{1}{2}$, or"),
    # The power of a unit is none of a formula.
    ("5 m^2 of it", "5 m^2 of it"),
    *((text, text) for text in (r"\text{5}", r"\mathrm{5}", r"\mbox{5}", r"\begin{5}", r"\end{5}", "5 and 6")),
    (r"\boxed{5 apples} of {5 apples}", r"\boxed{5} of {5 apples}"),
    ("so $$x^2$$ or\nx^2", "so $$x^2$$ or\nx^2"),
    ("so $x^2$ or x^2\nor x^2", "so $x^2$ or x^2\nor $x^2$"),
]


@pytest.mark.parametrize(("text", "expected"), MARKED)
def test_formulas_in_lines_without_marks_get_them(text, expected):
    assert with_marks(text) == expected


def test_what_marks_are():
    assert all(map(is_marked, ("$x$", r"\(x\)", r"\[x\]", r"\boxed x"))) and not is_marked(r"\frac{1}{2}(x)")
    assert is_formula("2 + x\n") and not any(map(is_formula, ("2\nx", "2 apples", "$x$")))


FORMULAS = [
    *((f"{text} apples", "5") for text in ("5", "(5", "5)", "so 5", "5 red", "5 €", "of 5")),
    *(
        (f"5 {unit}", "5")
        for unit in (
            "km",
            "kg/m^3",
            "m^{2}",
            "m^2",
            "km/h",
            "miles/hour",
            "miles / hour",
            "m/s",
            "m / s^2.",
            "g",
            "g of it",
            "kmh",
            "cm^-1",
            "dollars",
        )
    ),
    *(
        (text, "5")
        for text in (
            "5th",
            "5km",
            "5 p.m.",
            "5 p.m",
            "I am 5",
            "5 a. m.",
            "5 pm",
            "5dollars",
            "so it is 5",
            "1 + 4 = 5\n#### 5",
        )
    ),
    ("5m", "5m"),
    ("x = 5 apples", "x = 5"),
    *((text, text) for text in ("2xkm", "x m", "5 m + 3")),
    ("2 and 3", "2, 3"),
    ("2, and 3 or 4.", "2, 3, 4"),
    ("2,and 3", "2, 3"),
    ("2 1/2", r"2\frac{1}{2}"),
    *((f"5{percent}", "5%") for percent in (" percent", " pct")),
    (r"pi + \sin(x) + cos(x) + arctan(x) + log(x)", r"\pi + \sin(x) + \cos(x) + \arctan(x) + \log(x)"),
    ("sin(x)", r"\sin(x)"),
    ("5 pies, logs, spins", "5"),
    (r"sqrt(2) + \sqrt (x + 1) + sqrt((a + b)c)", r"\sqrt{2} + \sqrt{x + 1} + \sqrt{(a + b)c}"),
    *((text, text) for text in (r"\angle ABC", r"\triangle ABC", r"2\alpha", r"\begin{cases}5\end{cases}")),
    *(
        (text, text)
        for text in (rf"\{name}{{area}} + 5" for name in ("text", "textbf", "textrm", "mathrm", "operatorname"))
    ),
    (r"2\text{ and }3", r"2\text{ and }3"),
    ("apples", ""),
]


@pytest.mark.parametrize(("text", "expected"), FORMULAS)
def test_the_formula_of_an_answer(text, expected):
    assert formula_of(text) == expected


SEVERAL = ["2 apples 3", "x + apples 3", "1.2 1/2", "2 1/2/3", "5:30 apples", "max(2) x", "3 × 4 ☃"]
SEVERAL += [
    f"3 {word}" for word in ("hundred", "thousand", "million", "billion", "trillion", "dozen", "squared", "cubed")
]
SEVERAL += [f"{word} 3" for word in ("plus", "minus", "negative")]
SEVERAL += [rf"2\{name}{{ hours }}30" for name in ("text", "mbox", "mathrm")]
OPERATORS = ("*", "/", "^", "<", ">", r"\times", r"\cdot", r"\div", r"\le", r"\ge")
SEVERAL += [text for each in OPERATORS for text in (f"{each} 3", f"3 {each}")]
SEVERAL += ["3 +", "3 =", "3 -", "5' 3", '5" 3']


@pytest.mark.parametrize("text", SEVERAL)
def test_what_is_more_than_one_formula_or_none_that_is_whole(text):
    assert formula_of(text) is None
