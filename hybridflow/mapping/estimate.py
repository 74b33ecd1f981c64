"""The time of a training step and of decoding on described hardware, from a few formulas. No torch.

Products take the larger of their operations and their bytes; what a rank waits for is added. ``mapping.hardware`` has
the figures, and docs/mapping.md how far the results are from published measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.config.types import Recompute
from hybridflow.errors import ConfigError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.hardware import RANKS_PER_NODE, Hardware

_BYTES = 2
_FP32 = 4
_BACKWARD_ATTENTION = 2.5
"""Fused attention computes five products backward for two forward (arXiv 2205.14135)."""
_OPTIMIZER_BYTES = 32
"""Read and written for each parameter: gradient, master weight, two moments in fp32, and the bf16 weight."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a dense model that decide its time.

    Attributes:
        layers: Transformer layers.
        hidden: Width of the activations between layers.
        heads: Query heads.
        groups: Key/value heads.
        head: Width of each head.
        ffn: Width inside each feed-forward block.
        vocab: Vocabulary.
        gated: Whether feed-forward blocks have a gate.
        tied: Whether input and output embedding are one.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int, bool], ...]:
        """Return inputs, outputs, and whether the outputs are cut by tp, of each product of a layer."""
        inner = self.heads * self.head
        return (
            (self.hidden, inner + 2 * self.groups * self.head, True),
            (inner, self.hidden, False),
            (self.hidden, self.ffn * (1 + self.gated), True),
            (self.ffn, self.hidden, False),
        )

    @property
    def layer_weights(self) -> int:
        """Return the weights of a layer, without norms and biases."""
        return sum(inputs * outputs for inputs, outputs, _ in self.matrices)

    @property
    def table_weights(self) -> int:
        """Return the weights of one embedding."""
        return self.vocab * self.hidden

    @property
    def cached_bytes(self) -> int:
        """Return the keys and values of a token in all layers, in bf16."""
        return 2 * self.layers * self.groups * self.head * _BYTES

    def training_flops(self, tokens: int, sequence: int) -> float:
        """Return the operations of forward and backward passes as Megatron-LM counts them.

        Attention counts whole, not its causal half, and nothing counts for recomputation (arXiv 2104.04473).
        """
        layer = 2 * self.layer_weights + 4 * sequence * self.heads * self.head
        return 3 * tokens * (self.layers * layer + 2 * self.table_weights)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What a training step does.

    Attributes:
        layout: With all sizes: dp too.
        sequence: Tokens of each sequence.
        batch: Sequences of a step.
        micro_batch: Sequences of a micro-batch.
        recompute: What the backward pass computes anew.
    """

    layout: ParallelLayout
    sequence: int
    batch: int
    micro_batch: int
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        """Refuse what cannot be cut.

        Raises:
            ConfigError: The layout has what is not estimated, or does not divide the batch.
        """
        layout = self.layout
        left_out = layout.ep > 1 or layout.etp is not None or layout.fsdp > 1 or layout.layers is not None
        if left_out:
            raise ConfigError(f"--layout {layout}: ep, etp, fsdp and layers are not estimated yet; leave them out")
        if self.batch % (self.layout.dp * self.micro_batch):
            raise ConfigError(
                f"--batch {self.batch}: dp={self.layout.dp} times --micro-batch {self.micro_batch} does not divide it"
            )

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of each replica."""
        return self.batch // (self.layout.dp * self.micro_batch)


def train_seconds(size: Size, hardware: Hardware, step: TrainStep) -> dict[str, float]:
    """Return the seconds of a training step by what takes them; they add up to the step."""
    layout, number = step.layout, step.num_micro_batches
    layers = math.ceil(size.layers / layout.pp)
    first = _layer(size, hardware, step)
    again = {"none": {}, "selective": {"attention": first["attention"]}, "full": first}[step.recompute]
    parts = {name: first[name] + again.get(name, 0.0) for name in first}
    parts["products"] += 2 * first["products"]
    parts["attention"] += _BACKWARD_ATTENTION * first["attention"]
    parts["elementwise"] += 1.5 * first["elementwise"]
    for name in ("tensor parallel", "context parallel"):
        parts[name] += first[name]
    ends = _ends(size, hardware, step)
    found = {name: number * layers * value for name, value in parts.items()}
    for name, value in ends.items():
        found[name] += number * value
    a_micro_batch = layers * sum(parts.values()) + sum(ends.values()) / layout.pp
    found["bubble"] = (layout.pp - 1) / layout.vpp * a_micro_batch
    found["pipeline messages"] = _messages(size, hardware, step)
    weights = layers * size.layer_weights / layout.tp + size.table_weights / layout.tp
    found["data parallel"] = _data_parallel(hardware, layout, weights, a_micro_batch)
    sharers = layout.dp * layout.cp
    found["optimizer"] = weights / sharers * _OPTIMIZER_BYTES / (hardware.memory_bandwidth * hardware.memory_share)
    return found


