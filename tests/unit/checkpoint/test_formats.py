"""Damaged, hostile and mistaken directories: each an error that names file and tensor, before anything is written."""

from __future__ import annotations

import json
import re
import shutil
import struct

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybridflow.checkpoint.formats.registry import make_target, open_source
from hybridflow.checkpoint.manifest import WEIGHT, Manifest, TensorEntry, digest
from hybridflow.checkpoint.model_dir import Share, write_manifest, write_shares
from hybridflow.errors import CheckpointError, ConfigError, LayoutError, ReshardError, WriteError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import flat_boxes
from hybridflow.reshard.views import DTYPE_NAMES
from tests.support.checkpoint_cases import edit_json, make_model, same_bits, save, tensors_of
from tests.support.conversions import convert

pytest.importorskip("transformers")

Q0, LAST = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Llama in one file, in shards, and in ours."""
    folder = tmp_path_factory.mktemp("saved")
    model = make_model("llama")
    save(model, folder / "single")
    save(model, folder / "shards", max_shard_size="20KB")
    convert(folder / "single", "megatron", folder / "ours", layout=ParallelLayout(tp=2, pp=2))
    return folder


def change_tensors(path, **changes):
    """Replace tensors of the single file; None removes one."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({key: value for key, value in tensors.items() if value is not None}, path / "model.safetensors")


def shard_of(path, tensor):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def remap(path, **places):
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps({**values, "weight_map": {**values["weight_map"], **places}}))


