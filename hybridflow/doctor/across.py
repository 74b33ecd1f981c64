"""The checks on all nodes of an allocation at once: each node tells rank 0 through the store where the ranks meet.

No collective: a node that is broken must not take the others with it. Every wait has a deadline, and who passes it is
named and left out of what follows. Rank 0 opens each round of messages, so that a node that hangs holds up its partner
of that round alone.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from hybridflow.doctor import compare, measure
from hybridflow.doctor.board import Board
from hybridflow.doctor.compare import NodeReport, report_from_dict
from hybridflow.doctor.files import nearest, write_probe
from hybridflow.doctor.finding import Finding
from hybridflow.doctor.network import Talk, speak
from hybridflow.doctor.rounds import MAX_ROUNDS
from hybridflow.doctor.software import versions
from hybridflow.parallel.rendezvous import open_store
from hybridflow.parallel.start import Start, node_name

_LEAVE_S = 5.0

_SEEN_S = 10.0
"""So late a network's file system may show what another node wrote."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long rank 0 waits for the others, in seconds.

    Attributes:
        start_s: For all to come; Python and torch may have to be read over the network first.
        report_s: For a node's own checks and measurements.
        message_s: For the messages between two nodes.
    """

    start_s: float = 180.0
    report_s: float = 300.0
    message_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Findings on all nodes, on rank 0.

    Attributes:
        reports: Of the nodes that answered, in the order of their ranks.
        pairs: Bytes each way per second between two nodes.
        findings: About nodes, beside their own.
    """

    reports: tuple[NodeReport, ...]
    pairs: Mapping[tuple[str, str], float]
    findings: tuple[Finding, ...]


def look_across(
    start: Start, directory: Path, own_checks: Callable[[bool], list[Finding]], deadlines: Deadlines
) -> tuple[Board, Allocation | None]:
    """Check this node beside the others.

    Return the board on which the ranks speak, and on rank 0 what all found, None elsewhere.

    Collective: all ranks; those that do not come are named.

    Args:
        start: Which rank this is.
        directory: Of the run.
        own_checks: The checks of one machine; called with whether there are several nodes.
        deadlines: Of the waits.

    Raises:
        DeadlineError: Rank 0 is not to be reached, or does not go on.
    """
    board = Board(open_store(start, start_deadline_s=deadlines.start_s))
    board.put(f"here/{start.rank}", node_name())
    # Before a first run it is not there.
    directory = nearest(directory)
    token = _show_token(directory) if start.rank == 0 else None
    silent: dict[str, str] = {}
    if start.rank == 0:
        members, silent = _members(board, start, deadlines)
        board.put("members", [members, token])
    members, token = board.get("members", 2 * deadlines.start_s)
    clock_s = time.time()
    hosts = {int(rank): host for rank, host in members.items()}
    try:
        if start.rank in hosts:
            report = _own_report(hosts[start.rank], clock_s, directory, token, lambda: own_checks(len(hosts) > 1))
            board.put(f"report/{start.rank}", asdict(report))
        if start.rank == 0:
            told = board.collect({rank: f"report/{rank}" for rank in hosts}, deadlines.report_s)
            reports = {rank: report_from_dict(each) for rank, each in told.items()}
            silent |= {host: "its checks did not end" for rank, host in hosts.items() if rank not in reports}
            on_gpus = all(report.gpus for report in reports.values())
            board.put("speakers", [sorted(reports), on_gpus])
        if start.rank not in hosts:
            return board, None
        speakers, on_gpus = board.get("speakers", 2 * deadlines.report_s)
        talk = speak(board, start.rank, speakers, on_gpus=on_gpus, message_s=deadlines.message_s)
    finally:
        if start.rank == 0 and token:
            with contextlib.suppress(OSError):
                (directory / token).unlink()
    if start.rank != 0:
        return board, None
    return board, _allocation(list(reports.values()), hosts, talk, silent)


