"""The time of a training step and of decoding on described hardware, from a few formulas. No torch.

Products take the larger of their operations and their bytes; what a rank waits for is added. ``mapping.hardware`` has
the figures, and docs/mapping.md how far the results are from published measurements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from hybridflow.config.types import Recompute
from hybridflow.errors import ConfigError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.sizes import Matrix, Size, attention_of, widths_of

_FP32 = 4
_BACKWARD_ATTENTION = 2.5
"""Fused attention computes five products backward for two forward (arXiv 2205.14135)."""
_CAST_ITEMS = 2
"""What FP8 touches for each number that a product takes in, in bf16 numbers: it is read, and written twice in FP8, once
transposed."""
_STEPPED_BYTES = 28
"""Read and written for each parameter by the optimizer: gradient, weight and two moments in fp32."""


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What a training step does.

    Attributes:
        layout: With all sizes: dp too.
        sequence: Tokens of each sequence.
        batch: Sequences of a step.
        micro_batch: Sequences of a micro-batch.
        recompute: What the backward pass computes anew.
        recompute_layers: With ``full`` so many of a stage's layers; None: all.
        fp8: Whether the products of layers compute in FP8. Attention, router and output layer do not.
    """

    layout: ParallelLayout
    sequence: int
    batch: int
    micro_batch: int
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be cut.

        Raises:
            ConfigError: The layout has what is not estimated, or does not divide the batch.
        """
        layout = self.layout
        if layout.is_sharded or layout.layers == "auto":
            raise ConfigError(f"layout {layout}: fsdp and layers: auto are not estimated yet; leave them out")
        if self.batch % (self.layout.dp * self.micro_batch):
            raise ConfigError(
                f"--batch {self.batch}: dp={self.layout.dp} times --micro-batch {self.micro_batch} does not divide it; "
                f"choose a multiple of {self.layout.dp * self.micro_batch}"
            )

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of each replica."""
        return self.batch // (self.layout.dp * self.micro_batch)

    def num_anew(self, layers: int) -> int:
        """Return how many of a stage's ``layers`` are computed anew whole."""
        if self.recompute != "full":
            return 0
        return layers if self.recompute_layers is None else min(layers, self.recompute_layers)


def _layers_of(size: Size, layout: ParallelLayout, stage: int) -> int:
    """Return the layers of a stage, those of all its virtual chunks."""
    if layout.layers is None or layout.layers == "auto":
        return math.ceil(size.model.num_layers / layout.pp)
    return sum(layout.layers[stage :: layout.pp])


def _sparse_of(size: Size, layout: ParallelLayout, stage: int) -> int:
    """Return the layers of a stage that have experts; the first stage has those without, as far as it has layers."""
    layers = _layers_of(size, layout, stage)
    if size.model.num_experts is None:
        return 0
    return max(0, layers - max(0, size.model.num_dense_layers - stage * layers))


def _most_layers(size: Size, layout: ParallelLayout) -> int:
    return max(_layers_of(size, layout, stage) for stage in range(layout.pp))


def train_seconds(size: Size, hardware: Hardware, step: TrainStep) -> dict[str, float]:
    """Return the seconds of a training step by what takes them; they add up to the step."""
    layout, number = step.layout, step.num_micro_batches
    layers = _most_layers(size, layout)
    first = _layer(size, hardware, step)
    anew = {name: step.num_anew(layers) / layers * value for name, value in first.items()}
    again = {"none": {}, "selective": {"attention": first["attention"]}, "full": anew}[step.recompute]
    parts = {name: first[name] + again.get(name, 0.0) for name in first}
    parts["products"] += 2 * first["products"]
    parts["attention"] += _BACKWARD_ATTENTION * first["attention"]
    parts["elementwise"] += 1.5 * first["elementwise"]
    for name in ("tensor parallel", "context parallel", "expert parallel"):
        parts[name] += first[name]
    parts["launches"] += 2 * first["launches"]
    ends = _ends(size, hardware, step)
    found = {name: number * layers * value for name, value in parts.items()}
    for name, value in ends.items():
        found[name] += number * value
    a_micro_batch = layers * sum(parts.values()) + sum(ends.values()) / layout.pp
    found["bubble"] = _waiting(hardware, layout, number, learns=True) * a_micro_batch
    found["pipeline messages"] = _messages(size, hardware, step)
    # With stages, one has the embedding and another the output layer.
    tables = size.table_weights if layout.pp > 1 or size.tied else 2 * size.table_weights
    dense = _dense_weights(size, layers, tables, layout.tp)
    experts = layers * size.expert_weights / (layout.ep * layout.expert_tp)
    found["data parallel"] = _data_parallel(size, hardware, layout, dense, experts, a_micro_batch)
    kept = _kept_parameters(layout, dense, experts)
    # A bf16 weight is written beside its fp32 master.
    stepped = _STEPPED_BYTES + (_FP32 if size.item_bytes < _FP32 else 0)
    stepping = kept * stepped / (hardware.memory_bandwidth * hardware.memory_share)
    # The embeddings and the output layer are as much as one layer.
    found["optimizer"] = stepping + (layers + 1 / layout.pp) * hardware.update_launch
    return found


