"""Models and functions beside the policy: where teacher, reward, cost and reference are changes nothing.

Whole runs with weights of ``transformers``: colocated in other layouts, kept in host memory between calls, on ranks of
their own; and functions on ranks that host no model at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.parallel.world import World
from hybridflow.roles.critic import Critic
from hybridflow.roles.reward_model import RewardModel
from hybridflow.roles.teacher import Teacher
from tests.multi.jobs import open_with_data
from tests.multi.test_placement import OF_THE_MACHINE
from tests.multi.test_train_pretrained import batch, lines, run, sequences
from tests.multi.test_train_pretrained import recipe as of_directories
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.ranks import run_ranks

TOP_K = 5
OPTIMIZER = {"lr": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An actor, a teacher of another family and size, two scorers, and a tokenizer of all."""
    path = tmp_path_factory.mktemp("frozen")
    write_model(path / "actor", "Qwen2", seed=1)
    write_tokenizer(path / "actor")
    write_model(path / "teacher", "Llama", seed=2, hidden_size=48, num_hidden_layers=4)
    write_model(path / "score", "Llama", "ForSequenceClassification", seed=3)
    write_model(path / "price", "Qwen2", "ForSequenceClassification", seed=4, num_hidden_layers=4)
    return path


def recipe(folder: Path, name: str, algorithm: str, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Two steps of two mini-batches; sections of ``changes`` go over those here, key by key."""
    made = of_directories(
        folder,
        algorithm,
        name,
        seed=3,
        cluster={"ranks": ranks},
        model={"path": str(folder / "actor"), "max_context": 24, "dtype": "fp32"},
        actor={"update": {"dp": ranks}, "optimizer": OPTIMIZER},
        rollout={"max_new_tokens": 5, "temperature": 0.8},
        trainer={"steps": 2, "global_batch_size": 12, "mini_batch_size": 6, "micro_batch_tokens": 64},
    )
    scorer = {"max_context": 24, "dtype": "fp32"}
    if algorithm == "distill":
        made["teacher"] = {"model": {"path": str(folder / "teacher"), **scorer}, "top_k": TOP_K}
    elif algorithm == "safe-rlhf":
        made["reward"] = {"model": {"path": str(folder / "score"), **scorer}}
        made["cost"] = {"model": {"path": str(folder / "price"), **scorer}}
        made["critic"] = made["cost_critic"] = {"layout": {"dp": ranks}, "optimizer": OPTIMIZER}
        made["lagrange"] = {"limit": 0.3, "init": 0.5, "lr": 0.5}
        made["kl"] = {"coef": 0.1}
        made["advantage"] = {"gamma": 0.95, "gae_lambda": 0.9}
    for key, section in changes.items():
        made[key] = {**made.get(key, {}), **section}
    return made


def record(values: dict[str, Any], *, resume: bool = False) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The run's metrics, a row for each step, and its summary."""
    run_ranks(run, values["cluster"]["ranks"], values, resume)
    path = Path(values["run_dir"])
    return lines(path.parent, path.name), json.loads((path / "summary.json").read_text(encoding="utf-8"))


def check_alike(
    found: tuple[list[dict[str, float]], dict[str, float]], expected: tuple[list[dict[str, float]], dict[str, float]]
) -> None:
    assert len(found[0]) == len(expected[0]) == 2
    for step, (row, other) in enumerate(zip(expected[0], found[0], strict=True), start=1):
        for metric, value in row.items():
            if not metric.startswith((*OF_THE_MACHINE, "run/")):
                assert abs(other[metric] - value) <= 2e-5 * abs(value) + 2e-6, (step, metric, other[metric], value)
    for score in ("score_before_rl", "score_after_rl"):
        assert abs(found[1][score] - expected[1][score]) <= 1e-5, score


DISTILL = {
    "colocated": dict(
        ranks=2, actor={"update": {"cp": 2}, "rollout": {"dp": 2}}, teacher={"layout": {"pp": 2}, "offload": True}
    ),
    "split": dict(
        ranks=4,
        actor={"ranks": [2, 0], "update": {"pp": 2}},
        teacher={"ranks": [1, 3], "layout": {"tp": 2}},
        trainer={"micro_batch_tokens": 20},
    ),
    "shared in part": dict(
        ranks=3,
        actor={"ranks": [0, 1], "update": {"dp": 2}},
        teacher={"ranks": [1, 2], "layout": {"cp": 2}, "offload": True},
        reward={"ranks": [2]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [TOP_K, 0])
def test_where_the_teacher_is_changes_nothing(folder, top_k):
    teacher = {"top_k": top_k}
    expected = record(recipe(folder, f"alone {top_k}".replace(" ", "-"), "distill", teacher=teacher))
    first, second = expected[0]
    assert min(first["distill/kl"], second["distill/kl"]) > 0.05 and first["actor/grad_norm"] > 0.1
    assert first["response/length_mean"] > 1 and "kl/ref" not in first
    for name in DISTILL if top_k else ("colocated",):
        placement = DISTILL[name]
        changes = {**placement, "teacher": {**teacher, **placement["teacher"]}}
        made = recipe(folder, f"{name}-{top_k}".replace(" ", "-"), "distill", **changes)
        check_alike(record(made), expected)
        saved = Path(made["run_dir"]) / "checkpoints/step_000002"
        assert {each.name for each in saved.iterdir() if each.is_dir()} == {"actor"}, "a teacher is no part of it"


FSDP = {"update": {"fsdp": 2}, "rollout": {"dp": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["fsdp", "tp2"])
@pytest.mark.parametrize("top_k", [TOP_K, 0])
def test_a_teacher_that_is_sharded_teaches_the_same(folder, top_k, actor):
    expected = record(recipe(folder, f"whole-{top_k}-{actor}", "distill", teacher={"top_k": top_k}))
    layouts = FSDP if actor == "fsdp" else {"update": {"tp": 2}}
    teacher = {"layout": {"fsdp": 2}, "top_k": top_k, "offload": "always" if top_k else True}
    found = record(recipe(folder, f"sharded-{top_k}-{actor}", "distill", 2, actor=layouts, teacher=teacher))
    assert min(row["distill/kl"] for row in expected[0]) > 0.05
    check_alike(found, expected)


SAFE = {
    "colocated": dict(
        ranks=2,
        actor={"update": {"tp": 2}, "rollout": {"dp": 2}},
        critic={"layout": {"cp": 2}},
        cost_critic={"layout": {"tp": 2}},
        reference={"offload": True, "layout": {"pp": 2}},
        reward={"offload": True, "layout": {"cp": 2}},
        cost={"offload": True, "layout": {"pp": 2}},
    ),
    "split": dict(
        ranks=5,
        actor={"ranks": [0, 1], "update": {"pp": 2}},
        critic={"ranks": [1], "layout": {}},
        cost_critic={"ranks": [3, 2], "layout": {"dp": 2}},
        reference={"ranks": [4], "layout": {}, "offload": True},
        reward={"ranks": [2], "layout": {}, "offload": True},
        cost={"ranks": [3, 4], "layout": {"tp": 2}},
    ),
    "sharded": dict(
        ranks=2,
        actor={**FSDP, "offload": "always"},
        critic={"layout": {"fsdp": 2}, "offload": True},
        cost_critic={"layout": {"fsdp": 2}, "offload": "always"},
        reference={"layout": {"fsdp": 2}, "offload": "always"},
        reward={"layout": {"fsdp": 2}, "offload": "always"},
        cost={"layout": {"fsdp": 2}, "offload": True},
    ),
}


@pytest.mark.slow
def test_where_reward_cost_and_critics_are_changes_nothing(folder):
    expected = record(recipe(folder, "safe", "safe-rlhf"))
    first, second = expected[0]
    assert first["cost/multiplier"] == 0.5 and abs(first["cost/mean"]) > 0.01 and first["cost/mean"] != 0.3
    assert second["cost/multiplier"] == pytest.approx(0.5 * torch.tensor(0.25 * (first["cost/mean"] - 0.3)).exp())
    for row in (first, second):
        assert row["cost_critic/grad_norm"] > 0.01 and row["cost_critic/loss"] != row["critic/loss"]
    for name, placement in SAFE.items():
        made = recipe(folder, f"safe-{name}", "safe-rlhf", **placement)
        check_alike(record(made), expected)
        saved = Path(made["run_dir"]) / "checkpoints/step_000002"
        assert {each.name for each in saved.iterdir() if each.is_dir()} == {"actor", "critic", "cost_critic"}
        assert (saved.parent / "reference").is_dir()


@pytest.mark.slow
def test_a_resumed_run_has_the_same_price_and_the_same_cost_critic(folder):
    expected = record(recipe(folder, "whole", "safe-rlhf"))
    record_one = recipe(folder, "again", "safe-rlhf", trainer={"steps": 1})
    run_ranks(run, 1, record_one, False)
    # Goes on elsewhere.
    found = record(recipe(folder, "again", "safe-rlhf", **SAFE["colocated"]), resume=True)
    assert found[0][1]["cost/multiplier"] == expected[0][1]["cost/multiplier"] != 0.5
    check_alike((found[0], expected[1]), expected)


def longest(prompt: str, response: str, answer: str) -> float:
    return 0.5 * len(response) - response.count("1")


@pytest.mark.slow
def test_functions_score_on_ranks_without_a_model(folder):
    """Also where there are more ranks than samples to one of them."""
    functions = dict(
        reward={"model": None, "function": "tests.multi.test_placement:share_of_ones"},
        cost={"model": None, "function": f"{__name__}:longest"},
    )
    expected = record(recipe(folder, "functions", "safe-rlhf", **functions))
    assert abs(expected[0][0]["reward/mean"]) > 0.01 and abs(expected[0][0]["cost/mean"]) > 0.01
    placed = {name: {**functions[name], "ranks": ranks} for name, ranks in (("reward", [2, 3]), ("cost", [3]))}
    critics = dict.fromkeys(("critic", "cost_critic"), {"ranks": [0, 1], "layout": {"dp": 2}})
    actor = {"ranks": [0, 1], "update": {"tp": 2}}
    check_alike(record(recipe(folder, "apart", "safe-rlhf", 4, actor=actor, **critics, **placed)), expected)


def asked(world: World, distill: dict[str, Any], safe: dict[str, Any]) -> dict[str, Any]:
    """What frozen models say of some sequences, and the bytes of weights that they have before, and after."""
    found: dict[str, Any] = {}
    for values in (distill, safe):
        job, _ = open_with_data(world, values)
        if job.recipe.teacher is not None:
            roles = {"teacher": (Teacher(job), "top")}
        else:
            roles = {
                "cost": (RewardModel(job, "cost"), "score"),
                "reward": (RewardModel(job), "score"),
                "cost_critic": (Critic(job, "cost_critic"), "values"),
            }
        for name, (role, call) in roles.items():
            sizes = [weight_bytes(role)]
            for _ in range(2):
                said = columns_of(role.calls[call](batch(), {}))
            sizes.append(weight_bytes(role))
            found[name] = said, sizes
    return found


def weight_bytes(role: Any) -> int:
    """What its weights take on the device."""
    return sum(parameter.untyped_storage().nbytes() for parameter in role.model.transformer.parameters())


def columns_of(batch: Batch | None) -> dict[str, Any]:
    """Columns as arrays, which travel from a child to the test; none but on holders."""
    columns = {} if batch is None else batch.columns
    return {name: (each.values if isinstance(each, Ragged) else each).numpy() for name, each in columns.items()}


def test_frozen_models_say_what_transformers_say(folder):
    """And have no weights on the device between two calls, if they are kept in host memory."""
    distill = recipe(folder, "asked", "distill", 2, teacher={"layout": {"tp": 2}, "offload": True})
    safe = recipe(folder, "asked", "safe-rlhf", 2, cost={"layout": {"tp": 2}, "offload": True})
    by_rank = run_ranks(asked, 2, distill, safe)
    teacher = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher").eval()
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "price").eval()
    told, costs = [], []
    for row, prompt in zip(*sequences(), strict=True):
        with torch.no_grad():
            told.append((teacher(row[None]).logits[0, prompt - 1 : -1] / 0.8).log_softmax(-1))
            costs.append(float(scorer(row[None]).logits[0, 0]))
    whole = torch.cat(told)
    ids = whole.argsort(-1, descending=True)[:, :TOP_K]
    others = whole.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    expected = torch.cat([whole.gather(1, ids), others], dim=1)
    for found in by_rank:
        columns, sizes = found["teacher"]
        assert (columns["teacher_ids"] == ids.numpy()).all() and sizes == [0, 0]
        assert abs(columns["teacher_log_probs"] - expected.numpy()).max() < 1e-4
        columns, sizes = found["cost"]
        assert abs(columns["costs"] - torch.tensor(costs).numpy()).max() < 1e-4 and sizes == [0, 0]
        assert set(found["reward"][0]) == {"scores"} and found["reward"][1][0] > 0
        assert set(found["cost_critic"][0]) == {"cost_values"}
