"""Rewards that are functions, and the policy for what fails: ten ways to fail in each way to call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config.rewards import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import batched
from hybridflow.rewards.functions import as_function, find_function, regex
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.sample import LARGEST, Sample, Unscored, as_score, as_scores
from hybridflow.rewards.scorer import Scorer
from hybridflow.rollout.engines import wire
from tests.support.waiting import with_more_time

BAD = "bad"
"""The response that rewards here fail on; all others score their length."""
RESPONSES = ["a", "bb", BAD, "dddd", "a"]


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_S", 0.001)


def samples(responses=tuple(RESPONSES)):
    return [
        Sample(prompt=f"p{line}", response=response, answer="x", place=f"data.jsonl:{line}")
        for line, response in enumerate(responses, start=1)
    ]


def scorer(given_object=None, key="reward", **settings) -> Scorer:
    settings = RewardConfig(**settings)
    return Scorer(make_kind(settings, key, given_object), settings, key)


class Strange:
    """A number that is none when it is looked at."""

    def __float__(self):
        raise RuntimeError("not now")

    def __repr__(self):
        raise RuntimeError("nor so")


def _exit():
    sys.exit(0)


def _raise(error):
    raise error


WRONG = {
    "raises": (lambda: _raise(ValueError("no unit")), "ValueError: no unit"),
    "asserts": (lambda: _raise(AssertionError()), "AssertionError"),
    "exits": (_exit, "SystemExit: 0"),
    "recurses": (lambda: _raise(RecursionError("deep")), "RecursionError: deep"),
    "none": (lambda: None, "returned None; expected a finite number"),
    "nan": (lambda: math.nan, "returned nan; expected a finite number"),
    "infinite": (lambda: math.inf, "returned inf; expected a finite number"),
    "too large": (lambda: 1e39, "returned 1e+39; expected a finite number of at most 1e+30"),
    "huge integer": (lambda: 10**5000, "expected a finite number"),
    "text": (lambda: "1.0", "returned '1.0'; expected a finite number"),
    "nested": (lambda: [1.0], "returned [1.0]; expected a finite number"),
    "strange": (Strange, "expected a finite number"),
    "complex": (lambda: 1j, "returned 1j; expected a finite number"),
}


def single(act):
    """A function that scores one sample, and does something else for the bad one."""

    def reward(prompt, response, answer):
        return act() if response == BAD else len(response)

    return reward


def awaited(act):
    async def reward(prompt, response, answer):
        await asyncio.sleep(0)
        return act() if response == BAD else len(response)

    return reward


def many(act):
    @batched
    def reward(prompts, responses, answers):
        assert len(prompts) == len(responses) == len(answers)
        return [act() if response == BAD else len(response) for response in responses]

    return reward


def many_awaited(act):
    @batched
    async def reward(prompts, responses, answers):
        return [act() if response == BAD else len(response) for response in responses]

    return reward


class Scores:
    """An object with scores, as a user's class has them."""

    def __init__(self, act=lambda: 3.0):
        self._act = act

    def scores(self, prompts, responses, answers):
        return [self._act() if response == BAD else float(len(response)) for response in responses]


FORMS = {"single": single, "awaited": awaited, "many": many, "many awaited": many_awaited, "object": Scores}
TIMED = {"in place": {}, "in time": {"timeout_s": 30.0}}


