"""``from hybridflow.metrics import MetricsExporter``: the class of ``hybridflow.MetricsExporter``."""

from hybridflow.observe.exporters import MetricsExporter

__all__ = ["MetricsExporter"]
