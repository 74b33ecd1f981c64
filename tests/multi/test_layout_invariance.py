"""The crown test: what is learned from given samples depends neither on TP×PP×CP×DP nor on micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridflow.config.roles import OptimizerConfig
from hybridflow.dataflow.batch import Batch
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.weights import local_regions, regions_of
from hybridflow.parallel.world import World
from hybridflow.reshard.spec import Shard, num_elements
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.critic import Critic
from tests.multi.jobs import add_noise, inner_of, make_batch, make_job, outer_of, tiny_recipe
from tests.multi.models import CAPPED, DEEP, MIXTURE, SHARED, TINY, layouts_of
from tests.support.ranks import run_ranks

# Tied embeddings, one key-value head for several tensor-parallel ranks, norms of queries and keys, and a vocabulary of
# 29 padded to 30 by one or two ranks and to 40 by four: the last then holds nothing but padding.
MIXED = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=2,
    max_context=48,
    vocab_divisible_by=5,
    tied_embeddings=True,
    qk_norm=True,
)
MODELS = {"plain": TINY, "deep": DEEP, "mixed": MIXED, "capped": CAPPED, "mixture": MIXTURE, "shared": SHARED}
OTHERS: dict[str, ModelConfig] = {}
"""Models of other test files."""
LOSSES = ("dr-grpo", "gspo", "cispo")
"""Algorithms with another loss, which also reject tokens, or sequences."""
SMALL, LARGE = 24, 4096
"""Token budgets of a micro-batch: a few samples of at most 19 tokens, and all that a rank has."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to compute the same optimizer steps."""

    layout: ParallelLayout
    algorithm: str
    model: str = "plain"
    micro_batch_tokens: int = LARGE
    distributed: bool = False
    recompute: str = "none"
    recompute_layers: int | None = None
    dispatcher: str = "auto"
    steps: int = 2


@dataclass
class Findings:
    """What a rank computed.

    Attributes:
        replica: Which whole copy of the model its part belongs to.
        expert_replica: Which whole copy of all experts its part of them belongs to.
        numbers: Reported over the global batch.
        rows: Quantity and sample -> one number for each response token.
        tensors: Quantity and logical name -> this rank's elements and where they are in the whole, as boxes.
    """

    replica: int = 0
    expert_replica: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    rows: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    tensors: dict[tuple[str, str], list[tuple[Tensor, Shard]]] = field(default_factory=dict)


def share_of(batch: Batch, dp: int, case: Case) -> Batch:
    """The samples of one replica: of one mini-batch of six an uneven part, of the other all or none."""
    last = case.layout.dp - 1
    uneven, alone = [0, 0, 0, 0, min(1, last), last], [last] * 6
    owners = torch.tensor(uneven + alone if case.micro_batch_tokens == SMALL else alone + uneven)
    return batch.select((owners == dp).nonzero()[:, 0])


def compute(world: World, case: Case) -> Findings:
    """A case's optimizer steps of every trained role, with all that must not depend on the case."""
    # Adam's first step is the learning rate times the gradient's sign, so wherever the exact gradient is about zero,
    # rounding decides over a whole step: at a rate of 1e-3 biases would differ by 1e-4 of their norm.
    recipe = tiny_recipe(
        case.layout,
        case.algorithm,
        model=(MODELS | OTHERS)[case.model],
        micro_batch_tokens=case.micro_batch_tokens,
        optimizer=OptimizerConfig(lr=1e-4, distributed=case.distributed, weight_decay=0.1),
    )
    if case.recompute != "none":
        settings = dict(recompute=case.recompute, recompute_layers=case.recompute_layers)
        sections = {role: getattr(recipe, role) for role in ("actor", "critic") if getattr(recipe, role) is not None}
        recipe = replace(recipe, **{role: replace(section, **settings) for role, section in sections.items()})
    if case.dispatcher != "auto":
        moe = replace(recipe.actor.moe, dispatcher=case.dispatcher)
        recipe = replace(recipe, actor=replace(recipe.actor, moe=moe))
    job, _ = make_job(world, recipe)
    mesh = job.meshes["actor.update"]
    batch = share_of(make_batch(), mesh.coordinate(world.rank).dp, case)
    place, layout = mesh.coordinate(world.rank), case.layout
    found = Findings(
        replica=place.dp // layout.fsdp,
        expert_replica=(place.tp + layout.tp * (place.cp + layout.cp * place.dp))
        // (layout.expert_tp * layout.ep)
        // layout.fsdp,
    )
    actor = Actor(job, KLCoefficient(recipe))
    initial(found, "actor", actor, world.rank)
    keep_rows(found, "log_probs", actor, batch, lambda output, part: actor.model.log_probs(output, part)[0])
    keep_rows(found, "entropy", actor, batch, lambda output, part: actor.model.log_probs(output, part)[1])
    optimizer_steps(found, "actor", actor, batch, world.rank, case)
    if recipe.critic is not None:
        critic = Critic(job)
        initial(found, "critic", critic, world.rank)
        keep_rows(found, "values", critic, batch, critic.model.values)
        optimizer_steps(found, "critic", critic, batch, world.rank, case)
    return found


