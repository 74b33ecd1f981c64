"""Recipes: every key is checked, and every complaint names the place, the key and the remedy."""

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config.losses import LossConfig
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import OptimizerConfig
from hybridflow.dataflow.schedule import Call
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.families.cut import check_cut
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.load import find_recipe, load_recipe, recipe_from_dict
from hybridflow.recipe.meshes import role_meshes
from hybridflow.reshard.plan import shares_storage
from hybridflow.sections import LARGEST_INTEGER, keys_of, to_dict
from hybridflow.trainer.plan import plan_job
from tests.support.complaints import complains
from tests.support.recipes import POLICY, SCORER, SMALLEST, write_config

WHOLE = ["actor.update={dp: 4}", "actor.rollout=null", "critic.layout={dp: 4}"]
"""Layouts that cut no model."""

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    return path


def test_smallest_recipe_takes_the_defaults(recipe_file):
    recipe = load_recipe(recipe_file)
    assert recipe.run_dir == "runs/small"
    assert recipe.actor.update == ParallelLayout(tp=2, pp=1, dp=2)
    assert recipe.actor.optimizer == OptimizerConfig(lr=1e-4)  # YAML 1.1 reads 1e-4 as text
    assert recipe.loss == LossConfig()
    assert recipe.trainer.mini_batch_size is None


def test_overrides_win_and_later_ones_over_earlier(recipe_file):
    overrides = ["trainer.steps=3", "trainer.steps=4", "actor.optimizer.lr=2", "warm_start={steps: 1, batch_size: 2}"]
    recipe = load_recipe(recipe_file, [*overrides, "warm_start.lr=1e-3", "critic.ranks=[3, 2, 1, 0]"])
    assert recipe.trainer.steps == 4
    assert recipe.actor.optimizer.lr == 2.0 and isinstance(recipe.actor.optimizer.lr, float)
    assert recipe.warm_start.lr == 1e-3
    assert recipe.critic.ranks == (3, 2, 1, 0)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm=gpro", ["did you mean grpo?"]),
        ("trainer.step=3", ["override 'trainer.step=3'", "trainer.step:", "did you mean trainer.steps?", "save_every"]),
        ("gamma=0.9", ["gamma: unknown key; did you mean advantage.gamma?"]),
        ("trainer.zzz=1", ["trainer.zzz: unknown key; keys of trainer: steps"]),
        ("actor.update=tp2.dp8", ["actor.update: expected a section with keys tp", "such as {tp: 2, dp: 8}"]),
        ("actor.update={tp:2,dp:8}", ["YAML needs a blank behind each colon, as in '{tp: 2, dp: 8}'"]),
        ("rollout.environment=calc:Env", ["expected a section with keys name", "such as {name: calculator}"]),
        ("rollout.stop='</s>'", ["expected a list of texts of 1 to 1024 characters, such as ['</answer>']"]),
        ("lr=0.9", ["did you mean warm_start.lr or actor.optimizer.lr or critic.optimizer.lr"]),
        ("trainer.steps=many", ["trainer.steps: expected an integer of at least 0, found 'many' (text)"]),
        ("trainer.steps=true", ["found True (true or false)"]),
        ("trainer.steps=2.0", ["found 2.0 (a number)"]),
        ("trainer.steps=-1", ["expected an integer of at least 0, found -1"]),
        ("critic.lr=1e-5", ["critic.lr: unknown key; did you mean critic.optimizer.lr or "]),
        ("actor.optimizer.beta1=1", ["actor.optimizer.beta1: expected a number of at least 0 and below 1, found 1.0"]),
        ("advantage.gamma=1.5", ["advantage.gamma: expected a number of at least 0 and at most 1, found 1.5"]),
        ("advantage.gamma=.nan", ["found nan"]),
        ("loss.clip_high=.inf", ["found inf"]),
        ("actor.optimizer.lr=0", ["expected a number above 0, found 0.0"]),
        ("kl.place=lossy", ["kl.place: expected one of reward, loss, found 'lossy'"]),
        ("model.tied_embeddings=1", ["model.tied_embeddings: expected true or false, found 1 (an integer)"]),
        ("name=yes", ["name: expected text", "found True"]),
        ("name=a/b", ["expected text like [A-Za-z0-9]", "'a/b'"]),
        ("trainer=null", ["trainer: expected a section with keys steps", "found null"]),
        ("actor.ranks=3", ["actor.ranks: expected a list of integers or null, found 3"]),
        ("actor.ranks=[0, x]", ["actor.ranks[1]: expected an integer, found 'x'"]),
        ("seed.low=1", ["override 'seed.low=1'", "seed: expected an integer", "found {'low': 1} (a section)"]),
        ("name.low=1", ["override 'name.low=1': name is 'small' (text), not a section"]),
        ("trainer.steps", ["override 'trainer.steps': expected dotted.key=value"]),
        ("trainer.steps=[", ["override 'trainer.steps=[': not valid YAML"]),
        ("critic=null", ["critic: missing; algorithm=ppo needs this section"]),
        ("algorithm=grpo", ["critic: algorithm=grpo would ignore this section"]),
        ("lagrange.limit=0.1", ["lagrange: algorithm=ppo would ignore this section"]),
        ("actor.optimizer.min_lr=1", ["actor.optimizer.min_lr=1 is above actor.optimizer.lr=0.0001"]),
        ("critic.optimizer.min_lr=1e-4", ["critic.optimizer.schedule=constant never comes down to it"]),
        ("critic.warmup_steps=11", ["critic.warmup_steps=11 is more than trainer.steps=10"]),
        ("trainer.pass_k=2", ["trainer.pass_k=2 is more than trainer.validation_samples=0"]),
        ("trainer.keep_best=true", ["trainer.keep_best=true: trainer.validate_every=0 compares no steps"]),
        ("trainer.patience=3", ["trainer.patience=3: trainer.validate_every=0 compares no steps"]),
        ("kl.target=6", ["kl.target: adaptive KL multiplies kl.coef, which is 0"]),
        ("rollout.group_size=3", ["global_batch_size=16", "group_size=3", "set it to 18"]),
        ("trainer.mini_batch_size=5", ["mini_batch_size=5 does not divide trainer.global_batch_size=16"]),
        ("rollout.max_new_tokens=32", ["rollout.max_new_tokens=32", "model.max_context=32"]),
        ("rollout.environment={}", ["rollout.environment.name: missing; expected text"]),
        ("rollout.environment={name: calculator, max_turns: 0}", ["max_turns: expected an integer of at least 1"]),
        ("rollout.environment={name: calculator, failure_reward: .nan}", ["failure_reward", "found nan"]),
        ("model.num_query_groups=3", ["model.num_query_groups=3 does not divide model.num_attention_heads=4"]),
        ("model.hidden_size=30", ["model.hidden_size=30", "multiple of 2·heads", "model.head_dim"]),
        ("model.head_dim=7", ["model.head_dim=7", "even"]),
        ("model.window_layers=[0]", ["model.window_layers=[0] without model.window", "give its width"]),
        ("model.rotary_scaling={kind: yarn, factor: 2}", ["model.rotary_scaling.original_context: missing; yarn"]),
        (
            "model.rotary_scaling={kind: llama3, original_context: 8, low_freq_factor: 4}",
            ["model.rotary_scaling.low_freq_factor=4.0 is not below", "high_freq_factor=4.0"],
        ),
        (
            "model.rotary_scaling={kind: longrope, original_context: 8, short_factor: [1]}",
            ["model.rotary_scaling.short_factor: 1 numbers; longrope with heads of", "give so many"],
        ),
        ("model.rotary_scaling={kind: linear, long_factor: [1]}", ["long_factor: 1 numbers", "remove it"]),
        ("model.rotary_scaling={kind: dynamic}", ["model.rotary_scaling.kind: expected one of linear, llama3, yarn"]),
    ],
)
def test_bad_key_is_named_with_the_remedy(recipe_file, override, says):
    complains(lambda: load_recipe(recipe_file, [override]), says, ConfigError)


