"""Megatron's formats against megatron-core itself: what it saves is read, what we write it loads, bit for bit."""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import pickle
import queue
import random
import shutil
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from hybridflow.checkpoint.formats.megatron_args import to_args, to_model
from hybridflow.checkpoint.formats.registry import make_target, open_source
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.model import ModelConfig, RotaryScaling
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import model_spec
from hybridflow.models.weights import local_shards
from tests.multi.jobs import inner_of, outer_of
from tests.support.checkpoint_formats import (
    SMALL,
    MemorySource,
    assert_same,
    bits,
    in_bf16,
    logical_values,
)
from tests.support.conversions import convert
from tests.support.megatron_models import make_config
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

MODEL = replace(SMALL, vocab_divisible_by=4, rotary_base=50000.0, norm_eps=1e-6, max_context=32)
TIED = replace(in_bf16(MODEL), tied_embeddings=True, qkv_bias=False, qk_norm=True)
MIXTURE = replace(
    MODEL, num_experts=4, experts_per_token=2, qkv_bias=False, shared_ffn_hidden_size=8, shared_expert_gate=True
)
LATENT = ModelConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=8,
    num_attention_heads=4,
    max_context=64,
    vocab_size=29,
    vocab_divisible_by=4,
    norm_eps=1e-6,
    kv_lora_rank=8,
    q_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    rotary_scaling=RotaryScaling(
        kind="yarn", factor=4.0, original_context=16, beta_fast=8.0, mscale=1.0, mscale_all_dim=0.8
    ),
    num_experts=8,
    experts_per_token=4,
    router_score="sigmoid",
    router_bias=True,
    router_groups=4,
    router_groups_per_token=2,
    routed_scaling=2.5,
    shared_ffn_hidden_size=8,
    num_dense_layers=1,
    dense_ffn_hidden_size=24,
)
CASES = {"untied": MODEL, "tied": TIED}
MIXTURES = {"mixture": MIXTURE, "latent": LATENT}
TP2_PP2 = ParallelLayout(tp=2, pp=2)
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def arguments(model, layout):
    """What Megatron-LM's argument parser leaves for such a model; names and meanings are its own."""
    multiple = model.vocab_divisible_by * layout.tp
    settings = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        moe_ffn_hidden_size=model.ffn_hidden_size if model.num_experts else None,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=True,
        num_query_groups=model.num_query_groups,
        kv_channels=4,
        norm_epsilon=model.norm_eps,
        normalization="RMSNorm",
        apply_layernorm_1p=False,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        position_embedding_type="rope",
        rotary_base=int(model.rotary_base),
        rotary_percent=1.0,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        untie_embeddings_and_output_weights=not model.tied_embeddings,
        max_position_embeddings=model.max_context,
        seq_length=16,
        vocab_size=29,
        padded_vocab_size=-(-29 // multiple) * multiple,
        make_vocab_size_divisible_by=model.vocab_divisible_by,
        init_method_std=0.02,
        num_experts=model.num_experts,
        moe_router_topk=2,
        moe_router_pre_softmax=False,
        moe_shared_expert_intermediate_size=model.shared_ffn_hidden_size,
        moe_shared_expert_gate=model.shared_expert_gate,
        moe_router_load_balancing_type="aux_loss",
        window_size=None,
        params_dtype=torch.bfloat16 if model.dtype == "bf16" else torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        virtual_pipeline_model_parallel_size=None,
        lr=1e-4,
        data_path=["somewhere"],
    )
    return argparse.Namespace(**settings | (LATENT_ARGUMENTS if model is LATENT else {}))


LATENT_ARGUMENTS = dict(
    ffn_hidden_size=24,
    moe_ffn_hidden_size=8,
    kv_channels=4,
    group_query_attention=False,
    num_query_groups=1,
    qk_layernorm=True,
    multi_latent_attention=True,
    kv_lora_rank=8,
    q_lora_rank=12,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
    rope_type="yarn",
    rotary_scaling_factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=8.0,
    mscale=1.0,
    mscale_all_dim=0.8,
    moe_layer_freq=[0, 1, 1, 1],
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=8,
)


