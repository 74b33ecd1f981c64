"""Which keys a resumed run may change: each leaf key is changed alone, and is accepted or refused as its field says."""

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import yaml

from hybridflow.config.recipe import Recipe
from hybridflow.errors import CheckpointError, HybridflowError
from hybridflow.families.model import ModelConfig
from hybridflow.families.model_info import ModelInfo
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.recipe.resume import check_resume
from hybridflow.sections import Bounds, put_over, read_section, to_dict
from tests.support.recipes import POLICY, SCORER, SEES, SMALLEST, write_config

NUM_LEAF_KEYS = 862


class Key(NamedTuple):
    """A key of a recipe, as its dataclass has it."""

    name: str
    hint: Any
    may_change: bool
    is_section: bool


def keys(kind: Any, prefix: str = "", *, is_free: bool = False, free_names: tuple[str, ...] = ()) -> Iterator[Key]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        if item.metadata.get("is_key") is False:
            continue
        hint = hints[item.name]
        options = (each for each in (hint, *typing.get_args(hint)) if isinstance(each, type))
        section = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if typing.get_origin(hint) is tuple:
            section = None  # a list of sections is one key
        may_change = is_free or item.name in free_names or item.metadata.get("may_change") is True
        yield Key(f"{prefix}{item.name}", hint, may_change, section is not None)
        if section is not None:
            below = item.metadata.get("may_change_below", ())
            yield from keys(section, f"{prefix}{item.name}.", is_free=may_change, free_names=below)


KEYS = list(keys(Recipe))
LEAVES = [key for key in KEYS if not key.is_section]
NULLABLE_SECTIONS = [key for key in KEYS if key.is_section and type(None) in typing.get_args(key.hint)]

COMMON = yaml.safe_load(SMALLEST) | yaml.safe_load("""
cluster: {ranks: 2}
tokenizer: {path: tokenizer.model}
actor: {ranks: [0], update: {}, optimizer: {lr: 1e-3, schedule: linear}}
""")
del COMMON["algorithm"], COMMON["critic"]
CRITIC = "{ranks: [0], layout: {}, optimizer: {lr: 1e-3, schedule: linear}, model: {}}"
ALGORITHMS = {
    r"(critic|advantage)\b": ["algorithm=ppo", f"critic={CRITIC}"],
    r"(cost|cost_critic|lagrange)\b": [
        *("algorithm=safe-rlhf", f"critic={CRITIC}", f"cost_critic={CRITIC}", "cost.function=length"),
    ],
    r"teacher\b": ["algorithm=distill", "teacher.model={}"],
    r"dynamic_sampling\b": ["algorithm=dapo", "rollout.group_size=8"],
    r"preference\.(un)?desirable_weight|data\.(completion|wanted)_field": [
        *("algorithm=kto", "rollout.max_new_tokens=1"),
    ],
    r"preference|data\.(chosen|rejected|margin)_field": ["algorithm=dpo", "rollout.max_new_tokens=1"],
    r"": ["algorithm=grpo"],
}
"""Beginning of a key -> what reads it. The first that matches counts."""

