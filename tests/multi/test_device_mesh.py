"""Where a program's roles lie: by devices, or by process groups that Megatron has made."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from hybridflow.api.device_mesh import DeviceMesh, grid_of
from hybridflow.api.rollout_worker import RolloutWorker
from hybridflow.api.settings import finish_recipe, recipe_values
from hybridflow.api.trainers import PPOTrainer
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.recipe.meshes import role_meshes
from tests.support.complaints import complaint
from tests.support.hf_models import write_tokenizer
from tests.support.ranks import run_ranks
from tests.support.user_models import TinyActor, TinyCritic


def groups_of(tp: int, pp: int, dp: int) -> list[dict[str, list[int]]]:
    """Of each rank, its groups, as Megatron's own rank generator deals them."""
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    found = []
    for rank in range(tp * pp * dp):
        named = {"tp": generator.get_ranks("tp"), "pp": generator.get_ranks("pp")}
        found.append({axis: next(list(each) for each in ranks if rank in each) for axis, ranks in named.items()})
    return found


SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES)
def test_megatrons_own_groups_are_a_grid(tp, pp, dp):
    layout, ranks = grid_of(groups_of(tp, pp, dp))
    assert layout == ParallelLayout(tp=tp, pp=pp, dp=dp)
    # Its order of axes is ours.
    assert ranks == tuple(range(tp * pp * dp))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_ranks_in_any_order_are_put_where_their_groups_have_them(tp, pp, dp, chance: random.Random):
    size = tp * pp * dp
    named = list(range(size))
    chance.shuffle(named)
    told: list[Any] = [None] * size
    for rank, groups in enumerate(groups_of(tp, pp, dp)):
        told[named[rank]] = {axis: [named[each] for each in ranks] for axis, ranks in groups.items()}
    layout, ranks = grid_of(told)
    assert layout == ParallelLayout(tp=tp, pp=pp, dp=dp) and sorted(ranks) == list(range(size))
    for index, rank in enumerate(ranks):
        start = index // tp * tp
        assert list(ranks[start : start + tp]) == told[rank]["tp"]
        assert list(ranks[index % (tp * dp) :: tp * dp]) == told[rank]["pp"]


def test_groups_that_make_no_grid_are_refused():
    with pytest.raises(LayoutError, match=r"rank 0 gave a group of ranks \[0, 1\] for tp"):
        grid_of([{"tp": [0, 1]}, {"tp": [1, 2]}, {"tp": [1, 2]}, {"tp": [3, 0]}])
    with pytest.raises(LayoutError, match="make no grid"):
        grid_of(
            [{"tp": [0, 1], "pp": [0, 2]}, {"tp": [0, 1], "pp": [1, 3]}, {"tp": [2, 4], "pp": [0, 2]}]
            + [{"tp": [3, 5], "pp": [1, 3]}, {"tp": [2, 4], "pp": [4, 5]}, {"tp": [3, 5], "pp": [4, 5]}]
        )


def placed(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = DeviceMesh(devices=[0, "cpu:1", 2, 3], sub_meshes={"critic": [2], "reward": ["cuda:3"]})
    sizes = {"batch_size": 4, "kl_coef": 0.1, "model": {"path": None, **PLAIN}}
    values = recipe_values({**sizes, **mesh.settings}, algorithm="ppo", num_ranks=world.size)
    found["apart"] = {name: each.ranks for name, each in role_meshes(finish_recipe(values)).items()}
    mesh = DeviceMesh(devices=range(4), sub_meshes={"rollout": [3], "critic": [2]})
    values = recipe_values({**sizes, **mesh.settings}, algorithm="ppo", num_ranks=world.size)
    found["rollout"] = {name: each.ranks for name, each in role_meshes(finish_recipe(values)).items()}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = DeviceMesh("tensor", pairs[world.rank // 2])
    found["groups"] = mesh.ranks, str(mesh.layout), mesh.settings["actor"]["update"]
    refused: dict[str, dict[str, Any]] = {
        "named twice": {"devices": [0, 0, 1]},
        "no such role": {"sub_meshes": {"judge": [1]}},
        "reward is given twice": {"sub_meshes": {"reward": [1], "rm": [2]}},
        "leave no device to the actor": {"devices": [0], "sub_meshes": {"rollout": [0]}},
        "give an axis and its group": {"axis": "tensor"},
        "expected 'tensor' or 'pipeline'": {"axis": "depth", "group": pairs[world.rank // 2]},
    }
    for name, options in refused.items():
        assert name in complaint(lambda options=options: DeviceMesh(**options), ConfigError)
    absent = DeviceMesh(devices=[0, 1], sub_meshes={"rm": ["cuda:16"]})
    words = "DeviceMesh.sub_meshes['rm']: 'cuda:16' is not there: this job has 4 rank(s)"
    for start in (lambda: PPOTrainer(sizes, device_mesh=absent), lambda: RolloutWorker("nowhere", device_mesh=absent)):
        assert words in complaint(start, ConfigError)
    return found


PLAIN = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "max_context": 256,
    "vocab_size": 30,
}


def test_roles_lie_where_the_mesh_puts_them_and_groups_are_taken():
    for found in run_ranks(placed, 4):
        assert found["apart"]["actor.update"] == (0, 1) and found["apart"]["critic"] == (2,)
        assert found["apart"]["reward"] == (3,) and found["apart"]["reference"] == (0, 1)
        assert found["rollout"]["actor.rollout"] == (3,) and found["rollout"]["actor.update"] == (0, 1)
        ranks, layout, sizes = found["groups"]
        assert ranks == (0, 1, 2, 3) and layout == "tp2.pp1.dp2" and sizes == {"tp": 2, "pp": 1, "dp": 2}


def test_a_mesh_is_described_and_printed_without_its_devices():
    mesh = DeviceMesh(
        devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        sub_meshes={"rm": ["cuda:4", "cuda:5"], "critic": ["cuda:6", "cuda:7"]},
    )
    rows = [line.split() for line in str(mesh).splitlines()]
    assert rows == [
        ["role", "devices"],
        ["actor", "cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        ["reward", "cuda:4", "cuda:5"],
        ["critic", "cuda:6", "cuda:7"],
    ]
    assert str(DeviceMesh()).split() == ["role", "devices", "actor", "all"]
    beside = DeviceMesh(devices=range(4), sub_meshes={"rollout": [3], "critic": [2]})
    assert str(beside).split()[2:] == ["actor", "0", "1", "rollout", "3", "critic", "2"]
    assert "actor   all others" in str(DeviceMesh(sub_meshes={"critic": 1}))


def train(world: World, folder: Path) -> dict[str, float]:
    mesh = DeviceMesh(devices=[0, 1], sub_meshes={"critic": [1], "actor": [0]})
    config = {"rollout_batch_size": 4, "max_new_tokens": 5, "lr": 1e-3, "run_dir": str(folder / "run")}
    roles = {"actor_model": TinyActor(vocab_size=45), "critic_model": TinyCritic(vocab_size=45), "device_mesh": mesh}
    with PPOTrainer(config, **roles, reward="length", tokenizer=str(folder)) as trainer:
        return trainer.step(["1+1=", "2+2=", "3+4=", "10+5="])


def test_a_trainer_trains_there(tmp_path):
    write_tokenizer(tmp_path)
    for found in run_ranks(train, 2, tmp_path):
        assert found["critic/loss"] > 0 and found["actor/grad_norm"] > 0
