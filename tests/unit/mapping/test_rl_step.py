"""A recipe's whole step on paper, beside simulations token by token and sums by hand."""

import json
import math
import random
from dataclasses import replace

import pytest

from hybridflow import cli
from hybridflow.dataflow.graph import Node
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.estimate import TrainStep, decode_seconds, forward_seconds, prefill_seconds, train_seconds
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.rl_step import (
    Texts,
    Work,
    generation_seconds,
    moving_seconds,
    nodes,
    offload_seconds,
    role_size,
    scoring_seconds,
    spread_lengths,
    update_seconds,
)
from hybridflow.mapping.sizes import Size, model_size
from hybridflow.models.shapes import known_models
from hybridflow.recipe.load import load_recipe

LLAMA = {
    **{"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    **{"num_query_groups": 8, "max_context": 4096, "vocab_size": 128256, "dtype": "bf16"},
}
LINEAR = {
    **{"linear_layers": tuple(range(12)), "linear_key_heads": 16, "linear_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 64, "linear_conv_kernel": 4},
}
ACTOR = {"update": {"pp": 2, "dp": 8}, "rollout": {"dp": 16}, "optimizer": {"lr": 1e-6}}


@pytest.fixture
def recipe(tmp_path):
    def write(algorithm="grpo", **other):
        values = {
            **{"name": "paper", "algorithm": algorithm, "cluster": {"ranks": 16, "ranks_per_node": 8}},
            **{"model": LLAMA, "data": {"train": "data.jsonl"}, "tokenizer": {"path": "tokenizer"}, "actor": ACTOR},
            **{"reward": {"function": "maths"}, "rollout": {"group_size": 8, "max_new_tokens": 3900}},
            "trainer": {"steps": 1, "global_batch_size": 2048, "mini_batch_size": 512},
            **other,
        }
        path = tmp_path / "paper.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    return write


def estimate(capsys, *words):
    assert cli.main(["plan", "estimate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("concurrent", [1, 3, 8, 40])
@pytest.mark.parametrize("linear", [{}, LINEAR])
def test_generation_is_what_a_simulation_token_by_token_says(concurrent, linear):
    size = Size(model=replace(known_models()["llama3-1b"], **linear))
    machine, layout = hardware("h100-sxm"), ParallelLayout(tp=2)
    # A group shares its prompt, also with linear attention.
    prompts = 10
    lengths = random.Random(3).choices(range(1, 60), k=40)
    found = generation_seconds(
        size,
        machine,
        layout,
        Texts(prompt=1000, responses=tuple(sorted(lengths))),
        num_replicas=1,
        group_size=4,
        concurrent=concurrent,
    )

    def in_order(waiting):
        # The engine takes 2,048 tokens at a time: two prompts, where as many have a slot.
        at_once = min(2, concurrent)
        seconds, slots = prompts / at_once * prefill_seconds(size, machine, layout, 1000, at_once), []
        while waiting or slots:
            while waiting and len(slots) < concurrent:
                slots.append([waiting.pop(), 0])
            context = 1000 + sum(done for _, done in slots) / len(slots)
            seconds += sum(decode_seconds(size, machine, layout, len(slots), context).values())
            seconds += machine.engine_launch
            slots = [[length, done + 1] for length, done in slots if done + 1 < length]
        return seconds

    # The order of the responses is the simulation's own: any order is near where slots are few or as many as texts.
    found_in = [in_order(random.Random(seed).sample(lengths, 40)) for seed in range(20)]
    assert 0.99 * min(found_in) <= found <= 1.01 * max(found_in)


def test_a_text_has_the_tokens_since_it_began():
    size, machine, layout = model_size("llama3-1b"), hardware("h100-sxm"), ParallelLayout()
    texts = Texts(prompt=1000, responses=(2, 4))

    def a_token(number, context):
        return sum(decode_seconds(size, machine, layout, number, context).values()) + machine.engine_launch

    def generating(concurrent):
        words = dict(num_replicas=1, group_size=2, concurrent=concurrent)
        return generation_seconds(size, machine, layout, texts, **words) - prefill_seconds(size, machine, layout, 1000)

    # Together for two tokens, with one more than the prompt on average; then one of them has three more.
    assert generating(2) == pytest.approx(2 * a_token(2, 1001) + 2 * a_token(1, 1003), rel=1e-9)
    # One after the other.
    assert generating(1) == pytest.approx(2 * a_token(1, 1001) + 4 * a_token(1, 1002), rel=1e-9)


def test_what_is_offloaded_travels_over_the_link_to_the_host():
    machine = replace(hardware("h100-sxm"), host_bandwidth=10.0, host_share=0.5)
    # 4 · 12 + 4 · 4 weights of attention, 3 · 4 · 8 of the block and two tables of 4 · 10.
    size = model_size("layers=1,hidden=4,heads=1,ffn=8,vocab=10")
    away, here = (Work(layout=ParallelLayout(), micro_batch_tokens=8, is_offloaded=each) for each in (True, False))

    def moving(role, work, *, is_update=False):
        node = Node(name=role, role=role, call="call", mesh=role)
        return moving_seconds(node, size, work, machine, is_update=is_update)

    # Two moments and weights in fp32, there and back.
    assert offload_seconds(size, away, machine) == moving("critic", away, is_update=True) == 2 * 240 * 12 / 5
    # Weights in bf16 stay in host memory.
    assert moving("reference", away) == moving("reward", away) == 240 * 2 / 5
    assert moving("critic", away) == moving("actor", away) == moving("actor", away, is_update=True) == 0
    assert (
        offload_seconds(size, here, machine) == moving("critic", here, is_update=True) == moving("reference", here) == 0
    )


def test_a_call_has_the_size_of_its_model(recipe):
    small = {**LLAMA, "num_layers": 2, "tied_embeddings": True}
    plain = load_recipe(recipe("ppo", critic={"model": small}, kl={"coef": 0.1}))
    judged = replace(plain, reward=replace(plain.reward, model=plain.critic.model))

    def size(made, role):
        return role_size(made, Node(name=role, role=role, call="call", mesh=role))

    actor = size(plain, "actor")
    assert (actor.model.num_layers, actor.has_value_head, actor.tied, actor.item_bytes) == (32, False, False, 2)
    assert size(plain, "reference") == actor and size(plain, "advantage") is size(plain, "reward") is None
    # One number has no table.
    critic = size(plain, "critic")
    assert (critic.model.num_layers, critic.has_value_head, critic.tied) == (2, True, False) and size(
        judged, "reward"
    ) == critic


@pytest.mark.parametrize("num_replicas", [4, 16, 64])
def test_generation_of_replicas_takes_as_long_as_the_slowest(num_replicas):
    size, machine, layout = model_size("llama3-8b"), hardware("h100-sxm"), ParallelLayout()
    lengths = spread_lengths(256, 512, 4096)

    def seconds(responses, replicas):
        texts = Texts(prompt=512, responses=responses)
        return generation_seconds(*(size, machine, layout, texts), num_replicas=replicas, group_size=1, concurrent=256)

    drawn = random.Random(3).sample(lengths, len(lengths))
    dealt = [seconds(tuple(sorted(drawn[first::num_replicas])), 1) for first in range(num_replicas)]
    assert seconds(lengths, num_replicas) == pytest.approx(max(dealt), rel=0.05)


def test_passes_over_samples_are_slower_than_pretraining_and_what_follows_them_is_not():
    texts, work = Texts(prompt=24, responses=(1000,) * 64), Work(layout=ParallelLayout(dp=8), micro_batch_tokens=4096)
    step = TrainStep(layout=work.layout, sequence=1024, batch=64, micro_batch=4)
    for name, share in (("llama3-8b", 0.5), ("qwen3-30b-a3b", 0.5 * 0.4)):
        size, machine = model_size(name), replace(hardware("h100-sxm"), sample_share=0.5, mixture_share=0.4)
        parts = train_seconds(size, machine, step)
        after = parts["data parallel"] + parts["optimizer"]
        passes = sum(parts.values()) - after
        assert update_seconds(size, machine, work, texts, 64) == pytest.approx(passes / share + after)
        scored = forward_seconds(size, machine, step)
        assert scoring_seconds(size, machine, work, texts, 64) == pytest.approx(scored / share)
        # Of 21 the fullest replica has 3, 2 at a time.
        uneven, two = replace(step, batch=32, micro_batch=2), replace(work, micro_batch_tokens=2048)
        scored = forward_seconds(size, machine, uneven)
        assert scoring_seconds(size, machine, two, texts, 21) == pytest.approx(scored / share)


def test_lengths_have_their_mean_and_are_within_the_limit():
    lengths = spread_lengths(512, 900, 4096)
    assert sum(lengths) / 512 == pytest.approx(900, abs=1)
    assert min(lengths) < 250 and max(lengths) == 4096
    # Log-normal with a deviation of 1: the middle one is e^-½ of the mean, if few are cut at the limit.
    assert lengths[256] == pytest.approx(900 * math.exp(-0.5), rel=0.1)
    assert set(spread_lengths(8, 64, 64)) == {64} and set(spread_lengths(8, 1, 64)) == {1}
    # No response is empty, and the mean holds all the same.
    short = spread_lengths(512, 2, 64)
    assert min(short) == 1 and sum(short) / 512 == pytest.approx(2, abs=0.05)


def test_what_generates_nothing_is_estimated_with_stages_too(capsys):
    found = estimate(capsys, "dpo", "actor.update={pp: 2}", "model.dtype=bf16")
    assert found["seconds"] > 0


def test_an_offloaded_optimizer_leaves_before_weights_move(capsys, recipe):
    machine = hardware("h100-sxm")
    found = estimate(capsys, recipe(), "actor.offload=true")
    first, second, third, *_ = found["calls"]
    assert (first["name"], second["name"], third["name"]) == ("offload", "reshard", "actor.sample")
    # Three numbers of fp32 of half of the layers and a table, of which each of eight replicas has an eighth; there and
    # back. Norms are there.
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    away = 2 * 12 * (16 * layer + 128256 * 4096) / 8
    assert first["seconds"] == pytest.approx(away / (machine.host_bandwidth * machine.host_share), rel=1e-3)
    assert second["start"] == pytest.approx(first["seconds"])


def test_only_what_goes_over_mini_batches_learns():
    flow = ALGORITHMS["dapo"].step.flow
    learns = {node.name: is_update for node, is_update in nodes(flow)}
    assert learns["actor.sample"] is learns["reward.score"] is False
    assert [name for name, is_update in learns.items() if is_update] == ["actor.update"]


def test_calls_on_the_same_ranks_follow_one_another(capsys, recipe):
    # NeMo-RL v0.5, Llama 3.1 8B on 16 H100: 2,048 responses of 1,019 tokens, 1,581 tokens a second and GPU.
    words = ("--prompt", "127", "--response", "1019", "rollout.max_concurrent=256", "actor.recompute=full")
    found = estimate(capsys, recipe(kl={"coef": 0.01}), *words)
    assert found["seconds"] == pytest.approx(92.8, rel=0.2)
    names = [call["name"] for call in found["calls"]]
    assert names == ["reshard", "actor.sample", "actor.log_probs", "reference.log_probs", "actor.update"]
    ends = [call["start"] + call["seconds"] for call in found["calls"]]
    assert [call["start"] for call in found["calls"]][1:] == pytest.approx(ends[:-1])
    assert found["seconds"] == pytest.approx(ends[-1])
    # A forward pass is a quarter of the work with recomputation, but for the optimizer and what travels.
    seconds = {call["name"]: call["seconds"] for call in found["calls"]}
    assert seconds["actor.update"] == pytest.approx(4 * seconds["actor.log_probs"], rel=0.1)


def test_weights_that_a_rank_lacks_come_over_the_links(capsys, recipe):
    machine, two = hardware("h100-sxm"), ("cluster.ranks=2", "actor.update={tp: 2}", "actor.rollout={dp: 2}")

    def resharding(*changed):
        found = estimate(capsys, recipe(), *two, *changed)
        return next(call["seconds"] for call in found["calls"] if call["name"] == "reshard")

    # Half of 32 layers and two embeddings in 2 bytes; norms are there.
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    lacking = (32 * layer + 2 * 128256 * 4096) / 2 * 2
    assert resharding() == pytest.approx(lacking / (machine.node_bandwidth * machine.node_share), rel=1e-3)
    over_network = lacking / (machine.network_bandwidth * machine.network_share)
    assert resharding("cluster.ranks_per_node=1") == pytest.approx(over_network, rel=1e-3)
    every_second = ("cluster.ranks_per_node=1", "actor.reshard_every=2", "correction.kind=truncate")
    assert resharding(*every_second) == pytest.approx(over_network / 2, rel=1e-3)

    def scoring(away):
        words = (recipe(kl={"coef": 0.01}), *two, "reference.layout={tp: 2}", f"reference.offload={away}")
        found = estimate(capsys, *words)
        return next(call["seconds"] for call in found["calls"] if call["name"] == "reference.log_probs")

    # The other half comes from the host.
    from_host = lacking / (machine.host_bandwidth * machine.host_share)
    assert scoring("true") - scoring("false") == pytest.approx(from_host, rel=1e-3)


def test_layers_that_are_computed_anew_take_time_each(capsys, recipe):
    def updating(*changed):
        found = estimate(capsys, recipe(), "trainer.micro_batch_tokens=4096", *changed)
        return next(call["seconds"] for call in found["calls"] if call["name"] == "actor.update")

    none, full = updating(), updating("actor.recompute=full")
    # Of the 16 of a stage.
    some, every = (updating("actor.recompute=full", f"actor.recompute_layers={number}") for number in (4, 16))
    assert some == pytest.approx(none + (full - none) / 4, rel=1e-3) and every == full


def test_nodes_have_the_ranks_that_the_recipe_says(capsys, recipe):
    # Sums over 8 ranks leave nodes of 4.
    layout, nodes = "actor.update={tp: 8, dp: 2}", "cluster.ranks_per_node=4"
    eight, four = (estimate(capsys, recipe(), layout, *words)["seconds"] for words in ((), (nodes,)))
    assert four > eight
    assert cli.main(["plan", "auto", recipe(), nodes, "--nodes", "2", "actor.recompute=full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 8 and "cluster.ranks_per_node=4" in found["found"][0]["overrides"]


def test_no_more_texts_are_generated_at_a_time_than_the_cache_has_room_for(capsys, recipe):
    words = (recipe(), "--prompt", "100", "--response", "900", "actor.rollout={dp: 16}")

    def generating(*changed):
        found = estimate(capsys, *words, *changed)
        return next(call["seconds"] for call in found["calls"] if call["name"] == "actor.sample")

    # 32 layers, keys and values of 8 heads of 128 in bf16, of texts of 1,000 tokens.
    twenty = 20.5 * 1000 * 32 * 2 * 8 * 128 * 2
    assert generating(f"rollout.cache_memory={twenty}") == generating("rollout.max_concurrent=20") > generating()
    # A hundredth of what the models leave free of 80 GB holds fewer.
    assert generating("rollout.cache_memory=0.01") > generating(f"rollout.cache_memory={twenty}")


def test_states_of_texts_get_no_more_than_half_of_the_cache(capsys, recipe):
    heads = {"linear_key_heads": 16, "linear_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    layers = {"linear_layers": [layer for layer in range(32) if layer % 4 != 3], "linear_conv_kernel": 4}
    path = recipe(model={**LLAMA, **heads, **layers})

    def generating(*changed):
        found = estimate(capsys, path, "--prompt", "100", "--response", "900", "actor.rollout={dp: 16}", *changed)
        return next(call["seconds"] for call in found["calls"] if call["name"] == "actor.sample")

    # In fp32 three inputs of each channel, and a matrix for each head; more than a text's keys and values.
    state = 24 * (3 * (2 * 16 + 32) * 128 + 32 * 128 * 128) * 4
    assert state > 1000 * 8 * 2 * 8 * 128 * 2
    assert generating(f"rollout.cache_memory={20.5 * 2 * state}") == generating("rollout.max_concurrent=20")


def test_calls_on_ranks_of_their_own_run_side_by_side(capsys, recipe):
    actor = {**ACTOR, "ranks": [*range(8)], "update": {"tp": 2, "dp": 4}, "rollout": {"dp": 8}}
    optimizer = {"optimizer": {"lr": 1e-6}}
    critic = {"layout": {"tp": 2, "dp": 4}, "ranks": [*range(8, 16)], **optimizer}
    found = estimate(capsys, recipe("ppo", actor=actor, critic=critic, kl={"coef": 0}))
    starts = {call["name"]: call["start"] for call in found["calls"]}
    assert starts["actor.log_probs"] == pytest.approx(starts["critic.values"])
    assert starts["actor.update"] == pytest.approx(starts["critic.update"], rel=0.05)


def test_samples_made_ahead_cost_the_longer_of_two_halves(capsys, recipe):
    ranks = {"ranks": [*range(8)], "rollout_ranks": [*range(8, 16)]}
    actor = {**ACTOR, **ranks, "update": {"tp": 2, "dp": 4}, "rollout": {"dp": 8}}
    trainer = {"steps": 1, "global_batch_size": 2048, "mini_batch_size": 512}
    together = estimate(capsys, recipe(actor=actor, trainer=trainer))
    ahead = estimate(capsys, recipe(actor=actor, trainer={**trainer, "max_staleness": 1}))
    halves = [0.0, 0.0]
    for call in ahead["calls"]:
        halves[call["mesh"] == "actor.rollout"] += call["seconds"]
    assert ahead["seconds"] == pytest.approx(max(halves))
    assert together["seconds"] == pytest.approx(sum(halves))


def test_text_names_calls_and_memory(capsys, recipe):
    assert cli.main(["plan", "estimate", recipe(), "actor.recompute=full", "--prompt", "100"]) == 0
    text = capsys.readouterr().out
    assert "a step of paper on 16 × h100-sxm" in text and "prompts of 100 tokens" in text
    assert "of each token of a rollout 7 ms are the host's, as in published steps with vLLM" in text
    assert "actor.sample" in text and "memory of the fullest GPU: rollout" in text and "within 18.3 % of" in text


def test_plan_job_counts_the_micro_batches_of_plan_estimate(capsys, recipe, tmp_path):
    site, layout = tmp_path / "site.yaml", "actor.update={tp: 2, dp: 8}"
    site.write_text("gpu_memory_gb: 80\n", encoding="utf-8")
    chosen = estimate(capsys, recipe(), layout)["micro_batch_tokens"]
    assert chosen == 8192
    for words, tokens in (
        (["cluster.hardware=h100-sxm"], chosen),
        (["--site", str(site)], chosen),
        # The hardware of the recipe comes first.
        (["--site", str(site), "cluster.hardware=b200"], 16384),
        ([], 4096),
    ):
        assert cli.main(["plan", "job", recipe(), layout, *words]) == 0
        text = capsys.readouterr().out
        assert f"trainer.micro_batch_tokens  {tokens}\n" in text
        assert ("name the GPU" in text) == (not words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--response", "5000"), "--response 5000: expected 1 to rollout.max_new_tokens=3900"),
        (("model.dtype=fp32",), "model.dtype=fp32: this hardware is described for bf16"),
        (("--prompt", "3000", "--response", "3000"), "more than model.max_context=4096"),
        (("--nodes", "2"), "--nodes belongs to --phase; RECIPE has cluster.ranks"),
        (("--micro-batch", "1"), "--micro-batch belongs to --phase; RECIPE has trainer.micro_batch_tokens"),
        (("--concurrent", "32"), "RECIPE has rollout.max_concurrent"),
        (("--dtype", "fp8"), "--dtype belongs to --phase; RECIPE has model.dtype"),
        (("actor.rollout={pp: 2, dp: 8}",), "actor.rollout pp=2: not estimated yet"),
        (("actor.update={fsdp: 16}",), "fsdp and layers: auto are not estimated yet"),
        (("--phase", "train"), "give RECIPE, or --phase, --model and --layout"),
    ],
)
def test_wrong_requests_end_with_2(capsys, recipe, words, message):
    assert cli.main(["plan", "estimate", recipe(), *words]) == 2
    assert message in capsys.readouterr().err


def test_nothing_asked_for_is_refused(capsys):
    assert cli.main(["plan", "estimate"]) == 2
    assert "give RECIPE, or --phase" in capsys.readouterr().err
