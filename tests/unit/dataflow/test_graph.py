"""The dataflow graph: edges come from names, and every name that does not fit is refused with the nodes concerned."""

import pytest

from hybridflow.dataflow.graph import Flow, Node, repeat
from hybridflow.errors import GraphError
from tests.support import flows


def node(name: str, reads: str = "", writes: str = "", *, source: bool = False) -> Node:
    return flows.node(name, "m", reads, writes, source=source)


SAMPLE = node("actor.sample", writes="tokens", source=True)
SCORE = node("reward.score", "tokens", "scores")
VALUES = node("critic.values", "tokens", "values")
ADVANTAGES = node("ppo.advantages", "scores values", "advantages")
UPDATE = node("actor.update", "tokens advantages order")


def test_composition_does_not_depend_on_the_parentheses() -> None:
    assert (SAMPLE >> SCORE) >> (VALUES >> ADVANTAGES) == SAMPLE >> (SCORE >> VALUES) >> ADVANTAGES


def test_a_repeat_reads_columns_from_outside() -> None:
    flow = SAMPLE >> repeat("mini_batch", node("critic.loss", "tokens", "loss") >> node("log.write", "loss order"), "m")
    flow.check()


def test_a_repeat_with_its_own_source_may_use_the_names_of_outside() -> None:
    inner = node("actor.again", writes="tokens", source=True) >> node("buffer.add", "tokens")
    (SAMPLE >> repeat("refill", inner, "m")).check()


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (
            SAMPLE >> node("a.b", "token"),
            r"'a.b' reads column 'token'.*nearest name: 'tokens'.*tokens \(actor.sample\)",
        ),
        (SAMPLE >> ADVANTAGES >> SCORE, "'reward.score' writes it, but comes later: put it before 'ppo.advantages'"),
        (
            SAMPLE >> repeat("turns", VALUES, "m") >> node("a.b", "values"),
            "'critic.values' writes it, but inside a repeat, where it lives for one turn only",
        ),
        (Flow(elements=(SCORE,)), "Columns so far: none"),
        (
            SAMPLE >> SCORE >> node("cost.score", "tokens", "scores"),
            "written by 'reward.score' and again by 'cost.score'",
        ),
        (SAMPLE >> SCORE >> repeat("x", node("a.b", "tokens", "scores"), "m"), "'reward.score' and again by 'a.b'"),
        (SAMPLE >> node("a.b", "tokens", "order"), "'order' is written by 'actor.sample' and again by 'a.b'"),
        (SAMPLE >> SCORE >> SCORE, "two nodes are called 'reward.score'"),
        (SAMPLE >> node("data.read", writes="pairs", source=True), "'actor.sample' and 'data.read' are both sources"),
    ],
)
def test_names_that_do_not_fit_are_refused(flow: Flow, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        flow.check()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: node("a.b", "x", "y", source=True), "a source makes new samples and reads none"),
        (lambda: node("a.b", "", "y"), "let it read columns, or set source=True"),
        (lambda: node("a.b", "x x"), "name each column once"),
        (lambda: SAMPLE >> "reward", "'reward' cannot be joined"),
    ],
)
def test_nodes_that_cannot_be_are_refused(make, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
