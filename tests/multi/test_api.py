"""The Python API: programs of a few lines, on one rank and on two."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hybridflow
from hybridflow import (
    GRPO,
    PPO,
    Actor,
    BaseAlgorithm,
    Batch,
    DataPipeline,
    GRPOTrainer,
    PPOTrainer,
    Reward,
    RewardModel,
    find_world,
    node,
)
from hybridflow.api.settings import SHORT, finish_recipe, recipe_values
from hybridflow.api.trainers import as_reward
from hybridflow.checkpoint.manifest import Manifest, to_json
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.provider import DataProvider
from hybridflow.errors import CheckpointError, ConfigError, DataError, GraphError
from hybridflow.exit_status import REQUEUE
from hybridflow.families.model import ModelConfig
from hybridflow.mapping.memory_check import check_budget
from hybridflow.recipe.meshes import role_meshes
from hybridflow.recipe.other_names import find_other_name
from tests.support.complaints import complains, complaint
from tests.support.hf_models import write_tokenizer
from tests.support.ranks import run_ranks

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "max_context": 16,
    "init_std": 0.2,
}
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def digits(prompt: str, response: str, answer: str) -> float:
    """The share of digits."""
    return sum(letter.isdigit() for letter in response) / 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("api")
    lines = [row["prompt"] + row["answer"] for row in PROMPTS]
    train_tokenizer(lines, path=made / "tokenizer.model", vocab_size=32)
    return made


def run(program: Callable[[Path], Any], size: int, folder: Path):
    """What a program gives on each rank, in a folder with the tokenizer."""
    place = folder / f"{program.__name__}-{size}"
    place.mkdir(exist_ok=True)
    (place / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    return run_ranks(lambda world: program(place), size)


def settings(folder: Path, **more):
    return {"run_dir": str(folder / "run"), "max_new_tokens": 4, "lr": 1e-3, "seed": 3, **more}


def actor(folder: Path, **more) -> Actor:
    return Actor(MODEL, folder / "tokenizer.model", **more)


def a_flow(folder: Path):
    ppo = PPO(lr=1e-3, batch_size=4, rollout_batch_size=8, kl_coef=0.01)
    flow = actor(folder).sample(max_new_tokens=4) >> Reward(digits).score() >> ppo.update()
    return flow.run(PROMPTS, steps=2, run_dir=str(folder / "run"))


def lasting(steps):
    """What is learned, without what the clock says."""
    learned = ("actor/", "critic/", "reward/mean", "kl/", "response/")
    return [{name: step[name] for name in step if name.startswith(learned)} for step in steps]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_flow(folder: Path, size: int) -> None:
    found = run(a_flow, size, folder)
    assert all(lasting(each) == lasting(found[0]) for each in found)
    assert len(found[0]) == 2
    assert all(math.isfinite(step["actor/loss"]) and "critic/loss" in step for step in found[0])


def a_flow_with_a_node(folder: Path):
    def halve(batch):
        return {"halved": batch.columns["scores"] / 2}

    halved = node(halve, reads=("scores",), writes=("halved",))
    grpo = GRPO(lr=1e-3, batch_size=8)
    source = actor(folder).sample(max_new_tokens=4, group_size=4) >> Reward(digits).score()
    plain = (source >> grpo.update()).run(PROMPTS, steps=1, run_dir=str(folder / "plain"))
    other = (source >> halved >> grpo.update(scores="halved")).run(PROMPTS, steps=1, run_dir=str(folder / "halved"))
    return plain[0]["reward/mean"], other[0]["reward/mean"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_node_is_added_and_nothing_else_changes(folder: Path, size: int) -> None:
    (plain, halved), *others = run(a_flow_with_a_node, size, folder)
    assert halved == pytest.approx(plain / 2) and plain > 0
    assert others == [(plain, halved)] * (size - 1)


def test_what_a_node_returns() -> None:
    def call(found: Any) -> Batch:
        def mine(batch):
            return found

        (part,) = node(mine, reads=("scores",), writes=()).parts
        (role,) = part.objects.values()
        return role.call(Batch(torch.arange(2), {}), {})

    assert not call(None).columns and set(call({"halved": torch.ones(2)}).columns) == {"halved"}
    with pytest.raises(DataError, match=r"node .*test_api.py:\d+ mine: returned Tensor; expected the columns"):
        call(torch.ones(2))


def a_ppo_trainer(folder: Path):
    trainer = PPOTrainer(
        settings(folder, batch_size=4, rollout_batch_size=8, kl_coef=0.1),
        actor_model=actor(folder),
        reward=digits,
        namespace="search-rl",
    )
    seen = []
    trainer.add_metrics_exporter(lambda step, metrics: seen.append((step, metrics)))
    rollout = trainer.rollout(PROMPTS[:8])
    texts, scores = rollout.texts, rollout.scores.tolist()
    out = trainer.update(rollout)
    ids = torch.tensor([[5, 6, 7]] * 8)
    again = trainer.step(ids)
    trainer.save_checkpoint(folder / "weights")
    trainer.save_checkpoint(folder / "whole", save_optimizer=True)
    refused = complaint(lambda: trainer.save_checkpoint(folder / "weights"), CheckpointError)
    step = trainer.global_step
    trainer.close()
    return texts, scores, out, again, step, refused, seen


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ppo_trainer(folder: Path, size: int) -> None:
    found = run(a_ppo_trainer, size, folder)
    place = folder / f"a_ppo_trainer-{size}"
    assert sum(len(texts) for texts, *_ in found) == 8
    for texts, scores, out, again, step, refused, _ in found:
        assert [digits("", text, "") for text in texts] == pytest.approx(scores)
        assert out["loss"] == found[0][2]["loss"] and again["loss"] == found[0][3]["loss"]
        assert step == 2 and "is there already" in refused
    assert [(step, set(metrics) >= {"search-rl/actor/loss"}) for step, metrics in found[0][-1]] == [
        (1, True),
        (2, True),
    ]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place / "weights")
    assert loaded.config.hidden_size == 32
    assert (place / "whole" / "checkpoints" / "latest").read_text().strip() == "step_000002"


def a_resumed_trainer(folder: Path):
    def trainer(place, **more):
        given = {**settings(folder, batch_size=8), "run_dir": str(folder / place)}
        return PPOTrainer(given, actor_model=actor(folder), reward=digits, **more)

    with trainer("straight") as straight:
        losses = [straight.step(PROMPTS[:8])["loss"] for _ in range(3)]
    with trainer("broken") as first:
        first.step(PROMPTS[:8])
        first.step(PROMPTS[:8])
        first.save_checkpoint(folder / "kept", save_optimizer=True)
    with trainer("kept", resume=True) as second:
        begun = second.session().step
        return losses, begun, second.step(PROMPTS[:8])["loss"]


def test_a_saved_checkpoint_is_gone_on_with(folder: Path) -> None:
    ((losses, begun, last),) = run(a_resumed_trainer, 1, folder)
    assert begun == 2 and last == losses[2]


def a_closed_trainer(folder: Path):
    given = settings(folder, batch_size=16, group_size=2)
    with GRPOTrainer(given, actor_model=actor(folder), reward=digits) as trainer:
        trainer.step(PROMPTS[:8])
        trainer.save_checkpoint(folder / "before")
    trainer.save_checkpoint(folder / "after")
    refused = complaint(lambda: trainer.step(PROMPTS[:8]), ConfigError)
    return trainer.global_step, refused, GRPOTrainer(given, reward=digits, resume=True).global_step


def test_a_closed_trainer_keeps_what_it_has_learned(folder: Path) -> None:
    ((step, refused, resumed),) = run(a_closed_trainer, 1, folder)
    place = folder / "a_closed_trainer-1"
    assert step == resumed == 1 and "closed, after 1 step" in refused
    before, after = (place / name / "model.safetensors" for name in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()
    assert (place / "run" / "checkpoints" / "latest").read_text().strip() == "step_000001"


def a_trainer_that_saves(folder: Path):
    given = settings(folder, batch_size=16, group_size=2, trainer={"save_every": 2, "keep_last": 9})
    with GRPOTrainer(given, actor_model=actor(folder), reward=digits) as trainer:
        for _ in range(5):
            trainer.step(PROMPTS[:8])


def test_checkpoints_are_saved_while_a_program_trains(folder: Path) -> None:
    run(a_trainer_that_saves, 1, folder)
    names = {path.name for path in (folder / "a_trainer_that_saves-1/run/checkpoints").glob("step_*")}
    assert {"step_000002", "step_000004"} <= names


def turns(folder: Path):
    given = settings(folder, rollout_batch_size=16, group_size=4)
    with GRPOTrainer(given, actor_model=actor(folder), reward=digits, data_provider=PROMPTS[:10]) as trainer:
        return [len(trainer.train()) for _ in range(3)]


def test_the_last_step_of_a_turn_is_filled_up(folder: Path) -> None:
    """Of 10 prompts, 4 a step: steps 1 to 3 reach 12 of 10 draws, steps 4 and 5 20 of 20, steps 6 to 8 32 of 30."""
    assert run(turns, 1, folder) == [[3, 2, 3]]


def a_validation(folder: Path):
    told: list[tuple[str, float]] = []

    def scored(prompt: str, response: str, answer: str) -> float:
        told.append((prompt, digits(prompt, response, answer)))
        return told[-1][1]

    given = settings(folder, rollout_batch_size=8, group_size=4, actor={"data_parallel_size": find_world().size})
    rows = {"data_provider": PROMPTS[:8], "eval_dataset": PROMPTS[8:]}
    with GRPOTrainer(given, actor_model=actor(folder), reward=scored, **rows) as trainer:
        first, again = trainer.validate(), trainer.validate()
        before = told.copy()
        told.clear()
        steps = trainer.train(steps=3, eval_steps=2)
    return first, again, before, steps, told


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_held_out_prompts_are_scored_as_often_as_a_program_asks(folder: Path, size: int) -> None:
    found = run(a_validation, size, folder)
    held_out = {row["prompt"] for row in PROMPTS[8:]}
    before = dict(pair for each in found for pair in each[2])
    assert before.keys() == held_out
    after = [pair for each in found for pair in each[4] if pair[0] in held_out]
    # After steps 2 and 3.
    assert len(after) == 2 * len(held_out)
    for first, again, _, steps, _ in found:
        assert first["validation/score"] == pytest.approx(sum(before.values()) / len(before)) and again == first
        assert ["validation/score" in step for step in steps] == [False, True, True]
        assert all(step["loss"] == step["actor/loss"] for step in steps)
        scores = sum(step["validation/score"] for step in steps[1:])
        assert scores * len(held_out) == pytest.approx(sum(score for _, score in after))


def a_flow_gone_on_with(folder: Path):
    def flow():
        grpo = GRPO(lr=1e-3, rollout_batch_size=8, seed=3)
        return actor(folder).sample(max_new_tokens=4, group_size=2) >> Reward("length").score() >> grpo.update()

    one, run_dir = flow(), str(folder / "run")
    whole = flow().run(PROMPTS[:6], steps=3, run_dir=str(folder / "whole"))
    first = one.run(PROMPTS[:6], run_dir=run_dir)
    again = complaint(lambda: one.run(PROMPTS[:6], steps=3, run_dir=str(folder / "other")), ConfigError)
    rest = one.run(PROMPTS[:6], steps=3, resume=True, run_dir=run_dir)
    done = flow().run(PROMPTS[:6], resume=True, run_dir=run_dir)
    return lasting(whole), lasting(first), lasting(rest), done, again


@pytest.mark.slow
def test_a_flow_is_gone_on_with(folder: Path) -> None:
    ((whole, first, rest, done, again),) = run(a_flow_gone_on_with, 1, folder)
    assert len(first) == 2 and [*first, *rest] == whole and done == []
    assert "was called before" in again and "a_flow_gone_on_with-1/run'" in again


def a_program_that_is_asked_to_stop(folder: Path):
    asked: list[int] = []

    def ask_at_step_2(prompt: str, response: str, answer: str) -> float:
        if trainer.global_step == 1 and not asked:
            asked.append(2)
            os.kill(os.getpid(), signal.SIGUSR1)
        return 0.0

    trainer = GRPOTrainer(settings(folder, batch_size=4, group_size=2), actor_model=actor(folder), reward=ask_at_step_2)
    trainer.step(PROMPTS[:2])
    with pytest.raises(SystemExit) as ended:
        trainer.step(PROMPTS[:2])
    return ended.value.code, (folder / "run" / "checkpoints" / "latest").read_text().strip()


def test_a_signal_saves_a_program_of_one_process(folder: Path) -> None:
    assert run(a_program_that_is_asked_to_stop, 1, folder) == [(REQUEUE, "step_000001")]


def many_batches(folder: Path):
    given = settings(folder, rollout_batch_size=2, group_size=2)
    with GRPOTrainer(given, actor_model=actor(folder), reward=digits) as trainer:
        for number in range(18):
            trainer.step(PROMPTS[number % 16 :][:1])


def test_prompts_of_the_archive_are_known_after_many_batches(folder: Path) -> None:
    run(many_batches, 1, folder)
    assert list((folder / "many_batches-1/run/rollouts/segments").iterdir())


def a_rollout_that_is_lost(folder: Path):
    given = settings(folder, batch_size=8, group_size=2)
    trainer = GRPOTrainer(given, actor_model=actor(folder), reward=digits)
    trainer.step(PROMPTS[:4])
    trainer.session().save()
    trainer.rollout(PROMPTS[4:8])


def reused(folder: Path, prompts: list[dict[str, str]]) -> float:
    given = settings(folder, batch_size=8, group_size=2)
    trainer = GRPOTrainer(given, actor_model=actor(folder), reward=digits, resume=True)
    return trainer.step(prompts).get("rollout/reused", 0.0)


def test_responses_in_a_log_are_used_for_their_own_prompts_alone(folder: Path) -> None:
    run(a_rollout_that_is_lost, 1, folder)
    place = folder / "a_rollout_that_is_lost-1"
    for prompts, share in ((PROMPTS[8:12], 0.0), (PROMPTS[4:8], 1.0)):
        assert run_ranks(lambda world, prompts=prompts: reused(place, prompts), 1) == [share]


def rollouts_ahead(folder: Path):
    given = settings(folder, batch_size=16, group_size=2)
    with GRPOTrainer(given, actor_model=actor(folder), reward=digits) as trainer:
        made = [trainer.rollout(PROMPTS[:8]) for _ in range(3)]
        return [trainer.update(each).get("rollout/staleness_max", 0.0) for each in made]


def test_rollouts_made_ahead_are_known_as_old(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(rollouts_ahead, 1, folder) == [[0.0, 1.0, 2.0]]
    assert capfd.readouterr().err.count("nothing corrects for that") == 1


def different_batches(folder: Path):
    rows = list(PROMPTS[:8])
    if find_world().rank == 1:
        rows[2], rows[3] = rows[3], rows[2]
    given = settings(folder, batch_size=16, group_size=2)
    trainer = GRPOTrainer(given, actor_model=actor(folder), reward=digits)
    flow = actor(folder).sample(group_size=2) >> Reward(digits).score() >> GRPO(batch_size=16).update()
    messages = [complaint(lambda ask=ask: ask(rows), DataError) for ask in (trainer.rollout, flow.run)]
    judged = GRPOTrainer(given, actor_model=actor(folder), reward=digits, data_provider=PROMPTS[:8], eval_dataset=rows)
    return [*messages, complaint(judged.validate, DataError).removeprefix("eval_dataset: ")]


def test_batches_that_differ_between_ranks(folder: Path) -> None:
    for messages in run(different_batches, 2, folder):
        assert len(messages) == 3 and all("number 2 is another" in message for message in messages)
        assert messages[2].startswith("number 2")


def different_settings(folder: Path):
    rank = find_world().rank
    given = settings(folder, batch_size=16, group_size=2)
    others: list[dict[str, Any]] = [{"lr": 1e-3 * (1 + rank)}, {"seed": rank}, {"run_dir": f"{folder}/{rank}"}]
    trainers = [GRPOTrainer({**given, **other}, actor_model=actor(folder), reward=digits) for other in others]
    trainers.append((PPOTrainer if rank else GRPOTrainer)(given, actor_model=actor(folder), reward=digits))
    trainers.append(GRPOTrainer(given, actor_model=actor(folder), reward=digits, resume=rank == 1))
    return [complaint(lambda one=one: one.rollout(PROMPTS[:8])) for one in trainers]


def test_settings_that_differ_between_ranks(folder: Path) -> None:
    first, second = run(different_settings, 2, folder)
    assert first == second
    assert first[0].startswith("actor.optimizer.lr: 0.001 on rank 0, 0.002 on rank 1; every rank passes the same")
    keys = ("actor.optimizer.lr", "seed", "run_dir", "algorithm", "resume")
    assert [message.partition(":")[0] for message in first] == list(keys)


def a_tokenizer_object(folder: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")

    def trainer(place, **more):
        given = {**settings(folder, batch_size=8, group_size=2), "run_dir": str(folder / place)}
        given |= {"model": MODEL | {"max_context": 32}}
        return GRPOTrainer(given, tokenizer=tokenizer, reward=digits, **more)

    with trainer("run") as first:
        first.step(PROMPTS[:4])
        first.save_checkpoint(folder / "kept", save_optimizer=True)
    steps = []
    for place in ("run", "kept"):
        with trainer(place, resume=True) as again:
            again.step(PROMPTS[:4])
            steps.append(again.global_step)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_with_a_tokenizer_object_is_gone_on_with(folder: Path, size: int) -> None:
    place = folder / f"a_tokenizer_object-{size}"
    write_tokenizer(place / "hf")
    found = run(a_tokenizer_object, size, folder)
    assert found == [[2, 2]] * size


def role_sections(folder: Path):
    config = {
        "actor": {"tensor_parallel_size": 2},
        "critic": {"pipeline_parallel_size": 2},
        "hybrid_engine": {"rollout_data_parallel_size": 2},
        "model": MODEL,
        "tokenizer": {"path": str(folder / "tokenizer.model")},
        "reward": {"function": "length"},
        "batch_size": 8,
        **settings(folder),
    }
    with PPOTrainer(config) as trainer:
        out = trainer.step(PROMPTS[:8])
        recipe = trainer.session().recipe
        return out["reshard/bytes_sent"] if "reshard/bytes_sent" in out else sorted(out), str(recipe.actor.rollout)


def test_role_sections(folder: Path) -> None:
    found = run(role_sections, 2, folder)
    assert all("dp2" in rollout for _, rollout in found)


def stale_rollouts(folder: Path):
    given = {**settings(folder, batch_size=16, group_size=2), "hybrid_engine": {"resharding_interval": 3}}
    found = []
    with GRPOTrainer(given, actor_model=actor(folder), reward=digits) as trainer:
        for _ in range(5):
            rollout = trainer.rollout(PROMPTS[:8])
            out = trainer.update(rollout)
            found.append((out["rollout/staleness_max"], out["rollout/logprob_abs_diff"]))
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stale_rollouts(folder: Path, size: int) -> None:
    """The sampler's log-probabilities are those of the step that its weights are said to be of."""
    found = run(stale_rollouts, size, folder)[0]
    assert [behind for behind, _ in found] == [0, 1, 2, 0, 1]
    for behind, difference in found:
        assert (difference < 1e-5) == (behind == 0)


