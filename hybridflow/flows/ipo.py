"""IPO (arXiv 2310.12036): DPO that stops where a pair is far enough apart."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import PREFERENCES, Algorithm

ALGORITHM = Algorithm(
    name="ipo",
    step=step(
        sample=nodes.offline("pairs", "margins"),
        experience=nodes.REFERENCE_LOG_PROBS,
        update=nodes.update("ref_log_probs"),
    ),
    traits=AlgorithmTraits(
        reads=frozenset({"preference"}), is_paired=True, preference_keys=frozenset({"beta"}), **PREFERENCES
    ),
)
