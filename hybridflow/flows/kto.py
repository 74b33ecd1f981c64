"""KTO (arXiv 2402.01306): each response is wanted or not; the KL to the reference is where gains begin."""

from hybridflow.flows import nodes

STEP = (
    nodes.offline("completions", "wanted", "mismatched_tokens")
    >> nodes.REFERENCE_LOG_PROBS
    >> nodes.REFERENCE_MISMATCHED_LOG_PROBS
    >> nodes.update("wanted", "mismatched_tokens", "ref_log_probs", "ref_mismatched_log_probs")
)
