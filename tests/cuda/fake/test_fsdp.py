"""FSDP on a fake GPU: shards that are always in host memory come to the device to compute."""

from __future__ import annotations

from unittest.mock import MagicMock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hybridflow.config.roles import OptimizerConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import fsdp
from hybridflow.models.gpt import build_transformer, set_rotary
from hybridflow.models.specs import logical_parameters
from tests.cuda.fake.batches import shared_prompts
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place
from tests.cuda.fake.shapes import family_model


def test_shards_are_in_host_memory_and_layers_on_the_device(monkeypatch):
    model, make_mesh, pinned = family_model("llama"), fsdp._torch_mesh, []

    def with_values(*given):
        with unset_fake_temporarily():
            return make_mesh(*given)

    monkeypatch.setattr(fsdp, "_torch_mesh", with_values)
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    with fake_cuda(monkeypatch, size=2) as world:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.nbytes) or self)
        mesh, groups = place(world, ParallelLayout(fsdp=2))
        built = build_transformer(model, mesh.layout, groups, DEVICE, vocab_size=model.vocab_size)
        fsdp.shard_model(built, built.decoder.layers, world, mesh, in_host_memory=True)
        set_rotary(built, model, DEVICE)
        group = world.group((0, 1))

        def output(part):
            return built(part.tokens, part.attention, part.rows)

        settings = OptimizerConfig(lr=1e-3)
        learner = fsdp.FsdpTrainable(built, logical_parameters(built), output, group, group, DEVICE, settings)
        batch = shared_prompts(1, 1, 32, 32)
        with Launches() as launches, torch.no_grad():
            logits = output(batch)
    parts = [fsdp.local_part(each) for each in built.parameters()]
    state = learner.state()
    assert logits.device == DEVICE and launches.names["_to_copy"] >= len(parts)
    assert {each.device.type for each in [*parts, *(one for kind in state.values() for one in kind.values())]} == {
        "cpu"
    }
    assert sum(pinned) >= sum(each.nbytes for each in parts)
