"""Continuous batching over a cache in blocks, against a cache that knows what should stand in it."""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout.blocks import BLOCK_TOKENS, BlockPool, block_keys
from hybridflow.rollout.scheduler import Scheduler, Step, TokenSequence

STOP, FAILURE = 2, -1


@functools.lru_cache(maxsize=100_000)
def following(prefix: bytes) -> int:
    """The model: a token, or rarely a failure, behind all tokens before it."""
    number = hashlib.blake2b(prefix, digest_size=2).digest()
    return FAILURE if number == b"\0\0" or number[0] == 255 and number[1] > 128 else number[0] % 5


def alone(sequence: TokenSequence) -> list[int]:
    """A sequence continued with nothing beside it; ends with -1 where it failed."""
    tokens = sequence.tokens.tolist()
    while True:
        token = following(np.array(tokens, np.int64).tobytes())
        tokens.append(token)
        is_stop = token in sequence.stop_ids and len(tokens) >= sequence.no_stop_before
        if token == FAILURE or is_stop or len(tokens) >= sequence.end:
            return tokens


@dataclass
class Lane:
    scheduler: Scheduler
    pending: tuple[Step, np.ndarray] | None = None


class Simulation:
    """Runs sequences on several schedulers that share a pool, with a cache of what each place was computed from."""

    def __init__(
        self, num_blocks: int, num_lanes: int, num_slots: int, capacity: int, chunk: int, num_states: int = 0
    ) -> None:
        self.pool = BlockPool(num_blocks)
        sizes = {"num_slots": num_slots, "capacity": capacity, "max_step_tokens": chunk}
        self.lanes = [Lane(Scheduler(self.pool, **sizes, num_states=num_states)) for _ in range(num_lanes)]
        self.num_states = num_states
        # What the last token computed in each slot has left, where there are such states.
        self.states: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.cache: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.version, self.num_forgotten = 0, 0
        self.ended: dict[int, list[int]] = {}
        self.seated: dict[tuple[int, int], int] = {}
        self.scored: Counter = Counter()

    def turn(self, lane: Lane) -> bool:
        """As ``Session.step``: whether anything was done."""
        had_pending = lane.pending is not None
        self.absorb(lane)
        step = lane.scheduler.plan()
        for is_in, slot, sequence in lane.scheduler.moves:
            where = id(lane), slot
            assert (where in self.seated) != is_in
            if is_in:
                self.seated[where] = sequence.number
            else:
                assert self.seated.pop(where) == sequence.number
        lane.scheduler.moves.clear()
        self.check_users()
        if step is not None:
            lane.pending = step, self.forward(lane.scheduler, step)
        return had_pending or step is not None

    def forward(self, scheduler: Scheduler, step: Step) -> np.ndarray:
        """Copies, then writes, then reads, as the model does."""
        before = dict(self.cache)
        for source, target in step.copies.tolist():
            for place in range(BLOCK_TOKENS):
                if (source, place) in before:
                    self.cache[target, place] = before[source, place]
        written = set()
        for slot, position in zip(step.slots.tolist(), step.positions.tolist(), strict=True):
            block = int(scheduler.tables[slot, position // BLOCK_TOKENS])
            place = block, position % BLOCK_TOKENS
            assert place not in written, "two tokens go to one place"
            assert self.pool._users[block] == 1, "a block that others use is written"
            written.add(place)
            self.cache[place] = self.version, scheduler.tokens[slot, : position + 1].tobytes()
        assert len(set(zip(step.slots.tolist(), step.positions.tolist(), strict=True))) == len(step.tokens)
        np.testing.assert_array_equal(step.tokens, scheduler.tokens[step.slots, step.positions])
        for slot in set(step.slots.tolist()):
            last = int(step.positions[step.slots == slot].max())
            for position in range(last + 1):
                place = int(scheduler.tables[slot, position // BLOCK_TOKENS]), position % BLOCK_TOKENS
                expected = self.version, scheduler.tokens[slot, : position + 1].tobytes()
                assert self.cache.get(place) == expected, "what it sees was computed of something else"
        if self.num_states:
            self.step_states(scheduler, step)
        for slot, position in zip(step.slots[step.scored], step.positions[step.scored], strict=True):
            self.scored[scheduler.sequence(int(slot)).number, int(position)] += 1
        ends = step.positions[step.rows] + 1
        np.testing.assert_array_equal(ends, scheduler.lengths[step.row_slots])
        return np.array(
            [
                following(scheduler.tokens[slot, :end].tobytes())
                for slot, end in zip(step.row_slots.tolist(), ends.tolist(), strict=True)
            ],
            np.int64,
        )

    def step_states(self, scheduler: Scheduler, step: Step) -> None:
        """Copies, then linear attention goes on where its slot stands, or begins anew with the first token."""
        before, num_rows = dict(self.states), len(scheduler.tokens) + self.num_states
        targets = step.state_copies[:, 1].tolist()
        assert len(set(targets)) == len(targets) and all(0 <= each < num_rows for each in targets)
        for source, target in step.state_copies.tolist():
            self.states[id(scheduler), target] = before[id(scheduler), source]
        for slot, position in zip(step.slots.tolist(), step.positions.tolist(), strict=True):
            where, tokens = (id(scheduler), slot), scheduler.tokens[slot]
            if position:
                assert self.states[where] == (self.version, tokens[:position].tobytes())
            self.states[where] = self.version, tokens[: position + 1].tobytes()

    def absorb(self, lane: Lane) -> None:
        if lane.pending is None:
            return
        (step, tokens), lane.pending = lane.pending, None
        scheduler = lane.scheduler
        is_stop, is_long = scheduler.absorb(step, tokens)
        for slot, ends in zip(step.row_slots.tolist(), is_stop | is_long | (tokens < 0), strict=True):
            if ends:
                number = scheduler.sequence(slot).number
                assert number not in self.ended
                self.ended[number] = scheduler.tokens[slot, : scheduler.lengths[slot]].tolist()
                scheduler.remove(slot)
                del self.seated[id(lane), slot]

    def forget(self) -> None:
        """The weights change: what is under way is taken first."""
        for lane in self.lanes:
            self.absorb(lane)
        self.num_forgotten += 1
        self.version += 1
        for lane in self.lanes:
            lane.scheduler.forget()

    def check_users(self) -> None:
        """Whoever has a block in its table uses it, and nobody else."""
        users = Counter(
            int(block)
            for lane in self.lanes
            for slot in lane.scheduler.running
            for block in lane.scheduler.tables[slot, : lane.scheduler._num_blocks[slot]]
        )
        assert [users[block] for block in range(self.pool.size)] == self.pool._users
        assert self.pool.num_free == self.pool.size - len(users)

    def finish(self, sequences: list[TokenSequence]) -> None:
        """Until all has ended, or nothing goes on."""
        while len(self.ended) < len(sequences):
            assert any([self.turn(lane) for lane in self.lanes]), "nobody goes on"
            num_preempted = sum(lane.scheduler.num_preempted for lane in self.lanes)
            # Each that is preempted lets another, or itself, have got a token since it began.
            assert num_preempted <= sum(each.end - len(each.tokens) for each in sequences)
        assert self.pool.num_free == self.pool.size and self.pool.num_growing == 0
        for lane in self.lanes:
            assert not lane.scheduler._pending and not lane.scheduler._copies and not lane.scheduler._to_fill


@st.composite
def workloads(draw):
    """Sequences with beginnings in common, where they go, when they come, when weights change, and room for them."""
    bases = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=70), min_size=1, max_size=3))
    sequences = []
    for number in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(bases))
        known = base[: draw(st.sampled_from([len(base), *range(1, len(base) + 1)]))]
        known += draw(st.lists(st.integers(0, 3), max_size=4)) if draw(st.booleans()) else []
        end = len(known) + draw(st.integers(1, 40))
        sequences.append(
            TokenSequence(
                number=number,
                tokens=np.array(known, np.int64),
                num_prompt=draw(st.integers(1, len(known))),
                end=end,
                no_stop_before=draw(st.integers(0, end)),
                stop_ids=draw(st.sampled_from([(), (STOP,), (STOP, 4)])),
                with_prompt_log_probs=draw(st.integers(0, 5)) == 0,
            )
        )
    least = max(-(-each.end // BLOCK_TOKENS) for each in sequences)
    num_lanes = draw(st.integers(1, 3))
    return {
        "sequences": sequences,
        "lanes": draw(st.lists(st.integers(0, num_lanes - 1), min_size=len(sequences), max_size=len(sequences))),
        "arrivals": sorted(draw(st.lists(st.integers(0, 30), min_size=len(sequences), max_size=len(sequences)))),
        "forgets": draw(st.sets(st.integers(0, 60), max_size=2)),
        "num_blocks": least + draw(st.sampled_from([0, 0, 1, 2, 5, 50])),
        "num_lanes": num_lanes,
        "num_slots": draw(st.integers(1, 6)),
        "chunk": draw(st.sampled_from([1, 3, 16, 17, 500])),
        "num_states": draw(st.sampled_from([0, 1, 2])),
    }


@settings(max_examples=100, deadline=None)
@given(workloads())
def test_each_gets_the_tokens_that_it_gets_alone(work):
    sequences = work["sequences"]
    simulation = Simulation(
        *(work["num_blocks"], work["num_lanes"], work["num_slots"], max(each.end for each in sequences)),
        *(work["chunk"], work["num_states"]),
    )
    for round_ in range(61):
        for sequence, lane, arrival in zip(sequences, work["lanes"], work["arrivals"], strict=True):
            if arrival == round_:
                simulation.lanes[lane].scheduler.add([sequence])
        if round_ in work["forgets"]:
            simulation.forget()
        for lane in simulation.lanes:
            simulation.turn(lane)
    simulation.finish(sequences)
    for sequence in sequences:
        assert simulation.ended[sequence.number] == alone(sequence)
        if sequence.with_prompt_log_probs:
            positions = {position for number, position in simulation.scored if number == sequence.number}
            assert positions == set(range(sequence.num_prompt - 1))
    assert not {number for number, _ in simulation.scored} - {
        each.number for each in sequences if each.with_prompt_log_probs
    }
    # Nobody computes more than all it has, each time that it begins.
    schedulers = [lane.scheduler for lane in simulation.lanes]
    begun = len(sequences) * (1 + simulation.num_forgotten) + sum(each.num_preempted for each in schedulers)
    assert sum(each.num_computed for each in schedulers) <= begun * max(each.end for each in sequences)


def sequences_of(num_prompts: int, num_samples: int, num_prompt: int, num_new: int) -> list[TokenSequence]:
    generator = np.random.default_rng(3)
    prompts = generator.integers(0, 1000, (num_prompts, num_prompt)).astype(np.int64)
    return [
        TokenSequence(
            number=prompt * num_samples + sample,
            tokens=prompts[prompt],
            num_prompt=num_prompt,
            end=num_prompt + num_new,
        )
        for prompt in range(num_prompts)
        for sample in range(num_samples)
    ]


@pytest.mark.parametrize("num_prompt", [512, 500, 497, 32, 10])
@pytest.mark.parametrize("num_slots", [256, 3])
@pytest.mark.parametrize("num_states", [0, 1, 8])
def test_samples_of_one_prompt_compute_it_once(num_prompt, num_slots, num_states):
    sequences = sequences_of(2, 8, num_prompt, 5)
    simulation = Simulation(2000, 1, num_slots, num_prompt + 5, 2048, num_states)
    simulation.lanes[0].scheduler.add(sequences)
    simulation.finish(sequences)
    assert simulation.ended == {sequence.number: alone(sequence) for sequence in sequences}
    # Once for each prompt, and for each other sample its last token, behind which it samples.
    assert simulation.lanes[0].scheduler.num_prompt_computed == 2 * (num_prompt + 7)


@pytest.mark.parametrize("num_states", [0, 1])
def test_what_is_short_of_room_is_preempted_and_still_shares(num_states):
    sequences = sequences_of(3, 8, 40, 60)
    # Seven blocks hold one sequence of 100 tokens.
    simulation = Simulation(9, 1, 256, 100, 64, num_states)
    simulation.lanes[0].scheduler.add(sequences)
    simulation.finish(sequences)
    assert simulation.ended == {sequence.number: alone(sequence) for sequence in sequences}
    scheduler = simulation.lanes[0].scheduler
    assert scheduler.num_preempted > 0
    # With states, who lost its blocks computes its prompt again.
    assert scheduler.num_prompt_computed < 40 * (24 + scheduler.num_preempted) / (1 if num_states else 2)


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "use", "name", "forget"]), st.integers(0, 9)), max_size=80))
def test_a_pool_against_a_list_of_uses(calls):
    pool = BlockPool(4)
    uses: list[int] = []
    names: dict[bytes, int] = {}
    for call, number in calls:
        key = bytes([number])
        if call == "take":
            idle = [block for block in range(4) if block not in uses]
            block = pool.take()
            assert (block is None) == (not idle)
            if block is not None:
                assert block in idle
                uses.append(block)
                names = {key: named for key, named in names.items() if named != block}
        elif call == "give" and uses:
            pool.give_up(uses.pop(number % len(uses)))
        elif call == "use":
            found = pool.find([key])
            assert found == ([names[key]] if key in names else [])
            pool.use(found)
            uses += found
        elif call == "name" and uses:
            pool.name(uses[number % len(uses)], key)
            names.setdefault(key, uses[number % len(uses)])
        elif call == "forget":
            pool.forget()
            names.clear()
        assert pool.num_free == 4 - len(set(uses))


