"""Several steps of decoding by one call: to the bit what as many single steps make."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.rollout.cpu.kernels import load_kernels
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.paged import block_bytes
from hybridflow.rollout.request import Request, SamplingParams
from hybridflow.rollout.runner import PlainRunner
from hybridflow.rollout.session import FEW_STEPS
from tests.multi.models import CAPPED, TINY, VOCAB, make_model
from tests.multi.test_rollout_sampling import Bytes

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the compiled kernels, see README")

# With heads that the kernels take.
PLAIN = replace(TINY, num_layers=2, head_dim=16, num_query_groups=4)
GEMMA = replace(CAPPED, head_dim=16)
DAMAGED = 17
LONGEST = 29


KINDS = [{"stop_ids": (2, 5)}, {"greedy": True}, {"temperature": 0.6, "stop_ids": (3,)}, {"temperature": 1.4}]
WATCHED = [{"stop": ("e", " t")}, {"stop_ids": (2, 5)}, {"greedy": True}, {"stop": ("d", "ab"), "min_new_tokens": 3}]


def requests(count: int, kinds) -> list[Request]:
    """Such as the call takes: of several temperatures and lengths, with and without tokens that stop them."""
    generator = torch.Generator().manual_seed(count)
    return [
        Request(
            prompt=torch.randint(0, VOCAB, (1 + number % 19,), generator=generator),
            params=SamplingParams(max_new_tokens=1 + number * 7 % LONGEST, **kinds[number % 4]),
            prompt_index=number // 2,
            index=number % 2,
        )
        for number in range(count)
    ]


def decoded(
    shape,
    count: int,
    threads: int,
    blocks: int | None,
    max_concurrent: int,
    is_damaged: bool = False,
    kinds=KINDS,
    default: torch.dtype = torch.float32,
):
    """Of several numbers of steps at a time: calls, steps, preemptions, and all that is known of each response.

    The first time step by step, as a runner does that cannot decode by itself.

    In this process, since one that was forked has none of the threads that were used before.
    """
    world = World(rank=0, size=1, ranks_per_node=1, device=torch.device("cpu"), deadline_s=60.0, store=dist.HashStore())
    model, _, groups, _ = make_model(world, ParallelLayout(), model=shape)
    if is_damaged:
        model.embedding.word_embeddings.weight.data[DAMAGED] = torch.nan
    budget = 0.5 if blocks is None else blocks * block_bytes(model)
    num_threads, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(threads)
        for most in (None, 16, 3, 1):
            engine = MegatronEngine(
                *(model, groups),
                vocab_size=VOCAB,
                seed=7,
                max_concurrent=max_concurrent,
                cache_memory=budget,
                tokenizer=Bytes(),
            )
            engine.version = 3
            asked, responses, num_calls = requests(count, kinds), {}, 0
            session = engine.open(asked)
            session.add(asked)
            torch.set_default_dtype(default)
            with mock.patch.object(PlainRunner, "can_decode", most is not None):
                while not session.is_idle:
                    num_calls += 1
                    for ask, got in session.step(most or 1):
                        parts = [each.tolist() for each in (got.tokens, got.log_probs, got.sampled_log_probs)]
                        known = *parts, got.versions.tolist(), got.finish, got.error
                        responses[ask.prompt_index, ask.index] = known
            torch.set_default_dtype(torch.float32)
            counts = num_calls, session.num_steps, session.num_preempted, session.num_computed
            found.append((*counts, session.metrics()["prompt_computed"], responses))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(num_threads)
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("shape", "count", "threads", "blocks", "max_concurrent"),
    [
        pytest.param(PLAIN, 5, 1, None, 64, id="one thread"),
        pytest.param(PLAIN, 7, 2, None, 64, id="a team of threads"),
        pytest.param(PLAIN, 90, 2, None, 96, id="threads by themselves"),
        pytest.param(GEMMA, 90, 3, None, 96, id="capped and windowed"),
        pytest.param(PLAIN, 40, 2, 5, 12, id="too few blocks"),
    ],
)
def test_several_steps_by_one_call_are_those_of_single_ones(shape, count, threads, blocks, max_concurrent):
    single, many, some, one = decoded(shape, count, threads, blocks, max_concurrent)
    assert len(single[-1]) == count and single[0] == single[1] + 1, "one step a call; what it gave comes with the next"
    assert many[-1] == single[-1] and some[-1] == single[-1] and one[-1] == single[-1]
    assert one[1] <= one[0] <= single[0]
    assert {row[4] for row in single[-1].values()} == {"stop", "length"}
    assert all(set(row[3]) == {3} for row in single[-1].values())
    if blocks is None:
        assert many[3:5] == some[3:5] == one[3:5] == single[3:5], "as many tokens go through the model, and of prompts"
        assert many[0] < single[0] / FEW_STEPS and many[0] < some[0] < single[0]
    else:
        assert single[2] > 0 and many[2] > 0, "some lose their place"


def test_stop_texts_by_a_call_for_each_token_are_those_of_single_steps():
    single, many, some, one = decoded(PLAIN, 20, 1, None, 32, kinds=WATCHED)
    assert many[-1] == single[-1] and some[-1] == single[-1] and one[-1] == single[-1]
    watched = [row for (index, copy), row in single[-1].items() if (2 * index + copy) % 4 in (0, 3)]
    assert {row[4] for row in watched} == {"stop", "length"}
    assert many[1:4] == one[1:4] == single[1:4], "as many tokens go through the model, in as many steps"


def test_another_default_type_of_torch_changes_no_response():
    """A thread of a tool that loads a model sets it for all. Buffers of 2 bytes a number would be written beyond."""
    assert decoded(PLAIN, 9, 1, None, 64, default=torch.float64) == decoded(PLAIN, 9, 1, None, 64)


def test_capped_logits_that_are_not_finite_fail():
    # The embedding is the output layer too, so that each position has a logit of the damaged token.
    for *_, responses in decoded(GEMMA, 20, 2, None, 96, is_damaged=True):
        assert len(responses) == 20 and all("its logits are not finite" in row[5] for row in responses.values())


def test_a_sequence_that_fails_within_a_call_harms_no_other():
    sound = decoded(PLAIN, 90, 2, None, 96)[1][-1]
    single, many, *_ = decoded(PLAIN, 90, 2, None, 96, is_damaged=True)
    assert sorted(many[-1].items()) == sorted(single[-1].items())
    failed = {name for name, row in many[-1].items() if row[4] == "failed"}
    assert 3 <= len(failed) <= 60
    for name, row in many[-1].items():
        if name in failed:
            assert "its logits are not finite" in row[5] and len(row[0]) == len(row[1])
        else:
            assert row == sound[name]
