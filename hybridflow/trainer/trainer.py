"""The training loop: run the compiled schedule, take its decisions, and record each step."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.job_file import step_path
from hybridflow.checkpoint.store import Checkpoint, name_best, reading_state
from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.graph import Step
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.role import Role
from hybridflow.dataflow.run import Executor, Scope
from hybridflow.dataflow.schedule import Program
from hybridflow.errors import DataError, LayoutError
from hybridflow.mapping.memory import with_micro_batches
from hybridflow.mapping.memory_check import check_budget
from hybridflow.observe.activity import current_activity
from hybridflow.observe.console import complain
from hybridflow.observe.exporters import Exporter
from hybridflow.observe.files import writing
from hybridflow.observe.metrics import RESULTS
from hybridflow.observe.rank_log import open_rank_log, say, say_event
from hybridflow.parallel.deterministic import add_in_fixed_order
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.placement.job import Job
from hybridflow.placement.library_models import with_library_models
from hybridflow.recipe.resume import path_before
from hybridflow.recipe.run_dir import check_new
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.critic import Critic
from hybridflow.sampling.rollout_log import RolloutLog
from hybridflow.trainer import checkpoints
from hybridflow.trainer.banner import banner
from hybridflow.trainer.decisions import Decisions
from hybridflow.trainer.initial_weights import read_weights, spread_weights
from hybridflow.trainer.open import note_of_prompts, open_job
from hybridflow.trainer.plan import JobPlan, placement_warnings, plan_job, transformers_note
from hybridflow.trainer.progress import Progress
from hybridflow.trainer.record import Record
from hybridflow.trainer.roles import make_roles
from hybridflow.trainer.schedule import learning_rates
from hybridflow.trainer.starting import check_checkpoints, note_failure, note_start
from hybridflow.trainer.step_metrics import Share, merge_metrics
from hybridflow.trainer.stopping import Stopping
from hybridflow.trainer.validations import Validations
from hybridflow.trainer.warnings import cpu_warning, duration_warning, epochs_warning, recipe_warnings, reward_warning

SAVE_AFTER_S = 15 * 60.0
"""A checkpoint is due when the last one is so old, where the recipe names no number of steps."""


def train(recipe: Recipe, world: World, *, resume: bool = False) -> bool:
    """Run a recipe on the ranks that are there, this process being one of them.

    Returns:
        Whether it is done; else it has saved and stopped before its end, as it was asked to, and can be gone on with.

    Raises:
        HybridflowError: Whatever stops the run, with a message for the user.
    """
    return make_trainer(recipe, world, resume=resume).run()


def make_trainer(
    recipe: Recipe,
    world: World,
    *,
    resume: bool = False,
    step: Step | None = None,
    open_job: Callable[[Recipe, World, JobPlan], Job] = open_job,
) -> Trainer:
    """Prepare a run: read its data and make its models. Collective: all ranks.

    Args:
        recipe: What is asked for.
        world: This rank and the others.
        resume: Whether to go on from the last checkpoint of ``run_dir``, if there is one.
        step: Stages of a training step, in the place of the algorithm's.
        open_job: Brings data and tokenizer.

    Raises:
        HybridflowError: Whatever is wrong, with a message for the user.
    """
    if world.size != recipe.cluster.ranks:
        raise LayoutError(
            f"cluster.ranks={recipe.cluster.ranks}, but {world.size} ranks were started; start {recipe.cluster.ranks}, "
            f"or set cluster.ranks={world.size} with layouts that fit"
        )
    # The local launcher and torchrun say so in the environment, mpirun and srun do not.
    torch.set_num_threads(recipe.cluster.threads_per_rank)
    if recipe.trainer.deterministic:
        add_in_fixed_order(world.device)
    if not resume:
        with writing(Path(recipe.run_dir)):
            check_new(Path(recipe.run_dir))
    recipe = _with_nodes(recipe, world)
    plan = plan_job(recipe, step)
    recipe = with_micro_batches(recipe, plan.meshes, world.gpu_bytes())
    check_budget(recipe, plan.meshes)
    if world.rank == 0:
        placement = placement_warnings(plan.meshes, world.hosts)
        for warning in (*transformers_note(recipe), *placement, *recipe_warnings(recipe)):
            complain(warning)
        slow = cpu_warning(recipe) if world.device.type == "cpu" else None
        if slow is not None:
            complain(slow)
    world.make_groups([*rank_sets(plan.meshes.values(), world.size), *plan.rank_sets()])
    everyone = world.coordinator(plan.meshes["job"].ranks)
    check_checkpoints(recipe, everyone)
    started = note_start(recipe, plan.meshes, everyone)
    record, stopping = (
        Record(recipe, world, started.number),
        Stopping(world, started.earlier, works_ahead=recipe.trainer.max_staleness > 0),
    )
    run_dir = Path(recipe.run_dir)
    open_rank_log(run_dir, started.number, world.rank)
    watcher = world if world.watch is None else world.watch
    watcher.before_exit = lambda cause: note_failure(run_dir, started.number, world.rank, cause, stopping.save_s)
    with current_activity("reading data and making models"):
        job = open_job(recipe, world, plan)
        start = checkpoints.find_resume_point(job, resume=resume)
        job = replace(job, is_resumed=start.checkpoint is not None)
        return Trainer(job, plan, start, stopping, record)


def _with_nodes(recipe: Recipe, world: World) -> Recipe:
    """Return the recipe with the launcher's number of ranks per node, which decides whose data is near.

    Raises:
        LayoutError: The recipe says another number.
    """
    said, found = recipe.cluster.ranks_per_node, world.ranks_per_node
    if said is not None and said != found:
        raise LayoutError(
            f"cluster.ranks_per_node={said}, but the launcher put {found} ranks on each node; set it to {found}, or "
            "leave it out"
        )
    return replace(recipe, cluster=replace(recipe.cluster, ranks_per_node=found))


class Trainer(Role):
    """Runs a job's schedule on this rank. It is a role, too: it ends each step, and saves.

    Args:
        job: The job.
        plan: Its schedule.
        start: What it begins with.
        stopping: Whether it is to stop.
        record: What is written down of it.

    Attributes:
        job: The job.
        roles: Its roles.
        progress: The steps done.
        kl_coef: The weight of the KL to the reference.
    """

    call_names = ("finish_step", "save")

    def __init__(
        self, job: Job, plan: JobPlan, start: checkpoints.ResumePoint, stopping: Stopping, record: Record
    ) -> None:
        super().__init__()
        self.job = job = with_library_models(job)
        self.kl_coef = KLCoefficient(job.recipe)
        self.roles = make_roles(job, self.kl_coef)
        self.progress = Progress(job.recipe)
        self._plan = plan
        self._stopping = stopping
        self._record = record
        self._start = start.checkpoint
        self.progress.saved_step = None if start.checkpoint is None else start.checkpoint.step
        self._decisions = Decisions(job, plan.meshes, self.roles, self.progress, stopping)
        advantage = self.roles.advantage if "lagrange" in job.recipe.traits.reads else None
        self._multiplier = None if advantage is None else advantage.multiplier
        self._step_metrics: dict[str, float] = {}
        self._saved_at_s = time.monotonic()
        self._steps_here = 0
        if job.world.rank == 0:
            # A program gives no more of held-out rows of SFT than their solutions.
            num_held_out = len(job.held_out_pairs or job.held_out_solutions or job.held_out)
            rows, spec = job.train.num_rows, self.roles.actor.spec
            device = job.world.device_text()
            text = banner(
                job.recipe,
                plan.meshes,
                spec,
                device=device,
                num_rows=rows,
                num_held_out=num_held_out,
                prompts=note_of_prompts(job),
            )
            say_event("start", text, device=device, num_rows=rows, num_held_out=num_held_out)
        self._checkpoints = checkpoints.Checkpoints(job, self.roles.by_name, start)
        self._everyone = job.world.coordinator(plan.meshes["job"].ranks)
        self._mover = Mover(job.world, plan.meshes, chunk=job.recipe.trainer.samples_per_update)
        self._rollouts = RolloutLog(job, start.token, start.fingerprint, self._start)
        rollouts, rollout = self.roles.actor.rollouts, plan.meshes["actor.rollout"]
        if rollouts is not None:
            replica = job.world.coordinator(rollout.replica_of(job.world.rank))
            rollouts.log, rollouts.is_stopping = self._rollouts, lambda: stopping.agree(replica)

    def run(self) -> bool:
        """Train: warm start, training steps, and validation before and after; or what is left of it after a resume.

        Returns:
            Whether it is done; else it was asked to stop, and what it has done is saved.
        """
        if not self.begin():
            return False
        self._tell_once(epochs_warning(self.job.recipe, self.job.train.num_rows, self.progress.num_prompts))
        summary, validates = self._record.summary, self.job.recipe.data.held_out is not None
        if validates and {"score_before_rl", "loss_before_rl"}.isdisjoint(summary) and self._stopping.reason is None:
            self.validate("before_rl")
        if validates and self._decisions.has_missed_validation and self._stopping.reason is None:
            self.validate()
        self._execute(self._plan.fill)
        self._record.begin_step(self.progress.step, self._stopping.job_end_s)
        self._execute(self._plan.train)
        if self._decisions.shortage is not None:
            if self.progress.step > 0:
                self.save_now()
            raise DataError(self._decisions.shortage)
        if validates and self._stopping.reason is None and self.job.recipe.trainer.steps > 0:
            self.validate("after_rl")
        if self._stopping.reason is not None:
            self._save()
        return self.end()

    def begin(self) -> bool:
        """Fill the models, from the checkpoint or anew, and run the warm start. Collective: all ranks.

        Returns:
            Whether the job can go on; else its warm start was cut short.
        """
        if self._start is not None:
            self._resume(self._start)
            self._set_learning_rates()
            self._record.open(self.progress.step)
        elif not self._begin():
            return False
        for critic in self.roles.critics.values():
            critic.put_optimizer_away()
        return True

    def _begin(self) -> bool:
        recipe = self.job.recipe
        self._record.open(None)
        read_weights(self.job, self.roles)
        self._execute(self._plan.warm_start)
        own = [self._decisions.is_warm_start_cut, self._stopping.local_reason()]
        gathered = self._everyone.gather(own, "the warm start")
        if any(is_cut for is_cut, _ in gathered):
            self._stopping.settle(reason for _, reason in gathered)
            self._finish()
            return False
        self.roles.actor.end_warm_start()
        self._set_learning_rates()
        spread_weights(self.job, self.roles)
        if recipe.warm_start is not None or recipe.trainer.keep_best:
            self._save()
        return True

    def rollout(self, about: Mapping[str, Any]) -> Scope:
        """Return a step's samples with their scores, for ``learn``. Collective: all ranks.

        Args:
            about: Number of the step, and what it samples, as the decision ``train_step`` gives them.

        Raises:
            DataError: Too few groups of the step teach something.
        """
        self._record.begin_step(self.progress.step, self._stopping.job_end_s)
        self._decisions.first_prompt_index = about["first_prompt_index"]
        scope = self._execute(self._plan.rollout, {}, {"train_step": about})
        shortage, self._decisions.shortage = self._decisions.shortage, None
        if shortage is not None:
            raise DataError(shortage)
        return scope

    def learn(self, scope: Scope, about: Mapping[str, Any]) -> dict[str, float]:
        """Learn from samples of ``rollout``, which ends the step. Collective: all ranks.

        Args:
            scope: Result of ``rollout``.
            about: As there.

        Returns:
            The step's metrics, the same on all ranks but for its seconds.
        """
        self._execute(self._plan.learn, scope, {"train_step": about})
        return self._step_metrics

    def finish_step(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Gather and record what the step measured. Collective: all ranks."""
        self._checkpoints.check()
        progress, groups, about = self.progress, self.roles.groups, decided["train_step"]
        progress.step = about["step"]
        rates = learning_rates(self.job.recipe, progress.step, progress.num_critic_steps)
        told = self._take_metrics() | {f"{name}/lr": rate for name, rate in rates.items()}
        share = self._record.share(told, self.roles.take_sample_stats())
        progress.is_save_overdue = time.monotonic() - self._saved_at_s >= SAVE_AFTER_S
        own = [share, self.roles.take_shown(), progress.is_save_overdue, self._stopping.local_reason(), self._scores()]
        gathered = self._everyone.gather(own, "metrics of the step")
        shares, shown, overdue, reasons, all_scores = zip(*gathered, strict=True)
        following = about["first_prompt_index"] + about["num_prompts"]
        progress.next_prompt_index = following if groups is None else groups.next_prompt_index
        self._step_metrics = metrics = self._record.end_step(progress.step, [Share(*found) for found in shares])
        # Clocks differ: the lowest rank's counts.
        progress.is_save_overdue = overdue[0]
        self._stopping.learn(metrics)
        self._steps_here += 1
        if self._steps_here == 1:
            self._tell_once(reward_warning(metrics, progress.step, self.job.recipe.run_dir))
        self._tell_once(duration_warning(self.job.recipe, self._steps_here, progress.step, metrics["time/step_s"]))
        self._stopping.settle(reasons)
        for scores in all_scores:
            self._rollouts.add_scores(progress.step, scores)
        self._take_validation(metrics, shown)
        if self.job.recipe.data.held_out is None and self.job.world.rank == 0:
            self._record.show_samples([each for rank in shown for each in rank])
        self.roles.actor.end_step(progress.step)
        self._adapt(metrics)
        self._set_learning_rates()
        self._record.begin_step(progress.step, self._stopping.job_end_s)

    def _tell_once(self, warning: str | None) -> None:
        """Print a warning, on the lowest rank."""
        if warning is not None and self.job.world.rank == 0:
            say(f"warning: {warning}")

    def _adapt(self, metrics: Mapping[str, float]) -> None:
        """Adapt the KL coefficient and the price of cost to what the step measured."""
        if self.progress.is_critic_alone(self.progress.step):
            # The actor does not learn yet, so it could not answer.
            return
        groups = self.roles.groups
        if "kl/ref" in metrics:
            num_samples = self.job.recipe.trainer.global_batch_size if groups is None else groups.num_samples
            self.kl_coef.advance(metrics["kl/ref"], num_samples)
        self._rollouts.advance(metrics)
        if self._multiplier is not None:
            self._multiplier.advance(metrics["cost/mean"])

    def _scores(self) -> list[tuple[int, int, float]]:
        """Return this rank's scores of the step's samples, by prompt index and index; where samples are archived."""
        found: list[tuple[int, int, float]] = []
        for role in (self.roles.groups, self.roles.advantage):
            if role is not None:
                own, role.scores = role.scores, []
                found += own
        return found

    def save(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, complete or not at all. Called on all ranks."""
        self._save()

    def save_now(self) -> None:
        """Save between two steps, and wait until it is done. Collective: all ranks."""
        self._save()
        self._checkpoints.finish()
        self._rollouts.end_save()
        self._everyone.barrier("the checkpoint")

    def _save(self) -> None:
        """Begin to write a checkpoint, unless the step has one."""
        progress = self.progress
        if progress.saved_step == progress.step:
            return
        state = {
            "kl_coef": self.kl_coef.value,
            "next_prompt_index": progress.next_prompt_index,
            "rollouts": self._rollouts.state(),
            "rest_s": self._stopping.rest_s,
            "validations": asdict(progress.validations),
            **self._record.state(),
        }
        if self._multiplier is not None:
            state["multiplier"] = self._multiplier.value
        best = progress.validations.best_step if self.job.recipe.trainer.keep_best else None
        with contextlib.ExitStack() as at_hand:
            at_hand.enter_context(self.roles.actor.optimizer_at_hand())
            for critic in self.roles.critics.values():
                at_hand.enter_context(critic.optimizer_at_hand())
            self._checkpoints.save(progress.step, state, best)
        progress.saved_step, self._saved_at_s = progress.step, time.monotonic()
        self._rollouts.begin_save(progress.step)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint."""
        progress, state = self.progress, checkpoint.state
        checkpoints.load(self.job, self.roles.by_name, checkpoint)
        progress.step = checkpoint.step
        with reading_state(checkpoint):
            progress.next_prompt_index = operator.index(state["next_prompt_index"])
            progress.validations = Validations.of_checkpoint(checkpoint, self.job.recipe)
            if self.job.recipe.trainer.keep_best and not self._has_checkpoint(progress.validations.best_step):
                progress.validations.restart(checkpoint.step)
            self.kl_coef.value = float(state["kl_coef"])
            self._stopping.rest_s = float(state.get("rest_s", 0.0))
            if self._multiplier is not None:
                self._multiplier.value = float(state["multiplier"])
            self._record.resume(state)
        self.roles.actor.num_updates = progress.step
        self.roles.actor.mark_changed()
        if self.job.world.rank == 0:
            say(f"resumed from {checkpoint.path}")
            path, before = self.job.recipe.model.path, path_before(state["recipe"])
            if path not in (None, before):
                say(f"its weights go on from {before or 'a new model'}; model.path={path} is not read")
            steps = self.job.recipe.trainer.steps
            if 0 < steps <= progress.step:
                say(f"{progress.step} steps are done, and trainer.steps={steps}: nothing is left to train")

    def _has_checkpoint(self, step: int | None) -> bool:
        """Return whether a step's checkpoint is there: of a run that goes back, a better one may have replaced it."""
        folder = None if step is None else step_path(Path(self.job.recipe.run_dir), step)
        return folder is None or bool(self._everyone.on_lead("the best checkpoint", folder.is_dir))

    def ask_stop(self, reason: str) -> None:
        """Have the job save and stop at the next ``stop_if_asked``, on one rank for all, where there is no watch."""
        self._stopping.asked = reason

    def stop_if_asked(self) -> str | None:
        """Save and end the job between two calls, if a signal or the time limit asks for it. Collective: all ranks.

        Returns:
            Why; None: nobody asks.
        """
        if not self._stopping.agree(self._everyone):
            return None
        self.save_now()
        self._finish()
        return self._stopping.reason

    def add_exporter(self, name: str, exporter: Exporter) -> None:
        """Send the metrics of the steps to come there too; on rank 0, others do nothing."""
        self._record.add_exporter(name, exporter)

    def end(self) -> bool:
        """Wait for the last checkpoint, and write what is known at the end. Collective: all ranks.

        Returns:
            Whether it is done; else it was asked to stop.
        """
        self._checkpoints.finish()
        self._rollouts.end_save()
        self._name_best()
        # Where the ranks meet is kept by one of them, which stays until all have seen the checkpoint complete.
        shares = self._everyone.gather(self._take_metrics(), "the last checkpoint")
        self._stopping.learn(merge_metrics(shares))
        self._summarize_validations()
        self._finish()
        return self._stopping.reason is None

    def _name_best(self) -> None:
        """Name the last checkpoint as the best where its validation came after it, in a later start of the run.

        Collective: all ranks.
        """
        progress = self.progress
        best = progress.validations.best_step
        if self.job.recipe.trainer.keep_best and best is not None and best == progress.saved_step:
            self._everyone.on_lead("the best checkpoint", lambda: name_best(Path(self.job.recipe.run_dir), best))

    def _execute(self, program: Program, scope: Scope | None = None, decided: Mapping[str, Any] | None = None) -> Scope:
        """Run this rank's part of a program, from what it holds before; returns what it holds after."""
        meshes = self._plan.meshes
        executor = Executor(
            schedule=self._plan.schedule(program, self.job.world.rank),
            roles={**self.roles.by_name, "trainer": self},
            decisions=self._decisions.table(),
            mover=self._mover,
            world=self.job.world,
            meshes=meshes,
            timeline=self._record.timeline,
        )
        return executor.run(scope, decided)

    def _set_learning_rates(self) -> None:
        """Set the rates of the next step, whatever step that is."""
        learners: Mapping[str, Actor | Critic] = {"actor": self.roles.actor, **self.roles.critics}
        progress = self.progress
        for name, rate in learning_rates(self.job.recipe, progress.step + 1, progress.num_critic_steps).items():
            trainable = learners[name].trainable
            if trainable is not None:
                trainable.set_learning_rate(rate)

    def validate(self, when: str | None = None, *, again: bool = False) -> dict[str, float]:
        """Validate the current weights, unless this step has been, or the job is to stop. Collective: all ranks.

        Args:
            when: What the summary calls the score; None: it does not have it.
            again: Whether to measure a step that has been validated, too.

        Returns:
            What was measured, ``validation/*``.
        """
        found, metrics = self.progress.validations, dict[str, float]()
        if again or found.step != self.progress.step:
            self.roles.actor.begin_validation(self.progress.step)
            self._execute(self._plan.validation)
            shares = self._everyone.gather([self._take_metrics(), self.roles.take_shown()], "validation")
            self._record.timeline.reset()
            metrics = merge_metrics(own for own, _ in shares)
            self._record.draw(self.progress.step, metrics)
            self._take_validation(metrics, [shown for _, shown in shares])
        if when is not None and found.step == self.progress.step:
            # An accuracy is a score, too.
            names = ("score", "accuracy") if found.result == "accuracy" else (found.result,)
            self._record.summary |= {f"{name}_{when}": found.score for name in names}
        return {name: value for name, value in metrics.items() if name.startswith("validation/")}

    def _take_validation(self, metrics: Mapping[str, float], shown: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Note the result of a validation, if there was one, and show it to a person; the same on all ranks.

        Args:
            metrics: What was measured.
            shown: Samples that each rank shows.
        """
        result = next((name for name in RESULTS if f"validation/{name}" in metrics), None)
        if result is None:
            return
        step, is_learning = self.progress.step, not self.progress.is_critic_alone(self.progress.step)
        score = metrics[f"validation/{result}"]
        self.progress.validations.take(step, score, result=result, is_learning=is_learning)
        if self.job.world.rank == 0:
            self._record.show_validation(self.progress.step, metrics, [each for rank in shown for each in rank])

    def _summarize_validations(self) -> None:
        """Report which validation was the best, and why the training ended, if for that."""
        trainer, found, summary = self.job.recipe.trainer, self.progress.validations, self._record.summary
        if (trainer.keep_best or trainer.patience > 0) and found.best_score is not None:
            summary |= {"best_step": found.best_step, "best_score": found.best_score}
        if self.progress.is_out_of_patience and self.progress.step < trainer.steps:
            ended = (
                f"{found.num_since_best} validations in a row were not better than that of step {found.best_step} "
                f"(trainer.patience={trainer.patience})"
            )
            summary["ended"] = ended
            if self.job.world.rank == 0:
                say(f"the training ends after step {self.progress.step}: {ended}")

    def _take_metrics(self) -> dict[str, float]:
        """Return what the roles of this rank measured since the last call."""
        measured = [*(role.metrics for role in self.roles.by_name.values()), self._checkpoints.metrics]
        metrics = merge_metrics(measured)
        for each in measured:
            each.clear()
        return metrics

    def _finish(self) -> None:
        """Write what is known at the end. Collective: all ranks, which leave together."""
        self._record.finish(
            self.progress.step, is_done=self._stopping.reason is None, saved_step=self.progress.saved_step
        )
        if self.job.world.rank == 0:
            if self.job.recipe.archives:
                self._rollouts.join()
            if self._stopping.reason is not None:
                saved_step = self.progress.saved_step
                done = "nothing was saved before" if saved_step is None else f"saved after step {saved_step}"
                say(f"stopped: {self._stopping.reason}; {done}, begin again with --resume")
        self._everyone.barrier("the end of the job")
        self._record.end(self._stopping.reason, self._stopping.save_s)
