"""Models in memory as the beginning of roles: they compute what their own libraries compute, in any layout."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import GlobalMemoryBuffer

from hybridflow.api.trainers import GRPOTrainer, PPOTrainer
from hybridflow.checkpoint.formats.in_memory import in_memory_info, in_memory_model
from hybridflow.dataflow.batch import Batch
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.specs import describe
from hybridflow.models.user_model import ActorModel
from hybridflow.models.weights import initialize
from hybridflow.parallel.megatron import collection
from hybridflow.parallel.world import World
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.critic import Critic
from hybridflow.roles.reference import Reference
from hybridflow.roles.reward_model import RewardModel
from hybridflow.sections import to_dict
from hybridflow.testing import check_actor
from tests.multi.jobs import make_batch, make_job, tiny_recipe
from tests.multi.models import TINY, VOCAB, place
from tests.multi.test_placement import share_of_ones
from tests.support.complaints import complains, complaint
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.megatron_models import make_config
from tests.support.plain_models import token_log_probs
from tests.support.ranks import run_ranks

LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, pp=2)]
MIXTURE = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Phi3": {},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 4},
    "Mixtral": {**MIXTURE, "num_local_experts": 4, "sliding_window": None},
    "Qwen3Moe": {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 12},
}
TEMPERATURE = 0.8
"""Of the recipe of ``tests.multi.jobs``."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_model(folder / name, name, seed=seed, vocab_size=VOCAB, **other)
        for seed, (name, other) in enumerate(FAMILIES.items())
    }


def recipe_of(objects: dict[str, Any], layout: ParallelLayout, algorithm: str = "grpo") -> Any:
    """A recipe whose models are those that were given."""
    values = to_dict(tiny_recipe(layout, algorithm, model=replace(TINY, num_layers=2)))
    values["model"] = {}
    if values["critic"] is not None:
        values["critic"]["model"] = None
    return recipe_from_dict(values, in_memory=in_memory_info(objects))


def job_of(world: World, objects: dict[str, Any], layout: ParallelLayout, algorithm: str = "grpo") -> Any:
    job, _ = make_job(world, recipe_of(objects, layout, algorithm))
    return replace(job, objects=objects)


def log_probs(world: World, objects: dict[str, Any], layout: ParallelLayout) -> Any:
    """Of the actor that begins with what was given; None but on holders."""
    job = job_of(world, objects, layout)
    actor = Actor(job, KLCoefficient(job.recipe))
    assert actor.model is not None
    actor.model.load_given()
    found = actor.log_probs(make_batch(), {})
    return None if found is None else found.columns["old_log_probs"].values.numpy()


def responses(batch: Batch) -> list[tuple[torch.Tensor, int]]:
    return list(zip(batch.columns["tokens"].to_list(), batch.columns["prompt_lengths"].tolist(), strict=True))


def expected_log_probs(logits_of: Any) -> torch.Tensor:
    """By the library's own logits, sample for sample."""
    rows = []
    for tokens, prompt in responses(make_batch()):
        with torch.no_grad():
            rows.append(token_log_probs(logits_of(tokens[None])[0, :, :VOCAB], tokens, TEMPERATURE)[prompt - 1 :])
    return torch.cat(rows)


def all_log_probs(world: World, given: dict[str, Any], layout: ParallelLayout) -> dict[str, Any]:
    return {name: log_probs(world, {"actor": model}, layout) for name, model in given.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_actors_compute_what_transformers_computes(models, layout):
    ranks = run_ranks(all_log_probs, layout.world_size, models, layout)
    for name, model in models.items():
        expected = expected_log_probs(lambda ids, model=model: model(ids).logits)
        assert expected.std() > 0.5, name
        found = [each[name] for each in ranks if each[name] is not None]
        assert len(found) == layout.tp
        for each in found:
            assert (torch.from_numpy(each) - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def other_roles(world: World, actor: Any, scorer: Any, other: Any) -> Any:
    objects = {"actor": actor, "critic": scorer, "reward": scorer, "reference": other}
    job = job_of(world, objects, ParallelLayout(), "ppo")
    critic, reward, reference = Critic(job), RewardModel(job), Reference(job)
    assert critic.model is not None and reference.model is not None
    critic.model.load_given()
    reference.model.load_given()
    batch = make_batch()
    return (
        critic.values(batch, {}).columns["values"].values.numpy(),
        reward.score(batch, {}).columns["scores"].numpy(),
        reference.log_probs(batch, {}).columns["ref_log_probs"].values.numpy(),
    )


def test_critic_reward_and_reference_are_what_was_given(models, tmp_path):
    scorer = write_model(tmp_path, "Llama", "ForSequenceClassification", seed=5, vocab_size=VOCAB, pad_token_id=None)
    other = write_model(tmp_path, "Llama", seed=6, vocab_size=VOCAB)
    ((values, scores, ref),) = run_ranks(other_roles, 1, models["Llama"], scorer, other)
    wanted_values, wanted_scores = [], []
    for tokens, prompt in responses(make_batch()):
        with torch.no_grad():
            told = scorer.score(scorer.model(tokens[None]).last_hidden_state)[0, :, 0]
        wanted_values.append(told[prompt - 1 : -1])
        wanted_scores.append(told[-1])
    assert (torch.from_numpy(values) - torch.cat(wanted_values)).abs().max() <= 1e-5 * 30
    assert (torch.from_numpy(scores) - torch.stack(wanted_scores)).abs().max() <= 1e-5 * 30
    expected = expected_log_probs(lambda ids: other(ids).logits)
    assert (torch.from_numpy(ref) - expected).abs().max() <= 1e-5 * expected.abs().max()


GPT = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    max_context=32,
    vocab_size=VOCAB + 1,
)
"""Its embedding has a row of padding."""


def make_gpt(world: World, layout: ParallelLayout, ranks: tuple[int, ...], **other: Any) -> Any:
    """A GPTModel as megatron-core makes it, with its own attention; weights of (seed, name)."""
    # Its attention draws dropout, of which there is none, from the random state of a GPU.
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
    alone = ParallelLayout()
    built = {}
    for each, where in ((alone, (world.rank,)), (layout, ranks)):
        mesh = DeviceMesh(name=str(each), layout=each, ranks=where, ranks_per_node=world.ranks_per_node)
        _, groups = place(world, each, where) if each != alone else (None, None)
        if groups is None:
            groups = collection(world, mesh)
        config = make_config(GPT, each, **other)
        stage = groups.pp.rank()
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=GPT.vocab_size,
            max_sequence_length=64,
            pre_process=stage == 0,
            post_process=stage == each.pp - 1,
            position_embedding_type="rope",
            rotary_base=5000,
            pg_collection=groups,
        )
        if each == alone:
            spec = describe(model)
        initialize(model, spec, mesh, world.rank, seed=7, std=0.3)
        built[each] = model.eval()
    return built[layout], built[alone]


