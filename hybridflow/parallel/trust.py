"""What a rank checks before it believes what comes from other ranks over torch's process groups."""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybridflow.errors import ContractError, DeadlineError
from hybridflow.layout.mesh import format_ranks
from hybridflow.parallel.failure import lost_contact
from hybridflow.parallel.handshake import key_for

_BYTES = 32
"""Of a nonce, and of a proof."""

_MAY_EXCHANGE_OBJECTS = ("vllm",)
"""Packages whose process groups are their own affair."""

_unpickle: Any = distributed_c10d._tensor_to_object


def check_connections(
    group: dist.ProcessGroup, ranks: Sequence[int], rank: int, secret: bytes, deadline_s: float
) -> None:
    """Check that each connection of a gloo group has the rank at its other end for which gloo takes it.

    gloo takes for a peer whoever first connects and sends a number that can be guessed. That program has no connection
    with the true peer. So it cannot have it answer: each rank sends every other a nonce, and proves for each that it
    got that it knows the job's secret. Collective: the group.

    Args:
        group: A new one, which serves the CPU.
        ranks: Its ranks, in its order.
        rank: This one.
        secret: The job's.
        deadline_s: Longest wait, in seconds.

    Raises:
        DeadlineError: Another program took a connection, or a rank does not answer.
    """
    key = key_for(secret, f"connections of {list(ranks)}")
    name = f"the check of the connections among ranks {format_ranks(sorted(ranks))}"
    own = [secrets.token_bytes(_BYTES) for _ in ranks]
    with lost_contact(f"{name}; it may be that another program took one", tuple(ranks), deadline_s):
        theirs = _exchange(group, own, deadline_s)
        proofs = [_proof(key, rank, peer, theirs[at], own[at]) for at, peer in enumerate(ranks)]
        told = _exchange(group, proofs, deadline_s)
    for at, peer in enumerate(ranks):
        if not hmac.compare_digest(told[at], _proof(key, peer, rank, own[at], theirs[at])):
            raise DeadlineError(
                f"another program took the connection between ranks {rank} and {peer}: what answers there does not "
                "know the job's secret. Its messages were not used. Keep other users off the nodes, or see "
                "docs/security.md"
            )


def _proof(key: bytes, sender: int, receiver: int, asked: bytes, asking: bytes) -> bytes:
    return hmac.digest(key, b"%d %d " % (sender, receiver) + asked + asking, "sha256")


def _exchange(group: dist.ProcessGroup, parts: list[bytes], deadline_s: float) -> list[bytes]:
    """Send each rank of a group its part and return what each has sent."""
    outgoing = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=deadline_s)
    group.alltoall_base(incoming, outgoing, [], [], options).wait()
    received = incoming.numpy().tobytes()
    return [received[at : at + _BYTES] for at in range(0, len(received), _BYTES)]


def refuse_objects() -> None:
    """Refuse torch's collectives of objects from now on: they unpickle what they receive, which can run any code."""
    distributed_c10d._tensor_to_object = _refuse


def _refuse(*args: Any) -> Any:
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) == "torch":
        frame = frame.f_back
    if _package(frame.f_globals) in _MAY_EXCHANGE_OBJECTS:
        return _unpickle(*args)
    raise ContractError(
        f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}: a collective of objects unpickles what "
        "it receives, which can run any code; send tensors, or JSON through a Coordinator"
    )


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
