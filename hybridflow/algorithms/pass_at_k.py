"""pass@k: how likely at least one of k samples of a problem is right."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(num_right: Tensor, num_samples: int, k: int) -> Tensor:
    """Return the unbiased estimate ``1 - C(n - c, k) / C(n, k)`` from n samples of which c are right.

    Args:
        num_right: c of each problem, ``[problems]``, integers from 0 to n.
        num_samples: n, at least k.
        k: At least 1; 1 gives the share that is right, n whether any is.

    Returns:
        ``[problems]`` fp64, from 0 to 1.

    Paper: arXiv 2107.03374.
    """
    drawn = torch.arange(k, dtype=torch.float64, device=num_right.device)
    # Of the samples drawn one by one, how likely each is wrong after wrong ones: 0 once none is left, whatever follows.
    wrong = (num_samples - num_right[:, None] - drawn) / (num_samples - drawn)
    return 1 - wrong.prod(1)
