"""Generating within a budget of memory, prompts computed once, and replicas that take work from one another."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybridflow.data.prompts import Example
from hybridflow.errors import DataError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.rollout.budget import cache_bytes, free_bytes
from hybridflow.rollout.dealing import Deal
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.paged import block_bytes
from hybridflow.rollout.request import Request, SamplingParams
from tests.multi.jobs import make_job, tiny_recipe
from tests.multi.models import LINEAR, VOCAB, make_model
from tests.support.ranks import run_ranks

LONG = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    max_context=600,
    vocab_divisible_by=4,
)
SEED = 11
NUM_FITTING = 3


def make_requests(num_prompts: int, num_samples: int, num_prompt: int, params: SamplingParams) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (num_prompt,), generator=generator) for _ in range(num_prompts)]
    return [
        Request(prompt=prompts[prompt_index], params=params, prompt_index=prompt_index, index=index)
        for prompt_index in range(num_prompts)
        for index in range(num_samples)
    ]


def texts(requests, responses):
    return {
        (ask.prompt_index, ask.index): (got.tokens.tolist(), got.log_probs.tolist(), got.finish)
        for ask, got in zip(requests, responses, strict=True)
    }


def assert_equal(found, expected):
    """These seeds meet no near-tie."""
    assert found.keys() == expected.keys()
    for key, (tokens, log_probs, finish) in found.items():
        assert (tokens, finish) == (expected[key][0], expected[key][2]), key
        assert log_probs == pytest.approx(expected[key][1], abs=1e-5), key


def within_budget(world, layouts: list[ParallelLayout]):
    """For each layout, of too many requests for the budget: their texts, unlimited too; the cache; who lost room."""
    # 10 + 24 tokens take three blocks of 16.
    requests = make_requests(5, 6, 10, SamplingParams(max_new_tokens=24, stop_ids=(2,)))
    found = []
    for layout in layouts:
        model, _, groups, _ = make_model(world, layout)
        budget = NUM_FITTING * 3 * block_bytes(model)

        def engine(cache_memory, model=model, groups=groups):
            return MegatronEngine(
                model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=64, cache_memory=cache_memory
            )

        small, large = engine(budget + 7.0), engine(0.5)
        cache = small.open(requests)._cache
        taken = sum(each.nbytes for each in (*cache.keys, *cache.values))
        with pytest.raises(DataError) as caught:
            engine(2.9 * block_bytes(model)).generate(requests)
        found.append(
            {
                "small": texts(requests, small.generate(requests)),
                "large": texts(requests, large.generate(requests)),
                "preempted": small.metrics["preempted"],
                "bytes": (taken, budget),
                "error": (str(caught.value), 3 * block_bytes(model), 2 * block_bytes(model)),
            }
        )
    return found


@pytest.mark.slow
def test_ten_times_more_than_fits_is_generated_within_the_budget():
    layouts = [ParallelLayout.parse(text) for text in ("tp2.pp1.dp1", "tp1.pp2.dp1")]
    (alone,) = run_ranks(within_budget, 1, [ParallelLayout()])[0]
    lasts = run_ranks(within_budget, 2, layouts)[-1]
    for found in (alone, *lasts):
        assert len(found["small"]) == 10 * NUM_FITTING
        assert {len(tokens) for tokens, _, _ in found["small"].values()} > {24}
        assert_equal(found["small"], found["large"])
        assert_equal(found["small"], alone["large"])
        assert found["bytes"][0] == found["bytes"][1]
        text, needed, given = found["error"]
        assert all(part in text for part in (" cache_memory=", f"take {needed} bytes", f"gives {given};"))
    assert alone["preempted"] > 0


def states_within_budget(world, layout: ParallelLayout):
    """Of a model with linear attention: texts, unlimited too; slots, blocks and bytes; who lost room; an error."""
    requests = make_requests(3, 4, 10, SamplingParams(max_new_tokens=24, stop_ids=(2,)))
    model, _, groups, _ = make_model(world, layout, model=LINEAR)
    # Half of it holds five states, each 3 * 36 + 80 numbers in three layers: of four sequences, and one that is kept.
    budget = 2 * 5 * 3 * 188 * 4 + 7
    tiny, small, large = (
        MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=64, cache_memory=cache_memory)
        for cache_memory in (14_000, budget, 0.5)
    )
    session = small.open(requests)
    slots, _, blocks = small.room(None)
    with pytest.raises(DataError) as caught:
        tiny.generate(requests)
    return {
        "small": texts(requests, small.generate(requests)),
        "large": texts(requests, large.generate(requests)),
        "room": (slots, blocks),
        "bytes": (session._cache.num_bytes, budget),
        "preempted": small.metrics["preempted"],
        "error": str(caught.value),
    }


def test_states_and_blocks_fit_into_the_budget_together():
    (alone,) = run_ranks(states_within_budget, 1, ParallelLayout())
    # The other half holds three blocks of 2 * 2 * 12 * 16 numbers.
    assert alone["room"] == (4, 3)
    assert alone["bytes"][0] == 4 * (5 * 3 * 188 + 3 * 768) <= alone["bytes"][1]
    assert alone["preempted"] > 0
    assert_equal(alone["small"], alone["large"])
    # 14,000 bytes hold three states, one of them kept, and blocks of 3,072 beside them.
    assert "take 9216 bytes of the key-value cache" in alone["error"]
    assert "gives 6144 beside the states of linear attention;" in alone["error"]
    # The first of two stages has no keys, but two layers of states: it holds three for each of two lanes, one of
    # them kept.
    first, last = run_ranks(states_within_budget, 2, ParallelLayout(pp=2))
    assert first["room"] == last["room"] == (4, 3)
    assert first["bytes"][0] == 4 * 6 * 2 * 188 and last["bytes"][0] == 4 * (6 * 188 + 3 * 768)
    assert_equal(last["small"], alone["large"])


def shared_prompts(world, shape):
    found = {}
    model, _, groups, _ = make_model(world, ParallelLayout(), model=shape)
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=SEED, max_concurrent=64)
    for num_prompt in (512, 32, 9):
        requests = make_requests(2, 8, num_prompt, SamplingParams(max_new_tokens=6))
        together = texts(requests, engine.generate(requests))
        share = engine.metrics["prompt_computed"] / engine.metrics["prompt_tokens"]
        alone = {}
        for each in requests[::5]:
            alone |= texts([each], engine.generate([each]))
        found[num_prompt] = together, alone, share
    return found


@pytest.mark.parametrize("shape", [LONG, replace(LINEAR, max_context=LONG.max_context)], ids=["keys", "states"])
def test_eight_samples_of_a_prompt_compute_it_once(shape):
    for num_prompt, (together, alone, share) in run_ranks(shared_prompts, 1, shape)[0].items():
        assert_equal({key: together[key] for key in alone}, alone)
        # The whole once, and of the seven others the last token.
        assert share == (num_prompt + 7) / (8 * num_prompt)
        assert num_prompt < 512 or share <= 0.2


def uneven(prompt_index: int) -> int:
    """Replica 0 of two is dealt the long ones."""
    return 29 if prompt_index in (0, 2) else 2


class Problems:
    """Prompts for the actor to draw."""

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        return (1, 3 + prompt_index % 7, 4 + prompt_index % 5)

    def example(self, prompt_index: int) -> Example:
        raise AssertionError("nobody is to ask")


def sampled(world, layout: ParallelLayout):
    """A step's samples with the actor, one of its validations, and what was claimed."""
    recipe = tiny_recipe(layout, "grpo", num_samples=24, group_size=2)
    recipe = replace(recipe, rollout=replace(recipe.rollout, max_new_tokens=29, max_concurrent=4))
    job, _ = make_job(world, recipe)
    held_out = tuple((None, (1, 5 + row)) for row in range(9))
    actor = Actor(replace(job, train=Problems(), held_out=held_out), KLCoefficient(recipe))
    drive = actor.rollouts.engine.drive

    def cut_short(requests, *args, more=lambda num_open: (), **rest):
        def cut(requests):
            return [
                replace(ask, params=replace(ask.params, max_new_tokens=uneven(ask.prompt_index))) for ask in requests
            ]

        return drive(cut(requests), *args, more=lambda num_open: cut(more(num_open)), **rest)

    actor.rollouts.engine.drive = cut_short
    decided = {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": 12}}
    steps = [actor.sample(None, decided)]
    # As after each step of training: a replica that takes nothing of the queue writes no number.
    actor.metrics.clear()
    steps.append(actor.sample(None, decided))
    claimed = actor.metrics.get("rollout/claimed", 0)
    columns = [batch and {name: batch.columns[name] for name in batch.columns} for batch in steps]
    ids = [batch and batch.ids.tolist() for batch in steps]
    answer = actor.sample_validation(None, {})
    rows = [
        batch
        and {
            number: (tokens.tolist(), log_probs.tolist())
            for number, tokens, log_probs in zip(
                batch.ids.tolist(),
                batch.columns["tokens"].to_list(),
                batch.columns["rollout_log_probs"].to_list(),
                strict=True,
            )
        }
        for batch in (*steps, answer)
    ]
    return SimpleNamespace(ids=ids, rows=rows, claimed=claimed, names=[each and list(each) for each in columns])


def stopped_on_one(world):
    """A step of nine prompts, in which replica 1 is told to stop: what each replica has of it."""
    layout = ParallelLayout(dp=2)
    recipe = tiny_recipe(layout, "grpo", num_samples=18, group_size=2)
    recipe = replace(recipe, rollout=replace(recipe.rollout, max_new_tokens=29, max_concurrent=4))
    job, _ = make_job(world, recipe)
    actor = Actor(replace(job, train=Problems()), KLCoefficient(recipe))
    actor.rollouts.is_stopping = lambda: world.rank == 1
    batch = actor.sample(None, {"train_step": {"step": 1, "first_prompt_index": 0, "num_prompts": 9}})
    tokens = batch.columns["tokens"].to_list()
    return {number: row[:3].tolist() for number, row in zip(batch.ids.tolist(), tokens, strict=True)}


def test_a_replica_that_stops_leaves_none_behind():
    found = run_ranks(stopped_on_one, 2, wait_s=20.0)
    # Replica 0 does its own two groups and the queue; both plan alike where they lie, though their shares are unlike.
    merged = found[0] | found[1]
    assert len(found[0]) + len(found[1]) == len(merged) and merged.keys() == {0, 1, 4, 5, *range(8, 18)}
    for number, prompt in merged.items():
        assert prompt == list(Problems().prompt(number // 2))


@pytest.mark.slow
def test_replicas_take_work_from_one_another_and_the_samples_stay_the_same():
    (reference,) = run_ranks(sampled, 1, ParallelLayout())
    assert reference.claimed == 0 and len(reference.rows[0]) == 24 and len(reference.rows[2]) == 9
    # Half of what replica 0 has first is long, so that replica 1 mostly takes more; how much more is a race.
    for size, text in ((2, "tp1.pp1.dp2"), (4, "tp2.pp1.dp2"), (4, "tp1.pp2.dp2")):
        layout = ParallelLayout.parse(text)
        found = run_ranks(sampled, size, layout)
        output_ranks = [each for each in found if each.rows[0] is not None]
        assert len(output_ranks) == size // layout.pp
        for place in range(3):
            merged: dict = {}
            for each in output_ranks:
                merged |= each.rows[place]
            assert merged.keys() == reference.rows[place].keys()
            for number, (tokens, log_probs) in merged.items():
                assert tokens == reference.rows[place][number][0], (text, number)
                assert log_probs == pytest.approx(reference.rows[place][number][1], abs=1e-5)
        # They lie as they were dealt, whoever generated them, on every rank that has a share.
        for each in output_ranks:
            replica = each.ids[0][0] // 2
            assert (
                each.ids
                == [[2 * prompt_index + index for prompt_index in range(replica, 12, 2) for index in range(2)]] * 2
            )
        assert {each.ids[0][0] for each in output_ranks} == {0, 2}
        by_replica = {each.ids[0][0] // 2: each.claimed for each in output_ranks}
        # Four slots each are dealt 8 of 24 samples at once; of 4 + c samples that a replica generates it took c.
        assert sum(4 * share / (1 - share) for share in by_replica.values()) == pytest.approx(16), text


class Counter:
    """Claims of replicas in one process."""

    def __init__(self) -> None:
        self.num_taken = self.num_deals = 0

    def begin(self) -> None:
        self.num_deals += 1
        self.num_taken = 0

    def take(self, count: int) -> int:
        self.num_taken += count
        return self.num_taken - count


@pytest.mark.parametrize("num_groups", [0, 1, 3, 4, 5, 17])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_each_group_is_dealt_once(num_groups, num_replicas):
    params = SamplingParams(max_new_tokens=1)
    groups = [
        [Request(prompt=torch.ones(1), params=params, prompt_index=prompt_index, index=index) for index in range(3)]
        for prompt_index in range(num_groups)
    ]
    counter = Counter()
    deals = [
        Deal(groups, place=place, num_replicas=num_replicas, num_slots=7, make_claims=lambda: counter)
        for place in range(num_replicas)
    ]
    # Seven slots have room for two groups of three; a message is needed only where there are more.
    assert {deal.has_queue for deal in deals} == {num_replicas > 1 and num_groups > 2 * num_replicas}
    assert counter.num_deals == (num_replicas if deals[0].has_queue else 0)
    got = [ask for deal in deals for ask in deal.first]
    assert all(deal.more(7) == [] for deal in deals)
    turn = 0
    while taken := [*deals[turn % num_replicas].more(turn % 7), *deals[-1].more(6)]:
        got += taken
        turn += 1
    assert all(deal.more(0) == [] for deal in deals)
    assert sorted((ask.prompt_index, ask.index) for ask in got) == [
        (prompt_index, index) for prompt_index in range(num_groups) for index in range(3)
    ]


def files(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       9000 kB\nMemFree:  100 kB\nMemAvailable:   4000 kB\n"}


@pytest.mark.parametrize(
    ("others", "free"),
    [
        ({}, 4000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/memory.max": "max\n"}, 4000 * 1024),
        # Of a million bytes 600,000 are used, of which 50,000 are files that give way.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1000000\n",
                "sys/fs/cgroup/a/memory.current": "600000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            450_000,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n9:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2000000\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1500000\n",
            },
            500_000,
        ),
        (
            {
                "proc/self/cgroup": "0::/of/the/host\n",
                "sys/fs/cgroup/memory.max": "10\n",
                "sys/fs/cgroup/memory.current": "30\n",
            },
            0,
        ),
    ],
    ids=["no groups", "no limit", "version 2", "version 1", "over its limit"],
)
def test_free_memory_is_what_the_node_and_the_control_groups_leave(tmp_path, others, free):
    root = files(tmp_path, MEMINFO | others)
    assert free_bytes(torch.device("cpu"), 1, root) == free
    assert free_bytes(torch.device("cpu"), 4, root) == free // 4
    assert cache_bytes(4096.0, torch.device("cpu"), 4) == 4096, "from 1 on it is bytes, whatever is free"


def test_free_memory_of_a_gpu_counts_no_fragments(monkeypatch):
    # torch holds 50 bytes, of which 30 are unused: 20 in a segment of their own, 10 beside what is used.
    free = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + 20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_bytes(torch.device("cuda", 0), 4) == 120


def test_free_memory_of_this_machine():
    assert 0 < free_bytes(torch.device("cpu"), 1) < 1 << 50
