"""Hardware that is read from files, shared by ranks, and fitted to measured steps."""

import itertools
import json
from dataclasses import replace

import pytest

from hybridflow import cli
from hybridflow.errors import ConfigError, DataError
from hybridflow.mapping.fit import PHASES, Observed, estimated_phases, fitted, observed_run, recipe_of, with_host_time
from hybridflow.mapping.hardware import Hardware, hardware
from hybridflow.mapping.rl_step import Call, Texts, phase_seconds, spread_lengths, step_calls
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.trainer.plan import training_step
from tests.support.machines import write_machine, write_run

LAYOUTS = {
    "dp4": ["actor.update={dp: 4}", "critic.layout={dp: 4}", "reference.layout={dp: 4}"],
    "tp4": ["actor.update={tp: 4}", "actor.rollout={tp: 4}", "critic.layout={tp: 4}", "reference.layout={tp: 4}"],
    "small": ["trainer.micro_batch_tokens=128", "rollout.max_concurrent=8"],
    "wide": ["actor.update={tp: 4}", "model.hidden_size=512", "model.ffn_hidden_size=2048"],
}
TEXTS = Texts(prompt=7, responses=spread_lengths(1024, 3.5, 5))


def flow_of(recipe):
    return training_step(recipe).flow


@pytest.fixture
def described(tmp_path):
    return lambda **changed: write_machine(tmp_path / "machine.yaml", **changed)


def seconds_of(recipe, machine):
    meshes = role_meshes(recipe)
    calls = step_calls(recipe, flow_of(recipe), meshes, machine, TEXTS)
    found = phase_seconds(calls, {name: mesh.ranks for name, mesh in meshes.items()})
    return {name: found[name] for name in PHASES}


@pytest.mark.slow
def test_what_another_machine_does_is_found_from_its_times(described):
    mine = hardware(described())
    other = replace(mine, launch=4e-3, pass_launch=3e-4, update_launch=5e-3, node_latency=8e-3, elementwise_share=0.1)
    recipes = {name: load_recipe("quickstart", overrides) for name, overrides in LAYOUTS.items()}
    observed = [
        Observed(recipe=recipe, texts=TEXTS, step_s=1.0, seconds=seconds_of(recipe, other))
        for recipe in recipes.values()
    ]
    found = fitted(mine, observed, flow_of)
    assert found.launch == pytest.approx(other.launch, rel=0.05)
    assert found.node_latency == pytest.approx(other.node_latency, rel=0.05)
    # Nor is it wrong for a layout that it has not seen.
    unseen = load_recipe("quickstart", ["actor.update={pp: 2, dp: 2}", "actor.rollout={tp: 2, dp: 2}"])
    assert seconds_of(unseen, found) == pytest.approx(seconds_of(unseen, other), rel=0.05)
    assert seconds_of(unseen, mine) != pytest.approx(seconds_of(unseen, other), rel=0.5)


def test_a_share_stays_below_one_and_what_is_zero_stays_zero(described):
    mine = hardware(described(update_launch=0, crowding=1))
    recipe = load_recipe("quickstart")
    fast = {name: value / 50 for name, value in seconds_of(recipe, mine).items()}
    one = Observed(recipe=recipe, texts=TEXTS, step_s=1.0, seconds=fast)
    found = fitted(mine, [one], flow_of)
    assert found.update_launch == 0 and 0.9 <= found.product_share <= 1
    assert set(estimated_phases(one, flow_of(recipe), found)) == set(PHASES)


H100 = Hardware(
    **{"ranks_per_node": 1, "flops": 812.1e12, "memory_bytes": 85e9, "memory_bandwidth": 2.977e12, "launch": 3e-5},
    **{"node_bandwidth": 2.977e12, "network_bandwidth": 0, "host_bandwidth": 54.5e9, "product_share": 1.0},
    **{"half_size": 124, "attention_share": 0.4, "cache_share": 0.8, "pass_host": 1e-3, "update_launch": 1e-4},
    **{"engine_launch": 5e-4, "host_share": 1.0},
)
"""One H100, before the fit: rates that were measured, and what else the fit begins with."""