def test_a_budget_of_memory(folder: Path) -> None:
    def refused(budget: float) -> str:
        given = {"model": MODEL | {"vocab_size": 32}, "batch_size": 8, "rollout": {"max_new_tokens": 4}}
        values = recipe_values({**given, "hybrid_engine": {"memory_budget_gb": budget}}, algorithm="ppo", num_ranks=2)
        recipe = finish_recipe(values, num_prompts=None)
        return complaint(lambda: check_budget(recipe, role_meshes(recipe)), ConfigError)

    assert "needs about" in refused(1e-4) and "phase" in refused(1e-4)
    assert refused(100.0) == ""


class MeanOfOthers(BaseAlgorithm):
    """Each score against the mean of the group, and a loss without clipping."""

    def advantages(self, scores, groups, lengths):
        means = torch.stack([scores[groups == group].mean() for group in groups])
        return scores - means

    def loss(self, log_probs, old_log_probs, advantages, mask):
        return -(log_probs - old_log_probs.detach()).exp() * advantages


def own_algorithm(folder: Path):
    source = actor(folder).sample(max_new_tokens=4, group_size=4) >> Reward(digits).score()
    loss = {"aggregation": "token-mean", "epochs": 2}
    own = MeanOfOthers(lr=1e-3, batch_size=8, rollout_batch_size=16, kl_coef=0.0, loss=loss)
    found = (source >> own.update()).run(PROMPTS, steps=2, seed=3, run_dir=str(folder / "own"))
    # What the recipe calls Dr. GRPO, without clipping.
    given = {"loss": {**loss, "clip_low": 1.0, "clip_high": 1e9}, "rollout_batch_size": 16, "group_size": 4}
    trainer = hybridflow.OnlineTrainer(
        settings(folder, batch_size=8, **given),
        actor_model=actor(folder),
        reward=digits,
        data_provider=PROMPTS,
        algorithm="dr-grpo",
    )
    with trainer:
        return found, trainer.train(2)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_own_algorithm(folder: Path, size: int) -> None:
    for own, theirs in run(own_algorithm, size, folder):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm"):
            assert [step[name] for step in own] == pytest.approx([step[name] for step in theirs], rel=1e-5, abs=1e-7)
        assert all(step["actor/grad_norm"] > 0 for step in own)


