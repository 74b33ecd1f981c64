"""Trainers of a few lines: a program gives prompts, takes rollouts, and updates on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from hybridflow.api.algorithms import BaseAlgorithm
from hybridflow.api.checkpoints import export_actor, keep_checkpoint
from hybridflow.api.device_mesh import DeviceMesh, settings_of_mesh
from hybridflow.api.feed import GivenPrompt, prompts_of
from hybridflow.api.flow import RoleFlow
from hybridflow.api.parts import Part, objects_of, tokenizer_of
from hybridflow.api.roles import Actor, Critic, Reward
from hybridflow.api.session import Rollout, Session, problems_of, prompts_per_step
from hybridflow.api.settings import check_count, check_eval_steps, merge, read_config, recipe_values
from hybridflow.api.world import find_world
from hybridflow.checkpoint.store import latest_step
from hybridflow.errors import ConfigError, DataError
from hybridflow.families.model import ModelConfig, differing
from hybridflow.observe.exporters import Exporter
from hybridflow.placement.model_on_mesh import ModelOnMesh, copy_weights
from hybridflow.placement.placed_model import part_of
from hybridflow.placement.user_objects import user_class_of
from hybridflow.recipe.other_names import find_other_name
from hybridflow.reshard.plan import participants

_ELSEWHERE = {
    "model": "the policy is actor_model=…",
    "reward_funcs": "give reward=…, one function (prompt, response, answer) -> score",
    "reward_model": "give reward=…, a directory or a model",
    "ref_model": "the reference is the policy as it begins",
    "train_dataset": "prompts come from data_provider=…",
    "dataset": "prompts come from data_provider=…",
    "processing_class": "give tokenizer=…",
    "args": "settings are the first argument, config: a mapping, or a YAML file of one",
}
"""Arguments of other frameworks' trainers, and what says it here."""