ONE_GPU = (
    *("model.dtype=bf16", "model.tied_embeddings=true", "cluster.ranks=1", "actor.update={tp: 1}", "loss.epochs=1"),
    *("actor.rollout={tp: 1}", "reference.layout={tp: 1}"),
)
NARROW = (
    *(*ONE_GPU, "critic.layout={tp: 1}", "model.num_layers=8", "model.hidden_size=512", "model.ffn_hidden_size=2048"),
    *("model.vocab_size=65536", "model.max_context=288", "rollout.max_new_tokens=256"),
    *("trainer.global_batch_size=128", "trainer.mini_batch_size=64"),
)
QWEN = (
    *(*ONE_GPU, "model.num_query_groups=2", "model.vocab_size=151936", "model.max_context=544", "kl.coef=0.04"),
    *("rollout.max_new_tokens=512", "trainer.global_batch_size=256", "trainer.mini_batch_size=128"),
)
SMALL = (
    *("model.num_layers=24", "model.hidden_size=896", "model.ffn_hidden_size=4864", "model.num_attention_heads=14"),
    "trainer.micro_batch_tokens=16384",
)
LARGE = (
    *("model.num_layers=28", "model.hidden_size=1536", "model.ffn_hidden_size=8960", "model.num_attention_heads=12"),
    "trainer.micro_batch_tokens=8192",
)


def test_steps_of_an_h100_are_estimated_from_those_of_smaller_models():
    """Seconds of 2026-11-26: two trainings of PPO, and the steps of GRPO that docs/gpu.md has."""

    def one(name, overrides, samples, response, seconds):
        recipe = load_recipe(name, overrides)
        texts = Texts(prompt=7, responses=(response,) * samples)
        return Observed(
            recipe=recipe, texts=texts, step_s=sum(seconds), seconds=dict(zip(PHASES, seconds, strict=True))
        )

    # The host takes longer to start the kernels of these than they compute.
    first = one("quickstart", [*NARROW, "trainer.micro_batch_tokens=8192"], 128, 256, (0.593, 0.221, 0.103, 0.214))
    few = ["trainer.micro_batch_tokens=1024", "rollout.max_concurrent=16"]
    second = one("quickstart", [*NARROW, *few], 128, 256, (4.079, 1.621, 0.660, 1.169))
    third = one("grpo", [*QWEN, *SMALL], 256, 512, (1.77, 1.12, 0.0, 1.22))
    found = fitted(H100, [first, second, third], flow_of)
    assert 1e-3 < found.pass_host < 4e-3
    # As with --like, from published figures and one run.
    of_table = fitted(with_host_time(hardware("h100-sxm")), [third], flow_of)
    # On two machines of one kind.
    for machine, seconds in itertools.product((found, of_table), ((3.41, 2.38, 0.0, 1.97), (3.87, 2.75, 0.0, 2.05))):
        large = one("grpo", [*QWEN, *LARGE], 256, 512, seconds)
        estimated = estimated_phases(large, flow_of(large.recipe), machine)
        assert set(estimated) == {"update", "log_probs", "rollout"}
        assert sum(estimated.values()) == pytest.approx(large.step_s, rel=0.1)


def test_ranks_that_share_cores_work_in_turn(described):
    machine = hardware(described())
    assert [machine.share_of_time(ranks) for ranks in (1, 2, 3, 4)] == [0.5, 0.5, 0.75, 1]
    assert hardware("h100-sxm").share_of_time(1) == 1
    layouts = [f"{name}={{dp: 2}}" for name in ("actor.update", "actor.rollout", "critic.layout", "reference.layout")]
    ranks = ["actor.ranks=[0, 1]", "reward.ranks=[0, 1]", "critic.ranks=[2, 3]", "reference.ranks=[2, 3]"]
    recipe = load_recipe("quickstart", [*layouts, *ranks])
    made = step_calls(recipe, flow_of(recipe), role_meshes(recipe), machine, TEXTS)
    calls = [call for call in made if call.seconds]
    assert {call.mesh for call in calls} == {"actor.rollout", "actor.update", "critic", "reference"}
    assert all(one.end <= other.start for one, other in itertools.pairwise(calls))


