"""Prompts with images through the engine's kernels: texts are those of the training model's modules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.data.images import FIRST_ID
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.rollout import session
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.gpu.runner import GpuRunner
from hybridflow.rollout.request import Request, SamplingParams
from tests.multi.test_images import VOCAB, Drawn, build, our_tokens, reader_of
from tests.support.hf_models import WITH_VISION, write_vision_model

# The last two have a prompt in common, whose first block of the cache they share; behind it is one token, an image's.
SAME = [5, 4, 7] * 4 + [6], 3
PROMPTS = (([5, 6], 0, [7, 8]), ([11, 12, 13],), ([9], 1, [14], 3, [10]), SAME, SAME)
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)


@pytest.fixture(scope="module")
def world():
    made = World(rank=0, size=1, ranks_per_node=1, device=torch.device("cpu"), deadline_s=60.0, store=dist.HashStore())
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3VL",
        pytest.param("Qwen2_5_VL", marks=pytest.mark.long),
        pytest.param("Qwen3_5", marks=pytest.mark.long),
        pytest.param("Qwen3VLMoe", marks=pytest.mark.long),
    ],
)
def test_texts_behind_images_are_those_of_the_cpu_engine(world, tmp_path, monkeypatch, name):
    """Three at a time, beside prompts of text, long prompts in parts; decoding asks nothing of the host."""
    text, vision, whole = WITH_VISION[name]
    # Images of several rows and columns, behind which text turns less.
    monkeypatch.setitem(WITH_VISION, name, (text, {**vision, "patch_size": 4}, whole))
    write_vision_model(tmp_path, name, max_position_embeddings=128)
    model, groups = build(world, tmp_path, ParallelLayout())
    model.read_images(reader_of(tmp_path))
    prompts = [torch.tensor(our_tokens(prompt, Drawn(tmp_path))) for prompt in PROMPTS]
    monkeypatch.setattr(session, "STEP_TOKENS", max(map(len, prompts)) // 2)
    assert len(prompts[-1]) == BLOCK_TOKENS + 1 and prompts[-1][-1] >= FIRST_ID
    requests = [
        Request(
            prompt=prompt,
            params=GREEDY if number % 2 else replace(GREEDY, greedy=False, top_k=9, max_new_tokens=9),
            prompt_index=min(number, 3),
            index=int(number > 3),
        )
        for number, prompt in enumerate(prompts)
    ]
    decoded: list[np.ndarray] = []
    steps: list[tuple[bool, bool]] = []
    found = []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=3)
        if is_gpu:
            engine.runner = GpuRunner(model, groups, VOCAB, max_rows=3, max_steps=16)
            decode, run = engine.runner.decode, engine.run

            def noted_decode(cache, tables, chosen, *more, decode=decode, **arrays):
                decoded.append(arrays["shifts"][chosen])
                return decode(cache, tables, chosen, *more, **arrays)

            def noted_run(tokens, attention, wanted, run=run):
                steps.append((len(tokens) == len(wanted), bool((tokens >= FIRST_ID).any())))
                return run(tokens, attention, wanted)

            monkeypatch.setattr(engine.runner, "decode", noted_decode)
            monkeypatch.setattr(engine, "run", noted_run)
        found.append(engine.generate(requests))
    for theirs, ours in zip(*found, strict=True):
        assert ours.finish == "length" and ours.tokens.tolist() == theirs.tokens.tolist(), (theirs, ours)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=0)
    assert any((shifts < 0).any() and (shifts == 0).any() for shifts in decoded), decoded
    # A token of each through the host: only where the last of a prompt is an image's, and the others are known.
    assert {has_image for is_one_each, has_image in steps if is_one_each} == {True}, steps
