"""Models without a table run in ``transformers``: what roles compute, learn, sample, save and export is theirs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from hybridflow import cli
from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.checkpoint.formats.in_memory import library_assets
from hybridflow.checkpoint.model_dir import ModelDir
from hybridflow.errors import CheckpointError, ConfigError, LayoutError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.memory import job_memory
from hybridflow.models.hf_model import copy_model, make_actor, make_critic
from hybridflow.models.layers import transformer_layers
from hybridflow.models.microbatch import pack
from hybridflow.parallel.world import World
from hybridflow.placement.library_models import _fill
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.recipe.meshes import role_meshes
from hybridflow.rollout.engines.hf_engine import HFEngine
from hybridflow.rollout.engines.user_engine import UserEngine
from hybridflow.rollout.request import SamplingParams
from tests.multi.models import nine_requests, place
from tests.multi.test_train_pretrained import batch, begun, close, lines, run, sequences, their_log_probs
from tests.multi.test_train_pretrained import recipe as of_directories
from tests.support.checkpoint_cases import edit_json, tensors_of
from tests.support.complaints import complains
from tests.support.conversions import convert
from tests.support.hf_models import randomize, write_model, write_tokenizer, write_vision_model
from tests.support.plain_models import token_log_probs
from tests.support.ranks import run_ranks

FAMILIES = {
    "StableLm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "Falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True, "attention_dropout": 0.2},
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 1.5, "residual_multiplier": 0.7},
}
"""None has a table, and what each computes has another form: no family of ours could stand in for it."""

WINDOWS = {"attention_chunk_size": 4, "floor_scale": 2, "moe_layers": [], "head_dim": 8, "intermediate_size_mlp": 48}
STATEFUL = {
    "FalconH1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "MiniMax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 4},
    "RecurrentGemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 4},
    "Llama4Text": {"no_rope_layers": [1, 0], **WINDOWS},
}
"""Layers with a state or a count of their own, which padding and other samples of a batch must not reach."""

WITH_SCORER = ("StableLm", "Falcon")
VOCAB = 45


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of each family an actor with a tokenizer, of some a scorer."""
    path = tmp_path_factory.mktemp("hf")
    for seed, (name, changes) in enumerate({**FAMILIES, **STATEFUL}.items()):
        write_model(path / name, name, seed=seed, **changes)
        write_tokenizer(path / name)
        if name in WITH_SCORER:
            write_model(path / f"{name}-score", name, "ForSequenceClassification", seed=seed + 10, **changes)
    return path


