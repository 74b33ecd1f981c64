"""LoRA adapters of the actor: what PEFT computes, in every layout; and what is moved, kept and saved of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.checkpoint.formats import lora as formats
from hybridflow.checkpoint.formats.forms import to_logical
from hybridflow.checkpoint.formats.peft_dir import PeftSource
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.dataflow.batch import Batch
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.memory import job_memory, joined_bytes
from hybridflow.models.adapters import adapter_spec, base_spec, factor_spec
from hybridflow.models.attention import PackedAttention
from hybridflow.models.gpt import build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.lora import Dropout, adapters_off, merge
from hybridflow.models.microbatch import pack, split_by_tokens
from hybridflow.models.training import Trainable, forward_only
from hybridflow.models.weights import initialize, local_shards
from hybridflow.parallel.world import World
from hybridflow.placement.model_on_mesh import ModelOnMesh
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.recipe.checks import check_recipe
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.reference import Reference
from hybridflow.sampling.engines import whole_tensors
from tests.multi.jobs import inner_of, make_batch, make_job, tiny_recipe
from tests.multi.models import CAPPED, MIXTURE, TINY, VOCAB, place, samples
from tests.support.described import describe_model
from tests.support.lora_cases import make_adapter
from tests.support.lora_cases import make_model as make_hf_model
from tests.support.plain_models import token_log_probs
from tests.support.ranks import run_ranks

RANK, ALPHA = 3, 7.0
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("v_proj", "o_proj", "up_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES = [
    *(("llama", ALL), ("qwen3", SOME), ("phi3", FUSED)),
    *(
        ("olmo2", ALL),
        ("glm4", ("q_proj", "o_proj", "gate_up_proj")),
        ("gemma4_text", ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")),
        ("gpt_oss", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ),
]
LAYOUTS = ["tp1", "dp2", "tp2", "pp2", "cp2", "tp2.pp2", "tp2.dp2", "pp2.dp2", "tp2.cp2"]
LENGTHS = [(3, 6), (1, 9), (5, 4), (2, 2), (4, 11)]
"""Tokens of each sample's prompt and response."""


def sequences() -> tuple[list[Tensor], list[int]]:
    generator = torch.Generator().manual_seed(2)
    found = [torch.randint(0, 101, (prompt + response,), generator=generator) for prompt, response in LENGTHS]
    return found, [prompt for prompt, _ in LENGTHS]


def folders(root: Path, name: str) -> tuple[Path, Path]:
    return root / name / "base", root / name / "adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each case a model of transformers, and an adapter as PEFT writes it."""
    root = tmp_path_factory.mktemp("lora")
    for name, targets in CASES:
        base, adapter = folders(root, name)
        model = make_hf_model(name)
        model.save_pretrained(base)
        tensors = make_adapter(adapter, model, dict.fromkeys(targets, RANK), {"r": RANK, "lora_alpha": ALPHA})
        # Factors as large as weights would make the result a matter of rounding.
        small = {key: 0.2 * tensor for key, tensor in tensors.items()}
        save_file(small, adapter / "adapter_model.safetensors", {"format": "pt"})
    return root


