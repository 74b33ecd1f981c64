"""Memory of each rank, from figures worked out by hand; what ranks really hold is in tests/multi/test_memory.py."""

import functools
import re
from dataclasses import replace

import pytest

from hybridflow import cli
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping import memory
from hybridflow.mapping.memory import (
    MeshMemory,
    RankMemory,
    job_memory,
    packed_bytes,
    rank_memory,
    with_micro_batches,
)
from hybridflow.mapping.memory_check import check_memory
from hybridflow.mapping.memory_table import memory_summary, memory_table
from hybridflow.models.shapes import model_spec
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from tests.support.recipes import POLICY, SCORER, write_config

SHORT = ("model.max_context=4096", "rollout.max_new_tokens=2048", "trainer.micro_batch_tokens=4096")
"""Half of what the 70B recipe has, so that no product is hidden in another."""


@functools.cache
def memory_of(name, *overrides):
    recipe = load_recipe(name, (*SHORT, *overrides) if name == "ppo-70b" else overrides)
    return job_memory(recipe, role_meshes(recipe))


# A layer of Llama 3 70B: query, key, value (8192 + 2 · 1024) · 8192, projection 8192 · 8192, feed-forward block
# 3 · 28672 · 8192; in all 855,638,016, an eighth of which on each of eight ranks, and two norms of 8192 on each.
LAYER = 855_638_016 // 8 + 2 * 8192
EMBEDDING = 128_256 * 8192 // 8


def by_mesh(needed):
    return {part.mesh: part for part in needed.meshes}


def test_70b_on_a_stage_without_embeddings():
    needed = memory_of("ppo-70b")[100]
    actor, rollout, critic, reference = needed.meshes
    assert [part.mesh for part in needed.meshes] == ["actor.update", "actor.rollout", "critic", "reference"]
    assert actor.weights == critic.weights == reference.weights == 10 * LAYER * 2
    assert actor.gradients == critic.gradients == 10 * LAYER * 4 and reference.gradients == reference.optimizer == 0
    # Two moments and fp32 weights, over eight replicas; buffers are padded.
    assert actor.optimizer == critic.optimizer == pytest.approx(10 * LAYER * 12 / 8, rel=1e-3)
    # All 80 layers, two embeddings and the last norm, but for the ten layers that it has anyway: rank 100 is number 4
    # of its tensor-parallel group in both layouts.
    assert rollout.weights == (70 * LAYER + 2 * EMBEDDING + 8192) * 2
    # Keys and values of one of eight groups of 128: 80 layers, 32 sequences of 4096 tokens, 2 bytes.
    assert rollout.cache == 2 * 80 * 32 * 4096 * 128 * 2
    # 2048 tokens of prompts in one layer, see below, and of 32 texts 128,256 / 8 logits, and four fp32 copies.
    assert rollout.activations == 2048 * 47_488 * 2 + 32 * 16_032 * (2 + 4 * 4)
    # Stage 1 of 8 has seven micro-batches of 4096 tokens under way. Of each token a layer keeps
    # 4 · 8192 / 8 + 4 · 128 + 3 · (8192 + 1024 + 28672) / 8 numbers of 2 bytes; one layer has gradients, 6 · 28672 / 8.
    assert actor.activations == critic.activations == 4096 * (7 * 10 * 18_816 + 21_504) * 2
    # A micro-batch has at least one text, of 4096 tokens.
    small = by_mesh(memory_of("ppo-70b", "trainer.micro_batch_tokens=512")[100])
    assert small["actor.update"].activations == actor.activations