def recipe(folder: Path, algorithm: str, name: str, family: str, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Two steps; ``changes`` go over the sections, key by key."""
    made = of_directories(
        folder,
        algorithm,
        name,
        cluster={"ranks": ranks},
        model={"path": str(folder / family), "max_context": 32, "dtype": "fp32"},
        actor={"update": {"dp": ranks}, "optimizer": {"lr": 1e-3}},
        kl={"coef": 0.1},
    )
    if algorithm == "ppo":
        made["critic"] = {"layout": {"dp": ranks}, "optimizer": {"lr": 1e-3}}
        made["reward"] = {"function": "tests.multi.test_placement:share_of_ones"}
    for key, section in changes.items():
        made[key] = {**made.get(key, {}), **section}
    return made


def computed(world: World, values: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the roles compute before the first step, of the same samples on each rank."""
    roles = begun(world, values).roles.by_name
    calls = {"actor": "log_probs", "reference": "log_probs", "critic": "values", "reward": "score"}
    found = {}
    for role, call in calls.items():
        if role != "reward" or "model" in values["reward"]:
            (column,) = roles[role].calls[call](batch(), {}).columns.values()
            found[role] = (column if isinstance(column, Tensor) else column.values).numpy()
    return found


def their_values(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The head's number before each response token, and the score of each sequence."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    values, scores = [], []
    with torch.no_grad():
        for row, prompt in zip(*sequences(), strict=True):
            values.append(model.score(model.base_model(row[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
            scores.append(model(row[None]).logits[0, 0])
    return torch.cat(values).numpy(), torch.stack(scores).numpy()


@pytest.mark.parametrize("family", WITH_SCORER)
def test_roles_compute_what_transformers_computes(folder, family):
    scorer = {"model": {"path": str(folder / f"{family}-score"), "max_context": 32, "dtype": "fp32"}}
    values = recipe(folder, "ppo", f"computed-{family}", family, 2, critic=scorer)
    values["reward"] = scorer
    for found in run_ranks(computed, 2, values):
        assert close(found["actor"], their_log_probs(folder / family)) and (found["actor"] == found["reference"]).all()
        values_of, scores = their_values(folder / f"{family}-score")
        assert close(found["critic"], values_of) and close(found["reward"], scores)


def weights_of(path: Path, trained: tuple[list[Tensor], list[int]]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of plain ``transformers``: the mean of the responses' cross-entropy."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = [
        model(row[None]).logits[0, prompt - 1 : -1].log_softmax(-1).gather(1, row[prompt:, None])
        for row, prompt in zip(*trained, strict=True)
    ]
    loss = -torch.cat(rows).mean()
    loss.backward()
    return float(loss.detach()), {name: each.grad.numpy() for name, each in model.named_parameters()}


def learned(world: World, values: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """The same by the actor, its samples dealt to the ranks, several in a micro-batch."""
    actor = begun(world, values).roles.actor
    rows, prompts = sequences()
    count, mine = sum(map(len, rows)) - sum(prompts), range(world.rank, len(rows), world.size)
    parts = [pack(list(mine), rows, prompts, torch.device("cpu"))]

    def loss(output: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        share = -actor.model.log_probs(output, part)[0].sum() / count
        return share, share.detach()[None]

    (total,) = actor.model.add_up(actor.trainable.accumulate(parts, loss), 1)
    gradients = actor.trainable.state()["gradient"]
    shapes = {name: each.shape for name, each in actor.model.module.named_parameters()}
    return total, {name: each.view(shapes[name]).numpy() for name, each in gradients.items()}


@pytest.mark.parametrize("family", [*FAMILIES, "FalconH1", "Lfm2", "MiniMax"])
def test_losses_and_gradients_are_those_of_autograd(folder, family):
    expected, gradients = weights_of(folder / family, sequences())
    for loss, found in run_ranks(learned, 2, recipe(folder, "grpo", f"learned-{family}", family, 2)):
        assert loss == pytest.approx(expected, abs=1e-6 * max(1.0, expected))
        assert found.keys() == gradients.keys()
        for name, theirs in gradients.items():
            assert np.abs(found[name] - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max()), name
    assert max(np.abs(each).max() for each in gradients.values()) > 0.01


def settings(path: Path) -> ModelConfig:
    return replace(recipe_from_dict(of_directory(path)).model, dtype="fp32")


def of_directory(path: Path, **changes: Any) -> dict[str, Any]:
    made = of_directories(path.parent, "grpo", cluster={"ranks": 1})
    return {**made, "model": {"path": str(path)}, "actor": {"update": {}, "optimizer": {"lr": 1e-4}}, **changes}


def test_logits_and_values_equal_those_of_transformers_to_the_bit_of_fp32(folder):
    ids = torch.randint(3, 40, (3, 11), generator=torch.Generator().manual_seed(1))
    for family in FAMILIES:
        actor = make_actor(folder / family, settings(folder / family), filling="read")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
        with torch.no_grad():
            assert (actor.train()(ids) - theirs(ids).logits).abs().max() <= 1e-6
        assert {*actor.state_dict()} == {*theirs.state_dict()} and len(transformer_layers(actor, "actor")) == 2
        critic = make_critic(folder / family, settings(folder / family), is_scorer=False, filling="later")
        names = {name for name, _ in critic.named_parameters()} - {"value_head.weight"}
        assert names and names <= {name for name, _ in actor.named_parameters()}


BIASED = {
    "Glm4Moe": {
        **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1),
        **dict(n_group=1, topk_group=1, head_dim=12),
    },
    "Ernie4_5_Moe": {
        **dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1, moe_num_shared_experts=1),
    },
}
"""Mixtures with a bias that chooses experts: a buffer of the one, a parameter of the other."""


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("filling", ["read", "later", "never"])
def test_parameters_of_bf16_have_one_number_format_and_a_routers_bias_stays_exact(tmp_path, family, filling):
    given = write_model(tmp_path, family, **BIASED[family]).to(torch.bfloat16)
    for name, bias in [*given.named_buffers(), *given.named_parameters()]:
        if name.endswith("e_score_correction_bias"):
            bias.data = torch.full(bias.shape, 0.1234567)
    given.save_pretrained(tmp_path)
    model = ModelConfig(
        **dict(num_layers=2, hidden_size=48, ffn_hidden_size=40, num_attention_heads=4, max_context=32),
        **dict(path=str(tmp_path), vocab_size=VOCAB, dtype="bf16", implementation="transformers"),
    )
    for made in (copy_model(given, model, filling=filling), make_actor(tmp_path, model, filling=filling)):
        assert {each.dtype for each in made.parameters()} == {torch.bfloat16}
        (bias,) = [each for name, each in made.named_buffers() if name.endswith("e_score_correction_bias")]
        assert bias.dtype == torch.float32
        if filling == "read":
            assert torch.equal(bias, torch.full(bias.shape, 0.1234567))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("Gemma3", "transformers"), ("Qwen3_5", "transformers"), ("Gemma3", "tp2"), ("Qwen3VL", "pp2")),
        *(pytest.param(name, "tp2", marks=pytest.mark.slow) for name in ("Qwen3_5", "Gemma4")),
        *(pytest.param(name, "ep2", marks=pytest.mark.slow) for name in ("Qwen3_5Moe", "Gemma4")),
        pytest.param("Qwen2_5_VL", "cp2", marks=pytest.mark.slow),
        pytest.param("Mistral3", "pp2", marks=pytest.mark.slow),
        pytest.param("Glm4v", "tp2", marks=pytest.mark.slow),
        pytest.param("Qwen3VLMoe", "ep2", marks=pytest.mark.slow),
        pytest.param("Glm4vMoe", "pp2", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_sees_learns_from_text_and_is_exported_whole(tmp_path, name, how):
    """In ``transformers`` and by a table: the first log-probabilities are theirs, and what sees stays as it is."""
    experts = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24)
    given = write_vision_model(tmp_path / name, name, **(experts if (name, how) == ("Gemma4", "ep2") else {}))
    write_tokenizer(tmp_path / name)
    is_theirs = how == "transformers"
    ranks, layout = (1, {"dp": 1}) if is_theirs else (2, {"dp": 2, "ep": 2} if how == "ep2" else {how[:2]: 2})
    actor = {"update": layout, "rollout": {"dp": ranks}, "optimizer": {"lr": 1e-2}}
    model = {"implementation": "transformers"} if is_theirs else {}
    made = recipe(tmp_path, "grpo", "sees", name, ranks, kl={"coef": 0.0}, model=model, actor=actor)
    (found, *_) = [each for each in run_ranks(first_log_probs, ranks, made) if each is not None]
    np.testing.assert_allclose(found, vision_log_probs(given), atol=1e-5)
    assert all(row["actor/grad_norm"] > 0 for row in lines(tmp_path, "sees"))
    out = tmp_path / "out"
    assert cli.main(["convert", str(tmp_path / "sees"), str(out), "--to", "hf", "--quiet"]) == 0
    pictures = "preprocessor_config.json"
    assert (out / pictures).read_bytes() == (tmp_path / name / pictures).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((tmp_path / name / "config.json").read_text())
    assert tensors_of(out).keys() == tensors_of(tmp_path / name).keys()
    after = transformers.AutoModelForImageTextToText.from_pretrained(out).state_dict()
    moved = {key for key, value in given.state_dict().items() if not torch.equal(value, after[key])}
    assert moved and not [key for key in moved if "language_model" not in key and "lm_head" not in key]


@pytest.mark.slow
def test_an_adapter_of_a_model_that_sees_is_what_peft_takes_it_for(tmp_path):
    """PEFT finds its layers in the language model, none in the tower, and computes what the merged model does."""
    write_vision_model(tmp_path / "Gemma3", "Gemma3")
    write_tokenizer(tmp_path / "Gemma3")
    actor = {"update": {"tp": 2}, "rollout": {"dp": 2}, "optimizer": {"lr": 1e-2}, "lora": {"rank": 4, "alpha": 6.0}}
    run_ranks(run, 2, recipe(tmp_path, "grpo", "sees", "Gemma3", 2, kl={"coef": 0.0}, actor=actor))
    step = tmp_path / "sees/checkpoints/step_000002/actor"
    for out, format in (("peft", "peft"), ("merged", "hf")):
        assert cli.main(["convert", str(step), str(tmp_path / out), "--to", format, "--quiet"]) == 0
    auto = transformers.AutoModelForImageTextToText
    adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "Gemma3"), tmp_path / "peft").eval()
    layers = [name for name, _ in adapted.named_parameters() if "lora" in name]
    assert layers and all("language_model" in name for name in layers)
    merged = vision_log_probs(auto.from_pretrained(tmp_path / "merged"))
    np.testing.assert_allclose(vision_log_probs(adapted), merged, atol=1e-5)
    assert np.abs(merged - vision_log_probs(auto.from_pretrained(tmp_path / "Gemma3"))).max() > 1e-2
    actor["lora"]["path"] = str(tmp_path / "peft")
    again = recipe(tmp_path, "grpo", "again", "Gemma3", 2, kl={"coef": 0.0}, actor=actor)
    (found, *_) = [each for each in run_ranks(first_log_probs, 2, again) if each is not None]
    np.testing.assert_allclose(found, merged, atol=1e-5)


def critic_and_run(world: World, values: dict[str, Any]) -> np.ndarray | None:
    trainer = begun(world, values)
    trainer.run()
    column = trainer.roles.by_name["critic"].calls["values"](batch(), {})
    return None if column is None else column.columns["values"].values.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3_5", "Qwen3VL"])
def test_a_critic_of_a_whole_model_in_transformers_is_its_scorer(tmp_path, name):
    """Qwen3-VL has none, though its language model, a Qwen3, has one."""
    write_vision_model(tmp_path / name, name)
    write_tokenizer(tmp_path / name)
    how = {"model": {"implementation": "transformers"}, "trainer": {"steps": 1}}
    (values,) = run_ranks(critic_and_run, 1, recipe(tmp_path, "ppo", "sees", name, 1, **how))
    critic = tmp_path / "sees/checkpoints/step_000001/critic"
    if name == "Qwen3VL":
        says = ["transformers has no *ForSequenceClassification of 'qwen3_vl'", "keep the checkpoint as it is"]
        complains(lambda: convert(critic, "hf", tmp_path / "out"), says, ConfigError)
        return
    out = convert(critic, "hf", tmp_path / "out")
    scorer, report = transformers.AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(scorer).__name__]
    theirs = []
    for row, prompt in zip(*sequences(), strict=True):
        with torch.no_grad():
            theirs.append(scorer.eval().score(scorer.model(row[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
    np.testing.assert_allclose(values, torch.cat(theirs).numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_critic_of_a_model_that_sees_is_a_scorer_of_text(tmp_path):
    write_vision_model(tmp_path / "Qwen3VL", "Qwen3VL")
    write_tokenizer(tmp_path / "Qwen3VL")
    critic = {"layout": {"tp": 2}, "optimizer": {"lr": 1e-3}}
    made = recipe(tmp_path, "ppo", "sees", "Qwen3VL", 2, actor={"update": {"pp": 2}}, trainer={"steps": 1}) | {
        "critic": critic
    }
    (values, *_) = [each for each in run_ranks(critic_and_run, 2, made) if each is not None]
    step = tmp_path / "sees/checkpoints/step_000001"
    assert cli.main(["convert", str(step / "critic"), str(tmp_path / "out"), "--to", "hf", "--quiet"]) == 0
    scorer, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(scorer).__name__ == "Qwen3ForSequenceClassification" and not any(report.values()), report
    theirs = []
    for row, prompt in zip(*sequences(), strict=True):
        with torch.no_grad():
            theirs.append(scorer.eval().score(scorer.model(row[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
    np.testing.assert_allclose(values, torch.cat(theirs).numpy(), atol=1e-5)
    # An actor goes on from a checkpoint, and knows the original still.
    further = recipe(tmp_path, "grpo", "further", "Qwen3VL", 1, kl={"coef": 0.0}, model={"path": str(step / "actor")})
    run_ranks(run, 1, further)
    assert cli.main(["convert", str(tmp_path / "further"), str(tmp_path / "whole"), "--to", "hf", "--quiet"]) == 0
    assert tensors_of(tmp_path / "whole").keys() == tensors_of(tmp_path / "Qwen3VL").keys()


def first_log_probs(world: World, values: dict[str, Any]) -> np.ndarray | None:
    """The actor's log-probabilities before the first step, where this rank has them; then two steps."""
    trainer = begun(world, values)
    column = trainer.roles.by_name["actor"].calls["log_probs"](batch(), {})
    trainer.run()
    return None if column is None else column.columns["old_log_probs"].values.numpy()


def vision_log_probs(model: nn.Module) -> np.ndarray:
    found = []
    for row, prompt in zip(*sequences(), strict=True):
        with torch.no_grad():
            found.append(token_log_probs(model(input_ids=row[None]).logits[0], row)[prompt - 1 :])
    return torch.cat(found).numpy()


def sampled(world: World, path: Path) -> list[list[tuple[Any, ...]]]:
    """By forward, then with a cache in batches of one, of four and of all."""
    _, groups = place(world, ParallelLayout())
    actor = make_actor(path, settings(path), filling="read")
    params = SamplingParams(max_new_tokens=9, temperature=0.7, stop_ids=(4, 5, 6, 9))
    found = []
    for kind, max_concurrent in ((UserEngine, 9), (HFEngine, 1), (HFEngine, 4), (HFEngine, 9)):
        options = {"vocab_size": VOCAB, "max_context": 48, "seed": 5, "max_concurrent": max_concurrent, "pad_id": 2}
        responses = kind(actor, groups.tp, **options).generate(nine_requests(params))
        found.append([(each.tokens.tolist(), each.log_probs.numpy(), each.finish) for each in responses])
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL])
def test_sampling_with_a_cache_is_sampling_by_forward_in_every_batch(folder, family):
    ((expected, *others),) = run_ranks(sampled, 1, folder / family)
    assert len({tuple(tokens) for tokens, *_ in expected}) > 5 and {each[2] for each in expected} == {"stop", "length"}
    for found in others:
        for one, other in zip(expected, found, strict=True):
            assert one[0] == other[0] and one[2] == other[2]
            assert np.abs(one[1] - other[1]).max() <= 1e-5


def saved(folder: Path, name: str, step: int, role: str = "actor") -> dict[tuple[str, str], Tensor]:
    """Weights and optimizer state of a checkpoint."""
    held = ModelDir(folder / name / f"checkpoints/step_{step:06}/{role}")
    return {(kind, tensor): held.read(kind, tensor) for kind, each in held.manifest.tensors.items() for tensor in each}


def equal(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def held(world: World, values: dict[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """Weights and optimizer state of an actor that has just been resumed."""
    from hybridflow.trainer.trainer import make_trainer

    trainer = make_trainer(recipe_from_dict(values), world, resume=True)
    assert trainer.begin()
    actor = trainer.roles.actor
    found = {("weight", name): each for name, each in actor.model.tensors().items()}
    state = actor.trainable.state()
    found |= {(kind, name): each for kind in ("exp_avg", "exp_avg_sq") for name, each in state[kind].items()}
    return {key: each.detach().numpy() for key, each in found.items()}


@pytest.mark.slow
def test_a_run_is_saved_resumed_on_fewer_ranks_and_exported(folder, capsys):
    values = recipe(folder, "ppo", "whole", "StableLm", 2)
    run_ranks(run, 2, values)
    rows = lines(folder, "whole")
    assert len(rows) == 2 and all(row["rollout/logprob_abs_diff"] < 1e-5 for row in rows)
    assert rows[0]["kl/ref"] == pytest.approx(0, abs=1e-6) and rows[1]["kl/ref"] > 1e-6
    begun_at = recipe(folder, "ppo", "parted", "StableLm", 2, trainer={"steps": 1})
    run_ranks(run, 2, begun_at)
    # Resumed on one rank it holds bit for bit what two have written.
    alone = recipe(folder, "ppo", "parted", "StableLm", 1)
    (found,) = run_ranks(held, 1, alone)
    for key, each in saved(folder, "parted", 1).items():
        assert np.array_equal(found[key].reshape(-1), each.numpy().reshape(-1)), key
    # On as many as before it goes on bit for bit.
    again = recipe(folder, "ppo", "parted", "StableLm", 2)
    run_ranks(run, 2, again, True)
    for role in ("actor", "critic"):
        assert equal(saved(folder, "parted", 2, role), saved(folder, "whole", 2, role)), role
    check_export(folder, capsys)


def check_export(folder: Path, capsys: Any) -> None:
    for role, auto in (("actor", "AutoModelForCausalLM"), ("critic", "AutoModelForSequenceClassification")):
        source, out = folder / "whole/checkpoints/step_000002" / role, folder / f"export-{role}"
        assert cli.main(["inspect", str(source)]) == 0 and "stablelm" in capsys.readouterr().out
        convert(source, "hf", out)
        exported, weights = getattr(transformers, auto).from_pretrained(out), saved(folder, "whole", 2, role)
        names = {"score.weight": "value_head.weight"}
        for name, each in exported.named_parameters():
            assert torch.equal(each.data, weights["weight", names.get(name, name)]), name
        assert (out / "tokenizer.json").read_bytes() == (folder / "StableLm/tokenizer.json").read_bytes()
        assert cli.main(["inspect", str(out)]) == 0 and "stablelm" in capsys.readouterr().out
        # A directory that no table knows is copied as any other.
        assert cli.main(["convert", str(out), str(folder / f"again-{role}"), "--to", "hf"]) == 0
        (file,) = (path.name for path in out.glob("*.safetensors"))
        assert (folder / f"again-{role}" / file).read_bytes() == (out / file).read_bytes()
    complains(
        lambda: convert(folder / "whole/checkpoints/step_000002/actor", "megatron", folder / "no"),
        ["a stablelm that runs in transformers", "write hf"],
        ConfigError,
    )
    # A config.json that ties what was two is not believed.
    write_model(folder / "tied", "StableLm", **{**FAMILIES["StableLm"], "tie_word_embeddings": True})
    other = make_actor(folder / "tied", settings(folder / "tied"), filling="later")
    says = ["lm_head.weight: the StableLmForCausalLM", "has no such tensor", "tie_word_embeddings"]
    complains(lambda: _fill(other, folder / "whole/checkpoints/step_000002/actor"), says, CheckpointError)
    # The next run begins where this one ended, from the checkpoint as from the export.
    from_ours = recipe(folder, "grpo", "next", "whole/checkpoints/step_000002/actor")
    (found,) = run_ranks(begins_with, 1, from_ours)
    assert close(found, their_log_probs(folder / "export-actor"))


def begins_with(world: World, values: dict[str, Any]) -> np.ndarray:
    actor = begun(world, values).roles.actor
    return actor.log_probs(batch(), {}).columns["old_log_probs"].values.numpy()


LORA = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "up_proj"]}, "optimizer": {"lr": 1e-2}}


@pytest.mark.slow
def test_adapters_are_those_of_peft(folder):
    """The base stays as it is and is the reference; PEFT computes with the exported adapter what the actor computed."""
    made = recipe(folder, "grpo", "lora", "StableLm", 2, actor=LORA)
    run_ranks(run, 2, made)
    rows = lines(folder, "lora")
    assert rows[0]["kl/ref"] == pytest.approx(0, abs=1e-6) and rows[1]["kl/ref"] > 1e-6
    checkpoint = folder / "lora/checkpoints/step_000002/actor"
    base = ModelDir(folder / "lora/checkpoints/base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "StableLm")
    for name, each in theirs.named_parameters():
        assert torch.equal(base.read("weight", name), each.data), name
    held = ModelDir(checkpoint).manifest.tensors
    assert len(held["weight"]) == 2 * 3 * 2 and held["weight"].keys() == held["exp_avg"].keys()
    for out, kind in (("adapter", "peft"), ("merged", "hf")):
        assert cli.main(["convert", str(checkpoint), str(folder / out), "--to", kind, "--quiet"]) == 0
    expected = their_log_probs(folder / "merged")
    assert np.abs(their_log_probs(folder / "StableLm", folder / "adapter") - expected).max() <= 1e-5
    assert np.abs(their_log_probs(folder / "StableLm") - expected).max() > 1e-3
    # A resumed run begins with the adapter.
    run_ranks(run, 2, recipe(folder, "grpo", "lora", "StableLm", 2, actor=LORA, trainer={"steps": 3}), True)
    assert len(lines(folder, "lora")) == 3


def no_adapters(world: World, values: dict[str, Any]) -> None:
    said = "actor.lora.targets: q_proj: no linear layers of FalconForCausalLM, which has query_key_value, dense"
    complains(lambda: begun(world, values), [said, "name some of these"], ConfigError)


def test_layers_that_the_model_lacks_are_refused(folder):
    lora = {"lora": {"rank": 2, "targets": ["q_proj", "query_key_value"]}}
    run_ranks(no_adapters, 1, recipe(folder, "grpo", "no", "Falcon", actor=lora))


@pytest.mark.slow
def test_where_the_roles_are_changes_nothing(folder):
    """A rank without a part of a model has it without memory; a frozen one is read again after a resume."""
    scorer = {"model": {"path": str(folder / "Falcon-score"), "max_context": 32, "dtype": "fp32"}}
    apart = {"ranks": [1], "layout": {}}
    found = []
    for name, ranks, other in (("together", 1, {}), ("apart", 2, apart)):
        made = recipe(folder, "ppo", name, "Granite", ranks)
        made["actor"] = {"ranks": [0], "update": {}, "optimizer": {"lr": 1e-3}}
        made["critic"] = {**made["critic"], "layout": {}, **other}
        made["reward"], made["reference"] = {**scorer, **other}, other
        run_ranks(run, ranks, {**made, "trainer": {**made["trainer"], "steps": 1}})
        run_ranks(run, ranks, made, True)
        found.append(lines(folder, name))
    together, split = found
    assert len(together) == len(split) == 2 and together[1]["kl/ref"] > 1e-6
    for row, other in zip(together, split, strict=True):
        for metric in ("actor/loss", "actor/grad_norm", "critic/loss", "reward/mean", "kl/ref"):
            assert other[metric] == pytest.approx(row[metric], rel=1e-4, abs=1e-6), metric
    critic = folder / "apart/checkpoints/step_000002/critic"
    said = ["transformers has no *ForSequenceClassification of 'granite'"]
    complains(lambda: convert(critic, "hf", folder / "no"), said, ConfigError)


@pytest.mark.slow
def test_a_family_with_a_table_learns_the_same_in_both(folder):
    """Actor, reference and critic of Llama in megatron-core and in ``transformers``, beside a scorer of Falcon."""
    # transformers does not train the embedding of a padding token.
    write_model(folder / "Llama", "Llama", seed=7, pad_token_id=None)
    write_tokenizer(folder / "Llama")
    found = []
    for name, layout in (("megatron", {"tp": 2}), ("transformers", {"dp": 2})):
        made = recipe(folder, "ppo", f"in-{name}", "Llama", 2, model={"implementation": name})
        made["actor"]["update"] = made["critic"]["layout"] = layout
        # Adam's first steps are as large for gradients of little but rounding errors as for any other.
        made["actor"]["optimizer"] = made["critic"]["optimizer"] = {"lr": 1e-4}
        made["actor"].pop("rollout", None)
        scorer = {"path": str(folder / "Falcon-score"), "max_context": 32, "dtype": "fp32"}
        made["reward"] = {"model": scorer, "layout": {"dp": 2}}
        run_ranks(run, 2, made)
        found.append(lines(folder, f"in-{name}"))
    for row, other in zip(*found, strict=True):
        for metric in ("actor/loss", "actor/grad_norm", "critic/loss", "reward/mean", "response/length_mean", "kl/ref"):
            assert other[metric] == pytest.approx(row[metric], rel=2e-4, abs=1e-5), metric


def test_without_transformers_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = folder / "Granite"
    complains(lambda: make_actor(path, settings(path), filling="never"), [str(path), "pip install transformers"])


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
# With experts in each layer it would have a table.
EXPERTS |= {"decoder_sparse_step": 2}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "learned positions": ("GPT2", "LMHeadModel", {"n_positions": 64}),
    "ALiBi": ("Bloom", "ForCausalLM", {"seq_length": 64, "n_layer": 2, "n_head": 4}),
    "an infinity in config.json": (
        "Mamba2",
        "ForCausalLM",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "max_position_embeddings": 64},
    ),
    "numbers of no dims": ("Apertus", "ForCausalLM", {}),
    "states instead of keys": ("Mamba", "ForCausalLM", {"state_size": 8, "max_position_embeddings": 64}),
    "a mixture of experts": ("Qwen2Moe", "ForCausalLM", EXPERTS),
    "bf16": ("Granite", "ForCausalLM", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_other_kinds_of_models_train_and_are_exported(tmp_path, case):
    family, kind, sizes = KINDS[case]
    write_model(tmp_path / "model", family, kind, **sizes)
    write_tokenizer(tmp_path / "model")
    made = recipe(tmp_path, "ppo", "run", "model", 2)
    made["model"]["dtype"] = "bf16" if case == "bf16" else "fp32"
    run_ranks(run, 2, made)
    rows = lines(tmp_path)
    assert len(rows) == 2 and abs(rows[1]["kl/ref"]) > 1e-6 and rows[0]["critic/grad_norm"] > 0
    # Some processors round bf16 products of one token and of many differently, by up to 2^-8 of each.
    limit = 0.1 if case == "bf16" else 1e-4
    assert all(row["rollout/logprob_abs_diff_max"] < limit for row in rows)
    assert all(row["rollout/logprob_abs_diff"] < limit / 10 for row in rows)
    convert(tmp_path / "run/checkpoints/step_000002/actor", "hf", tmp_path / "out")
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and next(theirs.parameters()).dtype == theirs.dtype
    weights = saved(tmp_path, "run", 2)
    for name, each in theirs.named_parameters():
        assert torch.equal(each, weights["weight", name].to(each.dtype)), name
    # transformers 4 and vLLM know the names of the files alone, such as those of experts.
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "model").keys()
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert any((each != before[name].to(each.dtype)).any() for name, each in theirs.state_dict().items())


def in_a_program(world: World, given: Any, out: Path) -> tuple[float, list[int]]:
    """Loss and greedy tokens of an actor before it learns; then it is saved."""
    actor = HybridActor.from_pretrained(given, hybrid_config={"lr": 1e-2})
    ids = torch.tensor([[7, 8, 9, 11, 12]])
    loss = float(actor(input_ids=ids, labels=ids).loss)
    tokens = actor.generate(ids, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    actor.train().training_step(input_ids=ids, labels=ids)
    actor.save_pretrained(out)
    return loss, tokens


@pytest.mark.parametrize("is_in_memory", [False, True], ids=["directory", "model"])
def test_a_program_trains_it_through_the_api(folder, tmp_path, is_in_memory):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "Granite").eval()
    ((loss, tokens),) = run_ranks(in_a_program, 1, model if is_in_memory else folder / "Granite", tmp_path / "program")
    ids = torch.tensor([[7, 8, 9, 11, 12]])
    theirs = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    assert tokens == theirs and loss == pytest.approx(float(model(ids, labels=ids).loss.detach()), abs=1e-5)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "program")
    assert float(after(ids, labels=ids).loss.detach()) < loss - 0.01


@pytest.mark.parametrize("is_in_memory", [False, True], ids=["directory", "model"])
def test_a_program_trains_the_language_model_of_one_that_sees(tmp_path, is_in_memory):
    """Of a directory by the table, of a model in memory in ``transformers``; both are saved whole."""
    model = write_vision_model(tmp_path / "Qwen3VL", "Qwen3VL")
    given = model if is_in_memory else tmp_path / "Qwen3VL"
    ((loss, tokens),) = run_ranks(in_a_program, 1, given, tmp_path / "out")
    ids = torch.tensor([[7, 8, 9, 11, 12]])
    theirs = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 5:].tolist()
    assert tokens == theirs[: len(tokens)]
    assert loss == pytest.approx(float(model(ids, labels=ids).loss.detach()), abs=1e-5)
    after = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert float(after(ids, labels=ids).loss.detach()) < loss - 0.01
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, after.state_dict()[key])}
    assert moved and all("language_model" in key or key == "lm_head.weight" for key in moved)


OTHERS: dict[str, dict[str, Any]] = {
    "distill": {"teacher": {"model": "Falcon", "top_k": 5}},
    "dpo": {},
    "kto": {},
    "reward-model": {},
    "sft": {},
    "remax": {},
    "gspo": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OTHERS)
def test_other_algorithms_learn_on_two_ranks_as_on_one(folder, algorithm):
    found = []
    for ranks in (1, 2):
        made = recipe(folder, algorithm, f"{algorithm}-{ranks}", "StableLm", ranks)
        if algorithm == "distill":
            teacher = {"path": str(folder / "Falcon"), "max_context": 32, "dtype": "fp32"}
            made["teacher"] = {"model": teacher, "top_k": 5}
        if algorithm in ("dpo", "kto", "reward-model", "sft"):
            made["rollout"] = {"max_new_tokens": 6 if algorithm == "sft" else 1}
            made["data"] |= {
                "train": str(folder / f"{algorithm}.jsonl"),
                "held_out": str(folder / f"{algorithm}-held.jsonl"),
            }
            made.pop("reward")
        if algorithm not in ("remax", "gspo"):
            made.pop("kl")
        if algorithm == "gspo":
            made["rollout"]["group_size"] = 2
        run_ranks(run, ranks, made)
        found.append(lines(folder, made["name"]))
    alone, two = found
    assert len(alone) == len(two) == 2 and alone[0]["actor/grad_norm"] > 1e-3
    for row, other in zip(alone, two, strict=True):
        for metric in ("actor/loss", "actor/grad_norm"):
            assert other[metric] == pytest.approx(row[metric], rel=1e-4, abs=1e-5), metric


@pytest.mark.slow
def test_grpo_on_two_ranks_learns_the_arithmetic_task(folder):
    path = folder / "untrained"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    model = write_model(path, "StableLm", **sizes)
    randomize(model, 1, 0.05)
    model.save_pretrained(path)
    write_tokenizer(path)
    made = recipe(folder, "grpo", "task", "untrained", 2, actor={"optimizer": {"lr": 1e-3}}, kl={"coef": 0.0})
    files = {"train": str(folder / "task.jsonl"), "held_out": str(folder / "task-held.jsonl")}
    made["data"] = {**files, "arithmetic": {"num_train": 48, "num_held_out": 8, "max_operand": 30}}
    made["reward"] = {}
    made["warm_start"] = {"steps": 30, "batch_size": 64, "lr": 3e-3}
    made["rollout"] = {"max_new_tokens": 4, "group_size": 8}
    made["trainer"] = {"steps": 48, "global_batch_size": 128, "micro_batch_tokens": 4096}
    run_ranks(run, 2, made)
    rewards = [row["reward/mean"] for row in lines(folder, "task")]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last >= first + 0.2, rewards


REFUSED: list[tuple[type[Exception], dict[str, Any], list[str]]] = [
    (
        LayoutError,
        {"actor": {"update": {"tp": 2}, "rollout": {"dp": 2}}},
        ["actor.update.tp=2", "transformers", "dp or fsdp to its 2"],
    ),
    (LayoutError, {"actor": {"update": {"dp": 2}, "rollout": {"pp": 2}}}, ["actor.rollout.pp=2"]),
    (LayoutError, {"reference": {"layout": {"tp": 2}}}, ["reference.layout.tp=2"]),
    (ConfigError, {"actor": {"reshard_every": 2}}, ["actor.reshard_every", "transformers"]),
    (ConfigError, {"rollout": {"partial_rollouts": True}}, ["rollout.partial_rollouts"]),
    (
        ConfigError,
        {"model": {"implementation": "megatron"}},
        ["=megatron", "'stablelm'", "no table"],
    ),
    (ConfigError, {"model": {"num_layers": 3}}, ["model.num_layers=3", "has 2"]),
]


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED)
def test_what_it_cannot_do_is_refused_before_anything_starts(folder, kind, changes, words):
    complains(lambda: recipe_from_dict(recipe(folder, "grpo", "no", "StableLm", 2, **changes)), words, kind)


def test_code_of_a_directory_runs_only_where_the_recipe_says_so(folder, tmp_path):
    """Without the key it is refused in one sentence; with it, it is trained, saved and exported with its code."""
    path = tmp_path / "own"
    write_model(path, "StableLm", seed=4)
    write_tokenizer(path)
    config = json.loads((path / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    config |= {"model_type": "own-kind", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own_code.py").write_text(
        "from transformers import StableLmConfig, StableLmForCausalLM\n\n\n"
        "class OwnConfig(StableLmConfig):\n    model_type = 'own-kind'\n\n\n"
        "class OwnForCausalLM(StableLmForCausalLM):\n    config_class = OwnConfig\n\n"
        "    def forward(self, *given, **named):\n        return super().forward(*given, **named)\n"
    )
    model = recipe_from_dict(of_directory(path)).model
    complains(lambda: make_actor(path, model, filling="read"), [str(path), "trust_remote_code=true"], ConfigError)
    made = of_directory(path, model={"path": str(path), "trust_remote_code": True, "max_context": 32, "dtype": "fp32"})
    made["run_dir"] = str(tmp_path / "run")
    run_ranks(run, 1, {**made, "trainer": {**made["trainer"], "steps": 1}})
    convert(tmp_path / "run/checkpoints/step_000001/actor", "hf", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(theirs).__name__ == "OwnForCausalLM"

    # As an object it has been trusted already.
    given = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    ((loss, _),) = run_ranks(in_a_program, 1, given, tmp_path / "program")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "program", trust_remote_code=True)
    ids = torch.tensor([[7, 8, 9, 11, 12]])
    assert float(again(ids, labels=ids).loss.detach()) < loss - 0.01


def test_layers_are_found_beside_more_experts():
    layers = [nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(5))) for _ in range(3)]
    model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()] * 4), nn.ModuleList(layers))
    assert transformer_layers(model, "actor") == layers
    # Jamba has layers of two classes.
    layers = [nn.Linear(2, 2), nn.Bilinear(2, 2, 2), nn.Linear(2, 2)]
    model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()] * 4), nn.ModuleList(layers))
    assert transformer_layers(model, "actor") == layers
    complains(lambda: transformer_layers(nn.Linear(1, 1), "actor"), ["actor: has no nn.ModuleList"], ConfigError)


