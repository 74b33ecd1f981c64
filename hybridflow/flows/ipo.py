"""IPO (arXiv 2310.12036): DPO that stops where a pair is far enough apart."""

from hybridflow.flows import nodes

STEP = nodes.offline("pairs", "margins") >> nodes.REFERENCE_LOG_PROBS >> nodes.update("ref_log_probs")