def test_fp8_takes_two_more_copies_of_one_byte_and_a_rollout_with_weights_of_its_own():
    plain, rounded = (by_mesh(memory_of("ppo-70b", *more)[100]) for more in ((), ("actor.fp8=blockwise",)))
    # Rows and columns of ten layers' matrices; norms and embeddings have none.
    assert rounded["actor.update"].weights == plain["actor.update"].weights + 2 * 10 * (855_638_016 // 8)
    assert rounded["actor.update"].gradients == plain["actor.update"].gradients
    # Ten layers that it could have shared.
    assert rounded["actor.rollout"].weights == (80 * LAYER + 2 * EMBEDDING + 8192) * 2
    assert rounded["critic"] == plain["critic"] and rounded["reference"] == plain["reference"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_cpu_packs_the_matrices_that_a_stage_multiplies_with(tied):
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 2}
    model = ModelConfig(**sizes, vocab_size=40, max_context=64, dtype="fp32", tied_embeddings=tied)
    mesh = DeviceMesh(name="actor.rollout", layout=ParallelLayout(pp=2), ranks=(0, 1), ranks_per_node=2)
    # One layer: query, key and value 3 · 32 rows of 32, projection 32 of 32, gate and up 2 · 64 of 32, down 32 of 64.
    layer = (96 * 32 + 32 * 32 + 128 * 32 + 32 * 64) * 4
    # The output's 40 rows fill two panels of 32, on the last stage alone, also where it is the embedding.
    found = [packed_bytes(model_spec(model), model, mesh, rank) for rank in mesh.ranks]
    assert found == [layer, layer + 64 * 32 * 4]
    # Others go through the modules of training.
    for other in (
        {"implementation": "transformers"},
        {"num_experts": 2},
        {"attention_output_gate": True},
        {"value_norm": True},
        {"head_dim": 8},
    ):
        assert packed_bytes(model_spec(model), replace(model, **other), mesh, 0) == 0, other


def test_70b_first_and_last_stage_have_the_embeddings():
    memory = memory_of("ppo-70b")
    first, last = by_mesh(memory[0]), by_mesh(memory[511])
    assert first["critic"].weights == first["actor.update"].weights == (10 * LAYER + EMBEDDING) * 2
    assert last["actor.update"].weights == (10 * LAYER + EMBEDDING + 8192) * 2
    assert last["critic"].weights == (10 * LAYER + 8192 + 8192) * 2
    # One micro-batch, logits and their gradient, and four fp32 chunks of 1024 tokens; the columns are 128,256 / 8.
    layers, columns = 4096 * 10 * 18_816 * 2, 16_032
    assert last["actor.update"].activations == layers + 2 * 4096 * columns * 2 + 4 * 1024 * columns * 4
    # A frozen model keeps nothing of a layer, and has no gradient of the logits.
    assert last["reference"].activations == layers // 10 + 4096 * columns * 2 + 4 * 1024 * columns * 4


def test_sequence_parallelism_cuts_what_is_between_matrices_and_context_parallelism_the_tokens():
    # Of the 70B model with one stage of eight: see above. cp2 has half of the tokens, the keys and values of all tokens
    # of one layer four times (one group of 128), and half of the logits on the last stage.
    split, whole = (
        by_mesh(memory_of("ppo-70b", f"actor.update.sequence_parallel={value}")[100])["actor.update"]
        for value in ("true", "false")
    )
    kept = [4096 * (7 * 10 * numbers + 21_504) * 2 for numbers in (18_816, 47_488)]
    assert [split.activations, whole.activations] == kept
    shared = by_mesh(memory_of("ppo-70b", "actor.update={tp: 8, pp: 8, cp: 2, dp: 4}")[100])["actor.update"]
    assert shared.activations == split.activations // 2 + 4 * 4096 * 2 * 128 * 2
    assert (shared.weights, shared.optimizer) == (split.weights, split.optimizer)
    # A forward pass has them twice.
    reference = by_mesh(memory_of("ppo-70b", "reference.layout={tp: 8, pp: 8, cp: 2, dp: 4}")[100])["reference"]
    assert reference.activations == 2048 * 18_816 * 2 + 2 * 4096 * 2 * 128 * 2


@pytest.mark.parametrize("asked", ["presence_penalty=0.5", "repetition_penalty=1.1", "min_new_tokens=2"])
def test_penalties_need_a_table_of_tokens_seen(asked):
    few = "rollout.max_concurrent=32"
    plain, edited = (
        by_mesh(memory_of("ppo-70b", few, *more)[100])["actor.rollout"].activations
        for more in ((), (f"rollout.{asked}",))
    )
    # 128,256 columns over tp8: counts and edited logits of four bytes, and a context of 4,096 tokens.
    assert edited - plain == 32 * 4 * (2 * 16_032 + 4096)


@pytest.mark.parametrize(("asked", "item_bytes"), [((), 2), (("rollout.presence_penalty=0.5",), 4)])
def test_cuts_need_the_logits_of_all_ranks(asked, item_bytes):
    few, one = ("rollout.max_concurrent=32", *asked), "actor.rollout={dp: 512}"
    plain, cut, alone, cut_alone = (
        by_mesh(memory_of("ppo-70b", *few, *more)[100])["actor.rollout"].activations
        for more in ((), ("rollout.top_p=0.9",), (one,), (one, "rollout.top_k=50"))
    )
    assert cut - plain == 2 * 32 * 128_256 * item_bytes and alone == cut_alone


def test_vllm_takes_its_share_of_a_gpu_and_a_server_nothing():
    words = ("actor.rollout={dp: 512}", "rollout.engine={kind: vllm, memory_share: 0.3}", "actor.offload=true")
    recipe = load_recipe("ppo-70b", (*SHORT, *words))
    needed = job_memory(recipe, role_meshes(recipe), gpu_bytes=80e9)[100]
    actor, rollout, *others = needed.meshes
    assert (rollout.cache, rollout.activations, needed.spare) == (24e9, 0, 0)
    # Its weights are loaded from ours, which are there until then.
    kept = actor.weights + rollout.weights + sum(part.kept for part in others)
    assert needed.rollout == kept + 24e9 and rollout.weights > 70 * LAYER * 2
    asked = ("kind: openai", "urls: ['http://h:1']", "off_policy: true")
    served = memory_of("ppo-70b", words[0], f"rollout.engine={{{', '.join(asked)}}}", "actor.offload=false")[100]
    assert "actor.rollout" not in by_mesh(served) and served.rollout < served.update


@pytest.mark.parametrize(
    "placed",
    [
        ("actor.update={tp: 2, pp: 2, dp: 2}", "actor.rollout={tp: 4, dp: 2}"),
        ("actor.update={pp: 4, dp: 2}", "actor.rollout={tp: 4, dp: 2}"),
        ("actor.update={tp: 2, dp: 2}", "actor.rollout={tp: 2, dp: 2}", "actor.rollout_ranks=[4, 5, 6, 7]"),
    ],
)
def test_ranks_that_are_counted_as_one_need_the_same(placed, monkeypatch):
    size = "cluster.ranks=8", "cluster.ranks_per_node=8", "model.num_layers=4", "model.dtype=bf16"
    recipe = load_recipe("grpo", (*size, *placed))
    together = job_memory(recipe, role_meshes(recipe))
    monkeypatch.setattr("hybridflow.mapping.memory._Placed.kind", lambda placed, rank: rank)
    assert job_memory(recipe, role_meshes(recipe)) == together


def test_of_many_data_parallel_peers_a_few_are_worked_out(monkeypatch):
    """A plan of 65,536 ranks took minutes. With a distributed optimizer some peers step more elements than others."""
    size = "cluster.ranks=1024", "cluster.ranks_per_node=8", "actor.update={tp: 2, dp: 512}", "actor.rollout={dp: 1024}"
    recipe = load_recipe("grpo", (*size, "reference.layout={dp: 1024}", "trainer.mini_batch_size=1024"))
    asked = []
    found = memory._mesh_memory
    monkeypatch.setattr(memory, "_mesh_memory", lambda *args: asked.append(args[2].name) or found(*args))
    needed = job_memory(recipe, role_meshes(recipe))
    assert len({by_mesh(each)["actor.update"].optimizer for each in needed}) == asked.count("actor.update") < 8
    assert asked.count("reference") == 1


def test_phases_add_up_what_is_there_in_them():
    for needed in memory_of("ppo-70b")[::100]:
        parts = by_mesh(needed)
        actor, rollout, critic, reference = parts.values()
        kept = actor.kept + critic.kept + reference.kept
        assert needed.update == kept + max(actor.activations, critic.activations, reference.activations)
        assert needed.rollout == kept + rollout.weights + rollout.cache + rollout.activations
        assert needed.peak == max(needed.update, needed.rollout)


def test_models_on_one_rank_add_up_what_they_keep_and_take_turns_with_the_rest():
    update = MeshMemory(mesh="actor.update", weights=10, gradients=20, optimizer=30, activations=7)
    rollout = MeshMemory(mesh="actor.rollout", weights=5, lasting=2, cache=40, activations=3)
    for scoring, peak, spare in ((60, 10 + 5 + 4 + 60, 0), (20, 10 + 5 + 40 + 3, 40 + 3 - 20 - 4)):
        reward = MeshMemory(mesh="reward", weights=4, activations=scoring)
        # The reward is in host memory while it is not in use, and what the actor learns with during a rollout.
        found = rank_memory((update, rollout, reward), {"reward"}, 30, is_offloaded=True)
        assert (found.rollout, found.update) == (peak, 10 + 20 + 30 + 2 + 7)
        assert (found.spare, found.resident) == (spare, 10 + 5)
    alone = rank_memory((rollout,), (), 30, is_offloaded=True)
    assert (alone.rollout, alone.update, alone.spare) == (5 + 40 + 3, 5, 30)


def test_offload_frees_gradients_and_optimizer_of_the_actor_during_the_rollout():
    before, after = (memory_of("ppo-70b", f"actor.offload={value}")[100] for value in ("false", "true"))
    actor = by_mesh(before)["actor.update"]
    assert (before.rollout - after.rollout, after.update) == (actor.gradients + actor.optimizer, before.update)


def test_offload_frees_gradients_and_optimizer_of_a_critic_while_it_does_not_learn():
    before, after = (memory_of("ppo-70b", f"critic.offload={value}")[100] for value in ("false", "true"))
    parts = by_mesh(before)
    critic = parts["critic"]
    away = critic.gradients + critic.optimizer
    passing = [each.activations for name, each in parts.items() if name != "actor.rollout"]
    assert before.rollout - after.rollout == away > 0
    # In the update it is there while the critic learns, and nothing else is computed then.
    assert before.update - after.update == away + max(passing) - max(*passing, critic.activations + away)


def test_what_is_always_in_host_memory_takes_what_is_gathered_alone():
    fsdp = "actor.update={fsdp: 4}", "actor.rollout={dp: 4}", "reference.layout={tp: 2, dp: 2}", "kl.coef=0.1"
    before, after = (memory_of("grpo", *fsdp, f"actor.offload={value}")[0] for value in ("false", "always"))
    actor, moved = by_mesh(before)["actor.update"], by_mesh(after)["actor.update"]
    assert (moved.weights, moved.gradients, moved.optimizer) == (0, 0, 0)
    assert moved.activations == actor.activations
    assert before.update - after.update == before.rollout - after.rollout == actor.kept > 0


def test_a_gpu_copies_the_factors_of_adapters():
    layout = "actor.update={tp: 2, dp: 2}", "actor.rollout={tp: 2, dp: 2}", "model.dtype=bf16"
    rollout = by_mesh(memory_of("grpo", *layout, "actor.lora={rank: 8}")[0])["actor.rollout"]
    # Rows and columns of a rank: of query, key and value, the projection, gate and up, and the way down.
    qkv, projection, gate_up, down = 192 + 128, 128 + 64, 512 + 128, 128 + 256
    assert rollout.weights == rollout.lasting == 2 * 2 * 8 * (3 * qkv + projection + 2 * gate_up + down)


def test_adapters_keep_what_is_between_their_factors_and_masks_of_their_inputs():
    plain, adapted, dropped = (
        by_mesh(memory_of("grpo", "model.dtype=bf16", *more)[0])["actor.update"].activations
        for more in ((), ("actor.lora={rank: 8}",), ("actor.lora={rank: 8, dropout: 0.1}",))
    )
    # Two layers, 4096 tokens, seven pairs of factors, 2 bytes. tp2 cuts the inputs of both blocks, 128 each, and those
    # of projection and way down, 128 and 512.
    assert adapted - plain == 2 * 4096 * 7 * 8 * 2
    assert dropped - adapted == 2 * 4096 * (2 * 128 + 128 + 512) // 2 * 2


def test_adapters_are_copied_into_another_layout_and_their_base_is_the_reference():
    layout = "actor.update={tp: 2, dp: 2}", "actor.rollout={dp: 4}", "model.dtype=bf16", "kl.coef=0.1"
    plain, adapted = (by_mesh(memory_of("grpo", *layout, *more)[0]) for more in ((), ("actor.lora={rank: 8}",)))
    rollout = adapted["actor.rollout"]
    # Whole rows and columns, see above; what stays is joined, besides the copied base.
    joined = 2 * 2 * 8 * (3 * (384 + 128) + (128 + 128) + 2 * (1024 + 128) + (128 + 512))
    assert rollout.lasting == plain["actor.rollout"].weights + joined
    # Of the factors tp cuts rows of query, key, value, gate and up, and columns of projection and way down.
    assert rollout.weights == rollout.lasting + 2 * 2 * 8 * (3 * 128 + 128 + 2 * 512 + 512)
    assert plain["reference"].weights == plain["actor.update"].weights and adapted["reference"].weights == 0


def test_a_critic_has_no_adapters():
    plain, adapted = (by_mesh(memory_of("ppo", *more)[0]) for more in ((), ("actor.lora={rank: 8}",)))
    assert adapted["critic"] == plain["critic"]


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_what_is_gathered_has_gradients_that_are_summed_in_fp32(dtype, width):
    other = "actor.rollout={dp: 4}", f"model.dtype={dtype}", "kl.coef=0.1"
    sharded, whole = (
        by_mesh(memory_of("grpo", f"actor.update={{{axis}: 4}}", f"reference.layout={{{axis}: 4}}", *other)[0])
        for axis in ("fsdp", "dp")
    )
    # All weights: there are two layers, and what is in none. Unsharded they are there too, without gradients.
    numbers = whole["actor.update"].weights // width
    gathered = sharded["actor.update"].activations - whole["actor.update"].activations
    assert gathered == numbers * (width + 4)
    # Moments, and master weights where the weights are not fp32, are sharded with them.
    assert sharded["actor.update"].optimizer == sharded["actor.update"].weights // width * (8 if width == 4 else 12)
    # A frozen model has none.
    assert sharded["reference"].activations - whole["reference"].activations == numbers * width


@pytest.mark.parametrize(("sharding", "is_kept"), [("FULL_SHARD", False), ("SHARD_GRAD_OP", True)])
def test_the_two_largest_layers_are_gathered_at_a_time_or_all(sharding, is_kept):
    sizes = "num_layers=4", "num_experts=2", "num_dense_layers=1", "dense_ffn_hidden_size=256"
    model = [f"model.{each}" for each in sizes]
    fsdp = f"{{dp: 4, fsdp_sharding: {sharding}}}"
    sharded, whole = (
        by_mesh(memory_of("grpo", *model, f"actor.update={layout}", "actor.rollout={dp: 4}")[0])["actor.update"]
        for layout in (fsdp, "{dp: 4}")
    )
    # Attention and two norms, and the first layer's block of 256 columns or two experts of 512 with their router.
    dense = 4 * 128 * 128 + 2 * 128 + 3 * 256 * 128
    mixture = 4 * 128 * 128 + 2 * 128 + 2 * 3 * 512 * 128 + 2 * 128
    numbers = whole.weights // 4 - (0 if is_kept else dense + mixture)
    assert sharded.activations - whole.activations == numbers * (4 + 4)


def test_a_frozen_mixture_has_the_experts_that_are_gathered_side_by_side_too():
    other = "actor.rollout={dp: 4}", "model.num_experts=2", "model.dtype=bf16", "kl.coef=0.1"
    sharded, whole = (
        by_mesh(memory_of("grpo", "actor.update={dp: 4}", f"reference.layout={{{axis}: 4}}", *other)[0])["reference"]
        for axis in ("fsdp", "dp")
    )
    # Gate and up of two experts of 512 columns.
    assert sharded.activations - whole.activations == whole.weights + 2 * 2 * 512 * 128 * 2


def test_latent_attention_makes_keys_and_values_of_a_limited_number_of_tokens_of_prompts():
    sizes = "kv_lora_rank=32", "qk_nope_head_dim=16", "qk_rope_head_dim=8", "v_head_dim=12"
    latent = [*(f"model.{each}" for each in sizes), "rollout.max_concurrent=8"]
    short, longer, most = (
        by_mesh(memory_of("grpo", *latent, f"model.max_context={tokens}")[0])["actor.rollout"].activations
        for tokens in (16, 32, 4096)
    )
    # Of each of four heads 16 and 12 numbers as they are made, and keys and values of 24 as a kernel takes them.
    token = 4 * (16 + 12 + 2 * 24) * 4
    assert longer - short == 8 * 16 * token and most - short == (8192 - 8 * 16) * token


def test_one_layout_for_both_phases_has_the_weights_once():
    layout = "actor.rollout={tp: 2, dp: 2}"
    parts = by_mesh(memory_of("grpo", layout, "model.dtype=bf16")[0])
    assert parts["actor.rollout"].weights == 0 and parts["actor.rollout"].cache > 0
    # But where the update rounds them.
    wide = "model.hidden_size=256", "model.dtype=bf16", layout
    parts, apart = (by_mesh(memory_of("grpo", *wide, f"actor.fp8={kind}")[0]) for kind in ("none", "blockwise"))
    assert apart["actor.rollout"].weights == parts["actor.update"].weights
    # In fp32 a CPU generates with a copy of the matrices: half of two layers of 4 · 128 · 128 + 3 · 512 · 128 numbers,
    # and of 64 · 128 of the output.
    parts = by_mesh(memory_of("grpo", layout)[0])
    assert parts["actor.rollout"].weights == (2 * 262_144 + 8192) // 2 * 4


def test_a_mixture_needs_the_inputs_of_its_experts_and_their_weights_side_by_side():
    # Two layers, 4096 tokens, hidden 128, tp2, so 256 of 512 feed-forward columns, 2 bytes.
    dense, sparse, stacked = (
        by_mesh(memory_of("grpo", *more)[0])["actor.update"].activations
        for more in (
            ("model.dtype=bf16",),
            ("model.dtype=fp32", "model.num_experts=8"),
            ("model.dtype=bf16", "model.num_experts=8"),
        )
    )
    # Of each token a layer keeps the inputs of two experts, and of each four times 256 columns in the place of three.
    # Each of eight experts may have eight inputs more. One layer has gradients, six times the columns. Both ranks have
    # slices of the tokens and halves of the experts, so inputs and outputs are there five times more.
    layers, gradients = 2 * 4096 * (2 * 128 + 2 * 4 * 256 - 3 * 256) * 2, 4096 * 6 * 256 * 2
    spare, exchanged = 2 * 8 * 8 * (128 + 4 * 256) * 2, 5 * 4096 * 2 * 128 * 2
    # With gradients of gate and up of eight experts.
    assert stacked == dense + layers + spare + gradients + exchanged + 8 * 2 * 256 * 128 * 2
    # In fp32 they are multiplied one after the other, and keep six times as many columns.
    assert sparse == 2 * (dense + layers + 2 * 4096 * 2 * 2 * 256 * 2 + gradients + exchanged)


def test_norms_of_queries_and_keys_keep_what_they_normalize():
    plain, of_heads, of_all = (
        by_mesh(memory_of("grpo", "model.dtype=bf16", *more)[0])["actor.update"].activations
        for more in ((), ("model.qk_norm=true",), ("model.qk_norm=true", "model.qk_norm_over=projection"))
    )
    # Two layers, 4096 tokens, tp2: 64 of 128 columns of queries, and as many of keys. The queries as the kernel takes
    # them, in 2 bytes; over the projection both in 4 bytes, twice.
    assert of_heads - plain == 2 * 4096 * 64 * 2
    assert of_all - plain == 2 * 4096 * 2 * 2 * 64 * 4


def test_whole_experts_have_fewer_inputs_of_the_same_width():
    # Two layers, 4096 tokens, hidden 128, tp2, fp32. With etp2 a rank has half of each expert, and the inputs of all
    # tokens; with etp1 whole experts, and half of the inputs. What an expert makes of an input is as wide as its part.
    halves, whole = (
        by_mesh(memory_of("grpo", "model.num_experts=4", f"actor.update={layout}", "critic=null")[0])["actor.update"]
        for layout in ("{tp: 2, dp: 2, ep: 2}", "{tp: 2, dp: 2, ep: 2, etp: 1}")
    )
    inputs = 4096 * 2 * 128 * 4
    assert halves.activations - whole.activations == (2 + 5) * inputs // 2


def test_the_cache_keeps_to_its_budget():
    # 2 · 80 layers, 4096 tokens, one group of 128, 2 bytes.
    one = 2 * 80 * 4096 * 128 * 2
    for share, cache, spare in (("0.5", 32 * one, 31 * one), ("1e9", 10**9, 0), ("1e12", 32 * one, 0)):
        needed = memory_of("ppo-70b", f"rollout.cache_memory={share}")[100]
        assert (by_mesh(needed)["actor.rollout"].cache, needed.spare) == (cache, spare)
        assert needed.least == max(needed.update, needed.rollout - spare)
        assert memory_summary([needed]).startswith(
            "must fit: 34.1 GB on rank 0; a cache" if spare else "most on rank 0: "
        )


def test_sequences_are_cached_in_whole_blocks():
    longer, whole = (
        by_mesh(memory_of("ppo-70b", f"model.max_context={tokens}")[0])["actor.rollout"].cache
        for tokens in (4081, 4096)
    )
    assert longer == whole


def test_optimizer_state_that_is_not_distributed_is_whole():
    parts = by_mesh(memory_of("grpo", "actor.optimizer.distributed=false")[0])
    assert parts["actor.update"].optimizer == 2 * parts["actor.update"].weights


def test_ranks_without_a_model_need_nothing():
    memory = memory_of("split", "cluster.ranks=7")
    assert [part.mesh for part in memory[4].meshes] == ["critic"] and memory[6].peak == 0
    assert "\n6      none" in memory_table(memory) and memory_summary(memory).startswith("most on rank ")


LLAMA_70B = {
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
}


def test_a_reward_model_is_counted_where_it_scores(tmp_path):
    write_config(tmp_path, SCORER, **LLAMA_70B)
    override = f"reward.model={{path: {tmp_path}, dtype: bf16}}"
    without, needed = memory_of("ppo-70b")[100], memory_of("ppo-70b", override)[100]
    reward = by_mesh(needed)["reward"]
    assert reward.weights == 10 * LAYER * 2 and (reward.gradients, reward.optimizer, reward.cache) == (0, 0, 0)
    assert needed.update - without.update == reward.weights


def test_frozen_models_in_host_memory_are_counted_one_at_a_time(tmp_path):
    write_config(tmp_path, SCORER, **LLAMA_70B)
    reward = f"reward.model={{path: {tmp_path}, dtype: bf16}}"
    kept = memory_of("ppo-70b", reward)[100]
    parts = by_mesh(kept)
    weights, (needed,) = (
        10 * LAYER * 2,
        memory_of("ppo-70b", reward, "reward.offload=true", "reference.offload=true")[100:101],
    )
    assert kept.rollout - needed.rollout == 2 * weights, "generating takes more than scoring"
    # An update takes more than the reference's forward pass with its weights, or not.
    least = kept.update - 2 * weights
    with_reference = least - parts["critic"].activations + weights + parts["reference"].activations
    assert needed.update == max(least, with_reference)


def test_costs_cost_critics_and_teachers_are_counted(tmp_path):
    write_config(tmp_path / "price", SCORER, **LLAMA_70B)
    safe = (
        "algorithm=safe-rlhf",
        f"cost={{model: {{path: {tmp_path / 'price'}, dtype: bf16}}}}",
        "cost_critic={layout: {tp: 8, pp: 8, dp: 8}, optimizer: {lr: 1e-5}}",
    )
    parts = by_mesh(memory_of("ppo-70b", *safe)[100])
    assert list(parts) == ["actor.update", "actor.rollout", "critic", "cost_critic", "reference", "cost"]
    assert replace(parts["cost_critic"], mesh="critic") == parts["critic"]
    assert replace(parts["cost"], mesh="reference") == parts["reference"] and parts["cost"].weights == 10 * LAYER * 2
    function = by_mesh(memory_of("ppo-70b", safe[0], "cost.function=length", safe[2])[100])
    assert function.keys() == parts.keys() - {"cost"}
    write_config(tmp_path / "teacher", POLICY, **LLAMA_70B)
    teacher = "teacher={model: {path: %s, dtype: bf16}, layout: {tp: 8, pp: 8, dp: 8}}" % (tmp_path / "teacher")
    parts = by_mesh(memory_of("ppo-70b", "algorithm=distill", "critic=null", "kl={coef: 0}", teacher)[100])
    assert list(parts) == ["actor.update", "actor.rollout", "teacher"]
    assert (parts["teacher"].weights, parts["teacher"].optimizer) == (10 * LAYER * 2, 0)


def test_plan_of_70b_tells_layout_placement_memory_and_the_batch_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "job", "ppo-70b", "--script", "--time", "24:00:00"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "0-511  actor      actor.rollout tp8.pp1.dp64  sample_validation, sample",
        "    call critic.values on critic tp8.pp8.dp8",
        "0-63     actor.update   2.40 GB    4.80 GB    1.80 GB",
        "#SBATCH --nodes=64\n#SBATCH --ntasks-per-node=8",
        f"set -- {tmp_path}/runs/ppo-70b/launch/0001/recipe.yaml",
    ):
        assert line in printed
    assert list(tmp_path.iterdir()) == []