def test_a_directory_that_lacks_a_tensor_or_has_another_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    path = tmp_path / "other"
    write_model(path, "StableLm")
    tensors = load_file(path / "model.safetensors")
    make = lambda: make_actor(path, settings(path), filling="read")  # noqa: E731
    name = "model.layers.1.mlp.up_proj.weight"
    lacking = {each: tensor for each, tensor in tensors.items() if each != name}
    save_file(lacking, path / "model.safetensors", metadata={"format": "pt"})
    complains(make, [f"{name}: missing"], CheckpointError)
    # As where config.json says fewer layers than there are.
    save_file({**tensors, name.replace("1", "7"): tensors[name].clone()}, path / "model.safetensors")
    complains(
        make, ["model.layers.7.mlp.up_proj.weight: is in the files", "one of 1", "mend config.json"], CheckpointError
    )


def test_every_rank_has_the_same_parameters_whoever_reads_the_weights(tmp_path):
    """Mistral Small 3.1 does not say at the top that its output layer is none of its embedding."""
    write_vision_model(tmp_path / "mistral", "Mistral3")
    edit_json(tmp_path / "mistral/config.json", tie_word_embeddings=None)
    model = replace(settings(tmp_path / "mistral"), implementation="transformers")
    found = [make_actor(tmp_path / "mistral", model, filling=filling) for filling in ("read", "later", "never")]
    names = [[name for name, _ in each.named_parameters()] for each in found]
    assert names[0] == names[1] == names[2] and "lm_head.weight" in names[0]
    # In memory, too, its config says that they are tied, and its weights that they are not.
    given = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "mistral")
    assert given.config.tie_word_embeddings
    assert json.loads(library_assets(given)[1]["config.json"])["tie_word_embeddings"] is False
    # Where the files have no output layer, they are.
    given.lm_head.weight = given.get_input_embeddings().weight
    given.save_pretrained(tmp_path / "tied")
    assert json.loads(library_assets(given)[1]["config.json"])["tie_word_embeddings"] is True
    edit_json(tmp_path / "tied/config.json", tie_word_embeddings=None)
    for filling in ("read", "later"):
        made = make_actor(tmp_path / "tied", model, filling=filling)
        assert "lm_head.weight" not in dict(made.named_parameters())
    write_model(tmp_path / "StableLm", "StableLm")
    edit_json(tmp_path / "StableLm/config.json", tie_word_embeddings=True)
    complains(
        lambda: make_actor(tmp_path / "StableLm", settings(tmp_path / "StableLm"), filling="read"),
        ["StableLm: the output layer is not equal to the embedding", "tie_word_embeddings=true", "set it to false"],
        CheckpointError,
    )


