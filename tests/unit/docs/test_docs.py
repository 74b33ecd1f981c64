"""What the documentation shows is what the code does: commands, recipes, links, tables, parts made from code."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hybridflow
from hybridflow import cli
from hybridflow.launch.site import load_site
from hybridflow.observe.phases import PHASE_OF
from hybridflow.recipe.load import load_recipe, recipe_for_ranks, recipe_from_dict
from hybridflow.trainer.step_metrics import COMPUTING, DISTRIBUTIONS
from tests.support.known_models import write_models
from tests.support.machines import write_machine, write_run
from tests.support.recipes import SEES, write_config

ROOT = Path(__file__).parents[3]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
PAGES |= {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")}


def code_lines(text):
    """Lines of the indented blocks, without comments behind two spaces."""
    return [re.split(r"\s\s+#", line.strip())[0] for line in text.splitlines() if line.startswith("    ")]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_tool(name, *argv):
    """Run a tool with the package of this clone, whichever is installed."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / name), *argv]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def anchors(text):
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


COMMANDS = sorted({line for text in PAGES.values() for line in code_lines(text)} | set(code_lines(cli._EXAMPLES)))


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
            assert path.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{page} links to {target}"


def names_in(module):
    """Names that a module has, and modules of a package, without importing it."""
    place = ROOT.joinpath(*module.split("."))
    tree = ast.parse(
        (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text(encoding="utf-8")
    )
    found = {path.stem for path in place.glob("*")}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        found |= {alias.asname or alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)}
        found |= {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
    # Packages of the Python API give its names when they are asked for.
    return found | set(hybridflow.__all__) if "__getattr__" in found else found


def test_what_programs_import_is_there():
    told = {pair for text in PAGES.values() for pair in re.findall(r"^ *from (hybridflow\S*) import (.+)$", text, re.M)}
    assert ("hybridflow.parallel.world", "join_world, open_store") in told and len(told) > 30
    for module, names in told:
        for name in names.partition("#")[0].strip("() ,").split(","):
            assert name.split(" as ")[0].strip() in names_in(module), f"from {module} import {names}"


@pytest.fixture(scope="module")
def folder_of_a_user(tmp_path_factory):
    """A folder with the models and data that commands name."""
    folder = tmp_path_factory.mktemp("user")
    write_models(folder)
    write_machine(folder / ".config/hybridflow/measured.yaml")
    write_run(folder / "runs/short")
    model, data = folder / "models/Llama-3.1-8B-Instruct", folder / "data/train.jsonl"
    given = ["--algorithm", "grpo", "--model", str(model), "--data", str(data), "--nodes", "2"]
    given += ["--reward", "exact_match"]
    assert cli.main(["init", str(folder / "recipe.yaml"), *given]) == 0
    (folder / "geometry.yaml").write_text(blocks(PAGES["docs/images.md"], "yaml")[0])
    sees = write_config(folder / "models/Qwen2.5-VL-3B-Instruct", SEES)
    processor = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    (sees / "preprocessor_config.json").write_text(json.dumps(processor))
    for name in ("launch", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("command", [line for line in COMMANDS if re.search(r"\bhybridflow (train|plan)\b", line)])
def test_commands_are_understood_and_their_recipes_are_valid(command, folder_of_a_user, monkeypatch, capsys):
    monkeypatch.chdir(folder_of_a_user)
    monkeypatch.setenv("HOME", str(folder_of_a_user))
    words = shlex.split(command)
    words = words[words.index("hybridflow") + 1 :]
    if words[0] == "train":
        # Files of these names are the reader's, which a dry run would open.
        asked = cli._parse(words)
        words = ["plan", "job", asked.recipe, *asked.overrides]
    assert cli.main(words) == 0, capsys.readouterr().err


MODULES = {
    "init": "hybridflow.launch.init",
    "launch": "hybridflow.launch.command",
    "report": "hybridflow.report.command",
    "convert": "hybridflow.checkpoint.convert.command",
    "doctor": "hybridflow.doctor.command",
    "generate": "hybridflow.serving.command",
    "serve": "hybridflow.serving.command",
    "status": "hybridflow.observe.status_command",
}


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if re.search(rf"\bhybridflow ({'|'.join(MODULES)})\b", line)]
)
def test_other_commands_are_understood(command):
    words = shlex.split(command.partition(" | ")[0])
    if "--wrap" in words:
        words = shlex.split(words[words.index("--wrap") + 1].partition(";")[0])
    words = words[words.index("hybridflow") + 1 :]
    run = cli._parse(words).run
    assert getattr(run, "func", run).__module__ == MODULES[words[0]]


def test_examples_of_site_settings_and_fallbacks_are_valid(tmp_path):
    site, fallbacks = blocks(PAGES["docs/slurm.md"], "yaml")
    (tmp_path / "site.yaml").write_text(site)
    assert load_site(tmp_path / "site.yaml").time == "24:00:00"
    (tmp_path / "recipe.yaml").write_text((ROOT / "launch/recipes/quickstart.yaml").read_text() + fallbacks)
    layouts = ["actor.update={tp: 4, dp: 8}", "actor.rollout={tp: 2, dp: 16}", "critic.layout={tp: 4, dp: 8}"]
    asked = tmp_path / "recipe.yaml", ["cluster.ranks=32", *layouts]
    made = [recipe_for_ranks(load_recipe(*asked), *asked, ranks) for ranks in (32, 24, 8)]
    assert [recipe.cluster.ranks for recipe in made] == [32, 16, 8]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(("./", "tests/", "launch/"))])