def forward_seconds(size: Size, hardware: Hardware, step: TrainStep) -> float:
    """Return the seconds of a forward pass over the batch of ``step``, as for log-probabilities or values."""
    layout = step.layout
    ends = _ends(size, hardware, step)
    layer = sum(_layer(size, hardware, step).values())
    a_stage = _most_layers(size, layout) * layer
    number = step.num_micro_batches
    passes = (number + _waiting(hardware, layout, number, learns=False)) * a_stage + number * sum(ends.values()) / 3
    return passes + _messages(size, hardware, step) / 2


def decode_seconds(
    size: Size, hardware: Hardware, layout: ParallelLayout, concurrent: float, context: float, *, fp8: bool = False
) -> dict[str, float]:
    """Return the seconds of one token of each of a replica's ``concurrent`` texts, by part.

    Args:
        size: The model.
        hardware: Where.
        layout: tp, and ep where replicas share experts.
        concurrent: Texts of each replica.
        context: Tokens that each of them has.
        fp8: Whether the weights of layers and the cache are in FP8.
    """
    tp, layers = layout.tp, size.model.num_layers
    layer = _layer_products(size, hardware, layout, concurrent, fp8=fp8)
    # Keys and values are read; states are read and written.
    cached = concurrent * (context * size.cached_bytes(tp, fp8=fp8) + 2 * size.state_bytes(tp))
    summed, exchanged = _passed(size, hardware, layout, concurrent, is_generating=True)
    # Engines for GPUs do it within other kernels; what that leaves was fitted as launches.
    elementwise = _elementwise(size, hardware, layout, concurrent) if hardware.is_cpu else 0.0
    return {
        "products": layers * layer + _token_product(size, hardware, concurrent, tp),
        "elementwise": layers * elementwise,
        "attention": cached / (hardware.memory_bandwidth * hardware.cache_share),
        "tensor parallel": layers * summed,
        "expert parallel": layers * exchanged,
        "launches": layers * (hardware.launch + fp8 * hardware.cast_launch),
    }


def prefill_seconds(
    size: Size, hardware: Hardware, layout: ParallelLayout, tokens: int, prompts: int = 1, *, fp8: bool = False
) -> float:
    """Return the seconds until ``prompts`` of ``tokens`` each, read at once, have their first token.

    Products are not slowed down by what else a training step does, and nothing hides sums over tp.
    """
    step = TrainStep(layout=layout, sequence=tokens, batch=layout.dp * prompts, micro_batch=prompts, fp8=fp8)
    parts = _layer(size, hardware, step)
    parts["products"] /= 1.0 if fp8 else hardware.prompt_share
    passed = _passed(size, hardware, layout, prompts * tokens, is_generating=True)
    parts["tensor parallel"], parts["expert parallel"] = passed
    parts["launches"] = hardware.launch
    return size.model.num_layers * sum(parts.values()) + _token_product(size, hardware, prompts, layout.tp)


def _token_product(size: Size, hardware: Hardware, rows: float, tp: int) -> float:
    """Return the seconds of the output layer for the next token of so many texts."""
    return _product(size, hardware, rows, size.model.hidden_size, size.model.known_vocab_size / tp)


