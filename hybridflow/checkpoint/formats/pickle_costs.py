"""Pickles that would need much memory or time are refused by their opcodes, before anything is built.

A hostile pickle of a few bytes can stand for an object that takes years to hash, or for a dict whose keys all have one
hash. No object is made here: opcodes are followed with the costs of objects in the objects' place.
"""

from __future__ import annotations

import io
import pickletools
from typing import Any

_MAX_PICKLE_BYTES = 1 << 30
_MAX_OPCODES = 50_000_000
# Length with every reference written out, as a multiple of the pickle's; that of real files is below 10.
_MAX_GROWTH, _FREE_GROWTH_BYTES = 64, 1 << 16
_MAX_DEPTH = 256
# How often a key may be compared with another one, if the file chose all of them to have one hash.
_MAX_COMPARISONS = 1 << 28


def check_opcodes(data: bytes | memoryview) -> None:
    """Refuse a pickle that would need much memory or time.

    Raises:
        ValueError: It has too many bytes, opcodes, levels, references or keys.
    """
    if len(data) > _MAX_PICKLE_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than {_MAX_PICKLE_BYTES}")
    stream, costs = io.BytesIO(data), _Costs(len(data))
    for count, (opcode, argument, start) in enumerate(pickletools.genops(stream)):
        # The library makes room up to the number.
        if "PUT" in opcode.name and not (isinstance(argument, int) and 0 <= argument <= count):
            raise ValueError(f"it numbers its object {count} {argument}")
        if count > _MAX_OPCODES:
            raise ValueError(f"it has more than {_MAX_OPCODES} opcodes")
        assert start is not None, "the stream tells its position"
        costs.run(opcode, argument, stream.tell() - start)


class _Item:
    """Hold the costs of an object that a pickle will build.

    Attributes:
        num_bytes: Its length in the pickle, everything that it refers to written out.
        depth: How deep its contents are nested.
        is_shared: Whether the pickle has referred to it again.
        has_chosen_hash: Whether the pickle decides its hash, as that of numbers and tuples.
        num_chosen_keys: How many such keys it has, if it is a dict or a set.
    """

    __slots__ = ("depth", "has_chosen_hash", "is_shared", "num_bytes", "num_chosen_keys")

    def __init__(self, num_bytes: int, *, has_chosen_hash: bool) -> None:
        self.num_bytes, self.depth, self.is_shared = num_bytes, 0, False
        self.has_chosen_hash, self.num_chosen_keys = has_chosen_hash, 0


class _Costs:
    """Follow the stack and the memo of a pickle, with the costs of objects instead of the objects.

    ``x = (x, x)``, 40 times over, is a few bytes of pickle and a tuple that takes years to hash or print. So the length
    with every reference written out is bounded. It counts an object where the pickle refers to the object again, so the
    object may not change afterwards.

    A dict of numbers that all have one hash compares each key with every other one. So the number of comparisons is
    bounded too, as if all numbers and tuples had one hash.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = _MAX_GROWTH * num_bytes + _FREE_GROWTH_BYTES
        self._comparisons_left = _MAX_COMPARISONS
        self._stack: list[_Item] = []
        self._marks: list[int] = []
        self._memo: dict[Any, _Item] = {}

    def run(self, opcode: pickletools.OpcodeInfo, argument: Any, num_bytes: int) -> None:
        """Run an opcode of ``num_bytes`` bytes."""
        name, stack = opcode.name, self._stack
        kind, num_items, has_mark = _KINDS[name]
        if kind == "leaf":
            stack.append(_Item(num_bytes, has_chosen_hash=name not in _RANDOM_HASHES))
        elif kind == "put":
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif kind == "share":
            item = stack[-1] if name == "DUP" else self._memo[argument]
            item.is_shared = True
            self._left -= item.num_bytes
            if self._left < 0:
                raise ValueError(f"written out without references it is more than {_MAX_GROWTH} times as long")
            stack.append(item)
        elif kind == "mark":
            self._marks.append(len(stack))
        elif name == "POP" and self._marks and self._marks[-1] == len(stack):
            self._marks.pop()
        else:
            start = (self._marks.pop() if has_mark else len(stack)) - num_items
            if start < (self._marks[-1] if self._marks else 0):
                raise ValueError(f"{name} takes more objects than there are")
            taken = stack[start:]
            del stack[start:]
            if kind != "drop":
                made = self._made(name, taken, num_bytes, changes=kind == "change")
                if name in _KEYS:
                    self._count_keys(made, taken[_KEYS[name]])
                stack.append(made)

    def _made(self, name: str, taken: list[_Item], num_bytes: int, *, changes: bool) -> _Item:
        """Return the object that an opcode makes of others, or the first of them, which it changes."""
        made = taken[0] if changes else _Item(num_bytes, has_chosen_hash=name not in _RANDOM_HASHES)
        if changes and made.is_shared:
            raise ValueError("it changes an object after it referred to it")
        for item in taken[1:] if changes else taken:
            made.num_bytes += item.num_bytes
            if made.depth <= item.depth:
                made.depth = item.depth + 1
        if made.depth > _MAX_DEPTH:
            raise ValueError(f"it nests objects deeper than {_MAX_DEPTH}")
        return made

    def _count_keys(self, made: _Item, keys: list[_Item]) -> None:
        num_chosen = sum(key.has_chosen_hash for key in keys)
        self._comparisons_left -= num_chosen * (made.num_chosen_keys + num_chosen)
        made.num_chosen_keys += num_chosen
        if self._comparisons_left < 0:
            raise ValueError("it has too many keys that are neither texts nor objects")


def _kind(opcode: pickletools.OpcodeInfo) -> tuple[str, int, bool]:
    """Return what an opcode does, how many objects it takes, and whether it also takes all behind the last mark."""
    before, name = opcode.stack_before, opcode.name
    has_mark = pickletools.markobject in before
    num_items = before.index(pickletools.markobject) if has_mark else len(before)
    if "PUT" in name or name == "MEMOIZE":
        return "put", 0, False
    if "GET" in name or name == "DUP":
        return "share", 0, False
    if name == "MARK":
        return "mark", 0, False
    if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"):
        return "change", num_items, has_mark
    if not opcode.stack_after:
        return "drop", num_items, has_mark
    return "make" if before else "leaf", num_items, has_mark


_KINDS = {opcode.name: _kind(opcode) for opcode in pickletools.opcodes}
# Which of the objects that an opcode takes become keys or members; a dict or set that they go into comes first.
_KEYS = {
    "SETITEM": slice(1, None, 2),
    "SETITEMS": slice(1, None, 2),
    "ADDITEMS": slice(1, None),
    "DICT": slice(0, None, 2),
    "FROZENSET": slice(0, None),
}
# Python salts the hashes of texts, and those of our objects follow from where they lie in memory.
_TEXTS = (pickletools.pyunicode, pickletools.pystring, pickletools.pybytes, pickletools.pybytes_or_str)
_RANDOM_HASHES = {
    *("NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID"),
    *(opcode.name for opcode in pickletools.opcodes if opcode.stack_after and opcode.stack_after[0] in _TEXTS),
}
