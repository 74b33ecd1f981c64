"""An algorithm of a program's own that gives what cannot be learned from is refused, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.api.algorithms import BaseAlgorithm
from hybridflow.api.trainers import OnlineTrainer
from hybridflow.data.pieces import train_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.parallel.world import World
from tests.support.complaints import complains
from tests.support.ranks import run_ranks

MODEL = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "max_context": 16}
SETTINGS = {"lr": 1e-3, "max_new_tokens": 3, "group_size": 2, "rollout_batch_size": 8}
PROMPTS = ["1+1=", "2+1=", "3+1=", "4+1="]


class OfGroups(BaseAlgorithm):
    def advantages(self, scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        return scores.view(-1, 2).mean(dim=1)


class OfNumbers(BaseAlgorithm):
    def advantages(self, scores: Tensor, groups: Tensor, lengths: Tensor) -> Any:
        return scores.tolist()


class Divided(BaseAlgorithm):
    def advantages(self, scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        return torch.where(groups == groups[0], 0, scores) / scores.std() / (groups - groups[0])


class Summed(BaseAlgorithm):
    def loss(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return -(log_probs * advantages * mask).sum()


class Detached(BaseAlgorithm):
    def loss(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return -log_probs.detach() * advantages


REFUSED: list[tuple[type[BaseAlgorithm], str]] = [
    (OfGroups, "OfGroups.advantages: found shape [4], expected a tensor of shape [8]"),
    (OfNumbers, "OfNumbers.advantages: found list, expected a tensor of shape [8]"),
    (Divided, "Divided.advantages: found nan at sample 0, of score"),
    (Summed, "Summed.loss: found shape [], expected a tensor of shape ["),
    (Detached, "Detached.loss: found no gradient"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own-algorithm")
    lines = [f"{a}+{b}={a + b}" for a in range(20) for b in range(20)]
    train_tokenizer(lines, path=path / "tokenizer.model", vocab_size=32)
    return path


def refusals(world: World, folder: Path) -> None:
    for index, (kind, words) in enumerate(REFUSED):
        config = {**SETTINGS, "model": MODEL, "run_dir": str(folder / f"{world.size}-{index}")}
        trainer = OnlineTrainer(config, algorithm=kind(), reward="length", tokenizer=str(folder / "tokenizer.model"))
        complains(lambda trainer=trainer: trainer.step(PROMPTS), [words], ConfigError)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_an_own_algorithm_gives_is_checked(folder: Path, size: int) -> None:
    run_ranks(refusals, size, folder)
