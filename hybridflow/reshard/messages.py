"""How what one rank sends another is divided into messages, and when each is sent. Pure: no torch, no communication.

Both ends of a message derive it from the holdings alone, so nothing is said about it on the wire: a long run of memory
is a message of its own, which the end that has it in one run sends or receives in place; everything else is packed into
buckets.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.plan import Copy
from hybridflow.reshard.spec import ITEM_BYTES, Box, ModelSpec, Shard, TensorSpec, flat_boxes, intersect, num_elements

RUN_BYTES = 256 << 10
"""A run of memory from this size on is not packed with others."""

MAX_MESSAGE_BYTES = 1 << 30
"""MPI before version 4 counts in 31 bits."""

Pair = tuple[int, int]
"""Source and destination, global ranks."""


class Message(NamedTuple):
    """What travels at once from one rank to another.

    Attributes:
        pieces: Tensor index and box of each part, in the order in which they are packed.
        num_bytes: Bytes of all of them.
    """

    pieces: tuple[tuple[int, Box], ...]
    num_bytes: int


def divide(
    model: ModelSpec, copies: Iterable[Copy], source: Holdings, target: Holdings, bucket_bytes: int, *, is_plain: bool
) -> list[Message]:
    """Split one wave's copies between two ranks into messages: the same at both ends.

    There are at most ``1 + bytes / bucket_bytes`` and one for each run of ``RUN_BYTES`` or more.

    Args:
        model: The tensors.
        copies: Copies of one pair of ranks, in the order of the plan.
        source: What the copies are read from.
        target: What they are written to.
        bucket_bytes: Longest message that an end may have to hold elsewhere than in its tensors; a multiple of 8.
        is_plain: Both ends keep all their tensors in the dtype in which they travel, so that a run at both ends needs
            no bucket at either.
    """
    messages: list[Message] = []
    packed: list[Copy] = []
    for copy in copies:
        spec = model.tensors[copy.tensor]
        sizes = [stop - start for start, stop in copy.box]
        num_bytes = math.prod(sizes) * ITEM_BYTES[spec.dtype]
        ends = (source, copy.source), (target, copy.destination)
        depths = (_depth(sizes, region_of(holdings, spec, rank, copy.box)) for holdings, rank in ends)
        long = [depth for depth in depths if num_bytes // math.prod(sizes[:depth]) >= RUN_BYTES]
        if not long:
            packed.append(copy)
            continue
        limit = MAX_MESSAGE_BYTES if len(long) == len(ends) and is_plain else bucket_bytes
        for run in _runs(copy.box, max(long)):
            messages += _fill(model, [(copy.tensor, run)], limit)
    # The widest dtypes first: then every piece starts at a multiple of its item size, and no byte is lost to alignment.
    packed.sort(key=lambda copy: -ITEM_BYTES[model.tensors[copy.tensor].dtype])
    return messages + list(_fill(model, [(copy.tensor, copy.box) for copy in packed], bucket_bytes))


def region_of(holdings: Holdings, tensor: TensorSpec, rank: int, box: Box) -> Shard:
    """Return the region of a rank that holds a box of a tensor."""
    return next(region for region in holdings.regions(tensor, rank) if intersect(region.box, box) == box)


def _depth(sizes: list[int], region: Shard) -> int:
    """Return how many outer dims of a box one iterates over to get contiguous runs of the region's memory."""
    depth = len(sizes) - 1
    while depth > 0 and sizes[depth] == region.local_shape[depth]:
        depth -= 1
    return depth


def _runs(box: Box, depth: int) -> Iterator[Box]:
    for outer in itertools.product(*(range(start, stop) for start, stop in box[:depth])):
        yield (*((index, index + 1) for index in outer), *box[depth:])


def _fill(model: ModelSpec, pieces: Iterable[tuple[int, Box]], limit: int) -> Iterator[Message]:
    """Fill messages of ``limit`` bytes, and one with the rest."""
    filled: list[tuple[int, Box]] = []
    room = limit
    for tensor, box in pieces:
        item, count, start = ITEM_BYTES[model.tensors[tensor].dtype], num_elements(box), 0
        while start < count:
            stop = min(count, start + room // item)
            filled += ((tensor, part) for part in flat_boxes(box, start, stop))
            room -= (stop - start) * item
            start = stop
            if room < item:
                yield Message(tuple(filled), limit - room)
                filled, room = [], limit
    if filled:
        yield Message(tuple(filled), limit - room)


def slots(counts: Mapping[Pair, int]) -> dict[Pair, list[int]]:
    """Return when each message is sent: in one slot a rank sends at most one and receives at most one.

    Ranks that go through their messages by slot never wait for each other in a circle, whatever blocks: both ends of
    the message with the lowest slot of all unfinished ones have nothing before it. First fit, the busiest ranks first,
    needs fewer than twice the slots of the busiest rank, which is the least there can be, and mostly just those.

    Args:
        counts: Messages of each pair of ranks, the same on every rank.

    Returns:
        A slot for each message of a pair, ascending.
    """
    sent, received = Counter[int](), Counter[int]()
    for (source, destination), count in counts.items():
        sent[source] += count
        received[destination] += count

    def order(pair: Pair) -> tuple[int, int, int]:
        source, destination = pair
        # Those equally busy in the order of a ring: then none of them is everybody's first.
        return -max(sent[source], received[destination]), (destination - source) % len(sent), source

    # Bit s of a number: slot s is taken.
    sending, receiving = Counter[int](), Counter[int]()
    found: dict[Pair, list[int]] = {}
    for pair in sorted(counts, key=order):
        source, destination = pair
        taken, chosen = sending[source] | receiving[destination], 0
        places = []
        for _ in range(counts[pair]):
            free = ~taken & (taken + 1)
            taken |= free
            chosen |= free
            places.append(free.bit_length() - 1)
        sending[source] |= chosen
        receiving[destination] |= chosen
        found[pair] = places
    return found
