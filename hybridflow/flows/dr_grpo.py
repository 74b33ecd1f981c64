"""Dr. GRPO (arXiv 2503.20783): GRPO without what favours some lengths and some groups over others."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="dr-grpo",
    step=scored("dr_grpo"),
    traits=AlgorithmTraits(
        group_size=8, reads=ONLINE, defaults={"kl": KL_LOSS, "loss": {"aggregation": "seq-mean-token-sum-norm"}}
    ),
)
