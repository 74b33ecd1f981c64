"""Steps of several rollouts: DAPO's dynamic sampling in other placements and after a kill, and ReMax's baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from hybridflow.checkpoint.store import latest_step
from hybridflow.roles.actor import Actor
from hybridflow.roles.reward import Reward
from hybridflow.rollout import engine, session
from hybridflow.rollout.log_file import list_logs
from hybridflow.sampling.groups import Groups
from hybridflow.trainer.stopping import Stopping
from tests.e2e.commands import REWARDS, Done, fork_ranks, kill_when_logged, lasting_metrics, run_well, write_recipe
from tests.e2e.test_resume import reused

GROUP_SIZE = 2
RUN = ["train", "tiny.yaml", "trainer.steps=3", "trainer.save_every=1", "trainer.keep_last=9"]
DAPO = [*RUN, "algorithm=dapo"]
ALONE = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}"]
APART = ["actor.ranks=[0]", "actor.update={}", "actor.rollout={}", "reward.ranks=[1]"]
"""The reward is where nothing is sampled."""
STAGES = ["cluster.ranks=4", "actor.update={tp: 2, pp: 2}", "actor.rollout={pp: 2, dp: 2}"]


def write(path: Path, row: list[Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def noting(rank: int) -> None:
    """Each rank notes what is sampled, what is scored, and which batches are taken."""
    sample, score, judge, take = Actor.sample, Reward.score, Reward.score_validation, Groups.take

    def sample_and_note(self, batch, decided):
        turn = decided["fill"]
        write(Path(f"turns-{rank}"), [decided["train_step"]["step"], *(turn[key] for key in sorted(turn))])
        return sample(self, batch, decided)

    def score_and_note(self, batch, decided):
        found = score(self, batch, decided)
        prompt_indices, scores = batch.columns["prompt_indices"].tolist(), found.columns["scores"].tolist()
        step, is_greedy = decided["train_step"]["step"], decided["fill"]["is_greedy"]
        rows = [
            int(self._job.train.example(prompt_index).place.rpartition(":")[2]) - 1 for prompt_index in prompt_indices
        ]
        for each in zip(batch.ids.tolist(), prompt_indices, scores, rows, strict=True):
            write(Path(f"scored-{rank}"), [step, is_greedy, *each])
        return found

    def judge_and_note(self, batch, decided):
        scores = self._scores(batch, lambda row: self._job.held_out[row][0]).tolist()
        for row, each in zip(batch.columns["prompt_indices"].tolist(), scores, strict=True):
            write(Path(f"judged-{rank}"), [row, each])
        judge(self, batch, decided)

    def take_and_note(self, batch, decided):
        found = take(self, batch, decided)
        names = [name for name in ("scores", "baselines") if name in found.columns]
        for row, ident in enumerate(found.ids.tolist()):
            values = [float(found.columns[name][row]) for name in names]
            tokens = found.columns["tokens"].to_list()[row].tolist()
            write(Path(f"taken-{rank}"), [decided["train_step"]["step"], ident, tokens, values])
        return found

    Actor.sample, Reward.score, Reward.score_validation, Groups.take = (
        sample_and_note,
        score_and_note,
        judge_and_note,
        take_and_note,
    )


def kill_in_the_second_rollout(rank: int) -> None:
    """Rank 1 dies in the first step that has a second rollout, when responses of it are in its log."""
    noting(rank)
    if rank == 1:
        kill_when_logged("part-00002")


def stop_in_the_second_rollout(rank: int) -> None:
    """Rank 1 is told to stop when the first step with a second rollout is in it."""
    noting(rank)
    sample, local_reason = Actor.sample, Stopping.local_reason
    engine.LOOK_STEPS = session.LOOK_STEPS = 1
    is_late = False

    def sample_late(self, batch, decided):
        nonlocal is_late
        is_late = is_late or (rank == 1 and decided["fill"]["number"] == 2)
        return sample(self, batch, decided)

    def reason(self, **more):
        return "asked to" if is_late else local_reason(self, **more)

    Actor.sample, Stopping.local_reason = sample_late, reason


def all_equal_in_the_third_step(rank: int) -> None:
    """From step 3 on every score is 0."""
    noting(rank)
    score = Reward.score

    def score_alike(self, batch, decided):
        found = score(self, batch, decided)
        if decided["train_step"]["step"] < 3:
            return found
        return found.with_columns({"scores": torch.zeros_like(found.columns["scores"])})

    Reward.score = score_alike


def rows(folder: Path, name: str) -> list[list[Any]]:
    return [json.loads(line) for path in sorted(folder.glob(f"{name}-*")) for line in path.read_text().splitlines()]


def taken(folder: Path) -> dict[tuple[int, int], list[Any]]:
    """What training was given: (step, sample) -> tokens and scores; of several times the last."""
    return {(step, ident): rest for step, ident, *rest in rows(folder, "taken")}


def run(folder: Path, argv: list[str], hook: Any = noting, rewards: str = REWARDS, **more: Any) -> Done:
    folder.mkdir(exist_ok=True)
    write_recipe(folder)
    (folder / "rewards.py").write_text(rewards)
    return fork_ranks(argv, folder, hook=hook, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """DAPO on two replicas."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, [*DAPO, "rollout.archive=true"])
    assert set(done.codes) == {0} and done.err == "", done.err
    return folder


