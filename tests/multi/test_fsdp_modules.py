"""PyTorch FSDP around modules that no table describes: those of ``transformers``, and classes of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.errors import ConfigError
from hybridflow.placement.place import place_model
from hybridflow.placement.placed_model import role_spec
from tests.multi.test_hf_models import folder, recipe
from tests.multi.test_train_pretrained import begun, lines, run
from tests.support.complaints import complains
from tests.support.ranks import run_ranks

__all__ = ["folder"]

COMPARED = ("actor/loss", "actor/grad_norm", "reward/mean", "kl/ref")


def sharded(**changes: Any) -> dict[str, Any]:
    return {"actor": {"update": {"fsdp": 2}, "rollout": {"dp": 2}, **changes}}


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "family"), [("grpo", "Falcon"), ("ppo", "StableLm"), ("grpo", "MiniMax")])
def test_a_run_learns_what_it_learns_on_whole_modules(folder, algorithm, family):
    """MiniMax saves buffers too."""
    found = []
    for name, changes in (("whole", {}), ("fsdp", sharded(recompute="full", offload="always"))):
        if algorithm == "ppo" and changes:
            changes["critic"] = {"layout": {"fsdp": 2}, "offload": "always"}
        made = recipe(folder, algorithm, f"{family}-{name}", family, 2, **changes)
        run_ranks(run, 2, made)
        found.append(lines(folder, made["name"]))
    whole, fsdp = found
    assert len(whole) == len(fsdp) == 2 and whole[0]["actor/grad_norm"] > 1e-3
    for row, other in zip(whole, fsdp, strict=True):
        for metric in (*COMPARED, *(("critic/loss",) if algorithm == "ppo" else ())):
            assert other[metric] == pytest.approx(row[metric], rel=1e-4, abs=1e-6), metric


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_whole_modules_and_adapters_learn(folder):
    lora = {"lora": {"rank": 2, "targets": ["q_proj", "up_proj"]}}
    found = []
    for name, changes in (("a", {"actor": lora}), ("b", sharded(**lora))):
        made = recipe(folder, "grpo", name, "StableLm", 2, **changes)
        run_ranks(run, 2, made)
        made["trainer"] = {**made["trainer"], "steps": 4}
        # The sharded run goes on unsharded, on one rank.
        made["cluster"], made["actor"]["update"] = {"ranks": 1}, {"dp": 1}
        made["actor"].pop("rollout", None)
        run_ranks(run, 1, made, True)
        found.append(lines(folder, name))
    for row, other in zip(*found, strict=True):
        assert other["actor/loss"] == pytest.approx(row["actor/loss"], rel=1e-4, abs=1e-6)
    assert len(found[0]) == 4


class Unlisted(torch.nn.Module):
    """A policy whose layers are in no list."""

    vocab_size, max_context = 45, 32

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(45, 45)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)


def refused(world, values: dict[str, Any]) -> None:
    job = replace(begun(world, values).job, objects={"actor": Unlisted()}, modules={})
    said = ["actor: Unlisted: has no nn.ModuleList of layers,", "use neither fsdp nor"]
    complains(lambda: place_model(job, job.meshes["actor.update"], role_spec(job)), said, ConfigError)


def test_a_module_without_a_list_of_layers_is_refused(folder):
    run_ranks(refused, 2, recipe(folder, "grpo", "unlisted", "StableLm", 2, **sharded()))
