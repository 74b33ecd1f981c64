"""REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the batch; no critic."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="reinforce++",
    step=scored("reinforce_plus_plus"),
    traits=AlgorithmTraits(reads=ONLINE | {"advantage"}),
)
