"""FP8 on ranks of a CPU: the padding of its tokens, and the rounded weights with which the actor samples.

The linear layers are megatron-core's local ones, which compute in bf16 or fp32 whatever they are told.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from megatron.core.transformer import transformer_block

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import gpt
from hybridflow.models.fp8 import is_rounded, rounded
from hybridflow.models.gpt import build_transformer
from hybridflow.models.microbatch import pack
from hybridflow.models.specs import logical_parameters
from hybridflow.models.weights import initialize, local_shards
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from tests.multi.jobs import inner_of, make_batch, make_job, outer_of, tiny_recipe
from tests.multi.models import TINY, VOCAB, make_model, place
from tests.support.described import describe_model
from tests.support.ranks import run_ranks

LENGTHS = [17, 9, 30]


def padded(world, texts: list[str]) -> list[tuple[list[float], list[float], list[int]]]:
    """For each layout the outputs without padding and with it, and the tokens of a stage's activations."""
    found = []
    for text in texts:
        layout = ParallelLayout.parse(text)
        model, _, groups, _ = make_model(world, layout)
        sequences = [torch.arange(length) % VOCAB for length in LENGTHS]
        batch = pack([0, 1, 2], sequences, [1, 1, 1], world.device, groups.cp)
        seen: list[int] = []
        model.decoder.layers[0].mlp.register_forward_hook(
            lambda module, given, output, seen=seen: seen.append(len(given[0]))
        )
        outputs = []
        for multiple in (1, 128):
            model.aligned_tokens = multiple
            output = model(batch.tokens, batch.attention, batch.rows)
            model.zero_grad()
            output.square().sum().backward()
            gradient = model.decoder.layers[0].mlp.linear_fc1.weight.grad
            outputs.append([float(output.sum()), float(output.std()), float(gradient.norm())])
        found.append((*outputs, seen))
    return found


def test_padded_tokens_change_nothing():
    for size, texts in ((1, ["tp1"]), (2, ["tp2", "cp2"])):
        for cases in run_ranks(padded, size, texts):
            for text, (plain, aligned, seen) in zip(texts, cases, strict=True):
                torch.testing.assert_close(plain, aligned, rtol=2e-5, atol=2e-5)
                # Slices of tp2 are gathered before the layer's matrices, not before the block.
                assert seen[0] < 128 and seen[1] == 128, (text, seen)


def contexts(world, kind: str) -> tuple[list[int], list[bool], set[str]]:
    """The layers for which megatron-core opens a context, whether each product is inside, and what the modules ask."""
    mesh, groups = place(world, ParallelLayout())
    with mock.patch.object(gpt, "check_device"):
        model = build_transformer(TINY, mesh.layout, groups, world.device, vocab_size=VOCAB, fp8=kind)
    initialize(model, describe_model(world, TINY, vocab_size=VOCAB), mesh, world.rank, seed=3, std=0.1)
    opened: list[int] = []
    inside = [False]
    products: list[bool] = []

    @contextlib.contextmanager
    def context(config, layer_no=-1, is_init=False):
        opened.append(layer_no)
        inside[0] = True
        yield
        inside[0] = False

    for name, module in model.named_modules():
        if is_rounded(f"{name}.weight") or name == "output_layer":
            module.register_forward_hook(lambda *_: products.append(inside[0]))
    batch = pack([0], [torch.arange(12) % VOCAB], [1], world.device, groups.cp)
    with mock.patch.object(transformer_block, "get_fp8_context", context):
        model(batch.tokens, batch.attention, batch.rows)
    return opened, products, {model.config.fp8, model.config.fp8_recipe}


def test_each_layer_computes_inside_the_context_of_fp8_and_the_output_layer_outside():
    ((opened, products, asked),) = run_ranks(contexts, 1, "blockwise")
    assert opened == [0, 1, 2, 3] and asked == {"e4m3", "blockwise"}
    # Four matrices of four layers, and the output layer.
    assert products == [True] * 16 + [False]
    ((opened, products, asked),) = run_ranks(contexts, 1, "none")
    assert opened == [] and products == [False] * 17 and None in asked


WIDE = replace(TINY, num_layers=2, hidden_size=256, ffn_hidden_size=256, num_attention_heads=8, dtype="bf16")


def sampled_weights(world, layouts: list[tuple[str, str]]) -> list[dict[str, dict]]:
    """For each pair of layouts the parts of the update's weights that this rank rounds, and those of the rollout."""
    found = []
    for update, rollout in layouts:
        recipe = tiny_recipe(ParallelLayout.parse(update), "grpo", model=WIDE)
        actor = replace(recipe.actor, rollout=ParallelLayout.parse(rollout), fp8="blockwise", reshard="torch")
        job, _ = make_job(world, replace(recipe, actor=actor))
        with mock.patch.object(gpt, "check_device"):
            role = Actor(job, KLCoefficient(job.recipe))
        assert role.model.transformer.config.fp8_recipe == "blockwise"
        assert role._rollout is not role.model and role._rollout.transformer.config.fp8 is None
        assert role._rollout.transformer.aligned_tokens == 1
        parts = {}
        for turn in range(2):
            before = {name: each.clone() for name, each in role.model.tensors().items()}
            role.enter_phase("rollout")
            here = role.model.tensors()
            assert all(torch.equal(here[name], each) for name, each in before.items()), "training keeps its weights"
            assert all(each.untyped_storage().nbytes() == 0 for each in role._rollout_weights._rounded.values())
            parts = {
                "update": as_rounded(role.model, world.rank),
                "rollout": as_arrays(shards(role._rollout, world.rank)),
            }
            role.enter_phase("update")
            if turn == 0:
                role.update(make_batch(), {"actor_mini_batch": {"epoch": 0, "index": 0}})
        found.append(parts)
    return found


def as_rounded(placed, rank: int):
    """This rank's parts of the weights, those of linear layers rounded as rows and columns of the layer's matrix."""
    held, found = logical_parameters(placed.transformer), shards(placed, rank)
    for name in filter(is_rounded, found):
        assert held[name].dim() == 2
        found[name] = (rounded(held[name], "blockwise").view_as(found[name][0]), found[name][1])
    return as_arrays(found)


def as_arrays(found):
    return {name: (each.float().clone().numpy(), part) for name, (each, part) in found.items()}


def shards(placed, rank: int):
    return local_shards(placed.transformer, placed.spec, placed.mesh, rank)


def test_the_rollout_has_the_weights_that_each_rank_of_the_update_rounds():
    layouts = [("tp2", "dp2"), ("tp2", "tp2"), ("pp2", "tp2")]
    by_rank = run_ranks(sampled_weights, 2, layouts)
    for index, (update, _) in enumerate(layouts):
        whole: dict[str, np.ndarray] = {}
        for cases in by_rank:
            for name, (each, part) in cases[index]["update"].items():
                shape = tuple(tensor_shape(by_rank, index, name))
                whole.setdefault(name, np.zeros(shape, dtype=np.float32))[outer_of(part)] = each[inner_of(part)]
        changed = 0
        for cases in by_rank:
            for name, (each, part) in cases[index]["rollout"].items():
                assert np.array_equal(each[inner_of(part)], whole[name][outer_of(part)]), (update, name)
                changed += is_rounded(name)
        assert changed >= 8, "four matrices of two layers"


def tensor_shape(by_rank, index: int, name: str) -> list[int]:
    """The shape of a logical tensor, from the ends of its parts."""
    parts = [cases[index]["update"][name][1] for cases in by_rank if name in cases[index]["update"]]
    return [max(stop for _, stop in ends) for ends in zip(*(part.box for part in parts), strict=True)]