def test_the_batch_is_the_first_groups_that_teach_something(whole):
    next_prompt_index = 0
    for step in (1, 2, 3):
        scores: dict[int, list[float]] = {}
        for at, _, _, prompt_index, score, _ in rows(whole, "scored"):
            if at == step:
                scores.setdefault(prompt_index, []).append(score)
        assert sorted(scores) == list(range(next_prompt_index, next_prompt_index + len(scores)))
        informative = [prompt_index for prompt_index in sorted(scores) if len(set(scores[prompt_index])) > 1]
        chosen = informative[:4]
        found = {ident: rest for (at, ident), rest in taken(whole).items() if at == step}
        assert sorted(found) == [
            prompt_index * GROUP_SIZE + index for prompt_index in chosen for index in range(GROUP_SIZE)
        ]
        for prompt_index in chosen:
            assert sorted(found[prompt_index * GROUP_SIZE + index][1][0] for index in (0, 1)) == sorted(
                scores[prompt_index]
            )
        numbers = lasting_metrics(whole / "run")[step - 1]
        assert numbers["groups/kept_share"] == pytest.approx(len(informative) / len(scores))
        every = [score for group in scores.values() for score in group]
        assert numbers["groups/reward_mean"] == pytest.approx(sum(every) / len(every))
        turns = {tuple(row[1:]) for row in rows(whole, "turns") if row[0] == step}
        assert numbers["groups/tries"] == len(turns)
        next_prompt_index = chosen[-1] + 1
    assert any(numbers["groups/tries"] > 1 for numbers in lasting_metrics(whole / "run")), "nothing was refilled"


def test_the_archive_has_the_scores_of_what_was_left_out(whole):
    with h5py.File(whole / "run/rollouts/all.h5") as file:
        archived = {name: file[name][:].tolist() for name in ("step", "prompt_index", "index", "score")}
    found = {
        (step, prompt_index * GROUP_SIZE + index): score
        for step, prompt_index, index, score in zip(*archived.values(), strict=True)
    }
    scored = {(step, ident): score for step, _, ident, _, score, _ in rows(whole, "scored")}
    assert found == scored and len(found) > len(taken(whole))


def test_replicas_get_as_many_groups(whole):
    for rank in (0, 1):
        lines = (whole / f"taken-{rank}").read_text().splitlines()
        assert [json.loads(line)[0] for line in lines] == [step for step in (1, 2, 3) for _ in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "num_ranks"),
    [
        pytest.param(ALONE, 1, id="alone"),
        pytest.param(APART, 2, id="reward apart"),
        pytest.param(STAGES, 4, id="stages"),
    ],
)
def test_other_placements_take_the_same_groups(whole, tmp_path, placement, num_ranks):
    done = run(tmp_path, [*DAPO, *placement], num_ranks=num_ranks)
    assert set(done.codes) == {0} and done.err == "", done.err
    assert taken(tmp_path) == taken(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(kill_in_the_second_rollout, id="killed"),
        pytest.param(stop_in_the_second_rollout, id="stopped"),
    ],
)
def test_a_step_that_ended_in_a_refill_begins_anew_with_what_was_sampled(whole, tmp_path, hook):
    folder = tmp_path / "ended"
    done = run(folder, DAPO, hook=hook)
    assert 0 not in done.codes
    ended_in = max(row[0] for row in rows(folder, "turns"))
    # The reward comes after the rollout, and nobody has taken what it was for.
    assert {step for step, _ in taken(folder)} == set(range(1, ended_in))
    assert {name.part for name in list_logs(folder / "run/rollouts/log") if name.step == ended_in} == {1, 2}
    done = run_well([*DAPO, "--resume"], folder, hook=noting)
    assert f"resumed from run/checkpoints/step_{ended_in - 1:06d}" in done.out
    assert taken(folder) == taken(whole)
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
    assert reused(folder)[ended_in] > 0


@pytest.mark.slow
def test_a_run_that_finds_too_few_groups_saves_and_goes_on_as_its_message_says(whole, tmp_path):
    folder = tmp_path / "short"
    command = [*DAPO, "trainer.save_every=9"]
    done = run(folder, [*command, "dynamic_sampling.max_tries=4"], hook=all_equal_in_the_third_step)
    done.complains_once("after 4 rollouts the scores differ within 0 of 16 groups", "raise dynamic_sampling.max_tries")
    assert latest_step(folder / "run") == len(lasting_metrics(folder / "run")) == 2

    run_well([*command, "dynamic_sampling.max_tries=50", "--resume"], folder, hook=noting)
    assert taken(folder) == taken(whole)
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")


