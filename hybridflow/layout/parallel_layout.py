"""How many ways a model is cut. Pure arithmetic: no torch, so that a login node can use it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from hybridflow.errors import LayoutError
from hybridflow.layout.sharding import Sharding, in_our_words, settle_sharding

AXES = ("tp", "pp", "dp", "cp", "ep", "vpp")

_PART = re.compile(r"(tp|pp|dp|cp|ep|vpp|etp|fsdp|hsdp|zero)([0-9]{1,9})|(layers)([0-9]{1,9}(?:-[0-9]{1,9})*)")

MOST_RANKS = 1 << 16
"""Ranks are listed one by one."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Set how many ways a model is cut along each axis.

    Attributes:
        tp: Tensor-parallel size: ranks that share each matrix.
        pp: Pipeline-parallel size: ranks that share the stack of layers.
        dp: Data-parallel size: replicas of the model.
        cp: Context-parallel size: ranks that share one sequence.
        ep: Expert-parallel size. It adds no ranks: ``etp * ep`` divides the ``tp * cp * dp`` ranks of a stage. It also
            divides ``tp * cp``, or is a multiple of it.
        vpp: Virtual pipeline chunks on each stage. They add no ranks. Above 1, ``pp`` must be above 1 too.
        etp: Tensor-parallel size inside each expert. None means ``tp``.
        layers: Layers of each pipeline stage. If vpp > 1, layers of each of the ``pp * vpp`` virtual stages, in order.
            ``auto`` balances the stages by the operations of layers and output layer. None means equally many.
        fsdp: Ranks that share each parameter under PyTorch FSDP. It adds no ranks to ``dp``, which it divides;
            ``{fsdp: 8}`` alone means ``dp: 8`` too.
        fsdp_sharding: ``FULL_SHARD`` shards parameters, gradients and optimizer state over all ``dp`` ranks.
            ``SHARD_GRAD_OP`` keeps the parameters gathered from the forward to the backward pass. ``HYBRID_SHARD``
            shards within each node and replicates over the nodes. None means ``FULL_SHARD`` if ``fsdp`` is given. The
            keys ``hsdp`` and ``zero`` are other words for it: see docs/fsdp.md.
        sequence_parallel: Split activations between the tensor-parallel matrices by tokens over the ``tp`` ranks. None
            means true. It has no effect if ``tp`` is 1, and while responses are generated. It cuts no weight, so that
            layouts that differ in it alone are equal.

    Raises:
        LayoutError: A size is not a positive integer, or sizes contradict each other.
    """

    EXAMPLE: ClassVar[str] = "{tp: 2, dp: 8}"

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    etp: int | None = None
    layers: tuple[int, ...] | Literal["auto"] | None = None
    fsdp: int = 1
    fsdp_sharding: Sharding | None = None
    sequence_parallel: bool | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for axis in (*AXES, "etp", "fsdp"):
            size = getattr(self, axis)
            if size is None and axis == "etp":
                continue
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_RANKS:
                raise LayoutError(f"layout {axis}={size!r}: expected an integer of at least 1 and at most {MOST_RANKS}")
        self._settle_sharding()
        if self.world_size > MOST_RANKS:
            raise LayoutError(
                f"layout tp·pp·dp·cp = {self.world_size} ranks: expected at most {MOST_RANKS}; lower one of the sizes"
            )
        if self.tp * self.cp * self.dp % (self.expert_tp * self.ep):
            raise LayoutError(
                f"layout ep={self.ep} with etp={self.expert_tp}: their product does not divide the "
                f"tp·cp·dp = {self.tp * self.cp * self.dp} ranks of a stage; choose an ep or etp that does"
            )
        sharers, replica = self.expert_tp * self.ep, self.tp * self.cp
        if replica % sharers and sharers % replica:
            # Replicas take part in each other's micro-batches by groups of sharers, which would hold parts of replicas.
            raise LayoutError(
                f"layout tp={self.tp} cp={self.cp} with ep={self.ep} etp={self.expert_tp}: the etp·ep = {sharers} "
                f"ranks that share experts are no whole number of replicas of tp·cp = {replica} ranks, nor part of "
                "one; choose an ep or etp with which one of the two products divides the other"
            )
        if isinstance(self.layers, tuple) and (len(self.layers) != self.pp * self.vpp or min(self.layers) < 0):
            raise LayoutError(
                f"layout layers={list(self.layers)}: expected pp·vpp = {self.pp * self.vpp} numbers of layers"
            )

    def _settle_sharding(self) -> None:
        """Turn every name of a sharding into ``dp``, ``fsdp`` and what these do not say: equals compare equal."""
        settled = settle_sharding(self.dp, self.fsdp, self.fsdp_sharding)
        for name, value in zip(("dp", "fsdp", "fsdp_sharding"), settled, strict=True):
            object.__setattr__(self, name, value)
        others = [axis for axis in ("tp", "pp", "cp", "ep", "vpp") if getattr(self, axis) > 1]
        others += [axis for axis in ("etp", "layers") if getattr(self, axis) is not None]
        if self.is_sharded and others:
            raise LayoutError(
                f"layout fsdp with {others[0]}={getattr(self, others[0])}: FSDP shards whole layers over data-parallel "
                f"ranks alone; remove {others[0]}, or use dp in the place of fsdp"
            )

    @property
    def is_sharded(self) -> bool:
        """Return whether PyTorch FSDP shards the parameters."""
        return self.fsdp > 1 or self.fsdp_sharding is not None

    @property
    def keeps_gathered(self) -> bool:
        """Return whether FSDP keeps parameters gathered from the forward to the backward pass."""
        return self.fsdp_sharding == "SHARD_GRAD_OP"

    @property
    def splits_sequences(self) -> bool:
        """Return whether tensor-parallel ranks split activations by tokens outside of decoding."""
        return self.tp > 1 and self.sequence_parallel is not False

    def on_nodes(self, ranks_per_node: int) -> ParallelLayout:
        """Return the layout with ``HYBRID_SHARD`` as numbers: as many ranks share a parameter as a node has.

        Raises:
            LayoutError: Nodes and replicas have no common divisor.
        """
        if self.fsdp_sharding != "HYBRID_SHARD":
            return self
        within = math.gcd(self.dp, ranks_per_node)
        if within == 1:
            raise LayoutError(
                f"layout fsdp_sharding=HYBRID_SHARD: a node has {ranks_per_node} of {self.dp} ranks, and nothing is "
                "shared within it; use FULL_SHARD, or set fsdp"
            )
        return replace(self, fsdp=within, fsdp_sharding=None)

    def without_sharding(self) -> ParallelLayout:
        """Return the layout with whole parameters on every data-parallel rank."""
        return replace(self, fsdp=1, fsdp_sharding=None)

    def check_generates(self, owner: str) -> None:
        """Refuse a layout in which no rank has whole sequences, or whole layers.

        Raises:
            LayoutError: ``cp`` or ``vpp`` is above 1, or FSDP shards parameters.
        """
        if self.is_sharded:
            raise LayoutError(
                f"{owner}: {self}: a rollout needs whole layers; use tp, pp and dp there, and keep fsdp in actor.update"
            )
        if self.cp > 1:
            raise LayoutError(
                f"{owner}: {self}: a rollout needs whole sequences; set cp=1 and dp={self.dp * self.cp} there, and "
                "keep cp in actor.update"
            )
        if self.vpp > 1:
            raise LayoutError(
                f"{owner}.vpp={self.vpp}: a rollout has no backward pass to interleave; set vpp=1 with pp={self.pp}, "
                "and the weights are resharded from actor.update"
            )

    @property
    def expert_tp(self) -> int:
        """Return the tensor parallel size inside each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        """Return the number of ranks that the layout fills: ``tp * pp * dp * cp``."""
        return self.tp * self.pp * self.dp * self.cp

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read ``"tp2.pp1.dp4"``; axes may come in any order, and those left out are 1.

        Uneven stages are written ``"pp2.layers3-5"``. Left out beside ``ep``, ``dp`` is as large as the experts need.

        Raises:
            LayoutError: The text is not such a list, or names an axis twice.
        """
        sizes: dict[str, Any] = {}
        for part in text.split("."):
            # More digits are in no number that fits.
            match = _PART.fullmatch(part)
            axis = None if match is None else match[1] or match[3]
            if match is None or axis is None or axis in sizes:
                raise LayoutError(f"layout {text!r}: cannot read {part!r}; expected for instance 'tp2.pp1.dp4'")
            sizes[axis] = int(match[2]) if match[1] else tuple(map(int, match[4].split("-")))
        if sizes.keys() <= {*AXES, "etp", "layers"} - {"dp"}:
            ranks, experts = sizes.get("tp", 1) * sizes.get("cp", 1), sizes.get("etp", sizes.get("tp", 1))
            experts *= sizes.get("ep", 1)
            sizes["dp"] = max(1, experts // (math.gcd(experts, ranks) or 1))
        return cls(**in_our_words(sizes))

    @classmethod
    def as_section(cls, text: str) -> str | None:
        """Return how a recipe writes ``"tp2.pp2"``, which is ``"{tp: 2, pp: 2}"``; None for any other text."""
        try:
            cls.parse(text)
        except LayoutError:
            return None
        sizes = (_PART.fullmatch(part) for part in text.split("."))
        written = (
            f"{size[1]}: {size[2]}" if size[1] else f"layers: [{size[4].replace('-', ', ')}]" for size in sizes if size
        )
        return f"{{{', '.join(written)}}}"

    in_our_words = staticmethod(in_our_words)

    def __str__(self) -> str:
        extra = "".join(f".{axis}{getattr(self, axis)}" for axis in ("cp", "ep", "vpp") if getattr(self, axis) > 1)
        extra += "" if self.etp is None else f".etp{self.etp}"
        layers = self.layers if isinstance(self.layers, str | None) else "-".join(map(str, self.layers))
        extra += "" if layers is None else f".layers{layers}"
        extra += f".fsdp{self.fsdp}" if self.fsdp > 1 else f".hsdp{self.dp}" if self.is_sharded else ""
        extra += ".zero2" if self.keeps_gathered else ""
        return f"tp{self.tp}.pp{self.pp}.dp{self.dp}{extra}"

    def layer_counts(self, num_layers: int, name: str) -> tuple[int, ...]:
        """Return the layers of each of the ``pp * vpp`` virtual stages; chunk ``c`` of stage ``s`` is ``c * pp + s``.

        Args:
            num_layers: Layers of the model.
            name: Name of the layout's owner, or of what is cut, for the message.

        Raises:
            LayoutError: The layers cannot be dealt to the stages.
        """
        num_stages, which = self.pp * self.vpp, "pp" if self.vpp == 1 else "pp·vpp"
        if self.layers is None:
            if num_layers % num_stages:
                raise LayoutError(
                    f"{name}: {num_layers} layers cannot be dealt to {which}={num_stages} equal stages; choose one "
                    f"that divides {num_layers}, or give the layers of each stage, layers: [...] or auto"
                )
            return (num_layers // num_stages,) * num_stages
        if self.layers == "auto":
            raise LayoutError(f"{name}: layers=auto is settled where a recipe is read; give a list of numbers here")
        if sum(self.layers) != num_layers:
            raise LayoutError(
                f"{name}: layout {self} has {sum(self.layers)} layers, the model {num_layers}; make the two equal"
            )
        return self.layers

    def for_rollout(self) -> ParallelLayout:
        """Return the layout in which a model generates that learns in this one: whole layers, in one piece.

        Context-parallel ranks and shards are replicas.

        Raises:
            LayoutError: Replicas and ranks that share experts do not fit without ``cp``.
        """
        layers = self.layers
        if isinstance(layers, tuple):
            layers = tuple(sum(layers[stage :: self.pp]) for stage in range(self.pp))
        try:
            return replace(self.without_sharding(), cp=1, dp=self.dp * self.cp, vpp=1, layers=layers)
        except LayoutError as error:
            raise LayoutError(f"the rollout of layout {self}: {error}; or set actor.rollout") from None

    def check_fits(self, num_ranks: int, owner: str) -> None:
        """Refuse ranks that this layout does not fill exactly.

        Args:
            num_ranks: Ranks that the mesh has.
            owner: Name of the layout's owner, for the message (``"actor.update"``).

        Raises:
            LayoutError: ``world_size`` differs from ``num_ranks``; the message says what would fit.
        """
        if self.world_size == num_ranks:
            return
        factors = " × ".join(f"{axis} {getattr(self, axis)}" for axis in ("tp", "pp", "dp", "cp"))
        model_size = self.tp * self.pp * self.cp
        if self.is_sharded:
            remedy = f"set fsdp={num_ranks}, or dp={num_ranks} with an fsdp that divides it"
        elif num_ranks % model_size == 0:
            remedy = f"set dp={num_ranks // model_size}, or give it {self.world_size} ranks"
        else:
            sizes = ", ".join(str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0)
            remedy = f"choose tp·pp·cp among {sizes} (and dp = {num_ranks} / that), or give it {self.world_size} ranks"
        raise LayoutError(f"{owner}: {factors} = {self.world_size} ≠ {num_ranks} ranks; {remedy}")

    def check_trainable(self, owner: str) -> None:
        """Refuse by name the axes that this version describes but cannot train with.

        Raises:
            LayoutError: There is nothing to interleave.
        """
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"{owner}.vpp={self.vpp}: virtual chunks interleave pipeline stages, and pp=1 has one stage; set "
                "vpp=1, or pp to 2 or more"
            )