def test_a_model_whose_files_hold_integers_is_refused_as_what_it_is(folder):
    """As DeepSeek-V4, whose first routers have a table of experts by token."""
    given = transformers.AutoModelForCausalLM.from_pretrained(folder / "StableLm")
    given.model.register_buffer("tid2eid", torch.zeros(4, dtype=torch.int64))
    model = settings(folder / "StableLm")
    says = [
        "StableLmForCausalLM: its files hold model.tid2eid, of torch.int64",
        "expected tensors of",
        "choose another model",
    ]
    complains(lambda: copy_model(given, model, filling="read"), says, ConfigError)
    # One that is not saved may have what it likes.
    given.model.register_buffer("tid2eid", torch.zeros(4, dtype=torch.int64), persistent=False)
    copy_model(given, model, filling="read")


NOT_CAUSAL = {
    "Roberta": ("is_decoder=False", {"max_position_embeddings": 66}),
    "Gemma3Text": ("use_bidirectional_attention=True", {"use_bidirectional_attention": True, "head_dim": 8}),
    "Llama": ("is_causal=False", {"is_causal": False}),
}


@pytest.mark.parametrize("family", NOT_CAUSAL)
def test_a_model_in_which_tokens_see_those_behind_them_is_refused(tmp_path, family):
    said, changes = NOT_CAUSAL[family]
    given = write_model(tmp_path / "model", family, **changes)
    ids = torch.tensor([[7, 8, 9, 10], [7, 8, 9, 11]])
    with torch.no_grad():
        one, other = given(ids).logits[:, 0]
    assert (one - other).abs().max() > 1e-4
    model = settings(tmp_path / "model")
    for make in (
        lambda: make_actor(tmp_path / "model", model, filling="read"),
        lambda: make_critic(tmp_path / "model", model, is_scorer=False, filling="later"),
    ):
        complains(make, [said, "see those behind it"], ConfigError)


