"""The numbers of ``hybridflow plan reshard`` against arrays of element numbers, and the command itself."""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from hybridflow import cli
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping import reshard_command
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.observe.console import format_bytes
from hybridflow.reshard.diagram import Nearby, held_regions
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.messages import divide
from hybridflow.reshard.plan import Flows, bucket_bytes, participants, plan
from hybridflow.reshard.report import Bandwidth, Spread, message_counts, report
from hybridflow.reshard.spec import ITEM_BYTES, ModelSpec, TensorSpec, num_elements
from tests.e2e.commands import run_command
from tests.support.reshard_cases import make_mesh, make_model, scatter, whole_arrays

CASES = [
    ("tp4.pp2.dp2", "tp2.pp1.dp8", 8, 0),
    ("tp2.pp2.dp2", "tp4.dp2", 4, 0),
    ("tp4.dp2", "tp2.pp2.dp2", 2, 0),
    ("pp4.dp2", "tp8", 8, 0),
    ("tp4", "tp2.dp2", 2, 2),
    ("tp2.dp2", "tp4.pp2", 4, 4),
]


def holdings(model: ModelSpec, before: str, after: str, per_node: int, first: int) -> tuple[WeightHoldings, ...]:
    size = ParallelLayout.parse(after).world_size
    meshes = make_mesh(before, None, per_node), make_mesh(after, tuple(range(first, first + size)), per_node)
    return tuple(WeightHoldings(model, mesh) for mesh in meshes)


def elements(model: ModelSpec, mesh: DeviceMesh) -> dict[int, set[tuple[int, int]]]:
    """Rank -> (tensor, element) of all that it holds, without padding."""
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for index, (spec, whole) in enumerate(zip(model.tensors, whole_arrays(model), strict=True)):
        for rank, array in scatter(spec, whole, mesh).items():
            found[rank] |= {(index, element) for element in array.flatten().tolist() if element >= 0}
    return found


@pytest.mark.parametrize("case", CASES)
def test_limits_and_own_bytes_are_those_counted_element_by_element(case):
    model = make_model(padded_to=2, tied=True)
    source, target = holdings(model, *case)
    held, needed = elements(model, source.mesh), elements(model, target.mesh)

    def size(which: set[tuple[int, int]]) -> int:
        return sum(ITEM_BYTES[model.tensors[tensor].dtype] for tensor, _ in which)

    nodes = defaultdict(lambda: (set(), set()))
    for rank in participants(source.mesh, target.mesh):
        for one, all_of_rank in zip(nodes[source.mesh.node(rank)], (held, needed), strict=True):
            one.update(all_of_rank[rank])
    found = report(model, source, target, Bandwidth())
    assert found.own.total == sum(size(held[rank] & needed[rank]) for rank in needed)
    assert found.received_limit == found.received.total == sum(size(needed[rank] - held[rank]) for rank in needed)
    assert found.received.most == max(size(needed[rank] - held[rank]) for rank in needed)
    assert found.entering_limit == sum(size(wanted - there) for there, wanted in nodes.values())
    assert found.entering.total == found.between.total == found.entering_limit
    assert found.within.total == found.within_limit == found.received_limit - found.entering_limit
    assert found.sent.most >= found.sent_limit