def initial(found: Findings, name: str, role: Any, rank: int) -> None:
    """Keep the initial weights, then move them off their ones and zeros."""
    keep_tensors(found, f"{name} initial weights", role, rank)
    add_noise(role.model, role.spec, rank, seed=3)


def optimizer_steps(found: Findings, name: str, role: Any, batch: Batch, rank: int, case: Case) -> None:
    """One optimizer step on each of two mini-batches, or on the first alone."""
    step = role.trainable.step
    for index in range(case.steps):

        def keep_gradients_and_step(index: int = index, **settings: bool) -> float:
            # The distributed optimizer leaves each rank with the sum over replicas of its own part alone.
            if not case.distributed:
                keep_tensors(found, f"{name} gradients {index}", role, rank, role.trainable.state()["gradient"])
            return step(**settings)

        with mock.patch.object(role.trainable, "step", keep_gradients_and_step):
            role.update(batch, {f"{name}_mini_batch": {"epoch": 0, "index": index}})
        # A largest value is each rank's own.
        global_metrics = {metric: value for metric, value in role.metrics.items() if not metric.endswith("_max")}
        found.numbers |= {f"{metric} {index}": value for metric, value in global_metrics.items()}
        keep_tensors(found, f"{name} weights {index}", role, rank)


def keep_tensors(found: Findings, quantity: str, role: Any, rank: int, flat: dict[str, Tensor] | None = None) -> None:
    """Keep this rank's part of every tensor: its weights, or what lies in flat tensors as they do."""
    role.model.settle()
    for name, regions in local_regions(role.model.transformer, role.spec, role.model.mesh, rank).items():
        if flat is not None:
            if name.endswith("expert_bias"):
                continue  # It has no gradient.
            regions = regions_of(flat[name], [part for _, part in regions])
        found.tensors[quantity, name] = [(values.detach().clone(), part) for values, part in regions]


def keep_rows(found: Findings, quantity: str, role: Any, batch: Batch, function: Callable[..., Tensor]) -> None:
    """Keep a number for each response token, on ranks that have it."""
    column = role.model.per_token(batch, function)
    if column is not None:
        rows = zip(batch.ids.tolist(), column.to_list(), strict=True)
        found.rows |= {(quantity, sample): row for sample, row in rows}


def compute_all(world: World, cases: list[Case]) -> list[Findings]:
    """What one rank computes, as arrays, which travel from a child to the test."""
    every = [compute(world, case) for case in cases]
    for found in every:
        found.rows = {key: row.numpy() for key, row in found.rows.items()}
        found.tensors = {
            key: [(local[inner_of(part)].numpy(), part) for local, part in regions]
            for key, regions in found.tensors.items()
        }
    return every


