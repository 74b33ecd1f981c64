"""Sequences that a replica generates together, from the first step to the last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.data.images import FIRST_ID
from hybridflow.models.images import ImageRows
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.routing import unknown_choice
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.blocks import STEP_TOKENS, BlockPool, kept_states
from hybridflow.rollout.likeliest import likeliest
from hybridflow.rollout.paged import PagedCache
from hybridflow.rollout.records import Records
from hybridflow.rollout.replica import Replica, TakeTokens
from hybridflow.rollout.request import LOOK_STEPS, FinishReason, Request, Response, TopLogProbs
from hybridflow.rollout.runner import Cache
from hybridflow.rollout.sampling import FAILURES, Sampled, Sampler, sequence_key
from hybridflow.rollout.scheduler import Scheduler, Step, TokenSequence
from hybridflow.rollout.texts import Watch

FEW_STEPS = 4
"""Most steps at a time while sequences wait for the slots of those that end."""


class Session:
    """Sequences being generated, until all are done. Made by ``MegatronEngine.open``.

    Ranks of a replica make the same calls in the same order. With pipeline stages there are as many lanes as stages:
    each stage computes a step of one lane while its neighbours compute another's.

    Args:
        replica: Replica that generates.
        purpose: Purpose of the noise, a key of ``PURPOSES``.
        expected: Requests that will come, by which the cache is made no larger than it need be; None: any.

    Attributes:
        num_steps: Steps so far, those that one call did together counted one by one.
    """

    def __init__(self, replica: Replica, purpose: str, expected: Sequence[Request] | None) -> None:
        self._replica = replica
        self._purpose = purpose
        self._requests: dict[int, Request] = {}
        self._ready: list[tuple[Request, Response]] = []
        self.num_steps = self._next_look = self._num_added = self._num_prompt = 0
        self._last_prompt_index: int | None = None
        self._num_changes = replica.num_changes
        self._watches: dict[int, Watch] = {}
        self._clocks: dict[int, _Clock] = {}
        # Number of a request -> place of a token in its sequence -> the likeliest there.
        self._tops: dict[int, dict[int, TopLogProbs]] = {}
        self._turn = 0
        num_slots, capacity, num_blocks = replica.room(expected)
        blocks = BlockPool(num_blocks)
        stages = replica.groups.pp.size()
        each = -(-num_slots // stages)
        kept = kept_states(each) if replica.has_states else 0
        self._cache: Cache = replica.runner.make_cache(num_blocks, stages * (each + kept))
        self._lanes = [_Lane(replica, blocks, lane * (each + kept), each, kept, capacity) for lane in range(stages)]
        self._lane = self._lanes[0]

    @property
    def is_idle(self) -> bool:
        """Return whether all added requests have been handed out."""
        return self.num_open == 0

    @property
    def num_open(self) -> int:
        """Return the number of requests that have not been handed out."""
        return len(self._ready) + len(self._requests)

    @property
    def num_computed(self) -> int:
        """Return the number of tokens that went through the model."""
        return sum(lane.scheduler.num_computed for lane in self._lanes)

    @property
    def num_preempted(self) -> int:
        """Return how often a sequence lost its place in the cache."""
        return sum(lane.scheduler.num_preempted for lane in self._lanes)

    def metrics(self) -> dict[str, float]:
        """Return ``preempted``, and of the prompts' tokens ``prompt_computed`` and ``prompt_tokens``, all of them."""
        num_computed = sum(lane.scheduler.num_prompt_computed for lane in self._lanes)
        return {
            "preempted": self.num_preempted,
            "prompt_computed": num_computed,
            "prompt_tokens": self._num_prompt,
        }

    def looks_up(self) -> bool:
        """Return whether to ask about stopping: at the start, and ``LOOK_STEPS`` steps after the last time."""
        if self.num_steps < self._next_look:
            return False
        self._next_look = self.num_steps + LOOK_STEPS
        return True

    def add(self, requests: Sequence[Request]) -> None:
        """Take up requests. One that cannot be met is handed out as failed, one that has ended before as it is."""
        for request in requests:
            reason = self._replica.refusal(request)
            response = _ended_before(request) if reason is None else _nothing("failed", reason)
            if response is not None:
                self._ready.append((request, response))
                continue
            number = self._num_added
            self._num_added += 1
            self._requests[number] = request
            self._clocks[number] = _Clock(perf_counter())
            if request.params.has_texts:
                self._watches[number] = self._watch(request)
            self._num_prompt += len(request.prompt)
            # Samples of one prompt, which come one after the other, stay together: one computes it, the others wait.
            if request.prompt_index != self._last_prompt_index:
                self._lane = min(self._lanes, key=lambda lane: lane.scheduler.num_open)
            self._last_prompt_index = request.prompt_index
            self._lane.scheduler.add([_sequence(number, request)])

    @torch.inference_mode()
    def step(self, most: int = 1) -> list[tuple[Request, Response]]:
        """Take what the lane whose turn it is has sampled, and begin its next step; what ended, failed ones included.

        Where one call can do it, up to ``most`` steps, but no more than ``FEW_STEPS`` while others wait.

        Collective: tp, pp.
        """
        ended, self._ready = self._ready, []
        if self._num_changes != self._replica.num_changes:
            ended += self._begin_anew()
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        if lane.pending is not None:
            ended += self._absorb(lane, *lane.pending)
            lane.pending = None
        step = lane.scheduler.plan()
        self._follow_moves(lane)
        if step is None:
            return ended
        if self._is_decodable(lane, step):
            if lane.is_watched[step.slots].any():
                # A stop text may end with any token.
                most = 1
            num_steps = lane.scheduler.reserve(min(most, FEW_STEPS) if lane.scheduler.waiting else most)
            self.num_steps += num_steps
            return ended + self._decode(lane, step.slots, num_steps)
        self.num_steps += 1
        lane.pending = step, self._forward(lane, step)
        return ended

    @torch.inference_mode()
    def pause(self) -> list[tuple[Request, Response]]:
        """Stop, and return all open requests: what has just ended, and what is unfinished.

        Unfinished ones come in the order in which they were added, each with its tokens so far: ``Request.begun`` to
        continue from, in any session, with these weights or others.

        Collective: tp, pp.
        """
        ended, self._ready = self._ready, []
        ended += self._catch_up()
        paused: dict[int, Response] = {}
        for lane in self._lanes:
            for slot in lane.scheduler.running:
                number = lane.scheduler.sequence(slot).number
                paused[number] = self._response(lane, slot, number, "paused")
            for sequence in lane.scheduler.waiting:
                request = self._requests[sequence.number]
                response = lane.records.response_aside(sequence.number, request, sequence.tokens)
                paused[sequence.number] = response or _nothing("paused")
        ended += [(request, paused[number]) for number, request in self._requests.items()]
        self._requests.clear()
        self._watches.clear()
        self._clocks.clear()
        self._tops.clear()
        return ended

    @torch.inference_mode()
    def cancel(self, requests: Sequence[Request]) -> None:
        """Stop requests that nobody waits for any more; skip those that have ended.

        Collective: tp, pp.
        """
        numbers = {number for number, request in self._requests.items() if any(request is each for each in requests)}
        # What was sampled has its place among what is known, from which a sequence is then taken.
        self._ready += self._catch_up()
        for lane in self._lanes:
            for number in numbers & self._requests.keys():
                lane.scheduler.drop(number)
                lane.records.drop(number)
        for number in numbers & self._requests.keys():
            del self._requests[number], self._clocks[number]
            self._watches.pop(number, None)
            self._tops.pop(number, None)
        self._ready = [pair for pair in self._ready if not any(pair[0] is each for each in requests)]

    def new_tokens(self, num_known: Mapping[int, int]) -> list[tuple[Request, list[int], Tensor, list[TopLogProbs]]]:
        """Return running requests that have sampled more tokens than are known, each with the new ones.

        Args:
            num_known: ``id`` of a request -> its tokens that are known; the others are not looked at.

        Returns:
            Of each request the new tokens, their ``log_probs`` and ``top_log_probs``, as ``Response`` has them.
        """
        found = []
        for lane in self._lanes:
            for slot in lane.scheduler.running:
                number = lane.scheduler.sequence(slot).number
                request = self._requests[number]
                if id(request) not in num_known:
                    continue
                first, stop = len(request.prompt) + num_known[id(request)], int(lane.scheduler.lengths[slot])
                if first < stop:
                    tokens, tops = lane.scheduler.tokens[slot, first:stop].tolist(), self._tops.get(number, {})
                    told = [tops[place] for place in range(first, stop) if place in tops]
                    found.append((request, tokens, lane.records.log_probs(slot, first, stop), told))
        return found

    def _catch_up(self) -> list[tuple[Request, Response]]:
        """Take what all lanes have sampled, in the order in which they did; what ended."""
        ended = []
        for lane in self._lanes[self._turn :] + self._lanes[: self._turn]:
            if lane.pending is not None:
                ended += self._absorb(lane, *lane.pending)
                lane.pending = None
        return ended

    def _begin_anew(self) -> list[tuple[Request, Response]]:
        """Recompute the cache after a change of weights, before sampling; return what ended before."""
        self._num_changes = self._replica.num_changes
        self._replica.prepare()
        ended = self._catch_up()
        for lane in self._lanes:
            lane.scheduler.forget()
            self._follow_moves(lane)
        return ended

    def _follow_moves(self, lane: _Lane) -> None:
        for is_in, slot, sequence in lane.scheduler.moves:
            if is_in:
                self._seat(lane, slot, sequence.number)
            else:
                lane.records.put_aside(slot, sequence.number)
        lane.scheduler.moves.clear()

    def _watch(self, request: Request) -> Watch:
        texts, params = self._replica.texts(), request.params
        return Watch(texts, params.stop, params.bad, [] if request.begun is None else request.begun.tokens.tolist())

    def _seat(self, lane: _Lane, slot: int, number: int) -> None:
        request = self._requests[number]
        lane.records.seat(slot, number, request)
        seed = self._replica.seed if request.params.seed is None else request.params.seed
        key = sequence_key(seed, self._purpose, request.prompt_index, request.index)
        lane.sampler.seat(slot, request.params, key, len(request.prompt))
        lane.is_watched[slot] = request.params.has_texts
        lane.num_prompt[slot] = len(request.prompt)
        lane.num_top[slot] = request.params.num_top_log_probs
        lane.has_images[slot] = bool((request.prompt >= FIRST_ID).any())
        lane.shifts[slot] = 0
        if lane.has_images[slot]:
            assert self._replica.model.images is not None, "such a request is refused"
            lane.turns[slot] = self._replica.model.images.turns(pad(request.prompt, (0, 1)))
            lane.shifts[slot] = lane.turns[slot][-1, 0] - len(request.prompt)

    def _forward(self, lane: _Lane, step: Step) -> _Outcome:
        """Compute a step; on the last stage also sample, and send the others the tokens."""
        replica, scheduler = self._replica, lane.scheduler
        rows = to_device(torch.from_numpy(np.concatenate([step.rows, step.scored])), replica.device)
        if len(step.copies):
            self._cache.copy(*to_device(torch.from_numpy(step.copies), replica.device).unbind(1))
        if len(step.state_copies):
            moved = torch.from_numpy(lane.first_slot + step.state_copies)
            self._cache.copy_states(*to_device(moved, replica.device).unbind(1))
        attention = replica.runner.attention(self._cache, scheduler.tables, step.slots, step.positions, lane.first_slot)
        attention.images = self._images(lane, step)
        output = replica.run(to_device(torch.from_numpy(step.tokens), replica.device), attention, rows)
        if output is None:
            return _Outcome(replica.receive_tokens(len(step.rows)), replica.version)
        num = len(step.rows)
        row_slots = step.row_slots
        sampled = lane.sampler.sample(
            output[:num],
            torch.from_numpy(row_slots),
            torch.from_numpy(scheduler.lengths[row_slots]),
            scheduler.tokens,
            lambda slot, token: self._watches[scheduler.sequence(slot).number].would_complete_bad(token),
        )
        take_tokens = replica.send_tokens(sampled.tokens)
        scores, following = sampled.log_probs[:0], sampled.tokens[:0]
        if len(step.scored):
            known = scheduler.tokens[step.slots[step.scored], step.positions[step.scored] + 1].astype(np.int64)
            if replica.model.images is not None:
                # The text of the prompt has this token in the place of an image's.
                known[known >= FIRST_ID] = replica.model.images.settings.token_id
            following = to_device(torch.from_numpy(known), replica.device)
            scores = vocab_parallel_log_probs(
                output[num:], following, group=replica.groups.tp, vocab_size=replica.vocab_size
            )[0]
        tops = self._find_tops(lane, step, output, (sampled.tokens, following), (sampled.log_probs, scores))
        return _Outcome(take_tokens, replica.version, sampled, scores, tops)

    def _images(self, lane: _Lane, step: Step) -> ImageRows | None:
        """Return the tokens of images in a step; None: no sequence in it has any."""
        slots = np.unique(step.slots[lane.has_images[step.slots]]).tolist()
        if not slots:
            return None
        turns = torch.from_numpy(step.positions + lane.shifts[step.slots])[:, None].repeat(1, 3)
        for slot in slots:
            rows = np.flatnonzero((step.slots == slot) & (step.positions < lane.num_prompt[slot]))
            turns[rows] = lane.turns[slot][step.positions[rows]]
        reader = self._replica.model.images
        assert reader is not None, "such a request is refused"
        return reader.rows(torch.from_numpy(step.tokens), turns, self._replica.device)

    def _find_tops(
        self,
        lane: _Lane,
        step: Step,
        output: Tensor,
        tokens: tuple[Tensor, Tensor],
        log_probs: tuple[Tensor, Tensor],
    ) -> list[tuple[int, int, TopLogProbs]]:
        """Return the likeliest tokens where they are asked for, each with the request's number and the place.

        Collective: tp.

        Args:
            lane: Lane of the step.
            step: The step.
            output: Logits of its rows and then of what is scored, ``[rows + scored, padded_vocab/tp]``.
            tokens: The token behind each, ``[rows]`` and ``[scored]``.
            log_probs: Its log-probability, ``[rows]`` and ``[scored]``.
        """
        slots = np.concatenate([step.row_slots, step.slots[step.scored]])
        asked = np.flatnonzero(lane.num_top[slots])
        if not len(asked):
            return []
        replica, num = self._replica, len(step.rows)
        places = np.concatenate([lane.scheduler.lengths[step.row_slots], step.positions[step.scored] + 1])[asked]
        numbers = [lane.scheduler.sequence(slot).number for slot in slots[asked].tolist()]
        temperatures = [
            self._requests[number].params.temperature if place < num else 1.0
            for place, number in zip(asked.tolist(), numbers, strict=True)
        ]
        where = to_device(torch.from_numpy(asked), replica.device)
        found = likeliest(
            output[where],
            torch.tensor(temperatures, device=replica.device),
            torch.cat(tokens)[where],
            torch.cat(log_probs)[where],
            count=int(lane.num_top[slots].max()),
            group=replica.groups.tp,
            vocab_size=replica.vocab_size,
        )
        counts = lane.num_top[slots[asked]].tolist()
        tops = [each[:count] for each, count in zip(found, counts, strict=True)]
        return list(zip(numbers, places.tolist(), tops, strict=True))

    def _is_decodable(self, lane: _Lane, step: Step) -> bool:
        """Return whether the runner can take this step by itself, and further ones in the same call."""
        runner = self._replica.runner
        is_one_token_each = len(step.rows) == len(step.tokens)
        does_more = len(step.copies) + len(step.state_copies) + len(step.scored) > 0
        # A prompt that is known but for its last token may end with an image.
        has_images = (step.tokens >= FIRST_ID).any() or (not runner.can_turn and lane.has_images[step.slots].any())
        if not runner.can_decode or not is_one_token_each or does_more or has_images:
            return False
        known = {"with_cuts": runner.can_cut, "with_edits": runner.can_edit}
        return lane.sampler.is_plain(step.slots, **known) and not lane.num_top[step.slots].any()

    def _decode(self, lane: _Lane, slots: np.ndarray, num_steps: int) -> list[tuple[Request, Response]]:
        """Sample up to ``num_steps`` tokens of each running sequence, 1 if any is watched; return what ended."""
        replica, tables = self._replica, lane.scheduler.tables
        arrays = {**lane.scheduler.arrays(), **lane.sampler.arrays(slots), **lane.records.arrays()}
        arrays["shifts"] = lane.shifts
        begin = slots[lane.scheduler.lengths[slots] == lane.num_prompt[slots]]
        failures = replica.runner.decode(self._cache, tables, slots, num_steps, replica.version, **arrays)[slots]
        self._note_first_tokens(lane, begin)
        is_stop, is_long = lane.scheduler.absorb_decoded(slots)
        last = lane.scheduler.tokens[slots, lane.scheduler.lengths[slots] - 1]
        self._look_for_texts(lane, slots, np.where(failures < 0, failures, last), is_stop)
        return self._end(lane, slots, failures, is_stop, is_long)

    def _absorb(self, lane: _Lane, step: Step, outcome: _Outcome) -> list[tuple[Request, Response]]:
        slots = step.row_slots
        tokens = outcome.take_tokens().numpy()
        positions = lane.scheduler.lengths[slots]
        self._note_first_tokens(lane, slots[positions == lane.num_prompt[slots]])
        if outcome.sampled is not None:
            log_probs, sampled = (
                outcome.sampled.log_probs.cpu().numpy(),
                outcome.sampled.sampled_log_probs.cpu().numpy(),
            )
            lane.records.add(slots, positions, log_probs, sampled, outcome.version)
        else:
            lane.records.add(slots, positions, np.float32(0), np.float32(0), outcome.version)
        if outcome.scores is not None and len(step.scored):
            lane.records.score(step.slots[step.scored], step.positions[step.scored] + 1, outcome.scores.cpu().numpy())
        for number, place, top in outcome.tops:
            self._tops.setdefault(number, {})[place] = top
        is_stop, is_long = lane.scheduler.absorb(step, tokens)
        self._look_for_texts(lane, slots, tokens, is_stop)
        failures = np.minimum(tokens, 0)
        lane.scheduler.lengths[slots[failures < 0]] -= 1
        return self._end(lane, slots, failures, is_stop, is_long)

    def _note_first_tokens(self, lane: _Lane, slots: np.ndarray) -> None:
        """Note that the first token of some slots is known."""
        now_s = perf_counter()
        for slot in slots.tolist():
            self._clocks[lane.scheduler.sequence(slot).number].first_token_s = now_s

    def _end(
        self, lane: _Lane, slots: np.ndarray, failures: np.ndarray, is_stop: np.ndarray, is_long: np.ndarray
    ) -> list[tuple[Request, Response]]:
        """End the finished ones of some slots, ``[slots]`` each; drop the token that failed."""
        ended = []
        for row in (is_stop | is_long | (failures < 0)).nonzero()[0].tolist():
            slot = int(slots[row])
            number = lane.scheduler.sequence(slot).number
            if failures[row] < 0:
                reason = f"token {lane.scheduler.lengths[slot]}: {FAILURES[int(failures[row])]}"
                response = self._response(lane, slot, number, "failed", reason)
            else:
                response = self._response(lane, slot, number, "stop" if is_stop[row] else "length")
                if self._replica.keeps_choices:
                    response = replace(response, choices=self._choices(lane, slot))
            lane.scheduler.remove(slot)
            self._watches.pop(number, None)
            ended.append((self._requests.pop(number), self._clocks.pop(number).stop(response)))
        return ended

    def _choices(self, lane: _Lane, slot: int) -> Tensor:
        """Return the experts that each known token was sent to; those of the last are unknown. Collective: pp."""
        num_known = int(lane.scheduler.lengths[slot])
        blocks = torch.from_numpy(lane.scheduler.tables[slot]).to(self._replica.device)
        assert isinstance(self._cache, PagedCache), "no other keeps them"
        found = self._cache.choices_of(blocks, num_known)
        found[num_known - 1 :] = unknown_choice(found.dtype)
        if self._replica.groups.pp.size() > 1:
            # Unknown is the largest number, and each stage knows its own layers.
            wide = found.int()
            dist.all_reduce(wide, dist.ReduceOp.MIN, group=self._replica.groups.pp)
            found = wide.to(found.dtype)
        return found.cpu()

    def _look_for_texts(self, lane: _Lane, slots: np.ndarray, tokens: np.ndarray, is_stop: np.ndarray) -> None:
        """Show the watched slots' tokens to their watches; where they complete a stop text, set ``is_stop``."""
        for row in np.flatnonzero(lane.is_watched[slots] & (tokens >= 0)).tolist():
            number = lane.scheduler.sequence(int(slots[row])).number
            request = self._requests[number]
            is_complete = self._watches[number].add(int(tokens[row]))
            num_sampled = lane.scheduler.lengths[slots[row]] - len(request.prompt)
            is_stop[row] |= is_complete and num_sampled >= request.params.min_new_tokens

    def _response(
        self, lane: _Lane, slot: int, number: int, finish: FinishReason, error: str | None = None
    ) -> Response:
        tokens, request = lane.scheduler.tokens[slot, : lane.scheduler.lengths[slot]], self._requests[number]
        response = lane.records.response(slot, request, tokens, finish, error)
        tops = self._tops.pop(number, None)
        if tops is None:
            return response
        num_prompt = len(request.prompt)
        is_scored = request.params.with_prompt_log_probs
        return replace(
            response,
            top_log_probs=[tops[place] for place in range(num_prompt, len(tokens))],
            prompt_top_log_probs=[tops[place] for place in range(1, num_prompt)] if is_scored else None,
        )


