"""A model that only generates: of any kind, cut in any way, with weights that are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hybridflow.api.device_mesh import DeviceMesh
from hybridflow.api.roles import Actor
from hybridflow.api.rollout_worker import RolloutWorker
from hybridflow.api.trainers import GRPOTrainer
from hybridflow.errors import ConfigError, DataError
from hybridflow.parallel.world import World
from hybridflow.rollout.request import Request, SamplingParams
from tests.support.complaints import complains, complaint
from tests.support.hf_models import START, write_model, write_tokenizer
from tests.support.plain_models import greedy
from tests.support.ranks import run_ranks
from tests.support.user_models import TinyActor

PROMPTS = ["1+1=", "12+20=", "3+"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("worker")
    for seed in (1, 2):
        write_model(path / f"model-{seed}", "Llama", seed=seed)
        write_tokenizer(path / f"model-{seed}")
    return path


def greedy_of(folder: Path) -> list[list[int]]:
    """What transformers finds likeliest, as far as the first end of sequence."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = tokenizer(PROMPTS, add_special_tokens=False)["input_ids"]
    return [greedy(lambda ids: model(ids).logits, prompt, 6, 0)[0] for prompt in prompts]


def worked(world: World, folder: Path, options: dict[str, Any], kind: str) -> Any:
    one, two = (
        transformers.LlamaForCausalLM.from_pretrained(folder / f"model-{seed}")
        if kind == "memory"
        else str(folder / f"model-{seed}")
        for seed in (1, 2)
    )
    first: Any = Actor(one, tokenizer=str(folder / "model-1")) if kind == "actor" else one
    if options.get("device_mesh") == "second":
        options = {"device_mesh": DeviceMesh(devices=[1])}
    worker = RolloutWorker(first, tokenizer=str(folder / "model-1"), **options)
    before = worker.generate(PROMPTS, max_new_tokens=6, do_sample=False, temperature=0)
    with pytest.raises(DataError, match="for 0 give do_sample=False instead"):
        worker.generate(PROMPTS, temperature=0)
    sampled = worker.generate(PROMPTS, max_new_tokens=6, temperature=0.7, num_samples=3, seed=4)
    worker.update_weights(two)
    after = worker.generate(PROMPTS, max_new_tokens=6, do_sample=False)
    assert all(each.text is not None and len(each.log_probs) == len(each.tokens) for each in sampled)
    assert [each.prompt for each in sampled] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    return [[each.tokens.tolist() for each in found] for found in (before, after, sampled)]


CASES: list[tuple[int, dict[str, Any], str]] = [
    (1, {}, "memory"),
    (2, {}, "path"),
    (2, {"device_mesh": "second"}, "actor"),
    (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "memory"),
]


