"""GRPO (arXiv 2402.03300): each response is judged against the others to its prompt, so there is no critic."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("grpo")
    >> nodes.ACTOR_UPDATE
)
