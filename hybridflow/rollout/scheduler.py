"""Which tokens go through the model next: continuous batching over a cache of blocks.

Sequences have slots, and a row of numbers in arrays over the slots, so that decoding costs no Python for each token.
All that a sequence has is a list of known tokens, the prompt's and what was sampled, of which the first ``computed``
are in the cache. A step computes more of them: of most sequences one token, of those that begin, or lost their blocks,
a chunk. Who has computed all it knows gets the next token.

A prompt is computed once for all its samples: one computes it while the others wait, then they use its full blocks, and
copy the one that is not full, since each goes on in it with tokens of its own. A sequence gets blocks for all that it
knows when it begins, and one more at each border; if there is none, the youngest goes back to those that wait, and
computes once more what it knew. Each time that happens somebody has got a token since, so that there is an end.

A layer with linear attention has a state for each slot in the place of blocks, and of it what the last computed token
left. So what samples of a prompt share is the state behind all of it but the last token: the one that computes it
stops there, its state is copied to a place behind the slots, and the others begin with copies of that. All else begins
with the first token.

No torch, no messages, no clock: every rank of a replica plans the same steps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridflow.rollout.blocks import BLOCK_TOKENS, BlockPool, Key, block_keys

_LOOK_AHEAD = 256
"""Waiting sequences that are looked at for one that may begin, when those before it may not."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """A sequence to be continued.

    Attributes:
        number: Names it; lower numbers go first.
        tokens: Known tokens, ``[known]`` int64: the prompt, and what was sampled before.
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
        slots: Slot of each token, ``[tokens]`` int64, tokens of one slot side by side.
        positions: Where they stand in their sequences, ``[tokens]`` int64.
        rows: The tokens behind which a token is to be sampled, ``[samples]`` int64.
        scored: The tokens whose successor, known, is to be scored, ``[scored]`` int64.
        copies: Blocks to copy before, from where to where, ``[copies, 2]`` int64.
        state_copies: Slots whose states to copy before, likewise; all are read before any is written. Behind the slots
            are places of states that are kept.
    """

    tokens: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    scored: np.ndarray
    copies: np.ndarray
    state_copies: np.ndarray

    @property
    def row_slots(self) -> np.ndarray:
        """Return the slots that get a token, ``[samples]``."""
        found: np.ndarray = self.slots[self.rows]
        return found


@dataclass
class _Waiting:
    """A sequence with the keys of its blocks, once they are wanted: of all that it knows but the last token."""

    sequence: TokenSequence
    keys: list[Key] | None = None


class Scheduler:
    """Sequences that run, and those that wait for a slot or for room in the cache.

    Args:
        blocks: Room in the cache, enough for each sequence alone; schedulers may share it.
        num_slots: Most sequences that run together.
        capacity: Most tokens of a sequence.
        max_step_tokens: Most tokens of a step, as long as there are no more slots than that.
        num_states: Places of states that are kept, of a model with linear attention; 0: of any other.

    Attributes:
        tokens: Known tokens of each slot, ``[slots, capacity]`` int64.
        lengths: How many are known, ``[slots]``.
        tables: Blocks of each slot, ``[slots, blocks]`` int32.
        num_computed: Tokens computed so far, in all.
        num_prompt_computed: Those of prompts among them.
        num_preempted: How often a sequence lost its blocks.
        moves: Who took a slot (True) and who left one without having ended (False), in order; for the caller to read
            after ``plan``, and to empty.
    """

    def __init__(
        self, blocks: BlockPool, *, num_slots: int, capacity: int, max_step_tokens: int, num_states: int = 0
    ) -> None:
        self.blocks = blocks
        self._num_states = num_states
        self.tokens = np.zeros((num_slots, capacity), np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        self.tables = np.zeros((num_slots, -(-capacity // BLOCK_TOKENS)), np.int32)
        self.num_computed = self.num_prompt_computed = self.num_preempted = 0
        self.moves: list[tuple[bool, int, TokenSequence]] = []
        self._computed = np.zeros(num_slots, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int64)
        self._ends = np.zeros(num_slots, np.int64)
        self._no_stop_before = np.zeros(num_slots, np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._num_named = np.zeros(num_slots, np.int64)
        # How many tokens are in the cache when something is to be named next.
        self._name_at = np.zeros(num_slots, np.int64)
        self._stops = np.full((num_slots, 1), -1, np.int32)
        self._max_step_tokens = max(max_step_tokens, num_slots)
        self._sequences: dict[int, TokenSequence] = {}
        self._last_key: dict[int, Key] = {}
        self._running: list[int] = []
        self._order: np.ndarray | None = None
        self._free = list(range(num_slots - 1, -1, -1))
        self._waiting: deque[_Waiting] = deque()
        # Keys of blocks that slots are about to fill with what they know, in the order in which they will.
        self._pending: dict[Key, int] = {}
        self._to_fill: dict[int, deque[Key]] = {}
        self._copies: dict[int, tuple[int, int]] = {}
        # Places of kept states, by the last key of the tokens before, the one used last at the end.
        self._kept: OrderedDict[Key, int] = OrderedDict()
        # Keys of the states that slots are about to leave.
        self._leaders: dict[int, Key] = {}
        # Slots or places that take a state -> whose it is.
        self._state_copies: dict[int, int] = {}

    @property
    def num_open(self) -> int:
        """Return the number of sequences that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def waiting(self) -> list[TokenSequence]:
        """Return the sequences that have no slot, with their known tokens, next ones first."""
        return [each.sequence for each in self._waiting]

    @property
    def running(self) -> list[int]:
        """Return the taken slots, the oldest first."""
        return list(self._running)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Take up sequences, which wait behind those that are there."""
        self._waiting.extend(map(_Waiting, sequences))

    def sequence(self, slot: int) -> TokenSequence:
        """Return the sequence in a slot."""
        return self._sequences[slot]

    def plan(self) -> Step | None:
        """Return the next step, or None if all are done.

        Where schedulers share the cache, None may also mean that none can go on before another.
        """
        self._keep_states()
        chosen: dict[int, int] = {}
        room = self._max_step_tokens - len(self._running)
        for slot in self._in_want():
            is_seated = slot in self._sequences and self._make_room(slot)
            if is_seated and self.lengths[slot] - self._computed[slot] > 1:
                chosen[slot] = min(self._missing(slot), room + 1)
                room -= chosen[slot] - 1
        chosen = {slot: count for slot, count in chosen.items() if slot in self._sequences}
        if self._waiting and self._free and room > 0:
            for slot in self._admit(room):
                chosen[slot] = min(self._missing(slot), room)
                room -= chosen[slot]
        return self._step(chosen)

    def _keep_states(self) -> None:
        """Have the states copied that others are to begin with, before their slots go on."""
        for slot, key in list(self._leaders.items()):
            if self._missing(slot) == 0:
                is_full = len(self._kept) == self._num_states
                place = self._kept.popitem(last=False)[1] if is_full else len(self.tokens) + len(self._kept)
                self._kept[key] = place
                self._state_copies[place] = slot
                del self._leaders[slot]

    def _missing(self, slot: int) -> int:
        """Return how many tokens a slot is to compute before it gets another, or leaves its state."""
        return int(self.lengths[slot] - self._computed[slot]) - (slot in self._leaders)

    def _running_array(self) -> np.ndarray:
        if self._order is None:
            self._order = np.array(self._running, np.int64)
        return self._order

    def _in_want(self) -> list[int]:
        """Return running slots that need a new block or have several tokens to compute, the oldest first."""
        slots = self._running_array()
        lengths = self.lengths[slots]
        wants = (lengths - self._computed[slots] > 1) | (lengths > self._num_blocks[slots] * BLOCK_TOKENS)
        found: list[int] = slots[wants].tolist()
        return found

    def _step(self, chunks: dict[int, int]) -> Step | None:
        """Plan chunks of some slots, and one token of each other."""
        running = self._running_array()
        if len(running) == 0:
            return None
        singles = running[~np.isin(running, list(chunks))] if chunks else running
        slots, positions, rows = [singles], [self._computed[singles]], [np.arange(len(singles))]
        scored: list[int] = []
        num = len(singles)
        for slot, count in chunks.items():
            first = int(self._computed[slot])
            slots.append(np.full(count, slot))
            positions.append(np.arange(first, first + count))
            if self._sequences[slot].with_prompt_log_probs:
                scored += range(num, num + min(count, int(self._num_prompt[slot]) - 1 - first))
            num += count
            if first + count == self.lengths[slot]:
                rows.append(np.array([num - 1]))
        # Where they come from is used until they are copied, which is before anything else is planned.
        copies, self._copies = np.array(list(self._copies.values()), np.int64).reshape(-1, 2), {}
        for block in copies[:, 0].tolist():
            self.blocks.give_up(block)
        moved = [(source, target) for target, source in self._state_copies.items()]
        self._state_copies.clear()
        all_slots, all_positions = np.concatenate(slots), np.concatenate(positions)
        return Step(
            tokens=self.tokens[all_slots, all_positions],
            slots=all_slots,
            positions=all_positions,
            rows=np.concatenate(rows),
            scored=np.array(scored, np.int64),
            copies=copies,
            state_copies=np.array(moved, np.int64).reshape(-1, 2),
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
        self.num_prompt_computed += int((step.positions < self._num_prompt[step.slots]).sum())
        # Positions rise within a slot: of what is written twice the last stays.
        self._computed[step.slots] = step.positions + 1
        self._name_filled(step.slots)
        slots = step.row_slots
        self.tokens[slots, self.lengths[slots]] = tokens
        self.lengths[slots] += 1
        return self._ending(slots)

    def reserve(self, most: int) -> int:
        """Take blocks for further tokens of all that run, which just know one that is not in the cache.

        Returns:
            How many tokens each may get before the next plan: ``most``, or, if there are too few blocks, 1.
        """
        slots = self._running_array()
        num_cached = np.minimum(self.lengths[slots] + most - 1, self._ends[slots] - 1)
        missing = np.maximum(-(-num_cached // BLOCK_TOKENS) - self._num_blocks[slots], 0)
        if missing.sum() > self.blocks.num_free:
            return 1
        for slot, count in zip(slots[missing > 0].tolist(), missing[missing > 0].tolist(), strict=True):
            first = int(self._num_blocks[slot])
            self.tables[slot, first : first + count] = np.array([self.blocks.take() for _ in range(count)])
            self._num_blocks[slot] += count
        return most

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that decoding several tokens uses: it reads all, and writes ``tokens`` and ``lengths``."""
        return {
            "tokens": self.tokens,
            "lengths": self.lengths,
            "ends": self._ends,
            "no_stop_before": self._no_stop_before,
            "stops": self._stops,
        }

    def absorb_decoded(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take in the tokens decoded for slots that had one token outside the cache.

        Return as ``absorb``, for their last tokens.
        """
        num_cached = self.lengths[slots] - 1
        computed = self._computed[slots]
        self.num_computed += int((num_cached - computed).sum())
        # The first token may have been the last of a prompt.
        of_prompt = np.minimum(num_cached, self._num_prompt[slots]) - np.minimum(computed, self._num_prompt[slots])
        self.num_prompt_computed += int(of_prompt.sum())
        self._computed[slots] = num_cached
        self._name_filled(slots)
        return self._ending(slots)

    def _name_filled(self, slots: np.ndarray) -> None:
        filled = slots[self._computed[slots] >= self._name_at[slots]]
        for slot in dict.fromkeys(filled.tolist()):
            self._name_blocks(slot)

    def _ending(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which slots end by a stop token, and which by their length limit."""
        lengths = self.lengths[slots]
        tokens = self.tokens[slots, lengths - 1]
        is_stop = (self._stops[slots] == tokens[:, None]).any(1) & (tokens >= 0)
        return is_stop & (lengths >= self._no_stop_before[slots]), lengths >= self._ends[slots]

    def remove(self, slot: int) -> None:
        """End a sequence; its cached blocks stay findable."""
        del self._sequences[slot]
        self._running.remove(slot)
        self._order = None
        self._free.append(slot)
        self.blocks.num_growing -= 1
        for key in self._to_fill.pop(slot):
            del self._pending[key]
        if slot in self._copies:
            self.blocks.give_up(self._copies.pop(slot)[0])
        self._leaders.pop(slot, None)
        self._state_copies.pop(slot, None)
        # The last first, so that of a sequence's idle blocks the first are the last to go.
        for block in self.tables[slot, : self._num_blocks[slot]][::-1].tolist():
            self.blocks.give_up(block)
        self._last_key.pop(slot, None)

    def drop(self, number: int) -> None:
        """End a sequence that runs or waits, if there is one of that number."""
        for slot in [slot for slot, sequence in self._sequences.items() if sequence.number == number]:
            self.remove(slot)
        self._waiting = deque(each for each in self._waiting if each.sequence.number != number)

    def forget(self) -> None:
        """Drop all computed blocks after the weights have changed. All planned steps have been absorbed.

        Running sequences start again from their known tokens, so that a shared prefix is recomputed once.
        """
        for slot in reversed(self._running.copy()):
            self._send_back(slot)
        self.blocks.forget()
        self._kept.clear()

    def _admit(self, room: int) -> list[int]:
        """Give slots to waiting sequences, as long as there are slots and blocks for what they know, and room."""
        admitted: list[int] = []
        skipped: list[_Waiting] = []
        while self._waiting and self._free and room > 0 and len(skipped) < _LOOK_AHEAD:
            waiting = self._waiting.popleft()
            keys = _keys_of(waiting)
            # Mostly the others that have the same prompt.
            if keys and keys[-1] in self._pending:
                skipped.append(waiting)
                continue
            found = self.blocks.find(keys)
            if self._num_states:
                found, keys = self._with_state(found, keys)
            elif len(found) < len(keys) and keys[len(found)] in self._pending:
                skipped.append(waiting)
                continue
            usable = self._usable(len(waiting.sequence.tokens), found)
            leads = self._num_states > 0 and len(keys) > 0 and not found
            # A kept state is not overwritten before those have begun with it that wait for it.
            if usable is None or leads and len(self._leaders) == self._num_states:
                skipped.append(waiting)
                break
            if self._num_states and len(usable) < len(found):
                usable, keys = [], []
            slot = self._seat(waiting.sequence, usable, keys)
            room -= int(self.lengths[slot] - self._computed[slot])
            admitted.append(slot)
        self._waiting.extendleft(reversed(skipped))
        return admitted

    def _with_state(self, found: list[int], keys: list[Key]) -> tuple[list[int], list[Key]]:
        """Return of a sequence that was just taken from the queue what it uses, and names, of found blocks and keys.

        It uses all blocks if there is a state behind them. Else it names them if the next one can begin with its state.
        """
        if keys and len(found) == len(keys) and keys[-1] in self._kept:
            return found, keys
        is_first = bool(keys and self._waiting) and _keys_of(self._waiting[0])[-1:] == keys[-1:]
        return [], keys if is_first else []

    def _usable(self, num_known: int, found: list[int]) -> list[int] | None:
        """Return the found blocks that a sequence may use, or None if there is no room for it now.

        Each running sequence in any of the pool's schedulers needs a free block, so that admitting one does not stop
        another at its next block. A sequence alone always has room.
        """
        num_shared = (num_known - 1) // BLOCK_TOKENS
        missing = -(-num_known // BLOCK_TOKENS) - len(found[:num_shared])
        if missing + self.blocks.num_growing <= self.blocks.num_free - self.blocks.num_idle(found):
            return found
        # For a moment it would have one more than it needs: the one to be copied.
        return None if self.blocks.num_growing else found[:num_shared]

    def _seat(self, sequence: TokenSequence, found: list[int], keys: list[Key]) -> int:
        slot = self._free.pop()
        self._sequences[slot] = sequence
        self.moves.append((True, slot, sequence))
        self._running.append(slot)
        self._order = None
        self.blocks.num_growing += 1
        num_known = len(sequence.tokens)
        self.tokens[slot, :num_known] = sequence.tokens
        self.lengths[slot] = num_known
        self._num_prompt[slot] = sequence.num_prompt
        self._ends[slot] = sequence.end
        self._no_stop_before[slot] = sequence.no_stop_before
        self._take_blocks(slot, found, keys)
        if self._num_states and found:
            self._kept.move_to_end(keys[-1])
            place = self._kept[keys[-1]]
            # It may be about to be written.
            self._state_copies[slot] = self._state_copies.get(place, place)
        elif self._num_states and keys:
            self._leaders[slot] = keys[-1]
        if len(sequence.stop_ids) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(sequence.stop_ids)), -1, np.int32)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        return slot

    def _take_blocks(self, slot: int, found: list[int], keys: list[Key]) -> None:
        """Give a slot the blocks found, and new ones for the rest of what it knows."""
        num_known = int(self.lengths[slot])
        num_shared = min(len(found), (num_known - 1) // BLOCK_TOKENS)
        self.blocks.use(found)
        self.tables[slot, :num_shared] = found[:num_shared]
        self._num_blocks[slot] = self._num_named[slot] = num_shared
        self._computed[slot] = num_shared * BLOCK_TOKENS
        if num_shared:
            self._last_key[slot] = keys[num_shared - 1]
        is_roomy = self._make_room(slot)
        assert is_roomy, "a sequence was given a slot without room for it"
        if len(found) > num_shared:
            self._copies[slot] = found[-1], int(self.tables[slot, num_shared])
            self._computed[slot] = num_known - 1
        self._to_fill[slot] = deque(key for key in keys[len(found) :] if key not in self._pending)
        self._pending.update(dict.fromkeys(self._to_fill[slot], slot))
        self._set_name_at(slot)

    def _make_room(self, slot: int) -> bool:
        """Take blocks for a slot's known tokens, from the youngest if there are none; False: it lost its own."""
        while self._num_blocks[slot] * BLOCK_TOKENS < self.lengths[slot]:
            block = self.blocks.take()
            if block is not None:
                self.tables[slot, self._num_blocks[slot]] = block
                self._num_blocks[slot] += 1
                continue
            youngest = self._running[-1]
            self.num_preempted += 1
            self._send_back(youngest)
            if youngest == slot:
                return False
        return True

    def _send_back(self, slot: int) -> None:
        """Move a slot to the head of the queue; its sampled tokens stay, and its blocks may still be found."""
        sequence = self._sequences[slot]
        self.moves.append((False, slot, sequence))
        known = self.tokens[slot, : self.lengths[slot]].copy()
        self.remove(slot)
        self._waiting.appendleft(_Waiting(replace(sequence, tokens=known)))

    def _name_blocks(self, slot: int) -> None:
        """Make newly filled blocks findable, and the last block of the sequence's initial tokens."""
        first, last = int(self._num_named[slot]), int(self._computed[slot]) // BLOCK_TOKENS
        if last > first:
            span = self.tokens[slot, first * BLOCK_TOKENS : last * BLOCK_TOKENS]
            keys = block_keys(span, self._last_key.get(slot, b""))
            for block, key in zip(self.tables[slot, first:last].tolist(), keys, strict=True):
                self._name(slot, block, key)
            self._last_key[slot] = keys[-1]
            self._num_named[slot] = last
        num_came = len(self._sequences[slot].tokens) - 1
        if self._to_fill[slot] and self._computed[slot] >= num_came:
            self._name(slot, int(self.tables[slot, num_came // BLOCK_TOKENS]), self._to_fill[slot][0])
        self._set_name_at(slot)

    def _name(self, slot: int, block: int, key: Key) -> None:
        self.blocks.name(block, key)
        to_fill = self._to_fill[slot]
        if to_fill and to_fill[0] == key:
            del self._pending[to_fill.popleft()]

    def _set_name_at(self, slot: int) -> None:
        border = (int(self._num_named[slot]) + 1) * BLOCK_TOKENS
        if self._to_fill[slot]:
            border = min(border, len(self._sequences[slot].tokens) - 1)
        elif self._num_states:
            # Nobody finds a block that has no state behind it.
            border = np.iinfo(np.int64).max
        self._name_at[slot] = border


def _keys_of(waiting: _Waiting) -> list[Key]:
    if waiting.keys is None:
        # Who is to score its prompt computes all of it.
        has_keys = not waiting.sequence.with_prompt_log_probs
        waiting.keys = block_keys(waiting.sequence.tokens[:-1]) if has_keys else []
    return waiting.keys