@pytest.mark.slow
def test_every_kind_and_layout_generates_what_transformers_does_and_follows_new_weights(folder):
    wanted = [greedy_of(folder / f"model-{seed}") for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    told = []
    for size, options, kind in CASES:
        for found in run_ranks(worked, size, folder, options, kind):
            assert found[:2] == wanted, (size, options, kind)
            told.append(found[2])
    assert all(each == told[0] for each in told), "what is sampled depends on the seed alone"


def followed(world: World, folder: Path) -> Any:
    """What the worker finds likeliest after a trainer has learned, and what a worker of its saved weights finds."""
    path = str(folder / "model-1")
    config = {
        "rollout_batch_size": 8,
        "group_size": 2,
        "max_new_tokens": 4,
        "lr": 0.05,
        "actor": {"tp_size": world.size},
    }
    config["run_dir"] = str(folder / f"run-{world.size}")
    worker = RolloutWorker(path)
    before = worker.generate(PROMPTS, max_new_tokens=6, do_sample=False)
    with GRPOTrainer(config, actor_model=path, reward="length") as trainer:
        trainer.step(["1+1=", "2+2=", "3+4=", "10+5="])
        worker.update_weights(trainer)
        after = worker.generate(PROMPTS, max_new_tokens=6, do_sample=False)
        trainer.save_checkpoint(folder / f"saved-{world.size}")
    saved = RolloutWorker(str(folder / f"saved-{world.size}"), tokenizer=path)
    expected = saved.generate(PROMPTS, max_new_tokens=6, do_sample=False)
    return [[each.tokens.tolist() for each in part] for part in (before, after, expected)]


def test_a_worker_takes_a_trainers_weights_from_its_layout(folder):
    for before, after, expected in run_ranks(followed, 2, folder):
        assert after == expected and before != after


def own(world: World, folder: Path) -> Any:
    actor, other = TinyActor(vocab_size=45, seed=1), TinyActor(vocab_size=45, seed=2)
    worker = RolloutWorker(actor, tokenizer=str(folder / "model-1"))
    found = worker.generate([[3, 4], [5]], max_new_tokens=4, do_sample=False)
    worker.update_weights(other)
    again = worker.generate([[3, 4], [5]], max_new_tokens=4, do_sample=False)
    return [[each.tokens.tolist() for each in part] for part in (found, again)]


def test_a_class_of_ones_own_generates_too(folder):
    actors = [TinyActor(vocab_size=45, seed=seed) for seed in (1, 2)]
    wanted = [[greedy(actor, prompt, 4, 0)[0] for prompt in ([3, 4], [5])] for actor in actors]
    for found in run_ranks(own, 2, folder):
        assert found == wanted


def drawn(world: World, folder: Path) -> Any:
    path = str(folder / "model-1")
    worker = RolloutWorker(path)
    how: dict[str, Any] = {"max_new_tokens": 8, "num_samples": 2}
    calls = [worker.generate(PROMPTS, **how) for _ in range(2)]
    calls += [worker.generate(PROMPTS, seed=seed, **how) for seed in (0, 5, 5)]
    worker.update_weights(path)
    calls.append(worker.generate(PROMPTS, **how))
    assert all([each.prompt for each in found] == [0, 0, 1, 1, 2, 2] for found in calls)
    other = complaint(lambda: worker.generate(PROMPTS[: 3 - world.rank], **how), DataError)
    assert other.startswith("prompts and settings: number 4 is another on some ranks than on others")
    assert "prompt 1:" in complaint(lambda: worker.generate([[3], [3] * 70], max_new_tokens=6), DataError)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    rows = tokenizer(PROMPTS, padding=True, add_special_tokens=False, return_tensors="pt")
    likeliest = [worker.generate(each, max_new_tokens=6, do_sample=False) for each in (rows, PROMPTS)]
    return [[each.tokens.tolist() for each in found] for found in (*calls, *likeliest)]


def test_noise_is_of_each_call_but_for_a_seed_and_padded_ids_are_prompts(folder):
    ranks = run_ranks(drawn, 2, folder)
    assert ranks[0] == ranks[1]
    first, second, as_the_first, five, again, later, of_rows, of_texts = ranks[0]
    assert len({str(each) for each in (first, second, five, later)}) == 4
    assert first == as_the_first and five == again
    assert of_rows == of_texts


def ended(world: World, folder: Path) -> Any:
    """Responses that end at a special token, by its name and by its id; and those of a trainer."""
    path, how = str(folder / "model-1"), {"max_new_tokens": 12, "num_samples": 10, "seed": 3}
    module = transformers.LlamaForCausalLM.from_pretrained(path)
    found = []
    for given in ({"model": path}, {"model": module, "tokenizer": path, "engine": "hf"}):
        worker = RolloutWorker(**given)
        pairs = [worker.generate(PROMPTS, stop=START, **how), worker.generate(PROMPTS, stop_ids=(0, 1), **how)]
        found.append([[(each.tokens.tolist(), each.text, each.finish) for each in part] for part in pairs])
    engine = RolloutWorker(path)._open_worker().engine
    reasons = []
    for texts in ({"stop": ("=", START)}, {"bad": (START,)}):
        params = SamplingParams(max_new_tokens=4, **texts)
        reasons.append(engine.refusal(Request(prompt=torch.tensor([3, 4]), params=params, prompt_index=0)))
    config = {"group_size": 8, "max_new_tokens": 12, "rollout": {"stop": [START]}, "run_dir": str(folder / "ended")}
    drawn = []
    for place, actor in (("path", path), ("own", TinyActor(vocab_size=45, seed=1))):
        config["run_dir"] = str(folder / f"ended-{place}")
        with GRPOTrainer(config, actor_model=Actor(actor, path), reward="length") as trainer:
            batch = trainer.rollout(PROMPTS + ["7="]).batch
        rows = zip(batch.ragged("tokens").to_list(), batch.dense("prompt_lengths").tolist(), strict=True)
        drawn.append([row[length:].tolist() for row, length in rows])
    return found, reasons, drawn


def test_the_name_of_a_special_token_ends_a_response_in_every_engine(folder):
    ((found, reasons, drawn),) = run_ranks(ended, 1, folder)
    for by_name, by_id in found:
        assert by_name == by_id
        stopped = [(tokens, text) for tokens, text, finish in by_name if tokens[-1] == 1 and finish == "stop"]
        assert stopped and all(START not in text for _, text in stopped)
    assert reasons == [
        f"its stop text {START!r} is a special token, which is left out of texts; give stop_ids=(1,)",
        f"its bad text {START!r} is a special token, which is left out of texts; give bad_ids=((1,),)",
    ]
    for responses in drawn:
        assert len(responses) == 32 and any(tokens[-1] == 1 for tokens in responses)
        assert all(1 not in tokens[:-1] for tokens in responses)


def refusals(world: World, folder: Path) -> None:
    """What a worker refuses, and conversations, which only a tokenizer with a template takes."""
    path = str(folder / "model-1")
    bare = RolloutWorker(transformers.LlamaForCausalLM.from_pretrained(path))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=45, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    other = transformers.LlamaForCausalLM(config)
    complains(lambda: RolloutWorker(path, engine="sglang"), ["expected 'megatron' or 'vllm' or 'hf'"], ConfigError)
    complains(lambda: RolloutWorker(torch.nn.ReLU()), ["ReLU"], ConfigError)
    complains(lambda: bare.update_weights(other), ["num_layers=3"], ConfigError)
    masked = {"input_ids": [[3, 4]], "attention_mask": [[0, 0]]}
    for prompts, words in (
        (["1+1="], "there is no tokenizer"),
        ([[]], "at least one"),
        ([[1] * 70], "70 tokens"),
        ([{"prompt": "1+1="}], "expected text, a list of messages, or token ids"),
        ([[{"role": "user", "content": "1"}]], "there is no tokenizer"),
        ("1+1=", "found one str, expected a list"),
        ({"prompt": "1+1="}, "found one dict, expected a list"),
        (masked, "attention_mask keeps"),
    ):
        complains(lambda prompts=prompts: bare.generate(prompts), [words], DataError)
    talk = [{"role": "user", "content": "1+1="}]
    complains(lambda: RolloutWorker(path).generate([talk]), ["chat_template"], DataError)
    write_tokenizer(folder / "chat", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}2+2=")
    worker = RolloutWorker(path, tokenizer=str(folder / "chat"))
    by_messages, by_text = (
        worker.generate([prompt], max_new_tokens=4, do_sample=False)[0].tokens.tolist() for prompt in (talk, "1+1=2+2=")
    )
    assert by_messages == by_text


def test_what_cannot_be_done_is_refused(folder):
    run_ranks(refusals, 1, folder)
