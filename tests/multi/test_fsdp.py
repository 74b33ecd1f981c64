"""PyTorch FSDP as an update layout: memory, weights for the rollout, adapters, checkpoints in other layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from hybridflow.checkpoint.saver import Step
from hybridflow.checkpoint.store import load_latest, open_role
from hybridflow.checkpoint.training_state import load_training
from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.fsdp import local_part, shard_model
from hybridflow.models.weights import local_regions, regions_of
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from tests.multi.jobs import add_noise, inner_of, make_batch, make_job, outer_of, tiny_recipe
from tests.multi.models import TINY
from tests.multi.test_checkpoints import part_of, saver_of
from tests.support.ranks import run_ranks


def actor_of(world, text: str, **changes: Any) -> Actor:
    """An actor on all ranks, in an update layout."""
    recipe = tiny_recipe(ParallelLayout.parse(text), "grpo", model=changes.pop("model", TINY), micro_batch_tokens=30)
    recipe = replace(recipe, actor=replace(recipe.actor, **changes))
    job, _ = make_job(world, recipe)
    return Actor(job, KLCoefficient(recipe))


def learn(actor: Actor, rank: int, steps: int) -> None:
    layout = actor.model.mesh.layout
    batch = make_batch().select(torch.arange(12)[actor.model.mesh.coordinate(rank).dp :: layout.dp])
    for step in range(steps):
        actor.update(batch, {"actor_mini_batch": {"epoch": 0, "index": step % 2}})


def pieces(actor: Actor, rank: int, kind: str) -> list[tuple[str, Any, np.ndarray]]:
    """This rank's boxes of the weights, or of a kind of optimizer state."""
    found = []
    for name, regions in local_regions(actor.model.transformer, actor.spec, actor.model.mesh, rank).items():
        if kind != "weight":
            regions = regions_of(actor.trainable.state()[kind][name], [part for _, part in regions])
        found += [(name, outer_of(part), values[inner_of(part)].float().numpy().copy()) for values, part in regions]
    return found


