"""DAPO (arXiv 2503.14476): GRPO with a wider upper clip, on groups that teach something, until they are enough."""

from hybridflow.flows import nodes

STEP = (
    nodes.FILL
    >> nodes.TAKE
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("grpo")
    >> nodes.ACTOR_UPDATE
)
