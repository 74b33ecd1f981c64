"""Runs on given responses through the command: they end, go on bit for bit, and leave models that others can use."""

import json
import shutil

import pytest
import torch
import transformers

from hybridflow import cli
from hybridflow.data.pieces import PieceTokenizer
from hybridflow.recipe.load import load_recipe
from tests.e2e.commands import lasting_metrics, run_well

RECIPE = """
name: tiny
cluster: {ranks: 2, deadline_s: 60, start_deadline_s: 60}
model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, max_context: 24}
data:
  train: data/train.jsonl
  held_out: data/held_out.jsonl
  arithmetic: {num_train: 20, num_held_out: 8, max_operand: 99, mistake_share: 0.5}
run_dir: run
actor: {optimizer: {lr: 1.0e-2}}
trainer: {steps: 4, global_batch_size: 12, mini_batch_size: 6, save_every: 2, validate_every: 3}
"""
WARM = "warm_start={steps: 2, batch_size: 8, lr: 1.0e-2}"
SCORED = ["rollout.max_new_tokens=4", "reward.function=exact_match"]
RUNS = {
    "sft": ["actor.update={tp: 2}", "trainer.keep_best=true", WARM],
    "sft scored": ["actor.update={tp: 2}", "actor.rollout={dp: 2}", *SCORED, WARM],
    "reward-model": ["actor.update={pp: 2}", "trainer.micro_batch_tokens=40"],
    "dpo": ["actor.update={dp: 2}", "reference.ranks=[1]", "reference.layout={}", WARM, "cluster.memory_budget_gb=8"],
    "ipo": ["actor.update={tp: 2}", "reference.layout={dp: 2}"],
    "kto": ["actor.update={dp: 2}", "trainer.num_validation=5", WARM],
}
LONG = ("sft scored", "reward-model", "dpo", "ipo", "kto")
"""With the others, and with the losses by themselves in tests/multi/test_offline.py, these need not run every time."""


def weights(folder):
    files = (folder / "run/checkpoints/step_000004").rglob("*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in RUNS])
def test_it_trains_and_goes_on_bit_for_bit(name, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    (whole / "tiny.yaml").write_text(RECIPE)
    argv = ["train", "tiny.yaml", f"algorithm={name.partition(' ')[0]}", *RUNS[name]]
    run_well(argv, whole)
    rows = lasting_metrics(whole / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["actor/loss"] != 0 and row["actor/grad_norm"] > 0 for row in rows)
    for result, is_measured in (("accuracy", name != "sft"), ("loss", "sft" in name), ("margin", "sft" not in name)):
        validated = [row["step"] for row in rows if f"validation/{result}" in row]
        assert validated == ([3, 4] if is_measured else []), result
    if name == "dpo":
        (kept,) = whole.glob("run/logs/*/recipe.yaml")
        assert load_recipe(kept).trainer.micro_batch_tokens == 16384, "the most, since they fit into the budget"
    assert all(("preference/z_ref" in row) is (name == "kto") for row in rows)
    if name in ("dpo", "ipo"):
        summary = json.loads((whole / "run/summary.json").read_text())
        assert summary["accuracy_before_rl"] == 0.5, "the model is its reference, which is cut in another way"

    shutil.copytree(whole, folder)
    # The best so far is saved, too.
    step = 3 if name == "sft" else 2
    shutil.rmtree(folder / "run/checkpoints/step_000004")
    (folder / "run/checkpoints/latest").write_text(f"step_{step:06d}\n")
    done = run_well([*argv, "--resume"], folder)
    assert f"resumed from run/checkpoints/step_{step:06d}" in done.out and "warm start" not in done.out
    assert lasting_metrics(folder / "run") == rows
    assert len(weights(whole)) >= 2 and weights(folder) == weights(whole)
    summaries = [json.loads((place / "run/summary.json").read_text()) for place in (folder, whole)]
    if name == "sft":
        check_losses(whole, summaries[1], rows)
        return
    assert summaries[0]["accuracy_after_rl"] == summaries[1]["accuracy_after_rl"]
    if name == "reward-model":
        check_scorer(whole)


def check_losses(folder, summary, rows):
    """The last loss is that of what is exported, by others, over the tokens to write; the least counts as the best."""
    losses = {0: summary["loss_before_rl"], 3: rows[2]["validation/loss"], 4: rows[3]["validation/loss"]}
    assert summary["loss_after_rl"] == losses[4]
    assert (summary["best_step"], summary["best_score"]) == min(losses.items(), key=lambda item: item[1])
    assert (folder / "run/checkpoints/best").read_text().strip() == f"step_{summary['best_step']:06d}"
    out = folder / "written"
    source = folder / "run/checkpoints/step_000004/actor"
    assert cli.main(["convert", str(source), str(out), "--to", "hf", "--family", "llama"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = PieceTokenizer(folder / "run/tokenizer.model")
    total, count = 0.0, 0
    for line in (folder / "data/held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = [tokenizer.bos_id, *tokenizer.encode(row["prompt"])]
        solution = [*tokenizer.encode(row.get("solution", row["answer"])), tokenizer.eos_id]
        tokens = torch.tensor([prompt + solution])
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        total -= float(log_probs.gather(1, torch.tensor(solution)[:, None]).sum())
        count += len(solution)
    assert losses[4] == pytest.approx(total / count, rel=1e-5)


def check_scorer(folder):
    """Others score as it does, and what trains a policy takes it as its reward."""
    out = folder / "scorer"
    source = folder / "run/checkpoints/step_000004/actor"
    assert cli.main(["convert", str(source), str(out), "--to", "hf", "--family", "llama"]) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model.config.num_labels == 1
    tokenizer = PieceTokenizer(folder / "run/tokenizer.model")

    def score(prompt, response):
        tokens = [tokenizer.bos_id, *tokenizer.encode(prompt), *tokenizer.encode(response), tokenizer.eos_id]
        with torch.no_grad():
            return float(model(torch.tensor([tokens])).logits)

    rows = [json.loads(line) for line in (folder / "data/held_out.jsonl").read_text().splitlines()]
    differences = [score(row["prompt"], row["chosen"]) - score(row["prompt"], row["rejected"]) for row in rows]
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["accuracy_after_rl"] == sum(each > 0 for each in differences) / len(rows)
    recipe = load_recipe("grpo", [f"reward={{model: {{path: {out}}}}}"])
    assert recipe.model_of("reward").hidden_size == 16