def _waiting(hardware: Hardware, layout: ParallelLayout, number: int, *, learns: bool) -> float:
    """Return for how many micro-batches a stage waits; where ranks share cores, the others work faster meanwhile.

    With virtual chunks ``pp`` micro-batches pass one chunk of all stages before the next. Blank ones, which take no
    time, fill the last of these groups; with ``r`` others it takes as long as a whole one, less ``(pp - r) / vpp``. In
    training behind other groups it is shorter, by the forward passes of a chunk of the blank ones: that is exact with
    two chunks, and with more they save more.

    Args:
        hardware: Where.
        layout: Its pp and vpp.
        number: Micro-batches.
        learns: Whether there are backward passes, which take twice as long as forward passes.
    """
    pp, vpp = layout.pp, layout.vpp
    if pp == 1:
        return 0.0
    waiting = float(pp - 1)
    if vpp > 1:
        blank = -number % pp
        waiting = blank + (pp - blank - 1) / vpp
        waiting -= blank / vpp / 3 if learns and number > pp else 0.0
    return waiting * max(0.0, 1 - (hardware.crowding - 1) / (pp - 1))


def _layer(size: Size, hardware: Hardware, step: TrainStep) -> dict[str, float]:
    """Return the seconds of a layer's forward pass of a micro-batch."""
    layout = step.layout
    tp, tokens = layout.tp, step.micro_batch * step.sequence / layout.cp
    products = _layer_products(size, hardware, layout, tokens, fp8=step.fp8)
    # A token sees half of its sequence on average.
    scored = step.sequence * size.mean_heads(lambda each: each.num_attention_heads * widths_of(each))
    scores = tokens * size.mean_attention(scored, 2 * size.state_products) / tp
    cast = _CAST_ITEMS * _product_inputs(size) if step.fp8 else 0.0
    summed, exchanged = _passed(size, hardware, layout, tokens)
    keys = (
        2 * tokens * layout.cp * size.mean_heads(lambda each: each.query_groups * each.head_size) / tp * size.item_bytes
    )
    parts = {
        "products": products,
        "attention": scores / (hardware.flops * hardware.attention_share),
        "elementwise": _elementwise(size, hardware, layout, tokens, cast),
        "tensor parallel": summed * hardware.exposed_share,
        "context parallel": _collective(hardware, layout.cp, keys, step=tp),
        "expert parallel": exchanged,
    }
    parts["launches"] = _launching(hardware, sum(parts.values())) + size.mean_layer(0, hardware.route_launch)
    return parts


def _launching(hardware: Hardware, computing_s: float) -> float:
    """Return the seconds that kernels add to a layer's forward pass, beside those in which they compute."""
    return hardware.pass_launch + max(0.0, hardware.pass_host - computing_s)


def _elementwise(size: Size, hardware: Hardware, layout: ParallelLayout, tokens: float, others: float = 0.0) -> float:
    """Return the seconds in which a layer's norms, sums and activations, and ``others``, are read and written.

    Args:
        size: The model.
        hardware: Where.
        layout: Its tp cuts them.
        tokens: Of a replica.
        others: Further numbers of each token.
    """
    # Norms and residual sums between the products, and the activation within the block.
    heads = size.mean_heads(lambda each: each.num_attention_heads * each.head_size)
    touched = 12 * size.model.hidden_size + (3 + size.gated) * _width(size) + 3 * heads
    # Tokens are laid out by experts, and weighed and summed in their own order again.
    touched += 6 * size.model.hidden_size * _visits(size) + others
    bandwidth = hardware.memory_bandwidth * hardware.elementwise_share
    return tokens * touched / layout.tp * size.item_bytes / bandwidth


def _layer_products(
    size: Size, hardware: Hardware, layout: ParallelLayout, tokens: float, *, fp8: bool = False
) -> float:
    """Return the seconds of a layer's products for a replica's ``tokens``, on average over its layers."""

    def cut(matrices: tuple[Matrix, ...], rows: float, ways: int) -> float:
        return sum(
            _product(
                size,
                hardware,
                rows,
                inputs if is_cut else inputs / ways,
                outputs / ways if is_cut else outputs,
                fp8=fp8,
            )
            for inputs, outputs, is_cut in matrices
        )

    tp, model, number = layout.tp, size.model, size.model.num_experts
    attention = size.mean_heads(lambda each: cut(attention_of(each), tokens, tp))
    attention += cut(size.compressing, tokens / tp, 1)
    attention = size.mean_attention(attention, cut(size.linear_attention, tokens, tp))
    dense = cut(size.block(size.dense_width), tokens, tp)
    if number is None:
        return attention + dense
    # The ranks that share the experts bring their tokens; each expert has equally many, or none.
    visits = tokens / tp * layout.expert_tp * layout.ep * model.experts_per_token
    used = number * (1 - (1 - 1 / number) ** visits) / layout.ep
    experts = used * cut(size.block(model.ffn_hidden_size), visits / layout.ep / used, layout.expert_tp)
    router = _product(size, hardware, tokens / tp, model.hidden_size, number)
    shared = cut(size.block(size.shared_width), tokens, tp)
    return attention + size.mean_layer(dense, experts + router + shared)


