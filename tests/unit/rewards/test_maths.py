"""Whether two expressions are the same, by real workers: what they find, what takes for ever, what is none."""

from __future__ import annotations

import os
import resource
import time

import pytest

from hybridflow.config.rewards import RewardConfig
from hybridflow.errors import RewardError
from hybridflow.rewards import maths
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.sample import Sample, Unscored
from hybridflow.rewards.scorer import Scorer
from tests.support.waiting import with_more_time

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def made():
    settings = RewardConfig(function="maths", timeout_s=20.0, max_in_flight=1)
    scorer = Scorer(make_kind(settings, "reward"), settings, "reward")
    yield scorer
    scorer.close()


def sample(response, answer):
    return Sample(prompt="", response=response, answer=answer, place="data.jsonl:7")


NOTATIONS = [
    (r"\boxed{2\pi}", "2π", 1),
    (r"\boxed{2}", "2π", 0),
    ("It is 2π.", "2π", 1),
    ("It is 2π.", "2", 0),
    (r"\boxed{2\pi}", "2pi", 1),
    (r"\boxed{10^5}", "10⁵", 1),
    (r"\boxed{10}", "10⁵", 0),
    (r"\boxed{12}", "3×4", 1),
    (r"\boxed{3}", "3×4", 0),
    ("So 3 × 4 = 12.", "12", 1),
    (r"\boxed{x\le 3}", "x ≤ 3", 1),
    (r"\boxed{3}", "x ≤ 3", 0),
    (r"\boxed{3\sqrt{2}}", "3√2", 1),
    (r"\boxed{3}", "3√2", 0),
    ("**Answer: 3√2**", "3√2", 1),
    (r"so 3\sqrt{2} (a surd)", "3√2", 1),
    (r"\sqrt{2}", "√2", 1),
    (r"\boxed{2}", "√(2 + 2)", 1),
    (r"\boxed{2}", "2×10⁵", 0),
    ("It is 2 × 10⁵.", "200000", 1),
    (r"3+2\sqrt{5}", "3 + 2√5", 1),
    (r"\boxed{3, -3}", "±3", 1),
    (r"\boxed{(-\infty, 3] \cup [5, \infty)}", "(−∞, 3] ∪ [5, ∞)", 1),
    (r"\boxed{2.5}", "2½ cups", 1),
    ("It is 2½ cups.", "3 1/2", 0),
    (r"\boxed{3 1/2}", "3.5", 1),
    (r"\boxed{25\pi}", "25π cm²", 1),
    (r"\boxed{25}", "25π cm²", 0),
    (r"\boxed{90°}", "90", 1),
    ("30", "30°C", 1),
    # All values that are joined by words count.
    (r"\boxed{2, 3}", "x=2 or x=3", 1),
    (r"\boxed{3}", "x=2 or x=3", 0),
    (r"\boxed{2, 3}", "2 and 3", 1),
    ("2 and 3", "3", 0),
    # Letters behind a number are variables, unless they are a unit.
    (r"\boxed{2xy}", "2xy", 1),
    (r"\boxed{2}", "2xy", 0),
    ("2xy", "2", 0),
    (r"\boxed{2}", "2ab", 0),
    (r"\boxed{c + x}", "x + c", 1),
    (r"\boxed{x + d}", "x + c", 0),
    (r"\boxed{3x^2+1}", "3 x^2 + 1", 1),
    (r"\boxed{18 dollars}", "18", 1),
    ("18", "The answer is 18.", 1),
    ("18", "9 * 2 = 18\n#### 18", 1),
    (r"\boxed{Team A}", "Team A", 1),
    # Signs, digits in groups and powers of ten.
    ("The answer is −5.", "-5", 1),
    ("x = −3", "-3", 1),
    ("They owe -$5", "-5", 1),
    (r"They pay \$1,250.", "1250", 1),
    (r"\boxed{1\,000}", "1000", 1),
    (r"\boxed{1 000}", "1000", 1),
    ("1 000", "1 000", 1),
    (r"\boxed{1\,234\,567}", "1,234,567", 1),
    ("It is 1e5.", "100000", 1),
    ("1e5", "1", 0),
    (r"\boxed{2.5e-3}", "0.0025", 1),
    # Text without a space before the number.
    ("答案是5。", "5", 1),
    ("答案：－3/4", "-0.75", 1),
    ("答案是6。", "5", 0),
    ("答えは3です", "3", 1),
    ("답은 3입니다.", "3", 1),
    (r"因此\boxed{5}。", "5元", 1),
    ("Answer:5.", "5", 1),
    ("The answer is:-5", "-5", 1),
    (r"\boxed{2:5}", "5", 0),
    # Wide characters, and indices.
    (r"\boxed{（１／２）}", "0.5", 1),
    (r"\boxed{x_{12}}", "x₁₂", 1),
    (r"\boxed{x_1}", "x₁₂", 0),
]
DOLLARS = [
    r"The answer is \$18.",
    r"**Answer: \$18**",
    r"9 * \$2 = \$18 per day.",
    "US$18",
    "It costs $5 + $13 = $18",
    "She has $5 and then $13, so $18.",
    "$x$ costs $18.",
    r"\[9 \times \$2 = \boxed{\$18}\]",
    r"so $9 \times 2 = 18 $",
]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("The answer is 4.", "4", 1),
        ("The answer is 5.", "4", 0),
        (r"so $\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"so $\boxed{\frac{2}{4}}$", r"\frac{1}{2}", 1),
        (r"so $$\frac{1}{2}$$", "0.5", 1),
        (r"$x^2 + 2x + 1$", r"$(x+1)^2$", 1),
        (r"$x^2 + 2x$", r"$(x+1)^2$", 0),
        ("$x^2$", "It is $x^2$.", 1),
        ("$x$", r"\boxed x", 1),
        ("x + c", "x +\n c", 1),
        (r"$\boxed{\{2, 1\}}$", r"$\{1, 2\}$", 1),
        ("I do not know", "4", 0),
        ("", "4", 0),
        (r"\boxed{\frac{1}{", "4", 0),
        ("\ud800 4", "4", 1),
        ("$" * 5000, "4", 0),
        # An answer without marks of LaTeX, as in the data set MATH, is read whole.
        (r"so $\boxed{3\sqrt{2}}$", r"3\sqrt{2}", 1),
        (r"so $\boxed{3}$", r"3\sqrt{2}", 0),
        (r"3\sqrt{2}", r"3\sqrt{2}", 1),
        (r"3\sqrt{2}", "3", 0),
        (r"$2\pi$", r"2\pi", 1),
        (r"\boxed{4, 3}", "3, 4", 1),
        (r"\boxed{4}", "3, 4", 0),
        (r"\boxed{1.2}", "1,2", 0),
        (r"\boxed{1000}", "1,000", 1),
        (r"\boxed{1000}", "1 000", 1),
        (r"\boxed{30}", "30°", 1),
        ("6", "6.", 1),
        ("2 + 2 = 4", "4", 1),
        ("so 4", "4", 1),
        ("It is 5.", "x = 5", 1),
        ("It is 18.", "18 dollars", 1),
        # Units, currencies and emphasis are no parts of a formula.
        *((text, "5", 1) for text in ("**5**", "€5", "5€", "5;", "5 :)", "- 5", "Q: 5", "5 m/s", "5!")),
        (r"\boxed{60}", "60 km/h", 1),
        (r"\boxed{5}", "5 m/s", 1),
        (r"\boxed{60}", "60km/h", 1),
        ("60", "60\u00a0km/h", 1),
        *(("5", answer, 1) for answer in ("€5", "5 €", "5m", "x = 5 apples")),
        ("3", "(1 + 2) apples", 1),
        ("12", "It is 12 gm.", 1),
        (r"\boxed{12 gm}", "12", 1),
        (r"\boxed{50}", "50 m²", 1),
        (r"\boxed{5}", "5元", 1),
        (r"\boxed{10}", "10 a.m.", 1),
        (r"\boxed{50}", "60 km/h", 0),
        *NOTATIONS,
        *((text, "18", 1) for text in DOLLARS),
    ],
)
def test_what_is_equal(made, response, answer, score):
    assert made.scores([sample(response, answer)]) == [score]


