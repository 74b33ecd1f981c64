"""GSPO (arXiv 2507.18071): GRPO's advantages, and the ratio of the whole sequence in place of each token's."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("grpo")
    >> nodes.ACTOR_UPDATE
)