def test_many_groups_of_ranks_are_shortened():
    memory = [
        RankMemory(meshes=(MeshMemory(mesh="m", weights=size),), rollout=size, update=0) for size in range(1000, 0, -10)
    ]
    lines = memory_table(memory * 2).splitlines()
    # The heading, the eleven largest of a hundred, what is left out, and the smallest.
    assert len(lines) == 14 and lines[1].startswith("0,100 ") and lines[13].startswith("99,199 ")
    assert lines[12] == "… 88 more groups of ranks, each between these"


def test_what_samples_nothing_has_no_rollout_and_a_scorer_no_logits():
    """Of 64 rows of vocabulary the scorer has those of the embedding, and one row of a value head."""
    policy, scorer = (load_recipe(name, ["cluster.ranks=1", "actor.update={}"]) for name in ("dpo", "reward-model"))
    (of_policy,), (of_scorer,) = (job_memory(recipe, role_meshes(recipe)) for recipe in (policy, scorer))
    assert [part.mesh for part in of_policy.meshes] == ["actor.update", "reference"]
    assert [part.mesh for part in of_scorer.meshes] == ["actor.update"]
    assert of_policy.meshes[0].weights - of_scorer.meshes[0].weights == (64 - 1) * 128 * 4
    assert (of_policy.spare, of_scorer.spare) == (0, 0)


