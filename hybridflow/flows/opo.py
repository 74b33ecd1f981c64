"""OPO (arXiv 2505.23585): the baseline of a group is its mean score weighted by lengths, which varies least."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("opo")
    >> nodes.ACTOR_UPDATE
)
