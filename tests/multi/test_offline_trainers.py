"""Trainers of a few lines on given rows: their losses are those of a plain statement with ``transformers``' models."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from hybridflow.api.offline import DPOTrainer, KTOTrainer, OfflineTrainer, RewardTrainer, SFTTrainer
from hybridflow.api.other_frameworks import LoraConfig
from hybridflow.api.world import find_world
from hybridflow.data.provider import DataProvider
from hybridflow.errors import CheckpointError, ConfigError, DataError
from tests.support.complaints import complains, complaint
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.plain_models import token_log_probs
from tests.support.ranks import run_ranks

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 7), "margin": 0.5 * b}
    for a, b in ((1, 2), (3, 4), (9, 8), (21, 3))
]
VERDICTS = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS
    for name in ("chosen", "rejected")
]
SOLUTIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LR, BETA, STEPS = 1e-3, 0.3, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("offline")
    for seed, name in enumerate(("policy", "reference", "chat")):
        write_model(made / name, seed=seed)
        write_tokenizer(made / name, chat_template=TEMPLATE if name == "chat" else None)
    return made


def run(program: Any, size: int, folder: Path):
    return run_ranks(lambda world: program(folder, world.size), size)


def tokens(folder: Path, prompt: str, response: str) -> tuple[list[int], list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy")
    found = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, response)]
    return found[0], [*found[1], tokenizer.eos_token_id]


def log_prob(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    row = torch.tensor(prompt + response)
    return token_log_probs(model(input_ids=row[None]).logits[0], row)[len(prompt) - 1 :].sum()


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def steps_of(model: Any, loss: Any) -> list[float]:
    """The losses of plain torch training; the model is trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(value.detach()))
    return found


def preferences(folder: Path, size: int):
    """Every step has every row, whatever the number of ranks: their order says nothing."""
    import datasets  # Here, since it starts threads, which a parent of ranks must not have.

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "policy")
    trainer = DPOTrainer(
        model=folder / "policy",
        tokenizer=tokenizer,
        dataset=datasets.Dataset.from_list(PAIRS),
        eval_dataset=datasets.Dataset.from_list(PAIRS),
        beta=BETA,
        max_length=1024,
        ref_model=folder / "reference",
    )
    out = folder / f"dpo-{size}"
    metrics = trainer.train(
        num_train_epochs=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // size,
        learning_rate=LR,
        output_dir=out,
        eval_steps=1,
    )
    after = trainer.evaluate()
    assert after == {name: metrics[-1][name] for name in after} and "validation/margin" in after
    return metrics, complaint(lambda: trainer.train(output_dir=out), CheckpointError)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_dpo(folder: Path, size: int) -> None:
    ranks = run(preferences, size, folder)
    policy, reference = load(folder / "policy"), load(folder / "reference").requires_grad_(False)

    def loss() -> torch.Tensor:
        each = []
        for row in PAIRS:
            ahead = 0.0
            for name, sign in (("chosen", 1), ("rejected", -1)):
                prompt, response = tokens(folder, row["prompt"], row[name])
                ahead = ahead + sign * (log_prob(policy, prompt, response) - log_prob(reference, prompt, response))
            each.append(-logsigmoid(BETA * ahead))
        return torch.stack(each).mean()

    expected = steps_of(policy, loss)
    for metrics, refused in ranks:
        assert [step["loss"] for step in metrics] == pytest.approx(expected, abs=1e-5)
        assert "is there already" in refused
        for before, after in itertools.pairwise(metrics):
            # The same pairs, before the step that learns them.
            for name in ("accuracy", "margin"):
                assert before[f"validation/{name}"] == pytest.approx(after[f"preference/{name}"], abs=1e-5), name
    saved = load(folder / f"dpo-{size}")
    prompt, response = tokens(folder, "1+2=", "3")
    with torch.no_grad():
        told, wanted = (float(log_prob(each, prompt, response)) for each in (saved, policy))
    assert told == pytest.approx(wanted, abs=1e-3)
    assert (folder / f"dpo-{size}-run" / "checkpoints" / "latest").is_file()
    assert transformers.AutoTokenizer.from_pretrained(folder / f"dpo-{size}")("1+2=").input_ids == prompt


