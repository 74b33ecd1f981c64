"""Exported directories load in vLLM as they are, and generate what ``transformers`` generates of the first weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.layout.parallel_layout import ParallelLayout
from tests.support.conversions import convert

transformers = pytest.importorskip("transformers")
from tests.support.hf_models import write_model, write_tokenizer  # noqa: E402

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
IS_THERE = (ROOT / ".venv-vllm/.installed").is_file()
# The CPU attention of vLLM knows no smaller heads.
SHAPE: dict[str, Any] = dict(hidden_size=128, intermediate_size=96, head_dim=32)
MODELS = {
    "Llama": SHAPE,
    "Qwen2": {**SHAPE, "tie_word_embeddings": True},
    "Qwen3": {**SHAPE, "hidden_size": 96},
}
NUM_TOKENS = 16
PROMPTS = [[3, 4, 5, 6], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
NEAR_TIE = 1e-3
"""Logits closer than this may be the other way round in another order of summation."""


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The likeliest tokens one after the other, up to where two are as good as equal."""
    tokens = torch.tensor(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            best = model(tokens[None]).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < NEAR_TIE:
            break
        tokens = torch.cat([tokens, best.indices[:1]])
    return tokens[len(prompt) :].tolist()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not IS_THERE, reason="needs vLLM in .venv-vllm: ./tests/support/vllm.sh, or run.sh --all")
@pytest.mark.parametrize("family", MODELS)
def test_vllm_generates_from_an_export(tmp_path, family):
    model = write_model(tmp_path / "first", family, seed=4, **MODELS[family])
    write_tokenizer(tmp_path / "first")
    convert(tmp_path / "first", "megatron", tmp_path / "ours", layout=ParallelLayout(tp=2, pp=2))
    convert(tmp_path / "ours", "hf", tmp_path / "export", max_shard_bytes=100_000)
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 2
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, ROOT / "tests/e2e/vllm_generate.py", tmp_path / "export", str(NUM_TOKENS), json.dumps(PROMPTS)]
    done = subprocess.run(
        command,
        env={**environ, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert sum(map(len, expected)) >= NUM_TOKENS, "too many near ties to tell anything"
    for tokens, right in zip(found["tokens"], expected, strict=True):
        assert len(tokens) == NUM_TOKENS and tokens[: len(right)] == right
    assert any(found["texts"]), "the tokenizer travelled along"
