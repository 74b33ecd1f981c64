"""Choosing the next token from vocabulary-parallel logits, the same in every layout.

Noise is counter-based: a hash of (seed, purpose, prompt index, sample index, position, vocabulary id), so no generator
has a state to keep, and a tensor-parallel rank makes the noise of its own columns alone. The token is the argmax of
logits plus Gumbel noise, which samples from the softmax (Gumbel-max, see arXiv 1611.00712); only each rank's best
candidate crosses the group.

Rows whose requests ask for nothing but a temperature, or for the likeliest token, are done in one go over all rows. The
others are then gone over again, alone: each rank edits and cuts its own columns of them. What is known of each slot is
in arrays, so that this takes no Python for each row, but for those that have texts to avoid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns, uses_kernels
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.cpu.kernels import load_kernels
from hybridflow.rollout.edits import Entries, Rows, edited, floors, forbidden, gather_over, penalized, rules_of
from hybridflow.rollout.request import PURPOSES, SamplingParams

NOT_FINITE, NOTHING_LEFT, BAD_TEXT = -1, -2, -3
FAILURES = {
    NOT_FINITE: "its logits are not finite; the weights are damaged, or their training has diverged",
    NOTHING_LEFT: "every token is forbidden; look at its bad_ids and min_new_tokens",
    BAD_TEXT: "every candidate that was tried completes one of its bad texts; forbid less, or lower the temperature",
}
"""What stands in the place of a token that could not be sampled, and why."""

MAX_TRIES = 64
"""Candidates for one token that may each complete a bad text."""

_Integers = TypeVar("_Integers", Tensor, np.ndarray)

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_BELOW_ONE = 1.0 - 2.0**-24


def sequence_key(seed: int, purpose: str, prompt_index: int, index: int) -> int:
    """Return the 64-bit key of a sequence's noise.

    Args:
        seed: The run's seed.
        purpose: What the sample is for, a key of ``PURPOSES``.
        prompt_index: Serial number of the prompt in the data order.
        index: Number of the sample among those of its prompt.
    """
    key = seed * _GOLDEN + PURPOSES[purpose]
    for part in (prompt_index, index):
        key = _mix_integer(_mix_integer(key) + part)
    return _signed(key)


def row_keys(keys: _Integers, positions: _Integers) -> _Integers:
    """Return keys of tokens from their sequences' keys and positions, ``[rows]`` int64 each."""
    return _mix(_mix(keys) + positions)


def gumbel_noise(keys: Tensor, first: int, width: int) -> Tensor:
    """Return standard Gumbel noise for vocabulary ids ``first`` to ``first + width``, ``[rows, width]`` fp32."""
    ids = torch.arange(first + 1, first + width + 1, dtype=torch.int64, device=keys.device)
    bits = _mix(keys[:, None] + ids * _signed(_GOLDEN))
    # 32 bits, finest near 0, where the largest noise comes from, and never 0 or 1, where the logarithms end.
    uniform = _shift(bits, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True)
class Sampled:
    """The next token of some rows, the same on every rank of the group.

    Attributes:
        tokens: ``[rows]`` int64; one of ``FAILURES`` where there is none.
        log_probs: ``[rows]`` fp32 under ``softmax(logits / temperature)``: the quantity that the trainer computes.
        sampled_log_probs: ``[rows]`` fp32 under the distribution that was sampled from; 0 for the likeliest token.
    """

    tokens: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor


_SLOT = np.dtype(
    [
        *((name, np.int64) for name in ("key", "top_k", "num_prompt", "no_stop_before")),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")),
        *(
            (name, np.uint8)
            for name in ("is_greedy", "is_penalized", "is_edited", "is_cut", "is_special", "has_bad_texts")
        ),
    ]
)


