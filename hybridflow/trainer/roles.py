"""The roles of a job, as its recipe has them."""

from __future__ import annotations

from typing import Any

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
from hybridflow.sampling.groups import make_groups
from hybridflow.sampling.rollout_buffer import RolloutBuffer

NODE = "node "
"""What the names of ``Job.objects`` begin with that are roles of a program's own."""


def make_roles(job: Job, kl_coef: KLCoefficient) -> dict[str, Any]:
    """Name -> role, as the nodes of the algorithm's flow name them; in every process, in the same order.

    Collective: all ranks.

    Raises:
        ConfigError: What a program gave for a role cannot be that, or cannot do what the recipe asks.
    """
    recipe = job.recipe
    check_objects(job)
    is_offline = recipe.traits.is_offline
    roles: dict[str, Any] = {"actor": OfflineActor(job, kl_coef) if is_offline else Actor(job, kl_coef)}
    if recipe.has_reference:
        roles["reference"] = Reference(job, roles["actor"])
    for name in ("reward", "cost"):
        if name in recipe.traits.reads:
            roles[name] = Reward(job, name) if getattr(recipe, name).model is None else RewardModel(job, name)
    if recipe.teacher is not None:
        roles["teacher"] = Teacher(job)
    if is_offline:
        roles["offline"] = OfflineSamples(job)
    if "loss" in recipe.traits.reads:
        roles["advantage"] = Advantage(job, kl_coef)
    groups = make_groups(job)
    if groups is not None:
        roles["groups"] = groups
    for name in ("critic", "cost_critic"):
        if getattr(recipe, name) is not None:
            roles[name] = Critic(job, name)
    for name, given in job.objects.items():
        if name.startswith(NODE):
            roles[name.removeprefix(NODE)] = given
    if recipe.trainer.max_staleness > 0:
        roles["buffer"] = RolloutBuffer(job)
    return roles
