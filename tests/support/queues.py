"""What tests of live queues share: kills at the places of a take, and a recipe around a section of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.data import live


class Killed(BaseException):
    """In the place of a kill."""


def kill_at(patch: pytest.MonkeyPatch, kill: str) -> None:
    """Die where rows are synced, where the journal is written, or where a file is moved; anything else: nowhere."""

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    inner = Path.open
    if kill == "rows":
        patch.setattr(live, "sync_path", die)
    elif kill == "move":
        patch.setattr(Path, "rename", die)
    elif kill == "journal":
        # It opens the journal to append, and never gets so far.
        patch.setattr(Path, "open", lambda self, mode="r", **more: die() if mode == "ab" else inner(self, mode, **more))


def recipe_values(**data: Any) -> dict[str, Any]:
    """A recipe with a section of data."""
    return {
        "name": "tiny",
        "algorithm": "grpo",
        "model": {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "max_context": 8},
        "data": {**data, "held_out": "h"},
        "tokenizer": {"path": "tokenizer.model"},
        "actor": {"update": {}, "rollout": {}, "optimizer": {"lr": 1e-3}},
        "rollout": {"max_new_tokens": 2, "group_size": 2},
        "trainer": {"steps": 1, "global_batch_size": 2},
    }
