"""The training loop: run the compiled schedule, take its decisions, and record each step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.store import Checkpoint
from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.graph import Step
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.run import Executor, Replicated, Scope
from hybridflow.errors import LayoutError
from hybridflow.mapping.memory import check_memory
from hybridflow.observe.activity import current_activity
from hybridflow.observe.exporters import Exporter
from hybridflow.observe.rank_log import open_rank_log, say
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.placement.copy_weights import copy_weights
from hybridflow.placement.job import Job
from hybridflow.placement.peft import load_adapters
from hybridflow.placement.placed_model import mini_batch_size
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.sampling.groups import Scores, Turn
from hybridflow.sampling.rollout_log import RolloutLog
from hybridflow.trainer import checkpoints
from hybridflow.trainer.ahead import WORKING_AHEAD
from hybridflow.trainer.open import open_job
from hybridflow.trainer.plan import JobPlan, Program, placement_warnings, plan_job
from hybridflow.trainer.record import Record
from hybridflow.trainer.roles import make_roles
from hybridflow.trainer.schedule import learning_rate
from hybridflow.trainer.starting import note_failure, note_start
from hybridflow.trainer.step_metrics import Share, merge_metrics
from hybridflow.trainer.stopping import Stopping
from hybridflow.trainer.validations import Validations

_WARM_STEPS_TOGETHER = 16
"""After so many steps of the warm start the ranks agree anew on going on."""

_RATE_OF = {"actor": "actor/lr", "critic": "critic/lr", "cost_critic": "cost_critic/lr"}
"""Roles that learn -> the metric with their learning rate."""


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
    """All that comes before a run: its data are read and its models made. Collective: all ranks.

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
    if not resume:
        checkpoints.check_new(Path(recipe.run_dir))
    recipe = _with_nodes(recipe, world)
    plan = plan_job(recipe, step)
    check_memory(recipe, plan.meshes)
    for warning in placement_warnings(plan.meshes) if world.rank == 0 else ():
        print(f"hybridflow: {warning}", file=sys.stderr, flush=True)
    if recipe.actor.reshard_every > 1 and world.rank == 0:
        print(
            f"hybridflow: actor.reshard_every={recipe.actor.reshard_every}: rollouts come from weights that are up to "
            f"{recipe.actor.reshard_every - 1} update(s) old; rollout/staleness_max tells, and correction.kind="
            f"{recipe.correction_kind} applies",
            file=sys.stderr,
            flush=True,
        )
    world.make_groups([*rank_sets(plan.meshes.values(), world.size), *plan.rank_sets()])
    started = note_start(recipe, plan.meshes, world.coordinator(plan.meshes["job"].ranks))
    record, stopping = (
        Record(recipe, world, started.number),
        Stopping(world, started.earlier, works_ahead=recipe.trainer.max_staleness > 0),
    )
    run_dir = Path(recipe.run_dir)
    open_rank_log(run_dir, started.number, world.rank)
    if world.watch is not None:
        world.watch.before_exit = lambda cause: note_failure(
            run_dir, started.number, world.rank, cause, stopping.save_s
        )
    with current_activity("reading data and making models"):
        job = open_job(recipe, world, plan)
        start = checkpoints.find_resume_point(job, resume=resume)
        job = replace(job, is_resumed=start.checkpoint is not None)
        return Trainer(job, plan, start, stopping, record)