def test_an_override_of_a_text_may_look_like_a_number_or_a_date(recipe_file):
    for text in ("4711", "2024-01-31", "1_000", "007", "1.50"):
        recipe = load_recipe(recipe_file, [f"name={text}", f"namespace={text}", f"data.answer_field={text}"])
        assert (recipe.name, recipe.namespace, recipe.data.answer_field) == (text, text, text)
    assert load_recipe(recipe_file, ["namespace=null"]).namespace is None
    complains(lambda: load_recipe(recipe_file, ["name=true"]), ["name: expected text like", "found True"], ConfigError)
    assert load_recipe(recipe_file, ["trainer.pass_k=null", "trainer.steps=3"]).trainer.steps == 3


GLOBAL = [
    *("model.global_head_dim=16", "model.window=4", "model.window_layers=[0]", "model.local_rotary_base=9"),
    "model.attention_scale=1",
]
LINEAR = [
    *("model.linear_layers=[0]", "model.linear_key_heads=2", "model.linear_value_heads=4"),
    *("model.linear_key_head_dim=6", "model.linear_value_head_dim=8", "model.linear_conv_kernel=4"),
]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.window=4", "model.window_layers=[1, 2]"], "model.window_layers: [2] not among layers 0 to 1"),
        (["model.no_rope_layers=[2]"], "model.no_rope_layers: [2] not among layers 0 to 1"),
        (["model.no_rope_layers=[1]", "model.local_rotary_base=9"], "layers of three kinds are not computed"),
        (["model.expert_norms=true"], "model.expert_norms=True without model.num_experts"),
        (["model.num_experts=4", "model.expert_norms=true"], "expert_norms=true with model.post_norms=False is not"),
        (
            ["model.num_experts=4", "model.expert_norms=true", "model.post_norms=true"],
            "model.expert_norms=true without model.shared_ffn_hidden_size is not computed",
        ),
        (["model.keys_as_values=true"], "model.keys_as_values=True without model.window: layers of two kinds need it"),
        (["model.global_head_dim=16", "model.window=4"], "model.global_head_dim=16 without model.local_rotary_base"),
        ([*GLOBAL, "model.global_head_dim=15"], "model.global_head_dim=15: rotary embeddings need an even size"),
        ([*GLOBAL, "model.global_query_groups=3"], "model.global_query_groups=3 does not divide model."),
        ([*GLOBAL, "model.qkv_bias=true"], "model.global_head_dim=16 with model.qkv_bias=True is not computed"),
        (["model.linear_key_heads=2"], "model.linear_key_heads=2 with model.linear_layers=[]: layers with linear"),
        (["model.linear_layers=[0]"], "model.linear_key_heads=None with model.linear_layers=[0]: layers with linear"),
        ([*LINEAR, "model.linear_layers=[2]"], "model.linear_layers: [2] not among layers 0 to 1"),
        ([*LINEAR, "model.linear_layers=[0, 1]"], "none of 2 layers has keys and values"),
        ([*LINEAR, "model.linear_value_heads=3"], "linear_value_heads=3 is no multiple of model.linear_key_heads=2"),
        ([*LINEAR, "model.linear_conv_kernel=1"], "model.linear_conv_kernel=1: expected at least 2"),
        ([*LINEAR, "model.post_norms=true"], "model.post_norms=true with model.linear_layers: not computed"),
        (["actor.lora={rank: 2, targets: [out_proj]}"], "out_proj belong to linear attention, which no layer"),
        (["model.num_experts=4", "model.experts_per_token=5"], "experts_per_token=5 is more than model.num_experts=4"),
        (["model.num_experts=4", "model.experts_per_token=1"], "set normalized_experts to false"),
        (
            ["data.arithmetic={num_train: 9, num_held_out: 1, operation: multiply, mistake_share: 0.5}"],
            "data.arithmetic.mistake_share=0.5: only additions have a wrong carry",
        ),
        (
            ["rollout.environment={name: calculator, failure_reward: -1}", "reward.function=length"],
            "rollout.environment.failure_reward=-1: reward.function scores, and the environment's rewards are not",
        ),
        (["loss={kind: gspo, aggregation: token-mean}"], "loss.aggregation=token-mean: loss.kind=gspo weighs each"),
        (["loss={kind: cispo, dual_clip: 3.0}"], "loss.dual_clip=3: loss.kind=cispo has none; leave the key out"),
        (["loss.norm_tokens=5"], "loss.norm_tokens=5: loss.aggregation=token-mean does not divide by it"),
        (
            ["algorithm=reinforce++", "critic=null", "advantage.gae_lambda=0.5"],
            "advantage.gae_lambda=0.5: algorithm=reinforce++ has no critic",
        ),
        (["shaping.overlong_buffer=9999"], "shaping.overlong_buffer=9999 is above rollout.max_new_tokens="),
        (["shaping.overlong_factor=2"], "shaping.overlong_factor=2: nothing is paid for without a buffer"),
        (["correction.reject_high=3"], "correction.reject_high: nothing is rejected; set correction.reject"),
        (["correction={reject: k3, reject_low: 0.1}"], "correction.reject_low=0.1: k3 is never negative"),
        (["correction={reject: k1, reject_level: max}"], "correction.reject_level=max: a k1 near 0 may hide one"),
        (["correction={reject: k1, reject_low: 2}"], "reject_low=2 is not below correction.reject_high=2; nothing"),
        (
            ["algorithm=dapo", "critic=null", "rollout.group_size=1"],
            "rollout.group_size=1: algorithm=dapo compares the responses to a prompt",
        ),
    ],
)
def test_keys_at_odds_are_named_with_the_remedy(recipe_file, overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_recipe(recipe_file, overrides)


def test_experts_are_dealt_to_equal_blocks(recipe_file):
    dense, mixture = (load_recipe(recipe_file, [f"model.num_experts={count}"]).model for count in ("null", 4))
    check_cut(mixture, ParallelLayout(dp=2, ep=2), "mesh")
    for model, found in ((dense, "null"), (mixture, "4")):
        with pytest.raises(LayoutError, match=f"mesh: ep=3 does not divide model.num_experts={found}"):
            check_cut(model, ParallelLayout(dp=3, ep=3), "mesh")


def test_biases_of_routers_are_sharded_where_transformers_computes_them():
    of_routers = dict(num_experts=4, router_score="sigmoid", router_bias=True)
    model = replace(load_recipe("quickstart").model, **of_routers)
    with pytest.raises(LayoutError, match="no place for .*biases.*model.implementation=transformers"):
        check_cut(model, ParallelLayout(fsdp=2), "mesh")
    check_cut(replace(model, implementation="transformers"), ParallelLayout(fsdp=2), "mesh")


def test_linear_attention_is_cut_by_key_heads_and_whole_sequences(recipe_file):
    model = load_recipe(recipe_file, LINEAR).model
    check_cut(model, ParallelLayout(tp=2, pp=2), "mesh")
    with pytest.raises(LayoutError, match="mesh: tp=4 does not divide model.linear_key_heads=2; choose a divisor"):
        check_cut(model, ParallelLayout(tp=4), "mesh")
    with pytest.raises(LayoutError, match=re.escape("mesh: cp=2 with model.linear_layers=[0]: linear attention goes")):
        check_cut(model, ParallelLayout(cp=2), "mesh")


def test_heads_of_layers_without_the_window_are_cut_too(recipe_file):
    heads = ["model.num_attention_heads=8", "model.head_dim=8", "model.num_query_groups=8"]
    model = load_recipe(recipe_file, [*GLOBAL, *heads, "model.global_query_groups=2", "model.layer_scalars=true"]).model
    check_cut(model, ParallelLayout(tp=4), "mesh")
    with pytest.raises(LayoutError, match="tp=3 neither divides nor is a multiple of model.global_query_groups=2"):
        check_cut(
            replace(model, num_attention_heads=12, num_query_groups=12, ffn_hidden_size=48),
            ParallelLayout(tp=3),
            "mesh",
        )
    with pytest.raises(LayoutError, match="with model.layer_scalars=true: FSDP has no place for the layers' numbers"):
        check_cut(model, ParallelLayout(fsdp=2), "mesh")


def test_heads_may_be_wider_than_their_share_of_the_hidden_size(recipe_file):
    assert load_recipe(recipe_file, ["model.hidden_size=30", "model.head_dim=16"]).model.head_dim == 16


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.update={tp: 2, pp: 4, dp: 4}"], ["actor.update", "= 32 ≠ 4 ranks"]),
        (["actor.rollout.dp=2"], ["actor.rollout", "= 2 ≠ 4 ranks", "set dp=4"]),
        (["actor.update.tp=0"], ["override 'actor.update.tp=0'", "actor.update: layout tp=0"]),
        (["actor.rollout={cp: 2, dp: 2}"], ["actor.rollout: tp1.pp1.dp2.cp2: a rollout needs whole", "cp=1 and dp=4"]),
        (["actor.update={ep: 2, dp: 4}"], ["actor.update: ep=2 does not divide model.num_experts=null"]),
        (["actor.rollout={pp: 2, vpp: 2, dp: 2}"], ["actor.rollout.vpp=2: a rollout has no", "set vpp=1 with pp=2"]),
        (["actor.update={vpp: 2, dp: 4}"], ["actor.update.vpp=2: virtual chunks", "pp=1 has one stage; set vpp=1"]),
        (
            ["actor.update={pp: 2, vpp: 2, dp: 2}"],
            ["actor.update: pp·vpp=2·2=4 is above model.num_layers=2", "each virtual stage needs a layer"],
        ),
        (
            ["critic.layout={pp: 2, dp: 2}", "model.num_layers=3", "actor.update={dp: 4}"],
            ["critic: pp=2 does not divide model.num_layers=3", "layers: auto"],
        ),
        (
            ["actor.update={pp: 2, dp: 2, layers: [2, 1]}"],
            ["actor.update: layers=[2, 1]: expected at least one layer on each stage", "model.num_layers=2", "found 3"],
        ),
        (["actor.update={pp: 2, dp: 2, layers: [0, 2]}"], ["layers=[0, 2]: expected at least one layer"]),
        (["actor.update={pp: 2, dp: 2, layers: [2]}"], ["layers=[2]: expected pp·vpp = 2 numbers of layers"]),
        (["actor.update={ep: 4, dp: 4}", "model.num_experts=6"], ["ep=4 does not divide model.num_experts=6"]),
        (["actor.update={etp: 2, dp: 4}"], ["actor.update: etp=2 without experts"]),
        (
            ["actor.update={etp: 4, dp: 4}", "model.num_experts=4", "model.ffn_hidden_size=66"],
            ["actor.update: etp=4 does not divide model.ffn_hidden_size=66"],
        ),
        (["actor.update={tp: 2, dp: 2, ep: 4}", "model.num_experts=4"], ["ep=4 with etp=2: their product"]),
        (["critic.ranks=[2, 3, 4, 5]"], ["critic.ranks=[2, 3, 4, 5]", "[4, 5] not among ranks 0 to 3", "at least 6"]),
        (["critic.ranks=[0, 0, 1, 2]"], ["critic: ranks [0, 0, 1, 2]: expected distinct"]),
        (["critic.layout={pp: 4}"], ["critic: pp=4 is above model.num_layers=2", "lower pp"]),
        (["actor.update={tp: 4}", "model.num_attention_heads=2"], ["tp=4 does not divide model.num_attention_heads=2"]),
        (
            ["model.num_query_groups=1", "actor.update={tp: 4}", "model.ffn_hidden_size=66"],
            ["model.ffn_hidden_size=66"],
        ),
        (["reference.ranks=[0]", "kl.coef=0.1"], ["reference", "≠ 1 ranks"]),
    ],
)
def test_layout_that_does_not_fit_is_refused_before_any_model(recipe_file, overrides, says):
    complains(lambda: load_recipe(recipe_file, overrides), says, LayoutError)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["kl.coef=0.1", "kl.place=loss"], ["kl.estimator=k1", "0 on average", "k1+, k2 or k3"]),
        (["kl.coef=0.1", "kl.estimator=k3+"], ["kl.estimator=k3+", "in the reward has no gradient", "k3, or kl.place"]),
        (["kl.coef=0.1", "kl.horizon=5"], ["kl.horizon=5", "set kl.target"]),
        (["correction.level=sequence"], ["correction.level", "correction.kind is none here"]),
        (["correction.kind=truncate", "correction.low=0.1"], ["correction.low", "truncate here"]),
        *(
            ([f"algorithm={name}", "rollout.group_size=1", "critic=null"], ["rollout.group_size=1", name, "2 or more"])
            for name in ("grpo", "dr-grpo", "rloo", "opo", "gspo", "reinforce++-baseline")
        ),
    ],
)
def test_a_penalty_or_a_comparison_that_does_nothing_is_refused(recipe_file, overrides, says):
    complains(lambda: load_recipe(recipe_file, overrides), says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.recompute_layers=2"], ["actor.recompute_layers=2: counts the layers of actor.recompute=full", "none"]),
        (["critic.recompute=always"], ["critic.recompute", "expected one of none, selective, full"]),
        (["actor.gradient_checkpointing=true"], ["actor.recompute", "none, selective or full"]),
        (["critic.gradient_checkpointing=true"], ["TRL's gradient_checkpointing is critic.recompute here"]),
        (["actor.update.layers=even"], ["actor.update.layers: expected a list of integers or one of auto or null"]),
    ],
)
def test_what_cannot_be_recomputed_is_refused(recipe_file, overrides, says):
    complains(lambda: load_recipe(recipe_file, overrides), says, ConfigError)


