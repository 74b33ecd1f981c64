"""A user's own classes are trained: the same on any number of ranks, as plain torch would, and to some effect."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridflow.api.trainers import GRPOTrainer, PPOTrainer
from hybridflow.config.roles import OptimizerConfig
from hybridflow.errors import ConfigError, EngineError, LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.user_model import Uncut
from hybridflow.models.user_training import UserTrainable
from hybridflow.parallel.world import World
from hybridflow.rollout.engines.user_engine import UserEngine
from hybridflow.rollout.request import Request, SamplingParams
from tests.multi.models import nine_requests, place
from tests.support.complaints import complains, complaint
from tests.support.hf_models import write_tokenizer
from tests.support.ranks import run_ranks
from tests.support.user_models import SamplingActor, TinyActor, TinyCritic, fill

VOCAB = 45
PROMPTS = ["1+1=", "2+2=", "3+4=", "10+5="]
SETTINGS = {
    "rollout_batch_size": 16,
    "group_size": 4,
    "max_new_tokens": 6,
    "lr": 3e-3,
    "kl_coef": 0.01,
    "micro_batch_tokens": 64,
    "deadline_s": 60.0,
}


def ones(prompt: str, response: str, answer: str) -> float:
    """The share of the response that is the digit 1."""
    return response.count("1") / 6


def run(trainer: Any, steps: int) -> list[dict[str, float]]:
    return [trainer.step(PROMPTS) for _ in range(steps)]


def grpo(world: World, folder: Path, kind: Any, steps: int) -> Any:
    config = {**SETTINGS, "run_dir": str(folder / f"run-{world.size}-{kind.__name__}")}
    actor = kind(vocab_size=VOCAB, seed=3 + world.rank)
    with GRPOTrainer(config, actor_model=actor, reward=ones, tokenizer=str(folder)) as trainer:
        metrics = run(trainer, steps)
    weights = {name: each.detach().numpy() for name, each in actor.named_parameters()}
    return metrics, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("own")
    write_tokenizer(path)
    return path


@pytest.mark.slow
def test_grpo_is_the_same_on_one_rank_and_on_two_and_improves(folder):
    # The second rank begins with other weights, which must not count.
    ((alone, weights),) = run_ranks(grpo, 1, folder, TinyActor, 12)
    two = run_ranks(grpo, 2, folder, TinyActor, 12)
    for metrics, found in two:
        for one, other in zip(alone[:4], metrics[:4], strict=True):
            for name in ("loss", "actor/grad_norm", "actor/entropy", "kl/ref", "reward/mean", "response/length_mean"):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
        assert all((found[name] == two[0][1][name]).all() for name in weights)
    assert alone[0]["kl/ref"] == pytest.approx(0, abs=1e-6) and alone[-1]["kl/ref"] > 1e-4
    assert alone[0]["rollout/logprob_abs_diff"] < 1e-5
    before, after = (sum(each["reward/mean"] for each in part) / 3 for part in (alone[:3], alone[-3:]))
    assert after > before + 0.05


def test_its_own_generate_samples_where_it_has_one(folder):
    ((metrics, _),) = run_ranks(grpo, 1, folder, SamplingActor, 3)
    assert all(each["rollout/logprob_abs_diff"] < 1e-5 and each["actor/grad_norm"] > 0 for each in metrics)
    assert len({each["actor/entropy"] for each in metrics}) == 3


def ppo(world: World, folder: Path) -> Any:
    config = {**SETTINGS, "group_size": 1, "rollout_batch_size": 4, "run_dir": str(folder / f"ppo-{world.size}")}
    actor, critic = TinyActor(vocab_size=VOCAB), TinyCritic(vocab_size=VOCAB)
    with PPOTrainer(config, actor_model=actor, critic_model=critic, reward=ones, tokenizer=str(folder)) as trainer:
        return run(trainer, 3)


@pytest.mark.slow
def test_a_critic_of_ones_own_learns_the_same_on_two_ranks(folder):
    (alone,) = run_ranks(ppo, 1, folder)
    for metrics in run_ranks(ppo, 2, folder):
        for one, other in zip(alone, metrics, strict=True):
            for name in ("loss", "critic/loss", "critic/grad_norm"):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    assert all(each["critic/loss"] > 0 for each in alone)


def begin_and_save(world: World, folder: Path) -> Any:
    config = {**SETTINGS, "run_dir": str(folder / "first")}
    with GRPOTrainer(config, actor_model=TinyActor(vocab_size=VOCAB), reward=ones, tokenizer=str(folder)) as trainer:
        run(trainer, 2)
        trainer.save_checkpoint(folder / "saved", save_optimizer=True)
        return run(trainer, 2)


def go_on(world: World, folder: Path) -> Any:
    config = {**SETTINGS, "run_dir": str(folder / "saved")}
    # Other weights, which the checkpoint replaces.
    actor = TinyActor(vocab_size=VOCAB, seed=9)
    with GRPOTrainer(config, actor_model=actor, reward=ones, tokenizer=str(folder), resume=True) as trainer:
        return run(trainer, 2)


@pytest.mark.slow
def test_a_checkpoint_is_gone_on_from_on_another_number_of_ranks(folder):
    (expected,) = run_ranks(begin_and_save, 1, folder)
    for found in run_ranks(go_on, 2, folder):
        for one, other in zip(expected, found, strict=True):
            for name in ("loss", "actor/grad_norm", "kl/ref", "reward/mean"):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def export(world: World, folder: Path) -> str:
    config = {**SETTINGS, "run_dir": str(folder / "exported")}
    with GRPOTrainer(config, actor_model=TinyActor(vocab_size=VOCAB), reward=ones, tokenizer=str(folder)) as trainer:
        run(trainer, 1)
        return complaint(lambda: trainer.save_checkpoint(folder / "out"))


def test_a_directory_of_transformers_cannot_be_made_of_it(folder):
    (message,) = run_ranks(export, 1, folder)
    assert "class of" in message and not (folder / "out").exists()


class Mixed(nn.Module):
    """A bf16 matrix, an fp32 one, a bias, one that is not trained and one number of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4).bfloat16()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        fill(self, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.second(self.first(inputs).bfloat16()).float() * self.scale + self.frozen).square().mean()


