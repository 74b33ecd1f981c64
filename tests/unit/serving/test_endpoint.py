"""The HTTP side of ``hybridflow serve`` over real connections, with a thread in the place of the engine."""

import contextlib
import http.client
import json
import select
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from hybridflow.errors import ConfigError
from hybridflow.exit_status import REQUEST
from hybridflow.parallel.process import allow_many_files
from hybridflow.serving import api
from hybridflow.serving import endpoint as module
from hybridflow.serving.api import Sample, Served
from hybridflow.serving.command import _serve
from hybridflow.serving.desk import Desk
from hybridflow.serving.endpoint import MAX_BODY_BYTES, Endpoint
from hybridflow.serving.scores import Scored
from tests.support.waiting import wait_until
from tests.unit.serving.test_generate import ADD, TOOLS_TEMPLATE, Letters, chatting

SERVED = Served(name="letters", tokenizer=Letters(), vocab_size=257, max_context=64)
JSON = {"Content-Type": "application/json"}


class Echoing:
    """Answers each sample with its prompt reversed, letter by letter, unless it begins with x: that never ends.

    Or with the tokens that it is to say.
    """

    says = None

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
        tokens = command["prompt"][::-1] if self.says is None else self.says
        # Told beside the tokens: log-probabilities from -1 down, and the letter a as the likeliest.
        log_probs = [-1.0 - place for place in range(len(tokens))]
        tops = [[(ord("a"), -0.5)]] * len(tokens) if command["params"].get("num_top_log_probs") else None
        for sample_id in command["ids"]:
            for length in range(1, len(tokens)) if command["is_streamed"] else ():
                last = slice(length - 1, length)
                self.desk.deliver(sample_id, Scored(tokens[last], log_probs[last], tops and tops[last]), None)
            sample = Sample(
                tokens=tokens,
                log_probs=log_probs,
                prompt_log_probs=None,
                finish="stop",
                error=None,
                top_log_probs=tops,
            )
            self.desk.deliver(sample_id, Scored(), sample)


@contextlib.contextmanager
def serving(*, served=SERVED, token=None, request_s=60.0, max_waiting=8):
    desk = Desk(1, max_waiting)
    engine = Echoing(desk)
    end = Endpoint("127.0.0.1", 0, served=served, desk=desk, token=token, request_s=request_s)
    end.start()
    try:
        yield end, desk, engine
    finally:
        engine.is_over = True
        desk.give_up(5.0)
        end.close()


@pytest.fixture(scope="module")
def endpoint():
    with serving() as (end, _, _):
        yield end


def connect(end):
    return socket.create_connection(("127.0.0.1", end.port), timeout=30)


def call(end, method, path, body=None, headers=JSON):
    connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
    try:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        assert response.getheader("Content-Type") == "application/json"
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def raw(end, content, *, is_last=False):
    """What the server answers to bytes, up to where it closes; where they are the client's last it may hear of that."""
    answer = b""
    with connect(end) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(content)
        if is_last:
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
    return answer


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def asking(**body):
    content = json.dumps(body).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(content) + content


def test_answers_and_refusals():
    with serving() as (end, desk, engine):
        assert call(end, "GET", "/health") == (200, {"status": "ok"})
        (listed,) = call(end, "GET", "/v1/models")[1]["data"]
        assert listed["id"] == "letters" and call(end, "GET", "/v1/models/letters") == (200, listed)
        status, answer = call(end, "POST", "/v1/completions", {"prompt": ["abc", "de"], "n": 2, "stop": "a"})
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["cb", "cb", "ed", "ed"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        for method, path, body, headers, expected in [
            ("GET", "/v1/nothing", None, JSON, 404),
            ("POST", "/v1/nothing", {}, JSON, 404),
            ("GET", "/v1/models/other/one", None, JSON, 404),
            ("POST", "/v1/completions/", {}, JSON, 404),
            ("PUT", "/v1/completions", {}, JSON, 405),
            ("POST", "/v1/completions", b"{nonsense", JSON, 400),
            ("POST", "/v1/completions", b"", JSON, 400),
            ("POST", "/v1/completions", b'{"prompt": "a", "\\ud800": 1}', JSON, 400),
            ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}, JSON, 400),
            ("POST", "/v1/completions", {"prompt": "a" * 65}, JSON, 400),
            ("POST", "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"}, 415),
            ("POST", "/v1/completions", {"prompt": "a"}, {**JSON, "Host": "evil.example:80"}, 403),
            ("POST", "/v1/completions", {"prompt": "a", "n": 9}, JSON, 400),
        ]:
            status, answer = call(end, method, path, body, headers)
            assert status == expected and answer["error"]["message"], (path, body, status, answer)
        put = b"PUT /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert b"\r\nallow: POST\r\n" in raw(end, put)
        assert call(end, "GET", "/health")[0] == 200 and desk.num_running == 0


