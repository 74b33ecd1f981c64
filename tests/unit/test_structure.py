"""The direction of imports, and what stays light."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hybridflow"

# Packages and root modules, each of which imports only from those before it. docs/architecture.md shows the same order.
ORDER = [
    *("errors", "exit_status", "plugins", "programs", "shipped", "foreign", "sections"),
    *("layout", "families", "config"),
    *("observe", "metrics", "parallel"),
    *("algorithms", "dataflow", "flows", "reshard"),
    *("data", "models", "checkpoint", "rollout", "rewards"),
    *("report", "recipe"),
    *("placement", "sampling", "roles"),
    *("mapping", "trainer"),
    *("testing", "api", "doctor", "launch", "serving", "cli", "__main__"),
]

# Imported on login nodes and before ranks start: none may bring in torch, MPI or the HTTP server.
LIGHT = [
    *(
        "errors",
        "exit_status",
        "plugins",
        "programs",
        "foreign",
        "sections",
        "families.tables",
        "families.config_json",
        "checkpoint.model_info",
        "config.recipe",
        "recipe.load",
        "flows.registry",
        "layout.parallel_layout",
        "layout.mesh",
        "parallel.start",
        "parallel.signals",
        "parallel.scontrol",
        "parallel.secret",
        "parallel.handshake",
        "parallel.keeper",
        "parallel.links",
        "parallel.cause",
        "parallel.process",
        "parallel.hub",
        "parallel.watch",
        "observe.activity",
        "observe.rank_log",
    ),
    *("dataflow.graph", "dataflow.schedule", "dataflow.compiler", "reshard.plan", "reshard.optimizer"),
    *("reshard.report", "reshard.diagram"),
    *("observe.metrics", "observe.summary", "observe.starts", "observe.timeline", "observe.timeline_file"),
    *("observe.distribution", "observe.expert_loads", "observe.work", "models.flops", "metrics"),
    *(
        "observe.table",
        "observe.samples_text",
        "observe.status",
        "observe.status_command",
        "observe.status_file",
        "observe.status_text",
    ),
    *(
        "data.order",
        "data.arithmetic",
        "data.pieces",
        "data.fast",
        "data.trial",
        "data.limited",
        "data.tokenizer",
        "data.rows",
        "data.files",
        "data.readers",
        "data.parquet",
        "data.hdf5",
        "data.arrays",
        "data.saved",
        "data.chat",
        "data.chat_process",
        "data.image_process",
        "data.prompts",
        "data.preferences",
        "data.shaping",
        "data.row_store",
        "data.part",
        "data.prepare",
        "data.mixture",
        "data.problems",
        "data.provider",
        "data.live",
        "data.spool",
        "data.topic",
        "data.kafka",
        "data.queues",
        "doctor.command",
        "doctor.compare",
        "doctor.rounds",
        "rollout.archive",
        "rollout.log_file",
        "rollout.learned",
        "report.command",
        "report.page",
        "rollout.blocks",
        "rollout.scheduler",
        "rollout.request",
        "rollout.texts",
        "rollout.calls",
        "rollout.engines.wire",
        "rewards",
        "rewards.sample",
        "rewards.arguments",
        "rewards.functions",
        "rewards.total",
        "rewards.runners",
        "rewards.scorer",
        "rewards.service",
        "rewards.sandbox",
        "rewards.confine",
        "rewards.asserts",
        "rewards.code",
        "rewards.notation",
        "rewards.maths",
        "rewards.kinds",
        "recipe.inputs",
        "recipe.dry_run",
        "recipe.run_dir",
        "trainer.warnings",
        "mapping.memory",
        "mapping.estimate_command",
        "mapping.step_command",
        "launch",
        "launch.init",
        "launch.init_fields",
        "launch.local",
        "launch.site",
        "launch.batch",
        "launch.checks",
        "launch.snapshot",
        "launch.submit",
        "launch.command",
        "parallel.rank",
        "serving.command",
        "serving.options",
        "serving.prompts",
        "serving.images",
        "serving.results",
        "serving.files",
        "serving.api",
        "serving.desk",
        "cli",
    ),
]

# One third-party package, one door.
DOORS = [
    "sentencepiece",
    "tokenizers",
    "h5py",
    "mpi4py",
    "transformer_engine",
    "apex",
    "vllm",
    "wandb",
    "jinja2",
    "math_verify",
    "transformers",
    "fsspec",
    "pyarrow",
    "datasets",
    "confluent_kafka",
    "starlette",
    "uvicorn",
]


@cache
def modules():
    """Every module of the package: dotted name below ``hybridflow`` → syntax tree."""
    return {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def dotted(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(name):
    """Full names that a module imports anywhere; ``from a import b`` counts as ``a.b``."""
    found = []
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}: write it out"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own_imports(name):
    """Modules of ours that a module imports."""
    for full in imports(name):
        if full.startswith("hybridflow."):
            target = full.removeprefix("hybridflow.")
            target = target if target in modules() else target.rpartition(".")[0]
            if target not in ("", name):  # "" is the package itself: its version
                yield target


def level(name):
    """Place of a module's package in ORDER."""
    package = name.partition(".")[0]
    assert package in ORDER, f"hybridflow/{package} is not in ORDER: add it here and to the table in the docs"
    return ORDER.index(package)


