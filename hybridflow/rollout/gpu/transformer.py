"""The forward pass of a model on a GPU for generating: few launches for each layer, and decoding as captured graphs.

The same mathematics on the same weights as the training model's modules, which are read where they are: an update of
the weights needs neither a copy nor a new graph. Tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridflow.data.images import FIRST_ID
from hybridflow.models.attention import GroupedSelfAttention
from hybridflow.models.experts import ExpertLayer
from hybridflow.models.gated import kernel_gate
from hybridflow.models.gated_delta_net import GatedDeltaNet
from hybridflow.models.gpt import Transformer
from hybridflow.models.images import ImageRows
from hybridflow.models.latent_attention import LatentSelfAttention
from hybridflow.models.lora import Adapter, adapter_of
from hybridflow.models.norm import ProjectionNorm
from hybridflow.models.scoring import Scoring
from hybridflow.models.shapes import LAYER_SCALAR
from hybridflow.rollout.edits import joined_columns
from hybridflow.rollout.gpu import ops
from hybridflow.rollout.gpu.cache import GpuAttention, rows_per_tile
from hybridflow.rollout.gpu.experts import GpuExperts
from hybridflow.rollout.paged import cache_shapes


@dataclass(frozen=True)
class _Layer:
    """A layer's tensors and settings.

    Attributes:
        qkv: Module of the fused projection; with latent attention of the last projection of queries.
        projection: Module of the projection after attention.
        delta: Module of linear attention; None: the layer has none.
        latent: Module of latent attention; None: the layer has none.
        mlp: Module of the feed-forward block, or its experts.
        input_norm: Weight of the norm before attention; None: there is none.
        mlp_norm: Weight of the norm before the feed-forward block; None: there is none.
        head_norms: Weights of the norms of queries and keys; None: there are none.
        has_wide_norms: Whether these norms are over all heads of a token, and the weights whole on each rank.
        has_value_norm: Whether values are normalized, without a weight.
        groups: Query groups on this rank; 0: the layer has linear or latent attention.
        head: Width of a head; 0 likewise.
        is_shared: Whether a query group is on several ranks.
        picked: Where the dims of the heads here are in the projection, or if it is shared in those of all ranks side by
            side, ``[groups * heads of a group * head]`` int64; None: they are the projection.
        attention_norm: Weight of the norm of attention's output; None: there is none.
        output_norm: Weight of the norm of the feed-forward block's output; None: there is none.
        factor: What the layer's output is multiplied by, ``[1]``; None: nothing.
        scoring: How scores are made; None: the layer has linear attention.
        rotary: Cosines and sines of each position, ``[context, 2, turned pairs]`` fp32; None likewise.
        number: Its number in the whole model, counted from 1.
    """

    qkv: nn.Module
    projection: nn.Module
    delta: GatedDeltaNet | None
    latent: LatentSelfAttention | None
    mlp: Any
    input_norm: Tensor | None
    mlp_norm: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    has_wide_norms: bool
    has_value_norm: bool
    groups: int
    head: int
    is_shared: bool
    picked: Tensor | None
    attention_norm: Tensor | None
    output_norm: Tensor | None
    factor: Tensor | None
    scoring: Scoring | None
    rotary: Tensor | None
    number: int


class _Pending(NamedTuple):
    """A product that is still to be added to the hidden states, with what follows, see ``kernels.add_norm``."""

    product: Tensor | None = None
    norm: Tensor | None = None
    factor: Tensor | None = None


class GpuTransformer:
    """A stage and shard of a model, computed as ``Transformer.forward`` computes it.

    Args:
        model: Whose weights are read in place. Factors of adapters are copied, those of a layer's parts side by side.
        group: Its tensor-parallel ranks.
        vocab_size: True vocabulary.

    Attributes:
        layers: Tensors and settings of each layer.
        num_groups: Query groups on this rank, of layers that differ the fewest; of latent attention the groups of heads
            that programs share out.
        rows_per_tile: Most rows of a tile of a prompt, of all layers.
        num_columns: Columns of the logits on this rank, padding included; 0 on a stage that has none.
        softcap: Cap on the logits; 0: none.
        is_capturable: Whether a step needs nothing of the host: no experts but those that ``GpuExperts`` computes.
    """

    def __init__(self, model: Transformer, group: dist.ProcessGroup, vocab_size: int) -> None:
        config = model.config
        self._model = model
        self._group = group if group.size() > 1 else None
        self._tp_rank = group.rank()
        shapes = set(cache_shapes(model).values())
        self.num_groups = min((groups for groups, _ in shapes), default=0)
        heads = config.num_attention_heads // group.size()
        if model.has_latent_attention:
            self.num_groups = -(-heads // ops.LATENT_HEADS)
        self.rows_per_tile = {rows_per_tile(config.params_dtype, heads // groups, head) for groups, head in shapes}
        self._eps = config.layernorm_epsilon
        self._centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._gate = kernel_gate(config)
        tables = model.rotary_tables()
        self.layers = [_layer(each, tables.get(at)) for at, each in enumerate(model.decoder.layers)]
        scaled = [getattr(each.self_attention, "scaled_part", None) for each in model.decoder.layers]
        self._rotary_factor = next((part[1] for part in scaled if part is not None), 1.0)
        adapters = [each for each in model.modules() if isinstance(each, Adapter)]
        # Of factors a captured graph reads copies, wherever an update leaves the factors themselves.
        copied = {id(factor) for adapter in adapters for factor in adapter.parameters()}
        read = *model.parameters(), *model.buffers()
        self._weights = [each for each in read if id(each) not in copied]
        self._factors: dict[int, tuple[float, Tensor, Tensor]] = {}
        self._factor: Tensor | None = None
        if model.has_scaled_embeddings:
            # In the weights' own format, as these models were trained.
            device = next(model.parameters()).device
            self._factor = torch.full((), config.hidden_size**0.5, dtype=config.params_dtype, device=device)
        self.vocab_size = vocab_size
        self.num_columns = len(self._output_weight()) if model.post_process else 0
        self.softcap = model.logit_softcap or 0.0
        self.is_capturable = not any(isinstance(each.mlp, ExpertLayer) for each in self.layers)
        self.copy_adapters()

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return self._model.images is not None

    @torch.no_grad()
    def copy_adapters(self) -> None:
        """Copy the adapters' present factors, to where a captured graph finds them."""
        for module in self._linears():
            adapter = adapter_of(module)
            if adapter is not None:
                found = adapter.joined()
                _, *held = self._factors.setdefault(id(module), (adapter.scale, *found))
                for copy, factor in zip(held, found, strict=True):
                    copy.copy_(factor)

    def locate(self) -> tuple[int, ...]:
        """Take note of where the weights are, and return it: a captured graph holds as long as they are there."""
        for layer in self.layers:
            if isinstance(layer.mlp, GpuExperts):
                layer.mlp.locate()
        return tuple(each.data_ptr() for each in self._weights)

    def __call__(self, tokens: Tensor, attention: GpuAttention, rows: Tensor | None) -> Tensor:
        """Compute as ``Transformer.forward``; logits are not capped if ``rows`` is None.

        Hidden states come in by ``set_input_tensor`` of the model. Collective: tp.
        """
        model = self._model
        if model.sequence_switch is not None:
            # Left on by training; experts would take these tokens for slices.
            model.sequence_switch.turn(False)
        images = attention.images
        if images is not None:
            attention.turn_by(self._turns(images))
        hidden = self._embed(tokens, images) if model.pre_process else model.decoder.input_tensor[:, 0].clone()
        hidden, pending = self._through_layers(hidden, attention)
        if not model.post_process:
            return self._added(hidden, pending)[:, None]
        normed = self._added(hidden, pending, model.decoder.final_layernorm.weight)
        logits = linear(normed if rows is None else normed[rows], self._output_weight())
        cap = model.logit_softcap
        return logits if cap is None or rows is None else cap * torch.tanh(logits / cap)

    def _output_weight(self) -> Tensor:
        model = self._model
        shared = model.share_embeddings_and_output_weights
        weight: Tensor = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        return weight

    def _turns(self, images: ImageRows) -> Tensor:
        """Return cosines and sines of each row, ``[rows, 2, turned pairs]`` fp32, which all layers turn by."""
        angles = images.positions.float() * self._model.rotary_pos_emb.inv_freq
        return self._rotary_factor * torch.stack([angles.cos(), angles.sin()], dim=1)

    def _through_layers(self, hidden: Tensor, attention: GpuAttention) -> tuple[Tensor, _Pending]:
        """Run the layers; return hidden states, and the last product, which is still to be added to them."""
        pending, images = _Pending(), attention.images
        for index, layer in enumerate(self.layers):
            normed = self._added(hidden, pending, layer.input_norm)
            attend = self._attend if layer.latent is None else self._attend_latent
            context = attend(index, layer, normed, attention)
            product = self._over_group(self._partial(layer.projection, context))
            normed = self._added(hidden, _Pending(product, layer.attention_norm), layer.mlp_norm)
            pending = _Pending(self._feed_forward(layer, normed), layer.output_norm, layer.factor)
            if images is not None and layer.number <= images.reader.settings.num_deep:
                hidden = images.add(self._added(hidden, pending)[:, None], layer.number, 0)[:, 0]
                pending = _Pending()
        return hidden, pending

    def _added(self, hidden: Tensor, pending: _Pending, weight: Tensor | None = None) -> Tensor:
        """Add a product to ``hidden``, in place, and return the sum, normalized if there is a weight."""
        normed = None if weight is None else torch.empty_like(hidden)
        if pending.product is not None or normed is not None:
            product, post, factor = pending
            ops.add_norm(hidden, normed, product, post, weight, self._eps, self._centre, factor)
        return hidden if normed is None else normed

    def _attend_latent(self, index: int, layer: _Layer, normed: Tensor, attention: GpuAttention) -> Tensor:
        latent, given = layer.latent, normed
        assert latent is not None and layer.scoring is not None and layer.rotary is not None
        if hasattr(latent, "linear_q_down_proj"):
            narrow = linear(normed, latent.linear_q_down_proj.weight)
            given = torch.empty_like(narrow)
            norm = latent.q_layernorm
            ops.add_norm(narrow, given, None, None, norm.weight, norm.eps, self._centre)
        of_keys, of_values = latent.up_projections(latent.linear_kv_up_proj.weight)
        query = self._linear(layer.qkv, given).view(len(normed), len(of_keys), -1)
        compressed, norm = linear(normed, latent.linear_kv_down_proj.weight), latent.kv_layernorm
        turned = attention.store_latent(index, query, compressed, layer.rotary, norm.weight, norm.eps, self._centre)
        plain, prompts = query[..., : of_keys.shape[1]], attention.prompts
        values = normed.new_empty(len(normed), *of_values.shape[:2])
        if prompts is None:
            self._attend_vectors(values, index, layer, plain, turned, attention)
            return values.flatten(1)
        rows, others = prompts.rows, prompts.others
        values[rows] = prompts.attend(index, latent, plain[rows], turned[rows], layer.scoring)
        if attention.others is not None:
            own = values.new_empty(len(others), *values.shape[1:])
            self._attend_vectors(own, index, layer, plain[others], turned[others], attention.others)
            values[others] = own
        return values.flatten(1)

    def _attend_vectors(
        self, values: Tensor, index: int, layer: _Layer, plain: Tensor, turned: Tensor, attention: GpuAttention
    ) -> None:
        """Write what rows see of compressed vectors, as ``[rows, heads, value]``."""
        assert layer.latent is not None and layer.scoring is not None
        of_keys, of_values = layer.latent.up_projections(layer.latent.linear_kv_up_proj.weight)
        narrow = torch.bmm(plain.transpose(0, 1), of_keys)
        context = attention.attend_latent(index, narrow, turned, layer.scoring)
        # Where the next product reads it, without a copy.
        torch.bmm(context, of_values.transpose(1, 2), out=values.transpose(0, 1))

    def _attend(self, index: int, layer: _Layer, normed: Tensor, attention: GpuAttention) -> Tensor:
        mixed = self._linear(layer.qkv, normed)
        if layer.delta is not None:
            assert attention.recurrence is not None, "made with a cache that has states"
            return attention.recurrence.context(index, mixed, layer.delta)
        assert layer.scoring is not None and layer.rotary is not None, "attention turns and scores"
        config = self._model.config
        if layer.is_shared and self._group is not None:
            # Ranks have parts of a group, and each of them needs its key and its value.
            mixed = joined_columns(self._group, mixed)
        norms, squares = layer.head_norms, None
        if norms is not None and layer.has_wide_norms:
            norms, squares = self._wide_norms(layer, mixed, norms)
        if layer.picked is not None:
            mixed = mixed.index_select(1, layer.picked)
        return attention.attend_mixed(
            index,
            mixed.view(len(mixed), layer.groups, -1, layer.head),
            layer.rotary,
            *(norms, layer.scoring, self._eps, self._centre),
            squares=squares,
            is_gated=config.attention_output_gate,
            is_interleaved=config.rotary_interleaved,
            has_value_norm=layer.has_value_norm,
        )

    def _wide_norms(
        self, layer: _Layer, mixed: Tensor, norms: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return this rank's part of norms over all heads, and the mean squares, ``[rows, 2]`` fp32."""
        ranks, groups = self._model.config.tensor_model_parallel_size, self._model.config.num_query_groups
        squares = mixed.new_empty(len(mixed), 2, dtype=torch.float32)
        if layer.is_shared:
            ops.mean_squares(squares, mixed.view(len(mixed), groups, -1, layer.head), 1)
        else:
            ops.mean_squares(squares, mixed.view(len(mixed), layer.groups, -1, layer.head), ranks)
            self._over_group(squares)
        parts = min(ranks, groups)
        query_norm, key_norm = norms
        own = query_norm.view(ranks, -1)[self._tp_rank], key_norm.view(parts, -1)[self._tp_rank * parts // ranks]
        return own, squares

    def _feed_forward(self, layer: _Layer, normed: Tensor) -> Tensor:
        if isinstance(layer.mlp, GpuExperts) and layer.mlp.norms:
            return self._normed_experts(layer.mlp, normed)
        if isinstance(layer.mlp, GpuExperts):
            routed, shared = layer.mlp(normed), layer.mlp.shared
            if shared is not None:
                output = self._dense(shared, normed)
                gate = shared.gate_weight
                routed = routed + output if gate is None else routed.addcmul_(output, linear(normed, gate).sigmoid())
            return self._over_group(routed)
        if isinstance(layer.mlp, ExpertLayer):
            # Without the hook that normalizes what it returns.
            whole: Tensor = layer.mlp.forward(normed[:, None])[0][:, 0]
            return whole
        return self._over_group(self._dense(layer.mlp, normed))

    def _normed_experts(self, experts: GpuExperts, hidden: Tensor) -> Tensor:
        """Compute as ``NormedExpertLayer.forward``."""
        before_shared, behind_shared, before_routed, behind_routed = experts.norms
        routed = self._over_group(experts(self._added(hidden, _Pending(), before_routed), hidden))
        shared = self._over_group(self._dense(experts.shared, self._added(hidden, _Pending(), before_shared)))
        return self._added(self._added(shared, _Pending(), behind_shared), _Pending(routed, behind_routed))

    def _dense(self, mlp: Any, normed: Tensor) -> Tensor:
        """Return this rank's part of the output of a feed-forward block that is not a mixture."""
        both = self._linear(mlp.linear_fc1, normed)
        inner = both.new_empty(len(both), both.shape[1] // 2)
        ops.gate(inner, both, *self._gate)
        return self._partial(mlp.linear_fc2, inner)

    def _partial(self, module: Any, inputs: Tensor) -> Tensor:
        """Return this rank's part of a product that is summed over the ranks, of which one adds the bias."""
        return self._linear(module, inputs, has_bias=self._tp_rank == 0)

    def _linear(self, module: Any, inputs: Tensor, *, has_bias: bool = True) -> Tensor:
        product = linear(inputs, module.weight, getattr(module, "bias", None) if has_bias else None)
        if id(module) not in self._factors:
            return product
        scale, a, b = self._factors[id(module)]
        # Of a layer whose inputs are cut this is a part, as the product is, and both are summed over the ranks.
        return product.addmm_(linear(inputs, a), b, alpha=scale)

    def _over_group(self, product: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(product, group=self._group)
        return product

    def _embed(self, tokens: Tensor, images: ImageRows | None) -> Tensor:
        weight = self._model.embedding.word_embeddings.weight
        if images is not None:
            tokens = tokens.masked_fill(tokens >= FIRST_ID, images.reader.settings.token_id)
        if self._group is None:
            hidden = weight.index_select(0, tokens)
        else:
            local = tokens - self._tp_rank * len(weight)
            is_mine = (local >= 0) & (local < len(weight))
            hidden = weight.index_select(0, local.clamp(0, len(weight) - 1)) * is_mine[:, None]
            dist.all_reduce(hidden, group=self._group)
        if images is not None:
            hidden = images.put(hidden[:, None], 0)[:, 0]
        embedded: Tensor = hidden if self._factor is None else hidden * self._factor
        return embedded

    def _linears(self) -> list[nn.Module]:
        found = []
        for layer in self.layers:
            found += [layer.qkv, layer.projection]
            if not isinstance(layer.mlp, ExpertLayer | GpuExperts):
                found += [layer.mlp.linear_fc1, layer.mlp.linear_fc2]
        return found


def _layer(layer: TransformerLayer, rotary: Tensor | None) -> _Layer:
    attention, mlp = layer.self_attention, layer.mlp
    first = None if isinstance(mlp, ExpertLayer) else mlp.linear_fc1
    delta = attention if isinstance(attention, GatedDeltaNet) else None
    latent = attention if isinstance(attention, LatentSelfAttention) else None
    if latent is not None:
        qkv, projection = latent.last_query_projection, latent.linear_proj
    elif delta is not None:
        qkv, projection = delta.in_proj, delta.out_proj
    else:
        qkv, projection = attention.linear_qkv, attention.linear_proj
    is_plain = delta is None and latent is None
    query_norm, key_norm = (_norm(getattr(attention, f"{part}_layernorm", None)) for part in "qk")
    is_quick = isinstance(mlp, ExpertLayer) and GpuExperts.can_compute(mlp)
    return _Layer(
        qkv=qkv,
        projection=projection,
        delta=delta,
        latent=latent,
        mlp=GpuExperts(mlp) if is_quick else mlp,
        input_norm=_norm(layer.input_layernorm, qkv),
        mlp_norm=_norm(layer.pre_mlp_layernorm, first),
        head_norms=None if query_norm is None or key_norm is None else (query_norm, key_norm),
        has_wide_norms=delta is None and isinstance(getattr(attention, "q_layernorm", None), ProjectionNorm),
        has_value_norm=is_plain and attention.has_value_norm,
        groups=attention.num_query_groups_per_partition if is_plain else 0,
        head=attention.hidden_size_per_attention_head if is_plain else 0,
        is_shared=is_plain and attention.config.num_query_groups < attention.world_size,
        picked=_picked(attention) if is_plain else None,
        attention_norm=_norm(getattr(attention, "post_layernorm", None)),
        output_norm=_norm(getattr(mlp, "post_layernorm", None)),
        factor=getattr(layer, LAYER_SCALAR, None),
        scoring=attention.core_attention.whole_scoring if delta is None else None,
        rotary=rotary,
        number=layer.layer_number,
    )


def _picked(attention: GroupedSelfAttention) -> Tensor | None:
    """See ``_Layer.picked``."""
    config, ranks, head = attention.config, attention.world_size, attention.hidden_size_per_attention_head
    groups, is_shared = config.num_query_groups, config.num_query_groups < attention.world_size
    if not (is_shared or attention.keys_are_values):
        return None
    device = attention.linear_qkv.weight.device
    queries = config.num_attention_heads // groups * (1 + config.attention_output_gate)
    heads = queries + (1 if attention.keys_are_values else 2)
    sharers = ranks // groups if is_shared else 1
    first, part = divmod(attention.tp_group.rank(), sharers) if is_shared else (0, 0)
    own = queries // sharers
    of_group = torch.tensor([*range(part * own, (part + 1) * own), queries, heads - 1], device=device)
    of_rank = heads * torch.arange(first, first + attention.num_query_groups_per_partition, device=device)
    picked: Tensor = head * (of_rank[:, None] + of_group)[..., None] + torch.arange(head, device=device)
    return picked.flatten()


def _norm(norm: nn.Module | None, fused_into: Any = None) -> Tensor | None:
    """Return a norm's weight; Transformer Engine's linear layers may have the norm of their input in them."""
    if norm is None or isinstance(norm, IdentityOp):
        weight: Tensor | None = getattr(fused_into, "layer_norm_weight", None)
        return weight
    return norm.get_parameter("weight")
