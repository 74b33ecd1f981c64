"""What was sampled and is not yet part of a checkpoint: kept in logs, used again after a kill, archived or removed.

    <run_dir>/rollouts/log/step-000012-start-3fab…-rank-00003.log     see ``rollout.log_file``
    <run_dir>/rollouts/log/step-000012-start-3fab…-rank-00003-part-00002.log     of the step's second rollout
    <run_dir>/rollouts/segments/step-000001-000010-rank-00003.h5      see ``rollout.archive``
    <run_dir>/rollouts/all.h5
    <run_dir>/rollouts/learned/step-000001-000010-rank-00000.h5       see ``rollout.learned``

A response is used again where its step, the prompts of its rollout, and the weights that sampled it, are the same. The
weights are told apart by a fingerprint: at the beginning of a run one of where they come from, or a random one; from
then on the hash of the one before and of what the update measured, to the last bit. It is part of each checkpoint. So
all that was sampled since is found again by a run that takes the same way bit for bit, and what the checkpoint's own
weights have sampled by any. A response that was paused goes on where it stopped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.store import Checkpoint, reading_state
from hybridflow.errors import DataError, WriteError
from hybridflow.models.routing import choice_dtype
from hybridflow.observe.rank_log import say
from hybridflow.placement.job import Job
from hybridflow.rollout import archive
from hybridflow.rollout.learned import drop_learned, merge_learned
from hybridflow.rollout.log_file import (
    LoggedSample,
    LogHeader,
    LogName,
    LogWriter,
    list_logs,
    pack_response,
    read_log,
    unpack_response,
)
from hybridflow.rollout.request import FinishReason, Request, Response, SampleKey

_FOLDER, _LOGS = "rollouts", "log"

Prompts = Mapping[int, torch.Tensor]
"""Prompt index -> token ids, ``[tokens]`` int64."""


class RolloutLog:
    """This rank's part of them. Made on all ranks, which is collective.

    Args:
        job: The job.
        start: Tells this start of the run from others.
        fingerprint: Fingerprint of the weights with which it begins.
        checkpoint: The checkpoint that it resumes from; None: there is none.
    """

    def __init__(self, job: Job, start: str, fingerprint: str, checkpoint: Checkpoint | None) -> None:
        self._job, self._start, self._rank = job, start, job.world.rank
        self._folder = Path(job.recipe.run_dir) / _FOLDER
        self._logs = self._folder / _LOGS
        self._fingerprint = fingerprint
        self._saved = None if checkpoint is None else checkpoint.step
        # The start that saved it, and up to which step what that start sampled is the run's.
        self._before: tuple[str, int] | None = None
        if checkpoint is not None and "rollouts" in checkpoint.state:
            with reading_state(checkpoint):
                self._before = checkpoint.state["rollouts"]["start"], checkpoint.step
        self._written: list[LogName] = []
        self._scores: dict[archive.Key, float] = {}
        # Of the chosen ones alone. A program's own prompts may be forgotten elsewhere by the time of the archive.
        self._prompts: dict[tuple[int, int], Sequence[int]] = {}
        everyone = job.world.coordinator(job.meshes["job"].ranks)
        # One looks: of a directory that another node has just changed each might see something else.
        found = everyone.decide("rollouts of earlier starts", self._look() if everyone.is_lead else None)
        self._left = [LogName(*name) for name in found]

    def state(self) -> dict[str, str]:
        """Return the state for a checkpoint; equal on all ranks."""
        return {"start": self._start, "fingerprint": self._fingerprint}

    def advance(self, measured: Mapping[str, float]) -> None:
        """Note that an update has changed the weights, with its metrics; equal on all ranks."""
        # An update in which no token counts measures nothing. The rate may be changed on resume, and says nothing else
        # in the step in which it is.
        told = [float(measured.get(name, 0.0)).hex() for name in ("actor/loss", "actor/grad_norm", "actor/lr")]
        told.append(str(self._job.recipe.actor.update))
        self._fingerprint = hashlib.sha256(" ".join([self._fingerprint, *told]).encode()).hexdigest()

    def add_scores(self, step: int, scores: Iterable[tuple[int, int, float]]) -> None:
        """Add scores of a step's samples, by prompt index and index, for the archive."""
        self._scores |= {(step, prompt_index, index): score for prompt_index, index, score in scores}

    def find(self, step: int, prompts: Prompts, requests: list[Request]) -> dict[SampleKey, Response]:
        """Find responses to these requests that an earlier start of the run has sampled, by prompt index and index.

        Some may be paused: of those that are not there whole, the longest.

        Collective: tp, pp of the rollout, with the same arguments.

        Args:
            step: Training step that is to learn from them.
            prompts: All prompts of the rollout. A program may give others than before the resume.
            requests: This replica's share.
        """
        names = [name for name in self._left if name.step == step]
        if not names or not requests:
            return {}
        mesh = self._job.meshes["actor.rollout"]
        replica = self._job.world.coordinator(mesh.replica_of(self._rank))
        found = None
        if replica.is_lead:
            packed = map(pack_response, self._read(names, self._header(step, _sha256(prompts)), requests))
            found = [base64.b64encode(each).decode() for each in packed]
        texts = replica.decide("rollouts of earlier starts", found)
        responses = [unpack_response(base64.b64decode(text)) for text in texts]
        return {
            each.key: replace(
                kept_response(each.tokens, each.log_probs, each.sampled_log_probs, each.versions, each.finish),
                choices=self._choices(each),
            )
            for each in responses
        }

    @contextlib.contextmanager
    def log(self, step: int, prompts: Prompts) -> Iterator[LogWriter | None]:
        """Open this rank's log of one rollout of a step, on disk when it ends; None on a rank that has none.

        In each replica, the first rank that knows the log-probabilities has a log.

        Args:
            step: Training step that is to learn from the rollout.
            prompts: All prompts of the rollout.
        """
        if not self._job.meshes["actor.rollout"].speaks(self._rank):
            yield None
            return
        name = LogName(step, self._start, self._rank, 1 + sum(each.step == step for each in self._written))
        if self._job.recipe.archives_step(step):
            chosen = filter(self._job.recipe.archives_prompt, prompts)
            self._prompts |= {
                (step, prompt_index): self._job.without_images(prompts[prompt_index].tolist())
                for prompt_index in chosen
            }
        with LogWriter(self._logs / str(name), self._header(step, _sha256(prompts))) as writer:
            self._written.append(name)
            yield writer

    def begin_save(self, step: int) -> None:
        """Note that the checkpoint before is complete and that of ``step`` has begun. On all ranks."""
        self.end_save()
        self._saved = step

    def end_save(self) -> None:
        """Note that the last checkpoint is complete: archive or remove what was sampled before it. On all ranks.

        Raises:
            WriteError: The file system refuses.
        """
        step = self._saved
        if step is None:
            return
        if self._rank == 0 and self._job.recipe.archives and archive.is_behind(self._folder):
            # What the ranks have archived at the last save, since when they have met.
            self.join()
        done = [name for name in self._written if name.step <= step]
        done += [name for name in self._left if name.step <= step and name.rank % self._job.world.size == self._rank]
        if self._job.recipe.archives:
            self._archive([name for name in done if self._is_part_of_run(name)])
            merge_learned(self._folder, self._rank, step)
        self._scores = {key: score for key, score in self._scores.items() if key[0] > step}
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key[0] > step}
        for name in done:
            with contextlib.suppress(OSError):
                (self._logs / str(name)).unlink()
        self._written = [name for name in self._written if name.step > step]
        self._left = [name for name in self._left if name.step > step]

    def join(self) -> None:
        """Join all that is archived in one file. For one rank, while no other writes to the archive.

        Raises:
            WriteError: The file system refuses.
        """
        for line in archive.join_segments(self._folder):
            say(line)

    def _look(self) -> list[LogName]:
        """Return the existing logs, after removing what does not belong to the run at this step."""
        names = list_logs(self._logs)
        try:
            archive.drop_segments(self._folder, after=self._saved)
            drop_learned(self._folder, after=self._saved)
            is_of_run = self._saved is not None or any(self._is_first(name) for name in names)
        except OSError as error:
            raise _not_removed(self._folder, error) from error
        if not is_of_run:
            remove_logs(Path(self._job.recipe.run_dir))
        return names if is_of_run else []

    def _is_first(self, name: LogName) -> bool:
        """Return whether the weights with which this run begins have sampled a log."""
        log = read_log(self._logs / str(name)) if name.step == 1 else None
        # Its prompts are compared once there are requests.
        return log is not None and log.header == self._header(1, log.header.fingerprint.partition("-")[2])

    def _read(self, names: list[LogName], header: LogHeader, requests: list[Request]) -> Iterable[LoggedSample]:
        wanted = {request.key for request in requests}
        best: dict[SampleKey, LoggedSample] = {}
        for name in names:
            try:
                log = read_log(self._logs / str(name))
            except OSError as error:
                say(f"{self._logs / str(name)}: cannot be read, and is not used: {error}")
                continue
            if log is None or log.header != header:
                continue
            for each in log.responses:
                if each.key in wanted and (each.key not in best or _is_better(each, best[each.key])):
                    best[each.key] = each
        return best.values()

    def _header(self, step: int, prompts_sha256: str) -> LogHeader:
        return LogHeader(
            step=step,
            fingerprint=f"{self._fingerprint}-{prompts_sha256}",
            seed=self._job.recipe.seed,
            vocab_size=self._job.vocab_size,
        )

    def _is_part_of_run(self, name: LogName) -> bool:
        """Return whether a log belongs to this run: no later start went back before it."""
        if name.start == self._start:
            return True
        return self._before is not None and name.start == self._before[0] and name.step <= self._before[1]

    def _choices(self, sampled: LoggedSample) -> torch.Tensor | None:
        """Return the experts of a response, as ``Response.choices``; None: a run like this one keeps none."""
        model = self._job.model_of("actor.rollout")
        if not sampled.choices or model.num_experts is None:
            return None
        flat = torch.frombuffer(bytearray(sampled.choices), dtype=choice_dtype(model.num_experts))
        return flat.view(-1, model.num_layers, model.experts_per_token)

    def _is_kept(self, sampled: LoggedSample) -> bool:
        return sampled.is_whole and self._job.recipe.archives_prompt(sampled.prompt_index)

    def _archive(self, names: list[LogName]) -> None:
        """Archive one segment for each rank that wrote; skip logs that a segment of a killed writer already holds."""
        covered = archive.list_segments(self._folder)
        by_rank: dict[int, list[LogName]] = {}
        for name in sorted(names):
            if not any(segment.rank == name.rank and segment.holds(name.step) for segment in covered):
                by_rank.setdefault(name.rank, []).append(name)
        for rank, chosen in by_rank.items():
            rows = []
            for name in chosen:
                try:
                    log = read_log(self._logs / str(name))
                except OSError as error:
                    raise WriteError(f"{self._logs / str(name)}: cannot be archived: {error}") from error
                if log is not None and self._job.recipe.archives_step(name.step):
                    rows += [(name.step, each) for each in log.responses if self._is_kept(each)]
            asked = sorted({(step, each.prompt_index) for step, each in rows})
            prompts = {prompt_index: self._prompt(step, prompt_index) for step, prompt_index in asked}
            known = {prompt_index: prompt for prompt_index, prompt in prompts.items() if prompt is not None}
            rows = [(step, each) for step, each in rows if each.prompt_index in known]
            segment = archive.SegmentName(chosen[0].step, chosen[-1].step, rank)
            archive.write_segment(self._folder, segment, rows, known, self._scores)

    def _prompt(self, step: int, prompt_index: int) -> Sequence[int] | None:
        """Return the tokens of a prompt; None: a program gave it to an earlier start, and it is nowhere now."""
        if (step, prompt_index) in self._prompts:
            return self._prompts[step, prompt_index]
        try:
            return self._job.without_images(self._job.train.prompt(prompt_index))
        except DataError as error:
            say(f"step {step}: samples of a prompt are not archived: {error}")
            return None