def two_rollouts(folder: Path):
    given = {"rollout_batch_size": 16, "group_size": 4, "dynamic_sampling": {"max_tries": 9, "when_short": "train"}}
    config = settings(folder, batch_size=8, **given)
    make = {"actor_model": actor(folder), "reward": digits, "data_provider": PROMPTS, "algorithm": "dapo"}
    with hybridflow.OnlineTrainer(config, **make) as trainer:
        rollouts = [trainer.rollout(), trainer.rollout()]
        found = [set(each.batch.dense("prompt_indices").tolist()) for each in rollouts]
        for each in rollouts:
            trainer.update(each)
    return found


def test_a_second_rollout_before_an_update_takes_other_prompts(folder: Path) -> None:
    ((first, second),) = run(two_rollouts, 1, folder)
    assert first and second and max(first) < min(second)


def too_few_groups(folder: Path):
    config = settings(folder, rollout_batch_size=16, group_size=4, dynamic_sampling={"max_tries": 2})
    make = {"actor_model": actor(folder), "reward": alike, "data_provider": PROMPTS, "algorithm": "dapo"}
    with hybridflow.OnlineTrainer(config, **make) as trainer:
        for _ in range(2):
            complains(trainer.rollout, ["after 2 rollouts the scores differ within 0 of 8 groups"], DataError)


