"""REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the batch; no critic."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("reinforce_plus_plus")
    >> nodes.ACTOR_UPDATE
)
