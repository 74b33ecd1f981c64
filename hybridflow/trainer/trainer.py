"""The training loop: run the compiled schedule, take its decisions, and record each step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.store import Checkpoint
from hybridflow.config import Recipe
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.run import Executor, Replicated
from hybridflow.dataflow.schedule import project
from hybridflow.errors import LayoutError
from hybridflow.observe.doing import doing
from hybridflow.observe.rank_log import open_rank_log, say
from hybridflow.observe.starts import add_end
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.job import Job
from hybridflow.roles.kept_rollouts import KeptRollouts
from hybridflow.roles.peft import load_adapters
from hybridflow.roles.placed import mini_batch_size
from hybridflow.trainer import checkpoints
from hybridflow.trainer.copy_weights import copy_weights
from hybridflow.trainer.open import open_job
from hybridflow.trainer.plan import JobPlan, Program, placement_warnings, plan_job
from hybridflow.trainer.record import Record
from hybridflow.trainer.roles import make_roles
from hybridflow.trainer.starting import note_failure, note_start
from hybridflow.trainer.step_metrics import merge_metrics
from hybridflow.trainer.stopping import Stopping

_WARM_STEPS_TOGETHER = 16
"""After so many steps of the warm start the ranks agree anew on going on."""


def train(recipe: Recipe, world: World, *, resume: bool = False) -> bool:
    """Run a recipe on the ranks that are there, this process being one of them.

    Returns:
        Whether it is done; else it has saved and stopped before its end, as it was asked to, and can be gone on with.

    Raises:
        HybridflowError: Whatever stops the run, with a message for the user.
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
    plan = plan_job(recipe)
    for warning in placement_warnings(plan.meshes) if world.rank == 0 else ():
        print(f"hybridflow: {warning}", file=sys.stderr, flush=True)
    world.make_groups([*rank_sets(plan.meshes.values(), world.size), *plan.rank_sets()])
    started = note_start(recipe, plan.meshes, world.coordinator(plan.meshes["job"].ranks))
    record, stopping = Record(recipe, world, started.number), Stopping(world, started.earlier)
    run_dir = Path(recipe.run_dir)
    open_rank_log(run_dir, started.number, world.rank)
    if world.watch is not None:
        world.watch.before_exit = lambda cause: note_failure(
            run_dir, started.number, world.rank, cause, stopping.save_s
        )
    with doing("reading data and making models"):
        job = open_job(recipe, world, plan)
        start = checkpoints.begin(job, resume=resume)
        job = replace(job, is_resumed=start.checkpoint is not None)
        trainer = Trainer(job, plan, start, stopping, record)
    is_done = trainer.run()
    if world.rank == 0:
        add_end(run_dir, started.number, "finished" if is_done else "requeue", stopping.reason or "", stopping.save_s)
    return is_done


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
        roles: Name -> role.
    """

    def __init__(self, job: Job, plan: JobPlan, start: checkpoints.Begin, stopping: Stopping, record: Record) -> None:
        recipe = job.recipe
        self.step = 0
        self.kl_coef = KLCoefficient(recipe)
        self.roles = make_roles(job, self.kl_coef)
        self.job = job
        self._plan = plan
        self._stopping = stopping
        self._record = record
        self._start = start.checkpoint
        self._saved_step = None if start.checkpoint is None else start.checkpoint.step
        self._is_warm_start_cut = False
        self._checkpoints = checkpoints.Checkpoints(job, self.roles, start)
        self._everyone = job.world.coordinator(plan.meshes["job"].ranks)
        self._mover = Mover(job.world, plan.meshes, chunk=mini_batch_size(job))
        self._has_own_critic = recipe.critic is not None and recipe.critic.model is not None
        self._rollouts = KeptRollouts(job, start.token, start.fingerprint, self._start)
        rollouts, rollout = self.roles["actor"].rollouts, plan.meshes["actor.rollout"]
        if rollouts is not None:
            replica = job.world.coordinator(rollout.replica(rollout.coordinate(job.world.rank).dp))
            rollouts.kept, rollouts.is_stopping = self._rollouts, lambda: stopping.agree(replica)

    def run(self) -> bool:
        """Warm start, reinforcement learning, and validation before and after; or what is left of it after a resume.

        Returns:
            Whether it is done; else it was asked to stop, and what it has done is saved.
        """
        if self._start is not None:
            self._resume(self._start)
        self._record.open(None if self._start is None else self.step)
        if self._start is None and not self._begin():
            return False
        if "accuracy_before_rl" not in self._record.summary and self._stopping.reason is None:
            self._record.summary["accuracy_before_rl"] = self._validate()
        self._record.begin_step(self.step, self._stopping.job_end_s)
        self._execute(self._plan.train)
        if self._stopping.reason is None and self.job.recipe.trainer.steps > 0:
            self._record.summary["accuracy_after_rl"] = self._validate()
        if self._stopping.reason is not None and self._saved_step != self.step:
            self.save(Batch.empty(), {})
        self._checkpoints.finish()
        self._rollouts.end_save()
        # Where the ranks meet is kept by one of them, which stays until all have seen the checkpoint complete.
        shares = self._everyone.gather(self._take_metrics(), "the last checkpoint")
        self._stopping.learn(merge_metrics(shares))
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
        self._spread_weights()
        if recipe.warm_start is not None or recipe.trainer.steps == 0:
            self.save(Batch.empty(), {})
        return True

    def finish_step(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Gather and record what the step measured. Collective: all ranks."""
        self._checkpoints.check()
        own = [self._take_metrics(), self._record.timeline.spans, self._stopping.own_reason()]
        gathered = self._everyone.gather(own, "metrics of the step")
        self.step = decided["train_step"]["step"]
        metrics = self._record.end_step(self.step, [(measured, spans) for measured, spans, _ in gathered])
        self._stopping.learn(metrics)
        self._stopping.settle(reason for _, _, reason in gathered)
        self.roles["actor"].end_step(self.step)
        self.kl_coef.advance(metrics.get("kl/ref", 0.0))
        self._rollouts.advance(metrics)
        self._record.begin_step(self.step, self._stopping.job_end_s)

    def save(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, complete or not at all. Called on all ranks."""
        state = {"kl_coef": self.kl_coef.value, "rollouts": self._rollouts.state(), **self._record.state()}
        with self.roles["actor"].optimizer_at_hand():
            self._checkpoints.save(self.step, state)
        self._saved_step = self.step
        self._rollouts.begin_save(self.step)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint."""
        checkpoints.load(self.job, self.roles, checkpoint)
        self.step = checkpoint.step
        self.kl_coef.value = checkpoint.state["kl_coef"]
        self._record.resume(checkpoint.state)
        self.roles["actor"].mark_changed()
        if self.job.world.rank == 0:
            print(f"resumed from {checkpoint.path}", flush=True)

    def _execute(self, program: Program) -> None:
        """Run this rank's part of a program."""
        meshes = self._plan.meshes
        Executor(
            schedule=project(program, self.job.world.rank, meshes),
            roles={**self.roles, "trainer": self},
            decisions=self._decisions(),
            mover=self._mover,
            world=self.job.world,
            meshes=meshes,
            timeline=self._record.timeline,
        ).run()

    def _decisions(self) -> dict[str, Replicated]:
        """What the schedule's loops and branches ask for, the same on every rank.

        Functions of the step alone, so that no rank need ask another; but to go on is what all of them agree on.
        """
        recipe = self.job.recipe
        return {
            "warm_step": Replicated(self._warm_steps().__next__),
            "train_step": Replicated(self._next_step),
            "go_on": Replicated(lambda: not self._stopping.agree(self._everyone)),
            "go_on_to_update": Replicated(lambda: not self._stopping.agree(self._everyone, before_update=True)),
            "critic_mini_batch": Replicated(_mini_batches(self.job, recipe.loss.epochs).__next__),
            "actor_mini_batch": Replicated(_mini_batches(self.job, recipe.loss.epochs).__next__),
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
            if step % max(1, steps // 10) == 0 and self.job.world.rank == update.holders(0)[0]:
                loss = self.roles["actor"].metrics.get("warm_start/loss")
                say(f"warm start: step {step}/{steps}" + (f" | loss {loss:.3f}" if loss is not None else ""))
            yield {"step": step}
        yield None

    def _next_step(self) -> dict[str, int] | None:
        recipe = self.job.recipe
        if self.step >= recipe.trainer.steps or self._stopping.reason is not None:
            return None
        num_prompts = recipe.trainer.global_batch_size // recipe.rollout.group_size
        return {"step": self.step + 1, "first_draw": self.step * num_prompts, "num_prompts": num_prompts}

    def _is_validation_due(self) -> bool:
        """Asked before the step is counted; after the last step a validation comes anyway."""
        trainer = self.job.recipe.trainer
        return _is_due(self.step + 1, trainer.validate_every) and self.step + 1 < trainer.steps

    def _is_save_due(self) -> bool:
        trainer = self.job.recipe.trainer
        is_last = self.step == trainer.steps or self._stopping.reason is not None
        return is_last or _is_due(self.step, trainer.save_every)

    def _read_weights(self) -> None:
        """Actor and critic take the weights of the directories that the recipe names, if any."""
        for name in ("actor", "critic") if self._has_own_critic else ("actor",):
            role = self.roles[name]
            if role.model is not None:
                role.model.load()
                if name == "actor":
                    load_adapters(self.job, role.model)
                role.trainable.reload_weights()

    def _spread_weights(self) -> None:
        """Reference, and a critic that is no model of its own, begin as the actor that the warm start left.

        Collective: all ranks.
        """
        actor, critic = self.roles["actor"], self.roles.get("critic")
        actor.mark_changed()
        if "reference" in self.roles and not self.roles["reference"].is_base:
            copy_weights(self.job, actor, "actor.update", self.roles["reference"], "reference")
        if critic is not None and not self._has_own_critic:
            copy_weights(self.job, actor, "actor.update", critic, "critic")
            if critic.trainable is not None:
                critic.trainable.reload_weights()

    def _validate(self) -> float:
        """Greedy accuracy on the held-out problems, on every rank."""
        self._execute(self._plan.validation)
        shares = self._everyone.gather(self._take_metrics(), "validation")
        self._record.timeline.reset()
        accuracy = merge_metrics(shares)["validation/accuracy"]
        if self.job.world.rank == 0:
            print(f"held-out accuracy {accuracy:.1%} after {self.step} training steps", flush=True)
        return accuracy

    def _take_metrics(self) -> dict[str, float]:
        """What the roles of this rank measured since they were last asked."""
        measuring = [*self.roles.values(), self._checkpoints]
        metrics = merge_metrics(each.metrics for each in measuring)
        for each in measuring:
            each.metrics.clear()
        return metrics

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


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mini_batches(job: Job, epochs: int) -> Iterator[dict[str, int] | None]:
    """The mini-batches of one training step, then the end of the loop, and so on for ever."""
    while True:
        for epoch in range(epochs):
            for index in range(job.recipe.trainer.global_batch_size // mini_batch_size(job)):
                yield {"epoch": epoch, "index": index}
        yield None