SHARDS = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(2))
"""Of four replicas or micro-batches."""


def steps_of(world: World, num_steps: int) -> Any:
    mesh, groups = place(world, ParallelLayout(dp=world.size))
    module = Mixed()
    settings = OptimizerConfig(lr=0.05, weight_decay=0.1, clip_grad=0.5)
    trainable = UserTrainable(Uncut(module), lambda part: module(part), groups.dp, settings)
    norms = []
    for _ in range(num_steps):
        mine = list(SHARDS[world.rank :: world.size])
        kept = trainable.accumulate(mine, lambda output, part: (output / len(SHARDS), output.detach()))
        assert len(kept) == len(mine)
        norms.append(trainable.step())
    assert trainable.num_steps() == num_steps
    return {name: each.detach().float().numpy() for name, each in module.named_parameters()}, norms


def plain_steps(num_steps: int) -> Any:
    """The same by torch alone, fp32 copies by hand."""
    module = Mixed()
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    mains = {name: each.detach().float().clone() for name, each in named.items()}
    groups = [
        {"params": [each for each in mains.values() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in mains.values() if each.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for _ in range(num_steps):
        for main in mains.values():
            main.grad = torch.zeros_like(main)
        for part in SHARDS:
            module.zero_grad()
            (module(part) / len(SHARDS)).backward()
            for name, each in named.items():
                mains[name].grad += each.grad
        norms.append(float(nn.utils.clip_grad_norm_(mains.values(), 0.5)))
        optimizer.step()
        with torch.no_grad():
            for name, each in named.items():
                each.copy_(mains[name])
    return {name: each.detach().float().numpy() for name, each in module.named_parameters()}, norms


def test_steps_are_those_of_plain_torch():
    expected, norms = plain_steps(4)
    assert norms[0] > 0.5, "it is clipped"
    for size in (1, 2):
        for found, told in run_ranks(steps_of, size, 4):
            assert told == pytest.approx(norms, rel=2e-3)
            for name, each in expected.items():
                # A bf16 weight has steps of one in 256.
                assert abs(found[name] - each).max() <= (1e-2 if "second" in name else 1e-4), name
    assert (expected["frozen"] == 1).all()


def generated(world: World, actor: Any, max_concurrent: int = 3) -> Any:
    _, groups = place(world, ParallelLayout())
    options = {"vocab_size": VOCAB, "max_context": 48, "seed": 5, "max_concurrent": max_concurrent, "pad_id": 2}
    engine = UserEngine(actor, groups.tp, **options)
    params = SamplingParams(max_new_tokens=7, temperature=0.7, stop_ids=(4, 5))
    requests = nine_requests(params)
    responses = engine.generate(requests)
    asked = [(each.prompt.tolist(), each.params.greedy) for each in requests]
    return [(each.tokens.tolist(), each.log_probs.tolist(), each.finish) for each in responses], asked


def test_a_token_that_the_model_does_not_have_is_refused():
    actor = TinyActor(vocab_size=VOCAB)
    options = {"vocab_size": VOCAB, "max_context": 48, "seed": 5, "max_concurrent": 3, "pad_id": 2}
    request = Request(prompt=torch.tensor([3, VOCAB]), params=SamplingParams(max_new_tokens=4), prompt_index=0)
    reason = UserEngine(actor, None, **options).refusal(request)
    assert f"it has token {VOCAB}; expected 0 to {VOCAB - 1}" in str(reason)


def test_sampling_by_forward_does_not_depend_on_the_batch_and_tells_the_trainers_log_probs():
    actor = TinyActor(vocab_size=VOCAB)
    ((found, asked),) = run_ranks(generated, 1, actor)
    ((again, _),) = run_ranks(generated, 1, actor, 9)
    assert [each[0] for each in found] == [each[0] for each in again]
    assert len({tuple(tokens) for tokens, _, _ in found}) > 5
    for (prompt, is_greedy), (tokens, log_probs, finish) in zip(asked, found, strict=True):
        with torch.no_grad():
            told = (actor(torch.tensor([[*prompt, *tokens]]))[0] / 0.7).log_softmax(-1)
        rows = told[len(prompt) - 1 : -1]
        expected = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(log_probs), expected, atol=1e-5)
        ends = [at for at, token in enumerate(tokens) if token in (4, 5)]
        assert ends == ([len(tokens) - 1] if finish == "stop" else []) and len(tokens) <= 7
        if is_greedy:
            assert tokens == rows.argmax(-1).tolist()


class Short(SamplingActor):
    def generate(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return input_ids


def lying(world: World) -> str:
    return complaint(lambda: generated(world, Short(vocab_size=VOCAB)), EngineError)


def test_a_generate_that_gives_what_cannot_be_right_is_told_of():
    (message,) = run_ranks(lying, 1)
    assert "Short gave 0 new tokens, expected 1 to max_new_tokens=7" in message


REFUSED: dict[str, tuple[type[Exception], Any, dict[str, Any]]] = {
    "actor.update.tp=2: a class of your own is not cut": (LayoutError, GRPOTrainer, {"actor": {"tp_size": 2}}),
    "actor.update.cp=2: a class of your own is not cut": (LayoutError, GRPOTrainer, {"actor": {"cp_size": 2}}),
    "actor.lora: cannot be had": (ConfigError, GRPOTrainer, {"lora_rank": 4}),
    "rollout.stop: cannot be had": (ConfigError, GRPOTrainer, {"rollout": {"stop": ["x"]}}),
    "actor.reshard_every: cannot be had": (ConfigError, GRPOTrainer, {"hybrid_engine": {"resharding_interval": 2}}),
    "rollout.partial_rollouts: cannot be had": (ConfigError, GRPOTrainer, {"rollout": {"partial_rollouts": True}}),
    "critic: would begin as a copy": (ConfigError, PPOTrainer, {"group_size": 1, "rollout_batch_size": 4}),
}


def refusals(world: World, folder: Path) -> None:
    given = {"actor_model": TinyActor(vocab_size=VOCAB), "reward": ones, "tokenizer": str(folder)}
    given["data_provider"] = PROMPTS
    for index, (words, (kind, trainer, other)) in enumerate(REFUSED.items()):
        config = {**copy.deepcopy(SETTINGS), "run_dir": str(folder / f"refused-{index}"), **other}
        complains(lambda make=trainer, config=config: make(config, **given).step(), [words], kind)


def test_what_it_cannot_do_is_refused_by_key(folder):
    run_ranks(refusals, 2, folder)