def config_of(model, layout, given):
    """megatron-core's settings of a model, and the layers that these make; those of latent attention are given."""
    config = make_config(model, layout, layernorm_epsilon=model.norm_eps)
    if model is not LATENT:
        return config, get_gpt_layer_local_spec(
            num_experts=model.num_experts, qk_layernorm=model.qk_norm, normalization="RMSNorm"
        )
    names = {item.name for item in fields(MLATransformerConfig)}
    own = {name: given[name] for name in LATENT_ARGUMENTS if name in names}
    config = MLATransformerConfig(**{**vars(config), **own, "num_query_groups": 4, "rotary_base": model.rotary_base})
    # It thinks that there is Transformer Engine.
    multi_latent_attention.HAVE_TE = False
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        # megatron-core's own takes no sizes of latent attention; it has no weights.
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return config, spec


class CausalAttention(torch.nn.Module):
    """Whatever the sizes of keys and values, ``[tokens, samples, heads, head]``."""

    def __init__(self, softmax_scale, **_):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        parts = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
        output = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


def build(world, model, layout, given=None):
    """A rank of megatron-core's own model, by its own global groups, all weights 7; and where its weights lie."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.expert_tp
    )
    multiple = model.vocab_divisible_by * layout.tp
    config, spec = config_of(model, layout, given or LATENT_ARGUMENTS)
    built = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-model.vocab_size // multiple) * multiple,
        max_sequence_length=model.max_context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
    )
    for parameter in built.parameters():
        parameter.data = torch.full_like(parameter.data, 7.0, dtype=config.params_dtype)
    mesh = DeviceMesh(name="model", layout=layout, ranks=tuple(range(world.size)), ranks_per_node=world.size)
    return built, local_shards(built, model_spec(model), mesh, world.rank)


def with_heads(model):
    """Megatron-LM says the width of heads always, but for latent attention; it is the same model."""
    return model if model.kv_lora_rank else replace(model, head_dim=4)


def fill(shards, values):
    for name, (local, part) in shards.items():
        local[inner_of(part)] = values[name][outer_of(part)]


def assert_holds(shards, values):
    for name, (local, part) in shards.items():
        assert torch.equal(bits(local[inner_of(part)]), bits(values[name][outer_of(part)])), name


def saving_in_tests():
    """megatron-core's writer starts processes: allow it to, without a server process that outlives the test."""
    multiprocessing.current_process()._config["daemon"] = False
    filesystem_async._get_write_results_queue = queue.Queue


def save(world, folder, cases, layout):
    """megatron-core's ``torch_dist``, and the legacy form as Megatron-LM lays it out."""
    saving_in_tests()
    for name, model in cases.items():
        built, shards = build(world, model, layout)
        fill(shards, logical_values(model))
        args = arguments(model, layout)
        dist = Path(folder) / name / "dist" / "iter_0000010"
        if world.rank == 0:
            dist.mkdir(parents=True)
            (dist.parent / "latest_checkpointed_iteration.txt").write_text("10")
        torch.distributed.barrier()
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
        for flag in (None, "non_homogeneous_layers", "singleton_local_shards"):
            out = dist if flag is None else Path(folder) / name / flag
            if world.rank == 0:
                out.mkdir(exist_ok=True)
            torch.distributed.barrier()
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            metadata = {"dp_cp_group": group, **({} if flag is None else {flag: True})}
            dist_checkpointing.save({**common, "model": built.sharded_state_dict(metadata=metadata)}, str(out))
        place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        if layout.pp > 1:
            place += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        if layout.ep > 1:
            place += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
        legacy = Path(folder) / name / "legacy" / "iter_0000010" / place
        legacy.mkdir(parents=True)
        rng = {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        state = {**common, "model": built.state_dict_for_save_checkpoint(), "rng_state": [rng]}
        torch.save(state, legacy / "model_optim_rng.pt")
        (legacy.parents[1] / "latest_checkpointed_iteration.txt").write_text("10")


def load(world, folders, cases, layout):
    """What megatron-core loads of ours is every weight."""
    for name, model in cases.items():
        built, shards = build(world, model, layout)
        loaded = dist_checkpointing.load({"model": built.sharded_state_dict()}, folders[name])
        built.load_state_dict(loaded["model"])
        assert_holds(shards, logical_values(model))
        assert loaded["args"].num_layers == model.num_layers and loaded["checkpoint_version"] == 3.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 4, str(folder), CASES, TP2_PP2)
    run_ranks(save, 2, str(folder), MIXTURES, ParallelLayout(dp=2, ep=2))
    return folder


