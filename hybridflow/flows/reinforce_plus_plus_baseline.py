"""REINFORCE++ with a baseline (arXiv 2501.03262): scores less their group's mean, whitened over the batch."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="reinforce++-baseline",
    step=scored("reinforce_plus_plus_baseline"),
    traits=AlgorithmTraits(group_size=8, reads=ONLINE, defaults={"kl": {**KL_LOSS, "estimator": "k2"}}),
)
