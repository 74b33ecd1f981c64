"""What ``plan job`` says of a rank's memory, beside what the rank has at its peak in an update.

    pytest -n 0 -m "" -s tests/multi/test_planned_memory.py

prints the table of docs/layouts.md.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.config.losses import LossConfig
from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.memory import job_memory
from hybridflow.observe.table import format_table
from hybridflow.recipe.meshes import role_meshes
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.critic import Critic
from tests.multi.jobs import make_job, tiny_recipe
from tests.multi.models import VOCAB
from tests.support.ranks import run_ranks

TOKENS = 256
DENSE = ModelConfig(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=704,
    num_attention_heads=8,
    num_query_groups=4,
    max_context=TOKENS,
    vocab_divisible_by=4,
)
MIXTURE = replace(DENSE, num_experts=4, experts_per_token=2, ffn_hidden_size=352)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, a model, and settings of the actor's or the critic's section."""

    layout: ParallelLayout
    model: ModelConfig = DENSE
    role: str = "actor"
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "one rank": Case(layout=ParallelLayout()),
    "one rank, bf16": Case(layout=ParallelLayout(), model=replace(DENSE, dtype="bf16")),
    "one rank, critic": Case(layout=ParallelLayout(), role="critic"),
    "recompute: selective": Case(layout=ParallelLayout(), settings={"recompute": "selective"}),
    "recompute: full": Case(layout=ParallelLayout(), settings={"recompute": "full"}),
    "recompute: full, 2 layers": Case(layout=ParallelLayout(), settings={"recompute": "full", "recompute_layers": 2}),
    "lora of rank 8": Case(layout=ParallelLayout(), settings={"lora": LoRAConfig(rank=8)}),
    "dp2": Case(layout=ParallelLayout(dp=2)),
    "tp2, bf16": Case(layout=ParallelLayout(tp=2), model=replace(DENSE, dtype="bf16")),
    "tp2": Case(layout=ParallelLayout(tp=2)),
    "tp2, sequence_parallel: false": Case(layout=ParallelLayout(tp=2, sequence_parallel=False)),
    "pp2": Case(layout=ParallelLayout(pp=2)),
    "pp2, layers: [3, 1]": Case(layout=ParallelLayout(pp=2, layers=(3, 1))),
    "pp2.vpp2": Case(layout=ParallelLayout(pp=2, vpp=2)),
    "cp2": Case(layout=ParallelLayout(cp=2)),
    "tp2.pp2": Case(layout=ParallelLayout(tp=2, pp=2)),
    "experts, dp2.ep2": Case(layout=ParallelLayout(dp=2, ep=2), model=MIXTURE),
    "experts, tp2": Case(layout=ParallelLayout(tp=2), model=MIXTURE),
    "experts, tp2.ep2.etp1": Case(layout=ParallelLayout(tp=2, ep=2, etp=1), model=MIXTURE),
}


class Live(TorchDispatchMode):
    """Follows the bytes of all tensors that are there.

    Attributes:
        now: So many.
        most: The most at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, found)):
            if isinstance(each, Tensor):
                self._follow(each.untyped_storage())
        self.most = max(self.most, self.now)
        return found

    def begin(self) -> None:
        """Forget the peak. Storages that were freed in place are found to be empty here."""
        self._alive = {key: (found.nbytes(), there) for key, (_, there) in self._alive.items() if (found := there())}
        self.now = self.most = sum(size for size, _ in self._alive.values())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes(), weakref.ref(storage, lambda _: self._forget(key))
            self.now += storage.nbytes()

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and a number for each row, as torch's kernel for CUDA does."""

    @staticmethod
    def forward(ctx, rows, weight, eps):
        scale = torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(rows, weight, scale)
        return (rows.float() * scale).to(rows.dtype) * weight

    @staticmethod
    def backward(ctx, gradient):
        rows, weight, scale = ctx.saved_tensors
        normal, wanted = rows.float() * scale, gradient.float() * weight.float()
        of_rows = (wanted - normal * (wanted * normal).mean(-1, keepdim=True)) * scale
        of_weight = (gradient.float() * normal).flatten(0, -2).sum(0)
        return of_rows.to(rows.dtype), of_weight.to(weight.dtype), None


