"""``hybridflow plan estimate``: the time and memory of one configuration on described hardware."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.estimate import (
    Experts,
    Latent,
    Size,
    TrainStep,
    decode_bytes,
    decode_seconds,
    prefill_seconds,
    train_bytes,
    train_seconds,
)
from hybridflow.mapping.hardware import RANKS_PER_NODE, Hardware, hardware, hardware_names
from hybridflow.models.shapes import ModelShape, named_shapes, shape_of
from hybridflow.observe.table import format_table

_EXAMPLES = """examples:
  hybridflow plan estimate --phase train --model llama3-70b --layout tp8.pp2.dp4 --nodes 8 --sequence 4096 --batch 128
  hybridflow plan estimate --phase generate --model llama3-8b --layout tp1 --prompt 1024 --response 512 --concurrent 32
  hybridflow plan estimate --phase train --layout tp2.dp48 --sequence 4096 --batch 192 --json \\
    --model layers=30,hidden=4096,heads=32,ffn=16384,vocab=131072,gated=false
"""

ERRORS = {
    ("train", "h100-sxm"): (3.5, "three steps of Megatron-LM on 48 to 192 H100, to which the shares were fitted"),
    ("train", "a100-80g"): (3.5, "eight steps of arXiv 2205.05198, table 5, to which the shares were fitted"),
    ("generate", "h100-sxm"): (2.0, "three measurements of Llama 8B in TensorRT-LLM, to which the shares were fitted"),
}
"""Largest difference from published measurements in percent, and from which."""

_SIZES = ("layers", "hidden", "heads", "groups", "head", "ffn", "vocab", "gated", "tied")


def add_estimate(plans: Any) -> None:
    """Add it to the sub-commands of ``plan``."""
    parser = plans.add_parser(
        "estimate",
        help="show the time and memory of one configuration on described hardware",
        description="Estimate a training step, or decoding, of a model in bf16. Print the time by what takes it, "
        "the memory of a GPU by what it is for, and how far such estimates are from published measurements. The "
        "command starts no process and imports no torch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--phase", required=True, choices=("train", "generate"), help="what to estimate")
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="known model, directory or its config.json, or sizes: layers=32,hidden=4096,heads=32,…",
    )
    parser.add_argument("--hardware", default="h100-sxm", choices=hardware_names(), help="default: h100-sxm")
    parser.add_argument(
        "--layout", required=True, metavar="LAYOUT", help="for instance tp8.pp2.dp4; generate: tp alone"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of 8 GPUs; they decide dp where LAYOUT has none")
    training = parser.add_argument_group("train")
    training.add_argument("--sequence", type=_count, default=4096, metavar="N", help="tokens (default: 4096)")
    training.add_argument("--batch", type=_count, metavar="N", help="sequences of a step (default: one micro-batch)")
    training.add_argument("--micro-batch", type=_count, default=1, metavar="N", help="sequences (default: 1)")
    training.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="default: none")
    training.add_argument("--dtype", choices=("bf16",), default="bf16", help="default: bf16")
    generating = parser.add_argument_group("generate")
    generating.add_argument("--prompt", type=_count, default=1024, metavar="N", help="tokens (default: 1024)")
    generating.add_argument("--response", type=_count, default=512, metavar="N", help="tokens (default: 512)")
    generating.add_argument("--concurrent", type=_count, default=32, metavar="N", help="texts at a time (default: 32)")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: What is asked for is not known, or cannot be estimated.
    """
    size, machine = model_size(arguments.model), hardware(arguments.hardware)
    layout = _layout(arguments.layout, arguments.nodes)
    if size.heads % layout.tp:
        raise ConfigError(f"--layout {layout}: tp={layout.tp} does not divide {size.heads} heads; choose a divisor")
    num_experts = 1 if size.experts is None else size.experts.number
    if num_experts % layout.ep:
        raise ConfigError(f"--layout {layout}: ep={layout.ep} does not divide {num_experts} experts; choose a divisor")
    estimate = _train if arguments.phase == "train" else _generate
    found = estimate(arguments, size, machine, layout)
    error = ERRORS.get((arguments.phase, arguments.hardware))
    # What was measured were dense models with plain attention.
    if error and size.experts is None and size.latent is None:
        found["error"] = {"percent": error[0], "compared_with": error[1]}
    else:
        found["error"] = {"percent": None, "compared_with": "nothing: no measurement was compared"}
    asked = {name: getattr(arguments, name) for name in ("phase", "model", "hardware")}
    found = {**asked, "layout": str(layout), "gpus": layout.world_size, **found}
    print(json.dumps(found, indent=2) if arguments.json else _as_text(found, machine))
    return DONE


def model_size(text: str) -> Size:
    """Return the sizes of a model: a known one, one of a directory, or of a dense one given as ``name=value,…``.

    Raises:
        ConfigError: A name is not known, or a size is missing or no number.
        CheckpointError: The directory has no model that is known.
    """
    if "=" in text:
        return _given_size(text)
    shape = _shape(text)
    experts, latent = None, None
    if shape.num_experts is not None:
        experts = Experts(
            number=shape.num_experts,
            per_token=shape.experts_per_token,
            ffn=shape.ffn_hidden_size,
            shared=shape.shared_ffn_hidden_size or 0,
            dense_layers=shape.num_dense_layers,
        )
    if shape.kv_lora_rank is not None:
        latent = Latent(
            keys=shape.kv_lora_rank,
            queries=shape.q_lora_rank or 0,
            rotated=shape.qk_rope_head_dim,
            value=shape.v_head_dim,
        )
    return Size(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        head=shape.head_dim,
        ffn=shape.ffn_hidden_size if experts is None else shape.dense_ffn_hidden_size,
        vocab=shape.vocab_size,
        tied=shape.tied_embeddings,
        experts=experts,
        latent=latent,
    )


