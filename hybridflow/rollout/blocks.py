"""Which blocks of the key-value cache belong to whom: counted, shared by content, and given up when room is wanted.

No torch, and no messages: every rank of a replica derives the same from the same calls.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BLOCK_TOKENS = 16
"""Tokens of a block; ``BLOCK`` of kernels.c."""

STEP_TOKENS = 2048
"""Tokens that go through the model at one time."""

MOST_PROMPT_KEYS = 4 * STEP_TOKENS
"""Keys that latent attention on a GPU has of all heads at one time."""

PANEL = 32
"""Outputs of a matrix that lie side by side where a CPU decodes; ``PANEL`` of kernels.c."""

_MOST_KEPT_STATES = 8

Key = bytes
"""Names the tokens of a block and all tokens before it."""


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold ``num_tokens`` tokens of one sequence."""
    return -(-num_tokens // BLOCK_TOKENS)


def kept_states(num_slots: int) -> int:
    """Return how many states behind prompts are kept beside those of so many slots, for samples that begin later."""
    return min(_MOST_KEPT_STATES, -(-num_slots // 8))


def block_keys(tokens: np.ndarray, before: Key = b"") -> list[Key]:
    """Return keys of the blocks of a sequence; the last block may have fewer tokens than a block holds.

    Args:
        tokens: Token ids, ``[tokens]`` int64, from a border of blocks on.
        before: Key of the block before them.
    """
    data, num_bytes = tokens.tobytes(), BLOCK_TOKENS * tokens.itemsize
    keys = []
    for start in range(0, len(data), num_bytes):
        before = hashlib.blake2b(before + data[start : start + num_bytes], digest_size=16).digest()
        keys.append(before)
    return keys


class BlockPool:
    """Counts who uses each block. A named block that nobody uses any more stays findable until its room is wanted.

    Args:
        size: Number of blocks.

    Attributes:
        num_growing: Sequences that may want a further block each; for those who share the pool to count.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_growing = 0
        self._users = [0] * size
        self._empty = list(range(size - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[Key, int] = {}
        self._keys: dict[int, list[Key]] = {}

    @property
    def num_free(self) -> int:
        """Return the number of unused blocks."""
        return len(self._empty) + len(self._idle)

    def take(self) -> int | None:
        """Take a free block, whose content is undefined; return None if there is none."""
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            # The one that has been idle for longest.
            block, _ = self._idle.popitem(last=False)
            for key in self._keys.pop(block):
                del self._by_key[key]
        else:
            return None
        self._users[block] = 1
        return block

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Return the cached blocks of the longest known prefix of these keys; the caller claims them with ``use``."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def use(self, blocks: Sequence[int]) -> None:
        """Begin one use of each of some blocks that were just found."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] += 1

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of some blocks are unused: they count as free until they are used."""
        return sum(self._users[block] == 0 for block in blocks)

    def name(self, block: int, key: Key) -> None:
        """Make a block findable by its key; another block with the same tokens keeps the key."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys.setdefault(block, []).append(key)

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
        """Drop all keys after the weights have changed, so that no block is found any more."""
        self._empty += self._idle
        self._idle.clear()
        self._by_key.clear()
        self._keys.clear()
