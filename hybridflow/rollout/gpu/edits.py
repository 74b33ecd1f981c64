"""What requests ask to be changed about logits, in tensors that captured steps read and write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hybridflow.models.log_probs import Columns
from hybridflow.rollout.gpu import ops

_PENALTIES = "repetition", "presence", "frequency"


class GpuEdits:
    """Penalties, biases and forbidden tokens of the rows of a decoder, and the tokens that they depend on.

    Args:
        rows: Most rows.
        width: Columns of this rank, padding included.
        columns: Which ones these are.
        context: Longest sequence, in tokens.
        pair: Makes a tensor of zeros on the device, and one in host memory, from a shape and ``dtype``.
    """

    def __init__(
        self, rows: int, width: int, columns: Columns, context: int, pair: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self._where = columns.first, columns.num_real
        self._pair = pair
        self._penalties, self._host_penalties = pair(len(_PENALTIES), rows, dtype=torch.float32)
        self._known, self._host_known = pair(rows, context, dtype=torch.int32)
        self._seen = torch.zeros(rows, width, dtype=torch.int32, device=self._known.device)
        self._make_rules(1, 1)

    def _make_rules(self, num_rules: int, width: int) -> None:
        rows = len(self._seen)
        self._rules, self._host_rules = self._pair(rows, num_rules, width, dtype=torch.int32)
        self._amounts, self._host_amounts = self._pair(rows, num_rules, dtype=torch.float32)

    def widen(self, num_rules: int, width: int) -> bool:
        """Make room for so many rules of each row, of so many tokens; return whether tensors were made anew."""
        sizes = [(num_rules, self._rules.shape[1]), (width, self._rules.shape[2])]
        if all(wanted <= size for wanted, size in sizes):
            return False
        # Powers of 2, or graphs would be captured anew for each request that asks for a little more.
        self._make_rules(*(1 << (max(each) - 1).bit_length() for each in sizes))
        return True

    def fill(self, chosen: np.ndarray, lengths: Tensor, num_prompt: Tensor, arrays: dict[str, np.ndarray]) -> None:
        """Begin with some slots.

        Args:
            chosen: Slots, ``[chosen]``.
            lengths: Known tokens of each, ``[chosen]`` int64 on the device.
            num_prompt: How many of them are the prompt, ``[chosen]`` int64 on the device.
            arrays: As ``Decoder.decode`` takes them.
        """
        num, longest = len(chosen), int(arrays["lengths"][chosen].max())
        _, num_rules, width = arrays["rules"].shape
        rules = self._host_rules.numpy()[:num]
        rules[:] = -1
        rules[:, :num_rules, :width] = arrays["rules"]
        self._host_amounts.numpy()[:num, :num_rules] = arrays["amounts"]
        self._host_penalties.numpy()[:, :num] = [arrays[name][chosen] for name in _PENALTIES]
        # Side by side, since only such host memory is copied without waiting.
        known = self._host_known.view(-1)[: num * longest].view(num, longest)
        known.numpy()[:] = arrays["tokens"][chosen, :longest]
        for device, host in (
            (self._rules[:num], self._host_rules[:num]),
            (self._amounts[:num], self._host_amounts[:num]),
            (self._penalties, self._host_penalties),
            (self._known[:num, :longest], known),
        ):
            device.copy_(host, non_blocking=True)
        self._seen[:num].zero_()
        ops.count(self._seen[:num], self._known[:num], lengths, num_prompt, longest, *self._where)

    def apply(self, logits: Tensor, lengths: Tensor, no_stop_before: Tensor, stops: Tensor, softcap: float) -> Tensor:
        """Return the edited logits of the first rows, capped, ``[rows, padded_vocab/tp]`` fp32; 2 launches.

        Args:
            logits: This rank's columns, ``[rows, padded_vocab/tp]``.
            lengths: Place of the token to be chosen in its sequence, ``[rows]`` int64.
            no_stop_before: Least length at which a stop token counts; it is not sampled before, ``[rows]`` int64.
            stops: Stop tokens of each row, ``[rows, stops]`` int32, filled with -1.
            softcap: Cap on the logits; 0: none.
        """
        rows = len(logits)
        edited = torch.empty_like(logits, dtype=torch.float32)
        ops.penalize(edited, logits, self._seen[:rows], *self._penalties[:, :rows], self._where[1], softcap)
        given = self._rules[:rows], self._amounts[:rows], self._known[:rows], lengths, no_stop_before, stops
        ops.add_rules(edited, *given, *self._where)
        return edited

    def remember(self, tokens: Tensor, lengths: Tensor, positions: Tensor) -> None:
        """Take note of the tokens chosen for the first rows, ``[rows]`` int64; positions of -1 have ended."""
        ops.remember(self._seen, self._known, tokens, lengths, positions, *self._where)