def alike(prompt: str, response: str, answer: str) -> float:
    return 1.0


def test_a_program_is_told_of_too_few_groups_at_each_rollout(folder: Path) -> None:
    run(too_few_groups, 1, folder)


def wrong_batches(folder: Path):
    trainer = PPOTrainer(settings(folder, rollout_batch_size=4), actor_model=actor(folder), reward=digits)
    for words, batch in {
        "3 prompts": PROMPTS[:3],
        "no prompt": [],
        "prompts[0]": [{"answer": "1"}],
        "input_ids of shape [4]": torch.zeros(4),
        "at most 12": ["1+1=" * 10] * 4,
        "expected a list of texts": 7,
        "'answer' is {1}": {"prompt": ["1"] * 4, "answer": [{1}] * 4},
    }.items():
        complains(lambda batch=batch: trainer.rollout(batch), [words], DataError)


def test_wrong_batches(folder: Path) -> None:
    run(wrong_batches, 1, folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"batch_sise": 4}, ("batch_sise", "did you mean batch_size?")),
        ({"gamma": 1.0, "lam": 0.9, "gae_lambda": 0.8}, ("advantage.gae_lambda", "given twice")),
        ({"actor": {"devices": ["cuda:16"]}}, ("actor.devices", "'cuda:16' is not there", "1 rank")),
        ({"actor": {"devices": ["gpu0"]}}, ("'gpu0'", "'cuda:0'")),
        ({"hybrid_engine": {"enable_reshard": True}}, ("hybrid_engine.enable_reshard", "enable_resharding?")),
        ({"reference": {"model_name": "x"}}, ("reference.model_name", "remove it")),
        ({"actor": {"model_name": "x"}, "reference": {"model_name": "y"}}, ("'x'; remove it",)),
        (7, ("found int",)),
        ("/nowhere/config.yaml", ("cannot be read",)),
        ("/tmp", ("config: '/tmp' is a directory", "a mapping or a YAML file", "actor_model='/tmp'")),
        # Passes over the prompts, or over each batch: who knows.
        ({"num_epochs": 3}, ("num_epochs is trainer.steps here", "loss.epochs counts passes over each batch")),
    ],
)
def test_settings_refused(config, words) -> None:
    complains(lambda: recipe_values(config, algorithm="ppo", num_ranks=1), words, ConfigError)


