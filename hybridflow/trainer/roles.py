"""The roles of a job, as its recipe has them."""

from __future__ import annotations

from typing import Any

from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import Advantage, KLCoefficient
from hybridflow.roles.critic import Critic
from hybridflow.roles.job import Job
from hybridflow.roles.reference import Reference
from hybridflow.roles.reward import Reward
from hybridflow.roles.reward_model import RewardModel


def make_roles(job: Job, kl_coef: KLCoefficient) -> dict[str, Any]:
    """Name -> role, as the nodes of the algorithm's flow name them; in every process, in the same order.

    Collective: all ranks.
    """
    recipe = job.recipe
    roles: dict[str, Any] = {"actor": Actor(job, kl_coef)}
    if recipe.has_reference:
        roles["reference"] = Reference(job, roles["actor"])
    if "reward" in recipe.preset.reads:
        roles["reward"] = Reward(job) if recipe.reward.model is None else RewardModel(job)
    if "loss" in recipe.preset.reads:
        roles["advantage"] = Advantage(job, kl_coef)
    if recipe.critic is not None:
        roles["critic"] = Critic(job)
    return roles
