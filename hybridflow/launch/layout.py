"""``layout: auto``: the layouts are searched before a recipe is trained or submitted. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow.config.recipe import Recipe
from hybridflow.recipe.load import load_recipe


def with_layouts(
    recipe: Recipe, name: str | Path, overrides: Sequence[str], num_ranks: int
) -> tuple[Recipe, list[str], str | None]:
    """Return a recipe with the layouts that ``layout: auto`` asks for; any other recipe as it is.

    The same recipe, number of ranks and hardware give the same layouts on every machine.

    Args:
        recipe: From ``load_recipe`` with this name and these overrides.
        name: A YAML file, or the name of a shipped recipe.
        overrides: As for ``load_recipe``.
        num_ranks: Those that are there, whatever the recipe says.

    Returns:
        The recipe, overrides with which it is read again, and a line about what was found; None: nothing was searched.

    Raises:
        ConfigError: The hardware is not known, the recipe cannot be estimated, or nothing fits.
    """
    if recipe.layout is None:
        return recipe, list(overrides), None
    # Reads many modules that no other recipe needs.
    from hybridflow.mapping.auto import placed, settle
    from hybridflow.trainer.plan import training_step

    own = [*overrides, "layout=null"]
    found, texts = settle(
        recipe,
        lambda more: load_recipe(name, [*own, *more], num_ranks=num_ranks),
        num_ranks,
        lambda recipe: training_step(recipe).flow,
    )
    line = (
        f"layout: auto: {placed(found)}; a step is estimated to take {found.seconds:.3g} s with prompts of "
        f"{texts.prompt} tokens and responses of {texts.mean_response:.0f}"
    )
    return found.recipe, [*own, *found.overrides], line
