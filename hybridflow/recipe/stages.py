"""``layers: auto``: pipeline stages of equal work. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridflow.config.recipe import ROLES, Recipe
from hybridflow.families.model import ModelConfig
from hybridflow.layout.balance import balanced_layers
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.flops import model_flops, sequence_pairs


def with_layers(recipe: Recipe) -> Recipe:
    """Return the recipe with the layers of each stage in the place of ``auto``; ``defaults`` has them too."""
    for role in ROLES:
        keys = ("update", "rollout") if role == "actor" else ("layout",)
        section: Any = getattr(recipe, role)
        found = {} if section is None else {key: getattr(section, key) for key in keys}
        found = {key: layout for key, layout in found.items() if layout is not None and layout.layers == "auto"}
        if found:
            settled = {key: replace(layout, layers=stage_layers(recipe, role, layout)) for key, layout in found.items()}
            found_layers = {f"{role}.{key}.layers": layout.layers for key, layout in settled.items()}
            recipe = replace(
                recipe, **{role: replace(section, **settled)}, defaults={**recipe.defaults, **found_layers}
            )
    return recipe


def stage_layers(recipe: Recipe, role: str, layout: ParallelLayout) -> tuple[int, ...] | None:
    """Return the layers of each virtual stage with which the slowest has least to compute.

    Counted are the operations on one sequence of ``max_context`` tokens, the output layer's for the response alone. An
    embedding only looks up. With ``recompute: full`` layers are computed twice before their backward pass.

    Args:
        recipe: The recipe.
        role: Section of the model.
        layout: How the model is cut otherwise.

    Returns:
        None where equally many are best, or there are more stages than layers, which is refused later.
    """
    model, num_stages = recipe.sized_model_of(role), layout.pp * layout.vpp
    if not 1 < num_stages <= model.num_layers:
        return None
    tokens = model.max_context
    outputs = min(recipe.rollout.max_new_tokens, tokens) if recipe.generates else tokens
    is_recomputed = getattr(getattr(recipe, role), "recompute", "none") == "full"

    def cost(part: ModelConfig, outputs: int) -> float:
        flops = model_flops(part, vocab_size=model.vocab_size or 0, has_value_head=recipe.has_value_head(role))
        again = flops.forward(tokens, sequence_pairs(tokens), 0) if is_recomputed else 0.0
        return flops.training(tokens, sequence_pairs(tokens), outputs) + again

    so_far = [cost(replace(model, num_layers=count), 0) for count in range(model.num_layers + 1)]
    costs = [after - before for before, after in zip(so_far, so_far[1:], strict=False)]
    last = cost(replace(model, num_layers=0), outputs)
    found = balanced_layers(costs, num_stages, last=last)
    return None if len(set(found)) == 1 else found
