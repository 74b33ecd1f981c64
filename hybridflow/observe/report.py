"""What a run leaves for a person: ``summary.json`` and the learning curve."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import DataError
from hybridflow.observe.files import replace_file, writing
from hybridflow.observe.metrics import METRICS_FILE, phase_seconds, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY_FILE = "summary.json"

Rows = list[dict[str, float]]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: told apart by all


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write ``summary.json`` atomically: an interrupted write leaves the one before.

    Returns:
        Its path.

    Raises:
        ValueError: A value is not finite, which JSON cannot hold.
        TypeError: A value is not of JSON's types.
        WriteError: The file system refuses.
    """
    path = run_dir / SUMMARY_FILE
    with writing(path):
        replace_file(path, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    return path


def draw_learning_curve(run_dir: Path) -> Path:
    """Draw ``learning_curve.png`` from ``metrics.jsonl``: reward and accuracy, KL, response length, seconds per step.

    Returns:
        The picture's path.

    Raises:
        DataError: There are no metrics, or no step in them.
        WriteError: The file system refuses.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir)
    if not rows:
        raise DataError(f"{run_dir / METRICS_FILE} holds no step; there is nothing to draw")
    # A figure of its own canvas, past pyplot, whose backend is a global that belongs to the user's program.
    figure = Figure(figsize=(11, 7.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{run_dir.resolve().name}, up to step {max(row['step'] for row in rows)}", fontweight="bold")
    (reward, kl), (length, time) = figure.subplots(2, 2, sharex=True)

    _noisy_line(reward, rows, "reward/mean", "mean reward", _COLOURS[0])
    accuracy = _column(rows, "validation/accuracy")
    if accuracy[0]:
        reward.plot(*accuracy, color=_COLOURS[1], marker="o", label="held-out accuracy")
    _finish(reward, "Reward", "reward; accuracy (share)")
    _noisy_line(kl, rows, "kl/ref", "KL", _COLOURS[2])
    _finish(kl, "KL to the reference", "KL (nats per token)")
    _noisy_line(length, rows, "response/length_mean", "mean length", _COLOURS[3])
    _finish(length, "Response length", "length (tokens)")
    _draw_time(time, rows)
    _finish(time, "Time per step", "time (s)")
    for axes in (length, time):
        axes.set_xlabel("step")

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path = run_dir / "learning_curve.png"
    with writing(path):
        replace_file(path, picture.getvalue())
    return path


def _column(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values; a line has a gap where a value is NaN."""
    return [row["step"] for row in rows if name in row], [row[name] for row in rows if name in row]


def _noisy_line(axes: Axes, rows: Rows, name: str, label: str, colour: str) -> None:
    """Draw every step faintly and the mean of the steps around it on top; draw a short run as it is."""
    steps, values = _column(rows, name)
    reach = len(values) // 20
    if reach == 0:
        axes.plot(steps, values, color=colour, marker=".", label=label)
        return
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    means = [sum(near) / len(near) for near in around]
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    axes.plot(steps, means, color=colour, label=f"{label}, over {2 * reach + 1} steps")


def _draw_time(axes: Axes, rows: Rows) -> None:
    """Draw the phases stacked, longest at the bottom, the short ones together, and the whole step as a line."""
    steps, step_s = _column(rows, "time/step_s")
    phases_s = [phase_seconds(row) for row in rows if "time/step_s" in row]
    names = {name for phases in phases_s for name in phases}
    columns = {name: [phases.get(name, 0.0) for phases in phases_s] for name in names}
    longest_first = sorted(names, key=lambda name: (-sum(columns[name]), name))
    stack = {name: columns[name] for name in longest_first[:5]}
    if longest_first[5:]:
        rest = [columns[name] for name in longest_first[5:]]
        stack["other phases"] = [sum(at_step) for at_step in zip(*rest, strict=True)]
    if stack:
        axes.stackplot(steps, *stack.values(), labels=list(stack), colors=_COLOURS, alpha=0.8, linewidth=0)
    axes.plot(steps, step_s, color="black", linewidth=1, marker="." if len(steps) < 20 else "", label="whole step")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend above the stack


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # the default locator has it
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    num_entries = len(axes.get_legend_handles_labels()[0])
    if num_entries > 0:
        axes.legend(fontsize=8, frameon=False, ncols=3 if num_entries > 2 else num_entries)
