"""Safe RLHF (arXiv 2310.12773): PPO on rewards less costs, whose price rises while the mean cost is above its limit."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import CRITIC, ONLINE, Algorithm

ALGORITHM = Algorithm(
    name="safe-rlhf",
    step=step(
        sample=nodes.SAMPLE,
        score=nodes.SCORE >> nodes.COST,
        experience=nodes.ACTOR_LOG_PROBS
        >> nodes.REFERENCE_LOG_PROBS
        >> nodes.CRITIC_VALUES
        >> nodes.COST_VALUES
        >> nodes.advantages(
            "safe",
            reads=("values", "costs", "cost_values"),
            writes=("advantages", "returns", "cost_returns"),
        ),
        update=nodes.CRITIC_UPDATE >> nodes.COST_CRITIC_UPDATE >> nodes.ACTOR_UPDATE,
    ),
    traits=AlgorithmTraits(
        reads=ONLINE | CRITIC | {"cost", "cost_critic", "lagrange"}, needs=("critic", "cost", "cost_critic")
    ),
)
