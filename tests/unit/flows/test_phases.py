"""The time of each call is shown under a phase that people know, and that docs/metrics.md lists."""

from hybridflow.flows.nodes import VALIDATION, VALIDATION_OF_PAIRS, VALIDATION_OF_SOLUTIONS
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.observe.phases import PHASE_OF, phase_of


def test_every_call_of_every_algorithm_has_a_phase():
    steps = [each.step for each in ALGORITHMS.values()]
    flows = [flow for step in steps for flow in (step.sample, step.score, step.experience, step.update)]
    flows += [VALIDATION, VALIDATION_OF_PAIRS, VALIDATION_OF_SOLUTIONS]
    called = {node.name for flow in flows for node in flow.nodes()}
    assert len(called) > 20 and {phase_of("call", name) for name in called} <= set(PHASE_OF.values())
    # A name in the table that no node has is an old one.
    assert {name for name in PHASE_OF if "." in name} <= called | {"groups.keep", "groups.take", "trainer.save"}
