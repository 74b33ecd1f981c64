"""Compiled programs: where columns move, what runs at the same time, and that every rank has what its calls read."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridflow.dataflow.compiler import compile_flow, compile_stages
from hybridflow.dataflow.graph import Flow, Node, repeat
from hybridflow.dataflow.render import mermaid, plan_table
from hybridflow.dataflow.schedule import (
    Branch,
    Call,
    Concurrent,
    Instruction,
    Loop,
    Move,
    Phase,
    describe,
    project,
    rank_sets,
    walk,
)
from hybridflow.errors import GraphError
from hybridflow.layout.mesh import DeviceMesh
from tests.support.flows import mesh, node

COLOCATED = {
    "rollout": mesh("rollout", "dp4", range(4)),
    "update": mesh("update", "tp2.dp2", range(4)),
    "critic": mesh("critic", "pp2.dp2", range(4)),
    "job": mesh("job", "dp4", range(4)),
}
SPLIT = {**COLOCATED, "critic": mesh("critic", "pp2", range(4, 6)), "job": mesh("job", "dp6", range(6))}
ALONE = {name: mesh(name, "dp1", range(1)) for name in COLOCATED}

SAMPLE = node("actor.sample", "rollout", writes="tokens mask", source=True, phase="rollout")
SCORE = node("reward.score", "rollout", "tokens", "scores")
OLD = node("actor.log_probs", "update", "tokens", "old_log_probs", phase="update")
VALUES = node("critic.values", "critic", "tokens", "values")
ADVANTAGES = node("ppo.advantages", "update", "scores values mask", "advantages returns")
CRITIC_UPDATE = node("critic.update", "critic", "tokens values returns order")
ACTOR_UPDATE = node("actor.update", "update", "tokens old_log_probs advantages order", phase="update")
PPO = SAMPLE >> SCORE >> OLD >> VALUES >> ADVANTAGES >> repeat("mini_batch", CRITIC_UPDATE >> ACTOR_UPDATE, "job")


def lines(program: tuple[Instruction, ...]) -> list[str]:
    return [describe(instruction) for instruction in walk(program)]


def test_ppo_on_shared_ranks() -> None:
    assert lines(compile_flow(PPO, COLOCATED)) == [
        "phase actor rollout",
        "call actor.sample",
        "call reward.score",
        # One move brings what log_probs, advantages and update will read of the rollout's columns.
        "move tokens, scores, mask from rollout to update",
        "phase actor update",
        "call actor.log_probs",
        "move tokens from rollout to critic",
        "call critic.values",
        "move values from critic to update",
        "call ppo.advantages",
        # What the loop's body reads moves once, before it. Values fill the critic's first stage, which lacked them.
        "move values from critic to critic",
        "move returns from update to critic",
        "loop mini_batch",
        "call critic.update",
        # No phase here: the actor is in it, and the body keeps it.
        "call actor.update",
    ]


def test_ppo_with_the_critic_on_its_own_ranks() -> None:
    program = compile_flow(PPO, SPLIT)
    assert lines(program) == [
        "phase actor rollout",
        "call actor.sample",
        # It needs ranks of both branches, so it comes before them.
        "move tokens from rollout to critic",
        "concurrent",
        "call reward.score",
        "move tokens, scores, mask from rollout to update",
        "phase actor update",
        "call actor.log_probs",
        "call critic.values",
        "move values from critic to update",
        "call ppo.advantages",
        "move values from critic to critic",
        "move returns from update to critic",
        "loop mini_batch",
        "concurrent",
        "call critic.update",
        "call actor.update",
    ]
    assert [describe(instruction) for instruction in walk(project(program, 5, SPLIT))] == [
        "move tokens from rollout to critic",
        "call critic.values",
        "move values from critic to update",
        "move values from critic to critic",
        "move returns from update to critic",
        "loop mini_batch",
        "call critic.update",
    ]
    assert rank_sets(program, SPLIT) == ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (4, 5))


def test_one_rank_moves_nothing_but_the_order() -> None:
    program = compile_flow(PPO, ALONE)
    assert [each for each in walk(program) if isinstance(each, Move)] == [Move((), "rollout", "critic")]
    assert rank_sets(program, ALONE) == ()


def test_two_names_of_one_place_need_no_move() -> None:
    meshes = {"a": mesh("a", "tp2", range(2)), "b": mesh("b", "tp2", range(2)), "c": mesh("c", "tp2", (1, 0))}
    flow = node("x.make", "a", writes="t", source=True) >> node("x.use", "b", "t") >> node("x.far", "c", "t")
    assert lines(compile_flow(flow, meshes)) == ["call x.make", "call x.use", "move t from a to c", "call x.far"]


def test_meshes_of_several_stages_fill_the_others_before_a_call() -> None:
    meshes = {"m": mesh("m", "pp2.dp2", range(4))}
    flow = node("x.make", "m", writes="t u", source=True) >> node("x.use", "m", "t") >> node("x.more", "m", "u")
    assert lines(compile_flow(flow, meshes)) == ["call x.make", "move t, u from m to m", "call x.use", "call x.more"]


def test_moves_from_a_common_source_come_before_concurrent_calls() -> None:
    meshes = {name: mesh(name, "dp1", (rank,)) for name, rank in (("a", 0), ("b", 1), ("c", 2))}
    flow = node("x.make", "a", writes="t", source=True) >> node("x.left", "b", "t") >> node("x.right", "c", "t")
    assert lines(compile_flow(flow, meshes)) == [
        "call x.make",
        "move t from a to b",
        "move t from a to c",
        "concurrent",
        "call x.left",
        "call x.right",
    ]


def test_a_role_enters_a_phase_only_when_it_changes() -> None:
    meshes = {"m": mesh("m", "dp1", range(1))}
    make = node("a.make", "m", writes="t", source=True, phase="p")
    same = node("a.same", "m", "t", phase="p")
    other = node("a.other", "m", "t", phase="q")
    assert lines(compile_flow(make >> same >> other, meshes))[:5:2] == ["phase a p", "call a.same", "call a.other"]
    # A body that changes the phase must set it on every turn, and leaves it unknown.
    program = compile_flow(make >> repeat("turn", same >> other, "m") >> node("a.last", "m", "t", phase="q"), meshes)
    assert lines(program) == [
        "phase a p",
        "call a.make",
        "loop turn",
        "phase a p",
        "call a.same",
        "phase a q",
        "call a.other",
        "phase a q",
        "call a.last",
    ]


def test_a_change_of_phase_is_not_beside_work_on_other_ranks_of_the_role() -> None:
    # The actor's update ranks 2, 3 reshard when it samples on 0, 1, so the critic on 2, 3 cannot run meanwhile.
    meshes = {"a": mesh("a", "dp2", range(2)), "b": mesh("b", "dp2", (2, 3))}
    first = node("data.read", "a", writes="t", source=True)
    flow = first >> node("actor.score", "a", "t", phase="rollout") >> node("critic.values", "b", "t")
    flow = flow >> node("actor.update", "b", "t", phase="update")
    program = compile_flow(flow, meshes)
    assert not any(isinstance(each, Concurrent) for each in walk(program))
    assert Phase("actor", "rollout") in project(program, 3, meshes)


def test_epochs_are_loops_in_loops() -> None:
    update = repeat("epoch", Flow(elements=(repeat("mini_batch", ACTOR_UPDATE, "update"),)), "update")
    flow = SAMPLE >> SCORE >> OLD >> VALUES >> ADVANTAGES >> update
    program = compile_flow(flow, COLOCATED)
    assert program[-1] == Loop(
        "epoch",
        "update",
        (
            Loop(
                "mini_batch",
                "update",
                (Call("actor.update", "actor", "update", "update", ACTOR_UPDATE.reads, ()),),
            ),
        ),
    )
    assert not any(isinstance(each, Move) for each in walk(program[-1:]))


def test_refills_fill_a_buffer_until_the_batch_is_full() -> None:
    refill = repeat("refill", SAMPLE >> SCORE >> node("buffer.add", "rollout", "tokens scores"), "job")
    take = node("buffer.take", "rollout", writes="tokens scores advantages", source=True)
    program = compile_flow(refill >> take >> node("actor.update", "update", "tokens advantages"), COLOCATED)
    assert lines(program) == [
        "loop refill",
        "phase actor rollout",
        "call actor.sample",
        "call reward.score",
        "call buffer.add",
        "call buffer.take",
        "move tokens, advantages from rollout to update",
        "call actor.update",
    ]


def test_validation_and_saving_are_branches_of_the_training_loop() -> None:
    step = compile_flow(PPO, SPLIT)
    validation = compile_flow(
        node("actor.sample_greedy", "rollout", writes="tokens", source=True, phase="rollout")
        >> SCORE
        >> node("metrics.accuracy", "rollout", "scores"),
        SPLIT,
    )
    save = (Call("actor.save", "actor", "save", "update"), Call("critic.save", "critic", "save", "critic"))
    program = (
        *validation,
        Loop("train_step", "job", (*step, Branch("validate", "job", validation), Branch("save", "job", save))),
        *validation,
    )
    (loop,) = project(program, 4, SPLIT)
    assert isinstance(loop, Loop)
    # Rank 4 has no part in the validation, but in the decision about it.
    assert loop.body[-2] == Branch("validate", "job", ())
    assert loop.body[-1] == Branch("save", "job", (save[1],))


def test_rollout_one_step_ahead_of_training() -> None:
    meshes = {
        "rollout": mesh("rollout", "dp2", range(2)),
        "update": mesh("update", "tp2", (2, 3)),
        "job": mesh("job", "dp4", range(4)),
    }
    sample = compile_flow(Flow(elements=(node("generator.sample", "rollout", writes="tokens", source=True),)), meshes)
    train = compile_flow(
        node("queue.take", "update", writes="tokens", source=True) >> node("actor.update", "update", "tokens"), meshes
    )
    hand_over = (Move(("tokens",), "rollout", "update"), Call("queue.put", "queue", "put", "update", ("tokens",)))
    program = (*sample, *hand_over, Loop("train_step", "job", (Concurrent((sample, train)), *hand_over)))
    assert lines(project(program, 0, meshes)[2:]) == [
        "loop train_step",
        "call generator.sample",
        "move tokens from rollout to update",
    ]
    assert lines(project(program, 2, meshes)[2:]) == [
        "loop train_step",
        "call queue.take",
        "call actor.update",
        "move tokens from rollout to update",
        "call queue.put",
    ]


def test_programs_that_would_hang_are_refused() -> None:
    on_critic = Call("critic.update", "critic", "update", "critic")
    with pytest.raises(
        GraphError, match=r"rank 4 takes part in 'call critic.update' inside 'loop turn', which mesh 'update'"
    ):
        project((Loop("turn", "update", (on_critic,)),), 4, SPLIT)
    with pytest.raises(GraphError, match="rank 0 has work in 2 bodies of one concurrent instruction"):
        project((Concurrent(((on_critic,), (Call("actor.save", "actor", "save", "update"),))),), 0, COLOCATED)
    with pytest.raises(GraphError, match=r"call a\.b is on mesh 'gpu'; the meshes are rollout, update, critic, job"):
        project((Call("a.b", "a", "b", "gpu"),), 0, COLOCATED)
    with pytest.raises(GraphError, match=r"node 'x\.y' is on mesh 'nowhere'"):
        compile_flow(SAMPLE >> repeat("turn", node("x.y", "nowhere", "tokens"), "job"), COLOCATED)
    with pytest.raises(GraphError, match="repeat 'turn' is on mesh 'nowhere'"):
        compile_flow(SAMPLE >> repeat("turn", SCORE, "nowhere"), COLOCATED)


LAYOUTS = ["dp{n}", "tp{n}", "pp{n}", "pp2.dp{h}", "tp2.pp2.dp{q}"]


@st.composite
def jobs(draw) -> tuple[Flow, dict[str, DeviceMesh]]:
    """A random flow over random meshes of eight ranks: same, disjoint and partly overlapping."""
    meshes = {"job": mesh("job", "dp8", range(8))}
    for index in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 2, 4, 8]))
        start = draw(st.integers(0, 8 - size))
        text = draw(st.sampled_from(LAYOUTS)).format(n=size, h=size // 2, q=size // 4)
        assume("0" not in text)
        meshes[f"m{index}"] = mesh(f"m{index}", text, range(start, start + size))
    places = st.sampled_from([name for name in meshes if name != "job"])
    count = 0

    def make(known: list[str], depth: int) -> list:
        nonlocal count
        elements: list = []
        known = list(known)
        for _ in range(draw(st.integers(1, 5))):
            if depth < 2 and draw(st.integers(0, 4)) == 0:
                elements.append(repeat(f"turn{count}", Flow(elements=tuple(make(known, depth + 1))), "job"))
                continue
            count += 1
            reads = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True)))
            written = (f"c{count}",) if draw(st.booleans()) else ()
            phase = draw(st.sampled_from([None, None, "p", "q"]))
            role = draw(st.sampled_from("abc"))
            elements.append(
                Node(name=f"n{count}", role=role, call="f", mesh=draw(places), reads=reads, writes=written, phase=phase)
            )
            known += written
        return elements

    source = Node(name="source", role="a", call="f", mesh=draw(places), writes=("s", "t"), source=True)
    return Flow(elements=(source, *make(["s", "t", "order"], 0))), meshes


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_every_rank_has_what_its_calls_read(job) -> None:
    """Play the program with sets of columns: complete at each call, phases right, no column moved twice to a place."""
    flow, meshes = job
    program = compile_flow(flow, meshes)
    for rank in range(8):
        project(program, rank, meshes)
    phases_of = {each.name: each.phase for each in flow.nodes()}

    def play(body: tuple[Instruction, ...], held: set, phase: dict) -> None:
        for instruction in body:
            match instruction:
                case Call():
                    place = meshes[instruction.mesh]
                    for rank in place.ranks:
                        assert all((place.key, rank, column) in held for column in instruction.reads), describe(
                            instruction
                        )
                    wanted = phases_of[instruction.name]
                    assert wanted is None or phase[instruction.role] == wanted
                    owners = [rank for dp in range(place.layout.dp) for rank in place.output_ranks(dp)]
                    held.update((place.key, rank, column) for rank in owners for column in instruction.writes)
                case Move():
                    source, place = meshes[instruction.source], meshes[instruction.destination]
                    for dp in range(source.layout.dp):
                        for rank in source.output_ranks(dp):
                            assert all((source.key, rank, column) in held for column in instruction.columns)
                    for column in instruction.columns:
                        there = [(place.key, rank, column) in held for rank in place.ranks]
                        assert not all(there), "moved where it was already"
                    arrived = (*instruction.columns, "order")
                    held.update((place.key, rank, column) for rank in place.ranks for column in arrived)
                case Phase():
                    assert phase.get(instruction.role) != instruction.phase or instruction.role in unsure
                    phase[instruction.role] = instruction.phase
                case Loop():
                    for _ in range(2):
                        play(instruction.body, set(held), phase)
                case Concurrent():
                    for branch in instruction.branches:
                        play(branch, held, phase)

    # Inside and after a loop a phase may be set again, since the number of turns is not known.
    unsure = (
        {each.role for each in walk(program) if isinstance(each, Phase)}
        if any(isinstance(each, Loop) for each in program)
        else set()
    )
    play(program, set(), {})
    called = [each.name for each in walk(program) if isinstance(each, Call)]
    assert sorted(called) == sorted(each.name for each in flow.nodes())


def test_a_phase_that_ranks_outside_a_loop_take_part_in_is_entered_before_it() -> None:
    meshes = {**SPLIT, "critic": mesh("critic", "dp2", range(2)), "update": mesh("update", "dp2", range(4, 6))}
    update = node("actor.update", "update", "tokens order", phase="update")
    flow = SAMPLE >> repeat("mini_batch", update, "update")
    program = compile_flow(flow, meshes)
    assert lines(program)[-3:] == ["phase actor update", "loop mini_batch", "call actor.update"]
    for rank in range(6):
        project(program, rank, meshes)
    # Sampled by a program of its own.
    taken = node("buffer.take", "rollout", writes="tokens", source=True)
    apart = Flow(elements=(taken, repeat("mini_batch", update, "update")))
    (alone,) = compile_stages((apart,), meshes)
    (beside,) = compile_stages((apart,), meshes, elsewhere=(Flow(elements=(SAMPLE,)),))
    assert lines(alone.whole)[-3:] == ["loop mini_batch", "phase actor update", "call actor.update"]
    assert lines(beside.whole)[-3:] == ["phase actor update", "loop mini_batch", "call actor.update"]


def test_the_plan_says_who_does_what() -> None:
    program = (Loop("train_step", "job", (*compile_flow(PPO, SPLIT), Branch("save", "job", ()))),)
    text = plan_table(program, SPLIT, 7)
    rows = text.splitlines()
    assert rows[0].split() == ["ranks", "role", "mesh", "calls"]
    assert rows[1].split("  ")[0] == "0-3" and rows[1].endswith("sample")
    assert "4-5    critic  critic tp1.pp2.dp1   values, update" in rows
    assert "6      idle" in rows
    assert "  loop train_step, decided on job" in rows
    assert "    move tokens from rollout to critic" in rows


def test_the_picture_shows_calls_columns_and_moves() -> None:
    picture = mermaid((Loop("train_step", "job", compile_flow(PPO, SPLIT)),), SPLIT)
    assert picture.startswith("flowchart TD\n  subgraph")
    assert 'n0["actor.sample<br/>rollout tp1.pp1.dp4"]' in picture
    assert 'n0 -->|"tokens"| n1' in picture, "the reward reads tokens where they were written"
    assert 'n0 ==>|"tokens"| n2' in picture, "log_probs read tokens that a move brought"
    assert picture.count("subgraph") == picture.count("end") == 2