def unseen(ids: torch.Tensor) -> torch.Tensor:
    """A causal mask as megatron-core has it."""
    return torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()[None, None]


def gpt_log_probs(world: World, layout: ParallelLayout) -> Any:
    place(world, ParallelLayout(dp=world.size))
    cut, whole = make_gpt(world, layout, tuple(range(world.size)))
    check_actor(whole)
    given = in_memory_model(cut, vocab_size=VOCAB)
    found = log_probs(
        world, {"actor": given}, ParallelLayout(dp=1) if world.size == 1 else ParallelLayout(tp=world.size)
    )
    expected = expected_log_probs(lambda ids: whole(ids, torch.arange(ids.shape[1])[None], unseen(ids)))
    return found, expected.numpy()


@pytest.mark.parametrize("layout", [*LAYOUTS, ParallelLayout(tp=2)], ids=str)
def test_a_gpt_model_gives_its_own_logits_and_is_made_whole_where_it_is_cut(layout):
    for found, expected in run_ranks(gpt_log_probs, layout.world_size, layout):
        assert abs(expected).max() > 2
        assert abs(found - expected).max() <= 1e-5 * abs(expected).max()


def gpt_refusals(world: World) -> None:
    place(world, ParallelLayout())

    def refused(words: str, vocab_size: int | None = None, **other: Any) -> None:
        model, _ = make_gpt(world, ParallelLayout(), (0,), **other)
        complains(lambda: in_memory_model(model, vocab_size=vocab_size), [words], ConfigError)

    refused("config.add_bias_linear=True", add_bias_linear=True)
    refused("config.rotary_interleaved=True", rotary_interleaved=True)
    refused("vocab_size", VOCAB + 2)


def test_a_gpt_model_that_computes_something_else_is_refused_by_name():
    run_ranks(gpt_refusals, 1)


def test_settings_are_those_of_the_directory_that_it_would_be_saved_to(models, tmp_path):
    from hybridflow.checkpoint.formats.registry import open_model

    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        saved, given = open_model(tmp_path / name), in_memory_model(model)
        assert given.model == saved.model, name
        assert given.tensors == saved.tensors, name
        for tensor in saved.tensors:
            assert torch.equal(given.read(tensor), saved.read(tensor)), (name, tensor)