@pytest.mark.parametrize("form", ["dist", "legacy"])
@pytest.mark.parametrize("name", [*CASES, *MIXTURES])
def test_what_megatron_saves_is_read_bit_for_bit(saved, name, form):
    model = {**CASES, **MIXTURES}[name]
    source = open_source(saved / name / form)
    assert source.format == f"megatron-{form}"
    assert source.model == with_heads(model)
    assert source.layout == ("tp1.pp1.dp2.ep2" if name in MIXTURES else "tp2.pp2.dp1")
    assert_same(source, logical_values(model))
    assert source.identity() == open_source(saved / name / form).identity()


@pytest.mark.parametrize("form", ["non_homogeneous_layers", "singleton_local_shards"])
@pytest.mark.parametrize("name", [*CASES, *MIXTURES])
def test_keys_of_each_layer_and_each_expert(saved, name, form):
    source = open_source(saved / name / form)
    assert not any(key.startswith("decoder.layers.mlp") for key in source._stored)
    assert_same(source, logical_values({**CASES, **MIXTURES}[name]))


def test_what_we_write_is_loaded_by_megatron_in_other_layouts(tmp_path):
    cases = {**CASES, **MIXTURES}
    folders = {}
    for name, model in cases.items():
        source = MemorySource(model)
        out = tmp_path / name
        # Small files, so that there are several.
        convert(source, "megatron-dist", out, max_shard_bytes=9000)
        folders[name] = str(out / "release")
        assert len(list((out / "release").glob("*.distcp"))) > 2
        again = open_source(out)
        assert_same(again, source.values)
        assert again.model == with_heads(model) and again.assets() == source.assets()
    run_ranks(load, 2, folders, CASES, ParallelLayout(tp=2))
    run_ranks(load, 2, folders, MIXTURES, ParallelLayout(dp=2, ep=2))


def logits_of(world, folder, ids):
    """What megatron-core computes with the latent model of a checkpoint, ``[tokens, vocabulary]``."""
    with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        built, _ = build(world, LATENT, ParallelLayout(), given=to_args(LATENT, "fp32"))
        built.load_state_dict(dist_checkpointing.load({"model": built.sharded_state_dict()}, folder)["model"])
        positions = torch.arange(len(ids))[None]
        return built.eval()(torch.tensor([ids]), positions, None)[0, :, : LATENT.vocab_size].detach().numpy()


def test_arguments_of_latent_attention_mean_what_the_family_computes(tmp_path):
    """Scale, YaRN, groups of experts, shared experts, dense layers: megatron-core and transformers agree."""
    source = MemorySource(LATENT, family="deepseek_v3")
    for name, values in source.values.items():
        # Small enough for experts to differ, and norms near 1.
        source.values[name] = values * 0.3 + (1.0 if "norm" in name else 0.0)
    for form in ("megatron-dist", "hf"):
        convert(source, form, tmp_path / form)
    ids = [3, 17, 9, 28, 1, 12, 6, 20, 11, 5, 4, 22, 8, 19, 2, 7, 13, 25, 10, 0]
    (found,) = run_ranks(logits_of, 1, str(tmp_path / "megatron-dist/release"), ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    expected = model(torch.tensor([ids])).logits[0].detach().numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())


def copied(saved, tmp_path, name, form):
    out = tmp_path / "copy"
    shutil.copytree(saved / name / form, out)
    return out, out / "iter_0000010"


def flip(path, needle):
    content = bytearray(path.read_bytes())
    content[content.index(needle) + 3] ^= 1
    path.write_bytes(content)