def _product_inputs(size: Size) -> float:
    """Return how many numbers of a token the four products of a layer take in, on average over the layers."""
    model = size.model
    outputs = model.num_attention_heads * model.value_size
    return 2 * model.hidden_size + outputs + _width(size) + _visits(size) * model.hidden_size


def _width(size: Size) -> float:
    """Return the width of the activations inside a layer's feed-forward block or its experts, on average."""
    chosen = size.model.experts_per_token * size.model.ffn_hidden_size
    return size.mean_layer(size.dense_width, chosen + size.shared_width)


def _visits(size: Size) -> float:
    """Return how many experts a token goes to, on average over the layers."""
    return size.mean_layer(0, size.model.experts_per_token)


def _passed(
    size: Size, hardware: Hardware, layout: ParallelLayout, tokens: float, *, is_generating: bool = False
) -> tuple[float, float]:
    """Return the seconds of a layer's sums over tp, and of what it sends to experts and back.

    Gathered before two products, scattered as they are summed behind two others: two of each, as two sums. Experts take
    the place of one of them. When generating, experts that are all here are summed like any block.
    """
    a_token = size.model.hidden_size * size.item_bytes
    one = _collective(hardware, layout.tp, tokens * a_token, is_summed=True)
    if size.model.num_experts is None or (is_generating and layout.ep == 1):
        return 2 * one, 0.0
    exchanged = _exchange(hardware, layout, tokens / layout.tp * _visits(size) * a_token)
    return size.mean_layer(2, 1 + bool(size.shared_width)) * one, exchanged


def _exchange(hardware: Hardware, layout: ParallelLayout, num_bytes: float) -> float:
    """Return the seconds in which a rank's ``num_bytes`` reach their experts on other ranks, and come back."""
    ranks = layout.ep * layout.expert_tp
    if ranks == 1 or not num_bytes:
        return 0.0
    # Each rank of a tensor-parallel expert needs every token of the expert.
    num_bytes *= layout.expert_tp
    here = min(ranks, hardware.ranks_per_node)
    within = num_bytes * (here - 1) / ranks / (hardware.node_bandwidth * hardware.node_share)
    across = num_bytes * (ranks - here) / ranks / (hardware.network_bandwidth * hardware.network_share)
    latency = hardware.node_latency if ranks == here else hardware.network_latency
    return 2 * (max(within, across) + latency)


def _dense_weights(size: Size, layers: int, tables: int, tp: int) -> float:
    """Return a rank's weights of layers, without experts, and of embeddings or an output layer with ``tables``."""
    cut = layers * (size.layer_weights - size.whole_weights) + tables
    return cut / tp + layers * size.whole_weights


def _kept_parameters(layout: ParallelLayout, dense: float, experts: float) -> float:
    """Return of how many of a rank's parameters it has the optimizer's state."""
    return dense / (layout.dp * layout.cp) + experts / _expert_replicas(layout)


def _expert_replicas(layout: ParallelLayout) -> int:
    """Return how many ranks of a stage have the same part of the experts."""
    return layout.tp * layout.cp * layout.dp // (layout.ep * layout.expert_tp)


def _ends(size: Size, hardware: Hardware, step: TrainStep) -> dict[str, float]:
    """Return the seconds of logits and loss of a micro-batch, forward and backward, on the last stage."""
    tokens = step.micro_batch * step.sequence / step.layout.cp
    columns = size.output_weights / size.model.hidden_size / step.layout.tp
    # Written, turned to fp32, read for their largest and their sum, and the gradient the same way back.
    touched = tokens * columns * 6 * _FP32
    products = _product(size, hardware, tokens, size.model.hidden_size, columns)
    elementwise = touched / (hardware.memory_bandwidth * hardware.elementwise_share)
    return {
        "products": 3 * products,
        "elementwise": elementwise,
        "launches": 3 * _launching(hardware, products + elementwise / 3),
    }


