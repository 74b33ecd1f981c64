"""Replayed CUDA graphs decode what the same steps do one by one, also after the weights have changed."""

from __future__ import annotations

from typing import Any

from gpu_checks.common import build, fill, make_world, result, run, shape


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Generate with graphs and without, twice: the weights change in between, and penalties come with the last."""
    import torch

    from hybridflow.rollout.engine import MegatronEngine
    from hybridflow.rollout.request import Request, SamplingParams

    world, model = make_world(), shape("0.5b", is_dry, context=512)
    built, _, groups = build(world, model)
    fill(built)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (5 + 11 * index,), generator=generator) for index in range(20)]
    engines = [MegatronEngine(built, groups, vocab_size=model.vocab_size, seed=1, max_concurrent=16) for _ in range(2)]
    decoder = getattr(engines[1].runner, "_decoder", None)
    if decoder is not None:
        # Without graphs it does the same steps.
        decoder._is_cuda = False
    wrong, gap = 0, 0.0
    for turn in range(2):
        if turn:
            fill(built, seed=1)
            for engine in engines:
                engine.weights_changed()
        requests = [
            Request(
                prompt=prompt,
                params=SamplingParams(max_new_tokens=16 + 5 * index, presence_penalty=float(turn and index > 15)),
                prompt_index=index,
            )
            for index, prompt in enumerate(prompts)
        ]
        for ours, theirs in zip(*(engine.generate(requests) for engine in engines), strict=True):
            wrong += ours.tokens.tolist() != theirs.tokens.tolist()
            if len(ours.tokens) == len(theirs.tokens):
                gap = max(gap, float((ours.log_probs - theirs.log_probs).abs().max()))
    num_graphs = len(getattr(getattr(engines[0].runner, "_decoder", None), "_graphs", ()))
    bounds: dict[str, tuple[float, str, float]] = {"other texts": (wrong, "<=", 0), "difference": (gap, "<=", 1e-4)}
    if world.device.type == "cuda":
        bounds["graphs"] = (num_graphs, ">=", 2)
    text = f"{2 * len(prompts)} texts with {num_graphs} graphs: {wrong} differ from those of single steps"
    return result(text, bounds, {"wrong": wrong, "log_prob_gap": gap, "num_graphs": num_graphs})


if __name__ == "__main__":
    run(main)
