"""Adapters of PEFT: to model directories in any layout and back bit for bit, and merged into their base."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hybridflow.checkpoint.formats import lora
from hybridflow.checkpoint.formats.lora import read_settings
from hybridflow.checkpoint.formats.registry import make_target, open_merged, open_source
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.model_dir import ModelDir, write_manifest
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.support.conversions import convert
from tests.support.lora_cases import make_adapter, make_model

DENSE = {"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": 4, "gate_proj": 4, "up_proj": 4, "down_proj": 4}
PHI3 = {"qkv_proj": 4, "o_proj": 4, "gate_up_proj": 4, "down_proj": 4}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "all": ("llama", DENSE, {}),
    "some": ("llama", {"q_proj": 4, "down_proj": 4, "lm_head": 4}, {"use_rslora": True}),
    "fused": ("phi3", PHI3, {"lora_alpha": 3}),
    "linear attention": (
        "qwen3_5_text",
        dict.fromkeys(["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj"], 4),
        {},
    ),
    "normalised": ("qwen3", {"v_proj": 4, "up_proj": 4}, {}),
    "head": ("reward", {"q_proj": 4, "score": 4}, {}),
    "whole head": ("reward", {"q_proj": 4}, {"modules_to_save": ["classifier", "score"]}),
    "patterns": (
        "llama",
        {"q_proj": 2, "v_proj": 4, "up_proj": 6},
        {
            "rank_pattern": {"q_proj": 2, "mlp.up_proj": 6},
            "alpha_pattern": {r"^model\.layers\.1\.self_attn\.v_proj": 32, "q_proj": 1.5},
            "use_rslora": True,
        },
    ),
}


def scale(case: str, module: str) -> float:
    """Worked out by hand: alpha over the rank or its root."""
    if case == "patterns":
        alpha, rank = (1.5, 2) if "q_proj" in module else (8, 6) if "up_proj" in module else (8, 4)
        return (32 if module == "model.layers.1.self_attn.v_proj" else alpha) / math.sqrt(rank)
    return {"some": 8 / 2, "fused": 3 / 4}.get(case, 8 / 4)


def updated(case: str, model: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """The model with the low-rank updates added by hand."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in found.named_modules():
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                assert isinstance(module, nn.Linear)
                module.weight += scale(case, name) * tensors[f"base_model.model.{name}.lora_B.weight"] @ a
        if case == "whole head":
            found.get_parameter("score.weight").copy_(tensors["base_model.model.score.weight"])
    return found


def prepare(case: str, folder: Path) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    name, ranks, config = CASES[case]
    model = make_model(name)
    model.save_pretrained(folder / "base")
    config = {"base_model_name_or_path": str(folder / "base"), **config}
    tensors = make_adapter(folder / "adapter", model, ranks, config)
    if case == "whole head":
        tensors["base_model.model.score.weight"] = torch.linspace(-1, 1, 32).view(1, 32)
        save_file(tensors, folder / "adapter/adapter_model.safetensors")
    return model, tensors