@pytest.mark.parametrize("case", CASES)
def test_traffic_is_that_of_the_plans_of_the_ranks(case):
    model = make_model()
    source, target = holdings(model, *case)
    mesh, ranks = source.mesh, participants(source.mesh, target.mesh)
    within, between, sent = ({rank: 0 for rank in ranks} for _ in range(3))
    for rank in ranks:
        for wave, part in enumerate(plan(model, source, target, rank).waves):
            for copy in part.receives:
                link = within if mesh.node(copy.source) == mesh.node(rank) else between
                link[rank] += num_elements(copy.box) * ITEM_BYTES[model.tensors[copy.tensor].dtype]
            for copy in part.sends if wave == 0 else ():
                sent[rank] += num_elements(copy.box) * ITEM_BYTES[model.tensors[copy.tensor].dtype]
    found = report(model, source, target, Bandwidth())
    for spread, by_rank in ((found.within, within), (found.between, between), (found.sent, sent)):
        values = sorted(by_rank.values())
        assert spread == Spread(values[0], values[(len(values) - 1) // 2], values[-1], sum(values))


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_the_arrays(case):
    model = make_model(padded_to=2)
    source, target = holdings(model, *case)
    sums = [Counter[int](), Counter[int](), Counter[int]()]
    for spec, whole in zip(model.tensors, whole_arrays(model), strict=True):
        before, after = scatter(spec, whole, source.mesh), scatter(spec, whole, target.mesh)
        for rank in participants(source.mesh, target.mesh):
            arrays = [each.get(rank, np.zeros(0)) for each in (before, after)]
            same = arrays[0] if np.array_equal(*arrays) else np.zeros(0)
            for total, array in zip(sums, (*arrays, same), strict=True):
                total[rank] += array.size * ITEM_BYTES[spec.dtype]
    found = report(model, source, target, Bandwidth())
    for spread, total in zip((found.before, found.after, found.shared), sums, strict=True):
        values = [total[rank] for rank in participants(source.mesh, target.mesh)]
        assert (spread.least, spread.most, spread.total) == (min(values), max(values), sum(values))
    assert found.buckets == 4 * bucket_bytes(model, target)


@pytest.mark.parametrize("case", [("tp4.pp2", "tp2.dp4", 8, 0), ("tp4.pp2", "tp2.dp4", 4, 0), ("tp8", "dp8", 8, 0)])
def test_messages_are_within_a_hundredth_of_those_that_the_executor_makes(case):
    model = model_spec(known_models()["llama3-1b"])
    source, target = holdings(model, *case)
    made: Counter[int] = Counter()
    for rank in range(8):
        for wave, part in enumerate(plan(model, source, target, rank).waves):
            copies = defaultdict(list)
            for copy in part.sends:
                copies[copy.destination].append(copy)
            for receiver, those in copies.items():
                ends = (source if wave == 0 else target), target
                number = len(divide(model, those, *ends, bucket_bytes(model, target), is_plain=True))
                made[rank] += number
                made[receiver] += number
    told = message_counts(Flows(model, source, target), model, source, target)
    assert told == {rank: pytest.approx(made[rank], rel=0.01) for rank in range(8)}


def test_time_is_that_of_the_busiest_link_of_each_wave():
    """TP2 on node 0 to DP2 on node 1, 8 MB: each rank fetches a half at 2 GB/s, and hands it on at 4 GB/s."""
    tensor = TensorSpec(name="weight", shape=(2, 1000, 1000), dtype="fp32", tp_dim=0, place=0)
    model = ModelSpec(tensors=(tensor,), num_layers=1)
    found = report(model, *holdings(model, "tp2", "dp2", 2, 2), Bandwidth(node=4.0, network=2.0))
    assert found.between.most == found.within.most == 4000000
    assert found.time_s == pytest.approx(2e-3 + 1e-3)


def test_equal_meshes_move_nothing():
    model = make_model()
    found = report(model, *holdings(model, "tp2.pp2", "tp2.pp2", 4, 0), Bandwidth())
    assert (found.received.total, found.sent_limit, found.messages.total, found.time_s) == (0, 0, 0, 0.0)
    assert found.shared == found.after


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999499, "999 kB"), (999500, "1.00 MB"), (16060522496, "16.1 GB")],
)
def test_bytes_have_three_digits(number, text):
    assert format_bytes(number) == text


# --- The picture ------------------------------------------------------------------------------------------------------


def area(regions: list) -> float:
    return sum((each.right - each.left) * (each.bottom - each.top) for each in regions)


def test_regions_of_the_picture_are_the_shares_and_their_origins():
    """TP2·PP2 to TP2 on two nodes of two: of each new shard one stage is the rank's own, and one is away."""
    model = make_model()
    source, target = holdings(model, "tp2.pp2", "tp2.dp2", 2, 0)
    nearby = Nearby(model, source.mesh)
    for rank in range(4):
        regions = nearby.regions(held_regions(model, target.mesh, rank), rank)
        assert area(held_regions(model, source.mesh, rank)) == 1 / 4 and area(regions) == 1 / 2
        origins = Counter(each.origin for each in regions)
        assert origins == {"own": 1, "network": 1}
    assert held_regions(model, source.mesh, 7) == []


def test_shards_of_fsdp_are_parts_of_the_picture():
    """Two groups of two ranks on two nodes: of the whole model a rank has its half and the other is in its node."""
    model = make_model()
    source, target = make_mesh("fsdp2.dp4", None, 2), make_mesh("dp4", None, 2)
    for rank in range(4):
        regions = Nearby(model, source).regions(held_regions(model, target, rank), rank)
        assert {each.origin: (each.left, each.right) for each in regions} == {
            "own": (rank % 2 / 2, (rank % 2 + 1) / 2),
            "node": (1 / 2 - rank % 2 / 2, 1 - rank % 2 / 2),
        }


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp4.dp2", "tp2.dp4"), pytest.param("tp2.pp2.vpp2.dp16", "tp4.dp16", marks=pytest.mark.slow)],
)
def test_picture_is_a_png_of_some_colours(tmp_path, before, after):
    path = tmp_path / "plan.png"
    assert cli.main(["plan", "reshard", "--from", before, "--to", after, "--draw", str(path)]) == 0
    from matplotlib.image import imread

    colours = np.unique(imread(path)[:, :, :3].reshape(-1, 3), axis=0)
    assert len(colours) > 20 and [each.name for each in tmp_path.iterdir()] == ["plan.png"]


# --- The command ------------------------------------------------------------------------------------------------------


def reshard(*words: str) -> list[str]:
    return ["plan", "reshard", *words]