GIVEN = {
    r"model\.(path|implementation|trust_remote_code)": ["model={path: DIR/policy-1}"],
    r"data\.image": ["model={path: DIR/sees}", "data.images_field=images"],
    r"actor\.fp8": ["model.dtype=bf16", "model.hidden_size=128", "model.ffn_hidden_size=128"],
    r"(critic|cost_critic|teacher)\.model\.(path|implementation|trust_remote_code)": [r"\1.model={path: DIR/policy-1}"],
    r"(reward|cost)\.model\.(path|implementation|trust_remote_code)": [r"\1={model: {path: DIR/scorer-1}}"],
    r"(reward|cost)\.(model(?!\.(path|implementation|trust_remote_code))|layout|batch_size|offload)": [
        r"\1={model: {}}"
    ],
    r"(.*\bmodel)\.trust_remote_code": [r"\1.implementation=transformers"],
    r"(.*\bmodel)\.(window_layers|keys_as_values)": [r"\1.window=4"],
    r"(.*\bmodel)\.global_(head_dim|query_groups)": [
        *(r"\1.window=4", r"\1.local_rotary_base=9.0", r"\1.attention_scale=1.0"),
    ],
    r"correction\.(level|low|high)": ["correction.kind=icepop"],
    r"kl\.horizon": ["kl.coef=0.1", "kl.target=0.1"],
    r"(.*\bmodel)\.(router_score|router_bias|shared_ffn_hidden_size)": [r"\1.num_experts=4"],
    r"(.*\bmodel)\.expert_norms": [r"\1.num_experts=4", r"\1.shared_ffn_hidden_size=8", r"\1.post_norms=true"],
    r"(.*\bmodel)\.shared_expert_gate": [r"\1.num_experts=4", r"\1.shared_ffn_hidden_size=8"],
    r"(.*\bmodel)\.router_bias": [r"\1.router_score=sigmoid"],
    r"(.*\bmodel)\.(kv_lora_rank|q_lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim)": [
        *(r"\1.kv_lora_rank=8", r"\1.qk_nope_head_dim=4", r"\1.qk_rope_head_dim=4", r"\1.v_head_dim=8"),
    ],
    r"(.*\bmodel)\.linear_(layers|key_heads|value_heads|key_head_dim|value_head_dim|conv_kernel)": [
        *(r"\1.num_layers=3", r"\1.linear_layers=[0]", r"\1.linear_key_heads=1", r"\1.linear_value_heads=2"),
        *(r"\1.linear_key_head_dim=4", r"\1.linear_value_head_dim=4", r"\1.linear_conv_kernel=4"),
    ],
    r"(.*\bmodel)\.(num_dense_layers|dense_ffn_hidden_size|router_groups|router_groups_per_token|routed_scaling)": [
        *(r"\1.num_experts=8", r"\1.router_score=sigmoid", r"\1.router_groups=4", r"\1.router_groups_per_token=1"),
        *(r"\1.num_dense_layers=1", r"\1.dense_ffn_hidden_size=8"),
    ],
    r"(.*\bmodel)\.rotary_scaling": [r"\1.rotary_scaling={kind: linear, original_context: 8}"],
    r"(.*\bmodel)\.rotary_scaling\.(short|long)_factor": [
        *(r"\1.rotary_scaling.kind=longrope", r"\1.rotary_scaling.short_factor=[1, 1, 1, 1]"),
        r"\1.rotary_scaling.long_factor=[1, 1, 1, 1]",
    ],
    r"(actor\.rollout|(\w+)\.layout)\b": [r"\1={}"],
    r"(reward|cost)\.sandbox": [r"\1={function: code, sandbox: {}}"],
    r"(reward|cost)\.service": [r"\1={service: {urls: ['http://a:1']}}"],
    r"(reward|cost)\.judge": [r"\1={judge: {urls: ['http://a:1'], template: '{response}?'}}"],
    r"(reward|cost)\.pattern": [r"\1={function: regex, pattern: (a)}"],
    r"(reward|cost)\.(timeout_s|retries|on_failure|failure_score|cache|max_in_flight)": [r"\1.function=maths"],
    r"(reward|cost)\.failure_score": [r"\1.on_failure=score"],
    r"data\.mixture": ["data.train=null", "data.mixture=[{path: a.jsonl}]"],
    r"data\.spool": ["data.train=null", "data.spool={path: spool}"],
    r"data\.kafka": ["data.train=null", "data.kafka={servers: ['a:1'], topic: a}"],
    r"data\.arithmetic": ["data.arithmetic={num_train: 4, num_held_out: 2}"],
    r"warm_start": ["warm_start={steps: 1, batch_size: 2, lr: 1e-3}"],
    r"actor\.lora": ["actor.lora={rank: 4}"],
    r"(\w+)\.recompute_layers": [r"\1.recompute=full"],
    r"actor\.moe": ["model.num_experts=4"],
    r"actor\.moe\.bias_update_rate": ["model.router_score=sigmoid", "model.router_bias=true"],
    r"rollout\.environment": ["rollout.environment={name: calculator}"],
    r"rollout\.engine\.kind": ["cluster.ranks=1"],
    r"rollout\.engine\.(urls|model|auth_env|log_probs|off_policy)": [
        "rollout.engine={kind: openai, urls: ['http://a:1'], off_policy: true}",
    ],
    r"rollout\.engine\.off_policy": ["trainer.steps=0"],
    r"loss\.norm_tokens": ["loss.aggregation=seq-mean-token-sum-norm"],
    r"shaping\.overlong_factor": ["shaping.overlong_buffer=4"],
    r"correction\.reject_": ["correction.reject=k1"],
    r"trainer\.pass_k": ["trainer.validation_samples=4"],
    r"trainer\.(keep_best|patience)": ["trainer.validate_every=1"],
    r"trainer\.max_staleness": ["actor.rollout_ranks=[1]"],
    r"metrics\.prometheus": ["metrics.prometheus={pushgateway_url: 'http://a:1'}"],
    r"metrics\.wandb": ["metrics.wandb={project: a}"],
}
"""Beginning of a key -> other keys that it needs, before and after the change. All that match count."""