EIGHT = ("actor.update={tp: 8, pp: 8, dp: 8%s}", "critic.layout={tp: 8, pp: 8, dp: 8}")


GRADIENTS = 21_504 / 18_816
"""Of the feed-forward block of one layer, 6 · 28672 / 8 numbers, as a share of what a layer keeps."""


def activations(stage, axes="", *more):
    """Of a stage of the 70B actor; a layer keeps 18,816 numbers of 2 bytes of each of 4096 tokens.

    They are 47,488 without sequence parallelism, of which 4 times 8192 are then cut over 8 ranks.
    """
    needed = memory_of("ppo-70b", EIGHT[0] % axes, EIGHT[1], *more)[64 * stage]
    return by_mesh(needed)["actor.update"].activations / (4096 * 18_816 * 2)


def test_recomputed_layers_keep_their_input_and_one_layer_at_a_time_the_rest():
    share = 1024 / 18_816
    assert activations(1, "", "actor.recompute=full") == pytest.approx(7 * 10 * share + 1 + GRADIENTS)
    # Of the ten layers nine are recomputed: when the first of these is, the tenth is done with. Its own gradients are
    # counted beside those of a layer that is recomputed.
    assert activations(1, "", "actor.recompute=full", "actor.recompute_layers=9") == pytest.approx(
        7 * (9 * share + 1) + 2 * GRADIENTS
    )
    assert activations(1, "", "actor.recompute=full", "actor.recompute_layers=4") == pytest.approx(
        7 * (4 * share + 6) + GRADIENTS
    )
    # With chunks of five layers the second one keeps all. Stage 1 begins with 20 passes, turns of eight through each
    # chunk, and has 13 of the first and 8 of the second under way when the first goes back.
    assert activations(1, ", vpp: 2", "actor.recompute=full", "actor.recompute_layers=4") == pytest.approx(
        13 * (4 * share + 1) + 8 * 5 + 2 * GRADIENTS
    )
    assert activations(1, "", "actor.recompute=selective") == activations(1) == pytest.approx(70 + GRADIENTS)
    assert activations(1, ", sequence_parallel: false") == pytest.approx(70 * 47_488 / 18_816 + GRADIENTS)