def test_damaged_torch_dist_names_file_and_tensor(saved, tmp_path):
    out, folder = copied(saved, tmp_path, "untied", "dist")
    values = logical_values(MODEL)
    first = values[QKV][0].numpy().tobytes()
    (path,) = [path for path in folder.glob("*.distcp") if first in path.read_bytes()]
    whole = path.read_bytes()
    flip(path, first)
    with pytest.raises(CheckpointError, match=f"{QKV}.*{path.name}.*checksum"):
        open_source(out).read(QKV)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{path.name}: found .* bytes, expected at least"):
        open_source(out)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name}: found no such file"):
        open_source(out)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda entry, where: entry.chunks.pop(), "do not cover"),
        (lambda entry, where: entry.chunks.append(entry.chunks[0]), "do not cover"),
        (lambda entry, where: setattr(entry.chunks[0], "sizes", torch.Size([4, 32, 16])), "lies in .* bytes"),
        (lambda entry, where: setattr(entry.chunks[0], "offsets", entry.chunks[1].offsets), "do not cover|odds"),
        (lambda entry, where: setattr(entry.chunks[0], "offsets", torch.Size([9, 0, 0])), "not a box"),
        (lambda entry, where: setattr(entry.chunks[0], "sizes", torch.Size([-1, 1, 1])), "no sizes"),
        (lambda entry, where: where.clear(), "malformed: KeyError"),
        (lambda entry, where: setattr(next(iter(where.values())), "relative_path", "../x"), "a file beside it"),
        (lambda entry, where: setattr(next(iter(where.values())), "offset", -1), "no sizes"),
        (lambda entry, where: setattr(next(iter(where.values())), "length", "many"), "no sizes"),
        (lambda entry, where: setattr(entry, "size", torch.Size([4, 32, 17])), "linear_qkv.weight: found"),
        (lambda entry, where: setattr(entry.properties, "dtype", torch.int64), "linear_qkv.weight: found torch.int64"),
        (lambda entry, where: setattr(entry.properties, "dtype", torch.float16), "found torch.float32 .* expected"),
        (lambda entry, where: setattr(entry.properties, "dtype", "text"), "has no dtype"),
    ],
)
def test_metadata_at_odds_with_itself(saved, tmp_path, change, match):
    out, folder = copied(saved, tmp_path, "untied", "dist")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    key = "decoder.layers.self_attention.linear_qkv.weight"
    of_key = {index: info for index, info in metadata.storage_data.items() if index.fqn == key}
    if match == "malformed: KeyError":
        metadata.storage_data = {}
    change(metadata.state_dict_metadata[key], of_key)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=match):
        source = open_source(out)
        for name in source.tensors:
            source.read(name)


def test_tensors_that_no_argument_explains_are_refused(saved, tmp_path):
    """A bias that was left out would make another model of the same shape."""
    out, folder = copied(saved, tmp_path, "untied", "dist")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    def named(key, new):
        """The metadata with a second tensor that is a copy of one of its own."""
        changed = copy.deepcopy(metadata)
        changed.state_dict_metadata[new] = changed.state_dict_metadata[key]
        changed.storage_data |= {
            replace(index, fqn=new): info for index, info in metadata.storage_data.items() if index.fqn == key
        }
        path.write_bytes(pickle.dumps(changed))
        return open_source(out)

    norm = "decoder.final_layernorm.weight"
    for beside in ("optimizer.state.exp_avg.x", "chained_1.optimizer.state.exp_avg.x", "decoder.x._extra_state"):
        assert named(norm, beside).tensors.keys() == open_source(saved / "untied/dist").tensors.keys()
    for stranger in (
        "decoder.final_layernorm.bias",
        "vision_model.x",
        "decoder.layers.self_attention.q_layernorm.weight",
    ):
        with pytest.raises(CheckpointError, match=f"metadata: holds {stranger}, expected only"):
            named(norm, stranger)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_truncated_pickles_of_torch_dist(saved, tmp_path, name):
    out, folder = copied(saved, tmp_path, "untied", "dist")
    (folder / name).write_bytes((folder / name).read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=f"{name}: "):
        open_source(out)


def rewrite_args(path, **changed):
    found = torch.load(path, weights_only=False)
    for name, value in changed.items():
        setattr(found["args"], name, value)
    torch.save(found, path)


@pytest.mark.parametrize("form", ["dist", "legacy"])
def test_arguments_that_do_not_belong_to_the_tensors(saved, tmp_path, form):
    out, folder = copied(saved, tmp_path, "untied", form)
    paths = [folder / "common.pt"] if form == "dist" else list(folder.glob("*/*.pt"))

    def refused(error, match, **changed):
        before = {path: path.read_bytes() for path in paths}
        for path in paths:
            rewrite_args(path, **changed)
        with pytest.raises(error, match=match):
            open_source(out)
        for path, content in before.items():
            path.write_bytes(content)

    refused(CheckpointError, "linear_fc1.weight.*expected", ffn_hidden_size=32)
    refused(CheckpointError, "layers", num_layers=8)
    refused(CheckpointError, "layers|too few", num_layers=16_000)
    refused(ConfigError, "num_layers: expected an integer of at least 1 and at most 16384", num_layers=10**9)
    if form == "dist":
        refused(CheckpointError, "output_layer", untie_embeddings_and_output_weights=False)
    refused(ConfigError, "normalization='LayerNorm' is not computed", normalization="LayerNorm")
    refused(ConfigError, "swiglu=False is not computed", swiglu=False)
    refused(ConfigError, "position_embedding_type", position_embedding_type="learned_absolute")