def test_scripts_are_there_and_quickstart_takes_its_settings(command, capsys):
    script, *words = shlex.split(command)
    assert (ROOT / script).is_file() and (ROOT / script).stat().st_mode & 0o100
    if script.endswith("quickstart.sh"):
        assert cli.main(["train", "quickstart", "--resume", "--dry-run", *words]) == 0, capsys.readouterr().err


def test_every_kind_of_command_was_found():
    assert {line.split()[0] for line in COMMANDS} >= {"hybridflow", "torchrun", "mpirun", "srun", "./tests/run.sh"}


def test_recipe_built_part_by_part_is_whole_and_valid(folder_of_a_user, monkeypatch):
    short, *parts = blocks(PAGES["docs/recipes.md"], "yaml")
    monkeypatch.chdir(folder_of_a_user)
    assert recipe_from_dict(yaml.safe_load(short)).rollout.group_size == 8
    recipe = recipe_from_dict(yaml.safe_load("".join(parts)), source="docs/recipes.md")
    assert recipe.run_dir == "runs/sums" and len(parts) > 4
    for example in blocks(PAGES["docs/recipes.md"], "python"):
        ast.parse(example)


def test_parts_made_from_the_code_are_up_to_date():
    done = run_tool("write_docs.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


CRITICS = ("critic", "cost_critic")


def constant(path, name):
    """A table of a module, which is not imported since it would bring in torch."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in found if ast.unparse(node.targets[0]) == name)


def test_table_of_metrics_is_what_the_trainer_writes():
    folders = [ROOT / "hybridflow" / name for name in ("roles", "sampling", "placement")]
    files = [path for folder in folders for path in folder.glob("*.py")] + [ROOT / "hybridflow/trainer/step_metrics.py"]
    files += [ROOT / "hybridflow/trainer" / name for name in ("trainer.py", "record.py", "checkpoints.py")]
    files += [ROOT / "hybridflow/checkpoint/saver.py"]
    texts = [
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    written = {text for text in texts if re.fullmatch(r"[a-z_]+/[a-z_0-9]*[a-z0-9]", text)}
    written |= set(DISTRIBUTIONS)
    calls = constant("hybridflow/roles/reward.py", "CALL_METRICS")
    written |= {f"{role}/{name}" for role in ("reward", "cost") for name in calls}
    written |= {f"{role}/{name}" for role in CRITICS for name in ("loss", "clip_share")}
    written |= {f"{role}/{name}" for role in ("actor", *CRITICS) for name in ("lr", "grad_norm", "grad_norm_max")}
    phases = {*PHASE_OF.values(), "reshard"}
    written |= {name for phase in phases for name in (f"time/{phase}_s", f"memory/{phase}_bytes")}
    written |= {name for phase in COMPUTING for name in (f"throughput/{phase}_tokens_per_s", f"mfu/{phase}")}
    rows = re.findall(r"^\| `([a-z_]+/[a-z_0-9]+)` \| (.+?) \| (.+?) \| .+ \|$", PAGES["docs/metrics.md"], flags=re.M)
    told = [name for name, _, _ in rows]
    for name, unit, kind in rows:
        assert kind in ("real", "count"), name
        assert (unit in ("s", "tokens/s", "FLOP/s")) == name.endswith("_s"), name
        assert (unit == "bytes") == name.endswith("bytes") and (not name.endswith("share") or unit == "share"), name
    # The warm start measures its loss, and no step of the log is there to take it.
    assert sorted(told) == sorted(written - {"warm_start/loss"})


def recipe_keys():
    """Dotted keys of every recipe section, as docs/keys.md lists them."""
    for part in re.split(r"^### ", PAGES["docs/keys.md"], flags=re.M)[1:]:
        heading, _, table = part.partition("\n")
        for name in re.findall(r"^\| `(\w+)` \|", table, flags=re.M):
            yield from (f"{section}.{name}" for section in re.findall(r"`([\w.]+)`", heading) or [""])


def test_the_glossary_names_keys_and_metrics_that_exist():
    known = {key.removeprefix(".") for key in recipe_keys()}
    known |= set(re.findall(r"^\| `([a-z_]+/[a-z_0-9]+)` \|", PAGES["docs/metrics.md"], flags=re.M))
    rows = re.findall(r"^\| (.+) \| .+ \| (.+) \|$", PAGES["docs/glossary.md"], flags=re.M)[1:]
    words = [word.replace("`", "").lower() for word, _ in rows]
    assert len(rows) > 100 and words == sorted(words)
    for word, places in rows:
        named = re.findall(r"`([^`]+)`", places)
        assert set(named) <= known and (named or "](" in places), word


def test_the_dashboard_asks_for_metrics_that_there_are():
    board = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))
    told = re.findall(r"^\| `([a-z_]+/[a-z_0-9]+)` \|", PAGES["docs/metrics.md"], flags=re.M)
    known = {f"hybridflow_{name.replace('/', '_')}": name for name in told}
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 30 and len(board["panels"]) == 12
    for target in targets:
        metric = target["expr"].removesuffix('{run=~"$run"}')
        assert target["legendFormat"] == f"{{{{run}}}} {known[metric]}"


@pytest.mark.parametrize(
    "tool",
    [
        path.relative_to(ROOT / "tools").as_posix()
        for path in sorted((ROOT / "tools").glob("**/*.py"))
        # Modules of a package are parts of a tool.
        if not (path.parent / "__init__.py").exists()
    ],
)
def test_tools_tell_what_they_do_with_examples(tool):
    done = run_tool(tool, "--help")
    assert done.returncode == 0, done.stderr
    examples = [line for line in done.stdout.splitlines() if line.startswith(f"  python tools/{tool}")]
    assert examples, f"{tool} --help shows no example"
