"""A reward model from pairs (Bradley and Terry, Biometrika 1952; arXiv 1909.08593), with margins (arXiv 2307.09288)."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.algorithm import PREFERENCES, Algorithm

ALGORITHM = Algorithm(
    name="reward-model",
    step=step(sample=nodes.offline("pairs", "margins"), update=nodes.update("margins")),
    traits=AlgorithmTraits(lr=1e-5, reads=frozenset(), is_scorer=True, is_paired=True, **PREFERENCES),
)
