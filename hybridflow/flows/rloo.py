"""RLOO (arXiv 2402.14740): each response is judged against the mean of the others to its prompt."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("rloo")
    >> nodes.ACTOR_UPDATE
)
