"""Adapters: in captured steps with stop texts, and in jobs of a mixture of experts in two layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_checks.common import (
    RECIPE,
    build,
    compare_jobs,
    fill,
    find_device,
    make_world,
    result,
    run,
    shape,
    tell,
    train,
)

_STOP = ("q", "z")
_OFF = "log-probabilities of rollout and training"


class Letters:
    """A letter for each token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens."""
        return "".join(chr(ord("a") + index % 26) for index in ids)

    def pieces(self) -> dict[int, str]:
        """Return no names: a token's text is asked for where it is needed."""
        return {}

    def special_id(self, name: str) -> None:
        """Return the token of a name; there is none."""


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Draw a dropout mask, generate with and without graphs, and train a mixture in two ways."""
    wrong_mask = _wrong_in_mask(512 if is_dry else 4096, 3000)
    wrong, num_stopped, num_graphs, is_cuda = _generate(is_dry)
    bounds: dict[str, tuple[float, str, float]] = {
        "other elements of a mask": (wrong_mask, "<=", 0),
        "wrong texts": (wrong, "<=", 0),
        "texts that a stop text ended": (num_stopped, ">=", 2),
    }
    if is_cuda:
        bounds["graphs"] = (num_graphs, ">=", 2)
    text = f"40 texts with {num_graphs} graphs, of which a stop text ended {num_stopped}: {wrong} are wrong"
    # What is known if time runs out.
    tell(result(text, bounds, _figures(bounds)))
    bounds |= _compare_jobs()
    text += (
        f"; losses of a mixture in two layouts differ by {bounds['difference of losses'][0]:.2g}, log-probabilities "
        f"of rollout and training by {bounds[_OFF][0]:.2g}"
    )
    return result(text, bounds, _figures(bounds))


def _figures(bounds: Mapping[str, tuple[float, str, float]]) -> dict[str, float]:
    return {name: figure for name, (figure, *_) in bounds.items()}


def _compare_jobs() -> dict[str, tuple[float, str, float]]:
    """Train a mixture alone and in two layouts; return how far the jobs are apart."""
    recipe = {
        **RECIPE,
        "model": {**RECIPE["model"], "num_experts": 4, "experts_per_token": 2},
        "rollout": {**RECIPE["rollout"], "stop": ["1"]},
    }
    adapters = "actor.lora={rank: 4, alpha: 8, targets: [q_proj, k_proj, v_proj, o_proj]}", "actor.optimizer.lr=0.01"
    alone = train("alone", *adapters, recipe=recipe)
    layouts = "actor.update={tp: 2}", "actor.rollout={dp: 2}"
    other = train("other", *adapters, *layouts, "actor.recompute=full", recipe=recipe, ranks=2)
    off = max(row["rollout/logprob_abs_diff"] for row in (*alone, *other))
    return {_OFF: (off, "<=", 1e-3), **compare_jobs(other, alone)}


def _wrong_in_mask(tokens: int, width: int) -> int:
    """Return how many elements are dropped on this device and not on a CPU, or the other way round."""
    import torch

    from hybridflow.models.attention import PackedAttention
    from hybridflow.models.lora import Dropout

    found = []
    for device in (torch.device("cpu"), find_device()):
        dropout = Dropout(0.1, seed=3)
        numbers = torch.arange(tokens, device=device) * 7 % 101
        dropout.begin(numbers, PackedAttention([tokens // 2] * 2, device))
        found.append(dropout(torch.ones(tokens, 1, width, device=device), "layer", 5).cpu() > 0)
    return int((found[0] != found[1]).sum())


def _generate(is_dry: bool) -> tuple[int, int, int, bool]:
    """Generate twice, with graphs and without; adapters change in between.

    Return wrong texts, texts that a stop text ended, and graphs; and whether this is a GPU.
    """
    import torch

    from hybridflow.config.roles import LoRAConfig
    from hybridflow.rollout.engine import MegatronEngine
    from hybridflow.rollout.request import Request, SamplingParams

    world, model = make_world(), shape("0.5b", is_dry, context=512)
    built, _, groups = build(world, model, lora=LoRAConfig(rank=16, alpha=32.0))
    fill(built)
    generator = torch.Generator().manual_seed(0)
    requests = [
        Request(
            prompt=torch.randint(0, model.vocab_size, (5 + 11 * index,), generator=generator),
            # Behind the last stop text several steps are taken at a time.
            params=SamplingParams(max_new_tokens=16 + 5 * index, stop=_STOP if index % 2 == 0 else ()),
            prompt_index=index,
        )
        for index in range(20)
    ]
    engines = [
        MegatronEngine(
            built,
            groups,
            vocab_size=model.vocab_size,
            seed=1,
            max_concurrent=16,
            tokenizer=Letters(),  # type: ignore[arg-type]
        )
        for _ in range(2)
    ]
    decoder = getattr(engines[1].runner, "_decoder", None)
    if decoder is not None:
        # Without graphs it does the same steps.
        decoder._is_cuda = False
    wrong, num_stopped, texts = 0, 0, []
    for turn in range(2):
        if turn:
            with torch.no_grad():
                for parameter in built.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(-3.0)
            for engine in engines:
                engine.weights_changed()
        answers = [engine.generate(requests) for engine in engines]
        texts.append([each.tokens.tolist() for each in answers[0]])
        for request, ours, theirs in zip(requests, *answers, strict=True):
            text = Letters().decode(ours.tokens.tolist())
            places = [text.find(each) for each in request.params.stop if each in text]
            is_right = [len(text) - 1] == places if ours.finish == "stop" else not places
            wrong += ours.tokens.tolist() != theirs.tokens.tolist() or not is_right
            num_stopped += ours.finish == "stop"
    # As many again as if the adapters added nothing.
    wrong += len(requests) * (texts[0] == texts[1])
    num_graphs = len(getattr(getattr(engines[0].runner, "_decoder", None), "_graphs", ()))
    return wrong, num_stopped, num_graphs, world.device.type == "cuda"


if __name__ == "__main__":
    run(main)
