"""Training that begins with models of ``transformers``: what each role computes before the first step is theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import peft
import pytest
import torch
import transformers

from hybridflow import cli
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import ConfigError, DataError, DeadlineError
from hybridflow.parallel.world import World
from hybridflow.placement.pretrained import assets_of
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.trainer.checkpoints import find_resume_point
from hybridflow.trainer.initial_weights import read_weights, spread_weights
from hybridflow.trainer.open import note_of_prompts
from hybridflow.trainer.plan import plan_job
from hybridflow.trainer.record import Record
from hybridflow.trainer.stopping import Stopping
from hybridflow.trainer.trainer import Trainer, make_trainer, train
from tests.multi.jobs import open_with_data
from tests.support.complaints import complains
from tests.support.conversions import convert
from tests.support.hf_models import PAD, write_model, write_tokenizer
from tests.support.plain_models import token_log_probs
from tests.support.ranks import run_ranks


def recipe(folder: Path, algorithm: str, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Two steps on two ranks, from the directories in ``folder``."""
    values: dict[str, Any] = {
        "name": name,
        "algorithm": algorithm,
        "seed": 5,
        "run_dir": str(folder / name),
        "cluster": {"ranks": 2},
        "model": {"path": str(folder / "causal"), "max_context": 32, "dtype": "fp32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "held_out": str(folder / "held_out.jsonl"),
            "arithmetic": {"num_train": 60, "num_held_out": 8, "max_operand": 20},
        },
        "actor": {"update": {"tp": 2}, "rollout": {"dp": 2}, "optimizer": {"lr": 1e-4}},
        "reward": {"function": "tests.multi.test_placement:share_of_ones"},
        "rollout": {"max_new_tokens": 6, "group_size": 4 if algorithm == "grpo" else 1},
        "trainer": {"steps": 2, "global_batch_size": 16, "mini_batch_size": 8, "micro_batch_tokens": 48},
    }
    if algorithm == "ppo":
        values |= {
            "critic": {"layout": {"pp": 2}, "optimizer": {"lr": 1e-3}, "model": {"path": str(folder / "value")}},
            "reward": {"model": {"path": str(folder / "score")}, "layout": {"pp": 2}},
            "kl": {"coef": 0.1},
        }
    return {**values, **changes}


@pytest.fixture
def folder(tmp_path):
    """An actor of Qwen2, a critic that is one too, and a reward of another size and family."""
    write_model(tmp_path / "causal", "Qwen2", seed=1)
    write_tokenizer(tmp_path / "causal", has_start=True)
    write_model(tmp_path / "value", "Qwen2", "ForSequenceClassification", seed=2)
    write_model(tmp_path / "score", "Llama", "ForSequenceClassification", seed=3, hidden_size=48, num_hidden_layers=4)
    return tmp_path