ALSO = {
    r"actor\.rollout\.(tp|pp|dp)": ["actor.ranks=[0, 1]", "actor.update.dp=2"],
    r"(actor)\.update\.(tp|pp|dp|fsdp)$": [r"\1.ranks=[0, 1]"],
    r"(\w+)\.layout\.(tp|pp|dp|fsdp)$": [r"\1.ranks=[0, 1]"],
    r"(.*(?:update|rollout|layout))\.(ep|fsdp_sharding)": [r"\1.dp=2"],
}
"""Beginning of a key -> places that change with it."""

VALUES: dict[str, Any] = {
    r"algorithm": "rloo",
    r"actor\.lora\.targets": ["q_proj"],
    r"(reward|cost)\.model\.path": "DIR/scorer-2",
    r"(\w+\.)?model\.path": "DIR/policy-2",
    r".*\.urls": ["http://b:1"],
    r"(reward|cost)\.judge\.template": "{response}!",
    r"(reward|cost)\.(judge\.)?pattern": "(b)",
    r"(reward|cost)\.sandbox\.readable": ["/data"],
    r".*\.rotary_scaling\.(short|long)_factor": [2, 2, 2, 2],
    r".*\.layers": [2],
    r".*\.fsdp_sharding": "SHARD_GRAD_OP",
    r".*\.min_lr": 5e-4,
    r"data\.mixture": [{"path": "b.jsonl"}],
    r"data\.kafka\.options": {"client.id": "b"},
    r"data\.kafka\.options_env": {"sasl.password": "B"},
    r"metrics\.prometheus\.pushgateway_url": "http://b:1",
    r"metrics\.prometheus\.textfile": "b.prom",
    r"metrics\.callbacks": ["module:function"],
    r"fallbacks": [{"ranks": 1}],
}
"""Key -> another value, where not any of its type will do."""

