"""A layer of experts: what it asks of the host, and how many kernels it starts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch._subclasses.fake_tensor import FakeTensor

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping import activations
from hybridflow.models.gpt import build_transformer
from hybridflow.models.grouped import _add_gradients, _GroupedLinear, _side_by_side
from hybridflow.placement.rollout_weights import _lay_apart
from tests.cuda.fake.machine import DEVICE, Launches, Peak, fake_cuda, place
from tests.cuda.fake.shapes import family_model
from tests.multi.models import MIXTURE

TOKENS = 100


def run_layer(world, layout, num_experts):
    """Kernels that a layer starts, forward."""
    model = replace(MIXTURE, dtype="bf16", ffn_hidden_size=48, num_experts=num_experts)
    groups = place(world, layout)[1]
    layer = build_transformer(model, layout, groups, DEVICE, vocab_size=29).decoder.layers[0].mlp
    assert all(_side_by_side(stack[::-1]) is not None for stack in layer.stacks)
    with Launches() as launches:
        output, _ = layer(torch.empty(TOKENS, 1, model.hidden_size, dtype=torch.bfloat16, device=DEVICE))
    assert output.shape == (TOKENS, 1, model.hidden_size)
    return launches


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2)], ids=["1", "tp2"])
def test_a_layer_asks_nothing_of_the_host_and_its_kernels_do_not_grow_with_the_experts(monkeypatch, layout):
    with fake_cuda(monkeypatch, size=layout.world_size) as world:
        few, many = (run_layer(world, layout, num_experts) for num_experts in (4, 64))
    assert sum(few.names.values()) == sum(many.names.values()) <= 80, few.names
    # The products read the weights in place. What is put together is counts.
    assert (many.names["_grouped_mm"], many.names["cat"]) == (2, 1), many.names


def test_experts_of_which_some_leave_keep_no_room_for_them(monkeypatch):
    with fake_cuda(monkeypatch) as world:
        groups = place(world, ParallelLayout())[1]
        model = build_transformer(replace(MIXTURE, dtype="bf16"), ParallelLayout(), groups, DEVICE, vocab_size=29)
        first, second = model.decoder.layers[0].mlp.stacks
        _lay_apart(model, {id(first[0]), *map(id, second)})
    assert [weight.untyped_storage().nbytes() == weight.nbytes for weight in first] == [False, True, True, True]
    assert _side_by_side(second[::-1]) is not None, "they leave together, and their storage with them"


def test_ranks_that_exchange_tokens_ask_once(monkeypatch):
    asked = []

    def answer(tensor):
        asked.append(tuple(tensor.shape))
        return [[TOKENS, TOKENS], [TOKENS, TOKENS]]

    monkeypatch.setattr(FakeTensor, "tolist", answer)
    with fake_cuda(monkeypatch, size=2) as world:
        run_layer(world, ParallelLayout(dp=2, ep=2), 4)
    # Rows that go to each rank, and rows that come from each.
    assert asked == [(2, 2)]


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("tokens", [256, 8192])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_layer_takes_the_memory_that_is_planned(monkeypatch, name, tokens, is_training):
    model = replace(family_model(name), num_layers=1)
    with fake_cuda(monkeypatch) as world, torch.set_grad_enabled(is_training):
        mesh, groups = place(world, ParallelLayout())
        layer = build_transformer(model, mesh.layout, groups, DEVICE, vocab_size=model.vocab_size).decoder.layers[0].mlp
        hidden = torch.empty(tokens, 1, model.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        with Peak() as peak:
            output, _ = layer(hidden)
    assert output.requires_grad == is_training
    planned = activations._passing_bytes(model, mesh, tokens)
    # Of what is planned attention has a part. What is kept for gradients a plan counts apart.
    kept = is_training * activations._stacked_bytes(model, mesh)
    assert 0.5 * planned <= peak.most_bytes <= planned + kept


def test_a_backward_pass_takes_the_weights_side_by_side_or_their_gradients(monkeypatch):
    model = family_model("qwen3_moe")
    rows, out, hidden = 1024, 2 * model.ffn_hidden_size, model.hidden_size
    with fake_cuda(monkeypatch):

        def make(*shape):
            return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)

        stops = torch.empty(model.num_experts, dtype=torch.int32, device=DEVICE)
        saved = make(rows, hidden), stops, *(make(out, hidden) for _ in range(model.num_experts))
        needed = True, False, False, *[True] * model.num_experts
        context = SimpleNamespace(saved_tensors=saved, needs_input_grad=needed, adds_gradients=False, whole=None)
        with Peak() as peak:
            found = _GroupedLinear.backward(context, make(rows, out))
    stack = model.num_experts * out * hidden * 2
    assert sum(each.nbytes for each in found[3:]) == stack
    assert stack <= peak.most_bytes <= stack + 2 * rows * (out + hidden) * 2


@pytest.mark.parametrize("is_distributed", [False, True])
def test_gradients_of_all_experts_are_added_at_once(monkeypatch, is_distributed):
    found = []

    def note(rows, stops, adds_gradients, *weights):
        found.append(weights)
        return rows.new_empty(len(rows), len(weights[0]))

    model = replace(MIXTURE, dtype="bf16", ffn_hidden_size=48)
    with fake_cuda(monkeypatch) as world:
        groups = place(world, ParallelLayout())[1]
        built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=29)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=is_distributed)
        DistributedDataParallel(built.config, settings, built, pg_collection=groups)
        layer = built.decoder.layers[1].mlp
        monkeypatch.setattr(_GroupedLinear, "apply", note)
        layer(torch.empty(TOKENS, 1, model.hidden_size, dtype=torch.bfloat16, device=DEVICE))
        assert len(found) == 2
        for weights in found:
            assert _side_by_side(weights) is not None
            gradients = torch.empty(len(weights), *weights[0].shape, dtype=torch.bfloat16, device=DEVICE)
            with Launches() as launches:
                _add_gradients(gradients, weights)
            assert dict(launches.names) == {"add_": 1}
