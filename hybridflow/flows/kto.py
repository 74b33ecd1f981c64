"""KTO (arXiv 2402.01306): each response is wanted or not; the KL to the reference is where gains begin."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import PREFERENCES, Algorithm

ALGORITHM = Algorithm(
    name="kto",
    step=step(
        sample=nodes.offline("completions", "wanted", "mismatched_tokens"),
        experience=nodes.REFERENCE_LOG_PROBS >> nodes.REFERENCE_MISMATCHED_LOG_PROBS,
        update=nodes.update("wanted", "mismatched_tokens", "ref_log_probs", "ref_mismatched_log_probs"),
    ),
    traits=AlgorithmTraits(
        reads=frozenset({"preference"}),
        preference_keys=frozenset({"beta", "desirable_weight", "undesirable_weight"}),
        **PREFERENCES,
    ),
)
