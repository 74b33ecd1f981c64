"""Rewards over HTTP against servers on loopback: services and judges that work, and ones that lie, hang or drop."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time

import pytest

from hybridflow.config.rewards import JudgeConfig, RewardConfig, RewardServiceConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.exit_status import FAILURE, REQUEST, exit_status
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.sample import Sample
from hybridflow.rewards.scorer import Scorer
from hybridflow.rollout.engines import wire
from tests.support.waiting import with_more_time
from tests.unit.rewards.test_rewards import samples

BAD = "bad"
SECRET = "s3cr3t-t0ken"
TEMPLATE = "Question: {prompt}\nRight: {answer}\nSaid: {response}\n{other} Score from 0 to 10:"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_S", 0.001)
    yield
    while SCORERS:
        SCORERS.pop().close()


SCORERS = []
"""Made by a test, to be closed when it is over."""


def scorer_of(settings):
    SCORERS.append(Scorer(make_kind(settings, "reward"), settings, "reward"))
    return SCORERS[-1]


def service(*servers, path="/score", made=None, **settings):
    urls = tuple(f"{server.url}{path}" for server in servers)
    settings = RewardConfig(service=RewardServiceConfig(urls=urls, **(made or {})), **{"timeout_s": 20.0, **settings})
    return scorer_of(settings)


def judge(*servers, made=None, **settings):
    urls = tuple(server.url for server in servers)
    made = {"template": TEMPLATE, **(made or {})}
    settings = RewardConfig(judge=JudgeConfig(urls=urls, **made), **{"timeout_s": 20.0, **settings})
    return scorer_of(settings)


def ok(body):
    return 200, {}, json.dumps(body).encode()


def lengths(asked):
    return [len(each["response"]) for each in asked["samples"]]


def raw(text):
    return 200, {}, text


def test_a_service_is_sent_samples_and_gives_their_scores(serve, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    one, other = (serve(lambda asked, number: ok({"scores": lengths(asked)})) for _ in range(2))
    made = service(one, other, made={"batch_size": 3, "auth_env": "SCORER_TOKEN"})
    responses = ["a" * length for length in range(10)]
    assert made.scores(samples(responses)) == list(range(10)) and made.scores(samples(["xyz"])) == [3]
    asked = [each for server in (one, other) for body in server.asked for each in body["samples"]]
    assert sorted(map(len, (body["samples"] for body in one.asked + other.asked))) == [1, 1, 3, 3, 3]
    assert {"prompt": "p4", "response": "aaa", "answer": "x"} in asked and len(asked) == 11
    assert one.asked and other.asked and {*one.paths, *other.paths} == {"/score"}
    assert {headers["Authorization"] for headers in one.headers} == {f"Bearer {SECRET}"}
    assert made.counts.calls == 1 and made.counts.longest_s > 0
    plain = service(one, path="")
    assert plain.scores(samples(["ab"])) == [2] and one.paths[-1] == "/"


def test_connections_stay_open(serve):
    server = serve(lambda asked, number: ok({"scores": lengths(asked)}))
    made = service(server, max_in_flight=1)
    for _ in range(5):
        made.scores(samples(["a"]))
    assert len(server.asked) == 5 and server.connections == 1


HANG = object()
LIES = {
    "too few": (lambda count: ok({"scores": [1.0] * (count - 1)}), "scores for"),
    "too many": (lambda count: ok({"scores": [1.0] * (count + 1)}), "scores for"),
    "nothing": (lambda count: ok({}), 'expected {"scores"'),
    "a list": (lambda count: ok([1.0] * count), 'expected {"scores"'),
    "text for a list": (lambda count: ok({"scores": "1.0"}), 'expected {"scores"'),
    "no JSON": (lambda count: raw(b"<html>busy</html>"), "what is not JSON"),
    "no text": (lambda count: raw(b"\xff\xfe\x00"), "what is not JSON"),
    "nested for ever": (lambda count: raw(b"[" * 100000), "what is not JSON"),
    "NaN": (lambda count: raw(b'{"scores": [' + b", ".join([b"NaN"] * count) + b"]}"), "what is not JSON"),
    "huge": (lambda count: raw(b" " * (5 << 20)), "answered with more than"),
    "500": (lambda count: (500, {}, b"no"), "answered 500"),
    "404": (lambda count: (404, {}, b"no"), "answered 404"),
    "400": (lambda count: (400, {}, b"too odd"), "answered 400: too odd"),
    "redirect": (lambda count: (302, {"Location": "http://127.0.0.1:1/"}, b""), "answered 302"),
    "hangs up": (lambda count: None, ""),
    "stops in the midst": (lambda count: (200, {"Content-Length": "100"}, b"{"), ""),
    "hangs": (lambda count: HANG, "no answer"),
}


AWAY = ("500", "hangs up", "stops in the midst", "hangs")


def lying(serve, act, right, is_bad):
    """A server that does something else than right for what is bad."""

    def answer(asked, number):
        if not is_bad(asked):
            return right(asked)
        found = act(len(asked.get("samples", [0])))
        if found is HANG:
            server.hang()
            return None
        return found

    server = serve(answer)
    return server


@pytest.mark.parametrize("lie", LIES)
def test_a_service_that_lies_about_one_sample(serve, lie):
    act, says = LIES[lie]
    server = lying(
        serve,
        act,
        lambda asked: ok({"scores": lengths(asked)}),
        lambda asked: any(each["response"] == BAD for each in asked["samples"]),
    )
    # Refused requests are not sent again, so that halves do not find the sample: each has a request of its own.
    size = 1 if lie in ("404", "redirect") else 8

    def check(limit_s):
        made = service(server, on_failure="drop", retries=3, made={"batch_size": size}, timeout_s=limit_s)
        found = made.scores(samples(["a", "bb", BAD, "dddd"]))
        assert [found[place] for place in (0, 1, 3)] == [1, 2, 4] and math.isnan(found[2])
        assert says in made.counts.first_failure and "data.jsonl:3 with response 'bad'" in made.counts.first_failure
        failing = service(server, timeout_s=limit_s)
        with pytest.raises(
            RewardError, match=r"reward 'http://127.*' on data.jsonl:1 with response 'bad'.*on_failure"
        ) as raised:
            failing.scores(samples([BAD]))
        assert says in str(raised.value)
        # A server that is away may be back when the job begins again.
        assert exit_status(raised.value) == (FAILURE if lie in AWAY else REQUEST)

    with_more_time(check, *((0.5, 5.0) if lie in ("hangs", "stops in the midst") else (20.0,)))


@pytest.mark.parametrize("wrong", [None, "1.0", [1.0], {}, 1e31, True])
def test_a_number_that_is_none_is_the_failure_of_its_sample(serve, wrong):
    def answer(asked, number):
        return ok({"scores": [wrong if each["response"] == BAD else 1.0 for each in asked["samples"]]})

    made = service(serve(answer), on_failure="score", failure_score=-1.0)
    assert made.scores(samples(["a", BAD, "b"])) == [1, 1 if wrong is True else -1, 1]


def test_a_service_that_is_not_there_or_comes_back(serve):
    gone = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    gone.close()
    made = scorer_of(RewardConfig(service=RewardServiceConfig(urls=(url,)), retries=1, on_failure="drop"))
    assert math.isnan(made.scores(samples(["a"]))[0]) and "ConnectionRefusedError" in made.counts.first_failure
    with pytest.raises(RewardError, match="ConnectionRefusedError") as raised:
        scorer_of(RewardConfig(service=RewardServiceConfig(urls=(url,)), retries=0)).scores(samples(["a"]))
    assert exit_status(raised.value) == FAILURE
    server = serve(lambda asked, number: (503, {}, b"") if number < 2 else ok({"scores": lengths(asked)}))
    back = service(server, retries=2)
    assert back.scores(samples(["abc"])) == [3] and len(server.asked) == 3 and back.counts.retries == 2


def test_a_service_that_drips_is_left_in_time():
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = RewardConfig(service=RewardServiceConfig(urls=(url,)), timeout_s=0.5, on_failure="drop")
    made = scorer_of(settings)
    begin_s = time.monotonic()
    assert math.isnan(made.scores(samples(["a"]))[0]) and time.monotonic() - begin_s < 30
    assert "no answer within 0.5 s" in made.counts.first_failure
    listener.close()


def test_a_secret_is_told_to_the_service_alone(serve, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    made = service(serve(lambda asked, number: (500, {}, SECRET.encode())), made={"auth_env": "SCORER_TOKEN"})
    with pytest.raises(RewardError) as raised:
        made.scores(samples(["a"]))
    assert SECRET not in str(raised.value)
    monkeypatch.delenv("SCORER_TOKEN")
    with pytest.raises(ConfigError, match=r"reward\.service\.auth_env=SCORER_TOKEN: found nothing"):
        service(serve(lambda asked, number: None), made={"auth_env": "SCORER_TOKEN"})


def said(text, finish_reason="stop"):
    return ok({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]})


def test_a_judge_is_asked_with_the_template(serve):
    server = serve(lambda asked, number: said("The score: 2 at first.\nScore: 7.5"))
    made = judge(server, made={"model": "big", "max_new_tokens": 9, "temperature": 0.5})
    sample = Sample(prompt="{answer}?", response="Score: 10 {prompt}", answer="{response}", place="d:1")
    assert made.scores([sample]) == [7.5]
    (asked,) = server.asked
    assert server.paths == ["/v1/chat/completions"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("big", 9, 0.5)
    # What a sample has is put in once, and not looked through.
    assert [each["content"] for each in asked["messages"]] == [
        "Question: {answer}?\nRight: {response}\nSaid: Score: 10 {prompt}\n{other} Score from 0 to 10:"
    ]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score (0-10): 7", 7),
        ("Score (out of 10): 7", 7),
        ("Score: 8\nI gave this score because step 2 was unclear.", 8),
        ("Score: 8. A score of 10 would need units.", 8),
        ("Score: 8\n\n(Scores range from 0 to 10.)", 8),
        ("Score: .5", 0.5),
        ("Score = +3.25.", 3.25),
        ("Score: **8/10**", 8),
        ("**Score:** 8", 8),
        ("**Score** (of 10): 8", 8),
        ('{"score": 8}', 8),
    ],
)
def test_the_default_pattern_reads_the_score(serve, text, score):
    assert judge(serve(lambda asked, number: said(text))).scores(samples(["a"])) == [score]


JUDGED = {
    "nothing": (lambda _: said(""), "finds no number"),
    "prose": (lambda _: said("It is rather good."), "finds no number"),
    "a score in prose": (lambda _: said("A score of 10 needs units; the score is 3 of 3."), "finds no number"),
    "cut": (lambda _: said("Score: 5, for criterion 1", "length"), "judge.max_new_tokens=512; raise it"),
    "cut before a text": (lambda _: said(None, "length"), "judge.max_new_tokens=512; raise it"),
    "too high": (lambda _: said("Score: 11"), "expected a number from 0 to 10"),
    "too low": (lambda _: said("Score: -1"), "expected a number from 0 to 10"),
    "no message": (lambda _: ok({"choices": []}), "expected a chat completion"),
    "no text": (lambda _: said(None), "expected a chat completion"),
    "a number": (lambda _: ok(7), "expected a chat completion"),
    "401": (lambda _: (401, {}, b""), "answered 401"),
    "hangs": (lambda _: HANG, "no answer"),
}


@pytest.mark.parametrize("lie", JUDGED)
def test_a_judge_that_says_no_score(serve, lie):
    act, says = JUDGED[lie]
    server = lying(
        serve, act, lambda asked: said("Score: 4"), lambda asked: f"Said: {BAD}\n" in asked["messages"][0]["content"]
    )

    def check(limit_s):
        made = judge(server, on_failure="score", failure_score=1.0, retries=1, timeout_s=limit_s)
        assert made.scores(samples(["a", BAD, "c"])) == [4, 1, 4]
        assert says in made.counts.first_failure and "data.jsonl:2" in made.counts.first_failure
        assert made.counts.retries == (0 if lie == "401" else 1)

    with_more_time(check, *((0.5, 5.0) if lie == "hangs" else (20.0,)))


def test_judges_are_asked_together(serve):
    together = threading.Barrier(4)

    def answer(asked, number):
        together.wait(20)
        return said("Score: 1")

    made = judge(serve(answer), max_in_flight=4)
    assert made.scores(samples(["a"] * 8)) == [1] * 8
