"""One thing that was looked at, and what it means for a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        area: Which part of the report it belongs to.
        name: What was looked at.
        value: What was found there, and what follows for a run.
        verdict: ``"ok"``; ``"note"``: worth knowing; ``"problem"``: a run stops, or is slowed down by it.
        remedy: What to do about it; empty where nothing is to be done.
    """

    area: str
    name: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def unless(self, is_fine: bool, verdict: str, remedy: str) -> Finding:
        """Return this finding where all is fine; else with another verdict and a remedy."""
        return self if is_fine else replace(self, verdict=verdict, remedy=remedy)


def problem(area: str, name: str, value: str, remedy: str) -> Finding:
    """Return a finding that stops a run or slows it down."""
    return Finding(area=area, name=name, value=value, verdict=PROBLEM, remedy=remedy)


def note(area: str, name: str, value: str, remedy: str) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(area=area, name=name, value=value, verdict=NOTE, remedy=remedy)


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict among them; ``"ok"`` of none."""
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in (PROBLEM, NOTE) if verdict in found), OK)


def format_gib(num_bytes: float) -> str:
    """Format bytes, such as ``24.0 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB" if num_bytes < 1024 else f"{num_bytes / 1024:.1f} TiB"