@pytest.mark.parametrize("case", CASES)
def test_adapter_goes_through_layouts_and_back_bit_for_bit(case, tmp_path):
    _, tensors = prepare(case, tmp_path)
    source = open_source(tmp_path / "adapter")
    assert source.format == "peft" and len(source.tensors) == len(tensors)
    for layout in (ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(tp=4, pp=2)):
        folder = convert(source, "megatron", tmp_path / f"megatron {layout}", layout=layout)
        again = open_source(folder)
        assert again.layout == str(layout) and list(again.tensors) == list(source.tensors)
        back = convert(again, "peft", tmp_path / f"back {layout}")
        found = load_file(back / "adapter_model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
        assert (back / "adapter_config.json").read_bytes() == (tmp_path / "adapter/adapter_config.json").read_bytes()


def test_factors_are_cut_with_their_weights(tmp_path):
    _, tensors = prepare("all", tmp_path)
    folder = convert(tmp_path / "adapter", "megatron", tmp_path / "m", layout=ParallelLayout(tp=2))
    pieces = {(piece.tensor, piece.box) for piece in ModelDir(folder).manifest.pieces}
    layer, rank = "decoder.layers.0", (0, 4)
    # 4 heads and 2 groups of 8: q has 32 rows, k has 16; tp 2 halves them. ffn is 48, hidden 32.
    assert {box for name, box in pieces if name == f"{layer}.self_attention.linear_qkv.lora.q.A"} == {(rank, (0, 32))}
    assert {box for name, box in pieces if name == f"{layer}.self_attention.linear_qkv.lora.k.B"} == {
        ((0, 8), rank),
        ((8, 16), rank),
    }
    assert {box for name, box in pieces if name == f"{layer}.mlp.linear_fc1.lora.up.B"} == {
        ((0, 24), rank),
        ((24, 48), rank),
    }
    assert {box for name, box in pieces if name == f"{layer}.mlp.linear_fc2.lora.A"} == {
        (rank, (0, 24)),
        (rank, (24, 48)),
    }
    assert {box for name, box in pieces if name == f"{layer}.mlp.linear_fc2.lora.B"} == {((0, 32), rank)}


@pytest.mark.parametrize("case", CASES)
def test_merged_model_computes_what_updates_by_hand_give(case, tmp_path):
    model, tensors = prepare(case, tmp_path)
    merged = open_merged(open_source(tmp_path / "base"), tmp_path / "adapter")
    theirs = updated(case, model, tensors)
    convert(merged, "hf", tmp_path / "merged")
    ours = type(model).from_pretrained(tmp_path / "merged").eval()
    for (name, weight), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5, msg=name)
    tokens = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, expected, plain = (each(tokens).logits for each in (ours, theirs, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - plain).abs().max() > 0.1


def test_experts_have_adapters_of_their_own(tmp_path):
    """The model's experts are one tensor in memory and many on disk, and older adapters name those on disk."""
    make_model("mixtral").save_pretrained(tmp_path / "base")
    stem = "model.layers.1.block_sparse_moe.experts.2"
    generator = torch.Generator().manual_seed(2)
    shapes = {"w3.lora_A": (4, 32), "w3.lora_B": (48, 4), "w2.lora_A": (4, 48), "w2.lora_B": (32, 4)}
    shapes |= {"gate.lora_A": (4, 32), "gate.lora_B": (4, 4)}
    tensors = {
        f"base_model.model.{stem if end[0] == 'w' else 'model.layers.1.block_sparse_moe'}.{end}.weight": torch.randn(
            shape, generator=generator
        )
        for end, shape in shapes.items()
    }
    make_adapter(tmp_path / "adapter", nn.Module(), {}, {"base_model_name_or_path": str(tmp_path / "base")})
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    folder = convert(tmp_path / "adapter", "megatron", tmp_path / "m", layout=ParallelLayout(dp=2, ep=2))
    files = {piece.tensor: piece.file for piece in ModelDir(folder).manifest.pieces}
    assert files["decoder.layers.1.mlp.experts.2.linear_fc1.lora.up.B"] == "ep01-etp00-pp00.safetensors"
    assert files["decoder.layers.1.mlp.router.lora.A"] == "tp00-pp00.safetensors"
    back = load_file(convert(folder, "peft", tmp_path / "back") / "adapter_model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[key], tensors[key]) for key in tensors)
    convert(open_merged(open_source(tmp_path / "base"), folder), "hf", tmp_path / "merged")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    for name in before:
        update = tensors.get(f"base_model.model.{name.replace('.weight', '.lora_B.weight')}")
        expected = before[name]
        if update is not None:
            expected = (
                expected + 2.0 * update @ tensors[f"base_model.model.{name.replace('.weight', '.lora_A.weight')}"]
            )
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-5, msg=name)
    assert sum(not torch.equal(before[name], after[name]) for name in before) == 3


def test_merging_an_adapter_that_was_cut_is_the_same(tmp_path):
    prepare("fused", tmp_path)
    base = open_source(tmp_path / "base")
    cut = convert(tmp_path / "adapter", "megatron", tmp_path / "m", layout=ParallelLayout(tp=2))
    one, other = open_merged(base, tmp_path / "adapter"), open_merged(base, cut)
    assert all(torch.equal(one.read(name), other.read(name)) for name in base.tensors)
    assert one.identity() != base.identity()
    # The base is mapped memory: what was merged into it would be there at the next reading.
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    before = base.read(name).clone()
    assert torch.equal(one.read(name), one.read(name)) and torch.equal(base.read(name), before)
    assert not torch.equal(one.read(name), before)


def test_merged_weights_are_rounded_once_from_fp32(tmp_path):
    model = make_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    tensors = make_adapter(tmp_path / "adapter", model, {"o_proj": 4}, {})
    merged = open_merged(open_source(tmp_path / "base"), tmp_path / "adapter")
    weight = model.get_parameter("model.layers.0.self_attn.o_proj.weight").detach()
    key = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    exact = weight.double() + 2.0 * tensors[key.format("B")].double() @ tensors[key.format("A")].double()
    found = merged.read("decoder.layers.0.self_attention.linear_proj.weight")
    assert found.dtype == torch.bfloat16
    # What fp32 loses may tip a tie; rounding twice, or a product in bf16, would change more than one in a hundred.
    assert (found == exact.bfloat16()).double().mean() > 0.99


def test_merging_makes_no_new_infinities(tmp_path):
    model = make_model("llama", dtype=torch.float16)
    weight = model.get_parameter("model.layers.1.self_attn.o_proj.weight")
    with torch.no_grad():
        weight[2, 3] = 65504.0  # the largest of fp16
    model.save_pretrained(tmp_path / "base")
    name, key = "decoder.layers.1.self_attention.linear_proj.weight", "base_model.model.model.layers.1.self_attn.o_proj"
    tensors = make_adapter(tmp_path / "adapter", model, {"o_proj": 4}, {})
    for factor in (f"{key}.lora_A.weight", f"{key}.lora_B.weight"):
        # alpha / r times rank times 8 times 8 is 512 more.
        tensors[factor] = torch.full_like(tensors[factor], 8.0)
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    merged = open_merged(open_source(tmp_path / "base"), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=f"{name}: with the adapter .* beyond 65504, .* fp16"):
        merged.read(name)
    assert merged.read(name.replace(".1.", ".0.")).isfinite().all()


def test_large_weights_are_merged_block_by_block(monkeypatch):
    monkeypatch.setattr(lora, "_BLOCK_ELEMENTS", 7 * 24)
    generator = torch.Generator().manual_seed(1)
    weight, b, a = (torch.randn(shape, generator=generator) for shape in ((2, 1500, 24), (3000, 3), (3, 24)))
    expected = weight + 0.5 * (b @ a).view(2, 1500, 24)
    lora._add(weight, b, a, 0.5, "weight")
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_dora": True}, "use_dora=true is not computed"),
        ({"bias": "all"}, 'bias="all" is not computed'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa"'),
        ({"peft_type": "IA3"}, 'peft_type="IA3"'),
        ({"a_feature_of_next_year": 3}, "a_feature_of_next_year=3 is not computed"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_rslora": "yes"}, 'use_rslora="yes"'),
        ({"r": 0}, "r=0; expected an integer of at least 1"),
        ({"r": True}, "r=true"),
        ({"r": "8"}, 'r="8"'),
        ({"lora_alpha": None}, "lora_alpha=null; expected a number"),
        ({"lora_alpha": math.nan}, "lora_alpha=NaN"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000"),
        ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern: '(a+)+$' is not computed"),
        ({"rank_pattern": {"q_proj": -4}}, "rank_pattern: q_proj=-4"),
        ({"rank_pattern": [4]}, "rank_pattern=[4]; expected a mapping"),
        ({"alpha_pattern": {"q_proj": "much"}}, 'alpha_pattern: q_proj="much"'),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path=7; expected text"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(values, words):
    usual = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_dora": False, "modules_to_save": None, "bias": "none"}
    assert read_settings(usual, where="c.json").scale_of("any") == 2.0
    with pytest.raises(ConfigError) as caught:
        read_settings({**usual, **values}, where="c.json")
    assert words in str(caught.value) and str(caught.value).startswith("c.json: ")


def spoil_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


KEY = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(KEY.format("B")), "model.layers.0.mlp.down_proj has no lora_B"),
        (lambda tensors: tensors.update({KEY.format("A"): torch.ones(4, 47)}), "[4, 47], expected [4, 48]"),
        (lambda tensors: tensors.update({KEY.format("A"): torch.ones(5, 48)}), "[5, 48], expected [4, 48]"),
        (lambda tensors: tensors.update({KEY.format("B"): torch.ones(4)}), "[4], expected [32, 4]"),
        (
            lambda tensors: tensors.update({KEY.format("A").replace("layers.0", "layers.7"): torch.ones(4, 48)}),
            "layers.7.mlp.down_proj.lora_A.weight goes with no linear module of the base, a llama of 2 layers",
        ),
        (
            lambda tensors: tensors.update({"base_model.model.score.weight": torch.ones(1, 32)}),
            "score.weight goes with",
        ),
        (lambda tensors: tensors.update({KEY.format("embedding_A"): torch.ones(4, 101)}), "goes with no linear module"),
        (lambda tensors: tensors.clear(), "has no factors"),
    ],
)
def test_factors_that_do_not_fit_are_named(change, words, tmp_path):
    prepare("all", tmp_path)
    spoil_tensors(tmp_path / "adapter", change)
    for read in (
        lambda: open_source(tmp_path / "adapter"),
        lambda: open_merged(open_source(tmp_path / "base"), tmp_path / "adapter"),
    ):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert words in str(caught.value) and "adapter_model.safetensors" in str(caught.value)


@pytest.mark.parametrize(("family", "layer"), [("qwen3_next", "in_proj_qkvz"), ("gemma", "lm_head")])
def test_adapters_on_layers_that_have_none_here_are_refused_with_a_way_out(family, layer, tmp_path):
    """Of fused projections of linear attention, and of an output layer that is the embedding."""
    model = make_model(family)
    model.save_pretrained(tmp_path / "base")
    make_adapter(tmp_path / "adapter", model, {layer: 4}, {"base_model_name_or_path": str(tmp_path / "base")})
    with pytest.raises(CheckpointError, match=f"{layer}.lora_A.*no linear module of the base.*merge .* with PEFT"):
        open_source(tmp_path / "adapter")


def test_adapter_of_another_base_is_refused(tmp_path):
    prepare("all", tmp_path)
    make_model("phi3").save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="goes with no linear module of the base, a phi3"):
        open_merged(open_source(tmp_path / "other"), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="goes with no linear module"):
        open_source(tmp_path / "adapter", base=tmp_path / "other")


