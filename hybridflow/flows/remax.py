"""ReMax (arXiv 2310.10505): each response is judged against the greedy one to its prompt, so there is no critic."""

from dataclasses import replace

from hybridflow.flows import nodes

STEP = (
    nodes.FILL
    >> replace(nodes.TAKE, writes=(*nodes.TAKE.writes, "baselines"))
    >> nodes.ACTOR_LOG_PROBS
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.advantages("remax", reads=("baselines",))
    >> nodes.ACTOR_UPDATE
)
