"""How fast each two nodes speak with each other, in rounds of disjoint pairs that rank 0 opens and closes.

Each pair has a process group of its own: in one of all nodes, a node that hangs breaks the connections of its partner
to the others too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hybridflow.doctor import measure
from hybridflow.doctor.board import Board
from hybridflow.doctor.rounds import partner, tournament


@dataclass(kw_only=True)
class Talk:
    """Notes of rank 0.

    Attributes:
        speeds: Bytes each way per second, by the two ranks.
        failed: Pairs that could not speak though both answer, and why.
        silent: Ranks that did not answer, and where.
    """

    speeds: dict[tuple[int, int], float] = field(default_factory=dict)
    failed: dict[tuple[int, int], str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)


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
        DeadlineError: Rank 0 does not open the next round.
    """
    talk = Talk()
    if rank not in speakers:
        return talk
    # So that NCCL's waits raise, where they would end the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    for number, places in enumerate(tournament(len(speakers))):
        pairs = [(speakers[one], speakers[other]) for one, other in places]
        if rank == 0:
            board.put(f"round/{number}", sorted(talk.silent))
        left_out = board.get(f"round/{number}", 8 * message_s)
        peer = partner(rank, pairs)
        if peer is not None and not {rank, peer} & set(left_out):
            name = f"doctor/round/{number}/{min(rank, peer)}"
            found = _exchange(PrefixStore(name, board.store), rank > peer, on_gpus=on_gpus, message_s=message_s)
            board.put(f"round/{number}/{rank}", found)
        if rank == 0:
            _close_round(board, number, pairs, talk, message_s)
    return talk


def _exchange(store: Store, is_second: bool, *, on_gpus: bool, message_s: float) -> float | str:
    """Exchange messages with the partner; return bytes each way per second, or why there were none."""
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=store,
            rank=int(is_second),
            world_size=2,
            timeout=timedelta(seconds=message_s),
        )
        return measure.pair_bytes_per_s(1 - int(is_second), torch.device("cuda", 0) if on_gpus else torch.device("cpu"))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _close_round(board: Board, number: int, pairs: Sequence[tuple[int, int]], talk: Talk, message_s: float) -> None:
    """Note the results of all pairs of a round. To connect and to speak, each takes its own time."""
    speaking = [pair for pair in pairs if not set(pair) & talk.silent.keys()]
    told = board.collect({rank: f"round/{number}/{rank}" for pair in speaking for rank in pair}, 4 * message_s)
    for pair in speaking:
        speeds = [told[rank] for rank in pair if isinstance(told.get(rank), float)]
        missing = [rank for rank in pair if rank not in told]
        talk.silent |= {rank: "it fell silent during the messages between nodes" for rank in missing}
        if len(speeds) == 2:
            talk.speeds[pair] = min(speeds)
        elif not missing:
            talk.failed[pair] = next(told[rank] for rank in pair if isinstance(told[rank], str))
