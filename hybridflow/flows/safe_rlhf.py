"""Safe RLHF (arXiv 2310.12773): PPO on rewards less costs, whose price rises while the mean cost is above its limit."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.COST
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.CRITIC_VALUES
    >> nodes.COST_VALUES
    >> nodes.advantages(
        "safe",
        reads=("values", "costs", "cost_values"),
        writes=("advantages", "returns", "cost_returns"),
    )
    >> nodes.CRITIC_UPDATE
    >> nodes.COST_CRITIC_UPDATE
    >> nodes.ACTOR_UPDATE
)
