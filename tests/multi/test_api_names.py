"""Names of other frameworks: each does what it says, or tells what does it here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import hybridflow
from hybridflow import Actor, GRPOTrainer, LoraConfig, vLLMActor
from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.api.settings import finish_recipe, recipe_values
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import LoRAConfig
from hybridflow.errors import ConfigError
from hybridflow.roles.actor import give_back_unused
from tests.support.complaints import complains
from tests.support.hf_models import END, write_model, write_tokenizer
from tests.support.ranks import run_ranks

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "max_context": 256,
    "vocab_size": 32,
}


def recipe(algorithm: str = "ppo", num_ranks: int = 1, **config: Any) -> Recipe:
    values = recipe_values({"model": MODEL, "batch_size": 8, **config}, algorithm=algorithm, num_ranks=num_ranks)
    return finish_recipe(values)


def test_lora() -> None:
    assert recipe(use_lora=True).actor.lora == LoRAConfig(rank=8)
    assert recipe(use_lora=True, lora_rank=4, lora_alpha=2.0).actor.lora == LoRAConfig(rank=4, alpha=2.0)
    assert recipe(use_lora=True, actor={"lora": {"rank": 2}}).actor.lora == LoRAConfig(rank=2)
    assert recipe(lora_rank=4).actor.lora == LoRAConfig(rank=4)
    assert recipe(use_lora=False).actor.lora is None
    assert Actor(MODEL, lora=LoraConfig(r=4)).settings["actor"]["lora"]["rank"] == 4


def test_lora_config() -> None:
    ours = LoraConfig(rank=4, alpha=16, dropout=0.1, targets=("q_proj", "v_proj"), merge_every=5)
    theirs = LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", merge_every=5
    )
    assert ours == theirs == LoRAConfig(rank=4, alpha=16, dropout=0.1, targets=("q_proj", "v_proj"), merge_every=5)
    assert LoraConfig(4, target_modules="all-linear") == LoRAConfig(rank=4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "rank (r) is missing"),
        ({"rank": 4, "r": 8}, "rank is given twice"),
        ({"r": 4, "bias": "all"}, "bias='all'"),
        ({"r": 4, "task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"r": 4, "use_dora": True}, "use_dora"),
    ],
)
def test_lora_config_refused(given: dict[str, Any], words: str) -> None:
    complains(lambda: LoraConfig(**given), [words], ConfigError)


def test_switches() -> None:
    plain = recipe()
    assert recipe(enable_debug_mode=False, allow_unsafe_operations=False, enable_profiling=False) == plain
    assert recipe(enable_profiling=True).profile.steps == (1, 2, 3)
    assert recipe(enable_profiling=True, profile={"ranks": [0]}).profile.steps == (1, 2, 3)
    offloaded = recipe(offload_to_cpu=True)
    assert offloaded.actor.offload and offloaded.reference.offload and not plain.actor.offload
    always = recipe(num_ranks=2, offload_to_cpu="always", fsdp_sharding="FULL_SHARD")
    assert always.actor.offload == always.reference.offload == "always" and always.actor.update.fsdp == 2
    assert recipe(device="cuda:0").actor.ranks == (0,)
    assert recipe(num_ranks=2, device="cuda:1", critic={"device": "cuda:0"}).actor.ranks == (1,)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fsdp_sharding": "full"}, ("fsdp_sharding='full'", "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD")),
        ({"fsdp_sharding": "FULL_SHARD", "actor": {"tp_size": 2}}, ("{'tp': 2}", "rollout_tensor_parallel_size")),
        ({"enable_debug_mode": "yes"}, ("enable_debug_mode='yes'", "true or false")),
        ({"allow_unsafe_operations": True}, ("allow_unsafe_operations", "remove the key")),
        ({"enable_profiling": "yes"}, ("enable_profiling='yes'", "true or false")),
        ({"enable_profiling": True, "profile": {"steps": [7]}}, ("profile.steps", "remove one of the two")),
        ({"device": "cuda:16"}, ("actor.devices", "'cuda:16' is not there", "1 rank")),
        ({"critic": {"device": "cuda:16"}}, ("critic.devices", "'cuda:16' is not there")),
        ({"critic": {"device": "cuda:0", "devices": [1]}}, ("critic.device=", "remove one of the two")),
        ({"use_lora": False, "lora_rank": 4}, ("use_lora=false", "remove one of the two")),
        ({"use_lora": 1}, ("use_lora=1",)),
    ],
)
def test_refused(config: dict[str, Any], words: tuple[str, ...]) -> None:
    complains(lambda: recipe(**config), words, ConfigError)


def test_sharding() -> None:
    def update(num_ranks: int, **config: Any) -> Any:
        return recipe_values(config, algorithm="ppo", num_ranks=num_ranks)["actor"]["update"]

    for sharding in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        assert update(4, fsdp_sharding=sharding) == {"dp": 4, "fsdp_sharding": sharding}
    replicas = {"devices": [0, 1, 3], "data_parallel_size": 3}
    assert update(4, fsdp_sharding="FULL_SHARD", actor=replicas) == {"dp": 3, "fsdp_sharding": "FULL_SHARD"}


def test_debug_mode() -> None:
    try:
        assert recipe(enable_debug_mode=True) == recipe()
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)


def test_memory_is_given_back_unless_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    assert hybridflow.config.auto_cache_clear is True
    give_back_unused(torch.device("cuda"))
    monkeypatch.setattr(hybridflow.config, "auto_cache_clear", False)
    give_back_unused(torch.device("cuda"))
    assert calls == ["emptied"]


def test_vllm_of_another_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization='fp8'.*leave it out"):
        vLLMActor("models/policy", quantization="fp8")
    with pytest.raises(ConfigError, match="found SimpleNamespace.*vLLMActor\\('models/policy'\\)"):
        vLLMActor(SimpleNamespace(model_config=SimpleNamespace(model="models/policy")))


def test_a_rollout_by_vllm() -> None:
    assert vLLMActor("models/policy").settings == {
        "model": {"path": "models/policy"},
        "actor": {},
        "rollout": {"engine": {"kind": "vllm"}},
    }
    actor = vLLMActor("models/policy", tensor_parallel_size=2, quantization=None, enable_lora=True)
    assert actor.settings["actor"]["lora"]["rank"] == 8
    sizes = {"actor": {"tensor_parallel_size": 2}, "hybrid_engine": actor.settings["hybrid_engine"]}
    found = recipe(num_ranks=4, rollout=actor.settings["rollout"], **sizes).actor
    assert (str(found.update), str(found.rollout)) == ("tp2.pp1.dp2", "tp1.pp1.dp4")
    assert vLLMActor("models/policy", enable_lora=True, lora=LoraConfig(4)).settings["actor"]["lora"]["rank"] == 4


def test_set_device_mesh() -> None:
    actor = Actor(MODEL, data_parallel_size=4).set_device_mesh(tp=2, pp=2)
    update = recipe(num_ranks=8, actor=actor.settings["actor"]).actor.update
    assert (update.tp, update.pp, update.dp) == (2, 2, 2)
    with pytest.raises(ConfigError, match="'tp_size': 2, 'pp_size': 1"):
        HybridActor.set_device_mesh(None, 2, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose text ends otherwise than its tokenizer says, and that names no padding."""
    write_model(tmp_path / "model", eos_token_id=5, pad_token_id=None)
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def trained(world, folder: str, **settings: Any):
    place = Path(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "tokenizer")
    config = {"run_dir": str(place / "run"), "max_new_tokens": 16, "group_size": 8, "lr": 1e-4, **settings}
    actor = Actor(model=model, tokenizer=tokenizer)
    with GRPOTrainer(config, actor_model=actor, reward=lambda prompt, response, answer: len(response)) as trainer:
        rollout = trainer.rollout(["1+1=", "2+3="])
        trainer.update(rollout)
        trainer.save_checkpoint(place / "out")
    columns = rollout.batch.columns
    lengths = columns["prompt_lengths"].tolist()
    return [row[length:].tolist() for row, length in zip(columns["tokens"].to_list(), lengths, strict=True)]


def trained_with_adapters(world, folder: str):
    return trained(world, folder, use_lora=True)


@pytest.mark.parametrize("training", [trained, trained_with_adapters])
def test_ends_are_aligned(folder: Path, training) -> None:
    """Text ends where the model says so, and where its tokenizer does; and so it does in what is written."""
    (rows,) = run_ranks(training, 1, str(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    end = tokenizer.convert_tokens_to_ids(END)
    assert all(not {end, 5} & {*row[:-1]} and (len(row) == 16 or row[-1] in (end, 5)) for row in rows)
    assert {row[-1] for row in rows if len(row) < 16} == {end, 5}
    written = json.loads((folder / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [end, 5] and written["pad_token_id"] == end
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    assert loaded.generation_config.eos_token_id == [end, 5]