def test_what_cannot_be_taken_is_refused_by_name(models):
    llama = models["Llama"]
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=VOCAB)
    assert "model_type='gpt2'" in complaint(lambda: in_memory_model(transformers.GPT2LMHeadModel(config)), ConfigError)
    with torch.device("meta"):
        empty = type(llama)(llama.config)
    assert "meta device" in complaint(lambda: in_memory_model(empty), ConfigError)

    class Mine(type(llama)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert "overrides forward" in complaint(lambda: in_memory_model(Mine(llama.config)), ConfigError)
    assert "expected a PreTrainedModel" in complaint(lambda: in_memory_model(torch.nn.Linear(2, 2)), ConfigError)


def test_a_recipe_that_says_otherwise_than_the_model_is_refused(models):
    values = to_dict(tiny_recipe(ParallelLayout(), "grpo"))
    given = in_memory_info({"actor": models["Llama"]})
    with pytest.raises(ConfigError, match=r"model\.num_layers=4: the model that was given has 2"):
        recipe_from_dict(values, in_memory=given)
    values["model"] = {"path": "somewhere"}
    with pytest.raises(ConfigError, match=r"model\.path='somewhere': would not be read"):
        recipe_from_dict(values, in_memory=given)


def ppo_losses(world: World, folder: Path, name: str, roles: dict[str, Any], other: dict[str, Any]) -> Any:
    config = {"rollout_batch_size": 4, "max_new_tokens": 5, "lr": 1e-3, "kl_coef": 0.1, "run_dir": str(folder / name)}
    models = {"actor_model": roles["actor"], "critic_model": roles["critic"], "reward": roles["reward"]}
    with PPOTrainer({**config, **other}, **models, tokenizer=str(folder / "actor")) as trainer:
        metrics = [trainer.step(["1+1=", "2+2=", "3+4=", "10+5="]) for _ in range(2)]
        trainer.save_checkpoint(folder / f"{name}-out")
    return [(each["loss"], each["critic/loss"], each["reward/mean"], each["kl/ref"]) for each in metrics]


WITHOUT_TABLE = "StableLm", "StableLm"


@pytest.mark.parametrize(
    ("families", "other"),
    [
        pytest.param(("Qwen2", "Llama"), {"actor": {"tp_size": 2}}, marks=pytest.mark.slow),
        pytest.param(("Qwen2", "Llama"), {"lora_rank": 2}, marks=pytest.mark.slow),
        pytest.param(WITHOUT_TABLE, {}, marks=pytest.mark.slow),
        pytest.param(WITHOUT_TABLE, {"fsdp_sharding": "FULL_SHARD"}, marks=pytest.mark.slow),
        pytest.param(WITHOUT_TABLE, {"lora_rank": 2}, marks=pytest.mark.slow),
        pytest.param(WITHOUT_TABLE, {"actor": {"devices": [1]}, "critic": {"devices": [0]}}, marks=pytest.mark.slow),
    ],
    ids=["tp2", "lora", "without a table", "without a table, fsdp", "without a table, lora", "without a table, apart"],
)
def test_training_is_the_same_from_memory_as_from_directories(tmp_path, families, other):
    first, second = families
    memory = {
        "actor": write_model(tmp_path / "actor", first, seed=1),
        "critic": write_model(tmp_path / "critic", second, seed=2),
        "reward": write_model(tmp_path / "reward", second, "ForSequenceClassification", seed=3),
    }
    write_tokenizer(tmp_path / "actor")
    before = memory["actor"].state_dict()["model.norm.weight"].clone()
    expected = run_ranks(ppo_losses, 2, tmp_path, "paths", {name: tmp_path / name for name in memory}, other)
    assert run_ranks(ppo_losses, 2, tmp_path, "memory", memory, other) == expected
    assert torch.equal(memory["actor"].state_dict()["model.norm.weight"], before)
    load = transformers.AutoModelForCausalLM.from_pretrained
    one, two = (load(tmp_path / f"{name}-out") for name in ("paths", "memory"))
    assert type(two) is type(memory["actor"])
    assert all(torch.equal(one.state_dict()[name], each) for name, each in two.state_dict().items())


def grpo_resumed(world: World, model: Any, tokenizer: Path, folder: Path) -> list[Any]:
    """What three steps learn, and the same of two steps and one more after a stop."""
    found = []
    for name, starts in (("whole", [3]), ("stopped", [2, 1])):
        config = {"group_size": 2, "rollout_batch_size": 8, "max_new_tokens": 5, "lr": 1e-3}
        rows: list[Any] = []
        for steps in starts:
            trainer = GRPOTrainer(
                {**config, "run_dir": str(folder / name)},
                actor_model=ActorModel(model),
                reward=share_of_ones,
                tokenizer=str(tokenizer),
                resume=bool(rows),
            )
            with trainer:
                rows += [trainer.step(["1+1=", "2+2=", "3+4=", "10+5="]) for _ in range(steps)]
                trainer.save_checkpoint(folder / f"{name}-{len(rows)}")
        found.append([(each["loss"], each["actor/grad_norm"], each["reward/mean"]) for each in rows])
    return found


@pytest.mark.parametrize("family", ["Falcon", pytest.param("Granite", marks=pytest.mark.slow)])
def test_a_model_without_a_table_learns_goes_on_and_is_read_by_transformers(tmp_path, family):
    model = write_model(tmp_path / "given", family, seed=1)
    write_tokenizer(tmp_path / "tokenizer")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    ((whole, stopped),) = run_ranks(grpo_resumed, 1, model, tmp_path / "tokenizer", tmp_path)
    assert whole == stopped and any(grad_norm > 1e-3 for _, grad_norm, _ in whole)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    read, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole-3", output_loading_info=True)
    assert type(read) is type(model) and not told["missing_keys"] and not told["unexpected_keys"]
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stopped-3").state_dict()
    assert all(torch.equal(each, other[name]) for name, each in read.state_dict().items())
    assert any((each != before[name]).any() for name, each in read.state_dict().items())
