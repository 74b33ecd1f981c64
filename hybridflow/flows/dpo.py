"""DPO (arXiv 2305.18290): the policy is its own reward model, measured against the reference."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import PREFERENCES, Algorithm

ALGORITHM = Algorithm(
    name="dpo",
    step=step(
        sample=nodes.offline("pairs", "margins"),
        experience=nodes.REFERENCE_LOG_PROBS,
        update=nodes.update("ref_log_probs"),
    ),
    traits=AlgorithmTraits(
        reads=frozenset({"preference"}),
        is_paired=True,
        preference_keys=frozenset({"beta", "label_smoothing", "reference_free"}),
        **PREFERENCES,
    ),
)
