"""The roles of a job, as its recipe has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.config.recipe import CRITICS, REWARDS
from hybridflow.dataflow.role import Role
from hybridflow.placement.job import Job
from hybridflow.placement.user_objects import check_objects
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import Advantage, KLCoefficient
from hybridflow.roles.critic import Critic
from hybridflow.roles.offline_actor import OfflineActor
from hybridflow.roles.offline_samples import OfflineSamples
from hybridflow.roles.reference import Reference
from hybridflow.roles.reward import Reward
from hybridflow.roles.reward_model import RewardModel
from hybridflow.roles.teacher import Teacher
from hybridflow.sampling.groups import Groups, make_groups
from hybridflow.sampling.rollout_buffer import RolloutBuffer

NODE = "node "
"""What the names of ``Job.objects`` begin with that are roles of a program's own."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a job on this rank.

    Attributes:
        by_name: Name -> role, as the nodes of flows name them; in every process, in the same order.
        actor: The policy.
        reference: The frozen policy; None: nothing is measured against it.
        critics: ``critic`` and ``cost_critic``, as far as the recipe has them.
        advantage: From scores to advantages; None: the algorithm has none.
        groups: Chooses the batch, of algorithms with several rollouts in a step; None: others.
    """

    by_name: Mapping[str, Role]
    actor: Actor
    reference: Reference | None
    critics: Mapping[str, Critic]
    advantage: Advantage | None
    groups: Groups | None

    def take_shown(self) -> list[dict[str, Any]]:
        """Return the samples that the roles show a person, since the last call."""
        shown = []
        for role in self.by_name.values():
            shown += role.shown
            role.shown = []
        return shown

    def take_sample_stats(self) -> dict[str, list[float]]:
        """Return what the roles recorded of single samples, since the last call."""
        sample_stats: dict[str, list[float]] = {}
        for role in self.by_name.values():
            sample_stats |= role.sample_stats
            role.sample_stats.clear()
        return sample_stats


def make_roles(job: Job, kl_coef: KLCoefficient) -> Roles:
    """Make the roles that the recipe has. Collective: all ranks.

    Raises:
        ConfigError: What a program gave for a role cannot be that, or cannot do what the recipe asks.
    """
    recipe, reads = job.recipe, job.recipe.traits.reads
    check_objects(job)
    is_offline = recipe.traits.is_offline
    actor = OfflineActor(job, kl_coef) if is_offline else Actor(job, kl_coef)
    reference = Reference(job, actor) if recipe.has_reference else None
    roles: dict[str, Role | None] = {"actor": actor, "reference": reference}
    for name in REWARDS:
        if name in reads:
            roles[name] = Reward(job, name) if getattr(recipe, name).model is None else RewardModel(job, name)
    roles["teacher"] = None if recipe.teacher is None else Teacher(job)
    roles["offline"] = OfflineSamples(job) if is_offline else None
    advantage = roles["advantage"] = Advantage(job, kl_coef) if "loss" in reads else None
    groups = roles["groups"] = make_groups(job)
    critics = {name: Critic(job, name) for name in CRITICS if getattr(recipe, name) is not None}
    roles |= critics
    roles |= {name.removeprefix(NODE): each for name, each in job.objects.items() if name.startswith(NODE)}
    roles["buffer"] = RolloutBuffer(job) if recipe.trainer.max_staleness > 0 else None
    return Roles(
        by_name={name: role for name, role in roles.items() if role is not None},
        actor=actor,
        reference=reference,
        critics=critics,
        advantage=advantage,
        groups=groups,
    )
