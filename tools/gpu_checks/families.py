"""The GPU computes what the CPU does, for a small model of every family, in fp32: training and generating."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.common import CheckError, build, make_world, result, run, tell

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LINEAR = {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    # Norms of outputs that are nearly 0 magnify what is rounded, the more the smaller the number that they add.
    **{"layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-3},
}
_GATED_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 48,
}
_LONGROPE = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "dots1": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 8, "max_window_layers": 1},
    },
    "exaone4": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2},
    "qwen3_5_text": LINEAR,
    "gemma4_text": {
        **{"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0},
        **{"sliding_window": 8, "final_logit_softcapping": 4.0, "tie_word_embeddings": True},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    },
    "qwen2_moe": _GATED_EXPERTS,
    "glm4_moe_lite": {
        **{"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4, "moe_intermediate_size": 24},
    },
    "seed_oss": {"head_dim": 32},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "olmo3": {"head_dim": 32, "sliding_window": 8},
    "glm4_moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
        **{"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_next": {**LINEAR, **_GATED_EXPERTS},
    "qwen3_5_moe_text": {**LINEAR, **_GATED_EXPERTS},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {
        **{"pad_token_id": 0, "sliding_window": 12, "partial_rotary_factor": 0.75},
        **{"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", **_LONGROPE}},
    },
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
    "olmo2": {"head_dim": 32},
    "deepseek_v3": {
        **{"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14},
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1},
        **{"num_key_value_heads": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    },
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
}
"""Keys of ``config.json`` in which a family differs, those first that ran last on a GPU, or never."""

_BOUNDS = {"log-probabilities": 1e-4, "gradients": 1e-3, "weights": 1e-4, "text log-probabilities": 1e-4, "texts": 0}


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Compute every family here and without a GPU."""
    return compare(__spec__.name, argument, list(SPECIAL), _compute_all)


def compare(
    module: str,
    argument: str,
    names: Sequence[str],
    compute_all: Callable[[], Iterator[tuple[str, dict[str, Any]]]],
) -> dict[str, Any]:
    """Compute everything here and, at the same time, in a process that sees no GPU; compare model by model.

    Args:
        module: The check's, which is run there with an argument.
        argument: Where that process, which this may be, puts what it computes; empty in the check's own.
        names: Of the models.
        compute_all: Yields each, and by kind and name what is to be equal; nothing of one that fails.
    """
    if argument:
        for name, found in compute_all():
            _save(found, Path(argument, name))
        return {}
    Path("cpu").mkdir()
    command = [sys.executable, "-m", module, "cpu"]
    apart: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=sys.stderr) as reference:
        for name, found in compute_all():
            apart[name] = _differences(found, _load(Path("cpu", name), reference))
            # What is known if time runs out.
            tell(_result(apart, names))
    return _result(apart, names)


