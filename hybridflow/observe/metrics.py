"""The numbers of each step: one line of JSON, TensorBoard, and one line on the console.

Names are slash-separated, the unit last: ``reward/mean``, ``kl/ref``, ``response/length_mean``, ``time/step_s``,
``time/<phase>_s``, ``throughput/tokens_per_s``, ``validation/score``, ``rollout/logprob_abs_diff``,
``control/overhead_share``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TextIO

from hybridflow.errors import CheckpointError, DataError
from hybridflow.observe.console import rough_duration
from hybridflow.observe.files import replace_by_pieces, writing
from hybridflow.observe.rank_log import say_event

METRICS_FILE = "metrics.jsonl"

_PROGRESS = {
    "actor/loss": "loss {:.4f}",
    "preference/accuracy": "accuracy {:.1%}",
    "preference/margin": "margin {:.3f}",
    "reward/mean": "reward {:.3f}",
    "cost/mean": "cost {:.3f}",
    "kl/ref": "KL {:.4f}",
    "response/length_mean": "length {:.1f}",
    "time/step_s": "{:.2f} s",
    "throughput/tokens_per_s": "{:,.0f} tokens/s",
}
_MINUS_ZERO = re.compile(r"-(0\.?0*)(?![0-9.])")
_RECENT_STEPS = 20
_MOST_LETTERS = 100
_UNNEEDED = ("throughput/tokens_per_s", "response/length_mean")
"""What a line that is too long leaves out, first to last."""


class MetricsLog:
    """Records the metrics of a run; kept by one rank. A context manager, closed at its end.

    Args:
        run_dir: Gets ``metrics.jsonl`` and ``tensorboard/``; made if absent.
        num_steps: Steps of the whole run, for the progress line; None: they are not known.
        prefix: What names in TensorBoard begin with.
        resumed_step: The step whose checkpoint this run goes on from: lines after it, which the run will write again,
            are dropped before anything is added. None is a new run: what an earlier one left is dropped.

    Raises:
        CheckpointError: On resume, a line of ``metrics.jsonl`` is not a step.
        WriteError: The file system refuses.
    """

    def __init__(
        self, run_dir: Path, *, num_steps: int | None, prefix: str = "", resumed_step: int | None = None
    ) -> None:
        self._num_steps, self._prefix = num_steps, prefix
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._path = run_dir / METRICS_FILE
        kept: Iterable[bytes] = ()
        if resumed_step is not None and self._path.exists():
            kept = (line for line, row in _steps(self._path) if row["step"] <= resumed_step)
        with writing(self._path):
            run_dir.mkdir(parents=True, exist_ok=True)
        self._file = self._opened_with(kept)
        self._tensorboard = _EventFile(run_dir / "tensorboard", resumed_step)

    def _opened_with(self, lines: Iterable[bytes]) -> TextIO:
        """Replace the lines of the file, and return it for more."""
        with writing(self._path):
            replace_by_pieces(self._path, lines)
            return self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step, once, and print its progress line. Flushed, so that a killed job has lost nothing.

        Raises:
            WriteError: The file system refuses.
        """
        with writing(self._path):
            self._file.write(_line({"step": step} | dict(metrics)))
            self._file.flush()
        self.draw(step, metrics)
        if "time/step_s" in metrics:
            self._recent_s.append(metrics["time/step_s"])
        left_s = None
        if self._recent_s and self._num_steps is not None:
            left_s = (self._num_steps - step) * fmean(self._recent_s)
        say_event("step", progress_line(step, self._num_steps, metrics, left_s), step=step, metrics=_finite(metrics))

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to the line of the last step: of a validation that the job made up for after it was stopped.

        Raises:
            CheckpointError: A line of ``metrics.jsonl`` is not a step.
            WriteError: The file system refuses.
        """
        self._file.close()
        self._file = self._opened_with(self._amended(step, metrics))

    def _amended(self, step: int, metrics: Mapping[str, float]) -> Iterator[bytes]:
        last: tuple[bytes, dict[str, float]] = b"", {}
        for each in _steps(self._path):
            yield last[0]
            last = each
        line, row = last
        yield _line({**row, **metrics}).encode() if row.get("step") == step else line

    def draw(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to TensorBoard, and no line to the file: of a validation before the first step.

        Raises:
            WriteError: The file system refuses.
        """
        self._tensorboard.add_step(step, {self._prefix + name: value for name, value in metrics.items()})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Add texts in Markdown to TensorBoard, by name.

        Raises:
            WriteError: The file system refuses.
        """
        self._tensorboard.add_texts(step, {self._prefix + name: text for name, text in texts.items()})

    def close(self) -> None:
        """Close the files. Closing twice is harmless."""
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _EventFile:
    """A file of TensorBoard's, written at once; TensorBoard's own writer has a thread that ends in a traceback.

    Args:
        folder: Made if absent.
        resumed_step: TensorBoard forgets the steps after it, of the files that are already there; None: all steps.

    Raises:
        WriteError: The file system refuses.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        # TensorBoard reads the files in the order of their names.
        number = f"{next(self._numbers):06d}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._path = folder / name
        first_step = 0 if resumed_step is None else resumed_step + 1
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(self._path.open("wb"))
        self._add(file_version="brain.Event:2")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step. Raises WriteError when the file system refuses."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=self._summary(value=values))

    def add_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Add texts of a step, which TensorBoard shows as Markdown. Raises WriteError when the file system refuses."""
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        values = [
            self._summary.Value(
                tag=name, metadata=about, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()])
            )
            for name, text in texts.items()
        ]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        self._writer.close()

    def _add(self, **what: object) -> None:
        with writing(self._path):
            self._writer.write(self._event(wall_time=time.time(), **what).SerializeToString())
            self._writer.flush()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Read ``metrics.jsonl``: one dict per step, with ``step`` and the metrics.

    A metric that was not finite, which JSON cannot hold, is null in the file and NaN here.

    A last line without its newline was cut short by a crash, or is being written now, and is left out.

    Raises:
        DataError: The file is absent.
        CheckpointError: Another line is not a JSON object of numbers with a step.
    """
    return list(iterate_metrics(run_dir))


