"""Exported directories load in vLLM as they are, and generate what ``transformers`` generates of the first weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridflow.checkpoint.formats.registry import Options
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.support.conversions import write_as
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.plain_models import greedy
from tests.support.vllm_environment import NEEDED, PYTHON, ROOT, printed_by

pytestmark = NEEDED
# The CPU attention of vLLM knows no smaller heads.
SHAPE: dict[str, Any] = dict(hidden_size=128, intermediate_size=96, head_dim=32)
MODELS = {
    "Llama": SHAPE,
    "Qwen2": {**SHAPE, "tie_word_embeddings": True},
    "Qwen3": {**SHAPE, "hidden_size": 96},
}
NUM_TOKENS = 16
PROMPTS = [[3, 4, 5, 6], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28]]


@pytest.mark.parametrize("family", MODELS)
def test_vllm_generates_from_an_export(tmp_path, family):
    model = write_model(tmp_path / "first", family, seed=4, **MODELS[family])
    write_tokenizer(tmp_path / "first")
    write_as("megatron", tmp_path / "first", tmp_path / "ours", Options(layout=ParallelLayout(tp=2, pp=2)))
    write_as("hf", tmp_path / "ours", tmp_path / "export", Options(max_shard_bytes=100_000))
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 2
    command = [PYTHON, ROOT / "tests/e2e/vllm_generate.py", tmp_path / "export", str(NUM_TOKENS), json.dumps(PROMPTS)]
    found = json.loads(printed_by(command, folder=tmp_path).splitlines()[-1])
    expected = [greedy(lambda ids: model(ids).logits, prompt, NUM_TOKENS, None)[0] for prompt in PROMPTS]
    assert sum(map(len, expected)) >= NUM_TOKENS, "too many near ties to tell anything"
    for tokens, right in zip(found["tokens"], expected, strict=True):
        assert len(tokens) == NUM_TOKENS and tokens[: len(right)] == right
    assert any(found["texts"]), "the tokenizer travelled along"
