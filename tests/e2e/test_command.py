"""The command line itself, and what a login node does with it."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hybridflow import cli
from hybridflow.exit_status import DONE, TARGET
from tests.e2e.commands import run_command, write_recipe

ROOT = Path(__file__).parents[2]


def examples(text):
    """The command lines in a help text."""
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


def test_help_shows_examples_and_exit_statuses(tmp_path):
    for argv, shown in ((["--help"], cli._EXAMPLES), (["train", "--help"], cli._TRAIN_EXAMPLES)):
        done = run_command(argv, tmp_path)
        assert done.codes == (0,) and all(example in done.out for example in examples(shown))
        assert re.search(r"exit status: 0 done.* 1 a rank was lost.* 2 an error.* 75 saved", done.out, re.DOTALL)


def test_settings_stand_on_both_sides_of_an_option():
    arguments = cli._parse(["train", "tiny", "a=1", "--resume", "b=2"])
    assert arguments.overrides == ["a=1", "b=2"] and arguments.resume


@pytest.mark.parametrize("argv", [[], ["train"], ["train", "tiny", "--resum3"]])
def test_wrong_usage_is_refused_with_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as end:
        cli._parse(argv)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hybridflow")


@pytest.mark.parametrize(
    "command", [["plan", "job", "quickstart"], ["train", "split", "--dry-run"], ["plan", "job", "grpo", "--mermaid"]]
)
def test_plan_starts_nothing_and_imports_no_torch(tmp_path, command):
    code = """
    import os, subprocess, sys
    from hybridflow import cli
    subprocess.Popen = os.fork = os.posix_spawn = None
    status = cli.main(sys.argv[1:])
    assert not {"torch", "megatron", "mpi4py"} & sys.modules.keys()
    sys.exit(status)
    """
    done = run_command(command, tmp_path, program=[sys.executable, "-c", textwrap.dedent(code)])
    assert done.codes == (0,) and done.err == "" and "actor.sample" in done.out.replace("\\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wheel_runs_outside_of_the_clone(tmp_path):
    """Installed into an environment that takes its dependencies from this one, and nothing from the clone."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    ignored = ("runs", ".venv*", ".git", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored))
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run([*pip, *wheel], check=True)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin/python"
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", next(tmp_path.glob("hybridflow-*.whl"))], check=True
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    folder = tmp_path / "empty"
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*argv):
        return run_command(argv, folder, program=[environment / "bin/hybridflow"], environ=environ)

    where = "import hybridflow, hybridflow.launch; print(hybridflow.__file__, hybridflow.launch.__file__)"
    done = run_command(["-c", where], folder, program=[python], environ=environ)
    assert all(path.startswith(str(packages)) for path in done.out.split()), done.out
    done = run("plan", "job", "quickstart")
    assert done.codes == (0,) and "actor.sample" in done.out
    small = ["trainer.steps=1", "warm_start.steps=2", "trainer.global_batch_size=16", "trainer.mini_batch_size=8"]
    done = run(
        "train", "quickstart", *small, "trainer.num_validation=16", "run_dir=here", "cluster.start_deadline_s=300"
    )
    assert done.codes == (0,) and done.err == "", done.err
    assert (folder / "here/summary.json").exists() and sorted(path.name for path in folder.iterdir()) == [
        "here",
        "runs",
    ]

    # The console script, too, finds rewards in the working directory.
    write_recipe(folder)
    one = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}", "trainer.steps=1"]
    done = run("train", "tiny.yaml", *one)
    assert done.codes == (0,) and done.err == "", done.err


def test_output_that_nobody_takes(tmp_path):
    """A full disk, a reader that has left, a stream that the caller closed."""
    command = [sys.executable, "-m", "hybridflow", "plan", "job", "quickstart"]
    reader, left = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:
        started = [
            subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, **more)
            for out, more in ((full, {}), (left, {}), (None, {"preexec_fn": lambda: os.close(1)}))
        ]
    errors = [each.communicate(timeout=300)[1] for each in started]
    assert [each.returncode for each in started] == [TARGET, DONE, DONE]
    assert errors == ["hybridflow: [Errno 28] No space left on device\n", "", ""]
