"""The direction of imports, and what stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each imports only from those before it. Geometry comes before config, which checks a recipe's layouts against its
# ranks and orders the ranks of the rollout; so does what reads a model's settings from a directory that a recipe names.
ORDER = [
    *(
        "errors",
        "exit_status",
        "plugins",
        "presets",
        "programs",
        "sections",
        "observe.doing",
        "observe.rank_log",
        "parallel.layout",
        "parallel.mesh",
    ),
    *(
        "families",
        "reshard.spec",
        "reshard.overlap",
        "checkpoint.assets",
        "checkpoint.console",
        "checkpoint.manifest",
        "checkpoint.settings",
        "config",
    ),
    *("parallel", "algorithms", "observe", "dataflow", "reshard", "data", "models", "checkpoint"),
    # What makes a source of weights, as the formats of checkpoints do, of a model in memory.
    *("models.given_megatron", "models.given"),
    *("rollout", "rewards", "roles", "testing", "mapping", "trainer", "api"),
    *("doctor", "launch", "serving", "cli", "__main__"),
]

# Imported on login nodes and before ranks start: none may bring in torch or MPI.
LIGHT = [
    *(
        "errors",
        "exit_status",
        "plugins",
        "presets",
        "programs",
        "sections",
        "families.tables",
        "families.config_json",
        "checkpoint.settings",
        "config",
        "parallel.layout",
        "parallel.mesh",
        "parallel.start",
        "parallel.signals",
        "parallel.scontrol",
        "parallel.job_end",
        "parallel.links",
        "parallel.cause",
        "parallel.process",
        "parallel.hub",
        "parallel.watch",
        "observe.doing",
        "observe.rank_log",
    ),
    *("dataflow.graph", "dataflow.schedule", "dataflow.compiler", "reshard.plan", "reshard.optimizer"),
    *("reshard.report", "reshard.draw"),
    *("observe.metrics", "observe.report", "observe.starts", "observe.timeline", "observe.timeline_file"),
    *("observe.distribution", "observe.work", "models.flops"),
    *("observe.table", "observe.status", "observe.status_command", "observe.status_file", "observe.status_text"),
    *(
        "data.order",
        "data.arithmetic",
        "data.pieces",
        "data.fast",
        "data.tokenizer",
        "data.rows",
        "data.files",
        "data.readers",
        "data.parquet",
        "data.hdf5",
        "data.saved",
        "data.chat",
        "data.chat_process",
        "data.prompts",
        "data.preferences",
        "data.shaping",
        "data.row_store",
        "data.prepare",
        "data.mixture",
        "data.problems",
        "data.provider",
        "data.live",
        "data.spool",
        "data.topic",
        "data.kafka",
        "doctor.command",
        "doctor.compare",
        "doctor.rounds",
        "data.rollout_log",
        "rollout.blocks",
        "rollout.scheduler",
        "rollout.request",
        "rollout.texts",
        "rollout.calls",
        "rollout.engines.wire",
        "rewards",
        "rewards.sample",
        "rewards.functions",
        "rewards.total",
        "rewards.runners",
        "rewards.scorer",
        "rewards.service",
        "rewards.sandbox",
        "rewards.confine",
        "rewards.asserts",
        "rewards.code",
        "rewards.maths",
        "rewards.kinds",
        "mapping.memory",
        "launch",
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
        "serving.results",
        "serving.files",
        "serving.api",
        "serving.desk",
        "serving.endpoint",
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
]


def modules():
    """Every module of the package: dotted name below ``hybridflow`` → syntax tree."""
    files = [*(ROOT / "hybridflow").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]
    return {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "hybridflow" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = modules()


def imports(tree):
    """Full names that a module imports anywhere; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}: write it out"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name):
    """Modules of ours that a module imports."""
    for full in imports(MODULES[name]):
        if full.startswith("hybridflow."):
            target = full.removeprefix("hybridflow.")
            target = target if target in MODULES else target.rpartition(".")[0]
            if target not in ("", name):  # "" is the package itself: its version
                yield target


def level(name):
    """Place in ORDER; the longest entry that names the module or a package around it."""
    entries = [entry for entry in ORDER if f"{name}.".startswith(f"{entry}.")]
    assert entries, f"hybridflow/{name} is not in ORDER: add it here and to the table of packages in the docs"
    return ORDER.index(max(entries, key=len))


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {""}))
def test_imports_go_to_what_stands_before(name):
    for target in own_imports(name):
        assert level(target) <= level(name), f"{name} imports {target}, which comes after it in ORDER"


def test_no_import_runs_in_a_circle():
    pending = {name: set(own_imports(name)) for name in MODULES}
    while pending:
        free = [name for name, needed in pending.items() if not needed & pending.keys()]
        assert free, f"modules that import each other are among {sorted(pending)}"
        for name in free:
            del pending[name]


@pytest.mark.parametrize("package", DOORS)
def test_one_third_party_package_one_door(package):
    doors = [
        name for name, tree in MODULES.items() if any(f"{full}.".startswith(f"{package}.") for full in imports(tree))
    ]
    assert len(doors) <= 1, f"{package} is imported by {doors}; go through one of them"


def test_light_modules_bring_in_neither_torch_nor_mpi():
    names = ["hybridflow", *(f"hybridflow.{name}" for name in LIGHT if name in MODULES)]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    heavy = {'torch', 'megatron', 'mpi4py'} & sys.modules.keys()\n    assert not heavy, (name, heavy)\n"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(name for name, tree in MODULES.items() if name))
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(MODULES[name]), f"hybridflow/{name} has no docstring"


def test_no_pickle_no_eval_no_shell():
    for name, tree in MODULES.items():
        pickles = any(full.split(".")[0] in ("pickle", "dill", "cloudpickle") for full in imports(tree))
        # Megatron's checkpoints are pickles: one module reads them, and never runs what they name.
        assert not pickles or name == "checkpoint.formats.unpickle", name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                # One runs programs that nobody has read, which is what the sandbox around it is for.
                runs = isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
                assert not runs or name == "rewards.asserts", (name, node.lineno)
                assert not any(keyword.arg == "shell" for keyword in node.keywords), (name, node.lineno)
                torch_pickle = ast.unparse(node.func) in ("torch.save", "torch.load")
                assert not torch_pickle, (name, node.lineno)


def test_names_of_typing_are_there_in_the_oldest_python():
    """Python 3.10 is supported, and these came after it."""
    newer = {"Self", "assert_never", "reveal_type", "Never", "LiteralString", "override", "Unpack", "Required"}
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "typing":
                assert not newer & {alias.name for alias in node.names}, (name, node.lineno)
