"""What the reports of all nodes say together: who is slow, who is silent, who differs. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.doctor.finding import NOTE, OK, PROBLEM, Finding, note, problem

AREA = "nodes"

SLOW = 0.8
"""A node below this share of the median is slow: a job waits for its slowest node in every step."""

LATE_S = 5.0
"""Clocks further apart than this are named."""

SPEEDS = {
    # what is measured: (unit, its size, whether a slow one slows each step)
    "matmul": ("GFLOP/s", 1e9, True),
    "memory": ("GB/s", 1e9, True),
    "network": ("GB/s", 1e9, True),
    "disk": ("MB/s", 1e6, False),
}


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Report of one node.

    Attributes:
        host: Its name.
        device: What was measured, such as ``8 × NVIDIA H100``.
        speeds: By the names of ``SPEEDS``, in FLOP/s or bytes/s, of its slowest GPU where it has several; what could
            not be measured is absent.
        gpus: The speeds of each GPU; empty without.
        versions: What must be equal on all nodes.
        clock_s: Its clock at a moment common to all, seconds.
        sees_directory: It sees what the first node wrote into the run directory.
        findings: Its own.
        errors: What it could not do.
    """

    host: str
    device: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)
    gpus: tuple[Mapping[str, float], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    clock_s: float = 0.0
    sees_directory: bool = True
    findings: tuple[Finding, ...] = ()
    errors: tuple[str, ...] = ()


def report_from_dict(found: Mapping[str, Any]) -> NodeReport:
    """Build a report from the JSON form of ``asdict``."""
    findings = tuple(Finding(**finding) for finding in found["findings"])
    lists = {name: tuple(found[name]) for name in ("gpus", "errors")}
    return NodeReport(**{**found, **lists, "findings": findings})


def with_network(reports: Sequence[NodeReport], pairs: Mapping[tuple[str, str], float]) -> list[NodeReport]:
    """Return each report with its network's speed: the median of its pairs, of two the better.

    A slow node is slow with all partners; a good one only with a slow partner.
    """
    found = []
    for report in reports:
        own = [speed for hosts, speed in pairs.items() if report.host in hosts]
        found.append(
            replace(report, speeds={**report.speeds, "network": statistics.median_high(own)}) if own else report
        )
    return found


def ratios(reports: Sequence[NodeReport], speed: str) -> dict[str, float]:
    """Return each node's share of the median of all that were measured."""
    known = {report.host: report.speeds[speed] for report in reports if speed in report.speeds}
    middle = statistics.median(known.values()) if known else 0.0
    return {host: value / middle for host, value in known.items()} if middle > 0 else {}


def slow_nodes(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return a finding for each node that is slow in something, and for each GPU that is slow among all."""
    findings = []
    for speed, (unit, size, in_each_step) in SPEEDS.items():
        measured = {(report.host, report.host): report.speeds[speed] for report in reports if speed in report.speeds}
        if speed in ("matmul", "memory") and any(report.gpus for report in reports):
            measured = {
                (report.host, f"{report.host}, GPU {index}"): gpu[speed]
                for report in reports
                for index, gpu in enumerate(report.gpus)
            }
        middle = statistics.median(measured.values()) if measured else 0.0
        for (host, name), value in measured.items():
            if value < SLOW * middle:
                findings.append(
                    Finding(
                        area=AREA,
                        name=name,
                        value=f"slow: {speed} {value / size:.3g} {unit}, {value / middle:.2f} of the median",
                        verdict=PROBLEM if in_each_step else NOTE,
                        remedy=f"leave it out with --exclude={host}, and tell the site"
                        if in_each_step
                        else "look whether others use this disk now",
                    )
                )
    return findings


def slow_pairs(
    reports: Sequence[NodeReport], pairs: Mapping[tuple[str, str], float], broken: Mapping[tuple[str, str], str]
) -> list[Finding]:
    """Return pairs that are slow though neither node is, because of their link, and pairs that do not speak."""
    findings = [
        problem(
            AREA,
            f"{one} with {other}",
            f"no messages between them: {why}",
            "each must be reached by its name, and no firewall stand between; GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME name the interface where nodes have several",
        )
        for (one, other), why in broken.items()
    ]
    if len(pairs) < 3:
        return findings
    middle = statistics.median(pairs.values())
    slow = {host for host, share in ratios(reports, "network").items() if share < SLOW}
    return findings + [
        note(
            AREA,
            f"{one} with {other}",
            f"slow: network {speed / 1e9:.3g} GB/s, {speed / middle:.2f} of the median",
            "each is fast with others: a link or switch between them; if it stays, tell the site",
        )
        for (one, other), speed in pairs.items()
        if speed < SLOW * middle and not slow & {one, other}
    ]


def silent_nodes(missing: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each node that did not answer.

    Args:
        missing: By node, or rank where its node is not known: what it was waited for.
    """
    return [
        problem(
            AREA,
            who,
            f"did not answer: {what}",
            f"see what it says (sinfo -R, its log), and leave it out with --exclude={who}"
            if not who.startswith("rank ")
            else "see what kept it from starting",
        )
        for who, what in missing.items()
    ]


def failures(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return the failed checks of nodes that answered."""
    return [
        problem(AREA, report.host, error, f"leave it out with --exclude={report.host}, and tell the site")
        for report in reports
        for error in report.errors
    ]


def differences(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return findings on unequal versions, clocks that are apart, and nodes without the run directory."""
    findings = []
    for name in dict.fromkeys(key for report in reports for key in report.versions):
        found = {report.host: report.versions.get(name, "none") for report in reports}
        if len(set(found.values())) > 1:
            usual = Counter(found.values()).most_common(1)[0][0]
            others = "; ".join(f"{host}: {value}" for host, value in found.items() if value != usual)
            findings.append(
                problem(
                    AREA,
                    name,
                    f"{usual}, but {others}",
                    "all nodes need the same: install where all of them see it, or use one container",
                )
            )
    middle = statistics.median([report.clock_s for report in reports]) if reports else 0.0
    for report in reports:
        if abs(report.clock_s - middle) > LATE_S:
            findings.append(
                note(
                    AREA,
                    report.host,
                    f"its clock is {report.clock_s - middle:+.1f} s from the others'",
                    "have the site set it (chrony): Slurm's credentials expire, and times in logs mislead",
                )
            )
    blind = [report.host for report in reports if not report.sees_directory]
    if blind:
        findings.append(
            problem(
                AREA,
                "run directory",
                f"what the first node wrote there is not seen on {', '.join(blind)}",
                "choose a run_dir on a file system that all nodes share",
            )
        )
    elif len(reports) > 1:
        findings.append(Finding(area=AREA, name="run directory", value=f"the same on all {len(reports)} nodes"))
    return findings


def merge_findings(reports: Sequence[NodeReport]) -> list[Finding]:
    """Merge the nodes' own findings: once if all nodes found the same; else with the nodes that found it."""
    hosts: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            hosts.setdefault(finding, []).append(report.host)
    # Measured times differ everywhere; what is fine is then told of the first node alone.
    merged, told = [], set()
    for finding, where in hosts.items():
        key = (finding.area, finding.name)
        if len(where) == len(reports):
            merged.append(finding)
        elif finding.verdict != OK:
            merged.append(replace(finding, value=f"on {', '.join(where)}: {finding.value}"))
        elif key not in told:
            told.add(key)
            merged.append(replace(finding, value=f"on {_shown(where)}: {finding.value}"))
    return merged


def _shown(hosts: Iterable[str]) -> str:
    listed = list(hosts)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
