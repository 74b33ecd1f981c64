"""A run's status for a person: some lines of one, or a table of several. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from hybridflow.observe.console import duration
from hybridflow.observe.metrics import RESULTS, held_out_text
from hybridflow.observe.status import RunStatus
from hybridflow.observe.table import format_table

_STATES = {"silent": "no sign of life", "requeue": "saved and stopped, to be begun again"}
_PLACE = re.compile(r"^rank \d+ on [^:]*: (?=.)")
_LONGEST_CELL = 48
_NUM_HOSTS = 4
_NUM_PHASES = 4


class Plan(Protocol):
    """What a step of a run was estimated to take."""

    hardware: str
    step_s: float
    phases_s: dict[str, float]


def as_text(status: RunStatus, planned: Plan | None = None) -> str:
    """Format one run, one line for each known fact, with the estimate beside the measured times."""
    lines = [f"{status.run}: {_headline(status)}"]
    for name, value in (
        ("step", _step_line(status)),
        ("result" if status.reward is None else "reward", _reward_line(status)),
        ("speed", _speed_line(status)),
        ("planned", None if planned is None else _planned_line(status, planned)),
        ("left", _left_line(status)),
        ("saved", _saved_line(status)),
        ("starts", _starts_line(status)),
        ("before", None if status.last_end is None else _printable(status.last_end)),
        ("cause", None if status.cause is None else _printable(status.cause)),
        ("logs", status.logs),
    ):
        if value is not None:
            lines.append(f"  {name:<7} {value}")
    return "\n".join(lines)


def as_table(statuses: Sequence[RunStatus]) -> str:
    """Format several runs, one row each."""
    head = ("run", "state", "step", "reward", "held-out", "tokens/s", "s/step", "left", "saved", "restarts")
    return "\n".join(format_table([(*head, "doing or cause"), *map(_row, statuses)]))


def _headline(status: RunStatus) -> str:
    told = _STATES.get(status.state, status.state)
    if status.state == "requeue" and status.saved_step is None:
        told = "stopped before anything was saved, to be begun again"
    activity = None if status.activity is None else _printable(status.activity)
    if status.state == "silent":
        told += "" if status.sign_age_s is None else f" for {duration(status.sign_age_s)}"
        at = "" if activity is None else f"; it was at {activity}"
        return f"{told}: killed or suspended, or its node is down{at}"
    if activity is None:
        return told + ("" if status.end_age_s is None else f", {duration(status.end_age_s)} ago")
    return (
        told + f": {activity}" + ("" if status.activity_age_s is None else f", for {duration(status.activity_age_s)}")
    )


def _step_line(status: RunStatus) -> str | None:
    if status.step is None:
        return None
    # A finished run may be begun again with fewer steps than it has done.
    return f"{status.step}" + ("" if status.steps is None or status.step > status.steps else f" of {status.steps}")


def _reward_line(status: RunStatus) -> str | None:
    parts = [] if status.reward is None else [f"{status.reward:.3f}"]
    if status.score is not None:
        parts.append(held_out_text({f"validation/{status.result}": status.score}))
    return ", ".join(parts) or None


def _speed_line(status: RunStatus) -> str | None:
    if status.step_s is None:
        return None
    rate = "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f} tokens/s, "
    longest_first = sorted(status.phases_s.items(), key=lambda item: -item[1])
    shown = [f"{_printable(name)} {seconds:.2f}" for name, seconds in longest_first[:_NUM_PHASES]]
    rest = [seconds for _, seconds in longest_first[_NUM_PHASES:]]
    phases = ", ".join([*shown, *([f"others {sum(rest):.2f}"] if rest else [])])
    return f"{rate}{status.step_s:.2f} s a step" + (f": {phases}" if phases else "")


def _planned_line(status: RunStatus, planned: Plan) -> str:
    longest_first = sorted(status.phases_s, key=lambda name: -status.phases_s[name])
    known = [name for name in longest_first if name in planned.phases_s][:_NUM_PHASES]
    phases = ", ".join(f"{_printable(name)} {planned.phases_s[name]:.2f}" for name in known)
    return f"{planned.step_s:.2f} s a step: {phases} (on {_printable(planned.hardware)})"


def _left_line(status: RunStatus) -> str | None:
    parts = [] if status.left_s is None else [f"{duration(status.left_s)} at this pace"]
    parts += [] if status.job_left_s is None else [f"{duration(status.job_left_s)} of the job's time"]
    return ", ".join(parts) or None


def _saved_line(status: RunStatus) -> str | None:
    if status.saved_step is None:
        return None if status.state == "finished" else "nothing yet"
    age = "" if status.saved_age_s is None else f", {duration(status.saved_age_s)} ago"
    best = "" if status.best_step is None else f"; the best is step {status.best_step}"
    return f"step {status.saved_step}{age}{best}"


def _starts_line(status: RunStatus) -> str | None:
    if status.starts == 0:
        return None
    words = [f"{status.restarts + 1}, the last"]
    words += [] if status.start_age_s is None else [f"{duration(status.start_age_s)} ago"]
    words += ["from the beginning" if status.start_step is None else f"from step {status.start_step}"]
    words += [] if status.ranks is None else [f"on {status.ranks} rank{'s' if status.ranks > 1 else ''}"]
    hosts = [_printable(host) for host in status.hosts[:_NUM_HOSTS]]
    words += [] if not hosts else [f"of {', '.join(hosts)}" + (", …" if len(status.hosts) > _NUM_HOSTS else "")]
    job = "" if status.job_id is None else f"; job {_printable(status.job_id)}"
    slurm = "" if not status.slurm_restarts else f", Slurm's restart {status.slurm_restarts}"
    return " ".join(words) + job + slurm


def _row(status: RunStatus) -> tuple[str, ...]:
    def known(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    last = status.activity if status.cause is None else status.cause
    # Where it happened is in the text of a single run.
    told = "" if last is None else _PLACE.sub("", _printable(last))
    return (
        status.run,
        # What requeues a job is Slurm, and most jobs that were stopped are not of Slurm.
        "stopped" if status.state == "requeue" else status.state,
        _step_line(status) or "-",
        known(status.reward, "{:.3f}"),
        known(status.score, RESULTS[status.result]),
        known(status.tokens_per_s, "{:,.0f}"),
        known(status.step_s, "{:.2f}"),
        "-" if status.left_s is None else duration(status.left_s),
        known(status.saved_step, "step {}"),
        str(status.restarts),
        told if len(told) <= _LONGEST_CELL else told[: _LONGEST_CELL - 1] + "…",
    )


def _printable(text: str) -> str:
    """Put text on one line without characters that a terminal would take for a command."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
