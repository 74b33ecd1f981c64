"""What ``hybridflow init`` writes is trained by ``hybridflow train`` as it is, for each algorithm."""

import json

import pytest

from hybridflow import cli
from hybridflow.flows.registry import ALGORITHMS
from tests.e2e.commands import fork_ranks, run_command, run_well
from tests.support.hf_models import write_model, write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with a tiny model, and rows that have what any algorithm reads."""
    folder = tmp_path_factory.mktemp("user")
    write_model(folder / "model")
    write_tokenizer(folder / "model")
    for name, count in (("train", 64), ("held_out", 4)):
        sums = [(number, number * 7 % 30) for number in range(count)]
        rows = [
            {
                **{"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": str(a + b)},
                **{"chosen": str(a + b), "rejected": str(a + b + 1)},
            }
            for a, b in sums
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_two_steps_of_what_was_written(algorithm, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    name = algorithm.replace("+", "-")
    words = ["--algorithm", algorithm, "--model", "model", "--data", "train.jsonl", "--held-out", "held_out.jsonl"]
    words += ["--teacher", "model"] if algorithm == "distill" else []
    assert cli.main(["init", f"{name}.yaml", "--force", *words]) == 0
    assert f"next: hybridflow train {name}.yaml" in capsys.readouterr().out
    run_well(["train", f"{name}.yaml", "trainer.steps=2", f"run_dir=runs/{name}"], folder, num_ranks=1)
    metrics = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in metrics)


OWN = ["model=model", "data={train: train.jsonl, held_out: held_out.jsonl}"]


def test_four_keys_run_alone_and_on_the_ranks_of_a_launcher(folder):
    (folder / "mine.py").write_text("def score(prompt, response, answer):\n    return float(len(response))\n")
    four = ["train", "grpo", *OWN, "reward=mine:score"]
    done = run_command([*four, "trainer.steps=1", "run_dir=runs/alone"], folder)
    assert done.codes == (0,), done.err
    run_well([*four, "trainer.steps=1", "run_dir=runs/two"], folder, num_ranks=2)
    jobs = [folder / f"runs/{name}/checkpoints/step_000001/job.json" for name in ("alone", "two")]
    kept = [json.loads(job.read_text())["state"]["recipe"] for job in jobs]
    assert [recipe["actor"]["update"]["dp"] for recipe in kept] == [1, 2]
    assert [recipe["cluster"]["ranks"] for recipe in kept] == [1, 2]
    first = [json.loads((folder / f"runs/{name}/metrics.jsonl").read_text()) for name in ("alone", "two")]
    assert first[0]["reward/mean"] == pytest.approx(first[1]["reward/mean"], abs=1e-6)


def test_prompts_a_reward_and_a_model_of_ones_own_need_four_words(tmp_path):
    """No answers, no held-out rows, no recipe; the reward is named by its file."""
    write_model(tmp_path / "model", "Qwen2")
    write_tokenizer(tmp_path / "model")
    prompts = [{"prompt": f"{number}+{number}="} for number in range(64)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    (tmp_path / "rewards.py").write_text("def short(prompt, response):\n    return -float(len(response))\n")
    words = ["train", "grpo", "model=model", "data=prompts.jsonl", "reward=rewards.py:short"]
    done = fork_ranks([*words, "trainer.steps=2"], tmp_path, num_ranks=1)
    assert done.codes == (0,) and done.err.startswith("hybridflow: data.held_out is missing: there is no validation;")
    rows = [json.loads(line) for line in (tmp_path / "runs/grpo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["reward/mean"] < 0 for row in rows)