def _with_nodes(recipe: Recipe, world: World) -> Recipe:
    """The recipe with the launcher's number of ranks on each node, which decides whose data is near.

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


class Trainer:
    """Runs a job's schedule on this rank. A role of its own, too: it ends each step, and saves.

    Args:
        job: The job.
        plan: Its schedule.
        start: What it begins with.
        stopping: Whether it is to stop.
        record: What is written down of it.

    Attributes:
        step: Training steps done.
        next_prompt_index: Of the first prompt that no step has used.
        num_prompts: Of a step.
        roles: Name -> role.
    """

    def __init__(
        self, job: Job, plan: JobPlan, start: checkpoints.ResumePoint, stopping: Stopping, record: Record
    ) -> None:
        recipe = job.recipe
        self.step = 0
        self.next_prompt_index = 0
        self.num_prompts = recipe.trainer.global_batch_size // recipe.samples_per_prompt
        self.kl_coef = KLCoefficient(recipe)
        self.roles = make_roles(job, self.kl_coef)
        self._multiplier = self.roles["advantage"].multiplier if "lagrange" in recipe.traits.reads else None
        self.job = job
        self._plan = plan
        self._stopping = stopping
        self._record = record
        self._start = start.checkpoint
        self._saved_step = None if start.checkpoint is None else start.checkpoint.step
        self._metrics: dict[str, float] = {}
        self._is_warm_start_cut = False
        self._validations = Validations()
        self._checkpoints = checkpoints.Checkpoints(job, self.roles, start)
        self._everyone = job.world.coordinator(plan.meshes["job"].ranks)
        self._mover = Mover(job.world, plan.meshes, chunk=mini_batch_size(job))
        self._critics = [name for name in ("critic", "cost_critic") if name in self.roles]
        self._rollouts = RolloutLog(job, start.token, start.fingerprint, self._start)
        rollouts, rollout = self.roles["actor"].rollouts, plan.meshes["actor.rollout"]
        if rollouts is not None:
            replica = job.world.coordinator(rollout.replica(rollout.coordinate(job.world.rank).dp))
            rollouts.log, rollouts.is_stopping = self._rollouts, lambda: stopping.agree(replica)

    def run(self) -> bool:
        """Warm start, reinforcement learning, and validation before and after; or what is left of it after a resume.

        Returns:
            Whether it is done; else it was asked to stop, and what it has done is saved.
        """
        if not self.begin():
            return False
        if "accuracy_before_rl" not in self._record.summary and self._stopping.reason is None:
            self._record.summary["accuracy_before_rl"] = self._accuracy()
        self._execute(self._plan.fill)
        self._record.begin_step(self.step, self._stopping.job_end_s)
        self._execute(self._plan.train)
        if self._stopping.reason is None and self.job.recipe.trainer.steps > 0:
            self._record.summary["accuracy_after_rl"] = self._accuracy()
        if self._stopping.reason is not None and self._saved_step != self.step:
            self.save(Batch.empty(), {})
        return self.end()

    def begin(self) -> bool:
        """Weights are read, or taken from the checkpoint; warm start. Collective: all ranks.

        Returns:
            Whether the job can go on; else its warm start was cut short.
        """
        if self._start is not None:
            self._resume(self._start)
            self._set_rates()
        self._record.open(None if self._start is None else self.step)
        return self._start is not None or self._begin()

    def rollout(self, about: Mapping[str, Any]) -> Scope:
        """A step's samples with their scores, for ``learn``. Collective: all ranks.

        Args:
            about: Number of the step, and what it samples, as the decision ``train_step`` tells.
        """
        self._record.begin_step(self.step, self._stopping.job_end_s)
        return self._execute(self._plan.rollout, {}, {"train_step": about})

    def learn(self, scope: Scope, about: Mapping[str, Any]) -> dict[str, float]:
        """Learn from samples of ``rollout``, which ends the step. Collective: all ranks.

        Args:
            scope: What ``rollout`` gave.
            about: As there.

        Returns:
            The step's metrics, the same on all ranks but for its seconds.
        """
        self._execute(self._plan.learn, scope, {"train_step": about})
        return self._metrics

    def save_now(self) -> None:
        """Save between two steps, and wait until it is done. Collective: all ranks."""
        if self._saved_step != self.step:
            self.save(Batch.empty(), {})
        self._checkpoints.finish()
        self._rollouts.end_save()
        self._everyone.barrier("the checkpoint")

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
        # Where the ranks meet is kept by one of them, which stays until all have seen the checkpoint complete.
        shares = self._everyone.gather(self._take_metrics(), "the last checkpoint")
        self._stopping.learn(merge_metrics(shares))
        self._summarize_validations()
        self._finish()
        return self._stopping.reason is None

    def _begin(self) -> bool:
        """All that comes before the first training step; whether the job can go on, or its warm start was cut short."""
        recipe = self.job.recipe
        self._read_weights()
        self._execute(self._plan.warm_start)
        if any(self._everyone.gather(self._is_warm_start_cut, "the warm start")):
            self._finish()
            return False
        self.roles["actor"].end_warm_start()
        self._set_rates()
        self._spread_weights()
        if recipe.warm_start is not None or recipe.trainer.steps == 0 or recipe.trainer.keep_best:
            self.save(Batch.empty(), {})
        return True

    def finish_step(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Gather and record what the step measured. Collective: all ranks."""
        self._checkpoints.check()
        about = decided["train_step"]
        self.step = about["step"]
        rates = {_RATE_OF[name]: rate for name, rate in self._rates(self.step).items()}
        share = self._record.share(self._take_metrics() | rates, self._take_sample_stats())
        own = [share, self._stopping.local_reason(), self._scores()]
        gathered = self._everyone.gather(own, "metrics of the step")
        groups = self.roles.get("groups")
        self.next_prompt_index = (
            about["first_prompt_index"] + about["num_prompts"] if groups is None else groups.next_prompt_index
        )
        self._metrics = metrics = self._record.end_step(self.step, [Share(*found) for found, *_ in gathered])
        self._stopping.learn(metrics)
        self._stopping.settle(reason for _, reason, _ in gathered)
        for *_, scores in gathered:
            self._rollouts.add_scores(self.step, scores)
        if "validation/accuracy" in metrics:
            self._validations.take(self.step, metrics["validation/accuracy"])
        self.roles["actor"].end_step(self.step)
        if not self._is_critic_alone(self.step):
            if "kl/ref" in metrics:
                num_samples = self.job.recipe.trainer.global_batch_size if groups is None else groups.num_samples
                self.kl_coef.advance(metrics["kl/ref"], num_samples)
            self._rollouts.advance(metrics)
        if self._multiplier is not None:
            self._multiplier.advance(metrics["cost/mean"])
        self._set_rates()
        self._record.begin_step(self.step, self._stopping.job_end_s)

    def _scores(self) -> list[tuple[int, int, float]]:
        """Those that this rank tells of the step's samples, by prompt index and index; where samples are archived."""
        found: list[tuple[int, int, float]] = []
        for role in (self.roles[name] for name in ("groups", "advantage") if name in self.roles):
            own, role.scores = role.scores, []
            found += own
        return found

    def save(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, complete or not at all. Called on all ranks."""
        state = {
            "kl_coef": self.kl_coef.value,
            "next_prompt_index": self.next_prompt_index,
            "rollouts": self._rollouts.state(),
            "validations": self._validations.state(),
            **self._record.state(),
        }
        if self._multiplier is not None:
            state["multiplier"] = self._multiplier.value
        best = self._validations.best_step if self.job.recipe.trainer.keep_best else None
        with self.roles["actor"].optimizer_at_hand():
            self._checkpoints.save(self.step, state, best)
        self._saved_step = self.step
        self._rollouts.begin_save(self.step)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint."""
        checkpoints.load(self.job, self.roles, checkpoint)
        self.step = checkpoint.step
        self.kl_coef.value = checkpoint.state["kl_coef"]
        self._validations = Validations.resume(checkpoint.state.get("validations", {}))
        # Before steps could take more prompts than they train on, it was not kept.
        self.next_prompt_index = checkpoint.state.get("next_prompt_index", self.step * self.num_prompts)
        if self._multiplier is not None:
            self._multiplier.value = checkpoint.state["multiplier"]
        self._record.resume(checkpoint.state)
        self.roles["actor"].num_updates = self.step
        self.roles["actor"].mark_changed()
        if self.job.world.rank == 0:
            print(f"resumed from {checkpoint.path}", flush=True)

    def _execute(self, program: Program, scope: Scope | None = None, decided: Mapping[str, Any] | None = None) -> Scope:
        """Run this rank's part of a program, from what it holds before; returns what it holds after."""
        meshes = self._plan.meshes
        executor = Executor(
            schedule=self._plan.schedule(program, self.job.world.rank),
            roles={**self.roles, "trainer": self},
            decisions=self._decisions(),
            mover=self._mover,
            world=self.job.world,
            meshes=meshes,
            timeline=self._record.timeline,
        )
        return executor.run(scope, decided)

    def _decisions(self) -> dict[str, Replicated]:
        """What the schedule's loops and branches ask for, the same on every rank.

        Functions of the step alone, so that no rank need ask another; but on going on, and on what the scores of a
        rollout say, all of them agree.
        """
        recipe = self.job.recipe
        return {
            "warm_step": Replicated(self._warm_steps().__next__),
            "train_step": Replicated(self._next_step),
            "fill": Replicated(self._rollout_turns().__next__),
            "fill_buffer": Replicated(self._fill_steps().__next__),
            "sample_ahead": Replicated(self._step_to_sample),
            "keep_samples": Replicated(lambda: not self._stopping.agree(self._working_ahead())),
            "go_on": Replicated(lambda: not self._stopping.agree(self._everyone)),
            "go_on_to_update": Replicated(lambda: not self._stopping.agree(self._everyone, before_update=True)),
            "critic_mini_batch": Replicated(_mini_batches(self.job, recipe.loss.epochs).__next__),
            "actor_mini_batch": Replicated(self._actor_mini_batches().__next__),
            "validate": Replicated(self._is_validation_due),
            "save": Replicated(self._is_save_due),
        }

    def _warm_steps(self) -> Iterator[dict[str, int] | None]:
        """The turns of the warm start, with progress on the console, then the end of the loop."""
        warm, update = self.job.recipe.warm_start, self._plan.meshes["actor.update"]
        steps = warm.steps if warm is not None else 0
        ranks = self.job.world.coordinator(tuple(sorted(update.ranks)))
        for step in range(steps):
            if step % _WARM_STEPS_TOGETHER == 0 and self._stopping.agree(ranks):
                self._is_warm_start_cut = True
                break
            # The first rank of the last stage knows the loss.
            if step % max(1, steps // 10) == 0 and self.job.world.rank == update.output_ranks(0)[0]:
                loss = self.roles["actor"].metrics.get("warm_start/loss")
                say(f"warm start: step {step}/{steps}" + (f" | loss {loss:.3f}" if loss is not None else ""))
            yield {"step": step}
        yield None

    def _next_step(self) -> dict[str, int] | None:
        return self._about(self.step + 1)

    def _about(self, step: int) -> dict[str, int] | None:
        """What a step samples; None: it is not to come."""
        recipe = self.job.recipe
        if step > recipe.trainer.steps or self._stopping.reason is not None or self._is_out_of_patience:
            return None
        num_between = (step - self.step - 1) * self.num_prompts
        return {
            "step": step,
            "first_prompt_index": self.next_prompt_index + num_between,
            "num_prompts": self.num_prompts,
            "version": self.step,
        }

    def _rollout_turns(self) -> Iterator[Turn | None]:
        """The rollouts of one training step, of algorithms with several, then the end of the loop, and so on."""
        while True:
            yield from self.roles["groups"].turns(self.next_prompt_index, self.num_prompts, self._share_scores)
            yield None

    def _share_scores(self, own: Scores) -> list[Scores] | None:
        """Those of all ranks; None: the step is left. Collective: all ranks."""
        shares = self._everyone.gather([self._stopping.local_reason(), own], "scores of the step's groups")
        if self._stopping.settle(reason for reason, _ in shares):
            return None
        return [[(prompt_index, score) for prompt_index, score in scores] for _, scores in shares]

    def _step_to_sample(self) -> dict[str, int] | None:
        """What is sampled while a step learns."""
        return self._about(self.step + 1 + self.job.recipe.trainer.max_staleness)

    def _fill_steps(self) -> Iterator[dict[str, int] | None]:
        """What is sampled before the first step, then the end of the loop."""
        for ahead in range(1, 1 + self.job.recipe.trainer.max_staleness):
            yield self._about(self.step + ahead)
        yield None

    def _working_ahead(self) -> Coordinator:
        """Those that sample and score while others learn."""
        return self.job.world.coordinator(self._plan.meshes[WORKING_AHEAD].ranks)

    def _is_validation_due(self) -> bool:
        """Asked before the step is counted; after the last step a validation comes anyway.

        Where the best is kept it comes before, since the last checkpoint is to know whether it is that.
        """
        trainer = self.job.recipe.trainer
        is_last = self.step + 1 >= trainer.steps
        return trainer.keep_best if is_last else _is_due(self.step + 1, trainer.validate_every)

    def _is_save_due(self) -> bool:
        trainer = self.job.recipe.trainer
        is_last = self.step == trainer.steps or self._stopping.reason is not None or self._is_out_of_patience
        is_best = trainer.keep_best and self._validations.best_step == self.step
        return is_last or is_best or _is_due(self.step, trainer.save_every)

    @property
    def _is_out_of_patience(self) -> bool:
        """Whether the training ends since validations have not become better for long."""
        return 0 < self.job.recipe.trainer.patience <= self._validations.num_since_best

    def _is_critic_alone(self, step: int) -> bool:
        """Whether a step is one of the first, in which the actor stays as it is."""
        recipe = self.job.recipe
        return any(each is not None and step <= each.warmup_steps for each in (recipe.critic, recipe.cost_critic))

    def _actor_mini_batches(self) -> Iterator[dict[str, int] | None]:
        """The mini-batches of one training step for the actor, then the end of the loop, and so on for ever."""
        turns = _mini_batches(self.job, self.job.recipe.loss.epochs)
        while True:
            if not self._is_critic_alone(self.step + 1):
                yield from iter(turns.__next__, None)
            yield None

    def _rates(self, step: int) -> dict[str, float]:
        """The learning rate of each role that learns, in a step."""
        recipe = self.job.recipe
        trained = {name: getattr(recipe, name) for name in _RATE_OF}
        return {
            name: learning_rate(section.optimizer, step, recipe.trainer.steps)
            for name, section in trained.items()
            if section is not None
        }

    def _set_rates(self) -> None:
        """The next step's, whatever step that is."""
        for name, rate in self._rates(self.step + 1).items():
            trainable = getattr(self.roles.get(name), "trainable", None)
            if trainable is not None:
                trainable.set_learning_rate(rate)

    def _read_weights(self) -> None:
        """Actor and critics take the weights that were given, or of the directories that the recipe names, if any."""
        for name in ("actor", *(critic for critic in self._critics if self._has_own_model(critic))):
            role = self.roles[name]
            if role.model is not None:
                role.model.load()
                if name == "actor":
                    load_adapters(self.job, role.model)
                role.trainable.reload_weights()
        if self._is_reference_in_memory and self.roles["reference"].model is not None:
            with self.roles["reference"].model.at_hand(is_written=True):
                self.roles["reference"].model.load()

    def _spread_weights(self) -> None:
        """Reference, and critics that are no models of their own, begin as the actor that the warm start left.

        Collective: all ranks.
        """
        actor = self.roles["actor"]
        actor.mark_changed()
        if "reference" in self.roles and not self.roles["reference"].is_base and not self._is_reference_in_memory:
            copy_weights(self.job, actor, "actor.update", self.roles["reference"], "reference")
        for name in self._critics:
            if not self._has_own_model(name):
                critic = self.roles[name]
                copy_weights(self.job, actor, "actor.update", critic, name)
                if critic.trainable is not None:
                    critic.trainable.reload_weights()

    def _has_own_model(self, critic: str) -> bool:
        """Whether it does not begin as the actor."""
        return getattr(self.job.recipe, critic).model is not None or critic in self.job.objects

    @property
    def _is_reference_in_memory(self) -> bool:
        """Whether a program gave the reference, which then does not begin as the actor."""
        return "reference" in self.roles and "reference" in self.job.objects

    def _accuracy(self) -> float:
        """Greedy accuracy on the held-out problems as the weights are now, on every rank."""
        if self._validations.step != self.step:
            self._execute(self._plan.validation)
            shares = self._everyone.gather(self._take_metrics(), "validation")
            self._record.timeline.reset()
            self._validations.take(self.step, merge_metrics(shares)["validation/accuracy"])
        accuracy = self._validations.accuracy
        assert accuracy is not None, "has just been measured"
        if self.job.world.rank == 0:
            print(f"held-out accuracy {accuracy:.1%} after {self.step} training steps", flush=True)
        return accuracy

    def _summarize_validations(self) -> None:
        """Tell which validation was the best, and why the training ended, if for that."""
        trainer, found, summary = self.job.recipe.trainer, self._validations, self._record.summary
        if (trainer.keep_best or trainer.patience > 0) and found.best_accuracy is not None:
            summary |= {"best_step": found.best_step, "best_accuracy": found.best_accuracy}
        if self._is_out_of_patience and self.step < trainer.steps:
            ended = (
                f"{found.num_since_best} validations in a row were not better than that of step {found.best_step} "
                f"(trainer.patience={trainer.patience})"
            )
            summary["ended"] = ended
            if self.job.world.rank == 0:
                print(f"the training ends after step {self.step}: {ended}", flush=True)

    def _take_metrics(self) -> dict[str, float]:
        """What the roles of this rank measured since they were last asked."""
        measuring = [*self.roles.values(), self._checkpoints]
        metrics = merge_metrics(each.metrics for each in measuring)
        for each in measuring:
            each.metrics.clear()
        return metrics

    def _take_sample_stats(self) -> dict[str, list[float]]:
        """What the roles of this rank told of single samples since they were last asked."""
        sample_stats: dict[str, list[float]] = {}
        for role in self.roles.values():
            own = getattr(role, "sample_stats", {})
            sample_stats |= own
            own.clear()
        return sample_stats

    def _finish(self) -> None:
        """Write what is known at the end. Collective: all ranks, which leave together."""
        self._record.finish(self.step, is_done=self._stopping.reason is None)
        if self.job.world.rank == 0:
            if self.job.recipe.rollout.archive:
                self._rollouts.join()
            if self._stopping.reason is not None:
                done = (
                    "nothing was saved before" if self._saved_step is None else f"saved after step {self._saved_step}"
                )
                print(f"stopped: {self._stopping.reason}; {done}, begin again with --resume", flush=True)
        self._everyone.barrier("the end of the job")
        self._record.end(self._stopping.reason, self._stopping.save_s)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mini_batches(job: Job, epochs: int) -> Iterator[dict[str, int] | None]:
    """The mini-batches of one training step, then the end of the loop, and so on for ever."""
    while True:
        for epoch in range(epochs):
            for index in range(job.recipe.trainer.global_batch_size // mini_batch_size(job)):
                yield {"epoch": epoch, "index": index}
        yield None