def test_a_phase_is_of_the_rank_that_takes_longest():
    ranks = {"actor.update": (0, 1), "critic": (1, 2)}
    calls = [
        Call(name="actor.update", mesh="actor.update", start=0, seconds=2),
        Call(name="critic.update", mesh="critic", start=2, seconds=3),
        Call(name="critic.values", mesh="critic", start=5, seconds=1),
    ]
    assert phase_seconds(calls, ranks) == {"update": 5, "values": 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"flops": None}, "flops: missing"),
        ({"flop": 1.0}, "flop: unknown key"),
        ({"node_share": 0}, "node_share"),
        ({"crowding": 0.5}, "crowding"),
        ({"dtype": "fp8"}, "dtype"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(described, changed, message):
    with pytest.raises(ConfigError, match=message) as caught:
        hardware(described(**changed))
    assert "machine.yaml" in str(caught.value)


def test_other_wrong_hardware(capsys, described, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("plan", "estimate", "quickstart", "--hardware")
    cases = {
        "measured": "write it with `hybridflow doctor --measure`",
        "h100": "expected one of h100-sxm",
        str(tmp_path / "none.yaml"): "none.yaml",
        "a100-80g": "model.dtype=fp32: this hardware is described for bf16",
        described(ranks_per_node=2): "4 ranks need more than one node of 2",
        described(ranks_per_node=3): "4 ranks are no whole nodes of 3",
    }
    for name, message in cases.items():
        assert cli.main([*words, name]) == 2
        assert message in capsys.readouterr().err


def test_measured_figures_of_another_version_are_to_be_measured_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_machine(tmp_path / ".config/hybridflow/measured.yaml", call_launch=0.1)
    with pytest.raises(ConfigError, match="call_launch: unknown key.*anew with `hybridflow doctor --measure`"):
        hardware("measured")


def test_the_hardware_of_the_recipe_counts_where_no_other_is_named(capsys, described):
    named = described()
    words = ("plan", "estimate", "quickstart", f"cluster.hardware={named}", "--json")
    assert cli.main([*words]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == named
    assert cli.main([*words, "--hardware", "h200"]) == 2
    assert "described for bf16" in capsys.readouterr().err


def test_the_error_of_measured_hardware_is_told(capsys, described):
    assert cli.main(["plan", "estimate", "quickstart", "--hardware", described(error_percent=12.5), "--json"]) == 0
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["percent"] == 12.5 and "measured steps" in error["compared_with"]


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "run")


def test_a_run_tells_its_times_and_lengths(run_dir):
    found = observed_run(run_dir, recipe_of(run_dir))
    assert found.seconds == {"update": 1.0, "rollout": 0.1} and found.step_s == 1.1
    assert found.texts.prompt == 8 and found.texts.mean_response == pytest.approx(3.5, abs=0.05)
    assert found.recipe.name == "quickstart"


def test_estimates_like_a_run_are_near_it(capsys, described, run_dir):
    words = ["plan", "estimate", "quickstart", "--hardware", described(flops=1e11), "--like", str(run_dir), "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == 8 and found["error"]["percent"] < 10
    seconds = {call["name"]: call["seconds"] for call in found["calls"]}
    assert seconds["actor.update"] + seconds["critic.update"] == pytest.approx(1.0, rel=0.1)
    assert cli.main(["plan", "auto", *words[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["found"][0]["seconds"] <= found["seconds"]


def test_a_run_without_steps_is_refused(run_dir):
    rows = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join(rows[:2]) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="three steps"):
        observed_run(run_dir, recipe_of(run_dir))
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        observed_run(run_dir, recipe_of(run_dir))
