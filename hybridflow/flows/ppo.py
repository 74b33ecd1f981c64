"""PPO (arXiv 1707.06347) with a critic and a KL to a frozen reference (arXiv 1909.08593)."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import CRITIC, ONLINE, Algorithm

ALGORITHM = Algorithm(
    name="ppo",
    step=step(
        sample=nodes.SAMPLE,
        score=nodes.SCORE,
        experience=nodes.ACTOR_LOG_PROBS
        >> nodes.REFERENCE_LOG_PROBS
        >> nodes.CRITIC_VALUES
        >> nodes.advantages("ppo", reads=("values",), writes=("advantages", "returns")),
        update=nodes.CRITIC_UPDATE >> nodes.ACTOR_UPDATE,
    ),
    traits=AlgorithmTraits(reads=ONLINE | CRITIC, needs=("critic",)),
)
