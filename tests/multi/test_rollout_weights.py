"""The actor's two layouts on the same ranks: what they share, what is freed in each phase, and what comes back."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.specs import logical_parameters
from hybridflow.models.weights import local_shards
from hybridflow.parallel.world import World
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from tests.multi.jobs import make_job, tiny_recipe
from tests.support.ranks import run_ranks

PAIRS = [("tp2.dp2", "dp4"), ("dp4", "tp2.dp2"), ("tp2.pp2", "tp2.dp2"), ("pp2.dp2", "tp4")]
TENSORS = 7
"""Of a layer: two norms, the projection, query-key-value and its bias, the two of the feed-forward block."""
# Layers 0 and 2 are on the first stage and 1 and 3 on the second, then 0 to 2 and 3.
PAIRS += [("pp2.vpp2.dp2", "pp2.layers3-1.dp2")]


def phases(world: World, pairs: list[tuple[str, str]], reshard: str) -> list[int]:
    """Storages shared between the layouts of each pair."""
    shared = []
    for update, rollout in pairs:
        recipe = tiny_recipe(ParallelLayout.parse(update))
        layout = ParallelLayout.parse(rollout)
        actor_settings = replace(recipe.actor, rollout=layout, reshard=reshard, offload=True)
        job, _ = make_job(world, replace(recipe, actor=actor_settings))
        actor = Actor(job, KLCoefficient(job.recipe))
        assert actor.model is not None and actor.trainable is not None and actor._rollout is not None
        learning, generating = (logical_parameters(model.transformer) for model in (actor.model, actor._rollout))
        kinds = actor.trainable.state()
        state = {f"{kind} of {name}": kinds[kind][name] for kind in ("exp_avg", "exp_avg_sq") for name in kinds[kind]}
        for tensor in state.values():
            tensor.normal_()
        before = {name: tensor.clone() for name, tensor in state.items()}
        same = {name for name in generating if name in learning and shares(learning[name], generating[name])}

        for turn in range(2):
            with torch.no_grad():
                for name, (tensor, part) in local_shards(
                    actor.model.transformer, actor.spec, actor.model.mesh, world.rank
                ).items():
                    tensor[tuple(slice(0, stop - start) for start, stop in part.box)] = values(name, part.box, turn)
            actor.enter_phase("rollout")
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in state.values()), "moments on the device"
            for name, (tensor, part) in local_shards(
                actor._rollout.transformer, actor.spec, actor._rollout.mesh, world.rank
            ).items():
                inside = tensor[tuple(slice(0, stop - start) for start, stop in part.box)]
                assert torch.equal(inside, values(name, part.box, turn)), (update, rollout, name, turn)
            with actor.optimizer_at_hand():
                assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in state.values())
            actor.enter_phase("update")
            assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
            assert all(float(parameter.main_grad.abs().sum()) == 0 for parameter in learning.values())
            for name, parameter in generating.items():
                assert (parameter.untyped_storage().nbytes() > 0) == (name in same), name
        shared.append(len(same))
    return shared


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def values(name: str, box: tuple[tuple[int, int], ...], turn: int) -> torch.Tensor:
    """A box of a logical tensor whose every element tells where it is."""
    value = torch.tensor(float(len(name) + turn), dtype=torch.float64)
    for dim, (start, stop) in enumerate(box):
        value = value.unsqueeze(-1) * 1.0 + torch.arange(start, stop, dtype=torch.float64) * 0.37 ** (dim + 1)
    return value.float()


def test_phases_keep_what_they_need_and_free_the_rest() -> None:
    for reshard in ("shared", "torch"):
        found = run_ranks(phases, 4, PAIRS, reshard)
        # Between TP and DP, the two norms of each layer and the last are whole in both.
        assert all(shared[0] > 0 and shared[1] > 0 for shared in found), found
        # Layers 0 and 2 and the embedding, or layer 3, the last norm and the output layer.
        assert sorted(shared[4] for shared in found) == [TENSORS + 2] * 2 + [2 * TENSORS + 1] * 2, found
