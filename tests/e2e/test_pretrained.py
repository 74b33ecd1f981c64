"""``hybridflow train`` from a directory of Hugging Face: a run, a resume, and what is wrong with it, said once."""

import json

import pytest

from tests.e2e.commands import fork_ranks, lasting_metrics, run_command, run_well, without_validations, write_recipe
from tests.support.hf_models import write_model, write_tokenizer

OF_DIRECTORY = ["model={path: policy, max_context: 32}", "warm_start=null", "trainer.save_every=1"]
RUN = ["train", "tiny.yaml", *OF_DIRECTORY, "actor.update={pp: 2}", "actor.rollout={tp: 2}"]


@pytest.fixture
def folder(tmp_path):
    write_recipe(tmp_path)
    write_model(tmp_path / "policy", "Llama", num_hidden_layers=2)
    write_tokenizer(tmp_path / "policy", has_start=True)
    return tmp_path


@pytest.mark.slow
def test_train_and_resume(folder):
    run_well([*RUN, "run_dir=whole"], folder)
    rows = lasting_metrics(folder / "whole")
    assert len(rows) == 2 and rows[1]["actor/grad_norm"] > 0
    for argv in (["trainer.steps=1"], ["--resume"]):
        run_well([*RUN, *argv], folder)
    assert without_validations(lasting_metrics(folder / "run")) == without_validations(rows)


def cut(folder):
    file = folder / "policy/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def widen(folder):
    file = folder / "policy/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 64}))


def lose_tokenizer(folder):
    (folder / "policy/tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut, ["policy/model.safetensors"]),
        pytest.param(widen, ["policy", "mlp"], marks=pytest.mark.slow),
        pytest.param(lose_tokenizer, ["tokenizer.path: missing", "model.path='policy'"], marks=pytest.mark.slow),
    ],
)
def test_damaged_directory_is_told_by_one_rank(folder, change, says):
    change(folder)
    done = fork_ranks(RUN, folder)
    done.complains_once(*says)
    assert done.codes[0] == done.codes[1] in (2, 3) and not (folder / "run/checkpoints").exists()


def test_directory_that_is_not_there_starts_no_rank(folder):
    done = run_command([*RUN, "model.path=nowhere"], folder)
    done.complains_once("tiny.yaml: model.path='nowhere'", "config.json")
    assert done.codes == (2,)
