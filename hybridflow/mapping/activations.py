"""How much memory of an accelerator the activations of a model take: upper bounds from formulas. No torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hybridflow.config.recipe import FROZEN, Recipe
from hybridflow.config.roles import LoRAConfig
from hybridflow.config.types import Recompute
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import ALIGNED_ROWS, CHUNK_TOKENS, DELTA_CHUNK, DELTA_TOKENS
from hybridflow.reshard.spec import ITEM_BYTES
from hybridflow.rollout.blocks import MOST_PROMPT_KEYS, STEP_TOKENS
from hybridflow.sections import changed_keys

_FP32_BYTES = ITEM_BYTES["fp32"]
_CUTS = ("top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def activation_bytes(recipe: Recipe, model: ModelConfig, mesh: DeviceMesh, rank: int, *, has_value_head: bool) -> int:
    """Return the most that passes of a model which does not generate keep at one time, logits included.

    Args:
        recipe: The recipe, for its micro-batches, recomputation and adapters.
        model: The model, with its vocabulary size.
        mesh: Where it is.
        rank: Whose stage.
        has_value_head: Whether it gives one number in the place of logits.
    """
    name, whole = mesh.name, max(recipe.trainer.micro_batch_tokens, recipe.model.max_context)
    tokens = -(-whole // mesh.layout.cp)
    output = functools.partial(_output_bytes, model, mesh, rank, tokens, has_value_head=has_value_head)
    if name in FROZEN:
        passing = _passing_bytes(model, mesh, tokens, slices=_slices(mesh.layout))
        # What FSDP gathers does not lie side by side.
        passing += _stacked_bytes(model, mesh) if mesh.layout.fsdp > 1 else 0
        return passing + _exchanged_bytes(model, mesh, whole, copies=2) + output(copies=1)
    section: Any = getattr(recipe, mesh.role)
    lora = recipe.actor.lora if name == "actor.update" else None
    passing = training_bytes(
        model, mesh, rank, tokens, lora, recompute=section.recompute, recompute_layers=section.recompute_layers
    )
    passing += _stacked_bytes(model, mesh) + _sent_bytes(model, mesh.layout, tokens)
    # The logits are done with before the first layer has gradients. Where all are computed anew, ``passing`` has them.
    is_all_anew = section.recompute == "full" and section.recompute_layers is None
    gradients = 0 if is_all_anew else _gradient_bytes(model, mesh.layout.tp, tokens)
    return passing + _exchanged_bytes(model, mesh, whole, copies=4) + max(output(copies=2), gradients)


def decoding_bytes(recipe: Recipe, model: ModelConfig, mesh: DeviceMesh, rank: int, concurrent: int) -> int:
    """Return the most that a step of generation keeps beside weights and cache.

    That includes logits of all texts and, where the recipe has penalties or a least length, what these depend on. With
    tensor parallelism cuts need the logits of all ranks, as they were gathered and row by row.
    """
    logits, edits, cuts = _output_bytes(model, mesh, rank, concurrent, has_value_head=False, copies=1), 0, 0
    if recipe.rollout.min_new_tokens > 1 or changed_keys(recipe.rollout, _PENALTIES):
        # How often each token was seen, the edited logits in fp32, and the tokens of each text.
        columns = -(-model.known_vocab_size // mesh.layout.tp)
        edits = concurrent * (2 * columns + model.max_context) * _FP32_BYTES
    if mesh.layout.tp > 1 and changed_keys(recipe.rollout, _CUTS):
        cuts = 2 * concurrent * model.known_vocab_size * (_FP32_BYTES if edits else ITEM_BYTES[model.dtype])
    keys = 0
    if model.kv_lora_rank is not None:
        # As they were made, and as a kernel takes them: values as wide as keys. See ``rollout.gpu.prompts``.
        widths = 3 * model.head_size - model.rotary_size + model.value_size
        keys = min(MOST_PROMPT_KEYS, concurrent * model.max_context) * ITEM_BYTES[model.dtype]
        keys *= model.num_attention_heads // mesh.layout.tp * widths
    # Experts of which some lie with the weights that learn are copied.
    return _passing_bytes(model, mesh, STEP_TOKENS) + _stacked_bytes(model, mesh) + logits + keys + edits + cuts


def training_bytes(
    model: ModelConfig,
    mesh: DeviceMesh,
    rank: int,
    tokens: int,
    lora: LoRAConfig | None = None,
    *,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
) -> int:
    """Return what a stage's layers keep for the backward pass, of micro-batches of ``tokens`` tokens.

    The activations between the layers are cut over the tensor-parallel ranks with sequence parallelism alone. Weights
    below adapters are frozen, and need no input for a gradient; that is not taken off. What is recomputed, one layer at
    a time has, with the gradients of its feed-forward block; the layers behind it that were kept are done with by then.
    ``selective`` counts as ``none``: the formula has of the attention what a fused kernel keeps, and
    recomputing keeps it too.

    Args:
        model: The model.
        mesh: Where it is.
        rank: Whose stage.
        tokens: Of each micro-batch, this rank's: a share of them under context parallelism.
        lora: Its adapters.
        recompute: With ``full`` a layer keeps its input alone.
        recompute_layers: With ``full`` so many of the stage's layers, from the first; None: all.
    """
    layout, stage = mesh.layout, mesh.stage(rank)
    slices = _slices(layout)
    layer_bytes = _layer_bytes(model, layout, slices, tokens)
    layer_bytes += 0 if lora is None else tokens * _adapter_bytes(model, layout.tp, slices, lora)
    input_bytes = tokens * -(-model.hidden_size // slices) * ITEM_BYTES[model.dtype]
    left = 0
    if recompute == "full":
        left = model.num_layers if recompute_layers is None else recompute_layers
    at_once, chunks = 0, []
    for layers in layout.layer_counts(model.num_layers, f"layout {layout}")[stage :: layout.pp]:
        anew = min(layers, left)
        left -= anew
        kept = (layers - anew) * layer_bytes
        chunks.append(anew * input_bytes + kept)
        if anew:
            at_once = max(at_once, layer_bytes + _gradient_bytes(model, layout.tp, tokens) - kept)
    return _most_under_way(chunks, stage, layout.pp) + at_once


def _most_under_way(chunks: Sequence[int], stage: int, pp: int) -> int:
    """Return the largest sum over the forward passes of a stage whose backward pass is yet to come.

    In 1F1B stage ``s`` of ``pp`` has ``pp - s`` micro-batches under way. Interleaved it begins with
    ``2 (pp - s - 1) + (vpp - 1) pp`` passes, then goes one forward and one back: with equal chunks the first stage
    keeps ``1 + (pp - 1) / (pp vpp)`` times what all its layers keep of ``pp`` micro-batches.

    Args:
        chunks: What a pass through each virtual chunk keeps.
        stage: The stage.
        pp: Stages.
    """
    vpp = len(chunks)
    if vpp == 1:
        return (pp - stage) * chunks[0]
    begun = 2 * (pp - stage - 1) + (vpp - 1) * pp
    kept = sum(chunks[index // pp % vpp] for index in range(begun))
    most = 0
    for index in range(2 * pp * vpp):
        kept += chunks[(begun + index) // pp % vpp]
        most = max(most, kept)
        kept -= chunks[vpp - 1 - index // pp % vpp]
    return most


def _slices(layout: ParallelLayout) -> int:
    """Return the parts into which activations between tensor-parallel matrices are cut outside of decoding."""
    return layout.tp if layout.splits_sequences else 1


def _exchanged_bytes(model: ModelConfig, mesh: DeviceMesh, tokens: int, *, copies: int) -> int:
    """Return keys and values of all context-parallel ranks' tokens in one layer, of which nothing is kept.

    They are there as they were gathered, and as the kernel takes them, and in the backward pass so are their gradients.
    """
    if mesh.layout.cp == 1:
        return 0
    keys = max(max(1, kind.query_groups // mesh.layout.tp) * kind.head_size for kind in model.layer_kinds)
    return copies * tokens * 2 * keys * ITEM_BYTES[model.dtype]


def _adapter_bytes(model: ModelConfig, tp: int, slices: int, lora: LoRAConfig) -> int:
    """Return what a layer's adapters keep per token: A's output; with dropout a mask of the inputs too."""
    inputs = -(-2 * model.hidden_size // slices) - (
        -(model.num_attention_heads * _widest(model).head_size + model.ffn_hidden_size) // tp
    )
    masks = inputs if lora.dropout > 0 else 0
    return (lora.rank * len(lora.targets) + masks) * ITEM_BYTES[model.dtype]


def _gradient_bytes(model: ModelConfig, tp: int, tokens: int) -> int:
    """Return what a layer's feed-forward block has of so many tokens in its backward pass, as by operators of torch.

    That is the gradient of the product, the gate activated again, and gradients of gate and up, twice. A kernel needs
    half of it. Linear attention may have more, at another time: what it computes anew.
    """
    block = 6 * tokens * -(-_inner_width(model) // tp) * ITEM_BYTES[model.dtype]
    # Of a prompt that samples share, linear attention has the tokens for each of them.
    return max(block, _recurrence_bytes(model, tp, max(tokens, DELTA_TOKENS)))


def _recurrence_bytes(model: ModelConfig, tp: int, tokens: int) -> int:
    """Return what linear attention has of the tokens that it takes at one time, all in fp32, by operators of torch.

    The kernels of a GPU need less.

    Of each token, with ``C`` channels and ``V`` values: the convolution's input, sum and activation, ``3 C``; queries
    and keys of length 1, as they are and in chunks, ``2 (C - V)``; values and what is written, ``8 V``. For each value
    head four vectors as wide as keys, four numbers for each pair in a chunk (for each key head two), and the state that
    each chunk begins with.
    """
    heads, size = model.linear_value_heads or 0, model.linear_key_head_dim or 0
    channels, values = model.linear_channels, model.linear_values
    columns = 3 * channels + 2 * (channels - values) + 8 * values + 4 * heads * size
    columns += DELTA_CHUNK * (4 * heads + 2 * (model.linear_key_heads or 0)) + values * size // DELTA_CHUNK
    at_once = min(tokens, max(DELTA_TOKENS, model.max_context))
    return at_once * -(-columns // tp) * _FP32_BYTES


def _inner_width(model: ModelConfig) -> int:
    """Return the columns of a token inside a feed-forward block: of all its experts, or of a wider dense layer."""
    experts = 1 if model.num_experts is None else model.experts_per_token
    width = experts * model.ffn_hidden_size + (model.shared_ffn_hidden_size or 0)
    return max(width, model.dense_ffn_hidden_size or 0)


def _layer_bytes(model: ModelConfig, layout: ParallelLayout, slices: int, tokens: int) -> int:
    """Return what a layer keeps of so many tokens.

    In elements of a token: of the two blocks and their norms what ``_norm_columns`` says, over ``slices``; sine and
    cosine of the rotation, ``4 d``; of the attention, with ``q`` and ``kv`` columns of query and key, what the kernel
    takes and gives, and the context: ``3 (q + kv) / tp``, in latent attention also what these are put together of,
    ``5 (q + kv) / tp``, and what norms of queries and keys keep; of the feed-forward block gate and up, and the
    product, ``3 f / tp``. Experts in grouped products keep the weighted product too, ``4 f / tp``; one after the other
    they keep ``6 f / tp``, or ``8 f / tp`` with biases or another gate. A shared expert keeps ``5 f / tp``, by
    megatron-core's gate, and its output where that is gated too. A gate on the output of attention is kept as it is,
    activated in fp32, and with the product. Of layers with linear attention and others all count as the larger.

    In a mixture the numbers of the feed-forward block are there for each expert that a token goes to, or those of a
    dense layer, where it is wider. Latent attention keeps the compressed vectors too.

    An expert is cut in ``etp`` parts, and tokens go to ranks of their experts. With even loads a rank has ``etp / tp``
    inputs of an expert, ``h`` each, for each choice of a token of its own. Of these it has ``f / etp`` columns: ``f /
    tp`` for each choice, whatever ``etp`` is. Each expert has up to ``ALIGNED_ROWS`` such inputs more.
    """
    kind = _widest(model)
    queries, keys = kind.num_attention_heads * kind.head_size, kind.query_groups * kind.head_size
    whole = -(-(_norm_columns(model) + model.hidden_size * model.shared_expert_gate) // slices) + 4 * kind.rotary_size
    whole += -(-2 * ((model.q_lora_rank or 0) + (model.kv_lora_rank or 0)) // slices)
    whole += _input_columns(model, layout) + _router_columns(model)
    cut = (3 if model.kv_lora_rank is None else 5) * (queries + keys) + _head_norm_columns(model, queries, keys)
    of_fp32 = _FP32_BYTES // ITEM_BYTES[model.dtype]
    cut += (2 + of_fp32) * queries * model.attention_output_gate
    cut = max(cut, _linear_columns(model, of_fp32)) + _block_columns(model)
    columns = tokens * (whole - (-cut // layout.tp))
    if model.num_experts is not None and _is_grouped(model):
        inner = -(-4 * model.ffn_hidden_size // layout.expert_tp)
        columns += model.num_experts // layout.ep * ALIGNED_ROWS * (model.hidden_size + inner)
    return columns * ITEM_BYTES[model.dtype]


def _widest(model: ModelConfig) -> ModelConfig:
    """Return the settings of the layers with the most columns of queries and keys."""
    return max(model.layer_kinds, key=lambda kind: (kind.num_attention_heads + kind.query_groups) * kind.head_size)


def _linear_columns(model: ModelConfig, of_fp32: int) -> int:
    """Return what linear attention keeps of a token, in elements.

    That is what its rule takes; of the values what it gives, the gate and the activated gate in fp32, and the result as
    it is normalized, weighted and gated. In fp32 the gate is a part of the projection, which has the channels too.
    """
    decays = 6 * (model.linear_value_heads or 0) * of_fp32
    channels = model.linear_channels * (2 if of_fp32 == 1 else 1)
    return channels + (3 + 3 * of_fp32) * model.linear_values + decays


def _block_columns(model: ModelConfig) -> int:
    """Return what the feed-forward block keeps of a token inside, in elements; in a mixture that of the wider layer."""
    if model.num_experts is None:
        return 3 * model.ffn_hidden_size
    of_each = 4 if _is_grouped(model) else 6 if _has_plain_gate(model) else 8
    experts = of_each * model.experts_per_token * model.ffn_hidden_size + 5 * (model.shared_ffn_hidden_size or 0)
    return max(experts, 3 * (model.dense_ffn_hidden_size or 0))


def _has_plain_gate(model: ModelConfig) -> bool:
    return not (model.linear_bias or model.glu_clamp is not None or model.glu_offset)


def _is_grouped(model: ModelConfig) -> bool:
    """Return whether a GPU computes experts by grouped products, as ``models.grouped`` decides for whole experts."""
    widths = model.hidden_size, model.ffn_hidden_size
    return model.dtype == "bf16" and not any(width % 8 for width in widths)


def _norm_columns(model: ModelConfig) -> int:
    """Return what a layer's norms keep of a token, in elements, where a kernel fuses them as on a GPU.

    Inputs of the two blocks and of the norms before the blocks and behind them, ``2 h`` each. Norms around 1 compute in
    fp32: each keeps its input so, and the blocks their inputs. A router with scales keeps its input in fp32, and
    scaled.
    """
    before, behind = 2 * model.pre_norms + model.expert_norms, 2 * model.post_norms + 2 * model.expert_norms
    router = 3 * model.expert_norms
    if model.zero_centered_norms and model.dtype != "fp32":
        return (2 * (before + behind) + before) * model.hidden_size
    return (2 + before + behind + router) * model.hidden_size


def _head_norm_columns(model: ModelConfig, queries: int, keys: int) -> int:
    """Return what norms of queries and keys keep of a token, in elements, beside what is kept without them.

    Norms of heads: the queries as the kernel takes them, since the projection has them among keys and values; around 1
    queries and keys in fp32. Norms over the projection: both in fp32, as they are and scaled. Of norms of values these,
    in fp32, and as the kernel takes them.
    """
    of_fp32 = _FP32_BYTES // ITEM_BYTES[model.dtype]
    values = (of_fp32 + 1) * keys * model.value_norm
    if not model.qk_norm or model.kv_lora_rank is not None:
        return values
    if model.qk_norm_over == "projection":
        return 2 * of_fp32 * (queries + keys) + values
    return (of_fp32 * (queries + keys) if model.zero_centered_norms else queries) + values


def _router_columns(model: ModelConfig) -> int:
    """Return what a router by sigmoid keeps of a token, in elements: logits and scores of all experts in fp32."""
    if model.num_experts is None or model.router_score == "softmax":
        return 0
    return 2 * model.num_experts * _FP32_BYTES // ITEM_BYTES[model.dtype]


def _input_columns(model: ModelConfig, layout: ParallelLayout) -> int:
    """Return the columns of the inputs of a rank's experts, for each of its tokens, with even loads."""
    if model.num_experts is None:
        return 0
    return -(-model.experts_per_token * model.hidden_size * layout.expert_tp // layout.tp)


def _sent_bytes(model: ModelConfig, layout: ParallelLayout, tokens: int) -> int:
    """Return what a layer has beside what it keeps, where ranks send each other the inputs of experts.

    The inputs as they are sent and as they come, and the outputs as they are made, ordered and filled in.
    """
    if layout.ep * layout.expert_tp == 1 or (layout.ep == 1 and not layout.splits_sequences):
        return 0
    return 5 * tokens * _input_columns(model, layout) * ITEM_BYTES[model.dtype]


def _passing_bytes(model: ModelConfig, mesh: DeviceMesh, tokens: int, *, slices: int = 1) -> int:
    """Return the peak of a forward pass of which nothing is kept: what one layer makes."""
    made = _layer_bytes(model, mesh.layout, slices, tokens) + _recurrence_bytes(model, mesh.layout.tp, tokens)
    return made + _sent_bytes(model, mesh.layout, tokens)


def _stacked_bytes(model: ModelConfig, mesh: DeviceMesh) -> int:
    """Return the gradients of gate and up of a layer's experts, which ``models.grouped`` makes at once.

    Weights that do not lie at equal distances are copied for a product, which takes as much, at another time.
    """
    if model.num_experts is None or not _is_grouped(model):
        return 0
    rows = model.num_experts // mesh.layout.ep * 2 * model.ffn_hidden_size // mesh.layout.expert_tp
    return rows * model.hidden_size * ITEM_BYTES[model.dtype]


def _output_bytes(
    model: ModelConfig, mesh: DeviceMesh, rank: int, tokens: int, *, has_value_head: bool, copies: int
) -> int:
    """Return the logits on the last stage, all copies at one time, and four fp32 chunks of them."""
    if mesh.stage(rank) != mesh.layout.pp - 1:
        return 0
    columns = 1 if has_value_head else -(-model.known_vocab_size // mesh.layout.tp)
    logits = copies * tokens * columns * ITEM_BYTES[model.dtype]
    return logits + 4 * min(tokens, CHUNK_TOKENS) * columns * _FP32_BYTES