def _shape(text: str) -> ModelShape:
    path, shapes = Path(text), named_shapes()
    if text in shapes:
        return shapes[text]
    if not path.exists():
        raise ConfigError(
            f"--model {text}: not one of {', '.join(shapes)}, and no directory with a config.json; or give sizes: "
            "layers=32,hidden=4096,…"
        )
    model = read_model_info(path if path.is_dir() else path.parent).model
    assert model.vocab_size is not None, "a directory tells it"
    return shape_of(model, model.vocab_size)


def _given_size(text: str) -> Size:
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SIZES or name in given:
            raise ConfigError(f"--model {text}: {name!r} is not one of {', '.join(_SIZES)}, each once")
        if name in ("gated", "tied"):
            if value not in ("true", "false"):
                raise ConfigError(f"--model {text}: {name}={value}; expected true or false")
            given[name] = value == "true"
        elif not re.fullmatch("[1-9][0-9]{0,9}", value):
            raise ConfigError(f"--model {text}: {name}={value}; expected a whole number of 1 or more")
        else:
            given[name] = int(value)
    missing = [name for name in ("layers", "hidden", "heads", "ffn", "vocab") if name not in given]
    if missing:
        raise ConfigError(f"--model {text}: {', '.join(missing)} missing; give each as name=number")
    given.setdefault("groups", given["heads"])
    given.setdefault("head", given["hidden"] // given["heads"])
    if given["head"] < 1:
        raise ConfigError(f"--model {text}: fewer than one dim for each of {given['heads']} heads; give head=N")
    return Size(**given)


def _layout(text: str, nodes: int | None) -> ParallelLayout:
    layout = ParallelLayout.parse(text)
    if nodes is None:
        return layout
    gpus = nodes * RANKS_PER_NODE
    if not re.search(r"\bdp[0-9]", text) and gpus > 0 and gpus % layout.world_size == 0:
        layout = replace(layout, dp=gpus // layout.world_size)
    if layout.world_size != gpus:
        raise ConfigError(
            f"--nodes {nodes}: {gpus} GPUs, and --layout {text} has {layout.world_size}; change one of them"
        )
    return layout


def _train(arguments: argparse.Namespace, size: Size, machine: Hardware, layout: ParallelLayout) -> dict[str, Any]:
    batch = layout.dp * arguments.micro_batch if arguments.batch is None else arguments.batch
    step = TrainStep(
        layout=layout,
        sequence=arguments.sequence,
        batch=batch,
        micro_batch=arguments.micro_batch,
        recompute=arguments.recompute,
    )
    if layout.pp * layout.vpp > size.layers:
        raise ConfigError(f"--layout {layout}: pp*vpp={layout.pp * layout.vpp} stages for {size.layers} layers")
    parts = train_seconds(size, machine, step)
    seconds, tokens = sum(parts.values()), batch * arguments.sequence
    flops = size.training_flops(tokens, arguments.sequence)
    memory = train_bytes(size, step)
    return {
        "seconds": seconds,
        "tflops_per_gpu": flops / seconds / layout.world_size / 1e12,
        "tokens_per_s": tokens / seconds,
        "breakdown": parts,
        "memory_bytes": {name: {**part, "all": sum(part.values())} for name, part in memory.items()},
    }


def _generate(arguments: argparse.Namespace, size: Size, machine: Hardware, layout: ParallelLayout) -> dict[str, Any]:
    if layout.world_size != layout.tp:
        raise ConfigError(f"--layout {layout}: decoding is estimated for one replica cut by tp; leave the others out")
    prompt, response, concurrent = arguments.prompt, arguments.response, arguments.concurrent
    parts = decode_seconds(size, machine, layout.tp, concurrent, prompt + response / 2)
    of_a_token = sum(parts.values())
    first = prefill_seconds(size, machine, layout.tp, prompt)
    seconds = concurrent * first + (response - 1) * of_a_token
    memory = decode_bytes(size, layout.tp, concurrent, prompt + response)
    return {
        "seconds": seconds,
        "seconds_per_token": of_a_token,
        "seconds_to_first_token": first,
        "tokens_per_s": concurrent * response / seconds,
        "breakdown": {
            "prompts": concurrent * first,
            **{name: (response - 1) * value for name, value in parts.items()},
        },
        "memory_bytes": {"every GPU": {**memory, "all": sum(memory.values())}},
    }


def _as_text(found: dict[str, Any], machine: Hardware) -> str:
    seconds = found["seconds"]
    lines = [f"{found['phase']} {found['model']} on {found['gpus']} × {found['hardware']}, {found['layout']}", ""]
    names = {
        "tflops_per_gpu": "TFLOP/s of each GPU",
        "tokens_per_s": "tokens/s",
        "seconds_per_token": "seconds per token",
        "seconds_to_first_token": "seconds to the first token",
    }
    rows = [("seconds", f"{seconds:.4g}")]
    rows += [(text, f"{found[name]:,.4g}") for name, text in names.items() if name in found]
    rows += [(f"  {name}", f"{value / seconds:.1%}") for name, value in found["breakdown"].items() if value]
    lines += format_table(rows, num_left=1)
    for stage, parts in found["memory_bytes"].items():
        shown = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts.items() if name != "all")
        fits = "" if parts["all"] <= machine.memory_bytes else f": more than {machine.memory_bytes / 1e9:.0f} GB"
        lines.append(f"memory, {stage}: {parts['all'] / 1e9:.1f} GB ({shown}){fits}")
    error = found["error"]
    within = "" if error["percent"] is None else f"within {error['percent']} % of "
    return "\n".join([*lines, f"time: {within}{error['compared_with']}"])


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)
