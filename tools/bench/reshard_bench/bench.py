"""One run: every pair of this number of ranks, every rival in turn."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np
import torch

from hybridflow.families.model import ModelConfig
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.reshard.plan import Flows, bucket_bytes, held_bytes, received_limit
from reshard_bench.cases import Case, describe, set_up, whole_tensors
from reshard_bench.limits import busiest_sender_limit
from reshard_bench.measure import Cost, Memory, keep_freed_memory, timed
from reshard_bench.pairs import Pair, choose
from reshard_bench.rivals import RIVALS, Rival, bare_exchange, message_bound, ours


def bench(
    world: World, model: ModelConfig, *, names: Sequence[str] | None, transports: Sequence[str], repeats: int
) -> dict[str, Any]:
    """Measure every rival on every pair of as many ranks as the job has.

    Collective: all ranks of the job.

    Args:
        world: The job, on CPUs.
        model: What is resharded.
        names: Of the pairs; None: all.
        transports: Of hybridflow's own resharding.
        repeats: Rounds that are timed.

    Returns:
        What ``report.markdown`` shows, the same on all ranks.

    Raises:
        ConfigError: There is no such pair.
    """
    pairs = choose(names, [world.size])
    world.make_groups(rank_sets([], world.size))
    logging.getLogger("megatron").setLevel(logging.ERROR)
    keep_freed_memory()
    whole = whole_tensors(world, describe(world, model))
    results = [bench_pair(world, pair, model, whole, transports=transports, repeats=repeats) for pair in pairs]
    return {
        "ranks": world.size,
        "ranks_per_node": world.ranks_per_node,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "repeats": repeats,
        "model": {key: getattr(model, key) for key in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size")},
        "model_bytes": results[0]["model_bytes"],
        "pairs": results,
    }


def bench_pair(
    world: World,
    pair: Pair,
    model: ModelConfig,
    whole: Mapping[str, np.ndarray],
    *,
    transports: Sequence[str],
    repeats: int,
) -> dict[str, Any]:
    """Measure every rival on one pair. Collective: all ranks of the job."""
    # What is left of the pair before: its models and its rivals.
    gc.collect()
    gather = world.coordinator(tuple(range(world.size))).gather
    _tell(world, f"{pair.name}: building both models")
    case = set_up(world, pair, model, whole)
    contenders: dict[str, Callable[[Case], Rival | None]] = {"bare": bare_exchange}
    contenders |= {f"ours/{transport}": partial(ours, transport=transport) for transport in transports}
    contenders |= RIVALS
    rivals: dict[str, Rival] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, prepare in contenders.items():
        _tell(world, f"{pair.name}: {name}: preparing, first run")
        case.spoil()
        memory = Memory()
        rival = prepare(case)
        if rival is None:
            continue
        outcome = rival.run()
        extra_bytes = memory.peak_bytes() + rival.file_bytes()
        rivals[name] = rival
        rows[name] = _row(gather, rival, outcome, extra_bytes)
    costs: dict[str, list[list[Cost]]] = {name: [] for name in rivals}
    exact = dict.fromkeys(rivals, True)
    for turn in range(repeats):
        _tell(world, f"{pair.name}: round {turn + 1} of {repeats}")
        order = list(rivals)
        # Another one first each time, so that none always follows the same.
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            case.spoil()
            cost = timed(rivals[name].run)
            exact[name] &= case.is_exact()
            costs[name].append([Cost(*each) for each in gather(cost)])
    for name, rival in rivals.items():
        rival.close()
        rows[name] |= _summary(costs[name])
        # The bare exchange has nothing to get right.
        rows[name]["is_exact"] = all(gather(exact[name])) or name == "bare"
    return {"name": pair.name, **_limits(case, gather, rows["bare"]), "rivals": rows}


def _row(gather: Callable[..., Any], rival: Rival, outcome: Any, extra_bytes: int) -> dict[str, Any]:
    """What does not change from run to run: a list with one entry for each rank, or None where nobody can tell."""
    mine = {
        "extra_bytes": extra_bytes,
        "received_bytes": rival.received_bytes,
        "messages": getattr(outcome, "messages", rival.messages),
        "own_extra_bytes": getattr(outcome, "extra_bytes", None),
        "own_received_bytes": getattr(outcome, "received_bytes", None),
    }
    ranks = gather(mine)
    row: dict[str, Any] = {key: None if value is None else [each[key] for each in ranks] for key, value in mine.items()}
    plan_s = gather(rival.plan_s)
    return row | {"plan_s": None if rival.plan_s is None else max(plan_s)}


def _summary(costs: Sequence[Sequence[Cost]]) -> dict[str, Any]:
    """Medians over the rounds of what the ranks' costs come to."""
    walls = [max(cost.wall_s for cost in turn) for turn in costs]
    cpus = [sum(cost.cpu_s for cost in turn) for turn in costs]
    ranks = list(zip(*costs, strict=True))
    return {
        "wall_s": median(walls),
        "walls_s": walls,
        "cpu_s": median(cpus),
        "cpus_s": cpus,
        "kernel_received_bytes": [int(median(cost.kernel_received_bytes for cost in rank)) for rank in ranks],
        "kernel_sent_bytes": [int(median(cost.kernel_sent_bytes for cost in rank)) for rank in ranks],
    }


def _limits(case: Case, gather: Callable[..., Any], bare: dict[str, Any]) -> dict[str, Any]:
    """What is to be moved, what no plan can beat, and how fast the bare exchange was."""
    rank, arguments = case.world.rank, (case.model, case.source, case.target)
    sent = dict.fromkeys(range(case.world.size), 0)
    for flow in Flows(*arguments).all():
        sent[flow.source] += flow.stop - flow.start if flow.wave == 0 else 0
    busiest = busiest_sender_limit(case.model, case.source.mesh, case.target.mesh)
    received = gather(received_limit(*arguments, rank))
    bandwidth = max(*bare["received_bytes"], *sent.values()) / bare["wall_s"]
    return {
        "source": str(case.source.mesh.layout),
        "target": str(case.target.mesh.layout),
        "model_bytes": sum(spec.num_bytes for spec in case.model.tensors),
        "destination_bytes": gather(held_bytes(case.model, case.target, rank)),
        "bucket_bytes": bucket_bytes(case.model, case.target),
        "received_limit_bytes": received,
        "busiest_sender_limit_bytes": busiest,
        "busiest_sender_bytes": max(sent.values()),
        "bandwidth": bandwidth,
        "limit_wall_s": max(*received, busiest or 0) / bandwidth,
        "message_bounds": gather(message_bound(case)),
    }


def _tell(world: World, what: str) -> None:
    if world.rank == 0:
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
