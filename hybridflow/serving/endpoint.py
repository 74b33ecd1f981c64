"""The HTTP side of ``hybridflow serve``: one thread for each connection, all on rank 0. No torch.

Whoever can connect is not trusted: bodies, headers and waits have bounds, and what a client sends is answered with an
error of HTTP at worst.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import ipaddress
import json
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from queue import Empty
from socketserver import TCPServer
from typing import Any

from hybridflow import __version__
from hybridflow.errors import ConfigError
from hybridflow.rollout.texts import settled_text
from hybridflow.serving.api import (
    ApiError,
    Ask,
    Sample,
    Served,
    completion,
    failure,
    head,
    models,
    piece,
    read_ask,
    text_of,
    usage,
)
from hybridflow.serving.desk import Desk, Event, Ticket

MAX_BODY_BYTES = 8 << 20
_MAX_CONNECTIONS = 512
_QUIET_S = 60.0
"""A connection that sends nothing for so long is closed, and a body must be there within it."""

_LOOK_S = 0.2
"""So often a thread that waits looks whether its client is there."""

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_of(arguments: argparse.Namespace) -> bytes | None:
    """What clients must send; None: nothing.

    Raises:
        ConfigError: The variable that was named holds none.
    """
    if arguments.token_env is None:
        return None
    token = os.environ.get(arguments.token_env, "")
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"--token-env {arguments.token_env}: this environment variable is unset or empty, or is not printable "
            "ASCII; export it with the token"
        )
    return token.encode()


class Endpoint(ThreadingHTTPServer):
    """Listens and answers.

    Args:
        host: Address.
        port: 0 for a free one.
        served: What is served.
        desk: Where requests are handed in.
        token: What clients must send; None: nothing.
        request_s: A request may take so long, in seconds.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, *, served: Served, desk: Desk, token: bytes | None, request_s: float
    ) -> None:
        self.served, self.desk, self.token, self.request_s = served, desk, token, request_s
        self.since_s = int(time.time())
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host = host
        self._room = threading.Semaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot be listened on: {error.strerror or error}; choose another port, "
                "0 for a free one, or an address of this machine"
            ) from error

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_address[1]}/v1"

    def server_bind(self) -> None:
        """Listen, without asking a name server what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self._host, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or none where there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is nothing to tell of; what else goes wrong is answered before."""


