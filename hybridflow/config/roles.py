"""``actor``, ``critic``, ``reference`` and ``teacher``: models, their layouts and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.sections import (
    MAY_CHANGE,
    Bounds,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Share,
    may_change_below,
)

LoRATarget = Literal[
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"
]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay.

    Attributes:
        lr: Learning rate, once it is warm.
        schedule: What becomes of it from then to the last training step: nothing, or it falls to ``min_lr`` as a line
            or a half wave of the cosine.
        warmup_steps: Training steps in which it rises to ``lr`` as a line, the last of which has it.
        min_lr: Rate of the last training step.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of squared gradients.
        eps: What is added to the root of that mean.
        weight_decay: Pulls weights towards 0, times the learning rate.
        clip_grad: Largest global gradient norm; 0: no clipping.
        distributed: Whether optimizer state is cut over the data-parallel ranks.
    """

    lr: Positive = field(metadata=MAY_CHANGE)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrZero = 0
    min_lr: NotNegative = field(default=0.0, metadata=MAY_CHANGE)
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip_grad: NotNegative = 1.0
    distributed: bool = field(default=True, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised training of the actor before reinforcement learning, in the actor's update layout.

    Attributes:
        steps: Optimizer steps.
        batch_size: Samples in each.
        lr: Learning rate; the rest is as in ``actor.optimizer``.
    """

    steps: Count
    batch_size: Count
    lr: Positive


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters on the actor's linear layers, which are all that is trained of it; its own weights are frozen.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: The update is ``alpha / rank * B A``; None: twice the rank, so that its scale does not depend on it.
        dropout: Share of each adapter's inputs that is dropped while gradients are computed.
        targets: The layers that have one, by their names in Hugging Face; ``qkv_proj`` and ``gate_up_proj`` are those
            of families that fuse them, such as Phi-3.
        merge_every: After so many training steps the updates are put into the weights, and the adapters begin anew
            (arXiv 2307.05695); 0: never. The reference is then a model of its own.
        path: PEFT's directory of the adapters to begin with, of this rank, alpha and these targets; None: they begin
            as an update of zero.

    Paper: arXiv 2106.09685.
    """

    rank: Count
    alpha: Positive | None = None
    dropout: Annotated[float, Bounds(low=0, high=0.99)] = 0.0
    targets: tuple[LoRATarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    merge_every: CountOrZero = 0
    path: str | None = field(default=None, metadata=MAY_CHANGE)

    @property
    def effective_alpha(self) -> float:
        """``alpha``, also where it was left out."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """What ``B A`` is multiplied by."""
        return self.effective_alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy, which has a layout for each of its two phases.

    Attributes:
        ranks: Global ranks, in mesh order; None: all, but for ``rollout_ranks``.
        update: Layout in which it learns and computes log-probabilities.
        rollout: Layout in which it generates, on the same ranks, ordered so that each keeps what it can of its weights;
            None: that of the update.
        rollout_ranks: Other ranks to generate on, in mesh order, none of them among ``ranks``; None: the same.
            docs/async.md.
        optimizer: How it learns.
        reshard: How weights travel from the one layout to the other. ``shared``: ranks of a node read each other's
            memory; ``torch``: over torch.distributed; ``mpi``: over MPI, in a job that MPI started; ``auto``: shared
            where the system allows it, and the quickest of the others elsewhere.
        reshard_every: After so many training steps the weights that generate are brought up to date. Above 1 they are
            a copy of their own in the meantime, up to this less one updates old, which the correction takes into
            account.
        offload: During a rollout keep the optimizer's state in host memory, and free the gradients.
        lora: Train adapters instead of the weights; None: train the weights.
    """

    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    update: ParallelLayout = field(metadata=MAY_CHANGE)
    rollout: ParallelLayout | None = field(default=None, metadata=MAY_CHANGE)
    rollout_ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    optimizer: OptimizerConfig
    reshard: Literal["auto", "shared", "torch", "mpi"] = field(default="auto", metadata=MAY_CHANGE)
    reshard_every: Count = 1
    offload: bool = field(default=False, metadata=MAY_CHANGE)
    lora: LoRAConfig | None = None


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of PPO.

    Attributes:
        ranks: Global ranks, in mesh order; None: all, but for ``actor.rollout_ranks``.
        layout: How it is cut.
        optimizer: How it learns.
        model: A model of its own, language model or scorer; None: it begins as a copy of the actor.
        value_clip: The loss stops rewarding a value that is further from the old one than this.
        warmup_steps: Training steps at the start in which it learns alone, the actor staying as it is.
    """

    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    layout: ParallelLayout = field(metadata=MAY_CHANGE)
    optimizer: OptimizerConfig
    model: ModelConfig | None = field(default=None, metadata=may_change_below("path"))
    value_clip: Positive = 0.5
    warmup_steps: CountOrZero = 0


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen copy of the actor, taken after the warm start.

    Attributes:
        ranks: Global ranks, in mesh order; None: the actor's.
        layout: How it is cut; None: as the actor's update layout.
        offload: Keep its weights in host memory while it is not asked.
    """

    ranks: tuple[int, ...] | None = None
    layout: ParallelLayout | None = None
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The model that on-policy distillation learns from.

    Attributes:
        model: A language model with the actor's tokenizer, which ``path`` names.
        ranks: Global ranks, in mesh order; None: the actor's.
        layout: How it is cut; None: as the actor's update layout.
        top_k: Compare its likeliest tokens, so many, and all others as one; 0: the whole vocabulary, which takes 4
            bytes of host memory for each token of it and of the responses.
        offload: Keep its weights in host memory while it is not asked.
    """

    model: ModelConfig
    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    layout: ParallelLayout | None = field(default=None, metadata=MAY_CHANGE)
    top_k: CountOrZero = 0
    offload: bool = field(default=False, metadata=MAY_CHANGE)
