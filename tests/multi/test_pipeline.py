"""What a pipeline adds up, refuses, and leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hybridflow import Actor, DataPipeline, Reward, RLTrainer
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.parallel.world import World
from hybridflow.rewards.functions import batched
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.ranks import run_ranks

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2) for b in range(2)]


@batched
def ten(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    return [10.0] * len(prompts)


async def hundred(prompt: str, response: str, answer: str) -> float:
    return 100.0


def failing(prompt: str, response: str, answer: str) -> float:
    if prompt.startswith("0"):
        raise ValueError("no score")
    return 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    write_model(path / "model", "Llama", seed=1)
    write_tokenizer(path / "model")
    return path


def pipeline(folder: Path, rewards: list[Any], run_dir: str, **more: Any) -> DataPipeline:
    train_config = {"lr": 1e-2, "rollout_batch_size": 8, "group_size": 2, "run_dir": str(folder / run_dir), **more}
    actor = Actor(str(folder / "model"))
    return DataPipeline([actor], rewards, (), {"max_length": 3}, train_config, data=PROMPTS)


def trained(world: World, folder: Path) -> list[float]:
    size = world.size
    trainer = RLTrainer(pipeline(folder, ["exact_match", "length", ten, hundred], f"run-{size}", num_epochs=2))
    out = folder / f"out-{size}"
    metrics = trainer.run(output_dir=out)
    with pytest.raises(ConfigError, match="has run"):
        trainer.run()
    with pytest.raises(CheckpointError, match="is there already"):
        RLTrainer(pipeline(folder, ["length"], f"other-{size}")).run(output_dir=out)
    more = RLTrainer(
        pipeline(folder, ["exact_match", "length", ten, hundred], f"run-{size}", num_epochs=3), resume=True
    )
    metrics += more.run()
    failed = Reward(failing, on_failure="score", failure_score=2.0)
    other = Reward(hundred, on_failure="score", failure_score=2.0)
    policy = RLTrainer(pipeline(folder, [failed, other], f"failed-{size}")).run()
    return [step["reward/mean"] for step in (*metrics, *policy)]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rewards_are_added_and_the_actor_is_written(folder: Path, size: int) -> None:
    for *steps, failed in run_ranks(trained, size, folder):
        assert len(steps) == 3 and all(110 <= score <= 110 + 1 + 3 * 40 for score in steps)
        assert failed == (104.0 + 2.0) / 2
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("model", f"out-{size}")
    )
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    for name in (f"run-{size}", f"failed-{size}"):
        assert (folder / name / "checkpoints" / "latest").is_file()


REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([Reward(failing, on_failure="score"), Reward(ten)], {}, r"reward_models\[0\] has the settings .*on_failure"),
    ([ten, torch.nn.Linear(2, 2)], {}, r"Linear"),
    ([ten, "maths"], {}, r"reward_models\[1\]='maths'"),
    ([ten, Path("somewhere")], {}, r"reward_models\[1\] is a model"),
    ([ten], {"num_epochs": 1.5}, r"num_epochs=1.5, expected an integer"),
    ([ten], {"num_epochs": 0}, r"num_epochs=0"),
]


@pytest.mark.parametrize(("rewards", "more", "words"), REFUSED)
def test_what_cannot_be_added_up_or_counted_is_refused(
    folder: Path, rewards: list[Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pipeline(folder, rewards, "refused", **more)


def test_a_model_in_memory_among_others_is_refused(folder: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    with pytest.raises(ConfigError, match=r"reward_models\[0\] is a model.*function of your own"):
        pipeline(folder, [model, ten], "refused")
