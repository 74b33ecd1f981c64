"""What a recipe with images may not ask for, and what its memory is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.mapping.memory import job_memory
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from tests.support.recipes import POLICY, SEES, SMALLEST, write_config

PROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65536}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path / "sees", SEES)
    (tmp_path / "sees/preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_config(tmp_path / "blind", POLICY)
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    return tmp_path


def read(folder: Path, *changes: str) -> Recipe:
    model = f"model={{path: {folder}/sees}}"
    return load_recipe(str(folder / "recipe.yaml"), [model, "data.images_field=images", *changes])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model={path: DIR/blind}"], "blind: model_type 'llama' does not read images here"),
        (["critic.model={path: DIR/blind}"], "blind: model_type 'llama' does not read images here"),
        (["model.implementation=transformers"], "model.implementation=transformers: data.images_field needs a model"),
        (["rollout.replay=runs/x"], "rollout.replay: cannot be had with data.images_field"),
        (
            ["rollout.engine={kind: vllm}", "actor.rollout={dp: 4}"],
            "rollout.engine.kind=vllm: data.images_field=images gives images to our own engine alone",
        ),
        (["data.images_field=null", "data.image_max_pixels=9"], "data.image_max_pixels: is for images; give data.im"),
    ],
)
def test_refused(folder: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(folder, *(each.replace("DIR", str(folder)) for each in changes))
    assert message in str(caught.value)


def test_models_cut_images_alike(folder: Path) -> None:
    """Tokens of images are counted once, as the actor has them."""
    write_config(folder / "finer", SEES)
    size = {"shortest_edge": 1024, "longest_edge": 32768}
    (folder / "finer/preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": size}))
    critic = f"critic.model={{path: {folder}/finer}}"
    with pytest.raises(ConfigError, match=r"critic\.model\.path: .*finer has max_pixels=32768 for images, and .*65536"):
        read(folder, critic)
    read(folder, critic, "data.image_max_pixels=32768")


def test_a_new_model_reads_none(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: missing; data\.images_field needs the directory of a model"):
        load_recipe(str(folder / "recipe.yaml"), ["data.images_field=images"])


def test_the_tower_and_what_is_kept_count_once_on_ranks_of_first_stages(folder: Path) -> None:
    """Actor, reference and critic have it in common."""
    tower = {"model.visual.a": torch.zeros(700, 10), "model.visual.b": torch.zeros(50)}
    save_file({**tower, "lm_head.weight": torch.zeros(9)}, folder / "sees/model.safetensors")
    known = ["model.dtype=bf16", "actor.rollout=null", "actor.update={pp: 2, dp: 2}", "kl.coef=0.1"]
    both = (read(folder, *known), read(folder, *known, "data.images_field=null"))
    seeing, blind = (job_memory(recipe, role_meshes(recipe)) for recipe in both)
    more = [one.update - other.update for one, other in zip(seeing, blind, strict=True)]
    expected = 2 * (7050 + 16384 * 2 * 32)
    assert more == [expected, expected, 0, 0]
