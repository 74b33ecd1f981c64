"""A pipeline of roles, and what runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.api.checkpoints import check_free
from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.api.parts import Part
from hybridflow.api.roles import Actor, Critic, Reward
from hybridflow.api.settings import check_count, merge
from hybridflow.api.trainers import OnlineTrainer, as_reward
from hybridflow.api.world import find_world
from hybridflow.errors import ConfigError
from hybridflow.rewards.total import total_of


class DataPipeline:
    """Which roles take part, how they sample and how they learn.

    Args:
        actors: The policy: one, as ``Actor`` takes a model; or a ``HybridActor``, which has the trained weights in the
            end, unless it has adapters.
        reward_models: What scores: functions, their names, directories, models or ``Reward``. The scores of several
            functions are added; as ``Reward`` they have the same settings.
        critics: The value model: one directory, model or ``Critic``, and the algorithm is PPO; none, and it is GRPO.
        rollout_config: Keys of a recipe's ``rollout``, and ``max_length`` for its ``max_new_tokens``.
        train_config: Short names and sections as ``PPOTrainer`` takes them; ``num_epochs`` is how often the prompts are
            gone through.
        data: Prompts, as ``PPOTrainer.rollout`` takes them, or a ``DataProvider``.

    Raises:
        ConfigError: There is not one actor, more than one critic, no reward, several that cannot be added up, a model
            alone where a list is asked for, or ``num_epochs`` is no count.
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
        for name, given in (("actors", actors), ("reward_models", reward_models), ("critics", critics)):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise ConfigError(f"DataPipeline: {name}: found {type(given).__name__}; give a list: {name}=[…]")
        if len(actors) != 1:
            raise ConfigError(f"DataPipeline: {len(actors)} actors; one is trained, give a pipeline to each")
        if len(critics) > 1:
            raise ConfigError(f"DataPipeline: {len(critics)} critics; give one, or none for GRPO")
        self.actor = _as_actor(actors[0])
        self.hybrid_actor = actors[0] if isinstance(actors[0], HybridActor) else None
        self.reward = _sum_of(reward_models)
        self.critic = critics[0] if critics else None
        rollout = dict(rollout_config or {})
        if "max_length" in rollout:
            rollout["max_new_tokens"] = rollout.pop("max_length")
        self.data = data
        self.train_config = dict(train_config or {})
        self.num_epochs = self.train_config.pop("num_epochs", 1)
        remedy = "; give how often the prompts are gone through"
        check_count(self.num_epochs, "DataPipeline: train_config.num_epochs", more=remedy)
        self.settings = merge([{"rollout": rollout}, self.train_config])


class RLTrainer:
    """Runs a pipeline: PPO where it has a critic, GRPO else.

    Args:
        pipeline: The pipeline.
        data: Prompts, where the pipeline has none.
        resume: Whether to go on from the last checkpoint of ``run_dir``, if there is one.

    Raises:
        ConfigError: There are no prompts.
    """

    def __init__(self, pipeline: DataPipeline, data: Any = None, *, resume: bool = False) -> None:
        self.pipeline = pipeline
        prompts = pipeline.data if data is None else data
        if prompts is None:
            raise ConfigError(
                "RLTrainer: no prompts; give data=…, here or to the DataPipeline: texts, rows {'prompt': …, "
                "'answer': …}, or a DataProvider"
            )
        self.trainer = OnlineTrainer(
            pipeline.settings,
            actor_model=pipeline.actor,
            critic_model=Critic() if pipeline.critic is True else pipeline.critic,
            reward=pipeline.reward,
            data_provider=prompts,
            algorithm="grpo" if pipeline.critic is None else "ppo",
            resume=resume,
        )
        self._has_run = False

    def run(self, output_dir: str | Path | None = None) -> list[dict[str, float]]:
        """Train on all prompts, ``num_epochs`` times. Callable once. Collective: all ranks.

        The last step is filled up with prompts of the next turn.
        At the end ``run_dir`` has a checkpoint to resume from.

        Args:
            output_dir: Where to write the actor as transformers reads it; None: it is not written.

        Returns:
            The metrics of each step.

        Raises:
            ConfigError: It has run.
            CheckpointError: ``output_dir`` is there.
        """
        if self._has_run:
            raise ConfigError(
                "RLTrainer.run: has run, and would begin again with the model that it began with; make another "
                "RLTrainer, with resume=True, its train_config.run_dir and more num_epochs to go on"
            )
        if output_dir is not None:
            check_free(Path(output_dir), find_world())
        self._has_run = True
        with self.trainer as trainer:
            found = trainer.session().run(epochs=self.pipeline.num_epochs)
            if output_dir is not None:
                trainer.save_checkpoint(output_dir)
            hybrid_actor = self.pipeline.hybrid_actor
            if hybrid_actor is not None and hybrid_actor.recipe.actor.lora is None:
                hybrid_actor.update_weights(trainer)
            return found


def _as_actor(given: Any) -> Actor:
    if isinstance(given, HybridActor):
        return given.as_actor()
    if isinstance(given, type):
        raise ConfigError(
            f"DataPipeline: actors[0] is the class {given.__name__}, which has no model; give an object of it, such as "
            "HybridActor.from_pretrained(path), or the path"
        )
    return given if isinstance(given, Actor) else Actor(given)


def _sum_of(rewards: Sequence[Any]) -> Part:
    if not rewards:
        raise ConfigError("DataPipeline: no reward_models; give a function, or a model that scores")
    parts = [as_reward(reward) for reward in rewards]
    if len(parts) == 1:
        return parts[0]
    given, settings = zip(*(_function_of(part, index) for index, part in enumerate(parts)), strict=True)
    for index, each in enumerate(settings):
        if each != settings[0]:
            raise ConfigError(
                f"DataPipeline: reward_models[0] has the settings {settings[0]}, reward_models[{index}] {each}; they "
                "are asked as one: give the same to each, as Reward(function, …)"
            )
    return Reward(total_of(given, "DataPipeline: reward_models"), **settings[0])


def _function_of(part: Part, index: int) -> tuple[Any, dict[str, Any]]:
    """Return a reward's function, or its name, and its settings."""
    settings = dict(part.settings.get("reward", {}))
    name = settings.pop("function", None)
    user_reward = part.objects.get("reward", name)
    if user_reward is None or (hasattr(user_reward, "state_dict") and not hasattr(user_reward, "scores")):
        raise ConfigError(
            f"DataPipeline: reward_models[{index}] is a model, and the scores of models are not added up; give it "
            "alone, or call it in a function of your own, and give that"
        )
    return user_reward, settings
