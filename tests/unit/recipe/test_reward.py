"""What a recipe may say of its reward, and what is refused with a remedy."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml

from hybridflow.config.rewards import REWARD_POLICY
from hybridflow.dataflow.graph import SCORED
from hybridflow.errors import ConfigError
from hybridflow.recipe.load import load_recipe
from hybridflow.rewards.functions import as_function
from hybridflow.trainer.plan import plan_job, training_step

PAGE = (Path(__file__).parents[3] / "docs/rewards.md").read_text(encoding="utf-8")
SERVICE = "reward.service={urls: ['http://scorer:1/score']}"
JUDGE = "reward.judge={urls: ['http://judge:1'], template: '{response}'}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([SERVICE, "reward.function=mine:close"], "reward.function='mine:close': would not be called, reward.service"),
        ([SERVICE, JUDGE], "reward.judge: would not be asked, reward.service scores; remove one of the two"),
        ([SERVICE, "reward.offload=true"], "reward.offload: a function has no weights"),
        ([SERVICE, "reward.batch_size=4"], "reward.batch_size=4: only a model scores several samples at once"),
        (["reward.service={urls: []}"], "reward.service.urls: missing; give at least one"),
        (["reward.service={urls: ['scorer:1']}"], "reward.service.urls: found 'scorer:1', expected http://"),
        (["reward.service={urls: ['http://me:secret@scorer:1']}"], "reward.service.urls: an address has a user"),
        (["reward.service={urls: ['http://s:1'], batch_size: 0}"], "batch_size: expected an integer of at least 1"),
        (["reward.judge={urls: ['http://j:1']}"], "reward.judge.template: missing"),
        ([JUDGE, "reward.judge.template=Rate it"], "reward.judge.template: has no {response}"),
        ([JUDGE, "reward.judge.pattern='['"], "reward.judge.pattern='[': is no regular expression"),
        ([JUDGE, "reward.judge.pattern='\\d+'"], "has no group; put parentheses around the number"),
        ([JUDGE, "reward.judge.low=10"], "reward.judge.low=10 is not below reward.judge.high=10"),
        (["reward.function=regex"], "reward.pattern: missing; reward.function=regex needs one"),
        (["reward.function=regex", "reward.pattern='('"], "reward.pattern='(': is no regular expression"),
        (["reward.pattern=x"], "reward.pattern: only regex reads it"),
        (["reward.sandbox={wall_s: 1}"], "reward.sandbox: only code reads it"),
        (["reward.function=code", "reward.sandbox={readable: [data]}"], "sandbox.readable: found 'data', expected a"),
        (["reward.function=code", "reward.sandbox={readable: [/]}"], "sandbox.readable: found '/', expected a"),
        (["reward.function=code", "reward.timeout_s=3"], "reward.timeout_s: reward.sandbox.wall_s is the limit"),
        (
            ["reward.function=mine:close", "reward.failure_score=1"],
            "reward.on_failure=error gives none; set it to score",
        ),
        (["reward.function=mine:close", "reward.on_failure=skip"], "expected one of error, score, drop, found 'skip'"),
        (["reward.function=mine:close", "reward.failure_score=.nan", "reward.on_failure=score"], "found nan"),
        (["algorithm=safe-rlhf", "cost={timeout_s: 1}"], "missing"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_recipe("grpo", ["reward={}", *overrides])


@pytest.mark.parametrize("function", ["exact_match", "length", "regex"])
@pytest.mark.parametrize("key", REWARD_POLICY)
def test_what_cannot_fail_has_no_policy(function, key):
    value = {"on_failure": "drop"}.get(key, "2")
    pattern = ["reward.pattern=x"] if function == "regex" else []
    with pytest.raises(ConfigError, match=f"reward.{key}: {function} neither waits nor fails; remove the key"):
        load_recipe("grpo", [f"reward.function={function}", *pattern, f"reward.{key}={value}"])


def test_examples_of_the_page_are_valid():
    examples = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(examples) >= 5
    for example in examples:
        sections = yaml.safe_load(example)
        overrides = [
            f"{section}.{key}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...').strip()}"
            for section, keys in sections.items()
            for key, value in keys.items()
        ]
        recipe = load_recipe("grpo", ["reward={}", *overrides])
        assert recipe.reward.kind is not None
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    named = [node.name for node in ast.parse(code).body if hasattr(node, "name")]
    made: dict = {}
    exec(compile(code, "docs/rewards.md", "exec"), made)
    found = {name: as_function(made[name], name) for name in named}
    assert [(each.is_async, each.is_batched) for each in found.values()] == [
        (False, False),
        (True, False),
        (False, False),
        (False, True),
        (False, True),
    ]
    assert inspect.iscoroutinefunction(made["looked_up"])


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo", "remax", "safe-rlhf", "reinforce++"])
def test_who_learns_knows_what_is_dropped(algorithm):
    own = ["reward.function=mine:close", "reward.on_failure=drop"]
    layout = "{layout: {dp: 4}, optimizer: {lr: 1e-3}}"
    if algorithm in ("ppo", "safe-rlhf"):
        own.append(f"critic={layout}")
    if algorithm == "safe-rlhf":
        own += [f"cost_critic={layout}", "cost.function=length"]
    recipe = load_recipe("grpo", [f"algorithm={algorithm}", *own])
    nodes = training_step(recipe).flow.nodes()
    columns = {column for node in nodes for column in node.writes} & {*SCORED}
    updates = [node for node in nodes if node.call == "update"]
    assert updates and all(columns <= set(node.reads) for node in updates)
    assert columns == {"scores", *{"remax": ["baselines"], "safe-rlhf": ["costs"]}.get(algorithm, [])}
    plan_job(recipe)
    plain = training_step(load_recipe("grpo", [f"algorithm={algorithm}", *own, "reward.on_failure=error"])).flow
    assert not any(columns & set(node.reads) for node in plain.nodes() if node.call == "update")


@pytest.mark.parametrize("algorithm", ["ppo", "dapo", "remax"])
def test_the_actor_alone_knows_what_is_truncated(algorithm):
    own = ["reward.function=mine:close", "loss.mask_truncated=true"]
    if algorithm == "ppo":
        own.append("critic={layout: {dp: 4}, optimizer: {lr: 1e-3}}")
    recipe = load_recipe("grpo", [f"algorithm={algorithm}", *own])
    nodes = training_step(recipe).flow.nodes()
    assert {node.name for node in nodes if "is_truncated" in node.reads} - {"groups.keep"} == {"actor.update"}
    assert all("is_truncated" in node.writes for node in nodes if node.source)
    plan_job(recipe)
