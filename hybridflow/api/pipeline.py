"""A pipeline of roles, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.api.parts import Part
from hybridflow.api.roles import Actor, Critic
from hybridflow.api.settings import merge
from hybridflow.api.trainers import OnlineTrainer, as_reward
from hybridflow.errors import ConfigError


class DataPipeline:
    """Which roles take part, how they sample and how they learn.

    Args:
        actors: The policy: one.
        reward_models: What scores: functions, models or ``Reward``; of several functions the scores are added.
        critics: The value model: one, and the algorithm is PPO; none, and it is GRPO.
        rollout_config: Keys of a recipe's ``rollout``, and ``max_length`` for its ``max_new_tokens``.
        train_config: Short names and sections as ``PPOTrainer`` takes them; ``num_epochs`` is how often the prompts are
            gone through.
        data: Prompts, as ``PPOTrainer.rollout`` takes them, or a ``DataProvider``.

    Raises:
        ConfigError: There is not one actor, more than one critic, or no reward.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        reward_models: Sequence[Any],
        critics: Sequence[Any] = (),
        rollout_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
        data: Any = None,
    ) -> None:
        if len(actors) != 1:
            raise ConfigError(f"DataPipeline: {len(actors)} actors; one is trained, give a pipeline to each")
        if len(critics) > 1:
            raise ConfigError(f"DataPipeline: {len(critics)} critics; give one, or none for GRPO")
        self.actor = actors[0] if isinstance(actors[0], Actor) else Actor(actors[0])
        self.reward = _sum_of(reward_models)
        self.critic = critics[0] if critics else None
        rollout = dict(rollout_config or {})
        if "max_length" in rollout:
            rollout["max_new_tokens"] = rollout.pop("max_length")
        self.data = data
        self.train_config = dict(train_config or {})
        self.num_epochs = self.train_config.pop("num_epochs", 1)
        self.settings = merge([{"rollout": rollout}, self.train_config])


class RLTrainer:
    """Runs a pipeline: PPO where it has a critic, GRPO else.

    Args:
        pipeline: The pipeline.
        data: Prompts, where the pipeline has none.

    Raises:
        ConfigError: There are no prompts.
    """

    def __init__(self, pipeline: DataPipeline, data: Any = None) -> None:
        self.pipeline = pipeline
        prompts = pipeline.data if data is None else data
        if prompts is None:
            raise ConfigError("RLTrainer: no prompts; give data=…, here or to the DataPipeline")
        self.trainer = OnlineTrainer(
            pipeline.settings,
            actor_model=pipeline.actor,
            critic_model=Critic() if pipeline.critic is True else pipeline.critic,
            reward=pipeline.reward,
            data_provider=prompts,
            algorithm="grpo" if pipeline.critic is None else "ppo",
        )

    def run(self) -> list[dict[str, float]]:
        """Train on all prompts, ``num_epochs`` times. Collective: all ranks.

        Returns:
            The metrics of each step.
        """
        with self.trainer as trainer:
            found: list[dict[str, float]] = []
            for _ in range(self.pipeline.num_epochs):
                found += trainer.train()
            return found


def _sum_of(rewards: Sequence[Any]) -> Part:
    if not rewards:
        raise ConfigError("DataPipeline: no reward_models; give a function, or a model that scores")
    parts = [as_reward(reward) for reward in rewards]
    if len(parts) == 1:
        return parts[0]
    functions = [part.objects.get("reward") for part in parts]
    if not all(callable(function) for function in functions):
        raise ConfigError(
            "DataPipeline: several reward_models, of which one is no function; call the models in a function of your "
            "own, and give that"
        )
    return as_reward(_total(functions))


def _total(functions: Sequence[Any]) -> Callable[[str, str, str], float]:
    def total(prompt: str, response: str, answer: str) -> float:
        return sum(float(function(prompt, response, answer)) for function in functions)

    return total
