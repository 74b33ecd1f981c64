"""Megatron-LM's arguments, as its checkpoints carry them, to and from the settings of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.formats.unpickle import Inert
from hybridflow.checkpoint.tensor_file import TORCH_DTYPES
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.spec import DType
from hybridflow.sections import read_section

# Argument -> the setting that says the same.
_SAME = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "norm_eps",
    "add_qkv_bias": "qkv_bias",
    "qk_layernorm": "qk_norm",
    "apply_layernorm_1p": "zero_centered_norms",
    "num_experts": "num_experts",
    "init_method_std": "init_std",
    "make_vocab_size_divisible_by": "vocab_divisible_by",
}
# Arguments that must be there, since without them Megatron-LM computes something else, and the values computed here.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "add_bias_linear": (False,),
}
MEGATRON_SETTINGS: dict[str, tuple[object, ...]] = {
    "rotary_interleaved": (False,),
    "no_rope_freq": (None,),
    "multi_latent_attention": (False,),
    "attention_output_gate": (False,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "window_attn_skip_freq": (None,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "moe_layer_freq": (1,),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_shared_expert_gate": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "glu_linear_offset": (0, 0.0),
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
}
"""What Megatron-LM's arguments and megatron-core's ``TransformerConfig`` call alike: the values computed here."""

# Further arguments and the values computed here; an older version may lack any of them.
_COMPUTED: dict[str, tuple[object, ...]] = {
    **MEGATRON_SETTINGS,
    "rotary_percent": (1, 1.0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "linear_attention_type": (None,),
    "linear_attention_freq": (None,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (None,),
    "num_shared_experts": (None, 0),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_latent_size": (None,),
    "retro_add_retriever": (False,),
}
# The scaling of Llama 3.1 as megatron-core has it; only the factor is an argument.
_LLAMA3 = {"kind": "llama3", "original_context": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read_args(found: Any, path: Path) -> Mapping[str, Any]:
    """Read the arguments in a loaded checkpoint file.

    Raises:
        CheckpointError: There are none.
    """
    args = found.get("args") if isinstance(found, dict) else None
    if not isinstance(args, Inert) or args.global_name != "argparse.Namespace":
        raise CheckpointError(
            f"{path}: holds no args, the arguments of Megatron-LM that describe the model; save it with Megatron-LM"
        )
    return args.attributes


def to_model(args: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Convert the arguments of a checkpoint to settings.

    Args:
        args: Arguments by name.
        where: What messages call them.

    Raises:
        ConfigError: An argument is missing or ill-typed, or asks for what is not computed here.
    """
    for name, allowed in {**_REQUIRED, **_COMPUTED}.items():
        value = args.get(name, None if name in _REQUIRED else allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"{where}: {name}={value!r} is not computed; only {', '.join(map(repr, allowed))} is: choose another "
                "model"
            )
    model = {setting: args[name] for name, setting in _SAME.items() if args.get(name) is not None}
    model["ffn_hidden_size"] = args.get("ffn_hidden_size")
    if args.get("num_experts") is not None:
        width = args.get("moe_ffn_hidden_size")
        model["ffn_hidden_size"] = width if width is not None else args.get("ffn_hidden_size")
        model["experts_per_token"] = args.get("moe_router_topk", 2)
        model |= router_settings(args)
    if args.get("group_query_attention", args.get("num_query_groups", 1) not in (None, 1)):
        model["num_query_groups"] = args.get("num_query_groups")
    model["tied_embeddings"] = not args.get("untie_embeddings_and_output_weights", False)
    model["max_context"] = args.get("max_position_embeddings", args.get("seq_length"))
    vocabulary = args.get("vocab_size")
    model["vocab_size"] = vocabulary if vocabulary is not None else args.get("padded_vocab_size")
    model["rotary_base"] = args.get("rotary_base", 10000)
    model |= _rotary(args, where) | _window(args, where)
    model["dtype"] = "fp32" if args.get("params_dtype", torch.float32) == torch.float32 else "bf16"
    return read_section(ModelConfig, model, source=where)


def router_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a mixture that Megatron-LM's arguments and a ``TransformerConfig`` call alike."""
    score = values.get("moe_router_score_function", "softmax")
    return {
        "router_score": score,
        # Scores of sigmoid are always normalized there.
        "normalized_experts": score == "sigmoid" or not values.get("moe_router_pre_softmax", False),
        "router_bias": values.get("moe_router_enable_expert_bias", False),
        "shared_ffn_hidden_size": values.get("moe_shared_expert_intermediate_size") or None,
    }


