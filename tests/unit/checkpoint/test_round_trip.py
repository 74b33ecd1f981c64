"""Models of transformers through our directories in every layout and back: the same bits, the same logits."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hybridflow.checkpoint.formats.registry import make_target, open_source
from hybridflow.checkpoint.manifest import digest
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.tables import FAMILIES
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.support.checkpoint_cases import edit_json, make_model, same_bits, save, tensors_of
from tests.support.conversions import convert
from tests.support.hf_models import write_vision_model

PROMPTS = torch.tensor([[1, 17, 5, 9, 30, 2, 8, 11, 36], [1, 4, 4, 23, 7, 19, 33, 3, 10]])
LAYOUTS = ["tp1", "tp2", "pp2", "tp2.pp2"]
MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "qwen3_next"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 5e5}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 27.0]}
LONGROPE |= {"rope_theta": 1e4}

GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24)

CASES = {family: (family, {}) for family in FAMILIES} | {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all heads": ("llama", {"num_key_value_heads": 4, "rope_parameters": LLAMA3}),
    "llama, one group": ("llama", {"num_key_value_heads": 1}),
    "qwen2, tied, window": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "gemma, untied": ("gemma", {"tie_word_embeddings": False}),
    "gemma4, experts": ("gemma4_text", GEMMA4_EXPERTS),
    "phi3, part of a head": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
}


def load(path, auto=transformers.AutoModelForCausalLM):
    """The model that transformers reads, all of it."""
    model, report = auto.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    for parameter in model.parameters():
        # A view of a file may lie at any address, and sums are taken in another order at an odd one.
        parameter.data = parameter.data.clone()
    return model.eval()


def answers(path):
    """What transformers computes of a directory: logits, and the tokens that it generates."""
    model = load(path)
    with torch.no_grad():
        logits = model(PROMPTS).logits
        tokens = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=4, do_sample=False)
    return logits, tokens


def test_no_expert_of_a_shared_tensor_becomes_infinite(tmp_path):
    model = make_model("gpt_oss")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 0, 0] = 1e6
    source = open_source(save(model, tmp_path / "start"))
    target = make_target("hf", source, dtype="fp16")
    first = "decoder.layers.1.mlp.experts.0.linear_fc2.weight"
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts\.2\.linear_fc2\.weight: holds 1e\+06, beyond 65504"
    ):
        target.parts(first, source.read(first).half())


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_in_every_layout(case, tmp_path):
    family, other = CASES[case]
    made = make_model(family, **other)
    start = save(made, tmp_path / "start", **({"max_shard_size": "20KB"} if "tied" in case else {}))
    layouts = LAYOUTS + (["tp2.dp2.ep2", "tp2.pp2.ep2.etp1"] if family in MIXTURES or "experts" in case else [])
    before = start
    for layout in layouts:
        # From each layout to the next, so that every one is read as well.
        ours = convert(before, "megatron", tmp_path / layout, layout=ParallelLayout.parse(layout))
        assert open_source(ours).layout == str(ParallelLayout.parse(layout))
        end = convert(ours, "hf", tmp_path / f"{layout}-back", max_shard_bytes=15_000)
        assert same_bits(tensors_of(end), tensors_of(start)), layout
        before = ours
    assert len([*end.glob("model-*.safetensors")]) > 1
    expected, found = answers(start), answers(end)
    assert float(expected[0].std()) > 0.1, "logits are too alike to tell anything"
    assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        assert (end / name).read_bytes() == (start / name).read_bytes()
    written, original = (json.loads((path / "config.json").read_text()) for path in (end, start))
    older = {"rope_theta", "rope_scaling", "original_max_position_embeddings", "num_experts", "num_local_experts"}
    older |= {"rope_local_base_freq", "partial_rotary_factor"}
    if "num_nextn_predict_layers" in original:
        original["num_nextn_predict_layers"] = 0  # the tensors of these layers are not written
    assert {key: value for key, value in written.items() if key in original} == original
    assert written.keys() - original.keys() <= older
    rotary = original["rope_parameters"]
    if family != "gemma4_text":  # no older reader knows it
        assert written["rope_theta"] == rotary.get("full_attention", rotary)["rope_theta"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_kept_tensor_by_tensor(dtype, tmp_path):
    model = make_model("qwen3", dtype=dtype)
    model.model.norm.float()
    start = save(model, tmp_path / "start")
    ours = convert(start, "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2))
    end = convert(ours, "hf", tmp_path / "end")
    assert same_bits(tensors_of(end), tensors_of(start))
    assert {tensor.dtype for tensor in tensors_of(end).values()} == {dtype, torch.float32}


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path):
    model = make_model("deepseek_v3")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(generator=torch.Generator().manual_seed(3))
    start = save(model, tmp_path / "start")
    before = tensors_of(start)
    biases = {name for name in before if name.endswith("e_score_correction_bias")}
    assert biases and not any(torch.equal(before[name].bfloat16().float(), before[name]) for name in biases)
    for form in ("hf", "megatron", "hdf5", "megatron-dist"):
        small = convert(start, form, tmp_path / form, dtype="bf16")
        after = tensors_of(convert(small, "hf", tmp_path / f"{form}-back"))
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor if name in biases else tensor.bfloat16()), (form, name)


def test_a_kimi_k2_is_exported_as_what_transformers_loads_without_its_code(tmp_path):
    start = save(make_model("deepseek_v3"), tmp_path / "start")
    expected = answers(start)
    edit_json(start / "config.json", model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.Config"})
    end = convert(convert(start, "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2)), "hf", tmp_path / "end")
    assert same_bits(tensors_of(end), tensors_of(start))
    assert all(torch.equal(*each) for each in zip(answers(end), expected, strict=True))


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_a_language_model_saved_out_of_a_whole_reads_under_the_names_of_the_whole(name, tmp_path):
    write_vision_model(tmp_path / "whole", name)
    start = save(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), tmp_path / "start")
    assert "model.language_model.embed_tokens.weight" in tensors_of(start)
    assert open_source(start).family == f"{name.lower().replace('moe', '_moe')}_text"
    end = convert(convert(start, "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2)), "hf", tmp_path / "end")
    assert all(torch.equal(*each) for each in zip(answers(start), answers(end), strict=True))
    text = {key.replace("model.language_model.", "model."): each for key, each in tensors_of(start).items()}
    assert same_bits(tensors_of(end), text)


def test_a_scorer_is_a_value_model(tmp_path):
    start = save(make_model("qwen2", scorer=True), tmp_path / "start")
    ours = convert(start, "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2, pp=2))
    source = open_source(ours)
    assert source.has_value_head and source.tensors["value_head.weight"].shape == (1, 32)
    assert "output_layer.weight" not in source.tensors
    end = convert(ours, "hf", tmp_path / "end")
    assert same_bits(tensors_of(end), tensors_of(start))
    scores = []
    for path in (start, end):
        model = load(path, transformers.AutoModelForSequenceClassification)
        assert model.config.num_labels == 1
        with torch.no_grad():
            scores.append(model(PROMPTS).logits)
    assert scores[0].shape == (2, 1) and torch.equal(*scores)


@pytest.mark.parametrize(
    ("family", "scorer"),
    [(name, has) for name, each in FAMILIES.items() for has in (False, True) if each.scorer or not has],
)
def test_without_the_original_config_the_written_one_means_the_same(family, scorer, tmp_path):
    start = save(make_model(family, scorer=scorer), tmp_path / "start")
    ours = convert(start, "megatron", tmp_path / "ours")
    source = open_source(ours)
    (ours / "assets" / "config.json").unlink()
    manifest = json.loads((ours / "manifest.json").read_text())
    del manifest["notes"]["assets"]["config.json"]
    rewrite_manifest(ours, manifest)
    end = convert(ours, "hf", tmp_path / "end")
    auto = transformers.AutoModelForSequenceClassification if scorer else transformers.AutoModelForCausalLM
    outputs = []
    for path in (start, end):
        model = load(path, auto)
        model.config.pad_token_id = 0
        with torch.no_grad():
            outputs.append(model(PROMPTS).logits)
    assert torch.equal(*outputs)
    assert source.family == family


def rewrite_manifest(path, body):
    body.pop("sha256")
    (path / "manifest.json").write_text(json.dumps({"sha256": digest(body), **body}))


def brute_force_qkv(tensors, prefix, heads, groups, head):
    """Row by row: each group's queries, then its key, then its value."""
    rows = []
    for group in range(groups):
        for query in range(heads // groups):
            for row in range(head):
                rows.append(tensors[f"{prefix}.q_proj.weight"][(group * (heads // groups) + query) * head + row])
        for part in "kv":
            for row in range(head):
                rows.append(tensors[f"{prefix}.{part}_proj.weight"][group * head + row])
    return torch.stack(rows)


def test_queries_keys_and_values_are_grouped_as_megatron_has_them(tmp_path):
    start = save(make_model("llama", num_attention_heads=8, num_key_value_heads=2), tmp_path / "llama")
    found = open_source(start).read("decoder.layers.1.self_attention.linear_qkv.weight")
    theirs = tensors_of(start)
    assert torch.equal(found, brute_force_qkv(theirs, "model.layers.1.self_attn", heads=8, groups=2, head=4))
    gate_up = open_source(start).read("decoder.layers.0.mlp.linear_fc1.weight")
    assert torch.equal(gate_up[0], theirs["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(gate_up[1], theirs["model.layers.0.mlp.up_proj.weight"])


def test_phi3_cuts_its_fused_projections(tmp_path):
    start = save(make_model("phi3"), tmp_path / "phi3")
    theirs = tensors_of(start)
    fused = theirs["model.layers.0.self_attn.qkv_proj.weight"]
    apart = {f"x.{part}_proj.weight": rows for part, rows in zip("qkv", fused.split([32, 16, 16]), strict=True)}
    found = open_source(start).read("decoder.layers.0.self_attention.linear_qkv.weight")
    assert torch.equal(found, brute_force_qkv(apart, "x", heads=4, groups=2, head=8))
    gate_up = open_source(start).read("decoder.layers.1.mlp.linear_fc1.weight")
    assert torch.equal(gate_up.flatten(0, 1), theirs["model.layers.1.mlp.gate_up_proj.weight"])


def test_the_layer_that_predicts_further_tokens_is_skipped(tmp_path):
    start = save(make_model("deepseek_v3"), tmp_path / "start")
    tensors, further = tensors_of(start), {"eh_proj.weight": torch.ones(32, 64), "enorm.weight": torch.ones(32)}
    names = {f"model.layers.2.{name}": tensor for name, tensor in further.items()}
    save_file({**tensors, **names}, start / "model.safetensors", {"format": "pt"})
    end = convert(start, "hf", tmp_path / "end")
    assert same_bits(tensors_of(end), tensors)
    assert json.loads((end / "config.json").read_text())["num_nextn_predict_layers"] == 0
    # A layer too many of another kind is no such layer.
    del names["model.layers.2.eh_proj.weight"]
    save_file({**tensors, **names}, start / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not expected: model\.layers\.2\.enorm\.weight"):
        open_source(start)
