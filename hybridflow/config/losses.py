"""``loss``, ``kl``, ``advantage`` and their kin: how the policy learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from hybridflow.config.types import Score
from hybridflow.errors import ConfigError
from hybridflow.sections import MAY_CHANGE, Bounds, Count, CountOrZero, NotNegative, Positive, Share, changed_keys

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Weight each token's loss by its probability for the trainer over its probability for the sampler.

    ``w = exp(old_log_prob - rollout_log_prob)``, no gradient, times the clipped loss.

    Attributes:
        kind: ``truncate`` caps the weight at ``high``. ``icepop`` sets weights outside ``low`` to ``high`` to 0.
            ``none`` corrects nothing. ``auto`` means ``truncate`` if another engine, older weights or another run
            sampled, else ``none``.
        level: ``token`` weights each token by its own ratio. ``sequence`` uses the product over the response.
        low: Smallest weight that ``icepop`` keeps.
        high: Largest weight.
        reject: Estimate of the KL between sampler and trainer that decides which tokens count. None means all tokens
            count.
        reject_level: ``token`` decides for each token by its own estimate. ``sum``, ``mean`` and ``max`` decide for the
            whole response by the sum, the mean or the largest estimate.
        reject_low: Smallest ratio that ``k1`` accepts.
        reject_high: Largest estimate that counts. For ``k1``, the largest ratio.

    Paper: truncation arXiv 1802.01561; IcePop arXiv 2510.18855.
    """

    kind: Literal["auto", "none", "truncate", "icepop"] = "auto"
    level: Literal["token", "sequence"] = "token"
    low: NotNegative = 0.5
    high: Positive = 2.0
    reject: Literal["k1", "k2", "k3"] | None = None
    reject_level: Literal["token", "sum", "mean", "max"] = "token"
    reject_low: NotNegative = 0.5
    reject_high: Positive = 2.0


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Set how the policy learns from advantages. Defaults are PPO's. Other algorithms have their own.

    Attributes:
        kind: ``clip`` is PPO's clipped ratio of each token. ``gspo`` clips the ratio of the whole response. ``cispo``
            uses the clipped ratio as a weight without gradient.
        clip_low: The probability ratio is clipped below ``1 - clip_low``.
        clip_high: The probability ratio is clipped above ``1 + clip_high``.
        dual_clip: Bound on the ratio where the advantage is negative. None means no bound.
        aggregation: How token losses become one number. The critic's loss is always the token mean.
        norm_tokens: Divisor of ``seq-mean-token-sum-norm``. None means ``rollout.max_new_tokens``.
        entropy_coef: Weight of the entropy bonus.
        mask_truncated: Whether responses that ``rollout.max_new_tokens`` or the context cut are left out of the loss.
            Their scores still count in the advantages of the others.
        epochs: Passes over each global batch, in the same order.

    Paper: arXiv 1707.06347; dual clip arXiv 1912.09729; GSPO arXiv 2507.18071; CISPO arXiv 2506.13585.
    """

    kind: Literal["clip", "gspo", "cispo"] = "clip"
    clip_low: Share = 0.2
    clip_high: NotNegative = 0.2
    dual_clip: Annotated[float, Bounds(low=1, above=True)] | None = None
    aggregation: Aggregation = "token-mean"
    norm_tokens: Count | None = None
    entropy_coef: NotNegative = 0.0
    mask_truncated: bool = False
    epochs: Count = 1


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Penalize the distance between the policy and the reference.

    Attributes:
        coef: Weight of the KL to the reference. 0 means no penalty and no reference.
        estimator: Estimate of each token's KL. In the loss a ``+`` gives the estimate the gradient of ``k2``, and
            ``k1`` is refused: its gradient is 0 on average.
        place: Whether the KL penalty is part of the reward or of the loss.
        target: KL that adaptive KL steers toward. None keeps ``coef`` fixed.
        horizon: Samples over which adaptive KL responds.

    Paper: arXiv 1909.08593.
    """

    coef: NotNegative = 0.0
    estimator: KLEstimator = "k1"
    place: Literal["reward", "loss"] = "reward"
    target: Positive | None = None
    horizon: Count = 10000


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Set how token rewards become advantages, for algorithms that have a choice.

    Attributes:
        gamma: Discount of rewards, for each token.
        gae_lambda: λ of generalized advantage estimation. 1 gives reward-to-go minus value. 0 gives the one-step error.

    Paper: arXiv 1506.02438.
    """

    gamma: Share = 1.0
    gae_lambda: Share = 1.0


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """Set penalties that are added to scores before advantages.

    Attributes:
        overlong_buffer: Tokens before ``rollout.max_new_tokens`` that cost a penalty. 0 means no penalty.
        overlong_factor: Penalty of the longest response.

    Paper: arXiv 2503.14476.
    """

    overlong_buffer: CountOrZero = 0
    overlong_factor: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Replace groups whose scores, before shaping, are all equal.

    The batch is the first groups in the data order whose scores differ. Samples of later groups are not used. The next
    step begins with the prompt after the last group of the batch.

    Attributes:
        max_tries: Most rollouts of one step.
        when_short: What the run does if these rollouts give too few groups. ``error`` saves and ends the run. ``train``
            trains on the groups that there are. Without any group, both save and end the run.

    Paper: arXiv 2503.14476.
    """

    max_tries: Count = field(default=10, metadata=MAY_CHANGE)
    when_short: Literal["error", "train"] = field(default="error", metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class LagrangeConfig:
    """Set the multiplier of the cost. It rises while the mean cost is above its limit.

    Attributes:
        limit: Allowed mean cost of a response.
        init: Multiplier at the start.
        lr: Step size of the multiplier's logarithm, for each training step in which the actor learns.
        max: Largest multiplier.

    Paper: arXiv 2310.12773.
    """

    limit: Score = 0.0
    init: Positive = 1.0
    lr: Positive = 0.1
    max: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Set the losses of algorithms that learn from preferences.

    Attributes:
        beta: For ``dpo`` and ``kto``, the weight of the implied KL. For ``ipo``, the regularization τ.
        label_smoothing: For ``dpo``, the share of preferences that are assumed wrong.
        reference_free: For ``dpo``, measure without a reference.
        desirable_weight: For ``kto``, the weight of wanted responses.
        undesirable_weight: For ``kto``, the weight of unwanted responses.

    Paper: DPO arXiv 2305.18290; IPO arXiv 2310.12036; KTO arXiv 2402.01306.
    """

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Bounds(low=0, high=0.5)] = 0.0
    reference_free: bool = False
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0


def check_correction(correction: CorrectionConfig) -> None:
    """Refuse bounds of ``correction`` that exclude every token. Raises ConfigError."""
    if correction.reject is None:
        for key in changed_keys(correction, ("reject_level", "reject_low", "reject_high")):
            raise ConfigError(f"correction.{key}: nothing is rejected; set correction.reject, or leave it out")
    elif correction.reject != "k1" and correction.reject_low != CorrectionConfig().reject_low:
        raise ConfigError(
            f"correction.reject_low={correction.reject_low:g}: {correction.reject} is never negative and has an upper "
            "bound alone; leave it out, or set correction.reject=k1"
        )
    if correction.reject == "k1" and correction.reject_level == "max":
        raise ConfigError(
            "correction.reject_level=max: a k1 near 0 may hide one far below it; set correction.reject to k2 or k3, or "
            "the level to token, sum or mean"
        )
    if correction.reject == "k1" and correction.reject_low >= correction.reject_high:
        raise ConfigError(
            f"correction.reject_low={correction.reject_low:g} is not below "
            f"correction.reject_high={correction.reject_high:g}; nothing would count"
        )
    if correction.kind == "icepop" and correction.low >= correction.high:
        raise ConfigError(
            f"correction.low={correction.low:g} is not below correction.high={correction.high:g}; nothing would count"
        )
