"""What ``hybridflow init`` writes, asks and refuses. No torch."""

import ast
import io
import json

import pytest
import yaml

from hybridflow import cli
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.recipe.load import load_recipe
from tests.support.recipes import write_config

USER = {"role": "user", "content": "1+2="}
VERL = {"answer_field": "reward_model.ground_truth"}
GIVEN = ["--model", "model", "--data", "train.jsonl", "--held-out", "held_out.jsonl"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_config(tmp_path / "model")
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    return tmp_path


def init(*words):
    return cli.main(["init", *words, *GIVEN])


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_a_short_recipe_that_loads_and_its_functions(algorithm, folder, capsys):
    more = ["--teacher", "model"] if algorithm == "distill" else []
    assert init("mine.yaml", "--algorithm", algorithm, *more) == 0
    text = (folder / "mine.yaml").read_text()
    assert len(text.splitlines()) <= 15 and max(map(len, text.splitlines())) <= 120
    recipe = load_recipe("mine.yaml")
    assert recipe.algorithm == algorithm and recipe.run_dir == "runs/mine"
    is_scored = recipe.reward.function == "rewards:score"
    assert is_scored is (folder / "rewards.py").exists() is (algorithm not in UNSCORED)
    assert (algorithm == "safe-rlhf") is (folder / "costs.py").exists()
    for name in ("rewards", "costs"):
        if (folder / f"{name}.py").exists():
            (function,) = (node for node in ast.parse((folder / f"{name}.py").read_text()).body if is_function(node))
            assert [each.arg for each in function.args.args] == ["prompt", "response", "answer"]
    # The defaults that are shown are those that the recipe has: written out, they change nothing.
    shown = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ") and line.endswith("}")]
    values = {**yaml.safe_load(text), **yaml.safe_load("\n".join(shown))}
    (folder / "out.yaml").write_text(yaml.safe_dump({"name": "mine", **values}))
    assert len(shown) >= 2 and load_recipe("out.yaml") == recipe


def test_prompts_go_through_the_chat_template_of_a_model_that_has_one(folder):
    assert init("--algorithm", "grpo") == 0 and not load_recipe("recipe.yaml").data.prompt_as_message
    config = folder / "model/tokenizer_config.json"
    for text, has_one in (('{"chat_template": "{{ messages }}"}', True), ("{}", False), ("[", False), ("3", False)):
        config.write_text(text)
        assert init("--algorithm", "grpo", "--force") == 0
        assert load_recipe("recipe.yaml").data.prompt_as_message is has_one
        assert ("chat template" in (folder / "recipe.yaml").read_text()) is has_one
    (folder / "model/chat_template.jinja").write_text("{{ messages }}")
    assert init("--algorithm", "grpo", "--force") == 0 and load_recipe("recipe.yaml").data.prompt_as_message


UNSCORED = ("distill", "dpo", "ipo", "kto", "reward-model", "sft")


def is_function(node):
    return isinstance(node, ast.FunctionDef)


@pytest.mark.parametrize(
    ("algorithm", "row", "keys", "lacking"),
    [
        ("grpo", {"question": "1+2=", "answer": "3"}, {"prompt_field": "question"}, None),
        ("grpo", {"prompt": "1+2=", "solution": "3"}, {"answer_field": "solution"}, None),
        ("grpo", {"prompt": [USER], "reward_model": {"ground_truth": "3"}}, VERL, None),
        ("grpo", {"prompt": "1+2="}, {}, None),
        ("grpo", {"query": "1+2=", "gold": "3"}, {"prompt_field": "query"}, "data.answer_field"),
        ("grpo", {"text": "1+2=3"}, {}, "data.prompt_field"),
        (
            "sft",
            {"instruction": "1+2=", "output": "3"},
            {"prompt_field": "instruction", "solution_field": "output"},
            None,
        ),
        ("sft", {"question": "1+2=", "answer": "3"}, {"prompt_field": "question"}, None),
        ("sft", {"messages": [USER, {"role": "assistant", "content": "3"}]}, {}, None),
        ("sft", {"conversations": [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]}, {}, None),
        ("dpo", {"question": "1+2=", "chosen": "3"}, {"prompt_field": "question"}, "data.rejected_field"),
        ("kto", {"prompt": "1+2=", "completion": "3", "label": True}, {"wanted_field": "label"}, None),
        ("kto", {"prompt": "1+2=", "chosen": "3", "rejected": "4"}, {}, None),
    ],
)
def test_the_fields_of_the_first_row_are_named(algorithm, row, keys, lacking, folder, capsys):
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert init("--algorithm", algorithm) == 0
    data = {"train": "train.jsonl", **keys, "held_out": "held_out.jsonl"}
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["data"] == data
    told = capsys.readouterr().err
    assert (f"; set {lacking} in the recipe" in told) if lacking else told == "", told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ""),
        ("\n[]\n", "train.jsonl:2: expected a JSON object"),
        ('[{"a": 1}]', "found list [{'a': 1}]; expected one"),
    ],
)
def test_data_that_cannot_be_read_are_told_of_and_keep_the_usual_names(text, says, folder, capsys):
    (folder / "train.jsonl").write_text(text)
    assert init("--algorithm", "grpo", "--force") == 0
    told = capsys.readouterr().err
    assert says in told if says else told == "", told
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["data"]["train"] == "train.jsonl"


