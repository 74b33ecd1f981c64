"""Ranks of the 70B recipe's 512: what they hold is what the planner says."""

from __future__ import annotations

import functools

import pytest
import torch

from hybridflow.mapping.memory import job_memory
from hybridflow.models.gpt import build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.parallel.megatron import collection, rank_sets
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu.cache import GpuCache
from tests.cuda.fake.batches import shared_prompts
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda

RANKS = [pytest.param(0, id="first stage"), pytest.param(100, id="a stage between"), pytest.param(511, id="last stage")]


@functools.cache
def job():
    recipe = load_recipe("ppo-70b", ())
    meshes = role_meshes(recipe)
    return recipe, meshes, job_memory(recipe, meshes)


def planned(rank: int):
    return {part.mesh: part for part in job()[2][rank].meshes}


def build(world, name: str):
    recipe, meshes, _ = job()
    mesh, model = meshes[name], recipe.sized_model_of(name)
    world.make_groups(rank_sets([mesh], world.size))
    groups = collection(world, mesh)
    has_value_head = name == "critic"
    built = build_transformer(
        model, mesh.layout, groups, DEVICE, vocab_size=model.vocab_size, has_value_head=has_value_head
    )
    assert {each.device for each in built.parameters()} == {DEVICE}
    return groups, model, built


def weight_bytes(built) -> int:
    return sum(each.nbytes for each in built.parameters())


@pytest.mark.parametrize("rank", RANKS)
def test_a_training_stage_holds_what_is_planned_and_computes(monkeypatch, rank):
    with fake_cuda(monkeypatch, rank=rank, size=512) as world:
        groups, model, built = build(world, "actor.update")
        batch = shared_prompts(2, 4, 300, 100)
        # Sequence parallelism: a slice of the tokens on each tensor-parallel rank.
        here = -(-len(batch.tokens) // 8)
        if not built.pre_process:
            built.set_input_tensor(torch.empty(here, 1, model.hidden_size, dtype=torch.bfloat16, device=DEVICE))
        with Launches() as launches:
            output = built(batch.tokens, batch.attention, batch.rows)
            if built.post_process:
                found = vocab_parallel_log_probs(output, batch.targets, group=groups.tp, vocab_size=model.vocab_size)
                assert all(each.device == DEVICE for each in found)
    assert weight_bytes(built) == planned(rank)["actor.update"].weights
    assert launches.names["_varlen_attn"] == 10
    # Two sums over the tensor-parallel ranks in each layer, scattered, and the one of the embedding.
    assert launches.names["_reduce_scatter_base_"] == 20 + built.pre_process, launches.names
    assert not launches.names["allreduce_"] or built.post_process
    rows = len(batch.rows), model.vocab_size // 8
    assert output.shape == (rows if built.post_process else (here, 1, model.hidden_size))


@pytest.mark.parametrize("rank", RANKS)
def test_a_critic_holds_what_is_planned(monkeypatch, rank):
    with fake_cuda(monkeypatch, rank=rank, size=512) as world:
        _, _, built = build(world, "critic")
    assert weight_bytes(built) == planned(rank)["critic"].weights


@pytest.mark.parametrize("rank", RANKS)
def test_rollout_holds_what_is_planned(monkeypatch, rank):
    recipe, meshes, _ = job()
    with fake_cuda(monkeypatch, rank=rank, size=512) as world:
        _, model, built = build(world, "actor.rollout")
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
        blocks = recipe.rollout.max_concurrent * -(-model.max_context // BLOCK_TOKENS)
        cache = GpuCache(built, blocks, DEVICE)
    here = planned(rank)
    assert meshes["actor.rollout"].layout.tp == 8
    # Its part of the layers that it trains is there already.
    assert weight_bytes(built) == here["actor.rollout"].weights + here["actor.update"].weights
    assert sum(each.nbytes for each in cache._layers) == here["actor.rollout"].cache