def remove_logs(run_dir: Path) -> None:
    """Remove what earlier starts of a run have sampled. For one rank, before others look.

    Raises:
        WriteError: The file system refuses.
    """
    folder = run_dir / _FOLDER / _LOGS
    try:
        for name in list_logs(folder):
            (folder / str(name)).unlink()
    except OSError as error:
        raise _not_removed(folder, error) from error


def _not_removed(folder: Path, error: OSError) -> WriteError:
    return WriteError(f"{folder}: what an earlier run has left cannot be removed: {error}; remove it by hand")


def _sha256(prompts: Prompts) -> str:
    told = hashlib.sha256()
    for prompt_index, tokens in prompts.items():
        told.update(f"{prompt_index} {len(tokens)} ".encode() + tokens.numpy().tobytes())
    return told.hexdigest()


def to_logged(request: Request, response: Response) -> LoggedSample:
    """Return the part of a response that a log keeps."""
    return LoggedSample(
        prompt_index=request.prompt_index,
        index=request.index,
        tokens=response.tokens.int().numpy(),
        log_probs=response.log_probs.numpy(),
        sampled_log_probs=response.sampled_log_probs.numpy(),
        versions=response.versions.numpy(),
        choices=b"" if response.choices is None else response.choices.numpy().tobytes(),
        finish=response.finish,
    )


def kept_response(tokens: Any, log_probs: Any, sampled_log_probs: Any, versions: Any, finish: FinishReason) -> Response:
    """Return a response of what was kept of it: lists or arrays, ``[response]`` each."""
    return Response(
        tokens=torch.as_tensor(tokens, dtype=torch.int64),
        log_probs=torch.as_tensor(log_probs, dtype=torch.float32),
        sampled_log_probs=torch.as_tensor(sampled_log_probs, dtype=torch.float32),
        versions=torch.as_tensor(versions, dtype=torch.int32),
        finish=finish,
    )


def _is_better(one: LoggedSample, other: LoggedSample) -> bool:
    """Return whether one log has more of a response than another."""
    return (one.is_whole, len(one.tokens)) > (other.is_whole, len(other.tokens))