def _elsewhere(name: str) -> str:
    """Return what says a trainer's argument that is unknown here."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    other = find_other_name(name)
    return "settings go into config" if other is None else f"{other}, in its section of config"


class OnlineTrainer:
    """Samples responses, scores them, and learns from the scores. Collective: all ranks, with the same arguments.

    The job begins at the first ``rollout``, ``step`` or ``train``.

    Args:
        config: Settings: a mapping, or a YAML file of one, of short names (``batch_size``, ``lr``, ``kl_coef``, …), of
            role sections (``actor``, ``critic``, ``reference``, ``reward``: ``model_name``,
            ``tensor_parallel_size``, ``pipeline_parallel_size``, ``data_parallel_size``, ``devices``), of
            ``hybrid_engine``, and of a recipe's own sections.
        actor_model: The policy: directory, model of transformers, megatron-core ``GPTModel``, own class, or ``Actor``.
        critic_model: The value model, likewise, or ``Critic``; None: it begins as a copy of the actor.
        reward: A function ``(prompt, response, answer) -> score``, a scorer, its directory, or ``Reward``; None: a
            response is compared with its prompt's answer.
        tokenizer: Path, or fast tokenizer of transformers; None: the one that lies beside the model.
        data_provider: Where prompts come from: a ``DataProvider``, or prompts as ``rollout`` takes them; None: they
            are given to ``rollout`` and ``step``.
        eval_dataset: Prompts to measure ``validation/*`` on, in the forms of ``data_provider``; None: there is no
            validation.
        device_mesh: Where the roles lie.
        namespace: Namespace of a project's runs.
        algorithm: Its name, or a ``BaseAlgorithm``.
        resume: Whether to go on from the last checkpoint of ``run_dir``, if there is one.
        strange: None: refused, with what says it here.

    Raises:
        ConfigError: A setting is unknown, or contradicts another.
    """

    algorithm = "grpo"

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        actor_model: Any = None,
        critic_model: Any = None,
        reward: Any = None,
        tokenizer: Any = None,
        data_provider: Any = None,
        eval_dataset: Any = None,
        device_mesh: DeviceMesh | None = None,
        namespace: str | None = None,
        algorithm: str | BaseAlgorithm | None = None,
        resume: bool = False,
        **strange: Any,
    ) -> None:
        if strange:
            name = next(iter(strange))
            raise ConfigError(f"{type(self).__name__}: {name}=…: unknown; {_elsewhere(name)}")
        parts: list[Part] = []
        if actor_model is not None:
            parts.append(actor_model if isinstance(actor_model, Actor) else Actor(actor_model))
        if critic_model is not None:
            parts.append(critic_model if isinstance(critic_model, Critic) else Critic(critic_model))
        if reward is not None:
            parts.append(as_reward(reward))
        self._flow: RoleFlow | None = None
        if isinstance(algorithm, BaseAlgorithm):
            self._flow = Actor({}).sample() >> Reward("exact_match").score() >> algorithm.update()
            parts.append(algorithm)
            if algorithm.critic is not None and critic_model is None:
                parts.append(algorithm.critic)
            self.algorithm = algorithm.name
        elif algorithm is not None:
            if not isinstance(algorithm, str):
                raise ConfigError(
                    f"algorithm: found {algorithm!r:.80}; give the name of one, such as 'grpo', or an object of a "
                    "subclass of BaseAlgorithm, such as Mine(lr=1e-5)"
                )
            self.algorithm = algorithm
        given = read_config(config)
        if namespace is not None:
            given["namespace"] = namespace
        merged = merge([*(part.settings for part in parts), settings_of_mesh(device_mesh), given])
        self._values = recipe_values(merged, algorithm=self.algorithm, num_ranks=find_world().size)
        self._objects = objects_of(parts)
        self._tokenizer = tokenizer_of(parts) if tokenizer is None else tokenizer
        self._data, self._eval_dataset = data_provider, eval_dataset
        self._resume = resume
        self._exporters: list[tuple[str, Exporter]] = []
        self._session: Session | None = None
        self._closed: tuple[Path, int] | None = None

    @property
    def global_step(self) -> int:
        """Return the number of updates done, including those before a resume."""
        if self._closed is not None:
            return self._closed[1]
        if self._session is not None:
            return self._session.step
        place = self._values.get("run_dir")
        return (latest_step(Path(place)) or 0) if self._resume and place is not None else 0

    @property
    def run_dir(self) -> Path:
        """Return the directory of the run's files."""
        return self._closed[0] if self._closed is not None else Path(self.session().recipe.run_dir)

    def rollout(self, batch: Any = None) -> Rollout:
        """Sample responses to prompts, and score them. Collective: all ranks, with the same batch.

        Args:
            batch: Texts; rows ``{"prompt": …, "answer": …}``; token ids ``[prompts, tokens]``, alone or as
                ``input_ids`` with an ``attention_mask``. None: the next of ``data_provider``.

        Raises:
            DataError: The batch is none of these, or has another number of prompts than those before.
        """
        return self.session(batch).rollout(batch)

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from a rollout. Collective: all ranks.

        Returns:
            The step's metrics (docs/metrics.md), the same on all ranks but for its seconds, and ``loss``: the actor's.

        Raises:
            DataError: It is no rollout.
        """
        if not isinstance(rollout, Rollout):
            raise DataError(
                f"update: found {type(rollout).__name__}; give what rollout(batch) returned, or call step(batch)"
            )
        return self.session().learn(rollout)

    def step(self, batch: Any = None) -> dict[str, float]:
        """Run a rollout and the update on it; see ``rollout``, also for ``batch``, and ``update``."""
        return self.update(self.rollout(batch))

    def train(self, steps: int | None = None, *, eval_steps: int | None = None) -> list[dict[str, float]]:
        """Train for some steps on the prompts of ``data_provider``.

        Args:
            steps: How many; None: as many as use each prompt once more. The last of these is filled up with prompts
                of the next turn.
            eval_steps: Steps between validations on ``eval_dataset``; there is one at the end in any case.

        Returns:
            The metrics of each step, as of ``update``; of one with a validation ``validation/*`` too.

        Raises:
            ConfigError: It is no number of steps, or there is nothing to validate on.
        """
        if steps is not None:
            check_count(steps, "train: steps", least=0)
        check_eval_steps(eval_steps, self._eval_dataset, "train")
        return self.session().run(steps, eval_steps=eval_steps)

    def validate(self) -> dict[str, float]:
        """Answer the prompts of ``eval_dataset`` greedily, and score the responses.

        Collective: all ranks.

        Returns:
            ``validation/*`` (docs/metrics.md).

        Raises:
            ConfigError: There is no ``eval_dataset``.
        """
        if self._eval_dataset is None:
            raise ConfigError("validate: nothing to validate on; make the trainer with eval_dataset=…")
        return self.session().validate()

    def add_metrics_exporter(self, exporter: Exporter | Callable[[int, Mapping[str, float]], None]) -> None:
        """Send the metrics of the steps to come there too, from rank 0 and a thread of its own.

        Args:
            exporter: A ``MetricsExporter``, another object with ``export(step, metrics)`` and ``close()``, or a
                function of ``(step, metrics)``.

        Raises:
            ConfigError: It is nothing of these.
        """
        from hybridflow.observe.exporters import Callback

        if not hasattr(exporter, "export") and not callable(exporter):
            raise ConfigError(
                f"add_metrics_exporter: found {type(exporter).__name__}; give MetricsExporter(pushgateway_url=…, "
                "job_name=…), or a function of (step, metrics)"
            )
        found: Exporter = cast(Exporter, exporter) if hasattr(exporter, "export") else Callback(exporter)
        name = type(found).__name__
        if self._session is None:
            self._exporters.append((name, found))
        else:
            self._session.trainer.add_exporter(name, found)

    def save_checkpoint(
        self, path: str | Path, save_optimizer: bool = False, save_training_state: bool | None = None
    ) -> None:
        """Save what was trained, also after ``close``. Collective: all ranks. Nothing is at ``path`` yet.

        Args:
            path: Without the optimizer a directory as transformers reads it, with the actor's weights. With it a run
                directory, which ``resume=True`` and ``{"run_dir": path}`` go on from.
            save_optimizer: Whether to save all that training goes on from.
            save_training_state: As ``save_optimizer``, or left out: one is of no use without the other.

        Raises:
            ConfigError: ``path`` is none, there is nothing to save, or only one of the two is asked for.
            CheckpointError: ``path`` is there.
            WriteError: The file system refuses.
        """
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"save_checkpoint: found {type(path).__name__}, expected the path of a new directory")
        if save_training_state not in (None, save_optimizer):
            raise ConfigError(
                f"save_checkpoint: save_optimizer={save_optimizer} and save_training_state={save_training_state}: a "
                "run is gone on with from both, and transformers reads neither; give the same to both"
            )
        if self._closed is not None and self._closed[1] == 0:
            raise ConfigError("save_checkpoint: the trainer is closed, and has learned nothing that could be saved")
        run_dir = self.session().save() if self._closed is None else self._closed[0]
        keep = keep_checkpoint if save_optimizer else export_actor
        keep(run_dir, Path(path), find_world())

    def copy_actor(self, target: ModelOnMesh) -> None:
        """Fill a model of the actor's shape with its weights, from its layout into the model's, without a file between.

        Collective: all ranks.

        Args:
            target: The model; on a rank outside its mesh one without weights.

        Raises:
            ConfigError: The actor has adapters, is a class of the user's own, or has another shape.
        """
        job, actor = self.session().trainer.job, self.session().trainer.roles.actor
        if job.recipe.actor.lora is not None or user_class_of(job, "actor") is not None:
            raise ConfigError(
                "update_weights: the trainer's actor has adapters, or is a class of your own; give the directory that "
                "save_checkpoint writes, or the class itself"
            )
        check_same_shape(job.model_of("actor"), target.model)
        job.world.make_groups([participants(job.meshes["actor.update"], target.mesh)])
        copy_weights(job.world, part_of(job, "actor.update", actor.spec, actor.model), target)

    def close(self) -> None:
        """End the job with its last checkpoint in ``run_dir``. Collective: all ranks."""
        if self._session is not None:
            self._session.close()
            self._closed = Path(self._session.recipe.run_dir), self._session.step
            self._session = None

    def __enter__(self) -> OnlineTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def session(self, batch: Any = None) -> Session:
        """Return the job, made at the first call for batches like ``batch``.

        Raises:
            ConfigError: It is closed, or has no model.
        """
        if self._closed is not None:
            raise ConfigError(
                f"the trainer is closed, after {self._closed[1]} step(s); make a new one, with resume=True and run_dir="
                f"{str(self._closed[0])!r} to go on"
            )
        if self._session is None:
            if "model" not in self._values and "actor" not in self._objects:
                raise ConfigError(f"{type(self).__name__}: no model; give actor_model=…, a directory or a model")
            prompts = None if batch is None else prompts_of(batch)
            if prompts is not None and self._data is None and all(_is_bare(each) for each in prompts):
                self._score_nothing()
            num_prompts = prompts_per_step(self._values, self._data) if prompts is None else len(prompts)
            self._session = Session(
                self._values,
                tokenizer=self._tokenizer,
                objects=self._objects,
                step=None if self._flow is None else self._flow.step,
                make_problems=None if self._data is None else problems_of(self._data),
                make_held_out=None if self._eval_dataset is None else problems_of(self._eval_dataset, "eval_dataset"),
                num_prompts=num_prompts,
                resume=self._resume,
            )
            for name, exporter in self._exporters:
                self._session.trainer.add_exporter(name, exporter)
        return self._session

    def _score_nothing(self) -> None:
        """Score 0 where nothing scores and prompts are token ids, which have no answers to compare with."""
        scorers = {"reward", "teacher"} & {*self._values, *self._objects}
        if scorers or "environment" in self._values.get("rollout", {}):
            return
        self._objects["reward"] = _zero
        if find_world().rank == 0:
            print(
                "hybridflow: no reward is given, and token ids have no answers: each response scores 0, and only the "
                "KL to the reference is learned from; give reward=…, such as a function (prompt, response, answer) -> "
                "score",
                file=sys.stderr,
                flush=True,
            )


class PPOTrainer(OnlineTrainer):
    """PPO with a critic; see ``OnlineTrainer``."""

    algorithm = "ppo"


class GRPOTrainer(OnlineTrainer):
    """GRPO: samples are judged against those of their group; see ``OnlineTrainer``."""

    algorithm = "grpo"


def check_same_shape(found: ModelConfig, model: ModelConfig) -> None:
    """Refuse weights of a model whose settings are others than those of the one that takes them. Raises ConfigError."""
    different = differing(found, model)
    if different:
        told = ", ".join(f"{name}={getattr(found, name)!r}" for name in different)
        raise ConfigError(f"update_weights: the model has {told}, which the worker's has not; give one of its shape")


def _is_bare(prompt: GivenPrompt) -> bool:
    """Return whether a prompt is token ids without an answer."""
    return prompt.tokens is not None and prompt.example.answer == ""


def _zero(prompt: str, response: str, answer: str) -> float:
    return 0.0


def as_reward(reward: Any) -> Part:
    """Return a ``Reward`` from a function, the name of one, a directory or a model.

    Raises:
        ConfigError: It is nothing of these.
    """
    if isinstance(reward, Part):
        return reward
    is_directory = isinstance(reward, Path) or (
        isinstance(reward, str)
        and ((os.sep in reward and ".py:" not in reward) or (Path(reward) / "config.json").is_file())
    )
    if is_directory or hasattr(reward, "scores") or hasattr(reward, "state_dict"):
        return Reward(model=reward)
    if isinstance(reward, str) or callable(reward):
        return Reward(reward)
    several = "; several functions: make one of them, or use DataPipeline" if isinstance(reward, list | tuple) else ""
    raise ConfigError(
        f"reward: found {type(reward).__name__}; give a function (prompt, response, answer) -> score, its name, a "
        f"model, or an object with scores(prompts, responses, answers){several}"
    )