def full_batch(count: int) -> Batch:
    """Samples that each fill a micro-batch; all tokens but the first are a response."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Ragged:
        return Ragged.from_list([torch.randn(TOKENS - 1, generator=generator)] * count, torch.float32)

    tokens = [torch.randint(0, VOCAB, (TOKENS,), generator=generator) for _ in range(count)]
    columns = {name: noise() for name in ("ref_log_probs", "advantages", "values", "returns")}
    return Batch(
        torch.arange(count),
        {
            **columns,
            "tokens": Ragged.from_list(tokens, torch.int64),
            "prompt_lengths": torch.ones(count, dtype=torch.int64),
            "prompt_indices": torch.arange(count),
            "order": torch.arange(count),
            "response_mask": Ragged.from_list([torch.ones(TOKENS - 1)] * count, torch.float32),
            "old_log_probs": (old := noise()),
            "rollout_log_probs": old,
        },
    )


def measure(world, case: Case) -> tuple[int, int, int, int]:
    """Planned and measured: what stays, and the peak of an update."""
    layout, count = case.layout, 4
    recipe = tiny_recipe(
        layout,
        "ppo" if case.role == "critic" else "grpo",
        model=case.model,
        settings={"loss": LossConfig()},
        micro_batch_tokens=TOKENS,
        num_samples=count * layout.dp,
        mini_batch_size=count * layout.dp,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    # Shared memory would keep a second copy of weights that two layouts have.
    actor = replace(recipe.actor, reshard="torch", **(case.settings if case.role == "actor" else {}))
    recipe = replace(recipe, actor=actor)
    name = "critic" if case.role == "critic" else "actor.update"
    planned = next(part for part in job_memory(recipe, role_meshes(recipe))[world.rank].meshes if part.mesh == name)
    job, _ = make_job(world, recipe)
    first = count * job.meshes["actor.update"].coordinate(world.rank).dp
    with Live() as live:
        role = Critic(job) if case.role == "critic" else Actor(job, KLCoefficient(recipe))
        role.enter_phase("update")
        role.trainable.state()
        live.begin()
        kept = live.now
        batch = full_batch(count * layout.dp).select(torch.arange(first, first + count))
        role.update(batch, {f"{case.role}_mini_batch": {"epoch": 0, "index": 0}})
    return planned.kept, kept, planned.kept + planned.activations, live.most


def measure_all(world) -> dict[str, tuple[int, int, int, int]]:
    fused = mock.patch.object(
        torch.nn.functional, "rms_norm", lambda rows, shape, weight, eps: FusedNorm.apply(rows, weight, eps)
    )
    with fused:
        return {name: measure(world, case) for name, case in CASES.items() if case.layout.world_size == world.size}


@pytest.mark.slow
def test_the_peak_of_a_rank_is_within_a_tenth_of_the_plan():
    by_size = {size: run_ranks(measure_all, size) for size in (1, 2, 4)}
    rows = [("configuration", "rank", "planned", "measured", "ratio", "activations planned", "measured", "ratio")]
    for name, case in CASES.items():
        for rank, cases in enumerate(by_size[case.layout.world_size]):
            kept, there, peak, most = cases[name]
            ratios = most / peak, (most - there) / (peak - kept)
            sizes = [f"{number / 1e6:.1f} MB" for number in (peak, most, peak - kept, most - there)]
            rows.append((name, str(rank), *sizes[:2], f"{ratios[0]:.2f}", *sizes[2:], f"{ratios[1]:.2f}"))
            assert there == pytest.approx(kept, rel=0.05), (name, rank)
            assert 0.9 <= ratios[0] <= 1.1, (name, rank)
            assert 0.8 <= ratios[1] <= 1.2, (name, rank)
    print("", *format_table(rows, num_left=1), sep="\n")