def _product(size: Size, hardware: Hardware, rows: float, inputs: float, outputs: float, *, fp8: bool = False) -> float:
    """Return the seconds of a product of ``[rows, inputs]`` and ``[inputs, outputs]``."""
    flops, half, item_bytes = hardware.flops * hardware.product_share, hardware.half_size, size.item_bytes
    if fp8:
        # What starts and ends a product takes as long as in bf16, so that larger ones reach half the share.
        flops, half = hardware.fp8_flops * hardware.fp8_share, half * hardware.fp8_flops / hardware.flops
        item_bytes = 1
    share = inputs / (inputs + half) * outputs / (outputs + half)
    moved = (rows * inputs + inputs * outputs) * item_bytes + rows * outputs * size.item_bytes
    return max(
        2 * rows * inputs * outputs / (flops * share),
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
    here = max(hardware.ranks_per_node // step, 1)
    is_within = ranks <= here
    bandwidth = hardware.node_bandwidth * hardware.node_share
    if not is_within:
        bandwidth = min(bandwidth, here * hardware.network_bandwidth * hardware.network_share)
    ways = 1 + is_summed
    # Within a node each rank reads what all others have, and sums it.
    latency = hardware.node_latency if is_within else ways * hardware.network_latency * math.log2(ranks / here + 1)
    if hardware.crowding > 1:
        latency *= ranks  # Each of them has to be given a core.
    return ways * (num_bytes * (ranks - 1) / ranks / bandwidth) + latency


def _messages(size: Size, hardware: Hardware, step: TrainStep) -> float:
    """Return the seconds for which stages wait for activations and gradients."""
    layout = step.layout
    if layout.pp == 1:
        return 0.0
    passed = step.micro_batch * step.sequence / layout.cp * size.model.hidden_size / layout.tp * size.item_bytes
    is_within = layout.world_size <= hardware.ranks_per_node
    bandwidth = hardware.network_bandwidth * hardware.network_share
    if is_within:
        bandwidth = hardware.node_bandwidth * hardware.node_share
    latency = hardware.node_latency if is_within else hardware.network_latency
    # Interleaved stages compute another chunk meanwhile, but at the beginning and the end.
    waited = layout.pp - 1 + (step.num_micro_batches if layout.vpp == 1 else 0)
    return 2 * waited * (passed / bandwidth + latency)


def _data_parallel(
    size: Size, hardware: Hardware, layout: ParallelLayout, dense: float, experts: float, a_micro_batch: float
) -> float:
    """Return the seconds of sums of gradients and gathered weights that the passes do not hide."""
    ranks, step = layout.dp * layout.cp, layout.tp
    replicas, apart = _expert_replicas(layout), layout.ep * layout.expert_tp
    summed, gathered = (
        _collective(hardware, ranks, dense * each, step=step)
        + _collective(hardware, replicas, experts * each, step=apart)
        for each in (_FP32, size.item_bytes)
    )
    # Interleaved, the gradients of all chunks but one are complete while the last micro-batches are under way.
    hiding = a_micro_batch * max(1.0, layout.pp * (1 - 1 / layout.vpp))
    bare = hardware.bare_share
    return max(summed - 2 / 3 * hiding, bare * summed) + max(gathered - hiding / 3, bare * gathered)


def train_bytes(size: Size, step: TrainStep) -> dict[str, dict[str, float]]:
    """Return the bytes of a rank by its stage (``first``, ``middle``, ``last``) and by what they are for.

    Weights, gradients summed in fp32, two fp32 moments and, where weights are bf16, fp32 master weights, cut over the
    ranks that have the same weights. Buffers are the gradients that products return besides, one for each shape of
    weights: megatron-core and Transformer Engine keep them where sums are fused into products. In FP8 the inputs of
    products are kept in it; weights and their transposed copies take as much as in bf16. Activations as arXiv
    2205.05198 counts them, without dropout and with fused attention, cut over tp by sequence parallelism.
    """
    layout, hidden = step.layout, size.model.hidden_size
    tokens = step.micro_batch * step.sequence / layout.cp
    found = {}
    for name, stage in _stages(layout.pp).items():
        layers = _layers_of(size, layout, stage)
        is_first, is_last = stage == 0, stage == layout.pp - 1
        tables = is_first * size.table_weights + is_last * size.output_weights
        if is_first and is_last and size.tied:
            tables = size.table_weights
        dense = _dense_weights(size, layers, tables, layout.tp)
        experts = _sparse_of(size, layout, stage) * size.layer_experts / (layout.ep * layout.expert_tp)
        inputs = tokens * hidden * size.item_bytes / layout.tp
        saved = (size.item_bytes - 1) * _product_inputs(size) if step.fp8 else 0.0
        of_a_layer = tokens * (_kept_elements(size) * size.item_bytes - saved) / layout.tp
        anew = step.num_anew(layers)
        of_a_stage = anew * inputs + (layers - anew) * of_a_layer
        working = of_a_layer if anew else 0.0
        logits = tokens * size.output_weights / hidden / layout.tp * (size.item_bytes + _FP32) if is_last else 0.0
        found[name] = {
            "weights": (dense + experts) * size.item_bytes,
            "gradients": (dense + experts) * _FP32,
            "optimizer": (3 if size.item_bytes < _FP32 else 2) * _kept_parameters(layout, dense, experts) * _FP32,
            "activations": of_a_stage * _under_way(step, stage) + working + logits,
            "buffers": (_shapes_weights(size, layout) + is_last * size.output_weights / layout.tp) * size.item_bytes,
        }
    return found


@functools.lru_cache(maxsize=1 << 14)
def kept_bytes(size: Size, layout: ParallelLayout) -> dict[str, dict[str, float]]:
    """Return ``train_bytes`` for what stays from call to call; its activations mean nothing. A search asks often."""
    return train_bytes(size, TrainStep(layout=layout, sequence=1, batch=layout.dp, micro_batch=1))


def most_bytes(size: Size, layout: ParallelLayout, part: str) -> float:
    """Return what the stage that keeps most of a part of ``train_bytes`` has of it."""
    return max(stage[part] for stage in kept_bytes(size, layout).values())


def _shapes_weights(size: Size, layout: ParallelLayout) -> float:
    """Return a rank's weights of one layer, and of one of its experts."""
    expert = size.layer_experts / (size.model.num_experts or 1) / layout.expert_tp
    return _dense_weights(size, 1, 0, layout.tp) + expert


def decode_bytes(size: Size, tp: int, concurrent: int, context: int, *, fp8: bool = False) -> dict[str, float]:
    """Return a rank's bytes by what they are for, of ``concurrent`` texts of up to ``context`` tokens."""
    tables = _dense_weights(size, 0, (2 - size.tied) * size.table_weights, tp)
    layers = _dense_weights(size, size.model.num_layers, 0, tp) + size.model.num_layers * size.expert_weights / tp
    kept = size.item_bytes if not fp8 else 1
    return {
        "weights": tables * size.item_bytes + layers * kept,
        "cache": concurrent * (context * size.cached_bytes(tp, fp8=fp8) + size.state_bytes(tp)),
    }


def _stages(pp: int) -> dict[str, int]:
    return {"first": 0, **({"middle": 1} if pp > 2 else {}), **({"last": pp - 1} if pp > 1 else {})}


def _kept_elements(size: Size) -> float:
    """Return what a layer keeps of a token for the backward pass: inputs of norms, products and activation."""
    model = size.model
    heads = size.mean_heads(lambda each: (each.num_attention_heads + each.query_groups) * widths_of(each))
    compressed = 2 * ((model.kv_lora_rank or 0) + (model.q_lora_rank or 0))
    blocks = (2 + size.gated) * _width(size)
    # Each expert has its own copy of its tokens, and their outputs are kept to be weighed.
    return 4 * model.hidden_size + heads + compressed + blocks + 2 * _visits(size) * model.hidden_size


def _under_way(step: TrainStep, stage: int) -> float:
    """Return how many micro-batches' activations a stage keeps at one time (1F1B, interleaved where vpp > 1)."""
    pp, vpp = step.layout.pp, step.layout.vpp
    chunks = (vpp - 1) * pp + 2 * (pp - stage - 1) + 1 if vpp > 1 else pp - stage
    return min(step.num_micro_batches, chunks / vpp)
