"""``metrics``: where the numbers of each step go."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hybridflow.config.types import Name, Plugin
from hybridflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """Export the metrics of the last step to Prometheus.

    Attributes:
        pushgateway_url: Address of a Pushgateway, such as ``http://gateway:9091``.
        job_name: Job name in Prometheus.
        textfile: File in the node exporter's textfile directory. Its name must end in ``.prom``.
    """

    pushgateway_url: str | None = None
    job_name: Name = "hybridflow"
    textfile: str | None = None


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Export metrics to Weights & Biases. Its key comes from the environment or ``wandb login``, never from a recipe.

    Attributes:
        project: Project that files the run.
        entity: Owner of the project. None means the user.
        offline: Keep the metrics in the run's directory, for ``wandb sync``.
    """

    project: Name
    entity: Name | None = None
    offline: bool = False


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Export the metrics of each step beyond the run's directory. A failed export is reported and stops nothing.

    Attributes:
        prometheus: Prometheus. None means no export to it.
        wandb: Weights & Biases. None means no export to it.
        callbacks: Functions ``package.module:function``. Rank 0 calls them with ``(step, metrics)`` in a thread of
            their own.
    """

    prometheus: PrometheusConfig | None = None
    wandb: WandbConfig | None = None
    callbacks: tuple[Plugin, ...] = ()


def check_prometheus(pushgateway_url: str | None, textfile: str | None, where: str) -> None:
    """Refuse what Prometheus would not find, and a password in an address, which logs would show.

    Args:
        pushgateway_url: As in the recipe.
        textfile: As in the recipe.
        where: Whose settings they are, for the message.

    Raises:
        ConfigError: There is neither, or one of them is none.
    """
    if pushgateway_url is None and textfile is None:
        raise ConfigError(f"{where}: give pushgateway_url, textfile, or both")
    if textfile is not None and not textfile.endswith(".prom"):
        raise ConfigError(f"{where}.textfile={textfile!r}: the node exporter reads files that end in .prom alone")
    parts = urlsplit("" if pushgateway_url is None else pushgateway_url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"{where}.pushgateway_url: has a user or a password in it, which logs would show; give the address alone"
        )
    if pushgateway_url is not None and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise ConfigError(
            f"{where}.pushgateway_url={pushgateway_url!r}: expected an address such as http://gateway:9091"
        )