def sequences() -> tuple[list[torch.Tensor], list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [(5, 6), (3, 1), (8, 4), (2, 5)]
    rows = [torch.randint(3, 40, (prompt + response,), generator=generator) for prompt, response in lengths]
    return rows, [prompt for prompt, _ in lengths]


def batch() -> Batch:
    rows, prompts = sequences()
    return Batch(
        torch.arange(len(rows)),
        {
            "tokens": Ragged.from_list(rows, torch.int64),
            "prompt_lengths": torch.tensor(prompts),
            "prompt_indices": torch.arange(len(rows)),
        },
    )


def begun(world: World, values: dict[str, Any]) -> Trainer:
    """A trainer before its first step, with all weights."""
    job, plan = open_with_data(world, values)
    trainer = Trainer(job, plan, find_resume_point(job, resume=False), Stopping(world), Record(job.recipe, world, 1))
    read_weights(trainer.job, trainer.roles)
    spread_weights(trainer.job, trainer.roles)
    return trainer


def first_and_train(world: World, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the roles compute before the first step, on ranks that have it; then two steps."""
    trainer = begun(world, values)
    problems = trainer.job.train
    first = next(
        prompt_index for prompt_index in range(problems.num_rows) if problems.example(prompt_index).place.endswith(":1")
    )
    found: dict[str, Any] = {"prompt": list(problems.prompt(first))}
    calls = {"actor": "log_probs", "reference": "log_probs", "critic": "values", "reward": "score"}
    for role, call in calls.items():
        if role in trainer.roles.by_name and (role != "reward" or "model" in values["reward"]):
            column = trainer.roles.by_name[role].calls[call](batch(), {})
            if column is not None:
                (values_of,) = column.columns.values()
                found[role] = (values_of.values if isinstance(values_of, Ragged) else values_of).numpy()
    trainer.run()
    return found, dict(trainer._record.summary)


def their_log_probs(path: Path, adapter: Path | None = None) -> numpy.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    found = []
    for row, prompt in zip(*sequences(), strict=True):
        with torch.no_grad():
            found.append(token_log_probs(model(row[None]).logits[0], row)[prompt - 1 :])
    return torch.cat(found).numpy()


def their_scores(path: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The head's number before each response token, and the score of each sequence."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    values, scores = [], []
    for row, prompt in zip(*sequences(), strict=True):
        with torch.no_grad():
            values.append(model.score(model.model(row[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
            scores.append(model(row[None]).logits[0, 0])
    return torch.cat(values).numpy(), torch.stack(scores).numpy()


def lines(folder: Path, name: str = "run") -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def run(world: World, values: dict[str, Any], resume: bool = False) -> None:
    train(recipe_from_dict(values), world, resume=resume)


def run_without_small_files(world: World, values: dict[str, Any]) -> None:
    """A run whose directory loses its tokenizer's and the generation's settings once the trainer is made."""
    trainer = begun(world, values)
    if world.rank == 0:
        for name in ("tokenizer_config.json", "generation_config.json"):
            (Path(values["model"]["path"]) / name).unlink()
    trainer.run()


def close(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    return one.shape == other.shape and other.std() > 0.1 and bool(numpy.abs(one - other).max() <= 1e-4)


def test_grpo_begins_with_the_model_of_a_directory(folder):
    ranks = run_ranks(first_and_train, 2, recipe(folder, "grpo"))
    expected = their_log_probs(folder / "causal")
    for found, _ in ranks:
        assert close(found["actor"], expected) and close(found["reference"], expected)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "causal")
    first = json.loads((folder / "train.jsonl").read_text().splitlines()[0])["prompt"]
    assert ranks[0][0]["prompt"] == theirs(first)["input_ids"]
    assert not (folder / "run/tokenizer.model").exists()
    rows = lines(folder)
    assert len(rows) == 2 and rows[0]["kl/ref"] == pytest.approx(0.0, abs=1e-5) and rows[0]["actor/grad_norm"] > 0
    assert all(row["rollout/logprob_abs_diff"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_the_trained_actor_is_exported_and_trained_on(folder):
    """Its checkpoint has family, settings and tokenizer: ``transformers`` and the next run begin where it ended.

    The small files are those that were there when the run began, also where they are links.
    """
    (folder / "links").mkdir()
    for file in (folder / "causal").iterdir():
        (folder / "links" / file.name).symlink_to(file)
    linked = {"path": str(folder / "links"), "max_context": 32, "dtype": "fp32"}
    run_ranks(run_without_small_files, 2, recipe(folder, "grpo", model=linked))
    trained = folder / "run/checkpoints/step_000002/actor"
    convert(trained, "hf", folder / "export")
    config = json.loads((folder / "export/config.json").read_text())
    assert config["model_type"] == "qwen2" and config["architectures"] == ["Qwen2ForCausalLM"]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / "export" / name).read_bytes() == (folder / "causal" / name).read_bytes()
    expected = their_log_probs(folder / "export")
    assert numpy.abs(expected - their_log_probs(folder / "causal")).max() > 1e-3
    ranks = run_ranks(first_and_train, 2, recipe(folder, "grpo", "next", model={"path": str(trained)}))
    for found, _ in ranks:
        assert close(found["actor"], expected) and close(found["reference"], expected)
    assert json.loads((folder / "next/checkpoints/step_000002/actor/manifest.json").read_text())["family"] == "qwen2"


def refusal(world: World, folder: Path) -> str:
    """What the rank is told whose run has one checkpoint more than the lowest rank sees."""
    values = recipe(folder, "grpo", model={"path": str(folder / f"other/checkpoints/step_{world.rank + 1:06d}/actor")})
    try:
        make_trainer(recipe_from_dict(values), world)
    except ConfigError as error:
        return str(error)
    except DeadlineError:
        return "waited"
    return "began"


def test_ranks_that_find_other_checkpoints_of_a_run_are_refused(folder):
    for step in (1, 2):
        (folder / f"other/checkpoints/step_{step:06d}").mkdir(parents=True)
        (folder / f"other/checkpoints/step_{step:06d}/actor").symlink_to(folder / "causal")
    told = run_ranks(refusal, 2, folder, wait_s=5.0)
    assert told[0] == "waited"
    assert "rank 0 has found step_000001 there, and rank 1 step_000002" in told[1]
    assert told[1].endswith(f"name the step, as in {folder}/other/checkpoints/step_000002")


def note(world: World, values: dict[str, Any]) -> str | None:
    return note_of_prompts(open_with_data(world, values)[0])


def small_files(world: World, values: dict[str, Any]) -> dict[str, dict[str, bytes]]:
    job, _ = open_with_data(world, values)
    return {role: assets_of(job, role)[1] for role in ("actor", "base", "critic")}


@pytest.mark.parametrize("own", [None, "{{ messages }}"])
def test_the_chat_template_of_the_prompts_is_written_with_the_actor(folder, own):
    """Else who serves it would make other prompts than it has learned from, or none at all."""
    write_tokenizer(folder / "causal", has_start=True, chat_template=own)
    values = recipe(folder, "grpo", cluster={"ranks": 1}, actor={})
    # A person is told that prompts of text go past a template.
    (told,) = run_ranks(note, 1, values)
    assert (told or "").startswith("plain text; for a chat model set data.prompt_as_message=true") is (own is not None)
    (before,) = run_ranks(small_files, 1, values)
    assert all("chat_template.jinja" not in files for files in before.values())
    (folder / "chat.txt").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    values["data"]["chat_template"] = str(folder / "chat.txt")
    (after,) = run_ranks(small_files, 1, values)
    for role in ("actor", "base"):
        assert after[role].pop("chat_template.jinja") == (folder / "chat.txt").read_bytes()
    assert after == before


def test_models_of_a_recipe_alone_know_where_a_response_ends(folder):
    """The tokenizer that the run trained pads with 0, begins with 1 and ends with 2."""
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "max_context": 32}
    values = recipe(folder, "ppo", cluster={"ranks": 1}, model=sizes, actor={}, critic={}, kl={})
    values["reward"] = {"function": "tests.multi.test_placement:share_of_ones"}
    values["trainer"]["steps"] = 1
    run_ranks(run, 1, values)
    for role, kind in (("actor", "CausalLM"), ("critic", "SequenceClassification")):
        convert(folder / "run/checkpoints/step_000001" / role, "hf", folder / role)
        config = json.loads((folder / role / "config.json").read_text())
        assert [config[f"{name}_token_id"] for name in ("pad", "bos", "eos")] == [0, 1, 2]
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder / role).eval()
        # A scorer without a padding id takes no batch.
        assert model(torch.tensor([[5, 6, 2], [5, 2, 0]])).logits.shape[0] == 2
    ids = transformers.AutoModelForCausalLM.from_pretrained(folder / "actor").generation_config
    assert (ids.eos_token_id, ids.pad_token_id) == (2, 0)


@pytest.mark.slow
def test_a_resumed_run_needs_no_weights_where_it_began(folder):
    """Its settings and small files are enough, also for what it saves."""
    values = recipe(folder, "grpo")
    run_ranks(run, 2, {**values, "trainer": {**values["trainer"], "steps": 1}})
    (folder / "causal/model.safetensors").unlink()
    run_ranks(run, 2, values, True)
    one, two = (folder / f"run/checkpoints/step_00000{step}/actor" for step in (1, 2))
    assert json.loads((two / "manifest.json").read_text())["family"] == "qwen2"
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in names:
        assert (one / "assets" / name).read_bytes() == (two / "assets" / name).read_bytes()


@pytest.mark.slow
def test_ppo_with_critic_and_reward_of_their_own(folder):
    """The critic of a directory without a padding id has the tokenizer's: ``transformers`` scores its batches."""
    write_model(folder / "value", "Qwen2", "ForSequenceClassification", seed=2, pad_token_id=None)
    write_tokenizer(folder / "causal", has_start=True, pad_token=PAD)
    ranks = run_ranks(first_and_train, 2, recipe(folder, "ppo"))
    found, summary = ranks[1]  # the last stage of both
    assert "critic" not in ranks[0][0] and "reward" not in ranks[0][0]
    assert close(found["critic"], their_scores(folder / "value")[0])
    assert close(found["reward"], their_scores(folder / "score")[1])
    assert close(found["actor"], their_log_probs(folder / "causal"))
    rows = lines(folder)
    assert len(rows) == 2 and rows[1]["critic/grad_norm"] > 0 and abs(rows[0]["reward/mean"]) > 1e-3
    assert ranks[0][1]["score_before_rl"] == summary["score_before_rl"] != 0
    convert(folder / "run/checkpoints/step_000002/critic", "hf", folder / "scorer")
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scorer").eval()
    with torch.no_grad():
        alone, both = scorer(torch.tensor([[5, 6]])).logits, scorer(torch.tensor([[5, 6, 2, 2], [7, 8, 9, 5]])).logits
    torch.testing.assert_close(both[:1], alone)


@pytest.mark.slow
def test_an_actor_with_more_rows_than_its_reader_samples_none_of_them(folder):
    """No rank's model is given an id that it lacks: nor are log-probabilities those of a vocabulary with them."""
    write_model(folder / "wide", "Qwen2", seed=1, vocab_size=400)
    values = recipe(folder, "ppo", model={"path": str(folder / "wide"), "max_context": 32, "dtype": "fp32"})
    write_tokenizer(folder / "wide", has_start=True)
    run_ranks(run, 2, values)
    rows = lines(folder)
    assert len(rows) == 2 and all(row["rollout/logprob_abs_diff"] < 1e-4 for row in rows)
    # Of 45 ids, not of 400.
    assert 0 < rows[0]["actor/entropy"] < numpy.log(45) + 1e-6


def test_nothing_is_learned_from_truncated_responses(folder):
    values = recipe(folder, "grpo", loss={"mask_truncated": True})
    # The likeliest tokens never end.
    values["rollout"]["top_k"] = 1
    run_ranks(run, 2, values)
    for row in lines(folder):
        assert row["response/cut_share"] == 1 and row["actor/skipped"] == 2 and "actor/loss" not in row


def placed_otherwise(folder: Path, name: str, **placement: Any) -> dict[str, Any]:
    made = recipe(folder, "ppo", name)
    made["reward"] |= placement
    return made


@pytest.mark.slow
def test_where_the_reward_model_is_changes_nothing(folder):
    """Beside the ranks of the actor, over both, and on one alone; and after a resume, for which it is read again."""
    cases = {"pp": {"layout": {"pp": 2}}, "tp": {"layout": {"tp": 2}}, "one": {"layout": {}, "ranks": [1]}}
    found = {}
    for name, placement in cases.items():
        run_ranks(run, 2, placed_otherwise(folder, name, **placement))
        found[name] = lines(folder, name), json.loads((folder / name / "summary.json").read_text())
    resumed = placed_otherwise(folder, "again", layout={"pp": 2})
    run_ranks(run, 2, {**resumed, "trainer": {**resumed["trainer"], "steps": 1}})
    run_ranks(run, 2, resumed, True)
    found["again"] = lines(folder, "again"), json.loads((folder / "again/summary.json").read_text())
    rows, summary = found.pop("pp")
    assert abs(rows[1]["reward/mean"]) > 1e-3
    for name, (others, other) in found.items():
        assert len(others) == len(rows)
        for row, another in zip(rows, others, strict=True):
            for metric in ("reward/mean", "kl/ref", "critic/loss", "actor/grad_norm"):
                assert another[metric] == pytest.approx(row[metric], rel=1e-4, abs=1e-6), (name, metric)
        assert other["score_after_rl"] == pytest.approx(summary["score_after_rl"], rel=1e-4), name


def test_models_without_their_tokenizer_are_refused(folder):
    write_model(folder / "small", "Llama", "ForSequenceClassification", vocab_size=20, pad_token_id=None)
    write_model(folder / "other", "Llama", "ForSequenceClassification")
    write_tokenizer(folder / "other", has_start=False)
    text = (folder / "other/tokenizer.json").read_text()
    (folder / "other/tokenizer.json").write_text(text.replace("<|pad|>", "<|fill|>"))
    # Gemma 3's of 1B parameters has no row for the token of images.
    write_model(folder / "no_image", "Qwen2", vocab_size=41)
    write_tokenizer(folder / "no_image", more=["<audio>", "<image>"])
    one = {"cluster": {"ranks": 1}, "actor": {"update": {}, "rollout": {}, "optimizer": {"lr": 1e-4}}}
    bare = {"model": {"path": str(folder / "bare")}}

    def scored_by(name: str) -> dict[str, Any]:
        return recipe(folder, "grpo", **one, reward={"model": {"path": str(folder / name)}})

    def opened(world: World) -> None:
        for values, kind, says in (
            (recipe(folder, "grpo", **one, **bare), ConfigError, "tokenizer.path: missing"),
            (scored_by("small"), ConfigError, "reward.model.vocab_size=20 is smaller than the tokenizer's"),
            (scored_by("other"), DataError, "reward.model.path="),
        ):
            complains(lambda values=values: open_with_data(world, values), [says], kind)
        job, _ = open_with_data(world, recipe(folder, "grpo", "other", **one, model={"path": str(folder / "no_image")}))
        assert job.tokenizer.vocab_size == job.vocab_size == 41
        path = folder / "images.jsonl"
        path.write_text('{"prompt": "1<image>2"}\n')
        values = recipe(folder, "grpo", **one, model={"path": str(folder / "no_image")}, data={"train": str(path)})
        complains(lambda: open_with_data(world, values), ["images.jsonl:1: ", "<image>"], DataError)
        open_with_data(world, recipe(folder, "grpo", **one))
        open_with_data(world, recipe(folder, "grpo", **one, **bare, tokenizer={"path": str(folder / "causal")}))

    write_model(folder / "bare", "Qwen2")
    run_ranks(opened, 1)


def test_plan_shows_where_the_reward_model_is(folder, capsys):
    path = folder / "job.yaml"
    path.write_text(json.dumps(recipe(folder, "ppo")))
    assert cli.main(["plan", "job", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "reward     reward tp1.pp2.dp1" in printed and "call reward.score on reward tp1.pp2.dp1" in printed


def test_warm_start_changes_the_actor_of_the_directory_and_its_copies(folder):
    values = recipe(folder, "ppo", warm_start={"steps": 2, "batch_size": 8, "lr": 1e-2})
    del values["critic"]["model"]
    before, after = run_ranks(around_the_warm_start, 2, values)[1]
    assert before.keys() == after.keys() == {"actor", "reference", "critic"}
    for name, theirs in before.items():
        assert (theirs != after[name]).any(), name
    assert (after["actor"] == after["reference"]).all() and (after["actor"] == after["critic"]).all()


def around_the_warm_start(world: World, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    trainer = begun(world, {**values, "actor": {**values["actor"], "update": {"pp": 2}, "rollout": {"pp": 2}}})

    def norms() -> dict[str, Any]:
        name, roles = "decoder.final_layernorm.weight", ("actor", "reference", "critic")
        held = {role: trainer.roles.by_name[role].model.tensors() for role in roles}
        return {role: tensors[name].detach().clone().numpy() for role, tensors in held.items() if name in tensors}

    before = norms()
    trainer._execute(plan_job(trainer.job.recipe).warm_start)
    spread_weights(trainer.job, trainer.roles)
    return before, norms()
