"""Vision-language models: their language model in every format, and out of it the whole model again."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybridflow import cli
from hybridflow.checkpoint.formats.in_memory import in_memory_model
from hybridflow.checkpoint.formats.registry import for_export, open_source
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.vision import VISION_MODELS
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.support.checkpoint_cases import edit_json, same_bits, tensors_of
from tests.support.complaints import complains
from tests.support.conversions import convert
from tests.support.hf_models import write_tokenizer, write_vision_model

TOKENS = torch.tensor([[3, 17, 5, 9, 30, 2, 8, 11, 36, 7, 7, 21]])


WITH_TABLE = [each.causal.removesuffix("ForConditionalGeneration") for each in VISION_MODELS.values()]


@pytest.fixture(params=WITH_TABLE)
def original(request, tmp_path):
    """A vision-language model, in two files, whose tower is in another number format than its language model."""
    folder = tmp_path / "models/original"
    write_vision_model(folder, request.param)
    write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    tower = {key: each.bfloat16() for key, each in tensors.items() if "vis" in key or "projector" in key}
    text = {key: each for key, each in tensors.items() if key not in tower}
    (folder / "model.safetensors").unlink()
    save_file(text, folder / "text.safetensors", {"format": "pt"})
    save_file(tower, folder / "tower.safetensors", {"format": "pt"})
    places = dict.fromkeys(text, "text.safetensors") | dict.fromkeys(tower, "tower.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def logits(path):
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    ("format", "options"), [("megatron", {"layout": ParallelLayout(tp=2, pp=2)}), ("hdf5", {}), ("megatron-dist", {})]
)
def test_there_and_back_in_every_format(original, tmp_path, format, options):
    """The same bits in every tensor, also of the tower, the same settings and the same logits."""
    if format == "megatron-dist" and open_source(original).family != "qwen3":
        pytest.skip("Megatron-LM has no such model")
    there = convert(original, format, tmp_path / "there", **options)
    assert not [name for name in open_source(there).tensors if "vis" in name]
    back = convert(there, "hf", tmp_path / "back")
    assert same_bits(tensors_of(back), tensors_of(original))
    assert torch.equal(logits(back), logits(original))
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        theirs, ours = (json.loads((path / name).read_text()) for path in (original, back))
        assert ours == theirs, name


def test_another_number_format_is_that_of_the_language_model(original, tmp_path):
    there = convert(original, "megatron", tmp_path / "there")
    command = ["convert", str(there), str(tmp_path / "back"), "--to", "hf", "--dtype", "fp16", "--quiet"]
    assert cli.main(command) == 0
    ours, theirs = tensors_of(tmp_path / "back"), tensors_of(original)
    for name, each in theirs.items():
        assert torch.equal(ours[name], each.half() if each.dtype == torch.float32 else each), name
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float16"
    assert logits(tmp_path / "back").isfinite().all()


@pytest.mark.parametrize("original", ["Gemma3"], indirect=True)
def test_the_names_are_those_of_the_original(original, tmp_path):
    """Those of transformers 4, of which some wrote the names in memory, with a second copy of the embedding."""
    tensors = {
        key.replace("language_model.model.", "model.language_model.") if "language" in key else f"model.{key}": each
        for key, each in tensors_of(original).items()
    }
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    other = tmp_path / "other"
    shutil.copytree(original, other, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    back = convert(convert(other, "megatron", tmp_path / "there"), "hf", tmp_path / "back")
    del tensors["lm_head.weight"]
    assert same_bits(tensors_of(back), tensors)
    assert torch.equal(logits(back), logits(original))


@pytest.mark.parametrize("original", ["Qwen3VLMoe"], indirect=True)
def test_experts_have_the_form_of_the_original(original, tmp_path):
    """Published files have them transposed; those that transformers 5 has saved do not."""
    published, tensors = tmp_path / "published", tensors_of(original)
    shutil.copytree(original, published, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    turned = {key: each.mT.contiguous() if ".experts." in key else each for key, each in tensors.items()}
    save_file(turned, published / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(published), logits(original))
    ours, theirs = open_source(published), open_source(original)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.tensors)
    back = convert(convert(published, "megatron", tmp_path / "there"), "hf", tmp_path / "back")
    assert same_bits(tensors_of(back), turned)


@pytest.mark.parametrize("original", ["Qwen3_5Moe"], indirect=True)
def test_experts_may_share_tensors_in_the_original(original, tmp_path):
    """transformers reads both forms, and saves a tensor for each expert."""
    published, tensors = tmp_path / "published", tensors_of(original)
    shutil.copytree(original, published, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    fused = {key: each for key, each in tensors.items() if ".experts." not in key}
    for layer in range(2):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    save_file(fused, published / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(published), logits(original))
    ours, theirs = open_source(published), open_source(original)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.tensors)
    back = convert(convert(published, "megatron", tmp_path / "there"), "hf", tmp_path / "back")
    assert same_bits(tensors_of(back), fused)


def test_an_original_that_is_gone_is_named_and_another_copy_is_taken(original, tmp_path, capsys):
    there = convert(original, "megatron", tmp_path / "there")
    moved = original.rename(tmp_path / "moved")
    words = [f"{there}: is the language model of a", "vision tower", f"copied from {original}, which is not", "--base"]
    complains(lambda: for_export(open_source(there)), words, ConfigError)
    command = ["convert", str(there), str(tmp_path / "back"), "--to", "hf", "--quiet"]
    assert cli.main(command) == 2
    assert f"copied from {original}, which is not there" in capsys.readouterr().err
    assert cli.main([*command, "--base", str(moved)]) == 0
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(moved))
    assert cli.main(["convert", str(there), str(tmp_path / "m"), "--to", "megatron", "--base", str(moved)]) == 2
    assert "leave --base out" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["another tower", "another language model", "no language model"])
def test_an_original_that_is_another_model_is_refused(original, tmp_path, change):
    there = convert(original, "megatron", tmp_path / "there")
    values = json.loads((original / "config.json").read_text())
    part = "vision_config" if change == "another tower" else "text_config"
    if change == "no language model":
        for file in original.glob("*.safetensors"):
            file.unlink()
        (original / "model.safetensors.index.json").unlink()
        save_file({"tower": torch.ones(2)}, original / "model.safetensors")
        words = [f"{original}: missing: ", "embed_tokens.weight"]
    else:
        edit_json(original / "config.json", **{part: {**values[part], "hidden_size": 64}})
        words = [f"{original / 'config.json'}: describes another model", "--base DIR"]
    complains(lambda: for_export(open_source(there)), words, CheckpointError)


def test_a_tensor_of_the_language_model_that_is_not_its_own_is_refused(original):
    tensors = load_file(original / "text.safetensors")
    name = next(key for key in tensors if key.endswith("layers.0.input_layernorm.weight"))
    strange = name.replace("layers.0", "layers.7")
    save_file({**tensors, strange: tensors[name].clone()}, original / "text.safetensors")
    index = original / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, strange: "text.safetensors"}}))
    complains(lambda: open_source(original), [f"not expected: {strange} of text.safetensors"], CheckpointError)


def test_one_in_memory_is_its_language_model(original):
    """For a worker that generates with the weights of another program."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(original, dtype=torch.float32)
    ours, theirs = in_memory_model(model), open_source(original)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.tensors)


def test_an_export_says_nothing_of_where_it_came_from(original, tmp_path):
    back = convert(convert(original, "megatron", tmp_path / "there"), "hf", tmp_path / "back")
    assert not [file for file in back.glob("*.json") if str(tmp_path) in file.read_text()]


def test_what_travels_in_one_directory_alone_is_completed_from_itself(original, tmp_path):
    """As with ``--merge-lora``, or another number format."""
    back = convert(original, "hf", tmp_path / "back")
    assert same_bits(tensors_of(back), tensors_of(original))
