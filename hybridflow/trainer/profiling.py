"""A closer look at chosen steps: torch's profiler, and NVTX ranges for ``nsys``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hybridflow.config.recipe import Recipe
from hybridflow.observe.rank_log import say
from hybridflow.observe.timeline import Timeline
from hybridflow.observe.timeline_file import TRACE_DIR


class Profiler:
    """Traces the steps of this rank that ``profile.steps`` and ``profile.ranks`` choose.

    The spans of the timeline are ranges of the trace; and, where there is a GPU, NVTX ranges in every step, which cost
    nothing while nobody listens.

    Args:
        recipe: Says which steps and ranks, and where the run keeps its files.
        rank: This one.
        timeline: Whose spans become ranges.
    """

    def __init__(self, recipe: Recipe, rank: int, timeline: Timeline) -> None:
        chosen = recipe.profile.steps if rank in recipe.profile.ranks else ()
        self._steps = frozenset(step for step in chosen if step <= recipe.trainer.steps)
        self._folder, self._rank = Path(recipe.run_dir) / TRACE_DIR, rank
        self._timeline = timeline
        self._running: tuple[int, profile] | None = None
        self._has_gpu = torch.cuda.is_available()
        timeline.mark = _nvtx if self._has_gpu else None
        if self._steps:
            # Of a program that ends without closing its trainer.
            atexit.register(self.drop)

    def begin(self, step: int) -> None:
        """Begin a step, and trace it if it was chosen."""
        if step not in self._steps or self._running is not None:
            return
        # Kineto would tell stderr of each trace that it begins and ends; it looks here at each.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        self._timeline.mark = _both if self._has_gpu else record_function
        self._running = step, profile(activities=activities)
        self._running[1].start()

    def end(self) -> None:
        """End the step, and write its trace if there is one. A write error does not end training."""
        if self._running is None:
            return
        step, running = self._running
        self._stop(running)
        path = self._folder / f"step-{step:06d}-rank-{self._rank:05d}.json.gz"
        aside = path.with_name(f".{path.name.removesuffix('.json.gz')}.tmp.json.gz")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(aside))
            os.replace(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            print(f"hybridflow: rank {self._rank}: {path}: not written: {error}", file=sys.stderr, flush=True)
        else:
            say(f"rank {self._rank}: wrote {path}")
        finally:
            _free(running)

    def drop(self) -> None:
        """Leave a step that was broken off without a trace. A process that ends while it is traced crashes."""
        if self._running is not None:
            _, running = self._running
            self._stop(running)
            _free(running)

    def _stop(self, running: profile) -> None:
        self._running = None
        running.stop()
        self._timeline.mark = _nvtx if self._has_gpu else None


def _free(stopped: profile) -> None:
    """Free a trace now: collected as garbage, after another one has begun, it crashes the process."""
    stopped.profiler = None


@contextlib.contextmanager
def _nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _both(name: str) -> Iterator[None]:
    with record_function(name), _nvtx(name):
        yield
