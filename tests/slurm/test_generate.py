"""``srun hybridflow generate`` on a real Slurm: two tasks answer a file's prompts, through a job that is cancelled."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from hybridflow.serving.results import Results
from tests.slurm.jobs import output
from tests.support.hf_models import write_model, write_tokenizer
from tests.support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm

NUM_PROMPTS, SAMPLES = 24, 8
WORDS = [
    *("generate", "--model", "model", "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--layout", "dp2"),
    *("-n", str(SAMPLES), "--max-new-tokens", "50", "--max-concurrent", "4"),
]


def submit(cluster: SlurmCluster, folder: Path) -> str:
    command = shlex.join(["srun", sys.executable, "-m", "hybridflow", *WORDS])
    return cluster.sbatch("--nodes=2", "--ntasks-per-node=1", f"--wrap={command}", cwd=folder)


def test_a_cancelled_job_is_gone_on_with_and_repeats_nothing(cluster, tmp_path):
    write_model(tmp_path / "model", seed=3)
    write_tokenizer(tmp_path / "model")
    # No token ends a sample, so each takes its time.
    lines = [{"prompt": f"{a}+{a}=", "id": a, "sampling": {"stop_ids": []}} for a in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = Results(tmp_path / "out.jsonl")

    first = submit(cluster, tmp_path)

    def is_under_way() -> bool:
        assert cluster.job(first)["JobState"] in ("PENDING", "RUNNING"), output(cluster, first)
        return len(results.find()) > SAMPLES

    cluster.wait_for(is_under_way, within_s=300, what="the first samples")
    cluster.run("scancel", first)
    assert cluster.wait_for_end(first, within_s=300)["JobState"] == "CANCELLED", output(cluster, first)
    kept = list(results.read(results.find()))
    assert SAMPLES < len(kept) < NUM_PROMPTS * SAMPLES and not results.out.exists()

    second = submit(cluster, tmp_path)
    assert cluster.wait_for_end(second, within_s=300)["JobState"] == "COMPLETED", output(cluster, second)
    rows = [json.loads(line) for line in results.out.read_text().splitlines()]
    assert [(row["id"], row["sample"]) for row in rows] == [(a, n) for a in range(NUM_PROMPTS) for n in range(SAMPLES)]
    assert all(len(row["token_ids"]) == 50 for row in rows) and not results.folder.exists()
    # What the first job finished is there as it was, and the second generated the rest alone.
    for row in kept:
        assert rows[row["prompt_index"] * SAMPLES + row["index"]]["token_ids"] == row["token_ids"]
    (said,) = re.findall(r"(\d+) failed; now (\d+) samples", output(cluster, second))
    assert said == ("0", str(len(rows) - len(kept)))
