"""Generates with a model that runs in ``transformers``, by its own ``generate`` with a key-value cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.models.hf_model import TransformersActor, can_generate, generate, takes_padding
from hybridflow.rollout.engines.user_engine import Generated, Samples, UserEngine
from hybridflow.rollout.request import LOOK_STEPS, Request


@dataclass(eq=False)
class HFEngine(UserEngine):
    """Generates with one replica of a model of ``transformers``, see ``UserEngine``.

    Tokens are chosen with the noise of each sample's own place, as in every other engine of ours. ``transformers``
    keeps the cache, whatever kind the model needs. Once half of a batch is done, the other half begins a smaller batch
    with what it has: short responses do not wait for long ones. Of a model that cannot tell padding from tokens the
    prompts of a batch are equally long; one whose cache is wrong computes every token from the whole sample.
    """

    @property
    def _actor(self) -> TransformersActor:
        assert isinstance(self.module, TransformersActor), "made for one"
        return self.module

    def _batches(self, requests: list[Request]) -> Iterator[list[int]]:
        for numbers in super()._batches(requests):
            if takes_padding(self._actor):
                yield numbers
                continue
            for _, alike in itertools.groupby(numbers, key=lambda number: len(requests[number].prompt)):
                yield [*alike]

    def _by_forward(self, batch: list[Request], purpose: str, look: Callable[[], None]) -> list[Generated | str]:
        if not can_generate(self._actor):
            return super()._by_forward(batch, purpose, look)
        samples = Samples(batch, purpose, self)
        while len(samples.open):
            self._decode(samples, look)
        return samples.generated()

    def _decode(self, samples: Samples, look: Callable[[], None]) -> None:
        """Go on with the open samples until half of them are done."""
        slots, known = samples.open, samples.tokens()
        width, num_steps = max(map(len, known)), 0
        ids = torch.full((len(known), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(known):
            ids[row, width - len(tokens) :] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, width - len(tokens) :] = 1

        def choose(logits: Tensor) -> Tensor:
            nonlocal num_steps
            if num_steps % LOOK_STEPS == 0:
                look()
            num_steps += 1
            chosen = torch.full((len(slots),), self.pad_id, dtype=torch.int64, device=logits.device)
            rows = torch.from_numpy(np.flatnonzero(np.isin(slots, samples.open))).to(logits.device)
            if len(rows):
                # Where there is no token the sample is over, and what stands there is not looked at.
                chosen[rows] = samples.take(logits[rows]).clamp(min=0)
            return chosen

        generate(
            self._actor,
            ids.to(self.device),
            mask.to(self.device),
            max_new_tokens=samples.num_left,
            pad_id=self.pad_id,
            choose=choose,
            is_over=lambda: 2 * len(samples.open) <= len(slots),
        )