def test_a_short_name_sets_what_a_recipe_calls_it() -> None:
    both = {name: (keys, find_other_name(name)) for name, keys in SHORT.items() if find_other_name(name) is not None}
    assert both.pop("max_length")[0] == ("rollout.max_new_tokens",), "docs/api.md says so"
    assert "learning_rate" in both and [name for name, (keys, other) in both.items() if other.key not in keys] == []


def test_settings_that_an_algorithm_does_not_read() -> None:
    with pytest.raises(ConfigError, match="critic_lr: algorithm=grpo has no critic"):
        recipe_values({"critic_lr": 1e-3}, algorithm="grpo", num_ranks=1)


def test_the_reference_may_be_named_as_the_actor() -> None:
    sections = {role: {"model_name": "models/actor"} for role in ("actor", "critic", "reference", "reward")}
    values = recipe_values(sections, algorithm="ppo", num_ranks=1)
    assert values["model"] == {"path": "models/actor"} and "model" not in values["reference"]


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ConfigError, match="did you mean grpo"):
        recipe_values({}, algorithm="grop", num_ranks=1)
    with pytest.raises(ConfigError, match="an object of a subclass"):
        GRPOTrainer(algorithm=MeanOfOthers)


def test_short_settings() -> None:
    given = {"batch_size": 4, "rollout_batch_size": 8, "kl_coef": 0.1, "lr": 1e-6, "max_new_tokens": 4, "model": MODEL}
    recipe = finish_recipe(recipe_values(given, algorithm="ppo", num_ranks=1), num_prompts=None)
    assert recipe.trainer.mini_batch_size == 4 and recipe.trainer.global_batch_size == 8
    assert recipe.kl.coef == 0.1 and recipe.actor.optimizer.lr == recipe.critic.optimizer.lr == 1e-6


