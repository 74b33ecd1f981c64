"""What the checks share: how one is run, its result, models, jobs, and rates of the machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30

RECIPE: dict[str, Any] = {
    "name": "kit",
    "algorithm": "grpo",
    "run_dir": "run",
    "cluster": {"deadline_s": 120, "start_deadline_s": 120},
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "max_context": 32,
        "init_std": 0.1,
    },
    "data": {
        "train": "data/train.jsonl",
        "held_out": "data/held_out.jsonl",
        "arithmetic": {"num_train": 200, "num_held_out": 8},
    },
    "actor": {"update": {"tp": 1}, "optimizer": {"lr": 1e-3}},
    "reward": {"function": "gpu_checks.common:score"},
    "rollout": {"max_new_tokens": 8, "group_size": 4},
    "kl": {"coef": 0.04, "estimator": "k3", "place": "loss"},
    "trainer": {"steps": 3, "global_batch_size": 32, "mini_batch_size": 16},
}
"""GRPO with a reference, in a model of a moment."""

_KEYS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": dict(zip(_KEYS, (24, 896, 4864, 14, 2, 151936), strict=True), qkv_bias=True, tied_embeddings=True),
    "1.5b": dict(zip(_KEYS, (28, 1536, 8960, 12, 2, 151936), strict=True), qkv_bias=True, tied_embeddings=True),
    "7b": dict(zip(_KEYS, (28, 3584, 18944, 28, 4, 152064), strict=True), qkv_bias=True),
    # Qwen3.5-9B
    "linear": dict(
        zip(_KEYS, (4, 4096, 12288, 16, 4, 248320), strict=True),
        **{"head_dim": 256, "rotary_dim": 64, "qk_norm": True, "zero_centered_norms": True},
        **{"attention_output_gate": True, "linear_layers": (0, 1, 2), "linear_conv_kernel": 4},
        **{"linear_key_heads": 16, "linear_value_heads": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    # Qwen3-30B-A3B
    "moe": dict(
        zip(_KEYS, (4, 2048, 768, 32, 4, 151936), strict=True),
        **{"head_dim": 128, "qk_norm": True, "num_experts": 128, "experts_per_token": 8},
    ),
    # GPT-OSS 20B
    "sinks": dict(
        zip(_KEYS, (4, 2880, 2880, 64, 8, 201088), strict=True),
        **{"head_dim": 64, "qkv_bias": True, "linear_bias": True, "attention_sinks": True},
        **{"window": 128, "window_layers": (0, 2), "num_experts": 32, "experts_per_token": 4},
        **{"activation": "quick_gelu", "glu_clamp": 7.0, "glu_offset": 1.0},
    ),
    # GLM-4.7-Flash
    "latent": dict(
        zip(_KEYS, (4, 2048, 1536, 20, 20, 154880), strict=True),
        **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
        **{"v_head_dim": 256, "num_experts": 64, "experts_per_token": 4, "shared_ffn_hidden_size": 1536},
        **{"num_dense_layers": 1, "dense_ffn_hidden_size": 10240, "router_score": "sigmoid", "router_bias": True},
        **{"routed_scaling": 1.8},
    ),
}
"""Qwen2's, and 4 layers of larger models."""

