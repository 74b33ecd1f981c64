"""``hybridflow plan estimate RECIPE``: the time of a recipe's whole step. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import ConfigError
from hybridflow.mapping.accuracy import error_text, known_error
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import job_memory, with_micro_batches
from hybridflow.mapping.rl_step import Texts, spread_lengths, step_calls, steps_ahead, total_seconds
from hybridflow.observe.console import format_bytes
from hybridflow.observe.table import format_table
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes

_OWN_ENGINE_S = 1e-3
"""Host time of a token by a fit, see docs/mapping.md."""


def recipe_step(
    arguments: argparse.Namespace, machine: Hardware, like: Texts | None, flow_of: Callable[[Recipe], Flow]
) -> dict[str, Any]:
    """Return the estimate of a recipe's step, as JSON has it; ``like`` are texts of a run.

    Raises:
        ConfigError: The recipe is wrong, or cannot be estimated.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.layout is not None:
        raise ConfigError(
            "layout: auto: the layouts are yet to be found; estimate the recipe that `hybridflow plan auto --out FILE` "
            "writes, or the recipe's own layouts with layout=null"
        )
    machine.check_ranks(recipe.cluster.ranks)
    meshes, samples, texts = (
        role_meshes(recipe),
        recipe.trainer.global_batch_size,
        texts_of(recipe, arguments.prompt, arguments.response, like),
    )
    # As a job does on GPUs with so much memory.
    gpu_bytes = None if machine.is_cpu else machine.memory_bytes
    recipe = with_micro_batches(recipe, meshes, gpu_bytes)
    calls = step_calls(recipe, flow_of(recipe), meshes, machine, texts)
    seconds = total_seconds(calls, max_staleness=steps_ahead(recipe.trainer.max_staleness, machine))
    memory = max(job_memory(recipe, meshes, gpu_bytes=gpu_bytes), key=lambda rank: rank.least)
    return {
        "recipe": recipe.name,
        "hardware": arguments.hardware,
        "gpus": recipe.cluster.ranks,
        "prompt": texts.prompt,
        "response": texts.mean_response,
        "micro_batch_tokens": recipe.trainer.micro_batch_tokens,
        "seconds": seconds,
        "tokens_per_s": (samples * texts.prompt + sum(texts.responses)) / seconds,
        "calls": [asdict(call) for call in calls if call.seconds],
        # A cache beyond one sequence's takes what is free.
        "memory_bytes": {"rollout": memory.rollout - memory.spare, "update": memory.update},
        "error": known_error(_kind(recipe), arguments.hardware, machine, is_known=True),
    }


def _kind(recipe: Recipe) -> str:
    return "step" if recipe.model.num_experts is None else "step of a mixture"


def texts_of(recipe: Recipe, given_prompt: int | None, given_response: int | None, like: Texts | None) -> Texts:
    """Return the texts of a recipe's step, of given lengths, or those of a run; else half of what there is room for.

    Raises:
        ConfigError: The mean response is longer than ``rollout.max_new_tokens``, or given lengths than the context.
    """
    longest, samples = recipe.rollout.max_new_tokens, recipe.trainer.global_batch_size
    prompt, response = max(1, (recipe.model.max_context - longest) // 2), float(max(1, longest // 2))
    if like is not None:
        prompt, response = like.prompt, min(longest, like.mean_response)
    prompt, response = given_prompt or prompt, given_response or response
    lengths = spread_lengths(samples, response, longest)
    if (given_prompt or given_response) and prompt + response > recipe.model.max_context:
        raise ConfigError(
            f"--prompt {prompt} with --response {response:g}: more than model.max_context={recipe.model.max_context}; "
            "give shorter ones"
        )
    return Texts(prompt=prompt, responses=lengths)


def step_text(found: dict[str, Any], machine: Hardware) -> str:
    """Return it for a person to read."""
    seconds = found["seconds"]
    lines = [
        f"a step of {found['recipe']} on {found['gpus']} × {found['hardware']}: {seconds:.4g} s, "
        f"{found['tokens_per_s']:,.4g} tokens/s",
        f"prompts of {found['prompt']} tokens, responses of {found['response']:.0f} on average, micro-batches of "
        f"{found['micro_batch_tokens']}",
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
    lines.append(f"memory of the fullest GPU: {phases}{fits}")
    # Hardware that was fitted to measured times has the time of the engine that ran.
    if machine.error_percent is None and machine.engine_launch > _OWN_ENGINE_S:
        lines.append(
            f"of each token of a rollout {1e3 * machine.engine_launch:g} ms are the host's, as in published steps with "
            f"vLLM; hybridflow's own engine took about {1e3 * _OWN_ENGINE_S:g} ms on an H100, so a rollout of a small "
            "model is shorter: see `hybridflow doctor --measure` and --like"
        )
    return "\n".join([*lines, error_text(found["error"])])
