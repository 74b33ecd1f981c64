"""Continuous batching on the training model's own weights, under tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.models.gpt import Transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.rollout.blocks import BLOCK_TOKENS, BlockPool
from hybridflow.rollout.cpu_transformer import CpuTransformer, runs_on_cpu
from hybridflow.rollout.paged import PagedAttention, PagedCache, block_bytes
from hybridflow.rollout.records import Records
from hybridflow.rollout.request import FinishReason, Progress, Request, Response, RolloutStopped
from hybridflow.rollout.sampling import Sampled, Sampler, sequence_key
from hybridflow.rollout.scheduler import Job, Scheduler, Step

STEP_TOKENS = 2048
"""Tokens that go through the model at one time."""

LOOK_STEPS = 16
"""Every so many steps generating looks up: what is finished is handed over, and it may be told to stop."""


class MegatronEngine:
    """Generates with one data-parallel replica of a model; all its ranks make the same calls with the same arguments.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        seed: Of the noise.
        max_concurrent: Most sequences decoded together.
        cache_bytes: Most memory of the key-value cache on this rank; None: as much as ``max_concurrent`` sequences of
            the model's whole context take.

    Attributes:
        version: Number of the weights, noted beside each token; the caller's to set.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ProcessGroupCollection,
        *,
        vocab_size: int,
        seed: int,
        max_concurrent: int,
        cache_bytes: int | None = None,
    ) -> None:
        self.version = 0
        self.model = model
        self.groups = groups
        self.vocab_size = vocab_size
        self.seed = seed
        self.device = next(model.parameters()).device
        self._max_concurrent = max_concurrent
        self._cache_bytes = cache_bytes
        self._stage_ranks = dist.get_process_group_ranks(groups.pp)
        self._fast: CpuTransformer | None = None
        self._sent: tuple[dist.Work, Tensor] | None = None

    def weights_changed(self) -> None:
        """What was derived from the model's weights is of no use any more, and its memory is given back."""
        self._fast = None

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """One response for each request, in their order.

        ``progress`` is asked whether to stop every ``LOOK_STEPS`` steps, and is then handed what has been finished.

        Collective: tp, pp.

        Raises:
            DataError: A request cannot be met: its prompt leaves no room for a response, in the model's context or in
                the cache.
            RolloutStopped: ``progress`` said to stop; on all ranks of the replica, at the same point.
        """
        for request in requests:
            if reason := self.refusal(request):
                raise DataError(f"prompt of draw {request.draw}: {reason}")
        session = self.open(requests, purpose)
        session.add(requests)
        responses: dict[int, Response] = {}
        fresh: list[tuple[Request, Response]] = []
        num_steps = 0
        while not session.is_idle:
            if progress is not None and num_steps % LOOK_STEPS == 0:
                if fresh:
                    progress.finished(fresh)
                    fresh = []
                if progress.is_stopping():
                    raise RolloutStopped(session.pause())
            fresh += session.step()
            responses |= {id(request): response for request, response in fresh}
            num_steps += 1
        if progress is not None and fresh:
            progress.finished(fresh)
        return [responses[id(request)] for request in requests]

    def open(self, expected: Sequence[Request] | None = None, purpose: str = "rollout") -> Session:
        """Begin to generate: requests are added to the session, those that are expected or, without, any.

        Collective: tp, pp.
        """
        if self._fast is None and runs_on_cpu(self.model):
            self._fast = CpuTransformer(self.model, self.groups.tp)
        return Session(self, purpose, expected)

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be met; None: it can."""
        num_prompt, most = len(request.prompt), request.params.max_new_tokens
        context = self.model.max_sequence_length
        if num_prompt == 0:
            return "it has no tokens; give at least one, such as the tokenizer's beginning of a sequence"
        if num_prompt + most > context:
            return (
                f"it has {num_prompt} tokens; with max_new_tokens={most} that exceeds model.max_context={context}; "
                "shorten the prompt, ask for fewer tokens, or raise the context"
            )
        if blocks_for(num_prompt + most) > self._most_blocks():
            need = blocks_for(num_prompt + most) * block_bytes(self.model)
            return (
                f"its {num_prompt} tokens and max_new_tokens={most} take {need} bytes of the key-value cache of "
                f"{self._cache_bytes}; raise rollout.cache_memory"
            )
        return None

    def room(self, expected: Sequence[Request] | None) -> tuple[int, int, int]:
        """Slots, most tokens of a sequence, and blocks, for requests that are expected, or for any."""
        if expected is None:
            return self._max_concurrent, self.model.max_sequence_length, self._most_blocks()
        lengths = sorted((len(each.prompt) + each.params.max_new_tokens for each in expected), reverse=True)
        lengths = lengths[: self._max_concurrent]
        # Lanes may be dealt unevenly, but not more than all to one.
        num_blocks = sum(map(blocks_for, lengths))
        return max(len(lengths), 1), max(lengths, default=1), max(min(num_blocks, self._most_blocks()), 1)

    def run(self, tokens: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor | None:
        """This stage's part of a forward pass: logits of the rows, ``[rows, padded_vocab/tp]``, on the last stage."""
        stage, stages = self.groups.pp.rank(), self._stage_ranks
        config = self.model.config
        if stage > 0:
            hidden = torch.empty(len(tokens), 1, config.hidden_size, dtype=config.params_dtype, device=self.device)
            dist.recv(hidden, src=stages[stage - 1], group=self.groups.pp)
            self.model.set_input_tensor(hidden)
        run = self.model if self._fast is None else self._fast
        output = run(tokens, attention, rows)
        if self.model.post_process:
            return output
        if self._sent is not None:
            self._sent[0].wait()
        # Kept until it has left.
        output = output.contiguous()
        self._sent = dist.isend(output, dst=stages[stage + 1], group=self.groups.pp), output
        return None

    def send_tokens(self, tokens: Tensor) -> list[dist.Work]:
        """From the last stage to all others."""
        return [dist.isend(tokens, dst=rank, group=self.groups.pp) for rank in self._stage_ranks[:-1]]

    def receive_tokens(self, tokens: Tensor, sends: Sequence[dist.Work]) -> Tensor:
        """The tokens of the last stage, there and on all others, where ``tokens`` is filled."""
        if self.model.post_process:
            for send in sends:
                send.wait()
        else:
            dist.recv(tokens, src=self._stage_ranks[-1], group=self.groups.pp)
        return tokens

    def _most_blocks(self) -> int:
        most = self._max_concurrent * blocks_for(self.model.max_sequence_length)
        return most if self._cache_bytes is None else min(most, self._cache_bytes // block_bytes(self.model))


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return -(-num_tokens // BLOCK_TOKENS)


class Session:
    """Sequences being generated, until all are done. Made by ``MegatronEngine.open``.

    Ranks of a replica make the same calls in the same order. With pipeline stages there are as many lanes as stages:
    each stage computes a step of one lane while its neighbours compute another's.

    Args:
        engine: Whose model generates.
        purpose: Of the noise, a key of ``PURPOSES``.
        expected: Requests that will come, by which the cache is made no larger than it need be; None: any.
    """

    def __init__(self, engine: MegatronEngine, purpose: str, expected: Sequence[Request] | None) -> None:
        self._engine = engine
        self._purpose = purpose
        self._requests: dict[int, Request] = {}
        self._refused: list[tuple[Request, Response]] = []
        self._num_added = 0
        self._turn = 0
        num_slots, capacity, num_blocks = engine.room(expected)
        blocks = BlockPool(num_blocks)
        self._cache = PagedCache(engine.model, num_blocks, engine.device)
        stages = engine.groups.pp.size()
        self._lanes = [_Lane(engine, blocks, -(-num_slots // stages), capacity) for _ in range(stages)]

    @property
    def is_idle(self) -> bool:
        """Whether all that was added has been handed out."""
        return not self._refused and not self._requests

    @property
    def num_computed(self) -> int:
        """Tokens that went through the model."""
        return sum(lane.scheduler.num_computed for lane in self._lanes)

    @property
    def num_preempted(self) -> int:
        """How often a sequence lost its place in the cache."""
        return sum(lane.scheduler.num_preempted for lane in self._lanes)

    def add(self, requests: Sequence[Request]) -> None:
        """Take up requests. One that cannot be met is handed out as failed."""
        for request in requests:
            reason = self._engine.refusal(request)
            if reason is not None:
                self._refused.append((request, _nothing("failed", reason)))
                continue
            number = self._num_added
            self._num_added += 1
            self._requests[number] = request
            # Samples of one prompt stay together, since they share its blocks.
            self._lanes[request.draw % len(self._lanes)].scheduler.add([_job(number, request)])

    def step(self) -> list[tuple[Request, Response]]:
        """Take what the lane whose turn it is has sampled, and begin its next step; what ended, failed ones included.

        Collective: tp, pp.
        """
        ended, self._refused = self._refused, []
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        if lane.pending is not None:
            ended += self._absorb(lane, *lane.pending)
            lane.pending = None
        step = lane.scheduler.plan()
        for is_in, slot, job in lane.scheduler.moves:
            if is_in:
                self._seat(lane, slot, job.number)
            else:
                lane.records.put_aside(slot, job.number)
        lane.scheduler.moves.clear()
        if step is not None:
            lane.pending = step, self._forward(lane, step)
        return ended

    def cancel(self, requests: Sequence[Request]) -> None:
        """Requests that nobody waits for any more are not gone on with; those that have ended are passed over.

        Collective: tp, pp.
        """
        numbers = {number for number, request in self._requests.items() if any(request is each for each in requests)}
        for lane in self._lanes:
            if lane.pending is not None:
                # What was sampled has its place among what is known, from which a sequence is then taken.
                self._refused += self._absorb(lane, *lane.pending)
                lane.pending = None
            for number in numbers & self._requests.keys():
                lane.scheduler.drop(number)
                lane.records.drop(number)
        for number in numbers & self._requests.keys():
            del self._requests[number]
        self._refused = [pair for pair in self._refused if not any(pair[0] is each for each in requests)]

    def running(self) -> list[tuple[Request, list[int]]]:
        """The requests that have a slot, each with the tokens sampled so far."""
        found = []
        for lane in self._lanes:
            for slot in lane.scheduler.running:
                request = self._requests[lane.scheduler.job(slot).number]
                known = lane.scheduler.tokens[slot, len(request.prompt) : lane.scheduler.lengths[slot]]
                found.append((request, known.tolist()))
        return found

    def pause(self) -> list[tuple[Request, Response]]:
        """End, and give what is not done, each with what was sampled of it: ``Request.begun`` to go on from.

        Collective: tp, pp.
        """
        ended: list[tuple[Request, Response]] = []
        for lane in self._lanes:
            if lane.pending is not None:
                ended += self._absorb(lane, *lane.pending)
                lane.pending = None
            for slot in lane.scheduler.running:
                number = lane.scheduler.job(slot).number
                response = self._response(lane, slot, number, "paused")
                ended.append((self._requests.pop(number), response))
        ended += [(request, request.begun or _nothing("paused")) for request in self._requests.values()]
        self._requests.clear()
        return ended

    def _seat(self, lane: _Lane, slot: int, number: int) -> None:
        request = self._requests[number]
        lane.records.seat(slot, number, request)
        seed = self._engine.seed if request.params.seed is None else request.params.seed
        lane.sampler.seat(slot, request.params, sequence_key(seed, self._purpose, request.draw, request.index))

    def _forward(self, lane: _Lane, step: Step) -> _Outcome:
        """Compute a step; on the last stage also sample, and send the others the tokens."""
        engine, scheduler = self._engine, lane.scheduler
        slots, positions, tokens, tables = (
            torch.from_numpy(each).to(engine.device)
            for each in (step.slots, step.positions, step.tokens, scheduler.tables)
        )
        rows = torch.from_numpy(np.concatenate([step.rows, step.scored])).to(engine.device)
        output = engine.run(tokens, PagedAttention(self._cache, tables, slots, positions), rows)
        if output is None:
            return _Outcome(torch.empty(len(step.rows), dtype=torch.int64, device=engine.device))
        num = len(step.rows)
        row_slots = step.row_slots
        sampled = lane.sampler.sample(
            output[:num], torch.from_numpy(row_slots), torch.from_numpy(scheduler.lengths[row_slots])
        )
        sends = engine.send_tokens(sampled.tokens)
        scores = None
        if len(step.scored):
            following = scheduler.tokens[step.slots[step.scored], step.positions[step.scored] + 1]
            targets = torch.from_numpy(following.astype(np.int64)).to(engine.device)
            scores = vocab_parallel_log_probs(
                output[num:], targets, group=engine.groups.tp, vocab_size=engine.vocab_size
            )[0]
        return _Outcome(sampled.tokens, sampled, scores, sends)

    def _absorb(self, lane: _Lane, step: Step, outcome: _Outcome) -> list[tuple[Request, Response]]:
        engine, slots = self._engine, step.row_slots
        tokens = engine.receive_tokens(outcome.tokens, outcome.sends).cpu().numpy()
        positions = lane.scheduler.lengths[slots]
        if outcome.sampled is not None:
            log_probs, sampled = (
                outcome.sampled.log_probs.cpu().numpy(),
                outcome.sampled.sampled_log_probs.cpu().numpy(),
            )
            lane.records.add(slots, positions, log_probs, sampled, engine.version)
        else:
            lane.records.add(slots, positions, np.float32(0), np.float32(0), engine.version)
        if outcome.scores is not None:
            lane.records.score(step.slots[step.scored], step.positions[step.scored] + 1, outcome.scores.cpu().numpy())
        is_stop, is_long = lane.scheduler.absorb(step, tokens)
        ended = []
        for row in (is_stop | is_long | (tokens < 0)).nonzero()[0].tolist():
            slot = int(slots[row])
            number = lane.scheduler.job(slot).number
            if tokens[row] < 0:
                lane.scheduler.lengths[slot] -= 1
                reason = f"its logits are not finite at token {positions[row]}; look for damaged weights"
                response = self._response(lane, slot, number, "failed", reason)
            else:
                response = self._response(lane, slot, number, "stop" if is_stop[row] else "length")
            lane.scheduler.remove(slot)
            ended.append((self._requests.pop(number), response))
        return ended

    def _response(
        self, lane: _Lane, slot: int, number: int, finish: FinishReason, error: str | None = None
    ) -> Response:
        tokens = lane.scheduler.tokens[slot, : lane.scheduler.lengths[slot]]
        return lane.records.response(slot, self._requests[number], tokens, finish, error)


@dataclass(frozen=True)
class _Outcome:
    """What a step gave: the tokens, to be received on all stages but the last; the rest there alone."""

    tokens: Tensor
    sampled: Sampled | None = None
    scores: Tensor | None = None
    sends: Sequence[dist.Work] = ()


class _Lane:
    """Sequences that are computed together."""

    def __init__(self, engine: MegatronEngine, blocks: BlockPool, num_slots: int, capacity: int) -> None:
        self.scheduler = Scheduler(blocks, num_slots=num_slots, capacity=capacity, max_step_tokens=STEP_TOKENS)
        self.sampler = Sampler(num_slots, engine.groups.tp, engine.vocab_size, engine.device)
        self.records = Records(num_slots, capacity)
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
