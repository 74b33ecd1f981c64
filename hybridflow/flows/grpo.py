"""GRPO (arXiv 2402.03300): each response is judged against the others to its prompt, so there is no critic."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="grpo",
    step=scored("grpo"),
    traits=AlgorithmTraits(
        group_size=8,
        reads=ONLINE,
        defaults={"kl": {**KL_LOSS, "coef": 0.04}, "loss": {"aggregation": "seq-mean-token-mean"}},
    ),
)
