"""Training on data of every kind: as on the same rows in JSONL, mixed, and going on at another number of ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hybridflow import Actor, GRPOTrainer
from hybridflow.checkpoint.store import latest_step
from hybridflow.config.data import ArithmeticConfig
from hybridflow.data import problems as problems_module
from hybridflow.data.arithmetic import make_problems
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.problems import StoredProblems
from hybridflow.data.provider import DataProvider
from hybridflow.errors import CheckpointError
from hybridflow.exit_status import REQUEUE
from tests.e2e.commands import RECIPE, fork_ranks, lasting_metrics, run_well, write_recipe
from tests.support.kafka_broker import write_apart
from tests.support.ranks import run_ranks
from tests.support.row_files import write_rows

SPEC = ArithmeticConfig(num_train=60, num_held_out=8, mistake_share=0.5)
SETTINGS = ["data.arithmetic=null", "trainer.save_every=1", "trainer.keep_last=9"]


@pytest.fixture(scope="module")
def rows():
    train, held_out = make_problems(SPEC)
    return [dict(row) for row in train], [dict(row) for row in held_out]


def learned(folder: Path) -> list[dict[str, float]]:
    """What each step measured, without times."""
    names = ("actor/loss", "reward/mean", "response/length_mean")
    return [{name: row[name] for name in names if name in row} for row in lasting_metrics(folder / "run")]


def trained(folder: Path, rows, file_format: str, *settings: str, num_ranks: int = 2) -> list[dict[str, float]]:
    folder.mkdir(exist_ok=True)
    write_recipe(folder)
    files = [f"data.train={write_rows(folder / 'train', rows[0], file_format)}"]
    files += [f"data.held_out={write_rows(folder / 'held_out', rows[1], file_format)}"]
    run_well(["train", "tiny.yaml", *SETTINGS, *files, *settings], folder, num_ranks=num_ranks)
    return learned(folder)


@pytest.mark.slow
def test_a_mixture_goes_on_at_another_number_of_ranks_where_it_was(tmp_path, rows):
    train, held_out = rows
    one, other = write_rows(tmp_path / "one", train[:40], "parquet"), write_rows(tmp_path / "other", train[40:], "hdf5")
    write_rows(tmp_path / "held_out", held_out, "jsonl")
    recipe = RECIPE.replace("  train: data/train.jsonl\n", "").replace("data/held_out", f"{tmp_path}/held_out")
    mixture = f"data.mixture=[{{path: {one}, weight: 3}}, {{path: {other}, weight: 1}}]"
    command = ["train", "tiny.yaml", *SETTINGS, mixture]
    folders = tmp_path / "whole", tmp_path / "cut"
    for folder in folders:
        folder.mkdir()
        write_recipe(folder, recipe)

    def run(folder, *settings, num_ranks=2):
        run_well([*command, *settings], folder, num_ranks=num_ranks)

    run(folders[0], "trainer.steps=3")
    run(folders[1], "trainer.steps=1")
    stores = sorted((folders[1] / "run" / problems_module.FOLDER).iterdir())
    assert len(stores) == 3, "two sources, and what is held out"
    before = [(store / "manifest.json").stat().st_mtime_ns for store in stores]
    run(
        folders[1], "trainer.steps=3", "cluster.ranks=1", "actor.update={}", "actor.rollout={}", "--resume", num_ranks=1
    )

    whole, cut = (lasting_metrics(folder / "run") for folder in folders)
    assert len(whole) == len(cut) == 3
    for name in ("reward/mean", "response/length_mean"):
        assert [row[name] for row in cut] == pytest.approx([row[name] for row in whole])
    assert [(store / "manifest.json").stat().st_mtime_ns for store in stores] == before, "nothing is prepared again"


@pytest.mark.slow
def test_a_bad_row_is_one_message_or_skipped(tmp_path, rows):
    train, held_out = rows
    write_recipe(tmp_path)
    path = write_rows(tmp_path / "train", train, "jsonl")
    write_rows(tmp_path / "held_out", held_out, "jsonl")
    path.write_text(path.read_text().replace('"prompt"', '"promtp"', 1))
    command = ["train", "tiny.yaml", *SETTINGS, f"data.train={path}", "data.held_out=held_out.jsonl"]
    fork_ranks(command, tmp_path).complains_once("train.jsonl:1: no field 'prompt'")

    done = run_well([*command, "data.on_bad_row=skip"], tmp_path)
    assert done.out.count("1 bad rows skipped: 1 x no field 'prompt'") == 1


FIELD_REWARD = """
def score(completions, level, **kwargs):
    assert set(kwargs) == {"prompt", "prompts", "answers"}
    return [float(sum(map(ord, each)) % each_level) for each, each_level in zip(completions, level)]