def compare(world: World, cases: list[Case], expected: dict[tuple[str, str], Findings]) -> list[dict[str, Any]]:
    """How far this rank's part of each case is from what one rank computed.

    Returns:
        For each case: ``numbers``, quantity -> largest difference, relative to the scale of 1 or more; ``samples``,
        quantity -> samples that this rank has it of; ``tensors``, (quantity, tensor, replica) -> over this rank's
        elements, sums of squares of the difference and of the expected, and their number.
    """
    reports = []
    for case in cases:
        found, whole = compute(world, case), expected[case.algorithm, case.model]
        numbers: dict[str, float] = {}
        for quantity, value in found.numbers.items():
            numbers[quantity] = abs(value - whole.numbers[quantity]) / max(1.0, abs(whole.numbers[quantity]))
        for (quantity, sample), row in found.rows.items():
            difference = float((row - torch.from_numpy(whole.rows[quantity, sample])).abs().max())
            numbers[quantity] = max(numbers.get(quantity, 0.0), difference)
        tensors: dict[tuple[str, str, int], tuple[float, ...]] = {}
        for (quantity, name), regions in found.tensors.items():
            sums = torch.zeros(3, dtype=torch.float64)
            for local, part in regions:
                mine = local[inner_of(part)].double()
                theirs = torch.from_numpy(whole.tensors[quantity, name][0][0])[outer_of(part)].double()
                squares = (mine - theirs).square().sum(), theirs.square().sum()
                sums += torch.stack([*squares, torch.tensor(float(num_elements(part.box)))])
                assert local.count_nonzero() == mine.count_nonzero(), f"{case}: padding of {name}: {quantity} is not 0"
            replica = found.expert_replica if ".experts." in name else found.replica
            tensors[quantity, name, replica] = tuple(sums.tolist())
        samples = {quantity: {sample for what, sample in found.rows if what == quantity} for quantity, _ in found.rows}
        reports.append({"numbers": numbers, "samples": samples, "tensors": tensors})
    return reports


def worst_differences(reports: list[dict[str, Any]], whole: Findings, layout: ParallelLayout) -> dict[str, float]:
    """Quantity -> largest difference over ranks and tensors; checks that together the ranks have everything."""
    worst: dict[str, float] = {}
    sums: dict[tuple[str, str, int], Tensor] = {}
    samples: dict[str, set[int]] = {}
    for report in reports:
        for quantity, difference in report["numbers"].items():
            worst[quantity] = max(worst.get(quantity, 0.0), difference)
        for quantity, some in report["samples"].items():
            samples.setdefault(quantity, set()).update(some)
        for key, share in report["tensors"].items():
            sums[key] = sums.get(key, torch.zeros(3, dtype=torch.float64)) + torch.tensor(share, dtype=torch.float64)
    assert set(worst) == {*whole.numbers, *(quantity for quantity, _ in whole.rows)}
    assert all(some == set(range(12)) for some in samples.values())
    assert {key[:2] for key in sums} <= set(whole.tensors)
    for quantity, name in whole.tensors:
        if not any(key[0] == quantity for key in sums):
            assert "gradients" in quantity, f"{quantity} of {name} are nowhere"
            continue
        replicas = layout.dp // layout.fsdp
        if ".experts." in name:
            replicas = layout.tp * layout.cp * layout.dp // (layout.expert_tp * layout.ep) // layout.fsdp
        for replica in range(replicas):
            difference, expected, count = sums[quantity, name, replica].tolist()
            assert count and count % whole.tensors[quantity, name][0][0].size == 0, (quantity, name, replica, count)
            # Biases begin as zeros, and no token may have chosen an expert.
            is_empty = "initial" in quantity or ("gradients" in quantity and ".experts." in name)
            assert expected > 0 or is_empty, f"{quantity} of {name}: nothing to compare"
            distance = math.sqrt(difference / expected) if expected else math.sqrt(difference)
            worst[quantity] = max(worst.get(quantity, 0.0), distance)
    return worst


LIMITS = {
    "initial weights": 0.0,
    "weights": 2e-5,
    "gradients": 1e-5,
    "grad_norm": 1e-5,
    "log_probs": 1e-5,
    "entropy": 1e-5,
    "values": 1e-5,
}
"""Quantity -> largest relative difference, of a tensor by its norm; of losses and other means of the batch 1e-6."""


def limit(quantity: str) -> float:
    """What the difference of a quantity may be."""
    named = [name for name in LIMITS if quantity.removesuffix(" 0").removesuffix(" 1").endswith(name)]
    allowed = LIMITS[max(named, key=len)] if named else 1e-6
    # The second step begins with weights that already differ within their limit.
    return allowed if not quantity.endswith("1") or "weights" in quantity else 10 * allowed


def cases_of(size: int) -> list[Case]:
    """Every layout of a number of ranks, with few and many tokens to a micro-batch, for PPO and GRPO."""
    cases = []
    for layout in layouts_of(size, DEEP):
        cases.append(Case(layout=layout, algorithm="ppo", micro_batch_tokens=SMALL))
        cases.append(Case(layout=layout, algorithm="grpo", micro_batch_tokens=LARGE))
        if layout.tp > 1 and layout.tp * layout.pp == size:
            whole = replace(layout, sequence_parallel=False)
            cases.append(Case(layout=whole, algorithm="ppo", micro_batch_tokens=SMALL))
        if size < 4:
            cases.append(replace(cases[-2], distributed=layout.dp > 1, micro_batch_tokens=LARGE))
        if layout == ParallelLayout(dp=2):
            # What an algorithm does beyond log-probabilities knows of no other axis.
            cases += [Case(layout=layout, algorithm=name, micro_batch_tokens=SMALL) for name in LOSSES]
    return cases


