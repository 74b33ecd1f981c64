"""Where else the numbers of each step go: Prometheus, Weights & Biases, functions of the user's own.

Each has a thread of its own, so that none holds up training, or another one, however long it takes or often it fails.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridflow.config.metrics import WandbConfig, check_prometheus
from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.observe.files import replace_file, writing
from hybridflow.observe.rank_log import tell
from hybridflow.plugins import find_plugin
from hybridflow.sections import to_dict

MOST_WAITING = 256
"""Steps that wait for an exporter; of more the oldest are left out."""

PUSH_S = 10.0
"""Longest time that a push may take."""


class Exporter(Protocol):
    """Takes the numbers of each step, on rank 0 and in a thread of its own. What it raises is told once."""

    def export(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take those of a step, by name; some may be not finite."""

    def close(self) -> None:
        """Finish; no further step comes."""


@dataclass(eq=False)
class MetricsExporter:
    """To Prometheus, by the official client: a Pushgateway, a textfile for the node exporter, or both.

    A metric ``reward/mean`` is a gauge ``hybridflow_reward_mean``; ``hybridflow_step`` is the step's number. All have
    the label ``run``.

    Attributes:
        pushgateway_url: Address of the gateway, such as ``http://gateway:9091``.
        job_name: Prometheus' name of the job.
        textfile: A file in the node exporter's folder of textfiles; it must end in ``.prom``.
        run: Value of the label, by which a gateway also tells runs apart.

    Raises:
        ConfigError: There is neither a gateway nor a file, one of both is none, or ``prometheus_client`` is missing.
    """

    pushgateway_url: str | None = None
    job_name: str = "hybridflow"
    _: KW_ONLY
    textfile: str | None = None
    run: str = "run"

    def __post_init__(self) -> None:
        check_prometheus(self.pushgateway_url, self.textfile, "MetricsExporter")
        self._client = _import("prometheus_client", extra="prometheus")
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, tuple[str, Any]] = {}
        self._step: int | None = None

    def export(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges of a step, and push or write them.

        Gauges of an earlier step that this one has no number for are removed, but for those of validations.

        Args:
            step: Its number, counted from 1.
            metrics: Name -> value, which may be not finite.

        Raises:
            OSError: The gateway does not answer, or the file cannot be written.
        """
        values = {"step": step, **metrics}
        named = {"hybridflow_" + re.sub(r"[^a-zA-Z0-9_]", "_", name): name for name in values}
        # A validation after the last step adds to that step.
        if step != self._step:
            for written, (name, gauge) in list(self._gauges.items()):
                if written not in named and "validation/" not in name:
                    self._registry.unregister(gauge)
                    del self._gauges[written]
        self._step = step
        for written, name in named.items():
            if written not in self._gauges:
                gauge = self._client.Gauge(written, name, ["run"], registry=self._registry)
                self._gauges[written] = name, gauge
            self._gauges[written][1].labels(self.run).set(values[name])
        if self.textfile is not None:
            replace_file(Path(self.textfile), self._client.generate_latest(self._registry))
        if self.pushgateway_url is not None:
            key = {"run": self.run}
            self._client.push_to_gateway(
                self.pushgateway_url, job=self.job_name, registry=self._registry, grouping_key=key, timeout=PUSH_S
            )

    def close(self) -> None:
        """Do nothing: the last numbers stay where they are."""


class WandbExporter:
    """To Weights & Biases, or, offline, to files in the run's directory that ``wandb sync`` sends later.

    A run that is gone on with is the same run there. Steps that are made once more are not sent again.

    Args:
        settings: Section of the recipe.
        run: Name of the run.
        run_dir: Gets ``wandb/``.
        config: Settings of the run. A recipe names the variables of its secrets, and does not hold these.
        is_resumed: Whether the run has been there before.

    Raises:
        ConfigError: ``wandb`` is missing.
        WriteError: The file system refuses.
    """

    def __init__(
        self,
        settings: WandbConfig,
        run: str,
        run_dir: Path,
        *,
        config: Mapping[str, Any] | None = None,
        is_resumed: bool = False,
    ) -> None:
        self._wandb = _import("wandb", extra="wandb")
        if "prompt" not in inspect.signature(self._wandb.login).parameters:
            raise ConfigError("metrics.wandb: needs wandb 0.30 or newer; pip install -U wandb")
        folder = run_dir / "wandb"
        named = folder / "run_id"
        with writing(named):
            folder.mkdir(parents=True, exist_ok=True)
            if not is_resumed or not named.is_file():
                replace_file(named, secrets.token_hex(8).encode())
        self._settings = {
            "project": settings.project,
            "entity": settings.entity,
            "name": run,
            "dir": str(run_dir),
            "id": named.read_text(encoding="utf-8"),
            "resume": "allow",
            "config": None if config is None else dict(config),
            # A resumed run may have other settings.
            "allow_val_change": True,
            "mode": "offline" if settings.offline else os.environ.get("WANDB_MODE") or "online",
        }
        self._run: Any = None

    def export(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step; the first one begins the run there."""
        if self._run is None:
            # It would ask for a key otherwise, and wait where there is a terminal.
            if self._settings["mode"] == "online" and not self._wandb.login(prompt=False):
                raise ConfigError("there is no key; set WANDB_API_KEY, or run `wandb login`")
            self._run = self._wandb.init(**self._settings)
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run there."""
        if self._run is not None:
            self._run.finish()


class Callback:
    """A function ``(step, metrics)`` of the user's."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self._function = function

    def export(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call the function."""
        self._function(step, metrics)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Outlet:
    """Hands the steps to an exporter in a thread of its own, and tells of a failure once.

    Attributes:
        takes_steps_alone: Whether it is to get the metrics of steps, and nothing that was measured between them.
    """

    def __init__(self, name: str, exporter: Exporter) -> None:
        self._name, self._exporter = name, exporter
        # A function of the user's may read any metric that each step has.
        self.takes_steps_alone = isinstance(exporter, Callback)
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MOST_WAITING)
        self._condition = threading.Condition()
        self._is_over = self._is_failing = False
        self._num_taken = self._num_sent = 0
        self._thread = threading.Thread(target=self._run, name=f"metrics to {name}", daemon=True)
        self._thread.start()

    def send(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step; returns at once."""
        with self._condition:
            self._num_taken += 1
            self._waiting.append((step, dict(metrics)))
            self._condition.notify()

    def end(self) -> None:
        """Accept no further step; steps that wait are still sent."""
        with self._condition:
            self._is_over = True
            self._condition.notify()

    def wait(self, within_s: float) -> None:
        """Wait up to ``within_s`` seconds for the steps being sent, and print how many were not sent."""
        self._thread.join(within_s)
        if self._num_sent < self._num_taken:
            lost = self._num_taken - self._num_sent
            tell(f"metrics to {self._name}: {lost} of {self._num_taken} steps were not sent")

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    break
                step, metrics = self._waiting.popleft()
            if self._try(functools.partial(self._exporter.export, step, metrics), f"step {step}"):
                self._num_sent += 1
                if self._is_failing:
                    tell(f"metrics to {self._name}: step {step}: sent again")
                self._is_failing = False
        self._try(self._exporter.close, "the end")

    def _try(self, action: Callable[[], object], what: str) -> bool:
        """Run the action, and return whether it succeeded."""
        try:
            action()
        # It may raise anything, or call sys.exit; training goes on whatever it is.
        except BaseException as error:
            if not self._is_failing:
                tell(f"metrics to {self._name}: {what}: {type(error).__name__}: {error}; training goes on")
            self._is_failing = True
            return False
        return True


def close_outlets(outlets: Sequence[Outlet], within_s: float) -> None:
    """End all outlets within one shared time, and print how many steps were not sent by then."""
    end_s = time.monotonic() + within_s
    for outlet in outlets:
        outlet.end()
    for outlet in outlets:
        outlet.wait(max(0.0, end_s - time.monotonic()))


def open_outlets(recipe: Recipe, run_dir: Path, *, is_resumed: bool) -> list[Outlet]:
    """Open an outlet for each exporter of a recipe. For one rank.

    Raises:
        ConfigError: A package that is needed, or a function, is not there.
    """
    asked, exporters = recipe.metrics, list[tuple[str, Exporter]]()
    if (prometheus := asked.prometheus) is not None:
        exporter = MetricsExporter(
            prometheus.pushgateway_url,
            prometheus.job_name,
            textfile=prometheus.textfile,
            run=recipe.title,
        )
        exporters.append(("Prometheus", exporter))
    if (wandb := asked.wandb) is not None:
        wandb_exporter = WandbExporter(wandb, recipe.title, run_dir, config=to_dict(recipe), is_resumed=is_resumed)
        exporters.append(("Weights & Biases", wandb_exporter))
    exporters += [(name, Callback(find_callback(name))) for name in asked.callbacks]
    return [Outlet(name, exporter) for name, exporter in exporters]


def find_callback(name: str) -> Callable[[int, Mapping[str, float]], object]:
    """Return a function of ``metrics.callbacks``.

    Raises:
        ConfigError: It is not there, or no function.
    """
    function: Callable[[int, Mapping[str, float]], object]
    function = find_plugin(name, {}, key="metrics.callbacks", kind="function")
    if not callable(function):
        raise ConfigError(f"metrics.callbacks: {name!r} is {type(function).__name__}, expected a function")
    return function


def _import(name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{error}; install it with: pip install 'hybridflow[{extra}]'") from error
