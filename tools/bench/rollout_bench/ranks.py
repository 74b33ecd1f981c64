"""What is measured of ours on several ranks: the time to a first token, and how log-probabilities agree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.start import Start
from rollout_bench.cases import CONTEXT, prompt_index_prompts
from rollout_bench.ours import quiet

_AGREE_PROMPTS, _AGREE_SAMPLES, _AGREE_TOKENS = 6, 2, 24


def layouts_of(num_ranks: int, *, layers: int, kv_heads: int) -> list[ParallelLayout]:
    """Every TP×PP×DP of so many ranks that a model allows."""
    divisors = [each for each in range(1, num_ranks + 1) if num_ranks % each == 0]
    return [
        ParallelLayout(tp=tp, pp=pp, dp=num_ranks // (tp * pp))
        for tp in divisors
        for pp in divisors
        if num_ranks % (tp * pp) == 0 and layers % pp == 0 and kv_heads % tp == 0
    ]


def measure_on_ranks(
    start: Start, folder: str, layouts: list[ParallelLayout], cases: list[str], repeats: int
) -> dict[str, Any]:
    """As one of the ranks: layout -> case -> what was found, the same on every rank. Collective: all ranks."""
    # Host memory is what is measured here, also where there are GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet()
    import torch

    from hybridflow.layout.mesh import DeviceMesh
    from hybridflow.parallel.rendezvous import open_store
    from hybridflow.parallel.world import join_world
    from hybridflow.placement.pretrained import from_pretrained
    from hybridflow.rollout.engine import MegatronEngine

    torch.set_num_threads(1)
    store = open_store(start, start_deadline_s=300.0)
    world = join_world(start, store, deadline_s=300.0, start_deadline_s=300.0)
    found: dict[str, Any] = {}
    for layout in layouts:
        mesh = DeviceMesh(
            name=str(layout), layout=layout, ranks=tuple(range(world.size)), ranks_per_node=world.ranks_per_node
        )
        loaded = from_pretrained(folder, world, mesh, max_context=CONTEXT, dtype="fp32")
        vocab = loaded.model.vocab_size
        engine = MegatronEngine(loaded.transformer, loaded.groups, vocab_size=vocab, seed=1, max_concurrent=256)
        found[str(layout)] = {}
        if "first" in cases:
            found[str(layout)]["first"] = _first_token(engine, vocab, repeats)
        if "agree" in cases:
            replica = mesh.coordinate(world.rank).dp
            found[str(layout)]["agree"] = _disagreement(engine, vocab, replica, layout.dp)
    world.close()
    return found


def _first_token(engine: Any, vocab: int, repeats: int) -> dict[str, float]:
    """Medians of seconds, each the slowest rank's: to a first token, right after a change of weights too; a forward.

    Collective: all ranks.
    """
    import torch

    from hybridflow.rollout.blocks import blocks_for
    from hybridflow.rollout.paged import PagedAttention, PagedCache
    from hybridflow.rollout.request import Request, SamplingParams

    def request(seed: int) -> Request:
        (prompt,) = prompt_index_prompts([32], vocab, seed)
        return Request(prompt=torch.tensor(prompt), params=SamplingParams(max_new_tokens=1), prompt_index=seed)

    cache = PagedCache(engine.model, blocks_for(32), engine.device)
    positions = torch.arange(32)
    table = torch.arange(blocks_for(32), dtype=torch.int32)[None]

    def forward(asked: Request) -> None:
        with torch.inference_mode():
            attention = PagedAttention(cache, table, torch.zeros(32, dtype=torch.int64), positions)
            engine.run(asked.prompt, attention, torch.tensor([31]))

    engine.generate([request(0)])
    taken: dict[str, list[float]] = {"generate_s": [], "forward_s": [], "after_weights_s": []}
    for turn in range(max(7, repeats)):
        asked = request(1 + turn)
        taken["generate_s"].append(_slowest_s(lambda asked=asked: engine.generate([asked])))
        taken["forward_s"].append(_slowest_s(lambda asked=asked: forward(asked)))
        engine.weights_changed()
        taken["after_weights_s"].append(_slowest_s(lambda asked=asked: engine.generate([asked])))
    return {name: median(each) for name, each in taken.items()}


def _slowest_s(run: Callable[[], object]) -> float:
    """Seconds of the rank that took longest. Collective: all ranks."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began_s = time.perf_counter()
    run()
    taken = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _disagreement(engine: Any, vocab: int, replica: int, replicas: int) -> dict[str, float]:
    """The largest difference of a token's log-probability between rollout and training. Collective: all ranks."""
    import torch
    import torch.distributed as dist

    from hybridflow.models.log_probs import vocab_parallel_log_probs
    from hybridflow.models.microbatch import pack, split_by_tokens
    from hybridflow.models.training import forward_only
    from hybridflow.rollout.request import Request, SamplingParams

    worst, num_tokens = 0.0, 0
    for temperature, cut in ((1.0, {}), (0.7, {"top_k": 9, "top_p": 0.8})):
        params = SamplingParams(max_new_tokens=_AGREE_TOKENS, temperature=temperature, **cut)
        lengths = [4 + 7 * prompt_index % 29 for prompt_index in range(_AGREE_PROMPTS)]
        asked = [
            Request(prompt=torch.tensor(prompt), params=params, prompt_index=prompt_index, index=index)
            for prompt_index, prompt in enumerate(prompt_index_prompts(lengths, vocab, 2))
            for index in range(_AGREE_SAMPLES)
        ][replica::replicas]
        answers = engine.generate(asked)
        sequences = [torch.cat([ask.prompt, got.tokens]) for ask, got in zip(asked, answers, strict=True)]
        prompts = [len(ask.prompt) for ask in asked]
        batches = [
            pack(samples, sequences, prompts, engine.device)
            for samples in split_by_tokens([len(each) for each in sequences], 256)
        ]

        def compute(output: Any, batch: Any, temperature: float = temperature) -> dict[int, Any]:
            log_probs, _ = vocab_parallel_log_probs(
                output, batch.targets, group=engine.groups.tp, vocab_size=vocab, temperature=temperature
            )
            return dict(zip(batch.samples, log_probs.split(batch.response_lengths), strict=True))

        for part in forward_only(engine.model, engine.groups, batches, compute):
            for sample, trained in part.items():
                difference = (trained.cpu() - answers[sample].log_probs).abs().max()
                # A NaN is no number that agrees.
                worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
                num_tokens += len(trained)
    found = torch.tensor([worst, num_tokens], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"worst": float(found[0]), "num_tokens": int(found[1])}