def _result(apart: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> dict[str, Any]:
    """Return the result of some models, from their differences by kind; a model without any has failed."""
    failed, left = [name for name in apart if not apart[name]], [each for each in names if each not in apart]
    bounds = {
        f"{name}: difference of {kind}": (found[kind], "<=", bound)
        for name, found in apart.items()
        for kind, bound in _BOUNDS.items()
        if found
    }
    bounds["models that failed"] = (len(failed), "<=", 0)
    bounds["models"] = (len(apart), ">=", len(names))
    worst = {kind: max((found[kind] for found in apart.values() if found), default=math.inf) for kind in _BOUNDS}
    text = ", ".join(f"{kind} {value:.2g}" for kind, value in worst.items())
    text = f"largest differences over {len(apart) - len(failed)} models: {text}"
    reasons = [f"{name} failed: see the log" for name in failed]
    reasons += [f"not reached: {', '.join(left)}"] * bool(left)
    return result("; ".join([text, *reasons]), bounds, apart)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference of each kind; nothing if one of the two has failed."""
    if not ours or ours.keys() != theirs.keys():
        return {}
    apart = dict.fromkeys(_BOUNDS, 0.0)
    for name, value in ours.items():
        kind = name.split("|")[0]
        if kind == "texts":
            apart[kind] += float(value.tolist() != theirs[name].tolist())
            continue
        if value.shape != theirs[name].shape:
            # Of texts of unequal lengths.
            apart[kind] = math.inf
            continue
        gap = (value - theirs[name]).abs().max()
        gap = gap / theirs[name].abs().max().clamp(min=1e-6) if kind == "gradients" else gap
        # A difference that is not a number is the largest.
        apart[kind] = max(apart[kind], float(gap.nan_to_num(float("inf"))))
    return apart


def _save(found: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    unfinished = path.with_name(f"{path.name}.tmp")
    save_file(dict(found), unfinished)
    unfinished.replace(path)


def _load(path: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return what a process computed, as soon as it has."""
    from safetensors.torch import load_file

    is_over = False
    while not path.is_file():
        if is_over:
            raise CheckError("the CPU's process failed; the log says why")
        # It may write this last of all.
        is_over = process.poll() is not None
        time.sleep(0.02)
    found: dict[str, Any] = load_file(path)
    return found


def model_of(family: str) -> Any:
    """Return the small model of a family."""
    from hybridflow.families.config_json import read_config
    from hybridflow.families.tables import FAMILIES

    values = {"model_type": family, "architectures": [FAMILIES[family].causal], **SHAPE, **SPECIAL[family]}
    return read_config(values, where=family).model


def _compute_all() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each family and what is to be equal."""
    from hybridflow.families.tables import FAMILIES

    if SPECIAL.keys() != FAMILIES.keys():
        raise CheckError(f"families without settings here: {sorted(FAMILIES.keys() ^ SPECIAL.keys())}")
    world = make_world()
    for family in SPECIAL:
        yield family, tried(family, world, lambda family=family: model_of(family), text_prompts())


def text_prompts() -> list[Any]:
    """Return prompts of unequal lengths, some beyond a block of the cache, ``[tokens]`` each."""
    import torch

    generator, vocab = torch.Generator().manual_seed(0), SHAPE["vocab_size"]
    return [torch.randint(0, vocab, (1 + number * 7 % 29,), generator=generator) for number in range(16)]


def tried(name: str, world: Any, read: Callable[[], Any], prompts: Sequence[Any], images: Any = None) -> dict[str, Any]:
    """Return, by kind and name, what is to be equal of a model; nothing if it fails.

    Args:
        name: The model's.
        world: The job of this process alone.
        read: Returns its settings.
        prompts: Of samples to generate, ``[tokens]`` each; some are learned from, too.
        images: What knows the images in these; None: there are none.
    """
    import torch

    torch.set_num_threads(1)
    print(f"{name} on {world.device}", file=sys.stderr, flush=True)
    try:
        values = _compute(world, read(), prompts, images)
    except Exception:  # the other models tell more
        traceback.print_exc()
        return {}
    return {key: value.detach().cpu().contiguous() for key, value in values.items()}


def _compute(world: Any, model: Any, prompts: Sequence[Any], images: Any) -> dict[str, Any]:
    import torch

    from hybridflow.config.roles import OptimizerConfig
    from hybridflow.models.adapters import whole_spec
    from hybridflow.models.log_probs import vocab_parallel_log_probs
    from hybridflow.models.microbatch import pack
    from hybridflow.models.specs import logical_parameters
    from hybridflow.models.training import Trainable
    from hybridflow.models.weights import initialize
    from hybridflow.rollout.engine import MegatronEngine

    vocab = model.vocab_size
    built, mesh, groups = build(world, model)
    initialize(built, whole_spec(model), mesh, 0, seed=3, std=0.1)
    if images is not None:
        built.read_images(images)
    engine = MegatronEngine(built, groups, vocab_size=vocab, seed=7, max_concurrent=8)
    found = {}
    for index, response in enumerate(engine.generate(_requests(prompts, vocab))):
        found[f"texts|{index}"] = response.tokens
        found[f"text log-probabilities|{index}"] = response.log_probs
    # Large enough that a step is smooth in the gradient: without it Adam's first one is its sign.
    trainable = Trainable(built, groups, OptimizerConfig(lr=1e-2, eps=1e-2))
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randint(0, vocab, (length,), generator=generator) for length in (8, 13, 2, 27)]
    learned = prompts[-len(answers) :]
    sequences = [torch.cat(pair) for pair in zip(learned, answers, strict=True)]
    batch = pack(list(range(len(answers))), sequences, list(map(len, learned)), world.device, groups.cp, images)
    kept = []

    def loss(output: Any, micro_batch: Any) -> tuple[Any, None]:
        log_probs, entropy = vocab_parallel_log_probs(output, micro_batch.targets, group=groups.tp, vocab_size=vocab)
        kept.append(log_probs)
        return -(log_probs + 0.1 * entropy).mean(), None

    trainable.accumulate([batch], loss)
    found["log-probabilities|all"] = kept[0]
    found |= {f"gradients|{name}": value.clone() for name, value in trainable.state()["gradient"].items()}
    trainable.step()
    return found | {f"weights|{name}": value.data for name, value in logical_parameters(built).items()}


def _requests(prompts: Sequence[Any], vocab: int) -> list[Any]:
    """Sample in several ways."""
    from hybridflow.rollout.request import Request, SamplingParams

    kinds: list[dict[str, Any]] = [
        {"stop_ids": tuple(range(0, vocab, 9))},
        {"greedy": True},
        {"temperature": 1.4},
        {"temperature": 1.4, "top_k": 5, "repetition_penalty": 1.2},
    ]
    return [
        Request(
            prompt=prompt, params=SamplingParams(max_new_tokens=20, **kinds[number % len(kinds)]), prompt_index=number
        )
        for number, prompt in enumerate(prompts)
    ]


if __name__ == "__main__":
    run(main)