def iterate_metrics(run_dir: Path) -> Iterator[dict[str, float]]:
    """Yield what ``read_metrics`` returns, one step after the other, so that a long run takes no more memory.

    Raises:
        DataError: The file is absent.
        CheckpointError: Another line is not a JSON object of numbers with a step.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        raise DataError(f"{path} does not exist; give the directory of a run that has made a step")
    return (row for _, row in _steps(path))


def _steps(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield the whole lines of a file, each with its step."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield line, _step(path, number, line[:-1])


def _step(path: Path, number: int, line: bytes) -> dict[str, float]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not all(map(_is_metric, row.values())):
        raise CheckpointError(
            f'{path}, line {number}: {line[:60]!r} is not a JSON object with an integer "step" and numbers; '
            "mend or remove the line"
        )
    # Each line brings its names anew; of a long run they would take most of the memory.
    return {sys.intern(name): math.nan if value is None else value for name, value in row.items()}


def _is_metric(value: object) -> bool:
    # No float holds a larger integer.
    return value is None or isinstance(value, float) or (type(value) is int and value.bit_length() < 1024)


def progress_line(step: int, num_steps: int | None, metrics: Mapping[str, float], left_s: float | None = None) -> str:
    """Return one console line for a step: what the algorithm optimizes, and the time left. At most 100 characters.

    A metric that is absent is left out. The loss is shown where it is what is optimized: without a reward.
    """
    shown = {name: text for name, text in _PROGRESS.items() if name in metrics}
    if "reward/mean" in shown:
        shown.pop("actor/loss", None)
    parts = [f"step {step}" if num_steps is None else f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    # A small negative number is no "-0.0000".
    parts += [_MINUS_ZERO.sub(r"\1", text.format(metrics[name])) for name, text in shown.items()]
    if left_s:
        parts.append(f"{rough_duration(left_s)} left")
    line = " | ".join(parts)
    unneeded = next((name for name in _UNNEEDED if name in shown), None)
    if len(line) <= _MOST_LETTERS or unneeded is None:
        return line
    return progress_line(step, num_steps, {name: metrics[name] for name in shown if name != unneeded}, left_s)


RESULTS = {"accuracy": "{:.1%}", "score": "{:.3f}", "loss": "{:.4f}"}
"""Names of a validation's result, without ``validation/``, and how a person is shown it. The first that it has counts.

Accuracy is the mean of scores that are all 0 or 1, or a share of pairs.
"""


def held_out_text(metrics: Mapping[str, float]) -> str:
    """Return the result of a validation in words: ``held-out accuracy 46.1%``, or ``held-out score -3.200``."""
    told = [name for name in RESULTS if f"validation/{name}" in metrics]
    if told[0] == "accuracy" and "score" in told:
        told.remove("score")
    return "held-out " + ", ".join(f"{name} {RESULTS[name].format(metrics[f'validation/{name}'])}" for name in told)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Pick the seconds of each phase, ``time/<phase>_s``, without the whole step's."""
    return {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in metrics.items()
        if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
    }


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(_finite(row)) + "\n"


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}
