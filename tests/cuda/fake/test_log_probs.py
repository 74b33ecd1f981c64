"""Log-probabilities of many tokens: how much memory they take beside the logits and their gradient."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.algorithms.losses import Totals
from hybridflow.dataflow.batch import Ragged
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.distillation import top_log_probs
from hybridflow.models.log_probs import _VocabParallelLogProbs
from hybridflow.models.shapes import CHUNK_TOKENS
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.recipe.load import load_recipe
from hybridflow.roles import offline_actor
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.offline_actor import OfflineActor
from hybridflow.roles.policy_loss import LOSS_MASK, PolicyLoss
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


@pytest.mark.parametrize(("top_k", "copies"), [(4, 0), (0, 3)])
def test_what_a_teacher_says_of_a_few_tokens_stays_on_the_gpu(monkeypatch, top_k, copies):
    with fake_cuda(monkeypatch) as world, Launches() as launches:
        group = place(world, ParallelLayout())[1].tp
        logits = torch.empty(3 * CHUNK_TOKENS, 512, device=DEVICE)
        found = top_log_probs(logits, top_k, group=group, vocab_size=500)
    # All of a vocabulary are as much as the logits.
    assert {each.device.type for each in found} == {"cuda" if top_k else "cpu"}
    assert launches.names["_to_copy"] == copies


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


COLUMNS = ("response_mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        ([], COLUMNS),
        (["kl.coef=0"], COLUMNS[:-1]),
        (["correction.kind=truncate", "kl.place=loss"], COLUMNS),
        (["loss.kind=gspo", "loss.aggregation=seq-mean-token-mean", "loss.entropy_coef=0.1"], COLUMNS),
        (["loss.kind=cispo", "correction.kind=icepop", "correction.level=sequence"], (*COLUMNS, LOSS_MASK)),
    ],
    ids=["grpo", "no reference", "corrected", "gspo", "cispo"],
)
def test_a_loss_asks_nothing_of_the_host(monkeypatch, overrides, columns):
    """Whoever asks for a fake tensor's content gets an error."""
    recipe = load_recipe("grpo", overrides)
    assert recipe.has_reference == ("ref_log_probs" in columns)
    rows = SimpleNamespace(pad=lambda _: torch.zeros(2, 8))
    with fake_cuda(monkeypatch), Waits() as waits:
        part = SimpleNamespace(columns=columns, ragged=lambda name: SimpleNamespace(select=lambda samples: rows))
        micro_batch = SimpleNamespace(samples=[0, 1], pad=lambda values: values.view(2, 8))
        values = torch.zeros(16, device=DEVICE, requires_grad=True)
        actor = SimpleNamespace(
            _placed=SimpleNamespace(log_probs=lambda output, micro_batch: (values, values.detach())),
            _policy_loss=PolicyLoss(recipe, KLCoefficient(recipe)),
        )
        totals = Totals(num_tokens=16, num_sequences=2, max_response_tokens=8)
        loss, (sums, compared, largest) = Actor._loss(actor, values, micro_batch, part, totals, is_first=True)
    assert {each.device for each in (loss, sums, compared, largest)} == {DEVICE}
    assert waits.copies == {True: len(columns)}


@pytest.mark.parametrize("algorithm", ["reward-model", "dpo", "ipo", "kto", "sft"])
def test_a_loss_of_given_responses_asks_nothing_of_the_host(monkeypatch, algorithm):
    found = []
    monkeypatch.setattr(offline_actor, "mini_batch", lambda job, batch, index: batch)
    monkeypatch.setattr(offline_actor, "is_last_mini_batch", lambda job, turn: True)
    with fake_cuda(monkeypatch), Waits() as waits:
        values = torch.zeros(16, device=DEVICE, requires_grad=True)
        micro_batch = SimpleNamespace(
            samples=[0, 1, 2, 3], response_lengths=[4] * 4, by_response=lambda values: values.view(4, 4).unbind()
        )
        columns = {} if algorithm in ("reward-model", "sft") else {"ref_log_probs": None}
        whole = SimpleNamespace(values=torch.zeros(16), to_list=lambda: [torch.ones(4)] * 4)
        part = SimpleNamespace(
            columns=columns,
            ragged=lambda name: SimpleNamespace(select=lambda samples: whole, **vars(whole)),
            dense=lambda name: SimpleNamespace(tolist=lambda: [2] * 4) if name == "prompt_lengths" else torch.ones(4),
        )
        model = SimpleNamespace(
            is_output_rank=False,
            log_probs=lambda output, micro_batch, temperature=None: (values, values),
            values=lambda output, micro_batch: values[:4],
            totals=lambda part: Totals(num_tokens=16, num_sequences=4, max_response_tokens=4),
            pack=lambda sequences, prompt_lengths: [micro_batch],
        )
        actor = OfflineActor.__new__(OfflineActor)
        actor._job = SimpleNamespace(recipe=load_recipe(algorithm, []))
        actor.model = model
        actor._micro_batches = lambda part: [micro_batch]
        actor._z_ref = lambda part: torch.zeros(())
        actor._step = lambda micro_batches, loss, is_followed: (
            [found.append(loss(values, each)) for each in micro_batches],
            0.0,
        )
        actor.update(part, {"actor_mini_batch": {"epoch": 0, "index": 0}})
    ((loss, told),) = found
    assert loss.device == told.device == DEVICE
    assert False not in waits.copies, waits.copies
