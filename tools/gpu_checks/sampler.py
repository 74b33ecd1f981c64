"""The sampler chooses the same tokens on the GPU as on the CPU, also as captured steps use it."""

from __future__ import annotations

from typing import Any

from gpu_checks.common import find_device, make_world, result, run, runs_kernels

_SPECIAL = (
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": ((1, 4.0), (7, -2.0)), "bad_ids": ((2,), (3, 4)), "presence_penalty": 0.5},
)
_PLACE = 40
"""Of the sampled token in its sequence."""


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Sample for 10,000 rows, every eighth of which is cut or edited."""
    import numpy as np
    import torch

    from hybridflow.rollout.request import SamplingParams
    from hybridflow.rollout.sampling import Sampler, sequence_key

    num_rows, chunk, vocab = (200, 100, 1003) if is_dry else (10_000, 1000, 32_003)
    world, device = make_world(), find_device()
    world.make_groups([(0,)])
    group, generator = world.group((0,)), torch.Generator().manual_seed(0)
    wrong = {"sampler": 0, "captured": 0}
    gap, has_kernels = 0.0, runs_kernels()
    for first in range(0, num_rows, chunk):
        logits = 3 * torch.randn(chunk, vocab, generator=generator)
        known = torch.randint(0, vocab, (chunk, 64), generator=generator).numpy().astype(np.int32)
        keys = [sequence_key(1, "rollout", first + row, 0) for row in range(chunk)]
        params = [
            SamplingParams(max_new_tokens=1, temperature=0.5 + row % 7 / 5, greedy=row % 8 == 1)
            if row % 8
            else SamplingParams(max_new_tokens=1, **_SPECIAL[row // 8 % len(_SPECIAL)])
            for row in range(chunk)
        ]
        found = []
        for where in (torch.device("cpu"), device):
            sampler = Sampler(chunk, group, vocab, where)
            for row in range(chunk):
                sampler.seat(row, params[row], keys[row], num_prompt=8)
            places = torch.full((chunk,), _PLACE)
            found.append(sampler.sample(logits.to(where), torch.arange(chunk), places, known))
        wrong["sampler"] += int((found[0].tokens != found[1].tokens.cpu()).sum())
        gap = max(gap, float((found[0].log_probs - found[1].log_probs.cpu()).abs().max()))
        if has_kernels:
            wrong["captured"] += int((found[0].tokens != _choose(logits.to(device), sampler, known, group)).sum())
    # Two candidates may be within rounding of a tie.
    bounds = {f"other tokens by {name}": (number, "<=", num_rows // 5000) for name, number in wrong.items()}
    bounds["difference of log-probabilities"] = (gap, "<=", 1e-4)
    text = f"{num_rows} rows of {vocab} logits: {wrong['sampler']} other tokens"
    text += f", {wrong['captured']} in captured steps" if has_kernels else "; captured steps need Triton, not run"
    return result(text, bounds, {**wrong, "log_prob_gap": gap})


def _choose(logits: Any, sampler: Any, known: Any, group: Any) -> Any:
    """Return the tokens that a captured step chooses for all slots of a sampler."""
    import numpy as np
    import torch

    from hybridflow.models.log_probs import Columns
    from hybridflow.rollout.gpu.choose import choose
    from hybridflow.rollout.gpu.edits import GpuEdits

    (rows, vocab), device = logits.shape, logits.device
    arrays = {**sampler.arrays(np.arange(rows)), "tokens": known, "lengths": np.full(rows, _PLACE)}
    given = {name: torch.from_numpy(each).to(device) for name, each in arrays.items()}

    def pair(*shape: int, dtype: Any) -> tuple[Any, Any]:
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype)

    edits = GpuEdits(rows, vocab, Columns(vocab, group, vocab), known.shape[1], pair)
    edits.widen(*arrays["rules"].shape[1:])
    edits.fill(np.arange(rows), given["lengths"], given["num_prompt"], arrays)
    no_stops = torch.full((rows, 1), -1, dtype=torch.int32, device=device)
    edited = edits.apply(logits, given["lengths"], torch.zeros_like(given["lengths"]), no_stops, 0.0)
    noise = (given[name] for name in ("keys", "lengths", "temperatures", "greedy"))
    cuts = given["top_k"], given["top_p"], given["min_p"]
    return choose(logits, *noise, group, vocab, 0.0, cuts, edited)[0].cpu()


if __name__ == "__main__":
    run(main)
