"""Which code computes a model for generating: kernels for a CPU, kernels for a GPU, or the training model's modules."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.models.gpt import Transformer
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.cpu.transformer import CpuTransformer, runs_on_cpu
from hybridflow.rollout.paged import PagedAttention, PagedCache


class Cache(Protocol):
    """Keys and values of the layers of this stage, in blocks, and states by slot.

    Attributes:
        num_bytes: Memory of all.
    """

    num_bytes: int

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, ``[copies]`` int64 each; no block is both source and target."""

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states of slots, ``[copies]`` int64 each; all are read before any is written."""


class Runner(Protocol):
    """Computes a stage and shard of a model, over a cache of its own making.

    Attributes:
        can_cut: Whether ``decode`` knows top k, top p and min p.
        can_edit: Whether ``decode`` knows penalties, biases and forbidden tokens.
        can_turn: Whether ``decode`` knows how text behind images turns.
    """

    can_cut: bool
    can_edit: bool
    can_turn: bool

    @property
    def can_decode(self) -> bool:
        """Return whether ``decode`` can be called, once ``prepare`` was."""

    def prepare(self) -> None:
        """Derive from the weights what is not there."""

    def forget(self) -> None:
        """Drop what was derived from the weights: they have changed."""

    def make_cache(self, num_blocks: int, num_slots: int) -> Any:
        """Return an empty cache."""

    def attention(
        self, cache: Any, tables: np.ndarray, sequences: np.ndarray, positions: np.ndarray, first_slot: int
    ) -> Any:
        """Return the attention of some tokens, as ``PagedAttention`` takes them, in host memory."""

    def __call__(self, tokens: Tensor, attention: Any, rows: Tensor) -> Tensor:
        """Compute as ``Transformer.forward``. Collective: tp."""

    def decode(
        self, cache: Any, tables: np.ndarray, chosen: np.ndarray, most: int, version: int, **arrays: np.ndarray
    ) -> np.ndarray:
        """Sample several tokens of each of some slots, as ``CpuTransformer.decode`` does. Collective: tp."""


class PlainRunner:
    """Uses the training model's modules, or ``CpuTransformer`` where it can compute the model. See ``Runner``.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        device: Where the model is.
        keeps_choices: Whether its caches keep the choices of experts.
    """

    can_cut = can_edit = can_turn = False

    def __init__(
        self,
        model: Transformer,
        groups: ProcessGroupCollection,
        vocab_size: int,
        device: torch.device,
        *,
        keeps_choices: bool = False,
    ) -> None:
        self._keeps_choices = keeps_choices
        self._model, self._groups, self._vocab_size, self._device = model, groups, vocab_size, device
        self._fast: CpuTransformer | None = None

    @property
    def can_decode(self) -> bool:
        """Return whether the whole model is on this rank's CPU."""
        return self._fast is not None and self._groups.tp.size() == self._groups.pp.size() == 1

    def prepare(self) -> None:
        """See ``Runner``."""
        if self._fast is None and runs_on_cpu(self._model):
            self._fast = CpuTransformer(self._model, self._groups.tp, self._vocab_size)

    def forget(self) -> None:
        """See ``Runner``."""
        self._fast = None

    def make_cache(self, num_blocks: int, num_slots: int) -> PagedCache:
        """See ``Runner``."""
        sizes = self._model, num_blocks, self._device
        return PagedCache(*sizes, num_slots=num_slots, keeps_choices=self._keeps_choices)

    def attention(
        self, cache: PagedCache, tables: np.ndarray, sequences: np.ndarray, positions: np.ndarray, first_slot: int
    ) -> PagedAttention:
        """See ``Runner``."""
        places, of, at = (to_device(torch.from_numpy(each), self._device) for each in (tables, sequences, positions))
        return PagedAttention(cache, places, of, at, first_slot)

    def __call__(self, tokens: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor:
        """See ``Runner``."""
        # The kernels know neither embeddings of images nor how these turn.
        compute = self._model if attention.images is not None else self._fast or self._model
        found: Tensor = compute(tokens, attention, rows)
        return found

    def decode(
        self, cache: PagedCache, tables: np.ndarray, chosen: np.ndarray, most: int, version: int, **arrays: np.ndarray
    ) -> np.ndarray:
        """See ``Runner``."""
        assert self._fast is not None, "see can_decode"
        return self._fast.decode(cache, tables, chosen, most, version, **arrays)


def make_runner(
    model: Transformer,
    groups: ProcessGroupCollection,
    vocab_size: int,
    *,
    max_rows: int,
    max_steps: int,
    keeps_choices: bool = False,
) -> Runner:
    """Return what computes a model where it is.

    Args:
        model: This rank's stage and shard.
        groups: This rank's process groups.
        vocab_size: True vocabulary.
        max_rows: Most sequences decoded at a time.
        max_steps: Most steps in a row.
        keeps_choices: Whether its caches keep the choices of experts, which the training model's modules alone tell.
    """
    device = next(model.parameters()).device
    if device.type == "cuda" and not keeps_choices:
        # Needs Triton, which comes with torch's CUDA builds only.
        from hybridflow.rollout.gpu.runner import GpuRunner, runs_on_gpu

        if runs_on_gpu(model):
            return GpuRunner(model, groups, vocab_size, max_rows=max_rows, max_steps=max_steps)
    return PlainRunner(model, groups, vocab_size, device, keeps_choices=keeps_choices)
