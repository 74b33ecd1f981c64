"""The whole recipe of a job."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.config.cluster import ClusterConfig, FallbackConfig
from hybridflow.config.data import DataConfig, TokenizerConfig
from hybridflow.config.losses import (
    AdvantageConfig,
    CorrectionConfig,
    DynamicSamplingConfig,
    KLConfig,
    LagrangeConfig,
    LossConfig,
    PreferenceConfig,
    ShapingConfig,
)
from hybridflow.config.metrics import MetricsConfig
from hybridflow.config.rewards import RewardConfig
from hybridflow.config.roles import ActorConfig, CriticConfig, ReferenceConfig, TeacherConfig, WarmStartConfig
from hybridflow.config.rollout import RolloutConfig
from hybridflow.config.trainer import ProfileConfig, TrainerConfig
from hybridflow.config.types import Name
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import role_of
from hybridflow.sections import FILLED_IN, MAY_CHANGE, NOT_A_KEY, Seed, may_change_below

CRITICS = ("critic", "cost_critic")
REWARDS = ("reward", "cost")
FROZEN = ("reference", *REWARDS, "teacher")
"""Roles by what their models do. Frozen ones never learn."""

ROLES = ("actor", *CRITICS, *FROZEN)
"""Roles that may have a model, in the order of tables and messages. Each is a section of the recipe."""

MODEL_MESHES = ("actor.update", "actor.rollout", *CRITICS, *FROZEN)
"""Meshes of these roles."""

MODEL_SECTIONS = {"actor": "model", **{role: f"{role}.model" for role in (*CRITICS, *REWARDS, "teacher")}}
"""Role -> section of its model. The reference has the actor's."""

