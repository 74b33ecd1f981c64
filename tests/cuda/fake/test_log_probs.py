"""Log-probabilities of many tokens: how much memory they take beside the logits and their gradient."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.algorithms.losses import Totals
from hybridflow.dataflow.batch import Ragged
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.log_probs import _VocabParallelLogProbs
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.recipe.load import load_recipe
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.policy_loss import PolicyLoss
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place

TOKENS, VOCAB = 8192, 152064


class Context:
    """What autograd gives a function: the engine itself asks for a real device."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class Waits(TorchDispatchMode):
    """Counts copies to the device by whether the host goes on at once."""

    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].device != found.device == DEVICE:
            self.copies[kwargs.get("non_blocking", False)] += 1
        return found


def test_no_copy_of_the_logits_is_made(monkeypatch):
    with fake_cuda(monkeypatch) as world:
        group = place(world, ParallelLayout())[1].tp
        logits = torch.empty(TOKENS, VOCAB, dtype=torch.bfloat16, device=DEVICE)
        targets = torch.zeros(TOKENS, dtype=torch.int64, device=DEVICE)
        context = Context()
        with Launches() as launches:
            log_prob, entropy = _VocabParallelLogProbs.forward(context, logits, targets, group, VOCAB, 1.0)
            gradient, *_ = _VocabParallelLogProbs.backward(context, log_prob, entropy)
    assert log_prob.device == DEVICE and gradient.shape == logits.shape and gradient.dtype == logits.dtype
    assert launches.made_bytes - gradient.nbytes <= 0.05 * 4 * logits.numel()
    # Forward reads the logits once; backward reads them and writes the gradient.
    assert launches.num_bytes <= 1.01 * 3 * logits.nbytes


def test_scores_of_all_passes_are_copied_to_the_host_at_once(monkeypatch):
    # It sums lengths, and a fake tensor has none.
    monkeypatch.setattr(Ragged, "from_list", lambda rows, dtype: rows)
    with fake_cuda(monkeypatch) as world:
        parts = [
            SimpleNamespace(samples=[2, 0], response_lengths=[3, 1]),
            SimpleNamespace(samples=[1], response_lengths=[2]),
        ]
        placed = SimpleNamespace(
            micro_batches=lambda batch: parts,
            forward=lambda parts, compute: [compute(None, part) for part in parts],
            is_output_rank=True,
            _world=world,
        )
        with Launches() as launches:
            rows = PlacedModel.per_token(
                placed, [0, 1, 2], lambda _, part: torch.empty(sum(part.response_lengths), device=DEVICE)
            )
    assert [(len(row), row.device.type) for row in rows] == [(1, "cpu"), (2, "cpu"), (3, "cpu")]
    assert launches.names["_to_copy"] == 1


def test_a_loss_asks_nothing_of_the_host(monkeypatch):
    """Whoever asks for a fake tensor's content gets an error."""
    recipe = load_recipe("grpo", ["correction.kind=truncate", "kl.place=loss"])
    rows = SimpleNamespace(pad=lambda _: torch.zeros(2, 8))
    with fake_cuda(monkeypatch), Waits() as waits:
        part = SimpleNamespace(
            columns=("response_mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs"),
            ragged=lambda name: SimpleNamespace(select=lambda samples: rows),
        )
        micro_batch = SimpleNamespace(samples=[0, 1], pad=lambda values: values.view(2, 8))
        values = torch.zeros(16, device=DEVICE, requires_grad=True)
        actor = SimpleNamespace(
            _placed=SimpleNamespace(log_probs=lambda output, micro_batch: (values, values.detach())),
            _policy_loss=PolicyLoss(recipe, KLCoefficient(recipe)),
        )
        totals = Totals(num_tokens=16, num_sequences=2, max_response_tokens=8)
        loss, (sums, compared, largest) = Actor._loss(actor, values, micro_batch, part, totals, is_first=True)
    assert {each.device for each in (loss, sums, compared, largest)} == {DEVICE}
    assert waits.copies == {True: 5}