def decode_seconds(size: Size, hardware: Hardware, tp: int, concurrent: int, context: float) -> dict[str, float]:
    """Return the seconds of one token of each of ``concurrent`` texts that are ``context`` tokens long, by part."""
    bandwidth = hardware.memory_bandwidth
    matrices = [(i if is_cut else i / tp, o / tp if is_cut else o) for i, o, is_cut in size.matrices]
    layer = sum(_product(hardware, concurrent, inputs, outputs) for inputs, outputs in matrices)
    reduced = _collective(hardware, tp, concurrent * size.hidden * _BYTES, is_summed=True)
    cut_groups = max(size.groups / tp, 1) / size.groups
    cached = concurrent * context * size.cached_bytes * cut_groups
    return {
        "products": size.layers * layer + _product(hardware, concurrent, size.hidden, size.vocab / tp),
        "attention": cached / (bandwidth * hardware.cache_share),
        "tensor parallel": 2 * size.layers * reduced,
        "launches": size.layers * hardware.launch,
    }


def prefill_seconds(size: Size, hardware: Hardware, tp: int, tokens: int) -> float:
    """Return the seconds until a prompt of ``tokens`` has its first token."""
    step = TrainStep(layout=ParallelLayout(tp=tp), sequence=tokens, batch=1, micro_batch=1)
    layer = sum(_layer(size, hardware, step).values())
    return size.layers * (layer + hardware.launch) + _product(hardware, 1, size.hidden, size.vocab / tp)


def _layer(size: Size, hardware: Hardware, step: TrainStep) -> dict[str, float]:
    """Return the seconds of a layer's forward pass of a micro-batch."""
    layout = step.layout
    tp, tokens = layout.tp, step.micro_batch * step.sequence / layout.cp
    products = sum(
        _product(hardware, tokens, inputs if is_cut else inputs / tp, outputs / tp if is_cut else outputs)
        for inputs, outputs, is_cut in size.matrices
    )
    # A token sees half of its sequence on average.
    scores = 2 * tokens * step.sequence * size.heads * size.head / tp
    # Read or written: norms and residual sums between the products, and the activation within the block.
    touched = 12 * size.hidden / tp + (3 + size.gated) * size.ffn / tp + 3 * size.heads * size.head / tp
    # Gathered before two products, scattered as they are summed behind two others: two of each, as two sums.
    passed = 2 * _collective(hardware, tp, tokens * size.hidden * _BYTES, is_summed=True)
    keys = 2 * tokens * layout.cp * size.groups * size.head / tp * _BYTES
    return {
        "products": products,
        "attention": scores / (hardware.flops * hardware.attention_share),
        "elementwise": tokens * touched * _BYTES / (hardware.memory_bandwidth * hardware.elementwise_share),
        "tensor parallel": passed,
        "context parallel": _collective(hardware, layout.cp, keys, step=tp),
    }


def _ends(size: Size, hardware: Hardware, step: TrainStep) -> dict[str, float]:
    """Return the seconds of logits and loss of a micro-batch, forward and backward, on the last stage."""
    tokens = step.micro_batch * step.sequence / step.layout.cp
    columns = size.vocab / step.layout.tp
    # Written in bf16, turned to fp32, read for their largest and their sum, and the gradient the same way back.
    touched = tokens * columns * 6 * _FP32
    return {
        "products": 3 * _product(hardware, tokens, size.hidden, columns),
        "elementwise": touched / (hardware.memory_bandwidth * hardware.elementwise_share),
    }


def _product(hardware: Hardware, rows: float, inputs: float, outputs: float) -> float:
    """Return the seconds of a product of ``[rows, inputs]`` and ``[inputs, outputs]``."""
    half = hardware.half_size
    share = hardware.product_share * inputs / (inputs + half) * outputs / (outputs + half)
    moved = (rows * inputs + inputs * outputs + rows * outputs) * _BYTES
    return max(
        2 * rows * inputs * outputs / (hardware.flops * share),
        moved / (hardware.memory_bandwidth * hardware.memory_share),
    )


