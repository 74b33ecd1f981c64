"""GPT models from megatron-core, in any tensor, pipeline and data parallel layout, on packed tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, silu

from hybridflow.config.roles import LoRAConfig
from hybridflow.config.types import Fp8
from hybridflow.data.images import FIRST_ID
from hybridflow.families.cut import check_cut
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.attention import AttentionPlan, GroupedSelfAttention, PackedAttention, SdpaCoreAttention
from hybridflow.models.cpu_linear import use_onednn
from hybridflow.models.experts import ExpertLayer, NormedExpertLayer, RoutedLayer, mixtures
from hybridflow.models.flops import ModelFlops, model_flops
from hybridflow.models.fp8 import ALIGNED_TOKENS, check_device
from hybridflow.models.gated import GatedMLP, gelu_tanh, quick_gelu
from hybridflow.models.gated_delta_net import GatedDeltaNet
from hybridflow.models.grouped import lay_side_by_side
from hybridflow.models.images import ImageReader, ImageRows
from hybridflow.models.latent_attention import LatentSelfAttention
from hybridflow.models.layers import Chunks
from hybridflow.models.lora import Dropout, attach
from hybridflow.models.norm import ProjectionNorm, RmsNorm, normalize_output, scale_output
from hybridflow.models.rotary import all_frequencies, rotary_factor, rotary_table, rotated_pairs, score_scale
from hybridflow.models.scoring import Scoring
from hybridflow.models.sequence_parallel import SequenceSwitch
from hybridflow.parallel.accelerators import has_transformer_engine
from hybridflow.parallel.cpu import use_cpu_for_cuda
from hybridflow.reshard.views import TORCH_DTYPES

use_cpu_for_cuda()


def _padded(positions: Tensor, missing: int) -> Tensor:
    """Pad ``[tokens, …]`` at its end."""
    return pad(positions, (0, 0) * (positions.dim() - 1) + (0, missing))


def padded_vocab_size(model: ModelConfig, vocab_size: int, tp: int) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks: the vocabulary, rounded up."""
    multiple = model.vocab_divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def transformer_config(
    model: ModelConfig, layout: ParallelLayout, device: torch.device, fp8: Fp8 = "none"
) -> TransformerConfig:
    """Return megatron-core's configuration of this model in this layout."""
    on_gpu = device.type == "cuda"
    dtype = TORCH_DTYPES[model.dtype]
    experts: dict[str, Any] = {}
    if model.num_experts is not None:
        experts = dict(
            num_moe_experts=model.num_experts,
            moe_ffn_hidden_size=model.ffn_hidden_size,
            moe_router_topk=model.experts_per_token,
            moe_router_score_function=model.router_score,
            # Shares of all experts, or of those that were chosen.
            moe_router_pre_softmax=not model.normalized_experts,
            moe_router_load_balancing_type="none",
            # As the models that have them were trained; those of softmax have the activations' own format.
            moe_router_dtype="fp32" if model.router_score == "sigmoid" else None,
            moe_shared_expert_intermediate_size=model.shared_ffn_hidden_size,
            moe_shared_expert_gate=model.shared_expert_gate,
        )
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.head_size,
        softmax_scale=score_scale(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        layernorm_zero_centered_gamma=model.zero_centered_norms,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[model.activation],
        activation_func_clamp_value=model.glu_clamp,
        glu_linear_offset=model.glu_offset,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        attention_output_gate=model.attention_output_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None if layout.vpp == 1 else layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # Micro-batches are packed, so each has its own number of tokens.
        variable_seq_lengths=True,
        # Not used, but the default dispatcher refuses variable lengths.
        moe_token_dispatcher_type="alltoall",
        # Our losses carry the global batch's denominators: megatron-core must not divide again.
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        # Of two stages with chunks each is both before and behind the other: a batch could not tell what is for which.
        batch_p2p_comm=on_gpu and layout.vpp == 1,
        # What is sent and received is waited for on the stream; the host need not.
        batch_p2p_sync=False,
        # Weights are a function of (seed, name), set after construction; megatron-core's own initialization, which
        # also marks the tensor-parallel parameters, is left nothing to fill.
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=not on_gpu,
        # Trainable switches it on: there have to be sums to add to.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        # Then gradients of embeddings are added in one order.
        deterministic_mode=on_gpu and torch.are_deterministic_algorithms_enabled(),
        # megatron-core opens Transformer Engine's context around each layer; local layers would ignore it.
        fp8=None if fp8 == "none" else "e4m3",
        fp8_recipe="delayed" if fp8 == "none" else fp8,
        rotary_interleaved=model.rotary_interleaved,
        **experts,
    )
    # megatron-core refuses biases of experts that are cut; ``experts.share_bias`` mends what it lacks.
    config.add_bias_linear = model.linear_bias
    return config


_ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu}


def _add_rng_states() -> None:
    """Add the random states that megatron-core forks around initialization on a GPU; nothing of ours draws from them.

    A program that seeded megatron-core itself has them, and keeps its own.
    """
    tracker = get_cuda_rng_tracker()
    for name in ("model-parallel-rng", get_expert_parallel_rng_tracker_name()):
        if name not in tracker.get_states():
            # It refuses a seed that another state has.
            tracker.add(name, max(tracker.seeds_, default=-1) + 1)


def _leave(weight: Tensor) -> Tensor:
    return weight


class ValueHead(nn.Module):
    """One number for each token, in the place of the vocabulary projection; the same on all tensor-parallel ranks."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Map ``[tokens, 1, hidden]`` to ``[tokens, 1, 1]``."""
        return nn.functional.linear(hidden, self.weight), None


class Transformer(GPTModel):
    """megatron-core's GPT on packed tokens: ``[tokens]`` in, ``[rows, vocab/tp]`` or values ``[rows, 1]`` out.

    Inside, activations are Megatron's ``[tokens, 1, hidden]``.

    Attributes:
        has_scaled_embeddings: Whether input embeddings are multiplied by the root of their width.
        logit_softcap: Logits z become cap * tanh(z / cap); None: they do not.
        rotated_pairs: Of each kind of layers that differ in the rotary embedding, the pairs of dims that it turns.
        has_latent_attention: Whether keys and values are compressed.
        dropout: Dropout on the inputs of its adapters; None: none.
        flops: Operations that the whole model needs; None: they are not counted.
        sequence_switch: Splits activations by tokens over the tensor-parallel ranks; None: they are never split.
        images: What it knows of images; None: its prompts are text.
        aligned_tokens: A rank's tokens of packed sequences are padded to a multiple of this.
    """

    has_scaled_embeddings = False
    logit_softcap: float | None = None
    rotated_pairs: tuple[int, ...] = ()
    has_latent_attention = False
    dropout: Dropout | None = None
    flops: ModelFlops | None = None
    sequence_switch: SequenceSwitch | None = None
    images: ImageReader | None = None
    aligned_tokens = 1

    def stage_tokens(self, num_tokens: int) -> int:
        """Return the tokens that a stage hands to the next in a forward pass over packed tokens, with padding.

        Args:
            num_tokens: This rank's of a micro-batch; under context parallelism it may have none.
        """
        each = -(-max(num_tokens, 1) // self._num_slices)
        return -(-each // self.aligned_tokens) * self.aligned_tokens

    @property
    def _num_slices(self) -> int:
        return 1 if self.sequence_switch is None else int(self.pg_collection.tp.size())

    def forward(self, tokens: Tensor, attention: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Run this stage's part of the forward pass.

        Collective: tp, cp.

        Args:
            tokens: This rank's token ids of all sequences one after the other, ``[tokens]``; read by the first stage.
            attention: Which token sees which, and each token's position.
            rows: Which tokens' outputs are wanted, ``[rows]`` int64; None for all.

        Returns:
            Hidden states ``[tokens, 1, hidden]`` on all but the last stage, with sequence parallelism this rank's slice
            ``[stage_tokens, 1, hidden]``; on the last logits ``[rows, padded_vocab/tp]``,
            this rank's columns, or values ``[rows, 1]``.
        """
        embedded, num_tokens, images = None, len(attention.positions), attention.images
        positions = attention.positions if images is None else images.positions
        if self.dropout is not None:
            self.dropout.begin(tokens, attention)
        is_packed = isinstance(attention, PackedAttention) and attention.can_split
        is_split = is_packed and self.sequence_switch is not None
        if self.sequence_switch is not None:
            self.sequence_switch.turn(is_split)
        if is_packed and (missing := self.stage_tokens(num_tokens) * self._num_slices - num_tokens):
            tokens, positions = pad(tokens, (0, missing)), _padded(positions, missing)
        if self.pre_process:
            embedded = self._embedded(tokens, images, is_split=is_split)
            if self.has_scaled_embeddings:
                # The factor in the activations' own format, as these models were trained.
                embedded = embedded * embedded.new_full((), embedded.shape[-1] ** 0.5)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self._angles(positions),
            attention_bias=attention,
        )
        if not self.post_process:
            return hidden
        if is_split:
            # All ranks go on with the same, so that each has the whole gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden = hidden[:num_tokens]
        if rows is not None:
            # One that several samples go on from comes more than once.
            chosen = hidden[:, 0][rows] if self.config.deterministic_mode else embedding(rows, hidden[:, 0])
            hidden = chosen[:, None]
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        output = self.output_layer(hidden, weight=weight)[0][:, 0]
        return output if self.logit_softcap is None else self.logit_softcap * torch.tanh(output / self.logit_softcap)

    def _embedded(self, tokens: Tensor, images: ImageRows | None, *, is_split: bool) -> Tensor:
        """Return the embeddings of tokens, or what images have in their places; with ``is_split`` of this rank's."""
        if images is None:
            found: Tensor = self.embedding(input_ids=tokens[None], position_ids=None)
            return found
        known = tokens.masked_fill(tokens >= FIRST_ID, images.reader.settings.token_id)
        found = self.embedding(input_ids=known[None], position_ids=None)
        return images.put(found, self._first_token(found, is_split=is_split))

    def read_images(self, images: ImageReader) -> None:
        """Have the model read images; its first layers add to their outputs what images have for them."""
        self.images = images
        for layer in self.decoder.layers:
            if layer.layer_number <= images.settings.num_deep:
                layer.register_forward_hook(self._add_deep, with_kwargs=True)

    def _add_deep(self, layer: TransformerLayer, _: Any, given: dict[str, Any], output: Any) -> Any:
        attention: AttentionPlan = given["attention_bias"]
        if attention.images is None:
            return output
        hidden, *rest = output
        first = self._first_token(hidden, is_split=len(hidden) < len(attention.positions))
        return attention.images.add(hidden, layer.layer_number, first), *rest

    def _first_token(self, hidden: Tensor, *, is_split: bool) -> int:
        """Return the first of the tokens that hidden states of this rank are of."""
        return len(hidden) * int(self.pg_collection.tp.rank()) if is_split else 0

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angles of each dim, ``[tokens, 1, 1, dims]``, those of layers with a base of their own behind.

        Where kernels turn queries and keys, the cosines of each pair of dims and then the sines, in as many numbers.

        Args:
            positions: Of each token, ``[tokens]``; or of each token and pair of dims, ``[tokens, pairs]``.
        """
        if positions.dim() == 1:
            positions = positions[:, None]
        angles: Tensor = positions.float() * self.rotary_pos_emb.inv_freq
        if angles.is_cuda and not self.has_latent_attention:
            kinds = angles.split(self.rotated_pairs, dim=-1)
            return torch.cat([turn for kind in kinds for turn in (kind.cos(), kind.sin())], dim=-1)[:, None, None]
        if self.config.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, None, None]
        kinds = angles.split(self.rotated_pairs, dim=-1)
        return torch.cat([each for kind in kinds for each in (kind, kind)], dim=-1)[:, None, None]

    def rotary_tables(self) -> dict[int, Tensor]:
        """Return cosines and sines of each position for each local layer with attention, ``[context, 2, pairs]`` fp32.

        Layers that turn alike have the same tensor. A factor on the part of each head that turns is in it.
        """
        found: dict[int, Tensor] = {}
        made: dict[tuple[int, int] | None, Tensor] = {}
        for index, layer in enumerate(self.decoder.layers):
            attention = layer.self_attention
            if isinstance(attention, GatedDeltaNet):
                continue
            if attention.rotation not in made:
                first, end = attention.rotation or (0, 2 * len(self.rotary_pos_emb.inv_freq))
                table = rotary_table(self.rotary_pos_emb.inv_freq[first // 2 : end // 2], self.max_sequence_length)
                scaled = attention.scaled_part
                made[attention.rotation] = table if scaled is None else table * scaled[1]
            found[index] = made[attention.rotation]
        return found


def build_transformer(
    model: ModelConfig,
    layout: ParallelLayout,
    groups: ProcessGroupCollection,
    device: torch.device,
    *,
    vocab_size: int,
    has_value_head: bool = False,
    lora: LoRAConfig | None = None,
    seed: int = 1,
    is_empty: bool = False,
    chunk: int = 0,
    fp8: Fp8 = "none",
) -> Transformer:
    """Build this rank's stage and shard of a model, with weights not yet set; with ``vpp`` above 1 one of its chunks.

    Args:
        model: Shape of the model.
        layout: How it is cut; ``groups`` must be of such a mesh.
        groups: This rank's process groups.
        device: Where the weights live; ``meta`` for shapes only.
        vocab_size: True vocabulary, before padding.
        has_value_head: Values instead of logits.
        lora: Adapters, which are then all that can be trained of it.
        seed: Seed of the adapters' dropout.
        is_empty: The weights are on ``meta``, and take no memory yet; see ``fsdp.shard_model``.
        chunk: Which of the stage's virtual pipeline chunks.
        fp8: Scaling of 8-bit numbers in the linear layers.

    Raises:
        LayoutError: The layout cannot cut the model.
        ConfigError: The device has no 8-bit numbers of this kind.
    """
    check_cut(model, layout, f"layout {layout}")
    if fp8 != "none":
        check_device(fp8, device)
    config = transformer_config(model, layout, device, fp8)
    stage = chunk * layout.pp + groups.pp.rank()
    first, last = stage == 0, stage == layout.pp * layout.vpp - 1
    counts = layout.layer_counts(model.num_layers, f"layout {layout}")
    if device.type == "cuda":
        _add_rng_states()
    # Transformer Engine fuses norms into linear layers, whose input an adapter would not see.
    has_fused_norms = lora is None and model.pre_norms and device.type == "cuda" and has_transformer_engine()
    layers = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    block, experts = _block_spec(model, config, layers, is_local=not has_fused_norms)
    with torch.device("meta") if is_empty else device:
        transformer = Transformer(
            config=config,
            transformer_layer_spec=block,
            vocab_size=padded_vocab_size(model, vocab_size, layout.tp),
            max_sequence_length=model.max_context,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=model.tied_embeddings and not has_value_head,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            pg_collection=groups,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        if has_value_head and last:
            transformer.output_layer = ValueHead(config.hidden_size, config.params_dtype, device)
        for index, layer in enumerate(transformer.decoder.layers):
            # megatron-core's own count takes stages to be equal.
            layer.layer_number = layer.self_attention.layer_number = layers[index] + 1
            _finish_layer(layer, index, model, experts, groups, device)
        if lora is not None:
            transformer.requires_grad_(False)
            transformer.dropout = Dropout(lora.dropout, seed) if lora.dropout else None
            for layer in transformer.decoder.layers:
                attach(layer, lora, transformer.dropout, groups)
    if layout.splits_sequences:
        transformer.sequence_switch = SequenceSwitch(transformer)
    if device.type == "cpu" and config.params_dtype is torch.float32:
        use_onednn(transformer)
    set_rotary(transformer, model, device)
    transformer.aligned_tokens = 1 if fp8 == "none" else ALIGNED_TOKENS
    transformer.flops = model_flops(model, vocab_size=vocab_size, has_value_head=has_value_head)
    _note_shape(transformer, model, has_value_head=has_value_head)
    # megatron-core's torch norm makes fp32 weights whatever the dtype; its own training casts them too (Float16Module).
    transformer.to(None if is_empty else device, config.params_dtype)
    _finish_mixtures(transformer, is_empty=is_empty)
    return transformer


def _note_shape(transformer: Transformer, model: ModelConfig, *, has_value_head: bool) -> None:
    """Note what of the model's shape its passes ask for."""
    transformer.has_scaled_embeddings = model.scaled_embeddings
    transformer.rotated_pairs = rotated_pairs(model)
    transformer.has_latent_attention = model.kv_lora_rank is not None
    transformer.logit_softcap = None if has_value_head else model.logit_softcap


def _finish_mixtures(transformer: Transformer, *, is_empty: bool) -> None:
    """Lay the experts of each mixture side by side; the bias that chooses them stays in fp32."""
    for mixture in mixtures(transformer):
        if mixture.router.expert_bias is not None:
            # Steps of it are smaller than bf16 can tell.
            mixture.router.expert_bias.data = mixture.router.expert_bias.float()
        for stack in () if is_empty else mixture.stacks:
            lay_side_by_side(stack)


def build_stage(
    model: ModelConfig, layout: ParallelLayout, groups: ProcessGroupCollection, device: torch.device, **options: Any
) -> Transformer | Chunks:
    """Build this rank's stage and shard as ``build_transformer`` does; with ``vpp`` above 1 all its chunks."""
    parts = [build_transformer(model, layout, groups, device, chunk=chunk, **options) for chunk in range(layout.vpp)]
    return parts[0] if layout.vpp == 1 else Chunks(parts)


def set_rotary(transformer: Transformer, model: ModelConfig, device: torch.device) -> None:
    """Set the frequencies of the rotary embedding, which no checkpoint holds."""
    transformer.rotary_pos_emb.inv_freq = all_frequencies(model).to(device)


def _block_spec(
    model: ModelConfig, config: TransformerConfig, layers: Sequence[int], *, is_local: bool
) -> tuple[TransformerBlockSubmodules, MoESubmodules | None]:
    """Return the spec of a stage of these layers, and the submodules of its mixtures of experts.

    megatron-core's local layers, or Transformer Engine's; our attention in both. Every norm is named here: left to
    itself megatron-core takes the final one from whichever package is installed, wherever the model is.
    """
    has_head_norms = model.qk_norm and model.qk_norm_over == "head"
    known: dict[str, Any] = dict(num_experts=model.num_experts, moe_grouped_gemm=False, qk_layernorm=has_head_norms)
    if is_local:
        layer = get_gpt_layer_local_spec(**known, normalization=config.normalization)
    else:
        layer = get_gpt_layer_with_transformer_engine_spec(**known)
    parts = layer.submodules
    if model.kv_lora_rank is not None:
        parts.self_attention = ModuleSpec(module=LatentSelfAttention, params={"model": model})
        # Transformer Engine's would be in the projection that is not there.
        parts.input_layernorm = TENorm
    else:
        parts.self_attention.module = GroupedSelfAttention
        parts.self_attention.submodules.core_attention = SdpaCoreAttention
    experts = None
    if model.num_experts is not None:
        experts, parts.mlp, layer.module = parts.mlp.submodules, IdentityOp, RoutedLayer
    norm = TENorm
    if is_local:
        norm = RmsNorm if model.zero_centered_norms else WrappedTorchNorm
        parts.input_layernorm = parts.pre_mlp_layernorm = norm if model.pre_norms else IdentityOp
        if has_head_norms:
            parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = norm
    if model.expert_norms:
        parts.pre_mlp_layernorm = IdentityOp
    specs = [_layer_spec(layer, model, index) for index in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm), experts


def _layer_spec(layer: ModuleSpec, model: ModelConfig, index: int) -> ModuleSpec:
    """Return the spec of one layer."""
    if index in model.linear_layers:
        return _with_linear_attention(layer, model)
    if not (model.has_global_heads or model.value_norm):
        return layer
    parts = copy.copy(layer.submodules)
    parts.self_attention = replace(parts.self_attention, params={"model": model.of_layer(index)})
    return replace(layer, submodules=parts)


def _with_linear_attention(layer: ModuleSpec, model: ModelConfig) -> ModuleSpec:
    """Return the spec of a layer with linear attention in the place of its attention."""
    parts = copy.copy(layer.submodules)
    parts.self_attention = ModuleSpec(module=GatedDeltaNet, params={"model": model})
    if parts.input_layernorm is IdentityOp and model.pre_norms:
        # Transformer Engine's would be in the projection that is not there.
        parts.input_layernorm = TENorm
    return replace(layer, submodules=parts)


_DENSE = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
"""Of the dense layers of a mixture, whose norms stand before them as in the other layers."""


def _finish_layer(
    layer: TransformerLayer,
    local_layer: int,
    model: ModelConfig,
    experts: MoESubmodules | None,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> None:
    """Put in what megatron-core's layer lacks, or has the same for all layers."""
    if isinstance(layer.self_attention, GatedDeltaNet):
        layer.self_attention.local_layer = local_layer
    else:
        layer.self_attention.core_attention.local_layer = local_layer
        _finish_attention(layer, model, groups)
    if experts is not None and (width := model.ffn_size(layer.layer_number - 1)) is not None:
        # Of the width megatron-core asks the configuration too.
        dense = copy.copy(layer.config)
        dense.ffn_hidden_size = width
        layer.mlp = GatedMLP(dense, _DENSE, ffn_hidden_size=width, tp_group=groups.tp)
    elif experts is not None:
        kind = NormedExpertLayer if model.expert_norms else ExpertLayer
        layer.mlp = kind(layer.config, experts, layer.layer_number, groups, model, device)
    else:
        # megatron-core's layer builds its own class without a warning, and has no other place for ours.
        assert type(layer.mlp) is MLP, f"{type(layer.mlp)}: expected megatron-core's MLP"
        layer.mlp.__class__ = GatedMLP
    if model.post_norms:
        for module in (layer.self_attention, layer.mlp):
            normalize_output(module, layer.config)
    if model.layer_scalars:
        scale_output(layer, layer.config.params_dtype)


def _finish_attention(layer: TransformerLayer, model: ModelConfig, groups: ProcessGroupCollection) -> None:
    """Tell a layer's attention what megatron-core's configuration does not."""
    core, index = layer.self_attention.core_attention, layer.layer_number - 1
    has_window = model.has_window(index)
    if model.attention_sinks:
        core.add_sinks()
    has_other_rotation = index in model.no_rope_layers or (has_window and model.local_rotary_base is not None)
    if model.kv_lora_rank is None and model.rotary_size < model.head_size and rotary_factor(model) != 1:
        layer.self_attention.scaled_part = model.rotary_size, rotary_factor(model)
    if len(pairs := rotated_pairs(model)) > 1:
        first, other = (2 * each for each in pairs)
        layer.self_attention.rotation = (first, first + other) if has_other_rotation else (0, first)
    core.scoring = Scoring(
        scale=model.plain_scale if has_other_rotation else layer.config.softmax_scale,
        softcap=model.attention_softcap,
        window=model.window if has_window else None,
    )
    if model.qk_norm and model.qk_norm_over == "projection":
        attention, head = layer.self_attention, model.head_size
        attention.q_layernorm = ProjectionNorm(layer.config, model.num_attention_heads, head, groups.tp)
        attention.k_layernorm = ProjectionNorm(layer.config, model.query_groups, head, groups.tp)