class _Gone(Exception):
    """The client has left."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Endpoint
    protocol_version = "HTTP/1.1"
    server_version = f"hybridflow/{__version__}"
    sys_version = ""
    timeout = _QUIET_S

    def do_GET(self) -> None:
        """Health, and the list of models."""
        with self._answering():
            if self.path == "/health":
                self._send(200, {"status": "ok"})
                return
            self._check_client()
            if self.path != "/v1/models":
                raise ApiError(404, f"no GET {self.path:.80}; there are /health and /v1/models")
            self._send(200, models(self.server.served, self.server.since_s))

    def do_POST(self) -> None:
        """Completions."""
        with self._answering():
            self._check_client()
            kinds = {"/v1/completions": False, "/v1/chat/completions": True}
            if self.path not in kinds:
                raise ApiError(404, f"no POST {self.path:.80}; there are {' and '.join(kinds)}")
            ask = read_ask(self._body(), self.server.served, is_chat=kinds[self.path])
            if ask.is_streamed and self.server.served.tokenizer is None:
                raise ApiError(400, "the model has no tokenizer, so there is no text to stream; set stream to false")
            ticket = self.server.desk.submit(ask)
            try:
                answer_id = f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
                (self._stream if ask.is_streamed else self._whole)(ask, ticket, answer_id)
            finally:
                self.server.desk.leave(ticket)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what clients send is not for the console."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library finds wrong with a request, in the form of all errors."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self._send(code, ApiError(code, message or "malformed request").body())

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Whatever goes wrong is an answer; a client that has left needs none."""
        try:
            yield
        except (_Gone, OSError):
            self.close_connection = True
        except ApiError as error:
            # What was not read of the request would be taken for the next one.
            self.close_connection = True
            with contextlib.suppress(OSError):
                self._send(error.status, error.body())
        except Exception as error:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self._send(500, ApiError(500, f"an error of the server's own: {type(error).__name__}").body())
            raise

    def _check_client(self) -> None:
        """Refuse who has no token; without tokens, a web page that has put its own name on this address.

        Raises:
            ApiError: It is refused.
        """
        if self.server.token is not None:
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, b"Bearer " + self.server.token):
                raise ApiError(401, "the token is missing or wrong; send it as Authorization: Bearer TOKEN")
            return
        name = self.headers.get("Host", "").lower()
        name = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if name not in (*_LOCAL_NAMES, str(self.server.server_address[0])):
            raise ApiError(403, "this server answers to names of this machine alone; use http://127.0.0.1")

    def _body(self) -> bytes:
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Others may be sent by any web page.
            raise ApiError(415, "expected Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not length.isascii() or not length.isdigit():
            raise ApiError(411, "expected Content-Length with the number of bytes of the body")
        if len(length) > 12 or int(length) > MAX_BODY_BYTES:
            raise ApiError(413, f"a body of {length:.20} bytes; at most {MAX_BODY_BYTES} are taken")
        left, parts, end_s = int(length), [], time.monotonic() + _QUIET_S
        while left:
            part = self.rfile.read1(min(left, 1 << 16))
            if not part:
                raise _Gone
            if time.monotonic() > end_s:
                raise ApiError(408, f"the body was not there within {_QUIET_S:g} s")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _events(self, ask: Ask, ticket: Ticket) -> Iterator[Event]:
        """What comes of a request, until all its samples have ended.

        Raises:
            ApiError: It took too long, or the server ends.
            _Gone: The client has left.
        """
        left, end_s = len(ask.prompts) * ask.count, time.monotonic() + self.server.request_s
        while left:
            try:
                event = ticket.events.get(timeout=_LOOK_S)
            except Empty:
                self._look_at_client()
                if time.monotonic() > end_s:
                    raise ApiError(504, f"not done within {self.server.request_s:g} s; ask for fewer tokens") from None
                continue
            if event is None:
                raise ApiError(503, "the server ends")
            left -= event.sample is not None
            yield event
            if time.monotonic() > end_s and left:
                raise ApiError(504, f"not done within {self.server.request_s:g} s; ask for fewer tokens")

    def _look_at_client(self) -> None:
        ready, _, _ = select.select([self.connection], [], [], 0)
        if ready and not self.connection.recv(1, socket.MSG_PEEK):
            raise _Gone

    def _whole(self, ask: Ask, ticket: Ticket, answer_id: str) -> None:
        samples: dict[int, Sample] = {
            event.place: event.sample for event in self._events(ask, ticket) if event.sample is not None
        }
        ordered = [samples[index] for index in sorted(samples)]
        self._send(200, completion(ask, self.server.served, ordered, answer_id))

    def _stream(self, ask: Ask, ticket: Ticket, answer_id: str) -> None:
        """Server-sent events, up to ``data: [DONE]``; then the connection ends."""
        tokenizer, samples = self.server.served.tokenizer, []
        sent: dict[int, str] = {}
        assert tokenizer is not None, "asked before"
        self.close_connection = True
        events = self._events(ask, ticket)
        # What is refused at once is an error of its own, as without a stream.
        first = next(events)
        _check_sample(first)
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-cache"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        begin = head(ask, self.server.served, answer_id, is_piece=True)
        try:
            for event in chain([first], events):
                self._look_at_client()
                _check_sample(event)
                if event.sample is None:
                    text, finish = settled_text(event.tokens, ask.stop, tokenizer), None
                else:
                    text, finish = text_of(ask, self.server.served, event.sample.tokens), event.sample.finish
                    samples.append(event.sample)
                before = sent.get(event.place, "")
                if finish is None and not (text.startswith(before) and len(text) > len(before)):
                    continue
                sent[event.place] = text
                self._event({**begin, "choices": [piece(ask, text[len(before) :], event.place, finish)]})
        except ApiError as error:
            self._event(error.body())
        else:
            if ask.with_usage:
                self._event({**begin, "choices": [], "usage": usage(ask, samples)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: %b\n\n" % json.dumps(value).encode())

    def _send(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def _check_sample(event: Event) -> None:
    if event.sample is not None and event.sample.finish == "failed":
        raise failure(event.sample)
