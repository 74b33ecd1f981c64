"""Every way to cut a model over eight ranks: each axis alone, and all pairs of values of two axes.

All of them take minutes, so that a part of them is tried always, and the others as long tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.multi.test_layout_invariance import LARGE, OTHERS, SMALL, Case, Findings, check, compute_all
from tests.support.ranks import run_ranks

# As many heads, groups and experts as ranks.
DENSE = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    max_context=48,
    vocab_divisible_by=4,
    qkv_bias=True,
)
EXPERTS = replace(
    DENSE,
    qkv_bias=False,
    ffn_hidden_size=16,
    qk_norm=True,
    num_experts=8,
    experts_per_token=2,
    num_query_groups=4,
)
# As few as the stages and chunks of a case allow, for time; only dense layers are cut into two chunks of eight stages.
NUM_LAYERS = {"dense": (2, 4, 8, 16), "experts": (2, 4, 8)}
OTHERS |= {f"dense of {number} layers": replace(DENSE, num_layers=number) for number in NUM_LAYERS["dense"]}
OTHERS |= {f"experts of {number} layers": replace(EXPERTS, num_layers=number) for number in NUM_LAYERS["experts"]}

SIZES = (1, 2, 4, 8)
AXES: dict[str, tuple[Any, ...]] = {
    "tp": SIZES,
    "pp": SIZES,
    "cp": SIZES,
    "ep": SIZES,
    "etp": SIZES,
    "vpp": (1, 2),
    "sequence_parallel": (True, False),
    "recompute": ("none", "selective", "full"),
    "distributed": (True, False),
    "micro_batch_tokens": (SMALL, LARGE),
}
Choice = dict[str, Any]


def choices(has_experts: bool) -> Iterator[Choice]:
    """Every combination that can be trained."""
    for values in itertools.product(*AXES.values()):
        choice = dict(zip(AXES, values, strict=True))
        tp, pp, cp = choice["tp"], choice["pp"], choice["cp"]
        if 8 % (tp * pp * cp) or (8 // pp) % (choice["ep"] * choice["etp"]):
            continue
        if has_experts and pp * choice["vpp"] > max(NUM_LAYERS["experts"]):
            continue
        plain = choice["ep"] == 1 and choice["etp"] == tp
        if (has_experts or plain) and (pp > 1 or choice["vpp"] == 1) and (tp > 1 or choice["sequence_parallel"]):
            yield choice


def pairs_of(choice: Choice) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(choice.items(), key=str), 2))


def covering(has_experts: bool) -> list[Choice]:
    """``alone``, and few combinations for every other pair of values that can be: each with the most new pairs."""
    every = [(choice, pairs_of(choice)) for choice in choices(has_experts)]
    found = alone(has_experts)
    missing = set().union(*(pairs for _, pairs in every)).difference(*map(pairs_of, found))
    while missing:
        choice, pairs = max(every, key=lambda each: len(each[1] & missing))
        found.append(choice)
        missing -= pairs
    return found


def alone(has_experts: bool) -> list[Choice]:
    """Each axis over all ranks and no other, beside replicas: of experts those that only they have."""
    # The distributed optimizer keeps whole gradients nowhere: without it each tensor's are compared.
    usual = dict(vpp=1, sequence_parallel=True, recompute="none", distributed=False, micro_batch_tokens=SMALL)
    plain = dict(tp=1, pp=1, cp=1, ep=1, etp=1)
    found = [{**plain, **usual}, {**plain, **usual, "distributed": True}]
    if has_experts:
        return [*found, *({**plain, **usual, axis: size} for axis in ("ep", "etp") for size in (2, 4, 8))]
    for size in (2, 4, 8):
        found += [{**plain, **usual, "tp": size, "etp": size}, {**plain, **usual, "pp": size}]
        found.append({**plain, **usual, "cp": size})
    found.append({**plain, **usual, "tp": 8, "etp": 8, "sequence_parallel": False})
    found += [{**plain, **usual, "pp": pp, "vpp": 2} for pp in (2, 4, 8)]
    return found + [{**plain, **usual, "recompute": way} for way in ("selective", "full")]


def case_of(choice: Choice, model: str) -> Case:
    known = {axis: choice[axis] for axis in ("tp", "pp", "cp", "vpp", "sequence_parallel")}
    dp = 8 // (choice["tp"] * choice["pp"] * choice["cp"])
    if model == "experts":
        known |= {"ep": choice["ep"], "etp": None if choice["etp"] == choice["tp"] else choice["etp"]}
    num_layers = min(number for number in NUM_LAYERS[model] if number >= choice["pp"] * choice["vpp"])
    return Case(
        layout=ParallelLayout(dp=dp, **known),
        # The critic goes through the same code.
        algorithm="ppo" if choice["recompute"] == "selective" else "grpo",
        model=f"{model} of {num_layers} layers",
        micro_batch_tokens=choice["micro_batch_tokens"],
        distributed=choice["distributed"],
        recompute=choice["recompute"],
        steps=1,
    )


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Findings]:
    """What one rank computes."""
    keys = list(itertools.product(("ppo", "grpo"), OTHERS))
    cases = [Case(layout=ParallelLayout(), algorithm=algorithm, model=model, steps=1) for algorithm, model in keys]
    (found,) = run_ranks(compute_all, 1, cases)
    return dict(zip(keys, found, strict=True))


@pytest.mark.parametrize("model", NUM_LAYERS)
def test_each_pair_of_values_is_there(model):
    has_experts = model == "experts"
    together = set().union(*map(pairs_of, covering(has_experts)))
    assert together >= set().union(*map(pairs_of, choices(has_experts)))


@pytest.mark.slow
@pytest.mark.parametrize("model", NUM_LAYERS)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_each_axis_alone_and_all_pairs_compute_what_one_rank_computes(part, model, expected):
    # Every third: of sizes beside one another, and of all kinds of pairs.
    chosen = covering(model == "experts")[part::3]
    check(8, [case_of(choice, model) for choice in chosen], expected, deadline_s=1200.0)
