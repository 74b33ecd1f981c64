"""Scores of samples within a policy: tries, what is done where all fail, and what is known already. No torch.

A sample that fails harms no other. Where a call for several fails as a whole, what is tried again are its halves, so
that a sample that no call survives is found; where some of its samples fail, these alone are.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import heapq
import itertools
import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hybridflow.config.rewards import RewardConfig
from hybridflow.errors import RewardError
from hybridflow.observe.activity import waiting_for
from hybridflow.observe.rank_log import own_log
from hybridflow.plugins import place_of
from hybridflow.rewards.arguments import SIGNATURES
from hybridflow.rewards.runners import Runner
from hybridflow.rewards.sample import Outcome, Sample, Unscored, as_scores
from hybridflow.rollout.calls import CallFailed
from hybridflow.rollout.engines.wire import backoff_s

_WAIT_S = 0.1
"""Longest wait for a call before looking up, since some may be late."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to score.

    Attributes:
        name: For messages.
        source: File and line of a user's function, for messages; empty: it is none.
        call: Scores some samples: gives a list, of an asynchronous one an awaitable. May raise ``Unscored``.
        runner: Makes the calls.
        is_async: Whether ``call`` gives an awaitable.
        most_samples: Of one call; None: any number.
        close: Ends what it has begun.
        idle_stops: How many programs it has stopped that used little of their time on cores.
    """

    name: str
    source: str = ""
    call: Callable[[Sequence[Sample]], Any]
    runner: Runner
    is_async: bool = False
    most_samples: int | None = 1
    close: Callable[[], None] = lambda: None
    idle_stops: Callable[[], int] = lambda: 0


@dataclass
class Counts:
    """Outcome of the calls of one time.

    Attributes:
        samples: All of them.
        failed: Those without a score after all tries.
        cached: Those whose score was known.
        retries: Calls beyond the first of a sample.
        calls: All calls.
        calls_s: Their times together.
        longest_s: The longest.
        idle_stops: Programs that were stopped and had used little of their time on cores.
        first_failure: What became of one that failed; empty: none did.
    """

    samples: int = 0
    failed: int = 0
    cached: int = 0
    retries: int = 0
    calls: int = 0
    calls_s: float = 0.0
    longest_s: float = 0.0
    idle_stops: int = 0
    first_failure: str = ""

    def __add__(self, other: Counts) -> Counts:
        """Return the sum of both."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        first_failure = self.first_failure or other.first_failure
        return Counts(**{**sums, "longest_s": max(self.longest_s, other.longest_s), "first_failure": first_failure})


@dataclass(frozen=True, order=True)
class _Chunk:
    """Samples of one call.

    Attributes:
        places: Of them among all.
        attempt: Tries before.
    """

    places: tuple[int, ...]
    attempt: int = 0