def test_legacy_files_that_are_missing_or_changed(saved, tmp_path):
    out, folder = copied(saved, tmp_path, "tied", "legacy")
    path = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    whole = path.read_bytes()
    local = logical_values(TIED)["embedding.word_embeddings.weight"][16:29]
    flip(path, local.view(torch.uint8).numpy().tobytes())
    with pytest.raises(CheckpointError, match="mp_rank_01_000/model_optim_rng.pt.*checksum"):
        open_source(out).read("embedding.word_embeddings.weight")
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="mp_rank_01_000/model_optim_rng.pt"):
        open_source(out)
    path.unlink()
    with pytest.raises(CheckpointError, match="mp_rank_01_000/model_optim_rng.pt: missing"):
        open_source(out)
    shutil.rmtree(path.parent)
    with pytest.raises(CheckpointError, match="mp_rank_01_000: missing in layout tp2.pp2"):
        open_source(out)


def change_state(path, change):
    found = torch.load(path, weights_only=False)
    change(found)
    torch.save(found, path)


def test_legacy_tensors_that_should_not_be_as_they_are(saved, tmp_path):
    out, folder = copied(saved, tmp_path, "tied", "legacy")
    path = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    whole = path.read_bytes()

    def refused(match, change):
        change_state(path, change)
        with pytest.raises(CheckpointError, match=match):
            open_source(out).read("embedding.word_embeddings.weight")
        path.write_bytes(whole)

    refused("output_layer.weight is not equal", lambda found: found["model"]["output_layer.weight"].fill_(1))
    refused("holds language_model", lambda found: found.update(model={"language_model": {}}))
    refused("extra.weight: not expected", lambda found: found["model"].update({"extra.weight": torch.zeros(2)}))
    refused(
        "final_layernorm.weight: found on 1 of 2", lambda found: found["model"].pop("decoder.final_layernorm.weight")
    )
    refused("has no state dict 'model'", lambda found: found.pop("model"))
    refused("holds no args", lambda found: found.pop("args"))


def transformer_engine(state):
    """The names of Transformer Engine's layers in a state dict with those of the local ones."""
    renamed = {}
    for name, value in state.items():
        name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        for part in ("q", "kv"):
            name = name.replace(f"{part}_layernorm.weight", f"linear_{part}_up_proj.layer_norm_weight")
        renamed[name] = value
    return renamed


@pytest.mark.parametrize("name", ["untied", "latent"])
def test_legacy_names_of_transformer_engine(saved, tmp_path, name):
    out, folder = copied(saved, tmp_path, name, "legacy")
    for path in folder.glob("*/*.pt"):
        change_state(path, lambda found: found.update(model=transformer_engine(found["model"])))
    assert_same(open_source(out), logical_values({**CASES, **MIXTURES}[name]))


def test_legacy_names_of_grouped_experts(saved, tmp_path):
    out, folder = copied(saved, tmp_path, "mixture", "legacy")

    def group(found):
        for name in list(found["model"]):
            before, middle, after = name.partition("mlp.experts.local_experts.")
            if middle and after.endswith(".weight"):
                index, rest = after.split(".", 1)
                found["model"][f"{before}mlp.experts.{rest}{index}"] = found["model"].pop(name)

    for path in folder.glob("*/*.pt"):
        change_state(path, group)
    assert_same(open_source(out), logical_values(MIXTURE))


def test_virtual_stages_take_turns(saved, tmp_path):
    """Four layers on two stages of two chunks: the first stage has layers 0 and 2, the second 1 and 3."""
    out, folder = copied(saved, tmp_path, "untied", "legacy")
    for tp in ("00", "01"):
        paths = [folder / f"mp_rank_{tp}_00{pp}" / "model_optim_rng.pt" for pp in (0, 1)]
        whole: dict[str, torch.Tensor] = {}
        for pp, path in enumerate(paths):
            for name, value in torch.load(path, weights_only=False)["model"].items():
                layer = name.split(".")[2] if name.startswith("decoder.layers.") else None
                whole[name if layer is None else name.replace(f"layers.{layer}.", f"layers.{int(layer) + 2 * pp}.")] = (
                    value
                )

        def chunk(stage, chunk_index, whole=whole):
            at = f"decoder.layers.{chunk_index * 2 + stage}."
            ends = {(0, 0): "embedding.", (1, 1): ("decoder.final", "output_layer.")}.get((stage, chunk_index), "none")
            return {
                name.replace(at, "decoder.layers.0."): value
                for name, value in whole.items()
                if name.startswith(at) or name.startswith(ends)
            }

        for pp, path in enumerate(paths):
            found = torch.load(path, weights_only=False)
            del found["model"]
            found["args"].virtual_pipeline_model_parallel_size = 2
            torch.save({**found, "model0": chunk(pp, 0), "model1": chunk(pp, 1)}, path)
    source = open_source(out)
    assert source.layout == "tp2.pp2.dp1.vpp2"
    assert_same(source, logical_values(MODEL))


