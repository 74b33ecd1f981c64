"""The actor where it learns from given responses: solutions to imitate, pairs, or what is wanted and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.kl import rounding_at
from hybridflow.algorithms.preference import bradley_terry_loss, dpo_loss, ipo_loss, kto_loss
from hybridflow.dataflow.batch import Batch
from hybridflow.models.microbatch import MicroBatch
from hybridflow.parallel.copies import to_device
from hybridflow.placement.job import Job
from hybridflow.placement.loss_mask import is_last_mini_batch, mini_batch
from hybridflow.placement.user_objects import runs_in_transformers, user_class_of
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.offline_samples import mismatched
from hybridflow.roles.reward_model import last_tokens, padding_of


class OfflineActor(Actor):
    """An actor whose update reads given responses. What it makes of a response, for preferences, is one number.

    That number is its log-probability less that under the reference, of a scorer its score.
    """

    call_names = (*Actor.call_names, "validate_solutions", "validate_pairs")

    def __init__(self, job: Job, kl_coef: KLCoefficient) -> None:
        super().__init__(job, kl_coef)
        # As what it trains will be asked once it is a reward model.
        is_known = user_class_of(job, "actor") is None or runs_in_transformers(job, "actor")
        self._rewards = torch.zeros(4, dtype=torch.float64)
        self._pad_id = padding_of(job, "actor") if job.recipe.traits.is_scorer and is_known else None

    def update(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Take one optimizer step on one mini-batch. Collective: all ranks of the update mesh."""
        turn = decided["actor_mini_batch"]
        if turn["epoch"] == turn["index"] == 0:
            self._rewards = torch.zeros(4, dtype=torch.float64)
        part, is_followed = mini_batch(self._job, batch, turn), not is_last_mini_batch(self._job, turn)
        match self._job.recipe.algorithm:
            case "sft":
                self._update_solutions(part, is_followed=is_followed)
            case "kto":
                self._update_completions(part, is_followed=is_followed)
            case _:
                self._update_pairs(part, is_followed=is_followed)

    def validate_solutions(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Measure ``validation/loss`` on held-out solutions: token mean of the cross-entropy.

        Collective: the update mesh.
        """
        model = self._placed
        masks, totals = batch.ragged("response_mask").to_list(), model.totals(batch)
        assert totals is not None, "every solution has an end of sequence to imitate"
        sums = model.forward(
            model.micro_batches(batch),
            lambda output, micro_batch: self._cross_entropy(output, micro_batch, masks).detach()[None],
        )
        if model.is_output_rank:
            (total,) = model.add_up(sums, 1)
            self.metrics["validation/loss"] = total / totals.num_tokens

    def validate_pairs(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Measure ``validation/accuracy`` and ``validation/margin`` on held-out pairs.

        Accuracy is the share of pairs in which the wanted response has the larger number; a tie counts half. Margin is
        the mean difference, times ``preference.beta`` except for a scorer. Collective: the update mesh.
        """
        model = self._placed

        def compute(output: Tensor, micro_batch: MicroBatch) -> Tensor:
            chosen, rejected = self._numbers(output, micro_batch, batch).view(-1, 2).unbind(1)
            return _ahead(chosen, rejected, self._scale, micro_batch)

        shares = model.forward(self._micro_batches(batch), compute)
        if model.is_output_rank:
            accuracy, margin, count = model.add_up(shares, 3)
            self.metrics |= {"validation/accuracy": accuracy / count, "validation/margin": margin / count}

    def _update_solutions(self, part: Batch, *, is_followed: bool) -> None:
        """Update on solutions: token mean of the cross-entropy."""
        model = self._placed
        masks, totals = part.ragged("response_mask").to_list(), model.totals(part)
        assert totals is not None, "every solution has an end of sequence to imitate"
        sequences, prompt_lengths = part.ragged("tokens").to_list(), part.dense("prompt_lengths").tolist()
        kept, grad_norm = self._imitate(sequences, prompt_lengths, masks, totals.num_tokens, is_followed=is_followed)
        if model.is_output_rank:
            (loss,) = model.add_up(kept, 1)
            self.metrics.add_update("actor", grad_norm, {"actor/loss": loss})

    def _update_pairs(self, part: Batch, *, is_followed: bool) -> None:
        """Update on pairs: mean over the mini-batch's pairs."""
        settings, num_pairs = self._job.recipe.preference, self._job.recipe.trainer.samples_per_update // 2

        def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            chosen, rejected = self._numbers(output, micro_batch, part).view(-1, 2).unbind(1)
            match self._job.recipe.algorithm:
                case "reward-model":
                    margins = part.dense("margins")[micro_batch.samples[::2]]
                    each = bradley_terry_loss(chosen, rejected, to_device(margins, chosen.device))
                case "dpo":
                    each = dpo_loss(chosen, rejected, beta=settings.beta, label_smoothing=settings.label_smoothing)
                case _:
                    each = ipo_loss(chosen, rejected, beta=settings.beta)
            share = each.sum() / num_pairs
            ahead = _ahead(chosen.detach(), rejected.detach(), self._scale, micro_batch)
            return share, torch.cat([share.detach()[None].double(), ahead])

        kept, grad_norm = self._step(self._micro_batches(part), loss, is_followed=is_followed)
        if self._placed.is_output_rank:
            share, accuracy, margin, count = self._placed.add_up(kept, 4)
            told = {"actor/loss": share, "preference/accuracy": accuracy / count, "preference/margin": margin / count}
            self.metrics.add_update("actor", grad_norm, told)

    def _update_completions(self, part: Batch, *, is_followed: bool) -> None:
        """Update on completions: mean over the mini-batch, each against the KL of mismatched responses."""
        recipe, wanted = self._job.recipe, part.dense("wanted")
        settings, size = recipe.preference, recipe.trainer.samples_per_update
        z_ref = self._z_ref(part)

        def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            log_ratios = self._numbers(output, micro_batch, part)
            is_wanted = to_device(wanted[micro_batch.samples], log_ratios.device)
            each = kto_loss(
                log_ratios,
                is_wanted,
                to_device(z_ref, log_ratios.device),
                beta=settings.beta,
                desirable_weight=settings.desirable_weight,
                undesirable_weight=settings.undesirable_weight,
            )
            share = each.sum() / size
            rewards = settings.beta * log_ratios.detach().double()
            sums = [(rewards * is_wanted).sum(), is_wanted.sum(), (rewards * (1 - is_wanted)).sum()]
            return share, torch.stack([share.detach(), *sums]).double()

        kept, grad_norm = self._step(self._micro_batches(part), loss, is_followed=is_followed)
        if not self._placed.is_output_rank:
            return
        share, of_wanted, num_wanted, of_others = self._placed.add_up(kept, 4)
        self.metrics.add_update("actor", grad_norm, {"actor/loss": share, "preference/z_ref": float(z_ref)})
        # A mini-batch may have few of a kind, or none.
        self._rewards += torch.tensor([of_wanted, num_wanted, of_others, size - num_wanted], dtype=torch.float64)
        of_wanted, num_wanted, of_others, num_others = self._rewards.tolist()
        if num_wanted and num_others:
            self.metrics["preference/margin"] = of_wanted / num_wanted - of_others / num_others

    def _z_ref(self, part: Batch) -> Tensor:
        """Return the KL to the reference: the mean log-ratio of completions to other prompts, at least 0.

        The mean is over the global mini-batch.

        The result is a scalar. Ranks that hold no outputs get 0, which they do not use. Collective: the update mesh.
        """
        model = self._placed
        column = model.per_token(mismatched(part), lambda output, each: model.log_probs(output, each)[0])
        if column is None:
            return torch.zeros(())
        reference = part.ragged("ref_mismatched_log_probs")
        (total,) = model.add_up([(column.values.double() - reference.values).sum()[None].to(self._job.world.device)], 1)
        return torch.tensor(max(0.0, total / self._job.recipe.trainer.samples_per_update))

    def _numbers(self, output: Tensor, micro_batch: MicroBatch, part: Batch) -> Tensor:
        """Return one number per response, ``[samples of the micro-batch]``: its score, log-probability or log-ratio."""
        if self._job.recipe.traits.is_scorer:
            return self._placed.values(output, micro_batch)
        log_probs, _ = self._placed.log_probs(output, micro_batch)
        if "ref_log_probs" in part.columns:
            reference = part.ragged("ref_log_probs").select(torch.tensor(micro_batch.samples))
            log_probs = log_probs - to_device(reference.values, log_probs.device)
        return torch.stack([row.sum() for row in micro_batch.by_response(log_probs)])

    def _micro_batches(self, part: Batch) -> list[MicroBatch]:
        traits = self._job.recipe.traits
        is_single = "wanted" in part.columns
        parts = self._placed.micro_batches(part, 1 if is_single else 2)
        return [last_tokens(each, self._pad_id) for each in parts] if traits.is_scorer else parts

    @property
    def _scale(self) -> float:
        return 1.0 if self._job.recipe.traits.is_scorer else self._job.recipe.preference.beta


def _ahead(chosen: Tensor, rejected: Tensor, scale: float, micro_batch: MicroBatch) -> Tensor:
    """Return the number of wins (a tie is half), the scaled sum of differences, and the number of pairs, fp64.

    What rounding may have made of 0 is a tie: before the first update the log-ratios are exact zeros in one layout, or
    in one split into micro-batches, and almost zeros of any sign in another.

    Args:
        chosen: Number of each pair's better response, ``[pairs]``.
        rejected: The same of the other response.
        scale: Factor on the differences.
        micro_batch: The pairs.
    """
    difference = (chosen - rejected).double()
    num_tokens = torch.tensor(micro_batch.response_lengths).view(-1, 2).sum(1)
    # Errors of tokens are random: those of a sum grow with the root of their number.
    is_tie = difference.abs() <= rounding_at(1.0) * to_device(num_tokens, difference.device).sqrt()
    wins = (is_tie.logical_not() & (difference > 0)).double() + 0.5 * is_tie
    return torch.stack([wins.sum(), scale * difference.sum(), wins.new_full((), len(wins))])