def solutions(folder: Path, size: int):
    trainer = SFTTrainer(
        folder / "policy", dataset=SOLUTIONS, eval_dataset=SOLUTIONS, actor={"tensor_parallel_size": size}
    )
    before = trainer.evaluate()
    metrics = trainer.train(STEPS, 4, LR, eval_steps=2, run_dir=str(folder / f"sft-{size}"))
    return metrics, before, trainer.evaluate()


def sft_loss(model: Any, folder: Path) -> torch.Tensor:
    pairs = [tokens(folder, row["prompt"], row["completion"]) for row in SOLUTIONS]
    return -sum(log_prob(model, *pair) for pair in pairs) / sum(len(response) for _, response in pairs)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sft(folder: Path, size: int, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = run(solutions, size, folder)
    model = load(folder / "policy")
    expected = steps_of(model, lambda: sft_loss(model, folder))
    # It is validated behind step 2 and at the end, on the rows that each step learns.
    validated = {2: expected[2], 3: float(sft_loss(model, folder).detach())}
    for metrics, before, after in ranks:
        assert before["validation/loss"] == pytest.approx(expected[0], abs=1e-5)
        assert after["validation/loss"] == pytest.approx(validated[3], abs=1e-5)
        assert [step["loss"] for step in metrics] == pytest.approx(expected, abs=1e-5)
        told = {at: step["validation/loss"] for at, step in enumerate(metrics, 1) if "validation/loss" in step}
        assert told == pytest.approx(validated, abs=1e-5)
    assert "4 rows; 4 held out" in capfd.readouterr().out


def others(folder: Path, size: int):
    kto = KTOTrainer(folder / "policy", dataset=VERDICTS, beta=BETA).train(
        1, 8 // size, LR, run_dir=str(folder / f"kto-{size}")
    )
    out = folder / f"scorer-{size}"
    reward = RewardTrainer(folder / "policy", dataset=PAIRS).train(2, 4 // size, LR, output_dir=out)
    lora = SFTTrainer(folder / "policy", dataset=SOLUTIONS, lora=LoraConfig(r=2)).train(
        STEPS, 4 // size, LR, output_dir=folder / f"merged-{size}"
    )
    return [step["loss"] for step in kto + reward + lora]


@pytest.mark.slow
def test_others(folder: Path) -> None:
    """The step on one rank and on two is the same, and what comes of a scorer's training is one."""
    (one,), two = run(others, 1, folder), run(others, 2, folder)
    assert len(one) == 3 + STEPS and two == [pytest.approx(one, abs=1e-5)] * 2
    # Nothing is ahead of anything yet, and half of the responses are wanted.
    assert one[0] == pytest.approx(0.5, abs=1e-6)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scorer-2")
    assert scorer.config.num_labels == 1
    # Adapters are written as part of the weights: the step after the last would begin with less.
    assert one[-1] < one[3] and sft_loss(load(folder / "merged-2"), folder) < one[-1]


def resumed(folder: Path, size: int):
    def trainer() -> OfflineTrainer:
        return DPOTrainer(folder / "policy", dataset=PAIRS, seed=4)

    straight = trainer().train(max_steps=4, learning_rate=LR, output_dir=folder / "straight")
    trainer().train(max_steps=2, learning_rate=LR, output_dir=folder / "half", run_dir=str(folder / "broken"))
    rest = trainer().train(
        max_steps=4, learning_rate=LR, output_dir=folder / "rest", run_dir=str(folder / "broken"), resume=True
    )
    return [step["loss"] for step in straight], [step["loss"] for step in rest]


@pytest.mark.slow
def test_resumed(folder: Path) -> None:
    ((straight, rest),) = run(resumed, 1, folder)
    assert len(straight) == 4 and rest == straight[2:]


def provided(folder: Path, size: int):
    """Rows from files are drawn from files."""
    path = folder / f"pairs-{size}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    found = []
    for dataset in (PAIRS, DataProvider(str(path))):
        trainer = DPOTrainer(folder / "policy", dataset=dataset, ref_model=folder / "reference")
        out = folder / f"provided-{size}-{len(found)}"
        steps = trainer.train(2, 4, LR, run_dir=str(out))
        found.append([step["loss"] for step in steps])
    # A pair is two examples of KTO; and the model's tokenizer has the template.
    kto = KTOTrainer(folder / "policy", dataset=DataProvider(str(path)))
    chat = DataProvider([{**row, "prompt": as_messages("user", row["prompt"])} for row in SOLUTIONS])
    sft = SFTTrainer(folder / "chat", dataset=chat)
    steps = [len(each.train(1, 4, LR, run_dir=str(folder / f"{each.algorithm}-provided"))) for each in (kto, sft)]
    return found, steps


def test_provided(folder: Path) -> None:
    (((rows, files), steps),) = run(provided, 1, folder)
    assert len(rows) == 2 and files == pytest.approx(rows, abs=1e-6)
    assert steps == [2, 1]


def as_messages(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def written_by_trl(folder: Path, size: int):
    """Rows of texts and of messages, whose template adds nothing to their texts."""
    (folder / "plain.jinja").write_text(TEMPLATE)
    found = []
    for kind, rows, names in ((SFTTrainer, SOLUTIONS, ["completion"]), (DPOTrainer, PAIRS, ["chosen", "rejected"])):
        asked = [as_messages("user", row["prompt"]) for row in rows]
        said = [{name: as_messages("assistant", row[name]) for name in names} for row in rows]
        forms = [
            [{**more, "prompt": prompt} for prompt, more in zip(asked, said, strict=True)],
            [{name: prompt + more[name] for name in names} for prompt, more in zip(asked, said, strict=True)],
        ]
        if kind is SFTTrainer:
            forms[1] = [{"messages": row["completion"]} for row in forms[1]]
        for dataset in (rows, *forms):
            run_dir = str(folder / f"forms-{len(found)}")
            trainer = kind(folder / "policy", dataset=dataset, data={"chat_template": str(folder / "plain.jinja")})
            found.append([step["loss"] for step in trainer.train(1, 4, LR, run_dir=run_dir)])
    return found


@pytest.mark.slow
def test_rows_of_messages_are_read_as_their_texts(folder: Path) -> None:
    ((sft, *of_sft, dpo, prompted, implied),) = run(written_by_trl, 1, folder)
    assert of_sft == [sft, sft]
    # Margins are no part of DPO's loss.
    assert prompted == implied == dpo


LONG = {"prompt": "1+1=", "chosen": "2" * 300, "rejected": "3"}


def refusals(folder: Path, size: int):
    for number, (kind, rows, more, words) in enumerate(
        (
            (DPOTrainer, [{"prompt": "1", "chosen": "2"}], {}, "dataset[0]: no field 'rejected'"),
            (DPOTrainer, [{"prompt": "", "chosen": "2", "rejected": "3"}], {}, "dataset[0]: field 'prompt' is empty"),
            (DPOTrainer, [{"prompt": "1", "chosen": "2", "rejected": "2"}], {}, "same text"),
            (
                DPOTrainer,
                [{"prompt": "1", "chosen": [{"role": "assistant", "content": "2"}], "rejected": "3"}],
                {},
                "the tokenizer has no chat template",
            ),
            (DPOTrainer, [PAIRS[0], LONG], {}, "dataset[1]"),
            (DPOTrainer, [LONG], {"too_long": "drop"}, "none of 1 rows"),
            (DPOTrainer, [], {}, "no rows"),
            (DPOTrainer, None, {}, "no dataset"),
            (DPOTrainer, ["1+1="], {}, "found str"),
            (
                KTOTrainer,
                [{"prompt": "1", "completion": "2", "label": 1}],
                {},
                "field 'label': expected true or false, found 1",
            ),
            (DPOTrainer, PAIRS, {"critic_lr": 1.0}, "critic_lr"),
            (DPOTrainer, PAIRS, {"too_long": "cut"}, "'cut'"),
        )
    ):
        make = partial(kind, folder / "policy", dataset=rows, **more)
        run_dir = str(folder / f"refused-{number}")
        complains(lambda make=make, run_dir=run_dir: make().train(run_dir=run_dir), [words])
    kept = DPOTrainer(folder / "policy", dataset=[*PAIRS, LONG], too_long="drop", learning_rate=1e-4)
    assert [step["actor/lr"] for step in kept.train(2, 4, run_dir=str(folder / "kept"))] == [1e-4] * 2


ARGUMENTS: list[tuple[type[Exception], dict[str, Any], dict[str, Any], str]] = [
    (ConfigError, {"steps": 2}, {}, "DPOTrainer: trainer.steps=2 is not read here; give train(max_steps=…)"),
    (
        ConfigError,
        {"config": {"lr": 1e-6}},
        {},
        "DPOTrainer: config=…: unknown; settings are arguments here",
    ),
    (ConfigError, {"max_steps": 2}, {}, "DPOTrainer: max_steps=…: unknown; give it to train(…)"),
    (ConfigError, {"rollout_batch_size": 4}, {}, "trainer.global_batch_size=4 is not read here; give train(per_device"),
    (ConfigError, {}, {"global_batch_size": 4}, "trainer.global_batch_size=4 is not read"),
    (ConfigError, {"max_new_tokens": 4}, {}, "max_length=…"),
    (ConfigError, {}, {"per_device_train_batch_size": 0}, "per_device_train_batch_size=0, expected an integer of at"),
    (ConfigError, {}, {"per_device_train_batch_size": 1.5}, "per_device_train_batch_size=1.5, expected an integer"),
    (ConfigError, {}, {"gradient_accumulation_steps": True}, "gradient_accumulation_steps=True, expected"),
    (ConfigError, {}, {"max_steps": 0}, "max_steps=0, expected an integer of at least 1"),
    (ConfigError, {}, {"num_train_epochs": 0}, "num_train_epochs=0, expected a number above 0"),
    (ConfigError, {}, {"num_train_epochs": "two"}, "num_train_epochs='two', expected a number"),
    (DataError, {"dataset": iter(PAIRS)}, {}, "found list_iterator, expected rows that can be counted"),
    (ConfigError, {}, {"eval_steps": 2}, "DPOTrainer.train: eval_steps=2: nothing to validate on"),
    (ConfigError, {"eval_steps": 2}, {}, "DPOTrainer: eval_steps=…: unknown; give it to train(…)"),
    (DataError, {"eval_dataset": [{"prompt": "1"}]}, {}, "eval_dataset[0]: no field 'chosen'"),
    (DataError, {"eval_dataset": 3}, {}, "DPOTrainer: eval_dataset: found int, expected rows"),
    (DataError, {"dataset": 3}, {}, "DPOTrainer: dataset: found int, expected rows"),
    (DataError, {"dataset": "rows.jsonl"}, {}, "found str, expected rows that can be counted; give DataProvider('rows"),
    (DataError, {"dataset": {"prompt": ["1"]}}, {}, "found dict, expected rows that can be counted; of columns make"),
    (
        DataError,
        {"dataset": {"train": SimpleNamespace(column_names=["prompt"])}},
        {},
        "give one of its splits: dataset['tr",
    ),
    (DataError, {"dataset": [{**PAIRS[0], "margin": math.nan}]}, {}, "dataset[0]: field 'margin': expected a finite"),
    (
        DataError,
        {"max_length": 2},
        {},
        "exceeds model.max_context=2; shorten it or raise max_context: it is max_length=2",
    ),
    (ConfigError, {"actor": {"update": {"tpp": 1}}}, {}, "actor.update.tpp"),
    (ConfigError, {"actor": {"update": "dp1"}}, {}, "actor.update"),
    (ConfigError, {"rollout": None}, {}, "rollout is None, not a section"),
    (ConfigError, {"max_context": "abc"}, {}, "model.max_context: expected an integer"),
    (ConfigError, {"max_length": "1024"}, {}, "DPOTrainer: max_length='1024', expected an integer of at least 1"),
    (ConfigError, {"lora": {"r": 8}}, {}, "lora: found dict; give LoraConfig(rank=8)"),
]


def different_rows(folder: Path, size: int):
    last = find_world().rank == size - 1
    others = [SOLUTIONS[1:] + SOLUTIONS[:1] if last else SOLUTIONS, SOLUTIONS[:-1] if last else SOLUTIONS]
    dpo = DPOTrainer(folder / "policy", dataset=PAIRS, eval_dataset=PAIRS[:2] if last else PAIRS[:1])
    trainers = [*(SFTTrainer(folder / "policy", dataset=rows) for rows in others), dpo]
    return [complaint(trainer.train, DataError) for trainer in trainers]


def test_rows_that_differ_between_ranks(folder: Path) -> None:
    one, other = run(different_rows, 2, folder)
    assert one == other
    places = ("dataset: number 0", f"dataset: number {len(SOLUTIONS) - 1}", "eval_dataset: number 1")
    assert all(f"{place} is another on some ranks" in told for place, told in zip(places, one, strict=True))


def told(folder: Path, size: int):
    complains(lambda: DPOTrainer(folder / "policy", dataset=PAIRS, critic_lr=1.0), ["critic_lr"], ConfigError)
    evaluate = DPOTrainer(folder / "policy", dataset=PAIRS).evaluate
    complains(evaluate, ["DPOTrainer.evaluate: nothing to validate on"], ConfigError)
    misspelt = DPOTrainer(folder / "policies", dataset=PAIRS)
    complains(misspelt.train, [f"model.path='{folder}/policies'"], ConfigError)
    for kind, settings, arguments, words in ARGUMENTS:
        make = partial(DPOTrainer, folder / "policy", **{"dataset": PAIRS, **settings})
        complains(lambda make=make, arguments=arguments: make().train(**arguments), [words], kind)


def test_arguments_that_say_nothing_are_refused(folder: Path) -> None:
    run(told, 1, folder)


def again(folder: Path, size: int):
    run_dir = str(folder / f"again-{size}")
    trainer = SFTTrainer(folder / "policy", dataset=SOLUTIONS, seed=4)
    how: dict[str, Any] = {"per_device_train_batch_size": 4 // size, "learning_rate": LR, "run_dir": run_dir}
    first = trainer.train(max_steps=1, **how)
    for more in ({"run_dir": run_dir + "-other"}, {"run_dir": run_dir + "-other", "resume": True}, {}):
        again = partial(trainer.train, max_steps=STEPS, **{**how, **more})
        complains(again, ["SFTTrainer.train: was called before"], ConfigError)
    how["run_dir"] = f"{folder}/./again-{size}"
    rest = trainer.train(max_steps=STEPS, resume=True, **how)
    return [step["loss"] for step in (*first, *rest)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_second_training_goes_on_or_is_refused(folder: Path, size: int) -> None:
    """Without ``output_dir``, too, there is what it goes on from."""
    ranks = run(again, size, folder)
    model = load(folder / "policy")
    expected = steps_of(model, lambda: sft_loss(model, folder))
    for losses in ranks:
        assert losses == pytest.approx(expected, abs=1e-5)


def test_refusals(folder: Path) -> None:
    run(refusals, 1, folder)