def test_interleaved_stages_keep_more_the_more_there_are():
    # 1 + (pp - 1) / (pp · vpp) times 80 layers on the first stage; each stage behind it two passes of a chunk less.
    assert activations(0) == pytest.approx(80 + GRADIENTS)
    for vpp in (2, 5):
        chunk, first = 10 // vpp, 80 * (1 + 7 / (8 * vpp)) + GRADIENTS
        assert activations(0, f", vpp: {vpp}") == pytest.approx(first)
        assert activations(3, f", vpp: {vpp}") == pytest.approx(first - 3 * 2 * chunk)


def test_stages_of_unequal_length_keep_what_they_have():
    layers = ", layers: [11, 11, 11, 11, 10, 10, 9, 7]"
    kept = [activations(stage, layers) - GRADIENTS for stage in (0, 1, 4)]
    assert kept == pytest.approx([8 * 11, 7 * 11, 4 * 10])
    parts = [by_mesh(needed)["actor.update"] for needed in memory_of("ppo-70b", EIGHT[0] % layers, EIGHT[1])[::64]]
    assert [part.weights for part in parts[1:7]] == [count * LAYER * 2 for count in (11, 11, 11, 10, 10, 9)]
    assert parts[0].weights == (11 * LAYER + EMBEDDING) * 2


