"""Running a schedule on one rank: scopes, decisions, phases, and roles that return the wrong thing."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.compiler import compile_flow
from hybridflow.dataflow.graph import Flow, Node, repeat
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.role import Role
from hybridflow.dataflow.run import Executor
from hybridflow.dataflow.schedule import Branch, Call, Instruction, Loop
from hybridflow.errors import GraphError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.timeline import Timeline
from hybridflow.parallel.coordinator import Coordinator
from tests.support.roles import MethodRole

MESHES = {name: DeviceMesh(name=name, layout=ParallelLayout(), ranks=(0,), ranks_per_node=1) for name in ("m", "job")}
WORLD = SimpleNamespace(rank=0, deadline_s=1.0, coordinator=lambda ranks: Coordinator(0, ranks, None))


class Recorder(MethodRole):
    """A role that notes what it is asked to do; new samples start where the last ones ended."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[object] = []
        self.next_id = 0

    def enter_phase(self, phase: str) -> None:
        self.log.append(phase)

    def sample(self, batch: Batch, decided) -> Batch:
        assert len(batch) == 0 and not batch.columns
        ids = torch.tensor([self.next_id + 1, self.next_id])
        self.next_id += 2
        return Batch(ids, {"tokens": ids * 10})

    def double(self, batch: Batch, decided) -> Batch:
        return Batch(batch.ids, {"doubled": batch.columns["tokens"] * 2})

    def show(self, batch: Batch, decided) -> None:
        self.log.append((dict(decided), {name: column.tolist() for name, column in batch.columns.items()}))


def node(call: str, reads: str = "", writes: str = "", **options) -> Node:
    name = options.pop("name", f"r.{call}")
    return Node(
        name=name, role="r", call=call, mesh="m", reads=tuple(reads.split()), writes=tuple(writes.split()), **options
    )


SAMPLE = node("sample", writes="tokens", source=True)


def run(program: tuple[Instruction, ...], role: Role | None = None, **decisions) -> Recorder:
    role = role if role is not None else Recorder()
    timeline = Timeline()
    Executor(
        schedule=program,
        roles={"r": role},
        decisions=decisions,
        mover=Mover(WORLD, MESHES, 2),  # type: ignore[arg-type]
        world=WORLD,  # type: ignore[arg-type]
        meshes=MESHES,
        timeline=timeline,
    ).run()
    assert {span.kind for span in timeline.spans} <= {"call", "move", "control", "phase"}
    return role  # type: ignore[return-value]


def counter(*values: object):
    """Decide on each value in turn, and start again after the last."""
    turns = iter(())

    def decide() -> object:
        nonlocal turns
        value = next(turns, None)
        if value is None:
            turns = iter(values)
            value = next(turns)
        return value

    return decide


def test_samples_come_in_order_of_id_with_their_order() -> None:
    log = run(compile_flow(SAMPLE >> node("double", "tokens", "doubled") >> node("show", "doubled order"), MESHES)).log
    assert log == [({}, {"doubled": [0, 20], "order": [0, 1]})]


def test_loops_and_branches_pass_their_decisions_on() -> None:
    body = (*compile_flow(Flow(elements=(SAMPLE,)), MESHES), Call("r.show", "r", "show", "m", ("tokens",)))
    program = (Loop("step", "job", (*body, Branch("odd", "job", body[-1:]))),)
    steps = iter([1, 2, 0])
    seen = iter([False, True])
    assert run(program, step=lambda: next(steps), odd=lambda: next(seen)).log == [
        ({"step": 1}, {"tokens": [0, 10]}),
        ({"step": 2}, {"tokens": [20, 30]}),
        ({"step": 2, "odd": True}, {"tokens": [20, 30]}),
    ]


def test_a_turn_sees_outer_columns_and_its_own_end_with_it() -> None:
    turn = node("double", "tokens", "doubled") >> node("show", "doubled tokens")
    flow = SAMPLE >> repeat("epoch", Flow(elements=(repeat("mini_batch", turn, "m"),)), "m")
    log = run(compile_flow(flow, MESHES), epoch=counter(1, 2, 0), mini_batch=counter("a", "b", 0)).log
    assert [decided for decided, _ in log] == [
        {"epoch": epoch, "mini_batch": part} for epoch in (1, 2) for part in ("a", "b")
    ]
    assert all(columns == {"doubled": [0, 20], "tokens": [0, 10]} for _, columns in log)
    late = (*compile_flow(flow, MESHES), Call("r.late", "r", "show", "m", ("doubled",)))
    with pytest.raises(GraphError, match=r"'r\.late' reads column 'doubled', which rank 0 does not hold on m"):
        run(late, epoch=counter(1, 0), mini_batch=counter("a", 0))


def test_validation_hides_the_samples_outside_only_while_it_lasts() -> None:
    validation = compile_flow(SAMPLE >> node("show", "tokens order"), MESHES)
    step = compile_flow(SAMPLE >> node("double", "tokens", "doubled"), MESHES)
    after = Call("r.show", "r", "show", "m", ("tokens", "doubled"))
    log = run((*step, Branch("validate", "job", validation), after), validate=lambda: True).log
    assert log == [
        ({"validate": True}, {"tokens": [20, 30], "order": [0, 1]}),
        ({}, {"tokens": [0, 10], "doubled": [0, 20]}),
    ]
    stale = (*step, Branch("validate", "job", (*compile_flow(Flow(elements=(SAMPLE,)), MESHES), after)))
    with pytest.raises(GraphError, match="reads column 'doubled'"):
        run(stale, validate=lambda: True)


def test_phases_are_entered_in_turn() -> None:
    flow = node("sample", writes="tokens", source=True, phase="rollout") >> node("show", "tokens", phase="update")
    assert run(compile_flow(flow, MESHES)).log == ["rollout", "update", ({}, {"tokens": [0, 10]})]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda batch: None,
            r"'r.double' \(r.double\) returned columns \[\] on rank 0; it declares to write \['doubled'\]",
        ),
        (lambda batch: batch, r"returned columns \['tokens'\]"),
        (
            lambda batch: Batch(batch.ids.flip(0), {"doubled": batch.columns["tokens"]}),
            "returned other samples than it was given on rank 0 .2 for 2.; return the ids",
        ),
    ],
)
def test_a_role_that_returns_the_wrong_thing_is_named(answer, message: str) -> None:
    role = Recorder()
    role.double = lambda batch, decided: answer(batch)  # type: ignore[method-assign]
    with pytest.raises(GraphError, match=message):
        run(compile_flow(SAMPLE >> node("double", "tokens", "doubled"), MESHES), role)


def test_a_schedule_is_checked_before_it_runs() -> None:
    with pytest.raises(GraphError, match=r"call x\.y: there is no x\.y; the roles are r"):
        run((Call("x.y", "x", "y", "m"),))
    with pytest.raises(GraphError, match=r"call r\.fly: there is no r\.fly"):
        run((Branch("b", "m", (Call("r.fly", "r", "fly", "m"),)),), b=lambda: False)
    with pytest.raises(GraphError, match="loop step: nothing decides it; the decisions are none"):
        run((Loop("step", "m", ()),))