def test_a_program_goes_on_from_a_run_and_names_a_directory_without_a_model(tmp_path: Path) -> None:
    def model_of(path: Path) -> ModelConfig:
        values = recipe_values({"rollout_batch_size": 8, "model": {"path": str(path)}}, algorithm="grpo", num_ranks=1)
        return finish_recipe(values).model

    held = Manifest(model=ModelConfig(**MODEL, vocab_size=32), tensors={}, pieces=(), file_bytes={})
    actor = tmp_path / "run/checkpoints/step_000002/actor"
    actor.mkdir(parents=True)
    (actor / "manifest.json").write_text(to_json(held))
    assert model_of(tmp_path / "run").path == str(actor)
    assert Actor(str(tmp_path / "run")).settings["model"] == {"path": str(actor)}
    nothing = tmp_path / "run/checkpoints/step_000002"
    (actor / "manifest.json").unlink()
    says = complaint(lambda: model_of(nothing), ConfigError)
    assert f"config: model.path='{nothing}': expected a directory" in says


@pytest.mark.parametrize(
    ("algorithm", "more", "actor_lr", "critic_lr"),
    [
        ("ppo", {}, 1e-6, 1e-5),
        ("grpo", {"lora_rank": 2}, 1e-5, None),
        ("dpo", {}, 1e-6, None),
        ("sft", {}, 2e-5, None),
        ("reward-model", {}, 1e-5, None),
    ],
)
def test_a_program_learns_at_the_rate_of_a_recipe(algorithm, more, actor_lr, critic_lr) -> None:
    """The rates are those of docs/recipes.md."""
    given = {"rollout_batch_size": 8, "max_new_tokens": 1, "model": MODEL, **more}
    recipe = finish_recipe(recipe_values(given, algorithm=algorithm, num_ranks=1), num_prompts=None)
    assert recipe.actor.optimizer.lr == pytest.approx(actor_lr)
    assert (recipe.critic.optimizer.lr if recipe.critic is not None else None) == critic_lr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"trainer": {"validate_every": 2}}, ("validate_every", "no held-out data")),
        ({"warm_start": {"steps": 2, "batch_size": 8, "lr": 1e-3}}, ("warm_start", "SFTTrainer")),
        ({"actor": {"optimizer": {"schedule": "cosine"}}}, ("actor.optimizer.schedule=cosine", "set steps")),
    ],
)
def test_what_only_a_recipe_does_is_refused(config, words) -> None:
    given = {"rollout_batch_size": 8, "model": MODEL, **config}
    complains(lambda: finish_recipe(recipe_values(given, algorithm="ppo", num_ranks=1)), words, ConfigError)
    if "actor" in config:
        steps = recipe_values({**given, "steps": 9}, algorithm="ppo", num_ranks=1)
        assert finish_recipe(steps).actor.optimizer.schedule == "cosine"