def of_peft(root: Path, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each response by transformers and PEFT, and the gradient of each factor of their mean."""
    base, adapter = folders(root, name)
    model = peft.PeftModel.from_pretrained(make_hf_model(name), adapter, is_trainable=True)
    rows, prompts = sequences()
    log_probs = []
    for row, prompt in zip(rows, prompts, strict=True):
        log_probs.append(token_log_probs(model(row[None]).logits[0], row)[prompt - 1 :])
    torch.cat(log_probs).mean().backward()
    gradients = {
        key.replace(".default", ""): parameter.grad for key, parameter in model.named_parameters() if "lora_" in key
    }
    assert len(gradients) >= 12 and all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())
    return [each.detach() for each in log_probs], gradients


class Placed:
    """A case's model in a layout, with the adapter of PEFT's directory."""

    def __init__(self, world: World, root: Path, name: str, targets: tuple[str, ...], text: str) -> None:
        base, adapter = folders(root, name)
        source = open_source(base)
        lora = LoRAConfig(rank=RANK, alpha=ALPHA, targets=targets)
        model = replace(source.model, max_context=48)
        self.rank, self.layout = world.rank, ParallelLayout.parse(text)
        self.mesh, self.groups = place(world, self.layout)
        self.spec = describe_model(world, model, vocab_size=101, lora=lora)
        assert factor_spec(self.spec).tensors == adapter_spec(model, lora).tensors, name
        if self.groups is None:
            return
        made = ModelOnMesh(world, self.mesh, model, self.spec)
        made.build(lora=lora)
        made.load(source, base_spec(self.spec))
        made.load(PeftSource(adapter, formats.described_of(source)), factor_spec(self.spec))
        self.model = made.transformer

    def batches(self) -> list[Any]:
        """This replica's samples, in micro-batches of a few."""
        rows, prompts = sequences()
        dp, place = self.layout.dp, self.mesh.coordinate(self.rank)
        mine = list(range(len(rows)))[place.dp :: dp]
        chosen = split_by_tokens([len(rows[index]) for index in mine], 20)
        device, context = torch.device("cpu"), self.groups.cp
        return [pack([mine[index] for index in each], rows, prompts, device, context) for each in chosen]

    def log_probs(self, output: Tensor, batch: Any) -> Tensor:
        local = vocab_parallel_log_probs(output, batch.targets, group=self.groups.tp, vocab_size=101)[0]
        return batch.gathered(local)

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, None]:
        """The micro-batch's share of the mean."""
        return self.log_probs(output, batch).sum() / sum(response for _, response in LENGTHS), None

    def forward(self) -> dict[int, Tensor]:
        """Sample -> log-probabilities of its response; empty but on the last stage."""
        parts = forward_only(
            self.model,
            self.groups,
            self.batches(),
            lambda output, batch: (batch, self.log_probs(output, batch)),
        )
        return {
            sample: values
            for batch, found in parts
            for sample, values in zip(batch.samples, found.split(batch.response_lengths), strict=True)
        }

    def pieces(self, tensors: dict[str, Tensor]) -> list[Any]:
        """Boxes of logical tensors that this rank holds."""
        shards = local_shards(self.model, factor_spec(self.spec), self.mesh, self.rank)
        return [
            (name, part.box, tensors[name].view(part.local_shape)[inner_of(part)].clone().numpy())
            for name, (_, part) in shards.items()
        ]


