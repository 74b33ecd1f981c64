"""Training runs of adapters: what is saved of them, going on from it, and PEFT's files in and out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest

from hybridflow import cli
from hybridflow.checkpoint.model_dir import ModelDir
from hybridflow.errors import CheckpointError, ConfigError, LayoutError
from hybridflow.recipe.load import recipe_from_dict
from tests.multi.test_train_pretrained import first_and_train, lines, recipe, run, their_log_probs
from tests.support.complaints import complains
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.ranks import run_ranks

LORA = {"rank": 4, "alpha": 6.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_model(folder / "causal", "Qwen2", seed=1)
    write_tokenizer(folder / "causal", has_start=True)
    return folder


def values(folder: Path, name: str = "run", update: Any = None, rollout: Any = None, **lora: Any) -> dict[str, Any]:
    made = recipe(folder, "grpo", name)
    made["actor"] = {
        "update": {"tp": 2} if update is None else update,
        "rollout": {"dp": 2} if rollout is None else rollout,
        "optimizer": {"lr": 1e-2},
        "lora": {**LORA, **lora},
    }
    made["trainer"] |= {"save_every": 1}
    return made


def cut_to(made: dict[str, Any], steps: int) -> dict[str, Any]:
    return {**made, "trainer": {**made["trainer"], "steps": steps}}


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run in one go."""
    run_ranks(run, 2, values(folder))
    return folder / "run"


def convert(*arguments: Any) -> None:
    assert cli.main(["convert", *map(str, arguments), "--quiet"]) == 0


def test_a_run_saves_its_base_once_and_moves_adapters_alone(whole: Path) -> None:
    rows = lines(whole.parent)
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    assert all(row["rollout/logprob_abs_diff_max"] < 1e-5 for row in rows)
    assert 0 < rows[1]["reshard/bytes"] <= 1.05 * rows[1]["reshard/adapter_bytes"]
    assert rows[0]["kl/ref"] == 0 and rows[1]["kl/ref"] != 0
    kept = whole / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["base", "latest", "step_000001", "step_000002"]
    base, actor = ModelDir(kept / "base"), ModelDir(kept / "step_000002/actor")
    assert list(base.manifest.tensors) == ["weight"]
    assert all(".lora." in name for kind in actor.manifest.tensors.values() for name in kind)
    assert actor.manifest.tensors.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    size = sum(path.stat().st_size for path in (kept / "step_000002/actor").glob("*.safetensors"))
    assert size < sum(path.stat().st_size for path in (kept / "base").glob("*.safetensors"))


