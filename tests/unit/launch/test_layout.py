"""``layout: auto``: what a recipe becomes before it is trained or submitted."""

import pytest

from hybridflow import cli
from hybridflow.errors import ConfigError
from hybridflow.launch.layout import with_layouts
from hybridflow.parallel.start import Start
from hybridflow.recipe.load import load_recipe
from hybridflow.trainer.plan import plan_job
from tests.support.machines import write_machine


@pytest.fixture
def asked(tmp_path):
    return ["layout=auto", f"cluster.hardware={write_machine(tmp_path / 'machine.yaml')}"]


def test_a_recipe_with_layouts_stays_as_it_is():
    recipe = load_recipe("quickstart")
    assert with_layouts(recipe, "quickstart", ["seed=2"], 4) == (recipe, ["seed=2"], None)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_recipe_has_the_layouts_for_the_ranks_that_are_there(asked, num_ranks, capsys):
    found, overrides, line = with_layouts(load_recipe("quickstart", asked), "quickstart", asked, num_ranks)
    assert found.layout is None and found.cluster.ranks == num_ranks
    assert found == load_recipe("quickstart", overrides)
    assert {mesh.layout.world_size for mesh in plan_job(found).meshes.values()} <= {1, 2, 3, num_ranks}
    assert line.startswith("layout: auto: ") and "responses of 2" in line
    machine = asked[1].partition("=")[2]
    assert cli.main(["plan", "auto", "quickstart", "--hardware", machine, "--gpus", str(num_ranks)]) == 0
    # What the command would choose, and no other.
    told = capsys.readouterr().out
    assert all(f"  {override}\n" in told for override in overrides[3:] if not override.endswith("=null"))


def test_what_cannot_be_searched_is_refused(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load_recipe("quickstart", ["layout=auto"])
    with pytest.raises(ConfigError, match="doctor --measure"):
        with_layouts(recipe, "quickstart", ["layout=auto"], 4)
    with pytest.raises(ConfigError, match="8 ranks need more than one node of 4"):
        with_layouts(load_recipe("quickstart", asked), "quickstart", asked, 8)
    with pytest.raises(ConfigError, match="layout: auto: is for `hybridflow train`"):
        plan_job(recipe)


def test_where_nothing_fits_a_rank_does_not_search_for_what_would(asked, monkeypatch):
    searched = []
    monkeypatch.setattr("hybridflow.mapping.auto.search", lambda request: searched.append(request))
    recipe = load_recipe("quickstart", asked)
    with pytest.raises(ConfigError, match=r"nothing fits 4 GPUs, .* `hybridflow plan auto` with this recipe tells how"):
        with_layouts(recipe, "quickstart", asked, 4)
    assert len(searched) == 1


def test_a_job_is_searched_for_the_nodes_that_are_asked_for(asked, capsys):
    # The recipe itself has four ranks.
    words = ["launch", "slurm", "quickstart", *asked, "cluster.ranks_per_node=2", "--time", "1:00:00", "--print"]
    assert cli.main([*words, "--nodes", "3"]) == 2
    assert "6 ranks are no whole nodes of 4" in capsys.readouterr().err
    assert cli.main([*words, "--nodes", "1"]) == 0
    printed = capsys.readouterr()
    assert "1 node × 2 = 2 ranks: layout: auto: " in printed.err
    assert "#SBATCH --nodes=1" in printed.out


def test_a_job_searches_with_the_ranks_of_its_nodes_as_launch_did(asked, tmp_path, monkeypatch, capsys):
    # The machine has four on each; the network between nodes of two is slow.
    machine = write_machine(tmp_path / "even.yaml", crowding=1.0, network_bandwidth=1e6, network_latency=1e-2)
    (tmp_path / "site.yaml").write_text("ranks_per_node: 2\n")
    words = ["quickstart", asked[0], f"cluster.hardware={machine}"]
    launch = ["launch", "slurm", *words, "--nodes", "2", "--site", str(tmp_path / "site.yaml")]
    assert cli.main([*launch, "--time", "1:00:00", "--print"]) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "layout: auto: " in line]
    seen = []
    monkeypatch.setattr(cli, "find_start", lambda: Start(launcher="slurm", size=4, ranks_per_node=2))
    monkeypatch.setattr(cli, "_train_rank", lambda recipe, *_, **__: seen.append(recipe) or 0)
    monkeypatch.setattr(cli, "CaughtSignals", lambda **_: None)
    assert cli.main(["train", *words]) == 0
    (found,) = [line for line in capsys.readouterr().err.splitlines() if "layout: auto: " in line]
    assert told.partition("4 ranks: ")[2].partition("; the job")[0] == found.partition(": ")[2]
    # What the recipe says counts.
    assert cli.main(["train", *words, "cluster.ranks_per_node=4"]) == 0
    assert found not in capsys.readouterr().err and len(seen) == 2


def test_a_single_task_is_a_rank_of_a_recipe_with_fallbacks(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(cli, "is_launched", lambda: False)
    monkeypatch.setattr(cli, "find_start", lambda: Start(launcher="alone"))
    monkeypatch.setattr(
        cli, "_train_rank", lambda recipe, start, *_, **__: seen.append((recipe.cluster.ranks, start.size)) or 0
    )
    monkeypatch.setattr(cli, "train_here", lambda recipe, _: seen.append((recipe.cluster.ranks, "here")) or 0)
    monkeypatch.setattr(cli, "CaughtSignals", lambda **_: None)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    one = "{ranks: 1, overrides: ['actor.update={dp: 1}', 'actor.rollout={dp: 1}', 'critic.layout={dp: 1}']}"
    own = ["cluster.ranks=2", "actor.update={dp: 2}", "actor.rollout={dp: 2}", "critic.layout={dp: 2}"]
    for fallbacks in ("[]", f"[{one}]"):
        assert cli.main(["train", "quickstart", *own, f"fallbacks={fallbacks}"]) == 0, capsys.readouterr().err
    monkeypatch.delenv("SLURM_STEP_ID")
    assert cli.main(["train", "quickstart", *own, f"fallbacks=[{one}]"]) == 0
    assert seen == [(2, "here"), (1, 1), (2, "here")]
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert cli.main(["train", "quickstart", *own, f"fallbacks=[{one.replace('1', '2')}]"]) == 2
    assert "single task is 1 rank" in capsys.readouterr().err


def test_a_plan_shows_what_was_chosen(asked, capsys):
    assert cli.main(["plan", "job", "quickstart", *asked]) == 0
    printed = capsys.readouterr()
    assert "layout: auto: " in printed.err and "actor.update tp" in printed.out