def to_args(model: ModelConfig, dtype: DType) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that describe a model, uncut; the inverse of ``to_model``.

    Raises:
        ConfigError: Megatron-LM has no arguments for it; names the settings.
    """
    plain = ModelConfig(num_layers=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=1, max_context=1)
    names = (
        *("pre_norms", "post_norms", "qk_norm_over", "activation", "scaled_embeddings", "linear_bias", "glu_clamp"),
        *("glu_offset", "attention_sinks", "rotary_dim", "rotary_interleaved", "local_rotary_base", "attention_scale"),
        *("attention_softcap", "logit_softcap", "window_layers"),
        # Megatron-LM has arguments for these, and names for their tensors, that are neither written nor read here.
        *("kv_lora_rank", "num_dense_layers", "router_groups", "routed_scaling"),
    )
    strange = [name for name in names if getattr(model, name) != getattr(plain, name)]
    if model.router_score == "sigmoid" and not model.normalized_experts:
        strange.append("normalized_experts")
    scaling = model.rotary_scaling
    if scaling is not None:
        told = {name: getattr(scaling, name) for name in _LLAMA3}
        if scaling.kind != "linear" and told != _LLAMA3:
            strange.append("rotary_scaling")
    if strange:
        values = ", ".join(f"{name}={getattr(model, name)!r}" for name in strange)
        raise ConfigError(f"a checkpoint of Megatron-LM is not written of a model with {values}; write another format")
    args: dict[str, Any] = {name: getattr(model, setting) for name, setting in _SAME.items()}
    args |= {name: allowed[0] for name, allowed in _REQUIRED.items()}
    args |= {
        "ffn_hidden_size": model.ffn_hidden_size,
        "moe_ffn_hidden_size": None if model.num_experts is None else model.ffn_hidden_size,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.normalized_experts,
        "moe_router_score_function": model.router_score,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size,
        "kv_channels": model.head_size,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "max_position_embeddings": model.max_context,
        "seq_length": model.max_context,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab_size(model),
        # A float in ours; Megatron-LM takes an integer.
        "rotary_base": int(model.rotary_base) if model.rotary_base == int(model.rotary_base) else model.rotary_base,
        "rotary_percent": 1.0,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling is not None and scaling.kind == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": None,
        "window_size": None if model.window is None else (model.window - 1, 0),
        "params_dtype": TORCH_DTYPES[dtype],
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    if scaling is not None and scaling.kind == "linear":
        args["rotary_seq_len_interpolation_factor"] = _whole(scaling.factor)
    return args


def padded_vocab_size(model: ModelConfig) -> int:
    """Return the rows of the embeddings where they are not cut."""
    assert model.vocab_size is not None, "a source's model has a vocabulary"
    return -(-model.vocab_size // model.vocab_divisible_by) * model.vocab_divisible_by


def layout_of(args: Mapping[str, Any]) -> ParallelLayout:
    """Return the layout in which a checkpoint with these arguments was written, without its data parallel size.

    Raises:
        LayoutError: The sizes are impossible.
    """
    tp, pp = args.get("tensor_model_parallel_size", 1), args.get("pipeline_model_parallel_size", 1)
    ep, etp = args.get("expert_model_parallel_size", 1), args.get("expert_tensor_parallel_size")
    etp = None if etp == tp else etp
    experts = ep * (tp if etp is None else etp)
    vpp = args.get("virtual_pipeline_model_parallel_size")
    return ParallelLayout(tp=tp, pp=pp, dp=-(-experts // tp), ep=ep, etp=etp, vpp=1 if vpp is None else vpp)


def _rotary(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    factor, is_scaled = args.get("rotary_seq_len_interpolation_factor"), args.get("use_rope_scaling", False)
    if is_scaled and factor is not None:
        raise ConfigError(
            f"{where}: rotary_seq_len_interpolation_factor={factor!r} with use_rope_scaling=True is not computed; only "
            "one of them is: choose another model"
        )
    if factor is not None:
        return {"rotary_scaling": {"kind": "linear", "factor": float(factor)}}
    if is_scaled:
        return {"rotary_scaling": {**_LLAMA3, "factor": float(args.get("rope_scaling_factor", 8.0))}}
    return {}


def _window(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    window = args.get("window_size")
    if window is None:
        return {}
    if not isinstance(window, (tuple, list)) or len(window) != 2 or window[1] != 0 or type(window[0]) is not int:
        raise ConfigError(
            f"{where}: window_size={window!r} is not computed; only (tokens before, 0) is: choose another"
        )
    return {"window": window[0] + 1}


def _whole(number: float) -> int:
    if number != int(number):
        raise ConfigError(f"Megatron-LM has no arguments for a model with rotary_scaling.factor={number}")
    return int(number)
