"""Which metrics the page draws first, by what the algorithm optimizes. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart.

    Attributes:
        title: Its title.
        unit: Unit of its values.
        metric: The line.
        band: Metrics of the lower and the upper end of the band around it.
        held_out: Metrics of the points of validations; the first that a run has counts.
        is_objective: Whether the algorithm optimizes it.
    """

    title: str
    unit: str
    metric: str
    band: tuple[str, str] | None = None
    held_out: tuple[str, ...] = ()
    is_objective: bool = False


_SCORE, _ACCURACY, _MARGIN = "validation/score", "validation/accuracy", "validation/margin"
_LOSS = "validation/loss"
_PANELS = (
    Panel(
        title="Reward",
        unit="score",
        metric="reward/mean",
        band=("reward/p10", "reward/p90"),
        held_out=(_SCORE, _ACCURACY),
        is_objective=True,
    ),
    Panel(title="Cost", unit="cost", metric="cost/mean", is_objective=True),
    Panel(title="KL to the teacher", unit="nats per token", metric="distill/kl", is_objective=True),
    Panel(title="Loss", unit="", metric="actor/loss", held_out=(_LOSS,)),
    Panel(title="Margin of pairs", unit="score", metric="preference/margin", held_out=(_MARGIN,), is_objective=True),
    Panel(title="Pairs in order", unit="share", metric="preference/accuracy", held_out=(_ACCURACY,), is_objective=True),
    Panel(title="Held-out score", unit="score", metric=_SCORE, is_objective=True),
    Panel(title="Held-out accuracy", unit="share", metric=_ACCURACY, is_objective=True),
    Panel(title="KL to the reference", unit="nats per token", metric="kl/ref"),
    Panel(
        title="Response length",
        unit="tokens",
        metric="response/length_mean",
        band=("response/length_min", "response/length_max"),
    ),
    Panel(title="Entropy", unit="nats per token", metric="actor/entropy"),
    Panel(title="Sampler against trainer", unit="nats per token", metric="rollout/logprob_abs_diff"),
    Panel(title="Age of the weights that sampled", unit="updates", metric="rollout/staleness_mean"),
    Panel(title="Critic's loss", unit="", metric="critic/loss"),
    Panel(title="Gradient norm", unit="", metric="actor/grad_norm"),
    Panel(title="Throughput", unit="tokens/s", metric="throughput/tokens_per_s"),
)


def choose_panels(metrics: Collection[str]) -> list[dict[str, Any]]:
    """Return the charts of runs that have these metrics, the objective first, as JSON objects."""
    panels = [panel for panel in _PANELS if panel.metric in metrics]
    drawn = {name for panel in panels for name in panel.held_out}
    panels = [panel for panel in panels if panel.metric not in drawn]
    has_reward = "reward/mean" in metrics
    # Without a reward the loss itself is what is optimized.
    first = [panel for panel in panels if panel.is_objective or (panel.metric == "actor/loss" and not has_reward)]
    objectives = [asdict(replace(panel, is_objective=True)) for panel in first]
    return [*objectives, *(asdict(panel) for panel in panels if panel not in first)]
