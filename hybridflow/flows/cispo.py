"""CISPO (arXiv 2506.13585): GRPO's advantages, and the clipped ratio as a weight that has no gradient."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="cispo",
    step=scored("grpo"),
    traits=AlgorithmTraits(
        group_size=8, reads=ONLINE, defaults={"kl": KL_LOSS, "loss": {"kind": "cispo", "clip_low": 1.0}}
    ),
)