def change_dtype(path, name):
    """Call a tensor's bytes another dtype of as many bits, in the header alone."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[Q0]["dtype"] = name
    header[Q0]["shape"] = [header[Q0]["data_offsets"][1] - header[Q0]["data_offsets"][0]]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def truncate(path, file):
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:-5])


def pickled_only(path):
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")


def without_head(path):
    tensors = load_file(path / "model.safetensors")
    bare = {key.removeprefix("model."): value for key, value in tensors.items() if key != "lm_head.weight"}
    save_file(bare, path / "model.safetensors")


SINGLE = {
    "no config": (lambda path: (path / "config.json").unlink(), ["model.safetensors", "expected a checkpoint"]),
    "config is no JSON": (lambda path: (path / "config.json").write_text("{"), ["config.json", "expected JSON"]),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), ["config.json", "found list"]),
    "config is deep": (lambda path: (path / "config.json").write_text("[" * 10**6), ["config.json", "expected JSON"]),
    "absurd layers": (
        lambda path: edit_json(path / "config.json", num_hidden_layers=9999),
        ["9999 layers", "21 tensors"],
    ),
    "absurd width": (
        lambda path: edit_json(path / "config.json", hidden_size=10**7, intermediate_size=10**7),
        ["embed_tokens", "expected [37, 10000000]"],
    ),
    "absurd numbers": (
        lambda path: (path / "config.json").write_text('{"model_type": "llama", "hidden_size": 1' + "0" * 9999 + "}"),
        ["config.json", "expected JSON"],
    ),
    "missing tensor": (lambda path: change_tensors(path, **{LAST: None}), ["missing: " + LAST, "config.json"]),
    "extra tensor": (lambda path: change_tensors(path, spare=torch.ones(2)), ["not expected: spare of model.safet"]),
    "wrong shape": (
        lambda path: change_tensors(path, **{LAST: torch.ones(48, 32)}),
        ["model.safetensors: " + LAST, "found shape [48, 32], expected [32, 48]"],
    ),
    "wrong vocabulary": (lambda path: edit_json(path / "config.json", vocab_size=40), ["embed_tokens", "[40, 32]"]),
    "wrong family": (lambda path: edit_json(path / "config.json", model_type="qwen3", architectures=None), ["q_norm"]),
    "tied in the config alone": (
        lambda path: edit_json(path / "config.json", tie_word_embeddings=True),
        ["lm_head.weight is not equal to model.embed_tokens.weight", "tie_word_embeddings"],
    ),
    "unlike parts": (
        lambda path: change_tensors(path, **{Q0: torch.ones(32, 32, dtype=torch.bfloat16)}),
        [f"{Q0} is bf16", "is fp32", "linear_qkv.weight"],
    ),
    "8-bit floats": (lambda path: change_dtype(path, "F8_E4M3"), ["model.safetensors: " + Q0, "F8_E4M3"]),
    "integers": (lambda path: change_dtype(path, "U8"), ["model.safetensors: " + Q0, "U8"]),
    "truncated": (lambda path: truncate(path, "model.safetensors"), ["model.safetensors", "cannot be read"]),
    "no safetensors": (
        lambda path: (path / "model.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n" * 9),
        ["model.safetensors", "cannot be read as safetensors"],
    ),
    "pickled": (pickled_only, ["pytorch_model.bin", "save_pretrained"]),
    "nothing": (
        lambda path: (path / "model.safetensors").unlink(),
        ["found config.json", "expected model.safetensors"],
    ),
    "without a head": (without_head, ["missing: lm_head.weight", "without a head"]),
    "both": (
        lambda path: write_index(path, "model-00001.safetensors"),
        ["holds both model.safetensors and model.safetensors.index.json, which names model-00001.safetensors"],
    ),
}


def write_index(path, file):
    """An index that says of all tensors that they lie in one file."""
    places = dict.fromkeys(load_file(path / "model.safetensors"), file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_an_index_may_name_the_single_file(saved, tmp_path):
    shutil.copytree(saved / "single", tmp_path / "model")
    write_index(tmp_path / "model", "model.safetensors")
    one, other = open_source(tmp_path / "model"), open_source(saved / "single")
    assert one.tensors == other.tensors and all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)


def assert_refused(path, messages):
    """Opening or reading it fails, with these words."""
    with pytest.raises(CheckpointError) as caught:
        source = open_source(path)
        for name in source.tensors:
            source.read(name)
        source.assets()
    assert str(path) in str(caught.value)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("case", SINGLE)
def test_a_damaged_directory_of_one_file(case, saved, tmp_path):
    spoil, messages = SINGLE[case]
    shutil.copytree(saved / "single", tmp_path / "model")
    spoil(tmp_path / "model")
    assert_refused(tmp_path / "model", messages)


SHARDS = {
    "missing shard": (lambda path: (path / shard_of(path, LAST)).unlink(), [LAST, "missing"]),
    "names another file": (lambda path: remap(path, **{LAST: "model-00009.safetensors"}), ["model-00009", "missing"]),
    "names another shard": (
        lambda path: remap(path, **{LAST: shard_of(path, Q0)}),
        [f"missing: {LAST}", "does not hold what"],
    ),
    "names a tensor that is nowhere": (
        lambda path: remap(path, ghost=shard_of(path, Q0)),
        ["missing: ghost", "does not hold what"],
    ),
    "leaves the directory": (lambda path: remap(path, **{LAST: "../x.safetensors"}), ["names '../x.safetensors'"]),
    "no map": (lambda path: edit_json(path / "model.safetensors.index.json", weight_map=[1]), ["weight_map"]),
    "no JSON": (lambda path: (path / "model.safetensors.index.json").write_text("{]"), ["index.json", "expected JSON"]),
    "truncated shard": (lambda path: truncate(path, shard_of(path, LAST)), ["cannot be read as safetensors"]),
}


@pytest.mark.parametrize("case", SHARDS)
def test_a_damaged_directory_of_shards(case, saved, tmp_path):
    spoil, messages = SHARDS[case]
    path = tmp_path / "model"
    shutil.copytree(saved / "shards", path)
    names = {LAST: shard_of(path, LAST)}
    spoil(path)
    assert_refused(path, [names.get(message, message) for message in messages])


@pytest.mark.parametrize("limit", [5_000, 9_000, 20_000])
def test_shards_and_one_file_are_the_same_model(limit, saved, tmp_path):
    assert same_bits(tensors_of(saved / "single"), tensors_of(saved / "shards"))
    again = convert(saved / "shards", "hf", tmp_path / "again", max_shard_bytes=limit)
    assert same_bits(tensors_of(again), tensors_of(saved / "single"))
    index, theirs = (
        json.loads((path / "model.safetensors.index.json").read_text()) for path in (again, saved / "shards")
    )
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    sizes = [[tensor.nbytes for tensor in load_file(again / file).values()] for file in files]
    assert all(len(held) == 1 or sum(held) <= limit for held in sizes)
    assert all(sum(one) + sum(other) > limit for one, other in zip(sizes, sizes[1:], strict=False))


def test_a_stored_copy_of_tied_embeddings_passes_where_it_is_equal(tmp_path):
    path = save(make_model("llama", tie_word_embeddings=True), tmp_path / "model")
    before = tensors_of(path)
    assert "lm_head.weight" not in before
    change_tensors(path, **{"lm_head.weight": before["model.embed_tokens.weight"].clone()})
    assert same_bits(tensors_of(convert(path, "hf", tmp_path / "again")), before)
    change_tensors(path, **{"lm_head.weight": before["model.embed_tokens.weight"] + 1e-3})
    with pytest.raises(CheckpointError, match="lm_head.weight is not equal to model.embed_tokens.weight"):
        convert(path, "hf", tmp_path / "third")


def test_tables_of_frequencies_are_no_weights(saved, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(saved / "single", path)
    change_tensors(path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert same_bits(tensors_of(convert(path, "hf", tmp_path / "again")), tensors_of(saved / "single"))


def test_the_dtype_is_changed_on_the_way(saved, tmp_path):
    source = open_source(saved / "single")
    target = make_target("hf", source, dtype="bf16")
    assert {entry.dtype for entries in target.files.values() for entry in entries.values()} == {"bf16"}
    for format, dtype in (("hf", torch.bfloat16), ("megatron", torch.float16)):
        out = convert(source, format, tmp_path / format, dtype=DTYPE_NAMES[dtype])
        assert {tensor.dtype for tensor in tensors_of(out).values()} == {dtype}
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    assert {entry.dtype for entry in open_source(tmp_path / "megatron").tensors.values()} == {"fp16"}


def test_the_dtype_of_a_family_without_a_table_is_told_in_its_spellings(tmp_path):
    """transformers before 4.56 knows ``torch_dtype`` alone, and takes fp32 without it."""
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "start")
    for told in ({"dtype": "float32"}, {"torch_dtype": "float32"}, {"dtype": "float32", "torch_dtype": "float32"}):
        edit_json(tmp_path / "start/config.json", **{"dtype": None, "torch_dtype": None, **told})
        out = convert(tmp_path / "start", "hf", tmp_path / "-".join(told), dtype="bf16")
        found = json.loads((out / "config.json").read_text())
        assert {key: found.get(key) for key in ("dtype", *told)} == {
            "dtype": "bfloat16",
            **dict.fromkeys(told, "bfloat16"),
        }


OURS = {
    "no such file": (lambda path: (path / "tp01-pp00.safetensors").unlink(), ["tp01-pp00.safetensors", "no such file"]),
    "truncated": (lambda path: truncate(path, "tp01-pp00.safetensors"), ["tp01-pp00.safetensors", "bytes"]),
    "flipped bit": (lambda path: flip(path / "tp00-pp01.safetensors"), ["tp00-pp01.safetensors", "sha256"]),
    "exchanged files": (lambda path: exchange(path), ["tp00-pp00.safetensors", "bytes"]),
    "edited manifest": (
        lambda path: edit_json(path / "manifest.json", family="qwen2"),
        ["manifest.json", "sha256"],
    ),
    "other settings": (
        lambda path: resign(path, lambda body: body["model"].update(ffn_hidden_size=50)),
        ["manifest.json", "linear_fc1.weight", "(2, 48, 32)", "(2, 50, 32)"],
    ),
    "absurd settings": (
        lambda path: resign(path, lambda body: body["model"].update(num_layers=16_000)),
        ["manifest.json", "too few"],
    ),
    "assets": (
        lambda path: (path / "assets/tokenizer.json").write_text("{}"),
        ["assets/tokenizer.json", "other bytes"],
    ),
    "missing asset": (lambda path: (path / "assets/tokenizer.model").unlink(), ["assets/tokenizer.model", "no such"]),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def exchange(path):
    one, other = path / "tp00-pp00.safetensors", path / "tp01-pp00.safetensors"
    one.rename(path / "aside")
    other.rename(one)
    (path / "aside").rename(other)


def resign(path, change):
    """Change the manifest, and its hash with it."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    (path / "manifest.json").write_text(json.dumps({"sha256": digest(body), **body}))