def test_updates_beside_rollouts_are_refused() -> None:
    layouts = {"update": {"dp": 1}, "rollout": {"dp": 1}, "ranks": [0], "rollout_ranks": [1]}
    given = {"rollout_batch_size": 8, "model": MODEL, "actor": layouts, "trainer": {"max_staleness": 1}}
    values = recipe_values(given, algorithm="grpo", num_ranks=2)
    complains(lambda: finish_recipe(values), ["trainer.max_staleness=1: a program"], ConfigError)


def test_a_batch_without_sizes_has_whole_groups() -> None:
    recipe = finish_recipe(recipe_values({"model": MODEL}, algorithm="grpo", num_ranks=1), num_prompts=16)
    assert (recipe.rollout.group_size, recipe.trainer.global_batch_size) == (8, 128)


@pytest.mark.parametrize("name", ["dapo", "remax", "dpo"])
def test_an_own_algorithm_samples_once_in_a_step(name: str) -> None:
    kind = type("Mine", (BaseAlgorithm,), {"name": name})
    with pytest.raises(ConfigError, match=f"Mine: name='{name}': a flow samples once.*grpo"):
        kind()


def test_an_own_algorithm_overrides_something() -> None:
    def method(*_: object) -> None: ...

    for members, words in [
        ({}, "Mine: overrides nothing, and would train plain grpo; define advantages or loss"),
        ({"compute": method}, "Mine: overrides nothing"),
        ({"advantage": method}, r"Mine\.advantage: is never called; did you mean advantages\?"),
        ({"loss": method, "advantages_": method}, r"Mine\.advantages_: is never called; did you mean advantages\?"),
    ]:
        with pytest.raises(ConfigError, match=words):
            type("Mine", (BaseAlgorithm,), members)()
    for members in ({"loss": method, "scaled": method, "_losses": method}, {"name": "rloo"}):
        type("Mine", (BaseAlgorithm,), members)()
    type("Tuned", (type("Mine", (PPO,), {"loss": method}),), {"epsilon": 0.1})()


def test_a_reward_may_be_a_function_in_a_file() -> None:
    assert as_reward("rewards/mine.py:score").settings["reward"] == {"function": "rewards/mine.py:score"}


def test_strange_arguments() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'GrpoTrainer'; did you mean GRPOTrainer\? its names"):
        getattr(hybridflow, "GrpoTrainer")  # noqa: B009
    with pytest.raises(ConfigError, match="reward: found list; .*; several functions: make one of them, or use DataPi"):
        as_reward([len, len])
    names = {
        "model": "the policy is actor_model=…",
        "num_train_epochs": "TRL's num_train_epochs is trainer.steps here",
        "resum": "settings go into config",
    }
    for name, words in names.items():
        with pytest.raises(ConfigError, match=f"GRPOTrainer: {name}=…: unknown; {words}"):
            GRPOTrainer({"model": MODEL}, **{name: "models/actor"})


def of_another(folder: Path) -> None:
    given = settings(folder, batch_size=8, group_size=2)
    mine = GRPOTrainer(given, actor_model=actor(folder), reward=digits)
    other = GRPOTrainer({**given, "run_dir": str(folder / "of-another")}, actor_model=actor(folder), reward=digits)
    mine.update(other.rollout(PROMPTS[:4]))


