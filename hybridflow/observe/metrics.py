"""The numbers of each step: one line of JSON, TensorBoard, and one line on the console.

Names are slash-separated, the unit last: ``reward/mean``, ``kl/ref``, ``response/length_mean``, ``time/step_s``,
``time/<phase>_s``, ``throughput/tokens_per_s``, ``validation/accuracy``, ``rollout/logprob_abs_diff``,
``control/overhead_share``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from hybridflow.errors import CheckpointError, DataError
from hybridflow.observe.files import replace_file

METRICS_FILE = "metrics.jsonl"

_PROGRESS = {
    "reward/mean": "reward {:.3f}",
    "kl/ref": "KL {:.4f}",
    "response/length_mean": "length {:.1f}",
    "throughput/tokens_per_s": "{:,.0f} tokens/s",
    "validation/accuracy": "accuracy {:.1%}",
}


class MetricsLog:
    """Records the metrics of a run; kept by one rank. A context manager, closed at its end.

    Args:
        run_dir: Gets ``metrics.jsonl`` and ``tensorboard/``; made if absent.
        num_steps: Steps of the whole run, for the progress line.
        prefix: What names in TensorBoard begin with.
        resumed_step: The step whose checkpoint this run goes on from: lines after it, which the run will write again,
            are dropped before anything is added. None is a new run: what an earlier one left is dropped.

    Raises:
        CheckpointError: On resume, a line of ``metrics.jsonl`` is not a step.
    """

    def __init__(self, run_dir: Path, *, num_steps: int, prefix: str = "", resumed_step: int | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary, self._value = Summary, Summary.Value
        run_dir.mkdir(parents=True, exist_ok=True)
        self._num_steps, self._prefix = num_steps, prefix
        path = run_dir / METRICS_FILE
        kept = []
        if resumed_step is not None and path.exists():
            kept = [row for row in read_metrics(run_dir) if row["step"] <= resumed_step]
        replace_file(path, "".join(_line(row) for row in kept).encode())
        self._file = path.open("a", encoding="utf-8")
        # purge_step makes TensorBoard forget the same steps of the event files that are already there.
        purge_step = 0 if resumed_step is None else resumed_step + 1
        self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step, once, and print its progress line. Flushed, so that a killed job has lost nothing."""
        self._file.write(_line({"step": step} | dict(metrics)))
        self._file.flush()
        # In one event: each of its own would be queued, and every tenth wait for the disk.
        values = [self._value(tag=self._prefix + name, simple_value=value) for name, value in metrics.items()]
        # torch types file_writer as None.
        self._tensorboard.file_writer.add_summary(self._summary(value=values), step)  # type: ignore[attr-defined]
        self._tensorboard.flush()
        print(progress_line(step, self._num_steps, metrics), flush=True)

    def close(self) -> None:
        """Close the files. Closing twice is harmless."""
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Read ``metrics.jsonl``: one dict per step, with ``step`` and the metrics.

    A metric that was not finite, which JSON cannot hold, is null in the file and NaN here.

    A last line without its newline was cut short by a crash, or is being written now, and is left out.

    Raises:
        DataError: The file is absent.
        CheckpointError: Another line is not a JSON object of numbers with a step.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        raise DataError(f"{path} does not exist; give the directory of a run that has made a step")
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int or not all(map(_is_metric, row.values())):
            raise CheckpointError(
                f'{path}, line {number}: {line[:60]!r} is not a JSON object with an integer "step" and numbers; '
                "mend or remove the line"
            )
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def _is_metric(value: object) -> bool:
    # No float holds a larger integer.
    return value is None or isinstance(value, float) or (type(value) is int and value.bit_length() < 1024)


def progress_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Return one console line for a step: what was learned, and the time of each phase.

    A metric that is absent is left out. Phases are the metrics ``time/<phase>_s``, in their given order, after the
    whole step's ``time/step_s``.
    """
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    parts += [text.format(metrics[name]) for name, text in _PROGRESS.items() if name in metrics]
    if "time/step_s" in metrics:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phase_seconds(metrics).items())
        parts.append(f"{metrics['time/step_s']:.2f} s" + (f": {phases}" if phases else ""))
    return " | ".join(parts)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Pick the seconds of each phase, ``time/<phase>_s``, without the whole step's."""
    return {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in metrics.items()
        if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
    }


def _line(row: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"
