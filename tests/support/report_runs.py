"""Run directories for the report, written by what writes them in a run, without a model and without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.data.pieces import train_tokenizer
from hybridflow.observe.metrics import MetricsLog
from hybridflow.observe.starts import StartRecord, add_end, add_start, keep_recipe
from hybridflow.observe.status_file import StatusFile
from hybridflow.observe.summary import write_summary
from hybridflow.observe.timeline_file import TimelineFile
from hybridflow.rollout.archive import SegmentName, write_segment
from hybridflow.rollout.learned import Learned, write_learned
from hybridflow.rollout.log_file import LoggedSample

BEGAN_S = 1_700_000_000.0

HOSTILE = "</script><img src=x onerror=alert(1)>"
"""What a prompt or a cause may hold."""

CALLS = ("actor.sample", "reward.score", "actor.log_probs", "advantage.grpo", "actor.update")


def write_run(
    run_dir: Path,
    *,
    num_steps: int = 6,
    num_ranks: int = 2,
    num_groups: int = 3,
    group_size: int = 4,
    num_tokens: int = 3,
    has_archive: bool = True,
    is_done: bool = True,
    recipe: dict[str, Any] | None = None,
) -> Path:
    """Write a GRPO run that was stopped at half of its steps and gone on with; returns its directory."""
    run_dir.mkdir(parents=True)
    settings = {"name": run_dir.name, "algorithm": "grpo", "model": {"num_layers": 2, "path": None}, "seed": 1}
    half = num_steps // 2
    for number, step in ((1, None), (2, half)):
        add_start(run_dir, StartRecord(number=number, began_s=BEGAN_S + number, step=step, ranks=num_ranks))
        keep_recipe(run_dir, number, settings | (recipe or {}))
        if number == 1 or is_done:
            outcome = ("requeue", f"rank 0 received SIGTERM {HOSTILE}") if number == 1 else ("finished", "")
            add_end(run_dir, number, *outcome)
    status = StatusFile(run_dir, facts={"name": run_dir.name, "algorithm": "grpo", "steps": num_steps})
    status.note(step=num_steps, job_end_s=None)
    status.close()
    with MetricsLog(run_dir, num_steps=num_steps) as log:
        for step in range(1, num_steps + 1):
            log.write(step, metrics_of(step, num_steps))
    write_timeline(run_dir, range(1, num_steps + 1), num_ranks)
    if has_archive:
        write_archive(run_dir, range(1, num_steps + 1), num_groups, group_size, num_tokens)
    if is_done:
        write_summary(run_dir, {"steps": num_steps, "accuracy_before_rl": 0.25, "accuracy_after_rl": 0.75})
    return run_dir


def metrics_of(step: int, num_steps: int) -> dict[str, float]:
    """A step's metrics; each second step is validated, and the last has a number that is not finite."""
    share = step / num_steps
    found = {
        **{"reward/mean": share, "reward/p10": share / 2, "reward/p90": 1.0, "actor/loss": -share},
        **{"kl/ref": math.inf if step == num_steps else share / 100, "response/length_mean": 3.0},
        **{"time/rollout_s": 0.5, "time/update_s": 0.25, "time/step_s": 1.0, "throughput/tokens_per_s": 100.0 * step},
    }
    return found | ({"validation/accuracy": share} if step % 2 == 0 else {})


def write_timeline(run_dir: Path, steps: Sequence[int], num_ranks: int) -> None:
    """Write each step's calls, one behind the other, and a decision; later ranks are slower."""
    file = TimelineFile(run_dir, num_ranks=num_ranks, ranks_per_node=2)
    for step in steps:
        began_s = BEGAN_S + 10 * step
        spans = [
            [
                *(("call", call, 0.1 + rank / 1000, began_s + 0.15 * place) for place, call in enumerate(CALLS)),
                ("control", "save", 0.01, began_s + 0.9),
            ]
            for rank in range(num_ranks)
        ]
        file.add(step, began_s, 1.0, spans)


def write_archive(run_dir: Path, steps: Sequence[int], num_groups: int, group_size: int, num_tokens: int) -> None:
    """Archive all steps; the first response of a group is right, but in the last group of a step none is."""
    tokenizer = train_tokenizer([HOSTILE, "7+8=15 é"], path=run_dir / "tokenizer.model", vocab_size=48)
    prompts: dict[int, list[int]] = {}
    rows, scores = [], {}
    text = tokenizer.encode("15")
    for step in steps:
        learned = []
        for group in range(num_groups):
            prompt_index = step * num_groups + group
            prompts[prompt_index] = tokenizer.encode(HOSTILE if group == 0 else "7+8=")
            for index in range(group_size):
                tokens = np.array([*(text * num_tokens)[: num_tokens - 1], tokenizer.eos_id], np.int32)
                log_probs = -np.arange(num_tokens, dtype=np.float32) / 10
                is_right = index == 0 and group < num_groups - 1
                rows.append(
                    (
                        step,
                        LoggedSample(
                            prompt_index=prompt_index,
                            index=index,
                            tokens=tokens,
                            log_probs=log_probs,
                            sampled_log_probs=log_probs,
                            versions=np.full(num_tokens, max(0, step - 2), np.int32),
                        ),
                    )
                )
                scores[step, prompt_index, index] = float(is_right)
                advantages = np.full(num_tokens, 1.5 if is_right else -0.5, np.float32)
                learned.append((prompt_index, index, Learned(advantages, log_probs - np.float32(0.25))))
        write_learned(run_dir / "rollouts", step, 0, learned)
    write_segment(run_dir / "rollouts", SegmentName(steps[0], steps[-1], 0), rows, prompts, scores)


def data_of(path: Path) -> dict[str, Any]:
    """Return the data of a page, as its program reads it."""
    page = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    return found
