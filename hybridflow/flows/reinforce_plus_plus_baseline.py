"""REINFORCE++ with a baseline (arXiv 2501.03262): scores less their group's mean, whitened over the batch."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("reinforce_plus_plus_baseline")
    >> nodes.ACTOR_UPDATE
)
