"""Programs of the Python API as users start them: alone, under torchrun, failing on one rank, asked to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.data.pieces import train_tokenizer
from tests.e2e.commands import Done, free_port

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import time

from hybridflow import GRPOTrainer, find_world

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "max_context": 16}


def digits(prompt, response, answer):
    if len(sys.argv) > 1 and sys.argv[1] == "fail" and find_world().rank == 1:
        raise ValueError("no score today")
    if len(sys.argv) > 1 and sys.argv[1] == "slow":
        time.sleep(0.05)
    return float(sum(letter.isdigit() for letter in response))


config = {
    "model": MODEL,
    "tokenizer": {"path": "tokenizer.model"},
    "run_dir": "run",
    "batch_size": 8,
    "group_size": 2,
    "max_new_tokens": 4,
    "lr": 1e-3,
}
resume = len(sys.argv) > 2 and sys.argv[2] == "resume"
with GRPOTrainer(config, reward=digits, resume=resume) as trainer:
    print("begins at step", trainer.session(["1+1="] * 4).step, flush=True)
    for step in range(1000 if len(sys.argv) > 1 and sys.argv[1] == "slow" else 2):
        out = trainer.step(["1+1=", "2+3=", "4+5=", "9+9="])
print("ends at step", out["loss"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer(["1+1=2", "4+5=9", "3+6=9", "7+8=15", "0+0=0"], path=tmp_path / "tokenizer.model", vocab_size=32)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def start(folder: Path, *arguments: str, num_ranks: int = 1) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    children = []
    for rank in range(num_ranks):
        environ = dict(os.environ)
        if num_ranks > 1:
            environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
            environ |= {
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "HYBRIDFLOW_SECRET": "known to the ranks of a test",
            }
        command = [sys.executable, "program.py", *arguments]
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True))
    return children


def wait(children: list[subprocess.Popen[str]], within_s: float = 600.0) -> Done:
    began = time.monotonic()
    try:
        found = [child.communicate(timeout=within_s) for child in children]
    finally:
        for child in children:
            child.kill()
    return Done(
        codes=tuple(child.returncode for child in children),
        out="".join(out for out, _ in found),
        err="".join(err for _, err in found),
        seconds=time.monotonic() - began,
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_program(folder: Path, num_ranks: int) -> None:
    done = wait(start(folder, num_ranks=num_ranks))
    assert done.codes == (0,) * num_ranks, done.err
    assert done.out.count("ends at step") == 1, "the first rank's; the others' is in their logs"
    assert "Apex" not in done.err
    for rank in range(1, num_ranks):
        assert "ends at step" in (folder / "run" / "logs" / "0001" / f"rank-{rank:05d}.log").read_text()
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


def test_one_rank_that_fails_ends_all(folder: Path) -> None:
    done = wait(start(folder, "fail", num_ranks=2))
    assert all(code not in (0, None) for code in done.codes), done
    assert "no score today" in done.err
    assert done.seconds < 400


def test_a_program_that_is_asked_to_stop_goes_on_later(folder: Path) -> None:
    children = start(folder, "slow", num_ranks=2)
    metrics = folder / "run" / "metrics.jsonl"
    end = time.monotonic() + 300
    while time.monotonic() < end and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.2)
    for child in children:
        child.send_signal(signal.SIGUSR1)
    stopped = wait(children)
    assert stopped.codes == (75, 75), stopped.err
    done = wait(start(folder, "go", "resume", num_ranks=2))
    assert done.codes == (0, 0), done.err
    assert "begins at step 0" not in done.out