UNTRAINABLE = re.compile(
    r".*(update|rollout|layout)\.(cp|ep|vpp|etp|layers|fsdp_sharding)|actor\.rollout\.fsdp"
    r"|.*\bmodel\.(num_dense_layers|router_groups_per_token)"
)
"""Axes of which only one value can be trained with so far, and what no single key can change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Directories of models, two alike of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for number in "12":
        write_config(folder / f"policy-{number}", POLICY)
        write_config(folder / f"scorer-{number}", SCORER)
    write_config(folder / "sees", SEES)
    processor = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    (folder / "sees" / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def matching(table: dict[str, Any], key: str) -> Iterator[tuple[re.Match[str], Any]]:
    found = ((re.match(pattern, key), value) for pattern, value in table.items())
    return ((match, value) for match, value in found if match is not None)


def filled(table: dict[str, list[str]], key: str) -> list[str]:
    return [match.expand(each) for match, overrides in matching(table, key) for each in overrides]


@functools.cache
def load(overrides: tuple[str, ...], folder: Any) -> Recipe:
    """A valid recipe. Of models that only a directory may hold, those without a path are in memory."""
    values, _ = put_over(COMMON, [each.replace("DIR", str(folder)) for each in overrides])
    in_memory = {}
    for role in ("reward", "cost", "teacher"):
        model = (values.get(role) or {}).get("model")
        if model is not None and "path" not in model:
            del values[role]["model"]
            shape = read_section(ModelConfig, {**values["model"], **model}, source=role)
            in_memory[f"{role}.model"] = ModelInfo(shape, role != "teacher", None, None)
    return recipe_from_dict(values, in_memory=in_memory)


def type_checked(recipe: Recipe, overrides: list[str]) -> Recipe:
    """A recipe of which only the types are checked, so that any one key can be changed alone."""
    return read_section(Recipe, put_over(to_dict(recipe), overrides)[0], source="recipe")


def other_values(hint: Any, old: Any) -> Iterator[Any]:
    """Values of a type other than a given one."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    kind, bounds, *_ = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, Bounds(low=0))
    if typing.get_origin(kind) is Literal:
        found = list(typing.get_args(kind))
    elif typing.get_origin(kind) is tuple:
        found = [[1], *([item] for item in other_values(typing.get_args(kind)[0], None))]
    elif kind is bool:
        found = [not old]
    elif kind is str:
        found = ["other"]
    elif typing.get_origin(kind) is dict:
        found = [{"other": "1"}]
    else:
        numbers = [*([] if old is None else [old / 2, old * 2, old + 1]), 1, 2, 4, 0.25]
        found = [kind(number) for number in numbers if number in bounds and kind(number) == number]
    yield from (value for value in found if value != old)


