"""Training on prompts with images: answers that only the images tell, in several layouts, through to an export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import yaml
from safetensors.torch import load_file

from hybridflow.observe.metrics import read_metrics
from tests.e2e.commands import run_command
from tests.support.hf_models import write_tokenizer, write_vision_model

pytestmark = pytest.mark.slow

MARK = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}="
)


def train(folder: Path, name: str, recipe: dict, *options: str) -> Path:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**recipe, "run_dir": f"runs/{name}"}))
    done = run_command(["train", f"{name}.yaml", *options], folder, within_s=300)
    assert done.codes == (0,), done.out[-2000:] + done.err[-2000:]
    return folder / "runs" / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL, and four images of one color each behind the same question."""
    path = tmp_path_factory.mktemp("images")
    write_vision_model(path / "model", "Qwen3VL", max_position_embeddings=128)
    write_tokenizer(path / "model", more=[MARK], chat_template=TEMPLATE)
    rows = []
    for number in range(4):
        pixels = np.full((40 + 8 * number, 48, 3), 60 * number, np.uint8)
        PIL.Image.fromarray(pixels).save(path / f"{number}.png")
        message = {"role": "user", "content": "<image>1+1"}
        rows.append({"messages": [message], "images": [f"{number}.png"], "answer": str(number + 3)})
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


DATA = {"train": "rows.jsonl", "held_out": "rows.jsonl", "images_field": "images"}
COMMON = {"data": DATA, "reward": {"function": "exact_match"}}


@pytest.fixture(scope="module")
def taught(folder: Path) -> Path:
    """The run in which the model learned what the images show."""
    recipe = {
        **COMMON,
        "algorithm": "sft",
        "model": {"path": "model", "max_context": 96, "dtype": "fp32"},
        "cluster": {"ranks": 2},
        "actor": {"update": {"tp": 2}, "optimizer": {"lr": 3e-3}},
        "rollout": {"max_new_tokens": 3},
        "trainer": {"steps": 30, "global_batch_size": 4, "validate_every": 30},
    }
    return train(folder, "taught", recipe)


def test_answers_that_only_images_tell_are_learned(taught: Path) -> None:
    summary = json.loads((taught / "summary.json").read_text())
    assert summary["accuracy_after_rl"] == 1.0, summary


def test_who_forgets_the_key_is_told_of_it(folder: Path) -> None:
    recipe = {**COMMON, "algorithm": "sft", "model": {"path": "model", "max_context": 96, "dtype": "fp32"}}
    recipe |= {"data": {"train": "rows.jsonl"}, "trainer": {"steps": 1, "global_batch_size": 4}}
    (folder / "blind.yaml").write_text(yaml.safe_dump(recipe))
    done = run_command(["train", "blind.yaml", "run_dir=runs/blind"], folder)
    assert "prompts  text alone; data.images_field=images gives the model the images of its rows, too" in done.out
    written = run_command(
        ["init", "new.yaml", "--model", "model", "--data", "rows.jsonl", "--algorithm", "sft"], folder
    )
    assert written.codes == (0,), written.err
    assert yaml.safe_load((folder / "new.yaml").read_text())["data"]["images_field"] == "images"


def test_by_ppo_in_other_layouts_and_after_a_resume_it_goes_on_to_an_export(folder: Path, taught: Path) -> None:
    recipe = {
        **COMMON,
        "algorithm": "ppo",
        "model": {"path": str(taught), "max_context": 96, "dtype": "fp32"},
        "cluster": {"ranks": 4},
        "actor": {"update": {"pp": 2, "dp": 2}, "rollout": {"tp": 2, "dp": 2}, "optimizer": {"lr": 3e-4}},
        "critic": {"layout": {"tp": 2, "dp": 2}, "optimizer": {"lr": 1e-3}},
        "kl": {"coef": 0.01},
        "rollout": {"max_new_tokens": 3, "archive": True},
        "trainer": {"steps": 2, "global_batch_size": 8, "save_every": 1, "validate_every": 2},
    }
    run = train(folder, "ppo", recipe)
    train(folder, "ppo", {**recipe, "trainer": {**recipe["trainer"], "steps": 3}}, "--resume")
    metrics = read_metrics(run)
    assert len(metrics) == 3 and min(row["reward/mean"] for row in metrics) > 0.8, metrics
    shown = run_command(["rollouts", "runs/ppo", "--step", "1"], folder)
    assert shown.codes == (0,) and "prompt    1+1=" in shown.out, shown.out + shown.err
    done = run_command(["convert", "runs/ppo", "out", "--to", "hf"], folder)
    assert done.codes == (0,), done.err
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "visual" in name} == same
