"""ReMax (arXiv 2310.10505): each response is judged against the greedy one to its prompt, so there is no critic."""

from dataclasses import replace

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import ONLINE, Algorithm, learn

_TAKE = replace(nodes.TAKE, writes=(*nodes.TAKE.writes, "baselines"))

ALGORITHM = Algorithm(
    name="remax",
    step=step(sample=nodes.FILL >> _TAKE) >> learn("remax", reads=("baselines",)),
    traits=AlgorithmTraits(reads=ONLINE, resamples="samples each prompt once more, for its baseline"),
)