def test_what_is_no_adapter_or_no_base_is_refused(tmp_path):
    prepare("all", tmp_path)
    base, adapter = open_source(tmp_path / "base"), open_source(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="expected an adapter, found a model"):
        open_merged(base, tmp_path / "base")
    with pytest.raises(ConfigError, match="expected a model, found an adapter"):
        open_merged(adapter, tmp_path / "adapter")
    with pytest.raises(
        ConfigError,
        match="is a LoRA adapter, which format hf has no place for; write megatron or peft, .* --to hf --merge-lora /",
    ):
        make_target("hf", adapter)
    with pytest.raises(HybridflowError, match="expected a LoRA adapter"):
        make_target("peft", base)


def test_adapter_without_its_base_at_hand_asks_for_it(tmp_path):
    prepare("all", tmp_path)
    path = tmp_path / "adapter/adapter_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "base_model_name_or_path": "someone/on-the-hub"}))
    with pytest.raises(ConfigError, match="someone/on-the-hub.* is no directory .* --base DIR"):
        open_source(tmp_path / "adapter")
    assert open_source(tmp_path / "adapter", base=tmp_path / "base").family == "llama"
    path.write_text("{")
    with pytest.raises(CheckpointError, match="adapter_config.json: found .*, expected JSON"):
        open_source(tmp_path / "adapter")
    path.write_text(json.dumps([values]))
    with pytest.raises(CheckpointError, match="found list, expected a JSON object"):
        open_source(tmp_path / "adapter")


