"""LoRA adapters of the actor: what PEFT computes, in every layout; and what is moved, kept and saved of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.checkpoint.formats import lora as formats
from hybridflow.checkpoint.formats.forms import to_logical
from hybridflow.checkpoint.formats.peft_dir import PeftSource
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.config import LoRA, Optimizer
from hybridflow.models.adapters import adapter_spec, base_spec, factor_spec
from hybridflow.models.gpt import build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.lora import adapted, adapters_off, merge, merged_weight
from hybridflow.models.microbatch import pack, split_by_tokens
from hybridflow.models.shapes import shape_of
from hybridflow.models.training import Trainable, forward_only, sum_over
from hybridflow.models.weights import describe_model, initialize, local_shards
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.roles.pretrained import load_pretrained
from tests.lora_cases import make_adapter, make_model as make_hf_model
from tests.multi.jobs import inner_of
from tests.multi.models import place
from tests.ranks import run_ranks

RANK, ALPHA = 3, 7.0
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("v_proj", "o_proj", "up_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES = [("llama", ALL), ("qwen3", SOME), ("phi3", FUSED)]
LAYOUTS = ["tp1", "dp2", "tp2", "pp2", "tp2.pp2", "tp2.dp2", "pp2.dp2"]
LENGTHS = [(3, 6), (1, 9), (5, 4), (2, 2), (4, 11)]
"""Tokens of each sample's prompt and response."""


def sequences() -> tuple[list[Tensor], list[int]]:
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(0, 101, (prompt + response,), generator=generator) for prompt, response in LENGTHS]
    return found, [prompt for prompt, _ in LENGTHS]


def folders(root: Path, name: str) -> tuple[Path, Path]:
    return root / name / "base", root / name / "adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each case a model of transformers, and an adapter as PEFT writes it."""
    root = tmp_path_factory.mktemp("lora")
    for name, targets in CASES:
        base, adapter = folders(root, name)
        model = make_hf_model(name)
        model.save_pretrained(base)
        tensors = make_adapter(adapter, model, dict.fromkeys(targets, RANK), {"r": RANK, "lora_alpha": ALPHA})
        # Factors as large as weights would make the result a matter of rounding.
        small = {key: 0.2 * tensor for key, tensor in tensors.items()}
        save_file(small, adapter / "adapter_model.safetensors", {"format": "pt"})
    return root