def test_the_reward_that_is_written_scores_what_is_right_highest(folder):
    assert init("--algorithm", "grpo") == 0
    found = {}
    exec((folder / "rewards.py").read_text(), found)
    right, nearly, wrong = (found["score"]("27+35=", response, "62") for response in ("62", "63", ""))
    assert right == 1.0 and 0 < nearly < 0.6 and wrong == 0.0
    # A prompt without an answer, and an answer that is a number.
    assert found["score"]("Tell a joke.", "ha", "") > found["score"]("Tell a joke.", "ha ha", "")
    assert found["score"]("27+35=", "62", 62) == 1.0


def test_the_next_command_can_be_copied(folder, capsys):
    assert init("my recipe.yaml", "--algorithm", "sft") == 0
    assert capsys.readouterr().out.endswith("; next: hybridflow train 'my recipe.yaml'\n")
    assert "hybridflow plan job 'my recipe.yaml'\n" in (folder / "my recipe.yaml").read_text()


def test_ranks_nodes_and_rewards_of_hybridflow(folder, capsys):
    assert init("--algorithm", "ppo", "--reward", "exact_match", "--ranks", "16", "--nodes", "2") == 0
    assert capsys.readouterr().out == (
        "wrote recipe.yaml; next: hybridflow launch slurm recipe.yaml --nodes 2 --time 24:00:00\n"
    )
    recipe = load_recipe("recipe.yaml")
    assert (recipe.cluster.ranks, recipe.cluster.ranks_per_node, recipe.critic.layout.dp) == (16, 8, 16)
    assert recipe.reward.function == "exact_match" and not (folder / "rewards.py").exists()
    assert "# What it leaves out has defaults: hybridflow plan job recipe.yaml --nodes 2\n" in recipe_text(folder)


def test_no_comment_speaks_of_what_the_run_does_not_read(folder):
    (folder / "train.jsonl").write_text('{"prompt": "1+2=", "completion": "3"}\n')
    assert cli.main(["init", "--algorithm", "sft", "--model", "model", "--data", "train.jsonl"]) == 0
    text = recipe_text(folder)
    assert "\ndata: train.jsonl\n" in text and "solution" not in text and "max_new_tokens" not in text


def recipe_text(folder):
    return (folder / "recipe.yaml").read_text()


def test_a_function_that_is_installed_is_not_written(folder, capsys):
    assert init("--algorithm", "grpo", "--reward", "json.decoder:scanstring") == 0
    assert capsys.readouterr().out == "wrote recipe.yaml; next: hybridflow train recipe.yaml\n"
    assert "scanstring  # scanstring, larger is better\n" in (folder / "recipe.yaml").read_text()
    assert init("--algorithm", "grpo", "--reward", "nowhere_else.scores:good", "--force") == 0
    assert "# good(prompt, response, answer), larger is better\n" in (folder / "recipe.yaml").read_text()
    assert "def good(" in (folder / "nowhere_else/scores.py").read_text() and not (folder / "json").exists()
    assert init("--algorithm", "grpo", "--reward", "mine.py:good", "--force") == 0
    assert "def good(" in (folder / "mine.py").read_text() and not (folder / "mine").exists()


