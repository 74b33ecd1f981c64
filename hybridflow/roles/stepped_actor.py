"""An actor that a program drives call by call: the loss of rows that it gives, and steps on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import Trainable, equally_many
from hybridflow.parallel.copies import to_device
from hybridflow.placement.job import Job
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Rows of tokens, and what is to follow each of them; equal on all ranks.

    Attributes:
        sequences: Token ids of each row, ``[tokens]`` int64 each, at least one, in host memory.
        labels: Wanted next token of each token but the last, ``[tokens - 1]`` int64 each; below 0 does not count.
    """

    sequences: list[Tensor]
    labels: list[Tensor]

    @property
    def num_labels(self) -> int:
        """Return the number of labels that count."""
        return sum(int((row >= 0).sum()) for row in self.labels)

    def counts(self, rows: list[int]) -> Tensor:
        """Return which labels of some rows count, one row after the other, ``[labels]`` bool."""
        return torch.cat([self.labels[row] >= 0 for row in rows])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of some rows.

    Attributes:
        loss: Mean of the cross-entropy over the labels that count, a scalar fp32; the same number on all ranks.
        log_probs: Log-probability of each label, ``[rows, longest - 1]`` fp32 in host memory, 0 where none counts; the
            same on all ranks.
        logits: Logits of each row, ``[tokens, vocab]``; None where no rank has the whole model and all rows.
    """

    loss: Tensor
    log_probs: Tensor
    logits: list[Tensor] | None


class SteppedActor(Actor):
    """An actor whose rows come from a program, the same on all ranks, and are dealt to the replicas in turn.

    Its mesh has all ranks of the job.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job, KLCoefficient(job.recipe))
        assert self.trainable is not None, "its mesh has all ranks"
        self._trainable = self.trainable
        self._has_gradients = False
        self._dp = self._placed.mesh.coordinate(job.world.rank).dp
        self._tells = self._placed.mesh.speaks(job.world.rank)
        self._everyone = job.world.group(self._placed.mesh.ranks)

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has all of the model and all rows."""
        return self._placed.mesh.layout.world_size == 1

    @property
    def can_differentiate(self) -> bool:
        """Return whether a loss can have a backward pass of its own.

        It cannot with pipeline stages, or for a class of the user's own.
        """
        return self._placed.mesh.layout.pp == 1 and isinstance(self._trainable, Trainable)

    def predict(self, labelled: LabelledRows, *, has_gradient: bool) -> Prediction:
        """Return loss and log-probabilities of rows. Collective: all ranks.

        Args:
            labelled: The rows; where no label counts the loss is 0.
            has_gradient: Loss and logits can be differentiated, see ``can_differentiate``; what comes of it is added to
                the gradients that ``step`` takes. Collective then: backward passes too.
        """
        longest, count = max(1, *(len(row) for row in labelled.labels)), max(1, labelled.num_labels)
        all_log_probs = torch.zeros(len(labelled.labels), longest, device=self._job.world.device)
        local_losses: list[Tensor] = []
        logits: list[Tensor] = [torch.empty(0)] * len(labelled.sequences)

        def take(output: Tensor, part: MicroBatch) -> None:
            if part.is_blank:
                # Its backward pass takes part in the exchanges of the other replicas'.
                local_losses.append(output.sum() * 0.0)
                return
            if self.is_whole:
                for row, places in zip(part.samples, part.places, strict=True):
                    logits[row] = output[to_device(places, output.device), : self._job.vocab_size]
                output = output[to_device(torch.cat([places[:-1] for places in part.places]), output.device)]
            log_probs = self._placed.log_probs(output, part, temperature=1.0)[0]
            log_probs = log_probs * to_device(labelled.counts(part.samples), output.device)
            local_losses.append(-log_probs.sum() / count)
            if self._tells:
                for row, values in zip(part.samples, part.by_response(log_probs.detach()), strict=True):
                    all_log_probs[row, : len(values)] = values

        self._pass(labelled, take, has_gradient=has_gradient)
        dist.all_reduce(all_log_probs, group=self._everyone)
        loss = (-all_log_probs.double().sum() / count).float()
        if has_gradient:
            local_loss = sum(local_losses, start=torch.zeros((), device=loss.device, requires_grad=True))
            loss = _GlobalLoss.apply(local_loss, loss)  # type: ignore[no-untyped-call]
        return Prediction(loss=loss, log_probs=all_log_probs.cpu(), logits=logits if self.is_whole else None)

    def learn(self, labelled: LabelledRows, lr: float | None) -> tuple[float, float]:
        """Take one optimizer step on the rows' loss, in micro-batches. Collective: all ranks.

        Args:
            labelled: The rows; at least one label counts.
            lr: Learning rate from now on; None: as it is.

        Returns:
            Loss, and norm of the gradient; the same on all ranks.
        """

        def loss(output: Tensor, part: MicroBatch) -> tuple[Tensor, Tensor]:
            log_probs, _ = self._placed.log_probs(output, part, temperature=1.0)
            share = -(log_probs * to_device(labelled.counts(part.samples), output.device)).sum() / labelled.num_labels
            return share, share.detach()

        self._set_rate(lr)
        results, grad_norm = self._step(self._parts(labelled), loss)
        self._end_step()
        total = torch.zeros(1, dtype=torch.float64, device=self._job.world.device)
        if self._tells:
            total += sum(results)
        dist.all_reduce(total, group=self._everyone)
        return float(total), grad_norm

    def step(self, lr: float | None) -> float:
        """Take one optimizer step on the gradients that backward passes have left. Collective: all ranks.

        Returns:
            The norm of the gradient.
        """
        assert isinstance(self._trainable, Trainable), "see can_differentiate"
        self._set_rate(lr)
        self._begin_gradients()
        self._trainable.finish()
        grad_norm = self._trainable.step()
        self._end_step()
        return grad_norm

    def _set_rate(self, lr: float | None) -> None:
        if lr is not None:
            self._trainable.set_learning_rate(lr)

    def _begin_gradients(self) -> None:
        """Drop the gradients of an earlier step."""
        if not self._has_gradients:
            assert isinstance(self._trainable, Trainable), "see can_differentiate"
            self._trainable.begin()
            self._has_gradients = True

    def _end_step(self) -> None:
        self._has_gradients = False
        self._rollout_is_current = False
        self.num_updates += 1

    def _pass(self, labelled: LabelledRows, take: Callable[[Tensor, MicroBatch], Any], *, has_gradient: bool) -> None:
        """Run forward passes over this replica's rows."""
        parts = self._parts(labelled)
        if self.is_whole:
            parts = [replace(part, rows=torch.arange(len(part.tokens), device=part.tokens.device)) for part in parts]
        if not has_gradient:
            self._placed.forward(parts, take)
            return
        self._begin_gradients()
        for part in equally_many(self._placed.megatron_model, self._placed.groups, parts):
            take(self._placed.transformer(part.tokens, part.attention, part.rows), part)

    def _parts(self, labelled: LabelledRows) -> list[MicroBatch]:
        """Return this replica's rows in micro-batches whose sample numbers are row numbers.

        The label of a token is the token after it.
        """
        local_rows = list(range(self._dp, len(labelled.sequences), self._placed.mesh.layout.dp))
        parts = []
        for part in self._placed.pack([labelled.sequences[row] for row in local_rows], [1] * len(local_rows)):
            rows = [local_rows[sample] for sample in part.samples]
            targets = to_device(torch.cat([labelled.labels[row].clamp(min=0) for row in rows]), part.tokens.device)
            parts.append(replace(part, samples=rows, targets=part.local(targets)))
        return parts


class _GlobalLoss(torch.autograd.Function):
    """A loss with the global value and the replica's gradient; gradients are summed before the step."""

    @staticmethod
    def forward(ctx: Any, local_loss: Tensor, global_loss: Tensor) -> Tensor:
        return global_loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
