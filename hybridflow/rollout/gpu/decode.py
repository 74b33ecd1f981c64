"""Decoding on a GPU: several tokens of each sequence in a row, without asking the host in between.

A step reads and writes tensors that stay where they are, so it is captured once as a CUDA graph for each number of
rows, and replayed. Which sequences have ended is settled on the device. The host looks after some steps.
"""

from __future__ import annotations

import functools
from bisect import bisect_left

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns
from hybridflow.parallel.world import let_go_at_close
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu import ops
from hybridflow.rollout.gpu.cache import GpuAttention, GpuCache, processors_of, splits_for
from hybridflow.rollout.gpu.choose import choose
from hybridflow.rollout.gpu.edits import GpuEdits
from hybridflow.rollout.gpu.recurrence import GpuRecurrence
from hybridflow.rollout.gpu.transformer import GpuTransformer

_WHOLE = (
    "tokens",
    "lengths",
    "positions",
    "keys",
    "ends",
    "no_stop_before",
    "num_prompt",
    "top_k",
    "slots",
    "shifts",
    "counts",
    "failures",
)
"""The int64 numbers of each row: the state of its sequence, and what is counted while it is decoded."""


def buckets(most: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for, up to one that takes ``most`` rows."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 3)))
    return [size for size in sizes if size < most] + [most]


class Decoder:
    """Decodes with one model.

    Args:
        transformer: The model, whole but for tensor parallelism.
        group: Its tensor-parallel ranks.
        max_rows: Most sequences at a time.
        max_steps: Most steps in a row.
        context: Longest sequence, in tokens.
        device: Where the model is.
    """

    def __init__(
        self,
        transformer: GpuTransformer,
        group: dist.ProcessGroup,
        *,
        max_rows: int,
        max_steps: int,
        context: int,
        device: torch.device,
    ) -> None:
        self._transformer = transformer
        self._group = group
        self._buckets = buckets(max_rows)
        self._is_cuda = device.type == "cuda"
        self._processors = processors_of(device)
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._captured_at: tuple[int, ...] = ()
        self._device = device
        self._context = context
        table_width = -(-context // BLOCK_TOKENS)
        self._state = _State(max_rows, max_steps, table_width, len(transformer.layers), device)
        self._edits: GpuEdits | None = None
        let_go_at_close(self)

    def find_weights(self) -> None:
        """Let go of all graphs if any rank's weights have moved, so that all ranks capture anew. Collective: tp."""
        found = self._transformer.locate()
        has_moved = torch.tensor(int(found != self._captured_at))
        if self._group.size() > 1:
            dist.all_reduce(has_moved, dist.ReduceOp.MAX, group=self._group)
        if has_moved:
            self._graphs.clear()
            self._captured_at = found

    def let_go(self) -> None:
        """Let go of all graphs: NCCL does not end a communicator while a graph holds messages of it."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
            self._graphs.clear()

    def decode(
        self, cache: GpuCache, tables: np.ndarray, chosen: np.ndarray, most: int, version: int, **arrays: np.ndarray
    ) -> np.ndarray:
        """Sample up to ``most`` next tokens of each of some slots, as ``CpuTransformer.decode`` does.

        Collective: tp.
        """
        rows = self._buckets[bisect_left(self._buckets, len(chosen))]
        most = min(most, int((arrays["ends"] - arrays["lengths"])[chosen].max()))
        if self._state.widen_stops(arrays["stops"].shape[1]):
            self._graphs.clear()
        edits = self._edits_for(arrays["rules"]) if "rules" in arrays else None
        # On one rank cuts cost nothing where there are none.
        is_cut = self._group.size() == 1 or bool(_is_cut(chosen, arrays).any())
        graph = self._graph(rows, edits, is_cut) if self._is_cuda else None
        self._state.fill(cache, tables, chosen, rows, arrays)
        if edits is not None:
            lengths, num_prompt = (self._state.whole[name][: len(chosen)] for name in ("lengths", "num_prompt"))
            edits.fill(chosen, lengths, num_prompt, arrays)
        for _ in range(most):
            if graph is None:
                self.step(rows, edits, is_cut=is_cut)
            else:
                graph.replay()
        return self._state.collect(chosen, len(tables), version, arrays)

    def _edits_for(self, rules: np.ndarray) -> GpuEdits:
        """Return what holds the edits of the rows, made when the first request asks for some."""
        if self._edits is None:
            num_columns = self._transformer.num_columns
            columns = Columns(num_columns, self._group, self._transformer.vocab_size)
            self._edits = GpuEdits(self._buckets[-1], num_columns, columns, self._context, self._state.pair)
        if self._edits.widen(*rules.shape[1:]):
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
        return self._edits

    def step(self, rows: int, edits: GpuEdits | None = None, *, is_cut: bool = True) -> None:
        """Compute one token of each of the first rows, on the device alone.

        Collective: tp.

        Args:
            rows: How many.
            edits: What requests ask to be changed about logits; None: nothing.
            is_cut: Whether rows may have top k, top p or min p.
        """
        state = self._state
        where = state.addresses, state.tables[:rows], state.sequences[:rows], state.whole["positions"][:rows]
        groups = self._transformer.num_groups
        recurrence = GpuRecurrence(state.addresses, state.whole["slots"][:rows], where[-1])
        splits = splits_for(rows, groups, self._processors)
        shifts = state.whole["shifts"][:rows] if self._transformer.reads_images else None
        attention = GpuAttention(*where, splits=splits, recurrence=recurrence, shifts=shifts)
        logits = self._transformer(state.whole["tokens"][:rows], attention, None)
        noise = state.whole["keys"][:rows], state.whole["lengths"][:rows]
        settings = state.temperatures[:rows], state.is_quiet[:rows]
        model = self._transformer.vocab_size, self._transformer.softcap
        cuts = (state.whole["top_k"][:rows], *state.shares[:, :rows]) if is_cut else None
        stopping = state.whole["no_stop_before"][:rows], state.stops[:rows]
        edited = None if edits is None else edits.apply(logits, noise[1], *stopping, model[1])
        tokens, log_probs, sampled = choose(logits, *noise, *settings, self._group, *model, cuts, edited)
        if edits is not None:
            edits.remember(tokens, noise[1], where[-1])
        names = "tokens", "lengths", "positions", "counts", "failures"
        ops.advance(
            *(*(state.whole[name][:rows] for name in names), state.history, *state.log_probs),
            *(tokens, log_probs, sampled),
            *(state.whole["ends"][:rows], *stopping),
        )

    @functools.cached_property
    def _side(self) -> torch.cuda.Stream:
        """Return the stream of all captures: torch keeps a workspace for each stream that cuBLAS was called on."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _graph(self, rows: int, edits: GpuEdits | None, is_cut: bool) -> torch.cuda.CUDAGraph:
        """Return the captured step; capture it where there is none. Collective: tp."""
        key = rows, edits is not None, is_cut
        if key not in self._graphs:
            # Rows that have ended: they read and write no cache.
            self._state.whole["positions"].fill_(-1)
            side = self._side
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                # Compiles the kernels, and makes what libraries make at their first call.
                for _ in range(2):
                    self.step(rows, edits, is_cut=is_cut)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            # Other threads of this process, such as NCCL's, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                self.step(rows, edits, is_cut=is_cut)
            self._graphs[key] = graph
        return self._graphs[key]


def _is_cut(chosen: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return which of some slots have top k, top p or min p, ``[chosen]`` bool."""
    found: np.ndarray = (arrays["top_k"][chosen] > 0) | (arrays["top_p"][chosen] < 1) | (arrays["min_p"][chosen] > 0)
    return found


def wait_for(device: torch.device) -> None:
    """Wait for what was queued on a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _State:
    """What a step reads and writes on the device, and its counterparts in pinned host memory.

    Attributes:
        whole: Numbers of each row by their names in ``_WHOLE``, ``[rows]`` int64.
        temperatures: ``[rows]`` fp32.
        shares: Top p and min p, ``[2, rows]`` fp32.
        is_quiet: Rows without noise, ``[rows]`` uint8.
        stops: Stop tokens, ``[rows, stops]`` int32, filled with -1.
        tables: Blocks, ``[rows, blocks]`` int32.
        sequences: Each row is a sequence, ``[rows]`` int64.
        addresses: Where the cache is, ``[layers, 2]`` int64.
        history: Tokens, ``[steps, rows]`` int64.
        log_probs: Both log-probabilities of each, ``[2, steps, rows]`` fp32.
    """

    def __init__(self, rows: int, steps: int, table_width: int, layers: int, device: torch.device) -> None:
        self._device = device
        self._whole, self._host_whole = self.pair(len(_WHOLE), rows, dtype=torch.int64)
        self.whole = dict(zip(_WHOLE, self._whole, strict=True))
        self.temperatures, self._host_temperatures = self.pair(rows, dtype=torch.float32)
        self.shares, self._host_shares = self.pair(2, rows, dtype=torch.float32)
        self.is_quiet, self._host_is_quiet = self.pair(rows, dtype=torch.uint8)
        self.stops, self._host_stops = self.pair(rows, 4, dtype=torch.int32)
        self.tables, self._host_tables = self.pair(rows, table_width, dtype=torch.int32)
        self.history, self._host_history = self.pair(steps, rows, dtype=torch.int64)
        self.log_probs, self._host_log_probs = self.pair(2, steps, rows, dtype=torch.float32)
        self.sequences = torch.arange(rows, device=device)
        self.addresses = torch.zeros(layers, 2, dtype=torch.int64, device=device)
        self.temperatures.fill_(1)
        self.shares[0].fill_(1)

    def pair(self, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a tensor of zeros on the device, and one in host memory."""
        host = torch.zeros(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
        return torch.zeros(shape, dtype=dtype, device=self._device), host

    def widen_stops(self, num_stops: int) -> bool:
        """Make room for so many stop tokens of each row; return whether they are elsewhere now."""
        if num_stops <= self.stops.shape[1]:
            return False
        self.stops, self._host_stops = self.pair(len(self.stops), num_stops, dtype=torch.int32)
        return True

    def fill(
        self, cache: GpuCache, tables: np.ndarray, chosen: np.ndarray, rows: int, arrays: dict[str, np.ndarray]
    ) -> None:
        """Begin with some slots; the other rows are padding."""
        num, lengths = len(chosen), arrays["lengths"][chosen]
        whole = dict(zip(_WHOLE, self._host_whole.numpy(), strict=True))
        for values in whole.values():
            values[:rows] = 0
        whole["positions"][num:rows] = -1
        whole["slots"][:num] = chosen
        whole["tokens"][:num] = arrays["tokens"][chosen, lengths - 1]
        whole["lengths"][:num], whole["positions"][:num] = lengths, lengths - 1
        for name in ("keys", "ends", "no_stop_before", "num_prompt", "top_k", "shifts"):
            whole[name][:num] = arrays[name][chosen]
        self._host_temperatures.numpy()[:num] = arrays["temperatures"][chosen]
        self._host_shares.numpy()[:, num:rows] = [[1], [0]]
        self._host_shares.numpy()[:, :num] = arrays["top_p"][chosen], arrays["min_p"][chosen]
        self._host_is_quiet.numpy()[:num] = arrays["greedy"][chosen]
        stops = self._host_stops.numpy()
        stops[:num] = -1
        stops[:num, : arrays["stops"].shape[1]] = arrays["stops"][chosen]
        width = tables.shape[1]
        self._host_tables.numpy()[:num, :width] = tables[chosen]
        for device, host in (
            (self._whole, self._host_whole),
            (self.temperatures[:num], self._host_temperatures[:num]),
            (self.shares, self._host_shares),
            (self.is_quiet[:num], self._host_is_quiet[:num]),
            (self.stops[:num], self._host_stops[:num]),
            (self.tables[:num, :width], self._host_tables[:num, :width]),
        ):
            device.copy_(host, non_blocking=True)
        self.addresses.copy_(cache.addresses)

    def collect(self, chosen: np.ndarray, num_slots: int, version: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Wait for the device, and write down what it sampled; return failures, ``[slots]`` int64."""
        pairs = (
            (self._host_whole, self._whole),
            (self._host_history, self.history),
            (self._host_log_probs, self.log_probs),
        )
        for host, device in pairs:
            host.copy_(device, non_blocking=True)
        wait_for(self._device)
        whole = dict(zip(_WHOLE, self._host_whole.numpy()[:, : len(chosen)], strict=True))
        step, row = np.nonzero(np.arange(len(self.history))[:, None] < whole["counts"])
        slots, at = chosen[row], arrays["lengths"][chosen][row] + step
        arrays["tokens"][slots, at] = self._host_history.numpy()[step, row]
        arrays["log_probs"][slots, at], arrays["sampled_log_probs"][slots, at] = self._host_log_probs.numpy()[
            :, step, row
        ]
        arrays["versions"][slots, at] = version
        arrays["lengths"][chosen] += whole["counts"]
        failures = np.zeros(num_slots, np.int64)
        failures[chosen] = whole["failures"]
        return failures
