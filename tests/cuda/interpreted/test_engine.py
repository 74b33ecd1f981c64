"""The engine's kernels on small models: texts are those of the CPU engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from hybridflow.config.roles import LoRAConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.lora import merged_weight
from hybridflow.parallel.world import World
from hybridflow.rollout import session
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.gpu import decode, prompts, runner
from hybridflow.rollout.gpu.runner import GpuRunner
from hybridflow.rollout.gpu.transformer import GpuTransformer
from hybridflow.rollout.request import Request, SamplingParams
from tests.multi.models import (
    BESIDE,
    BOUNDED,
    CAPPED,
    GLOBAL,
    LINEAR,
    MIXTURE,
    SHARED,
    TINY,
    VOCAB,
    WIDE,
    make_model,
    vary_vectors,
)
from tests.multi.test_rollout_sampling import Bytes

SMALL = replace(TINY, num_layers=2, num_attention_heads=6, hidden_size=48, head_dim=16, num_query_groups=2)
NORMED = replace(SMALL, qkv_bias=False, qk_norm=True)
BEHIND = replace(CAPPED, num_layers=2, window_layers=(0,))
TURNED = replace(SMALL, rotary_interleaved=True, rotary_dim=8, no_rope_layers=(1,))
KINDS = [
    {"stop_ids": tuple(range(0, VOCAB, 5))},
    {"greedy": True},
    {"temperature": 0.6, "stop_ids": (3, 4)},
    {"temperature": 1.4},
]
CUTS = [{"temperature": 1.4, "top_k": 5}, {"top_p": 0.8, "top_k": 9}, {"min_p": 0.1}, {"top_p": 0.5, "min_p": 0.2}]
ALL = LoRAConfig(rank=3, alpha=7.0)
SOME = replace(ALL, targets=("v_proj", "o_proj", "up_proj"))
FUSED = replace(ALL, targets=("qkv_proj", "gate_up_proj"))
EDITS = [
    {"temperature": 1.4, "top_k": 5, "repetition_penalty": 1.2},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "stop_ids": (3, 4), "min_new_tokens": 5},
    {"logit_bias": ((1, 5.0), (2, 4.5)), "bad_ids": ((1, 2), (5,))},
]


@pytest.fixture(scope="module")
def world():
    made = World(rank=0, size=1, ranks_per_node=1, device=torch.device("cpu"), deadline_s=60.0, store=dist.HashStore())
    yield made
    dist.destroy_process_group()


def requests(count: int, kinds) -> list[Request]:
    """Of unequal lengths: some prompts are longer than a tile, some than a block of the cache."""
    generator = torch.Generator().manual_seed(count)
    return [
        Request(
            prompt=torch.randint(0, VOCAB, (1 + number * 7 % 29,), generator=generator),
            params=SamplingParams(max_new_tokens=1 + number * 7 % 9, **kinds[number % len(kinds)]),
            prompt_index=number // 2,
            index=number % 2,
        )
        for number in range(count)
    ]


def generated(engine: MegatronEngine, asked: list[Request]):
    return [(each.tokens.tolist(), each.finish, each.error) for each in engine.generate(asked)]


def both(world: World, shape, asked: list[Request], lora: LoRAConfig | None = None):
    """Return what the CPU engine and the GPU engine generate, and the largest difference of a log-probability."""
    model, _, groups, _ = make_model(world, ParallelLayout(), model=shape, lora=lora)
    vary_vectors(model)
    found = []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8)
        if is_gpu:
            engine.runner = GpuRunner(model, groups, VOCAB, max_rows=8, max_steps=16)
        found.append(engine.generate(asked))
    texts = [[(each.tokens.tolist(), each.finish, each.error) for each in responses] for responses in found]
    gaps = [
        (getattr(ours, name) - getattr(theirs, name)).abs().max().item()
        for ours, theirs in zip(*found, strict=True)
        for name in ("log_probs", "sampled_log_probs")
    ]
    gap = max(gaps)
    return *texts, gap


def test_texts_of_adapters_are_those_of_the_cpu_engine(world):
    ours, theirs, gap = both(world, SMALL, requests(3, KINDS), ALL)
    assert ours == theirs and gap < 1e-5


@pytest.mark.parametrize("lora", [ALL, SOME, FUSED], ids=["all", "some", "fused"])
def test_linear_layers_add_what_merged_weights_would_after_an_update(world, lora):
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL, lora=lora)
    transformer = GpuTransformer(model, groups.tp, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    places = [pair[1].data_ptr() for pair in transformer._factors.values()]
    transformer.copy_adapters()
    assert places == [pair[1].data_ptr() for pair in transformer._factors.values()], "a captured graph reads there"
    for module in transformer._linears():
        inputs = torch.randn(5, module.weight.shape[1], generator=torch.Generator().manual_seed(1))
        expected = linear(inputs, merged_weight(module), module.bias)
        torch.testing.assert_close(transformer._linear(module, inputs), expected, atol=1e-5, rtol=0)


def test_an_update_too_small_for_a_weight_in_bf16_counts(world):
    shape = replace(SMALL, dtype="bf16", qkv_bias=False)
    model, _, groups, _ = make_model(world, ParallelLayout(), model=shape, lora=replace(ALL, rank=1, alpha=2.0))
    for name, parameter in model.named_parameters():
        # Inputs of alternating signs: W x is 0, and A x their number. To 1 bf16 cannot add less than 1/256.
        parameter.data.fill_(2**-12 if name.endswith(".B") else 1)
        if name.endswith(".A"):
            parameter.data[:, 1::2] = -1
    transformer = GpuTransformer(model, groups.tp, VOCAB)
    for module in transformer._linears():
        inputs = module.weight.new_ones(2, module.weight.shape[1])
        inputs[:, 1::2] = -1
        expected = torch.full((2, len(module.weight)), 2 * inputs.shape[1] * 2**-12, dtype=torch.bfloat16)
        assert torch.equal(transformer._linear(module, inputs), expected)
        assert torch.equal(merged_weight(module), module.weight), "merged, the update would be gone"


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        pytest.param(SMALL, [*KINDS, *CUTS], id="bias, and cuts"),
        pytest.param(NORMED, [*KINDS, *EDITS], marks=pytest.mark.long, id="normalized heads, and edits"),
        pytest.param(BEHIND, KINDS, marks=pytest.mark.long, id="caps, windows, norms behind, 12 dims a head"),
        pytest.param(TURNED, KINDS, marks=pytest.mark.long, id="other rotations"),
        pytest.param(replace(MIXTURE, num_layers=2), KINDS, marks=pytest.mark.long, id="mixture of experts"),
        # tests/cuda/interpreted/test_ranks.py always runs these, but for wide queries, with tp2 or tp4.
        pytest.param(WIDE, KINDS, marks=pytest.mark.long, id="norms over all heads, none before a block"),
        pytest.param(GLOBAL, KINDS, marks=pytest.mark.long, id="other heads in some layers, norms around experts"),
        pytest.param(BOUNDED, KINDS, marks=pytest.mark.long, id="sinks, experts with biases and bounds"),
        pytest.param(
            BESIDE, KINDS, marks=pytest.mark.long, id="a shared expert with a gate, experts by sigmoids and a bias"
        ),
        # Norms of compressed vectors have an epsilon of their own.
        pytest.param(
            replace(SHARED, norm_eps=1e-3), KINDS, marks=pytest.mark.long, id="latent attention, groups of experts"
        ),
        pytest.param(
            replace(SHARED, q_lora_rank=None), KINDS, marks=pytest.mark.long, id="latent attention, wide queries"
        ),
        pytest.param(
            replace(LINEAR, num_layers=3, linear_layers=(0, 2)), KINDS, marks=pytest.mark.long, id="linear attention"
        ),
    ],
)
def test_texts_are_those_of_the_cpu_engine(world, shape, kinds):
    ours, theirs, gap = both(world, shape, requests(len(kinds) + 1, kinds))
    assert ours == theirs and gap < 1e-5
    assert {row[1] for row in ours} == {"stop", "length"} or kinds is KINDS


def test_texts_are_the_same_where_the_keys_are_split(world, monkeypatch):
    monkeypatch.setattr(decode, "splits_for", lambda rows, groups, processors: 3)
    ours, theirs, gap = both(world, SMALL, requests(3, KINDS))
    assert ours == theirs and gap < 1e-5


def test_long_prompts_of_latent_attention_go_through_in_parts(world, monkeypatch):
    """Some with tokens in the cache before, some with too many keys for all heads, beside rows of other sequences."""
    monkeypatch.setattr(session, "STEP_TOKENS", 9)
    monkeypatch.setattr(prompts, "MOST_PROMPT_KEYS", 20)
    plans = []

    def noted(vectors, tables, sequences, positions, device):
        plan = prompts.plan_prompts(vectors, tables, sequences, positions, device)
        if plan is not None:
            plans.append((len(plan.places) > len(plan.rows), len(plan.others) > 0))
        elif (np.diff(sequences) == 0).any():
            plans.append("by rows")
        return plan

    monkeypatch.setattr(runner, "plan_prompts", noted)
    ours, theirs, gap = both(world, replace(SHARED, v_head_dim=18), requests(5, KINDS))
    assert ours == theirs and gap < 1e-5
    assert {*plans} >= {(False, False), (True, False), (True, True), "by rows"}, plans


def test_logits_that_are_not_finite_fail_and_harm_no_other(world):
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL)
    asked = [replace(each, params=replace(each.params, max_new_tokens=4)) for each in requests(4, KINDS)]
    found = []
    for is_damaged in (False, True):
        if is_damaged:
            model.embedding.word_embeddings.weight.data[17] = torch.nan
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8)
        engine.runner = GpuRunner(model, groups, VOCAB, max_rows=8, max_steps=16)
        found.append(generated(engine, asked))
    failed = [row for row in range(4) if found[1][row][1] == "failed"]
    assert 1 <= len(failed) < 4
    for row in range(4):
        if row in failed:
            assert "its logits are not finite" in found[1][row][2]
        else:
            assert found[1][row] == found[0][row]


def test_weights_are_read_where_they_are_after_an_update(world):
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL)
    asked = requests(3, KINDS)
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8)
    engine.runner = GpuRunner(model, groups, VOCAB, max_rows=8, max_steps=16)
    before = generated(engine, asked)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.weights_changed()
    after = generated(engine, asked)
    fresh = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8)
    assert after != before and after == generated(fresh, asked)


def test_graphs_are_captured_for_few_numbers_of_rows():
    for most in (1, 5, 64, 256, 1024):
        sizes = decode.buckets(most)
        assert sizes[-1] == most and sorted(set(sizes)) == sizes and len(sizes) <= 40
        assert all(large <= max(8, small * 1.5 + 8) for small, large in zip(sizes, sizes[1:], strict=False))


def test_edits_need_no_step_through_the_host(world, monkeypatch):
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL)
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8)
    engine.runner = GpuRunner(model, groups, VOCAB, max_rows=8, max_steps=16)
    run, rows = engine.run, []

    def noted(tokens, attention, wanted):
        rows.append(len(wanted))
        return run(tokens, attention, wanted)

    monkeypatch.setattr(engine, "run", noted)
    engine.generate([replace(each, params=replace(each.params, max_new_tokens=8)) for each in requests(3, EDITS)])
    # Only the first tokens, behind the prompts.
    assert sum(rows) == 3


@pytest.mark.parametrize("stop", [pytest.param(("e",), marks=pytest.mark.long), (" t", "ab", "k")])
def test_stop_texts_need_no_step_through_the_host(world, monkeypatch, stop):
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL)
    kinds = [{"stop": stop}, *KINDS, {"stop": ("d",), "top_k": 9, "min_new_tokens": 3}]
    asked = [replace(each, params=replace(each.params, max_new_tokens=9)) for each in requests(len(kinds), kinds)]
    found = []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8, tokenizer=Bytes())
        if is_gpu:
            engine.runner = GpuRunner(model, groups, VOCAB, max_rows=8, max_steps=16)
            decode_some, run, most, rows = engine.runner.decode, engine.run, [], []

            def noted(tokens, attention, wanted, run=run, rows=rows):
                rows.append(len(wanted))
                return run(tokens, attention, wanted)

            def decoded(cache, tables, chosen, steps, *more, decode_some=decode_some, most=most, **arrays):
                most.append(steps)
                return decode_some(cache, tables, chosen, steps, *more, **arrays)

            monkeypatch.setattr(engine, "run", noted)
            monkeypatch.setattr(engine.runner, "decode", decoded)
        found.append(generated(engine, asked))
    assert found[0] == found[1] and found[0][0][1] == "stop" and len(found[0][0][0]) < 9
    # Through the host only the two steps that compute prompts.
    assert len(rows) <= 2 and len(most) >= 5 and set(most) == {1}


def test_steps_through_the_host_with_a_row_of_each_sequence_need_no_tiles(world, monkeypatch):
    monkeypatch.setattr(runner, "splits_for", lambda rows, groups, processors: 3)
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL)
    kinds = [{"bad": ("e",)}, {"temperature": 0.6}]
    asked = [replace(each, params=replace(each.params, max_new_tokens=6)) for each in requests(3, kinds)]
    found, made = [], []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=8, tokenizer=Bytes())
        if is_gpu:
            engine.runner = GpuRunner(model, groups, VOCAB, max_rows=8, max_steps=16)
            attend = engine.runner.attention

            def noted(cache, tables, sequences, positions, first_slot, attend=attend):
                attention = attend(cache, tables, sequences, positions, first_slot)
                made.append((len(set(sequences)) == len(sequences), attention._tiles is None, attention._splits))
                return attention

            monkeypatch.setattr(engine.runner, "attention", noted)
        found.append(generated(engine, asked))
    assert found[0] == found[1]
    assert set(made) == {(False, False, 1), (True, True, 3)}