def test_attention_that_is_not_ours_is_not_recomputed_alone(recipe_file, tmp_path):
    path = write_config(tmp_path / "policy", POLICY)
    given = [f"model={{path: {path}, implementation: transformers}}", *WHOLE]
    says = ["actor.recompute=selective", "layers of its own; set it to full or none"]
    complains(lambda: load_recipe(recipe_file, [*given, "actor.recompute=selective"]), says, ConfigError)
    assert load_recipe(recipe_file, [*given, "actor.recompute=full"]).actor.recompute == "full"


def test_experts_that_are_not_ours_have_no_settings(recipe_file, tmp_path):
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
    path = write_config(tmp_path / "policy", {**POLICY, **mixtral}, num_local_experts=4)
    given = [f"model={{path: {path}, implementation: transformers}}", *WHOLE, "actor.moe.aux_loss=0.1"]
    says = ["actor.moe.aux_loss=0.1", "runs in transformers", "remove the key"]
    complains(lambda: load_recipe(recipe_file, given), says, ConfigError)


def test_quantized_weights_are_decoded_but_not_in_transformers(recipe_file, tmp_path):
    path = write_config(tmp_path / "policy", POLICY, quantization_config=FP8)
    given = [f"model={{path: {path}, max_context: 64}}"]
    assert load_recipe(recipe_file, given).model.dtype == "bf16"
    given = [f"model={{path: {path}, max_context: 64, implementation: transformers}}", *WHOLE]
    says = [
        "model.implementation=transformers",
        str(path),
        "quantized weights",
        "hybridflow convert SOURCE OUT --to hf",
    ]
    complains(lambda: load_recipe(recipe_file, given), says, ConfigError)