def value_at(recipe: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        recipe = recipe[name]
    return recipe


def change(key: Key, folder: Any) -> tuple[Recipe, Recipe]:
    """A valid recipe, and a valid one in which this key is another."""
    _, base = next(matching(ALGORITHMS, key.name))
    given = (*base, *filled(GIVEN, key.name))
    recipe, also = load(given, folder), filled(ALSO, key.name)
    special = next((value for match, value in matching(VALUES, key.name) if match.end() == len(key.name)), None)
    values = other_values(key.hint, value_at(to_dict(recipe), key.name)) if special is None else (special,)
    refusals = []
    for value in values:
        new = [*also, f"{key.name}={json.dumps(value)}"]
        try:
            is_untrainable = UNTRAINABLE.fullmatch(key.name) is not None
            return recipe, type_checked(recipe, new) if is_untrainable else load((*given, *new), folder)
        except HybridflowError as error:
            refusals.append(str(error))
    raise AssertionError(f"{key.name}: no other value was accepted; add one to VALUES, GIVEN or ALSO. {refusals}")


STEP = Path("runs/x/checkpoints/step_000003")


def hold(key: Key, saved: Recipe, now: Recipe) -> None:
    """Check that a resume with the second recipe is accepted or refused as the key's field says."""
    kept = json.loads(json.dumps(to_dict(saved)))
    check_resume(saved, kept, STEP)
    before, after = (value_at(to_dict(recipe), key.name) for recipe in (saved, now))
    assert before != after
    if key.may_change:
        check_resume(now, kept, STEP)
        return
    with pytest.raises(CheckpointError) as caught:
        check_resume(now, kept, STEP)
    is_section = typing.get_origin(key.hint) is not dict
    values = ["a section" if isinstance(value, dict) and is_section else value for value in (before, after)]
    shown = [value if isinstance(value, str) else json.dumps(value) for value in values]
    assert not any("None" in text or "True" in text for text in shown)
    assert f"written with {key.name}={shown[0]}, the recipe now has {shown[1]}; resume with" in str(caught.value)
    assert "another run_dir, and model=runs/x/checkpoints/step_000003/actor to begin there" in str(caught.value)


@pytest.mark.parametrize("key", LEAVES, ids=lambda key: key.name)
def test_a_resume_accepts_another_value_exactly_where_the_field_says_so(key, folder):
    hold(key, *change(key, folder))


@pytest.mark.parametrize("key", NULLABLE_SECTIONS, ids=lambda key: key.name)
def test_a_section_that_may_be_null_is_such_a_key_too(key, folder):
    _, base = next(matching(ALGORITHMS, key.name))
    recipe = load((*base, *filled(GIVEN, key.name)), folder)
    hold(key, recipe, type_checked(recipe, [f"{key.name}=null"]))


@pytest.mark.parametrize(
    ("may_change", "names"),
    [
        (False, "correction.kind correction.low correction.high correction.reject critic.value_clip"),
        (False, "critic.warmup_steps trainer.max_staleness actor.reshard_every warm_start.steps seed model.dtype"),
        (False, "reward.model.path teacher.model.path cost.sandbox.wall_s reward.judge.model rollout.engine.kind"),
        (False, "rollout.temperature data.chat_template data.kafka.topic trainer.mini_batch_size actor.lora.rank"),
        (True, "model.path critic.model.path actor.optimizer.lr critic.optimizer.min_lr actor.optimizer.distributed"),
        (True, "cluster.ranks actor.update.tp critic.layout.pp reference.offload trainer.steps trainer.save_every"),
        (True, "trainer.micro_batch_tokens rollout.max_concurrent rollout.engine.deadline_s data.on_bad_row run_dir"),
        (True, "dynamic_sampling.max_tries dynamic_sampling.when_short reward.on_failure cost.failure_score"),
        (True, "metrics.wandb.project profile.steps data.kafka.servers reward.service.urls cluster.memory_budget_gb"),
    ],
)
def test_what_is_learned_must_match_and_where_it_is_computed_may_change(may_change, names):
    found = {key.name: key.may_change for key in LEAVES}
    assert {name: found[name] for name in names.split()} == dict.fromkeys(names.split(), may_change)


def test_the_number_of_leaf_keys_is_frozen():
    assert len(LEAVES) == NUM_LEAF_KEYS, (
        "The number of recipe keys has changed. Each key is one more that every user reads past: first ask whether a "
        "constant or an existing key will do. If not, decide whether a resume may change it (sections.MAY_CHANGE), run "
        f"tools/write_docs.py, and set NUM_LEAF_KEYS to {len(LEAVES)}."
    )


@pytest.mark.parametrize(
    "changes",
    [
        ("data.train=/elsewhere/train.jsonl",),
        ("data.train=null", "data.mixture=[{path: b.jsonl}]"),
        ("data.held_out=b.jsonl",),
        ("tokenizer.path=new/tokenizer.model", "run_dir=new"),
    ],
)
def test_files_whose_content_is_held_against_the_checkpoint_may_lie_elsewhere(changes, folder):
    saved = to_dict(load(("algorithm=grpo",), folder))
    check_resume(load(("algorithm=grpo", *changes), folder), saved, STEP)


def test_a_model_is_not_evaluated_by_the_checkpoint_of_another(folder):
    recipe = load(("algorithm=grpo", "trainer.steps=0"), folder)
    one, other = (replace(recipe, model=replace(recipe.model, path=name)) for name in ("one", "other"))
    check_resume(one, to_dict(one), STEP)
    with pytest.raises(CheckpointError, match=r"evaluates model.path=one, .* set another run_dir to evaluate other$"):
        check_resume(other, to_dict(one), STEP)


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        ("rewards.py:score", "rewards:score", True),
        ("mine.rewards:score", "./mine/rewards.py:score", True),
        ("rewards.py:score", "rewards.py:other", False),
        ("rewards.py:score", "mine/rewards.py:score", False),
    ],
)
def test_a_function_of_a_file_is_the_one_of_its_module(before, now, is_same, folder):
    saved = to_dict(load(("algorithm=grpo", f"reward={{function: '{before}'}}"), folder))
    changed = load(("algorithm=grpo", f"reward={{function: '{now}'}}"), folder)
    if is_same:
        return check_resume(changed, saved, STEP)
    with pytest.raises(CheckpointError, match=r"written with reward.function=rewards:score, the recipe now has"):
        check_resume(changed, saved, STEP)
