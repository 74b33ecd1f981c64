"""Which blocks of the key-value cache belong to whom: counted, shared by content, and given up when room is wanted.

No torch, and no messages: every rank of a replica derives the same from the same calls.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

BLOCK_TOKENS = 16
"""Tokens of a block; ``BLOCK`` of kernels.c."""

Key = bytes
"""Names the tokens of a block and all tokens before it."""


def block_keys(tokens: np.ndarray, before: Key = b"") -> list[Key]:
    """Keys of the full blocks of a sequence.

    Args:
        tokens: Token ids, ``[tokens]`` int32, from a border of blocks on.
        before: Key of the block before them.
    """
    keys = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = hashlib.blake2b(before + tokens[start : start + BLOCK_TOKENS].tobytes(), digest_size=16).digest()
        keys.append(before)
    return keys


class BlockPool:
    """Counts who uses each block. A full block that nobody uses any more stays findable until its room is wanted.

    Args:
        size: Number of blocks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._users = [0] * size
        self._empty = list(range(size - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._empty) + len(self._idle)

    def take(self) -> int | None:
        """A block of one's own, its content undefined; None: there is none."""
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            # The one that has been idle for longest.
            block, _ = self._idle.popitem(last=False)
            del self._by_key[self._keys.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def find(self, key: Key) -> int | None:
        """The block of these tokens, which the caller then uses too; None: it is not there."""
        block = self._by_key.get(key)
        if block is not None:
            self._idle.pop(block, None)
            self._users[block] += 1
        return block

    def name(self, block: int, key: Key) -> None:
        """Make a full block findable, unless another with the same tokens is already."""
        if key not in self._by_key and block not in self._keys:
            self._by_key[key], self._keys[block] = block, key

    def give_up(self, block: int) -> None:
        """End one use of a block."""
        assert self._users[block] > 0, f"block {block} is given up by someone who does not use it"
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._keys:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def forget(self) -> None:
        """What all blocks hold is of other weights: none is found any more."""
        self._empty += self._idle
        self._idle.clear()
        self._by_key.clear()
        self._keys.clear()