UNREADABLE = ["", "3 million", "5:30 p.m.", "2 hours 30 minutes", r"2\text{ hours }30\text{ minutes}", "5 3", "3–5"]
UNREADABLE += [
    "3 or more apples",
    "18 apples and 3 pears",
    "3 apples + pears",
    "max(3, 4)",
    "3 squared",
    "18-year-old",
    "→ 3",
    "5' 3\"",
]


@pytest.mark.parametrize("answer", UNREADABLE)
def test_an_answer_that_is_none_or_would_be_read_in_part_is_a_failure(made, answer):
    with pytest.raises(RewardError, match="data.jsonl:7 .*is not one expression; give LaTeX or a number"):
        made.scores([sample("3", answer)])


def test_what_takes_for_ever_is_not_equal_and_the_others_go_on():
    tower = r"$9^{9^{9^{9^{9}}}}$"
    hard = [sample(tower, "7"), sample("4", "4"), sample(tower, tower.replace("9}}}}", "8}}}}"))]

    def check(limit_s):
        settings = RewardConfig(function="maths", timeout_s=limit_s, max_in_flight=2)
        scorer = Scorer(make_kind(settings, "reward"), settings, "reward")
        begin_s = time.monotonic()
        found = scorer.scores(hard)
        assert found[1] == 1 and time.monotonic() - begin_s < 90
        workers = list(scorer.kind.call._idle)
        scorer.close()
        assert all(worker._process.poll() is not None for worker in workers)

    with_more_time(check, 2.5, 20.0)


def test_a_worker_that_is_killed_is_replaced(made):
    assert made.scores([sample("4", "4")]) == [1]
    (worker,) = made.kind.call._idle
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(RewardError, match="the process that compares was killed"):
        made.scores([sample("4", "4")])
    assert made.scores([sample("4", "4")]) == [1]


def test_a_rank_with_more_than_a_thousand_open_files_compares_too():
    limits, files = resource.getrlimit(resource.RLIMIT_NOFILE), [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    try:
        while files[-1] < 1024:
            files.append(os.dup(files[0]))
        made = maths.Maths(10.0, "reward.function")
        assert made([sample("4", "4")]) == [1.0]
        made.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


OLD = """
class LatexExtractionConfig:
    pass
ExprExtractionConfig = LatexExtractionConfig
parse = verify = lambda *_, **__: []
"""


def test_a_math_verify_that_reads_nothing_is_not_begun_with(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(OLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Unscored, match="is older than 0.9: pip install -U math-verify"):
        maths.Maths(10.0, "reward.function")([sample("4", "4")])


def test_a_comparison_that_is_not_told_in_time_counts_as_different(monkeypatch):
    made = maths.Maths(10.0, "reward.function")
    assert made([sample("4", "4")]) == [1.0]
    (worker,) = made._idle
    monkeypatch.setattr(worker, "_line", lambda wait_s: None)
    assert made([sample("4", "4")]) == [0.0] and not made._idle and worker._process.poll() is not None
