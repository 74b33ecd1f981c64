"""Collectives that overlap with forward and backward passes change no weight, whatever passes a replica runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import MicroBatch, pack
from hybridflow.models.training import Trainable, forward_only
from hybridflow.models.weights import initialize
from hybridflow.parallel.world import World
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.critic import Critic
from tests.multi.jobs import make_batch, make_job, tiny_recipe
from tests.multi.models import CAPPED, MIXTURE, TINY, VOCAB, place, samples
from tests.support.described import describe_model
from tests.support.ranks import run_ranks

BUCKET_SIZE = 3000
"""Elements, so that a layer is in several buckets."""

SHORT = replace(TINY, num_layers=2)
TIED = replace(CAPPED, num_layers=2, window_layers=(0,))
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "tensor parallel": (SHORT, "tp2.dp2", {}),
    "tied over stages, bf16": (replace(TIED, dtype="bf16"), "pp2.dp2", {}),
    "tied, optimizer of whole tensors": (TIED, "tp2.dp2", {"distributed": False}),
    "experts": (replace(MIXTURE, num_layers=2), "tp2.dp2", {}),
    "adapters": (SHORT, "tp2.dp2", {"lora": LoRAConfig(rank=16, dropout=0.1)}),
}
STEPS = 3


class Run:
    """A model in training on four ranks.

    Attributes:
        trainable: This rank's part.
        num_in_backward: Reductions that began within a backward pass.
        num_pending: Buckets that each step but the last has left to be gathered.
    """

    def __init__(self, world: World, case: str, bucket_size: int | None) -> None:
        model, text, other = CASES[case]
        settings = OptimizerConfig(lr=1e-2, clip_grad=1e6, distributed=other.get("distributed", True))
        other = {key: value for key, value in other.items() if key != "distributed"}
        layout = ParallelLayout.parse(text)
        self.mesh, self._groups = place(world, layout)
        built = build_transformer(model, layout, self._groups, world.device, vocab_size=VOCAB, **other)
        spec = describe_model(world, model, vocab_size=VOCAB, **other)
        initialize(built, spec, self.mesh, world.rank, seed=3, std=0.1)
        self.trainable = Trainable(built, self._groups, settings, bucket_size=bucket_size)
        self.num_in_backward, self.num_pending = 0, set()
        self._world = world

    def micro_batches(self, number: int) -> list[MicroBatch]:
        """Two of unequal size; the second replica has none in the second step."""
        sequences, prompts = samples(8, seed=number)
        replica = self.mesh.coordinate(self._world.rank).dp
        if (number, replica) == (1, 1):
            return []
        mine = list(range(replica, 8, 2))
        return [pack(part, sequences, prompts, self._world.device) for part in (mine[:1], mine[1:])]

    def loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, None]:
        log_probs, _ = vocab_parallel_log_probs(output, batch.targets, group=self._groups.tp, vocab_size=VOCAB)
        return -log_probs.sum() / 50, None

    def train(self) -> None:
        start = _ParamAndGradBucketGroup.start_grad_sync

        def note(bucket: _ParamAndGradBucketGroup, *settings: Any, **more: Any) -> None:
            self.num_in_backward += torch._C._current_graph_task_id() >= 0
            start(bucket, *settings, **more)

        with mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", note):
            for number in range(STEPS):
                self.trainable.accumulate(self.micro_batches(number), self.loss)
                self.trainable.step(is_followed=number < STEPS - 1)
                if number < STEPS - 1:
                    self.num_pending.add(num_pending(self.trainable))

    def step_by_own_passes(self, number: int) -> None:
        """Take a step on two backward passes that no schedule runs, after a forward pass without gradients."""
        batches, model = self.micro_batches(number), self.trainable.model
        self.trainable.begin()
        forward_only(model, self._groups, batches, self.loss)
        for batch in batches:
            self.loss(model(batch.tokens, batch.attention, batch.rows), batch)[0].backward()
        self.trainable.finish()
        self.trainable.step()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.trainable.model.named_parameters()}


def num_pending(trainable: Trainable) -> int:
    """Buckets that are still to be gathered."""
    return 0 if trainable._overlap is None else len(trainable._overlap._ungathered)


def trained(world: World) -> dict[str, dict[str, Any]]:
    """What differs with and without overlap, and how much overlapped."""
    found = {}
    for case in CASES:
        plain, run = Run(world, case, None), Run(world, case, BUCKET_SIZE)
        before, (ddp,) = plain.weights, run.trainable._ddp
        for each in (plain, run):
            each.train()
            if each.mesh.layout.pp == 1:
                each.step_by_own_passes(STEPS)
        found[case] = {
            "different": [name for name, each in run.weights.items() if not torch.equal(each, plain.weights[name])],
            "moved": sum(not torch.equal(each, before[name]) for name, each in run.weights.items()),
            "buckets": sum(len(each.buckets) for each in (*ddp.buffers, *ddp.expert_parallel_buffers)),
            "in_backward": run.num_in_backward,
            "pending": run.num_pending,
            "plain": plain.num_in_backward + max(plain.num_pending),
        }
    return found


@pytest.mark.slow
def test_weights_are_those_without_overlap_to_the_last_bit() -> None:
    for rank, cases in enumerate(run_ranks(trained, 4)):
        for case, (_, text, other) in CASES.items():
            layout, found = ParallelLayout.parse(text), cases[case]
            assert found["different"] == [] and found["moved"] > 4, (case, found)
            stage, replica = divmod(rank, 2) if layout.pp == 2 else (0, rank // 2)
            # Only the first stage is cut into buckets, but for a tied embedding.
            assert found["buckets"] > 3 if stage == 0 else found["buckets"] <= 2, (case, found)
            num_passes = STEPS - 1 if replica == 1 else STEPS
            assert found["in_backward"] == num_passes * found["buckets"], (case, found)
            assert found["pending"] == {found["buckets"] if other.get("distributed", True) else 0}, (case, found)
            assert found["plain"] == 0, case


def without(batch: Batch, index: int) -> Batch:
    """The batch with no token of one of its two mini-batches left."""
    mask, order = batch.ragged("response_mask"), batch.dense("order")
    kept = (order // 6 != index).repeat_interleave(mask.lengths)
    return batch.with_columns({"response_mask": Ragged(mask.values * kept, mask.lengths)})


def updated(world: World, bucket_size: int | None) -> dict[str, Any]:
    """An actor and a critic after two steps, the last mini-batch of which is left out in the second."""
    with mock.patch(
        "hybridflow.placement.placed_model.Trainable", lambda *given, **_: Trainable(*given, bucket_size=bucket_size)
    ):
        recipe = tiny_recipe(ParallelLayout(tp=2, dp=2), optimizer=OptimizerConfig(lr=1e-2, clip_grad=1e6))
        job, _ = make_job(world, recipe)
        roles = {"actor": Actor(job, KLCoefficient(recipe)), "critic": Critic(job)}
    actor, pending, found = roles["actor"], [], {}
    replica = actor.model.mesh.coordinate(world.rank).dp
    for step, batch in enumerate((make_batch(), without(make_batch(), 1))):
        mine = batch.select(torch.arange(replica, len(batch), 2))
        for index in range(2):
            for name, role in roles.items():
                role.update(mine, {f"{name}_mini_batch": {"index": index, "epoch": 0}})
                pending.append(num_pending(role.trainable))
            if step == 0 and index == 0:
                # Between two mini-batches a forward pass waits for the weights, on a replica without samples too.
                parts = [] if replica else actor.model.micro_batches(mine)
                rows = actor.model.forward(parts, lambda output, part: actor.model.log_probs(output, part)[0])
                found["log_probs"] = [row.tolist() for row in rows]
                pending.append(num_pending(actor.trainable))
    found |= {
        name: torch.cat([each.detach().flatten() for each in role.model.tensors().values()]).numpy()
        for name, role in roles.items()
    }
    return found | {"pending": pending}


def updates(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return updated(world, None), updated(world, BUCKET_SIZE)


@pytest.mark.slow
def test_who_reads_weights_between_mini_batches_waits_for_them() -> None:
    for plain, overlapped in run_ranks(updates, 4):
        for name in ("log_probs", "actor", "critic"):
            np.testing.assert_array_equal(plain[name], overlapped[name], err_msg=name)
        # Of each mini-batch actor and critic, and after the first the actor's forward pass.
        pending = [min(count, 1) for count in overlapped["pending"]]
        assert pending == [1, 1, 0, 0, 0, 1, 1, 0, 0] and not any(plain["pending"])