"""


def test_prompts_alone_and_a_reward_that_asks_for_a_field(tmp_path, rows):
    """Neither answers nor held-out data: one notice, no validation, and the reward's field is that of the row."""
    write_recipe(tmp_path, RECIPE.replace("  held_out: data/held_out.jsonl\n", ""))
    (tmp_path / "rewards.py").write_text(FIELD_REWARD)
    prompts = [{"prompt": row["prompt"], "level": 2 + number % 3} for number, row in enumerate(rows[0])]
    path = write_rows(tmp_path / "train", prompts, "jsonl")
    done = fork_ranks(["train", "tiny.yaml", *SETTINGS, f"data.train={path}", "warm_start=null"], tmp_path)
    assert set(done.codes) == {0}, done.err
    assert done.err.count("data.held_out is missing: there is no validation") == 1
    # Two samples of each step, the first and the last, after its line.
    two = r"(  prompt    .*\n  response  .*  \(score .*\)\n){2}(?!  prompt)"
    for step in (1, 2):
        assert re.search(rf"step {step}/2 \|.*\n(warning.*\n)*samples of step {step}\n{two}", done.out), done.out
    assert "accuracy" not in done.out and len(lasting_metrics(tmp_path / "run")) == 2
    assert "accuracy_before_rl" not in json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.slow
