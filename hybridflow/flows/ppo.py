"""PPO (arXiv 1707.06347) with a critic and a KL to a frozen reference (arXiv 1909.08593)."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.CRITIC_VALUES
    >> nodes.advantages("ppo", reads=("values",), writes=("advantages", "returns"))
    >> nodes.CRITIC_UPDATE
    >> nodes.ACTOR_UPDATE
)
