"""A ``GPTModel`` of megatron-core in memory: its settings read off its own description, and its weights made whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.nn.functional import silu

from hybridflow.checkpoint.formats.megatron_args import MEGATRON_SETTINGS, router_settings
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.tensor_file import entry_of
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig, RotaryScaling, check_model
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.rotary import rotary_frequencies
from hybridflow.models.shapes import model_spec
from hybridflow.models.specs import logical_tensors, pipeline_layers
from hybridflow.reshard.spec import TensorSpec, cut, slices, stage_of
from hybridflow.reshard.views import DTYPE_NAMES

_COMPUTED: dict[str, tuple[object, ...]] = {
    **MEGATRON_SETTINGS,
    "normalization": ("RMSNorm",),
    "gated_linear_unit": (True,),
    "activation_func": (silu,),
    "add_bias_linear": (False,),
    "moe_apply_probs_on_input": (False,),
}
"""Settings of a ``TransformerConfig`` and the values that are computed here; a version may lack some of them."""

_WHERE = "GPTModel"
_REMEDY = "save it as a checkpoint that hybridflow reads (docs/checkpoints.md) and name its directory"


def read_megatron(given: GPTModel, *, vocab_size: int | None = None) -> ModelConfig:
    """Read the settings of a ``GPTModel``.

    Args:
        given: The model, or the part of it that this rank holds.
        vocab_size: True vocabulary, without padding; None: all rows of the embedding.

    Raises:
        ConfigError: It asks for what is not computed here; names the setting.
    """
    if type(given).forward is not GPTModel.forward:
        raise ConfigError(
            f"{type(given).__name__}: overrides forward of {_WHERE}, which is what would be computed here; give a "
            f"{_WHERE} of megatron-core itself"
        )
    config = given.config
    found = {f"config.{name}": (getattr(config, name, each[0]), each) for name, each in _COMPUTED.items()}
    found |= {
        "position_embedding_type": (given.position_embedding_type, ("rope",)),
        "rotary_percent": (given.rotary_percent, (1, 1.0)),
        "vp_stage": (given.vp_stage, (None,)),
        "config.expert_model_parallel_size": (config.expert_model_parallel_size, (None, 1)),
        "config.params_dtype": (config.params_dtype, tuple(DTYPE_NAMES)),
    }
    for name, (value, allowed) in found.items():
        if value not in allowed:
            told = ", ".join(_said(each) for each in allowed)
            raise ConfigError(f"{_WHERE}.{name}={_said(value)} is not computed; only {told} is: choose another model")
    if vocab_size is not None and not 0 < vocab_size <= given.vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size}: the {_WHERE} has {given.vocab_size} rows in its embedding; give at most so many"
        )
    experts: dict[str, Any] = {}
    if config.num_moe_experts is not None:
        experts = dict(
            num_experts=config.num_moe_experts,
            experts_per_token=config.moe_router_topk,
            **router_settings(vars(config)),
        )
    width = config.ffn_hidden_size if config.num_moe_experts is None else config.moe_ffn_hidden_size
    model = ModelConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=width,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        head_dim=config.kv_channels,
        max_context=given.max_sequence_length,
        vocab_size=given.vocab_size if vocab_size is None else vocab_size,
        rotary_base=float(given.rotary_base),
        norm_eps=config.layernorm_epsilon,
        zero_centered_norms=config.layernorm_zero_centered_gamma,
        tied_embeddings=given.share_embeddings_and_output_weights,
        qkv_bias=config.add_qkv_bias,
        qk_norm=config.qk_layernorm,
        attention_scale=config.softmax_scale,
        window=_window(config.window_size),
        init_std=config.init_method_std,
        dtype=DTYPE_NAMES[config.params_dtype],
        **experts,
    )
    model = _with_rotary(model, given)
    check_model(model, _WHERE)
    return model


def _said(value: object) -> str:
    return getattr(value, "__name__", None) or repr(value)


def _window(size: Any) -> int | None:
    if size is None:
        return None
    if tuple(size)[1] != 0:
        raise ConfigError(f"{_WHERE}.config.window_size={size} is not computed; only (tokens before, 0) is")
    return int(size[0]) + 1


def _with_rotary(model: ModelConfig, given: GPTModel) -> ModelConfig:
    """Return the model with its rotary scaling, checked against its actual frequencies."""
    stretch, frequencies = given.rotary_pos_emb.seq_len_interpolation_factor, given.rotary_pos_emb.inv_freq.cpu()
    if stretch is not None:
        model = replace(model, rotary_scaling=RotaryScaling(kind="linear", factor=float(stretch)))
        frequencies = frequencies / stretch
    elif given.rotary_scaling:
        # The factor is told nowhere; it is by what the slowest pair of dims was slowed down.
        plain = rotary_frequencies(model)
        factor = float(plain[-1] / frequencies[-1])
        scaling = RotaryScaling(
            kind="llama3",
            factor=float(round(factor)),
            original_context=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
        model = replace(model, rotary_scaling=scaling)
    if not torch.allclose(rotary_frequencies(model), frequencies.float(), rtol=1e-4):
        raise ConfigError(f"{_WHERE}.rotary_pos_emb.inv_freq: is no scaling that is computed here; {_REMEDY}")
    return model


class MegatronSource(Source):
    """The weights of a ``GPTModel``, see ``source.Source``.

    If the model is cut, each rank gathers the parts of all others. It then holds the whole model in host memory while
    the source is there.

    Collective: of a model that is cut, its tensor and pipeline parallel groups.

    Args:
        given: The model, or this rank's part.
        vocab_size: As for ``read_megatron``.

    Raises:
        ConfigError: It asks for what is not computed here, or its tensors are not those of its settings.
    """

    format = "megatron-core"

    def __init__(self, given: GPTModel, *, vocab_size: int | None = None) -> None:
        self.path = Path("<GPTModel in memory>")
        self.model = read_megatron(given, vocab_size=vocab_size)
        groups = given.pg_collection
        tp, pp = groups.tp.size(), groups.pp.size()
        self.layout = None if tp == pp == 1 else f"tp{tp}.pp{pp}"
        # Its own padding may be more than a layout of ours would have.
        specs = model_spec(replace(self.model, vocab_size=given.vocab_size)).tensors
        held = logical_tensors(given)
        _check_held(held, {spec.name for spec in specs}, is_whole=pp == 1)
        if self.layout is None:
            whole = {spec.name: held[spec.name].detach().view(spec.shape) for spec in specs}
        else:
            whole = _gather(given, held, specs)
        self._tensors = {
            spec.name: whole[spec.name] if spec.padded_to is None else whole[spec.name][: self.model.vocab_size]
            for spec in specs
        }
        self.tensors: Mapping[str, TensorEntry] = {name: entry_of(each) for name, each in self._tensors.items()}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        return self._tensors[tensor].cpu()

    def identity(self) -> str:
        """See ``Source``; of names and shapes alone, since what is in memory has no time."""
        return hashlib.sha256(json.dumps([[name, *each] for name, each in self.tensors.items()]).encode()).hexdigest()


def _check_held(held: Mapping[str, Tensor], expected: set[str], *, is_whole: bool) -> None:
    strangers = sorted(held.keys() - expected)
    missing = sorted(expected - held.keys()) if is_whole else []
    if strangers or missing:
        what, name = ("has", strangers[0]) if strangers else ("lacks", missing[0])
        raise ConfigError(f"{_WHERE}: {what} {name}, which its settings do not tell; {_REMEDY}")
    away = [name for name, tensor in held.items() if tensor.device.type == "meta"]
    if away:
        raise ConfigError(f"{_WHERE}: {away[0]} is on the meta device, without values; load the weights first")


def _gather(given: GPTModel, held: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    """Gather every tensor whole, in host memory. Collective: tp, pp."""
    groups = given.pg_collection
    layers = pipeline_layers(given.config)
    layout = ParallelLayout(tp=groups.tp.size(), pp=groups.pp.size(), layers=layers)
    found = {}
    for spec in specs:
        stage = stage_of(spec.place, layout, given.config.num_layers, spec.name)
        whole = None
        if stage == groups.pp.rank():
            whole = _join(spec, held[spec.name].detach(), groups.tp)
        if groups.pp.size() > 1:
            sender = dist.get_global_rank(groups.pp, stage)
            if whole is None:
                like = next(iter(held.values()))
                whole = torch.empty(spec.shape, dtype=given.config.params_dtype, device=like.device)
            # Norms may be fp32 in a model that is not.
            whole = whole.to(given.config.params_dtype).contiguous()
            dist.broadcast(whole, sender, group=groups.pp)
        assert whole is not None, "each tensor is on some stage"
        found[spec.name] = whole.cpu()
    return found


def _join(spec: TensorSpec, local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join a tensor from the parts of a tensor-parallel group. Collective: tp."""
    size = group.size()
    if spec.tp_dim is None or size == 1:
        return local.view(spec.shape)
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local.contiguous(), group=group)
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    for index, part in enumerate(parts):
        box, shape, _ = cut(spec, size, index)
        whole[slices(box)] = part.view(shape)
    return whole
