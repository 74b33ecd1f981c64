"""``hybridflow plan estimate RECIPE``: the time of a recipe's whole step. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Step
from hybridflow.mapping.errors import error_text, published_error
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import job_memory
from hybridflow.mapping.rl_step import Texts, spread_lengths, step_calls, total_seconds
from hybridflow.observe.table import format_table
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.reshard.report import format_bytes


def recipe_step(arguments: argparse.Namespace, machine: Hardware, step_of: Callable[[Recipe], Step]) -> dict[str, Any]:
    """Return the estimate of a recipe's step, as JSON has it.

    Raises:
        ConfigError: The recipe is wrong, or cannot be estimated.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    meshes, samples, texts = role_meshes(recipe), recipe.trainer.global_batch_size, texts_of(arguments, recipe)
    calls = step_calls(recipe, step_of(recipe).flow, meshes, machine, texts)
    seconds = total_seconds(calls, max_staleness=recipe.trainer.max_staleness)
    memory = max(job_memory(recipe, meshes), key=lambda rank: rank.least)
    return {
        "recipe": recipe.name,
        "hardware": arguments.hardware,
        "gpus": recipe.cluster.ranks,
        "prompt": texts.prompt,
        "response": texts.mean_response,
        "seconds": seconds,
        "tokens_per_s": (samples * texts.prompt + sum(texts.responses)) / seconds,
        "calls": [asdict(call) for call in calls if call.seconds],
        # A cache beyond one sequence's takes what is free.
        "memory_bytes": {"rollout": memory.rollout - memory.spare, "update": memory.update},
        "error": published_error("step", arguments.hardware, is_known=recipe.model.num_experts is None),
    }


def texts_of(arguments: argparse.Namespace, recipe: Recipe) -> Texts:
    """Return the texts of a recipe's step, as ``--prompt`` and ``--response`` have them.

    Raises:
        ConfigError: The mean response is longer than ``rollout.max_new_tokens``.
    """
    longest, samples = recipe.rollout.max_new_tokens, recipe.trainer.global_batch_size
    prompt = arguments.prompt or max(1, (recipe.model.max_context - longest) // 2)
    return Texts(prompt=prompt, responses=spread_lengths(samples, arguments.response or max(1, longest // 2), longest))


def step_text(found: dict[str, Any], machine: Hardware) -> str:
    """Return it for a person to read."""
    seconds = found["seconds"]
    lines = [
        f"a step of {found['recipe']} on {found['gpus']} × {found['hardware']}: {seconds:.4g} s, "
        f"{found['tokens_per_s']:,.4g} tokens/s",
        f"prompts of {found['prompt']} tokens, responses of {found['response']:.0f} on average",
        "",
    ]
    rows = [("call", "mesh", "begins", "seconds", "share")]
    for call in found["calls"]:
        times = f"{call['start']:.4g}", f"{call['seconds']:.4g}", f"{call['seconds'] / seconds:.1%}"
        rows.append((call["name"], call["mesh"], *times))
    lines += format_table(rows, num_left=2)
    most = found["memory_bytes"]
    fits = "" if max(most.values()) <= machine.memory_bytes else f": more than {machine.memory_bytes / 1e9:.0f} GB"
    phases = ", ".join(f"{name} {format_bytes(number)}" for name, number in most.items())
    return "\n".join([*lines, f"memory of the fullest GPU: {phases}{fits}", error_text(found["error"])])