def joined(spec: Any, ranks: list[list[tuple[str, Any, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Whole tensors from the ranks' boxes; replicas agree."""
    whole = {tensor.name: np.full(tensor.shape, np.nan, np.float32) for tensor in spec.tensors}
    for name, box, values in (piece for rank in ranks for piece in rank):
        assert np.isnan(whole[name][box]).all() or (whole[name][box] == values).all(), name
        whole[name][box] = values
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole


def held_bytes(world) -> dict[str, list[int]]:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    found = {}
    for text in ("fsdp4", "dp4"):
        actor = actor_of(world, text, optimizer=OptimizerConfig(lr=1e-3, distributed=False))
        learn(actor, world.rank, 1)
        state = actor.trainable.state()
        storages = {each.untyped_storage().data_ptr(): each.nbytes for each in actor.model.tensors().values()}
        found[text] = [
            sum(storages.values()),
            sum(each.nbytes for each in state["gradient"].values()),
            sum(each.nbytes for kind in ("exp_avg", "exp_avg_sq") for each in state[kind].values()),
        ]
    return found


def test_a_rank_holds_a_quarter():
    ranks = run_ranks(held_bytes, 4)
    for kind in range(3):
        whole, parts = ranks[0]["dp4"][kind], [rank["fsdp4"][kind] for rank in ranks]
        # Padding of the vocabulary is on the last rank alone, and no tensor here has rows that four ranks cannot share.
        assert max(parts) <= 1.01 * whole / 4 and abs(sum(parts) - whole) <= 0.01 * whole, (kind, parts, whole)


def summed_gradients(world) -> set[float]:
    """Sums over four ranks of 256, 1, -256 and 1 in every order. In bf16 256 + 1 is 256."""
    _, plan = make_job(world, tiny_recipe(ParallelLayout.parse("fsdp4"), "grpo"))
    module = torch.nn.Linear(24, 4, bias=False, dtype=torch.bfloat16)
    shard_model(module, [], world, plan.meshes["actor.update"])
    module(torch.tensor([*permutations([256.0, 1, -256, 1])], dtype=torch.bfloat16)[:, world.rank]).sum().backward()
    return set(local_part(module.weight.grad).flatten().tolist())


def test_gradients_in_bf16_are_summed_over_ranks_in_fp32():
    assert run_ranks(summed_gradients, 4) == [{2.0}] * 4


def rollout_weights(world, text: str) -> tuple[list[Any], list[Any], dict[str, float]]:
    actor = actor_of(world, "fsdp4", rollout=ParallelLayout.parse(text))
    add_noise(actor.model, actor.spec, world.rank, seed=3)
    learn(actor, world.rank, 2)
    actor.enter_phase("rollout")
    rollout = local_regions(actor._rollout.transformer, actor.spec, actor._rollout.mesh, world.rank)
    here = [
        (name, outer_of(part), values[inner_of(part)].numpy().copy())
        for name, regions in rollout.items()
        for values, part in regions
    ]
    return pieces(actor, world.rank, "weight"), here, dict(actor.metrics)


@pytest.mark.parametrize("text", ["tp2.dp2", "dp4"])
def test_the_rollout_gets_the_weights_with_the_fewest_bytes(text):
    found = run_ranks(rollout_weights, 4, text)
    spec = run_ranks(spec_of, 1)[0]
    learned, sampled = joined(spec, [each[0] for each in found]), joined(spec, [each[1] for each in found])
    assert all((learned[name] == sampled[name]).all() for name in learned)
    for _, _, metrics in found:
        assert 0 < metrics["reshard/bytes"] == metrics["reshard/limit_bytes"]


def spec_of(world) -> Any:
    return actor_of(world, "dp1").spec


KINDS = ("weight", "exp_avg", "exp_avg_sq")


def save(world, folder: Path, text: str, model: Any) -> dict[str, list[Any]]:
    actor = actor_of(world, text, model=model, optimizer=OptimizerConfig(lr=1e-3, distributed=False))
    learn(actor, world.rank, 3)
    saver = saver_of(world, folder)
    part = part_of(world, actor.trainable, actor.spec, actor.model.mesh)
    saver.save(Step(number=3, state={}, leads={"actor": 0}, parts={"actor": part}))
    saver.finish(print)
    kinds = [*KINDS, *(["master"] if model.dtype == "bf16" else [])]
    return {kind: pieces(actor, world.rank, kind) for kind in kinds}


def resume(world, folder: Path, text: str, model: Any) -> tuple[int, dict[str, list[Any]]]:
    actor = actor_of(world, text, model=model, optimizer=OptimizerConfig(lr=1e-2, distributed=False))
    source = open_role(load_latest(folder), "actor")
    load_training(source, actor.trainable, actor.spec, actor.model.mesh, world.rank)
    kinds = [*KINDS, *(["master"] if model.dtype == "bf16" else [])]
    return actor.trainable.num_steps(), {kind: pieces(actor, world.rank, kind) for kind in kinds}


@pytest.mark.parametrize(
    ("source", "target", "dtype"),
    [
        ("fsdp4", "fsdp2", "bf16"),
        ("fsdp2.dp4", "tp2", "fp32"),
        pytest.param("tp2.dp2", "fsdp2", "fp32", marks=pytest.mark.slow),
        pytest.param("fsdp4", "dp1", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(tmp_path, source, target, dtype):
    model = replace(TINY, dtype=dtype)
    before = run_ranks(save, 4, tmp_path, source, model)
    after = run_ranks(resume, ParallelLayout.parse(target).world_size, tmp_path, target, model)
    spec = run_ranks(spec_of, 1)[0]
    assert {steps for steps, _ in after} == {3}
    for kind in before[0]:
        was, now = joined(spec, [each[kind] for each in before]), joined(spec, [each[kind] for _, each in after])
        assert all((was[name] == now[name]).all() for name in was), kind
        assert any(values.any() for values in was.values())


def adapters(world, text: str) -> list[Any]:
    lora = LoRAConfig(rank=2, targets=("q_proj", "gate_proj", "up_proj", "down_proj"), dropout=0.1)
    actor = actor_of(world, text, lora=lora, optimizer=OptimizerConfig(lr=1e-3, distributed=False))
    learn(actor, world.rank, 3)
    return pieces(actor, world.rank, "weight")


def test_adapters_learn_as_in_a_layout_of_one_rank():
    (alone,) = run_ranks(adapters, 1, "dp1")
    whole = {name: values for name, _, values in alone}
    moved = 0.0
    for rank in run_ranks(adapters, 2, "fsdp2"):
        for name, box, values in rank:
            np.testing.assert_allclose(values, whole[name][box], atol=2e-5, rtol=0, err_msg=name)
            moved = max(moved, float(np.abs(values).max()) if name.endswith(".B") else 0.0)
    assert moved > 1e-3, "no adapter has learned"


def recomputed(world) -> list[bool]:
    """Of each layout: whether weights are the same to the last bit with and without activations that are kept."""
    found = []
    for text in ("fsdp2", "tp2", "pp2"):
        both = []
        for is_on in (False, True):
            actor = actor_of(world, text, recompute="full" if is_on else "none")
            learn(actor, world.rank, 2)
            both.append(pieces(actor, world.rank, "weight"))
        found.append(all((one == other).all() for (_, _, one), (_, _, other) in zip(*both, strict=True)))
    return found


def test_computing_activations_again_changes_no_bit():
    assert run_ranks(recomputed, 2) == [[True] * 3] * 2


def saved_tensors(world) -> dict[bool, int]:
    """Bytes that a forward pass keeps for the backward pass."""
    found = {}
    for is_on in (False, True):
        actor, kept = actor_of(world, "dp1", recompute="full" if is_on else "none"), [0]

        def note(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept[0] += tensor.nbytes if not isinstance(tensor, torch.nn.Parameter) else 0
            return tensor

        (part,) = actor.model.pack([torch.arange(24)], [4])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            actor.model.transformer(part.tokens, part.attention, part.rows)
        found[is_on] = kept[0]
    return found


def test_computing_activations_again_keeps_a_fraction_of_them():
    (found,) = run_ranks(saved_tensors, 1)
    assert found[True] < found[False] / 4


LARGER = replace(TINY, num_layers=4, hidden_size=512, ffn_hidden_size=1408)


def resharded(world, reshard: str) -> dict[str, float]:
    """Bytes of weights that went from eight shards to two tensor-parallel halves, and what held them on the way."""
    actor = actor_of(world, "fsdp8", model=LARGER, rollout=ParallelLayout.parse("tp2.dp4"), reshard=reshard)
    actor.enter_phase("rollout")
    own = sum(tensor.nbytes for tensor in actor._rollout.tensors().values())
    return {**actor.metrics, "own": float(own)}


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["torch", "shared"])
def test_eight_shards_become_two_halves_with_little_memory(reshard):
    for found in run_ranks(resharded, 8, reshard):
        assert found["reshard/bytes"] <= 1.001 * found["reshard/limit_bytes"]
        # What the rollout's weights take themselves is in it.
        assert found["reshard/extra_bytes"] - found["own"] <= 0.10 * found["own"]
        assert found["own"] > 1 << 22


def offloaded(world) -> tuple[list[int], bool]:
    """Bytes of this rank's shards in an update, in a rollout, while a checkpoint is written, and in an update again."""
    actor = actor_of(world, "fsdp2", rollout=ParallelLayout(dp=2), offload=True)
    held = list(actor.model.tensors().values())
    learn(actor, world.rank, 1)
    before = [tensor.clone() for tensor in held]

    def size() -> int:
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())

    sizes = [size()]
    for _ in range(2):
        actor.enter_phase("rollout")
        sizes.append(size())
    with actor.optimizer_at_hand():
        sizes.append(size())
    actor.mark_changed()
    actor.enter_phase("rollout")
    sizes.append(size())
    actor.enter_phase("update")
    sizes.append(size())
    return sizes, all(torch.equal(one, other) for one, other in zip(held, before, strict=True))


def test_shards_are_in_host_memory_during_a_rollout():
    for (first, *rest), is_same in run_ranks(offloaded, 2):
        assert first > 0 and rest == [0, 0, first, 0, first] and is_same


def in_host_memory(world, text: str, model: Any, rollout: str) -> tuple[bool, bool, bool]:
    """Whether FSDP keeps the shards in host memory, and weights and what a rollout gets are the same without that."""
    found = []
    for offload in (False, "always"):
        actor = actor_of(world, text, model=model, offload=offload, rollout=ParallelLayout.parse(rollout))
        add_noise(actor.model, actor.spec, world.rank, seed=3)
        learn(actor, world.rank, 3)
        groups = [
            module._get_fsdp_state()._fsdp_param_group
            for module in actor.model.transformer.modules()
            if isinstance(module, FSDPModule)
        ]
        actor.enter_phase("rollout")
        sampled = [tensor.clone() for tensor in actor._rollout.tensors().values()]
        actor.enter_phase("update")
        learn(actor, world.rank, 1)
        policies = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
        found.append((policies, pieces(actor, world.rank, "weight"), sampled))
    (without, weights, sampled), (within, same_weights, same_sampled) = found
    return (
        without == {False} and within == {True},
        all((one == other).all() for (_, _, one), (_, _, other) in zip(weights, same_weights, strict=True)),
        all(torch.equal(one, other) for one, other in zip(sampled, same_sampled, strict=True)),
    )


@pytest.mark.parametrize(
    ("text", "dtype", "rollout"),
    [
        ("fsdp2", "fp32", "tp2"),
        pytest.param("fsdp2", "bf16", "tp2", marks=pytest.mark.slow),
        pytest.param("fsdp2.zero2", "fp32", "dp2", marks=pytest.mark.slow),
        pytest.param("fsdp2.dp4", "bf16", "tp2.pp2", marks=pytest.mark.slow),
    ],
)
def test_shards_in_host_memory_learn_alike(text, dtype, rollout):
    layout = ParallelLayout.parse(text)
    for found in run_ranks(in_host_memory, layout.world_size, text, replace(TINY, dtype=dtype), rollout):
        assert found == (True, True, True)