LEFT_OUT = "trainer.micro_batch_tokens"


def chosen(*overrides, gpu_bytes=None):
    """Return the micro-batch tokens that a DPO recipe gets, and what its fullest rank needs with others."""
    recipe = load_recipe("dpo", overrides)
    meshes = role_meshes(recipe)

    def needs(tokens):
        with_tokens = replace(recipe, trainer=replace(recipe.trainer, micro_batch_tokens=tokens))
        return max(needed.least for needed in job_memory(with_tokens, meshes))

    return with_micro_batches(recipe, meshes, gpu_bytes).trainer.micro_batch_tokens, needs


def test_micro_batches_that_are_left_out_are_the_largest_that_fit():
    assert chosen()[0] == 4096, "no memory is known"
    assert chosen(gpu_bytes=80e9)[0] == 16384
    needs = chosen()[1]
    between = (needs(8192) + needs(16384)) / 2
    assert chosen(f"cluster.memory_budget_gb={between / 1e9}")[0] == 8192
    assert chosen(gpu_bytes=needs(8192) / 0.9 + 1)[0] == 8192
    assert chosen(gpu_bytes=needs(8192) / 0.9 - 9)[0] == 4096
    assert chosen(f"cluster.memory_budget_gb={between / 1e9}", gpu_bytes=needs(2048) + 9)[0] == 2048
    assert chosen(gpu_bytes=1)[0] == 1024, "the smallest, which check_memory refuses"