_SOME_STEPS, _SOME_PROMPTS = 100, 2
"""What is archived where the recipe does not say."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Describe a training run.

    Attributes:
        name: Name of the run.
        namespace: Project of the run. Metric names and ``run_dir`` begin with it. Names in ``metrics.jsonl`` do not.
        algorithm: Algorithm of a training step.
        seed: Seed of initial weights, data order and sampling.
        run_dir: Directory of the run's files. Left out, it is ``runs/<name>`` or ``runs/<namespace>/<name>``.
        cluster: Ranks of the job.
        layout: ``auto`` has ``hybridflow train`` and ``hybridflow launch`` search ranks, layouts and memory settings of
            all models for ``cluster.hardware``, as ``hybridflow plan auto`` does. They replace the recipe's.
        model: Language model of the actor and the reference. A critic without its own model uses it too.
        data: Source of prompts.
        tokenizer: Conversion of text to token ids.
        warm_start: Supervised training before reinforcement learning. None means no warm start.
        actor: Policy.
        critic: Value model, for algorithms that have one.
        reference: Frozen policy that the KL is measured against.
        reward: Scorer of responses.
        cost: Scorer of the cost of responses, for ``safe-rlhf``. It takes the same keys as ``reward``.
        cost_critic: Value model of costs, for ``safe-rlhf``.
        teacher: Model that ``distill`` learns from.
        rollout: Sampling of responses.
        loss: Policy loss.
        kl: KL penalty against the reference.
        advantage: Advantages from rewards.
        shaping: Additions to scores.
        dynamic_sampling: Replacement of groups with equal scores, for ``dapo``.
        lagrange: Multiplier of the cost, for ``safe-rlhf``.
        preference: Losses of ``dpo``, ``ipo`` and ``kto``.
        correction: Weights for tokens that other weights or another engine sampled.
        trainer: Training loop.
        metrics: Exporters of metrics.
        profile: Steps and ranks to trace.
        fallbacks: Overrides for other numbers of ranks than ``cluster.ranks``.
        traits: Traits of the algorithm. Not a key: ``recipe.load`` looks them up.
        defaults: Dotted keys that the recipe left out, and what ``recipe.load`` has set them to. Not a key.
        dropped: Overrides that drop keys of the recipe's file, in words. Not a key.
    """

    name: Name = field(metadata={**MAY_CHANGE, **FILLED_IN})
    namespace: Name | None = field(default=None, metadata=MAY_CHANGE)
    algorithm: str
    seed: Seed = 1
    run_dir: str = field(default="", metadata=MAY_CHANGE)
    cluster: ClusterConfig = field(default=ClusterConfig(), metadata=MAY_CHANGE)
    layout: Literal["auto"] | None = field(default=None, metadata=MAY_CHANGE)
    model: ModelConfig = field(metadata=may_change_below("path"))
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    warm_start: WarmStartConfig | None = None
    actor: ActorConfig = field(metadata=FILLED_IN)
    critic: CriticConfig | None = None
    reference: ReferenceConfig = field(default=ReferenceConfig(), metadata=MAY_CHANGE)
    reward: RewardConfig = RewardConfig()
    cost: RewardConfig | None = None
    cost_critic: CriticConfig | None = None
    teacher: TeacherConfig | None = None
    rollout: RolloutConfig = field(metadata=FILLED_IN)
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    shaping: ShapingConfig = ShapingConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    lagrange: LagrangeConfig = LagrangeConfig()
    preference: PreferenceConfig = PreferenceConfig()
    correction: CorrectionConfig = CorrectionConfig()
    trainer: TrainerConfig = field(metadata=FILLED_IN)
    metrics: MetricsConfig = field(default=MetricsConfig(), metadata=MAY_CHANGE)
    profile: ProfileConfig = field(default=ProfileConfig(), metadata=MAY_CHANGE)
    fallbacks: tuple[FallbackConfig, ...] = field(default=(), metadata=MAY_CHANGE)
    traits: AlgorithmTraits = field(default=AlgorithmTraits(reads=frozenset()), metadata=NOT_A_KEY)
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False, metadata=NOT_A_KEY)
    dropped: tuple[str, ...] = field(default=(), compare=False, metadata=NOT_A_KEY)

    def __post_init__(self) -> None:
        if self.run_dir == "":
            object.__setattr__(self, "run_dir", f"runs/{self.title}")
        object.__setattr__(self, "run_dir", os.path.expanduser(self.run_dir))

    @property
    def title(self) -> str:
        """Return the run's name among those of other namespaces."""
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"

    @property
    def correction_kind(self) -> Literal["none", "truncate", "icepop"]:
        """Return how tokens are weighed, once it is known what samples them."""
        if self.correction.kind != "auto":
            return self.correction.kind
        is_exact = self.rollout.engine.kind == "megatron" and self.rollout.replay is None and self.staleness_bound == 0
        return "none" if is_exact else "truncate"

    @property
    def staleness_bound(self) -> int:
        """Return the most updates that sampling weights may be behind the trained ones."""
        return self.trainer.max_staleness + self.rollout.partial_rollouts + self.actor.reshard_every - 1

    @property
    def scores_held_out(self) -> bool:
        """Return whether validation scores responses. That of SFT does so if the recipe names what scores."""
        is_named = self.reward.kind is not None or self.rollout.environment is not None
        can_score = not self.traits.is_offline or (self.traits.imitates and is_named)
        return self.data.held_out is not None and can_score

    @property
    def generates(self) -> bool:
        """Return whether it ever samples from what it trains."""
        return not self.traits.is_offline or self.scores_held_out

    @property
    def samples_per_prompt(self) -> int:
        """Return the number of samples in the global batch per row of the data."""
        return 2 if self.traits.is_paired else self.rollout.group_size

    @property
    def archives(self) -> bool:
        """Return whether the run archives samples, all or some."""
        return self.rollout.archive is not False

    def archives_prompt(self, prompt_index: int) -> bool:
        """Return whether the run archives the responses to a prompt, in some steps at least."""
        # Prompts have serial numbers, so each step has as many of the chosen ones.
        num_prompts = self.trainer.global_batch_size // self.samples_per_prompt
        return self.archives and (self.rollout.archive is True or prompt_index % num_prompts < _SOME_PROMPTS)

    def archives_step(self, step: int) -> bool:
        """Return whether the run archives samples of a step."""
        steps = self.trainer.steps
        is_chosen = (step - 1) % max(1, math.ceil(steps / _SOME_STEPS)) == 0 or step == steps
        return self.archives and (self.rollout.archive is True or is_chosen)

    @property
    def has_reference(self) -> bool:
        """Return whether anything is measured against the frozen policy."""
        if self.traits.has_preferences:
            return not (self.traits.is_scorer or self.preference.reference_free)
        return "kl" in self.traits.reads and self.kl.coef > 0

    @property
    def drops_samples(self) -> bool:
        """Return whether samples may be left out of learning because their scoring failed."""
        return any(section is not None and section.on_failure == "drop" for section in (self.reward, self.cost))

    @property
    def is_on_policy(self) -> bool:
        """Return whether a step's one update starts from the sampling weights and has their log-probabilities.

        It is false if the log-probabilities are needed before: for a penalty in the reward, or to know which tokens
        count.
        """
        trainer = self.trainer
        is_one = self.loss.epochs == 1 and trainer.samples_per_update == trainer.global_batch_size
        needs_them = (self.kl.coef > 0 and self.kl.place == "reward") or self.correction.reject is not None
        return is_one and not needs_them

    def model_of(self, name: str) -> ModelConfig:
        """Return the settings of the model of a role or mesh."""
        own: ModelConfig | None = getattr(getattr(self, name, None), "model", None)
        return self.model if own is None else own

    def sized_model_of(self, name: str) -> ModelConfig:
        """Return the settings of the model of a role or mesh with its vocabulary size.

        For a tokenizer yet to be trained it is the largest.
        """
        model = self.model_of(name)
        return replace(model, vocab_size=self.tokenizer.vocab_size) if model.vocab_size is None else model

    def has_value_head(self, name: str) -> bool:
        """Return whether the model of a role or mesh gives one number for each token in the place of logits."""
        if role_of(name) == "actor":
            return self.traits.is_scorer and name != "actor.rollout"
        return name in (*CRITICS, *REWARDS)