def cases_of_stages(size: int) -> list[Case]:
    """Virtual pipeline chunks, stages of unequal length, and activations computed anew."""
    chosen: dict[int, list[tuple[str, str, str, str, int | None]]] = {
        1: [("tp1", "ppo", "plain", "full", 2), ("tp1", "grpo", "capped", "selective", None)],
        2: [
            ("pp2.vpp2", "ppo", "plain", "none", None),
            ("pp2.vpp2.layers1-1-1-1", "grpo", "mixed", "full", 1),
            ("pp2.layers3-1", "ppo", "mixed", "selective", None),
            ("pp2.layers1-3", "grpo", "mixture", "full", None),
        ],
        4: [
            ("pp4.vpp2", "ppo", "deep", "full", 1),
            ("pp4.layers3-1-2-2", "grpo", "deep", "selective", None),
            ("tp2.pp2.vpp2", "ppo", "mixed", "selective", None),
            ("tp2.pp2.vpp2", "grpo", "plain", "full", None),
            ("pp2.vpp2.dp2", "grpo", "mixed", "none", None),
            ("pp2.vpp2.dp2.layers1-2-3-2", "ppo", "deep", "none", None),
            ("pp2.vpp4.dp2", "grpo", "deep", "none", None),
            ("pp2.dp2.layers1-3", "ppo", "capped", "full", 2),
            ("pp2.vpp2.dp2", "ppo", "capped", "none", None),
        ],
    }
    cases = []
    for text, algorithm, model, recompute, layers in chosen[size]:
        layout = ParallelLayout.parse(text)
        case = Case(layout=layout, algorithm=algorithm, model=model, recompute=recompute, recompute_layers=layers)
        # More micro-batches than pp, and fewer: then some are blank.
        cases.append(
            replace(case, micro_batch_tokens=SMALL if algorithm == "ppo" else LARGE, distributed=layout.dp > 1)
        )
    return cases


def cases_of_other_models(size: int) -> list[Case]:
    """The same for heads that ranks share, for Gemma 2's parts and for experts."""
    cases = []
    for layout in layouts_of(size, MIXED):
        cases.append(Case(layout=layout, algorithm="ppo", model="mixed", micro_batch_tokens=LARGE))
        cases.append(
            Case(layout=layout, algorithm="grpo", model="mixed", micro_batch_tokens=SMALL, distributed=layout.tp == 2)
        )
    if size == 4:
        for model, text in itertools.product(("capped", "mixture"), ("tp2.pp2.dp1", "tp2.pp1.dp2", "tp1.pp2.dp2")):
            layout = ParallelLayout.parse(text)
            cases.append(Case(layout=layout, algorithm="ppo", model=model, distributed=layout.tp == 1))
    return cases


def cases_of_context(size: int) -> list[Case]:
    """Context parallelism, alone and with every other axis, of every model and algorithm.

    Of four ranks each model is in two layouts.
    """
    texts = {2: ["cp2"], 4: ["cp4", "tp2.cp2", "pp2.cp2", "cp2.dp2"]}
    cases = []
    for number, text in enumerate(texts[size]):
        layout = ParallelLayout.parse(text)
        models = list(MODELS)[number % 2 :: 2] if size == 4 else MODELS
        cases += [Case(layout=layout, algorithm="ppo", model=model, micro_batch_tokens=SMALL) for model in models]
        cases.append(Case(layout=layout, algorithm="grpo", model="mixed", distributed=True))
        if layout.cp == 2 == size:
            cases += [Case(layout=layout, algorithm=name) for name in LOSSES]
        if layout.tp > 1:
            cases.append(replace(cases[-1], layout=replace(layout, sequence_parallel=False)))
    return cases


