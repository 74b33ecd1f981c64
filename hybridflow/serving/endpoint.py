"""The HTTP side of ``hybridflow serve``: the one door to starlette and uvicorn. One thread, on rank 0. No torch.

Whoever can connect is not trusted: connections, bodies and waits have bounds, and errors have OpenAI's form.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from hybridflow.errors import ConfigError
from hybridflow.rollout.texts import GrowingText, Texts, settled_text
from hybridflow.serving import api
from hybridflow.serving.api import ApiError, Ask, Sample, Served
from hybridflow.serving.desk import Desk, Event
from hybridflow.serving.scores import Scored

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from hybridflow.serving.heads import StrictConnection
except ImportError as error:
    raise ConfigError(
        f"hybridflow serve needs the packages starlette and uvicorn: {error}; pip install 'hybridflow[serve]'"
    ) from error

MAX_BODY_BYTES, MAX_BODY_WITH_IMAGES_BYTES = 8 << 20, 32 << 20
_MAX_CONNECTIONS, _MAX_CONNECTIONS_OF_ONE = 512, 384
"""One more takes the place of the one that has had no request for the longest, of all or of the same address."""

_HEAD_S = 10
"""The head of a request must be whole within it, from the connection or from its first byte on."""

_QUIET_S = 60
"""A body, or the next request, must be there within it. A client that reads none of its answer has up to twice that."""

_END_S = 5
_LATE = 408
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_ROUTES = "GET /health, GET /v1/models, POST /v1/completions and POST /v1/chat/completions"


def is_loopback(host: str) -> bool:
    """Return whether an address is of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_of(arguments: argparse.Namespace) -> bytes | None:
    """Return the token that clients must send, or None if they need none.

    Raises:
        ConfigError: The variable that was named holds none.
    """
    if arguments.token_env is None:
        return None
    token = os.environ.get(arguments.token_env, "")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-env {arguments.token_env}: this environment variable is unset or empty, or is not printable "
            "ASCII without blanks; export it with the token"
        )
    return token.encode()


class Endpoint:
    """Listens from its making on; answers in a thread, from ``start`` to ``close``.

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

    def __init__(
        self, host: str, port: int, *, served: Served, desk: Desk, token: bytes | None, request_s: float
    ) -> None:
        self.served, self.desk, self.request_s = served, desk, request_s
        self.max_body_bytes = MAX_BODY_BYTES if served.looker is None else MAX_BODY_WITH_IMAGES_BYTES
        self.texts = None if served.tokenizer is None else Texts(served.tokenizer)
        self._token, self._since_s = token, int(time.time())
        self._socket = _listen(host, port)
        self._address, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", _Completions(self, is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", _Completions(self, is_chat=True), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _refuse))
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            # Bad requests are not for the console. Errors of our own are: Python writes them to stderr.
            log_config=None,
            log_level="error",
            timeout_keep_alive=_QUIET_S,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and return when the answers that have begun are sent, or ``_END_S`` is over."""
        self._server.should_exit = True
        self._thread.join(2 * _END_S)

    def check_client(self, request: Request) -> None:
        """Refuse who has no token; without tokens, a web page that has put its own name on this address.

        Raises:
            ApiError: It is refused.
        """
        if self._token is not None:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            is_same = hmac.compare_digest(given.encode("latin-1"), self._token)
            # HTTP has schemes in any case.
            if not is_same or scheme.lower() != "bearer":
                raise ApiError(401, "the token is missing or wrong; send it as Authorization: Bearer TOKEN")
            return
        name = request.headers.get("Host", "").lower()
        name = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if name not in (*_LOCAL_NAMES, self._address):
            raise ApiError(403, "this server answers to names of this machine alone; use http://127.0.0.1")

    async def _health(self, request: Request) -> Response:
        if self.desk.is_closed:
            raise ApiError(503, "the server is about to end")
        return _json(200, {"status": "ok"})

    async def _models(self, request: Request) -> Response:
        self.check_client(request)
        return _json(200, api.models(self.served, self._since_s))

    async def _model(self, request: Request) -> Response:
        self.check_client(request)
        api.check_name(request.path_params["name"], self.served)
        return _json(200, api.models(self.served, self._since_s)["data"][0])


