"""What the arguments of ``hybridflow generate`` stand for, and what tells one run of it from another. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hybridflow.families.assets import identity_of
from hybridflow.serving.options import Options, read_options
from hybridflow.serving.results import FORMAT

SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "greedy", "stop", "bad"),
)
"""Arguments that are sampling parameters."""


def sampling_of(arguments: argparse.Namespace) -> Options:
    """Return the sampling parameters of all prompts that name no others.

    Raises:
        DataError: A value is not allowed.
    """
    given = {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    options = read_options(given, "command line")
    return {**options, "with_prompt_log_probs": arguments.prompt_log_probs}


def identity(arguments: argparse.Namespace, prompts_sha256: str, dtype: str, max_context: int) -> dict[str, Any]:
    """Return as JSON what two starts must have in common for the second to continue the first.

    It leaves out the layout and the number of ranks.
    """
    model = Path(arguments.model)
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    return {
        "format": FORMAT,
        "model": [str(model.resolve()), identity_of(files)],
        "tokenizer": None if arguments.tokenizer is None else str(arguments.tokenizer),
        "prompts": prompts_sha256,
        "sampling": json.loads(json.dumps(sampling_of(arguments))),
        "seed": arguments.seed,
        "dtype": dtype,
        "max_context": max_context,
        "log_probs": arguments.log_probs,
        "chat_template_kwargs": arguments.chat_template_kwargs,
        "images_field": arguments.images_field,
        "image_max_pixels": arguments.image_max_pixels,
    }