def test_stages_are_balanced_by_what_they_compute(recipe_file):
    """An output layer of 40 entries costs what a layer costs, about: the last stage has one layer less."""
    sizes = ["model.num_layers=7", "model.vocab_size=VOCAB", "actor.update={pp: 4, layers: auto}"]
    sizes += ["critic.layout={pp: 2, vpp: 2, dp: 2, layers: auto}", "actor.rollout={dp: 4}"]

    def recipe(vocab, *more):
        return load_recipe(recipe_file, [*(each.replace("VOCAB", str(vocab)) for each in sizes), *more])

    small, large = recipe(300), recipe(4000)
    assert small.actor.update.layers == (2, 2, 2, 1)
    assert sum(large.actor.update.layers) == 7 and large.actor.update.layers[-1] == 1
    # A value head costs next to nothing.
    assert small.critic.layout == large.critic.layout and sorted(large.critic.layout.layers) == [1, 2, 2, 2]
    assert role_meshes(large)["actor.update"].layout == large.actor.update
    assert to_dict(large)["actor"]["update"]["layers"] == list(large.actor.update.layers)
    assert recipe(300, "actor.update={dp: 4, layers: auto}").actor.update.layers is None


@pytest.mark.parametrize(
    "first",
    [
        ["model.num_experts=4", "model.num_dense_layers=2", "model.dense_ffn_hidden_size=32768"],
        [
            *("model.linear_layers=[0, 1]", "model.linear_key_heads=2", "model.linear_value_heads=256"),
            *("model.linear_key_head_dim=6", "model.linear_value_head_dim=256", "model.linear_conv_kernel=4"),
        ],
    ],
    ids=["dense layers of a mixture", "linear attention"],
)
def test_a_layer_counts_as_what_it_computes(recipe_file, first):
    sizes = ["model.num_layers=6", "model.vocab_size=300", "actor.update={pp: 2, dp: 2, layers: auto}"]
    recipe = load_recipe(recipe_file, [*sizes, "actor.rollout={dp: 4}", *first])
    # The first two compute far more than all others together.
    assert recipe.actor.update.layers == (1, 5)


