"""The actor: generates in its rollout layout, learns in its update layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.kl import kl_penalty
from hybridflow.algorithms.losses import Totals, aggregate, policy_loss
from hybridflow.data.prompts import Example
from hybridflow.data.rollout_log import LogWriter
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.schedule import Move
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import Trainable
from hybridflow.reshard.memory import HostOffload
from hybridflow.reshard.plan import shares_storage
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.job import Job
from hybridflow.roles.kept_rollouts import KeptRollouts, to_sampled
from hybridflow.roles.placed import PlacedModel, mini_batch, pad_rows, padded, role_spec
from hybridflow.roles.rollout_weights import RolloutWeights
from hybridflow.rollout.dealing import Claims, Deal
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.environment import Environments
from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams


@dataclass(frozen=True)
class _Progress:
    """What goes on beside generating, see ``request.Progress``."""

    is_stopping: Callable[[], bool]
    log: LogWriter | None = None

    def finished(self, pairs: list[tuple[Request, Response]]) -> None:
        """They are kept, on the rank that has a log; so are paused ones. One that failed is tried again."""
        if self.log is not None:
            self.log.add(to_sampled(ask, got) for ask, got in pairs if got.finish != "failed" and len(got.tokens))


_COLUMNS = ("tokens", "prompt_lengths", "draws", "response_mask", "rollout_log_probs")
"""What generating gives of each sample."""


def _expected(deal: Deal, groups: list[list[Request]]) -> list[Request]:
    """All that a replica may come to generate."""
    return [request for group in groups for request in group] if deal.has_queue else deal.first


class Actor:
    """The policy being trained.

    Attributes:
        model: Its weights in the update layout; None on a rank outside that mesh.
        trainable: Gradients and optimizer of ``model``.
        metrics: What the last calls measured, over the global batch; emptied by the trainer each step.
        is_stopping: Whether ``sample`` is to end early, as a step that is left; set by the trainer. Asked on all ranks
            of a replica at the same points, and answers the same on all of them. Collective: tp, pp.
        kept: What was sampled and is not yet part of a checkpoint; None: nothing is kept.
    """

    def __init__(self, job: Job, kl_coef: KLCoefficient) -> None:
        self.metrics: dict[str, float] = {}
        self.is_stopping: Callable[[], bool] = lambda: False
        self.kept: KeptRollouts | None = None
        self.spec = role_spec(job)
        self._job = job
        self._kl_coef = kl_coef
        self._settings = job.recipe.ppo if job.recipe.algorithm == "ppo" else job.recipe.grpo
        update, rollout = job.meshes["actor.update"], job.meshes["actor.rollout"]
        rank = job.world.rank
        self.model = PlacedModel(job, update, self.spec) if rank in update else None
        self.trainable: Trainable | None = None
        if self.model is not None:
            self.trainable = Trainable(self.model.transformer, self.model.groups, job.recipe.actor.optimizer)
        self._rollout = self.model
        self._rollout_weights: RolloutWeights | None = None
        if not shares_storage(update, rollout) and (rank in update or rank in rollout):
            self._rollout = PlacedModel(job, rollout, self.spec, is_filled_later=True) if rank in rollout else None
            self._rollout_weights = RolloutWeights(job, self.spec, self.model, self._rollout)
        self._offload: HostOffload | None = None
        if self.trainable is not None and job.recipe.actor.offload:
            self._offload = self.trainable.offload(f"rank {rank}: optimizer of actor.update")
        self._rollout_is_current = False
        self._engine: MegatronEngine | None = None
        if self._rollout is not None:
            self._engine = MegatronEngine(
                self._rollout.transformer,
                self._rollout.groups,
                vocab_size=job.vocab_size,
                seed=job.recipe.seed,
                max_concurrent=job.recipe.rollout.max_concurrent,
                cache_memory=job.recipe.rollout.cache_memory,
                ranks_per_node=min(job.world.ranks_per_node, job.world.size),
                tokenizer=job.tokenizer,
            )
        self._claims: Claims | None = None
        self._conversations: Environments | None = None
        if self._rollout is not None and job.recipe.rollout.environment is not None:
            replica = job.world.coordinator(rollout.group_of(rank, "tp", "pp"))
            self._conversations = Environments(job.recipe.rollout.environment, job.tokenizer, replica)

    def enter_phase(self, phase: str) -> None:
        """Make room for a phase and bring what it needs. Collective: all ranks of both layouts.

        Before a rollout its layout's weights are brought up to date; before an update those that the layouts do not
        share are freed.
        """
        if phase == "update":
            if self._engine is not None:
                self._engine.weights_changed()
            if self._rollout_weights is not None:
                self._rollout_weights.release()
                self._rollout_is_current = False
            if self._offload is not None:
                self._offload.restore()
            return
        if self._offload is not None:
            self._offload.offload()
        if self._rollout_weights is not None and not self._rollout_is_current:
            for name, value in self._rollout_weights.refresh().items():
                # A validation within the step may reshard once more: what is moved adds up, what is kept does not.
                before = 0.0 if name == "reshard/extra_bytes" else self.metrics.get(name, 0.0)
                self.metrics[name] = before + value
        self._rollout_is_current = True

    @contextlib.contextmanager
    def optimizer_at_hand(self) -> Iterator[None]:
        """The optimizer's state where it is used, also in the midst of a rollout."""
        is_away = self._offload is not None and self._offload.is_away
        if self._offload is not None:
            self._offload.restore()
        try:
            yield
        finally:
            if self._offload is not None and is_away:
                self._offload.offload()

    def sample(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Generate the step's responses: ``group_size`` for each prompt.

        Source of ``tokens``, ``prompt_lengths``, ``draws``, ``response_mask`` and ``rollout_log_probs``. Whole groups
        are dealt to the replicas in turn; who has short responses generates some of another's, which are then brought
        back. What an earlier start has sampled for the step is taken from its log. A replica that is told to stop
        returns no samples, since the step is left, and logs what it has of them.

        Collective: the rollout mesh.

        Raises:
            WriteError: The log cannot be written.
        """
        recipe = self._job.recipe
        first, count = decided["train_step"]["first_draw"], decided["train_step"]["num_prompts"]
        params = self._sampling(greedy=False)
        groups = [
            [
                Request(prompt=torch.tensor(self._job.train.prompt(draw)), params=params, draw=draw, index=index)
                for index in range(recipe.rollout.group_size)
            ]
            for draw in range(first, first + count)
        ]
        if self._conversations is not None:
            return self._converse(groups, "rollout", self._job.train.example)
        deal = self._deal(groups)
        try:
            pairs = self._sample(decided["train_step"]["step"], deal, groups)
        except RolloutStopped:
            pairs = []
        return self._as_batch(pairs, groups, deal)

    def answer(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Greedy responses to the held-out problems; their ``draws`` are places in the held-out file.

        A source, as ``sample``. Collective: the rollout mesh.
        """
        limit = self._job.recipe.trainer.num_validation
        count = len(self._job.held_out) if limit is None else min(limit, len(self._job.held_out))
        params = self._sampling(greedy=True)
        groups = [
            [Request(prompt=torch.tensor(self._job.held_out[row][1]), params=params, draw=row)] for row in range(count)
        ]
        if self._conversations is not None:
            return self._converse(groups, "validation", lambda row: self._job.held_out[row][0])
        deal = self._deal(groups)
        assert self._engine is not None, "called outside the rollout mesh"
        pairs = self._engine.drive(deal.first, "validation", more=deal.more, expected=_expected(deal, groups))
        return self._as_batch(pairs, groups, deal)

    def log_probs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """``old_log_probs``: those of the weights at the start of the update."""
        assert self.model is not None, "called outside the update mesh"
        column = self.model.per_token(batch, lambda output, part: self.model.log_probs(output, part)[0])
        return None if column is None else Batch(batch.ids, {"old_log_probs": column})

    def update(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """One optimizer step on one mini-batch. Collective: all ranks of the update mesh."""
        assert self.model is not None and self.trainable is not None, "called outside the update mesh"
        part = mini_batch(self._job, batch, decided["actor_mini_batch"]["index"])
        totals = self.model.totals(part)
        kept = self.trainable.accumulate(
            self.model.micro_batches(part), lambda output, micro_batch: self._loss(output, micro_batch, part, totals)
        )
        grad_norm = self.trainable.step()
        self._rollout_is_current = False
        if self.model.is_holder:
            self._report(kept, grad_norm)

    def imitate(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """One step of supervised training on solutions: token mean of the cross-entropy.

        Collective: the update mesh.
        """
        assert self.model is not None and self.trainable is not None, "called outside the update mesh"
        warm = self._job.recipe.warm_start
        assert warm is not None, "a warm start was scheduled without its section"
        problems, step = self._job.train, decided["warm_step"]["step"]
        rows = [problems.source.row(draw) for draw in range(step * warm.batch_size, (step + 1) * warm.batch_size)]
        num_tokens = sum(sum(problems.solutions[row].is_written) for row in rows)
        layout, place = self.model.mesh.layout, self.model.mesh.coordinate(self._job.world.rank)
        solutions = [problems.solutions[row] for row in rows[place.dp :: layout.dp]]
        sequences = [torch.tensor(each.prompt + each.tokens) for each in solutions]
        micro_batches = self.model.pack(sequences, [len(each.prompt) for each in solutions])

        def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            log_probs, _ = self.model.log_probs(output, micro_batch)
            is_written = [flag for sample in micro_batch.samples for flag in solutions[sample].is_written]
            share = -log_probs[torch.tensor(is_written, dtype=torch.bool, device=output.device)].sum() / num_tokens
            return share, share.detach()[None]

        self.trainable.set_learning_rate(warm.lr)
        kept = self.trainable.accumulate(micro_batches, loss)
        self.trainable.step()
        self._rollout_is_current = False
        if self.model.is_holder:
            (self.metrics["warm_start/loss"],) = self.model.add_up(kept, 1)

    def end_warm_start(self) -> None:
        """Forget the moments of the supervised phase and take up the recipe's own learning rate."""
        if self.trainable is not None:
            self.trainable.reset_optimizer()
            self.trainable.set_learning_rate(self._job.recipe.actor.optimizer.lr)

    def mark_changed(self) -> None:
        """The update layout's weights were written from outside: the rollout's are no longer current."""
        self._rollout_is_current = False
        if self._engine is not None:
            self._engine.weights_changed()

    def _rollout_place(self) -> Any:
        return self._job.meshes["actor.rollout"].coordinate(self._job.world.rank)

    def _sampling(self, *, greedy: bool) -> SamplingParams:
        rollout = self._job.recipe.rollout
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            min_new_tokens=rollout.min_new_tokens,
            repetition_penalty=rollout.repetition_penalty,
            presence_penalty=rollout.presence_penalty,
            frequency_penalty=rollout.frequency_penalty,
            stop=rollout.stop,
            greedy=greedy,
            stop_ids=self._job.tokenizer.stop_ids,
        )

    def _deal(self, groups: list[list[Request]]) -> Deal:
        """Who generates what. Collective: the rollout mesh."""
        mesh = self._job.meshes["actor.rollout"]

        def claims() -> Claims:
            if self._claims is None:
                self._claims = Claims(self._job.world, mesh)
            return self._claims

        return Deal(
            groups,
            place=self._rollout_place().dp,
            num_replicas=mesh.layout.dp,
            num_slots=self._job.recipe.rollout.max_concurrent,
            make_claims=claims,
        )

    def _sample(self, step: int, deal: Deal, groups: list[list[Request]]) -> list[tuple[Request, Response]]:
        """A response to each request of this replica's; what is in a log is not generated again."""
        assert self._engine is not None, "called outside the rollout mesh"
        # Steps whose updates the weights have.
        self._engine.version = step - 1
        expected, kept = _expected(deal, groups), self.kept
        found = {} if kept is None else kept.find(step, expected)
        with contextlib.nullcontext() if kept is None else kept.log(step) as log:
            progress = _Progress(self.is_stopping, log)
            again: list[tuple[Request, Response]] = []
            num_begun = 0

            def missing(requests: list[Request]) -> list[Request]:
                nonlocal num_begun
                pairs = [(ask, found.get((ask.draw, ask.index))) for ask in requests]
                done = [(ask, got) for ask, got in pairs if got is not None and got.finish != "paused"]
                if done:
                    # So that the log of this start has the whole step.
                    progress.finished(done)
                    again.extend(done)
                begun = [replace(ask, begun=got) for ask, got in pairs if got is None or got.finish == "paused"]
                num_begun += sum(ask.begun is not None for ask in begun)
                return begun

            def more(num_open: int) -> list[Request]:
                while requests := deal.more(num_open):
                    if others := missing(requests):
                        return others
                return []

            try:
                new = self._engine.drive(missing(deal.first), progress=progress, more=more, expected=expected)
            except RolloutStopped as stopped:
                progress.finished(stopped.unfinished)
                raise
        self.metrics |= self._engine.metrics
        num = len(again) + len(new)
        shares = {"rollout/reused": len(again), "rollout/continued": num_begun, "rollout/claimed": deal.num_claimed}
        self.metrics |= {name: count / num for name, count in shares.items() if count}
        return again + new

    def _as_batch(self, pairs: list[tuple[Request, Response]], groups: list[list[Request]], deal: Deal) -> Batch | None:
        """The samples of this replica, as they were dealt to begin with: those generated elsewhere are brought back.

        So what is computed from them does not depend on who was quicker. Collective: the rollout mesh, if there was a
        choice.
        """
        pairs = sorted(pairs, key=lambda pair: (pair[0].draw, pair[0].index))
        batch = self._columns([ask for ask, _ in pairs], [got for _, got in pairs])
        if not deal.has_queue:
            return batch
        place, mesh = self._rollout_place(), self._job.meshes["actor.rollout"]
        mine = [ask for group in groups[place.dp :: mesh.layout.dp] for ask in group]
        home = Batch(torch.tensor([self._id_of(ask) for ask in mine], dtype=torch.int64), {})
        mover = Mover(self._job.world, self._job.meshes, chunk=max(1, len(home)))
        moved = mover.move(Move(columns=_COLUMNS, source=mesh.name, destination=mesh.name), batch, home)
        return (
            None
            if batch is None or moved is None
            else Batch(moved.ids, {name: moved.columns[name] for name in _COLUMNS})
        )

    def _id_of(self, request: Request) -> int:
        return request.draw * self._job.recipe.rollout.group_size + request.index

    def _converse(
        self, groups: list[list[Request]], purpose: str, example_of: Callable[[int], Example]
    ) -> Batch | None:
        """As ``sample``, of conversations with the environment; a validation does not stop.

        ``response_mask`` is 1 on what was sampled alone, ``environment_rewards`` are the sums over the turns.
        """
        assert self._engine is not None and self._conversations is not None, "called outside the rollout mesh"
        place, num_replicas = self._rollout_place(), self._job.meshes["actor.rollout"].layout.dp
        requests = [ask for group in groups[place.dp :: num_replicas] for ask in group]
        examples = [example_of(ask.draw) for ask in requests]
        is_stopping = self.is_stopping if purpose == "rollout" else lambda: False
        try:
            found = self._conversations.converse(self._engine, requests, examples, purpose, is_stopping)
        except RolloutStopped:
            requests, found = [], []
        if purpose == "rollout":
            mesh, rank = self._job.meshes["actor.rollout"], self._job.world.rank
            errors = [each.error for each in found if each.error is not None]
            if errors and place.tp == place.pp == 0:
                print(f"environment: failed in {len(errors)} of {len(found)} samples; one: {errors[0]}", flush=True)
            share = [len(found), sum(each.num_turns for each in found), len(errors)]
            # Each replica has its own samples, and its first rank tells of them.
            shares = self._job.world.coordinator(mesh.ranks).gather(share, "conversations")
            firsts = [
                shares[mesh.ranks.index(mesh.group_of(each, "tp", "pp")[0])] for each in mesh.group_of(rank, "dp")
            ]
            num_samples, num_turns, num_failed = (sum(each) for each in zip(*firsts, strict=True))
            self.metrics["environment/turns_mean"] = num_turns / max(num_samples, 1)
            self.metrics["environment/failed"] = float(num_failed)
            self.metrics |= self._engine.metrics
        batch = self._columns(requests, [each.response for each in found])
        if batch is None:
            return None
        rewards = torch.tensor([each.reward for each in found], dtype=torch.float32)
        mask = Ragged.from_list([each.mask for each in found], torch.float32)
        return batch.with_columns({"response_mask": mask, "environment_rewards": rewards})

    def _columns(self, requests: list[Request], responses: list[Response]) -> Batch | None:
        assert self._rollout is not None, "called outside the rollout mesh"
        if not self._rollout.is_holder:
            return None
        sequences = [torch.cat([ask.prompt, got.tokens]) for ask, got in zip(requests, responses, strict=True)]
        draws = torch.tensor([ask.draw for ask in requests], dtype=torch.int64)
        return Batch(
            torch.tensor([self._id_of(ask) for ask in requests], dtype=torch.int64),
            {
                "tokens": Ragged.from_list(sequences, torch.int64),
                "prompt_lengths": torch.tensor([len(ask.prompt) for ask in requests], dtype=torch.int64),
                "draws": draws,
                "response_mask": Ragged.from_list([torch.ones(len(got.tokens)) for got in responses], torch.float32),
                "rollout_log_probs": Ragged.from_list([got.log_probs for got in responses], torch.float32),
            },
        )

    def _loss(self, output: Tensor, micro_batch: MicroBatch, part: Batch, totals: Totals) -> tuple[Tensor, Tensor]:
        """The micro-batch's share of the loss; beside it, shares of what is reported."""
        settings, device = self._settings, output.device
        log_probs, entropy = self.model.log_probs(output, micro_batch)
        log_probs = pad_rows(log_probs.split(micro_batch.response_lengths))
        entropy = pad_rows(entropy.split(micro_batch.response_lengths))
        columns = {
            name: padded(part, name, micro_batch.samples, device)
            for name in ("response_mask", "old_log_probs", "advantages")
        }
        mask = columns["response_mask"]
        per_token, stats = policy_loss(
            log_probs,
            columns["old_log_probs"],
            columns["advantages"],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        loss = aggregate(per_token, mask, settings.aggregation, totals)
        policy_share = loss.detach()
        if self._kl_coef.is_in_loss:
            reference = padded(part, "ref_log_probs", micro_batch.samples, device)
            kl = kl_penalty(log_probs, reference, settings.kl_estimator)
            loss = loss + self._kl_coef.value * aggregate(kl, mask, settings.aggregation, totals)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * aggregate(entropy, mask, settings.aggregation, totals)
        log_ratio = (log_probs - columns["old_log_probs"]).detach()
        reported = torch.stack(
            [
                policy_share,
                loss.detach(),
                (stats.is_clipped * mask).sum() / totals.num_tokens,
                (entropy.detach() * mask).sum() / totals.num_tokens,
                (-log_ratio * mask).sum() / totals.num_tokens,
            ]
        )
        return loss, reported

    def _report(self, kept: list[Tensor], grad_norm: float) -> None:
        policy, loss, clipped, entropy, kl = self.model.add_up(kept, 5)
        self.metrics |= {
            "actor/policy_loss": policy,
            "actor/loss": loss,
            "actor/clip_share": clipped,
            "actor/entropy": entropy,
            "actor/kl_to_old": kl,
            "actor/grad_norm": grad_norm,
        }
