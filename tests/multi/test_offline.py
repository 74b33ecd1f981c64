"""Steps on given responses: every layout and micro-batch split computes what one process in plain torch does, in fp64.

Nothing below the line "plain torch" uses hybridflow: log-probabilities and scores by the transformer of
``test_reference_step``, losses and gradients straight from the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.api.feed import GivenProblems
from hybridflow.config.cluster import ClusterConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.losses import PreferenceConfig
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import ActorConfig, OptimizerConfig, ReferenceConfig
from hybridflow.config.rollout import RolloutConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.data.preferences import JudgedResponse
from hybridflow.data.prompts import Example, Solution
from hybridflow.dataflow import schedule
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.move import Mover, balance
from hybridflow.dataflow.run import Executor
from hybridflow.families.model import ModelConfig
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.weights import local_shards
from hybridflow.observe.timeline import Timeline
from hybridflow.parallel.world import World
from hybridflow.recipe.checks import check_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.offline_actor import OfflineActor
from hybridflow.roles.offline_samples import OfflineSamples, row_stats
from hybridflow.trainer.roles import make_roles
from tests.multi.jobs import add_noise, inner_of, make_job, outer_of, watch
from tests.multi.models import VOCAB
from tests.multi.test_reference_step import transformer
from tests.support.ranks import run_ranks
from tests.support.roles import MethodRole

CONTEXT = 14
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    max_context=CONTEXT,
    qkv_bias=True,
    vocab_divisible_by=4,
    vocab_size=VOCAB,
    init_std=0.1,
)
BATCH, MINI_BATCH, NUM_ROWS = 12, 6, 9
SEEDS = {"actor": 3, "reference": 13}
# An optimizer step moves no weight of fp32 by so little: both mini-batches meet the first weights.
OPTIMIZER = OptimizerConfig(lr=1e-12, clip_grad=0.0, distributed=False)
PREFERENCES = {
    "dpo": PreferenceConfig(beta=0.4, label_smoothing=0.1),
    "dpo-free": PreferenceConfig(beta=0.4, reference_free=True),
    "ipo": PreferenceConfig(beta=0.7),
    "kto": PreferenceConfig(beta=0.5, desirable_weight=1.5, undesirable_weight=0.8),
}
NAMES = ("sft", "reward-model", *PREFERENCES)
STEP = 2
"""Which training step is taken; its rows lie in two epochs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to compute the same step."""

    name: str
    layout: ParallelLayout
    micro_batch_tokens: int


def recipe_of(case: Case) -> Recipe:
    """All models on the same ranks, but of two ranks or more the reference, which is cut in another way."""
    size = case.layout.world_size
    recipe = Recipe(
        name="tiny",
        algorithm=case.name.removesuffix("-free"),
        traits=ALGORITHMS[case.name.removesuffix("-free")].traits,
        cluster=ClusterConfig(ranks=size),
        model=MODEL,
        data=DataConfig(train="none", held_out="none"),
        actor=ActorConfig(update=case.layout, optimizer=OPTIMIZER),
        reference=ReferenceConfig(layout=ParallelLayout(dp=size)),
        rollout=RolloutConfig(max_new_tokens=1),
        preference=PREFERENCES.get(case.name, PreferenceConfig()),
        trainer=TrainerConfig(
            steps=1, global_batch_size=BATCH, mini_batch_size=MINI_BATCH, micro_batch_tokens=case.micro_batch_tokens
        ),
    )
    check_recipe(recipe)
    # Validations of sft that score responses sample with a temperature. What is learned from was given.
    hot = RolloutConfig(max_new_tokens=1, temperature=0.5)
    return replace(recipe, rollout=hot) if case.name == "sft" else recipe


def draw(low: int, high: int, generator: torch.Generator) -> tuple[int, ...]:
    """So many random tokens."""
    count = int(torch.randint(low, high, (1,), generator=generator))
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


def rows_of(name: str, seed: int = 11) -> list[Any]:
    """Rows of unequal lengths: solutions with observed tokens, pairs with margins, or single responses."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Any] = []
    for index in range(NUM_ROWS):
        prompt, first, second = (draw(1, high, generator) for high in (8, 8, 8))
        margin = 0.25 * index
        if name == "sft":
            rows.append(Solution(prompt, first, tuple(place % 3 != 1 for place in range(len(first)))))
        elif name == "kto":
            rows.append((JudgedResponse(prompt, first, index % 3 != 0, 0.0),))
        else:
            rows.append((JudgedResponse(prompt, first, True, margin), JudgedResponse(prompt, second, False, margin)))
    return rows


