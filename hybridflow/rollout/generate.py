"""Decoding with a key-value cache on the training model's own modules, under tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

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
        log_probs: ``[response]`` fp32, the sampler's own; empty but on the last stage.
    """

    tokens: Tensor
    log_probs: Tensor


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
    def generate(self, requests: list[Request], params: SamplingParams, purpose: str = "rollout") -> list[Response]:
        """Sample one response for each request.

        Collective: tp, pp.

        Raises:
            DataError: A prompt leaves no room for a response of ``max_new_tokens`` in the model's context.
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
            responses += self._wave(requests[start : start + self._max_concurrent], params, purpose)
        return responses

    def _wave(self, requests: list[Request], params: SamplingParams, purpose: str) -> list[Response]:
        state = _Wave(requests, params, self._device)
        cache = self._new_cache(len(requests), max(len(request.prompt) for request in requests) + params.max_new_tokens)
        tokens, log_probs = self._prefill(requests, cache, params, purpose, state)
        while state.add(tokens, log_probs):
            slots = state.slots_to_keep()
            if slots is not None:
                cache.keep(slots)
            attention = CachedAttention(cache, state.positions - 1)
            tokens, log_probs = self._step(state.last, attention, None, state.keys(self._seed, purpose), params)
        return state.responses()

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
            chosen, log_probs = torch.empty_like(keys), torch.empty(len(keys), device=self._device)
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


class _Wave:
    """The sequences that are decoded together: what was sampled so far, and which slots of the cache they have.

    Attributes:
        positions: Tokens of each slot's sequence so far, prompt included, ``[slots]``.
        last: Each slot's newest token, ``[slots]``.
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
        self._count = 0
        self.positions = torch.tensor([len(request.prompt) for request in requests], device=device)
        self.last = torch.zeros(len(requests), dtype=torch.int64, device=device)

    def keys(self, seed: int, purpose: str) -> Tensor:
        """Noise keys of the next token of each slot, ``[slots]``."""
        return row_keys(seed, purpose, self._draws[self._slots], self._indices[self._slots], self.positions)

    def add(self, tokens: Tensor, log_probs: Tensor) -> bool:
        """Take the slots' newest tokens; whether any sequence goes on."""
        running = self._slots[self._is_running]
        self._tokens[running, self._count] = tokens[self._is_running]
        self._log_probs[running, self._count] = log_probs[self._is_running]
        self._lengths[running] += 1
        self._count += 1
        self.last = tokens
        self.positions = self.positions + 1
        self._is_running = self._is_running & ~torch.isin(tokens, self._stop)
        return self._count < self._params.max_new_tokens and bool(self._is_running.any())

    def slots_to_keep(self) -> Tensor | None:
        """Slots that still run, once they are few enough to be worth moving together; they become slots 0 and up."""
        if int(self._is_running.sum()) > 0.75 * len(self._slots):
            return None
        kept = self._is_running.nonzero()[:, 0]
        self._slots, self.positions, self.last = self._slots[kept], self.positions[kept], self.last[kept]
        self._is_running = self._is_running[kept]
        return kept

    def responses(self) -> list[Response]:
        tokens, log_probs, lengths = self._tokens.cpu(), self._log_probs.cpu(), self._lengths.tolist()
        return [
            Response(tokens=tokens[row, :length], log_probs=log_probs[row, :length])
            for row, length in enumerate(lengths)
        ]
