"""What docs/from-verl.md shows as the same run: recipe and reward on rows of verl, with a tiny model."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow import cli
from tests.e2e.commands import run_well
from tests.support.hf_models import write_model, write_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/from-verl.md").read_text(encoding="utf-8")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
TINY = [
    "cluster.ranks=1",
    "actor.update={dp: 1}",
    "actor.rollout={dp: 1}",
    "trainer.steps=1",
    "rollout.max_new_tokens=4",
]
TINY += [
    "trainer.global_batch_size=20",
    "trainer.mini_batch_size=10",
    "data.max_prompt_tokens=16",
    "model.max_context=32",
]
MODEL = "models/Qwen2.5-7B-Instruct"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").mkdir()
    for split in ("train", "test"):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{a}+1"}],
                "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
            }
            for a in range(8)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"gsm8k/{split}.parquet")
    write_model(tmp_path / MODEL, "Qwen2")
    write_tokenizer(tmp_path / MODEL, chat_template=TEMPLATE)
    (recipe,), (reward,) = blocks("yaml"), blocks("python")
    Path("gsm8k.yaml").write_text(recipe)
    Path("gsm8k_reward.py").write_text(reward)
    return tmp_path


@pytest.mark.slow
def test_the_recipe_trains_on_the_rows_of_verl_and_fits_eight_ranks(folder, capsys):
    assert cli.main(["plan", "job", "gsm8k.yaml", "model.max_context=64", "rollout.max_new_tokens=4"]) == 0
    assert "actor.rollout tp2.pp1.dp4" in capsys.readouterr().out
    run_well(["train", "gsm8k.yaml", *TINY], folder, num_ranks=1)
    (step,) = [json.loads(line) for line in (folder / "runs/gsm8k/metrics.jsonl").read_text().splitlines()]
    assert step["step"] == 1 and 0 <= step["reward/mean"] <= 1
    namespace = {}
    exec(blocks("python")[0], namespace)
    scores = [namespace["compute_score"]("", text, "1000") for text in ("so it is #### 1,000", "#### 999", "1000")]
    assert scores == [1.0, 0.0, 1.0]
