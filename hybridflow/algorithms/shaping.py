"""What is added to scores before advantages are made of them."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """Return DAPO's penalty on responses close to the maximum length; it is 0 or negative.

    ``min(-(length - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0)``

    Args:
        lengths: Tokens of each response, ``[samples]``.
        max_tokens: The configured maximum response length.
        buffer_tokens: The last so many tokens before it are paid for.
        factor: What the longest response pays.

    Returns:
        What is added to each score, ``[samples]`` fp32.

    Raises:
        ValueError: ``buffer_tokens`` is below 1.

    Paper: arXiv 2503.14476.
    """
    if buffer_tokens < 1:
        raise ValueError(f"buffer_tokens={buffer_tokens}: must be at least 1")
    excess = (lengths - (max_tokens - buffer_tokens)).double()
    return (-excess / buffer_tokens * factor).clamp(max=0).float()
