"""``HybridActor``: it says, generates and learns what ``transformers`` does with the same weights, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.api.world import find_world
from hybridflow.errors import CheckpointError, ConfigError, DataError
from tests.support.complaints import complains, complaint
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.ranks import run_ranks
from tests.support.user_models import TinyActor

IDS = torch.tensor([[7, 12, 33, 9, 21, 5], [8, 31, 4, 2, 2, 2], [11, 6, 19, 27, 40, 2]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
LABELS = torch.where(MASK.bool(), IDS, -100)
LABELS[0, 1:3] = -100
LABELS[2, 4] = 30  # not the token that stands there
LR = 1e-2
LAYOUTS = {
    "one rank": {},
    "the same layout": {"dp_size": 2},
    "tensors to replicas": {"tp_size": 2, "rollout_tp_size": 1, "rollout_dp_size": 2},
    "stages to tensors": {"pp_size": 2, "rollout_tp_size": 2},
    "replicas to stages": {"dp_size": 2, "rollout_pp_size": 2, "offload_to_cpu": True},
    "shared sequences": {"cp_size": 2},
    "computed anew": {"pp_size": 2, "rollout_dp_size": 2, "recompute": "full"},
    "whole activations": {"tp_size": 2, "sequence_parallel": False, "recompute": "selective"},
}
ONE = ("one rank",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    write_model(made / "model", seed=3)
    write_tokenizer(made / "model")
    return made


def run(program: Any, size: int, *args: Any):
    return run_ranks(lambda world: program(*args), size)


def make(folder: Path, layout: dict[str, Any], **more: Any) -> HybridActor:
    return HybridActor.from_pretrained(folder / "model", hybrid_config={"lr": LR, **layout, **more})


def theirs(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    shifts = (MASK.shape[1] - MASK.sum(1)).tolist()
    return tuple(
        torch.stack([row.roll(shift) for row, shift in zip(table, shifts, strict=True)]) for table in (IDS, MASK)
    )


def everything(folder: Path, layout: dict[str, Any], out: str):
    """What an actor says before and after a step, and what transformers says of the weights that it saves."""
    actor = make(folder, layout)
    found: dict[str, Any] = {"training": actor.training}
    said = actor(input_ids=IDS, labels=LABELS, attention_mask=MASK)
    found["loss"], found["log_probs"] = float(said.loss), said.log_probs.numpy()
    ids, mask = left_padded()
    found["left"] = actor.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False).numpy()
    found["right"] = actor.generate(IDS, MASK, max_new_tokens=8)[:, IDS.shape[1] :].numpy()
    found["generating"] = not actor.training
    sampled = [actor.generate(ids, mask, max_new_tokens=5, do_sample=True, temperature=0.7, **more) for more in SAMPLED]
    found["sampled"] = [each.numpy() for each in sampled]
    step = actor.train().training_step(input_ids=IDS, labels=LABELS, attention_mask=MASK)
    found["step"] = step.loss, step.grad_norm
    found["loss_after"] = float(actor(IDS, LABELS, MASK).loss)
    found["after"] = actor.generate(ids, mask, max_length=ids.shape[1] + 8).numpy()
    cost = actor.switch_cost()
    found["cost"] = cost.ms, cost.back_ms, cost.mb, cost.limit_mb
    actor.save_pretrained(folder / out)
    found["refused"] = complaint(lambda: actor.save_pretrained(folder / out), CheckpointError)
    return found


SAMPLED: tuple[dict[str, Any], ...] = ({}, {}, {"seed": 5}, {"seed": 5}, {"num_return_sequences": 2})


@pytest.mark.parametrize("name", LAYOUTS)
def test_says_what_transformers_says(folder: Path, name: str) -> None:
    out = f"saved {name}"
    ranks = run(everything, 1 if name in ONE else 2, folder, LAYOUTS[name], out)
    before, after = theirs(folder / "model"), theirs(folder / out)
    ids, mask = left_padded()
    with torch.no_grad():
        expected = before(input_ids=IDS, attention_mask=MASK, labels=LABELS)
        loss_after = after(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss
        greedy, greedy_after = (
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False).numpy()
            for model in (before, after)
        )
    log_probs = expected.logits[:, :-1].log_softmax(-1)
    counted = LABELS[:, 1:] != -100
    told = torch.where(counted, log_probs.gather(2, LABELS[:, 1:].clamp(min=0)[:, :, None])[:, :, 0], 0.0)
    for found in ranks:
        assert found["training"] and found["generating"]
        assert found["loss"] == pytest.approx(float(expected.loss), abs=1e-5)
        assert (found["log_probs"][:, 1:] == pytest.approx(told.numpy(), abs=1e-5)) and not found["log_probs"][
            :, 0
        ].any()
        assert found["left"].tolist() == greedy.tolist()
        width = min(found["right"].shape[1], greedy.shape[1] - ids.shape[1])
        assert found["right"][:, :width].tolist() == greedy[:, ids.shape[1] :][:, :width].tolist()
        first, second, seeded, again, double = found["sampled"]
        assert first.tolist() != second.tolist() and seeded.tolist() == again.tolist()
        assert len(double) == 6 and double[:, : ids.shape[1]].tolist() == ids.repeat_interleave(2, 0).tolist()
        assert found["step"][0] == pytest.approx(found["loss"], abs=1e-6)
        assert found["loss_after"] < found["loss"] - 1e-3
        assert found["loss_after"] == pytest.approx(float(loss_after), abs=1e-5)
        assert found["after"].tolist() == greedy_after.tolist() != found["left"].tolist()
        assert "is there already" in found["refused"]
        ms, back_ms, mb, limit_mb = found["cost"]
        assert ms > 0 and back_ms > 0
        assert (mb > 0) == (name in ("tensors to replicas", "stages to tensors", "computed anew")) and mb >= limit_mb
        assert {key: str(value) for key, value in found.items()} == {key: str(value) for key, value in ranks[0].items()}


MIXTURE = {
    "experts dealt": {"dp_size": 2, "ep_size": 2},
    "whole experts beside tensors": {"tp_size": 2, "ep_size": 2, "etp_size": 1, "rollout_dp_size": 2},
    "stages of two chunks": {"pp_size": 2, "vpp_size": 2, "rollout_tp_size": 2},
}


def mixture_says(folder: Path, layout: dict[str, Any]):
    actor = HybridActor.from_pretrained(folder / "mixture", hybrid_config={"lr": LR, **layout})
    said, tokens = actor(IDS, LABELS, MASK), actor.generate(*left_padded(), max_new_tokens=8)
    actor.train()
    norms = [actor.training_step(IDS, LABELS, MASK, lr=0.0).grad_norm]
    if "pp_size" not in layout:
        # One row: a second replica has none, and takes part.
        actor(IDS[:1], LABELS[:1], MASK[:1]).loss.backward()
        norms.append(actor.step())
    return float(said.loss), tokens.tolist(), norms


@pytest.mark.parametrize("name", MIXTURE)
def test_a_mixture_says_what_transformers_says(folder: Path, name: str) -> None:
    if not (folder / "mixture").exists():
        write_model(folder / "mixture", "Mixtral", seed=4, num_hidden_layers=4, num_local_experts=4)
    model, (ids, mask) = theirs(folder / "mixture"), left_padded()
    losses, norms = [], []
    for rows in (3, 1):
        model.zero_grad()
        losses.append(model(input_ids=IDS[:rows], attention_mask=MASK[:rows], labels=LABELS[:rows]).loss)
        losses[-1].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
    with torch.no_grad():
        greedy = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for found in run(mixture_says, 2, folder, MIXTURE[name]):
        assert found[0] == pytest.approx(losses[0].item(), abs=1e-5) and found[1] == greedy.tolist()
        assert found[2] == pytest.approx(norms[: len(found[2])], rel=1e-4)


def gradients(folder: Path, layout: dict[str, Any]):
    """Two backward passes and a step: what transformers does in one pass of a loss that is their mean."""
    actor = make(folder, layout)
    parts = [actor(IDS[:2], LABELS[:2], MASK[:2]).loss, actor(IDS[2:], LABELS[2:], MASK[2:]).loss]
    for part in parts:
        (part / 2).backward()
    norm = actor.step()
    after = float(actor(IDS, LABELS, MASK).loss)
    # What a step has used up is not there at the next one.
    (actor(IDS[2:], LABELS[2:], MASK[2:]).loss).backward()
    again = actor.step(lr=0.0)
    return norm, after, again


@pytest.mark.parametrize("name", ["one rank", "the same layout", "tensors to replicas"])
def test_backward(folder: Path, name: str) -> None:
    ranks = run(gradients, 1 if name in ONE else 2, folder, LAYOUTS[name])
    model = theirs(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def loss(part: slice) -> torch.Tensor:
        return model(input_ids=IDS[part], attention_mask=MASK[part], labels=LABELS[part]).loss

    ((loss(slice(0, 2)) + loss(slice(2, 3))) / 2).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    with torch.no_grad():
        after = float(loss(slice(0, 3)))
    optimizer.zero_grad()
    loss(slice(2, 3)).backward()
    again = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for found in ranks:
        assert found == pytest.approx((norm, after, again), rel=1e-3)


def refusals(folder: Path, layout: dict[str, Any]):
    actor = make(folder, layout)

    def refused(words: str, call: Any) -> None:
        complains(call, [words], (ConfigError, DataError))

    refused("log_probs", lambda: actor(IDS, LABELS, MASK).logits)
    refused("actor.training_step(", lambda: actor(IDS, LABELS, MASK).loss.backward())
    refused("actor.training_step(", lambda: actor.step())
    refused("labels: missing", lambda: actor(IDS).logits)
    actor.eval()
    refused("actor.training_step(", lambda: actor(IDS, LABELS, MASK).loss.backward())
    for words, given in {
        "exceed max_context=64": {"max_new_tokens": 60},
        "how long?": {},
        "num_beams": {"max_new_tokens": 4, "num_beams": 4},
        "did you mean do_sample?": {"max_new_tokens": 4, "do_sampel": True},
        "do_sample=False": {"max_new_tokens": 4, "do_sample": True, "temperature": 0},
        "set do_sample=True": {"max_new_tokens": 4, "num_return_sequences": 2},
        "max_length=6": {"max_length": 6},
        "top_p": {"max_new_tokens": 4, "stop_strings": ["="], "top_p": 2.0, "do_sample": True},
    }.items():
        refused(words, lambda given=given: actor.generate(IDS, MASK, **given))
    refused("labels of shape [2, 6]", lambda: actor(IDS, LABELS[:2]))
    refused("there is no loss", lambda: actor(IDS, torch.full_like(IDS, -100)))
    refused("the model knows 0 to 44", lambda: actor(IDS + 40, IDS))
    refused("labels[", lambda: actor(IDS, IDS + 40))
    refused("between tokens", lambda: actor(IDS, IDS, torch.tensor([[1, 0, 1, 1, 1, 1]] * 3)))
    refused("no token that attention_mask keeps", lambda: actor(IDS, IDS, torch.zeros_like(IDS)))
    refused("torch.float32", lambda: actor(IDS.float(), IDS))
    refused("give ids", lambda: actor("1+1=", IDS))
    rank = find_world().rank
    refused("input_ids: number 0 is another on some ranks", lambda: actor(IDS + rank, IDS))
    refused("input_ids: number 2 is another", lambda: actor.generate(IDS[: 3 - rank], max_new_tokens=2))
    refused(
        "actor.optimizer.lr: 0.001 on rank 0, 0.002 on rank 1",
        lambda: make(folder, {**layout, "lr": 1e-3 * (1 + rank)}),
    )
    # Nothing that was refused has done harm.
    assert actor.generate(IDS[:1], max_new_tokens=2).shape[0] == 1


def test_refusals(folder: Path) -> None:
    run(refusals, 2, folder, {"pp_size": 2})


def one_rank(folder: Path):
    """What only a rank with the whole model has: logits, also to be differentiated, and a model from memory."""
    path = folder / "model"
    actor = HybridActor(theirs(path), {"lr": LR})
    said = actor(IDS, attention_mask=MASK)
    whole = said.loss, said.log_probs, said.logits.detach().numpy()
    actor.eval()
    refused = complaint(lambda: actor(IDS, LABELS, MASK).loss.backward(), ConfigError)
    actor.train()
    (-actor(IDS, attention_mask=MASK).logits.log_softmax(-1)[:, :, 7]).mean().backward()
    return whole, refused, actor.step()


def test_one_rank(folder: Path) -> None:
    (((loss, log_probs, logits), refused, norm),) = run(one_rank, 1, folder)
    assert loss is None and log_probs is None
    model = theirs(folder / "model")
    expected = model(input_ids=IDS, attention_mask=MASK).logits
    kept = MASK.bool().numpy()
    assert logits[kept] == pytest.approx(expected.detach().numpy()[kept], abs=1e-4) and not logits[~kept].any()
    assert "actor.train()" in refused
    masked = torch.where(MASK.bool()[:, :, None], expected, torch.zeros(()))
    (-masked.log_softmax(-1)[:, :, 7]).mean().backward()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-3)


def adapters(folder: Path):
    actor = make(folder, {"tp_size": 2, "rollout_dp_size": 2, "rollout_tp_size": 1, "lora_rank": 2})
    actor.training_step(IDS, LABELS, MASK)
    actor.training_step(IDS, LABELS, MASK)
    ids, mask = left_padded()
    tokens = actor.generate(ids, mask, max_new_tokens=6).tolist()
    actor.save_pretrained(folder / "merged")
    return tokens, float(actor(IDS, LABELS, MASK).loss)


def test_adapters(folder: Path) -> None:
    ranks = run(adapters, 2, folder)
    model = theirs(folder / "merged")
    ids, mask = left_padded()
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False).tolist()
        loss = float(model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss)
    for found in ranks:
        assert found == (tokens, pytest.approx(loss, abs=1e-5))


def own_class(folder: Path):
    """A class of the user's own says, generates and learns as well; only its backward passes are ours."""
    module = TinyActor(vocab_size=45, seed=3)
    actor = HybridActor(module, {"lr": LR})
    said = actor(IDS, LABELS, MASK)
    before = float(said.loss)
    logits = [module(row[None, : int(mask.sum())])[0] for row, mask in zip(IDS, MASK, strict=True)]
    losses = [cross_entropy(each[:-1], row[1 : len(each)]) for each, row in zip(logits, LABELS, strict=True)]
    counted = [int((row[1 : len(each)] != -100).sum()) for each, row in zip(logits, LABELS, strict=True)]
    expected = sum(loss * count for loss, count in zip(losses, counted, strict=True)) / sum(counted)
    step = actor.training_step(IDS, LABELS, MASK)
    tokens = actor.generate(IDS[:1], max_new_tokens=3, eos_token_id=[])
    calls = (lambda: actor(IDS, LABELS, MASK).loss.backward(), lambda: actor.save_pretrained(folder / "own"))
    found = [complaint(call) for call in calls]
    return before, float(expected), step.loss, float(actor(IDS, LABELS, MASK).loss), tokens.tolist(), found


@pytest.mark.parametrize("size", [1, 2])
def test_own_class(folder: Path, size: int) -> None:
    ranks = run(own_class, size, folder)
    for before, expected, stepped, after, tokens, (first, second) in ranks:
        assert before == pytest.approx(expected, abs=1e-5) and stepped == pytest.approx(before, abs=1e-6)
        assert after < before and len(tokens[0]) == 9 and tokens == ranks[0][4]
        assert "actor.training_step(" in first and "state_dict()" in second
    assert not list(folder.glob("own*"))


def test_configs_refused(folder: Path) -> None:
    configs = {
        "tp_size": {"tp_sise": 2},
        "rollout_tp_size": {"rollout_tp_sise": 2},
        "tp": {"tp_size": 2},
        "generate(": {"temperature": 0.5},
    }
    run(lambda: [complains(lambda given=given: make(folder, given), [words]) for words, given in configs.items()], 1)
