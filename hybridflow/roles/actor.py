"""The actor: generates in its rollout layout, learns in its update layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.algorithms.kl import kl_penalty
from hybridflow.algorithms.losses import Totals, aggregate, policy_loss
from hybridflow.data.rollout_log import LogWriter, Sampled
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import EngineError
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import Trainable
from hybridflow.reshard.memory import HostOffload
from hybridflow.reshard.plan import shares_storage
from hybridflow.roles.advantage import KLCoefficient, corrections
from hybridflow.roles.job import Job
from hybridflow.roles.kept_rollouts import KeptRollouts
from hybridflow.roles.placed import PlacedModel, mini_batch, pad_rows, padded, role_spec
from hybridflow.roles.rollout_weights import RolloutWeights
from hybridflow.roles.sampling_engine import PushedEngine, our_engine, server_engine
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.engines.http_engine import HttpEngine
from hybridflow.rollout.request import Request, Response, RolloutStopped, SamplingParams

if TYPE_CHECKING:
    from hybridflow.rollout.engines.vllm_engine import VllmEngine


@dataclass(frozen=True)
class _Progress:
    """What goes on beside generating, see ``request.Progress``."""

    is_stopping: Callable[[], bool]
    log: LogWriter | None = None

    def finished(self, pairs: list[tuple[Request, Response]]) -> None:
        """They are kept, on the rank that has a log."""
        if self.log is not None:
            self.log.add(
                Sampled(draw=ask.draw, index=ask.index, tokens=got.tokens.numpy(), log_probs=got.log_probs.numpy())
                for ask, got in pairs
                if got.finish != "failed"
            )


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
        engine = job.recipe.rollout.engine
        self._rollout = None if engine.is_server else self.model
        self._rollout_weights: RolloutWeights | None = None
        if not engine.is_server and not shares_storage(update, rollout) and (rank in update or rank in rollout):
            self._rollout = PlacedModel(job, rollout, self.spec, is_filled_later=True) if rank in rollout else None
            self._rollout_weights = RolloutWeights(job, self.spec, self.model, self._rollout)
        self._offload: HostOffload | None = None
        if self.trainable is not None and job.recipe.actor.offload:
            self._offload = self.trainable.offload(f"rank {rank}: optimizer of actor.update")
        self._rollout_is_current = False
        self._pushed = PushedEngine(job, self.spec) if engine.kind == "vllm" else None
        self._engine: MegatronEngine | VllmEngine | HttpEngine | None = None
        if self._pushed is not None:
            self._engine = self._pushed.engine
        elif engine.is_server and rank in rollout:
            self._engine = server_engine(
                engine, tokenizer=job.tokenizer, seed=job.recipe.seed, vocab_size=job.vocab_size
            )
        elif self._rollout is not None:
            self._engine = our_engine(job, self._rollout)

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
        if self._pushed is not None and self._rollout is not None and not self._rollout_is_current:
            self._pushed.push(self._rollout)
            if self._rollout_weights is not None:
                self._rollout_weights.release()
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
        are dealt to the replicas in turn. What a killed job has sampled for the step is taken from its log. A replica
        that is told to stop returns no samples, since the step is left.

        Collective: the rollout mesh.

        Raises:
            WriteError: The log cannot be written.
        """
        recipe = self._job.recipe
        first, count = decided["train_step"]["first_draw"], decided["train_step"]["num_prompts"]
        place, params = self._rollout_place(), self._sampling(greedy=False)
        requests = [
            Request(prompt=torch.tensor(self._job.train.prompt(draw)), params=params, draw=draw, index=index)
            for draw in range(first + place.dp, first + count, self._job.meshes["actor.rollout"].layout.dp)
            for index in range(recipe.rollout.group_size)
        ]
        try:
            responses = self._sample(decided["train_step"]["step"], requests)
        except RolloutStopped:
            requests, responses = [], []
        return self._as_batch(requests, responses)

    def answer(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Greedy responses to the held-out problems; their ``draws`` are places in the held-out file.

        A source, as ``sample``. Collective: the rollout mesh.
        """
        limit = self._job.recipe.trainer.num_validation
        count = len(self._job.held_out) if limit is None else min(limit, len(self._job.held_out))
        place, step = self._rollout_place(), self._job.meshes["actor.rollout"].layout.dp
        params = self._sampling(greedy=True)
        requests = [
            Request(prompt=torch.tensor(self._job.held_out[row][1]), params=params, draw=row)
            for row in range(place.dp, count, step)
        ]
        assert self._engine is not None, "called outside the rollout mesh"
        return self._as_batch(requests, self._engine.generate(requests, "validation"))

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
        num_tokens = sum(len(problems.solutions[row][1]) for row in rows)
        layout, place = self.model.mesh.layout, self.model.mesh.coordinate(self._job.world.rank)
        pairs = [problems.solutions[row] for row in rows[place.dp :: layout.dp]]
        sequences = [torch.tensor(prompt + solution) for prompt, solution in pairs]
        micro_batches = self.model.pack(sequences, [len(prompt) for prompt, _ in pairs])

        def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            log_probs, _ = self.model.log_probs(output, micro_batch)
            share = -log_probs.sum() / num_tokens
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
            greedy=greedy,
            stop_ids=self._job.tokenizer.stop_ids,
        )

    def _sample(self, step: int, requests: list[Request]) -> list[Response]:
        """A response to each request; those that are in a log are not generated again."""
        assert self._engine is not None, "called outside the rollout mesh"
        kept = self.kept
        if kept is None:
            return self._engine.generate(requests, progress=_Progress(self.is_stopping))
        found = kept.find(step, requests)
        again = [(ask, found[ask.draw, ask.index]) for ask in requests if (ask.draw, ask.index) in found]
        others = [ask for ask in requests if (ask.draw, ask.index) not in found]
        with kept.log(step) as log:
            progress = _Progress(self.is_stopping, log)
            if again:
                self.metrics["rollout/reused"] = len(again) / len(requests)
                # So that the log of this start has the whole step.
                progress.finished(again)
            new = self._engine.generate(others, progress=progress)
        found |= {(ask.draw, ask.index): got for ask, got in zip(others, new, strict=True)}
        return [found[ask.draw, ask.index] for ask in requests]

    def _as_batch(self, requests: list[Request], responses: list[Response]) -> Batch | None:
        if self._rollout is not None and not self._rollout.is_holder:
            return None
        for ask, got in zip(requests, responses, strict=True):
            if got.finish == "failed":
                raise EngineError(f"response {ask.index} to draw {ask.draw} failed: {got.error}")
        group = self._job.recipe.rollout.group_size
        sequences = [torch.cat([ask.prompt, got.tokens]) for ask, got in zip(requests, responses, strict=True)]
        draws = torch.tensor([ask.draw for ask in requests], dtype=torch.int64)
        indices = torch.tensor([ask.index for ask in requests], dtype=torch.int64)
        return Batch(
            draws * group + indices,
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
        if self._job.recipe.correction_kind != "none":
            sampled = padded(part, "rollout_log_probs", micro_batch.samples, device)
            corrected = corrections(self._job.recipe, columns["old_log_probs"], sampled, mask)
            per_token = per_token * corrected.weights
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
