"""Megatron-LM's arguments, as its checkpoints carry them, to and from the settings of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.formats.unpickle import Inert
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.model import ModelConfig, RotaryScaling, check_model
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.spec import DType
from hybridflow.reshard.views import TORCH_DTYPES
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
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "glu_linear_offset": (0, 0.0),
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
}
"""What Megatron-LM's arguments and megatron-core's ``TransformerConfig`` call alike: the values computed here."""

# What an argument says that a module in memory may not have: it is read below.
_READ = (
    *("multi_latent_attention", "moe_layer_freq", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk"),
)
# Further arguments and the values computed here; an older version may lack any of them.
_COMPUTED: dict[str, tuple[object, ...]] = {
    **{name: allowed for name, allowed in MEGATRON_SETTINGS.items() if name not in _READ},
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
    "softmax_scale": (None,),
    "moe_apply_probs_on_input": (False,),
}
# Argument -> the setting of latent attention that says the same.
_LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
# Argument -> the setting of YaRN, and megatron-core's default. Only latent attention has YaRN there.
_YARN: dict[str, tuple[str, float]] = {
    "rotary_scaling_factor": ("factor", 40.0),
    "original_max_position_embeddings": ("original_context", 4096),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
_LATENT_EPS = 1e-6
"""Of the norms of compressed vectors: there that of all norms, here always this."""
_BEST_OF_GROUP = 2
"""Experts of a group whose scores are added up to choose groups: there those of a token over its groups."""
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
        model |= router_settings(args) | _groups(args, where) | _dense_layers(args, where)
    if args.get("group_query_attention", args.get("num_query_groups", 1) not in (None, 1)):
        model["num_query_groups"] = args.get("num_query_groups")
    model["tied_embeddings"] = not args.get("untie_embeddings_and_output_weights", False)
    model["max_context"] = args.get("max_position_embeddings", args.get("seq_length"))
    vocabulary, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if args.get("tokenizer_type") == "NullTokenizer" and type(vocabulary) is int and type(padded) is int:
        # It is told the size without its end of sequence, which has the row behind.
        vocabulary = min(vocabulary + 1, padded)
    model["vocab_size"] = vocabulary if vocabulary is not None else padded
    model["rotary_base"] = args.get("rotary_base", 10000)
    if args.get("multi_latent_attention", False):
        for name in ("head_dim", "qk_norm", "num_query_groups"):
            model.pop(name, None)
        model |= _latent(args, where)
    else:
        model |= _rotary(args, where)
    model |= _window(args, where)
    model["dtype"] = "fp32" if args.get("params_dtype", torch.float32) == torch.float32 else "bf16"
    found = read_section(ModelConfig, model, source=where)
    check_model(found, where)
    return found


def router_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a mixture that Megatron-LM's arguments and a ``TransformerConfig`` call alike."""
    score = values.get("moe_router_score_function", "softmax")
    # Scores of sigmoid are always normalized there, but that of a single expert.
    has_sigmoid, is_one = score == "sigmoid", values.get("moe_router_topk", 2) == 1
    return {
        "router_score": score,
        "normalized_experts": not (is_one if has_sigmoid else values.get("moe_router_pre_softmax", False)),
        "router_bias": values.get("moe_router_enable_expert_bias", False),
        "shared_ffn_hidden_size": values.get("moe_shared_expert_intermediate_size") or None,
        "shared_expert_gate": values.get("moe_shared_expert_gate", False),
    }


