"""What would ignore ``actor.fp8``, or compute something else, is refused on the login node."""

from __future__ import annotations

import pytest

from hybridflow.errors import ConfigError, LayoutError
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.rl_step import check_estimated
from hybridflow.recipe.load import load_recipe
from tests.support.complaints import complains
from tests.support.recipes import POLICY, write_config

FP8 = ("actor.fp8=blockwise", "model.dtype=bf16")


def load(*overrides: str):
    return load_recipe("grpo", [*FP8, *overrides])


def test_a_model_that_has_whole_blocks_is_taken():
    # 128 columns, and 512 in the feed-forward block.
    for kind in ("blockwise", "mxfp8"):
        assert load(f"actor.fp8={kind}", "actor.update={dp: 4}").actor.fp8 == kind
    assert load_recipe("ppo-70b", ["actor.fp8=blockwise"]).actor.fp8 == "blockwise"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["model.dtype=fp32"], "model.dtype=fp32", "it needs weights in bf16"),
        (["model.num_experts=4"], "model.num_experts=4", "experts would compute in bf16"),
        (
            ["model.kv_lora_rank=64", "model.qk_nope_head_dim=32", "model.qk_rope_head_dim=32", "model.v_head_dim=32"],
            "model.kv_lora_rank=64",
            "latent attention would compute in bf16",
        ),
        (
            [
                *("model.linear_layers=[0]", "model.linear_key_heads=2", "model.linear_value_heads=4"),
                *("model.linear_key_head_dim=6", "model.linear_value_head_dim=8", "model.linear_conv_kernel=4"),
            ],
            "model.linear_layers",
            "linear attention would compute in bf16",
        ),
        (["model.pre_norms=false", "model.post_norms=true"], "model.pre_norms=false", "not Transformer Engine's"),
        (["actor.lora={rank: 4}"], "actor.lora", "layers with adapters are not Transformer Engine's"),
        (["actor.recompute=full"], "actor.recompute=full", "would compute in bf16"),
        (["actor.reshard=shared"], "actor.reshard=shared", "cannot read the rounded weights in place"),
        (["rollout.engine.kind=vllm"], "rollout.engine.kind=vllm", "samples with rounded weights"),
    ],
)
def test_what_would_not_follow_is_named(overrides, key, reason):
    says = ["actor.fp8=blockwise", key, reason, "or set actor.fp8 to none"]
    complains(lambda: load("actor.update={dp: 4}", *overrides), says, ConfigError)


def test_a_model_in_transformers_is_refused(tmp_path):
    path = write_config(tmp_path / "policy", POLICY)
    given = [f"model={{path: {path}, implementation: transformers, dtype: bf16}}", "actor.update={dp: 4}"]
    says = ["actor.fp8=blockwise", "model.implementation=transformers"]
    complains(lambda: load(*given, "actor.rollout=null"), says, ConfigError)


def test_layouts_that_shard_parameters_or_cut_blocks_are_refused():
    sharded = "actor.update={fsdp: 4}", "actor.rollout={dp: 4}"
    complains(lambda: load(*sharded), ["actor.update=", "shards parameters", "use dp"], LayoutError)
    # 4 heads of 32 and as many keys and values: 384 columns, which tp2 cuts in halves.
    says = ["actor.update.tp=2", "192 columns of query, key and value", "a multiple of 128"]
    complains(lambda: load("actor.update={tp: 2, dp: 2}"), says, LayoutError)


def test_the_kinds_are_told():
    complains(lambda: load("actor.fp8=delayed"), ["actor.fp8", "expected one of none, blockwise, mxfp8"], ConfigError)


def test_the_time_of_a_step_in_fp8_is_not_estimated():
    complains(
        lambda: check_estimated(load_recipe("ppo-70b", ["actor.fp8=mxfp8"]), hardware("b200")),
        ["actor.fp8=mxfp8", "not estimated yet"],
    )
