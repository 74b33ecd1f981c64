"""All algorithms: every file of this package that defines ``ALGORITHM``. No torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hybridflow import flows
from hybridflow.flows.algorithm import Algorithm


def load_algorithms() -> Mapping[str, Algorithm]:
    """Return name -> algorithm, in the order of the names."""
    modules = (
        importlib.import_module(f"{flows.__name__}.{each.name}") for each in pkgutil.iter_modules(flows.__path__)
    )
    found = [module.ALGORITHM for module in modules if hasattr(module, "ALGORITHM")]
    return {algorithm.name: algorithm for algorithm in sorted(found, key=lambda each: each.name)}


ALGORITHMS = load_algorithms()

CHOSEN = frozenset().union(*(algorithm.traits.reads for algorithm in ALGORITHMS.values()))
"""Recipe sections that some algorithms read and others do not."""
