"""``loss``, ``kl``, ``advantage`` and their kin: how the policy learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridflow.config.types import Score
from hybridflow.errors import ConfigError
from hybridflow.sections import (
    Bounds,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Share,
)

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Weighs the loss of tokens by how much likelier they are to the trainer than they were to the sampler.

    ``w = exp(old_log_prob - rollout_log_prob)``, no gradient, times the clipped loss.

    Attributes:
        kind: ``truncate``: at most ``high``; ``icepop``: 0 outside of ``low`` to ``high``; ``none``; ``auto``: as
            ``truncate`` where another engine than ours samples, older weights or another run, ``none`` elsewhere.
        level: Of each token, or the product over its response.
        low: Of ``icepop``.
        high: Largest weight.
        reject: Which estimate of the KL between sampler and trainer decides on tokens that do not count; None: all do.
        reject_level: Of each token, or the sum, mean or largest of its response, all of which it then decides on.
        reject_low: Of ``k1``: smallest ratio.
        reject_high: Largest estimate; of ``k1``: largest ratio.

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
    """How the policy learns from advantages. Defaults are PPO's; other algorithms have their own.

    Attributes:
        kind: ``clip``: PPO's clipped ratio of each token; ``gspo``: that of the whole sequence; ``cispo``: the clipped
            ratio as a weight without gradient.
        clip_low: The probability ratio is clipped below ``1 - clip_low``.
        clip_high: The probability ratio is clipped above ``1 + clip_high``.
        dual_clip: Bound on the ratio where the advantage is negative; None: off.
        aggregation: How the losses of tokens become one number; the critic's is always their token mean.
        norm_tokens: What ``seq-mean-token-sum-norm`` divides by; None: ``rollout.max_new_tokens``.
        entropy_coef: Weight of the entropy, which the loss then rewards.
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
    epochs: Count = 1


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The distance to the reference that the policy pays for.

    Attributes:
        coef: Weight of the KL to the reference; 0: none, and no reference is made.
        estimator: How each token's KL is estimated; a ``+`` gives the estimate the gradient of ``k2``.
        place: Whether the KL penalty is part of the reward or of the loss.
        target: Where adaptive KL steers; None: ``coef`` stays fixed.
        horizon: Samples over which adaptive KL answers.

    Paper: arXiv 1909.08593.
    """

    coef: NotNegative = 0.0
    estimator: KLEstimator = "k1"
    place: Literal["reward", "loss"] = "reward"
    target: Positive | None = None
    horizon: Count = 10000


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How the rewards of tokens become advantages, where an algorithm has a choice.

    Attributes:
        gamma: Discount of rewards, for each token.
        gae_lambda: Of generalised advantage estimation: 1 is reward-to-go minus value, 0 the one-step error.

    Paper: arXiv 1506.02438.
    """

    gamma: Share = 1.0
    gae_lambda: Share = 1.0


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """What is added to scores before advantages are made of them.

    Attributes:
        overlong_buffer: The last so many tokens before ``rollout.max_new_tokens`` are paid for; 0: none.
        overlong_factor: What the longest response pays.

    Paper: arXiv 2503.14476.
    """

    overlong_buffer: CountOrZero = 0
    overlong_factor: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose scores, before shaping, are all equal teach nothing: others are sampled in their place.

    The batch is the first groups in the data order whose scores differ. What was sampled beyond them is not used, and
    the next step begins with the prompt behind the last of them.

    Attributes:
        max_tries: Most rollouts of one step.
        when_short: What to do when there are fewer groups than wanted after so many: end with an error, or train on
            those; where there are none at all it is an error in any case.

    Paper: arXiv 2503.14476.
    """

    max_tries: Count = 10
    when_short: Literal["error", "train"] = "error"


@dataclass(frozen=True, kw_only=True)
class LagrangeConfig:
    """The price of cost, which rises while the mean cost is above its limit.

    Attributes:
        limit: Mean cost of a response that is allowed.
        init: The multiplier at the start.
        lr: How fast its logarithm moves, for each training step.
        max: Its upper bound.

    Paper: arXiv 2310.12773.
    """

    limit: Score = 0.0
    init: Positive = 1.0
    lr: Positive = 0.1
    max: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Learning from responses of which some are preferred.

    Attributes:
        beta: Of DPO and KTO: weight of the KL that is implied; of IPO its regularisation τ.
        label_smoothing: Of DPO: share of the preferences that are taken for wrong.
        reference_free: Of DPO: measure against no reference.
        desirable_weight: Of KTO: weight of the responses that are wanted.
        undesirable_weight: Of KTO: weight of the others.

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
        for key in ("reject_level", "reject_low", "reject_high"):
            if getattr(correction, key) != getattr(CorrectionConfig(), key):
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