def test_a_reward_that_teaches_nothing_and_data_that_comes_too_often_are_told_once(tmp_path, rows):
    write_recipe(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(response):\n    return 0.5\n")
    train, held_out = (write_rows(tmp_path / name, rows[1][:1], "jsonl") for name in ("train", "held_out"))
    # A step takes 4 prompts, of one row.
    files = [f"data.train={train}", f"data.held_out={held_out}", "warm_start=null", "data.arithmetic=null"]
    done = run_well(["train", "tiny.yaml", *files, "trainer.steps=26"], tmp_path)
    warnings = [line for line in done.out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2, done.out
    assert "trainer.steps=26: the run goes through the 1 rows of " in warnings[0] and " 104 times" in warnings[0]
    assert "step 1: every sample scored 0.5, so that the reward teaches nothing" in warnings[1]


def asking_while_ahead(rank):
    """A hook: as ``asking_while_waiting``, of rank 1."""
    asking_while_waiting(rank, 1)


def asking_while_waiting(rank, asked=0):
    """A hook: rank 0 is sent a signal when it waits for the third step's prompts."""
    look = StoredProblems.look

    def looked(self, prompt_index, since_s, within_s):
        if rank == asked and prompt_index == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return look(self, prompt_index, since_s, 0.5)

    StoredProblems.look = looked


def command_of_a_spool(tmp_path, rows, *settings):
    """Write a recipe, held-out rows and a tokenizer; an empty spool, and the command that trains from it."""
    train, held_out = rows
    write_recipe(tmp_path)
    write_rows(tmp_path / "held_out", held_out, "jsonl")
    texts = [row["prompt"] + row["answer"] for row in train]
    train_tokenizer(texts, path=tmp_path / "tokenizer.model", vocab_size=64)
    spool = tmp_path / "spool"
    spool.mkdir()
    command = ["train", "tiny.yaml", *SETTINGS, "data.train=null", "data.held_out=held_out.jsonl", *settings]
    return spool, [*command, "tokenizer.path=tokenizer.model", "warm_start=null", "trainer.save_every=9"]


@pytest.mark.slow
def test_a_spool_is_waited_for_and_gone_on_with(tmp_path, rows):
    train, _ = rows
    spool, command = command_of_a_spool(tmp_path, rows, "trainer.steps=3")
    # A step takes 4 prompts.
    write_rows(tmp_path / "a", train[:8], "jsonl").rename(spool / "a.jsonl")

    stopped = fork_ranks([*command, "data.spool={path: spool, deadline_s: 20}"], tmp_path, hook=asking_while_waiting)

    assert set(stopped.codes) == {REQUEUE} and latest_step(tmp_path / "run") == 2, stopped.err
    shutil.rmtree(tmp_path / "run/checkpoints")
    command += ["data.spool={path: spool, deadline_s: 2}"]

    done = fork_ranks(command, tmp_path)

    done.complains_once("did not come within data.spool.deadline_s=2; 8 rows were taken so far")
    assert len(lasting_metrics(tmp_path / "run")) == latest_step(tmp_path / "run") == 2

    write_rows(tmp_path / "b", train[8:12], "jsonl").rename(spool / "b.jsonl")
    run_well([*command, "--resume"], tmp_path)
    assert len(lasting_metrics(tmp_path / "run")) == 3
    assert sorted(path.name for path in (spool / "taken").iterdir()) == ["a.jsonl", "b.jsonl"]


ODD_REWARD = """
def score(prompt, response, answer):
    return float(sum(map(ord, prompt)) % 2 and sum(place * ord(each) for place, each in enumerate(response)) % 97)
"""
"""Only prompts with an odd sum of characters teach something."""


def asking_in_a_refill(rank):
    """A hook: rank 0 is sent a signal when the second step's refill waits for its prompts."""
    look = StoredProblems.look

    def looked(self, prompt_index, since_s, within_s):
        if rank == 0 and prompt_index > 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return look(self, prompt_index, since_s, 0.5)

    StoredProblems.look = looked


@pytest.mark.slow
def test_a_refill_waits_for_a_spool_as_a_step_does(tmp_path, rows):
    train, _ = rows
    spool, command = command_of_a_spool(tmp_path, rows, "algorithm=dapo")
    (tmp_path / "rewards.py").write_text(ODD_REWARD)
    # A step takes 4 prompts. The first has 4 that teach, the second has 2 and needs as many more.
    even, odd = ([row for row in train if sum(map(ord, row["prompt"])) % 2 == rest] for rest in (0, 1))
    write_rows(tmp_path / "a", [*odd[:6], *even[:2]], "jsonl").rename(spool / "a.jsonl")

    stopped = fork_ranks([*command, "data.spool={path: spool, deadline_s: 20}"], tmp_path, hook=asking_in_a_refill)

    assert set(stopped.codes) == {REQUEUE} and latest_step(tmp_path / "run") == 1, stopped.err
    shutil.rmtree(tmp_path / "run/checkpoints")
    command += ["data.spool={path: spool, deadline_s: 2}"]

    done = fork_ranks(command, tmp_path)

    done.complains_once("did not come within data.spool.deadline_s=2; 8 rows were taken so far")
    assert len(lasting_metrics(tmp_path / "run")) == latest_step(tmp_path / "run") == 1

    write_rows(tmp_path / "b", odd[6:10], "jsonl").rename(spool / "b.jsonl")
    run_well([*command, "--resume"], tmp_path)
    assert [each["groups/tries"] for each in lasting_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_job_that_works_ahead_stops_while_it_waits_and_saves_where_nothing_comes(tmp_path, rows):
    """The rank that samples waits for the third step's prompts, the other one learns the second step meanwhile."""
    train, held_out = rows
    ahead = "  rollout_ranks: [1]\n  optimizer: {lr"
    recipe = (
        RECIPE.replace("{tp: 2}", "{}").replace("rollout: {dp: 2}", "rollout: {}").replace("  optimizer: {lr", ahead)
    )
    write_recipe(tmp_path, recipe)
    write_rows(tmp_path / "held_out", held_out, "jsonl")
    texts = [row["prompt"] + row["answer"] for row in train]
    train_tokenizer(texts, path=tmp_path / "tokenizer.model", vocab_size=64)
    (tmp_path / "spool").mkdir()
    write_rows(tmp_path / "a", train[:8], "jsonl").rename(tmp_path / "spool" / "a.jsonl")
    command = ["train", "tiny.yaml", *SETTINGS, "data.train=null", "data.held_out=held_out.jsonl", "trainer.steps=3"]
    command += ["tokenizer.path=tokenizer.model", "warm_start=null", "trainer.save_every=9", "trainer.max_staleness=1"]

    stopped = fork_ranks([*command, "data.spool={path: spool, deadline_s: 20}"], tmp_path, hook=asking_while_ahead)

    assert set(stopped.codes) == {REQUEUE} and latest_step(tmp_path / "run") == 2, stopped.err
    shutil.rmtree(tmp_path / "run/checkpoints")

    done = fork_ranks([*command, "data.spool={path: spool, deadline_s: 2}"], tmp_path)

    done.complains_once("did not come within data.spool.deadline_s=2; 8 rows were taken so far")
    assert len(lasting_metrics(tmp_path / "run")) == latest_step(tmp_path / "run") == 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_topic_is_waited_for_and_gone_on_with(tmp_path, rows, broker, size):
    train, held_out = rows
    write_recipe(tmp_path)
    write_rows(tmp_path / "held_out", held_out, "jsonl")
    texts = [row["prompt"] + row["answer"] for row in train]
    train_tokenizer(texts, path=tmp_path / "tokenizer.model", vocab_size=64)
    kafka = f"servers: [{broker.server}], topic: train-{size}, deadline_s: 2, poll_s: 0.2"
    kafka += ", options: {api.version.request: false, broker.version.fallback: 0.9.0.1}"
    command = ["train", "tiny.yaml", *SETTINGS, "data.train=null", "data.held_out=held_out.jsonl", "trainer.steps=3"]
    command += ["tokenizer.path=tokenizer.model", "warm_start=null"]
    if size == 1:
        command += ["cluster.ranks=1", "actor.update={}", "actor.rollout={}"]
    messages = [(number % 2, json.dumps(row).encode()) for number, row in enumerate(train[:12])]
    # A step takes 4 prompts.
    write_apart(broker.server, f"train-{size}", messages[:8])

    done = fork_ranks([*command, f"data.kafka={{{kafka}}}"], tmp_path, num_ranks=size)

    done.complains_once("did not come within data.kafka.deadline_s=2; 8 rows were taken so far")
    assert len(lasting_metrics(tmp_path / "run")) == 2

    # A broken message could not be mended, so it may be left out from here on; the brokers may have another address.
    write_apart(broker.server, f"train-{size}", [(0, b"{"), *messages[8:]])
    kafka = kafka.replace("127.0.0.1", "localhost").replace("deadline_s: 2", "deadline_s: 20")
    more = [f"data.kafka={{{kafka}}}", "data.on_bad_row=skip", "--resume"]
    done = run_well([*command, *more], tmp_path, num_ranks=size)
    assert len(lasting_metrics(tmp_path / "run")) == 3
    assert done.out.count(f"1 bad rows skipped; the first: train-{size}[0]@4: not valid JSON") == 1


def digits(prompt: str, response: str, answer: str) -> float:
    """The share of digits."""
    return sum(letter.isdigit() for letter in response) / 4


def provided(world, folder: str, source: str, steps: int = 5, **given: Any) -> list[dict[str, float]]:
    """Steps of a program on rows in a list, or by a provider of their file."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    data = rows if source == "list" else DataProvider(f"{folder}/rows.jsonl", **given)
    model = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "max_context": 16}
    settings = {"run_dir": f"{folder}/{source}", "max_new_tokens": 4, "lr": 1e-3, "batch_size": 8, "group_size": 2}
    if world.rank == 0:
        write_rows(Path(folder) / "rows", rows, "jsonl")
    actor = Actor(model, f"{folder}/tokenizer.model")
    is_resumed = (Path(folder) / source / "checkpoints").is_dir()
    with GRPOTrainer(settings, actor_model=actor, reward=digits, data_provider=data, resume=is_resumed) as trainer:
        return trainer.train(steps)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_provider_is_what_a_program_trains_on(tmp_path, size):
    train_tokenizer(["0123456789+="], path=tmp_path / "tokenizer.model", vocab_size=32)
    of_list = run_ranks(provided, size, str(tmp_path), "list")
    of_provider = run_ranks(provided, size, str(tmp_path), "provider")
    names = ("reward/mean", "actor/grad_norm")
    for one, other in zip(of_list, of_provider, strict=True):
        assert [[step[name] for name in names] for step in one] == [[step[name] for name in names] for step in other]


def provided_anew(world, folder: str) -> str:
    """What a trainer says that goes on with the rows in another order."""
    provided(world, folder, "provider", 1)
    assert len(provided(world, folder, "provider", 1, seed=1)) == 1, "the seed that the trainer has"
    with pytest.raises(CheckpointError) as caught:
        provided(world, folder, "provider", 1, seed=5)
    return str(caught.value)


def test_a_trainer_does_not_go_on_in_the_order_of_another_seed(tmp_path):
    train_tokenizer(["0123456789+="], path=tmp_path / "tokenizer.model", vocab_size=32)
    (said,) = run_ranks(provided_anew, 1, str(tmp_path))
    assert "order of seed=5, and was in that of seed=1" in said and "give the DataProvider seed=1" in said