def held_out() -> tuple[tuple[JudgedResponse, JudgedResponse], ...]:
    return tuple(rows_of("dpo", seed=12)[:5])


def held_out_solutions() -> tuple[Solution, ...]:
    """Fewer than replicas in some layouts."""
    return tuple(rows_of("sft", seed=12)[:3])


def given_problems(kind: type[GivenProblems] = GivenProblems, **more: Any) -> GivenProblems:
    examples = tuple(Example(prompt="", answer=str(row), place="") for row in range(NUM_ROWS))
    return kind(examples=examples, seed=5, prompts=(), **more)


def step(world: World, case: Case) -> dict[str, Any]:
    """A training step with a validation through the compiled program, and what this rank saw of it."""
    recipe = recipe_of(case)
    job, plan = make_job(world, recipe)
    rows = rows_of(case.name)
    problems = given_problems(
        solutions=tuple(rows) if case.name == "sft" else (),
        all_responses=() if case.name == "sft" else tuple(rows),
    )
    job = replace(job, train=problems, held_out_pairs=held_out(), held_out_solutions=held_out_solutions())
    roles = make_roles(job, KLCoefficient(recipe)).by_name
    assert type(roles["actor"]) is OfflineActor
    for name, seed in SEEDS.items():
        if name in roles:
            add_noise(roles[name].model, roles[name].spec, world.rank, seed=seed)
    gradients, metrics = watch(roles["actor"], world.rank)
    per_prompt = recipe.samples_per_prompt
    about = {"step": STEP, "first_prompt_index": BATCH // per_prompt, "num_prompts": BATCH // per_prompt}
    world.make_groups(schedule.rank_sets(plan.train, plan.meshes))
    Executor(
        schedule=schedule.project(plan.train, world.rank, plan.meshes),
        roles={**roles, "trainer": EndOfStep()},
        decisions={
            "train_step": iter([about, None]).__next__,
            "go_on": lambda: True,
            "go_on_to_update": lambda: True,
            "actor_mini_batch": iter([{"epoch": 0, "index": 0}, {"epoch": 0, "index": 1}, None]).__next__,
            "validate": lambda: True,
            "save": lambda: False,
        },
        mover=Mover(world, plan.meshes, chunk=MINI_BATCH),
        world=world,
        meshes=plan.meshes,
        timeline=Timeline(),
    ).run()
    return {"gradients": gradients, "metrics": [*metrics, {**roles["actor"].metrics, **roles["offline"].metrics}]}


class EndOfStep(MethodRole):
    """A trainer that records and saves nothing."""

    def finish_step(self, batch: Any, decided: Any) -> None:
        pass

    def save(self, batch: Any, decided: Any) -> None:
        pass


def steps(world: World, cases: list[Case]) -> list[dict[str, Any]]:
    return [step(world, case) for case in cases]


def whole_weights(world: World) -> dict[str, dict[str, Any]]:
    """The weights of actor, scorer and reference, uncut."""
    found = {}
    for name in ("dpo", "reward-model"):
        recipe = recipe_of(Case(name=name, layout=ParallelLayout(), micro_batch_tokens=4096))
        job, _ = make_job(world, recipe)
        for role, made in make_roles(job, KLCoefficient(recipe)).by_name.items():
            if role in SEEDS:
                add_noise(made.model, made.spec, 0, seed=SEEDS[role])
                shards = local_shards(made.model.transformer, made.spec, made.model.mesh, 0)
                found["scorer" if name == "reward-model" else role] = {
                    tensor: local[inner_of(part)].numpy() for tensor, (local, part) in shards.items()
                }
    return found


# --- plain torch -----------------------------------------------------------------------------------------------------


class Plain:
    """The same step by one process."""

    def __init__(self, name: str, weights: dict[str, dict[str, Any]]) -> None:
        self.name = name
        trained = "scorer" if name == "reward-model" else "actor"
        self.weights, self.reference = (
            {key: torch.tensor(array, dtype=torch.float64, requires_grad=True) for key, array in weights[each].items()}
            for each in (trained, "reference")
        )
        order = given_problems()
        first = BATCH // per_prompt(name)
        rows = rows_of(name)
        self.rows = [rows[order.row(prompt_index)] for prompt_index in range(first, 2 * first)]
        size = MINI_BATCH // per_prompt(name)
        self.mini_batches = [self.rows[:size], self.rows[size:]]

    def states(self, weights: dict[str, Tensor], tokens: tuple[int, ...]) -> Tensor:
        return transformer(weights, torch.tensor(tokens), 4, 2, 2)

    def log_probs(self, weights: dict[str, Tensor], prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        states = self.states(weights, (*prompt, *response))[len(prompt) - 1 : -1]
        log_p = (states @ weights["output_layer.weight"].T).log_softmax(-1)
        return log_p[torch.arange(len(response)), torch.tensor(response)]

    def number(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        """A response's score, or its log-ratio."""
        if self.name == "reward-model":
            return self.states(self.weights, (*prompt, *response))[-1] @ self.weights["value_head.weight"][0]
        value = self.log_probs(self.weights, prompt, response).sum()
        if self.name == "dpo-free":
            return value
        return value - self.log_probs(self.reference, prompt, response).sum().detach()

    @torch.no_grad()
    def z_ref(self, rows: list[Any]) -> float:
        """Each prompt with the completion of the row before it, the first with that of the last."""
        numbers = []
        for index, (row,) in enumerate(rows):
            completion = rows[index - 1][0].tokens[: CONTEXT - len(row.prompt)]
            numbers.append(float(self.number(row.prompt, completion)))
        return max(0.0, sum(numbers) / len(numbers))

    def loss(self, rows: list[Any]) -> Tensor:
        settings = PREFERENCES.get(self.name)
        if self.name == "sft":
            log_probs = torch.cat([self.log_probs(self.weights, row.prompt, row.tokens) for row in rows])
            written = torch.tensor([flag for row in rows for flag in row.is_written])
            return -log_probs[written].mean()
        if self.name == "kto":
            z_ref = self.z_ref(rows)
            losses = []
            for (row,) in rows:
                ahead = settings.beta * (self.number(row.prompt, row.tokens) - z_ref)
                weight = settings.desirable_weight if row.is_wanted else settings.undesirable_weight
                value = 1 / (1 + torch.exp(-ahead if row.is_wanted else ahead))
                losses.append(weight * (1 - value))
            return torch.stack(losses).mean()
        h = self.differences(rows)
        if self.name == "reward-model":
            return torch.log1p(torch.exp(-(h - torch.tensor([pair[0].margin for pair in rows])))).mean()
        if self.name == "ipo":
            return ((h - 1 / (2 * settings.beta)) ** 2).mean()
        right, wrong = torch.log1p(torch.exp(-settings.beta * h)), torch.log1p(torch.exp(settings.beta * h))
        return ((1 - settings.label_smoothing) * right + settings.label_smoothing * wrong).mean()

    def differences(self, pairs: Any) -> Tensor:
        return torch.stack([self.number(*one[:2]) - self.number(*other[:2]) for one, other in pairs])

    @torch.no_grad()
    def validation(self) -> dict[str, float]:
        if self.name == "sft":
            return {"validation/loss": float(self.loss(held_out_solutions()))}
        h = self.differences(held_out())
        scale = 1.0 if self.name == "reward-model" else PREFERENCES[self.name].beta
        return {"validation/accuracy": float((h > 0).double().mean()), "validation/margin": scale * float(h.mean())}

    def margin(self, rows: list[Any]) -> float:
        """Mean margin of the mini-batches so far, whose rows these are: all have equally many."""
        with torch.no_grad():
            if self.name != "kto":
                scale = 1.0 if self.name == "reward-model" else PREFERENCES[self.name].beta
                return scale * float(self.differences(rows).mean())
            rewards = [PREFERENCES["kto"].beta * float(self.number(row.prompt, row.tokens)) for (row,) in rows]
        by_kind: dict[bool, list[float]] = {True: [], False: []}
        for reward, (row,) in zip(rewards, rows, strict=True):
            by_kind[bool(row.is_wanted)].append(reward)
        return fmean(by_kind[True]) - fmean(by_kind[False])

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        return {
            name: torch.zeros_like(weight) if gradient is None else gradient
            for (name, weight), gradient in zip(self.weights.items(), found, strict=True)
        }


def cases_of(size: int) -> list[Case]:
    """Every algorithm in layouts of so many ranks, with a pair or two to a micro-batch, and with many."""
    layouts = {
        1: ["tp1.pp1.dp1"],
        2: ["tp2.pp1.dp1", "tp1.pp2.dp1", "tp1.pp1.dp2", "cp2"],
        4: ["tp2.pp2.dp1", "tp1.pp2.dp2", "fsdp4", "fsdp2.dp4"],
    }[size]
    return [
        Case(name=name, layout=ParallelLayout.parse(layout), micro_batch_tokens=40 if place % 2 == size % 2 else 4096)
        for place, layout in enumerate(layouts)
        for name in NAMES
    ] + ([Case(name=name, layout=ParallelLayout(), micro_batch_tokens=4096) for name in NAMES] if size == 1 else [])


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    """Algorithm -> losses and gradients of both mini-batches, and the validation."""
    (weights,) = run_ranks(whole_weights, 1)
    found = {}
    for name in NAMES:
        plain = Plain(name, weights)
        losses = [plain.loss(rows) for rows in plain.mini_batches]
        found[name] = {
            "losses": [float(loss.detach()) for loss in losses],
            "gradients": [plain.gradients(loss) for loss in losses],
            "z_ref": [plain.z_ref(rows) for rows in plain.mini_batches] if name == "kto" else [],
            "margins": [] if name == "sft" else [plain.margin(rows) for rows in (plain.mini_batches[0], plain.rows)],
            "validation": plain.validation(),
            "rows": plain.rows,
        }
    return found


@pytest.mark.parametrize("size", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
def test_a_step_is_that_of_plain_torch_in_every_layout(size, truth):
    cases = cases_of(size)
    every = run_ranks(steps, size, cases)

    def so_far(values: list[float], index: int) -> float:
        """What a metric is after a mini-batch: the mean of them."""
        return sum(values[: index + 1]) / (index + 1)

    for number, case in enumerate(cases):
        expected = truth[case.name]
        shares = [each[number] for each in every]
        output_ranks = [each for each in shares if "actor/loss" in each["metrics"][-1]]
        assert len(output_ranks) == size // case.layout.pp
        norms = [math.sqrt(sum(float(each.square().sum()) for each in of.values())) for of in expected["gradients"]]
        for index in range(2):
            for share in output_ranks:
                told = share["metrics"][index]
                assert told["actor/loss"] == pytest.approx(so_far(expected["losses"], index), rel=2e-6, abs=4e-6), case
                if expected["z_ref"]:
                    z_ref = so_far(expected["z_ref"], index)
                    assert told["preference/z_ref"] == pytest.approx(z_ref, rel=1e-5, abs=4e-6), case
                if expected["margins"]:
                    margin = pytest.approx(expected["margins"][index], rel=1e-5, abs=4e-6)
                    assert told["preference/margin"] == margin, (case, index)
                assert told["actor/grad_norm"] == pytest.approx(so_far(norms, index), rel=1e-5), case
                assert told["actor/grad_norm_max"] == pytest.approx(max(norms[: index + 1]), rel=1e-5), case
            check_gradients(case, [share["gradients"][index] for share in shares], expected["gradients"][index])
        for share in output_ranks:
            for name, value in expected["validation"].items():
                assert share["metrics"][-1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (case, name)
        check_counts(case.name, shares, expected["rows"])


def check_gradients(case: Case, shares: list[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    """Together the ranks have every tensor, and each element is right."""
    seen: dict[str, int] = {}
    for share in shares:
        for box, (found, part) in share.items():
            name = box.partition(":")[0]
            wanted = expected[name][outer_of(part)]
            scale = max(float(expected[name].norm()) / math.sqrt(expected[name].numel()), 1e-7)
            difference = float((torch.from_numpy(found).double() - wanted).abs().max())
            assert difference < 5e-5 * max(scale, float(expected[name].abs().max())), (case, name, difference)
            seen[name] = seen.get(name, 0) + found.size
    assert seen.keys() == expected.keys()
    assert all(count % expected[name].numel() == 0 for name, count in seen.items())


class Read(GivenProblems):
    """Problems that note which prompt indices are read."""

    def solution(self, prompt_index: int) -> Solution:
        noted.add(prompt_index)
        return super().solution(prompt_index)

    def responses(self, prompt_index: int) -> tuple[JudgedResponse, ...]:
        noted.add(prompt_index)
        return super().responses(prompt_index)


noted: set[int] = set()


def reading(world: World, name: str, layout: str) -> dict[str, Any]:
    """What a source of samples gives this rank, and which prompt indices it read for that."""
    recipe = recipe_of(Case(name=name, layout=ParallelLayout.parse(layout), micro_batch_tokens=4096))
    job, plan = make_job(world, recipe)
    rows = tuple(rows_of(name))
    solutions, responses = (rows, ()) if name == "sft" else ((), rows)
    given = OfflineSamples(replace(job, train=given_problems(Read, solutions=solutions, all_responses=responses)))
    call = {"sft": given.solutions, "kto": given.completions, "dpo": given.pairs}[name]
    noted.clear()
    batch = call(
        Batch.empty(), {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": BATCH // per_prompt(name)}}
    )
    return {
        "dp": job.meshes["actor.update"].coordinate(world.rank).dp,
        "prompt_indices": sorted({int(each) // per_prompt(name) for each in batch.ids}),
        "read": sorted(noted),
        "metrics": given.metrics,
    }


def per_prompt(name: str) -> int:
    return 1 if name in ("sft", "kto") else 2


@pytest.mark.parametrize("layout", ["tp1.pp1.dp4", "tp2.pp1.dp2"])
@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_a_rank_reads_what_it_learns_from_and_its_share_of_the_lengths(name, layout):
    ranks = run_ranks(reading, 4, name, layout)
    count, size = BATCH // per_prompt(name), MINI_BATCH // per_prompt(name)
    rows = [
        (row,) if name == "sft" else row
        for row in (rows_of(name)[given_problems().row(prompt_index)] for prompt_index in range(count))
    ]
    lengths = [sum(len(each.prompt) + len(each.tokens) for each in row) for row in rows]
    dealt = balance(lengths, ParallelLayout.parse(layout).dp, size)
    for rank, found in enumerate(ranks):
        mine = {prompt_index for prompt_index, dp in enumerate(dealt) if dp == found["dp"]}
        assert found["prompt_indices"] == sorted(mine)
        before = (
            {prompt_index - 1 if prompt_index % size else prompt_index + size - 1 for prompt_index in mine}
            if name == "kto"
            else set()
        )
        assert found["read"] == sorted(mine | before | {*range(count)[rank::4]}) and len(found["read"]) < count
        assert found["metrics"]["batch/num_tokens"] == sum(lengths)


def check_counts(name: str, shares: list[dict[str, Any]], rows: list[Any]) -> None:
    responses = rows if name == "sft" else [each for row in rows for each in row]
    lengths = [sum(each.is_written) if name == "sft" else len(each.tokens) for each in responses]
    num_tokens = sum(len(each.prompt) + len(each.tokens) for each in responses)
    assert name != "sft" or sum(lengths) < sum(len(each.tokens) for each in responses), "some are observed"
    for share in shares:
        told = share["metrics"][-1]
        assert told["batch/num_tokens"] == num_tokens
        assert told["response/length_mean"] == pytest.approx(sum(lengths) / len(lengths))


def test_the_rows_reach_what_they_are_to_show(truth):
    """Two epochs in one step, a KL that counts, and pairs both ways round."""
    order = given_problems()
    assert len({order.row(prompt_index) for prompt_index in range(BATCH, 2 * BATCH)}) < BATCH
    assert any(z_ref > 0.01 for z_ref in truth["kto"]["z_ref"])
    assert 0 < truth["dpo"]["validation"]["validation/accuracy"] < 1
    assert truth["dpo"]["losses"] != truth["dpo-free"]["losses"]


def test_mismatched_responses_rotate_within_the_mini_batch_and_are_cut_at_the_context():
    recipe = recipe_of(Case(name="kto", layout=ParallelLayout(), micro_batch_tokens=4096))
    trainer = replace(recipe.trainer, global_batch_size=4, mini_batch_size=2)
    rows = [((row,) * 10, (10 + row,) * (4 if row % 2 else 1)) for row in range(NUM_ROWS)]
    job = SimpleNamespace(
        recipe=replace(recipe, trainer=trainer),
        world=SimpleNamespace(rank=0),
        meshes=role_meshes(recipe),
        train=given_problems(all_responses=tuple((JudgedResponse(*row, True, 0.0),) for row in rows)),
    )
    batch = OfflineSamples(job).completions(
        Batch.empty(), {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": 4}}
    )
    drawn = [rows[given_problems().row(number)] for number in range(4)]
    assert batch.ids.tolist() == [0, 1, 2, 3]
    for place, other in enumerate((1, 0, 3, 2)):
        expected = (*drawn[place][0], *drawn[other][1])[:CONTEXT]
        assert tuple(batch.columns["mismatched_tokens"].to_list()[place].tolist()) == expected
        assert tuple(batch.columns["tokens"].to_list()[place].tolist()) == (*drawn[place][0], *drawn[place][1])
    shorter = replace(recipe.model, max_context=12)
    job.recipe = replace(job.recipe, model=shorter)
    cut = OfflineSamples(job).completions(
        Batch.empty(), {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": 4}}
    )
    whole = batch.columns["mismatched_tokens"].to_list()
    found = cut.columns["mismatched_tokens"].to_list()
    assert [row.tolist() for row in found] == [row[:12].tolist() for row in whole]
    assert max(map(len, whole)) > 12


def test_no_more_held_out_rows_are_judged_than_asked_for():
    recipe = recipe_of(Case(name="dpo", layout=ParallelLayout(), micro_batch_tokens=4096))
    job = SimpleNamespace(
        recipe=replace(recipe, trainer=replace(recipe.trainer, num_validation=2)),
        world=SimpleNamespace(rank=0),
        meshes=role_meshes(recipe),
        held_out_pairs=held_out(),
        held_out_solutions=held_out_solutions(),
    )
    given = OfflineSamples(job)
    assert given.held_out_pairs(Batch.empty(), {}).ids.tolist() == [0, 1, 2, 3]
    assert given.held_out_solutions(Batch.empty(), {}).ids.tolist() == [0, 1]


def told_of_rows(world: World) -> list[Any]:
    """What a mesh whose ranks are not in order tells of five rows."""
    mesh = DeviceMesh(name="actor.update", layout=ParallelLayout(dp=2), ranks=(1, 0), ranks_per_node=2)
    world.make_groups([(0, 1)])
    return row_stats(SimpleNamespace(meshes={"actor.update": mesh}, world=world), range(3, 8), lambda row: row)


def test_rows_come_in_their_order_whatever_that_of_the_ranks():
    assert run_ranks(told_of_rows, 2) == [[3, 4, 5, 6, 7]] * 2
