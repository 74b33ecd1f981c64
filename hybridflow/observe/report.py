"""What a run leaves for a person: ``summary.json`` and the learning curve."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridflow.errors import DataError
from hybridflow.observe.files import replace_file, writing
from hybridflow.observe.metrics import METRICS_FILE, phase_seconds, read_metrics
from hybridflow.observe.rank_log import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY_FILE, REPORT_FILE, CURVE_FILE = "summary.json", "report.html", "learning_curve.png"

Rows = list[dict[str, float]]

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: told apart by all


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


def drop_summary(run_dir: Path) -> None:
    """Remove the summary that an earlier run has left. Raises WriteError when the file system refuses."""
    path = run_dir / SUMMARY_FILE
    with writing(path):
        path.unlink(missing_ok=True)


def try_learning_curve(run_dir: Path) -> None:
    """Draw the learning curve of a run that ends, or say why it is not there: the run is done all the same."""
    try:
        draw_learning_curve(run_dir)
    except Exception as error:  # Whatever it is, it must not make a failure of a run that has succeeded.
        say(f"{run_dir / CURVE_FILE} was not drawn: {type(error).__name__}: {error}")


def draw_learning_curve(run_dir: Path) -> Path:
    """Draw ``learning_curve.png`` from ``metrics.jsonl``: what the algorithm optimizes, then seconds per step.

    The first three panels of ``_panels`` are drawn. The summary gives the validation before the first step.

    Returns:
        The picture's path.

    Raises:
        DataError: There are no metrics, or no step in them.
        WriteError: The file system refuses.
    """
    import matplotlib

    rows = read_metrics(run_dir)
    if not rows:
        raise DataError(f"{run_dir / METRICS_FILE} holds no step; there is nothing to draw")
    # Settings of the user's own may ask for what is not there, such as LaTeX.
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        picture = _picture(run_dir, rows)
    path = run_dir / CURVE_FILE
    with writing(path):
        replace_file(path, picture)
    return path


def _picture(run_dir: Path, rows: Rows) -> bytes:
    """Return the learning curve as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    last = max(row["step"] for row in rows)
    rows = _validation_before(run_dir) + rows
    # A figure of its own canvas, past pyplot, whose backend is a global that belongs to the user's program.
    figure = Figure(figsize=(11, 7.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{run_dir.resolve().name}, up to step {last}", fontweight="bold", parse_math=False)
    *places, time = figure.subplots(2, 2, sharex=True).flatten()
    for axes in places:
        axes.set_visible(False)
    for axes, panel in zip(places, _panels(rows), strict=False):
        axes.set_visible(True)
        for curve in panel.curves:
            _draw_curve(axes, rows, curve)
        _widen(axes)
        _finish(axes, panel.title, panel.label)
    _draw_time(time, rows)
    _finish(time, "Time per step", "time (s)")
    for axes in (places[-1], time):
        axes.set_xlabel("step")

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


class _Curve(NamedTuple):
    """One line of a panel.

    Attributes:
        name: Metric.
        label: Name in the legend.
        color: Its color.
    """

    name: str
    label: str
    color: str


class _Panel(NamedTuple):
    """One of the pictures.

    Attributes:
        title: Its title.
        label: Of the vertical axis.
        curves: What is drawn.
    """

    title: str
    label: str
    curves: Sequence[_Curve]


def _panels(rows: Rows) -> list[_Panel]:
    """Return the panels for which there are numbers, what the algorithm optimizes first."""
    names = {name for row in rows for name in row}
    is_accuracy, has_reward = "validation/accuracy" in names, "reward/mean" in names
    held_out = _Curve(
        "validation/accuracy" if is_accuracy else "validation/score",
        "held-out accuracy" if is_accuracy else "held-out score",
        _COLORS[1],
    )
    loss, reward = _Curve("actor/loss", "loss", _COLORS[0]), _Curve("reward/mean", "mean reward", _COLORS[0])
    pairs = _Curve("preference/accuracy", "accuracy", _COLORS[0])
    margins = (
        _Curve("preference/margin", "margin", _COLORS[0]),
        _Curve("validation/margin", "held-out margin", _COLORS[1]),
    )
    panels = [
        _Panel("Loss", "loss", (loss,)),
        _Panel("Accuracy" if is_accuracy else "Score", held_out.label, (pairs, held_out)),
    ]
    if has_reward:
        panels = [_Panel("Reward", "reward; accuracy" if is_accuracy else "reward", (reward, held_out))]
    panels += [
        _Panel("Margin between the responses of a pair", "margin", margins),
        _Panel("KL to the reference", "KL (nats per token)", (_Curve("kl/ref", "KL", _COLORS[2]),)),
        _Panel("Response length", "length (tokens)", (_Curve("response/length_mean", "mean length", _COLORS[3]),)),
        _Panel("Entropy", "entropy (nats per token)", (_Curve("actor/entropy", "entropy", _COLORS[4]),)),
        _Panel("Gradient norm", "norm", (_Curve("actor/grad_norm", "gradient norm", _COLORS[5]),)),
    ]
    known = [each._replace(curves=[curve for curve in each.curves if curve.name in names]) for each in panels]
    return [each for each in known if each.curves]


def _validation_before(run_dir: Path) -> Rows:
    """Return the validation before the first step as a row of step 0; none where it is not known."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    names = {"accuracy_before_rl": "validation/accuracy", "score_before_rl": "validation/score"}
    found = {metric: summary[name] for name, metric in names.items() if isinstance(summary.get(name), float)}
    return [{"step": 0, **found}] if found else []


def _column(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values; a line has a gap where a value is NaN."""
    return [row["step"] for row in rows if name in row], [row[name] for row in rows if name in row]


def _draw_curve(axes: Axes, rows: Rows, curve: _Curve) -> None:
    """Draw every step faintly and the mean of the steps around it on top; draw a short curve as it is."""
    steps, values = _column(rows, curve.name)
    reach = 0 if curve.name.startswith("validation/") else len(values) // 20
    if reach == 0:
        marker = "o" if curve.name.startswith("validation/") else "."
        axes.plot(steps, values, color=curve.color, marker=marker, label=curve.label)
        return
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    means = [sum(near) / len(near) for near in around]
    axes.plot(steps, values, color=curve.color, alpha=0.3, linewidth=1)
    axes.plot(steps, means, color=curve.color, label=f"{curve.label}, over {2 * reach + 1} steps")


def _widen(axes: Axes) -> None:
    """Show at least a tenth of the size of what is drawn, so that noise does not look like a trend."""
    low, high = axes.get_ylim()
    least = 0.1 * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)


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
        axes.stackplot(steps, *stack.values(), labels=list(stack), colors=_COLORS, alpha=0.8, linewidth=0)
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
