"""How many ways a model is cut. Pure arithmetic: no torch, so that a login node can use it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from hybridflow.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How many ways a model is cut along each axis.

    Attributes:
        tp: Tensor parallel size: ranks that share each matrix.
        pp: Pipeline parallel size: ranks that share the stack of layers.
        dp: Data parallel size: replicas of the model.
        cp: Context parallel size: ranks that share one sequence.
        ep: Expert parallel size; divides ``dp * cp``, so it adds no ranks.
        vpp: Virtual pipeline chunks on each stage; adds no ranks.

    Raises:
        LayoutError: A size is not a positive integer.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"layout {field.name}={size!r}: expected an integer of at least 1")

    @property
    def world_size(self) -> int:
        """Ranks that the layout fills: ``tp * pp * dp * cp``."""
        return self.tp * self.pp * self.dp * self.cp

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read ``"tp2.pp1.dp4"``; axes may come in any order, and those left out are 1.

        Raises:
            LayoutError: The text is not such a list, or names an axis twice.
        """
        sizes: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"(tp|pp|dp|cp|ep|vpp)([0-9]+)", part)
            if match is None or match[1] in sizes:
                raise LayoutError(f"layout {text!r}: cannot read {part!r}; expected for instance 'tp2.pp1.dp4'")
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    def __str__(self) -> str:
        extra = "".join(f".{axis}{getattr(self, axis)}" for axis in ("cp", "ep", "vpp") if getattr(self, axis) > 1)
        return f"tp{self.tp}.pp{self.pp}.dp{self.dp}{extra}"

    def check_fits(self, num_ranks: int, owner: str) -> None:
        """Refuse ranks that this layout does not fill exactly.

        Args:
            num_ranks: Ranks that the mesh has.
            owner: Whose layout this is, for the message (``"actor.update"``).

        Raises:
            LayoutError: ``world_size`` differs from ``num_ranks``; the message says what would fit.
        """
        if self.world_size == num_ranks:
            return
        factors = " × ".join(f"{axis} {getattr(self, axis)}" for axis in ("tp", "pp", "dp", "cp"))
        model_size = self.tp * self.pp * self.cp
        if num_ranks % model_size == 0:
            remedy = f"set dp={num_ranks // model_size}, or give it {self.world_size} ranks"
        else:
            sizes = ", ".join(str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0)
            remedy = f"choose tp·pp·cp among {sizes} (and dp = {num_ranks} / that), or give it {self.world_size} ranks"
        raise LayoutError(f"{owner}: {factors} = {self.world_size} ≠ {num_ranks} ranks; {remedy}")

    def check_trainable(self, owner: str) -> None:
        """Refuse by name the axes that this version describes but cannot train with.

        Raises:
            LayoutError: ``cp``, ``ep`` or ``vpp`` is above 1.
        """
        for axis, what in (("cp", "context"), ("ep", "expert"), ("vpp", "virtual pipeline")):
            size = getattr(self, axis)
            if size > 1:
                raise LayoutError(
                    f"{owner}.{axis}={size}: {what} parallelism cannot be trained yet; "
                    f"set {axis}=1 and use tp, pp and dp"
                )
