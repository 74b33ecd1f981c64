"""What pages for users of verl and slime show as the same run, on their rows, with a tiny model."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow import cli
from tests.e2e.commands import run_well
from tests.support.hf_models import write_model, write_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
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


def blocks(language, page="from-verl"):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


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


@pytest.mark.slow
def test_the_recipe_of_slime_trains_on_its_rows_and_fits_eight_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"{a}+1"}], "label": str(a + 1)} for a in range(8)]
    for name in ("math", "aime"):
        Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(tmp_path / "models/Qwen3-4B", "Qwen3")
    write_tokenizer(tmp_path / "models/Qwen3-4B", chat_template=TEMPLATE)
    (recipe,) = blocks("yaml", "from-slime")
    Path("math.yaml").write_text(recipe)
    assert cli.main(["plan", "job", "math.yaml", "model.max_context=64", "rollout.max_new_tokens=4"]) == 0
    assert "actor.rollout tp2.pp1.dp4" in capsys.readouterr().out
    tiny = ["trainer.global_batch_size=16", "trainer.mini_batch_size=8", "trainer.validation_samples=2"]
    run_well(["train", "math.yaml", *TINY[:5], *TINY[7:], *tiny], tmp_path, num_ranks=1)
    (step,) = [json.loads(line) for line in (tmp_path / "runs/math/metrics.jsonl").read_text().splitlines()]
    assert step["step"] == 1 and 0 <= step["reward/mean"] <= 1 and "validation/pass_at_1" in step