def _listen(host: str, port: int) -> socket.socket:
    is_v6 = ":" in host
    try:
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_v6)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot be listened on: {error}; choose another port, 0 for a free one, or "
            "an address of this machine"
        ) from error


class _Connection(H11Protocol):
    """A connection with the bounds that uvicorn leaves to a proxy: strict heads, their number, their waits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = self._http = StrictConnection()
        self._address = "" if self.client is None else self.client[0]
        self._idle_since_s = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._begin_head()
        self._look(0)
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._http.awaits_head:
            self._end_head()
        elif self._head_timer is None:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._next_look.cancel()
        self._end_head()

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        if self._http.awaits_body:
            self.loop.call_later(_QUIET_S, self._end_rest, self.cycle)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            # This is the answer, whatever its handler may say yet.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def _end_rest(self, cycle: object) -> None:
        """Close the connection if the body of a request that was refused still comes."""
        if self.cycle is cycle and self._http.awaits_body:
            self.transport.abort()

    def _begin_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _look(self, before: int) -> None:
        """Close the connection of a client that has taken nothing of its answer since the last look."""
        num_unsent = self.transport.get_write_buffer_size()
        if 0 < num_unsent == before:
            self.transport.abort()
        self._next_look = self.loop.call_later(_QUIET_S, self._look, num_unsent)

    def _make_room(self) -> None:
        """Where there are too many connections, close the one that has had no request for the longest; else this."""
        crowd = cast("set[_Connection]", self.connections)
        if len(crowd) <= _MAX_CONNECTIONS:
            crowd = {each for each in crowd if each._address == self._address}
            if len(crowd) <= _MAX_CONNECTIONS_OF_ONE:
                return
        idle = [each for each in crowd if each is not self and each._is_idle()]
        dropped = min(idle, key=lambda each: each._idle_since_s, default=self)
        dropped.transport.abort()
        # The loop tells it of its end later, and would count it until then.
        self.connections.discard(dropped)

    def _is_idle(self) -> bool:
        """Return whether no request is there in full that has no answer yet."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer with an error. uvicorn drops the rest of the body as it comes: a client that sends reads no answer yet.

    Where nothing more of the body may come the connection is closed.
    """
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        # The methods that are allowed.
        headers = dict(error.headers or {})
        error = ApiError(error.status_code, f"no {request.method} {request.scope['path']:.80}; there are {_ROUTES}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"an error of the server's own: {type(error).__name__}")
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == _LATE or "Expect" in request.headers:
        headers["Connection"] = "close"
    return _json(error.status, error.body(), headers)


def _json(status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    # ASCII, not starlette's JSONResponse: clients may send halves of surrogate pairs, which are no UTF-8.
    return Response(json.dumps(value), status, headers, media_type="application/json")


class _Completions:
    """Handler of a route that generates."""

    def __init__(self, endpoint: Endpoint, *, is_chat: bool) -> None:
        self._endpoint, self._is_chat = endpoint, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a client that has left needs no answer."""
        request, served = Request(scope, receive), self._endpoint.served
        self._endpoint.check_client(request)
        with contextlib.suppress(ClientDisconnect):
            # In threads: others go on while a long prompt is read, or a long answer written.
            body = await _body(request, self._endpoint.max_body_bytes)
            ask = await run_in_threadpool(api.read_ask, body, served, is_chat=self._is_chat)
            if ask.is_streamed and served.tokenizer is None:
                raise ApiError(400, "the model has no tokenizer, so there is no text to stream; set stream to false")
            answer_id = f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
            async with contextlib.aclosing(self._events(ask, receive)) as events:
                if ask.is_streamed:
                    await self._stream(ask, events, answer_id, send)
                    return
                found = {event.place: event.sample async for event in events if event.sample is not None}
                samples = [found[place] for place in sorted(found)]
                answer = await run_in_threadpool(api.completion, ask, served, samples, answer_id)
                await _json(200, answer)(scope, receive, send)

    async def _events(self, ask: Ask, receive: Receive) -> AsyncGenerator[Event, None]:
        """Yield the events of a request until all its samples have ended. Closing it early cancels the request.

        Raises:
            ApiError: A sample failed, it took too long, there are too many, or the server ends.
            ClientDisconnect: The client has left.
        """
        loop, request_s = asyncio.get_running_loop(), self._endpoint.request_s
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()

        def tell(event: Event | ApiError) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        async def watch_client() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(ClientDisconnect())

        ticket = self._endpoint.desk.submit(ask, tell)
        num_left = len(ticket.ids)
        late = ApiError(504, f"not done within {request_s:g} s; ask for fewer tokens")
        timer, watch = loop.call_later(request_s, tell, late), asyncio.create_task(watch_client())
        try:
            while num_left:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event.sample is not None:
                    num_left -= 1
                    if event.sample.finish == "failed":
                        raise api.failure(event.sample)
                yield event
        finally:
            timer.cancel()
            watch.cancel()
            self._endpoint.desk.leave(ticket)

    async def _stream(self, ask: Ask, events: AsyncIterator[Event], answer_id: str, send: Send) -> None:
        """Send server-sent events, up to ``data: [DONE]``."""
        served, sent, samples = self._endpoint.served, dict[int, str](), list[Sample]()
        growing: dict[int, GrowingText] = {}
        untold: dict[int, Scored] = {}
        num_told = Counter[int]()
        texts = self._endpoint.texts
        assert texts is not None, "asked before"
        # What is refused at once is an error of its own, as without a stream.
        event: Event | None = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        begin = api.head(ask, served, answer_id, is_piece=True)
        try:
            while event is not None:
                if event.sample is None and ask.has_tools:
                    # A call is known when it is whole.
                    event = await anext(events, None)
                    continue
                if event.sample is None:
                    whole = growing.setdefault(event.place, GrowingText(texts)).add(event.new.tokens)
                    if ask.with_log_probs:
                        untold[event.place] = untold.get(event.place, Scored()) + event.new
                    text, finish = settled_text(whole, ask.stop), None
                else:
                    text, finish = api.text_of(ask, served, event.sample.tokens), event.sample.finish
                    samples.append(event.sample)
                    if ask.with_log_probs:
                        known = Scored(event.sample.tokens, event.sample.log_probs, event.sample.top_log_probs)
                        untold[event.place] = known.after(num_told[event.place])
                is_first, before = event.place not in sent, sent.get(event.place, "")
                if finish is not None or (text.startswith(before) and len(text) > len(before)):
                    sent[event.place] = text
                    new = untold.pop(event.place, Scored())
                    num_told[event.place] += len(new.tokens)
                    more = text[len(before) :]
                    choice = api.piece(ask, served, more, new, event.place, finish, is_first=is_first)
                    await send(_server_sent({**begin, "choices": [choice]}))
                event = await anext(events, None)
            if ask.with_usage:
                await send(_server_sent({**begin, "choices": [], "usage": api.usage(ask, samples)}))
        except ApiError as error:
            await send(_server_sent(error.body()))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


_STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


def _server_sent(value: dict[str, Any]) -> Message:
    content = b"data: %b\n\n" % json.dumps(value).encode()
    return {"type": "http.response.body", "body": content, "more_body": True}


async def _body(request: Request, max_bytes: int) -> bytes:
    """Read a request's body.

    Raises:
        ApiError: It is too large, too slow, or no JSON.
        ClientDisconnect: The client has left.
    """
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        # Others may be sent by any web page.
        raise ApiError(415, "expected Content-Type: application/json")
    try:
        return await asyncio.wait_for(_read(request, max_bytes), _QUIET_S)
    except asyncio.TimeoutError:
        raise ApiError(_LATE, f"the body was not there within {_QUIET_S:g} s") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    # uvicorn has checked that it is a number. Who waits for "100 Continue" sends nothing in vain.
    if int(request.headers.get("Content-Length", "0")) <= max_bytes:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise ApiError(413, f"the body is too large; at most {max_bytes} bytes are taken")
