"""The actor: generates in its rollout layout, learns in its update layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms.losses import Totals, aggregate
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.role import Role
from hybridflow.models.adapters import factor_spec
from hybridflow.models.distillation import vocab_parallel_reverse_kl
from hybridflow.models.lora import merge
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import LossFunction, Trainable, sum_over
from hybridflow.models.user_model import Uncut
from hybridflow.observe.expert_loads import Loads, as_statistics
from hybridflow.parallel.copies import to_device
from hybridflow.placement.job import Job
from hybridflow.placement.loss_mask import is_last_mini_batch, mini_batch
from hybridflow.placement.peft import check_targets
from hybridflow.placement.place import place_model
from hybridflow.placement.placed_model import PlacedModel, role_spec
from hybridflow.placement.rollout_weights import RolloutWeights, offloads_shards
from hybridflow.placement.routing import RouterWatch
from hybridflow.reshard.memory import HostOffload, give_back
from hybridflow.reshard.plan import shares_storage
from hybridflow.roles.advantage import KLCoefficient, length_metrics, length_stats
from hybridflow.roles.offline_samples import row_stats
from hybridflow.roles.policy_loss import LOSS_MASK, LOSS_SUMS, SAMPLER_SUMS, PolicyLoss
from hybridflow.sampling.engines import PushedEngine, make_own_engine, make_server_engine
from hybridflow.sampling.rollout_buffer import asked, measure_staleness
from hybridflow.sampling.rollouts import Rollouts

_LOSS_COLUMNS = ("response_mask", LOSS_MASK, "advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")


class Actor(Role):
    """The policy being trained.

    Attributes:
        model: Its weights in the update layout; None on a rank outside that mesh.
        trainable: Gradients and optimizer of ``model``.
        rollouts: Samples for it; None on a rank outside the rollout mesh.
    """

    call_names: tuple[str, ...] = ("sample", "sample_validation", "log_probs", "update", "distill", "imitate")

    def __init__(self, job: Job, kl_coef: KLCoefficient) -> None:
        super().__init__()
        self.spec = role_spec(job, has_value_head=job.recipe.traits.is_scorer)
        check_targets(job)
        self._job = job
        self._lora = job.recipe.actor.lora
        self._kl_coef = kl_coef
        user_algorithm = job.objects.get("algorithm")
        user_loss = None
        if user_algorithm is not None and user_algorithm.has_user_method("loss"):
            user_loss = user_algorithm.loss
        self._policy_loss = PolicyLoss(job.recipe, kl_coef, user_loss)
        self._compared = torch.zeros(len(SAMPLER_SUMS), dtype=torch.float64)
        update, rollout = job.meshes["actor.update"], job.meshes["actor.rollout"]
        rank = job.world.rank
        is_scorer = job.recipe.traits.is_scorer
        self.model = place_model(job, update, self.spec, has_value_head=is_scorer)
        self.trainable: Trainable | None = None
        if self.model is not None:
            self.trainable = self.model.make_trainable(job.recipe.actor.optimizer)
        engine = job.recipe.rollout.engine
        self._rollout = None if engine.is_server else self.model
        self._rollout_weights: RolloutWeights | None = None
        generates = job.recipe.generates
        self._reshard_every = job.recipe.actor.reshard_every
        is_one = shares_storage(update, rollout) and not job.recipe.actor.keeps_rollout_apart
        is_apart = generates and not engine.is_server and not is_one
        if is_apart and (rank in update or rank in rollout):
            self._rollout = place_model(job, rollout, self.spec, is_filled_later=True)
            self._rollout_weights = RolloutWeights(job, self.spec, self.model, self._rollout)
        self._offload: HostOffload | None = None
        if self.trainable is not None and job.recipe.actor.offload is True:
            self._offload = self.trainable.offload(f"rank {rank}: optimizer of actor.update")
        self._shards: HostOffload | None = None
        if self._offload is not None and self._rollout_weights is not None and offloads_shards(job):
            self._shards = HostOffload(self._rollout_weights.unshared, owner=f"rank {rank}: weights of actor.update")
        self._rollout_is_current = False
        self.num_updates = self._rollout_version = 0
        self._pushed = PushedEngine(job) if engine.kind == "vllm" else None
        self.rollouts: Rollouts | None = None
        if rank in rollout and generates:
            self.rollouts = Rollouts(
                job, self._make_engine(), is_output_rank=self._rollout is None or self._rollout.is_output_rank
            )
            self.rollouts.metrics, self.rollouts.sample_stats = self.metrics, self.sample_stats

    @property
    def _placed(self) -> PlacedModel:
        """Return the model on a rank of the update mesh."""
        assert self.model is not None, "called outside the update mesh"
        return self.model

    def enter_phase(self, phase: str) -> None:
        """Make room for a phase and bring what it needs. Collective: all ranks of both layouts.

        Before a rollout its layout's weights are updated. Before an update the weights that the layouts do not share
        are freed, except on ranks that only generate. An update does not wait for these ranks.
        """
        if phase == "update":
            self._begin_update()
        else:
            self._begin_rollout()

    def _begin_update(self) -> None:
        """Free what only a rollout needs, and bring back what waited in host memory."""
        stays = self._reshard_every > 1
        if self.rollouts is not None and not stays:
            self.rollouts.engine.weights_changed()
        if self._rollout_weights is not None and not stays:
            if self.model is not None:
                self._rollout_weights.release()
            self._rollout_is_current = False
        if self._pushed is not None:
            self._pushed.sleep()
        give_back_unused(self._job.world.device)
        for away in (self._offload, self._shards):
            if away is not None:
                away.restore()

    def _begin_rollout(self) -> None:
        """Move away what only an update needs, and bring the rollout's weights up to date."""
        if self.model is not None:
            self.model.settle()
        if self._offload is not None:
            self._offload.offload()
        give_back_unused(self._job.world.device)
        if self._rollout_weights is not None and not self._rollout_is_current:
            self._reshard(self._rollout_weights)
        if self._shards is not None:
            self._shards.offload()
            give_back_unused(self._job.world.device)
        if self._pushed is not None and self._rollout is not None:
            self._pushed.wake(self._rollout, is_current=self._rollout_is_current)
            if self._rollout_weights is not None and not self._rollout_is_current:
                self._rollout_weights.release()
        if not self._rollout_is_current:
            self._rollout_version = self.num_updates
        self._rollout_is_current = True

    def _reshard(self, weights: RolloutWeights) -> None:
        """Update the rollout layout's weights, and measure that. Collective: all ranks of both layouts."""
        if self._shards is not None:
            self._shards.restore()
        for name, value in weights.refresh().items():
            # A validation within the step may reshard once more: what is moved adds up, what is kept does not.
            is_kept = name in ("reshard/extra_bytes", "reshard/adapter_bytes")
            before = 0.0 if is_kept else self.metrics.get(name, 0.0)
            self.metrics[name] = before + value

    @contextlib.contextmanager
    def optimizer_at_hand(self) -> Iterator[None]:
        """Hold the optimizer's state, and the weights, on their device inside the block, also during a rollout."""
        with contextlib.ExitStack() as stack:
            for away in (self._offload, self._shards):
                if away is not None:
                    stack.enter_context(away.at_hand())
            yield

    def sample(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Generate the responses of a step, or of one of its rollouts: ``group_size`` for each prompt, or a greedy one.

        Source of ``tokens``, ``prompt_lengths``, ``prompt_indices``, ``response_mask`` and ``rollout_log_probs``, and
        where batches are made ahead ``versions``: of the oldest weights that sampled a token, so many updates. Whole
        groups are dealt to the replicas in turn; who has short responses generates some of another's, which are then
        brought back. What an earlier start has sampled for the step is taken from its log. A replica that is to stop
        returns no samples, since the step is left, and logs what it has of them.

        Collective: the rollout mesh.

        Raises:
            WriteError: The log cannot be written.
        """
        assert self.rollouts is not None, "called outside the rollout mesh"
        found = asked(decided)
        if self._reshard_every > 1:
            behind = found["version"] - self._rollout_version
            found["version"] = self._rollout_version
            self.metrics |= measure_staleness(self._job, [behind])
        return self.rollouts.sample(**found)

    def sample_validation(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Sample one greedy and ``trainer.validation_samples`` random responses to each held-out problem.

        Their ``prompt_indices`` are places in the held-out file, their ids are those of
        ``sampling.validation.validation_id``. A source, as ``sample``. Collective: the rollout mesh.
        """
        assert self.rollouts is not None, "called outside the rollout mesh"
        limit = self._job.recipe.trainer.num_validation
        count = len(self._job.held_out) if limit is None else min(limit, len(self._job.held_out))
        return self.rollouts.sample_validation(count)

    def log_probs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Return ``old_log_probs``: log-probabilities under the weights at the start of the update."""
        model = self._placed
        column = model.per_token(batch, lambda output, part: model.log_probs(output, part)[0])
        return None if column is None else Batch(batch.ids, {"old_log_probs": column})

    def update(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Take one optimizer step on one mini-batch, or none if no token counts.

        Collective: all ranks of the update mesh.
        """
        turn = decided["actor_mini_batch"]
        is_first = turn["epoch"] == 0
        if is_first and turn["index"] == 0:
            self._compared = torch.zeros(len(SAMPLER_SUMS)).double()
        part, totals = self._counted(mini_batch(self._job, batch, turn), is_first=is_first)
        if totals is None:
            if is_first and LOSS_MASK in part.columns and self._placed.is_output_rank:
                # All is rejected, and it is the farthest of all: that is to be seen.
                self._report_distance(self._compare_skipped(part))
            self._skip()
            return
        results, grad_norm = self._step(
            self._placed.micro_batches(part),
            lambda output, micro_batch: self._loss(output, micro_batch, part, totals, is_first=is_first),
            is_followed=not is_last_mini_batch(self._job, turn),
        )
        if self._placed.is_output_rank:
            self._report([sums for sums, _, _ in results], grad_norm)
            if is_first:
                self._report_distance(results)

    def _skip(self) -> None:
        """Leave out a mini-batch that has no token to learn from."""
        self._placed.settle()
        self.metrics.add_count("actor/skipped", 1)

    def _counted(self, part: Batch, *, is_first: bool) -> tuple[Batch, Totals | None]:
        """Return a mini-batch without its rejected tokens, and the counts of its tokens. Collective: dp."""
        totals = self._placed.totals(part)
        if self._job.recipe.correction.reject is None or totals is None:
            return part, totals
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        kept_tokens = self._policy_loss.keep(*(part.ragged(name).pad(0) for name in names))
        lengths = part.ragged("response_mask").lengths
        part = part.with_columns({LOSS_MASK: Ragged.from_padded(kept_tokens, lengths)})
        kept = self._placed.totals(part, LOSS_MASK)
        if is_first:
            num_rejected = totals.num_tokens - (0 if kept is None else kept.num_tokens)
            self.metrics.add_share("correction/rejected_share", num_rejected, totals.num_tokens)
        return part, kept

    def distill(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Take one optimizer step towards the teacher on one mini-batch: token mean of the KL to it.

        Collective: all ranks of the update mesh.
        """
        turn = decided["actor_mini_batch"]
        if turn["index"] == 0:
            self.metrics |= length_metrics(batch, sum_over(self._placed.groups.dp))
            self.sample_stats |= length_stats(self._job, batch)
        part = mini_batch(self._job, batch, turn)
        totals = self._placed.totals(part)
        if totals is None:
            self._skip()
            return
        results, grad_norm = self._step(
            self._placed.micro_batches(part),
            lambda output, micro_batch: self._distance(output, micro_batch, part, totals),
            is_followed=not is_last_mini_batch(self._job, turn),
        )
        if self._placed.is_output_rank:
            (loss,) = self._placed.add_up(results, 1)
            self.metrics.add_share("distill/kl", loss * totals.num_tokens, totals.num_tokens)
            self.metrics.add_update("actor", grad_norm, {"actor/loss": loss})

    def _distance(self, output: Tensor, micro_batch: MicroBatch, part: Batch, totals: Totals) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's share of the KL to the teacher, and the same value for the report."""
        here = part.select(torch.tensor(micro_batch.samples))
        ids = here.ragged("teacher_ids").values if "teacher_ids" in part.columns else None
        kl = vocab_parallel_reverse_kl(
            output,
            micro_batch.local(here.ragged("teacher_log_probs").values),
            None if ids is None else micro_batch.local(ids),
            group=self._placed.groups.tp,
            vocab_size=self._placed.vocab_size,
            temperature=self._placed.temperature,
        )
        mask = to_device(here.ragged("response_mask").pad(0), output.device)
        loss = aggregate(micro_batch.pad(micro_batch.gathered(kl)), mask, "token-mean", totals)
        return loss, loss.detach()[None]

    def imitate(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Take one step of supervised training on solutions: token mean of the cross-entropy.

        Collective: the update mesh.
        """
        assert self.trainable is not None, "called outside the update mesh"
        warm = self._job.recipe.warm_start
        assert warm is not None, "a warm start was scheduled without its section"
        problems, step = self._job.train, decided["warm_step"]["step"]
        prompt_indices = range(step * warm.batch_size, (step + 1) * warm.batch_size)
        num_tokens = sum(
            row_stats(self._job, prompt_indices, lambda prompt_index: sum(problems.solution(prompt_index).is_written))
        )
        layout, place = self._placed.mesh.layout, self._placed.mesh.coordinate(self._job.world.rank)
        solutions = [problems.solution(prompt_index) for prompt_index in prompt_indices[place.dp :: layout.dp]]
        self.trainable.set_learning_rate(warm.lr)
        results, _ = self._imitate(
            [torch.tensor(each.prompt + each.tokens) for each in solutions],
            [len(each.prompt) for each in solutions],
            [torch.tensor(each.is_written) for each in solutions],
            num_tokens,
        )
        if self._placed.is_output_rank:
            (self.metrics["warm_start/loss"],) = self._placed.add_up(results, 1)

    def _imitate(
        self,
        sequences: list[Tensor],
        prompt_lengths: list[int],
        masks: list[Tensor],
        num_tokens: int,
        *,
        is_followed: bool = False,
    ) -> tuple[list[Tensor], float]:
        """Take one optimizer step on the cross-entropy of some tokens.

        Args:
            sequences: This rank's, prompt and response, ``[tokens]`` each.
            prompt_lengths: Of each.
            masks: Which response tokens count, ``[response]`` each.
            num_tokens: How many count in the global batch.
            is_followed: As for ``Trainable.step``.

        Returns:
            The loss's shares, ``[1]`` each, and the norm of the gradient.
        """

        def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            share = self._cross_entropy(output, micro_batch, masks) / num_tokens
            return share, share.detach()[None]

        return self._step(self._placed.pack(sequences, prompt_lengths), loss, is_followed=is_followed)

    def _cross_entropy(self, output: Tensor, micro_batch: MicroBatch, masks: list[Tensor]) -> Tensor:
        """Return the sum of the cross-entropy over the response tokens that count; ``masks`` as for ``_imitate``."""
        # What is imitated was not sampled at the rollout's temperature.
        log_probs, _ = self._placed.log_probs(output, micro_batch, temperature=1.0)
        counts = to_device(torch.cat([masks[sample] > 0 for sample in micro_batch.samples]), output.device)
        return -torch.where(counts, log_probs, 0).sum()

    def _step(
        self, micro_batches: list[MicroBatch], loss: LossFunction, *, is_followed: bool = False
    ) -> tuple[list[Any], float]:
        """Take one optimizer step, see ``Trainable.step``.

        Returns:
            The extra outputs of the loss, and the norm of the gradient.
        """
        assert self.trainable is not None, "called outside the update mesh"
        model, watch = self._placed, None
        if not isinstance(model.transformer, Uncut) and model.model.num_experts is not None:
            watch = RouterWatch(model.megatron_model, model.groups, self._job.recipe.actor.moe, micro_batches)
        results = self.trainable.accumulate(micro_batches, loss)
        grad_norm = self.trainable.step(is_followed=is_followed)
        if watch is not None:
            self._note_routers(*watch.finish())
        # Weights that may stay behind do so until the step says otherwise.
        self._rollout_is_current = self._rollout_is_current and self._reshard_every > 1
        return results, grad_norm

    def _note_routers(self, found: dict[str, float], loads: Loads) -> None:
        """Keep what the routers did in a mini-batch; the last one's loads stay."""
        model = self._placed
        if not model.is_output_rank:
            return
        # Weights are those of the rollout in the first mini-batch alone.
        if "rollout/router_agreement" in found:
            self.metrics.setdefault("rollout/router_agreement", found.pop("rollout/router_agreement"))
        self.metrics.average(found)
        if model.groups.dp.rank() == 0:
            self.sample_stats |= as_statistics(loads)

    def end_warm_start(self) -> None:
        """Forget the moments of the supervised phase.

        The adapters are merged into the weights, from which the reference starts.
        """
        if self._job.recipe.warm_start is not None and self._lora is not None:
            self._merge(variant=1)
        if self.trainable is not None:
            self.trainable.reset_optimizer()

    def end_step(self, step: int) -> None:
        """Put the adapters' updates into the weights, if that is due after so many training steps.

        Collective: all ranks of either mesh, in so far as each then knows that the weights have changed.
        """
        if self._lora is not None and self._lora.merge_every and step % self._lora.merge_every == 0:
            self._merge(variant=1 + step // self._lora.merge_every)
        self.num_updates = step
        if self._reshard_every > 1 and step % self._reshard_every == 0:
            self.mark_changed()

    def _merge(self, variant: int) -> None:
        """Merge the adapters into the weights, and restart them from other values without moments."""
        if self.model is not None and self.trainable is not None:
            with self.optimizer_at_hand():
                merge(self.model.transformer)
                self.model.initialize({tensor.name for tensor in factor_spec(self.spec).tensors}, variant)
                self.trainable.reset_optimizer()
                self.trainable.reload_weights()
        self.mark_changed()

    def begin_validation(self, step: int) -> None:
        """Have the next rollout sample with the weights after a step, also where rollouts may stay behind them.

        On all ranks of either mesh.
        """
        if self._reshard_every > 1:
            self.num_updates = step
            self.mark_changed()

    def mark_changed(self) -> None:
        """Note that the update layout's weights were written from outside, so the rollout's are out of date."""
        self._rollout_is_current = False
        if self._rollout_weights is not None:
            self._rollout_weights.base_changed()
        if self.rollouts is not None:
            self.rollouts.engine.weights_changed()

    def _make_engine(self) -> Any:
        """Make this rank's engine, as the recipe chooses."""
        job, engine = self._job, self._job.recipe.rollout.engine
        if self._pushed is not None:
            return self._pushed.engine
        if engine.is_server:
            return make_server_engine(engine, tokenizer=job.tokenizer, seed=job.recipe.seed, vocab_size=job.vocab_size)
        assert self._rollout is not None, "a rank of the rollout mesh has its weights"
        return make_own_engine(job, self._rollout)

    def _loss(
        self, output: Tensor, micro_batch: MicroBatch, part: Batch, totals: Totals, *, is_first: bool
    ) -> tuple[Tensor, Any]:
        """Return the micro-batch's share of the loss, and its shares of the reported sums."""
        log_probs, entropy = (micro_batch.pad(each) for each in self._placed.log_probs(output, micro_batch))
        columns = _loss_columns(part, torch.tensor(micro_batch.samples), output.device)
        loss, sums = self._policy_loss(log_probs, entropy, columns, totals)
        compared, largest = torch.zeros(len(SAMPLER_SUMS)), torch.zeros(())
        if is_first:
            compared, largest = self._policy_loss.compare(log_probs.detach(), columns)
        return loss, (sums, compared, largest)

    def _compare_skipped(self, part: Batch) -> list[Any]:
        """Return what ``_loss`` tells of the distance, for a mini-batch that has old log-probabilities and no pass."""
        if not len(part):
            return []
        columns = _loss_columns(part, torch.arange(len(part)), self._job.world.device)
        return [(None, *self._policy_loss.compare(columns["old_log_probs"], columns))]

    def _report(self, results: list[Tensor], grad_norm: float) -> None:
        found = dict(zip(LOSS_SUMS, self._placed.add_up(results, len(LOSS_SUMS)), strict=True))
        told = {
            "actor/policy_loss": found["policy_loss"],
            "actor/loss": found["loss"],
            "actor/clip_share": found["num_clipped"],
            "actor/clip_low_share": found["num_clipped_low"],
            "actor/entropy": found["entropy"],
            "actor/kl_to_old": found["kl_to_old"],
        }
        if self._job.recipe.loss.dual_clip is not None:
            told["actor/dual_clip_share"] = found["num_dual_clipped"]
        self.metrics.add_update("actor", grad_norm, told)

    def _report_distance(self, results: list[Any]) -> None:
        """Report how the policy differs from the sampler and the reference, over the mini-batches so far."""
        seen = torch.tensor(
            self._placed.add_up([sums for _, sums, _ in results], len(SAMPLER_SUMS)), dtype=torch.float64
        )
        self._compared = self._compared + seen
        found = dict(zip(SAMPLER_SUMS, self._compared.tolist(), strict=True))
        before = torch.tensor(self.metrics.get("rollout/logprob_abs_diff_max", 0.0))
        # Not max(), which may pass over a NaN.
        largest = float(torch.stack([before, *(most.float().cpu() for *_, most in results)]).max())
        tokens = max(found["tokens"], 1.0)
        self.metrics |= {
            "rollout/logprob_abs_diff": found["abs_diff"] / tokens,
            # Of this rank; of several ranks' the largest counts.
            "rollout/logprob_abs_diff_max": largest,
            "rollout/kl": found["sampler_kl"] / tokens,
        }
        if self._job.recipe.has_reference:
            self.metrics["kl/ref"] = found["reference_kl"] / max(found["sequences"], 1.0)
            self.metrics["kl/coef"] = self._kl_coef.value
        if self._job.recipe.correction_kind != "none":
            # The share of tokens that a bound changed; and of how many equal weights these are worth.
            squares = found["square_weight"] * tokens
            self.metrics["correction/bounded_share"] = found["bounded"] / tokens
            self.metrics["correction/effective_share"] = found["weight"] ** 2 / squares if squares else 0.0


def _loss_columns(part: Batch, samples: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the columns that the loss reads of some samples, ``[samples, tokens]`` each."""
    return {
        name: to_device(part.ragged(name).select(samples).pad(0), device)
        for name in _LOSS_COLUMNS
        if name in part.columns
    }


def give_back_unused(device: torch.device) -> None:
    """Give a GPU back what torch holds unused, unless ``hybridflow.config.auto_cache_clear`` is false."""
    if config.auto_cache_clear:
        give_back(device)
