#!/usr/bin/env python3
"""Print published RL steps on H100 beside what `hybridflow plan estimate` says of them, phase by phase.

The first six are those that figures of the hardware were fitted to; the others were held back.

Examples:
  python tools/table_steps.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hybridflow.config.types import Recompute
from hybridflow.layout.parallel_layout import ParallelLayout as Layout
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.rl_step import (
    Texts,
    Work,
    generation_seconds,
    scoring_seconds,
    spread_lengths,
    update_seconds,
)
from hybridflow.mapping.sizes import model_size

BLOG, V05, V06 = "v0.3 blog", "v0.5", "v0.6"
"""NeMo-RL: nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3, and the page "Performance" of its documentation."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A GRPO step that was published: two passes for log-probabilities, of the policy and of the reference.

    Attributes:
        source: Where.
        model: Its name.
        update: Layout that learns.
        rollout: Layout that generates.
        prompt: Tokens of a prompt: tokens a second times seconds over samples, less the tokens of a response.
        response: Tokens of a response, on average.
        longest: Tokens of prompt and response, and of a micro-batch that is learned from.
        seconds: Of the whole step.
        phases: Of generation, of log-probabilities and of the updates, where they were published.
        samples: Responses of a step.
        recompute: What the backward pass computes anew, by the recipe.
        scored_tokens: Of a micro-batch for log-probabilities.
        is_fitted: Whether figures were fitted to it.
        is_ahead: Whether responses are made on GPUs of their own while others are learned from.
    """

    source: str
    model: str
    update: Layout
    rollout: Layout
    prompt: int
    response: int
    longest: int = 4096
    seconds: float
    phases: tuple[float, float, float] | None = None
    samples: int = 2048
    recompute: Recompute = "none"
    scored_tokens: int = 16384
    is_fitted: bool = False
    is_ahead: bool = False

    @property
    def gpus(self) -> int:
        """Return how many GPUs it was on."""
        return self.update.world_size + self.is_ahead * self.rollout.world_size


_BIG_STAGES = (11, *[12] * 6, 11)
_HUGE_STAGES = (3, *[4] * 14, 2)
_LLAMA = {"model": "llama3-8b", "prompt": 127, "recompute": "full", "scored_tokens": 8192}
_DENSE = {"model": "qwen3-32b", "prompt": 104}
_MIXTURE = {"model": "qwen3-30b-a3b", "prompt": 102}
_BIG = {
    **{"model": "qwen3-235b-a22b", "prompt": 129, "longest": 8192, "samples": 512, "recompute": "full"},
    "scored_tokens": 8192,
}
_HUGE = {
    **{"model": "deepseek-v3", "prompt": 107, "longest": 1536, "samples": 512, "recompute": "full"},
    **{"scored_tokens": 1536, "update": Layout(pp=16, dp=16, ep=16, etp=1, layers=_HUGE_STAGES)},
    "rollout": Layout(tp=32, dp=8),
}

STEPS = (
    Published(
        **{"source": BLOG, "model": "llama3-8b", "update": Layout(dp=8), "rollout": Layout(dp=8), "prompt": 110},
        **{"response": 795, "seconds": 112, "phases": (58, 18, 28), "is_fitted": True},
    ),
    Published(
        **{"source": BLOG, "model": "llama3-70b", "update": Layout(tp=4, pp=4, dp=4), "rollout": Layout(tp=4, dp=16)},
        **{"prompt": 110, "response": 398, "seconds": 147, "phases": (84, 18, 28), "is_fitted": True},
    ),
    Published(
        **{"source": BLOG, **_DENSE, "update": Layout(tp=4, pp=2, dp=8), "rollout": Layout(tp=4, dp=16)},
        **{"response": 3283, "seconds": 213, "phases": (96, 40, 68), "is_fitted": True},
    ),
    Published(
        **{"source": BLOG, **_MIXTURE, "update": Layout(tp=2, dp=32, ep=8, etp=1), "rollout": Layout(tp=4, dp=16)},
        **{"response": 3251, "seconds": 167, "phases": (78, 23, 50), "is_fitted": True},
    ),
    Published(
        **{"source": V05, **_MIXTURE, "update": Layout(dp=32, ep=8, etp=1), "rollout": Layout(tp=2, dp=16)},
        **{"response": 3196, "seconds": 198, "is_fitted": True},
    ),
    Published(
        **{"source": V05, **_LLAMA, "update": Layout(pp=2, dp=8), "rollout": Layout(dp=16), "response": 1019},
        **{"seconds": 92.8, "is_fitted": True},
    ),
    Published(
        **{"source": V05, **_DENSE, "update": Layout(tp=4, pp=4, dp=2), "rollout": Layout(tp=4, dp=8)},
        **{"response": 3251, "seconds": 376},
    ),
    Published(
        **{"source": V05, **_BIG, "update": Layout(tp=2, cp=2, pp=8, dp=4, ep=16, etp=1, layers=_BIG_STAGES)},
        **{"rollout": Layout(tp=16, dp=8), "response": 5700, "seconds": 431},
    ),
    Published(
        **{"source": V06, **_BIG, "update": Layout(tp=2, cp=2, pp=8, dp=8, ep=16, etp=1, layers=_BIG_STAGES)},
        **{"rollout": Layout(tp=16, dp=16), "response": 5713, "seconds": 312},
    ),
    Published(**{"source": V05, **_HUGE, "response": 744, "seconds": 134}),
    Published(
        **{"source": V05, **_LLAMA, "update": Layout(dp=8), "rollout": Layout(dp=8), "response": 1123},
        **{"seconds": 64.8, "is_ahead": True},
    ),
    Published(
        **{"source": V05, **_DENSE, "update": Layout(tp=4, pp=4, dp=2), "rollout": Layout(tp=4, dp=8)},
        **{"response": 3252, "seconds": 200, "is_ahead": True},
    ),
    Published(
        **{"source": V05, **_MIXTURE, "update": Layout(pp=2, dp=8, ep=8, etp=1), "rollout": Layout(tp=2, dp=8)},
        **{"response": 3201, "seconds": 154, "is_ahead": True},
    ),
    Published(
        **{"source": V05, **_BIG, "update": Layout(tp=4, pp=8, dp=4, ep=16, etp=1, layers=_BIG_STAGES)},
        **{"rollout": Layout(tp=8, dp=16), "response": 5707, "seconds": 203, "is_ahead": True},
    ),
    Published(**{"source": V05, **_HUGE, "response": 738, "seconds": 64.9, "is_ahead": True}),
)
"""512 samples make an update, and a replica generates up to 256 samples at a time, as vLLM does."""


def estimated_phases(one: Published) -> tuple[float, float, float]:
    """Return the estimated seconds of generation, of log-probabilities and of the updates."""
    size, machine = model_size(one.model), hardware("h100-sxm")
    texts = Texts(prompt=one.prompt, responses=spread_lengths(one.samples, one.response, one.longest - one.prompt))
    generated = generation_seconds(
        *(size, machine, one.rollout, texts), num_replicas=one.rollout.dp, group_size=32, concurrent=256
    )
    scoring = Work(layout=one.update, micro_batch_tokens=one.scored_tokens)
    learning = Work(layout=one.update, micro_batch_tokens=one.longest, recompute=one.recompute)
    updates = one.samples // 512
    return (
        generated,
        2 * scoring_seconds(size, machine, scoring, texts, one.samples),
        updates * update_seconds(size, machine, learning, texts, 512),
    )


def estimated_seconds(one: Published) -> float:
    """Return the estimated seconds of a step."""
    generated, *others = estimated_phases(one)
    return max(generated, sum(others)) if one.is_ahead else generated + sum(others)


def difference(one: Published) -> float:
    """Return by which share the estimate is longer than what was published."""
    return estimated_seconds(one) / one.seconds - 1


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| step | GPUs | generation | log-probabilities | updates | step published | estimated | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for one in STEPS:
        phases = [f"{value:.0f} s" for value in estimated_phases(one)]
        if one.phases is not None:
            phases = [f"{value:.0f} s, {mine}" for value, mine in zip(one.phases, phases, strict=True)]
        name = f"{one.model}, {'asynchronous, ' * one.is_ahead}{one.source}{', fitted' * one.is_fitted}"
        cells = (name, str(one.gpus), *phases, f"{one.seconds:g} s", f"{estimated_seconds(one):.0f} s")
        print(f"| {' | '.join(cells)} | {difference(one):+.0%} |")
    for words, is_fitted in (("fitted", True), ("held back", False)):
        found = [abs(difference(one)) for one in STEPS if one.is_fitted == is_fitted]
        print(f"{words}: mean difference {sum(found) / len(found):.0%}, largest {max(found):.0%}")


if __name__ == "__main__":
    main()