def leave(board: Board, start: Start, status: int, deadlines: Deadlines) -> int:
    """Wait until rank 0 has printed the report, and return the exit status of all: rank 0's.

    Rank 0, which may keep the store, leaves last.

    Raises:
        DeadlineError: Rank 0 does not tell.
    """
    if start.rank == 0:
        board.put("status", status)
        board.collect({rank: f"left/{rank}" for rank in range(1, start.size)}, _LEAVE_S)
    else:
        status = board.get("status", deadlines.report_s + 4 * deadlines.message_s * (MAX_ROUNDS + 1))
        board.put(f"left/{start.rank}", True)
    return status


def _members(board: Board, start: Start, deadlines: Deadlines) -> tuple[dict[int, str], dict[str, str]]:
    """Return the first rank of each node with the node's name, and the nodes or ranks that did not come."""
    came = board.collect({rank: f"here/{rank}" for rank in range(start.size)}, deadlines.start_s)
    members: dict[int, str] = {}
    for rank, host in came.items():
        if host not in members.values():
            members[rank] = host
    late = f"it did not come within {deadlines.start_s:g} s"
    missing = [rank for rank in range(start.size) if rank not in came]
    # A node of which some ranks came is there; where the launcher tells no names, the ranks are named.
    silent = {(start.hosts[rank] if start.hosts else f"rank {rank}"): late for rank in missing}
    return members, {who: what for who, what in silent.items() if who not in members.values()}


def _show_token(directory: Path) -> str:
    """Write a file into the run directory for the others to see. Returns its name; empty if it cannot be written."""
    name = f".hybridflow-doctor-{uuid.uuid4().hex}"
    try:
        (directory / name).write_text(name, encoding="ascii")
    except OSError:
        return ""  # the node's own check of the directory says why
    return name


def _sees(directory: Path, token: str) -> bool:
    """Return whether the file of the first node comes into sight."""
    end = time.monotonic() + _SEEN_S
    while token:
        with contextlib.suppress(OSError):
            os.listdir(directory)  # has NFS ask its server again
            if (directory / token).read_text(encoding="ascii") == token:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _own_report(
    host: str, clock_s: float, directory: Path, token: str, own_checks: Callable[[], list[Finding]]
) -> NodeReport:
    found, errors = versions(), []
    findings = tuple(own_checks())
    found |= {each.name: each.value for each in findings if each.area == "GPUs" and each.name == "driver"}
    report = NodeReport(
        host=host, versions=found, clock_s=clock_s, sees_directory=_sees(directory, token), findings=findings
    )
    try:
        report = _measured(report)
    except Exception as error:  # a broken GPU raises whatever it likes; the node is named with it
        errors.append(f"its speed cannot be measured: {str(error).splitlines()[0]}")
    with contextlib.suppress(OSError):
        report = replace(report, speeds={**report.speeds, "disk": write_probe(directory).bytes_per_s})
    return replace(report, errors=tuple(errors))


def _measured(report: NodeReport) -> NodeReport:
    measure.use_all_cores()
    devices = measure.devices()
    each = [
        {"matmul": measure.matmul_flops_per_s(device), "memory": measure.memory_bytes_per_s(device)}
        for device in devices
    ]
    on_gpus = devices[0].type == "cuda"
    name = f"{len(devices)} × {torch.cuda.get_device_name(0)}" if on_gpus else f"CPU, {torch.get_num_threads()} threads"
    slowest = {speed: min(found[speed] for found in each) for speed in ("matmul", "memory")}
    return replace(report, device=name, speeds=slowest, gpus=tuple(each) if on_gpus else ())


def _allocation(
    reports: Sequence[NodeReport], hosts: Mapping[int, str], talk: Talk, silent: Mapping[str, str]
) -> Allocation:
    """Put together what rank 0 was told."""
    silent = {**silent, **{hosts[rank]: what for rank, what in talk.silent.items()}}
    pairs = {(hosts[one], hosts[other]): speed for (one, other), speed in talk.speeds.items()}
    broken = {(hosts[one], hosts[other]): why for (one, other), why in talk.failed.items()}
    reports = compare.with_network(reports, pairs)
    findings = [*compare.silent_nodes(silent), *compare.failures(reports), *compare.differences(reports)]
    findings += [*compare.slow_nodes(reports), *compare.slow_pairs(reports, pairs, broken)]
    return Allocation(reports=tuple(reports), pairs=pairs, findings=tuple(findings))