def wrong_arguments(folder: Path):
    trainer = GRPOTrainer({"model": MODEL, "batch_size": 8})
    calls = (
        lambda: trainer.update(["1+1="]),
        lambda: of_another(folder),
        lambda: trainer.train("3"),
        lambda: trainer.train(-1),
        lambda: trainer.train(2.5),
        lambda: trainer.train(3, eval_steps=1),
        lambda: trainer.validate(),
        lambda: trainer.add_metrics_exporter("http://localhost"),
        lambda: trainer.save_checkpoint(None),
        lambda: without_answers(folder, ["1+1="] * 4),
        lambda: without_answers(folder, [PROMPTS[0], {"prompt": "1+1="}] * 2, reward="exact_match"),
        lambda: without_answers(folder, data_provider=DataProvider([PROMPTS[0], {"prompt": "1+1="}] * 2)),
        lambda: without_answers(folder, PROMPTS[:4], data={"prompt_as_message": True}),
        lambda: without_answers(folder, PROMPTS[:4], rollout={"partial_rollouts": True}),
        lambda: GRPOTrainer(settings(folder, batch_size=8), actor_model=actor(folder)).train(),
        lambda: GRPOTrainer(settings(folder), actor_model=actor(folder), data_provider=DataProvider(PROMPTS)).train(),
        lambda: GRPOTrainer({"batch_size": 8}).step(["1+1="]),
        lambda: GRPOTrainer({"model": MODEL}, device_mesh="cuda"),
        lambda: GRPOTrainer({"model": MODEL, "actor": {"tensor_parallel_size": 0}}),
        lambda: GRPOTrainer({"model": MODEL, "hybrid_engine": {"rollout_tp_size": "2"}}),
        lambda: GRPOTrainer({"model": MODEL, "actor": {"devices": 1.5}}),
        lambda: GRPOTrainer({"model": MODEL, "actor": {"devices": []}}),
        lambda: GRPOTrainer({"actor": None}, actor_model=actor(folder)),
        lambda: GRPOTrainer({3: 4, "model": MODEL}),
        lambda: GRPOTrainer({"model": MODEL, "max_completion_length": 64}),
    )
    return [complaint(call, (ConfigError, DataError)) for call in calls]


def without_answers(folder: Path, batch=None, *, reward=None, data_provider=None, **more):
    given = settings(folder, batch_size=8, group_size=2, **more)
    trainer = GRPOTrainer(given, actor_model=actor(folder), reward=reward, data_provider=data_provider)
    return trainer.rollout(batch)


def test_wrong_arguments(folder: Path) -> None:
    (found,) = run(wrong_arguments, 1, folder)
    assert [each.split(";")[0] for each in found] == [
        "update: found list",
        "update: the rollout was sampled by another trainer",
        *(f"train: steps={steps!r}, expected an integer of at least 0" for steps in ("3", -1, 2.5)),
        "train: eval_steps=1: nothing to validate on",
        "validate: nothing to validate on",
        "add_metrics_exporter: found str",
        "save_checkpoint: found NoneType, expected the path of a new directory",
        "prompts[0]: has no answer, with which the reward compares a response",
        "prompts[1]: has no answer, with which the reward compares a response",
        "the rows given: row 1: no field 'answer'",
        "data.prompt_as_message: is not read for what a program gives",
        "rollout.partial_rollouts: begins with prompts of the next step",
        "train: no prompts",
        "rollout_batch_size: missing: a step takes 64 prompts then, and the data_provider has 16 rows",
        "GRPOTrainer: no model",
        "device_mesh: found str",
        "tensor_parallel_size=0, expected an integer of at least 1",
        "rollout_tp_size='2', expected an integer of at least 1",
        *(
            f"actor.devices: found {given}, expected ranks, such as [0, 1], or devices, such as 'cuda:0'"
            for given in ("1.5", "[]")
        ),
        "actor: found nothing, expected a section",
        "config: found the key 3, expected the name of a setting",
        "config: max_completion_length: unknown key",
    ]
    assert "TRL's max_completion_length is rollout.max_new_tokens here" in found[-1]


def test_flows_refused(folder: Path) -> None:
    flow = actor(folder).sample() >> Reward("length").score()
    with pytest.raises(GraphError, match="cannot be joined"):
        flow >> "update"
    with pytest.raises(GraphError, match="two updates"):
        flow >> PPO().update() >> GRPO().update()
    with pytest.raises(GraphError, match="the stage sample stands behind the stage score, and runs before it"):
        Reward("length").score() >> actor(folder).sample()
    with pytest.raises(GraphError, match="the stage score stands behind the stage update"):
        actor(folder).sample() >> PPO().update() >> Reward("length").score()
    with pytest.raises(ConfigError, match="learns nothing"):
        flow.run(PROMPTS)
    with pytest.raises(ConfigError, match="one of the two"):
        Reward()
    with pytest.raises(ConfigError, match="2 actors"):
        DataPipeline(actors=[actor(folder)] * 2, reward_models=[digits])
    for given in ({"actors": "models/actor"}, {"reward_models": digits}, {"critics": None}):
        (name,) = given
        with pytest.raises(ConfigError, match=rf"DataPipeline: {name}: found .*; give a list: {name}=\[…\]"):
            DataPipeline(**{"actors": [MODEL], "reward_models": [digits], **given})
    assert RewardModel("somewhere").settings["reward"]["model"] == {"path": "somewhere"}


def test_names() -> None:
    assert set(hybridflow.__all__) <= set(dir(hybridflow))
    for name in hybridflow.__all__:
        assert getattr(hybridflow, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        hybridflow.Nothing  # noqa: B018


def test_yaml_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"batch_size": 4, "actor": {"data_parallel_size": 1}}), encoding="utf-8")
    assert recipe_values(path, algorithm="ppo", num_ranks=1)["trainer"] == {"mini_batch_size": 4}


assert GRPOTrainer.algorithm == "grpo"