@pytest.mark.parametrize("case", OURS)
def test_a_damaged_directory_of_ours(case, saved, tmp_path):
    spoil, messages = OURS[case]
    shutil.copytree(saved / "ours", tmp_path / "model")
    spoil(tmp_path / "model")
    assert_refused(tmp_path / "model", messages)


def test_what_several_ranks_hold_alike_is_written_once(saved):
    files = {file.name: load_file(file) for file in (saved / "ours").glob("*.safetensors")}
    assert sorted(files) == [f"tp{tp:02}-pp{pp:02}.safetensors" for tp in range(2) for pp in range(2)]
    norm, qkv = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
    assert [norm in files[name] for name in sorted(files)] == [True, False, False, False]
    assert [tuple(files[name][qkv].shape) for name in sorted(files) if qkv in files[name]] == [(32, 32)] * 2
    # 37 rows of the vocabulary in two parts of 19: the second has 18 and one of padding, which is not kept.
    embedding = "embedding.word_embeddings.weight"
    assert [len(files[name][embedding]) for name in sorted(files) if embedding in files[name]] == [19, 18]
    whole = open_source(saved / "single").read("decoder.layers.1.mlp.linear_fc1.weight")
    part = files["tp01-pp01.safetensors"]["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(part, whole[:, 24:])


def test_a_rank_with_padding_alone_has_no_piece(tmp_path):
    # 5 rows of the vocabulary in four parts of 2: the third has one, the fourth none.
    start = save(make_model("llama", vocab_size=5), tmp_path / "start")
    ours = convert(start, "megatron", tmp_path / "ours", layout=ParallelLayout(tp=4))
    name = "output_layer.weight"
    held = [load_file(ours / f"tp{tp:02}-pp00.safetensors") for tp in range(4)]
    assert [len(tensors[name]) if name in tensors else None for tensors in held] == [2, 2, 1, None]
    assert same_bits(tensors_of(convert(ours, "hf", tmp_path / "back")), tensors_of(start))


@pytest.mark.parametrize("layout", ["pp2.layers2-0", "vpp2", "tp4.dp3.cp2", "pp2.vpp2.layers1-0-0-1"])
def test_uneven_and_interleaved_stages(layout, saved, tmp_path):
    ours = convert(saved / "shards", "megatron", tmp_path / "ours", layout=ParallelLayout.parse(layout))
    assert same_bits(tensors_of(convert(ours, "hf", tmp_path / "back")), tensors_of(saved / "single"))


def test_experts_lie_in_files_of_their_own(tmp_path):
    start = save(make_model("mixtral"), tmp_path / "start")
    ours = convert(start, "megatron", tmp_path / "ours", layout=ParallelLayout.parse("tp2.ep2.etp1"))
    files = sorted(file.name for file in ours.glob("*.safetensors"))
    assert files == [
        *("ep00-etp00-pp00.safetensors", "ep01-etp00-pp00.safetensors"),
        *("tp00-pp00.safetensors", "tp01-pp00.safetensors"),
    ]
    experts = [{key.split(".")[5] for key in load_file(ours / file)} for file in files[:2]]
    assert experts == [{"0", "1"}, {"2", "3"}]


CUTS = {
    "tp3": (LayoutError, "tp=3 does not divide model.num_attention_heads=4"),
    "pp3": (ReshardError, "2 layers cannot be dealt to pp=3"),
    "pp2.layers1-2": (ReshardError, "has 3 layers, the model 2"),
    "dp2.ep2": (LayoutError, "the model has no experts"),
}


@pytest.mark.parametrize("layout", CUTS)
def test_a_layout_that_does_not_cut_the_model(layout, saved):
    error, message = CUTS[layout]
    with pytest.raises(error, match=re.escape(message)):
        make_target("megatron", open_source(saved / "single"), layout=ParallelLayout.parse(layout))


def test_a_layout_that_does_not_cut_the_experts_or_the_groups(tmp_path):
    source = open_source(save(make_model("mixtral"), tmp_path / "model"))
    with pytest.raises(ReshardError, match="4 experts cannot be dealt to ep=3"):
        make_target("megatron", source, layout=ParallelLayout.parse("dp3.ep3"))
    other = save(make_model("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=48), tmp_path / "other")
    with pytest.raises(LayoutError, match="tp=3 does not"):
        make_target("megatron", open_source(other), layout=ParallelLayout(tp=3))


def test_the_role_of_a_run_is_found(saved, tmp_path):
    run, step = tmp_path / "run", tmp_path / "run/checkpoints/step_000010"
    shutil.copytree(saved / "ours", step / "actor")
    shutil.copytree(saved / "ours", run / "checkpoints/reference")
    # Before the first checkpoint is complete, and where the pointer is empty, the reference is not what was trained.
    for path in (run, run / "checkpoints", step):
        with pytest.raises(CheckpointError, match="expected a checkpoint"):
            open_source(path)
    (step / "job.json").write_text("{}")
    (run / "checkpoints/latest").write_text("\n")
    with pytest.raises(CheckpointError, match="latest: found '', expected the name of a step"):
        open_source(run)
    (run / "checkpoints/latest").write_text("step_000010\n")
    for path in (run, run / "checkpoints", step, step / "actor"):
        assert open_source(path).path == step / "actor"
    # Without the pointer the newest is taken, as a run that goes on does.
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/step_000009").mkdir()
    for path in (run, run / "checkpoints"):
        assert open_source(path).path == step / "actor"
    shutil.copytree(saved / "ours", step / "critic")
    assert open_source(run).path == step / "actor"
    assert open_source(step / "critic").path == step / "critic"
    (step / "actor").rename(step / "cost_critic")
    with pytest.raises(ConfigError, match=f"holds several models; give one of {step}/cost_critic, {step}/critic"):
        open_source(run)
    (run / "checkpoints/latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match="latest: found '../../etc'"):
        open_source(run)


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_damaged(saved, tmp_path):
    shutil.copytree(saved / "ours", tmp_path / "actor")
    source = open_source(tmp_path / "actor")
    shutil.rmtree(tmp_path / "actor")
    with pytest.raises(CheckpointError, match="actor: was removed while it was read; .* trainer.keep_last"):
        source.read("decoder.final_layernorm.weight")


def test_pieces_that_ranks_wrote_read_as_well(tmp_path):
    """A checkpoint of a run: optimizer beside weights, tensors in flat boxes over several files, no family."""
    shape = dict(num_layers=1, hidden_size=8, ffn_hidden_size=6, num_attention_heads=2, max_context=16, vocab_size=11)
    model = ModelConfig(**shape, qk_norm=True)
    folder = tmp_path / "actor"
    folder.mkdir()
    specs = model_spec(model).tensors
    torch.manual_seed(3)
    values = {spec.name: torch.randn(spec.shape) for spec in specs}
    shares = [[], []]
    for spec in specs:
        whole, count = tuple((0, size) for size in spec.shape), values[spec.name].numel()
        for rank, span in enumerate([(0, count // 3), (count // 3, count)]):
            for box in flat_boxes(whole, *span):
                part = values[spec.name][tuple(slice(*edge) for edge in box)]
                shares[rank] += [Share(WEIGHT, spec.name, box, part), Share("exp_avg", spec.name, box, part + 1)]
    written = [write_shares(folder, f"rank-{rank:05}.safetensors", shares[rank]) for rank in range(2)]
    entries = {spec.name: TensorEntry("fp32", spec.shape) for spec in specs}
    manifest = Manifest(
        model=model,
        layout="tp1.pp1.dp2",
        tensors={WEIGHT: entries, "exp_avg": entries},
        pieces=tuple(piece for pieces, _ in written for piece in pieces),
        file_bytes={f"rank-{rank:05}.safetensors": size for rank, (_, size) in enumerate(written)},
    )
    write_manifest(folder, manifest)
    source = open_source(folder)
    assert source.tensors.keys() == values.keys() and source.family is None
    assert all(torch.equal(source.read(name), values[name]) for name in values)
    out = convert(folder, "hf", tmp_path / "hf")
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    again = open_source(out)
    assert all(torch.equal(again.read(name), values[name]) for name in values)


def test_paths_with_nothing_to_convert(tmp_path):
    with pytest.raises(CheckpointError, match="found nothing, expected a checkpoint"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="found an empty directory"):
        open_source(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="found a directory with notes.txt"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="found a file"):
        open_source(tmp_path / "notes.txt")


def test_options_that_a_format_does_not_take(saved):
    source = open_source(saved / "single")
    with pytest.raises(ConfigError, match="--layout: format hf has no such option; .* write megatron"):
        make_target("hf", source, layout=ParallelLayout())
    with pytest.raises(ConfigError, match="leave it out, Megatron loads this format in any layout, or write megatron"):
        make_target("megatron-dist", source, layout=ParallelLayout())
    with pytest.raises(ConfigError, match="format 'onnx': cannot be written; expected one of megatron, hf"):
        make_target("onnx", source)
    with pytest.raises(ConfigError, match="max_shard_bytes=0: expected at least 1"):
        make_target("hf", source, max_shard_bytes=0)


def test_a_target_that_cannot_be_written(saved, tmp_path):
    for format in ("hf", "megatron"):
        target = make_target(format, open_source(saved / "single"))
        hashes = {file: dict.fromkeys(entries, "0") for file, entries in target.files.items()}
        with pytest.raises(WriteError, match=re.escape(str(tmp_path / "gone"))):
            target.finish(tmp_path / "gone", hashes)


def test_identity_changes_with_the_files(saved, tmp_path):
    for name in ("single", "ours"):
        path = tmp_path / name
        shutil.copytree(saved / name, path)
        before = open_source(path).identity()
        assert open_source(path).identity() == before
        assets = path / "assets" if name == "ours" else path
        (assets / "tokenizer_config.json").touch()
        assert open_source(path).identity() != before
