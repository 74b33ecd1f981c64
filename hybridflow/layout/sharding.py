"""What the names of PyTorch FSDP and DeepSpeed ZeRO come to. Pure arithmetic: no torch."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Literal

from hybridflow.errors import LayoutError

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]

SHARDINGS: tuple[Sharding, ...] = typing.get_args(Sharding)
_BY_ZERO: dict[Any, Sharding | None] = {1: None, 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


def in_our_words(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the keys of a layout with ``hsdp`` and ``zero``, which others use, as ``dp`` and ``fsdp_sharding``.

    Raises:
        LayoutError: A name is not known, or two contradict each other.
    """
    found = dict(values)
    hsdp, zero = found.pop("hsdp", None), found.pop("zero", None)
    if hsdp is not None and found.setdefault("dp", hsdp) != hsdp:
        raise LayoutError(f"layout hsdp={hsdp} with dp={found['dp']}: both give the ranks; remove dp")
    if zero not in (None, *_BY_ZERO):
        raise LayoutError(f"layout zero={zero!r}: expected 1, 2 or 3")
    names = [found.get("fsdp_sharding"), None if hsdp is None else "HYBRID_SHARD", _BY_ZERO.get(zero)]
    asked = {name for name in names if name is not None}
    if len(asked) > 1 or (zero == 1 and (asked or found.get("fsdp", 1) != 1)):
        raise LayoutError(
            "layout: fsdp, fsdp_sharding, hsdp and zero ask for different shardings; keep one of the keys"
        )
    return {**found, "fsdp_sharding": asked.pop()} if asked else found


def settle_sharding(dp: int, fsdp: int, sharding: Sharding | None) -> tuple[int, int, Sharding | None]:
    """Return ``dp``, ``fsdp``, and a sharding that these two do not say.

    That is ``SHARD_GRAD_OP``, or ``HYBRID_SHARD`` while the size of a node is not known.

    Args:
        dp: Data-parallel ranks; 1: not given.
        fsdp: Ranks that share a parameter; 1: not given.
        sharding: PyTorch's name.

    Raises:
        LayoutError: The name is not known, or the sizes contradict each other.
    """
    if sharding not in (None, *SHARDINGS):
        raise LayoutError(f"layout fsdp_sharding={sharding!r}: expected one of {', '.join(SHARDINGS)}")
    dp = fsdp if dp == 1 else dp
    if sharding in ("FULL_SHARD", "SHARD_GRAD_OP") and fsdp == 1:
        fsdp = dp
    if dp % fsdp:
        raise LayoutError(f"layout fsdp={fsdp} with dp={dp}: expected a dp that is a multiple of fsdp")
    # A shard of one rank is the whole; a hybrid whose parts are known needs no name.
    is_named = fsdp > 1 if sharding == "SHARD_GRAD_OP" else sharding == "HYBRID_SHARD" and fsdp == 1 < dp
    return dp, fsdp, sharding if is_named else None