@dataclass
class Scorer:
    """Scores samples by one kind of reward, as a recipe's section says.

    Args:
        kind: How.
        settings: The section.
        role: ``reward`` or ``cost``, for messages.

    Attributes:
        counts: Of the last ``scores``.
    """

    kind: Kind
    settings: RewardConfig
    role: str
    counts: Counts = field(default_factory=Counts)
    _known: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of each sample; NaN of one that failed and is to be left out.

        Raises:
            RewardError: One failed, and the policy is to end with an error; names it.
        """
        self.counts = Counts(samples=len(samples))
        idle_before = self.kind.idle_stops()
        same = self._same(samples)
        found: dict[Any, float] = {key: self._known[key] for key in same if key in self._known}
        self.counts.cached = len(samples) - sum(len(same[key]) for key in same if key not in found)
        missing = [key for key in same if key not in found]
        asked = [samples[same[key][0]] for key in missing]
        with _coming_back(), contextlib.closing(self._outcomes(asked)) as outcomes:
            for place, outcome in outcomes:
                key = missing[place]
                if isinstance(outcome, Unscored):
                    found[key] = self._score_of_failed(asked[place], outcome, len(same[key]))
                else:
                    found[key] = outcome
                    self._remember(key, outcome)
        self.counts.idle_stops = self.kind.idle_stops() - idle_before
        scores = [math.nan] * len(samples)
        for key, places in same.items():
            for place in places:
                scores[place] = found[key]
        return scores

    def close(self) -> None:
        """Close what it has opened: connections, processes."""
        self.kind.close()

    def _same(self, samples: Sequence[Sample]) -> dict[Any, list[int]]:
        """Return places of samples by what decides their score; each by itself if nothing is cached."""
        if self.settings.cache == 0:
            return {place: [place] for place in range(len(samples))}
        same: dict[Any, list[int]] = {}
        for place, sample in enumerate(samples):
            whole = [sample.prompt, sample.response, sample.answer, dict(sample.fields)]
            # Rows of a program may hold what JSON has not.
            content = json.dumps(whole, default=repr).encode()
            same.setdefault(hashlib.blake2b(content, digest_size=16).digest(), []).append(place)
        for key in same:
            if key in self._known:
                self._known.move_to_end(key)
        return same

    def _remember(self, key: Any, score: float) -> None:
        if self.settings.cache:
            self._known[key] = score
            if len(self._known) > self.settings.cache:
                self._known.popitem(last=False)

    def _named(self) -> str:
        return f"{self.role} {self.kind.name!r}{f' ({self.kind.source})' if self.kind.source else ''}"

    def _score_of_failed(self, sample: Sample, outcome: Unscored, count: int) -> float:
        where = f"{self._named()} on {sample.place} with response {sample.response[:200]!r}: {outcome}"
        if self.settings.on_failure == "error":
            # What the function's own lines raise is not about its form, unless a text was taken for something else.
            is_form = outcome.is_form or isinstance(outcome.__cause__, TypeError)
            forms = f"; a reward function is one of {SIGNATURES}" if self.kind.source and is_form else ""
            # As TRL's functions do, of which those for conversations read completions[0][0]["content"].
            is_item = isinstance(outcome.__cause__, IndexError | TypeError) and "string ind" in str(outcome.__cause__)
            forms = "; prompts and responses are texts here, not lists of messages" if is_item else forms
            log = "" if outcome.__cause__ is None or own_log() is None else f"; traceback in {own_log()}"
            # By this cause the exit status says that beginning again may help.
            cause = TimeoutError(errno.ETIMEDOUT, str(outcome)) if outcome.is_passing else outcome.__cause__
            raise RewardError(
                f"{where}{log}; mend the function or the sample, or set {self.role}.on_failure to score or drop{forms}"
            ) from cause
        self.counts.failed += count
        self.counts.first_failure = self.counts.first_failure or where
        return self.settings.failure_score if self.settings.on_failure == "score" else math.nan

    def _outcomes(self, samples: Sequence[Sample]) -> Generator[tuple[int, Outcome], None, None]:
        """Yield place and outcome of each sample, as they come, after all tries."""
        runner, numbers = self.kind.runner, itertools.count()
        begun: dict[int, _Chunk] = {}
        waiting: list[tuple[float, _Chunk]] = []

        def begin(chunk: _Chunk) -> None:
            number = next(numbers)
            begun[number] = chunk
            runner.submit(number, self._timed([samples[place] for place in chunk.places]))

        size = len(samples) if self.kind.most_samples is None else self.kind.most_samples
        what, moved_s = self._named(), time.monotonic()
        try:
            for first in range(0, len(samples), max(size, 1)):
                begin(_Chunk(tuple(range(first, min(first + size, len(samples))))))
            while begun or waiting:
                now = time.monotonic()
                while waiting and waiting[0][0] <= now:
                    begin(heapq.heappop(waiting)[1])
                    moved_s = now
                if not begun:
                    time.sleep(waiting[0][0] - now)
                    continue
                wait_s = min([_WAIT_S, *(max(at - now, 0.0) for at, _ in waiting[:1])])
                with waiting_for(what, moved_s):
                    ended = runner.ended(wait_s)
                for number, result in ended:
                    chunk = begun.pop(number)
                    outcomes = self._read(result, len(chunk.places))
                    again = self._again(chunk, outcomes)
                    for each in again:
                        heapq.heappush(waiting, each)
                    tried_again = {place for _, each in again for place in each.places}
                    for place, outcome in zip(chunk.places, outcomes, strict=True):
                        if place not in tried_again:
                            yield place, outcome
                # Whoever takes the outcomes may take its time, too.
                moved_s = time.monotonic() if ended else moved_s
        finally:
            runner.drop()

    def _again(self, chunk: _Chunk, outcomes: Sequence[Outcome]) -> list[tuple[float, _Chunk]]:
        """Return the parts of a call to try again, and when."""
        failures = {
            place: outcome
            for place, outcome in zip(chunk.places, outcomes, strict=True)
            if isinstance(outcome, Unscored) and not outcome.is_final
        }
        if not failures or chunk.attempt == self.settings.retries:
            return []
        after_s = max((failure.after_s or 0.0 for failure in failures.values()), default=0.0)
        at = time.monotonic() + backoff_s(chunk.attempt, after_s)
        places = tuple(failures)
        half = (len(places) + 1) // 2 if len(failures) == len(chunk.places) else len(places)
        parts = [part for part in (places[:half], places[half:]) if part]
        self.counts.retries += len(parts)
        return [(at, _Chunk(part, chunk.attempt + 1)) for part in parts]

    def _read(self, result: Any, count: int) -> list[Outcome]:
        """Return the outcome of a call for each of its samples."""
        if isinstance(result, CallFailed):
            return [Unscored(str(result))] * count
        value, seconds = result
        self.counts.calls += 1
        self.counts.calls_s += seconds
        self.counts.longest_s = max(self.counts.longest_s, seconds)
        if isinstance(value, Unscored):
            return [value] * count
        try:
            return as_scores(value, count)
        except Unscored as failure:
            return [failure] * count

    def _timed(self, samples: Sequence[Sample]) -> Callable[[], Any]:
        """Return a call that does not raise: it returns a result or an error, and its seconds."""
        return functools.partial(_timed_async if self.kind.is_async else _timed, self.kind.call, samples)


def _timed(call: Callable[[Sequence[Sample]], Any], samples: Sequence[Sample]) -> tuple[Any, float]:
    begin_s = time.monotonic()
    try:
        value = call(samples)
    except (Exception, SystemExit) as error:
        value = _unscored(error)
    return value, time.monotonic() - begin_s


async def _timed_async(call: Callable[[Sequence[Sample]], Any], samples: Sequence[Sample]) -> tuple[Any, float]:
    begin_s = time.monotonic()
    try:
        value = await call(samples)
    except (Exception, SystemExit) as error:
        value = _unscored(error)
    return value, time.monotonic() - begin_s


def _unscored(error: BaseException) -> Unscored:
    """Return an error with its kind: a user's function may raise anything, or call sys.exit."""
    if isinstance(error, Unscored):
        return error
    found = Unscored(f"{f'{type(error).__name__}: {error}':.500}{place_of(error)}")
    found.__cause__ = error
    return found


@contextlib.contextmanager
def _coming_back() -> Iterator[None]:
    """Come back to the working directory, which a reward may leave and all that a run writes is relative to."""
    folder = os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