def cases_of_experts(size: int) -> list[Case]:
    """Experts on several ranks, cut as the rest or otherwise, where some replicas have more micro-batches than others.

    A token goes to two of four experts: by default tokens are sent to and fro, and here gathered in every second case.
    """
    texts = {
        2: ["dp2.ep2", "tp2.ep2.etp1", "dp2.etp2"],
        4: [
            *("dp4.ep4", "dp4.ep2", "tp2.dp2.ep2", "tp2.dp2.ep2.etp1", "tp2.dp2.ep4.etp1", "tp2.dp2.etp1"),
            *("pp2.dp2.ep2", "tp4.ep2.etp2", "tp2.dp2.etp4", "tp2.pp2.ep2.etp1"),
        ],
    }[size]
    cases = []
    for number, text in enumerate(texts):
        case = Case(layout=ParallelLayout.parse(text), algorithm="ppo", model="mixture", distributed=number % 2 == 0)
        ways = ("auto", "allgather") if number % 2 else ("allgather", "auto")
        cases.append(replace(case, micro_batch_tokens=SMALL, dispatcher=ways[0]))
        cases.append(replace(case, model="shared", algorithm="grpo", distributed=number % 2 == 1, dispatcher=ways[1]))
    return cases


def cases_of_fsdp(size: int) -> list[Case]:
    """PyTorch FSDP over all ranks and over some, with replicas that have more micro-batches than others."""
    texts = {2: ["fsdp2", "fsdp2.zero2"], 4: ["fsdp4", "fsdp2.dp4"]}[size]
    cases = []
    for text in texts:
        layout = ParallelLayout.parse(text)
        cases.append(Case(layout=layout, algorithm="ppo", micro_batch_tokens=SMALL))
        cases.append(Case(layout=layout, algorithm="grpo", model="mixed"))
        others = ("capped", "mixture") if size == 2 and layout.keeps_gathered else ()
        cases += [Case(layout=layout, algorithm="ppo", model=model) for model in others]
    return cases


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Findings]:
    """What one rank computes with all samples in one micro-batch, by algorithm and model."""
    keys = [(algorithm, model) for algorithm in ("ppo", "grpo") for model in MODELS]
    keys += [(algorithm, "plain") for algorithm in LOSSES]
    cases = [Case(layout=ParallelLayout(), algorithm=algorithm, model=model) for algorithm, model in keys]
    (found,) = run_ranks(compute_all, 1, cases)
    return dict(zip(keys, found, strict=True))


# Eight ranks, with pairs of all axes of two models, are in test_axes; four ranks with other models take minutes.
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_layout_and_micro_batches_change_nothing(size, expected):
    cases = cases_of(size)
    assert {str(case.layout) for case in cases} == {str(layout) for layout in layouts_of(size, DEEP)}, (
        "a layout is left out"
    )
    check(size, [*cases, *cases_of_stages(size)], expected)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_layout_and_micro_batches_change_nothing_of_other_models(size, expected):
    check(size, cases_of_other_models(size), expected)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
def test_experts_on_several_ranks_change_nothing(size, expected):
    check(size, cases_of_experts(size), expected)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
def test_context_parallelism_changes_nothing(size, expected):
    check(size, cases_of_context(size), expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_fsdp_and_micro_batches_change_nothing(size, expected):
    check(size, cases_of_fsdp(size), expected)


def check(size, cases, expected, deadline_s=600.0):
    """Hold what all ranks compute together to what one rank computes."""
    reports = run_ranks(compare, size, cases, expected, deadline_s=deadline_s)
    too_far = []
    for number, case in enumerate(cases):
        whole = expected[case.algorithm, case.model]
        worst = worst_differences([report[number] for report in reports], whole, case.layout)
        too_far += [f"{case}: {quantity} {found}" for quantity, found in worst.items() if found > limit(quantity)]
    assert not too_far, "\n".join(too_far)


def test_the_samples_reach_every_branch_of_the_loss(expected):
    numbers = expected["ppo", "plain"].numbers
    assert 0.1 < numbers["actor/clip_share 0"] < 0.9
    assert numbers["actor/grad_norm 0"] > 1.0, "clipping of the gradient is not at work"
    assert abs(numbers["actor/loss 0"] - numbers["actor/policy_loss 0"]) > 0.01, "neither KL nor entropy counts"
    assert expected["grpo", "plain"].numbers["actor/loss 0"] != numbers["actor/loss 0"]
    for algorithm in LOSSES:
        numbers = expected[algorithm, "plain"].numbers
        assert 0.1 < numbers["correction/rejected_share 1"] < 0.9, algorithm
        assert algorithm == "dr-grpo" or numbers["actor/clip_share 0"] > 0.05, algorithm
