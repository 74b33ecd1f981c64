"""What the names of PyTorch FSDP and DeepSpeed ZeRO come to. Pure arithmetic: no torch."""

from __future__ import annotations

import typing
from typing import Literal

from hybridflow.errors import LayoutError

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]

SHARDINGS: tuple[Sharding, ...] = typing.get_args(Sharding)
_BY_ZERO: dict[int, Sharding | None] = {1: None, 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


def settle_sharding(
    dp: int, fsdp: int, sharding: Sharding | None, hsdp: int | None, zero: int | None
) -> tuple[int, int, Sharding | None]:
    """Return ``dp``, ``fsdp``, and a sharding that these two do not say.

    That is ``SHARD_GRAD_OP``, or ``HYBRID_SHARD`` while the size of a node is not known.

    Args:
        dp: Data-parallel ranks; 1: not given.
        fsdp: Ranks that share a parameter; 1: not given.
        sharding: PyTorch's name.
        hsdp: Data-parallel ranks of a hybrid sharding.
        zero: DeepSpeed's stage.

    Raises:
        LayoutError: A name is not known, or two contradict each other.
    """
    asked = _asked(fsdp, sharding, hsdp, zero)
    if hsdp is not None and dp not in (1, hsdp):
        raise LayoutError(f"layout hsdp={hsdp} with dp={dp}: both give the ranks; remove dp")
    dp = dp if hsdp is None else hsdp
    dp = fsdp if dp == 1 else dp
    if asked in ("FULL_SHARD", "SHARD_GRAD_OP") and fsdp == 1:
        fsdp = dp
    if dp % fsdp:
        raise LayoutError(f"layout fsdp={fsdp} with dp={dp}: expected a dp that is a multiple of fsdp")
    # A shard of one rank is the whole; a hybrid whose parts are known needs no name.
    is_named = fsdp > 1 if asked == "SHARD_GRAD_OP" else asked == "HYBRID_SHARD" and fsdp == 1 < dp
    return dp, fsdp, asked if is_named else None


def _asked(fsdp: int, sharding: Sharding | None, hsdp: int | None, zero: int | None) -> Sharding | None:
    """Return the one sharding that all names ask for; None: none is named."""
    if zero is not None and zero not in _BY_ZERO:
        raise LayoutError(f"layout zero={zero}: expected 1, 2 or 3")
    if sharding not in (None, *SHARDINGS):
        raise LayoutError(f"layout fsdp_sharding={sharding!r}: expected one of {', '.join(SHARDINGS)}")
    names: list[Sharding | None] = [sharding, "HYBRID_SHARD" if hsdp is not None else None]
    names.append(None if zero is None else _BY_ZERO[zero])
    asked = {name for name in names if name is not None}
    if len(asked) > 1 or (zero == 1 and (asked or fsdp > 1)):
        raise LayoutError(
            "layout: fsdp, fsdp_sharding, hsdp and zero ask for different shardings; keep one of the keys"
        )
    return next(iter(asked), None)