def of_peft(root: Path, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each response by transformers and PEFT, and the gradient of each factor of their mean."""
    base, adapter = folders(root, name)
    model = peft.PeftModel.from_pretrained(make_hf_model(name), adapter, is_trainable=True)
    rows, prompts = sequences()
    log_probs = []
    for row, prompt in zip(rows, prompts, strict=True):
        logits = model(row[None]).logits[0].log_softmax(-1)
        log_probs.append(logits[prompt - 1 : -1].gather(1, row[prompt:, None])[:, 0])
    torch.cat(log_probs).mean().backward()
    gradients = {
        key.replace(".default", ""): parameter.grad for key, parameter in model.named_parameters() if "lora_" in key
    }
    assert len(gradients) >= 12 and all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())
    return [each.detach() for each in log_probs], gradients


class Placed:
    """A case's model in a layout, with the adapter of PEFT's directory."""

    def __init__(self, world: World, root: Path, name: str, targets: tuple[str, ...], text: str) -> None:
        base, adapter = folders(root, name)
        source = open_source(base)
        lora = LoRA(rank=RANK, alpha=ALPHA, targets=targets)
        model = replace(source.model, max_context=48)
        self.rank, self.layout = world.rank, ParallelLayout.parse(text)
        self.mesh, self.groups = place(world, self.layout)
        self.spec = describe_model(world, model, vocab_size=101, lora=lora)
        assert factor_spec(self.spec).tensors == adapter_spec(shape_of(model, 101), lora).tensors, name
        if self.groups is None:
            return
        self.model = build_transformer(model, self.layout, self.groups, world.device, vocab_size=101, lora=lora)
        arguments = self.mesh, world.rank
        load_pretrained(source, self.model, base_spec(self.spec), *arguments, seed=1, std=0.1)
        peft_source = PeftSource(adapter, formats.described_of(source))
        load_pretrained(peft_source, self.model, factor_spec(self.spec), *arguments, seed=1, std=0.1)

    def batches(self) -> list[Any]:
        """This replica's samples, in micro-batches of a few."""
        rows, prompts = sequences()
        dp, place = self.layout.dp, self.mesh.coordinate(self.rank)
        mine = list(range(len(rows)))[place.dp :: dp]
        chosen = split_by_tokens([len(rows[index]) for index in mine], 20)
        return [pack([mine[index] for index in each], rows, prompts, torch.device("cpu")) for each in chosen]

    def log_probs(self, output: Tensor, batch: Any) -> Tensor:
        return vocab_parallel_log_probs(output, batch.targets, group=self.groups.tp, vocab_size=101)[0]

    def forward(self) -> dict[int, Tensor]:
        """Sample -> log-probabilities of its response; empty but on the last stage."""
        parts = forward_only(
            self.model,
            self.groups,
            self.batches(),
            lambda output, batch: (batch, self.log_probs(output, batch)),
        )
        return {
            sample: values
            for batch, found in parts
            for sample, values in zip(batch.samples, found.split(batch.response_lengths), strict=True)
        }

    def pieces(self, tensors: dict[str, Tensor]) -> list[Any]:
        """Boxes of logical tensors that this rank holds."""
        shards = local_shards(self.model, factor_spec(self.spec), self.mesh, self.rank)
        return [
            (name, part.box, tensors[name].view(part.local_shape)[inner_of(part)].clone().numpy())
            for name, (_, part) in shards.items()
        ]


def against_peft(world: World, root: Path, name: str, targets: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for text in LAYOUTS:
        placed = Placed(world, root, name, targets, text)
        if placed.groups is None:
            continue
        count = sum(response for _, response in LENGTHS)
        before = placed.forward()
        trainable = Trainable(placed.model, placed.groups, Optimizer(lr=1e-3, distributed=False))
        trainable.accumulate(
            placed.batches(), lambda output, batch: (placed.log_probs(output, batch).sum() / count, None)
        )
        state = trainable.state()
        assert state["exp_avg"].keys() == {name for name in state["gradient"]}
        gradients = placed.pieces({name: flat.clone() for name, flat in state["gradient"].items()})
        with adapters_off(placed.model):
            without = placed.forward()
        merge(placed.model)
        with adapters_off(placed.model):
            merged = placed.forward()
        found[text] = [{k: v.numpy() for k, v in each.items()} for each in (before, without, merged)], gradients
    return found


@pytest.mark.parametrize(("name", "targets"), CASES, ids=[name for name, _ in CASES])
def test_values_and_gradients_are_those_of_peft_in_every_layout(root: Path, name: str, targets: tuple[str, ...]) -> None:
    expected, gradients = of_peft(root, name)
    base, adapter = folders(root, name)
    source = PeftSource(adapter, formats.described_of(open_source(base)))
    by_name = {}
    for logical, (key, factor) in source._where.items():
        by_name[logical] = to_logical(factor.form, [gradients[key]], source.model).numpy()
    ranks = run_ranks(against_peft, 4, root, name, targets)
    with torch.no_grad():
        plain = make_hf_model(name)
        rows, prompts = sequences()
        bare = [
            plain(row[None]).logits[0].log_softmax(-1)[prompt - 1 : -1].gather(1, row[prompt:, None])[:, 0]
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    for text in LAYOUTS:
        seen: dict[str, np.ndarray] = {each: np.zeros(value.shape, bool) for each, value in by_name.items()}
        samples = set()
        for rank in ranks:
            if text not in rank:
                continue
            (before, without, merged), pieces = rank[text]
            for sample, values in before.items():
                samples.add(sample)
                np.testing.assert_allclose(values, expected[sample].numpy(), atol=2e-5, err_msg=f"{text} {sample}")
                np.testing.assert_allclose(without[sample], bare[sample].numpy(), atol=2e-5)
                np.testing.assert_allclose(merged[sample], values, atol=1e-5)
                assert abs(without[sample] - values).max() > 1e-2
            for each, box, values in pieces:
                where = tuple(slice(*span) for span in box)
                np.testing.assert_allclose(values, by_name[each][where], rtol=2e-4, atol=2e-6, err_msg=f"{text} {each}")
                seen[each][where] = True
        assert samples == set(range(len(LENGTHS))) and all(each.all() for each in seen.values()), text