def test_stages_of_a_rollout_wait_for_no_micro_batches():
    recipe = load_recipe("grpo", ["actor.update={dp: 4}", "actor.rollout={pp: 2, dp: 2}"])
    assert with_micro_batches(recipe, role_meshes(recipe), 80e9).trainer.micro_batch_tokens == 16384


def test_micro_batches_are_those_of_the_recipe_or_leave_no_stage_idle():
    assert chosen(f"{LEFT_OUT}=512", gpu_bytes=80e9)[0] == 512
    assert chosen("actor.update={pp: 2}", gpu_bytes=80e9)[0] == 4096


def test_the_plan_tells_the_micro_batches_that_fit(capsys):
    assert cli.main(["plan", "job", "dpo", "cluster.memory_budget_gb=80"]) == 0
    assert re.search(rf"^  {LEFT_OUT} +16384$", capsys.readouterr().out, re.M)


def test_memory_near_the_limit_warns_and_above_it_is_refused():
    def ranks(*peaks_gb):
        return [RankMemory(meshes=(), rollout=int(each * 1e9), update=1) for each in peaks_gb]

    recipe = load_recipe("grpo")
    assert check_memory(recipe, ranks(71, 72), 80e9) == check_memory(recipe, ranks(900)) == []
    (warning,) = check_memory(recipe, ranks(10, 73), 80e9)
    assert "rank 1 needs about 73.0 GB in its rollout phase, a GPU has 80.0 GB (gpu_memory_gb in the site" in warning
    with pytest.raises(ConfigError, match=r"rank 0 needs about 80\.1 GB in its rollout.* rollout\.max_concurrent"):
        check_memory(recipe, ranks(80.1, 10), 80e9)
    # A cache that takes no more than is free fits.
    roomy = RankMemory(meshes=(), rollout=int(200e9), update=1, spare=int(190e9))
    assert check_memory(recipe, [roomy, *ranks(20)], 80e9) == []
    budget = load_recipe("grpo", ["cluster.memory_budget_gb=70"])
    assert check_memory(budget, ranks(70)) == []
    with pytest.raises(ConfigError, match=r"cluster\.memory_budget_gb=70: rank 1 needs about 70\.5 GB in its rollout"):
        check_memory(budget, ranks(70, 70.5))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.memory_budget_gb=2", "cluster.memory_budget_gb=2: rank 0 needs about"),
        ("cluster.hardware=h100-sxm", "a GPU has 80.0 GB (cluster.hardware=h100-sxm)"),
    ],
)
@pytest.mark.parametrize("command", [["plan", "job"], ["train", "--dry-run"], ["launch", "slurm", "--print"]])
def test_a_job_that_does_not_fit_is_refused_before_it_has_gpus(tmp_path, monkeypatch, capsys, command, setting, words):
    monkeypatch.setenv("HOME", str(tmp_path))
    size = "model={num_layers: 64, hidden_size: 8192, ffn_hidden_size: 28672, num_attention_heads: 64, max_context: 64}"
    time = ["--time", "1:00:00"] if command[0] == "launch" else []
    assert cli.main([*command, "grpo", size, setting, f"run_dir={tmp_path}/run", *time]) == 2
    error = capsys.readouterr().err
    assert words in error and ("`hybridflow plan auto` finds layouts that fit" in error) is ("hardware" in setting)


