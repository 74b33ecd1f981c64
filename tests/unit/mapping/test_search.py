"""The search for placement and layouts, beside all configurations tried one by one."""

import functools
import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from hybridflow import cli
from hybridflow.errors import HybridflowError, LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping import choices, memory
from hybridflow.mapping.auto import recipe_text
from hybridflow.mapping.choices import _rollout_layouts, _update_layouts
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.memory import MeshMemory, held_texts, job_memory, rank_memory
from hybridflow.mapping.rl_step import (
    Call,
    Texts,
    Work,
    generation_seconds,
    node_seconds,
    nodes,
    offload_seconds,
    role_size,
    spread_lengths,
    step_calls,
    timed,
    total_seconds,
)
from hybridflow.mapping.search import (
    Found,
    ModelSet,
    SearchRequest,
    _axes,
    _host_of,
    _reshard_key,
    _Search,
    needed_memory,
    placements,
    search,
    settings_of,
    with_choices,
)
from hybridflow.mapping.sizes import model_size
from hybridflow.mapping.step_command import texts_of
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.trainer.plan import training_step
from tests.support.recipes import SEES, write_config

MODEL = {
    **{"num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    **{"num_query_groups": 8, "max_context": 4096, "vocab_size": 32000, "dtype": "bf16"},
}
MACHINE = hardware("h100-sxm")
CROWDED = replace(MACHINE, ranks_per_node=4, crowding=2.0, pass_launch=1e-3)
OPTIMIZER = {"optimizer": {"lr": 1e-6}}


@pytest.fixture
def recipe(tmp_path):
    def write(algorithm="grpo", **other):
        values = {
            **{"name": "small", "algorithm": algorithm, "cluster": {"ranks": 1}, "model": MODEL},
            **{
                "data": {"train": "data.jsonl"},
                "tokenizer": {"path": "tokenizer"},
                "actor": {"update": {}, **OPTIMIZER},
            },
            **{"reward": {"function": "maths"}, "rollout": {"group_size": 4, "max_new_tokens": 2048}},
            "trainer": {"steps": 1, "global_batch_size": 64, "mini_batch_size": 32, "micro_batch_tokens": 4096},
            **other,
        }
        path = tmp_path / "small.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")
        return str(path)

    return write


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(ranks, *, learns):
    for tp, pp, cp in itertools.product(divisors(8), divisors(ranks), (1, 2)):
        if ranks % (tp * pp * cp) == 0 and pp <= MODEL["num_layers"]:
            for vpp in (1, 2, 4) if learns and pp > 1 else (1,):
                if pp * vpp <= MODEL["num_layers"]:
                    yield ParallelLayout(tp=tp, pp=pp, cp=cp, dp=ranks // (tp * pp * cp), vpp=vpp)


def works(mesh, ranks, tokens):
    if mesh == "actor.rollout":
        for tp, concurrent in itertools.product(divisors(min(ranks, 8)), (16, 32, 64)):
            if ranks % tp == 0:
                layout = ParallelLayout(tp=tp, dp=ranks // tp)
                yield Work(layout=layout, micro_batch_tokens=0, concurrent=concurrent)
        return
    learns = mesh in ("actor.update", "critic")
    for layout in layouts(ranks, learns=learns):
        for recompute, away in itertools.product(("none", "full") if learns else ("none",), (False, True)):
            yield Work(layout=layout, micro_batch_tokens=tokens, recompute=recompute, is_offloaded=away)


def partitions(names):
    if not names:
        return [[]]
    found = []
    for sets in partitions(names[1:]):
        found += [[[names[0]], *sets]]
        found += [[*sets[:at], [names[0], *sets[at]], *sets[at + 1 :]] for at in range(len(sets))]
    return found


def settings(chosen, ranks, tokens, num_ranks, *, is_one):
    keys = {
        "cluster.ranks": num_ranks,
        "cluster.ranks_per_node": min(8, num_ranks),
        "trainer.micro_batch_tokens": tokens,
    }
    for mesh, work in chosen.items():
        role, _, phase = mesh.partition(".")
        layout = {axis: getattr(work.layout, axis) for axis in ("tp", "pp", "dp", "cp", "vpp")}
        keys[f"{role}.{phase or 'layout'}"] = layout
        mine = None if is_one else ranks[mesh]
        if phase == "rollout":
            keys["rollout.max_concurrent"] = work.concurrent
            keys["actor.rollout_ranks"] = None if ranks[mesh] == ranks["actor.update"] else mine
            continue
        keys |= {f"{role}.ranks": mine, f"{role}.offload": work.is_offloaded}
        if mesh in ("actor.update", "critic"):
            keys[f"{role}.recompute"] = work.recompute
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def brute_force(path, num_ranks, limit, texts, algorithm_meshes, machine):
    """Return the least seconds of all configurations that are recipes and fit."""
    base = load_recipe(path)
    flow = training_step(base).flow
    calls = {mesh: [(node, update) for node, update in nodes(flow) if node.mesh == mesh] for mesh in algorithm_meshes}
    calls = {mesh: [each for each in found if role_size(base, each[0])] for mesh, found in calls.items()}

    @functools.cache
    def seconds(mesh, work):
        size = role_size(base, calls[mesh][0][0])
        found = {
            node.name: node_seconds(base, node, size, work, machine, texts, is_update=update)
            for node, update in calls[mesh]
        }
        return found | ({"offload": offload_seconds(size, work, machine)} if mesh == "actor.update" else {})

    everything = []
    for sets in partitions(list(algorithm_meshes)):
        for order in itertools.permutations(sets):
            for cuts in itertools.combinations(range(1, num_ranks), len(sets) - 1):
                edges = (0, *cuts, num_ranks)
                ranks = {
                    mesh: list(range(*edges[index : index + 2])) for index, names in enumerate(order) for mesh in names
                }
                places = {mesh: (index,) for index, names in enumerate(order) for mesh in names}
                places["reward"] = places["actor.rollout"]
                if machine.crowding > 1:
                    places = dict.fromkeys(places, (0,))
                for tokens in (4096, 8192, 16384):
                    offered = [[(mesh, work) for work in works(mesh, len(ranks[mesh]), tokens)] for mesh in ranks]
                    for pairs in itertools.product(*offered):
                        times = {}
                        for pair in pairs:
                            times |= seconds(*pair)
                        # Without the reshard: no more than it takes.
                        least = total_seconds(timed(flow, places, times), max_staleness=0)
                        everything.append((least, tokens, ranks, pairs, len(sets) == 1))
    everything.sort(key=lambda each: each[0])
    best = float("inf")
    for least, tokens, ranks, pairs, is_one in everything:
        if least >= best:
            break
        try:
            found = load_recipe(path, settings(dict(pairs), ranks, tokens, num_ranks, is_one=is_one))
            meshes = role_meshes(found)
        except HybridflowError:
            continue
        if any(mesh.spans_nodes("tp") for mesh in meshes.values()):
            continue
        total = total_seconds(step_calls(found, flow, meshes, machine, texts), max_staleness=0)
        if total < best and max(rank.peak for rank in needed_memory(found, meshes, texts, machine)) <= limit:
            best = total
    return best


@pytest.mark.parametrize(
    ("algorithm", "num_ranks", "limit_gb", "meshes", "machine"),
    [
        ("grpo", 2, 80, ("actor.update", "actor.rollout", "reference"), MACHINE),
        ("grpo", 2, 25, ("actor.update", "actor.rollout", "reference"), MACHINE),
        pytest.param("grpo", 8, 9, ("actor.update", "actor.rollout"), MACHINE, marks=pytest.mark.slow),
        ("grpo", 16, 30, ("actor.update", "actor.rollout"), MACHINE),
        pytest.param("grpo", 4, 14, ("actor.update", "actor.rollout", "reference"), MACHINE, marks=pytest.mark.slow),
        pytest.param("grpo", 4, 30, ("actor.update", "actor.rollout", "reference"), CROWDED, marks=pytest.mark.slow),
        ("ppo", 2, 45, ("actor.update", "actor.rollout", "critic"), MACHINE),
    ],
)
def test_the_best_of_all_configurations_is_found(recipe, algorithm, num_ranks, limit_gb, meshes, machine):
    others = {"critic": {"layout": {}, **OPTIMIZER}} if "critic" in meshes else {}
    path = recipe(algorithm, kl={"coef": 0.01 if "reference" in meshes else 0.0}, **others)
    texts = Texts(prompt=500, responses=spread_lengths(64, 700, 2048))
    request = SearchRequest(
        load=lambda overrides: load_recipe(path, overrides),
        flow=lambda recipe: training_step(recipe).flow,
        hardware=machine,
        texts=texts,
        num_ranks=num_ranks,
        ranks_per_node=machine.ranks_per_node,
        memory_bytes=limit_gb * 1e9,
    )
    best = brute_force(path, num_ranks, limit_gb * 1e9, texts, meshes, machine)
    # A thousandth is not looked for.
    assert search(request)[0].seconds == pytest.approx(best, rel=1.1e-3)


def auto(capsys, *words):
    assert cli.main(["plan", "auto", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sets_have_consecutive_ranks_in_blocks_of_equal_size():
    found = list(placements(("actor.update", "critic", "reference"), 64, 8))
    # 15 cuts into two sets, of three partitions; 15 · 14 / 2 into three.
    assert len(found) == 1 + 3 * 15 + 105
    assert len(list(placements(("a", "b", "c", "d"), 4, 8))) == 1 + 7 * 3 + 6 * 3 + 1
    assert {len(one.ranks) % 4 for placement in found for one in placement} == {0}
    whole_nodes = {len(one.ranks) for one in itertools.chain(*placements(("actor.update", "critic"), 1000, 8))}
    assert min(whole_nodes) == 40 and {size % 8 for size in whole_nodes} == {0}


def test_the_recipe_that_is_written_takes_as_long_as_was_said(capsys, recipe, tmp_path):
    out = tmp_path / "found.yaml"
    critic = {"layout": {}, **OPTIMIZER}
    path = recipe("ppo", critic=critic, kl={"coef": 0.01}, layout="auto")
    words = (path, "--gpus", "8", "--prompt", "300", "--response", "900")
    assert cli.main(["plan", "estimate", path]) == 2
    assert "layout: auto: the layouts are yet to be found" in capsys.readouterr().err
    found = auto(capsys, *words, "--out", str(out))
    best = found["found"][0]
    assert found["gpus"] == 8 and sum(each["ranks"] for each in best["placement"]) == 8
    assert [each["seconds"] for each in found["found"]] == sorted(each["seconds"] for each in found["found"])
    assert cli.main(["plan", "estimate", str(out), "--prompt", "300", "--response", "900", "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert estimated["seconds"] == pytest.approx(best["seconds"])
    assert estimated["calls"] == best["calls"]
    written = load_recipe(out)
    # The cache that a job takes has room for the texts that are generated at a time.
    meshes = role_meshes(written)
    texts = min(written.rollout.max_concurrent, 64 // meshes["actor.rollout"].layout.dp)
    assert held_texts(written, meshes, replace(MACHINE, memory_bytes=0.9 * MACHINE.memory_bytes), 1200) >= texts
    assert written == load_recipe(words[0], best["overrides"]) and written.layout is None
    assert cli.main(["plan", "auto", *words, "--out", str(out)]) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert cli.main(["plan", "auto", *words, "--out", str(tmp_path / "none" / "found.yaml")]) == 2
    assert "none is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["2e9", "40e9"])
def test_a_cache_of_given_bytes_is_counted_as_a_job_counts_it(recipe, budget):
    given = load_recipe(recipe(), [f"rollout.cache_memory={budget}", "rollout.max_concurrent=64"])
    meshes, texts = role_meshes(given), Texts(prompt=100, responses=(200,) * 64)
    (searched,) = needed_memory(given, meshes, texts, MACHINE)
    (planned,) = job_memory(given, meshes, gpu_bytes=MACHINE.memory_bytes)
    assert searched.rollout == planned.rollout == planned.rollout - planned.spare


def test_the_recipe_that_is_written_fixes_its_micro_batches(recipe, tmp_path):
    found = Found(
        recipe=load_recipe(recipe()),
        **{"overrides": (), "placement": (), "seconds": 1.0, "memory_bytes": 0},
        calls=(Call(name="actor.update", mesh="actor.update", start=0.0, seconds=1.0),),
    )
    (tmp_path / "found.yaml").write_text(recipe_text(found, "hybridflow plan auto"), encoding="utf-8")
    # As many as the class has by default.
    written = load_recipe(tmp_path / "found.yaml")
    assert written.trainer.micro_batch_tokens == 4096 and "trainer.micro_batch_tokens" not in written.defaults


def test_text_says_what_is_best_and_why_the_next_loses(capsys, recipe):
    assert cli.main(["plan", "auto", recipe(kl={"coef": 0.01}), "--gpus", "4"]) == 0
    text = capsys.readouterr().out
    assert "small on 4 × h100-sxm" in text and "up to 72 GB of a GPU" in text
    assert "4: actor, rollout, reference" in text and "actor.update={" in text
    assert "2 loses: " in text and "s slower" in text and "of the step" in text
    # What the recipe has not is not taken away from it.
    assert "=null" not in text and text.endswith("To write 1 as a recipe, add --out FILE.\n")
    assert cli.main(["plan", "auto", recipe(layout="auto"), "--gpus", "4"]) == 0
    assert "  layout=null\n" in capsys.readouterr().out


def test_what_is_found_is_the_same_each_time(capsys, recipe):
    words = recipe(kl={"coef": 0.01}), "--gpus", "16"
    assert auto(capsys, *words) == auto(capsys, *words)


def test_samples_are_made_ahead_only_where_asked_for(capsys, recipe):
    words = recipe(), "--gpus", "16", "--response", "1800"
    assert "trainer.max_staleness=1" not in str(auto(capsys, *words))
    ahead = [
        each for each in auto(capsys, *words, "--ahead")["found"] if "trainer.max_staleness=1" in each["overrides"]
    ]
    for each in ahead:
        rollout = next(one for one in each["placement"] if "actor.rollout" in one["models"])
        assert "actor.update" not in rollout["models"]
    assert ahead


@pytest.mark.parametrize(
    ("algorithm", "changed", "words"),
    [
        (
            "grpo",
            {"fallbacks": [{"ranks": 1, "overrides": ["actor.update={}"]}]},
            ("cluster.ranks=2", "actor.update.dp=2"),
        ),
        ("grpo", {"reward": {"function": "maths", "ranks": [0]}}, ("--ahead",)),
        ("dapo", {}, ("--ahead",)),
        ("grpo", {"rollout": {"group_size": 4, "max_new_tokens": 2048, "engine": {"kind": "vllm"}}}, ("--ahead",)),
    ],
)
def test_the_search_offers_recipes_alone(capsys, recipe, monkeypatch, algorithm, changed, words):
    refused = []
    monkeypatch.setattr("hybridflow.mapping.search._Search._refuse", lambda *given: refused.append(given))
    path = recipe(algorithm, **changed)
    best = auto(capsys, path, "--gpus", "8", *words)["found"][0]
    written = load_recipe(path, [*(word for word in words if "=" in word), *best["overrides"]])
    assert not refused and not written.fallbacks and written.reward.ranks is None
    if written.rollout.engine.kind == "vllm":
        meshes, texts = role_meshes(written), texts_of(written, None, None, None)
        assert meshes["actor.rollout"].layout == ParallelLayout(dp=8)
        calls = step_calls(written, training_step(written).flow, meshes, MACHINE, texts)
        assert total_seconds(calls, max_staleness=0) == pytest.approx(best["seconds"])


def test_a_rollout_that_only_validates_follows_the_layout_that_is_found(capsys):
    found = auto(capsys, "sft", "model.dtype=bf16", "--gpus", "4")["found"]
    written = load_recipe("sft", ["model.dtype=bf16", *found[0]["overrides"]])
    assert written.cluster.ranks == 4 == role_meshes(written)["actor.rollout"].layout.world_size


def test_a_way_to_share_ranks_that_is_always_refused_is_given_up(recipe):
    path, tried = recipe(kl={"coef": 0.01}), []

    def load(overrides):
        tried.append(overrides)
        if "actor.rollout_ranks=null" in overrides or not overrides:
            return load_recipe(path, overrides)
        raise LayoutError("no")

    request = SearchRequest(
        load=load,
        flow=lambda recipe: training_step(recipe).flow,
        hardware=MACHINE,
        texts=Texts(prompt=500, responses=spread_lengths(64, 700, 2048)),
        num_ranks=16,
        ranks_per_node=8,
        memory_bytes=80e9,
    )
    ways = {tuple(each.meshes for each in found.placement) for found in search(request)}
    assert ways and all(any("actor.update" in one and "actor.rollout" in one for one in way) for way in ways)
    # Of 5 ways to share ranks 3 keep the rollout apart.
    assert len(tried) < 3 * 51 + 100


def request_of(path, num_ranks, memory_bytes, *always):
    """A request for a recipe with overrides that are always there, in nodes of 8 ranks."""
    return SearchRequest(
        load=lambda overrides: load_recipe(path, [*always, *overrides]),
        flow=lambda recipe: training_step(recipe).flow,
        hardware=MACHINE,
        texts=Texts(prompt=500, responses=(700,) * 64),
        num_ranks=num_ranks,
        ranks_per_node=8,
        memory_bytes=memory_bytes,
    )


def test_no_choice_has_the_room_of_a_vision_tower(recipe, tmp_path, monkeypatch):
    """It is on the first rank of each model. That bounds what is tried, and leaves out nothing that fits."""
    processor = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    text = {**SEES["text_config"], "num_hidden_layers": 8, "hidden_size": 1024, "max_position_embeddings": 4096}
    write_config(tmp_path / "sees", {**SEES, "text_config": text})
    (tmp_path / "sees/preprocessor_config.json").write_text(json.dumps(processor))
    has_tower = functools.partial(
        monkeypatch.setattr, memory, "_image_elements", lambda path, hidden_size: (path, 10**9)
    )
    has_tower()
    data = {"train": "data.jsonl", "images_field": "images"}
    path = recipe(model={"path": str(tmp_path / "sees"), "dtype": "bf16"}, data=data)
    limits = (2.1e9, 2.6e9, 4e9)
    found = [search(request_of(path, 4, limit)) for limit in limits]
    monkeypatch.setattr(choices, "least_image_bytes", lambda recipe, names: 0)
    assert [search(request_of(path, 4, limit)) for limit in limits] == found and found[-1]
    monkeypatch.undo()
    has_tower()
    monkeypatch.setattr(choices.Choices, "_best", lambda *args: pytest.fail("nothing of this can fit"))
    assert search(request_of(path, 4, 1.9e9)) == []


@pytest.mark.parametrize(("start", "sizes"), [(0, {1, 2, 4}), (3, {1}), (6, {1, 2}), (12, {1, 2, 4})])
def test_tensor_parallel_groups_begin_where_none_of_them_spans_nodes(recipe, start, sizes):
    request = request_of(recipe(), 16, 72e9)
    four = ModelSet(meshes=("actor.rollout",), ranks=range(start, start + 4))
    assert {each.work.layout.tp for each in _Search(request)._offered("actor.rollout", four, 4096)} == sizes


def test_where_any_will_do_the_search_ends_with_the_first_that_fits(recipe):
    path, tried = recipe(kl={"coef": 0.01}), []

    def load(overrides):
        tried.append(overrides)
        return load_recipe(path, overrides)

    request = SearchRequest(
        load=load,
        flow=lambda recipe: training_step(recipe).flow,
        hardware=MACHINE,
        texts=Texts(prompt=500, responses=spread_lengths(64, 700, 2048)),
        **{"num_ranks": 8, "ranks_per_node": 8, "memory_bytes": 72e9, "is_any": True},
    )
    assert len(search(request)) == 1
    # As it is, without what does not go with other layouts, and with what was found.
    assert len(tried) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # Weights, gradients and state of 2 billion parameters: 36 GB; 8 GB and one of them do not go together.
        (("--gpus", "1", "cluster.memory_budget_gb=20"), "nothing fits 1 GPUs, of which each may need 20 GB; "),
        (("--gpus", "12"), "12 ranks are no whole nodes of 8"),
        (("model.dtype=fp32", "--gpus", "1"), "model.dtype=fp32: this hardware is described for bf16"),
        (("actor.lora={rank: 8}", "--gpus", "1"), "estimate the recipe without it, by actor.lora=null"),
    ],
)
def test_requests_without_an_answer_end_with_2(capsys, recipe, words, message):
    assert cli.main(["plan", "auto", recipe(), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_smallest_change_that_fits_does_fit(capsys, recipe):
    words = recipe(), "cluster.memory_budget_gb=12"
    assert cli.main(["plan", "auto", *words, "--gpus", "1"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("hybridflow: nothing fits; looking for what would\n")
    number = int(text.split(" GPUs suffice")[0].split()[-1])
    assert number > 1 and auto(capsys, *words, "--gpus", str(number))["found"]
    assert cli.main(["plan", "auto", *words, "--gpus", str(number - 1)]) == 2
    capsys.readouterr()
    enough = int(text.split(" GB would do")[0].split()[-1])
    assert auto(capsys, words[0], f"cluster.memory_budget_gb={enough}", "--gpus", "1")["found"]
    assert cli.main(["plan", "auto", words[0], f"cluster.memory_budget_gb={0.95 * enough - 1}", "--gpus", "1"]) == 2


def test_gpus_that_suffice_are_such_as_the_command_takes(capsys, recipe, tmp_path):
    assert cli.main(["plan", "auto", recipe(), "cluster.memory_budget_gb=5", "--gpus", "5"]) == 2
    # 8 do not suffice, and neither 9 nor 15 are whole nodes.
    assert "16 GPUs suffice: give --nodes 2" in capsys.readouterr().err
    machine = tmp_path / "node.yaml"
    machine.write_text(json.dumps({**asdict(MACHINE), "ranks_per_node": 2, "network_bandwidth": 0}), encoding="utf-8")
    words = recipe(), "cluster.memory_budget_gb=7", "--hardware", str(machine)
    assert cli.main(["plan", "auto", *words, "--gpus", "1"]) == 2
    assert "nor do 2 GPUs suffice (one node: the hardware has no network_bandwidth); lower" in capsys.readouterr().err
    usual = ("--phase", "train", "--model", "llama3-8b", "--layout", "dp8")
    assert cli.main(["plan", "estimate", *usual, "--hardware", str(machine)]) == 2
    assert "8 ranks need more than one node of 2" in capsys.readouterr().err


@pytest.mark.parametrize("concurrent", [32, 64, 128])
def test_a_7b_model_generates_faster_at_tp_2_than_at_tp_8(concurrent):
    # The choice in arXiv 2409.19256, on 16 A100.
    size = model_size("layers=32,hidden=4096,heads=32,ffn=11008,vocab=32000")
    texts = Texts(prompt=1024, responses=(1024,) * 1024)
    narrow, wide = (
        generation_seconds(
            size,
            hardware("a100-80g"),
            ParallelLayout(tp=tp),
            texts,
            num_replicas=16 // tp,
            group_size=1,
            concurrent=concurrent,
        )
        for tp in (2, 8)
    )
    assert narrow < 0.9 * wide


def test_layouts_of_experts_that_cannot_be_made_are_not_tried():
    # tp3.dp2.ep2.etp1 would divide the 6 ranks.
    heads = ("model.num_attention_heads=6", "model.num_query_groups=6", "model.hidden_size=192", "model.head_dim=32")
    model = load_recipe("grpo", [*heads, "model.ffn_hidden_size=384", "model.num_experts=8"]).model
    for found in (_update_layouts(model, 6, 6), _rollout_layouts(model, 6, 6)):
        assert {3, 6} < {each.tp for each in found}


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (ParallelLayout(tp=2, dp=4, ep=4, etp=1), {"num_experts": 8}),
        (ParallelLayout(tp=2, dp=4, ep=2, etp=2), {"num_experts": 8}),
        (ParallelLayout(pp=2, dp=2, cp=2, vpp=2), {}),
        (ParallelLayout(pp=2, dp=4, layers=(5, 3)), {}),
    ],
    ids=str,
)
def test_a_layout_that_is_found_is_read_as_it_was(recipe, layout, experts):
    path = recipe(model={**MODEL, **experts}, cluster={"ranks": 8})
    overrides = [f"actor.update={json.dumps(_axes(layout))}", "actor.rollout={dp: 8}"]
    found = load_recipe(path, overrides)
    assert found.actor.update == layout
    assert f"actor.update={json.dumps(_axes(layout))}" in settings_of(found, ["actor.update"])


def test_no_reshard_is_faster_than_its_bound(recipe):
    request = request_of(recipe(), 8, 72e9, "actor.reshard_every=4", "correction.kind=truncate")
    made, names = _Search(request), ("actor.update", "actor.rollout")
    apart = tuple(ModelSet(meshes=(name,), ranks=range(4 * at, 4 * at + 4)) for at, name in enumerate(names))
    for update, rollout in itertools.product(*(made._choices.of(name, 4, 4096)[:3] for name in names)):
        chosen = {"actor.update": update, "actor.rollout": rollout}
        found = with_choices(made._base, apart, chosen, 4096, 0, 8)
        least = made._least_reshard(chosen, apart)
        assert 0 < least <= made._reshard_seconds(_reshard_key(chosen, apart), found, role_meshes(found)) * (1 + 1e-9)


def test_functions_of_rewards_are_where_responses_are():
    apart = {"actor.update": 0, "actor.rollout": 1}
    assert _host_of("reward", apart) == "actor.rollout" and _host_of("advantage", apart) == "actor.update"
    assert _host_of("reward", {"actor.update": 0}) == "actor.update"


def learned(recipe, *parts):
    """What is learned of an update and a rollout of a rank that needs more than 90 bytes."""
    request = request_of(recipe(), 4, 90)
    made, names = _Search(request), ("actor.update", "actor.rollout")
    works = {name: SimpleNamespace(work=Work(layout=ParallelLayout(dp=4), micro_batch_tokens=0)) for name in names}
    one = ModelSet(meshes=names, ranks=range(4))
    made._learn(rank_memory(parts, (), 0, is_offloaded=False), SimpleNamespace(placement=(one,)), works)
    assert list(made._conflicts) == [one]
    (conflict,) = made._conflicts[one]
    assert conflict <= {(name, works[name].work) for name in names}
    return {name for name, _ in conflict}


def test_a_rollout_is_not_found_too_large_without_the_update_beside_it(recipe):
    """Of its weights those count that the update has not; with another update it has others."""
    update, rollout = (
        MeshMemory(mesh="actor.update", weights=10),
        MeshMemory(mesh="actor.rollout", weights=5, cache=100),
    )
    assert learned(recipe, update, rollout) == {"actor.update", "actor.rollout"}


@pytest.mark.parametrize("tower", [50, 95])
def test_what_does_not_fit_beside_a_vision_tower_is_learned(recipe, tower):
    """The tower is there whatever is chosen: too large beside the update, or alone."""
    update, rollout = MeshMemory(mesh="actor.update", weights=45), MeshMemory(mesh="actor.rollout", weights=5)
    assert learned(recipe, MeshMemory(mesh="images", weights=tower), update, rollout) == {"actor.update"}


@pytest.mark.parametrize("gpus", ["1", "4"])
def test_what_does_not_fit_is_said_of_a_recipe_whose_rollout_only_validates(capsys, gpus):
    words = ("sft", "model.dtype=bf16", "cluster.memory_budget_gb=0.0005", "--gpus", gpus)
    assert cli.main(["plan", "auto", *words]) == 2
    assert f"nothing fits {gpus} GPUs, of which each may need 0.0005 GB" in capsys.readouterr().err
