"""A model on a GPU, as the engine uses it."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.models.gpt import Transformer
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.gpu.cache import GpuAttention, GpuCache, processors_of, splits_for, tiles_of
from hybridflow.rollout.gpu.decode import Decoder
from hybridflow.rollout.gpu.prompts import plan_prompts
from hybridflow.rollout.gpu.recurrence import plan_recurrence
from hybridflow.rollout.gpu.transformer import GpuTransformer
from hybridflow.rollout.paged import cache_shapes


def runs_on_gpu(model: Transformer) -> bool:
    """Return whether ``GpuRunner`` can compute this model; others go through the training model's modules."""
    return model.has_latent_attention or all(head <= 512 for _, head in cache_shapes(model).values())


def _can_be_captured(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a graph can hold the messages of a group: those of NCCL, or none."""
    return group.size() == 1 or group._get_backend(device).name() == "nccl"


class GpuRunner:
    """See ``rollout.runner.Runner``.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        max_rows: Most sequences decoded at a time.
        max_steps: Most steps in a row.
    """

    can_cut = can_edit = can_turn = True

    def __init__(
        self, model: Transformer, groups: ProcessGroupCollection, vocab_size: int, *, max_rows: int, max_steps: int
    ) -> None:
        self._model, self._groups = model, groups
        self._device = next(model.parameters()).device
        self._transformer = GpuTransformer(model, groups.tp, vocab_size)
        self._is_stale = False
        self._processors = processors_of(self._device)
        self._decoder: Decoder | None = None
        if self._transformer.is_capturable and groups.pp.size() == 1 and _can_be_captured(groups.tp, self._device):
            self._decoder = Decoder(
                self._transformer,
                groups.tp,
                max_rows=max_rows,
                max_steps=max_steps,
                context=model.max_sequence_length,
                device=self._device,
            )

    @property
    def can_decode(self) -> bool:
        """Return whether a step needs nothing of the host, nor of another stage."""
        return self._decoder is not None

    def prepare(self) -> None:
        """Find the weights, which may have moved, and copy adapters anew after a change; all else is read in place.

        Collective: tp.
        """
        if self._decoder is None:
            self._transformer.locate()
        else:
            self._decoder.find_weights()
        if self._is_stale:
            self._transformer.copy_adapters()
            self._is_stale = False

    def forget(self) -> None:
        """See ``Runner``."""
        self._is_stale = True

    def make_cache(self, num_blocks: int, num_slots: int) -> GpuCache:
        """See ``Runner``."""
        return GpuCache(self._model, num_blocks, self._device, num_slots)

    def attention(
        self, cache: GpuCache, tables: np.ndarray, sequences: np.ndarray, positions: np.ndarray, first_slot: int
    ) -> GpuAttention:
        """See ``Runner``."""
        places, of, at = (to_device(torch.from_numpy(each), self._device) for each in (tables, sequences, positions))
        recurrence = None
        if cache.states:
            slots = first_slot + sequences
            recurrence = plan_recurrence(cache.addresses, cache.states, slots, positions, self._device)
        prompts = None
        if self._model.has_latent_attention:
            prompts = plan_prompts(cache.vectors, tables, sequences, positions, self._device)
        if self._model.has_latent_attention or not (np.diff(sequences) == 0).any():
            alone = len(sequences) if prompts is None else len(prompts.others)
            # A row of each, as in a captured step. There is a kernel for each number of shares, hence few of these.
            rows = 1 << max(alone - 1, 0).bit_length()
            splits = splits_for(rows, self._transformer.num_groups, self._processors)
            return GpuAttention(cache.addresses, places, of, at, splits=splits, recurrence=recurrence, prompts=prompts)
        tiles = {
            most: to_device(torch.from_numpy(tiles_of(sequences, most)), self._device)
            for most in self._transformer.rows_per_tile
        }
        return GpuAttention(cache.addresses, places, of, at, tiles, recurrence=recurrence)

    def __call__(self, tokens: Tensor, attention: GpuAttention, rows: Tensor) -> Tensor:
        """See ``Runner``."""
        return self._transformer(tokens, attention, rows)

    def decode(
        self, cache: GpuCache, tables: np.ndarray, chosen: np.ndarray, most: int, version: int, **arrays: np.ndarray
    ) -> np.ndarray:
        """See ``Runner``."""
        assert self._decoder is not None, "see can_decode"
        return self._decoder.decode(cache, tables, chosen, most, version, **arrays)