HYBRID = {
    "Mamba2": dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, expand=2, max_position_embeddings=64),
    "NemotronH": dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], mamba_num_heads=8, mamba_head_dim=8
    )
    | dict(ssm_state_size=16, n_groups=2, n_routed_experts=4, moe_intermediate_size=24, num_experts_per_tok=2),
    "GPTNeoX": {"tie_word_embeddings": False},
}
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=45)


@pytest.fixture
def hybrid(request, tmp_path):
    """A model that runs in transformers, in two files, and its recipe's overrides."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{request.param}Config")(**{**SIZES, **HYBRID[request.param]})
    module = getattr(transformers, f"{request.param}ForCausalLM")(config)
    module.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return module, [
        f"model={{path: {tmp_path / 'model'}, max_context: 64}}",
        "actor.update={dp: 4}",
        "actor.rollout=null",
    ]


@pytest.mark.parametrize("hybrid", HYBRID, indirect=True)
def test_the_parameters_of_a_model_in_transformers_are_those_of_its_files(hybrid):
    module, overrides = hybrid
    numbers = sum(each.numel() for each in module.parameters())
    saved = sum(each.numel() for each in module.state_dict().values())  # also the bias of a router
    recipe = load_recipe("grpo", overrides)
    meshes = by_mesh(job_memory(recipe, role_meshes(recipe))[0])
    update = meshes["actor.update"]
    assert (update.weights, update.gradients, update.optimizer) == (4 * saved, 4 * numbers, 8 * numbers)
    assert meshes["actor.rollout"].weights == 0, "transformers generates with what is trained"
    # A critic has no output layer, which is no tensor of its own where it is the embedding.
    recipe = load_recipe("ppo", [*overrides, "critic.layout={dp: 4}"])
    critic = by_mesh(job_memory(recipe, role_meshes(recipe))[0])["critic"]
    assert critic.gradients // 4 == numbers - (0 if module.config.tie_word_embeddings else 45 * 32)


@pytest.mark.parametrize("hybrid", ["GPTNeoX"], indirect=True)
def test_adapters_of_a_model_in_transformers_are_on_the_layers_that_are_named(hybrid):
    _, overrides = hybrid
    recipe = load_recipe("grpo", [*overrides, "actor.lora={rank: 3, targets: [query_key_value, dense]}"])
    update = by_mesh(job_memory(recipe, role_meshes(recipe))[0])["actor.update"]
    # Of each of two layers: A [3, 32] and B [96, 3], A [3, 32] and B [32, 3].
    assert update.gradients == 4 * 2 * 3 * (32 + 96 + 32 + 32)


@pytest.mark.parametrize("hybrid", ["Mamba2"], indirect=True)
def test_without_all_files_of_its_weights_rough_sizes_count(hybrid, tmp_path):
    module, overrides = hybrid
    next((tmp_path / "model").glob("model-00001-of-*.safetensors")).unlink()
    recipe = load_recipe("grpo", overrides)
    update = by_mesh(job_memory(recipe, role_meshes(recipe))[0])["actor.update"]
    assert 0 < update.weights != 4 * sum(each.numel() for each in module.parameters())
