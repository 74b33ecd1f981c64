"""DAPO (arXiv 2503.14476): GRPO with a wider upper clip, on groups that teach something, until they are enough."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, learn

ALGORITHM = Algorithm(
    name="dapo",
    step=step(sample=nodes.FILL >> nodes.TAKE) >> learn("grpo"),
    traits=AlgorithmTraits(
        group_size=8,
        reads=ONLINE | {"dynamic_sampling"},
        defaults={"kl": KL_LOSS, "loss": {"clip_high": 0.28}},
        resamples="samples until its batch is full, which is not known beforehand",
    ),
)
