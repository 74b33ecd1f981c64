"""Engines over HTTP against servers on loopback: ones that work, and ones that hang, drop, or answer rubbish."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.config.rollout import SamplingEngineConfig
from hybridflow.errors import ConfigError, ContractError, DataError, EngineError
from hybridflow.rollout.engines import http_engine, wire
from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams
from hybridflow.sampling.engines import make_server_engine
from hybridflow.testing import check_actor
from tests.support.waiting import with_more_time

VOCAB, STOP = 50, 7
SECRET = "s3cr3t-t0ken"
MADE = []
"""Engines of the current test."""


class Letters:
    """A tokenizer whose token 10 + i is the i-th letter."""

    path = Path("letters")
    vocab_size, eos_id, stop_ids, pad_id, bos_id = VOCAB, STOP, (STOP,), 0, None

    def encode(self, text):
        return [10 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in text]

    def decode(self, ids):
        return "".join("abcdefghijklmnopqrstuvwxyz"[each - 10] for each in ids if each >= 10)

    def pieces(self):
        return {STOP: "<end>", 8: "<turn>", **{token: self.decode([token]) for token in range(10, 36)}}

    def special_id(self, name):
        return {"<end>": STOP, "<turn>": 8}.get(name)


class Pairs(Letters):
    """As Letters, with tokens of two letters, and of parts of a character."""

    stop_ids = (STOP, 8)
    names = {**Letters().pieces(), 36: "ab", 37: "bc", 38: "<0xC3>", 39: "<0xA9>", 40: "▁a"}

    def encode(self, text):
        known = {"abc": [36, 12], "aé": [10, 38, 39], " a": [40]}
        return known[text] if text in known else super().encode(text)

    def decode(self, ids):
        texts = {**self.names, STOP: "", 8: "", 38: "\ufffd", 39: "\ufffd", 40: "a"}
        return "é" if [*ids] == [38, 39] else "".join(texts[each] for each in ids)

    def pieces(self):
        return self.names


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)
    monkeypatch.setattr(http_engine, "LOOK_S", 0.02)
    yield
    while MADE:
        MADE.pop().close()


def tokens_of(asked):
    """What the servers here sample: a function of the prompt and the seed."""
    drawn = random.Random(f"{asked['prompt']}:{asked['seed']}")
    return [drawn.randrange(10, 36) for _ in range(asked["max_tokens"])]


def choice(asked, tokens=None, **changes):
    tokens = tokens_of(asked) if tokens is None else tokens
    return {
        "finish_reason": "length",
        "token_ids": tokens,
        "prompt_token_ids": asked["prompt"],
        "logprobs": {"token_logprobs": [-token / 10 for token in tokens]},
        **changes,
    }


def ok(asked, number=0, **changes):
    return 200, {}, json.dumps({"choices": [choice(asked, **changes)]}).encode()


def engine(*servers, **changes):
    settings = SamplingEngineConfig(
        **{"kind": "openai", "urls": tuple(server.url for server in servers), "retries": 2, **changes}
    )
    MADE.append(make_server_engine(settings, tokenizer=Letters(), seed=3, vocab_size=VOCAB))
    return MADE[-1]


def requests(count, **params):
    params = SamplingParams(**{"max_new_tokens": 4, "stop_ids": (STOP,), **params})
    return [
        Request(
            prompt=torch.tensor([10 + prompt_index % 40, 11]), params=params, prompt_index=prompt_index, index=index
        )
        for prompt_index in range(count // 2)
        for index in range(2)
    ]


class Watching:
    """Keeps what is finished, and says to stop when there are ``enough``."""

    def __init__(self, enough=math.inf):
        self.pairs, self.enough = [], enough

    def finished(self, pairs):
        self.pairs += pairs

    def is_stopping(self):
        return len(self.pairs) >= self.enough


@pytest.mark.slow
def test_many_requests_over_few_connections_to_servers_in_turn(serve):
    one, two = serve(ok), serve(ok)
    ask, watching = requests(60), Watching()
    made = engine(one, two, max_in_flight=4)
    made.version = 9
    responses = made.generate(ask, progress=watching)
    sent = {(asked["prompt"][0], asked["seed"]): asked for server in (one, two) for asked in server.asked}
    assert len(sent) == 60, "each request has a seed of its own"
    assert len(one.asked) == len(two.asked) == 30
    # One of each was for the list of models, perhaps.
    assert one.connections <= 5 and two.connections <= 5
    for request, got in zip(ask, responses, strict=True):
        (asked,) = [each for each in sent.values() if tokens_of(each) == got.tokens.tolist()]
        assert asked["prompt"] == request.prompt.tolist() and asked["model"] == "tiny"
        torch.testing.assert_close(got.log_probs, -got.tokens / 10)
        assert torch.equal(got.log_probs, got.sampled_log_probs)
        assert got.versions.tolist() == [9] * 4 and got.finish == "length"
    assert Counter(id(request) for request, _ in watching.pairs) == Counter(map(id, ask))
    again = engine(one, max_in_flight=1).generate(ask)
    assert [got.tokens.tolist() for got in again] == [got.tokens.tolist() for got in responses]
    other = engine(one, max_in_flight=4).generate(ask, "validation")
    assert [got.tokens.tolist() for got in other] != [got.tokens.tolist() for got in responses]


def test_all_that_vllm_knows_is_passed(serve):
    server = serve(ok)
    params = SamplingParams(
        max_new_tokens=4,
        min_new_tokens=2,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((3, -2.0),),
        stop_ids=(STOP, 8),
        stop=("zz",),
        seed=5,
    )
    engine(server).generate([Request(prompt=torch.tensor([10, 11]), params=params, prompt_index=0)])
    (asked,) = server.asked
    expected = {
        "prompt": [10, 11],
        "max_tokens": 4,
        "min_tokens": 1,  # without the stop token, which ours counts
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"3": -2.0},
        "stop_token_ids": [STOP, 8],
        "stop": ["zz"],
        "logprobs": 0,
    }
    assert {name: asked.get(name) for name in expected} == expected
    engine(server).generate(requests(2, greedy=True))
    assert server.asked[-1]["temperature"] == 0


@pytest.mark.parametrize(
    ("owned_by", "params", "words"),
    [
        ("vllm", {"bad": ("x",)}, "bad"),
        ("vllm", {"bad_ids": ((3, 4),)}, "bad_ids"),
        ("vllm", {"logit_bias": ((3, 1000.0),)}, "logit_bias=1000"),
        ("vllm", {"temperature": 0.005}, "temperature=0.005: the engine takes 0.01 to 10000"),
        ("someone", {"frequency_penalty": -3.0}, "frequency_penalty=-3: the engine takes -2 to 2"),
        ("someone", {"top_k": 3}, "top_k=3"),
        ("someone", {"min_p": 0.1}, "min_p=0.1"),
        ("someone", {"stop": ("x",)}, "stop"),
        ("someone", {"stop_ids": (STOP, 8)}, r"stop_ids: .* found \[8\] beyond the tokenizer's ends"),
        ("someone", {"repetition_penalty": 1.2}, "repetition_penalty"),
        ("someone", {"with_prompt_log_probs": True}, "with_prompt_log_probs"),
    ],
)
def test_what_a_server_does_not_know_is_refused_before_anything_is_sent(serve, owned_by, params, words):
    server = serve(ok, owned_by=owned_by)
    with pytest.raises(DataError, match=words):
        engine(server).generate([*requests(2), *requests(2, **params)])
    assert server.asked == []


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_the_model_does_not_have_is_refused_before_anything_is_sent(serve, token):
    server = serve(ok)
    strange = replace(requests(2)[0], prompt=torch.tensor([10, token]))
    with pytest.raises(DataError, match=f"it has token {token}; expected 0 to {VOCAB - 1}"):
        engine(server).generate([*requests(2), strange])
    assert server.asked == []


def test_log_probs_that_are_of_another_distribution_are_not_known(serve):
    server = serve(ok)
    for params, kind, has_own, has_sampled in [
        ({}, "raw", True, True),
        ({"top_k": 3}, "raw", True, False),
        ({"temperature": 0.5}, "raw", False, False),
        ({"temperature": 0.5}, "processed", True, True),
        ({"temperature": 0.5, "top_k": 3}, "processed", False, True),
    ]:
        for got in engine(server, log_probs=kind).generate(requests(2, **params)):
            assert got.log_probs.isfinite().all() == has_own, (params, kind)
            assert got.sampled_log_probs.isfinite().all() == has_sampled, (params, kind)


def test_a_response_ends_at_the_first_stop_token_and_goes_on_from_what_was_sampled(serve):
    server = serve(lambda asked, number: ok(asked, tokens=[12, STOP, 13, 14][: asked["max_tokens"]]))
    (got, _) = engine(server).generate(requests(2))
    assert got.tokens.tolist() == [12, STOP] and got.finish == "stop" and len(got.log_probs) == 2
    begun = Response(
        tokens=torch.tensor([20, 21]),
        log_probs=torch.tensor([-0.5, -0.25]),
        sampled_log_probs=torch.tensor([-0.5, -0.25]),
        versions=torch.tensor([1, 1], dtype=torch.int32),
        finish="paused",
    )
    request = replace(requests(2)[0], begun=begun)
    made = engine(server)
    made.version = 2
    (got,) = made.generate([request])
    assert server.asked[-1]["prompt"] == [10, 11, 20, 21] and server.asked[-1]["max_tokens"] == 2
    assert got.tokens.tolist() == [20, 21, 12, STOP] and got.versions.tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(got.log_probs, torch.tensor([-0.5, -0.25, -1.2, -0.7]))


BAD = {
    "not json": lambda asked, number: (200, {}, b"<html>so sorry"),
    "deep json": lambda asked, number: (200, {}, b"[" * 100_000),
    "nan": lambda asked, number: (200, {}, b'{"choices": [{"logprobs": {"token_logprobs": [NaN]}}]}'),
    "another shape": lambda asked, number: (200, {}, b'[{"text": "x"}]'),
    "no choice": lambda asked, number: (200, {}, b'{"choices": []}'),
    "no tokens": lambda asked, number: ok(asked, token_ids=None, logprobs={"token_logprobs": [-1.0]}),
    "too many tokens": lambda asked, number: ok(asked, tokens=[12] * 5),
    "too few tokens": lambda asked, number: ok(asked, tokens=[12] * 3),
    "tokens of another model": lambda asked, number: ok(asked, tokens=[12, 13, 14, VOCAB]),
    "negative tokens": lambda asked, number: ok(asked, tokens=[12, 13, 14, -1]),
    "text for tokens": lambda asked, number: ok(asked, token_ids=["a", "b", "c", "d"]),
    "another prompt": lambda asked, number: ok(asked, prompt_token_ids=[1, *asked["prompt"]]),
    "too few log-probs": lambda asked, number: ok(asked, logprobs={"token_logprobs": [-1.0] * 3}),
    "positive log-probs": lambda asked, number: ok(asked, logprobs={"token_logprobs": [0.5] * 4}),
    "null log-probs": lambda asked, number: ok(asked, logprobs={"token_logprobs": [None] * 4}),
    "no log-probs": lambda asked, number: ok(asked, logprobs=None),
    "aborted": lambda asked, number: ok(asked, finish_reason="abort"),
    "an end of its own": lambda asked, number: ok(asked, tokens=[12, 13], finish_reason="stop"),
    "too busy": lambda asked, number: (429, {"Retry-After": "0.01"}, b"slow down"),
    "broken": lambda asked, number: (500, {}, b"boom"),
    "hung up": lambda asked, number: None,
    "cut off": lambda asked, number: (200, {"Content-Length": "1000", "Connection": "close"}, b'{"choices": ['),
    "not wanted": lambda asked, number: (400, {}, b"prompt too long"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_sample_that_is_answered_badly_fails_alone(serve, kind):
    server = serve(lambda asked, number: BAD[kind](asked, number) if asked["prompt"][0] == 12 else ok(asked))
    responses = engine(server).generate(requests(8))
    for request, got in zip(requests(8), responses, strict=True):
        if request.prompt_index == 2:
            assert got.finish == "failed" and len(got.tokens) == 0 and server.url in got.error
        else:
            assert got.finish == "length" and len(got.tokens) == 4
    tries = Counter((asked["prompt"][0], asked["seed"]) for asked in server.asked)
    # A connection that was kept may have been closed by the server meanwhile: that is no try.
    expected = {"not wanted": (1,), "hung up": (3, 4, 5, 6)}.get(kind, (3,))
    assert all(number in (expected if prompt == 12 else (1,)) for (prompt, _), number in tries.items())


def test_what_goes_wrong_once_is_tried_again(serve):
    kinds = [kind for kind in BAD if kind != "not wanted"]
    server = serve(lambda asked, number: ok(asked) if number % 2 else BAD[kinds[number // 2]](asked, number))
    responses = engine(server, max_in_flight=1).generate(requests(2 * len(kinds))[: len(kinds)])
    assert all(got.finish == "length" for got in responses) and len(server.asked) == 2 * len(kinds)


def test_another_server_takes_over_from_one_that_is_down(serve):
    down, up = serve(ok), serve(ok)
    made = engine(up, down)
    down.close()
    assert all(got.finish == "length" for got in made.generate(requests(20)))
    assert len(up.asked) == 20


def test_a_server_that_hangs_fails_after_the_read_timeout_or_the_deadline(serve):
    server = serve(lambda asked, number: ok(asked) if asked["prompt"][0] != 12 else server.hang())

    def check(limit_s, name, says):
        responses = engine(server, **{name: limit_s}).generate(requests(8))
        assert [got.finish for got in responses].count("failed") == 2 and says in responses[4].error

    begun = time.monotonic()
    with_more_time(lambda limit_s: check(limit_s, "read_timeout_s", "no answer in time"), 0.2, 5.0)
    with_more_time(lambda limit_s: check(limit_s, "deadline_s", f"deadline_s={limit_s:g}"), 0.4, 5.0)
    # A request that hangs does so for longer.
    assert time.monotonic() - begun < 60


def test_a_server_that_drips_is_ended_at_the_deadline():
    """Each byte comes well within the read timeout, and there is no end of them."""
    listener, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not is_over.wait(0.02):
                connection.sendall(b"X-More: and more\r\n"[:1])

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    settings = SamplingEngineConfig(
        kind="tgi", urls=(f"http://127.0.0.1:{listener.getsockname()[1]}",), deadline_s=0.5, read_timeout_s=60.0
    )
    made = make_server_engine(settings, tokenizer=Letters(), seed=1, vocab_size=VOCAB)
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"all of the first 2 .*deadline_s=0.5"):
        made.generate(requests(2))
    assert time.monotonic() - begun < 30
    is_over.set()
    listener.close()


def test_where_nothing_works_all_ends_soon(serve):
    server = serve(lambda asked, number: (503, {}, b"loading"))
    with pytest.raises(EngineError, match=r"all of the first 4 requests failed.* answered 503: loading"):
        engine(server, max_in_flight=4).generate(requests(400))
    assert len(server.asked) < 100
    server.close()
    with pytest.raises(EngineError, match="given up after 3 tries: is the server of rollout.engine.urls up"):
        engine(server)


def test_generating_stops_when_told_to_and_hands_over_what_is_there(serve):
    server = serve(lambda asked, number: ok(asked) if asked["prompt"][0] < 12 else server.hang())
    watching, ask = Watching(enough=4), requests(12)
    made = engine(server)
    begun = time.monotonic()
    with pytest.raises(RolloutStopped) as stopped:
        made.generate(ask, progress=watching)
    assert time.monotonic() - begun < 30
    assert {request.prompt_index for request, _ in watching.pairs} == {0, 1}
    assert [id(request) for request, _ in stopped.value.unfinished] == [id(request) for request in ask[4:]]
    assert all(got.finish == "paused" and len(got.tokens) == 0 for _, got in stopped.value.unfinished)
    assert all(got.finish == "length" for got in made.generate(ask[:4])), "it can be used again"


def test_the_token_is_shown_and_never_told(serve, monkeypatch, caplog, capfd):
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)
    server = serve(lambda asked, number: (400, {}, f"who is {SECRET}?".encode()) if number else ok(asked))
    made = engine(server, auth_env="ENGINE_TOKEN", max_in_flight=1)
    good, bad = made.generate(requests(2))
    assert good.finish == "length" and server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert "who is ***?" in bad.error
    refusing = serve(lambda asked, number: (401, {}, SECRET.encode()))
    with pytest.raises(EngineError, match="answered 401") as raised:
        engine(refusing, auth_env="ENGINE_TOKEN").generate(requests(40))
    assert len(refusing.asked) <= 40
    told = [bad.error, str(raised.value), repr(made), str(vars(made)), caplog.text, *capfd.readouterr()]
    assert not any(SECRET in text for text in told)
    for value in ("", "two words", "line\nbreak"):
        monkeypatch.setenv("ENGINE_TOKEN", value)
        with pytest.raises(ConfigError, match="auth_env=ENGINE_TOKEN") as raised:
            engine(server, auth_env="ENGINE_TOKEN")
        assert not value or value not in str(raised.value)


def test_a_server_that_tells_text_alone(serve):
    def answer(asked, number):
        letters = Letters().decode(tokens_of(asked))
        scores = [-token / 10 for token in tokens_of(asked)]
        if asked["prompt"][0] == 10:
            return ok(asked, token_ids=None, text=letters, logprobs={"token_logprobs": scores})
        if asked["prompt"][0] == 11:
            told = {"text": letters[:2], "finish_reason": "stop", "logprobs": {"token_logprobs": scores[:2]}}
            return ok(asked, token_ids=None, **told)
        return ok(asked, token_ids=None, text=letters[:3], logprobs={"token_logprobs": scores})

    server = serve(answer, owned_by="someone")
    whole, other, stopped, _, wrong, _ = engine(server).generate(requests(6))
    # The first may not be the first to come.
    asked = [tokens_of(each) for each in server.asked if each["prompt"][0] == 10]
    assert sorted([whole.tokens.tolist(), other.tokens.tolist()]) == sorted(asked) and whole.finish == "length"
    assert stopped.finish == "stop" and stopped.tokens.tolist()[2:] == [STOP]
    assert stopped.log_probs.isnan().tolist() == [False, False, True]
    assert wrong.finish == "failed" and "is it the model's tokenizer" in wrong.error


@pytest.mark.parametrize(
    ("text", "pieces", "finish", "expected"),
    [
        ("abc", ["ab", "c"], "length", [36, 12]),
        ("abc", ["a", "bc"], "length", None),
        ("abc", None, "length", [36, 12]),
        ("abc", ["token_id:36", "token_id:12"], "length", [36, 12]),
        ("abc", ["token_id:10", "token_id:37"], "length", None),
        ("abc", ["ab", "c", "d"], "length", None),
        # What is no text alone is told in many ways.
        ("aé", ["a", "bytes:\\xc3", "bytes:\\xa9"], "length", [10, 38, 39]),
        ("aé", ["a", "", "é"], "length", [10, 38, 39]),
        *[(" a", [piece], "length", [40]) for piece in ("a", " a", "▁a")],
        (" a", ["_a"], "length", None),
        *[
            ("abc", ["ab", "c", end], "stop", [36, 12, token])
            for end, token in (("<end>", STOP), ("", STOP), ("<turn>", 8))
        ],
        ("abc", ["ab", "c"], "stop", [36, 12, STOP]),
        # As many as with the end, and none of them is it.
        ("abc", ["a", "b", "c"], "stop", None),
    ],
)
def test_the_tokens_of_a_text_are_those_that_the_server_tells(serve, text, pieces, finish, expected):
    def answer(asked, number):
        scores = [-0.5 - at for at in range(len(pieces or "12"))]
        told = {"token_logprobs": scores, "tokens": pieces}
        return ok(asked, token_ids=None, text=text, finish_reason=finish, logprobs=told)

    settings = SamplingEngineConfig(kind="openai", urls=(serve(answer, owned_by="someone").url,), retries=0)
    MADE.append(make_server_engine(settings, tokenizer=Pairs(), seed=3, vocab_size=VOCAB))
    most = 5 if finish == "stop" or expected is None else len(expected)
    ask, *_ = requests(2, max_new_tokens=most, stop_ids=Pairs.stop_ids)
    (got,) = MADE[-1].generate([ask])
    if expected is None:
        assert got.finish == "failed" and "is it the model's tokenizer" in got.error
    else:
        assert got.tokens.tolist() == expected
        assert got.log_probs.isnan().tolist() == [at >= len(pieces or "12") for at in range(len(expected))]


def test_ids_that_a_server_tells_unasked_are_taken_where_they_have_the_end(serve):
    """As ``hybridflow serve`` does. The text alone would be other tokens, or none."""
    answers = {
        10: {"token_ids": [11, 36, 12, 13], "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0, -4.0]}},
        11: {"token_ids": [36, 8], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0, -2.0]}},
        # This one leaves the end out.
        12: {
            "token_ids": [36, 12],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0], "tokens": ["ab", "c", "<end>"]},
        },
    }
    server = serve(
        lambda asked, number: ok(asked, **{"text": "abc", **answers[asked["prompt"][0]]}), owned_by="hybridflow"
    )
    settings = SamplingEngineConfig(kind="openai", urls=(server.url,), retries=0)
    MADE.append(make_server_engine(settings, tokenizer=Pairs(), seed=3, vocab_size=VOCAB))
    long, _, short, _, text, _ = MADE[-1].generate(requests(6, stop_ids=Pairs.stop_ids))
    assert long.tokens.tolist() == [11, 36, 12, 13] and long.log_probs.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert short.tokens.tolist() == [36, 8] and short.finish == "stop"
    assert text.tokens.tolist() == [36, 12, STOP] and text.log_probs.tolist() == [-1.0, -2.0, -3.0]


def tgi_answer(asked, number):
    tokens = tokens_of({**asked["parameters"], "prompt": asked["inputs"], "max_tokens": 4})
    tokens, finish = (tokens, "length") if asked["inputs"][0] == "a" else ([*tokens[:2], STOP], "eos_token")
    prefill = [
        {"id": token, "logprob": None if at == 0 else -1.5}
        for at, token in enumerate(Letters().encode(asked["inputs"]))
    ]
    details = {
        "finish_reason": finish,
        "tokens": [{"id": token, "logprob": -token / 10} for token in tokens],
        "prefill": prefill if asked["parameters"]["decoder_input_details"] else [],
    }
    return 200, {}, json.dumps({"generated_text": "", "details": details}).encode()


def test_tgi(serve):
    server = serve(tgi_answer)
    made = engine(server, kind="tgi")
    first, _, second, _ = made.generate(requests(4, temperature=0.5, with_prompt_log_probs=True))
    assert {asked["inputs"] for asked in server.asked} == {"ab", "bb"}
    assert server.asked[0]["parameters"] | {"seed": 0} == {
        "max_new_tokens": 4,
        "do_sample": True,
        "seed": 0,
        "stop": [],
        "details": True,
        "decoder_input_details": True,
        "return_full_text": False,
        "temperature": 0.5,
    }
    assert first.finish == "length" and len(first.tokens) == 4 and first.prompt_log_probs.tolist() == [-1.5]
    assert second.finish == "stop" and second.tokens[-1] == STOP
    torch.testing.assert_close(first.log_probs, -first.tokens / 10)
    cuts = dict(greedy=True, top_k=3, top_p=0.5, repetition_penalty=1.5)
    # It reads special tokens as their names, and of what it ends at without being told says nothing.
    made.generate(requests(2, **cuts, stop=("zz",), stop_ids=(STOP, 8, 12, 49)))
    asked = server.asked[-1]["parameters"]
    assert (asked["do_sample"], asked["repetition_penalty"], asked["stop"]) == (False, 1.5, ["zz", "<turn>"])
    # With one of these TGI samples, although do_sample is false.
    assert not asked.keys() & {"temperature", "top_k", "top_p"}
    made.generate(requests(2, **{**cuts, "greedy": False}))
    asked = server.asked[-1]["parameters"]
    assert (asked["do_sample"], asked["top_k"], asked["top_p"], asked["repetition_penalty"]) == (True, 3, 0.5, 1.5)
    sent = len(server.asked)
    for params, words in [
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"min_new_tokens": 1}, "min_new_tokens"),
        ({"logit_bias": ((1, 1.0),)}, "logit_bias"),
    ]:
        with pytest.raises(DataError, match=words):
            made.generate(requests(2, **params))
    unreadable = Request(prompt=torch.tensor([3, 10]), params=SamplingParams(max_new_tokens=4), prompt_index=0)
    with pytest.raises(DataError, match="not read as the same tokens"):
        made.generate([unreadable])
    assert len(server.asked) == sent


def by_prompt(asked, number):
    """As a model would: the likeliest at temperature 0, ended by what ends it."""
    drawn = random.Random(f"{asked['prompt']}:{0 if asked['temperature'] == 0 else asked['seed']}")
    tokens = [drawn.randrange(10, 36) for _ in range(asked["max_tokens"])]
    ends = [at for at, token in enumerate(tokens) if token in asked.get("stop_token_ids", [])]
    if ends:
        return ok(asked, tokens=tokens[: ends[0] + 1], finish_reason="stop")
    return ok(asked, tokens=tokens)


def test_a_server_is_looked_at_by_the_contract_tests_of_actors(serve):
    check_actor(engine(serve(by_prompt)), vocab_size=VOCAB)
    seen = itertools.count()

    def restless(asked, number):
        return ok(asked, tokens=[10 + next(seen) % 20] * asked["max_tokens"])

    with pytest.raises(ContractError, match="HttpEngine: determinism: "):
        check_actor(engine(serve(restless)), vocab_size=VOCAB)
    with pytest.raises(ContractError, match=r"HttpEngine: tokens: found \[49, 49.*expected ids from 0 to 39"):
        check_actor(engine(serve(lambda asked, number: ok(asked, tokens=[49] * asked["max_tokens"]))), vocab_size=40)
    with pytest.raises(ContractError, match="HttpEngine: response: all of the first"):
        check_actor(engine(serve(lambda asked, number: (500, {}, b"no"))), vocab_size=VOCAB)