class Sampler:
    """Samples for slots, each of which has its own parameters.

    Args:
        num_slots: Slots.
        group: Tensor-parallel ranks, each of which has some columns of the logits.
        vocab_size: True vocabulary.
        device: Where logits are.
    """

    def __init__(self, num_slots: int, group: dist.ProcessGroup, vocab_size: int, device: torch.device) -> None:
        self._group = group
        self._vocab_size = vocab_size
        self._device = device
        self._slots = np.zeros(num_slots, _SLOT)
        self._slots["temperature"] = 1
        self._biases, self._stop_ids, self._bad_ids = Entries(), Entries(), Entries()

    def seat(self, slot: int, params: SamplingParams, key: int, num_prompt: int) -> None:
        """Give a slot to a sequence whose noise comes from ``key``, and whose first tokens are the prompt."""
        must_go_on = bool(params.stop_ids) and params.min_new_tokens > 1
        is_penalized = bool(
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        # The likeliest token survives every cut.
        is_cut = not params.greedy and bool(params.top_k or params.top_p < 1 or params.min_p)
        is_edited = is_penalized or must_go_on or bool(params.logit_bias or params.bad_ids or params.bad)
        self._slots[slot] = (
            *(key, params.top_k, num_prompt, num_prompt + params.min_new_tokens),
            *(params.temperature, params.top_p, params.min_p),
            *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
            *(params.greedy, is_penalized, is_edited, is_cut, is_cut or is_edited, bool(params.bad)),
        )
        self._biases.put(slot, params.logit_bias)
        self._stop_ids.put(slot, [(token,) for token in params.stop_ids] if must_go_on else [])
        self._bad_ids.put(slot, [ids[::-1] for ids in params.bad_ids])

    def is_plain(self, slots: np.ndarray, *, with_cuts: bool = False, with_edits: bool = False) -> bool:
        """Return whether some slots need only a temperature, or the likeliest token.

        Args:
            slots: Slots.
            with_cuts: They may have top k, top p and min p too.
            with_edits: They may have penalties, biases and forbidden tokens too, but no bad texts.
        """
        known = {"is_cut": with_cuts, "is_edited": with_edits, "has_bad_texts": False}
        return not any(self._slots[name][slots].any() for name, is_known in known.items() if not is_known)

    def arrays(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of all slots that decoding several tokens of some slots reads.

        If one of these has edits: their penalties too, and what ``rollout.edits.rules_of`` returns of these slots.
        """
        names = {"keys": "key", "temperatures": "temperature", "greedy": "is_greedy"}
        names |= {name: name for name in ("top_k", "top_p", "min_p", "num_prompt")}
        is_edited = self._slots["is_edited"][slots].any()
        if is_edited:
            names |= {name: name for name in ("repetition", "presence", "frequency")}
        found = {name: np.ascontiguousarray(self._slots[field]) for name, field in names.items()}
        if is_edited:
            found["rules"], found["amounts"] = rules_of(slots, self._biases, self._bad_ids)
        return found

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        known: np.ndarray | None = None,
        is_bad: Callable[[int, int], bool] | None = None,
    ) -> Sampled:
        """Choose one token for each row.

        Collective: tp.

        Args:
            logits: This rank's columns, ``[rows, padded_vocab/tp]``.
            slots: Whose rows they are, ``[rows]`` int64 in host memory, each once.
            positions: Where the tokens to be chosen will stand in their sequences, ``[rows]`` int64 in host memory.
            known: The tokens of each slot before that, ``[slots, capacity]``; may be left out where no parameter
                depends on them.
            is_bad: Whether a token would complete a bad text in a slot; asked for slots that have some.
        """
        columns = Columns(logits.shape[-1], self._group, self._vocab_size)
        rows = self._rows(slots.numpy(), positions.numpy(), known)
        is_greedy = rows.tensor("is_greedy")
        special = np.flatnonzero(rows.values["is_special"])
        # Of rows that are gone over again only the sums are of use: no noise is made for them.
        is_quiet = is_greedy | rows.tensor("is_special")
        found = _find(logits, rows.tensor("key"), rows.tensor("temperature"), is_quiet, columns)
        if not len(special):
            return _settle(gather_over(self._group, found), is_greedy)
        found = torch.cat([found, found[2:4]])
        self._find_special(found, logits, rows, special, columns, [])
        sampled = _settle(gather_over(self._group, found), is_greedy)
        if is_bad is not None and rows.values["has_bad_texts"].any():
            self._try_others(sampled, found, logits, rows, columns, is_bad)
        return sampled

    def _rows(self, slots: np.ndarray, positions: np.ndarray, known: np.ndarray | None) -> Rows:
        values = self._slots[slots]
        values["key"] = row_keys(values["key"], positions)
        return Rows(slots=slots, positions=positions, values=values, known=known, device=self._device)

    def _try_others(
        self,
        sampled: Sampled,
        found: Tensor,
        logits: Tensor,
        rows: Rows,
        columns: Columns,
        is_bad: Callable[[int, int], bool],
    ) -> None:
        """Forbid what would complete a bad text, and sample such rows again, with the noise they had. Collective: tp.

        The best of what is left, with the same noise, is a sample of what is left (Plackett-Luce), so that without cuts
        this samples exactly from the tokens that complete none. Each try samples anew, cuts included;
        the log-probability is that of the last.
        """
        forbidden: list[tuple[int, int]] = []
        asked = np.flatnonzero(rows.values["has_bad_texts"])
        for num_tried in range(1, MAX_TRIES + 1):
            tokens = sampled.tokens.tolist()
            asked = np.array(
                [row for row in asked.tolist() if tokens[row] >= 0 and is_bad(int(rows.slots[row]), tokens[row])],
                np.int64,
            )
            if not len(asked):
                return
            where = to_device(torch.from_numpy(asked), self._device)
            if num_tried == MAX_TRIES:
                sampled.tokens[where] = BAD_TEXT
                return
            forbidden += [(int(rows.slots[row]), tokens[row]) for row in asked.tolist()]
            self._find_special(found, logits, rows, asked, columns, forbidden)
            is_greedy = rows.tensor("is_greedy")[where]
            other = _settle(gather_over(self._group, found[:, where]), is_greedy)
            sampled.tokens[where] = other.tokens
            sampled.log_probs[where] = other.log_probs
            sampled.sampled_log_probs[where] = other.sampled_log_probs

    def _find_special(
        self,
        found: Tensor,
        logits: Tensor,
        rows: Rows,
        chosen: np.ndarray,
        columns: Columns,
        never: list[tuple[int, int]],
    ) -> None:
        """Fill in some rows' candidates, from edited and cut logits. Collective: tp.

        Args:
            found: As ``_find`` makes it, with two rows more: the candidate's edited logit, and the largest edited one,
                ``[8, rows]``. Of those chosen all is written but the largest logit and the sum, which stand.
            logits: This rank's columns, ``[rows, padded_vocab/tp]``.
            rows: Whose they are.
            chosen: Which rows, ``[chosen]``.
            columns: Columns of this rank.
            never: Slots, and tokens that they may not have beside those that their parameters forbid.
        """
        where = to_device(torch.from_numpy(chosen), self._device)
        some = rows.take(chosen)
        raw = columns.scaled(logits[where], 1.0)
        temperatures = some.tensor("temperature")[:, None]
        values = penalized(raw, some, columns) if some.values["is_penalized"].any() else raw
        rules = forbidden(some, self._stop_ids, self._bad_ids, never)
        values = edited(values, some, self._biases, rules, columns) / temperatures
        values.masked_fill_(values < floors(values, some, columns)[:, None], -torch.inf)
        best = _find(values, some.tensor("key"), torch.ones_like(temperatures[:, 0]), some.tensor("is_greedy"), columns)
        place = (best[1].long() - columns.first)[:, None]
        found[0, where], found[1, where] = best[0], best[1]
        found[2, where] = (raw.gather(1, place) / temperatures)[:, 0].double()
        # Of this rank's columns there may be none that is left.
        found[5, where] = best[4].masked_fill(best[3] == -torch.inf, 0)
        found[6, where], found[7, where] = best[2], best[3]


def _find(logits: Tensor, keys: Tensor, temperatures: Tensor, is_quiet: Tensor, columns: Columns) -> Tensor:
    """Return this rank's candidates and the terms of their log-probabilities, ``[6, rows]`` fp64.

    The rows are: best score, its id, its scaled logit, the largest scaled logit, the sum of ``exp(scaled - largest)``,
    and the same sum over what may be sampled. fp64 carries token ids, and fp32 numbers, exactly.

    Args:
        logits: This rank's columns, ``[rows, padded_vocab/tp]``.
        keys: Keys of the noise, ``[rows]`` int64.
        temperatures: ``[rows]`` fp32.
        is_quiet: Rows without noise, ``[rows]`` uint8.
        columns: Columns of this rank.
    """
    if uses_kernels(logits):
        # Triton comes with torch's CUDA builds only.
        from hybridflow.rollout.gpu.choose import find

        return find(logits, keys, temperatures, is_quiet, columns)
    kernels = load_kernels()
    if kernels is None or logits.device.type != "cpu" or logits.dtype is not torch.float32:
        return _find_in_torch(columns.scaled(logits, temperatures[:, None]), keys, is_quiet, columns)
    logits, temperatures = logits.contiguous(), temperatures.contiguous()
    found = torch.empty(6, len(logits), dtype=torch.float64)
    kernels.hf_sample(
        *(each.data_ptr() for each in (found, logits, keys, temperatures, is_quiet)),
        *logits.shape,
        columns.num_real,
        columns.first,
    )
    return found


def _find_in_torch(scaled: Tensor, keys: Tensor, is_quiet: Tensor, columns: Columns) -> Tensor:
    """Compute ``_find`` in torch, from scaled logits."""
    largest = scaled.amax(-1)
    # A rank may have no column of the vocabulary.
    total = (scaled - largest.clamp(min=torch.finfo(scaled.dtype).min)[:, None]).exp().sum(-1)
    scores = scaled
    if not bool(is_quiet.all()):
        scores = scaled + gumbel_noise(keys, columns.first, scaled.shape[1]) * (1 - is_quiet[:, None])
    best, place = scores.max(-1)
    chosen = scaled.gather(1, place[:, None])[:, 0]
    return torch.stack([each.double() for each in (best, place + columns.first, chosen, largest, total, total)])


def _settle(candidates: Tensor, is_greedy: Tensor) -> Sampled:
    """Pick the winners among all ranks' candidates, ``[tp, 6 or 8, rows]``.

    See ``_find`` and ``Sampler._find_special``.
    """
    kernels = load_kernels()
    if kernels is None or candidates.device.type != "cpu":
        return _settle_in_torch(candidates, is_greedy)
    candidates, num_rows = candidates.contiguous(), candidates.shape[2]
    tokens = torch.empty(num_rows, dtype=torch.int64)
    # Not of torch's default type, which another thread may have changed: that of a reward which loads a model.
    log_probs, sampled = torch.empty(2, num_rows, dtype=torch.float32)
    kernels.hf_settle(
        *(each.data_ptr() for each in (tokens, log_probs, sampled, candidates, is_greedy)), *candidates.shape
    )
    return Sampled(tokens, log_probs, sampled)


def _settle_in_torch(candidates: Tensor, is_greedy: Tensor) -> Sampled:
    """Compute ``_settle`` in torch."""
    best, ids, chosen, largest, totals, kept = candidates[:, :6].unbind(1)
    edited, edited_largest = (chosen, largest) if candidates.shape[1] == 6 else candidates[:, 6:].unbind(1)
    winner = best.argmax(0, keepdim=True)
    log_probs, sampled = (
        logit.gather(0, winner)[0] - _normalizer(*parts)
        for logit, parts in ((chosen, (largest, totals)), (edited, (edited_largest, kept)))
    )
    tokens = ids.gather(0, winner)[0].long()
    tokens[best.amax(0) == -torch.inf] = NOTHING_LEFT
    tokens[~_normalizer(largest, totals).isfinite()] = NOT_FINITE
    return Sampled(tokens, log_probs.float(), sampled.masked_fill(is_greedy.bool(), 0).float())


def _normalizer(largest: Tensor, totals: Tensor) -> Tensor:
    """Return the log-sum-exp over all ranks, ``[rows]``, from ``[tp, rows]`` each."""
    top = largest.amax(0)
    shares = torch.where(totals == 0, torch.zeros_like(totals), (largest - top).exp())
    return top + (totals * shares).sum(0).log()


def _mix(value: _Integers) -> _Integers:
    """Mix 64-bit integers one to one, so that all output bits depend on all input bits.

    This is the finalizer of SplitMix64.
    """
    value = (value ^ _shift(value, 30)) * _signed(_FACTORS[0])
    value = (value ^ _shift(value, 27)) * _signed(_FACTORS[1])
    mixed: _Integers = value ^ _shift(value, 31)
    return mixed


def _mix_integer(value: int) -> int:
    """Compute ``_mix`` of one number."""
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        value &= _WORD
        value = (value ^ (value >> shift)) * factor
    value &= _WORD
    return value ^ (value >> 31)


def _shift(value: _Integers, bits: int) -> _Integers:
    """Shift right logically; the operator on signed integers keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >= 1 << 63 else value