def test_models_that_megatron_has_no_arguments_for():
    one_expert = {"num_experts": 4, "router_score": "sigmoid", "experts_per_token": 1, "normalized_experts": True}
    for changed in (
        {"logit_softcap": 30.0},
        {"activation": "gelu_tanh"},
        {"window": 8, "window_layers": (0,)},
        one_expert,
    ):
        source = MemorySource(replace(SMALL, **changed))
        with pytest.raises(ConfigError, match=f"Megatron-LM is not written of .*{next(reversed(changed))}"):
            make_target("megatron-dist", source)
    source = MemorySource(SMALL, has_value_head=True)
    with pytest.raises(ConfigError, match="no value head"):
        make_target("megatron-dist", source)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"window": 8},
        {"zero_centered_norms": True, "tied_embeddings": True, "dtype": "bf16"},
        {"num_experts": 4, "experts_per_token": 3, "normalized_experts": False},
        {"num_experts": 4, "num_dense_layers": 2, "dense_ffn_hidden_size": 40},
        # megatron-core's topk_routing_with_score_function normalizes scores of sigmoid where there are several.
        {"num_experts": 4, "router_score": "sigmoid", "experts_per_token": 2},
        {"num_experts": 4, "router_score": "sigmoid", "experts_per_token": 1, "normalized_experts": False},
        {"rotary_scaling": RotaryScaling(kind="linear", factor=2.0)},
        {
            "rotary_scaling": RotaryScaling(
                kind="llama3", factor=32.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
            )
        },
    ],
)
def test_settings_to_arguments_and_back(changed):
    model = replace(SMALL, head_dim=4, **changed)
    args = to_args(model, model.dtype)
    assert to_model(args, where="args") == model


@pytest.mark.parametrize(("name", "value"), [("softmax_scale", 1.0), ("moe_apply_probs_on_input", True)])
def test_arguments_of_another_model_are_refused(name, value):
    args = to_args(SMALL, SMALL.dtype)
    with pytest.raises(ConfigError, match=name):
        to_model({**args, name: value}, where="args")


@pytest.mark.parametrize(
    ("kind", "told", "padded", "expected"),
    [
        ("NullTokenizer", 29, 32, 30),
        # The row was left out where the size is given as it is padded.
        ("NullTokenizer", 32, 32, 32),
        ("HuggingFaceTokenizer", 29, 32, 29),
        ("NullTokenizer", None, 32, 32),
    ],
)
def test_the_end_of_sequence_of_a_null_tokenizer_has_a_row(kind, told, padded, expected):
    """Its ``vocab_size`` is one more than the argument of that name."""
    args = {**to_args(SMALL, SMALL.dtype), "tokenizer_type": kind, "vocab_size": told, "padded_vocab_size": padded}
    assert to_model(args, where="args").vocab_size == expected


def test_latent_attention_to_arguments_and_back():
    plain_yarn = RotaryScaling(kind="yarn", factor=4.0, original_context=16)
    for changed in ({}, {"rotary_scaling": None}, {"rotary_scaling": plain_yarn}, {"q_lora_rank": None}):
        model = replace(LATENT, **changed)
        assert to_model(to_args(model, model.dtype), where="args") == model

    args = to_args(LATENT, "fp32")
    refused = {
        "norm_epsilon": 1e-5,
        "qk_layernorm": False,
        "mscale": 0.0,
        "rope_type": "other",
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_router_group_topk": 4,
        "kv_lora_rank": None,
    }
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=rf"^args.*{name}|router_groups"):
            to_model({**args, name: value}, where="args")
    for changed in ({"norm_eps": 1e-5}, {"experts_per_token": 2}, {"rotary_scaling": replace(plain_yarn, mscale=1.0)}):
        with pytest.raises(ConfigError, match=f"not written of .*({next(iter(changed))}|router_groups)"):
            to_args(replace(LATENT, **changed), "fp32")
