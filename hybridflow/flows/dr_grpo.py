"""Dr. GRPO (arXiv 2503.20783): GRPO without what favours some lengths and some groups over others."""

from hybridflow.flows import nodes

STEP = (
    nodes.SAMPLE
    >> nodes.SCORE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("dr_grpo")
    >> nodes.ACTOR_UPDATE
)
