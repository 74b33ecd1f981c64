"""Supervised fine-tuning (arXiv 2203.02155): the token mean of the cross-entropy on given solutions."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import Algorithm

ALGORITHM = Algorithm(
    name="sft",
    step=step(sample=nodes.offline("solutions", "response_mask"), update=nodes.update("response_mask")),
    traits=AlgorithmTraits(lr=2e-5, reads=frozenset({"reward"}), is_offline=True),
)
