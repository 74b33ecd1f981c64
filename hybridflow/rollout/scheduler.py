"""Which tokens go through the model next: continuous batching over a cache of blocks.

Sequences have slots, and a row of numbers in arrays over the slots, so that decoding costs no Python for each token.
All that a sequence has is a list of known tokens, the prompt's and what was sampled, of which the first ``computed`` are
in the cache. A step computes more of them: all but one sequence's are one token, those that begin, or lost their blocks,
have a chunk. Who has computed all it knows gets the next token.

No torch, no messages, no clock: every rank of a replica plans the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridflow.rollout.blocks import BLOCK_TOKENS, BlockPool, Key, block_keys

_LOOK_AHEAD = 64
"""Waiting sequences that are looked at for one that may begin, when those before it may not."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A sequence to be continued.

    Attributes:
        number: Names it; lower numbers go first.
        tokens: What is known, ``[known]`` int32: the prompt, and what was sampled before.
        num_prompt: How many of them are the prompt.
        end: Most tokens, prompt included.
        no_stop_before: Tokens, prompt included, before which it does not stop.
        stop_ids: Tokens that end it.
        with_prompt_log_probs: Whether the prompt's tokens are scored: then none of it is taken from the cache.
    """

    number: int
    tokens: np.ndarray
    num_prompt: int
    end: int
    no_stop_before: int = 0
    stop_ids: tuple[int, ...] = ()
    with_prompt_log_probs: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens to compute together.

    Attributes:
        tokens: ``[tokens]`` int64.
        slots: Whose they are, ``[tokens]`` int64, those of one slot side by side.
        positions: Where they stand in their sequences, ``[tokens]`` int64.
        rows: The tokens behind which a token is to be sampled, ``[samples]`` int64.
        scored: The tokens whose successor, known, is to be scored, ``[scored]`` int64.
    """

    tokens: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    scored: np.ndarray

    @property
    def row_slots(self) -> np.ndarray:
        """The slots that get a token, ``[samples]``."""
        return self.slots[self.rows]


