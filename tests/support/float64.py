"""A model of ``transformers`` in float64 throughout, to tell which of two fp32 computations is off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    """Put float64 wherever the code of a model asks for fp32: in its norms, rotary tables, routers and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*wide, **named)


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def exact_log_probs(folder: Path, sequences: list[Tensor]) -> list[Tensor]:
    """Log-probability of each token but the first of some sequences, in float64, by a model's directory."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    # The default for experts, grouped_mm, has no float64.
    plain.set_experts_implementation("eager")
    with _in_float64():
        model = type(plain)(plain.config).eval()
        model.load_state_dict(plain.state_dict())
        held = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
        assert held == {torch.float64}
        logits = [model(sequence[None]).logits[0, :-1] for sequence in sequences]
        assert all(each.dtype == torch.float64 for each in logits)
        return [
            each.log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
            for each, sequence in zip(logits, sequences, strict=True)
        ]