@dataclass(frozen=True)
class _Outcome:
    """What a step gave, of which weights: tokens, received on all stages from the last; the rest there alone."""

    take_tokens: TakeTokens
    version: int
    sampled: Sampled | None = None
    scores: Tensor | None = None
    tops: Sequence[tuple[int, int, TopLogProbs]] = ()


@dataclass
class _Clock:
    """When a request was added, and when its first token was known, if yet; by the monotonic clock, in seconds."""

    began_s: float
    first_token_s: float = math.nan

    def stop(self, response: Response) -> Response:
        """Return the response, which has just ended, with its times."""
        return replace(
            response, latency_s=perf_counter() - self.began_s, first_token_s=self.first_token_s - self.began_s
        )


class _Lane:
    """Sequences that are computed together, in slots of the cache that no other lane has, with kept states behind."""

    def __init__(
        self, replica: Replica, blocks: BlockPool, first_slot: int, num_slots: int, num_states: int, capacity: int
    ) -> None:
        self.first_slot = first_slot
        self.scheduler = Scheduler(
            blocks,
            num_slots=num_slots,
            capacity=capacity,
            max_step_tokens=STEP_TOKENS,
            num_states=num_states,
        )
        self.sampler = Sampler(num_slots, replica.groups.tp, replica.vocab_size, replica.device)
        self.records = Records(num_slots, capacity)
        self.is_watched = np.zeros(num_slots, bool)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.num_top = np.zeros(num_slots, np.int64)
        self.has_images = np.zeros(num_slots, bool)
        # Of slots with images how far each token of the prompt turns, and the one behind it.
        self.turns: dict[int, Tensor] = {}
        # Text turns as if it stood so many tokens further on; below zero behind images.
        self.shifts = np.zeros(num_slots, np.int64)
        self.pending: tuple[Step, _Outcome] | None = None


def _sequence(number: int, request: Request) -> TokenSequence:
    params, prompt = request.params, request.prompt
    known = prompt if request.begun is None else torch.cat([prompt, request.begun.tokens])
    return TokenSequence(
        number=number,
        tokens=known.numpy(),
        num_prompt=len(prompt),
        end=len(prompt) + params.max_new_tokens,
        no_stop_before=len(prompt) + params.min_new_tokens,
        stop_ids=params.stop_ids,
        with_prompt_log_probs=params.with_prompt_log_probs,
    )


def _ended_before(request: Request) -> Response | None:
    """Return the response, if nothing is left to be sampled of what was begun."""
    begun = request.begun
    if begun is None or begun.finish in ("stop", "length"):
        return begun
    return replace(begun, finish="length") if len(begun.tokens) >= request.params.max_new_tokens else None


def _nothing(finish: FinishReason, error: str | None = None) -> Response:
    none = torch.zeros(0)
    return Response(
        tokens=none.long(),
        log_probs=none,
        sampled_log_probs=none,
        versions=none.int(),
        finish=finish,
        error=error,
    )
