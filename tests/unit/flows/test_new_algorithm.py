"""Adding an algorithm takes one file of stages and defaults, a formula, and a recipe: at most 30 lines together."""

import yaml

from hybridflow import flows
from hybridflow.algorithms.advantages import GROUP_ESTIMATORS
from hybridflow.dataflow.schedule import Call, walk
from hybridflow.flows import registry
from hybridflow.recipe.load import load_recipe
from hybridflow.shipped import shipped
from hybridflow.trainer.plan import plan_job

FILE = '''\
"""Best against rest: a response learns from the distance to the best of its group."""

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.flows.algorithm import KL_LOSS, ONLINE, Algorithm, scored

ALGORITHM = Algorithm(
    name="best-of-group", step=scored("best_of_group"), traits=AlgorithmTraits(reads=ONLINE, defaults={"kl": KL_LOSS})
)
'''
FORMULA = """\
def best_of_group(scores, groups, lengths):
    best = {group: max(scores[groups == group]) for group in groups.tolist()}
    return scores - scores.new_tensor([best[group] for group in groups.tolist()])
"""
CHANGES = {"name": "best-of-group", "algorithm": "best-of-group"}


def test_a_file_a_formula_and_a_recipe_are_enough(tmp_path, monkeypatch):
    (tmp_path / "best_of_group.py").write_text(FILE)
    monkeypatch.setattr(flows, "__path__", [*flows.__path__, str(tmp_path)])
    for name, algorithm in registry.load_algorithms().items():
        monkeypatch.setitem(registry.ALGORITHMS, name, algorithm)
    scope = {}
    exec(compile(FORMULA, "formula", "exec"), scope)
    monkeypatch.setitem(GROUP_ESTIMATORS, "best_of_group", scope["best_of_group"])
    # The recipe is grpo's with two lines changed.
    values = yaml.safe_load((shipped("launch/recipes") / "grpo.yaml").read_text(encoding="utf-8"))
    (tmp_path / "best.yaml").write_text(yaml.safe_dump({**values, **CHANGES}))
    assert len(FILE.splitlines()) + len(FORMULA.splitlines()) + len(CHANGES) <= 30

    recipe = load_recipe(tmp_path / "best.yaml")
    assert recipe.kl.place == "loss" and recipe.traits.reads == registry.ALGORITHMS["grpo"].traits.reads
    calls = [each.name for each in walk(plan_job(recipe).train) if isinstance(each, Call)]
    assert calls[:2] == ["actor.sample", "reward.score"] and "advantage.best_of_group" in calls