@pytest.mark.parametrize("timed", TIMED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_one_sample_harms_no_other(form, wrong, timed):
    act, says = WRONG[wrong]
    # Of a call for many that fails as a whole, three tries find the one of five samples.
    settings = dict(TIMED[timed], retries=3)
    dropping = scorer(FORMS[form](act), on_failure="drop", **settings)
    found = dropping.scores(samples())
    assert [found[place] for place in (0, 1, 3, 4)] == [1, 2, 4, 1] and math.isnan(found[2])
    counts = dropping.counts
    assert (counts.samples, counts.failed) == (5, 1) and counts.retries >= 3
    assert says in counts.first_failure and "data.jsonl:3 with response 'bad'" in counts.first_failure
    assert scorer(FORMS[form](act), on_failure="score", failure_score=-2.5, **settings).scores(samples())[2] == -2.5
    with pytest.raises(RewardError) as raised:
        scorer(FORMS[form](act), "cost", **TIMED[timed]).scores(samples([BAD]))
    assert says in str(raised.value) and "mend the function or the sample, or set cost.on_failure" in str(raised.value)
    assert str(raised.value).startswith("cost '") and "on data.jsonl:" in str(raised.value)
    is_form = says.startswith(("returned", "expected")) and wrong not in ("nan", "infinite", "too large")
    assert ("a reward function is one of" in str(raised.value)) is is_form


@pytest.mark.parametrize("response", ["", "12"])
def test_a_function_that_takes_texts_for_messages_is_told_so(response):
    def as_of_trl(completions, **kwargs):
        return [float(completion[0]["content"] == "12") for completion in completions]

    with pytest.raises(RewardError, match="; prompts and responses are texts here, not lists of messages$"):
        scorer(as_of_trl).scores(samples([response]))


@pytest.mark.parametrize("form", FORMS)
def test_right_scores_come_in_order_whatever_the_form(form):
    for settings in ({}, {"timeout_s": 30.0}, {"max_in_flight": 2}, {"cache": 10}):
        made = scorer(FORMS[form](lambda: 3), **settings)
        assert made.scores(samples()) == [1, 2, 3, 4, 1]
        assert made.scores([]) == [] and made.scores(samples(["xyz"])) == [3]


LISTS = {
    "too few": (lambda count: [1.0] * (count - 1), "scores for"),
    "too many": (lambda count: [1.0] * (count + 1), "scores for"),
    "none": (lambda count: None, "returned None; expected a list"),
    "a number": (lambda count: 1.0, "returned 1.0; expected a list"),
    "text": (lambda count: "1" * count, "expected a list"),
    "bytes": (lambda count: b"1" * count, "expected a list"),
    "a dict": (lambda count: dict.fromkeys(range(count), 1.0), "expected a list"),
    "a set, which has no order": (lambda count: set(range(count)), "expected a list"),
    "a generator": (lambda count: (1.0 for _ in range(count)), "expected a list"),
    "nested": (lambda count: [[1.0] * count], "expected"),
    "raises": (lambda count: _raise(OSError("gone")), "OSError: gone"),
}


@pytest.mark.parametrize("wrong", LISTS)
def test_a_list_that_is_none_fails_as_a_whole(wrong):
    made, says = LISTS[wrong]

    @batched
    def reward(prompts, responses, answers):
        return made(len(responses))

    found = scorer(reward, on_failure="drop")
    assert all(map(math.isnan, found.scores(samples()))) and found.counts.failed == 5
    assert says in found.counts.first_failure
    with pytest.raises(RewardError, match="data.jsonl:1 with response 'a'"):
        scorer(reward).scores(samples())


def test_one_that_hangs_is_left_behind():
    held = threading.Event()

    def check(limit_s):
        dropping = scorer(single(held.wait), timeout_s=limit_s, on_failure="drop", retries=1)
        found = dropping.scores(samples())
        assert math.isnan(found[2]) and [found[place] for place in (0, 1, 3, 4)] == [1, 2, 4, 1]
        assert f"no answer within {limit_s:g} s" in dropping.counts.first_failure and dropping.counts.retries == 1

    with_more_time(check, 0.3, 5.0)
    held.set()


def test_one_that_hangs_in_the_loop_is_cancelled_and_one_that_holds_it_is_left():
    async def waits(prompt, response, answer):
        await asyncio.sleep(600 if response == BAD else 0)
        return len(response)

    def check(limit_s, function, says, **settings):
        waiting = scorer(function, timeout_s=limit_s, on_failure="drop", **settings)
        found = waiting.scores(samples())
        assert math.isnan(found[2]) and [found[place] for place in (0, 1, 3, 4)] == [1, 2, 4, 1]
        assert says in waiting.counts.first_failure

    with_more_time(lambda limit_s: check(limit_s, waits, f"no answer within {limit_s:g} s"), 0.3, 5.0)
    held = threading.Event()

    async def holds(prompt, response, answer):
        if response == BAD:
            held.wait(60)
        return len(response)

    # In the order of the samples, one at a time: those before it are done, those after it are tried again elsewhere.
    with_more_time(lambda limit_s: check(limit_s, holds, "the event loop is held", max_in_flight=1), 0.2, 5.0)
    held.set()


def test_calls_in_the_loop_share_one_loop_and_are_under_way_together():
    loops, together = set(), []

    async def reward(prompt, response, answer):
        loops.add(id(asyncio.get_running_loop()))
        together.append(1)
        while len(together) < 4:
            await asyncio.sleep(0.001)
        return 1.0

    made = scorer(reward, timeout_s=30.0, max_in_flight=4)
    assert made.scores(samples(["a"] * 4)) == [1] * 4 and made.scores(samples(["a"] * 4)) == [1] * 4 and len(loops) == 1


def test_no_more_calls_are_under_way_than_said():
    lock, now, most = threading.Lock(), [0], [0]

    def reward(prompt, response, answer):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return 1.0

    assert scorer(reward, max_in_flight=3).scores(samples(["a"] * 12)) == [1] * 12 and most[0] == 3


def test_a_call_is_tried_as_often_as_said_and_no_more():
    asked = []

    def comes_right(prompt, response, answer):
        asked.append(response)
        if asked.count(response) < 3:
            raise OSError("busy")
        return 7.0

    made = scorer(comes_right, retries=2)
    assert made.scores(samples(["a", "b"])) == [7, 7] and len(asked) == 6 and made.counts.retries == 4
    asked.clear()
    with pytest.raises(RewardError, match="OSError: busy"):
        scorer(comes_right, retries=1).scores(samples(["a"]))
    assert len(asked) == 2


def test_what_cannot_go_better_is_not_tried_again():
    asked = []

    def refused(prompt, response, answer):
        asked.append(response)
        raise Unscored("never", is_final=True)

    assert math.isnan(scorer(refused, retries=5, on_failure="drop").scores(samples(["a"]))[0]) and len(asked) == 1


@given(bad=st.sets(st.integers(0, 19)), count=st.integers(1, 20))
def test_halving_finds_every_sample_that_no_call_survives(bad, count):
    @batched
    def reward(prompts, responses, answers):
        if any(int(response) in bad for response in responses):
            raise ValueError("one of them")
        return [float(response) for response in responses]

    made = scorer(reward, retries=5, on_failure="drop")
    # Halves are tried at once.
    wire_backoff, wire.BACKOFF_S = wire.BACKOFF_S, 0.0
    try:
        found = made.scores(samples([str(number) for number in range(count)]))
    finally:
        wire.BACKOFF_S = wire_backoff
    assert [math.isnan(each) for each in found] == [number in bad for number in range(count)]
    assert all(each == number for number, each in enumerate(found) if number not in bad)


def test_equal_samples_are_scored_once_and_the_oldest_are_forgotten():
    asked = []

    def reward(prompt, response, answer):
        asked.append(response)
        return _raise(OSError("now and then")) if response == BAD and asked.count(BAD) == 1 else len(response)

    def same(*responses):
        return [Sample(prompt="p", response=each, answer="x", place="d:1") for each in responses]

    made = scorer(reward, cache=2, on_failure="score", failure_score=-1.0)
    assert made.scores(same("a", "bb", "a", "a")) == [1, 2, 1, 1] and asked == ["a", "bb"] and made.counts.cached == 0
    assert made.scores(same("bb", "a")) == [2, 1] and made.counts.cached == 2 and len(asked) == 2
    # A failure is not kept; then b, which was used before a, is the oldest of three.
    assert made.scores(same(BAD)) == [-1] and made.scores(same(BAD)) == [3] and asked == ["a", "bb", BAD, BAD]
    made.scores(same("a"))
    assert len(asked) == 4
    made.scores(same("bb"))
    assert len(asked) == 5
    # Another prompt or answer is another sample, however the texts are joined.
    one, other = (
        Sample(prompt="ab", response="c", answer="", place=""),
        Sample(prompt="a", response="bc", answer="", place=""),
    )
    made.scores([one, other])
    assert len(asked) == 7


def test_nothing_is_kept_unless_asked_for():
    asked = []
    made = scorer(lambda prompt, response, answer: asked.append(1) or 1.0)
    made.scores(samples(["a", "a"]))
    assert len(asked) == 2


@given(st.floats(-LARGEST, LARGEST) | st.booleans() | st.integers(-(10**30), 10**30))
def test_finite_numbers_are_scores(number):
    assert as_score(number) == float(number)


def test_numbers_of_other_libraries_are_scores():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    assert as_score(numpy.float32(0.5)) == as_score(torch.tensor(0.5)) == 0.5
    assert as_scores(numpy.array([1.0, 2.0]), 2) == as_scores(torch.tensor([1.0, 2.0]), 2) == [1, 2]
    for shape in ((2, 2), ()):
        with pytest.raises(Unscored):
            as_scores(numpy.zeros(shape), 3)
    assert all(isinstance(each, Unscored) for each in as_scores(numpy.zeros((2, 2)), 2))


@pytest.mark.parametrize(
    ("pattern", "response", "answer", "score"),
    [
        (r"answer is (\d+)", "the answer is 4, no, the answer is 5", "5", 1),
        (r"answer is (\d+)", "the answer is 4, no, the answer is 5", "4", 0),
        (r"answer is (\d+)", "five", "5", 0),
        (r"<b>", "a <b>", "whatever", 1),
        (r"<b>", "a", "whatever", 0),
        (r"(x)|y", "x y", "x", 0),
        (r"= (.*)$", "1 + 1 = 2 ", " 2", 1),
    ],
)
def test_a_pattern(pattern, response, answer, score):
    assert regex(pattern)("", response, answer) == score
    made = scorer(function="regex", pattern=pattern)
    assert made.scores([Sample(prompt="", response=response, answer=answer, place="")]) == [score]


def test_a_module_that_calls_sys_exit_is_refused(tmp_path, monkeypatch):
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit('no key')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"reward.function='exits_at_import:f': SystemExit: no key at .*exits_at_import.py:2; mend it"
    ):
        find_function("exits_at_import:f", "reward.function")


