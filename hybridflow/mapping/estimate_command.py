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
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE
from hybridflow.families.cut import check_cut
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.accuracy import error_text, known_error
from hybridflow.mapping.arguments import HARDWARE_HELP, add_like, count
from hybridflow.mapping.estimate import (
    TrainStep,
    decode_bytes,
    decode_seconds,
    prefill_seconds,
    train_bytes,
    train_seconds,
)
from hybridflow.mapping.hardware import DEFAULT_HARDWARE, Hardware, hardware
from hybridflow.mapping.sizes import Size, model_size
from hybridflow.observe.table import format_table
from hybridflow.reshard.spec import ITEM_BYTES

_PROMPT_TOKENS = 2048
"""Prompts are read as many at a time as fit this."""

_USUAL = {"sequence": 4096, "micro_batch": 1, "recompute": "none", "concurrent": 32}
"""Options of ``--phase`` that may be left out."""

_KEYS = {
    **{"nodes": "cluster.ranks", "dtype": "model.dtype", "sequence": "model.max_context"},
    **{"batch": "trainer.global_batch_size", "micro_batch": "trainer.micro_batch_tokens"},
    **{"recompute": "actor.recompute", "concurrent": "rollout.max_concurrent"},
}
"""Options of ``--phase``, and the keys that a recipe has in their place."""

_EXAMPLES = """examples:
  hybridflow plan estimate ppo-llama-3.1-8b model.path=models/Llama-3.1-8B-Instruct --response 400
  hybridflow plan estimate --phase train --model llama3-70b --layout tp8.pp2.dp4 --nodes 8 --sequence 4096 --batch 128
  hybridflow plan estimate --phase generate --model llama3-8b --layout tp1 --prompt 1024 --response 512 --concurrent 32
  hybridflow plan estimate --phase train --layout tp2.dp48 --sequence 4096 --batch 192 --json \\
    --model layers=30,hidden=4096,heads=32,ffn=16384,vocab=131072,gated=false
"""


