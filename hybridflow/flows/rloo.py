"""RLOO (arXiv 2402.14740): each response is judged against the mean of the others to its prompt."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="rloo",
    step=scored("rloo"),
    traits=AlgorithmTraits(group_size=8, reads=ONLINE),
)