def test_what_is_no_reward_is_refused():
    for found in (3, "text", type("Empty", (), {}), object()):
        with pytest.raises(ConfigError, match="expected a function .prompt, response, answer."):
            as_function(found, "reward")
    with pytest.raises(ConfigError, match="its class is made without arguments"):
        as_function(type("Asks", (Scores,), {"__init__": lambda self, much: None}), "reward")
    with pytest.raises(ConfigError, match="SystemExit: no key; its class is made without arguments"):
        as_function(type("Exits", (Scores,), {"__init__": lambda self: sys.exit("no key")}), "reward")
    assert as_function(Scores, "reward").is_batched and as_function(partial(awaited(None)), "reward").is_async
    with pytest.raises(ConfigError, match="reward.retries: exact_match neither waits nor fails"):
        make_kind(RewardConfig(retries=1), "reward")


def test_names_that_are_not_there():
    for name, says in (("json:no", "has no attribute"), ("nowhere:no", "No module named"), ("json:loads", None)):
        if says is None:
            assert make_kind(RewardConfig(function=name), "reward").name == name
            continue
        with pytest.raises(ConfigError, match=says):
            make_kind(RewardConfig(function=name), "reward")


def test_an_error_names_the_line_of_the_users_code(tmp_path, monkeypatch):
    code = "import json\n\ndef score(response):\n    return parse(response)\n\ndef parse(text):\n    json.loads(text)\n"
    (tmp_path / "of_parts.py").write_text(code)
    (tmp_path / "of_nothing.py").write_text("import json\nimport no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=r"JSONDecodeError: .* at of_parts\.py:7; mend the function") as raised:
        scorer(function="of_parts:score").scores([Sample(prompt="", response="{", answer="", place="")])
    assert isinstance(raised.value.__cause__, json.JSONDecodeError), "the log has its traceback"
    for name, says in [
        ("of_parts:sccore", r"of_parts\.py has no attribute 'sccore'; did you mean score\? give one of"),
        (
            "of_nothing:score",
            r"No module named 'no_such_package' at of_nothing\.py:2; install no_such_package",
        ),
    ]:
        with pytest.raises(ConfigError, match=says):
            make_kind(RewardConfig(function=name), "reward")


def test_a_function_may_be_named_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/of_a_file.py").write_text("def long(response):\n    return len(response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own/of_a_file.py:long", "./own/of_a_file.py:long", "own.of_a_file:long"):
        assert scorer(function=name).scores([Sample(prompt="", response="four", answer="", place="")]) == [4]


def test_built_in_rewards_take_what_any_tokenizer_may_say():
    odd = [Sample(prompt="", response="\ud800\0", answer="\ud800\0 ", place="")]
    assert scorer(function="exact_match").scores(odd) == [1] and scorer(function="length").scores(odd) == [2]
    assert scorer(lambda *texts: 1.0, cache=1).scores(odd) == [1]


@pytest.mark.parametrize("is_broken", [False, True], ids=["scores", "raises"])
def test_a_function_that_leaves_the_working_directory_leaves_the_run_in_it(tmp_path, monkeypatch, is_broken):
    def elsewhere(prompt, response, answer):
        os.chdir("/")
        return None if is_broken else 1.0

    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError) if is_broken else contextlib.nullcontext():
        scorer(elsewhere).scores(samples())
    assert os.getcwd() == str(tmp_path)
