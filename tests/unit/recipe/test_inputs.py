"""Files that a recipe names are looked for in the working directory and beside the recipe; a dry run opens them."""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridflow import cli
from hybridflow.checkpoint.store import complete_step
from hybridflow.errors import ConfigError, WriteError
from hybridflow.exit_status import FAILURE, REQUEST, SOURCE, TARGET
from hybridflow.observe.starts import StartRecord, add_start
from hybridflow.recipe.inputs import check_inputs
from hybridflow.recipe.load import load_recipe
from hybridflow.rollout.archive import SegmentName, write_segment
from hybridflow.rollout.log_file import LoggedSample
from hybridflow.sections import to_dict
from tests.support.hf_models import write_tokenizer
from tests.support.recipes import POLICY, write_config

RECIPE = """
name: own
algorithm: grpo
cluster: {ranks: 1}
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, max_context: 64}
data: {train: train.jsonl}
actor: {update: {}, optimizer: {lr: 1e-4}}
rollout: {max_new_tokens: 8, group_size: 2}
trainer: {steps: 10, global_batch_size: 16}
"""
_NUMBERS = itertools.count()
_ONE = np.zeros(1, np.float32)
SAMPLE = LoggedSample(
    prompt_index=0,
    index=0,
    tokens=np.ones(1, np.int32),
    log_probs=_ONE,
    sampled_log_probs=_ONE,
    versions=np.zeros(1, np.int32),
)


def write(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A working directory, and another with the recipe; modules of the first may be imported, as ranks do."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "own.yaml").write_text(RECIPE)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HOME", str(tmp_path))
    return here, there


def module(folder: Path, text: str) -> str:
    """Write a module of a name of its own."""
    name = f"rewards_{next(_NUMBERS)}"
    (folder / f"{name}.py").write_text(text)
    return name


def test_a_file_is_found_here_then_beside_the_recipe(folders):
    here, there = folders
    recipe = there / "own.yaml"
    assert load_recipe(recipe).data.train == "train.jsonl", "it is nowhere"
    write(there / "train.jsonl")
    assert load_recipe(recipe).data.train == str(there / "train.jsonl")
    write(here / "train.jsonl")
    assert load_recipe(recipe).data.train == "train.jsonl"
    write_config(there / "model", POLICY)
    write(there / "rows-1.jsonl")
    (there / "chat.jinja").write_text("")
    found = load_recipe(
        recipe,
        [
            "model={path: model}",
            "data.train=null",
            "data.mixture=[{path: rows-*.jsonl}]",
            "data.chat_template=chat.jinja",
        ],
    )
    assert found.model.path == str(there / "model") and found.data.chat_template == str(there / "chat.jinja")
    assert found.data.mixture[0].path == str(there / "rows-*.jsonl")
    # What a run writes is relative to the directory of the command.
    assert found.run_dir == "runs/own"


def test_a_module_is_found_here_then_beside_the_recipe(folders, monkeypatch):
    here, there = folders
    name, gone = module(there, "def score(prompt, response, answer): return 1.0"), "rewards_nowhere:score"
    asked = [f"reward.function={name}:score", f"metrics.callbacks=[{name}:score, {gone}]"]
    assert load_recipe(there / "own.yaml", asked).reward.function == f"{name}:score", "not below the working directory"
    monkeypatch.chdir(there.parent)
    for recipe in (Path("there/own.yaml"), there / "own.yaml"):
        found = load_recipe(recipe, asked)
        assert found.reward.function == f"there.{name}:score"
        assert found.metrics.callbacks == (f"there.{name}:score", gone)
    path = f"reward.function={name}.py:score"
    assert load_recipe(there / "own.yaml", [path]).reward.function == f"there.{name}:score"
    assert load_recipe(there / "own.yaml", ["reward.function=length"]).reward.function == "length"
    (there.parent / f"{name}.py").touch()
    assert load_recipe(there / "own.yaml", asked).reward.function == f"{name}:score"


@pytest.mark.parametrize("key", ["data.train", "data.held_out", "data.chat_template", "tokenizer.path"])
def test_a_missing_file_names_both_places(folders, key):
    here, there = folders
    write(there / "train.jsonl")
    recipe = load_recipe(there / "own.yaml", [f"{key}=gone"])
    with pytest.raises(ConfigError) as raised:
        check_inputs(recipe, there)
    words = f"{key}='gone': no such file in {here}, nor beside the recipe in {there}; name one that is there"
    assert str(raised.value) == words
    check_inputs(load_recipe(there / "own.yaml", ["data.train=s3://bucket/rows.parquet"]), there)
    arithmetic = "data.arithmetic={num_train: 4, num_held_out: 2}"
    check_inputs(load_recipe(there / "own.yaml", ["data.train=made.jsonl", arithmetic]), there)