def _collective(hardware: Hardware, ranks: int, num_bytes: float, *, step: int = 1, is_summed: bool = False) -> float:
    """Return the seconds in which ``ranks`` gather ``num_bytes``, or sum them and gather the sums.

    A ring that enters a node on several of its ranks uses the network links of all of them.

    Args:
        hardware: Where.
        ranks: Of the group.
        num_bytes: Of the whole.
        step: Distance of neighbors of the group.
        is_summed: Twice the way: scattered sums and gathered results.
    """
    if ranks == 1:
        return 0.0
    here = max(RANKS_PER_NODE // step, 1)
    is_within = ranks <= here
    bandwidth = hardware.node_bandwidth * hardware.node_share
    if not is_within:
        bandwidth = min(bandwidth, here * hardware.network_bandwidth * hardware.network_share)
    latency = hardware.node_latency if is_within else hardware.network_latency * math.log2(ranks / here + 1)
    ways = 1 + is_summed
    return ways * (num_bytes * (ranks - 1) / ranks / bandwidth) + latency


def _messages(size: Size, hardware: Hardware, step: TrainStep) -> float:
    """Return the seconds for which stages wait for activations and gradients."""
    layout = step.layout
    if layout.pp == 1:
        return 0.0
    passed = step.micro_batch * step.sequence / layout.cp * size.hidden / layout.tp * _BYTES
    is_within = layout.world_size <= RANKS_PER_NODE
    bandwidth = hardware.network_bandwidth * hardware.network_share
    if is_within:
        bandwidth = hardware.node_bandwidth * hardware.node_share
    latency = hardware.node_latency if is_within else hardware.network_latency
    return 2 * layout.vpp * (step.num_micro_batches + layout.pp - 1) * (passed / bandwidth + latency)


def _data_parallel(hardware: Hardware, layout: ParallelLayout, weights: float, a_micro_batch: float) -> float:
    """Return the seconds of sums of gradients and gathered weights that the passes do not hide."""
    ranks, step = layout.dp * layout.cp, layout.tp
    summed = _collective(hardware, ranks, weights * _FP32, step=step)
    gathered = _collective(hardware, ranks, weights * _BYTES, step=step)
    return max(summed - 2 / 3 * a_micro_batch, 0.1 * summed) + max(gathered - a_micro_batch / 3, 0.1 * gathered)


def train_bytes(size: Size, step: TrainStep) -> dict[str, dict[str, float]]:
    """Return the bytes of a rank by its stage (``first``, ``middle``, ``last``) and by what they are for.

    bf16 weights, gradients summed in fp32, fp32 master weights and two moments cut over dp and cp. Activations as arXiv
    2205.05198 counts them, without dropout and with fused attention, cut over tp by sequence parallelism.
    """
    layout = step.layout
    layers = math.ceil(size.layers / layout.pp)
    tokens = step.micro_batch * step.sequence / layout.cp
    found = {}
    for name, stage in _stages(layout.pp).items():
        is_first, is_last = stage == 0, stage == layout.pp - 1
        tables = is_first + is_last - (is_first and is_last and size.tied)
        weights = (layers * size.layer_weights + tables * size.table_weights) / layout.tp
        inputs = tokens * size.hidden * _BYTES / layout.tp
        of_a_layer = tokens * _kept_elements(size) * _BYTES / layout.tp
        of_a_stage = layers * (inputs if step.recompute == "full" else of_a_layer)
        working = of_a_layer if step.recompute == "full" else 0.0
        logits = tokens * size.vocab / layout.tp * (_BYTES + _FP32) if is_last else 0.0
        found[name] = {
            "weights": weights * _BYTES,
            "gradients": weights * _FP32,
            "optimizer": 3 * weights * _FP32 / (layout.dp * layout.cp),
            "activations": of_a_stage * _under_way(step, stage) + working + logits,
        }
    return found


def decode_bytes(size: Size, tp: int, concurrent: int, context: int) -> dict[str, float]:
    """Return a rank's bytes by what they are for, of ``concurrent`` texts of up to ``context`` tokens."""
    weights = size.layers * size.layer_weights + (2 - size.tied) * size.table_weights
    cut_groups = max(size.groups / tp, 1) / size.groups
    return {"weights": weights * _BYTES / tp, "cache": concurrent * context * size.cached_bytes * cut_groups}


def _stages(pp: int) -> dict[str, int]:
    return {"first": 0, **({"middle": 1} if pp > 2 else {}), **({"last": pp - 1} if pp > 1 else {})}


def _kept_elements(size: Size) -> float:
    """Return what a layer keeps of a token for the backward pass: inputs of norms, products and activation."""
    heads = 2 * size.heads * size.head + 2 * size.groups * size.head
    return 4 * size.hidden + heads + (2 + size.gated) * size.ffn


def _under_way(step: TrainStep, stage: int) -> float:
    """Return how many micro-batches' activations a stage keeps at one time (1F1B, interleaved where vpp > 1)."""
    pp, vpp = step.layout.pp, step.layout.vpp
    chunks = (vpp - 1) * pp + 2 * (pp - stage - 1) + 1 if vpp > 1 else pp - stage
    return min(step.num_micro_batches, chunks / vpp)