def to_args(model: ModelConfig, dtype: DType) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that describe a model, uncut; the inverse of ``to_model``.

    Raises:
        ConfigError: Megatron-LM has no arguments for it; names the settings.
    """
    _check_written(model)
    scaling = model.rotary_scaling
    args: dict[str, Any] = {name: getattr(model, setting) for name, setting in _SAME.items()}
    args |= {name: allowed[0] for name, allowed in _REQUIRED.items()}
    args |= {
        "ffn_hidden_size": model.dense_ffn_hidden_size if model.num_dense_layers else model.ffn_hidden_size,
        "moe_ffn_hidden_size": None if model.num_experts is None else model.ffn_hidden_size,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": not model.normalized_experts,
        "moe_router_score_function": model.router_score,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size,
        "moe_shared_expert_gate": model.shared_expert_gate,
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
        "rotary_seq_len_interpolation_factor": (
            _whole(scaling.factor) if scaling is not None and scaling.kind == "linear" else None
        ),
        "window_size": None if model.window is None else (model.window - 1, 0),
        "params_dtype": TORCH_DTYPES[dtype],
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    if model.num_dense_layers:
        sparse = model.num_layers - model.num_dense_layers
        args |= {"moe_layer_freq": [0] * model.num_dense_layers + [1] * sparse}
    if model.router_score == "sigmoid":
        args |= {"moe_router_num_groups": model.router_groups, "moe_router_group_topk": model.router_groups_per_token}
        args |= {"moe_router_topk_scaling_factor": model.routed_scaling}
    return args | (_latent_args(model) if model.kv_lora_rank is not None else {})


def _check_written(model: ModelConfig) -> None:
    """Refuse a model that Megatron-LM has no arguments for. Raises ConfigError: names the settings."""
    plain = ModelConfig(num_layers=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=1, max_context=1)
    names = (
        *("pre_norms", "post_norms", "qk_norm_over", "activation", "scaled_embeddings", "linear_bias", "glu_clamp"),
        *("glu_offset", "attention_sinks", "rotary_dim", "rotary_interleaved", "local_rotary_base", "attention_scale"),
        *("attention_softcap", "logit_softcap", "window_layers", "no_rope_layers"),
        *("linear_layers", "attention_output_gate", "value_norm", "layer_scalars", "expert_norms"),
        *("global_head_dim", "global_query_groups", "keys_as_values"),
    )
    strange = [name for name in names if getattr(model, name) != getattr(plain, name)]
    if model.router_score == "sigmoid" and model.normalized_experts == (model.experts_per_token == 1):
        strange.append("normalized_experts")
    per_group = model.experts_per_token // (model.router_groups_per_token or model.experts_per_token)
    if model.router_groups is not None and per_group != _BEST_OF_GROUP:
        strange.append("router_groups_per_token")
    scaling, is_latent = model.rotary_scaling, model.kv_lora_rank is not None
    if is_latent and model.norm_eps != _LATENT_EPS:
        strange.append("norm_eps")
    if scaling is not None:
        told = {name: getattr(scaling, name) for name in _LLAMA3}
        is_told = _is_yarn_of_megatron(scaling) if is_latent else scaling.kind == "linear" or told == _LLAMA3
        if not is_told:
            strange.append("rotary_scaling")
    if strange:
        values = ", ".join(f"{name}={getattr(model, name)!r}" for name in strange)
        raise ConfigError(f"a checkpoint of Megatron-LM is not written of a model with {values}; write another format")


def padded_vocab_size(model: ModelConfig) -> int:
    """Return the rows of the embeddings where they are not cut."""
    return -(-model.known_vocab_size // model.vocab_divisible_by) * model.vocab_divisible_by


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


def _groups(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of groups of experts, and of the factor on what they give."""
    groups, chosen = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    scaling = args.get("moe_router_topk_scaling_factor")
    found = {"router_groups": groups, "router_groups_per_token": chosen, "routed_scaling": scaling}
    if groups is not None and (not chosen or args.get("moe_router_topk", 2) // chosen != _BEST_OF_GROUP):
        raise ConfigError(
            f"{where}: moe_router_topk={args.get('moe_router_topk', 2)} with moe_router_group_topk={chosen} is not "
            f"computed; only {_BEST_OF_GROUP} experts for each group that a token goes to are: choose another model"
        )
    return {name: value for name, value in found.items() if value is not None}


def _dense_layers(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of dense layers in front of those with experts."""
    pattern = args.get("moe_layer_freq", 1)
    if pattern == 1:
        return {}
    dense = pattern.count(0) if isinstance(pattern, list) else 0
    if not isinstance(pattern, list) or pattern != [0] * dense + [1] * (len(pattern) - dense):
        raise ConfigError(
            f"{where}: moe_layer_freq={pattern!r} is not computed; only dense layers in front of layers with experts "
            "are, [0, …, 1, …]: choose another model"
        )
    return {"num_dense_layers": dense, "dense_ffn_hidden_size": args.get("ffn_hidden_size")} if dense else {}


def _latent(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of latent attention, whose rotary embedding has arguments of its own."""
    wanted = {"qk_layernorm": True, "norm_epsilon": _LATENT_EPS}
    for name, value in wanted.items():
        if args.get(name) != value:
            raise ConfigError(
                f"{where}: {name}={args.get(name)!r} with multi_latent_attention=True is not computed; only {value} "
                "is: choose another model"
            )
    found = {setting: args.get(name) for name, setting in _LATENT.items()}
    kind = args.get("rope_type") or "yarn"
    if kind == "rope":
        return found
    yarn = {setting: args.get(name, default) for name, (setting, default) in _YARN.items()}
    if (yarn["mscale"], yarn["mscale_all_dim"]) == (1.0, 0.0):
        yarn |= {"mscale": None, "mscale_all_dim": None}
    elif kind != "yarn" or not yarn["mscale"] or not yarn["mscale_all_dim"]:
        raise ConfigError(
            f"{where}: rope_type={kind!r} with mscale={yarn['mscale']} and mscale_all_dim={yarn['mscale_all_dim']} is "
            "not computed; only rope, and yarn with both numbers or neither, are: choose another model"
        )
    return {**found, "rotary_scaling": {"kind": "yarn", **yarn}}


def _latent_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that describe latent attention, the inverse of ``_latent``."""
    args: dict[str, Any] = {name: getattr(model, setting) for name, setting in _LATENT.items()}
    args |= {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}
    args |= {"group_query_attention": False, "kv_channels": model.v_head_dim}
    scaling = model.rotary_scaling
    if scaling is not None:
        given = {name: getattr(scaling, setting) for name, (setting, _) in _YARN.items()}
        args |= {name: _YARN[name][1] if value is None else value for name, value in given.items()}
        args["rope_type"] = "yarn"
    return args


def _is_yarn_of_megatron(scaling: RotaryScaling) -> bool:
    """Return whether megatron-core's latent attention computes a scaling: both numbers of the scale, or neither."""
    both = (scaling.mscale is None) == (scaling.mscale_all_dim is None)
    return scaling.kind == "yarn" and scaling.truncate and scaling.attention_factor is None and both


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
