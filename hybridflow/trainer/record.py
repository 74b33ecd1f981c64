"""What a person sees of a run as it goes: metrics, timeline, traces of chosen steps, status, summary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.mapping.planned import planned_run
from hybridflow.observe.expert_loads import ExpertLoadsFile, from_statistics
from hybridflow.observe.exporters import Exporter, Outlet, close_outlets, find_callback, open_outlets
from hybridflow.observe.live_line import LiveLine
from hybridflow.observe.metrics import MetricsLog, held_out_text
from hybridflow.observe.rank_log import say_event
from hybridflow.observe.samples_text import samples_markdown, samples_text
from hybridflow.observe.starts import add_end, keep_recipe, recipe_text
from hybridflow.observe.status_file import StatusFile
from hybridflow.observe.summary import drop_summary, write_summary
from hybridflow.observe.timeline import Timeline
from hybridflow.observe.timeline_file import TimelineFile
from hybridflow.parallel.world import World
from hybridflow.report.page import try_report
from hybridflow.reshard.views import TORCH_DTYPES
from hybridflow.sampling.validation import NUM_SHOWN, NUM_TRAINING_SHOWN
from hybridflow.sections import to_dict
from hybridflow.trainer.banner import farewell
from hybridflow.trainer.meter import RankMeter, peak_flops
from hybridflow.trainer.plan import training_step
from hybridflow.trainer.profiling import Profiler
from hybridflow.trainer.step_metrics import Share, step_metrics

_LEAVE_S, _LEAVE_STOPPED_S = 10.0, 2.0
"""For metrics that are still being sent when a run is done; when it stops before, in time for its end."""


class Record:
    """Keeps it on each rank, and writes it on the lowest.

    Args:
        recipe: Recipe of the run.
        world: This rank and the others.
        number: Number of this start of the run, 1 for the first.

    Attributes:
        timeline: This rank's spans of the step.
        summary: Summary of the run so far; goes into ``summary.json``.
    """

    def __init__(self, recipe: Recipe, world: World, number: int) -> None:
        self.timeline = Timeline()
        self.timeline.meter = RankMeter(world.device)
        self.summary: dict[str, Any] = {"name": recipe.name, "algorithm": recipe.algorithm, "ranks": world.size}
        self._recipe, self._world, self._run_dir = recipe, world, Path(recipe.run_dir)
        self._number = number
        self._totals = {"steps": 0, "step_s": 0.0, "tokens": 0.0, "control_s": 0.0}
        self._profiler = Profiler(recipe, world.rank, self.timeline)
        self._log: MetricsLog | None = None
        self._outlets: list[Outlet] = []
        self._prefix = "" if recipe.namespace is None else f"{recipe.namespace}/"
        self._status: StatusFile | None = None
        self._live = LiveLine() if world.rank == 0 else None
        if world.rank == 0:
            # They are opened once the models are made, which takes minutes.
            for name in recipe.metrics.callbacks:
                find_callback(name)
            facts = {"name": recipe.name, "algorithm": recipe.algorithm, "steps": recipe.trainer.known_steps}
            self._status = StatusFile(self._run_dir, facts=facts)
            keep_recipe(self._run_dir, number, to_dict(recipe))

    def open(self, resumed_step: int | None) -> None:
        """Open the files to which steps are added; None: the run is a new one. Measures the device, on each rank."""
        self._peak_flops = peak_flops(self._world.device, TORCH_DTYPES[self._recipe.model.dtype])
        if self._world.rank == 0:
            self._log = MetricsLog(
                self._run_dir,
                num_steps=self._recipe.trainer.known_steps,
                prefix=self._prefix,
                resumed_step=resumed_step,
            )
            self._log.write_texts(resumed_step or 0, {"recipe": f"```yaml\n{recipe_text(to_dict(self._recipe))}```"})
            if resumed_step is None:
                drop_summary(self._run_dir)
            self._expert_loads = ExpertLoadsFile(self._run_dir, resumed_step)
            self._outlets = open_outlets(self._recipe, self._run_dir, is_resumed=resumed_step is not None)
            self._timeline_file = TimelineFile(
                self._run_dir, num_ranks=self._world.size, ranks_per_node=self._world.ranks_per_node
            )

    def add_exporter(self, name: str, exporter: Exporter) -> None:
        """Send the metrics of the steps to come there too; on the lowest rank."""
        if self._world.rank == 0:
            self._outlets.append(Outlet(name, exporter))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"summary": self.summary, "totals": self._totals}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept; name, algorithm and ranks are those of this start."""
        self.summary, self._totals = {**state["summary"], **self.summary}, dict(state["totals"])

    def draw(self, step: int, metrics: Mapping[str, float]) -> None:
        """Draw what a validation outside a step measured; it is no line of the metrics, and callbacks do not get it."""
        if self._log is not None:
            self._log.draw(step, metrics)
            self._log.amend(step, {name: value for name, value in metrics.items() if name.startswith("validation/")})
            for outlet in self._outlets:
                if not outlet.takes_steps_alone:
                    outlet.send(step, {self._prefix + name: value for name, value in metrics.items()})

    def show_validation(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Show a person the result of a validation, and a few samples; on the lowest rank.

        Args:
            step: Training steps done.
            metrics: What was measured.
            samples: See ``sampling.validation.shown_samples``.
        """
        chosen = sorted(samples, key=lambda each: each["row"])[:NUM_SHOWN]
        head = f"{held_out_text(metrics)} after step {step}"
        told = {name: value for name, value in metrics.items() if name.startswith("validation/")}
        text = "\n".join([head, samples_text(chosen)]) if chosen else head
        say_event("validation", text, step=step, metrics=told, samples=list(chosen))
        if self._log is not None and chosen:
            self._log.write_texts(step, {"samples": samples_markdown(chosen)})

    def show_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show a person a few samples of a step, where no data is held out; on the lowest rank.

        Args:
            samples: See ``sampling.validation.shown_training_samples``.
        """
        chosen = sorted(samples, key=lambda each: (each["step"], each["row"]))[:NUM_TRAINING_SHOWN]
        if chosen:
            step = chosen[0]["step"]
            text = f"samples of step {step}\n{samples_text(chosen)}"
            say_event("samples", text, step=step, samples=chosen)

    def begin_step(self, steps_done: int, job_end_s: float | None) -> None:
        """Start the next step's clocks, and its trace, if it is to be traced."""
        self._began_s, self._began_perf_s = time.time(), time.perf_counter()
        self.timeline.reset()
        self._profiler.begin(steps_done + 1)
        if self._status is not None:
            self._status.note(step=steps_done, job_end_s=job_end_s)

    def share(self, metrics: Mapping[str, float], sample_stats: Mapping[str, Sequence[float]]) -> Share:
        """Return this rank's part of the step: its roles' metrics and sample statistics, and its timeline."""
        return Share(metrics, self.timeline.spans, sample_stats, self.timeline.costs, self._peak_flops)

    def end_step(self, step: int, shares: Sequence[Share]) -> dict[str, float]:
        """Write down a step by the shares of all ranks. Returns its metrics, the same on every rank."""
        step_s = time.perf_counter() - self._began_perf_s
        self._profiler.end()
        metrics = step_metrics(shares, step_s)
        self._totals["steps"] += 1
        self._totals["step_s"] += step_s
        self._totals["tokens"] += metrics["batch/num_tokens"]
        self._totals["control_s"] += metrics["control/overhead_share"] * step_s
        if self._log is not None:
            written = metrics | {"run/restarts": self._number - 1}
            self._log.write(step, written)
            self._expert_loads.write(step, from_statistics(share.sample_stats for share in shares))
            named = {self._prefix + name: value for name, value in written.items()}
            for outlet in self._outlets:
                outlet.send(step, named)
            self._timeline_file.add(step, self._began_s, step_s, [share.spans for share in shares])
        return metrics

    def finish(self, step: int, *, is_done: bool, saved_step: int | None = None) -> None:
        """Close the files; of a run that is done, write the summary. On all ranks.

        Args:
            step: Training steps done.
            is_done: Whether the run is done.
            saved_step: Step of the newest checkpoint; None: there is none.
        """
        self._profiler.drop()
        if self._live is not None:
            self._live.close()
        if self._log is None or self._status is None:
            return
        self._log.close()
        if is_done:
            totals = self._totals
            self.summary["steps"] = step
            if totals["steps"]:
                self.summary |= {
                    "tokens_per_s": totals["tokens"] / totals["step_s"],
                    "step_s": totals["step_s"] / totals["steps"],
                    "control_overhead_share": totals["control_s"] / totals["step_s"],
                }
            write_summary(self._run_dir, self.summary)
            text = farewell(self._recipe, self.summary, saved_step=saved_step, seconds=totals["step_s"])
            say_event("end", text, summary=self.summary)
        self._status.close()
        close_outlets(self._outlets, _LEAVE_S if is_done else _LEAVE_STOPPED_S)

    def end(self, stopped: str | None, save_s: float | None) -> None:
        """Note that this start has ended, on the lowest rank, when all others have left.

        Args:
            stopped: Why it stopped before the run was done; None: it is done.
            save_s: How long saving took, in seconds, if it is known.
        """
        if self._world.rank == 0:
            add_end(self._run_dir, self._number, "finished" if stopped is None else "requeue", stopped or "", save_s)
            try_report(self._run_dir, lambda run_dir: planned_run(run_dir, lambda recipe: training_step(recipe).flow))
