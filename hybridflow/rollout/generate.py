"""Decoding with a key-value cache on the training model's own modules, under tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.models.attention import AttentionPlan, CachedAttention, KeyValueCache, PackedAttention
from hybridflow.models.gpt import Transformer
from hybridflow.models.log_probs import Columns
from hybridflow.rollout.sampling import SamplingParams, row_keys, sample_tokens

PREFILL_TOKENS = 8192
"""Prompt tokens that go through the model at one time."""

LOOK_TOKENS = 16
"""Every so many tokens of a response decoding looks up: what is finished is handed over, and it may be told to stop."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response wanted.

    Attributes:
        prompt: Token ids, ``[tokens]`` int64, at least one.
        draw: Serial number of the prompt in the data order.
        index: Number of this sample among those of its prompt.
    """

    prompt: Tensor
    draw: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Response:
    """What was sampled, in host memory.

    Attributes:
        tokens: ``[response]`` int64, the stop token included.
        log_probs: ``[response]`` fp32, the sampler's own; zeros but on the last stage.
    """

    tokens: Tensor
    log_probs: Tensor


class Progress(Protocol):
    """What goes on beside generating. Called at the same points of decoding on all ranks of a replica."""

    def finished(self, pairs: list[tuple[Request, Response]]) -> None:
        """Take responses that have just been finished, each once; at least one."""

    def is_stopping(self) -> bool:
        """Whether to end early; the same answer on all ranks of the replica. Collective: tp, pp."""


class RolloutStopped(Exception):
    """Generating ended early because ``Progress.is_stopping`` said so, with all that was finished handed over.

    No error: nothing is wrong, and no rank of the replica waits for another.
    """


class Generator:
    """Generates with one data-parallel replica of a model; all its ranks call with the same requests.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        seed: Of the noise.
        max_concurrent: Most sequences decoded together.
    """

    def __init__(
        self, model: Transformer, groups: ProcessGroupCollection, *, vocab_size: int, seed: int, max_concurrent: int
    ) -> None:
        self._model = model
        self._groups = groups
        self._vocab_size = vocab_size
        self._seed = seed
        self._max_concurrent = max_concurrent
        self._device = next(model.parameters()).device
        self._ranks = dist.get_process_group_ranks(groups.pp)
        self._stage = groups.pp.rank()

    @torch.no_grad()
    def generate(
        self,
        requests: list[Request],
        params: SamplingParams,
        purpose: str = "rollout",
        progress: Progress | None = None,
    ) -> list[Response]:
        """Sample one response for each request.

        ``progress`` is asked whether to stop before each wave and every ``LOOK_TOKENS`` decoded tokens within one, and
        is handed each response at the next of these points, or at the end of its wave.

        Collective: tp, pp.

        Raises:
            DataError: A prompt leaves no room for a response of ``max_new_tokens`` in the model's context.
            RolloutStopped: ``progress`` said to stop; on all ranks of the replica, at the same point.
        """
        context = self._model.max_sequence_length
        for request in requests:
            if len(request.prompt) + params.max_new_tokens > context:
                raise DataError(
                    f"prompt of draw {request.draw} has {len(request.prompt)} tokens; with "
                    f"rollout.max_new_tokens={params.max_new_tokens} that exceeds model.max_context={context}; shorten "
                    "the prompt or raise the context"
                )
        responses: list[Response] = []
        for start in range(0, len(requests), self._max_concurrent):
            if progress is not None and progress.is_stopping():
                raise RolloutStopped
            responses += self._wave(requests[start : start + self._max_concurrent], params, purpose, progress)
        return responses

    def _wave(
        self, requests: list[Request], params: SamplingParams, purpose: str, progress: Progress | None
    ) -> list[Response]:
        state = _Wave(requests, params, self._device)
        cache = self._new_cache(len(requests), max(len(request.prompt) for request in requests) + params.max_new_tokens)
        tokens, log_probs = self._prefill(requests, cache, params, purpose, state)
        while state.add(tokens, log_probs):
            if progress is not None and state.count % LOOK_TOKENS == 0:
                _hand_over(requests, state, progress)
                if progress.is_stopping():
                    raise RolloutStopped
            slots = state.slots_to_keep()
            if slots is not None:
                cache.keep(slots)
            attention = CachedAttention(cache, state.positions - 1)
            tokens, log_probs = self._step(state.last, attention, None, state.keys(self._seed, purpose), params)
        if progress is not None:
            _hand_over(requests, state, progress)
        return state.responses(range(len(requests)))

    def _prefill(
        self, requests: list[Request], cache: KeyValueCache, params: SamplingParams, purpose: str, state: _Wave
    ) -> tuple[Tensor, Tensor]:
        keys = state.keys(self._seed, purpose)
        found: list[tuple[Tensor, Tensor]] = []
        start = 0
        while start < len(requests):
            end, room = start + 1, PREFILL_TOKENS - len(requests[start].prompt)
            while end < len(requests) and room >= len(requests[end].prompt):
                room -= len(requests[end].prompt)
                end += 1
            prompts = [request.prompt for request in requests[start:end]]
            lengths = [len(prompt) for prompt in prompts]
            rows = torch.tensor(lengths).cumsum(0).sub(1).to(self._device)
            attention = PackedAttention(lengths, self._device, cache, start)
            found.append(self._step(torch.cat(prompts).to(self._device), attention, rows, keys[start:end], params))
            start = end
        return torch.cat([tokens for tokens, _ in found]), torch.cat([log_probs for _, log_probs in found])

    def _step(
        self, tokens: Tensor, attention: AttentionPlan, rows: Tensor | None, keys: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """One forward pass through all stages, one token for each row: ids everywhere, log-probs on the last stage."""
        model, config = self._model, self._model.config
        if self._stage > 0:
            hidden = torch.empty(
                len(attention.positions), 1, config.hidden_size, dtype=config.params_dtype, device=self._device
            )
            dist.recv(hidden, src=self._ranks[self._stage - 1], group=self._groups.pp)
            model.set_input_tensor(hidden)
        output = model(tokens, attention, rows)
        if not model.post_process:
            dist.send(output.contiguous(), dst=self._ranks[self._stage + 1], group=self._groups.pp)
            chosen, log_probs = torch.empty_like(keys), torch.zeros(len(keys), device=self._device)
        else:
            columns = Columns(output.shape[-1], self._groups.tp, self._vocab_size)
            chosen, log_probs = sample_tokens(output, keys, columns, params)
        if len(self._ranks) > 1:
            dist.broadcast(chosen, src=self._ranks[-1], group=self._groups.pp)
        return chosen, log_probs

    def _new_cache(self, num_slots: int, num_tokens: int) -> KeyValueCache:
        layers = self._model.decoder.layers
        attention = layers[0].self_attention
        return KeyValueCache(
            num_layers=len(layers),
            num_slots=num_slots,
            num_tokens=num_tokens,
            num_groups=attention.num_query_groups_per_partition,
            head_size=attention.hidden_size_per_attention_head,
            dtype=self._model.config.params_dtype,
            device=self._device,
        )


def _hand_over(requests: list[Request], state: _Wave, progress: Progress) -> None:
    rows = state.newly_finished()
    if rows:
        progress.finished([(requests[row], got) for row, got in zip(rows, state.responses(rows), strict=True)])


class _Wave:
    """The sequences that are decoded together: what was sampled so far, and which slots of the cache they have.

    Attributes:
        positions: Tokens of each slot's sequence so far, prompt included, ``[slots]``.
        last: Each slot's newest token, ``[slots]``.
        count: Tokens of the longest response so far.
    """

    def __init__(self, requests: list[Request], params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._stop = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(len(requests), params.max_new_tokens, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(len(requests), params.max_new_tokens, device=device)
        self._lengths = torch.zeros(len(requests), dtype=torch.int64, device=device)
        self._draws = torch.tensor([request.draw for request in requests], device=device)
        self._indices = torch.tensor([request.index for request in requests], device=device)
        self._slots = torch.arange(len(requests), device=device)
        self._is_running = torch.ones(len(requests), dtype=torch.bool, device=device)
        self._is_handed_over = [False] * len(requests)
        self.count = 0
        self.positions = torch.tensor([len(request.prompt) for request in requests], device=device)
        self.last = torch.zeros(len(requests), dtype=torch.int64, device=device)

    def keys(self, seed: int, purpose: str) -> Tensor:
        """Noise keys of the next token of each slot, ``[slots]``."""
        return row_keys(seed, purpose, self._draws[self._slots], self._indices[self._slots], self.positions)

    def add(self, tokens: Tensor, log_probs: Tensor) -> bool:
        """Take the slots' newest tokens; whether any sequence goes on."""
        running = self._slots[self._is_running]
        self._tokens[running, self.count] = tokens[self._is_running]
        self._log_probs[running, self.count] = log_probs[self._is_running]
        self._lengths[running] += 1
        self.count += 1
        self.last = tokens
        self.positions = self.positions + 1
        self._is_running = self._is_running & ~torch.isin(tokens, self._stop)
        return self.count < self._params.max_new_tokens and bool(self._is_running.any())

    def slots_to_keep(self) -> Tensor | None:
        """Slots that still run, once they are few enough to be worth moving together; they become slots 0 and up."""
        if int(self._is_running.sum()) > 0.75 * len(self._slots):
            return None
        kept = self._is_running.nonzero()[:, 0]
        self._slots, self.positions, self.last = self._slots[kept], self.positions[kept], self.last[kept]
        self._is_running = self._is_running[kept]
        return kept

    def newly_finished(self) -> list[int]:
        """Sequences that have ended since this was last asked."""
        is_open = torch.zeros_like(self._lengths, dtype=torch.bool)
        if self.count < self._params.max_new_tokens:
            is_open[self._slots[self._is_running]] = True
        rows = [row for row, goes_on in enumerate(is_open.tolist()) if not (goes_on or self._is_handed_over[row])]
        for row in rows:
            self._is_handed_over[row] = True
        return rows

    def responses(self, rows: Sequence[int]) -> list[Response]:
        """What was sampled of some sequences."""
        chosen = torch.tensor(rows, device=self._tokens.device)
        tokens, log_probs = self._tokens[chosen, : self.count].cpu(), self._log_probs[chosen, : self.count].cpu()
        lengths = self._lengths[chosen].tolist()
        return [
            Response(tokens=tokens[place, :length], log_probs=log_probs[place, :length])
            for place, length in enumerate(lengths)
        ]