def test_a_model_with_chunks_generates_in_one_piece(recipe_file):
    more = ["model.num_layers=4", "actor.update={pp: 2, vpp: 2, dp: 2}", "actor.rollout=null", "critic.layout={dp: 4}"]
    meshes = role_meshes(load_recipe(recipe_file, more))
    assert meshes["actor.update"].layout == ParallelLayout(pp=2, vpp=2, dp=2)
    assert meshes["actor.rollout"].layout == ParallelLayout(pp=2, dp=2)
    assert not shares_storage(meshes["actor.update"], meshes["actor.rollout"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping with keys name"),
        ("name: [", "not valid YAML"),
        (
            "model: {num_layers: 2\ncluster:\n  ranks: 4\n",
            "not valid YAML: line 2, column 8, 'cluster:': while parsing a flow mapping from line 1 on, "
            "expected ',' or '}', but got ':'",
        ),
        ("name: a\nname: b", "key 'name' twice"),
        (re.sub("algorithm: .*", "", SMALLEST), "algorithm: missing; a recipe needs algorithm, model and data"),
        ("algorithm: grpo", "model, data: missing; a recipe needs algorithm, model and data, as in `algorithm=grpo"),
        (re.sub("model: .*", "model: {dtype: bf16}", SMALLEST), "model.path: missing; name the directory of a model"),
        (SMALLEST + "rewards: {}", "rewards: unknown key; did you mean reward?"),
    ],
)
def test_bad_file_is_named(tmp_path, text, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: .*{re.escape(says)}"):
        load_recipe(path)


def test_file_that_is_not_text(tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"bad\.yaml: cannot be read as UTF-8"):
        load_recipe(tmp_path / "bad.yaml")


def test_meshes_of_the_roles(recipe_file):
    recipe = load_recipe(recipe_file, ["critic={ranks: [2, 3], layout: {pp: 2}, optimizer: {lr: 1}}", "kl.coef=1"])
    meshes = role_meshes(recipe)
    assert {name: (str(mesh.layout), mesh.ranks) for name, mesh in meshes.items()} == {
        "actor.update": ("tp2.pp1.dp2", (0, 1, 2, 3)),
        "actor.rollout": ("tp1.pp1.dp4", (0, 1, 2, 3)),
        "critic": ("tp1.pp2.dp1", (2, 3)),
        "reference": ("tp2.pp1.dp2", (0, 1, 2, 3)),
        "reward": ("tp1.pp1.dp4", (0, 1, 2, 3)),
    }
    assert {mesh.ranks_per_node for mesh in meshes.values()} == {4}


def test_rollout_takes_the_ranks_in_the_order_of_largest_overlap(recipe_file):
    """TP4 holds quarters, TP2 needs halves: rank 1 joins rank 0, and its peer is rank 2."""
    layouts = ["actor.update={tp: 4}", "actor.rollout={tp: 2, dp: 2}"]
    meshes = role_meshes(load_recipe(recipe_file, layouts))
    assert (meshes["actor.update"].ranks, meshes["actor.rollout"].ranks) == ((0, 1, 2, 3), (0, 2, 1, 3))
    two_nodes = role_meshes(load_recipe(recipe_file, [*layouts, "cluster.ranks_per_node=2"]))
    assert two_nodes["actor.rollout"].ranks == (0, 1, 2, 3)


def test_unknown_recipe_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"recipe nonsense: no such file; .* shipped recipe: .*quick"):
        find_recipe("nonsense")
    with pytest.raises(ConfigError, match=r"recipe /tmp: is a directory; .*give a YAML file or a shipped recipe"):
        find_recipe("/tmp")


