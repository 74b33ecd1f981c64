"""The two batch files that train: what differs between them, and what both of them need to survive."""

import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "slurm"
NAMES = ("train.sbatch", "train_preemptible.sbatch")


def parts(name: str) -> tuple[list[str], str]:
    """A file's lines up to the block that a site edits; the rest."""
    head, mark, rest = (SLURM / name).read_text().partition("# ---- edit for your site")
    assert mark
    return head.splitlines(), rest


def test_they_differ_in_their_heads_alone():
    assert parts(NAMES[0])[1] == parts(NAMES[1])[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_survival_rests_on(name):
    head, rest = parts(name)
    given = {line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")}
    assert {"--requeue", "--no-kill", "--open-mode=append", "--signal=B:USR1@120"} <= given
    # sbatch reads none behind the first command.
    assert all(line.startswith("#") for line in head)
    commands = [line for line in rest.splitlines()[1:] if line and not line.startswith("#")]
    assert commands[0].startswith("container=()") and commands[2] == "trap 'asked=yes' USR1 TERM"
    assert subprocess.run(["bash", "-n", SLURM / name], check=False).returncode == 0
