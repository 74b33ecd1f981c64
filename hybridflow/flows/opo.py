"""OPO (arXiv 2505.23585): the baseline of a group is its mean score weighted by lengths, which varies least."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="opo",
    step=scored("opo"),
    traits=AlgorithmTraits(group_size=8, reads=ONLINE, defaults={"kl": KL_LOSS}),
)
