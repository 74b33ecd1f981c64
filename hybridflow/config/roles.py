"""``actor``, ``critic``, ``reference`` and ``teacher``: models, their layouts and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from hybridflow.config.types import Fp8, Offload, Recompute
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.sections import (
    FILLED_IN,
    MAY_CHANGE,
    Bounds,
    Count,
    CountOrZero,
    Decay,
    NotNegative,
    Positive,
    may_change_below,
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Set Adam with decoupled weight decay.

    Attributes:
        lr: Learning rate after warmup.
        schedule: Learning rate from the end of warmup to the last training step. ``constant`` keeps ``lr``. ``linear``
            falls to ``min_lr`` in a line. ``cosine`` falls to ``min_lr`` in half a cosine wave.
        warmup_steps: Training steps in which the rate rises to ``lr`` in a line. The last of them has ``lr``.
        min_lr: Learning rate of the last training step.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of squared gradients.
        eps: Number added to the root of that mean.
        weight_decay: Pull of the matrices toward 0, times the learning rate. Norms and biases are not pulled.
        clip_grad: Largest global gradient norm. 0 means no clipping.
        distributed: Whether the optimizer state is sharded over the data-parallel ranks.
    """

    lr: Positive = field(metadata={**MAY_CHANGE, **FILLED_IN})
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrZero = 0
    min_lr: NotNegative = field(default=0.0, metadata=MAY_CHANGE)
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip_grad: NotNegative = 1.0
    distributed: bool = field(default=True, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Train the actor on solutions before reinforcement learning, in its update layout.

    Attributes:
        steps: Optimizer steps.
        batch_size: Samples of one optimizer step.
        lr: Learning rate. All other settings are those of ``actor.optimizer``.
    """

    steps: Count
    batch_size: Count
    lr: Positive


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Train adapters on the actor's linear layers. The actor's own weights are frozen.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Scale: the update is ``alpha / rank * B A``. None means twice the rank, so that the scale does not depend
            on the rank.
        dropout: Share of each adapter's inputs that is dropped while gradients are computed.
        targets: Layers with an adapter, by their Hugging Face names. ``qkv_proj`` and ``gate_up_proj`` are for families
            that fuse them, such as Phi-3. A model in ``transformers`` has names of its own.
        merge_every: Training steps after which the updates are merged into the weights and the adapters start anew
            (arXiv 2307.05695). 0 means never. With merging, the reference is a separate model.
        path: PEFT directory of the adapters to start from, with this rank, alpha and these targets. None starts with an
            update of zero.

    Paper: arXiv 2106.09685.
    """

    rank: Count
    alpha: Positive | None = None
    dropout: Annotated[float, Bounds(low=0, high=0.99)] = 0.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    merge_every: CountOrZero = 0
    path: str | None = field(default=None, metadata=MAY_CHANGE)

    @property
    def effective_alpha(self) -> float:
        """Return ``alpha``, or its default if it was left out."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        """Return the factor of ``B A``."""
        return self.effective_alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Set how the experts of the actor are kept in balance, and how tokens travel to them. See docs/experts.md.

    Attributes:
        aux_loss: Weight of the auxiliary loss that balances the experts within each sample. Losses of layers add up.
        z_loss: Weight of the z-loss, which keeps the router's logits small. Losses of layers add up.
        bias_update_rate: Amount by which the bias of each expert rises or falls after an optimizer step, towards equal
            loads. It needs ``model.router_bias``. 0 leaves the bias as it is.
        dispatcher: How tokens reach experts on other ranks. ``alltoall`` sends each token to the ranks of its experts.
            ``allgather`` brings all tokens to all of these ranks. ``auto`` means ``allgather`` where a token has more
            experts than there are such ranks.
        router_replay: What is done with the rollout's choices of experts. ``replay`` takes them in log-probabilities
            and training. ``measure`` only compares. ``none`` does not keep them.

    Paper: arXiv 2412.19437, 2202.08906, 2408.15664.
    """

    aux_loss: NotNegative = 0.0
    z_loss: NotNegative = 0.0
    bias_update_rate: NotNegative = 0.0
    dispatcher: Literal["auto", "alltoall", "allgather"] = field(default="auto", metadata=MAY_CHANGE)
    router_replay: Literal["none", "measure", "replay"] = "none"


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """Set the policy, with one layout for each of its two phases.

    Attributes:
        ranks: Global ranks, in mesh order. None means all ranks except ``rollout_ranks``.
        update: Layout of the update phase, which learns and computes log-probabilities.
        rollout: Layout of the rollout phase, on the same ranks unless ``rollout_ranks`` names others. The ranks are
            ordered so that each keeps as many of its weights as it can. None means the update layout; ranks of
            ``cp`` and ``fsdp`` become replicas.
        rollout_ranks: Separate ranks that generate, in mesh order. They must not be among ``ranks``. None means that
            ``ranks`` generate too. See docs/async.md.
        optimizer: Optimizer of the actor.
        reshard: How weights travel from the update layout to the rollout layout. ``shared`` lets the ranks of a node
            read each other's memory. ``torch`` uses torch.distributed. ``mpi`` uses MPI, in a job that MPI started.
            ``auto`` means ``shared`` where the system allows it, and the fastest of the others elsewhere.
        reshard_every: Training steps between weight syncs to the rollout. Above 1, the rollout keeps a copy of the
            weights. The copy is at most ``reshard_every - 1`` updates old, and ``correction`` takes its age into
            account.
        offload: Keep the optimizer's state in host memory during a rollout, and free the gradients. Under FSDP the
            weights that learn are in host memory then too, unless ``reshard`` is ``shared`` or ``mpi``. ``always``
            (under FSDP) keeps weights, gradients and optimizer state in host memory during the update too. A layer
            comes to the accelerator to compute, and the optimizer runs on the host.
        recompute: Activations that are not kept, and computed again in the backward pass. ``selective`` means
            inside the core attention, ``full`` all but the input of each layer. See docs/layouts.md.
        recompute_layers: Layers of each pipeline stage that ``recompute: full`` holds for, from the first. None means
            all.
        fp8: Scaling of the 8-bit numbers with which the linear layers of the update compute. ``blockwise`` is for GPUs
            of the Hopper generation, ``mxfp8`` for Blackwell. Both need Transformer Engine and ``model.dtype: bf16``.
            The rollout samples with weights that were rounded alike. ``none`` means no such numbers. See docs/gpu.md.
        lora: Train adapters instead of the weights. None trains the weights.
        moe: Experts of the actor's model.
    """

    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    update: ParallelLayout = field(metadata={**MAY_CHANGE, **FILLED_IN})
    rollout: ParallelLayout | None = field(default=None, metadata=MAY_CHANGE)
    rollout_ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    optimizer: OptimizerConfig = field(metadata=FILLED_IN)
    reshard: Literal["auto", "shared", "torch", "mpi"] = field(default="auto", metadata=MAY_CHANGE)
    reshard_every: Count = 1
    offload: Offload = field(default=False, metadata=MAY_CHANGE)
    recompute: Recompute = field(default="none", metadata=MAY_CHANGE)
    recompute_layers: Count | None = field(default=None, metadata=MAY_CHANGE)
    fp8: Fp8 = "none"
    lora: LoRAConfig | None = None
    moe: MoEConfig = MoEConfig()

    @property
    def keeps_rollout_apart(self) -> bool:
        """Return whether the weights that generate are never those that learn, also where both layouts are equal.

        They may stay behind, be elsewhere, or be rounded.
        """
        return self.reshard_every > 1 or self.offload == "always" or self.fp8 != "none"


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Set the value model.

    Attributes:
        ranks: Global ranks, in mesh order. None means all ranks except ``actor.rollout_ranks``.
        layout: Layout of the critic.
        optimizer: Optimizer of the critic.
        model: Separate model: a language model or a scorer. None starts with a copy of the actor, without the adapter
            of ``actor.lora.path`` unless a warm start merges it.
        value_clip: Distance from the old value beyond which the loss stops rewarding a change.
        warmup_steps: Training steps at the start in which only the critic learns. The actor does not change.
        offload: Keep the optimizer's state in host memory while the critic does not learn, and free the gradients.
            ``always`` as for the actor.
        recompute: Activations that are not kept, and computed again in the backward pass. ``selective`` means
            inside the core attention, ``full`` all but the input of each layer. See docs/layouts.md.
        recompute_layers: Layers of each pipeline stage that ``recompute: full`` holds for, from the first. None means
            all.
    """

    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    layout: ParallelLayout = field(metadata={**MAY_CHANGE, **FILLED_IN})
    optimizer: OptimizerConfig = field(metadata=FILLED_IN)
    model: ModelConfig | None = field(default=None, metadata=may_change_below("path"))
    value_clip: Positive = 0.5
    warmup_steps: CountOrZero = 0
    offload: Offload = field(default=False, metadata=MAY_CHANGE)
    recompute: Recompute = field(default="none", metadata=MAY_CHANGE)
    recompute_layers: Count | None = field(default=None, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Set the frozen copy of the actor. The copy is taken after the warm start.

    Attributes:
        ranks: Global ranks, in mesh order. None means the actor's ranks.
        layout: Layout of the reference. None means the actor's update layout.
        offload: Keep its weights in host memory while it is not in use. ``always`` (under FSDP) brings one layer at a
            time to the accelerator.
    """

    ranks: tuple[int, ...] | None = None
    layout: ParallelLayout | None = None
    offload: Offload = False


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Set the model that on-policy distillation learns from.

    Attributes:
        model: Language model with the actor's tokenizer, named by ``path``.
        ranks: Global ranks, in mesh order. None means the actor's ranks.
        layout: Layout of the teacher. None means the actor's update layout.
        top_k: Number of the teacher's likeliest tokens to compare. All other tokens count as one. 0 compares the whole
            vocabulary, which takes 4 bytes of host memory per vocabulary entry and response token.
        offload: Keep its weights in host memory while it is not in use. ``always`` (under FSDP) brings one layer at a
            time to the accelerator.
    """

    model: ModelConfig
    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    layout: ParallelLayout | None = field(default=None, metadata=MAY_CHANGE)
    top_k: CountOrZero = 0
    offload: Offload = field(default=False, metadata=MAY_CHANGE)