def test_nothing_is_written_over(folder, capsys):
    (folder / "recipe.yaml").write_text("mine")
    assert init("--algorithm", "grpo") == 4
    assert "recipe.yaml: is there already; give another file, or --force" in capsys.readouterr().err
    (folder / "rewards.py").write_text("from mine import score\n")
    assert init("--algorithm", "grpo", "--force") == 0
    assert (folder / "rewards.py").read_text() == "from mine import score\n"
    assert capsys.readouterr().out.startswith("wrote recipe.yaml; next")
    assert load_recipe("recipe.yaml").algorithm == "grpo"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--algorithm", "gropo", *GIVEN], "--algorithm 'gropo': did you mean grpo? expected one of cispo, dapo"),
        (["--algorithm", "grpo"], "init: --model, --data: missing; give them, or start on a terminal"),
        (["--algorithm", "distill", *GIVEN], "init: --teacher: missing"),
        (["--algorithm", "grpo", *GIVEN, "--data", "none.jsonl"], "--data 'none.jsonl': no such file"),
        (["--algorithm", "grpo", *GIVEN, "--data", "my/data"], "name one that is there; `hf download my/data --repo"),
        (["--algorithm", "grpo", *GIVEN, "--held-out", "none.jsonl"], "--held-out 'none.jsonl': no such file"),
        (["--algorithm", "grpo", *GIVEN, "--model", "."], "recipe.yaml: model.path='.': expected a directory"),
        (["--algorithm", "grpo", *GIVEN, "--ranks", "0"], "--ranks 0: expected a number of at least 1"),
        (["--algorithm", "grpo", *GIVEN, "--ranks", "3", "--nodes", "2"], "--ranks 3 does not fill --nodes 2"),
        (["--algorithm", "sft", *GIVEN, "--reward", "mine:score"], "algorithm=sft scores nothing; remove it"),
        (["--algorithm", "grpo", *GIVEN, "--reward", "bad:score"], "bad.py: does not define score"),
        (["--algorithm", "grpo", *GIVEN, "--reward", "broken:score"], "broken.py: cannot be read as Python"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(words, says, folder, capsys):
    (folder / "bad.py").write_text("def other():\n    pass\n")
    (folder / "broken.py").write_text("def (")
    assert cli.main(["init", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "recipe.yaml").exists() and not (folder / "rewards.py").exists()


def test_a_terminal_is_asked_until_the_answer_will_do(folder, monkeypatch, capsys):
    answers = "gropo\ngrpo\nnowhere\nmodel\ntrain.jsonl\nheld_out.jsonl\nnowhere_else:good\nmany\n2\n"
    terminal = io.StringIO(answers)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["init"]) == 0
    told = capsys.readouterr()
    assert told.err.count("expected one of cispo") == 1 and "'nowhere': no such directory" in told.err
    assert "found 'many', expected a number" in told.err and terminal.read() == ""
    recipe = load_recipe("recipe.yaml")
    assert (recipe.cluster.ranks, recipe.reward.function) == (2, "nowhere_else:good")
    assert "def good(" in (folder / "nowhere_else.py").read_text()


def test_what_options_give_is_not_asked_and_an_end_is_told(monkeypatch, capsys):
    terminal = io.StringIO("")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["init", "--algorithm", "grpo"]) == 2
    assert (
        "init: model: a directory, or a name in Hugging Face's cache: no answer; give it, or use options"
        in capsys.readouterr().err
    )
    assert init("--algorithm", "grpo") == 0


def test_a_place_that_cannot_be_written_is_told(folder, capsys):
    assert init("train.jsonl/mine.yaml", "--algorithm", "grpo") == 4
    assert "train.jsonl: cannot be written: File exists" in capsys.readouterr().err
    assert not (folder / "rewards.py").exists()


def test_ctrl_c_ends_quietly(folder, monkeypatch, capsys):
    def interrupt(question):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", interrupt)
    assert cli.main(["init"]) == 130
    assert capsys.readouterr().err == "\n" and not (folder / "recipe.yaml").exists()


def test_odd_names_survive_yaml(folder):
    odd = "a: b, {c} #1.jsonl"
    (folder / odd).write_text(json.dumps({"prompt": "1"}))
    assert cli.main(["init", "--algorithm", "sft", *GIVEN, "--data", odd]) == 0
    assert load_recipe("recipe.yaml").data.train == odd
