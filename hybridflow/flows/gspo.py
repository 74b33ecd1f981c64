"""GSPO (arXiv 2507.18071): GRPO's advantages, and the ratio of the whole sequence in place of each token's."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="gspo",
    step=scored("grpo"),
    traits=AlgorithmTraits(
        group_size=8,
        reads=ONLINE,
        defaults={
            "kl": KL_LOSS,
            "loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
        },
    ),
)