def test_an_unknown_recipe_or_algorithm_gets_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    for name, near in [("grpp", "grpo"), ("grpp.yaml", "grpo"), ("GRPO", "grpo"), ("mien.yaml", "mine.yaml")]:
        with pytest.raises(ConfigError, match=rf"recipe {name}: no such file; did you mean {near}\?"):
            find_recipe(name)
    with pytest.raises(ConfigError, match=r"algorithm: did you mean grpo\? expected one of .*, found 'grop'"):
        load_recipe("grpo", ["algorithm=grop"])


def test_the_recipe_of_distillation_is_valid_with_a_teacher(tmp_path):
    with pytest.raises(ConfigError, match=r"teacher\.model\.path: missing; .* runs/NAME\)"):
        load_recipe("distill", ["teacher.model.path=null"])
    with pytest.raises(ConfigError, match=r"teacher\.model\.path='runs/sft/.*found nothing there"):
        load_recipe("distill")
    write_config(tmp_path, POLICY, vocab_size=64, num_hidden_layers=3, max_position_embeddings=16)
    recipe = load_recipe("distill", [f"teacher.model.path={tmp_path}"])
    assert recipe.model_of("teacher").num_layers == 3 and recipe.model_of("actor") == recipe.model
    write_config(tmp_path, SCORER, vocab_size=64, max_position_embeddings=16)
    with pytest.raises(ConfigError, match=r"teacher\.model\.path=.*is a scorer, which gives no text"):
        load_recipe("distill", [f"teacher.model.path={tmp_path}"])


@given(
    st.builds(
        LossConfig,
        dual_clip=st.none() | st.floats(1.5, 1e300),
        clip_high=st.floats(0, 1e300),
        entropy_coef=st.floats(0, 1e-300),
        epochs=st.integers(1, LARGEST_INTEGER),
    ),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.none() | st.permutations(range(4)).map(tuple),
    st.integers(0, 2**53),
)
def test_recipe_survives_a_round_trip_through_yaml(loss, text, ranks, seed):
    recipe = recipe_from_dict(yaml.safe_load(SMALLEST))
    recipe = replace(
        recipe,
        loss=loss,
        seed=seed,
        run_dir=text,
        actor=replace(recipe.actor, ranks=ranks),
        reward=replace(recipe.reward, function=text),
    )
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(to_dict(recipe)))) == recipe


def test_every_field_of_a_recipe_can_be_overridden(recipe_file):
    recipe = load_recipe(recipe_file)
    shown = to_dict(recipe)
    overrides = [f"{item.name}={yaml.safe_dump(shown[item.name], default_flow_style=True)}" for item in keys_of(Recipe)]
    assert load_recipe(recipe_file, overrides) == recipe


