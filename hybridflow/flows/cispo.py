"""CISPO (arXiv 2506.13585): GRPO's advantages, and the clipped ratio as a weight that has no gradient."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("grpo")
    >> nodes.ACTOR_UPDATE
)