@pytest.mark.slow
def test_what_was_trained_goes_to_peft_and_transformers_and_comes_back(whole: Path, folder: Path) -> None:
    actor = whole / "checkpoints/step_000002/actor"
    convert(actor, folder / "peft", "--to", "peft")
    convert(actor, folder / "merged", "--to", "hf")
    expected = their_log_probs(folder / "merged")
    assert numpy.abs(expected - their_log_probs(folder / "causal")).max() > 1e-2
    numpy.testing.assert_allclose(their_log_probs(folder / "causal", folder / "peft"), expected, atol=1e-5)
    settings = json.loads((folder / "peft/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 6)
    assert settings["base_model_name_or_path"] == str(folder / "causal")
    bare = their_log_probs(folder / "causal")
    begun = values(folder, "begun", path=str(folder / "peft"), update={"pp": 2})
    merged = {**values(folder, "full"), "model": {**values(folder)["model"], "path": str(actor)}}
    del merged["actor"]["lora"]
    for made, reference in ((begun, bare), (merged, expected)):
        ranks = run_ranks(first_and_train, 2, cut_to(made, 1))
        for found, _ in ranks:
            if "actor" in found:
                numpy.testing.assert_allclose(found["actor"], expected, atol=1e-5)
                numpy.testing.assert_allclose(found["reference"], reference, atol=1e-5)
        assert any("actor" in found for found, _ in ranks)


def pieces(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.safetensors")}


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_in_another_layout(whole: Path, folder: Path) -> None:
    run_ranks(run, 2, cut_to(values(folder, "cut"), 1))
    shutil.copytree(folder / "cut", folder / "moved")
    run_ranks(run, 2, values(folder, "cut"), True)
    expected = pieces(whole / "checkpoints/step_000002")
    assert len(expected) == 2 and pieces(folder / "cut/checkpoints/step_000002") == expected
    assert pieces(folder / "cut/checkpoints/base") == pieces(whole / "checkpoints/base")
    # With the reference elsewhere too, which then is a model of its own, taken from the base.
    moved = {**values(folder, "moved", update={"pp": 2}, rollout={"tp": 2}), "reference": {"layout": {"dp": 2}}}
    run_ranks(run, 2, moved, True)
    assert (folder / "moved/checkpoints/reference").is_dir()
    (_, one), (_, other) = lines(folder), lines(folder, "moved")
    for metric in ("actor/loss", "actor/grad_norm", "kl/ref", "reward/mean"):
        assert other[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-7), metric


@pytest.mark.slow
def test_merging_and_a_warm_start_go_on_bit_for_bit_too(folder: Path) -> None:
    """The base is saved each time where it changes, and the reference beside it."""

    def made(name: str) -> dict[str, Any]:
        found = values(folder, name, merge_every=2, dropout=0.1)
        return {**found, "warm_start": {"steps": 3, "batch_size": 8, "lr": 1e-2}}

    run_ranks(run, 2, cut_to(made("once"), 4))
    for steps in (1, 3, 4):
        run_ranks(run, 2, cut_to(made("often"), steps), steps > 1)
    expected = pieces(folder / "once/checkpoints/step_000004")
    assert len(expected) == 4 and pieces(folder / "often/checkpoints/step_000004") == expected
    rows = lines(folder, "once")
    # After a merge what lies below the adapters travels again.
    assert [row["step"] for row in rows if row.get("reshard/base_bytes")] == [3]
    assert rows[0]["kl/ref"] == 0 and abs(rows[3]["kl/ref"]) > 1e-4
    convert(folder / "once/checkpoints/step_000004/actor", folder / "once-merged", "--to", "hf")
    convert(folder / "once/checkpoints/reference", folder / "once-before", "--to", "hf")
    after, before = their_log_probs(folder / "once-merged"), their_log_probs(folder / "once-before")
    assert numpy.abs(after - before).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"targets": ["q_proj", "qkv_proj"]}, ConfigError, "qkv_proj is q_proj, k_proj, v_proj in one"),
        ({"targets": []}, ConfigError, "expected at least one layer"),
        ({"targets": ["lm_head"]}, ConfigError, "actor.lora.targets: lm_head: expected some of q_proj"),
        ({"rank": 0}, ConfigError, "actor.lora.rank"),
        ({"dropout": 1.0}, ConfigError, "actor.lora.dropout"),
        ({"reference": {"offload": True}}, ConfigError, "reference.offload=true"),
        (
            {"path": "adapter", "warm_start": {"steps": 1, "batch_size": 8, "lr": 1e-3}},
            ConfigError,
            "remove warm_start",
        ),
        ({"update": {"tp": 4}, "rollout": {"dp": 4}}, LayoutError, "tp=4 is above model.num_query_groups=2"),
    ],
)
def test_contradictions_are_refused(folder: Path, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    sections = {name: changes[name] for name in ("reference", "warm_start") if name in changes}
    made = values(folder, **{name: value for name, value in changes.items() if name not in sections}) | sections
    if "update" in changes:
        made["cluster"] = {"ranks": 4}
    complains(lambda: recipe_from_dict(made), [words], error)


def test_adapters_of_another_shape_scale_or_family_are_refused(whole: Path, folder: Path) -> None:
    convert(whole / "checkpoints/step_000002/actor", folder / "theirs", "--to", "peft")
    path = str(folder / "theirs")
    one = {"update": {}, "rollout": {}}
    cases = [
        (dict(path=path, rank=8, alpha=12.0), CheckpointError, ["actor.lora.rank=8"]),
        (dict(path=path, alpha=8.0), ConfigError, ["set actor.lora.alpha to 6"]),
        (dict(path=path, targets=["q_proj"]), CheckpointError, ["expected no such tensor", "targets=q_proj"]),
        (dict(path=str(folder / "causal")), ConfigError, ["expected a LoRA adapter, found a model"]),
        (dict(targets=["qkv_proj"]), ConfigError, ["no layers of qwen2", "down_proj; name some", "implementation"]),
    ]

    def refused(world: Any) -> None:
        for number, (lora, kind, words) in enumerate(cases):
            made = {**values(folder, f"r{number}", **one, **lora), "cluster": {"ranks": 1}}
            complains(lambda made=made: run(world, made), words, kind)

    run_ranks(refused, 1)