def against_peft(world: World, root: Path, name: str, targets: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for text in LAYOUTS:
        placed = Placed(world, root, name, targets, text)
        if placed.groups is None:
            continue
        before = placed.forward()
        trainable = Trainable(placed.model, placed.groups, OptimizerConfig(lr=1e-3, distributed=False))
        trainable.accumulate(placed.batches(), placed.loss)
        state = trainable.state()
        assert state["exp_avg"].keys() == {name for name in state["gradient"]}
        gradients = placed.pieces({name: flat.clone() for name, flat in state["gradient"].items()})
        with adapters_off(placed.model):
            without = placed.forward()
        merge(placed.model)
        with adapters_off(placed.model):
            merged = placed.forward()
        found[text] = [{k: v.numpy() for k, v in each.items()} for each in (before, without, merged)], gradients
    return found


@pytest.mark.parametrize(
    ("name", "targets"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.slow] * (case[0] != "llama")) for case in CASES],
)
def test_values_and_gradients_are_those_of_peft_in_every_layout(
    root: Path, name: str, targets: tuple[str, ...]
) -> None:
    expected, gradients = of_peft(root, name)
    base, adapter = folders(root, name)
    source = PeftSource(adapter, formats.described_of(open_source(base)))
    by_name = {}
    for logical, (key, factor) in source._where.items():
        by_name[logical] = to_logical(factor.form, [gradients[key]], source.model).numpy()
    ranks = run_ranks(against_peft, 4, root, name, targets)
    with torch.no_grad():
        plain = make_hf_model(name)
        rows, prompts = sequences()
        bare = [
            token_log_probs(plain(row[None]).logits[0], row)[prompt - 1 :]
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    for text in LAYOUTS:
        seen: dict[str, np.ndarray] = {each: np.zeros(value.shape, bool) for each, value in by_name.items()}
        samples = set()
        for rank in ranks:
            if text not in rank:
                continue
            (before, without, merged), pieces = rank[text]
            for sample, values in before.items():
                samples.add(sample)
                np.testing.assert_allclose(values, expected[sample].numpy(), atol=2e-5, err_msg=f"{text} {sample}")
                np.testing.assert_allclose(without[sample], bare[sample].numpy(), atol=2e-5)
                np.testing.assert_allclose(merged[sample], values, atol=1e-5)
                assert abs(without[sample] - values).max() > 1e-2
            for each, box, values in pieces:
                where = tuple(slice(*span) for span in box)
                np.testing.assert_allclose(values, by_name[each][where], rtol=2e-4, atol=2e-6, err_msg=f"{text} {each}")
                seen[each][where] = True
        assert samples == set(range(len(LENGTHS))) and all(each.all() for each in seen.values()), text


PAIRS = [("tp2.dp2", "dp4"), ("pp2.dp2", "tp2.dp2"), ("tp2.pp2", "tp4"), ("dp4", "dp4")]


def lora_recipe(
    update: str, rollout: str, *, lora: LoRAConfig, distributed: bool = True, model: ModelConfig = TINY
) -> Recipe:
    optimizer = OptimizerConfig(lr=1e-2, distributed=distributed)
    recipe = tiny_recipe(ParallelLayout.parse(update), "grpo", model=model, optimizer=optimizer, group_size=2)
    actor = replace(recipe.actor, rollout=ParallelLayout.parse(rollout), lora=lora)
    recipe = replace(recipe, actor=actor)
    check_recipe(recipe)
    return recipe


def log_probs(model: PlacedModel) -> np.ndarray | None:
    column = model.per_token(make_batch(), lambda output, part: model.log_probs(output, part)[0])
    return None if column is None else column.values.numpy()


def my_part(batch: Batch, actor: Actor, rank: int) -> Batch:
    place = actor.model.mesh.coordinate(rank)
    return batch.select(torch.arange(place.dp, len(batch), actor.model.mesh.layout.dp))


def learn(actor: Actor, rank: int, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each update, on ranks that know them."""
    found = []
    for index in range(steps):
        actor.update(my_part(make_batch(), actor, rank), {"actor_mini_batch": {"index": index % 2, "epoch": 1}})
        if actor.model.is_output_rank:
            found.append((actor.metrics["actor/loss"], actor.metrics["actor/grad_norm"]))
    return found


def phases(world: World) -> list[dict[str, Any]]:
    """For each pair of layouts what is held, moved and computed."""
    found = []
    for index, (update, rollout) in enumerate(PAIRS):
        recipe = lora_recipe(update, rollout, lora=LoRAConfig(rank=4, merge_every=3), distributed=index % 2 == 0)
        job, _ = make_job(world, recipe)
        actor = Actor(job, KLCoefficient(recipe))
        actor.mark_changed()
        state = actor.trainable.state()
        parts = {part.mesh: part for part in job_memory(recipe, job.meshes)[world.rank].meshes}
        needed, there = parts["actor.update"], parts["actor.rollout"]
        parameters = list(actor.model.transformer.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        held = [
            sum(parameter.nbytes for parameter in parameters),
            sum(parameter.main_grad.nbytes for parameter in trained),
            sum(tensor.nbytes for kind in ("exp_avg", "exp_avg_sq", "master") for tensor in state[kind].values()),
        ]
        assert not any(hasattr(parameter, "main_grad") for parameter in parameters if not parameter.requires_grad)
        shared = {tensor.data_ptr() for tensor in parameters}
        own = {name: tensor for name, tensor in actor._rollout.tensors().items() if tensor.data_ptr() not in shared}
        mesh, spec = job.meshes["actor.rollout"], base_spec(actor.spec)
        # The kernels of a CPU do not know the model, and a GPU copies the factors.
        joined = joined_bytes(spec, recipe.actor.lora, mesh, world.rank)
        held += [
            sum(tensor.nbytes for name, tensor in own.items() if ".lora." not in name) + joined,
            sum(tensor.nbytes for tensor in own.values()) + joined,
        ]
        adapters = sum(tensor.num_bytes for tensor in factor_spec(actor.spec).tensors)
        rows = []
        for _ in range(2):
            learn(actor, world.rank, 1)
            expected = log_probs(actor.model)
            actor.metrics.clear()
            actor.enter_phase("rollout")
            rows.append((expected, log_probs(actor._rollout), dict(actor.metrics)))
            actor.enter_phase("update")
        before = log_probs(actor.model)
        actor.end_step(2)
        kept = log_probs(actor.model)
        # What vLLM would be given, of which each rank here holds a part.
        read = whole_tensors(actor.model)
        given = {name: read(name).clone() for name in actor.model.tensors(spec)}
        actor.end_step(3)
        pushed = all(
            torch.equal(given[name], tensor[inner_of(part)])
            for name, (tensor, part) in local_shards(
                actor.model.transformer, spec, actor.model.mesh, world.rank
            ).items()
        )
        merged = log_probs(actor.model)
        values = {name: tensor for name, tensor in actor.model.tensors().items() if ".lora." in name}
        largest = {
            side: max(float(values[name].abs().max()) for name in values if name.endswith(side)) for side in "AB"
        }
        moments = [float(tensor.abs().sum()) for kind in ("exp_avg", "exp_avg_sq") for tensor in state[kind].values()]
        actor.metrics.clear()
        actor.enter_phase("rollout")
        rows.append((merged, log_probs(actor._rollout), dict(actor.metrics)))
        found.append(
            {
                "pushed": pushed,
                "bytes": (held, [needed.weights, needed.gradients, needed.optimizer, there.lasting, there.weights]),
                "adapters": adapters,
                "rows": rows,
                "merges": (before, kept, merged),
                "largest": largest,
                "moments": sum(moments),
                "steps": actor.trainable.num_steps(),
            }
        )
    return found


def test_only_adapters_are_trained_and_moved_and_generate_what_was_trained() -> None:
    ranks = run_ranks(phases, 4)
    for index, pair in enumerate(PAIRS):
        whole = next(rank[index]["merges"][0] for rank in ranks if rank[index]["merges"][0] is not None)
        for rank in ranks:
            found = rank[index]
            held, needed = found["bytes"]
            assert found["pushed"] and held == needed and held[2] < held[0] / 2, pair
            for turn, (_, generating, metrics) in enumerate(found["rows"]):
                if generating is not None:
                    expected = next(
                        each[index]["rows"][turn][0] for each in ranks if each[index]["rows"][turn][0] is not None
                    )
                    np.testing.assert_allclose(generating, expected, atol=1e-5, err_msg=f"{pair} {turn}")
                if pair[0] == pair[1]:
                    assert not any(name.startswith("reshard") for name in metrics)
                    continue
                assert metrics["reshard/bytes"] <= 1.05 * metrics["reshard/adapter_bytes"] <= 1.05 * found["adapters"]
                # What lies below the adapters travels at first, and when it was changed.
                assert ("reshard/base_bytes" in metrics) == (turn != 1), (pair, turn)
            before, kept, merged = found["merges"]
            if before is not None:
                np.testing.assert_array_equal(before, whole)
                np.testing.assert_array_equal(before, kept)
                np.testing.assert_allclose(before, merged, atol=1e-5)
            assert found["largest"]["B"] == 0 and found["largest"]["A"] > 0 and found["moments"] == 0
            assert found["steps"] in (0, None)
        if pair[0] != pair[1]:
            assert sum(rank[index]["rows"][1][2]["reshard/bytes"] for rank in ranks) > 0, pair


def trained(world: World, cases: list[tuple[ModelConfig, tuple[str, ...], str]]) -> list[Any]:
    found = []
    for model, targets, text in cases:
        lora = LoRAConfig(rank=4, dropout=0.3, targets=targets)
        rollout = str(ParallelLayout.parse(text).for_rollout())
        recipe, merging = lora_recipe(text, rollout, lora=lora, model=model), replace(lora, merge_every=9)
        if "vpp" in text:
            # Layers are computed anew when other micro-batches have begun: with their own tokens' masks.
            actor, trainer = replace(recipe.actor, recompute="full"), replace(recipe.trainer, micro_batch_tokens=24)
            recipe = replace(recipe, actor=actor, trainer=trainer)
        job, _ = make_job(world, recipe)
        actor = Actor(job, KLCoefficient(recipe))
        reference = Reference(job, actor)
        first = reference.log_probs(make_batch(), {})
        own = Reference(make_job(world, replace(recipe, actor=replace(recipe.actor, lora=merging)))[0])
        copied = own.log_probs(make_batch(), {})
        losses = learn(actor, world.rank, 3)
        last = reference.log_probs(make_batch(), {})
        assert reference.is_base and not own.is_base
        columns = [
            None if each is None else each.columns["ref_log_probs"].values.numpy() for each in (first, copied, last)
        ]
        found.append((losses, columns, log_probs(actor.model)))
    return found


@pytest.mark.slow
def test_training_with_dropout_is_the_same_in_every_layout_and_leaves_the_reference_as_it_was() -> None:
    tiny, mixture = (replace(model, num_layers=2) for model in (TINY, MIXTURE))
    capped = replace(CAPPED, num_layers=2, window_layers=(0,))
    cases = [(tiny, SOME, text) for text in ("dp4", "tp4", "pp2.dp2", "tp2.cp2")]
    # With tied embeddings, which nobody trains, on the first and the last stage; and beside experts without adapters.
    cases += [(capped, ALL, text) for text in ("dp4", "tp2.pp2", "cp4")]
    cases += [(TINY, SOME, text) for text in ("dp4", "pp2.vpp2.dp2")]
    cases += [(mixture, ("q_proj", "k_proj", "o_proj"), text) for text in ("dp4", "tp2.pp2")]
    ranks = run_ranks(trained, 4, cases)
    expected = {}
    for index, (model, _, text) in enumerate(cases):
        losses, _, result = expected.setdefault(model, ranks[0][index])
        assert len(losses) == 3 and all(norm > 0 for _, norm in losses)
        for rank in ranks:
            mine, columns, values = rank[index]
            if values is None:
                assert mine == [] and columns == [None] * 3
                continue
            np.testing.assert_allclose(mine, losses, rtol=2e-4, atol=1e-6, err_msg=text)
            np.testing.assert_allclose(values, result, atol=1e-3, err_msg=text)
            # Before and after training, the model that a frozen copy would be.
            np.testing.assert_array_equal(columns[0], columns[1])
            np.testing.assert_array_equal(columns[0], columns[2])
            assert abs(values - columns[0]).max() > 1e-2


def split_mix(value: int) -> int:
    """Finalize SplitMix64, on Python's integers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


@pytest.mark.parametrize("rows_at_once", [1, 2, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_the_formula(monkeypatch, rows_at_once, dtype) -> None:
    golden, tokens, first, width = 0x9E3779B97F4A7C15, [3, 1, 4, 1, 5], 11, 60
    monkeypatch.setattr("hybridflow.models.lora._DRAWN_AT_ONCE", rows_at_once * width + 7)
    salt = int.from_bytes(hashlib.sha256(b"5:2:layer").digest()[:8], "little")
    expected, so_far = [], 0
    for position, token in enumerate(tokens):
        so_far = (so_far + split_mix((token * golden + position) % 2**64)) % 2**64
        key = split_mix(so_far)
        mixed = [split_mix((column * golden + salt) % 2**64) for column in range(first, first + width)]
        expected.append([split_mix((key + each) % 2**64) % 2**24 >= 0.3 * 2**24 for each in mixed])
    dropout = Dropout(0.3, seed=5)
    dropout.update = 2
    dropout.begin(torch.tensor(tokens), PackedAttention([5], torch.device("cpu")))
    inputs = torch.linspace(-3, 3, 7 * width).view(7, 1, width).to(dtype)
    found = dropout(inputs, "layer", first)
    # What stands behind the tokens is dropped somehow.
    kept = torch.tensor(expected, dtype=torch.float32)
    assert torch.equal(found[:5, 0], inputs[:5, 0] * (kept / 0.7).to(dtype))
    assert found.dtype == dtype and found.shape == inputs.shape


def test_dropout_depends_on_the_tokens_so_far_and_on_nothing_else() -> None:
    dropout, ones = Dropout(0.3, seed=5), torch.ones(7, 1, 4000)
    rows, lengths = [torch.tensor([3, 1, 4, 1]), torch.tensor([3, 1, 5])], [4, 3]
    tokens, attention = torch.cat(rows), PackedAttention(lengths, torch.device("cpu"))

    def mask(name: str = "layer", first: int = 0, update: int = 0) -> Tensor:
        dropout.update = update
        dropout.begin(tokens, attention)
        return dropout(ones, name, first)[:, 0]

    found = mask()
    assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
    assert abs(float((found > 0).float().mean()) - 0.7) < 0.01
    # Equal beginnings are dropped alike, and only these.
    pairs = {(one, other): torch.equal(found[one], found[other]) for one in range(7) for other in range(one)}
    assert [pair for pair, are_equal in pairs.items() if are_equal] == [(4, 0), (5, 1)]
    assert torch.equal(mask(first=1000)[:, :3000], found[:, 1000:])
    for other in (mask(update=1), mask(name="other")):
        assert 0.55 < float((other == found).float().mean()) < 0.61
    dropout.begin(tokens[4:], PackedAttention([3], torch.device("cpu")))
    dropout.update = 0
    assert torch.equal(dropout(ones[:3], "layer", 0)[:, 0], found[4:])
    # A beginning that samples share, and that is there once.
    together = pack([0, 1], rows, [2, 2], torch.device("cpu"))
    dropout.begin(together.tokens, together.attention)
    assert torch.equal(dropout(ones[:5], "layer", 0)[:, 0], found[[0, 1, 2, 3, 6]])
    with torch.no_grad():
        dropout.begin(tokens, attention)
        assert dropout(ones, "layer", 0) is ones


def imitate(world: World, lora: LoRAConfig | None, lr: float, steps: int) -> list[float]:
    model = replace(TINY, num_layers=2, qkv_bias=False)
    mesh, groups = place(world, ParallelLayout())
    spec = describe_model(world, model, vocab_size=VOCAB, lora=lora)
    built = build_transformer(model, mesh.layout, groups, world.device, vocab_size=VOCAB, lora=lora)
    initialize(built, spec, mesh, world.rank, seed=3, std=0.1)
    trainable = Trainable(built, groups, OptimizerConfig(lr=lr))
    rows, prompts = samples(8)
    batch = pack(list(range(8)), rows, prompts, world.device)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        value = -vocab_parallel_log_probs(output, batch.targets, group=groups.tp, vocab_size=VOCAB)[0].mean()
        return value, float(value.detach())

    found = []
    for _ in range(steps):
        found += trainable.accumulate([batch], loss)
        trainable.step()
    return found


def both(world: World) -> tuple[list[float], ...]:
    return tuple(
        imitate(world, lora, 3e-3, 40)
        for lora in (None, LoRAConfig(rank=64, alpha=64.0), LoRAConfig(rank=1, alpha=1.0))
    )


@pytest.mark.slow
def test_with_the_rank_of_the_weights_it_learns_what_they_would() -> None:
    (results,) = run_ranks(both, 1)
    full, wide, narrow = results
    assert full[0] == wide[0] == narrow[0] and full[-1] < 0.2 * full[0]
    assert abs(wide[-1] - full[-1]) < 0.1 * full[0] and narrow[-1] > wide[-1]