def test_a_missing_model_names_both_places(folders):
    here, there = folders
    with pytest.raises(ConfigError, match=rf"model\.path='gone': is not in {here}, nor beside the recipe in {there}: "):
        load_recipe(there / "own.yaml", ["model={path: gone}"])


@pytest.mark.parametrize(
    ("rank", "place", "overrides", "speaks", "status"),
    [
        (0, 0, ["model={path: gone}"], True, REQUEST),
        (1, 1, ["model={path: gone}"], False, FAILURE),
        (2, 0, ["model={path: gone}"], True, FAILURE),
        (2, 0, ["data.train=gone"], True, FAILURE),
        (2, 0, ["trainer.stepz=3"], False, REQUEST),
    ],
)
def test_a_file_missing_on_one_node_is_told_there(folders, monkeypatch, capsys, rank, place, overrides, speaks, status):
    """Rank 0 of another node may see it, and would then only say that the ranks of this one did not come.

    Then another node may do, and status 1 has the job begin again; of several, srun returns the largest.
    """
    monkeypatch.setattr(cli, "_AFTER_RANK_0_S", 0.0)
    for name, value in (("RANK", rank), ("LOCAL_RANK", place), ("WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    assert cli.main(["train", str(folders[1] / "own.yaml"), *overrides, "--dry-run"]) == status
    error = capsys.readouterr().err
    who = f"rank {rank} on {socket.gethostname()}: " if rank > 0 else ""
    assert error.startswith(f"hybridflow: {who}") and error.count("gone") > 0 if speaks else error == ""


def dry(folders, capsys, *overrides: str) -> tuple[int, str, str]:
    """Exit status, what is said of the inputs, and the error of a dry run; which has written nothing."""
    here, there = folders
    before = {path for path in here.rglob("*") if "__pycache__" not in path.parts}
    status = cli.main(["train", str(there / "own.yaml"), *overrides, "--dry-run"])
    told = capsys.readouterr()
    assert {path for path in here.rglob("*") if "__pycache__" not in path.parts} == before, "a start was counted"
    return status, told.out.partition("\ninputs\n")[2], told.err.removeprefix(UNJUDGED)


UNJUDGED = "hybridflow: data.held_out is missing: there is no validation; name a file of held-out rows to have it\n"
"""A warning, which is tested elsewhere: the recipe has no held-out rows."""

OWN = "def score(response, level):\n    return float(level)\n"
"""A reward that asks for a field."""

FAILS = {
    "no training file": (["data.train=gone.jsonl"], "data.train='gone.jsonl': no such file in "),
    "a name of the hub": (
        ["data.train=openai/gsm8k"],
        "name one that is there; `hf download openai/gsm8k --repo-type dataset --local-dir openai/gsm8k` fetches a",
    ),
    "no held-out file": (["data.held_out=gone.jsonl"], "data.held_out='gone.jsonl': no such file in "),
    "another field": (["data.prompt_field=question"], "train.jsonl:1: no field 'question'; found ['level', 'prompt']"),
    "no answer to compare with": (["reward={}"], "train.jsonl:1: no field 'answer'; found ['level', 'prompt'], and"),
    "no module": (["reward.function=gone:score"], "No module named 'gone', in {here} or on PYTHONPATH; give one of"),
    "a path": (["reward.function=/elsewhere/mine.py:score"], "found a path from / on; start in its directory"),
    "a path upwards": (["reward.function=../sub/mine.py:score"], "found a path from .. on; start in its directory"),
    "a file alone": (["reward.function=mine.py"], "reward.function='mine.py': names no function of a module; give"),
    "a point for a colon": (["reward.function={module}.text"], "did you mean {module}:text? give one of exact_match"),
    "a word like a built-in": (["reward.function=exact_mach"], "of a module; did you mean exact_match? give one of"),
    "no function": (["reward.function={module}:gone"], "has no attribute 'gone'; give one of"),
    "no adapter": (["actor.lora={rank: 4, path: gone}"], "actor.lora.path='gone': no such file in "),
    "no environment": (["rollout.environment.name=gone:Env"], "rollout.environment.name='gone:Env': ModuleNotFoundE"),
    "an environment's signature": (
        ["rollout.environment.name={module}:Odd"],
        "environment '{module}:Odd' ({module}.py:10) on train.jsonl:1: TypeError: Odd.reset() takes 2 positional",
    ),
    "an environment without a method": (
        ["rollout.environment.name={module}:Half"],
        "rollout.environment.name='{module}:Half': has no step; give a class with reset(prompt, answer) and step(resp",
    ),
    "no callback": (["metrics.callbacks=['gone:f']"], "metrics.callbacks='gone:f': ModuleNotFoundError"),
    "its parameters": (["reward.function={module}:two"], "{module}.py:3 two(level) does not ask for the response"),
    "what it returns": (["reward.function={module}:text"], "{module}.py:5) on train.jsonl:1"),
    "a stop text for vLLM": (
        ["rollout.engine.kind=vllm", "rollout.stop=[x]"],
        "rollout.stop=['x']: rollout.engine.kind",
    ),
    "what it raises": (
        ["reward.function={module}:wrong"],
        "ZeroDivisionError: division by zero at {module}.py:7; mend the",
    ),
}
WRONG = """
\ndef two(level): return 1.0
\ndef text(response): return "good"
\ndef wrong(response): return 1 / 0
\nclass Odd:
    def reset(self, prompt): return None
    def step(self, response): return "", int(response), True
\nclass Even(Odd):
    def reset(self, prompt, answer): return None
\nclass Half:
    def reset(self, prompt, answer): return None
\ndef silent(response, answer): return 1.0 if response else None
"""


@pytest.mark.parametrize("case", FAILS)
def test_a_dry_run_fails_where_the_run_would(folders, capsys, case):
    here, _ = folders
    overrides, words = FAILS[case]
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    names = {"module": module(here, OWN if case in ("no answer to compare with",) else WRONG), "here": str(here)}
    given = [each.format(**names) if "{module}" in each else each for each in overrides]
    if not any(each.startswith("reward") for each in given):
        given.append(f"reward.function={module(here, OWN)}:score")
    status, _, error = dry(folders, capsys, *given)
    assert status == 2 and len(error.splitlines()) == 1
    assert error.startswith("hybridflow: ") and words.format(**names) in error


def refused(folders, capsys, run_dir, *more):
    """Status and error of a dry run whose inputs are all there."""
    here, _ = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    status, _, error = dry(folders, capsys, f"reward.function={module(here, OWN)}:score", f"run_dir={run_dir}", *more)
    return status, error


def test_a_run_directory_of_too_long_a_name(folders, capsys):
    """Whether it holds a run is looked at first, and fails."""
    status, error = refused(folders, capsys, "x" * 300)
    assert status == TARGET and "cannot be written: File name too long; set another run_dir" in error


@pytest.mark.parametrize(("run_dir", "reason"), [("afile/x", "Not a directory"), ("afile", "File exists")])
def test_a_dry_run_says_what_the_run_would_of_a_file_in_the_way(folders, capsys, run_dir, reason):
    (folders[0] / "afile").write_text("")
    status, error = refused(folders, capsys, run_dir)
    assert (status, error) == (TARGET, f"hybridflow: {run_dir}: cannot be written: {reason}; set another run_dir\n")
    with pytest.raises(WriteError) as met:
        add_start(Path(run_dir), StartRecord(number=1, began_s=0.0, step=None, ranks=1))
    assert error == f"hybridflow: {met.value}\n"


def test_a_dry_run_refuses_the_directory_of_a_run_unless_it_resumes(folders, capsys):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    saved = load_recipe(there / "own.yaml", [f"reward.function={module(here, OWN)}:score", "run_dir=run", "seed=7"])
    complete_step(here / "run", 3, {"recipe": to_dict(saved)}, {}, keep_last=1)
    status, error = refused(folders, capsys, "run")
    assert (
        status == 2
        and "run: holds a run with a checkpoint of step 3; add --resume (resume=True in Python) to go on from it"
        in error
    )
    # Before the plan is made and printed.
    assert cli.main(["train", str(there / "own.yaml"), "run_dir=run", "--dry-run"]) == 2
    assert capsys.readouterr().out == ""
    assert refused(folders, capsys, "run", "--resume", "seed=7", f"reward.function={saved.reward.function}") == (0, "")
    status, error = refused(folders, capsys, "run", "--resume", f"reward.function={saved.reward.function}")
    assert status == 3 and "the checkpoint was written with seed=7, the recipe now has " in error
    (here / "run/starts.jsonl").touch()
    status, error = refused(folders, capsys, "run/inner")
    assert status == 2 and "run is another run's directory" in error


def test_a_dry_run_tells_what_it_has_tried(folders, capsys):
    here, _ = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    write(here / "held.jsonl", {"prompt": "1+2=", "level": 4})
    name = module(here, OWN)
    status, told, error = dry(folders, capsys, f"reward.function={name}:score", "data.held_out=held.jsonl")
    assert (status, error) == (0, "")
    assert told.splitlines() == [
        "data.train: train.jsonl:1 can be read",
        "data.held_out: held.jsonl:1 can be read",
        f"reward '{name}:score': gives 3 for an empty response to train.jsonl:1, which has no answer "
        "(fields: prompt, level; see data.answer_field)",
    ]
    wrong = [f"reward.function={module(here, WRONG)}:wrong", "reward.on_failure=drop"]
    status, told, error = dry(folders, capsys, *wrong)
    assert (status, error) == (0, "") and "ZeroDivisionError" in told
    assert told.endswith("; the run would go on, as reward.on_failure=drop says\n")
    even = f"rollout.environment.name={module(here, WRONG)}:Even"
    status, told, error = dry(folders, capsys, even, "data.answer_field=level")
    assert (status, error) == (0, "") and told.endswith(
        "Even': ends and gives 3 for the answer of train.jsonl:1 as a response\n"
    )
    status, told, error = dry(folders, capsys, even)
    assert (status, error) == (0, "") and "on train.jsonl:1 with response '': ValueError: invalid literal" in told
    arithmetic = ["data.train=a.jsonl", "data.held_out=b.jsonl", "data.arithmetic={num_train: 4, num_held_out: 2}"]
    status, told, error = dry(folders, capsys, *arithmetic)
    # A path that is misspelled is seen here.
    assert (status, error) == (0, "") and "data.train: a.jsonl as data.arithmetic makes it, row 0 can be read" in told
    assert "reward 'exact_match': gives 0 for an empty response to a.jsonl as data.arithmetic makes it" in told
    assert ", and 1 for its answer as a response\n" in told
    # Many a reward has nothing to return for what is no answer.
    silent = f"reward.function={module(here, WRONG)}:silent"
    status, told, error = dry(folders, capsys, silent, "data.answer_field=level")
    assert status == 2 and "on train.jsonl:1 with response '': returned None; expected a finite number" in error


def test_a_dry_run_looks_for_the_weights(folders, capsys):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    config = write_config(here / "hf")
    write_tokenizer(here / "hf")
    given = [f"reward.function={module(here, OWN)}:score", "model={path: hf}", "tokenizer={}"]
    status, _, error = dry(folders, capsys, *given)
    assert status == SOURCE and "expected model.safetensors or model.safetensors.index.json; restore" in error
    (config / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert (
        "one.safetensors: missing; model.safetensors.index.json has 1 tensors in it" in dry(folders, capsys, *given)[2]
    )
    (config / "one.safetensors").touch()
    assert dry(folders, capsys, *given)[0] == 0


def test_a_dry_run_compares_the_tokenizers_of_the_models(folders, capsys):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    for name in ("hf", "teacher", "other"):
        write_config(here / name)
        write_tokenizer(here / name)
        (here / name / "model.safetensors").touch()
    file = here / "other/tokenizer.json"
    file.write_text(file.read_text().replace("<|start|>", "<|begin|>"))
    given = ["algorithm=distill", "rollout.group_size=1", "model={path: hf}", "tokenizer={}"]
    assert dry(folders, capsys, *given, "teacher.model.path=teacher")[0] == 0
    status, _, error = dry(folders, capsys, *given, "teacher.model.path=other")
    assert status != 0 and "teacher.model.path='other': token 1 is '<|begin|>' in other/tokenizer.json" in error
    # The run would train a tokenizer.
    given = ["algorithm=distill", "rollout.group_size=1", "teacher.model.path=teacher"]
    status, _, error = dry(folders, capsys, *given)
    assert status == REQUEST and "set tokenizer.path to that file" in error
    assert "tokenizer.path: missing; teacher.model.path='teacher' knows the tokens of teacher/tokenizer.json" in error
    assert dry(folders, capsys, *given, "tokenizer.path=teacher/tokenizer.json")[0] == 0


def test_a_dry_run_looks_for_the_samples_to_replay(folders, capsys):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    rows = [(1, replace(SAMPLE, prompt_index=prompt_index, index=index)) for prompt_index, index in [(0, 0), (1, 0)]]
    write_segment(here / "old/rollouts", SegmentName(1, 1, 0), rows, {0: [1], 1: [1]}, {})
    (here / "empty").mkdir()
    given = [f"reward.function={module(here, OWN)}:score", "trainer.global_batch_size=2"]
    status, _, error = dry(folders, capsys, *given, "rollout.replay=empty")
    assert status != 0 and "rollout.replay: empty/rollouts holds no archive; name the directory of a run" in error
    status, _, error = dry(folders, capsys, *given, "rollout.replay=old")
    assert status != 0 and "rollout.replay=old: prompt 0, sample 1: is not in the archive; replay a run" in error
    rows = [(1, replace(SAMPLE, index=1))]
    write_segment(here / "old/rollouts", SegmentName(1, 1, 1), rows, {0: [1]}, {})
    assert dry(folders, capsys, *given, "rollout.replay=old")[0] == 0


def test_a_dry_run_says_that_a_chat_template_is_not_applied(folders, capsys):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "level": 3})
    write_config(here / "hf")
    write_tokenizer(here / "hf", chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (here / "hf/model.safetensors").touch()
    given = [f"reward.function={module(here, OWN)}:score", "model={path: hf}", "tokenizer={}"]
    words = "prompts are plain text, so the tokenizer's chat template is not applied; for a chat model set"
    assert words in dry(folders, capsys, *given)[1]
    assert words not in dry(folders, capsys, *given, "data.prompt_as_message=true")[1]


SITE = "time: 30\ncontainer: {{kind: {kind}, image: {image}}}\n"


@pytest.mark.parametrize(
    ("kind", "image", "is_there"),
    [
        ("apptainer", "gone.sif", False),
        ("apptainer", "docker://ubuntu", True),
        ("apptainer", "here.sif", True),
        ("pyxis", "/images/gone.sqsh", False),
        ("pyxis", "nvcr.io#nvidia/pytorch:25.01-py3", True),
    ],
)
def test_a_dry_run_of_a_launch_looks_for_the_image(folders, capsys, kind, image, is_there):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "answer": "2"})
    (here / "here.sif").write_text("")
    (here / "site.yaml").write_text(SITE.format(kind=kind, image=image).replace("time: 30", 'time: "30"'))
    command = ["launch", "slurm", str(there / "own.yaml"), "--site", "site.yaml"]
    status = cli.main([*command, "--dry-run"])
    error = capsys.readouterr().err
    assert status == (0 if is_there else 2)
    assert is_there or f"container.image='{image}' in the site settings: no such file" in error
    # The batch file alone may be looked at anywhere.
    assert cli.main([*command, "--print"]) == 0
    assert is_there or "the job fails unless its nodes have it" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_packages_of_the_container_are_not_asked_for_here(folders, capsys):
    here, there = folders
    write(here / "train.jsonl", {"prompt": "1+1=", "answer": "2"})
    (here / "here.sif").write_text("")
    (here / "site.yaml").write_text('time: "30"\ncontainer: {kind: apptainer, image: here.sif}\n')
    (here / "plain.yaml").write_text('time: "30"\n')
    name = module(here, "import no_such_package\n")
    command = ["launch", "slurm", str(there / "own.yaml"), f"reward.function={name}:score", "--dry-run", "--site"]
    assert cli.main([*command, "site.yaml"]) == 0
    assert "warning: not checked, since the job's environment is another one" in capsys.readouterr().err
    assert cli.main([*command, "plain.yaml"]) == 2
    assert "No module named 'no_such_package'" in capsys.readouterr().err
    for where in ("local", "mpi"):
        assert cli.main(["launch", where, str(there / "own.yaml"), f"reward.function={name}:score", "--dry-run"]) == 2
        assert cli.main(["launch", where, str(there / "own.yaml"), "--dry-run"]) == 0
        assert re.search(
            r"-m hybridflow train .*\n# data\.train: .*train\.jsonl:1 can be read\n", capsys.readouterr().out
        )
    assert cli.main(["launch", "slurm", str(there / "own.yaml"), "--dry-run", "--site", "plain.yaml"]) == 0
    assert re.search(r"\n# data\.train: .*train\.jsonl:1 can be read\n", capsys.readouterr().out)