class Scheduler:
    """Sequences that run, and those that wait for a slot or for room in the cache.

    Args:
        blocks: Room in the cache; schedulers may share it.
        num_slots: Most sequences that run together.
        capacity: Most tokens of a sequence.
        max_step_tokens: Most tokens of a step, as long as there are no more slots than that.

    Attributes:
        tokens: Known tokens of each slot, ``[slots, capacity]`` int32.
        lengths: How many are known, ``[slots]``.
        tables: Blocks of each slot, ``[slots, blocks]`` int32.
        num_computed: Tokens computed so far, in all.
        num_preempted: How often a sequence lost its blocks.
        moves: Who took a slot (True) and who left one without having ended (False), in order; for the caller to read
            after ``plan``, and to empty.
    """

    def __init__(self, blocks: BlockPool, *, num_slots: int, capacity: int, max_step_tokens: int) -> None:
        self.blocks = blocks
        self.tokens = np.zeros((num_slots, capacity), np.int32)
        self.lengths = np.zeros(num_slots, np.int64)
        self.tables = np.zeros((num_slots, -(-capacity // BLOCK_TOKENS)), np.int32)
        self.num_computed = self.num_preempted = 0
        self.moves: list[tuple[bool, int, Job]] = []
        self._computed = np.zeros(num_slots, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int64)
        self._ends = np.zeros(num_slots, np.int64)
        self._no_stop_before = np.zeros(num_slots, np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._num_named = np.zeros(num_slots, np.int64)
        self._stops = np.full((num_slots, 1), -1, np.int32)
        self._max_step_tokens = max(max_step_tokens, num_slots)
        self._jobs: dict[int, Job] = {}
        self._last_key: dict[int, Key] = {}
        self._running: list[int] = []
        self._free = list(range(num_slots - 1, -1, -1))
        self._waiting: deque[Job] = deque()

    @property
    def num_waiting(self) -> int:
        """Sequences that have no slot."""
        return len(self._waiting)

    @property
    def running(self) -> list[int]:
        """Slots that are taken, the oldest first."""
        return list(self._running)

    def add(self, jobs: Sequence[Job]) -> None:
        """Take up sequences, which wait behind those that are there."""
        self._waiting.extend(jobs)

    def job(self, slot: int) -> Job:
        """Whose a slot is."""
        return self._jobs[slot]

    def plan(self) -> Step | None:
        """The next step; None: all are done, or, where schedulers share the cache, none can go on before another."""
        room = self._max_step_tokens - len(self._running)
        chosen: list[tuple[int, int]] = []
        for slot in self._in_want():
            if slot not in self._jobs:
                continue  # has lost its blocks to one before it
            missing = int(self.lengths[slot] - self._computed[slot])
            count = min(missing, room + 1)
            if self._make_room(slot, int(self._computed[slot]) + count):
                room -= count - 1
                chosen.append((slot, count))
        chosen = [(slot, count) for slot, count in chosen if slot in self._jobs]
        for slot in self._admit(room):
            if slot not in self._jobs:
                continue
            count = min(int(self.lengths[slot] - self._computed[slot]), room)
            if count > 0 and self._make_room(slot, int(self._computed[slot]) + count):
                room -= count
                chosen.append((slot, count))
        return self._step({slot: count for slot, count in chosen if slot in self._jobs})

    def _in_want(self) -> list[int]:
        """Running slots that need a new block, or have more than one token to compute, the oldest first."""
        running = np.array(self._running, np.int64)
        lengths = self.lengths[running]
        wants = (lengths - self._computed[running] > 1) | (lengths > self._num_blocks[running] * BLOCK_TOKENS)
        return running[wants].tolist()

    def _step(self, chunks: dict[int, int]) -> Step | None:
        """Chunks of some slots, and one token of each other that has one to compute and room for it."""
        running = np.array(self._running, np.int64)
        is_single = np.ones(len(running), bool)
        if chunks:
            is_single &= ~np.isin(running, list(chunks))
        is_single &= self.lengths[running] - self._computed[running] == 1
        is_single &= self.lengths[running] <= self._num_blocks[running] * BLOCK_TOKENS
        singles = running[is_single]
        slots, positions, scored = [singles], [self._computed[singles]], []
        rows = list(range(len(singles)))
        num = len(singles)
        for slot, count in chunks.items():
            first = int(self._computed[slot])
            slots.append(np.full(count, slot))
            positions.append(np.arange(first, first + count))
            if self._jobs[slot].with_prompt_log_probs:
                scored += range(num, num + min(count, int(self._num_prompt[slot]) - 1 - first))
            num += count
            if first + count == self.lengths[slot]:
                rows.append(num - 1)
        if num == 0:
            return None
        all_slots, all_positions = np.concatenate(slots), np.concatenate(positions)
        return Step(
            tokens=self.tokens[all_slots, all_positions].astype(np.int64),
            slots=all_slots,
            positions=all_positions,
            rows=np.array(rows, np.int64),
            scored=np.array(scored, np.int64),
        )

    def absorb(self, step: Step, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take what a step has sampled.

        Args:
            step: From ``plan``; nothing was planned since.
            tokens: Behind each of its rows, ``[samples]``; -1: none could be sampled.

        Returns:
            Which of the rows' sequences end: because of a stop token, because they are as long as they may be, both
            ``[samples]`` bool.
        """
        self.num_computed += len(step.tokens)
        np.add.at(self._computed, step.slots, 1)
        self._name_blocks(np.unique(step.slots))
        slots = step.row_slots
        self.tokens[slots, self.lengths[slots]] = tokens
        self.lengths[slots] += 1
        lengths = self.lengths[slots]
        is_stop = (self._stops[slots] == np.asarray(tokens)[:, None]).any(1) & (tokens >= 0)
        is_stop &= lengths >= self._no_stop_before[slots]
        return is_stop, lengths >= self._ends[slots]

    def remove(self, slot: int) -> None:
        """End a sequence; what it has in the cache stays findable."""
        del self._jobs[slot]
        self._running.remove(slot)
        self._free.append(slot)
        self._give_up(slot)

    def drop(self, number: int) -> None:
        """End a sequence that runs or waits; nothing where there is none of that number."""
        for slot in [slot for slot, job in self._jobs.items() if job.number == number]:
            self.remove(slot)
        self._waiting = deque(job for job in self._waiting if job.number != number)

    def forget(self) -> None:
        """The weights have changed: nothing that was computed is used again."""
        for slot in self._running:
            self._give_up(slot)
        self.blocks.forget()

    def _admit(self, room: int) -> list[int]:
        """Give slots to waiting sequences, as long as there are slots and blocks for what they know, and room."""
        admitted: list[int] = []
        pending = {key for slot in self._running for key in self._pending(slot)} if self._waiting else set()
        skipped: list[Job] = []
        while self._waiting and self._free and room > 0 and len(skipped) < _LOOK_AHEAD:
            job = self._waiting.popleft()
            keys = [] if job.with_prompt_log_probs else block_keys(job.tokens[:-1])
            found = self._find(keys)
            if len(found) < len(keys) and keys[len(found)] in pending:
                # Someone is about to compute the same.
                for block in found:
                    self.blocks.give_up(block)
                skipped.append(job)
                continue
            missing = -(-len(job.tokens) // BLOCK_TOKENS) - len(found)
            # A block for each that runs, so that admitting one does not stop another at its next border.
            if self._running and missing + len(self._running) > self.blocks.num_free:
                for block in found:
                    self.blocks.give_up(block)
                skipped.append(job)
                break
            slot = self._seat(job, found, keys)
            pending.update(keys[len(found) :])
            room -= len(job.tokens) - len(found) * BLOCK_TOKENS
            admitted.append(slot)
        self._waiting.extendleft(reversed(skipped))
        return admitted

    def _find(self, keys: list[Key]) -> list[int]:
        found = []
        for key in keys:
            block = self.blocks.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def _pending(self, slot: int) -> list[Key]:
        """Keys of blocks that a slot is about to fill with what it knows."""
        if self.lengths[slot] - self._computed[slot] <= 1:
            return []
        named = int(self._num_named[slot])
        return block_keys(
            self.tokens[slot, named * BLOCK_TOKENS : self.lengths[slot] - 1], self._last_key.get(slot, b"")
        )

    def _seat(self, job: Job, found: list[int], keys: list[Key]) -> int:
        slot = self._free.pop()
        self._jobs[slot] = job
        self.moves.append((True, slot, job))
        self._running.append(slot)
        self.tokens[slot, : len(job.tokens)] = job.tokens
        self.lengths[slot] = len(job.tokens)
        self._num_prompt[slot] = job.num_prompt
        self._ends[slot] = job.end
        self._no_stop_before[slot] = job.no_stop_before
        self._computed[slot] = len(found) * BLOCK_TOKENS
        self.tables[slot, : len(found)] = found
        self._num_blocks[slot] = self._num_named[slot] = len(found)
        if found:
            self._last_key[slot] = keys[len(found) - 1]
        if len(job.stop_ids) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(job.stop_ids)), -1, np.int32)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(job.stop_ids)] = job.stop_ids
        return slot

    def _make_room(self, slot: int, num_tokens: int) -> bool:
        """Blocks for so many tokens of a slot, taken from the youngest if there are none; False: it lost its own."""
        while self._num_blocks[slot] * BLOCK_TOKENS < num_tokens:
            block = self.blocks.take()
            if block is not None:
                self.tables[slot, self._num_blocks[slot]] = block
                self._num_blocks[slot] += 1
                continue
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest == slot:
                return False
        return True

    def _preempt(self, slot: int) -> None:
        """Back among those that wait, at the head; what it has sampled is known, and its blocks may still be found."""
        job = self._jobs[slot]
        self.num_preempted += 1
        self.moves.append((False, slot, job))
        known = self.tokens[slot, : self.lengths[slot]].copy()
        self.remove(slot)
        self._waiting.appendleft(replace(job, tokens=known))

    def _give_up(self, slot: int) -> None:
        # The last first, so that of a sequence's idle blocks the first are the last to go.
        for block in self.tables[slot, : self._num_blocks[slot]][::-1].tolist():
            self.blocks.give_up(block)
        self._num_blocks[slot] = self._num_named[slot] = self._computed[slot] = 0
        self._last_key.pop(slot, None)

    def _name_blocks(self, slots: np.ndarray) -> None:
        """Make findable what has become full."""
        for slot in slots[self._computed[slots] // BLOCK_TOKENS > self._num_named[slots]].tolist():
            first, last = int(self._num_named[slot]), int(self._computed[slot]) // BLOCK_TOKENS
            span = self.tokens[slot, first * BLOCK_TOKENS : last * BLOCK_TOKENS]
            for index, key in enumerate(block_keys(span, self._last_key.get(slot, b"")), first):
                self.blocks.name(int(self.tables[slot, index]), key)
                self._last_key[slot] = key
            self._num_named[slot] = last
