"""How fast a shape decodes, beside what the bandwidth allows and beside transformers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from gpu_checks.common import build, copy_rate, fill, find_device, make_world, result, run, seconds_of, shape

_PROMPT = 128
_LENGTHS = {"ours": (32, 160), "transformers": (16, 48)}
"""Response tokens of two runs; their difference in time is that of decoding alone. Short texts suit transformers."""

_REPEATS = {"ours": 5, "transformers": 2}
"""Of each run, the fastest of which counts: where the GPU has little to do, the host's speed is that of the step."""

_TIMES_TRANSFORMERS = 2.0
"""On an H100, transformers takes 4 to 7 times what the bandwidth allows at 7B and batch 64, by the host's speed."""


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Measure a size, a key of ``SHAPES``, at two batches."""
    import torch

    prompt, lengths = (8, dict.fromkeys(_LENGTHS, (8, 104))) if is_dry else (_PROMPT, _LENGTHS)
    batches = (2, 4) if is_dry else (64, 256)
    model = shape(argument, is_dry, context=512)
    # Half of what is read and written together.
    rate = copy_rate(is_dry)
    step_s: dict[str, dict[int, float]] = {"ours": {}, "transformers": {}}
    for name, load in (("ours", _load_ours), ("transformers", _load_transformers)):
        generate = load(model, max(batches), prompt)
        for batch in batches:
            step_s[name][batch] = _step_s(generate, batch, lengths[name], 2 if is_dry else _REPEATS[name])
            print(f"{name}, batch {batch}: {1e3 * step_s[name][batch]:.2f} ms a step", file=sys.stderr, flush=True)
        del generate
        gc.collect()
        torch.cuda.empty_cache()
    figures, texts, bounds = [], [], {}
    for batch in batches:
        limit_s = _step_bytes(model, batch, prompt + sum(lengths["ours"]) // 2) / rate
        ours_s, theirs_s = step_s["ours"][batch], step_s["transformers"][batch]
        share, ratio = limit_s / ours_s, theirs_s / ours_s
        figures.append({"batch": batch, "ours_s": ours_s, "transformers_s": theirs_s, "limit_s": limit_s})
        texts.append(
            f"batch {batch}: {batch / ours_s:,.0f} tokens/s, bandwidth bound over time per token {share:.2f}, "
            f"{ratio:.1f} times transformers"
        )
        if argument == "7b" and batch == 64:
            bounds = {"bound over time": (share, ">=", 0.5), "times transformers": (ratio, ">=", _TIMES_TRANSFORMERS)}
    return result("; ".join(texts), bounds, {"copy_bytes_per_s": rate, "batches": figures})


def _step_s(generate: Callable[[int, int], None], batch: int, lengths: tuple[int, int], repeats: int) -> float:
    """Return the seconds of a step of decoding."""
    short_s, long_s = (seconds_of(lambda length=length: generate(batch, length), repeats) for length in lengths)
    return (long_s - short_s) / (lengths[1] - lengths[0])


def _step_bytes(model: Any, batch: int, context: int) -> float:
    """Return what a step reads at least, and writes of states of linear attention.

    It reads all weights but an input embedding, of experts those that some token chooses, keys, values and states.
    """
    from hybridflow.layout.parallel_layout import ParallelLayout
    from hybridflow.models.shapes import cached_token_bytes, model_spec, state_bytes

    found = 0.0
    for tensor in model_spec(model).tensors:
        if model.tied_embeddings or not tensor.name.startswith("embedding."):
            found += tensor.num_bytes * (1.0 if tensor.expert is None else _share_read(model, batch))
    layout = ParallelLayout()
    of_token = cached_token_bytes(model, layout) / (model.num_layers - len(model.linear_layers))
    for layer in set(range(model.num_layers)) - set(model.linear_layers):
        found += batch * of_token * (min(context, model.window) if model.has_window(layer) else context)
    return found + batch * 2 * state_bytes(model, layout)


def _share_read(model: Any, batch: int) -> float:
    """Return the share of a layer's experts that some token chooses, on average, if all are as likely."""
    return float(1 - (1 - model.experts_per_token / model.num_experts) ** batch)


def _prompts(model: Any, batch: int, prompt: int) -> Any:
    import torch

    return torch.randint(0, model.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(batch))


def _load_ours(model: Any, most: int, prompt: int) -> Callable[[int, int], None]:
    from hybridflow.rollout.engine import MegatronEngine
    from hybridflow.rollout.request import Request, SamplingParams

    built, _, groups = build(make_world(), model)
    fill(built)
    engine = MegatronEngine(built, groups, vocab_size=model.vocab_size, seed=1, max_concurrent=most)

    def generate(batch: int, length: int) -> None:
        params = SamplingParams(max_new_tokens=length)
        prompts = enumerate(_prompts(model, batch, prompt))
        engine.generate([Request(prompt=each, params=params, prompt_index=index) for index, each in prompts])

    return generate


def _load_transformers(model: Any, most: int, prompt: int) -> Callable[[int, int], None]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridflow.families.config_json import describe, update_config

    dtype = "float32" if model.dtype == "fp32" else "bfloat16"
    values = update_config(None, describe(model, family=None, has_value_head=False), dtype=dtype)
    config = AutoConfig.for_model(**{**values, "pad_token_id": 0, "eos_token_id": None})
    with find_device():
        built = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    def generate(batch: int, length: int) -> None:
        tokens = _prompts(model, batch, prompt).to(find_device())
        with torch.inference_mode():
            found = built.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, max_new_tokens=length
            )
        assert found.shape[1] == prompt + length, f"transformers made {found.shape[1] - prompt} of {length} tokens"

    return generate


if __name__ == "__main__":
    run(main)
