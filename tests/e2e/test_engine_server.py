"""Runs whose responses come from a server on loopback, a made-up one that speaks as vLLM's does."""

from __future__ import annotations

import json
import os
import random

import pytest

from tests.e2e.commands import fork_ranks, write_recipe
from tests.unit.rollout.test_http_engine import ok

SECRET = "s3cr3t-t0ken"
SAMPLED = "rollout={max_new_tokens: 4, group_size: 2, engine: {kind: openai, auth_env: ENGINE_TOKEN, retries: 0}}"


def sampled(asked, number):
    """Tokens that every tokenizer here has, at probabilities that no model gives them."""
    drawn = random.Random(f"{asked['prompt']}:{asked['seed']}")
    tokens = [drawn.randrange(4, 12) for _ in range(asked["max_tokens"])]
    return ok(asked, tokens=tokens, logprobs={"token_logprobs": [-drawn.random() * 5 for _ in tokens]})


def train(folder, url, *overrides):
    def hook(rank):
        os.environ["ENGINE_TOKEN"] = SECRET

    write_recipe(folder)
    argv = ["train", "tiny.yaml", "warm_start=null", SAMPLED, f"rollout.engine.urls=['{url}']", *overrides]
    return fork_ranks(argv, folder, hook=hook)


@pytest.mark.slow
def test_training_and_validation_on_what_a_server_samples(tmp_path, serve):
    server = serve(sampled)
    done = train(tmp_path, server.url, "rollout.engine.off_policy=true")
    assert done.codes == (0, 0), done.err
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert 1 < step["rollout/logprob_abs_diff"] < step["rollout/logprob_abs_diff_max"] < 5
        assert 0 < step["correction/bounded_share"] < 1 and 0 < step["correction/effective_share"] < 1
    # Two steps of 8, and 8 held-out problems before and after.
    assert len(steps) == 2 and len(server.asked) == 2 * 8 + 2 * 8
    assert sum(asked["temperature"] == 0 for asked in server.asked) == 16
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for headers in server.headers)
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path

    alone = tmp_path / "alone"
    alone.mkdir()
    done = train(alone, server.url, "trainer.steps=0")
    assert done.codes == (0, 0) and "held-out " in done.out, done.err


@pytest.mark.slow
def test_a_sample_that_fails_ends_the_step_with_the_reason(tmp_path, serve):
    broken = (500, {}, b"no " + SECRET.encode())
    server = serve(lambda asked, number: sampled(asked, number) if asked["temperature"] == 0 or number % 5 else broken)
    done = train(tmp_path, server.url, "rollout.engine.off_policy=true")
    assert 0 not in done.codes
    assert "given up after 1 tries" in done.err and "answered 500: no ***" in done.err
    assert SECRET not in done.out + done.err
