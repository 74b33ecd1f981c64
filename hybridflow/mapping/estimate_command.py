"""``hybridflow plan estimate``: the time and memory of one configuration on described hardware."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Step
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.arguments import count
from hybridflow.mapping.errors import error_text, published_error
from hybridflow.mapping.estimate import (
    Size,
    TrainStep,
    decode_bytes,
    decode_seconds,
    prefill_seconds,
    train_bytes,
    train_seconds,
)
from hybridflow.mapping.hardware import RANKS_PER_NODE, Hardware, hardware, hardware_names
from hybridflow.mapping.sizes import model_size
from hybridflow.observe.table import format_table

_EXAMPLES = """examples:
  hybridflow plan estimate ppo-llama-3.1-8b model.path=models/Llama-3.1-8B-Instruct --response 400
  hybridflow plan estimate --phase train --model llama3-70b --layout tp8.pp2.dp4 --nodes 8 --sequence 4096 --batch 128
  hybridflow plan estimate --phase generate --model llama3-8b --layout tp1 --prompt 1024 --response 512 --concurrent 32
  hybridflow plan estimate --phase train --layout tp2.dp48 --sequence 4096 --batch 192 --json \\
    --model layers=30,hidden=4096,heads=32,ffn=16384,vocab=131072,gated=false
"""


def add_estimate(plans: Any, step_of: Callable[[Recipe], Step]) -> None:
    """Add it to the sub-commands of ``plan``.

    Args:
        plans: The sub-commands.
        step_of: Returns the stages of a recipe's training step.
    """
    parser = plans.add_parser(
        "estimate",
        help="show the time and memory of one configuration on described hardware",
        description="Estimate a recipe's whole training step; or, with --phase, training or decoding of one model in "
        "bf16. Print the time by what takes it, "
        "the memory of a GPU by what it is for, and how far such estimates are from published measurements. The "
        "command starts no process and imports no torch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="YAML file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    parser.add_argument("--phase", choices=("train", "generate"), help="estimate one phase of --model, without RECIPE")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="known model, directory or its config.json, or sizes: layers=32,hidden=4096,heads=32,…",
    )
    parser.add_argument("--hardware", default="h100-sxm", choices=hardware_names(), help="default: h100-sxm")
    parser.add_argument("--layout", metavar="LAYOUT", help="for instance tp8.pp2.dp4; generate: tp alone")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of 8 GPUs; they decide dp where LAYOUT has none")
    training = parser.add_argument_group("train")
    training.add_argument("--sequence", type=count, default=4096, metavar="N", help="tokens (default: 4096)")
    training.add_argument("--batch", type=count, metavar="N", help="sequences of a step (default: one micro-batch)")
    training.add_argument("--micro-batch", type=count, default=1, metavar="N", help="sequences (default: 1)")
    training.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="default: none")
    training.add_argument("--dtype", choices=("bf16",), default="bf16", help="default: bf16")
    generating = parser.add_argument_group("generate, and RECIPE")
    generating.add_argument(
        "--prompt",
        type=count,
        metavar="N",
        help="tokens (default: 1024; RECIPE: half of what model.max_context leaves beside rollout.max_new_tokens)",
    )
    generating.add_argument(
        "--response",
        type=count,
        metavar="N",
        help="tokens; of RECIPE the mean, and lengths are spread around it (default: 512; half of "
        "rollout.max_new_tokens)",
    )
    generating.add_argument("--concurrent", type=count, default=32, metavar="N", help="texts at a time (default: 32)")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    parser.set_defaults(run=functools.partial(run, step_of=step_of))


def run(arguments: argparse.Namespace, step_of: Callable[[Recipe], Step]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: What is asked for is not known, or cannot be estimated.
    """
    given = [name for name in ("phase", "model", "layout") if getattr(arguments, name) is not None]
    if len(given) != (3 if arguments.recipe is None else 0):
        raise ConfigError("plan estimate: give RECIPE, or --phase, --model and --layout; see --help for examples")
    machine = hardware(arguments.hardware)
    if arguments.recipe is not None:
        # Reads far more modules than the rest.
        from hybridflow.mapping.step_command import recipe_step, step_text

        found = recipe_step(arguments, machine, step_of)
        print(json.dumps(found, indent=2) if arguments.json else step_text(found, machine))
        return DONE
    size = model_size(arguments.model)
    layout = _layout(arguments.layout, arguments.nodes)
    if size.heads % layout.tp:
        raise ConfigError(f"--layout {layout}: tp={layout.tp} does not divide {size.heads} heads; choose a divisor")
    num_experts = 1 if size.experts is None else size.experts.number
    if num_experts % layout.ep:
        raise ConfigError(f"--layout {layout}: ep={layout.ep} does not divide {num_experts} experts; choose a divisor")
    estimate = _train if arguments.phase == "train" else _generate
    found = estimate(arguments, size, machine, layout)
    # What was measured were dense models with plain attention.
    is_known = size.experts is None and size.latent is None
    found["error"] = published_error(arguments.phase, arguments.hardware, is_known=is_known)
    asked = {name: getattr(arguments, name) for name in ("phase", "model", "hardware")}
    found = {**asked, "layout": str(layout), "gpus": layout.world_size, **found}
    print(json.dumps(found, indent=2) if arguments.json else _as_text(found, machine))
    return DONE


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
    prompt, response, concurrent = arguments.prompt or 1024, arguments.response or 512, arguments.concurrent
    parts = decode_seconds(size, machine, layout, concurrent, prompt + response / 2)
    of_a_token = sum(parts.values())
    first = prefill_seconds(size, machine, layout, prompt)
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
    return "\n".join([*lines, error_text(found["error"])])
