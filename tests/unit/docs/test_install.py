"""The install block is the same everywhere, installs the pinned torch, and makes a bare ``hybridflow`` work."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(text):
    """The lines from ``git clone`` on, without their comments."""
    found = re.search(r"^ {4}git clone .*\n(?: {4}.*\n)*", text, flags=re.MULTILINE)
    return [re.split(r"\s\s+#", line.strip())[0] for line in found[0].splitlines()]


def test_three_lines_install_the_torch_of_the_script():
    pinned = set(re.findall(r"torch==([0-9.]+)", (ROOT / "launch/venv.sh").read_text(encoding="utf-8")))
    clone, install, activate = block(README)
    assert set(re.findall(r"torch==([0-9.]+)", install)) == pinned and len(pinned) == 1
    assert (clone.split()[:2], activate) == (["git", "clone"], "source .venv/bin/activate")
    assert block((ROOT / "docs/slurm.md").read_text(encoding="utf-8")) == [clone, install, activate]


def test_a_model_of_hugging_face_is_read_after_the_block():
    """A Qwen model has only ``tokenizer.json``, which takes the package tokenizers."""
    (extras,) = re.findall(r"--editable '\.\[([a-z,]+)\]'", block(README)[1])
    described = (ROOT / "setup.py").read_text(encoding="utf-8")
    (packages,) = re.findall(rf'"{extras}": \[(.*?)\]', described)
    assert extras == "hf" and '"tokenizers' in packages


@pytest.mark.parametrize("page", ["launchers", "slurm", "gpu", "from-trl", "from-verl", "from-slime"])
def test_pages_for_beginners_say_how_to_install(page):
    assert "(../README.md#install)" in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_block_makes_the_bare_command_work(tmp_path):
    """Its own lines, from a clone; packages that are installed here are taken as installed there."""
    lines = [line.replace("<repository>", f"file://{ROOT}") for line in block(README)]
    script = "\n".join(["set -e", *lines, "command -v hybridflow", "hybridflow plan job split"])
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": sysconfig.get_path("purelib")}
    environ |= {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    environ["PATH"] = f"{Path(sysconfig.get_config_var('BINDIR'))}:{environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path}/hybridflow/.venv/bin/hybridflow\n" in done.stdout and "most on rank" in done.stdout
