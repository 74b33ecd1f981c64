"""JSON to servers over HTTP connections that stay open: one try of one request at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from hybridflow.errors import ConfigError

MOST_BYTES = 1 << 26
"""An answer is no longer than this, unless said otherwise."""

BACKOFF_S = 0.5
"""About so long one waits before the second try; twice as long before each further one."""

MOST_BACKOFF_S = 30.0
"""No wait is longer, whatever a server asks for."""

CONNECT_TIMEOUT_S = 10.0
"""Longest wait for a connection, after which the request is tried again."""

_EXCERPT = 300
_ALL_FAIL = (300, 301, 302, 303, 307, 308, 401, 403, 404, 405)
"""With these every request fails, not this one alone."""


class BadAnswer(Exception):
    """An answer that cannot be right; the message says what was found."""


class Unavailable(Exception):
    """It may go better the next time.

    Attributes:
        after_s: The server asked to wait so long; None: it did not.
    """

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Refused(Exception):
    """The server will not do it however often it is asked.

    Attributes:
        is_for_all: So it would say to every request.
    """

    def __init__(self, reason: str, *, is_for_all: bool) -> None:
        super().__init__(reason)
        self.is_for_all = is_for_all


def backoff_s(attempt: int, after_s: float | None = None) -> float:
    """Return the wait after a failed try: it doubles each time, with jitter so that clients spread out.

    Args:
        attempt: Tries before this one.
        after_s: Seconds that the server asked to wait; None: it did not ask.
    """
    drawn = BACKOFF_S * 2.0**attempt * random.uniform(0.5, 1.5)
    return min(drawn if after_s is None else max(drawn, after_s), MOST_BACKOFF_S)


def token_of(auth_env: str | None, key: str = "rollout.engine.auth_env") -> str | None:
    """Return the secret in an environment variable, or None if no variable is named.

    Args:
        auth_env: The variable's name.
        key: Where the recipe names it, for the message.

    Raises:
        ConfigError: The variable is not set, or holds what cannot be in a header; its value is not told.
    """
    if auth_env is None:
        return None
    value = os.environ.get(auth_env, "")
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        found = "nothing" if not value else "something with blanks or unprintable signs"
        raise ConfigError(f"{key}={auth_env}: found {found} in that environment variable, expected the token")
    return value


class Line:
    """A connection to one server, opened when needed. One thread asks; any may hang up."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._parts = urlsplit(url)
        self._token = token
        self._connection: http.client.HTTPConnection | None = None
        self._was_used = False

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        most_bytes: int = MOST_BYTES,
    ) -> Any:
        """Return the parsed JSON of an answer.

        Args:
            method: ``GET`` or ``POST``.
            path: Below the url.
            body: Sent as JSON; None: nothing.
            timeout_s: Longest silence.
            most_bytes: Longest answer.

        Raises:
            Unavailable: No connection, no answer in time, or the server is busy or broken.
            Refused: It does not want the request.
            BadAnswer: What came is not JSON.
        """
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        try:
            status, after_s, answer = self._exchange(method, path, content, timeout_s, most_bytes)
        except (OSError, ValueError, http.client.HTTPException, AttributeError) as error:
            # ValueError and AttributeError: hung up by another thread in the midst of it. An idle connection may have
            # been closed by the other side at any time.
            if isinstance(error, ConnectionError) and self._was_used:
                self.hang_up()
                return self.ask(method, path, body, timeout_s=timeout_s, most_bytes=most_bytes)
            raise self._lost(error) from None
        if status == 200:
            return self._parsed(answer)
        said = f"{self.url}{path}: answered {status}: {self._excerpt(answer)}"
        if status in (408, 425, 429) or status >= 500:
            raise Unavailable(said, after_s)
        raise Refused(said, is_for_all=status in _ALL_FAIL)

    def hang_up(self) -> None:
        """Close the connection; another thread that waits on it fails."""
        connection, self._connection, self._was_used = self._connection, None, False
        # The thread that waits on it may take the socket out of the connection at any time.
        found = None if connection is None else connection.sock
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            # What that thread reads from stays open until it lets go.
            found.close()

    def _exchange(
        self, method: str, path: str, content: bytes | None, timeout_s: float, most_bytes: int
    ) -> tuple[int, float | None, bytes]:
        connection = self._open()
        connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        connection.request(method, f"{self._parts.path.rstrip('/')}{path}", body=content, headers=headers)
        # What is left unread would keep the socket open.
        with connection.getresponse() as answer:
            body = answer.read(most_bytes + 1)
            if len(body) > most_bytes:
                self.hang_up()
                raise BadAnswer(f"{self.url}{path}: answered with more than {most_bytes} bytes")
            if answer.length:
                raise http.client.IncompleteRead(body, answer.length)
        self._was_used = not answer.will_close
        if answer.will_close:
            self.hang_up()
        return answer.status, _seconds(answer.getheader("Retry-After")), body

    def _open(self) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            assert self._parts.hostname is not None, "addresses are checked before"
            connection = kind(self._parts.hostname, self._parts.port, timeout=CONNECT_TIMEOUT_S)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
        return self._connection

    def _lost(self, error: Exception) -> Unavailable:
        self.hang_up()
        told = "no answer in time" if isinstance(error, TimeoutError) else self._excerpt(str(error).encode())
        return Unavailable(f"{self.url}: {type(error).__name__}: {told}")

    def _parsed(self, answer: bytes) -> Any:
        try:
            return json.loads(answer, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise BadAnswer(f"{self.url}: answered what is not JSON: {self._excerpt(answer)}") from None

    def _excerpt(self, answer: bytes) -> str:
        """Return the beginning of a server's answer, in one line and without the token."""
        text = answer.decode("utf-8", "replace")
        if self._token is not None:
            text = text.replace(self._token, "***")
        text = " ".join(text.split())
        return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


class Lines:
    """Connections to several servers, kept while they are idle."""

    def __init__(self, urls: Sequence[str], token: str | None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self._token = token
        self._idle: dict[str, deque[Line]] = {url: deque() for url in self.urls}

    def take(self, number: int) -> Line:
        """Return a connection to the server whose turn it is."""
        url = self.urls[number % len(self.urls)]
        try:
            return self._idle[url].pop()
        except IndexError:
            return Line(url, self._token)

    def give_back(self, line: Line) -> None:
        """Return a connection to the idle ones."""
        self._idle[line.url].append(line)

    def close(self) -> None:
        """Hang up all that are idle."""
        for lines in self._idle.values():
            while lines:
                lines.pop().hang_up()


class Flight:
    """A request that is under way, and may be ended from outside.

    Attributes:
        deadline: Monotonic time after which it has failed.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._line: Line | None = None
        self._lock = threading.Lock()
        self._is_ended = False

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def board(self, line: Line | None) -> bool:
        """Use a connection, or none; False: it was ended."""
        with self._lock:
            self._line = line
            return not self._is_ended

    def end(self) -> None:
        """Hang up, and use no other connection."""
        with self._lock:
            self._is_ended = True
            if self._line is not None:
                self._line.hang_up()


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; dates are ignored."""
    try:
        value = math.nan if text is None else float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
