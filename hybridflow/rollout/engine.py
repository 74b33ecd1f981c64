"""Continuous batching on the training model's own weights, under tensor, pipeline and data parallelism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.models.attention import PackedAttention
from hybridflow.models.gpt import Transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.routing import unknown_choice
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.blocks import BLOCK_TOKENS, BlockPool
from hybridflow.rollout.budget import cache_bytes
from hybridflow.rollout.paged import PagedCache, block_bytes
from hybridflow.rollout.records import Records
from hybridflow.rollout.request import (
    FinishReason,
    Progress,
    Request,
    Response,
    RolloutStopped,
    SamplingParams,
    length_refusal,
)
from hybridflow.rollout.runner import Cache, make_runner
from hybridflow.rollout.sampling import FAILURES, Sampled, Sampler, sequence_key
from hybridflow.rollout.scheduler import Job, Scheduler, Step
from hybridflow.rollout.texts import Texts, Watch

STEP_TOKENS = 2048
"""Tokens that go through the model at one time."""

LOOK_STEPS = 16
"""Every so many steps generating looks up: what is finished is handed over, and it may be told to stop."""

FEW_STEPS = 4
"""Most steps at a time while sequences wait for the slots of those that end."""

TakeTokens = Callable[[], Tensor]
"""Waits for the tokens of a step, ``[rows]`` int64 in host memory."""


class MegatronEngine:
    """Generates with one data-parallel replica of a model; all its ranks make the same calls with the same arguments.

    Replicas that share experts compute in lockstep: whoever has nothing to compute takes part with a blank token, until
    all of them have come to ``finish``.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        seed: Seed of the noise.
        max_concurrent: Most sequences decoded together.
        cache_memory: Most memory of the key-value cache on this rank: in bytes, or, below 1, a share of what is free
            when generating begins.
        ranks_per_node: Ranks that share the memory of this rank's node.
        tokenizer: Tokenizer for stop and bad texts; None: requests may have none.
        keeps_choices: Whether responses tell the experts that each token was sent to.

    Attributes:
        version: Number of the weights, noted beside each token; the caller's to set.
        metrics: Metrics of the last ``generate``.
        runner: Computes the model, over a cache of its own making.
        keeps_choices: Whether responses tell the experts that each token was sent to.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ProcessGroupCollection,
        *,
        vocab_size: int,
        seed: int,
        max_concurrent: int,
        cache_memory: float = 0.5,
        ranks_per_node: int = 1,
        tokenizer: Tokenizer | None = None,
        keeps_choices: bool = False,
    ) -> None:
        self.keeps_choices = keeps_choices
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.model = model
        self.groups = groups
        self.vocab_size = vocab_size
        self.seed = seed
        self._tokenizer = tokenizer
        self._texts: Texts | None = None
        self.device = next(model.parameters()).device
        self._max_concurrent = max_concurrent
        self._cache_memory = cache_memory
        self._ranks_per_node = ranks_per_node
        self._most_blocks = 0
        self._stage_ranks = dist.get_process_group_ranks(groups.pp)
        self.runner = make_runner(
            model, groups, vocab_size, max_rows=max_concurrent, max_steps=LOOK_STEPS, keeps_choices=keeps_choices
        )
        self._sent: tuple[dist.Work, Tensor] | None = None
        self._num_changes = 0
        mates, own = (dist.get_process_group_ranks(group) for group in (groups.tp_ep, groups.tp))
        self._is_in_lockstep = model.config.num_moe_experts is not None and not {*mates} <= {*own}

    @property
    def num_changes(self) -> int:
        """Return how often the weights have changed."""
        return self._num_changes

    def weights_changed(self) -> None:
        """Drop what was derived from the model's weights, and free its memory.

        An open session goes on with the new weights: it recomputes its cache.
        """
        self.runner.forget()
        self._num_changes += 1

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """Return one response for each request, in their order.

        Collective: tp, pp.

        Raises:
            DataError: A request cannot be met: its prompt leaves no room for a response, in the model's context or in
                the cache.
            RolloutStopped: ``progress`` said to stop; on all ranks of the replica, at the same point.
        """
        found = {id(request): response for request, response in self.drive(requests, purpose, progress)}
        return [found[id(request)] for request in requests]

    @torch.inference_mode()
    def drive(
        self,
        requests: Sequence[Request],
        purpose: str = "rollout",
        progress: Progress | None = None,
        *,
        more: Callable[[int], Sequence[Request]] = lambda num_open: (),
        expected: Sequence[Request] | None = None,
    ) -> list[tuple[Request, Response]]:
        """Generate like ``generate``, with further requests that arrive meanwhile; return all pairs in finishing order.

        It asks ``progress`` every ``LOOK_STEPS`` steps whether to stop, and then passes it what has finished.

        Args:
            requests: What there is at once.
            purpose: Of the noise.
            progress: What goes on beside; None: nothing.
            more: Asked before each step, with the number of requests that are not done, for others. Gives the same on
                all ranks of the replica. When none is left and it has no others, that is the end.
            expected: All requests that may come; None: only ``requests``.

        Collective: tp, pp.
        """
        expected = requests if expected is None else expected
        session = self.open(expected, purpose)
        for request in expected:
            if reason := self.refusal(request):
                raise DataError(f"prompt {request.prompt_index}: {reason}")
        session.add(requests)
        done: list[tuple[Request, Response]] = []
        num_told = 0
        num_added = len(requests)
        while True:
            others = more(session.num_open)
            session.add(others)
            num_added += len(others)
            if session.is_idle:
                break
            if progress is not None and session.looks_up():
                if len(done) > num_told:
                    progress.finished(done[num_told:])
                    num_told = len(done)
                if progress.is_stopping():
                    left = session.pause()
                    self.finish()
                    self.metrics = session.metrics()
                    if ended := [pair for pair in left if pair[1].finish != "paused"]:
                        progress.finished(ended)
                    raise RolloutStopped([pair for pair in left if pair[1].finish == "paused"])
            done += session.step(LOOK_STEPS if num_added == len(expected) else FEW_STEPS)
        if progress is not None and len(done) > num_told:
            progress.finished(done[num_told:])
        self.finish()
        self.metrics = session.metrics()
        return done

    @torch.inference_mode()
    def open(self, expected: Sequence[Request] | None = None, purpose: str = "rollout") -> Session:
        """Begin to generate: requests are added to the session, those that are expected or, without, any.

        Collective: tp, pp.
        """
        self.prepare()
        self._most_blocks = self._measure()
        return Session(self, purpose, expected)

    def prepare(self) -> None:
        """Derive from the weights what the quick path needs, if it is not there."""
        self.runner.prepare()

    def refusal(self, request: Request) -> str | None:
        """Return why a request cannot be met, or None if it can."""
        if reason := length_refusal(request, self.model.max_sequence_length) or self._stranger(request):
            return reason
        num_prompt, most = len(request.prompt), request.params.max_new_tokens
        if blocks_for(num_prompt + most) > self._most_blocks:
            block, asked = block_bytes(self.model), self._cache_memory
            return (
                f"its {num_prompt} tokens and max_new_tokens={most} take {blocks_for(num_prompt + most) * block} bytes "
                f"of the key-value cache, and cache_memory={asked:g} "
                f"{'of what is free ' if asked < 1 else ''}gives {self._most_blocks * block}; raise it, shorten the "
                "prompt, or ask for fewer tokens"
            )
        return None

    def _stranger(self, request: Request) -> str | None:
        """Return what in a request the vocabulary does not allow, or a missing tokenizer; None if nothing."""
        smallest, largest = (int(each) for each in request.prompt.aminmax())
        if smallest < 0 or largest >= self.vocab_size:
            wrong = smallest if smallest < 0 else largest
            return f"it has token {wrong}; expected 0 to {self.vocab_size - 1}, as the model's tokenizer makes them"
        if request.params.largest_id >= self.vocab_size:
            return (
                f"its logit_bias or bad_ids name token {request.params.largest_id}; expected 0 to {self.vocab_size - 1}"
            )
        if request.params.has_texts and self._tokenizer is None:
            return "it has stop or bad texts, and there is no tokenizer to look for them with; give the engine one"
        return self._named_token(request.params)

    def _named_token(self, params: SamplingParams) -> str | None:
        """Return which stop or bad text is a special token's name, which no response's text has; None if none is."""
        instead = {"stop": "stop_ids=({},)", "bad": "bad_ids=(({},),)"}
        for kind, name in [*(("stop", name) for name in params.stop), *(("bad", name) for name in params.bad)]:
            assert self._tokenizer is not None, "refused before"
            if (index := self._tokenizer.special_id(name)) is not None:
                return (
                    f"its {kind} text {name!r} is a special token, which is left out of texts; give "
                    f"{instead[kind].format(index)}"
                )
        return None

    @property
    def most_tokens(self) -> int:
        """Return the longest sequence for which there is room, as ``open`` has found: in the context and the cache."""
        context: int = self.model.max_sequence_length
        return min(context, self._most_blocks * BLOCK_TOKENS)

    def texts(self) -> Texts:
        """Return the tokenizer for requests with texts; such requests are refused without one."""
        if self._texts is None:
            assert self._tokenizer is not None, "such a request is refused"
            self._texts = Texts(self._tokenizer)
        return self._texts

    def room(self, expected: Sequence[Request] | None) -> tuple[int, int, int]:
        """Return slots, longest sequence and blocks for the expected requests, or for any."""
        if expected is None:
            return self._max_concurrent, self.model.max_sequence_length, max(self._most_blocks, 1)
        lengths = sorted((len(each.prompt) + each.params.max_new_tokens for each in expected), reverse=True)
        lengths = lengths[: self._max_concurrent]
        # Lanes may be dealt unevenly, but not more than all to one.
        num_blocks = sum(map(blocks_for, lengths))
        return max(len(lengths), 1), max(lengths, default=1), max(min(num_blocks, self._most_blocks), 1)

    def run(self, tokens: Tensor, attention: Any, rows: Tensor) -> Tensor | None:
        """Run this stage's part of a forward pass, with an attention that the runner made. Collective: tp, ep.

        Return logits of the rows, ``[rows, padded_vocab/tp]``, on the last stage.
        """
        self._meet(has_work=True)
        return self._through(self.runner, tokens, attention, rows)

    @torch.inference_mode()
    def finish(self) -> None:
        """Take part in what replicas that share experts with this one still compute.

        Collective: ep. To be called after the last step of a session.
        """
        while self._meet(has_work=False):
            tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
            attention = PackedAttention([1], self.device)
            attention.can_split = False
            self._through(self.model, tokens, attention, tokens)

    def _meet(self, *, has_work: bool) -> bool:
        """Return whether a replica that shares experts with this one has something to compute. Collective: ep."""
        if not self._is_in_lockstep:
            return False
        working = torch.tensor(has_work, dtype=torch.int32, device=self.device)
        dist.all_reduce(working, group=self.groups.tp_ep)
        return has_work or bool(working)

    def _through(self, compute: Callable[..., Tensor], tokens: Tensor, attention: Any, rows: Tensor) -> Tensor | None:
        stage, stages = self.groups.pp.rank(), self._stage_ranks
        config = self.model.config
        if stage > 0:
            hidden = torch.empty(len(tokens), 1, config.hidden_size, dtype=config.params_dtype, device=self.device)
            dist.recv(hidden, src=stages[stage - 1], group=self.groups.pp)
            self.model.set_input_tensor(hidden)
        output = compute(tokens, attention, rows)
        if self.model.post_process:
            return output
        if self._sent is not None:
            self._sent[0].wait()
        # Kept until it has left.
        output = output.contiguous()
        self._sent = _send(output, stages[stage + 1], self.groups.pp), output
        return None

    def send_tokens(self, tokens: Tensor) -> TakeTokens:
        """Begin to bring tokens from the last stage to the host memory of all stages; what ends it gives them.

        Those of a GPU leave with the end, through the host: on one way with the hidden states, which go in the other
        direction, each stage would wait for the other.
        """
        others = self._stage_ranks[:-1]
        if tokens.device.type == "cpu":
            sends = [_send(tokens, rank, self.groups.pp) for rank in others]
            return functools.partial(_wait_for, tokens, sends)
        found = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        found.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def send() -> Tensor:
            copied.synchronize()
            return _wait_for(found, [_send(found, rank, self.groups.pp) for rank in others])

        return send

    def receive_tokens(self, num_tokens: int) -> TakeTokens:
        """Return what receives the tokens of the last stage, on any other."""

        def receive() -> Tensor:
            tokens = torch.empty(num_tokens, dtype=torch.int64)
            dist.recv(tokens, src=self._stage_ranks[-1], group=self.groups.pp)
            return tokens

        return receive

    def _measure(self) -> int:
        """Return the number of blocks that the memory budget allows on each rank of the replica.

        It is no more than can ever be needed.

        Collective: tp, pp.
        """
        most = self._max_concurrent * blocks_for(self.model.max_sequence_length)
        num_bytes = cache_bytes(self._cache_memory, self.device, self._ranks_per_node)
        allowed = torch.tensor(min(num_bytes // block_bytes(self.model), most), device=self.device)
        for group in (self.groups.tp, self.groups.pp):
            if group.size() > 1:
                dist.all_reduce(allowed, dist.ReduceOp.MIN, group=group)
        return int(allowed)


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Begin to send a tensor to a rank of a group that this rank is in."""
    work = dist.isend(tensor, dst=rank, group=group)
    assert work is not None, "a rank sends only in its own groups"
    return work


def _wait_for(tokens: Tensor, sends: Sequence[dist.Work]) -> Tensor:
    for send in sends:
        send.wait()
    return tokens


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold ``num_tokens`` tokens of one sequence."""
    return -(-num_tokens // BLOCK_TOKENS)


class Session:
    """Sequences being generated, until all are done. Made by ``MegatronEngine.open``.

    Ranks of a replica make the same calls in the same order. With pipeline stages there are as many lanes as stages:
    each stage computes a step of one lane while its neighbours compute another's.

    Args:
        engine: Engine whose model generates.
        purpose: Purpose of the noise, a key of ``PURPOSES``.
        expected: Requests that will come, by which the cache is made no larger than it need be; None: any.

    Attributes:
        num_steps: Steps so far, those that one call did together counted one by one.
    """

    def __init__(self, engine: MegatronEngine, purpose: str, expected: Sequence[Request] | None) -> None:
        self._engine = engine
        self._purpose = purpose
        self._requests: dict[int, Request] = {}
        self._ready: list[tuple[Request, Response]] = []
        self.num_steps = self._next_look = self._num_added = self._num_prompt = 0
        self._last_prompt_index: int | None = None
        self._num_changes = engine.num_changes
        self._watches: dict[int, Watch] = {}
        self._clocks: dict[int, _Clock] = {}
        self._turn = 0
        num_slots, capacity, num_blocks = engine.room(expected)
        blocks = BlockPool(num_blocks)
        self._cache: Cache = engine.runner.make_cache(num_blocks)
        stages = engine.groups.pp.size()
        self._lanes = [_Lane(engine, blocks, -(-num_slots // stages), capacity) for _ in range(stages)]
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
        """Return ``preempted``, and ``prefill_share``: computed prompt tokens over requested ones."""
        num_computed = sum(lane.scheduler.num_prompt_computed for lane in self._lanes)
        return {"preempted": self.num_preempted, "prefill_share": num_computed / max(self._num_prompt, 1)}

    def looks_up(self) -> bool:
        """Return whether to ask about stopping: at the start, and ``LOOK_STEPS`` steps after the last time."""
        if self.num_steps < self._next_look:
            return False
        self._next_look = self.num_steps + LOOK_STEPS
        return True

    def add(self, requests: Sequence[Request]) -> None:
        """Take up requests. One that cannot be met is handed out as failed, one that has ended before as it is."""
        for request in requests:
            reason = self._engine.refusal(request)
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
            self._lane.scheduler.add([_job(number, request)])

    @torch.inference_mode()
    def step(self, most: int = 1) -> list[tuple[Request, Response]]:
        """Take what the lane whose turn it is has sampled, and begin its next step; what ended, failed ones included.

        Where one call can do it, up to ``most`` steps, but no more than ``FEW_STEPS`` while others wait.

        Collective: tp, pp.
        """
        ended, self._ready = self._ready, []
        if self._num_changes != self._engine.num_changes:
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
                number = lane.scheduler.job(slot).number
                paused[number] = self._response(lane, slot, number, "paused")
            for job in lane.scheduler.waiting:
                request = self._requests[job.number]
                response = lane.records.response_aside(job.number, request, job.tokens)
                paused[job.number] = response or _nothing("paused")
        ended += [(request, paused[number]) for number, request in self._requests.items()]
        self._requests.clear()
        self._watches.clear()
        self._clocks.clear()
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
        self._ready = [pair for pair in self._ready if not any(pair[0] is each for each in requests)]

    def new_tokens(self, num_known: Mapping[int, int]) -> list[tuple[Request, list[int]]]:
        """Return running requests that have sampled more tokens than are known, each with the new ones.

        Args:
            num_known: ``id`` of a request -> its tokens that are known; the others are not looked at.
        """
        found = []
        for lane in self._lanes:
            for slot in lane.scheduler.running:
                request = self._requests[lane.scheduler.job(slot).number]
                if id(request) not in num_known:
                    continue
                first = len(request.prompt) + num_known[id(request)]
                if first < lane.scheduler.lengths[slot]:
                    found.append((request, lane.scheduler.tokens[slot, first : lane.scheduler.lengths[slot]].tolist()))
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
        self._num_changes = self._engine.num_changes
        self._engine.prepare()
        ended = self._catch_up()
        for lane in self._lanes:
            lane.scheduler.forget()
            self._follow_moves(lane)
        return ended

    def _follow_moves(self, lane: _Lane) -> None:
        for is_in, slot, job in lane.scheduler.moves:
            if is_in:
                self._seat(lane, slot, job.number)
            else:
                lane.records.put_aside(slot, job.number)
        lane.scheduler.moves.clear()

    def _watch(self, request: Request) -> Watch:
        texts, params = self._engine.texts(), request.params
        return Watch(texts, params.stop, params.bad, [] if request.begun is None else request.begun.tokens.tolist())

    def _seat(self, lane: _Lane, slot: int, number: int) -> None:
        request = self._requests[number]
        lane.records.seat(slot, number, request)
        seed = self._engine.seed if request.params.seed is None else request.params.seed
        key = sequence_key(seed, self._purpose, request.prompt_index, request.index)
        lane.sampler.seat(slot, request.params, key, len(request.prompt))
        lane.is_watched[slot] = request.params.has_texts
        lane.num_prompt[slot] = len(request.prompt)

    def _forward(self, lane: _Lane, step: Step) -> _Outcome:
        """Compute a step; on the last stage also sample, and send the others the tokens."""
        engine, scheduler = self._engine, lane.scheduler
        rows = to_device(torch.from_numpy(np.concatenate([step.rows, step.scored])), engine.device)
        if len(step.copies):
            self._cache.copy(*to_device(torch.from_numpy(step.copies), engine.device).unbind(1))
        attention = engine.runner.attention(self._cache, scheduler.tables, step.slots, step.positions)
        output = engine.run(to_device(torch.from_numpy(step.tokens), engine.device), attention, rows)
        if output is None:
            return _Outcome(engine.receive_tokens(len(step.rows)), engine.version)
        num = len(step.rows)
        row_slots = step.row_slots
        sampled = lane.sampler.sample(
            output[:num],
            torch.from_numpy(row_slots),
            torch.from_numpy(scheduler.lengths[row_slots]),
            scheduler.tokens,
            lambda slot, token: self._watches[scheduler.job(slot).number].would_complete_bad(token),
        )
        take_tokens = engine.send_tokens(sampled.tokens)
        scores = None
        if len(step.scored):
            following = scheduler.tokens[step.slots[step.scored], step.positions[step.scored] + 1]
            targets = to_device(torch.from_numpy(following.astype(np.int64)), engine.device)
            scores = vocab_parallel_log_probs(
                output[num:], targets, group=engine.groups.tp, vocab_size=engine.vocab_size
            )[0]
        return _Outcome(take_tokens, engine.version, sampled, scores)

    def _is_decodable(self, lane: _Lane, step: Step) -> bool:
        """Return whether the runner can take this step by itself, and further ones in the same call."""
        is_one_token_each = len(step.rows) == len(step.tokens) and not len(step.copies) + len(step.scored)
        runner = self._engine.runner
        if not runner.can_decode or not is_one_token_each:
            return False
        known = {"with_cuts": runner.can_cut, "with_edits": runner.can_edit}
        return lane.sampler.is_plain(step.slots, **known) and not bool(lane.is_watched[step.slots].any())

    def _decode(self, lane: _Lane, slots: np.ndarray, num_steps: int) -> list[tuple[Request, Response]]:
        """Sample up to ``num_steps`` tokens of each running sequence; return what ended."""
        engine, tables = self._engine, lane.scheduler.tables
        arrays = {**lane.scheduler.arrays(), **lane.sampler.arrays(slots), **lane.records.arrays()}
        begin = slots[lane.scheduler.lengths[slots] == lane.num_prompt[slots]]
        failures = engine.runner.decode(self._cache, tables, slots, num_steps, engine.version, **arrays)[slots]
        self._note_first_tokens(lane, begin)
        return self._end(lane, slots, failures, *lane.scheduler.absorb_decoded(slots))

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
        if outcome.scores is not None:
            lane.records.score(step.slots[step.scored], step.positions[step.scored] + 1, outcome.scores.cpu().numpy())
        is_stop, is_long = lane.scheduler.absorb(step, tokens)
        self._look_for_texts(lane, slots, tokens, is_stop)
        failures = np.minimum(tokens, 0)
        lane.scheduler.lengths[slots[failures < 0]] -= 1
        return self._end(lane, slots, failures, is_stop, is_long)

    def _note_first_tokens(self, lane: _Lane, slots: np.ndarray) -> None:
        """Note that the first token of some slots is known."""
        now_s = perf_counter()
        for slot in slots.tolist():
            self._clocks[lane.scheduler.job(slot).number].first_token_s = now_s

    def _end(
        self, lane: _Lane, slots: np.ndarray, failures: np.ndarray, is_stop: np.ndarray, is_long: np.ndarray
    ) -> list[tuple[Request, Response]]:
        """End the finished ones of some slots, ``[slots]`` each; drop the token that failed."""
        ended = []
        for row in (is_stop | is_long | (failures < 0)).nonzero()[0].tolist():
            slot = int(slots[row])
            number = lane.scheduler.job(slot).number
            if failures[row] < 0:
                reason = f"token {lane.scheduler.lengths[slot]}: {FAILURES[int(failures[row])]}"
                response = self._response(lane, slot, number, "failed", reason)
            else:
                response = self._response(lane, slot, number, "stop" if is_stop[row] else "length")
                if self._engine.keeps_choices:
                    response = replace(response, choices=self._choices(lane, slot))
            lane.scheduler.remove(slot)
            self._watches.pop(number, None)
            ended.append((self._requests.pop(number), self._clocks.pop(number).stop(response)))
        return ended

    def _choices(self, lane: _Lane, slot: int) -> Tensor:
        """Return the experts that each known token was sent to; those of the last are unknown. Collective: pp."""
        num_known = int(lane.scheduler.lengths[slot])
        blocks = torch.from_numpy(lane.scheduler.tables[slot]).to(self._engine.device)
        assert isinstance(self._cache, PagedCache), "no other keeps them"
        found = self._cache.choices_of(blocks, num_known)
        found[num_known - 1 :] = unknown_choice(found.dtype)
        if self._engine.groups.pp.size() > 1:
            # Unknown is the largest number, and each stage knows its own layers.
            wide = found.int()
            dist.all_reduce(wide, dist.ReduceOp.MIN, group=self._engine.groups.pp)
            found = wide.to(found.dtype)
        return found.cpu()

    def _look_for_texts(self, lane: _Lane, slots: np.ndarray, tokens: np.ndarray, is_stop: np.ndarray) -> None:
        """Show the watched slots' tokens to their watches; where they complete a stop text, set ``is_stop``."""
        for row in np.flatnonzero(lane.is_watched[slots] & (tokens >= 0)).tolist():
            number = lane.scheduler.job(int(slots[row])).number
            request = self._requests[number]
            is_complete = self._watches[number].add(int(tokens[row]))
            num_sampled = lane.scheduler.lengths[slots[row]] - len(request.prompt)
            is_stop[row] |= is_complete and num_sampled >= request.params.min_new_tokens

    def _response(
        self, lane: _Lane, slot: int, number: int, finish: FinishReason, error: str | None = None
    ) -> Response:
        tokens = lane.scheduler.tokens[slot, : lane.scheduler.lengths[slot]]
        return lane.records.response(slot, self._requests[number], tokens, finish, error)


@dataclass(frozen=True)
class _Outcome:
    """What a step gave, of which weights: tokens, received on all stages from the last; the rest there alone."""

    take_tokens: TakeTokens
    version: int
    sampled: Sampled | None = None
    scores: Tensor | None = None


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
    """Sequences that are computed together."""

    def __init__(self, engine: MegatronEngine, blocks: BlockPool, num_slots: int, capacity: int) -> None:
        self.scheduler = Scheduler(blocks, num_slots=num_slots, capacity=capacity, max_step_tokens=STEP_TOKENS)
        self.sampler = Sampler(num_slots, engine.groups.tp, engine.vocab_size, engine.device)
        self.records = Records(num_slots, capacity)
        self.is_watched = np.zeros(num_slots, bool)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.pending: tuple[Step, _Outcome] | None = None


def _job(number: int, request: Request) -> Job:
    params, prompt = request.params, request.prompt
    known = prompt if request.begun is None else torch.cat([prompt, request.begun.tokens])
    return Job(
        number=number,
        tokens=known.numpy().astype(np.int32),
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