_TOY: dict[str, Any] = {
    **dict(zip(_KEYS, (2, 64, 96, 4, 2, 512), strict=True)),
    **{"head_dim": 16, "rotary_dim": 8, "window": 8, "window_layers": (0,), "num_experts": 4, "experts_per_token": 2},
    **{"linear_layers": (0,), "linear_key_heads": 2, "linear_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14},
    **{"shared_ffn_hidden_size": 96, "dense_ffn_hidden_size": 96},
}
"""What stands for a size in a dry run."""


class CheckError(Exception):
    """A check cannot go on, and says why."""


def score(prompt: str, response: str, answer: str) -> float:
    """Give a reward that differs within every group."""
    return float(sum(map(ord, prompt + response)) % 3)


def run(main: Callable[[str, bool], dict[str, Any]]) -> None:
    """Run a check in this process, and tell its result.

    Args:
        main: Takes the check's argument, and whether it is to use toy sizes; returns what ``result`` makes.
    """
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    silence_dependencies()
    try:
        found = main(*words or [""], len(words) < len(sys.argv) - 1)
    except CheckError as error:
        sys.exit(f"error: {error}")
    tell(found)


def tell(found: Mapping[str, Any]) -> None:
    """Print a result as a line, the result so far also: the last line counts, whenever the check is ended."""
    print(json.dumps(found), flush=True)


def silence_dependencies() -> None:
    """Leave out what megatron-core and torch say about themselves; before they are imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")


def result(text: str, bounds: Mapping[str, tuple[float, str, float]], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a check prints.

    Args:
        text: What was found, in a line.
        bounds: Name -> figure, ``<=`` or ``>=``, and its bound. A check passes if all of them hold.
        figures: All that was measured.
    """
    missed = [
        f"{name} is {value:.3g}, must be {relation} {bound:g}"
        for name, (value, relation, bound) in bounds.items()
        # Written so that a figure that is not a number holds no bound.
        if not (value <= bound if relation == "<=" else value >= bound)
    ]
    return {"passed": not missed, "result": "; ".join([text, *missed]), "figures": dict(figures)}


def facts() -> dict[str, str | None]:
    """Return the GPU's name, None without one, and the versions that matter."""
    import torch

    versions = [f"torch {torch.__version__}"]
    if torch.version.cuda:
        versions.append(f"CUDA {torch.version.cuda}")
    for name in ("triton", "megatron-core", "transformer-engine", "transformers"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {"gpu": gpu, "versions": ", ".join(versions)}


def runs_kernels() -> bool:
    """Return whether Triton can run here: it comes with torch's CUDA builds only, and without a GPU interprets."""
    can_interpret = os.environ.get("TRITON_INTERPRET") == "1"
    return importlib.util.find_spec("triton") is not None and (find_device().type == "cuda" or can_interpret)


def find_device() -> Any:
    """Return the GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def make_world() -> Any:
    """Return the job of this process alone."""
    import torch.distributed as dist

    from hybridflow.parallel.world import World

    return World(rank=0, size=1, ranks_per_node=1, device=find_device(), deadline_s=300.0, store=dist.HashStore())


def build(world: Any, model: Any, layout: str = "tp1", lora: Any = None) -> tuple[Any, Any, Any]:
    """Return this rank's part of a model without weights, its mesh of all ranks, and its groups. Collective: all."""
    from hybridflow.layout.mesh import DeviceMesh
    from hybridflow.layout.parallel_layout import ParallelLayout
    from hybridflow.models.gpt import build_transformer
    from hybridflow.parallel.megatron import collection, rank_sets

    axis, size = layout[:2], int(layout[2:])
    mesh = DeviceMesh(
        name=layout, layout=ParallelLayout(**{axis: size}), ranks=tuple(range(size)), ranks_per_node=world.size
    )
    world.make_groups(rank_sets([mesh], world.size))
    groups = collection(world, mesh)
    known = {"vocab_size": model.vocab_size, "lora": lora}
    return build_transformer(model, mesh.layout, groups, world.device, **known), mesh, groups


def settings(size: str, is_dry: bool, *, context: int) -> dict[str, Any]:
    """Return the ``model`` section of ``SHAPES`` in bf16, or that of a toy in fp32."""
    section = {**SHAPES[size], "max_context": context, "dtype": "bf16"}
    if is_dry:
        section |= {key: value for key, value in _TOY.items() if key in section} | {"dtype": "fp32"}
        if "kv_lora_rank" in section:
            del section["num_query_groups"]
    return section


def shape(size: str, is_dry: bool, *, context: int) -> Any:
    """Return the model that ``settings`` describes."""
    from hybridflow.families.model import ModelConfig

    return ModelConfig(**settings(size, is_dry, context=context))


def fill(model: Any, seed: int = 0) -> None:
    """Set random weights, made where they are; norms are 1, biases 0."""
    import torch

    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)


def train(
    folder: str,
    *overrides: str,
    ranks: int = 1,
    recipe: Mapping[str, Any] | str = RECIPE,
    resume: bool = False,
    stop_after: int = 1 << 30,
) -> list[dict[str, float]]:
    """Run a job in a folder of this directory; several ranks share the GPU.

    Args:
        folder: Made if it is not there.
        overrides: ``key=value`` each.
        ranks: Ranks of the job.
        recipe: Sections, or the name of a shipped recipe.
        resume: Go on from the checkpoint.
        stop_after: Steps after which the job is killed, before it saves.

    Returns:
        The lines of ``metrics.jsonl``.

    Raises:
        CheckError: The job failed.
    """
    metrics = Path(folder, "run/metrics.jsonl")
    Path(folder).mkdir(exist_ok=True)
    if not isinstance(recipe, str):
        # JSON is YAML.
        Path(folder, "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        recipe = "recipe.yaml"
    command = [sys.executable, "-m", "hybridflow", "train", recipe, f"cluster.ranks={ranks}", "run_dir=run", *overrides]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if ranks > 1:
        environment["HYBRIDFLOW_SHARE_GPU"] = "1"
    # Its ranks end with it.
    with subprocess.Popen(command + ["--resume"] * resume, cwd=folder, env=environment, stdout=sys.stderr) as job:
        while job.poll() is None:
            time.sleep(0.2)
            if metrics.is_file() and len(metrics.read_text(encoding="utf-8").splitlines()) >= stop_after:
                job.kill()
                break
    if job.returncode not in (0, -signal.SIGKILL if stop_after < 1 << 30 else 0):
        raise CheckError(f"the job {folder} ended with status {job.returncode}; the log says why")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def compare_jobs(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]
) -> dict[str, tuple[float, str, float]]:
    """Return how far two jobs are apart, as bounds: losses and gradient norms near, the samples' rewards equal."""
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        raise CheckError(f"steps {[row['step'] for row in ours]} beside {[row['step'] for row in theirs]}")

    def apart(name: str) -> float:
        return max(abs(one[name] - other[name]) for one, other in zip(ours, theirs, strict=True))

    return {
        "difference of losses": (apart("actor/loss"), "<=", 1e-4),
        "difference of gradient norms": (apart("actor/grad_norm"), "<=", 1e-2),
        "difference of rewards": (apart("reward/mean"), "<=", 0.0),
    }


def shown(losses: Sequence[Mapping[str, float]]) -> str:
    """Return the losses of a job in words."""
    return ", ".join(f"{row['actor/loss']:.6f}" for row in losses)


def relative_gap(found: Any, expected: Any) -> float:
    """Return the largest difference of two tensors over the largest value expected; infinity if it is no number."""
    found, expected = found.detach().double(), expected.detach().double()
    gap = (found - expected).abs().max() / expected.abs().max()
    return float(gap.nan_to_num(float("inf")))


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the least seconds that something takes, the GPU's part included; the first run does not count."""
    import torch

    best = float("inf")
    for turn in range(1 + repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn:
            best = min(best, time.perf_counter() - began_s)
    return best


def copy_rate(is_dry: bool) -> float:
    """Return the bytes per second of a copy on the device, those read and those written counted."""
    import torch

    source = torch.ones((1 << 24) if is_dry else 4 * GIB, dtype=torch.uint8, device=find_device())
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source))


def product_rate(is_dry: bool) -> float:
    """Return the operations per second of a product of square matrices in bf16, of random numbers."""
    import torch

    size = 256 if is_dry else 8192
    left, right = (torch.randn(size, size, device=find_device(), dtype=torch.bfloat16) for _ in range(2))
    return float(2 * size**3 / seconds_of(lambda: left @ right))


if __name__ == "__main__":
    print(json.dumps(facts()))
