"""The HTTP side of ``hybridflow serve`` over real connections, with a thread in the place of the engine."""

import contextlib
import http.client
import json
import socket
import threading

import pytest

from hybridflow.errors import ConfigError
from hybridflow.serving import endpoint as module
from hybridflow.serving.api import Sample, Served
from hybridflow.serving.command import _serve
from hybridflow.serving.desk import Desk
from hybridflow.serving.endpoint import MAX_BODY_BYTES, Endpoint
from tests.support.waiting import wait_until
from tests.unit.serving.test_generate import Letters

SERVED = Served(name="letters", tokenizer=Letters(), vocab_size=257, max_context=64)
JSON = {"Content-Type": "application/json"}


class Echoing:
    """Answers each sample with its prompt reversed, letter by letter, unless it begins with x: that never ends."""

    def __init__(self, desk):
        self.desk, self.seen, self.is_over = desk, [], False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while not self.is_over:
            for command in self.desk.take(0.01):
                self.seen.append(command)
                if command["do"] == "add" and command["prompt"][0] != ord("x"):
                    self._answer(command)

    def _answer(self, command):
        tokens = command["prompt"][::-1]
        for sample_id in command["ids"]:
            for length in range(1, len(tokens)) if command["is_streamed"] else ():
                self.desk.deliver(sample_id, tokens[:length], None)
            sample = Sample(
                tokens=tokens, log_probs=[-1.0] * len(tokens), prompt_log_probs=None, finish="stop", error=None
            )
            self.desk.deliver(sample_id, (), sample)


