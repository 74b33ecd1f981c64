"""What ``hybridflow plan auto`` searches, prints and writes. No torch."""

from __future__ import annotations

import argparse
import bisect
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import yaml

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE
from hybridflow.layout.mesh import format_ranks
from hybridflow.mapping.fit import asked_hardware, in_nodes_of
from hybridflow.mapping.hardware import MEASURED, Hardware, hardware
from hybridflow.mapping.memory import usable_bytes
from hybridflow.mapping.rl_step import Texts, check_estimated
from hybridflow.mapping.search import Found, SearchRequest, cleared, search
from hybridflow.mapping.step_command import texts_of
from hybridflow.observe.console import format_bytes
from hybridflow.observe.files import replace_file
from hybridflow.observe.table import format_table
from hybridflow.recipe.check_placement import may_sample_ahead
from hybridflow.recipe.load import load_recipe
from hybridflow.sections import changed_keys, to_dict

_MOST_TIMES = 64
"""Times the nodes asked for that are tried where these do not suffice."""

_NEAR = 0.05
"""Share of the memory that would do by which it may be more than the least."""


def find_layouts(arguments: argparse.Namespace, flow_of: Callable[[Recipe], Flow]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: The recipe is wrong or cannot be estimated, or nothing fits.
    """
    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(f"--out {arguments.out}: exists; remove it, or name another file")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise ConfigError(f"--out {arguments.out}: {arguments.out.parent} is no directory; make it first")
    begun, machine = time.monotonic(), asked_hardware(arguments, flow_of)
    request = _request(arguments, *machine, flow_of)
    found = search(request)
    if not found:
        # For large models it takes minutes to find.
        print("hybridflow: nothing fits; looking for what would", file=sys.stderr, flush=True)
        raise ConfigError(_remedy(f"plan auto {arguments.recipe}", request))
    if arguments.out is not None:
        command = " ".join(["hybridflow", *arguments.words])
        replace_file(arguments.out, recipe_text(found[0], command).encode())
    if arguments.json:
        print(json.dumps(_as_json(found, request, arguments), indent=2))
    else:
        print(_text(found, request, arguments, time.monotonic() - begun))
    return DONE


def _request(
    arguments: argparse.Namespace, machine: Hardware, like: Texts | None, flow_of: Callable[[Recipe], Flow]
) -> SearchRequest:
    def load(overrides: Sequence[str]) -> Recipe:
        return load_recipe(arguments.recipe, [*arguments.overrides, *overrides])

    recipe = load(())
    num_ranks = recipe.cluster.ranks
    if arguments.nodes is not None or arguments.gpus is not None:
        num_ranks = arguments.gpus or arguments.nodes * machine.ranks_per_node
    texts = texts_of(recipe, arguments.prompt, arguments.response, like)
    request = request_for(recipe, load, machine, texts, num_ranks, flow_of)
    if arguments.ahead and may_sample_ahead(recipe):
        request = replace(request, staleness=tuple(dict.fromkeys((*request.staleness, 1))))
    return request


def request_for(
    recipe: Recipe,
    load: Callable[[Sequence[str]], Recipe],
    machine: Hardware,
    texts: Texts,
    num_ranks: int,
    flow_of: Callable[[Recipe], Flow],
) -> SearchRequest:
    """Return what is searched for a recipe.

    Args:
        recipe: The recipe.
        load: Returns it with further overrides, checked.
        machine: Where.
        texts: Of a step.
        num_ranks: Ranks of the job.
        flow_of: Returns the flow of its step.

    Raises:
        ConfigError: It has what is not estimated, or no nodes of the hardware have so many ranks.
    """
    check_estimated(recipe, machine)
    machine.check_ranks(num_ranks)
    room = usable_bytes(recipe, machine.memory_bytes)
    assert room is not None, "the hardware's memory is known"
    return SearchRequest(
        load=load,
        flow=flow_of,
        hardware=machine,
        texts=texts,
        num_ranks=num_ranks,
        ranks_per_node=machine.ranks_per_node,
        memory_bytes=room,
        staleness=(recipe.trainer.max_staleness,),
    )


def settle(
    recipe: Recipe, load: Callable[[Sequence[str]], Recipe], num_ranks: int, flow_of: Callable[[Recipe], Flow]
) -> tuple[Found, Texts]:
    """Return the fastest configuration of a recipe with ``layout: auto`` for so many ranks, and the texts assumed.

    Raises:
        ConfigError: The hardware is not known, the recipe cannot be estimated, or nothing fits.
    """
    machine = in_nodes_of(recipe, hardware(recipe.cluster.hardware or MEASURED))
    texts = texts_of(recipe, None, None, None)
    # As many as `plan auto` looks for: of configurations that take equally long both choose the same.
    request = request_for(recipe, load, machine, texts, num_ranks, flow_of)
    if not (found := search(request)):
        # Every rank of a job comes here, and what would do takes far longer to find.
        nothing = _nothing(f"recipe {recipe.name}: layout: auto", request)
        raise ConfigError(f"{nothing}; `hybridflow plan auto` with this recipe tells how many would do")
    return found[0], texts


def _remedy(what: str, request: SearchRequest) -> str:
    """Return why nothing was found, and the smallest change with which something is."""

    def fits(**changes: Any) -> bool:
        return bool(search(replace(request, most=1, is_any=True, **changes)))

    text = _nothing(what, request)
    low, high = request.memory_bytes, 2 * request.memory_bytes
    while high < 64 * request.memory_bytes and not fits(memory_bytes=high):
        low, high = high, 2 * high
    while high - low > _NEAR * high and high < 64 * request.memory_bytes:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(memory_bytes=middle) else (middle, high)
    if high < 64 * request.memory_bytes:
        text += f"; {math.ceil(high / 1e9)} GB would do"
    few, enough = _least_ranks(request, lambda number: fits(num_ranks=number))
    if enough is None:
        more = f"; nor do {few} GPUs suffice" if few > request.num_ranks else ""
        node = "" if request.hardware.network_bandwidth else " (one node: the hardware has no network_bandwidth)"
        return f"{text}{more}{node}; lower model.max_context, or train a smaller model or adapters"
    return f"{text}; {enough} GPUs suffice: give {_named(enough, request.ranks_per_node)}"


def _nothing(what: str, request: SearchRequest) -> str:
    """Return that nothing fits."""
    most = f"{request.memory_bytes / 1e9:.3g} GB"
    return f"{what}: nothing fits {request.num_ranks} GPUs, of which each may need {most}"


def _least_ranks(request: SearchRequest, fits: Callable[[int], bool]) -> tuple[int, int | None]:
    """Return the most ranks tried that do not suffice, and the fewest that do, as ``Hardware.check_ranks`` allows."""
    per_node, few = request.ranks_per_node, request.num_ranks
    most = _in_nodes(_MOST_TIMES * few, per_node) if request.hardware.network_bandwidth else per_node
    while few < most:
        enough = min(most, _in_nodes(2 * few, per_node))
        if fits(enough):
            between = [number for number in range(few + 1, enough) if _in_nodes(number, per_node) == number]
            return few, [*between, enough][bisect.bisect_left(between, True, key=fits)]
        few = enough
    return few, None


def _in_nodes(num_ranks: int, per_node: int) -> int:
    """Return as many ranks, or where they are more than a node has, those of whole nodes."""
    return num_ranks if num_ranks <= per_node else -(-num_ranks // per_node) * per_node


def _named(num_ranks: int, per_node: int) -> str:
    is_whole = num_ranks % per_node == 0
    return f"--nodes {num_ranks // per_node}" if is_whole else f"--gpus {num_ranks}"


def _text(found: Sequence[Found], request: SearchRequest, arguments: argparse.Namespace, took_s: float) -> str:
    best, texts = found[0], request.texts
    ways = f"the best {len(found)} ways" if len(found) > 1 else "the best way"
    lines = [
        f"{best.recipe.name} on {request.num_ranks} × {arguments.hardware}: {ways} to share them, "
        f"found in {took_s:.0f} s",
        f"prompts of {texts.prompt} tokens, responses of {texts.mean_response:.0f} on average; "
        f"up to {request.memory_bytes / 1e9:.0f} GB of a GPU",
        "",
    ]
    rows = [("", "step", "memory", "longest call", "GPUs: models")]
    for index, one in enumerate(found, 1):
        rows.append((str(index), f"{one.seconds:.4g} s", format_bytes(one.memory_bytes), _longest(one), placed(one)))
    lines += [*format_table(rows, num_left=1), "", "1 in full"]
    needed = cleared(request.load(()))
    lines += [f"  {override}" for override in best.overrides if override in needed or not override.endswith("=null")]
    if len(found) > 1:
        lines += ["", f"2 loses: {why_slower(best, found[1])}"]
    if arguments.out is None:
        return "\n".join([*lines, "", "To write 1 as a recipe, add --out FILE."])
    return "\n".join([*lines, "", f"wrote {arguments.out}: hybridflow launch slurm {arguments.out} --time TIME"])


def placed(found: Found, separator: str = " | ") -> str:
    """Return in words which models share how many GPUs."""
    words = {"actor.update": "actor", "actor.rollout": "rollout"}
    sets = [f"{len(one.ranks)}: {', '.join(words.get(mesh, mesh) for mesh in one.meshes)}" for one in found.placement]
    ahead = found.recipe.trainer.max_staleness
    return separator.join(sets) + (f" (max_staleness={ahead})" if ahead else "")


def _longest(found: Found) -> str:
    call = max(found.calls, key=lambda call: call.seconds)
    return f"{call.name} {call.seconds / found.seconds:.0%}"


def why_slower(best: Found, other: Found) -> str:
    """Return in words what takes longer in a slower configuration, and which of its ranks wait."""
    seconds = {call.name: call.seconds for call in best.calls}
    more = sorted(((call.seconds - seconds.get(call.name, 0.0), call.name) for call in other.calls), reverse=True)
    longer = [f"{name} takes {extra:.3g} s longer" for extra, name in more[:3] if extra > 0.01 * best.seconds]
    waiting = []
    for one in other.placement:
        idle = 1 - sum(call.seconds for call in other.calls if call.mesh in one.meshes) / other.seconds
        if idle > 0.05:
            waiting.append(f"ranks {format_ranks(list(one.ranks))} wait {idle:.0%} of the step")
    slower = f"{other.seconds - best.seconds:.3g} s slower"
    return "; ".join([slower, *longer, *waiting])


def _as_json(found: Sequence[Found], request: SearchRequest, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "recipe": found[0].recipe.name,
        "hardware": arguments.hardware,
        "gpus": request.num_ranks,
        "memory_limit_bytes": request.memory_bytes,
        "prompt": request.texts.prompt,
        "response": request.texts.mean_response,
        "found": [
            {
                "seconds": one.seconds,
                "memory_bytes": one.memory_bytes,
                "placement": [
                    {"models": list(each.meshes), "first_rank": each.ranks.start, "ranks": len(each.ranks)}
                    for each in one.placement
                ],
                "calls": [asdict(call) for call in one.calls if call.seconds],
                "overrides": list(one.overrides),
                "slower_because": why_slower(found[0], one) if one is not found[0] else None,
            }
            for one in found
        ],
    }


def recipe_text(found: Found, command: str) -> str:
    """Return the recipe as YAML, without the keys that are at their defaults.

    With the size of micro-batches in any case: a job finds one for a recipe without.
    """
    values = _changed(found.recipe, to_dict(found.recipe))
    values.setdefault("trainer", {})["micro_batch_tokens"] = found.recipe.trainer.micro_batch_tokens
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    return (
        f"# {command}\n# A step is estimated to take {found.seconds:.4g} s; {_longest(found)}.\n"
        f"# {placed(found)}\n{text}"
    )


def _changed(section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a section that are not its class's defaults."""
    found = {name: (getattr(section, name), values[name]) for name in changed_keys(section)}
    return {name: _changed(value, plain) if is_dataclass(value) else plain for name, (value, plain) in found.items()}