@pytest.mark.parametrize("changes", [{"layer_norm_eps": "x"}, {"pad_token_id": 4000}])
def test_a_config_that_transformers_cannot_read_is_told_in_one_sentence(tmp_path, changes):
    write_model(tmp_path / "other", "StableLm")
    edit_json(tmp_path / "other/config.json", **changes)
    words = [str(tmp_path / "other"), "cannot make the model", "restore the directory"]
    model = settings(tmp_path / "other")
    complains(lambda: make_actor(tmp_path / "other", model, filling="never"), words, ConfigError)


def test_the_plan_says_what_runs_in_transformers(folder, capsys):
    path = folder / "job.yaml"
    path.write_text(json.dumps(recipe(folder, "ppo", "planned", "Granite", 2)))
    assert cli.main(["train", str(path), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "actor.update, actor.rollout, critic, reference: run in transformers" in said.err
    assert "memory of each rank" in said.out and not (folder / "planned").exists()
    planned = recipe_from_dict(json.loads(path.read_text()))
    for rank in job_memory(planned, role_meshes(planned)):
        learners = {part.mesh: part for part in rank.meshes if part.mesh in ("actor.update", "critic")}
        assert all(part.optimizer == 2 * part.gradients > 0 for part in learners.values()) and len(learners) == 2
