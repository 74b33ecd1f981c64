"""The benchmark of resharding on a tiny model: every rival gives the right bits, and the figures are what they say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reshard_bench import bench as bench_module
from reshard_bench.limits import busiest_sender_limit
from reshard_bench.measure import Memory, tcp_bytes
from reshard_bench.pairs import PAIRS
from reshard_bench.report import bounds, is_exact, markdown
from reshard_bench.rivals import RIVALS, Rival

from hybridflow.families.model import ModelConfig
from hybridflow.parallel.world import World
from tests.support.ranks import run_ranks
from tests.support.reshard_cases import make_model

TOOLS = Path(__file__).parents[2] / "tools/bench"

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=16,
    num_query_groups=8,
    max_context=64,
    vocab_size=64,
    vocab_divisible_by=1,
)

# Of all that tp cuts, in bytes. A layer: QKV (64 + 2·8·4)·64, projection 64·64, gate/up 2·128·64, down 64·128; four of
# them, and 64·64 for each of embedding and output.
CUT_BYTES = 4 * (4 * (8192 + 4096 + 16384 + 8192) + 2 * 4096)


def measure(world: World) -> list[dict[str, Any]]:
    whole = bench_module.bench(world, MODEL, names=None, transports=["torch", "shared"], repeats=1)
    bench_module.RIVALS = {"broken": lambda case: Rival(run=lambda: None)}
    broken = bench_module.bench(world, MODEL, names=["tp2.pp2-dp4"], transports=[], repeats=1)
    return [{**result, "launcher": "a test"} for result in (whole, broken)]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    first, *others = run_ranks(measure, 4)
    assert all(other[0]["pairs"] == first[0]["pairs"] for other in others)
    return json.loads(json.dumps(first))


@pytest.mark.slow
def test_every_rival_runs_and_is_exact(measured):
    names = {"bare", "ours/torch", "ours/shared", *RIVALS}
    found = {pair["name"]: pair["rivals"] for pair in measured[0]["pairs"]}
    assert {name: rivals.keys() for name, rivals in found.items()} == {
        "tp4-tp2.dp2": names,
        "tp4-tp2.dp2-strided": names,
        "tp2.pp2-dp4": names - {"dtensor"},
    }
    for rivals in found.values():
        for run in rivals.values():
            assert run["is_exact"] and run["wall_s"] > 0 and run["cpu_s"] > 0
    assert is_exact(measured[:1])


def test_wrong_values_are_seen(measured):
    assert not measured[1]["pairs"][0]["rivals"]["broken"]["is_exact"]
    assert not is_exact(measured)
    assert "| values | bit-exact | | | **NO** |" in markdown(measured)


def test_bytes_are_those_worked_out_by_hand(measured):
    contiguous, strided, _ = measured[0]["pairs"]
    # Ranks 0 to 3 hold a quarter each. Strided, each needs one more. Contiguous, rank 0 needs quarters 0 and 1, rank 1
    # quarters 2 and 3, rank 2 quarters 0 and 1, rank 3 quarters 2 and 3; so quarters 1 and 2 go to two ranks each.
    quarter = CUT_BYTES // 4
    assert strided["received_limit_bytes"] == [quarter] * 4
    assert strided["busiest_sender_limit_bytes"] == pytest.approx(quarter)
    assert contiguous["received_limit_bytes"] == [quarter, 2 * quarter, 2 * quarter, quarter]
    assert contiguous["busiest_sender_limit_bytes"] == pytest.approx(2 * quarter)
    for pair in (contiguous, strided):
        runs = pair["rivals"]
        assert runs["ours/torch"]["received_bytes"] == pair["received_limit_bytes"]
        assert runs["gather"]["received_bytes"] == [3 * quarter] * 4
        for name in ("bare", "ours/torch", "megatron", "gather"):
            # What goes with the payload: headers of a few dozen bytes for each message, and the barriers.
            over = np.subtract(runs[name]["kernel_received_bytes"], runs[name]["received_bytes"])
            assert over.min() > 0 and over.max() < 20_000, name
        assert max(runs["ours/shared"]["kernel_received_bytes"]) < 4096


def test_the_lp_shares_what_several_hold():
    # tp2.dp2 to dp4: each half of what is cut is held by two ranks and needed by the two others.
    model = make_model(vocab_size=12)
    cut_bytes = sum(spec.num_bytes for spec in model.tensors if spec.tp_dim is not None)
    pair = replace(PAIRS[-1], name="", source="tp2.dp2", target="dp4")
    assert busiest_sender_limit(model, *pair.meshes(4)) == pytest.approx(cut_bytes / 2)
    # Two nodes of two ranks: each node holds everything, so the neighbour alone sends, and as much.
    assert busiest_sender_limit(model, *pair.meshes(2)) == pytest.approx(cut_bytes / 2)
    # tp4 to dp4: over nodes of two, each quarter goes to its neighbour and once to the other node.
    pair = replace(pair, source="tp4")
    assert busiest_sender_limit(model, *pair.meshes(4)) == pytest.approx(3 * cut_bytes / 4)
    assert busiest_sender_limit(model, *pair.meshes(2)) == pytest.approx(2 * cut_bytes / 4)


def test_the_report_is_a_table(measured):
    tables = [line for line in markdown(measured[:1]).splitlines() if line.startswith("|")]
    widths = [line.count("|") for line in tables]
    assert {16, 6} == set(widths)
    for name in ("bare", "ours/torch", "ours/shared", *RIVALS):
        assert sum(line.startswith(f"| {name} |") for line in tables) == (2 if name == "dtensor" else 3)
    for bound in bounds(measured[:1]):
        assert bound.passes == (max(bound.values) <= bound.bound if bound.values else None) or bound.is_median


def test_the_kernel_counts_what_a_connection_carries():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = tcp_bytes()
            one.sendall(b"x" * 12345)
            left = 12345
            while left:
                left -= len(other.recv(left))
            counts = [np.subtract(count, before[name]).tolist() for name, count in tcp_bytes().items()]
    assert [12345, 0] in counts and [0, 12345] in counts


def test_memory_is_the_rise_to_the_peak():
    memory = Memory()
    block = np.ones(32 << 20, dtype=np.uint8)
    del block
    # The kernel counts pages in batches.
    assert 31 << 20 < memory.peak_bytes() < 36 << 20
    assert Memory().peak_bytes() < 2 << 20


def test_an_unknown_pair_is_explained_before_ranks_start():
    command = [sys.executable, str(TOOLS / "bench_reshard.py"), "--pairs", "tp3-dp3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: pairs tp3-dp3 of any ranks") and "tp2.pp2-dp4 (4 ranks)" in done.stderr


def test_planning_is_measured_and_judged(tmp_path):
    found = tmp_path / "plan.json"
    command = [sys.executable, str(TOOLS / "bench_plan.py"), "--ranks", "8", "--repeats", "1", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())
    assert [(row["model"], row["ranks"]) for row in rows] == [("llama3-70b", 8), ("qwen3-235b-a22b", 8)]
    # 80 layers of 4 matrices and 2 norms, embedding, output and norm: every one in at least one copy.
    assert rows[0]["copies"] >= 80 * 6 + 3 and 0 < rows[0]["median_ms"] <= rows[0]["worst_ms"]
    assert done.stdout.count("\n| llama3-70b | 8 |") == 1