def test_the_block_idle_for_longest_goes_first_and_unnamed_ones_before():
    pool = BlockPool(3)
    first, second, third = pool.take(), pool.take(), pool.take()
    for block, key in ((first, b"a"), (second, b"b")):
        pool.name(block, key)
    for block in (second, first, third):
        pool.give_up(block)
    assert [pool.take(), pool.take(), pool.take(), pool.take()] == [third, second, first, None]


def test_keys_are_of_all_tokens_before_and_of_how_many_there_are():
    tokens = np.arange(40, dtype=np.int64)
    keys = block_keys(tokens)
    assert len(keys) == 3 and block_keys(tokens[:32]) == keys[:2] and block_keys(tokens[16:], keys[0]) == keys[1:]
    assert block_keys(tokens[:39])[2] != keys[2]
    tokens[0] = 9
    assert not set(block_keys(tokens)) & set(keys)


def test_a_step_costs_little_beside_the_model():
    """256 rows that decode, a thousand that wait: a generous bound, since machines differ."""
    sequences = sequences_of(256, 5, 64, 200)
    scheduler = Scheduler(BlockPool(256 * 17), num_slots=256, capacity=264, max_step_tokens=1 << 20)
    scheduler.add(sequences)
    times: list[float] = []
    while len(times) < 150:
        # Not by the clock, since other processes use the machine too.
        begin = time.process_time()
        step = scheduler.plan()
        assert step is not None
        scheduler.absorb(step, np.zeros(len(step.rows), np.int64))
        if len(step.tokens) == 256:
            times.append(time.process_time() - begin)
        scheduler.moves.clear()
    assert scheduler.num_open == 1280
    assert sorted(times)[75] < 5e-3
    print(
        f"median {sorted(times)[75] * 1e6:.0f} µs, mean {sum(times) / 150 * 1e6:.0f} µs, most {max(times) * 1e6:.0f} µs"
    )