def add_estimate(plans: Any, flow_of: Callable[[Recipe], Flow]) -> None:
    """Add it to the sub-commands of ``plan``; ``flow_of`` returns the flow of a recipe's step."""
    parser = plans.add_parser(
        "estimate",
        help="show the time and memory of one configuration on described hardware",
        description="Estimate a recipe's whole training step; or, with --phase, training or decoding of one model. "
        "Print the time by what takes it, "
        "the memory of a GPU by what it is for, and how far such estimates are from published measurements. The "
        "command starts no process and imports no torch.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="YAML file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    parser.add_argument("--phase", choices=("train", "generate"), help="estimate one phase of --model, without RECIPE")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="known model, directory or its config.json, or sizes: layers=32,hidden=4096,heads=32,…",
    )
    parser.add_argument("--hardware", metavar="NAME", help=HARDWARE_HELP)
    add_like(parser)
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="for instance tp8.pp2.vpp4.dp4; with pp and no vpp the fastest vpp is assumed; generate: tp alone",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="with --phase: nodes of the hardware, which has 8 GPUs in each; they decide dp where LAYOUT has none",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32", "fp8"),
        help="with --phase: of products (default: the hardware's). fp8 is for the products of layers, and in decoding "
        "for weights and cache",
    )
    training = parser.add_argument_group("train")
    training.add_argument("--sequence", type=count, metavar="N", help="tokens (default: 4096)")
    training.add_argument("--batch", type=count, metavar="N", help="sequences of a step (default: one micro-batch)")
    training.add_argument("--micro-batch", type=count, metavar="N", help="sequences (default: 1)")
    training.add_argument("--recompute", choices=("none", "selective", "full"), help="default: none")
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
    generating.add_argument(
        "--concurrent", type=count, metavar="N", help="generate: samples decoded together (default: 32)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    parser.set_defaults(run=functools.partial(run, flow_of=flow_of))


def run(arguments: argparse.Namespace, flow_of: Callable[[Recipe], Flow]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: What is asked for is not known, or cannot be estimated.
    """
    given = [name for name in ("phase", "model", "layout") if getattr(arguments, name) is not None]
    if len(given) != (3 if arguments.recipe is None else 0):
        raise ConfigError("plan estimate: give RECIPE, or --phase, --model and --layout; see --help for examples")
    if arguments.recipe is not None:
        for name, key in _KEYS.items():
            if getattr(arguments, name) is not None:
                option = name.replace("_", "-")
                raise ConfigError(f"plan estimate: --{option} belongs to --phase; RECIPE has {key}")
        # Reads far more modules than the rest.
        from hybridflow.mapping.fit import asked_hardware
        from hybridflow.mapping.step_command import recipe_step, step_text

        machine, texts = asked_hardware(arguments, flow_of)
        found = recipe_step(arguments, machine, texts, flow_of)
        print(json.dumps(found, indent=2) if arguments.json else step_text(found, machine))
        return DONE
    for name, value in _USUAL.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.hardware = arguments.hardware or DEFAULT_HARDWARE
    machine = hardware(arguments.hardware)
    if arguments.like is not None:
        raise ConfigError("plan estimate: --like belongs to RECIPE; leave it out with --phase")
    _check_dtype(arguments.dtype, arguments.hardware, machine)
    size = replace(model_size(arguments.model), item_bytes=ITEM_BYTES[machine.dtype])
    layout = _layout(arguments.layout, arguments.nodes, machine)
    machine.check_ranks(layout.world_size)
    if arguments.phase == "generate" and layout != ParallelLayout(tp=layout.tp):
        raise ConfigError(f"--layout {layout}: decoding is estimated for one replica cut by tp; leave the others out")
    _check_cut(size.model, layout)
    estimate = _train if arguments.phase == "train" else _generate
    found = estimate(arguments, size, machine, layout)
    what = f"{arguments.phase} fp8" if arguments.dtype == "fp8" else arguments.phase
    is_mixture = size.model.num_experts is not None
    what += " mixture" if is_mixture else ""
    # Of latent attention a mixture alone was measured, and no model with linear attention.
    is_known = (size.model.kv_lora_rank is None or is_mixture) and not size.model.linear_layers
    found["error"] = known_error(what, arguments.hardware, machine, is_known=is_known)
    asked = {name: getattr(arguments, name) for name in ("phase", "model", "hardware")}
    found = {**asked, "dtype": arguments.dtype or machine.dtype, "gpus": layout.world_size, **found}
    print(json.dumps(found, indent=2) if arguments.json else _as_text(found, machine))
    return DONE


def _check_dtype(dtype: str | None, name: str, machine: Hardware) -> None:
    if dtype == "fp8":
        if not machine.fp8_flops:
            raise ConfigError(f"--dtype fp8: --hardware {name} has no products in FP8; leave it out")
    elif dtype not in (None, machine.dtype):
        raise ConfigError(f"--dtype {dtype}: --hardware {name} is described for {machine.dtype}")


def _layout(text: str, nodes: int | None, machine: Hardware) -> ParallelLayout:
    if nodes is None:
        return ParallelLayout.parse(text)
    gpus = nodes * machine.ranks_per_node
    if not re.search(r"\bdp[0-9]", text):
        # ep adds no ranks, and may need more than those without dp.
        parts = [part for part in text.split(".") if not re.fullmatch("ep[0-9]+", part)]
        replica = ParallelLayout.parse(".".join(parts)).world_size if parts else 1
        if gpus > 0 and gpus % replica == 0:
            text = f"{text}.dp{gpus // replica}"
    layout = ParallelLayout.parse(text)
    if layout.world_size != gpus:
        raise ConfigError(
            f"--nodes {nodes}: {gpus} GPUs, and --layout {text} has {layout.world_size}; change one of them"
        )
    return layout


def _check_cut(model: ModelConfig, layout: ParallelLayout) -> None:
    """Refuse a layout in which the model cannot be trained. Stages may be as equal as can be where none are given.

    Raises:
        LayoutError: It cannot.
    """
    if layout.layers == "auto" or layout.is_sharded:
        return  # ``TrainStep`` refuses it.
    layout.check_trainable("--layout")
    num_stages, layers = layout.pp * layout.vpp, model.num_layers
    # Embedding and output layer may count as a layer each.
    if layout.layers is None and (layout.vpp == 1 or (layers + 2) % num_stages == 0) and num_stages <= layers:
        layout = replace(layout, layers=tuple((layers + stage) // num_stages for stage in range(num_stages)))
    check_cut(model, layout, "--layout")


def _train(arguments: argparse.Namespace, size: Size, machine: Hardware, layout: ParallelLayout) -> dict[str, Any]:
    batch = layout.dp * arguments.micro_batch if arguments.batch is None else arguments.batch
    step = TrainStep(
        layout=layout,
        sequence=arguments.sequence,
        batch=batch,
        micro_batch=arguments.micro_batch,
        recompute=arguments.recompute,
        fp8=arguments.dtype == "fp8",
    )
    assumed = None
    if layout.pp > 1 and layout.layers is None and not re.search(r"\bvpp[0-9]", arguments.layout):
        step = _interleaved(size, machine, step)
        assumed = f"vpp{step.layout.vpp}, for {arguments.layout} names no vpp; add vpp1 for stages of one chunk"
    layout = step.layout
    parts = train_seconds(size, machine, step)
    seconds, tokens = sum(parts.values()), batch * arguments.sequence
    flops = size.training_flops(tokens, arguments.sequence)
    memory = train_bytes(size, step)
    return {
        "layout": str(layout),
        "assumed": assumed,
        "seconds": seconds,
        "tflops_per_gpu": flops / seconds / layout.world_size / 1e12,
        "tokens_per_s": tokens / seconds,
        "breakdown": parts,
        "memory_bytes": {name: {**part, "all": sum(part.values())} for name, part in memory.items()},
    }


def _interleaved(size: Size, machine: Hardware, step: TrainStep) -> TrainStep:
    """Return the step with the number of virtual chunks that is fastest, as those who publish steps choose it.

    Megatron-core needs equal chunks, where embedding and output layer may count as a layer each, and micro-batches by
    groups of as many as there are stages.
    """
    pp = step.layout.pp
    num_layers = size.model.num_layers
    layers = next((number // pp for number in (num_layers, num_layers + 2) if number % pp == 0), 0)
    if step.num_micro_batches % pp:
        return step
    chunks = [vpp for vpp in range(1, layers + 1) if layers % vpp == 0 and pp * vpp <= num_layers]
    steps = [replace(step, layout=replace(step.layout, vpp=vpp)) for vpp in chunks]
    return min(steps, key=lambda one: sum(train_seconds(size, machine, one).values()), default=step)


def _generate(arguments: argparse.Namespace, size: Size, machine: Hardware, layout: ParallelLayout) -> dict[str, Any]:
    prompt, response, concurrent = arguments.prompt or 1024, arguments.response or 512, arguments.concurrent
    fp8 = arguments.dtype == "fp8"
    parts = decode_seconds(size, machine, layout, concurrent, prompt + response / 2, fp8=fp8)
    decoding = sum(parts.values())
    first = prefill_seconds(size, machine, layout, prompt, fp8=fp8)
    together = max(1, min(concurrent, _PROMPT_TOKENS // prompt))
    reading = concurrent / together * prefill_seconds(size, machine, layout, prompt, together, fp8=fp8)
    seconds = reading + (response - 1) * decoding
    memory = decode_bytes(size, layout.tp, concurrent, prompt + response, fp8=fp8)
    return {
        "layout": str(layout),
        "seconds": seconds,
        "seconds_per_token": seconds / response,
        "seconds_per_decoded_token": decoding,
        "seconds_to_first_token": first,
        "tokens_per_s": concurrent * response / seconds,
        "breakdown": {
            "prompts": reading,
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
        "seconds_per_token": "seconds per token, prompts included",
        "seconds_per_decoded_token": "seconds per token that is decoded",
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
    if found.get("assumed"):
        lines.append(f"assumed: {found['assumed']}")
    return "\n".join([*lines, error_text(found["error"])])