@pytest.mark.parametrize(
    "override, says",
    [
        ("profile.steps=[0]", "profile.steps[0]: expected an integer of at least 1, found 0"),
        ("profile.ranks=[-1]", "profile.ranks[0]: expected an integer of at least 0, found -1"),
        ("profile.ranks=[0, 4, 7]", "profile.ranks=[0, 4, 7]: [4, 7] not among ranks 0 to 3"),
    ],
)
def test_what_cannot_be_profiled_is_refused(recipe_file, override, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_recipe(recipe_file, [override])


def test_steps_and_ranks_are_chosen_for_profiles(recipe_file):
    recipe = load_recipe(recipe_file, ["profile.steps=[3, 10]", "profile.ranks=[0, 3]"])
    assert (recipe.profile.steps, recipe.profile.ranks) == ((3, 10), (0, 3))
    assert load_recipe(recipe_file).profile.steps == ()


OFFLINE = {
    **{key: value for key, value in yaml.safe_load(SMALLEST).items() if key in ("name", "model", "data", "trainer")},
    **{"algorithm": "dpo", "actor": {"update": {}, "optimizer": {"lr": 1e-4}}},
}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.global_batch_size=15"], "trainer.global_batch_size=15: counts responses, of which a pair has two"),
        (
            ["algorithm=ipo", "trainer.global_batch_size=18", "trainer.mini_batch_size=9"],
            "trainer.mini_batch_size=9: counts responses, of which a pair has two that belong together; set it to an "
            "even number, 10 say",
        ),
        (["algorithm=kto", "trainer.mini_batch_size=1"], "trainer.mini_batch_size=1: algorithm=kto measures the KL"),
        (["rollout.group_size=2"], "rollout.group_size=2: algorithm=dpo samples nothing; remove the key"),
        (["rollout.max_new_tokens=8"], "rollout.max_new_tokens=8: algorithm=dpo samples nothing"),
        (["actor.rollout={}"], "algorithm=dpo samples nothing"),
        (["actor.offload=true"], "actor.offload=True: algorithm=dpo samples nothing"),
        (["reward.function=exact_match"], "reward: algorithm=dpo would ignore this section"),
        (["loss.epochs=2"], "loss: algorithm=dpo would ignore this section"),
        (["preference.desirable_weight=2"], "preference.desirable_weight: algorithm=dpo would ignore it"),
        (["algorithm=ipo", "preference.label_smoothing=0.1"], "ipo would ignore it; remove it, or choose dpo"),
        (["algorithm=kto", "preference.reference_free=true"], "algorithm=kto would ignore it"),
        (["algorithm=reward-model", "preference.beta=1"], "algorithm=reward-model would ignore"),
        (
            ["algorithm=reward-model", "warm_start={steps: 1, batch_size: 1, lr: 1}"],
            "warm_start: algorithm=reward-model trains a scorer, which writes no text",
        ),
        (["algorithm=sft", "rollout.max_new_tokens=4", "rollout.group_size=2"], "a row has one solution to imitate"),
        (
            ["algorithm=sft", "rollout.max_new_tokens=4", "data.chosen_field=good"],
            "data.chosen_field: algorithm=sft reads no preferences; remove the key",
        ),
        (
            ["data.arithmetic={num_train: 1, num_held_out: 1, operation: multiply}"],
            "data.arithmetic.operation=multiply: the rejected response is a wrong carry",
        ),
    ],
)
def test_what_learns_from_given_responses_has_keys_of_its_own(overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        recipe_from_dict(OFFLINE, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "has_reference", "samples"),
    [
        ([], True, 2),
        (["preference.reference_free=true"], False, 2),
        (["algorithm=kto", "preference.desirable_weight=2", "trainer.global_batch_size=3"], True, 1),
        (["algorithm=reward-model"], False, 2),
        (["algorithm=sft", "rollout.max_new_tokens=4", "warm_start={steps: 1, batch_size: 1, lr: 1}"], False, 1),
    ],
)
def test_offline_algorithms_have_a_reference_where_they_measure_against_one(overrides, has_reference, samples):
    recipe = recipe_from_dict(OFFLINE, overrides=overrides)
    assert (recipe.has_reference, recipe.samples_per_prompt) == (has_reference, samples)
    assert ("reference" in role_meshes(recipe)) is has_reference


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.offload=always"], ["actor.offload=always", "actor.update is tp2.pp1.dp2", "set fsdp to 2 or more"]),
        (["critic.offload=always"], ["critic.offload=always: needs fsdp", "critic.layout is", "or offload to true"]),
        (["actor.offload=sometimes"], ["actor.offload: expected one of true, false, always, found 'sometimes'"]),
        (["actor.offload=always", "actor.update={fsdp: 4}", "actor.reshard=shared"], ["set reshard to auto, torch"]),
    ],
)
def test_what_is_always_in_host_memory_is_sharded(recipe_file, overrides, says):
    complains(lambda: load_recipe(recipe_file, overrides), says, (ConfigError, LayoutError))


@pytest.mark.parametrize(
    ("override", "layout"),
    [
        ("actor.update={hsdp: 4}", ParallelLayout(dp=4, fsdp_sharding="HYBRID_SHARD")),
        ("actor.update={dp: 4, zero: 3}", ParallelLayout(fsdp=4)),
        ("actor.update={dp: 4, zero: 2}", ParallelLayout(fsdp=4, fsdp_sharding="SHARD_GRAD_OP")),
        ("actor.update={dp: 4, zero: 1}", ParallelLayout(dp=4)),
    ],
)
def test_other_words_for_a_sharding_are_read_and_ours_are_kept(recipe_file, override, layout):
    recipe = load_recipe(recipe_file, [override])
    assert recipe.actor.update == layout
    assert not {"hsdp", "zero"} & to_dict(recipe)["actor"]["update"].keys()


def test_other_words_that_contradict_each_other_are_named_with_their_key(recipe_file):
    says = ["override 'actor.update.hsdp=4': actor.update: layout hsdp=4 with dp=2: both give the ranks; remove dp"]
    complains(lambda: load_recipe(recipe_file, ["actor.update.hsdp=4"]), says, LayoutError)
    says = ["override 'actor.update={zero: 7}': actor.update: layout zero=7: expected 1, 2 or 3"]
    complains(lambda: load_recipe(recipe_file, ["actor.update={zero: 7}"]), says, LayoutError)


