"""The GPU engine on several ranks: mixtures of experts give the CPU engine's texts; ranks capture graphs together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World, let_go_at_close
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.gpu import runner
from hybridflow.rollout.gpu.decode import Decoder
from hybridflow.rollout.gpu.runner import GpuRunner
from hybridflow.rollout.gpu.transformer import GpuTransformer
from hybridflow.rollout.request import Request, SamplingParams
from tests.multi.models import (
    BESIDE,
    BOUNDED,
    GLOBAL,
    LINEAR,
    MIXTURE,
    SHARED,
    TINY,
    VOCAB,
    WIDE,
    make_model,
    samples,
    vary_vectors,
)
from tests.multi.test_images import VOCAB as IMAGE_VOCAB
from tests.multi.test_images import Drawn, build, our_tokens, reader_of
from tests.support.hf_models import write_vision_model
from tests.support.ranks import run_ranks


def texts_of(world, layout: ParallelLayout, shape: ModelConfig, lora: LoRAConfig | None):
    """What both engines generate, and whether the kernels compute the experts."""
    model, _, groups, _ = make_model(world, layout, model=replace(shape, num_layers=2), lora=lora)
    vary_vectors(model)
    sequences, prompts = samples(2)
    # Replicas end at different times.
    most = 2 + 2 * (world.rank * layout.dp // world.size)
    asked = [
        Request(
            prompt=sequence[:length], params=SamplingParams(max_new_tokens=most + index), prompt_index=index, index=0
        )
        for index, (sequence, length) in enumerate(zip(sequences, prompts, strict=True))
    ]
    found = []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=4)
        if is_gpu:
            if model.sequence_switch is not None:
                # As training leaves it.
                model.sequence_switch.turn(True)
            engine.runner = GpuRunner(model, groups, VOCAB, max_rows=4, max_steps=8)
        found.append([(each.tokens.tolist(), each.log_probs.tolist()) for each in engine.generate(asked)])
    return *found, engine.runner._transformer.is_capturable


@pytest.mark.parametrize(
    ("layout", "has_kernels", "shape", "lora"),
    [
        (ParallelLayout(tp=2), True, BESIDE, LoRAConfig(rank=3, alpha=7.0)),
        (ParallelLayout(tp=2), True, BOUNDED, LoRAConfig(rank=3, alpha=7.0, targets=("q_proj", "o_proj"))),
        (ParallelLayout(tp=2), True, WIDE, None),
        (ParallelLayout(tp=2), True, SHARED, None),
        # Ranks share a query group.
        (ParallelLayout(tp=2), True, replace(WIDE, num_query_groups=1), None),
        (ParallelLayout(tp=2), True, replace(GLOBAL, global_query_groups=1), None),
        (ParallelLayout(tp=4), True, replace(LINEAR, linear_layers=(0,), linear_key_heads=4), None),
        # Each rank has half of the experts, whole.
        (ParallelLayout(tp=2, etp=1, ep=2), True, BOUNDED, None),
        (ParallelLayout(tp=2, etp=1), False, MIXTURE, None),
        (ParallelLayout(dp=2, etp=2), False, MIXTURE, None),
        (ParallelLayout(tp=2, dp=2, ep=2), False, MIXTURE, None),
        (ParallelLayout(tp=2), True, TINY, LoRAConfig(rank=3, alpha=7.0)),
    ],
)
def test_texts_are_those_of_the_cpu_engine(layout, has_kernels, shape, lora):
    for ours, theirs, is_capturable in run_ranks(texts_of, layout.world_size, layout, shape, lora):
        assert is_capturable == has_kernels
        for (tokens, log_probs), (others, other_log_probs) in zip(ours, theirs, strict=True):
            assert tokens == others and log_probs == pytest.approx(other_log_probs, abs=1e-5)


def texts_behind_images(world, folder: Path, layout: ParallelLayout):
    """What both engines generate behind an image, and behind text."""
    model, groups = build(world, folder, layout)
    model.read_images(reader_of(folder))
    params = SamplingParams(max_new_tokens=3, greedy=True)
    asked = [
        Request(prompt=torch.tensor(our_tokens(prompt, Drawn(folder))), params=params, prompt_index=index, index=0)
        for index, prompt in enumerate((([5], 1, [14, 6]), ([11, 12, 13],)))
    ]
    found = []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=IMAGE_VOCAB, seed=7, max_concurrent=4)
        if is_gpu:
            # The ranks' messages are not NCCL's, but nothing is captured on a CPU.
            with mock.patch.object(runner, "_can_be_captured", lambda *_: True):
                engine.runner = GpuRunner(model, groups, IMAGE_VOCAB, max_rows=4, max_steps=8)
        found.append([(each.tokens.tolist(), each.log_probs.tolist()) for each in engine.generate(asked)])
    return *found, engine.runner.can_decode


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(pp=2)], ids=["tp2", "pp2"])
def test_texts_behind_images_are_those_of_the_cpu_engine(tmp_path, layout):
    """Behind the first layer the tower adds something, on the first stage alone."""
    write_vision_model(tmp_path, "Qwen3VL", max_position_embeddings=64)
    for ours, theirs, can_decode in run_ranks(texts_behind_images, 2, tmp_path, layout):
        assert can_decode == (layout.pp == 1)
        for (tokens, log_probs), (others, other_log_probs) in zip(ours, theirs, strict=True):
            assert tokens == others and log_probs == pytest.approx(other_log_probs, abs=1e-5)


def cut_texts(world, has_edits):
    """What both engines generate with cuts and without; which steps of the GPU's decoding had logits gathered."""
    model, _, groups, _ = make_model(world, ParallelLayout(tp=2), model=replace(TINY, num_layers=2))
    sequences, prompts = samples(3)
    kinds = [{"top_k": 5, "temperature": 1.4}, {"top_p": 0.6, "min_p": 0.05}, {}]
    if has_edits:
        kinds[1] = {**kinds[1], "repetition_penalty": 1.4}
    asked = [
        Request(
            prompt=sequence[:length],
            # That without cuts is the last to end.
            params=SamplingParams(max_new_tokens=3 + 4 * (index == 2), **kind),
            prompt_index=index,
            index=0,
        )
        for index, (sequence, length, kind) in enumerate(zip(sequences, prompts, kinds, strict=True))
    ]
    found, cuts = [], []
    for is_gpu in (False, True):
        engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=4)
        if is_gpu:
            # The ranks' messages are not NCCL's, but nothing is captured on a CPU.
            with mock.patch.object(runner, "_can_be_captured", lambda *_: True):
                engine.runner = GpuRunner(model, groups, VOCAB, max_rows=4, max_steps=3)
            step = engine.runner._decoder.step

            def noted(rows, edits, *, is_cut, step=step):
                cuts.append(is_cut)
                step(rows, edits, is_cut=is_cut)

            engine.runner._decoder.step = noted
        session = engine.open(asked)
        session.add(asked)
        responses = {}
        while not session.is_idle:
            responses |= {request.prompt_index: got for request, got in session.step(3)}
        found.append([(responses[index].tokens.tolist(), responses[index].log_probs.tolist()) for index in range(3)])
    return *found, cuts