def test_head_that_is_announced_must_be_there_and_once(tmp_path):
    prepare("whole head", tmp_path)
    spoil_tensors(tmp_path / "adapter", lambda tensors: tensors.pop("base_model.model.score.weight"))
    with pytest.raises(CheckpointError, match="score has no weight, which modules_to_save"):
        open_source(tmp_path / "adapter")
    factors = {f"base_model.model.score.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    spoil_tensors(tmp_path / "adapter", lambda tensors: tensors.update(factors))
    with pytest.raises(CheckpointError, match="value_head.lora.. goes with no linear module"):
        open_source(tmp_path / "adapter")


def test_pickled_adapter_is_not_read(tmp_path):
    prepare("all", tmp_path)
    (tmp_path / "adapter/adapter_model.safetensors").rename(tmp_path / "adapter/adapter_model.bin")
    with pytest.raises(CheckpointError, match="adapter_model.bin, which is a pickle, is not read"):
        open_source(tmp_path / "adapter")
    (tmp_path / "adapter/adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no adapter_model.safetensors; restore it from a copy"):
        open_source(tmp_path / "adapter")


def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(tmp_path):
    prepare("all", tmp_path)
    folder = convert(tmp_path / "adapter", "megatron", tmp_path / "m")
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder, dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, num_layers=10**9)))
    with pytest.raises(HybridflowError, match="num_layers: expected an integer of at least 1 and at most 16384"):
        open_source(folder)
    path = tmp_path / "base/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**9}))
    with pytest.raises(HybridflowError, match="num_hidden_layers=1000000000"):
        open_source(tmp_path / "adapter")


def test_peft_merges_to_the_same_weights_and_loads_what_came_back(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    model = make_model("llama")
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        init_lora_weights=False,
        target_modules=["q_proj", "k_proj", "gate_proj", "down_proj", "lm_head"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"gate_proj": 3},
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(4)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    source = open_source(tmp_path / "adapter", base=tmp_path / "base")
    folder = convert(source, "megatron", tmp_path / "m", layout=ParallelLayout(tp=2, pp=2))
    back = convert(folder, "peft", tmp_path / "back")
    merged = open_merged(open_source(tmp_path / "base"), back)
    convert(merged, "hf", tmp_path / "merged")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), back).merge_and_unload()
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    for (name, weight), expected in zip(ours.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5, msg=name)
    for expected, found in zip(theirs.merge_and_unload().parameters(), loaded.parameters(), strict=True):
        assert torch.equal(found, expected)