EQUAL = """
def score(prompt, response, answer):
    return float(sum(map(ord, prompt)) % 3 == 0 and sum(map(ord, response)) % 2)
"""
"""Two in three problems pay for nothing."""


@pytest.mark.slow
def test_too_few_groups_are_an_error_or_a_smaller_batch_as_the_recipe_says(tmp_path):
    limited = [*DAPO, *ALONE, "dynamic_sampling.max_tries=2", "warm_start=null", "trainer.steps=1"]
    done = run(tmp_path / "error", limited, rewards=EQUAL, num_ranks=1)
    assert done.codes != (0,) and "dynamic_sampling.when_short=train" in done.err, done.err
    assert "after 2 rollouts the scores differ within" in done.err

    done = run(tmp_path / "train", [*limited, "dynamic_sampling.when_short=train"], rewards=EQUAL, num_ranks=1)
    assert done.codes == (0,) and done.err == "", done.err
    (numbers,) = lasting_metrics(tmp_path / "train/run")
    num_taken = len(taken(tmp_path / "train"))
    assert 0 < num_taken < 8 and numbers["groups/tries"] == 2
    # Of two mini-batches of four the second is left out where there are no more than four samples.
    assert numbers.get("actor/skipped", 0) == (num_taken <= 4)

    done = run(
        tmp_path / "none",
        [*limited, "dynamic_sampling.when_short=train"],
        rewards="def score(prompt, response, answer): return 1.0",
        num_ranks=1,
    )
    assert done.codes != (0,) and "differ within 0 of 8 groups" in done.err, done.err


@pytest.mark.slow
def test_the_baseline_of_remax_is_the_score_of_the_greedy_response(tmp_path):
    # The held-out problems are those that are trained on, so that validation judges the same greedy responses.
    same = ["data.held_out=data/train.jsonl", "data.arithmetic=null"]
    first = tmp_path / "first"
    write_recipe_and_data(first)
    run_well([*RUN, "algorithm=remax", *same, "trainer.steps=2"], first, hook=noting)
    judged: dict[int, float] = {}
    for row, score in rows(first, "judged"):
        # The first validation comes before the first step.
        judged.setdefault(row, score)
    greedy = {
        prompt_index: (row, score)
        for step, is_greedy, _, prompt_index, score, row in rows(first, "scored")
        if is_greedy
    }
    assert len(greedy) == 8
    for (step, ident), (_, (_, baseline)) in taken(first).items():
        row, score = greedy[ident // GROUP_SIZE]
        assert baseline == score
        if step == 1:
            assert baseline == judged[row]
    assert len({baseline for _, (_, baseline) in taken(first).values()}) > 1
    assert len(taken(first)) == 16
    assert [numbers["reward/baseline_mean"] for numbers in lasting_metrics(first / "run")] == [
        pytest.approx(sum(values[1] for (at, _), (_, values) in taken(first).items() if at == step) / 8)
        for step in (1, 2)
    ]


def write_recipe_and_data(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    write_recipe(folder)
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "data/train.jsonl").write_text("\n".join(map(json.dumps, problems)))


SCORER = """
name: scorer
algorithm: reward-model
model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, max_context: 24, init_std: 0.2}
data:
  train: data/pairs.jsonl
  held_out: data/held.jsonl
  arithmetic: {num_train: 40, num_held_out: 4, mistake_share: 0.5}
run_dir: scorer
actor: {update: {}, optimizer: {lr: 1.0e-2}}
trainer: {steps: 1, global_batch_size: 8}
"""


@pytest.mark.slow
def test_groups_that_a_scorer_finds_equal_are_the_same_in_every_layout(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "scorer.yaml").write_text(SCORER)
    run_well(["train", "scorer.yaml"], tmp_path, num_ranks=1)
    # So cold that some groups have one response alone.
    argv = [
        *("train", "tiny.yaml", "algorithm=dapo", "trainer.steps=2", "model.init_std=0.2", "warm_start=null"),
        *("tokenizer.path=scorer/tokenizer.model", "rollout.temperature=0.05", "rollout.group_size=4"),
        *("trainer.global_batch_size=32", "trainer.mini_batch_size=32", "actor.optimizer.eps=1e-3"),
        "reward={model: {path: scorer/checkpoints/step_000001/actor}}",
    ]
    layouts = {
        "whole": (1, *ALONE),
        "parts": (1, *ALONE, "trainer.micro_batch_tokens=40"),
        "context": (2, "actor.update={cp: 2}", "actor.rollout={dp: 2}"),
    }
    found = []
    for name, (num_ranks, *settings) in layouts.items():
        run_well([*argv, *settings, f"run_dir={name}"], tmp_path, num_ranks=num_ranks)
        found.append(lasting_metrics(tmp_path / name))
    assert found[0][0]["groups/kept_share"] < 1
    for others in found[1:]:
        for expected, other in zip(found[0], others, strict=True):
            for key in expected.keys() & other.keys():
                if key.startswith(("actor/grad", "groups/", "reward/", "response/length")):
                    assert other[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
