"""Generates with a user's own module: by its ``generate``, or token by token with ``forward``."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.errors import EngineError
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.user_model import ask_logits, said
from hybridflow.rollout.engines.answers import failed, stopped
from hybridflow.rollout.request import (
    LOOK_STEPS,
    Progress,
    Request,
    Response,
    SamplingParams,
    check_requests,
    model_refusal,
)
from hybridflow.rollout.sampling import FAILURES, Sampler, sequence_key

_BY_GENERATE = ("max_new_tokens", "temperature", "top_k", "top_p", "stop_ids", "greedy", "seed")
"""Parameters that a module's own ``generate`` takes."""

Generated = tuple[Tensor, Tensor, Tensor]
"""Of one sample what is new: tokens, their log-probabilities, and those under what was sampled from."""


@dataclass(eq=False)
class UserEngine:
    """Generates with one replica of a module, see ``request.Engine``; no other rank takes part.

    Attributes:
        module: The user's, as ``models.user_model.ActorModel``.
        group: This rank alone.
        vocab_size: Ids that are sampled.
        max_context: Longest sequence.
        seed: Seed of the noise.
        max_concurrent: Most sequences at a time.
        pad_id: Token that pads shorter prompts.
        version: Number of the weights, noted beside each token; the caller's to set.
        device: Where the module is.
    """

    module: nn.Module
    group: dist.ProcessGroup
    _: KW_ONLY
    vocab_size: int
    max_context: int
    seed: int
    max_concurrent: int
    pad_id: int
    version: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.module.parameters()).device
        self._has_generate = callable(getattr(self.module, "generate", None))

    def weights_changed(self) -> None:
        """Do nothing: no copy of the weights is kept."""

    def refusal(self, request: Request) -> str | None:
        """Return why a request cannot be met, or None if it can."""
        params = request.params
        of = f"max_context of {type(self.module).__name__}"
        if reason := model_refusal(request, self.max_context, self.vocab_size, of):
            return reason
        if params.has_texts or params.with_prompt_log_probs or params.num_top_log_probs:
            return (
                "stop, bad, with_prompt_log_probs, num_top_log_probs: an actor of your own works on tokens, and tells "
                "of new ones alone"
            )
        plain = SamplingParams(max_new_tokens=1)
        strange = [name for name in vars(plain) if name not in _BY_GENERATE]
        strange = [name for name in strange if getattr(params, name) != getattr(plain, name)]
        if self._has_generate and strange:
            return (
                f"{', '.join(strange)}: generate of {type(self.module).__name__} is not asked for that; leave it out, "
                "or set generate = None to sample by forward"
            )
        return None

    @torch.no_grad()
    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """Return one response for each request, in their order.

        Raises:
            DataError: A request cannot be met; nothing has been sampled.
            EngineError: The module's own ``generate`` gave what cannot be right.
            RolloutStopped: ``progress`` said to stop; what was under way begins anew.
        """
        check_requests(requests, self.refusal)
        self.module.eval()
        began_s = perf_counter()
        found: dict[int, Response] = {}
        for numbers in self._batches(requests):
            batch = [requests[number] for number in numbers]

            def look() -> None:
                if progress is not None and progress.is_stopping():
                    raise stopped(requests, found)

            look()
            sampled = (
                self._by_generate(batch, purpose) if self._has_generate else self._by_forward(batch, purpose, look)
            )
            made = (self._response(*each) for each in zip(batch, sampled, strict=True))
            responses = [replace(each, latency_s=perf_counter() - began_s) for each in made]
            found.update(zip(numbers, responses, strict=True))
            if progress is not None:
                progress.finished(list(zip(batch, responses, strict=True)))
        return [found[number] for number in range(len(requests))]

    def _batches(self, requests: list[Request]) -> Iterator[list[int]]:
        """Yield numbers of requests that are sampled together.

        They have equal parameters; short prompts go with short ones.
        """
        order = sorted(range(len(requests)), key=lambda at: (repr(requests[at].params), len(requests[at].prompt), at))
        for _, alike in itertools.groupby(order, key=lambda at: repr(requests[at].params)):
            numbers = list(alike)
            for start in range(0, len(numbers), self.max_concurrent):
                yield numbers[start : start + self.max_concurrent]

    def _by_forward(self, batch: list[Request], purpose: str, look: Callable[[], None]) -> list[Generated | str]:
        """Sample token by token, the same in every batch and layout."""
        samples = Samples(batch, purpose, self)
        for step in itertools.count():
            if step % LOOK_STEPS == 0:
                look()
            known = [torch.from_numpy(each.astype(np.int64)) for each in samples.tokens()]
            ids = nn.utils.rnn.pad_sequence(known, batch_first=True, padding_value=self.pad_id).to(self.device)
            last = torch.tensor([len(each) - 1 for each in known], device=self.device)
            samples.take(self._logits(ids)[torch.arange(len(ids), device=self.device), last])
            if not len(samples.open):
                break
        return samples.generated()

    def _by_generate(self, batch: list[Request], purpose: str) -> list[Generated | str]:
        """Ask the module's own, and tell the log-probabilities by ``forward`` where it does not."""
        params = batch[0].params
        width = max(len(each.prompt) for each in batch)
        ids = torch.full((len(batch), width), self.pad_id, dtype=torch.int64, device=self.device)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(batch):
            ids[row, width - len(each.prompt) :] = each.prompt
            mask[row, width - len(each.prompt) :] = 1
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._batch_seed(batch, purpose))
            output: Any = self.module.generate(  # type: ignore[operator]
                ids,
                attention_mask=mask,
                max_new_tokens=params.max_new_tokens,
                do_sample=not params.greedy,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                eos_token_id=list(params.stop_ids),
                pad_token_id=self.pad_id,
            )
        rows, told = output if isinstance(output, tuple) else (output, None)
        self._check_generated(rows, told, ids, params)
        new = [_until_stop(row, params.stop_ids) for row in rows[:, width:].cpu()]
        if told is not None:
            found = [row[: len(each)].float().cpu() for row, each in zip(told, new, strict=True)]
        else:
            found = self._log_probs([each.prompt for each in batch], new, params.temperature)
        unknown = [torch.full((len(each),), torch.nan) for each in new]
        is_known = params.greedy or (params.top_k == 0 and params.top_p == 1)
        sampled = [torch.zeros(len(each)) for each in new] if params.greedy else found if is_known else unknown
        return list(zip(new, found, sampled, strict=True))

    def _check_generated(self, rows: Any, told: Any, ids: Tensor, params: SamplingParams) -> None:
        name, width = f"generate of {type(self.module).__name__}", ids.shape[1]
        if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(ids):
            raise EngineError(f"{name} gave {said(rows)}, expected [samples, tokens + new] with {len(ids)} samples")
        if not torch.equal(rows[:, :width], ids):
            raise EngineError(f"{name} gave rows that do not begin with the prompts; return prompt and response")
        if not width < rows.shape[1] <= width + params.max_new_tokens:
            raise EngineError(
                f"{name} gave {rows.shape[1] - width} new tokens, expected 1 to max_new_tokens={params.max_new_tokens}"
            )
        if int(rows.max()) >= self.vocab_size or int(rows.min()) < 0:
            raise EngineError(f"{name} gave token {int(rows.max())}, expected ids from 0 to {self.vocab_size - 1}")
        if told is not None and (not isinstance(told, Tensor) or told.shape != rows[:, width:].shape):
            raise EngineError(
                f"{name} gave log-probabilities {said(told)}, expected [samples, new] = {[*rows[:, width:].shape]}"
            )

    def _log_probs(self, prompts: list[Tensor], new: list[Tensor], temperature: float) -> list[Tensor]:
        """Return log-probabilities of new tokens under ``forward``."""
        whole = [torch.cat(pair) for pair in zip(prompts, new, strict=True)]
        ids = nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=self.pad_id).to(self.device)
        logits = self._logits(ids)
        found = []
        for row, prompt, tokens in zip(logits, prompts, new, strict=True):
            rows = row[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
            targets = tokens.to(self.device)
            found.append(
                vocab_parallel_log_probs(
                    rows, targets, group=self.group, vocab_size=self.vocab_size, temperature=temperature
                )[0].cpu()
            )
        return found

    def _logits(self, ids: Tensor) -> Tensor:
        return ask_logits(self.module, ids, vocab_size=self.vocab_size, name=type(self.module).__name__)

    def _batch_seed(self, batch: list[Request], purpose: str) -> int:
        """Return a seed for torch's generators from the requests and the version of the weights.

        Each step has a seed of its own.
        """
        seed = self.seed if batch[0].params.seed is None else batch[0].params.seed
        told = [seed, purpose, self.version, [[each.prompt_index, each.index] for each in batch]]
        return int.from_bytes(hashlib.sha256(json.dumps(told).encode()).digest()[:8], "little") >> 1

    def _response(self, request: Request, sampled: Generated | str) -> Response:
        if isinstance(sampled, str):
            return failed(request, sampled)
        tokens, log_probs, sampled_log_probs = sampled
        is_stop = len(tokens) > 0 and int(tokens[-1]) in request.params.stop_ids
        return Response(
            tokens=tokens,
            log_probs=log_probs,
            sampled_log_probs=sampled_log_probs,
            versions=torch.full((len(tokens),), self.version, dtype=torch.int32),
            finish="stop" if is_stop else "length",
        )


class Samples:
    """Samples of some requests, token by token, with the noise of each sample's own place.

    Args:
        requests: With equal parameters.
        purpose: What they are for, a key of ``PURPOSES``.
        engine: Whose they are.

    Attributes:
        open: Numbers of the samples that are not done, ``[open]`` int64.
    """

    def __init__(self, requests: list[Request], purpose: str, engine: UserEngine) -> None:
        self._params, lengths = requests[0].params, np.array([len(each.prompt) for each in requests])
        self._known = np.full(
            (len(requests), int(lengths.max()) + self._params.max_new_tokens), engine.pad_id, np.int32
        )
        self._sampler = Sampler(len(requests), engine.group, engine.vocab_size, engine.device)
        for slot, each in enumerate(requests):
            self._known[slot, : lengths[slot]] = each.prompt.numpy()
            seed = engine.seed if self._params.seed is None else self._params.seed
            key = sequence_key(seed, purpose, each.prompt_index, each.index)
            self._sampler.seat(slot, self._params, key, int(lengths[slot]))
        self._log_probs = np.zeros((2, *self._known.shape), np.float32)
        self._first, self._lengths = lengths, lengths.copy()
        self._failures: dict[int, str] = {}
        self.open = np.arange(len(requests))

    @property
    def num_left(self) -> int:
        """Return how many more tokens an open sample may have; all have equally many."""
        return self._params.max_new_tokens - int((self._lengths - self._first)[self.open[0]])

    def tokens(self) -> list[np.ndarray]:
        """Return the tokens of the open samples, prompts included."""
        return [self._known[slot, : self._lengths[slot]] for slot in self.open]

    def take(self, logits: Tensor) -> Tensor:
        """Choose the next token of each open sample; who is done is closed.

        Args:
            logits: ``[open, vocab]``.

        Returns:
            The tokens, ``[open]`` int64; below 0 where there is none.
        """
        slots, lengths = self.open, self._lengths
        positions = torch.from_numpy(lengths[slots])
        got = self._sampler.sample(logits, torch.from_numpy(slots), positions, self._known)
        tokens = got.tokens.cpu().numpy()
        self._failures |= {int(slot): FAILURES[int(each)] for slot, each in zip(slots, tokens, strict=True) if each < 0}
        at = slots, lengths[slots]
        self._known[at] = tokens
        self._log_probs[0][at], self._log_probs[1][at] = (
            got.log_probs.cpu().numpy(),
            got.sampled_log_probs.cpu().numpy(),
        )
        lengths[slots] += 1
        is_done = np.isin(tokens, self._params.stop_ids) | (tokens < 0)
        is_done |= (lengths - self._first)[slots] == self._params.max_new_tokens
        self.open = slots[~is_done]
        return got.tokens

    def generated(self) -> list[Generated | str]:
        """Return what is new of each sample, or why it failed."""

        def new(array: np.ndarray, slot: int, dtype: type[np.generic]) -> Tensor:
            return torch.from_numpy(array[slot, self._first[slot] : self._lengths[slot]].astype(dtype))

        return [
            self._failures.get(slot)
            or (
                new(self._known, slot, np.int64),
                new(self._log_probs[0], slot, np.float32),
                new(self._log_probs[1], slot, np.float32),
            )
            for slot in range(len(self._known))
        ]


def _until_stop(tokens: Tensor, stop_ids: tuple[int, ...]) -> Tensor:
    """Return a response without the padding behind its end."""
    ends = torch.isin(tokens, torch.tensor(stop_ids, dtype=tokens.dtype)).nonzero()
    return tokens[: int(ends[0]) + 1] if len(ends) else tokens