@contextlib.contextmanager
def serving(*, token=None, request_s=60.0, max_waiting=8):
    desk = Desk(1, max_waiting)
    engine = Echoing(desk)
    end = Endpoint("127.0.0.1", 0, served=SERVED, desk=desk, token=token, request_s=request_s)
    thread = threading.Thread(target=end.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield end, desk, engine
    finally:
        engine.is_over = True
        desk.give_up(5.0)
        end.shutdown()
        end.server_close()


def call(end, method, path, body=None, headers=JSON):
    connection = http.client.HTTPConnection("127.0.0.1", end.server_address[1], timeout=30)
    try:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def raw(end, content):
    """What the server answers to bytes, up to where it closes."""
    with socket.create_connection(("127.0.0.1", end.server_address[1]), timeout=30) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_answers_and_refusals():
    with serving() as (end, desk, engine):
        assert call(end, "GET", "/health") == (200, {"status": "ok"})
        assert call(end, "GET", "/v1/models")[1]["data"][0]["id"] == "letters"
        status, answer = call(end, "POST", "/v1/completions", {"prompt": ["abc", "de"], "n": 2, "stop": "a"})
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["cb", "cb", "ed", "ed"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        for method, path, body, headers, expected in [
            ("GET", "/v1/nothing", None, JSON, 404),
            ("POST", "/v1/nothing", {}, JSON, 404),
            ("POST", "/v1/completions", b"{nonsense", JSON, 400),
            ("POST", "/v1/completions", b"", JSON, 400),
            ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}, JSON, 400),
            ("POST", "/v1/completions", {"prompt": "a" * 65}, JSON, 400),
            ("POST", "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"}, 415),
            ("POST", "/v1/completions", {"prompt": "a"}, {**JSON, "Host": "evil.example:80"}, 403),
            ("POST", "/v1/completions", {"prompt": "a", "n": 9}, JSON, 429),
            ("PUT", "/v1/completions", {}, JSON, 501),
        ]:
            status, answer = call(end, method, path, body, headers)
            assert status == expected and answer["error"]["message"], (path, body, status, answer)
        huge = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for length, expected in ((MAX_BODY_BYTES + 1, b"413"), (10**30, b"413"), (-1, b"411"), ("x", b"411")):
            assert raw(end, huge + f"Content-Length: {length}\r\n\r\n".encode()).split()[1] == expected
        assert raw(end, huge + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n").split()[1] == b"411"
        assert raw(end, b"nonsense\r\n\r\n").split()[1] == b"400" or b"error" in raw(end, b"nonsense\r\n\r\n")
        assert raw(end, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n").split()[1] == b"414"
        many = b"".join(b"X-%d: 1\r\n" % number for number in range(200))
        assert raw(end, b"GET /health HTTP/1.1\r\n" + many + b"\r\n").split()[1] == b"431"
        assert raw(end, huge + b"Content-Length: 100\r\n\r\nshort") == b"", "nobody is there to be answered"
        assert call(end, "GET", "/health")[0] == 200 and desk.num_running == 0


def test_pieces_of_a_stream_are_the_text():
    with serving() as (end, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", end.server_address[1], timeout=30)
        body = {"prompt": "abé😀z", "stream": True, "stop": ["ba", "!"], "stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        assert response.getheader("Content-Type") == "text/event-stream"
        *events, last, empty = response.read().decode().split("\n\n")
        assert last == "data: [DONE]" and empty == ""
        rows = [json.loads(event.removeprefix("data: ")) for event in events]
        texts = [choice["text"] for row in rows for choice in row["choices"]]
        # Bytes in reverse order are no letters where there are several to one; of "ba" nothing is sent.
        assert "".join(texts) == bytes(reversed("é😀z".encode())).decode("utf-8", "replace") and len(texts) > 1
        assert rows[-2]["choices"][0]["finish_reason"] == "stop" and rows[-1]["usage"]["completion_tokens"] == 9


def test_a_token_is_needed_once_there_is_one():
    with serving(token=b"secret") as (end, _, _):
        for given in (None, "Bearer wrong", "Bearer secre", "Bearer secrets", "secret", "Basic secret", "Bearer \xe9"):
            headers = {**JSON, **({} if given is None else {"Authorization": given})}
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                assert call(end, method, path, {"prompt": "a"} if method == "POST" else None, headers)[0] == 401
        headers = {**JSON, "Authorization": "Bearer secret", "Host": "node7:80"}
        assert call(end, "POST", "/v1/completions", {"prompt": "ab"}, headers)[1]["choices"][0]["text"] == "ba"
        assert call(end, "GET", "/health")[0] == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_who_leaves_is_no_longer_generated_for(is_streamed):
    with serving() as (end, desk, engine):
        connection = socket.create_connection(("127.0.0.1", end.server_address[1]))
        body = json.dumps({"prompt": "x", "n": 3, "stream": is_streamed}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        connection.sendall(head.encode() + b"%d\r\n\r\n" % len(body) + body)
        wait_until(lambda: desk.num_running == 3, what="it is taken up")
        connection.close()
        wait_until(lambda: desk.num_running == 0, what="it is given up")
        wait_until(lambda: engine.seen[-1]["do"] == "cancel", what="the engine hears of it")
        assert engine.seen[-1]["ids"] == engine.seen[0]["ids"]


def test_what_takes_too_long_and_what_is_too_much_is_told():
    with serving(request_s=0.3, max_waiting=2) as (end, desk, engine):
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(call(end, "POST", "/v1/completions", {"prompt": "x"})))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: desk.num_running == 2 or len(answers) == 2)
        status, answer = call(end, "POST", "/v1/completions", {"prompt": ["a", "b", "c"]})
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        for thread in threads:
            thread.join()
        assert [status for status, _ in answers] == [504, 504]
        wait_until(lambda: [each["do"] for each in engine.seen].count("cancel") == 2)
        desk.close()
        assert call(end, "POST", "/v1/completions", {"prompt": "a"})[0] == 503


def test_who_waits_when_the_server_ends_is_told():
    with serving() as (end, desk, _):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(call(end, "POST", "/v1/completions", {"prompt": "x"})))
        thread.start()
        wait_until(lambda: desk.num_running == 1)
        desk.give_up(30.0)
        thread.join()
        assert answers[0][0] == 503


def test_clients_share_the_server(monkeypatch):
    with serving(max_waiting=64) as (end, _, _):
        found = {}

        def one(number):
            found[number] = call(end, "POST", "/v1/completions", {"prompt": f"a{number}b"})[1]["choices"][0]["text"]

        threads = [threading.Thread(target=one, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: f"a{number}b"[::-1] for number in range(24)}


def test_too_many_connections_are_closed_and_the_others_served(monkeypatch):
    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 2)
    with serving() as (end, _, _):
        held = [socket.create_connection(("127.0.0.1", end.server_address[1])) for _ in range(2)]
        wait_until(lambda: end._room._value == 0)
        assert raw(end, b"") == b""
        for connection in held:
            connection.close()
        wait_until(lambda: end._room._value == 2)
        assert call(end, "GET", "/health")[0] == 200


def serve_arguments(**changes):
    from hybridflow import cli

    arguments = cli._parse(["serve", "--model", "absent"])
    for name, value in changes.items():
        setattr(arguments, name, value)
    return arguments


def test_others_may_not_reach_it_without_a_token(monkeypatch):
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):
        with pytest.raises(ConfigError, match="--token-env"):
            _serve(serve_arguments(host=host))
    monkeypatch.delenv("NO_TOKEN", raising=False)
    for value in (None, "", "a\nb", "é"):
        if value is not None:
            monkeypatch.setenv("NO_TOKEN", value)
        with pytest.raises(ConfigError, match="NO_TOKEN"):
            _serve(serve_arguments(host="0.0.0.0", token_env="NO_TOKEN"))
    with pytest.raises(ConfigError, match="name of an environment variable") as refused:
        _serve(serve_arguments(token_env="sk-0123 secret"))
    assert "0123" not in str(refused.value)


def test_an_address_that_cannot_be_had_is_an_error():
    with serving() as (end, desk, _):
        with pytest.raises(ConfigError, match="choose another port"):
            Endpoint("127.0.0.1", end.server_address[1], served=SERVED, desk=desk, token=None, request_s=1.0)
        with pytest.raises(ConfigError, match="cannot be listened on"):
            Endpoint("192.0.2.1", 0, served=SERVED, desk=desk, token=None, request_s=1.0)
