"""Programs in the words of other frameworks: what they compute. That they run as written docs/api.md shows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hybridflow
from hybridflow import (
    PPO,
    Actor,
    ActorModel,
    CriticModel,
    DataParallelTrainer,
    DataPipeline,
    GRPOTrainer,
    HybridActor,
    PPOTrainer,
    ReplayBuffer,
    RewardModel,
    RLTrainer,
    RolloutManager,
    RolloutWorker,
    measure_switch_overhead,
)
from hybridflow.api.settings import finish_recipe, recipe_values
from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.parallel.world import World
from tests.support.complaints import complains, complaint
from tests.support.hf_models import SIZES, randomize, write_model, write_tokenizer
from tests.support.plain_models import greedy
from tests.support.ranks import run_ranks
from tests.support.user_models import TinyActor, TinyCritic

PROMPTS = ["1+1=", "2+3=", "4+4=", "12+5="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words")
    for name, kind in (("actor", "ForCausalLM"), ("reward", "ForSequenceClassification")):
        write_model(path / name, kind=kind, seed=len(name))
        write_tokenizer(path / name)
    return path


def test_import_paths() -> None:
    from hybridflow.data import DataLoader, DataProvider
    from hybridflow.metrics import MetricsExporter
    from hybridflow.trainer import RLTrainer as SameTrainer
    from hybridflow.trainer.ppo import PPOTrainer as SamePPO

    assert SamePPO is hybridflow.PPOTrainer and SameTrainer is hybridflow.RLTrainer
    assert MetricsExporter is hybridflow.MetricsExporter
    assert DataLoader is hybridflow.DataLoader is DataProvider is hybridflow.DataProvider
    assert dir(hybridflow) == sorted(hybridflow.__all__) and "PPOTrainer" in dir(hybridflow)
    for module in (hybridflow.trainer, hybridflow.data):
        with pytest.raises(AttributeError, match="has no attribute 'Actor'"):
            module.Actor  # noqa: B018


def test_settings_classes_of_trl_are_answered_with_ours() -> None:
    with pytest.raises(ImportError, match=r"hybridflow has no GRPOConfig: a trainer takes a dict .*docs/from-trl\.md"):
        from hybridflow import GRPOConfig  # noqa: F401
    with pytest.raises(AttributeError, match="did you mean GRPOTrainer"):
        hybridflow.GRPOTrainr  # noqa: B018


def test_a_model_is_given_back_as_it_is_and_subclasses_are_classes() -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **SIZES))
    assert ActorModel(llama) is llama and CriticModel(llama) is llama and ActorModel(model=llama) is llama
    actor, critic = TinyActor(vocab_size=9), TinyCritic(vocab_size=9)
    assert type(actor) is TinyActor and actor.vocab_size == 9 and type(critic) is TinyCritic
    copied = copy.deepcopy(actor)
    assert type(copied) is TinyActor and torch.equal(copied.head.weight, actor.head.weight)
    assert type(ActorModel()) is ActorModel
    for given in ("models/actor", actor, critic):
        complains(lambda given=given: ActorModel(given), [type(given).__name__, "as they are"], ConfigError)


def test_one_prompt_is_sampled_for_a_whole_batch() -> None:
    model = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 30}
    given = {"batch_size": 4, "rollout_batch_size": 8, "model": {**model, "max_context": 64}}

    def sizes(num_prompts: int, **more: Any) -> tuple[int, int]:
        recipe = finish_recipe(recipe_values({**given, **more}, algorithm="ppo", num_ranks=1), num_prompts=num_prompts)
        return recipe.rollout.group_size, recipe.trainer.global_batch_size

    assert sizes(1) == (8, 8) and sizes(8) == (1, 8) and sizes(1, group_size=2) == (2, 8)


def scored(world: World, folder: Path) -> Any:
    """Scores of two sizes of forward passes, what transformers says, and how many samples a pass has at most."""
    found = []
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    for most in (3, None):
        config = {
            "actor": {"model_name": str(folder / "actor"), "device": "cuda:0"},
            "reward": {"model_name": str(folder / "reward"), "device": "cuda:0", "batch_size": most},
            "run_dir": str(folder / f"scored-{most}"),
            "max_new_tokens": 6,
            "rollout_batch_size": 8,
        }
        trainer = PPOTrainer(config)
        rollout = trainer.rollout(PROMPTS * 2)
        role = trainer.session().trainer.roles.by_name["reward"]
        largest = max(len(part.samples) for part in role._micro_batches(rollout.batch))
        with torch.no_grad():
            rows = rollout.batch.ragged("tokens").to_list()
            told = [float(reward(row[None]).logits[0, 0]) for row in rows]
        found.append((rollout.scores.tolist(), told, largest, trainer.update(rollout)["loss"]))
        trainer.close()
    return found


@pytest.mark.slow
def test_a_reward_model_scores_so_many_samples_at_once(folder: Path) -> None:
    (((few, told, largest, loss), (all_at_once, _, most, same)),) = run_ranks(scored, 1, folder)
    assert few == pytest.approx(told, abs=1e-4) and few == pytest.approx(all_at_once, abs=1e-5)
    assert (largest, most) == (3, 8) and loss == pytest.approx(same, abs=1e-6)


def unscored(world: World, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "actor")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "actor")
    trainer = PPOTrainer(
        actor_model=ActorModel(model),
        critic_model=CriticModel(model),
        tokenizer=tokenizer,
        namespace="search-rl",
        config={"batch_size": 4, "rollout_batch_size": 8, "lr": 1e-6, "run_dir": str(folder / "unscored")},
    )
    ids = tokenizer.encode("1+2=", return_tensors="pt")
    rollout = trainer.rollout(ids)
    lengths = rollout.batch.dense("prompt_lengths").tolist()
    prompts = [
        row[:length].tolist() for row, length in zip(rollout.batch.ragged("tokens").to_list(), lengths, strict=True)
    ]
    loss = trainer.update(rollout)["loss"]
    refused = complaint(lambda: trainer.save_checkpoint(folder / "no", save_training_state=True), ConfigError)
    trainer.save_checkpoint(path=folder / "weights", save_optimizer=False, save_training_state=False)
    trainer.close()
    return prompts == ids.tolist() * 8, rollout.scores.tolist(), len(set(rollout.texts)), loss, refused


def test_without_a_reward_token_ids_score_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ((is_one_prompt, scores, num_texts, loss, refused),) = run_ranks(unscored, 1, folder)
    assert is_one_prompt and scores == [0.0] * 8 and num_texts > 1 and loss == loss
    assert capfd.readouterr().err.count("no reward is given") == 1
    assert "save_training_state=True" in refused and not (folder / "no").exists()
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("actor", "weights")
    )
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


def pipelines(world: World, folder: Path) -> Any:
    actor = HybridActor.from_pretrained(str(folder / "actor"), hybrid_config={"tp_size": 1, "lr": 0.1})
    sections = {
        "reward_models": [str(folder / "reward")],
        "critics": [str(folder / "actor")],
        "rollout_config": {"max_length": 4},
        "train_config": {"num_epochs": 2, "lr": 1e-2, "run_dir": str(folder / "pipeline")},
    }
    no_data = complaint(lambda: RLTrainer(pipeline=DataPipeline(actors=[actor], **sections)).run(), ConfigError)
    a_class = complaint(lambda: DataPipeline(actors=[HybridActor], **sections), ConfigError)
    ids = actor.tokenizer.encode("1+2=3")
    losses = [float(actor([ids], [ids]).loss)]
    actor.eval()
    metrics = RLTrainer(DataPipeline(actors=[actor], **sections, data=PROMPTS)).run(output_dir=folder / "trained")
    losses.append(float(actor([ids], [ids]).loss))
    told = []
    for name in ("actor", "trained"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        told.append(float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss))
    # A manager generates with what the actor has at the time.
    manager = RolloutManager(actor)
    ids = actor.tokenizer.encode("1+2=")
    said = []
    for _ in range(2):
        tokens = actor.generate([ids], max_new_tokens=5)[0, len(ids) :].tolist()
        (got,) = manager.rollout(["1+2="], max_new_tokens=5, do_sample=False)
        said.append((tokens[: len(got.tokens)], got.tokens.tolist()))
        actor.training_step([ids], [ids])
    learned = complaint(lambda: DataPipeline(actors=[actor], **sections), ConfigError)
    pushed = complaint(lambda: manager.update_weights(str(folder / "actor")), ConfigError)
    costs = [measure_switch_overhead(actor, mode) for mode in ("generate", "train")]
    mode = complaint(lambda: measure_switch_overhead(actor, "faster"), ConfigError)
    other = complaint(lambda: measure_switch_overhead(Actor("models/actor")), ConfigError)
    return (
        len(metrics),
        (losses, told),
        (no_data, a_class, learned, pushed, mode, other),
        said,
        costs,
        actor.switch_cost(),
    )


def test_a_pipeline_of_paths_and_a_hybrid_actor(folder: Path) -> None:
    ((steps, (losses, told), refused, said, (there, back), cost),) = run_ranks(pipelines, 1, folder)
    # Four prompts without a size of the batch are one step, twice.
    assert steps == 2 and (folder / "pipeline" / "checkpoints" / "latest").is_file()
    # The actor has learned what the pipeline has.
    assert losses == pytest.approx(told, abs=1e-5) and abs(losses[0] - losses[1]) > 1e-3
    words = ("give data=…", "is the class HybridActor", "has learned", "own training", "'faster'", "found Actor")
    for message, each in zip(refused, words, strict=True):
        assert each in message, message
    assert all(tokens == got for tokens, got in said) and said[0] != said[1]
    assert (there.latency_ms, there["mem_increase_mb"]) == (cost.ms, cost.extra_mb)
    assert (back["latency_ms"], back.mem_increase_mb) == (cost.back_ms, 0.0)


def flows(world: World, folder: Path) -> Any:
    buffer, path = ReplayBuffer(capacity=6), str(folder / "actor")
    worker = RolloutWorker(path)
    before = worker.generate(PROMPTS[:1], max_new_tokens=2)
    flow = worker >> RewardModel(str(folder / "reward")) >> buffer >> PPO(rollout_batch_size=4)
    settings = {"max_new_tokens": 4, "run_dir": str(folder / "flow")}
    metrics = flow.run(PROMPTS, steps=2, **settings)
    whole = [torch.cat([each["prompt"], each["response"]]) for each in buffer.samples]
    kept = [
        (row.tolist(), each["score"], len(each["log_probs"])) for row, each in zip(whole, buffer.samples, strict=True)
    ]
    refused = [
        complaint(call, ConfigError)
        for call in (
            lambda: worker.generate(PROMPTS),
            lambda: RolloutWorker(path, engine="hf").as_flow(),
            lambda: ReplayBuffer(0),
        )
    ]
    chosen = [each["score"] for each in buffer.sample(2, seed=1)], len(buffer.sample(100))
    return len(before), [step["reward/mean"] for step in metrics], kept, refused, chosen


def test_a_worker_a_model_and_a_buffer_are_nodes_of_a_flow(folder: Path) -> None:
    ((num, means, kept, refused, (chosen, everything)),) = run_ranks(flows, 1, folder)
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    with torch.no_grad():
        told = [float(reward(torch.tensor([row])).logits[0, 0]) for row, _, _ in kept]
    scores = [score for _, score, _ in kept]
    assert num == 1 and scores == pytest.approx(told, abs=1e-4)
    # Of eight samples the newest six are kept: two of the first step, all of the second.
    assert len(kept) == 6 and sum(scores[2:]) / 4 == pytest.approx(means[1], abs=1e-5)
    assert all(0 < num_log_probs < len(row) for row, _, num_log_probs in kept)
    assert len(chosen) == 2 and set(chosen) <= set(scores) and everything == 6
    for message, words in zip(refused, ("policy of a flow", "engine='hf'", "capacity=0"), strict=True):
        assert words in message, message


def replicas(world: World, folder: Path) -> Any:
    config = {"rollout_batch_size": 4, "group_size": 2, "max_new_tokens": 4, "lr": 1e-2}
    model, found = str(folder / "actor"), []
    for name, make in (
        ("named", lambda config: GRPOTrainer(config, actor_model=model, reward="length")),
        ("words", lambda config: DataParallelTrainer(model, strategy="megatron", config=config, reward="length")),
    ):
        with make({**config, "run_dir": str(folder / name)}) as trainer:
            out = trainer.step(PROMPTS[:2])
            found.append([out[key] for key in ("loss", "reward/mean", "actor/grad_norm")])
    trainer = DataParallelTrainer(model, strategy="fsdp", reward="length")
    unknown = complaint(lambda: DataParallelTrainer(model, strategy="ddp"), ConfigError)
    return found, trainer._values["actor"]["update"], unknown


@pytest.mark.slow
def test_a_trainer_of_replicas_is_a_trainer(folder: Path) -> None:
    (((one, other), update, unknown),) = run_ranks(replicas, 1, folder)
    assert one == other and one[2] > 0
    assert update == {"dp": 1, "fsdp_sharding": "FULL_SHARD"}
    assert "strategy='ddp'; expected 'fsdp' or 'megatron'" in unknown


def by_transformers(world: World, folder: Path) -> Any:
    found = []
    for seed, other in ((1, 2), (3, 4)):
        sizes = {**SIZES, "vocab_size": 45}
        # The second is of a family that has no table here.
        kind, config = (
            (transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes))
            if seed == 1
            else (transformers.StableLmForCausalLM, transformers.StableLmConfig(**sizes))
        )
        models = [kind(config).eval() for _ in range(2)]
        for model, number in zip(models, (seed, other), strict=True):
            randomize(model, number, 0.2)
        models[1].save_pretrained(folder / f"hf-{seed}")
        worker = RolloutWorker(models[0], engine="hf")
        prompts = [[7, 12, 33], [9]]
        said = [worker.generate(prompts, max_new_tokens=5, do_sample=False, stop_ids=[])]
        worker.update_weights(folder / f"hf-{seed}")
        said.append(worker.generate(prompts, max_new_tokens=5, do_sample=False, stop_ids=[]))
        for model, responses in zip(models, said, strict=True):
            for prompt, response in zip(prompts, responses, strict=True):
                expected, is_tie = greedy(lambda ids, model=model: model(ids).logits, prompt, 5, None)
                assert not is_tie
                found.append((response.tokens.tolist(), expected))
    refused = [
        complaint(call, HybridflowError)
        for call in (
            lambda: RolloutWorker(torch.nn.Linear(2, 2), engine="hf"),
            lambda: RolloutWorker(models[0], engine="hf", tensor_parallel_size=2),
            lambda: RolloutWorker(str(folder / "nowhere"), engine="hf", tokenizer=str(folder / "actor")),
            lambda: worker.update_weights(str(folder / "reward")),
        )
    ]
    return found, refused


def test_transformers_generates_what_it_says_itself(folder: Path) -> None:
    ((found, refused),) = run_ranks(by_transformers, 1, folder)
    assert len(found) == 8 and all(got == expected for got, expected in found)
    assert len({str(got) for got, _ in found}) > 4
    for message, words in zip(
        refused, ("max_context", "leave sizes out", "found nothing there", "lm_head.weight: missing"), strict=True
    ):
        assert words in message, message


def sharded(world: World, folder: Path) -> Any:
    ids, found = torch.tensor([[5, 6, 7, 8]]), []
    for more in ({}, {"fsdp_sharding": "HYBRID_SHARD"}):
        actor = HybridActor.from_pretrained(str(folder / "actor"), hybrid_config={"tp_size": 4, **more})
        said = actor.generate(ids, max_new_tokens=4, do_sample=False).tolist()
        actor.train()
        step = actor.training_step(input_ids=ids.repeat(4, 1), labels=ids.repeat(4, 1))
        found.append((said, step.loss, step.grad_norm, str(actor.recipe.actor.update)))
    config = {"rollout_batch_size": 8, "group_size": 2, "max_new_tokens": 4, "lr": 1e-2}
    for strategy in ("megatron", "fsdp"):
        settings = {**config, "run_dir": str(folder / f"strategy-{strategy}")}
        with DataParallelTrainer(str(folder / "actor"), strategy=strategy, config=settings, reward="length") as trainer:
            out = trainer.step(PROMPTS[:4])
            found.append([out[key] for key in ("loss", "reward/mean", "actor/grad_norm")])
    return found


@pytest.mark.slow
def test_programs_that_ask_for_fsdp_learn_what_others_learn(folder: Path) -> None:
    for (said, loss, norm, layout), other, one, two in run_ranks(sharded, 4, folder):
        assert layout == "tp4.pp1.dp1" and other[3] == "tp1.pp1.dp4.hsdp4"
        assert said == other[0] and (loss, norm) == pytest.approx(other[1:3], rel=1e-5)
        assert one == pytest.approx(two, rel=1e-5) and one[2] > 0
