"""Generates by asking servers over HTTP: many requests in flight, tried again where a server fails."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridflow.config.rollout import SamplingEngineConfig
from hybridflow.errors import EngineError
from hybridflow.rollout.calls import take_all
from hybridflow.rollout.engines.answers import (
    Answer,
    failed,
    other_refusal,
    request_seed,
    response_of,
    stopped,
)
from hybridflow.rollout.engines.wire import BadAnswer, Flight, Lines, Refused, Unavailable, backoff_s
from hybridflow.rollout.request import Progress, Request, Response, check_requests, model_refusal

LOOK_S = 0.1
"""So often generating looks up: what is finished is handed over, what is late is ended, and it may be told to stop."""


_ASKED_S = 60.0
"""Longest wait for what a server says of itself."""


class Api(Protocol):
    """How a kind of server is asked.

    Attributes:
        path: Where.
    """

    path: str

    def refusal(self, request: Request) -> str | None:
        """Return what in a request the server cannot do, or None if it can do all."""
        ...

    def body(self, request: Request, seed: int) -> dict[str, Any]:
        """Return the body to send."""
        ...

    def read(self, request: Request, answer: Any) -> Answer:
        """Read the answer. Raises BadAnswer: it has not the form that it should."""
        ...


@dataclass(kw_only=True, eq=False)
class HttpEngine:
    """Generates with servers of one model, see ``request.Engine``. No other rank takes part.

    Attributes:
        lines: Connections to the servers.
        api: How they are asked.
        settings: ``rollout.engine`` of the recipe.
        seed: Seed of the noise.
        vocab_size: Ids that the trainer knows; None: any will do.
        version: Number of the weights, noted beside each token; the caller's to set.
    """

    lines: Lines
    api: Api
    settings: SamplingEngineConfig
    seed: int
    vocab_size: int | None
    version: int = 0

    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """Return one response for each request, in their order; ``failed`` if no try got a valid answer.

        Raises:
            DataError: The server cannot be asked for what a request wants; nothing has been sent.
            EngineError: All requests fail: the server is not there, or does not let us in.
            RolloutStopped: ``progress`` said to stop; what was under way begins anew.
        """
        check_requests(requests, self.refusal, "rollout.engine: ")
        run = _Run(len(requests), lambda number, run: self._try_all(run, number, requests[number], purpose))
        try:
            return self._collect(run, requests, progress)
        finally:
            run.end()

    def refusal(self, request: Request) -> str | None:
        """Return why a request cannot be met, or None if it can."""
        reason = model_refusal(request, None, self.vocab_size)
        return reason or other_refusal(request) or self.api.refusal(request)

    def weights_changed(self) -> None:
        """Do nothing: a server's weights do not follow the trainer's."""

    def close(self) -> None:
        """Hang up."""
        self.lines.close()

    def _collect(self, run: _Run, requests: list[Request], progress: Progress | None) -> list[Response]:
        responses: dict[int, Response] = {}
        began_s = time.monotonic()
        run.start(min(self.settings.max_in_flight, len(requests)))
        while len(responses) < len(requests):
            new = run.wait()
            for number, outcome in new:
                if isinstance(outcome, BaseException):
                    raise outcome
                responses[number] = replace(outcome, latency_s=time.monotonic() - began_s)
            _check_hope(responses, min(self.settings.max_in_flight, len(requests)))
            if progress is None:
                continue
            if new:
                progress.finished([(requests[number], responses[number]) for number, _ in new])
            if len(responses) < len(requests) and progress.is_stopping():
                raise stopped(requests, responses)
        return [responses[number] for number in range(len(requests))]

    def _try_all(self, run: _Run, number: int, request: Request, purpose: str) -> Response:
        """Send a request until it is answered, its tries are used up, or its time is over."""
        body = self.api.body(request, request_seed(self.seed, purpose, request))
        flight = run.begin(number, self.settings.deadline_s)
        error: Exception = TimeoutError()
        for attempt in range(self.settings.retries + 1):
            try:
                return self._try(flight, number + attempt, request, body)
            except Refused as refused:
                if refused.is_for_all:
                    raise EngineError(f"{refused}; look at rollout.engine.urls, model and auth_env") from None
                return failed(request, str(refused))
            except (Unavailable, BadAnswer) as failure:
                error = failure
            wait_s = backoff_s(attempt, getattr(error, "after_s", None))
            if attempt == self.settings.retries or wait_s >= flight.left_s() or run.is_ended.wait(wait_s):
                break
        if flight.left_s() == 0 or isinstance(error, TimeoutError):
            told = f"not answered within rollout.engine.deadline_s={self.settings.deadline_s:g}"
        else:
            told = f"given up after {attempt + 1} tries"
        return failed(request, f"{told}; the last: {error}")

    def _try(self, flight: Flight, turn: int, request: Request, body: Mapping[str, Any]) -> Response:
        line = self.lines.take(turn)
        try:
            if not flight.board(line):
                raise Unavailable(f"{line.url}: ended")
            timeout_s = max(min(self.settings.read_timeout_s, flight.left_s()), 1e-3)
            answer = line.ask("POST", self.api.path, body, timeout_s=timeout_s)
        finally:
            flight.board(None)
            self.lines.give_back(line)
        try:
            told = self.api.read(request, answer)
            return response_of(request, told, version=self.version, vocab_size=self.vocab_size)
        except BadAnswer as error:
            raise BadAnswer(f"{line.url}: {error}") from None


def ask_once(lines: Lines, path: str, settings: SamplingEngineConfig) -> tuple[str, Any]:
    """Get the JSON of the first server, tried as often as a request is.

    Returns:
        The server's address, and what it said.

    Raises:
        EngineError: It does not answer, or refuses.
        Refused: It has no such path.
    """
    flight, error = Flight(time.monotonic() + settings.deadline_s), None
    timeout_s = min(settings.read_timeout_s, _ASKED_S)
    for attempt in range(settings.retries + 1):
        line = lines.take(attempt)
        try:
            return line.url, line.ask("GET", path, None, timeout_s=min(timeout_s, flight.left_s() + 1e-3))
        except (Unavailable, BadAnswer) as failure:
            error = failure
        finally:
            lines.give_back(line)
        wait_s = backoff_s(attempt, getattr(error, "after_s", None))
        if attempt == settings.retries or wait_s >= flight.left_s():
            break
        time.sleep(wait_s)
    raise EngineError(f"{error}; given up after {attempt + 1} tries: is the server of rollout.engine.urls up?")


def _check_hope(responses: Mapping[int, Response], enough: int) -> None:
    """Do not go through all requests where no server works: if the first all fail, so will the others."""
    errors = [response.error for response in responses.values() if response.finish == "failed"]
    if len(errors) >= max(enough, 2) and len(errors) == len(responses):
        raise EngineError(f"all of the first {len(errors)} requests failed; the first: {errors[0]}")


class _Run:
    """Requests being tried by threads, which leave what comes of each in a queue.

    Args:
        count: Number of requests.
        work: ``(number, run)`` to a response.
    """

    def __init__(self, count: int, work: Callable[[int, _Run], Response]) -> None:
        self.is_ended = threading.Event()
        self._work = work
        self._waiting = deque(range(count))
        self._flights: dict[int, Flight] = {}
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[tuple[int, Response | BaseException]] = queue.SimpleQueue()

    def start(self, num_threads: int) -> None:
        """Begin."""
        for _ in range(num_threads):
            # What is left of them when the run ends early waits for nothing but its own connection.
            threading.Thread(target=self._serve, name="http-engine", daemon=True).start()

    def begin(self, number: int, deadline_s: float) -> Flight:
        """Start a request's time limit."""
        flight = Flight(time.monotonic() + deadline_s)
        with self._lock:
            self._flights[number] = flight
        if self.is_ended.is_set():
            flight.end()
        return flight

    def wait(self) -> Sequence[tuple[int, Response | BaseException]]:
        """Return what has arrived since the last call, perhaps nothing; end late requests."""
        found = take_all(self._results, LOOK_S)
        with self._lock:
            for number, _ in found:
                self._flights.pop(number, None)
            late = [flight for flight in self._flights.values() if flight.left_s() == 0]
        for flight in late:
            flight.end()
        return found

    def end(self) -> None:
        """Begin no other request, and end those that are under way."""
        self.is_ended.set()
        with self._lock:
            flights = list(self._flights.values())
        for flight in flights:
            flight.end()

    def _serve(self) -> None:
        while not self.is_ended.is_set():
            try:
                number = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._results.put((number, self._work(number, self)))
            except BaseException as error:  # told where it is waited for
                self._results.put((number, error))
                return
