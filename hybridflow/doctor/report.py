"""The report as text and as JSON. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridflow.doctor.compare import SPEEDS, NodeReport, ratios
from hybridflow.doctor.finding import OK, PROBLEM, Finding, worst
from hybridflow.observe.table import format_table

_WIDTH = 120


def as_text(findings: Sequence[Finding], nodes: Sequence[NodeReport] = ()) -> str:
    """Return findings by area, each problem with its remedy; then the table of nodes, and the conclusion."""
    lines: list[str] = []
    width = max((len(finding.name) for finding in findings), default=0)
    for area in dict.fromkeys(finding.area for finding in findings):
        lines += ["", area]
        for finding in (each for each in findings if each.area == area):
            lines += _lines(finding, width)
    if nodes:
        lines += ["", *_table(nodes)]
    return "\n".join([*lines[1:], "", _conclusion(findings)])


def _lines(finding: Finding, width: int) -> list[str]:
    mark = "" if finding.verdict == OK else finding.verdict
    head = f"  {mark:<8}{finding.name:<{width}}  "
    lines = textwrap.wrap(finding.value, _WIDTH - len(head)) or [""]
    if finding.remedy:
        lines += textwrap.wrap(f"→ {finding.remedy}", _WIDTH - len(head), subsequent_indent="  ")
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]


def _conclusion(findings: Sequence[Finding]) -> str:
    number = sum(finding.verdict == PROBLEM for finding in findings)
    if number:
        return f"{number} problem{'s' if number > 1 else ''} that will stop a run or slow it down, see above"
    return "nothing found that would stop a run"


def _table(nodes: Sequence[NodeReport]) -> list[str]:
    """Return a line for each node: its measurements, and their shares of the median."""
    shares = {speed: ratios(nodes, speed) for speed in SPEEDS}
    head = [
        "node",
        *(cell for speed, (unit, _, _) in SPEEDS.items() for cell in (f"{speed} {unit}", "ratio")),
        "measured",
    ]
    rows = [head]
    for node in nodes:
        row = [node.host]
        for speed, (_, size, _) in SPEEDS.items():
            known = speed in node.speeds
            row += [f"{node.speeds[speed] / size:.4g}" if known else "-"]
            row += [f"{shares[speed][node.host]:.2f}" if node.host in shares[speed] else "-"]
        rows.append([*row, node.device])
    return [f"  {line}" for line in format_table(rows)]


def as_dict(
    findings: Sequence[Finding],
    nodes: Sequence[NodeReport] = (),
    pairs: Mapping[tuple[str, str], float] | None = None,
) -> dict[str, Any]:
    """Return the report for a program to read; speeds in FLOP/s and bytes/s."""
    found: dict[str, Any] = {"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]}
    if nodes:
        found["nodes"] = [
            {
                "host": node.host,
                "device": node.device,
                "speeds": {
                    speed: {"per_s": node.speeds[speed], "ratio": ratios(nodes, speed).get(node.host)}
                    for speed in SPEEDS
                    if speed in node.speeds
                },
                "gpus": [dict(gpu) for gpu in node.gpus],
                "versions": dict(node.versions),
                "clock_s": node.clock_s,
            }
            for node in nodes
        ]
        found["pairs"] = [{"hosts": list(hosts), "bytes_per_s": speed} for hosts, speed in (pairs or {}).items()]
    return found
