"""DPO (arXiv 2305.18290): the policy is its own reward model, measured against the reference."""

from hybridflow.flows import nodes

STEP = nodes.offline("pairs", "margins") >> nodes.REFERENCE_LOG_PROBS >> nodes.update("ref_log_probs")