@pytest.mark.parametrize("has_edits", [False, True])
def test_cuts_are_found_among_the_columns_of_all_ranks(has_edits):
    for ours, theirs, cuts in run_ranks(cut_texts, 2, has_edits):
        for (tokens, log_probs), (others, other_log_probs) in zip(ours, theirs, strict=True):
            assert tokens == others and log_probs == pytest.approx(other_log_probs, abs=1e-5)
        # Gathered only while rows have cuts.
        assert cuts == sorted(cuts, reverse=True) and set(cuts) == {True, False}


def graphs_kept(world):
    """Whether a graph is kept at first, where only factors of adapters have moved, and where rank 1's weights have."""
    lora = LoRAConfig(rank=3, alpha=7.0)
    model, _, groups, _ = make_model(world, ParallelLayout(tp=2), model=replace(TINY, num_layers=2), lora=lora)
    transformer = GpuTransformer(model, groups.tp, VOCAB)
    decoder = Decoder(transformer, groups.tp, max_rows=2, max_steps=2, context=8, device=world.device)
    found = []
    for moves in (True, False, world.rank == 1):
        decoder._graphs = {(2, False, False): None}
        for parameter in model.parameters():
            # Those of adapters alone are trained.
            if moves or parameter.requires_grad:
                parameter.data = parameter.data.clone()
        decoder.find_weights()
        found.append(bool(decoder._graphs))
    return found


def test_all_ranks_capture_anew_where_the_weights_of_one_have_moved():
    assert run_ranks(graphs_kept, 2) == [[False, True, False]] * 2


def test_graphs_are_let_go_before_the_groups_end(monkeypatch):
    """NCCL would wait for them for ever."""
    ends = []

    class Held:
        def let_go(self) -> None:
            ends.append("graphs")

    held = Held()
    let_go_at_close(held)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ends.append("groups"))
    World.close(None)
    assert ends == ["graphs", "groups"]