def test_bodies_have_a_limit_however_they_come():
    with serving() as (end, desk, _):
        largest = json.dumps({"prompt": "ab"}).encode().ljust(MAX_BODY_BYTES)
        assert call(end, "POST", "/v1/completions", largest)[0] == 200
        chunked = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        assert raw(end, chunked + b'10\r\n{"prompt": "ab"}\r\n0\r\n\r\n').split()[1] == b"200"
        # No more of it is waited for.
        assert b"413" in raw(end, chunked + b"%x\r\n" % (2 * MAX_BODY_BYTES) + b"a" * (MAX_BODY_BYTES + 1))[:20]
        length = {"Content-Length": str(MAX_BODY_BYTES + 1)}
        assert call(end, "POST", "/v1/completions", None, {**JSON, **length})[0] == 413
        waiting = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
        assert raw(end, waiting).split()[1] == b"413", "its body never comes, and the connection is closed"
        assert raw(end, POST + b"Content-Length: 100\r\n\r\nshort", is_last=True) == b"", "nobody is there to answer"
        assert desk.num_running == 0


def test_what_is_not_http_is_refused_and_not_for_the_console(caplog):
    with serving() as (end, _, _):
        for content in (
            *(
                b"nonsense\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                bytes(range(256)) + b"\r\n\r\n",
            ),
            *(POST + b"Content-Length: %b\r\n\r\n" % length for length in (b"-1", b"x", b"1" * 30)),
            POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
            b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 300_000,
        ):
            assert raw(end, content).split()[1] == b"400", content[:100]
        assert call(end, "GET", "/health")[0] == 200
    assert not caplog.records


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"prompt": "ab"}'
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(GET + b"Content-Length: 44\r\n\r\n", id="GET with a body"),
        pytest.param(GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="GET with a chunked body"),
        pytest.param(b"HEAD" + GET[3:] + b"Content-Length: 44\r\n\r\n", id="HEAD with a body"),
        pytest.param(POST + b"Content-Length: 16\r\nContent-Length: 16\r\n\r\n" + BODY, id="two lengths"),
        pytest.param(POST + b"Content-Length: 16, 16\r\n\r\n" + BODY, id="two lengths in a line"),
        pytest.param(POST + b"Content-Length: 16\r\ncontent-length: 62\r\n\r\n" + BODY, id="two that differ"),
        pytest.param(
            POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n\r\n",
            id="a length and chunks",
        ),
        pytest.param(POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", id="two encodings"),
        pytest.param(POST + b"Content-Length : 16\r\n\r\n" + BODY, id="a space before the colon"),
        pytest.param(POST + b"X: a\r\n Content-Length: 3\r\nContent-Length: 16\r\n\r\n" + BODY, id="a folded line"),
        pytest.param(POST + b"X: a\nContent-Length: 16\r\n\r\n" + BODY, id="LF alone"),
        pytest.param(POST + b"X: a\rContent-Length: 3\r\nContent-Length: 16\r\n\r\n" + BODY, id="CR alone"),
        pytest.param(POST + b"Content-Length: 16\r\n\n" + BODY, id="LF alone at the end"),
        pytest.param(POST + b"X: a\0b\r\nContent-Length: 16\r\n\r\n" + BODY, id="NUL"),
        pytest.param(POST + b"X: a\x0bb\r\nContent-Length: 16\r\n\r\n" + BODY, id="a control character"),
        pytest.param(
            POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n\r\n",
            id="chunks before HTTP/1.1",
        ),
        pytest.param(POST + b"X: " + b"a" * 20_000 + b"\r\nContent-Length: 16\r\n\r\n" + BODY, id="a long head"),
    ],
)
def test_what_two_readers_could_take_for_different_requests_is_refused(endpoint, content):
    answer = raw(endpoint, content + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1, answer


def test_nothing_is_read_behind_a_chunked_body(endpoint):
    """What ends its trailers is open to doubt."""
    answer = raw(endpoint, POST + b"Transfer-Encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\nX: a\n\n" + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1, answer


def test_pipelined_requests_have_their_answers_in_order(endpoint):
    last = GET + b"Connection: close\r\n\r\n"
    answer = raw(endpoint, (GET + b"\r\n") * 500 + asking(prompt="ab") + last)
    assert answer.count(b"HTTP/1.1 200 ") == 502 and answer.rfind(b'"ba"') < answer.rfind(b'"status"')


def test_who_sends_a_long_body_in_vain_reads_why_and_may_ask_again():
    """A connection that is closed with bytes unread is reset, and of the answer the client sees nothing."""
    body = json.dumps({"prompt": "ab"}).encode().ljust(MAX_BODY_BYTES - 1)
    with serving(token=b"secret") as (end, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
        for path, token, expected in [
            ("/v1/completions", "wrong", 401),
            ("/v1/embeddings", "secret", 404),
            ("/v1/completions", "secret", 200),
        ]:
            connection.request("POST", path, body, {**JSON, "Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            assert response.status == expected and json.loads(response.read())
        connection.close()


def test_a_bad_body_behind_a_refused_head_is_not_for_the_console(caplog):
    with serving(token=b"secret") as (end, _, _):
        assert raw(end, POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n").startswith(b"HTTP/1.1 400 ")
    assert not caplog.records


def test_an_error_of_our_own_is_an_answer_and_for_the_console(monkeypatch, caplog):
    def fail(*arguments, **named):
        raise ValueError("a bug, of which clients hear no more than its kind")

    monkeypatch.setattr(api, "read_ask", fail)
    with serving() as (end, _, _):
        status, answer = call(end, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert "ValueError" in answer["error"]["message"] and "bug" not in answer["error"]["message"]
    assert "a bug" in caplog.text


def test_pieces_of_a_stream_are_the_text():
    with serving() as (end, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
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


def test_a_piece_of_a_stream_has_the_log_probabilities_of_its_tokens():
    with serving() as (end, _, _):
        body = {"prompt": "!ab", "stop": ["!"], "logprobs": 1, "n": 2}
        whole = call(end, "POST", "/v1/completions", body)[1]["choices"]
        connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), JSON)
        events = connection.getresponse().read().decode().split("\n\n")[:-2]
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    for index in range(2):
        mine = [each for each in pieces if each["index"] == index]
        # The token of the stop has a score, and no text.
        assert [each["text"] for each in mine] == ["b", "a", ""]
        assert [each["logprobs"]["tokens"] for each in mine[:2]] == [["b"], ["a"]]
        assert mine[1]["logprobs"]["top_logprobs"] == [{"a": -0.5}]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert [value for each in mine for value in each["logprobs"][name]] == whole[index]["logprobs"][name]
    assert whole[0]["logprobs"]["token_logprobs"] == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("body", [{}, {"tools": [ADD], "logprobs": True}])
def test_what_a_stream_does_not_tell_is_not_joined_token_by_token(tmp_path, monkeypatch, body):
    joined = []
    monkeypatch.setattr(Scored, "__add__", lambda before, later: joined.append((before, later)))
    with serving(served=replace(chatting(tmp_path, TOOLS_TEMPLATE), max_context=4096)) as (end, _, engine):
        engine.says = list(b"letters")
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, **body}
        connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        events = connection.getresponse().read().decode().split("\n\n")[:-2]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(each["delta"].get("content", "") for each in choices) == "letters"
    scores = [entry["logprob"] for each in choices for entry in (each["logprobs"] or {"content": ()})["content"]]
    assert scores == ([-1.0 - place for place in range(7)] if "logprobs" in body else [])
    assert not joined


def test_the_first_piece_of_each_choice_of_a_chat_says_who_speaks(tmp_path):
    with serving(served=chatting(tmp_path)) as (end, _, _):
        body = {"messages": [{"role": "user", "content": "abc"}], "n": 2, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        events = connection.getresponse().read().decode().split("\n\n")[:-2]
    deltas = {0: [], 1: []}
    for event in events:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        deltas[choice["index"]].append(choice["delta"])
    for first, *later in deltas.values():
        assert first["role"] == "assistant" and "content" in first
        assert len(later) > 1 and not any("role" in delta for delta in later)


def test_a_call_of_a_tool_is_one_piece_of_a_stream(tmp_path):
    served = replace(chatting(tmp_path, TOOLS_TEMPLATE), max_context=4096)
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with serving(served=served) as (end, _, engine):
        engine.says = list(text.encode())
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [ADD], "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", end.port, timeout=30)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        (event,) = connection.getresponse().read().decode().split("\n\n")[:-2]
    (choice,) = json.loads(event.removeprefix("data: "))["choices"]
    (call,) = choice["delta"]["tool_calls"]
    assert call["index"] == 0 and call["function"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls" and choice["delta"]["content"] == ""


def test_a_token_is_needed_once_there_is_one():
    with serving(token=b"secret") as (end, _, _):
        for given in (None, "Bearer wrong", "Bearer secre", "Bearer secrets", "secret", "Basic secret", "Bearer \xe9"):
            headers = {**JSON, **({} if given is None else {"Authorization": given})}
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                assert call(end, method, path, {"prompt": "a"} if method == "POST" else None, headers)[0] == 401
        for scheme in ("Bearer", "bearer"):
            headers = {**JSON, "Authorization": f"{scheme} secret", "Host": "node7:80"}
            assert call(end, "POST", "/v1/completions", {"prompt": "ab"}, headers)[1]["choices"][0]["text"] == "ba"
        assert call(end, "GET", "/health")[0] == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_who_leaves_is_no_longer_generated_for(is_streamed):
    with serving() as (end, desk, engine):
        connection = connect(end)
        connection.sendall(asking(prompt="x", n=3, stream=is_streamed))
        wait_until(lambda: desk.num_running == 3, what="it is taken up")
        connection.close()
        wait_until(lambda: desk.num_running == 0, what="it is given up")
        wait_until(lambda: engine.seen[-1]["do"] == "cancel", what="the engine hears of it")
        assert engine.seen[-1]["ids"] == engine.seen[0]["ids"]


def test_what_takes_too_long_and_what_is_too_much_is_told():
    with serving(max_waiting=2) as (end, desk, _), contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(connect(end)).sendall(asking(prompt="x"))
        wait_until(lambda: desk.num_running == 2)
        status, answer = call(end, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        desk.close()
        assert call(end, "POST", "/v1/completions", {"prompt": "a"})[0] == 503
        assert call(end, "GET", "/health")[0] == 503
    with serving(request_s=0.3) as (end, _, engine):
        assert call(end, "POST", "/v1/completions", {"prompt": "x"})[0] == 504
        wait_until(lambda: [each["do"] for each in engine.seen].count("cancel") == 1)


def test_who_waits_when_the_server_ends_is_told():
    with serving() as (end, desk, _):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(call(end, "POST", "/v1/completions", {"prompt": "x"})))
        thread.start()
        wait_until(lambda: desk.num_running == 1)
        desk.give_up(30.0)
        thread.join()
        assert answers[0][0] == 503


def test_clients_share_the_server():
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


def test_a_connection_is_used_again():
    with serving() as (end, _, _), connect(end) as connection:
        for prompt in ("ab", "cd"):
            connection.sendall(asking(prompt=prompt))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert json.loads(answer.read())["choices"][0]["text"] == prompt[::-1]


def test_slow_clients_hold_up_nobody():
    """More of each kind than a pool of threads would have: silent, within a body, and waiting for what never ends."""
    with serving(max_waiting=128) as (end, desk, _), contextlib.ExitStack() as held:
        for content in (b"", POST, asking(prompt="a")[:-1], asking(prompt="x"), asking(prompt="x", stream=True)):
            for _ in range(50):
                held.enter_context(connect(end)).sendall(content)
        wait_until(lambda: desk.num_running == 100)
        assert call(end, "POST", "/v1/completions", {"prompt": "ab"})[1]["choices"][0]["text"] == "ba"


@pytest.mark.slow
def test_who_does_not_go_on_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 0.5)
    monkeypatch.setattr(module, "_HEAD_S", 0.5)
    long = Served(name="letters", tokenizer=Letters(), vocab_size=257, max_context=1 << 20)
    with serving(served=long, max_waiting=64) as (end, _, engine):
        assert raw(end, b"") == b"" == raw(end, POST), "no request"
        assert b" 408 " in raw(end, asking(prompt="a")[:-1]), "a body that never ends"
        # An answer of some 15 MB of which nothing is taken.
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", end.port))
            connection.sendall(asking(prompt=[97] * 100_000, n=32, max_tokens=1))
            wait_until(lambda: engine.seen, what="it is taken up")
            wait_until(lambda: not end._server.server_state.connections, what="it is cut off")
        # Who waits for an answer may wait.
        with connect(end) as connection:
            connection.sendall(asking(prompt="x"))
            connection.settimeout(2.0)
            with pytest.raises(TimeoutError):
                connection.recv(1)


def drip(connection):
    """Send one more byte; whether the server has hung up."""
    try:
        connection.sendall(b"X")
        return bool(select.select([connection], [], [], 0.05)[0]) and connection.recv(65536) == b""
    except ConnectionError:
        return True


def test_a_head_that_drips_in_is_cut_off(monkeypatch):
    """Also the second of a connection, for which there is a deadline of its own."""
    monkeypatch.setattr(module, "_HEAD_S", 0.5)
    with serving() as (end, _, _):
        for first in (b"", GET + b"\r\n"):
            with connect(end) as connection:
                connection.sendall(first)
                wait_until(lambda connection=connection: drip(connection), what="it is cut off")


def test_a_refused_body_that_drips_in_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 0.5)
    with serving() as (end, _, _), connect(end) as connection:
        connection.sendall(POST.replace(b"completions", b"nothing") + b"Content-Length: 100000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
        wait_until(lambda: drip(connection), what="it is cut off")


@pytest.mark.parametrize("limit", ["_MAX_CONNECTIONS", "_MAX_CONNECTIONS_OF_ONE"])
def test_one_connection_too_many_takes_the_place_of_the_one_that_is_idle_for_longest(monkeypatch, limit):
    monkeypatch.setattr(module, limit, 4)
    with serving() as (end, desk, _), contextlib.ExitStack() as held:
        now_open = end._server.server_state.connections

        def hold(content):
            num_before = len(now_open)
            connection = held.enter_context(connect(end))
            connection.sendall(content)
            wait_until(lambda: len(now_open) == num_before + 1)
            return connection

        waiting, dripping = hold(asking(prompt="x")), hold(b"GET /health")
        wait_until(lambda: desk.num_running == 1)
        used = hold(GET + b"\r\n")
        assert b" 200 " in used.recv(65536)
        slow = hold(asking(prompt="x")[:-1])
        for dropped in (dripping, used, slow):
            held.enter_context(connect(end)).sendall(asking(prompt="x"))
            with contextlib.suppress(ConnectionError):
                while dropped.recv(65536):
                    pass
        wait_until(lambda: desk.num_running == 4)
        assert raw(end, b"") == b"", "there is none to take the place of"
        assert desk.num_running == 4 and select.select([waiting], [], [], 0)[0] == []


def test_a_thousand_dripping_connections_keep_nobody_out():
    allow_many_files()
    with serving() as (end, _, _), contextlib.ExitStack() as held:
        for _ in range(1000):
            held.enter_context(connect(end)).sendall(b"GET /health HTTP/1.1\r\nX:")
        assert call(end, "POST", "/v1/completions", {"prompt": "ab"})[0] == 200
        assert len(end._server.server_state.connections) <= module._MAX_CONNECTIONS_OF_ONE


def test_without_the_packages_the_extra_is_named():
    for package in ("starlette", "uvicorn"):
        code = (
            "import sys\nsys.modules[sys.argv[1]] = None\nfrom hybridflow.cli import main\nsys.exit(main(sys.argv[2:]))"
        )
        argv = [sys.executable, "-c", code, package, "serve", "--model", "absent"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == REQUEST and len(done.stderr.splitlines()) == 1, done.stderr
        assert package in done.stderr and "pip install 'hybridflow[serve]'" in done.stderr


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
    for value in (None, "", "a\nb", "é", "secret "):
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
            Endpoint("127.0.0.1", end.port, served=SERVED, desk=desk, token=None, request_s=1.0)
        with pytest.raises(ConfigError, match="cannot be listened on"):
            Endpoint("192.0.2.1", 0, served=SERVED, desk=desk, token=None, request_s=1.0)