def test_imports_go_to_packages_above():
    edges = [(name, target) for name in modules() if name for target in own_imports(name)]
    wrong = [f"{name} imports {target}" for name, target in edges if level(target) > level(name)]
    assert wrong == [], "the packages of what is imported come later in ORDER"


def test_order_lists_packages_that_exist_and_is_the_table_of_the_docs():
    assert sorted(ORDER) == sorted({name.partition(".")[0] for name in modules()} - {""})
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("<!-- packages -->")[2].partition("<!-- end of packages -->")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)", cell)]
    assert named == [name for name in ORDER if name != "__main__"]


def test_a_training_step_is_read_in_few_files():
    """From the README to the optimizer step, as docs/architecture.md lists it."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("<!-- path -->")[2].partition("<!-- end of path -->")[0]
    rows = re.findall(r"^\| (\d) \| \[([\w./]+)\]", table, flags=re.MULTILINE)
    files = [ROOT / name for _, name in rows]
    assert files[0] == ROOT / "README.md" and files[-1] == PACKAGE / "models/training.py"
    assert "hybridflow/trainer/loop.py" in files[0].read_text(encoding="utf-8")
    assert len(files) <= 12 and int(rows[-1][0]) <= 6
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 2500


def test_no_import_runs_in_a_circle():
    pending = {name: set(own_imports(name)) for name in modules()}
    while pending:
        free = [name for name, needed in pending.items() if not needed & pending.keys()]
        assert free, f"modules that import each other are among {sorted(pending)}"
        for name in free:
            del pending[name]


@pytest.mark.parametrize("package", DOORS)
def test_one_third_party_package_one_door(package):
    doors = [name for name in modules() if any(f"{full}.".startswith(f"{package}.") for full in imports(name))]
    assert len(doors) <= 1, f"{package} is imported by {doors}; go through one of them"


def test_light_modules_bring_in_neither_torch_nor_mpi_nor_the_http_server():
    names = ["hybridflow", *(f"hybridflow.{name}" for name in LIGHT)]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    heavy = {'torch', 'megatron', 'mpi4py', 'starlette', 'uvicorn'} & sys.modules.keys()\n"
    code += "    assert not heavy, (name, heavy)\n"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_says_what_it_is():
    assert [name for name, tree in modules().items() if name and not ast.get_docstring(tree)] == []


def test_no_pickle_no_eval_no_shell():
    for name, tree in modules().items():
        pickles = any(full.split(".")[0] in ("pickle", "dill", "cloudpickle") for full in imports(name))
        # Megatron's checkpoints are pickles: one module reads them, and never runs what they name.
        assert not pickles or name == "checkpoint.formats.unpickle", name
        # docs/formats.md says why torch's own loader reads none of them, with weights_only=True neither.
        loaders = ("torch.load", "torch.save", "torch.serialization", "torch._weights_only_unpickler")
        assert not any(f"{full}.".startswith(f"{loader}.") for full in imports(name) for loader in loaders), name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                # One runs programs that nobody has read, which is what the sandbox around it is for.
                runs = isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
                assert not runs or name == "rewards.asserts", (name, node.lineno)
                assert not any(keyword.arg == "shell" for keyword in node.keywords), (name, node.lineno)
                assert not ast.unparse(node.func).startswith(loaders), (name, node.lineno)


def test_names_of_typing_are_there_in_the_oldest_python():
    """Python 3.10 is supported, and these came after it."""
    newer = {"Self", "assert_never", "reveal_type", "Never", "LiteralString", "override", "Unpack", "Required"}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "typing":
                assert not newer & {alias.name for alias in node.names}, (name, node.lineno)