def test_json_has_the_numbers_and_the_order(capsys):
    assert cli.main(reshard("--from", "tp4", "--to", "tp2.dp2", "--model", "llama3-1b", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["to"] == {"layout": "tp2.pp1.dp2", "ranks": [0, 2, 1, 3]}
    model = model_spec(known_models()["llama3-1b"])
    meshes = make_mesh("tp4", None, 8), make_mesh("tp2.dp2", (0, 2, 1, 3), 8)
    found = report(model, *(WeightHoldings(model, mesh) for mesh in meshes), Bandwidth())
    assert {name: told[name] for name in found.to_dict()} == json.loads(json.dumps(found.to_dict()))
    assert told["received"]["total"] == told["received_limit"]


def test_ranks_that_share_parameters_send_each_other_the_rest(capsys):
    assert cli.main(reshard("--from", "fsdp8", "--to", "dp8", "--json")) == 0
    fsdp = json.loads(capsys.readouterr().out)["received"]["total"]
    # All 8 ranks lack 7 of 8 parts of 16.06 GB.
    assert fsdp == pytest.approx(8 * 7 / 8 * 16.06e9, rel=1e-3)


def test_order_as_given_moves_more(capsys):
    """TP4 to TP2 moves 3/8 of the cut weights instead of 1/4 where the groups are contiguous."""
    moved = []
    for order in ("max-overlap", "given"):
        assert cli.main(reshard("--from", "tp4", "--to", "tp2.dp2", "--order", order, "--json")) == 0
        moved.append(json.loads(capsys.readouterr().out)["received"]["total"])
    assert moved[1] / moved[0] == pytest.approx(1.5, rel=1e-3)


def test_table_has_limit_and_ratio_beside_what_is_received(capsys):
    assert cli.main(reshard("--from", "tp4.pp2.dp2", "--to", "tp2.dp8", "--nodes", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama3-8b, 16.1 GB, 16 ranks on 2 nodes of 8")
    (row,) = (line for line in lines if "receives in all" in line)
    assert row.split()[-1] == "1.000"


@pytest.mark.parametrize("line", [line for line in reshard_command._EXAMPLES.splitlines() if line.startswith("  ")])
def test_examples_run(line, capsys):
    assert cli.main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--from tp2x --to dp2", "cannot read 'tp2x'"),
        ("--from pp5 --to dp5", "--from: pp=5 does not divide model.num_layers=32"),
        ("--from dp5 --to pp5 --order given", "--to: pp=5 does not divide model.num_layers=32"),
        ("--from tp5 --to dp5", "--from: tp=5 does not divide model.num_attention_heads=32"),
        ("--from dp64 --to tp64", "--to: tp=64 does not divide model.num_attention_heads=32"),
        ("--from vpp2 --to dp1", "--from.vpp=2: virtual chunks interleave pipeline stages"),
        ("--from dp4 --to dp4.ep4", "--to: ep=4 does not divide model.num_experts=null"),
        ("--from dp8 --to fsdp8", "--to: tp1.pp1.dp8.fsdp8: a rollout needs whole layers"),
        ("--from tp2 --to dp2 --model gpt9", "--model gpt9: not one of llama3-1b, "),
        ("--from tp2 --to dp2 --nodes 3", "--nodes 3 does not divide the 2 ranks"),
        ("--from tp2 --to dp2 --nodes 0", "--nodes 0 does not divide"),
        ("--from tp2 --to dp2 --ranks-per-node 0", "ranks_per_node=0: expected at least 1"),
        ("--from tp2 --to dp2 --first-rank -1", "ranks [-1, 0]: expected distinct ranks from 0 up"),
        ("--from tp2 --to dp2 --bandwidth bus=3", "--bandwidth 'bus=3': expected GB/s above 0"),
        ("--from tp2 --to dp2 --bandwidth node=0", "expected GB/s above 0"),
        ("--from fsdp2 --to tp2 --draw plan.png", "--draw with --from tp1.pp1.dp2.fsdp2 --to tp2.pp1.dp1: fsdp cuts"),
        ("--from tp2 --to dp2 --draw /nowhere/plan.png", "--draw /nowhere/plan.png: cannot be written"),
    ],
)
def test_what_is_wrong_is_named(words, says, capsys):
    assert cli.main(reshard(*words.split())) == 2
    assert says in capsys.readouterr().err


def test_words_that_are_no_options_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(reshard("--from", "tp2", "--to", "dp2", "trainer.steps=3"))
    assert caught.value.code == 2 and "trainer.steps=3" in capsys.readouterr().err


def test_70b_on_512_ranks_takes_under_five_seconds_and_no_torch(tmp_path):
    """Seconds of the processor: of the wall clock they would depend on what else runs here."""
    code = "import sys\nfrom hybridflow import cli\nstatus = cli.main(sys.argv[1:])\n"
    code += "heavy = {'torch', 'megatron', 'mpi4py'} & sys.modules.keys()\nassert not heavy, heavy\nsys.exit(status)"
    words = reshard("--from", "tp8.pp8.dp8", "--to", "tp4.pp2.dp64", "--model", "llama3-70b")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_command(words, tmp_path, program=[sys.executable, "-c", code], environ=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.codes == (0,), done.err
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0
