"""The blocks of docs/api.md, extend.md and from-trl.md run as they are written, on one rank and on two."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

# All that the blocks import: ranks are forked from this process.
import hybridflow
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = {"api.md": 18, "extend.md": 1, "from-trl.md": 2}
"""Page -> how many blocks it has at least."""
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

for _name in hybridflow.__all__:
    getattr(hybridflow, _name)


def blocks(page: str) -> list[str]:
    path = ROOT / "docs" / page
    return BLOCK.findall(path.read_text(encoding="utf-8")) if path.is_file() else []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that the pages name."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("actor", "ForCausalLM"), ("reward", "ForSequenceClassification")):
        write_model(folder / name, kind=kind)
        write_tokenizer(folder / name)
    return folder


def run_blocks(world, page: str, folder: str, models: str) -> list[str]:
    """What each block printed on this rank."""
    place = Path(folder)
    if world.rank == 0:
        (place / "models").symlink_to(models)
    world.make_groups([tuple(range(world.size))])
    world.coordinator(tuple(range(world.size))).barrier("the models")
    os.chdir(place)
    sys.path.insert(0, str(place))
    printed = []
    for number, text in enumerate(blocks(page)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, f"docs/{page}, block {number + 1}", "exec"), {"__name__": "__main__"})
        printed.append(out.getvalue())
    return printed


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", PAGES)
def test_blocks(page: str, size: int, models: Path, tmp_path: Path) -> None:
    found = run_ranks(run_blocks, size, page, str(tmp_path), str(models))
    assert all(len(printed) == len(blocks(page)) >= PAGES[page] for printed in found)
