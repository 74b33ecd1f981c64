"""How fast each two nodes speak with each other, in rounds of disjoint pairs that rank 0 opens and closes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from hybridflow.doctor import measure
from hybridflow.doctor.board import Board
from hybridflow.doctor.rounds import partner, tournament


@dataclass(kw_only=True)
class Talk:
    """What rank 0 notes.

    Attributes:
        speeds: Bytes each way per second, by the two ranks.
        failed: Pairs that could not speak though both answer.
        silent: Ranks that did not answer, and where.
        error: Why no connections could be made; empty if they were.
    """

    speeds: dict[tuple[int, int], float] = field(default_factory=dict)
    failed: list[tuple[int, int]] = field(default_factory=list)
    silent: dict[int, str] = field(default_factory=dict)
    error: str = ""


def speak(board: Board, rank: int, speakers: Sequence[int], *, on_gpus: bool, message_s: float) -> Talk:
    """Measure the network between the speakers; the notes are rank 0's, and empty elsewhere.

    Collective: the speakers, of which rank 0 is one; others return at once.

    Args:
        board: Where rank 0 opens the rounds.
        rank: This one.
        speakers: One rank of each node.
        on_gpus: Whether messages go between the first GPUs by NCCL, or between the hosts by gloo.
        message_s: Longest wait for the messages of two nodes, in seconds.

    Raises:
        TimeoutError: Rank 0 does not open the next round.
    """
    talk = Talk()
    if rank not in speakers or len(speakers) < 2:
        return talk
    board.put(f"connected/{rank}", _connect(board, rank, speakers, on_gpus=on_gpus, message_s=message_s))
    if rank == 0:
        _collect_connected(board, speakers, talk, message_s)
        board.put("all connected", talk.error == "")
    if not board.get("all connected", 6 * message_s):
        return talk
    for number, pairs in enumerate(tournament(len(speakers))):
        if rank == 0:
            board.put(f"round/{number}", sorted(talk.silent))
        left_out = board.get(f"round/{number}", 6 * message_s)
        board.put(f"round/{number}/{rank}", _exchange(rank, speakers, pairs, left_out, on_gpus=on_gpus))
        if rank == 0:
            _close_round(board, number, [(speakers[one], speakers[other]) for one, other in pairs], talk, message_s)
    return talk


def _connect(board: Board, rank: int, speakers: Sequence[int], *, on_gpus: bool, message_s: float) -> str:
    """Join a process group of the speakers. Returns why it failed; empty if it did not."""
    # So that NCCL's waits raise, where they would end the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=PrefixStore("doctor/group", board.store),
            rank=list(speakers).index(rank),
            world_size=len(speakers),
            timeout=timedelta(seconds=message_s),
        )
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def _collect_connected(board: Board, speakers: Sequence[int], talk: Talk, message_s: float) -> None:
    told = board.collect({rank: f"connected/{rank}" for rank in speakers}, 3 * message_s)
    talk.silent |= {rank: "it made no connections to the others" for rank in speakers if rank not in told}
    talk.error = next(filter(None, told.values()), "")


def _exchange(
    rank: int, speakers: Sequence[int], pairs: list[tuple[int, int]], left_out: Sequence[int], *, on_gpus: bool
) -> float | None:
    """This rank's messages of a round: bytes per second, or None if there were none."""
    peer = partner(list(speakers).index(rank), pairs)
    if peer is None or {rank, speakers[peer]} & set(left_out):
        return None
    with contextlib.suppress(RuntimeError):
        return measure.pair_bytes_per_s(peer, torch.device("cuda", 0) if on_gpus else torch.device("cpu"))
    return None


def _close_round(board: Board, number: int, pairs: list[tuple[int, int]], talk: Talk, message_s: float) -> None:
    asked = {rank: f"round/{number}/{rank}" for pair in pairs for rank in pair if rank not in talk.silent}
    told = board.collect(asked, 2 * message_s)
    talk.silent |= {rank: "it fell silent during the messages between nodes" for rank in asked if rank not in told}
    for pair in pairs:
        values = [told[rank] for rank in pair if told.get(rank) is not None]
        if len(values) == 2:
            talk.speeds[pair] = min(values)
        elif not set(pair) & set(talk.silent):
            talk.failed.append(pair)
