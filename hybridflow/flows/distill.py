"""On-policy distillation (arXiv 2306.13649): the actor learns a teacher's distribution on its own responses."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import Algorithm

ALGORITHM = Algorithm(
    name="distill",
    step=step(sample=nodes.SAMPLE, experience=nodes.TEACHER_TOP, update=nodes.DISTILL),
    traits=AlgorithmTraits(lr=1e-5, reads=frozenset({"teacher", "reward"}), needs=("teacher",)),
)