SFT = """
name: sft
algorithm: sft
cluster: {ranks: 1}
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, max_context: 64}
data: {train: train.jsonl}
actor: {update: {}, optimizer: {lr: 1e-4}}
trainer: {steps: 10, global_batch_size: 16}
"""


def test_sft_needs_neither_a_length_of_responses_nor_held_out_data(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(SFT)
    assert load_recipe(path).rollout.max_new_tokens == 1, "nothing is sampled"
    assert not plan_job(load_recipe(path)).validation
    assert load_recipe(path, ["rollout.stop=['</call>']"]).rollout.stop == ("</call>",), "it ends what is learned"
    of_loss = load_recipe(path, ["data.held_out=h.jsonl"])
    assert of_loss.rollout.max_new_tokens == 1 and not of_loss.generates, "a loss needs no response"
    assert called(plan_job(of_loss).validation) == ["offline.held_out_solutions", "actor.validate_solutions"]
    for key in ("rollout.engine.kind=vllm", "rollout.temperature=0.5", "actor.rollout={dp: 1}"):
        shown = "rollout.engine:" if "kind" in key else key.partition("=")[0]
        says = [f"{shown}", "algorithm=sft samples nothing; remove the key, or name data.held_out and what scores"]
        complains(lambda key=key: load_recipe(path, ["data.held_out=h.jsonl", key]), says)
    assert load_recipe(path, ["rollout.max_new_tokens=7"]).rollout.max_new_tokens == 7, "for a reward that may come"
    scored = ["data.held_out=h.jsonl", "reward.function=maths"]
    assert load_recipe(path, [*scored, "rollout.engine.kind=vllm"]).generates
    recipe = load_recipe(path, scored)
    assert recipe.rollout.max_new_tokens == 32 and recipe.generates
    assert called(plan_job(recipe).validation) == [
        *("actor.sample_validation", "reward.score_validation"),
        *("offline.held_out_solutions", "actor.validate_solutions"),
    ]
    assert load_recipe(path, [*scored, "model.max_context=4096"]).rollout.max_new_tokens == 256
    assert load_recipe(path, [*scored, "rollout.max_new_tokens=7"]).rollout.max_new_tokens == 7


def called(program):
    """The names of a program's calls, in order."""
    found = []
    for each in program:
        found += [each.name] if isinstance(each, Call) else called(getattr(each, "then", ()))
    return found


@pytest.mark.parametrize("key", ["validate_every=10", "keep_best=true", "patience=2", "num_validation=8"])
def test_validation_without_held_out_data_is_refused(tmp_path, key):
    path = tmp_path / "sft.yaml"
    path.write_text(SFT)
    with pytest.raises(ConfigError, match=rf"trainer\.{key}: data\.held_out is missing.*name a file of held-out rows"):
        load_recipe(path, [f"trainer.{key}"])


def test_variables_of_a_chat_template_keep_their_kinds(recipe_file):
    given = "data.chat_template_kwargs={enable_thinking: false, budget: 3, date: '2026-01-02', of: {a: [x, null]}}"
    expected = {"enable_thinking": False, "budget": 3, "date": "2026-01-02", "of": {"a": ["x", None]}}
    recipe = load_recipe(recipe_file, [given, "data.chat_template_kwargs.budget=4"])
    assert recipe.data.chat_template_kwargs == expected | {"budget": 4}
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(to_dict(recipe)))).data == recipe.data
    for word, says in (
        ("date=2026-01-02", "chat_template_kwargs.date: expected a value that JSON can have, found datetime"),
        ("budget=.inf", "chat_template_kwargs.budget: expected a value that JSON can have, found inf"),
        ("tools=[]", "data.chat_template_kwargs: tools is set by hybridflow; remove it"),
    ):
        complains(
            lambda word=word: load_recipe(recipe_file, [f"data.chat_template_kwargs.{word}"]), [says], ConfigError
        )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.moe.aux_loss=0.1"], ["actor.moe.aux_loss=0.1: the actor's model has no experts", "remove the key"]),
        (["actor.moe.bias_update_rate=0.1", "model.num_experts=4"], ["the model's routers have no bias"]),
        (["model.router_bias=true", "model.num_experts=4"], ["router_bias=true with model.router_score='softmax'"]),
        (
            ["model.post_norms=true", "model.linear_bias=true"],
            ["model.post_norms=true with model.linear_bias=true is not computed", "set one of them to false"],
        ),
        (["model.shared_ffn_hidden_size=8"], ["shared_ffn_hidden_size=8 without model.num_experts"]),
        (
            ["model.shared_expert_gate=true", "model.num_experts=4"],
            ["model.shared_expert_gate=true without model.shared_ffn_hidden_size; give the width"],
        ),
        (
            ["actor.moe.router_replay=replay", "model.num_experts=4", "rollout.environment={name: calculator}"],
            ["actor.moe.router_replay=replay: with rollout.environment nobody tells"],
        ),
        (
            ["actor.moe.router_replay=measure", "model.num_experts=4", "rollout.replay=runs/other"],
            ["actor.moe.router_replay=measure: with rollout.replay nobody tells"],
        ),
        (["actor.moe_aux_loss_coeff=0.1"], ["Megatron's moe_aux_loss_coeff is actor.moe.aux_loss here"]),
    ],
)
def test_settings_of_experts_that_contradict_are_refused(recipe_file, overrides, says):
    complains(lambda: load_recipe(recipe_file, overrides), says, ConfigError)
