"""Columns between meshes of real processes: bit exact, balanced, in any placement; and whole programs on them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hybridflow.dataflow.batch import Batch, Column, Ragged
from hybridflow.dataflow.compiler import compile_flow
from hybridflow.dataflow.graph import repeat
from hybridflow.dataflow.move import Mover, balance
from hybridflow.dataflow.run import Executor
from hybridflow.dataflow.schedule import Branch, Instruction, Loop, Move, project, rank_sets
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.timeline import Timeline
from hybridflow.parallel.world import World
from tests.support import flows
from tests.support.flows import node
from tests.support.ranks import run_ranks
from tests.support.roles import MethodRole

PER_NODE = 2
CHUNK = 4
COLUMNS = ("tokens", "log_probs", "pairs", "scores", "flags", "vectors")


def mesh(name: str, layout: str, ranks: tuple[int, ...]) -> DeviceMesh:
    return flows.mesh(name, layout, ranks, PER_NODE)


def length(sample: int) -> int:
    return sample * 7 % 5


def columns_of(ids: list[int]) -> dict[str, Column]:
    """Every column of a sample follows from its id; log-probs have arbitrary bits, with NaN and -0 among them."""
    rows = []
    for sample in ids:
        generator = torch.Generator().manual_seed(sample)
        bits = torch.randint(-(2**31), 2**31, (length(sample),), generator=generator).to(torch.int32)
        bits[:1] = (0x7FC00001, -0x80000000, 0x7F800000)[sample % 3]
        rows.append(bits)
    lengths = torch.tensor([length(sample) for sample in ids], dtype=torch.int64)
    odd = torch.tensor([sample % 2 for sample in ids], dtype=torch.int64)
    tokens = torch.cat([torch.empty(0, dtype=torch.int32), *rows])
    return {
        "tokens": Ragged(tokens.long(), lengths),
        "log_probs": Ragged(tokens.view(torch.float32), lengths),
        "pairs": Ragged(torch.tensor(ids, dtype=torch.int8).repeat_interleave(odd)[:, None].repeat(1, 3), odd),
        "scores": torch.tensor(ids, dtype=torch.float64) / 3,
        "flags": torch.tensor([sample % 3 == 0 for sample in ids], dtype=torch.bool),
        "vectors": torch.tensor(ids, dtype=torch.bfloat16)[:, None].repeat(1, 5),
    }


def is_equal(got: Column, expected: Column) -> bool:
    """Same kind, type, shape and bits."""
    if isinstance(expected, Ragged):
        return (
            isinstance(got, Ragged)
            and torch.equal(got.lengths, expected.lengths)
            and is_equal(got.values, expected.values)
        )
    if not isinstance(got, torch.Tensor) or (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(got.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))


PLACES = [
    ("same ranks, more replicas", ("tp2.dp2", (0, 1, 2, 3)), ("dp4", (0, 1, 2, 3))),
    ("same ranks, fewer replicas", ("dp4", (0, 1, 2, 3)), ("tp2.dp2", (3, 1, 0, 2))),
    ("disjoint ranks", ("dp2", (0, 3)), ("pp2.dp2", (1, 2, 4, 5))),
    ("overlapping ranks", ("tp2.pp2", (0, 1, 2, 3)), ("dp3", (3, 4, 5))),
    ("from stages", ("pp3.dp2", (0, 1, 2, 3, 4, 5)), ("tp3.dp2", (5, 4, 3, 2, 1, 0))),
    ("one rank to all", ("dp1", (4,)), ("dp6", (0, 1, 2, 3, 4, 5))),
    ("the other stages of one place", ("tp2.pp2", (2, 3, 4, 5)), ("tp2.pp2", (2, 3, 4, 5))),
]
COUNTS = (0, 1, 3, 13)


def move_everywhere(world: World) -> list[dict[str, Any]]:
    found = []
    for title, (from_layout, from_ranks), (to_layout, to_ranks) in PLACES:
        meshes = {"from": mesh("from", from_layout, from_ranks), "to": mesh("to", to_layout, to_ranks)}
        there, back = Move(COLUMNS, "from", "to"), Move(("doubled",), "to", "from")
        world.make_groups(rank_sets((there, back), meshes))
        if world.rank not in meshes["from"] and world.rank not in meshes["to"]:
            continue
        mover = Mover(world, meshes, CHUNK)
        for count in COUNTS:
            source = None
            if world.rank in meshes["from"]:
                dp = meshes["from"].coordinate(world.rank).dp
                # Uneven: the second replica has none of the first few samples.
                ids = [5 * sample for sample in range(count) if (sample // 3) % meshes["from"].layout.dp == dp]
                if world.rank in meshes["from"].output_ranks(dp):
                    source = Batch(torch.tensor(ids, dtype=torch.int64), columns_of(ids))
            is_one_place = meshes["from"].key == meshes["to"].key
            moved = mover.move(there, source, source if is_one_place else None)
            record: dict[str, Any] = {"title": title, "count": count}
            if moved is not None:
                ids = moved.ids.tolist()
                record["ids"] = ids
                record["dp"] = meshes["to"].coordinate(world.rank).dp
                record["order"] = moved.columns["order"].tolist()
                expected = columns_of(ids)
                record["wrong"] = [name for name in COLUMNS if not is_equal(moved.columns[name], expected[name])]
                moved = moved.with_columns({"doubled": moved.ids * 2})
            returned = mover.move(back, moved, moved if is_one_place else source)
            if returned is not None and source is not None:
                record["is_back"] = torch.equal(returned.ids, source.ids)
                record["is_doubled"] = returned.columns["doubled"].tolist() == (source.ids * 2).tolist()
            found.append(record)
    return found


def test_columns_arrive_bit_exact_and_balanced_and_find_their_way_back() -> None:
    ranks = run_ranks(move_everywhere, 6, ranks_per_node=PER_NODE)
    for title, (from_layout, _), (to_layout, to_ranks) in PLACES:
        num_parts = ParallelLayout.parse(to_layout).dp
        for count in COUNTS:
            records = [r for found in ranks for r in found if (r["title"], r["count"]) == (title, count)]
            assert all(r.get("is_back", True) and r.get("is_doubled", True) for r in records), (title, count)
            received = [r for r in records if "ids" in r]
            assert len(received) == len(to_ranks) and not any(r["wrong"] for r in received), (title, received)
            everything = [5 * sample for sample in range(count)]
            parts = balance([length(sample) for sample in everything], num_parts, CHUNK)
            for r in received:
                assert r["order"] == [sample // 5 for sample in r["ids"]], "the position among all samples"
                if title != "the other stages of one place":
                    mine = [sample for sample, part in zip(everything, parts, strict=True) if part == r["dp"]]
                    assert r["ids"] == mine, (title, count, from_layout)


class Numbers(MethodRole):
    """Roles whose arithmetic is exact: a difference between placements is a sample lost, doubled or mixed up."""

    def __init__(self, where: DeviceMesh, rank: int) -> None:
        super().__init__()
        self.where = where
        self.rank = rank
        self.prompt_index = 0
        self.seen: list[tuple[Any, ...]] = []

    def answer(self, batch: Batch, name: str, column: Column) -> Batch | None:
        is_output_rank = self.rank in self.where.output_ranks(self.where.coordinate(self.rank).dp)
        return Batch(batch.ids, {name: column}) if is_output_rank else None

    def sample(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        dp = self.where.coordinate(self.rank).dp
        ids = [self.prompt_index + index for index in range(10) if index % self.where.layout.dp == dp]
        self.prompt_index += 10
        columns = columns_of(ids)
        new = Batch(torch.tensor(ids, dtype=torch.int64), {})
        return self.answer(new, "tokens", columns["tokens"])

    def score(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        tokens = batch.columns["tokens"]
        assert isinstance(tokens, Ragged)
        return self.answer(
            batch, "scores", torch.tensor([int(row.sum()) for row in tokens.to_list()], dtype=torch.int64)
        )

    def values(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        tokens = batch.columns["tokens"]
        assert isinstance(tokens, Ragged)
        return self.answer(batch, "values", Ragged(tokens.values * 3, tokens.lengths))

    def advantages(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        values, scores = batch.columns["values"], batch.columns["scores"]
        assert isinstance(values, Ragged) and isinstance(scores, torch.Tensor)
        spread = torch.repeat_interleave(scores, values.lengths)
        return self.answer(batch, "advantages", Ragged(spread - values.values, values.lengths))

    def update(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        order = batch.columns["order"]
        assert isinstance(order, torch.Tensor)
        chosen = batch.select((order // CHUNK == decided["mini_batch"] - 1).nonzero().view(-1))
        (name,) = set(batch.columns) - {"order", "tokens"}
        column = chosen.columns[name]
        assert isinstance(column, Ragged)
        for sample, row in zip(chosen.ids.tolist(), column.to_list(), strict=True):
            self.seen.append((decided["step"], decided["mini_batch"], name, sample, row.tolist()))

    def report(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        scores = batch.columns["scores"]
        self.seen.append((decided["step"], "held out", batch.ids.tolist(), scores.tolist()))  # type: ignore[union-attr]


def program_on(meshes: dict[str, DeviceMesh]) -> tuple[Instruction, ...]:
    sample = node("actor.sample", "rollout", writes="tokens", source=True)
    score = node("reward.score", "rollout", "tokens", "scores")
    step = (
        sample
        >> score
        >> node("critic.values", "critic", "tokens", "values")
        >> node("trainer.advantages", "update", "scores values", "advantages")
        >> repeat(
            "mini_batch",
            node("critic.update", "critic", "tokens values order")
            >> node("trainer.update", "update", "advantages tokens order"),
            "job",
        )
    )
    validation = sample >> score >> node("judge.report", "job", "scores")
    validate = Branch("validate", "job", compile_flow(validation, meshes))
    return (Loop("step", "job", (*compile_flow(step, meshes), validate)),)


def turns(count: int) -> Any:
    state = {"turn": 0}

    def decide() -> int:
        state["turn"] = (state["turn"] + 1) % (count + 1)
        return state["turn"]

    return decide


PLACEMENTS = {
    "alone": {"rollout": ("dp1", (0,)), "update": ("dp1", (0,)), "critic": ("dp1", (0,)), "job": ("dp1", (0,))},
    "colocated": {
        "rollout": ("dp4", (0, 1, 2, 3)),
        "update": ("tp2.dp2", (0, 1, 2, 3)),
        "critic": ("pp2.dp2", (0, 1, 2, 3)),
        "job": ("tp4", (0, 1, 2, 3)),
    },
    "split": {
        "rollout": ("dp2", (0, 1)),
        "update": ("tp2", (0, 1)),
        "critic": ("pp2", (2, 3)),
        "job": ("tp4", (0, 1, 2, 3)),
    },
    "overlapping": {
        "rollout": ("dp3", (0, 1, 2)),
        "update": ("pp2", (1, 2)),
        "critic": ("dp2", (2, 3)),
        "job": ("tp4", (0, 1, 2, 3)),
    },
}


def run_program(world: World, places: dict[str, tuple[str, tuple[int, ...]]]) -> list[tuple[Any, ...]]:
    meshes = {name: mesh(name, layout, ranks) for name, (layout, ranks) in places.items()}
    program = program_on(meshes)
    world.make_groups(rank_sets(program, meshes))
    homes = {"actor": "rollout", "reward": "rollout", "critic": "critic", "trainer": "update", "judge": "job"}
    roles = {role: Numbers(meshes[name], world.rank) for role, name in homes.items() if world.rank in meshes[name]}
    step_turns = turns(3)
    steps: list[int] = []

    def step() -> int:
        steps.append(step_turns())
        return steps[-1]

    timeline = Timeline()
    Executor(
        schedule=project(program, world.rank, meshes),
        roles=roles,
        decisions={"step": step, "mini_batch": turns(3), "validate": lambda: steps[-1] == 2},
        mover=Mover(world, meshes, CHUNK),
        world=world,
        meshes=meshes,
        timeline=timeline,
    ).run()
    # One rank of each replica speaks; the roles that hold nothing have seen nothing.
    return [
        entry
        for role, numbers in roles.items()
        if meshes[homes[role]].coordinate(world.rank)[0::3] == (0, 0)
        for entry in numbers.seen
    ]


@pytest.mark.parametrize("placement", ["colocated", "split", "overlapping"])
def test_placements_give_the_same_numbers(placement: str) -> None:
    expected = sorted(map(repr, run_ranks(run_program, 1, PLACEMENTS["alone"])[0]))
    seen = [entry for entries in run_ranks(run_program, 4, PLACEMENTS[placement]) for entry in entries]
    # Three steps of ten samples for critic and trainer, and one validation.
    assert len(expected) == 2 * 3 * 10 + 1
    assert sorted(map(repr, seen)) == expected
