"""Writing checkpoints while training goes on.

``save`` copies what this rank is to write, and returns; a thread of the rank writes it. Ranks meet in no collective:
threads announce what they have done where the ranks have met (``torch.distributed``'s store), which every launcher
brings along, which answers also when a disk is full, and whose answers, unlike names in a shared directory, are never
stale. The first rank of a role's mesh waits for that mesh alone, and writes the manifest; one of these leads waits for
the others, and completes the step. A rank that holds no role has nothing to do. The next save begins when the last is
complete, on every rank: one that went on would wait for the others in the midst of training, where it cannot be seen
that they are still writing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridflow.checkpoint.job_file import RoleRecord
from hybridflow.checkpoint.manifest import NAME, WEIGHT, Manifest, OptimizerProgress, Piece, TensorEntry, check_cover
from hybridflow.checkpoint.model_dir import Share, write_assets, write_manifest, write_shares
from hybridflow.checkpoint.store import complete_role, complete_step, role_path
from hybridflow.errors import CheckpointError, DeadlineError, HybridflowError, WriteError
from hybridflow.exit_status import pack_error, unpack_error
from hybridflow.families.model import ModelConfig
from hybridflow.observe.files import writing
from hybridflow.reshard.spec import ModelSpec

_POLL_S = 0.05
_VISIBLE_S = 60.0
"""So long a file that another rank wrote may take to be seen: NFS keeps names that it has looked up."""

_TOLD_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RolePart:
    """What a rank writes of a role.

    Attributes:
        ranks: Ranks of the role's mesh; the first is its lead.
        model: Settings; the vocabulary is given.
        has_value_head: Whether it gives values instead of logits.
        layout: In which it is, as text.
        spec: The whole model's tensors.
        shares: In host memory, which nobody writes until they are written.
        trained: Those of the tensors held here that an optimizer steps, on this rank or another.
        progress: Where the optimizer stands, if this rank can tell.
        is_frozen: Whether it never changes, and is written once for all checkpoints of the run.
        family: Hugging Face family; None where that is not known.
        assets: Small files that travel along, by name; the role's lead writes them.
    """

    ranks: tuple[int, ...]
    model: ModelConfig
    has_value_head: bool
    layout: str
    spec: ModelSpec
    shares: tuple[Share, ...]
    trained: tuple[str, ...]
    progress: OptimizerProgress | None
    is_frozen: bool
    family: str | None = None
    assets: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is saved, as every rank knows it.

    Attributes:
        number: Training steps done.
        state: JSON: what the job needs to go on.
        best: Step of the best checkpoint, see ``store.complete_step``.
        leads: Role -> its lead, of those that are written; the first completes the step.
        parts: Role -> what this rank writes of it.
    """

    number: int
    state: Mapping[str, Any]
    leads: Mapping[str, int]
    parts: Mapping[str, RolePart]
    best: int | None = None


class Saver:
    """Writes checkpoints of a run, one after the other, on this rank.

    Args:
        run_dir: Directory of the run.
        rank: This one.
        board: Where the ranks meet; a connection that this saver has for itself. While a step is written it has
            ``STEP/ROLE/RANK``, what a rank has written of a role; ``STEP/ROLE``, a complete role; ``STEP/bytes``, the
            bytes that all ranks have written; ``STEP/failed``, a rank that cannot write, and its error, packed, unless
            that is a bug; ``STEP/done``.
        deadline_s: Longest time in which no rank writes anything, while one is waited for.
        keep_last: See ``store.complete_step``.
        keep_every: See ``store.complete_step``.
        frozen: Roles that an earlier checkpoint holds and that never change.

    Attributes:
        metrics: What was measured since the trainer last took it: ``checkpoint/*``.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        board: dist.Store,
        *,
        deadline_s: float,
        keep_last: int,
        keep_every: int,
        frozen: Mapping[str, RoleRecord],
    ) -> None:
        self.metrics: dict[str, float] = {}
        self._run_dir, self._rank, self._board, self._deadline_s = run_dir, rank, board, deadline_s
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._frozen = dict(frozen)
        self._last: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._measured: dict[str, float] = {}
        # Grows while anything happens; a wait ends when it has not for as long as the deadline.
        self._signs = 0

    def save(self, step: Step) -> None:
        """Begin to write a step, once the one before is complete; does not wait for this one.

        Raises:
            HybridflowError: What kept the step before from being written.
        """
        self.finish()
        self._last = step.number
        if step.parts:
            self._start(lambda: self._write(step), f"checkpoint of step {step.number}")

    def check(self) -> None:
        """Tell of what went wrong meanwhile.

        Raises:
            HybridflowError: What keeps a step from being written.
        """
        if self._error is not None:
            raise self._error
        if self._thread is None or not self._thread.is_alive():
            self.metrics |= self._measured
            self._measured = {}

    def finish(self, tell: Callable[[str], None] | None = None) -> None:
        """Return when the last step is complete, also on a rank that wrote nothing of it.

        Args:
            tell: Is given a line of progress now and then.

        Raises:
            HybridflowError: What kept it from being written.
        """
        self._wait(tell)
        if self._last is not None:
            step, name = self._last, f"checkpoint of step {self._last}"
            self._start(lambda: self._await(step, [f"{step}/done"], name), name)
            self._wait(tell)
            self._last = None

    def _start(self, work: Callable[[], object], name: str) -> None:
        def run() -> None:
            try:
                work()
            except dist.DistError as error:
                reason = str(error).splitlines()[0]
                self._error = DeadlineError(f"{name}: lost contact with where the ranks have met: {reason}")
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _wait(self, tell: Callable[[str], None] | None = None) -> None:
        """Wait until the thread has ended, for as long as there are signs of life."""
        signs, since_s, told_s = self._signs, time.monotonic(), time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            now_s = time.monotonic()
            if self._signs != signs:
                signs, since_s = self._signs, now_s
            # The thread notices first, unless the store or the file system does not answer.
            if now_s - since_s > 2 * self._deadline_s:
                raise DeadlineError(
                    f"{self._thread.name}: nothing was written for {2 * self._deadline_s:g} s; look at the file system "
                    f"of {self._run_dir}, or raise cluster.deadline_s"
                )
            if tell is not None and now_s - told_s > _TOLD_EVERY_S:
                told_s = now_s
                tell(f"{self._thread.name}: {signs / 1e6:.0f} MB written by all ranks")
        self._thread = None
        self.check()

    def _write(self, step: Step) -> None:
        """Write this rank's files, and what it leads. In a thread."""
        begin_s, board, number = time.monotonic(), self._board, step.number

        def advance(num_bytes: int) -> None:
            self._signs = board.add(f"{number}/bytes", num_bytes)

        try:
            for role, part in step.parts.items():
                record = self._write_part(step, role, part, advance)
                board.set(f"{number}/{role}/{self._rank}", json.dumps(record))
            for role, part in step.parts.items():
                if part.ranks[0] == self._rank:
                    board.set(f"{number}/{role}", json.dumps(self._complete_role(step, role, part)))
            if next(iter(step.leads.values())) == self._rank:
                num_bytes = self._complete(step)
                board.set(f"{number}/done", "1")
                self._measured = {"checkpoint/write_s": time.monotonic() - begin_s, "checkpoint/bytes": num_bytes}
        except DeadlineError:
            raise
        except BaseException as error:
            # The others end with its status too, and may be the first: all ranks have the status of the first cause.
            packed = pack_error(error) if isinstance(error, (HybridflowError, OSError)) else []
            with contextlib.suppress(dist.DistError):
                board.set(f"{number}/failed", json.dumps([self._rank, *packed]))
            raise

    def _write_part(self, step: Step, role: str, part: RolePart, advance: Callable[[int], None]) -> dict[str, Any]:
        folder = role_path(self._run_dir, step.number, role, is_frozen=part.is_frozen)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"trained": part.trained, "progress": part.progress, "pieces": []}
        if part.shares:
            file = f"rank-{self._rank:05d}.safetensors"
            pieces, num_bytes = write_shares(folder, file, part.shares, advance=advance)
            record |= {"file": file, "num_bytes": num_bytes, "pieces": pieces}
        return record

    def _complete_role(self, step: Step, role: str, part: RolePart) -> RoleRecord:
        """Put together what the ranks of a role have announced. On its lead."""
        announced = [f"{step.number}/{role}/{rank}" for rank in part.ranks]
        self._await(step.number, announced, f"{role} of step {step.number}")
        records = []
        for key in announced:
            records.append(json.loads(self._board.get(key)))
            # They are long, and the board is in some rank's memory.
            self._board.delete_key(key)
        folder = role_path(self._run_dir, step.number, role, is_frozen=part.is_frozen)
        manifest = _manifest(part, records)
        check_cover(manifest, folder / NAME)
        self._check_seen(folder, manifest.file_bytes)
        write_manifest(folder, replace(manifest, notes=write_assets(folder, part.assets) if part.assets else {}))
        num_bytes = sum(manifest.file_bytes.values())
        return complete_role(self._run_dir, step.number, role, num_bytes, is_frozen=part.is_frozen)

    def _check_seen(self, folder: Path, file_bytes: Mapping[str, int]) -> None:
        """Refuse to complete what this rank does not see: each node may have a directory of that name of its own.

        Raises:
            WriteError: A file that another rank wrote is not there.
        """
        end_s = time.monotonic() + min(_VISIBLE_S, self._deadline_s)
        for name, size in file_bytes.items():
            path = folder / name
            while not (path.is_file() and path.stat().st_size == size):
                if time.monotonic() > end_s:
                    raise WriteError(
                        f"{path}: was written, and rank {self._rank} does not see it; set run_dir to a directory on a "
                        "file system that all ranks share"
                    )
                time.sleep(_POLL_S)

    def _complete(self, step: Step) -> int:
        """Put the roles together. On one of the leads. Returns the bytes that were written."""
        completed = {role: f"{step.number}/{role}" for role in step.leads}
        self._await(step.number, [*completed.values()], f"roles of step {step.number}")
        written = {role: RoleRecord(*json.loads(self._board.get(key))) for role, key in completed.items()}
        roles = {**self._frozen, **written}
        complete_step(self._run_dir, step.number, step.state, roles, best=step.best, **self._keep)
        self._frozen |= {role: record for role, record in written.items() if "/" not in record.directory}
        return sum(record.num_bytes for record in written.values())

    def _await(self, step: int, awaited: list[str], what: str) -> None:
        """Return when all of some keys of a step are set.

        Raises:
            DeadlineError: A rank could not write, for the reason that it met; or nobody wrote anything for as long as
                the deadline.
        """
        board, since_s = self._board, time.monotonic()
        while not board.check(awaited):
            if board.check([f"{step}/failed"]):
                rank, *packed = json.loads(board.get(f"{step}/failed"))
                where = f"{what}: rank {rank} could not write its part"
                if not packed:
                    raise DeadlineError(f"{where}; see what it says")
                error = unpack_error(*packed)
                raise DeadlineError(f"{where}: {error}") from error
            signs = board.add(f"{step}/bytes", 0)
            if signs != self._signs:
                self._signs, since_s = signs, time.monotonic()
            elif time.monotonic() - since_s > self._deadline_s:
                lacking = [key for key in awaited if not board.check([key])]
                raise DeadlineError(
                    f"{what}: {', '.join(lacking[:8])} did not come, and nothing was written for {self._deadline_s:g} "
                    "s; look for a rank that failed earlier, or raise cluster.deadline_s if the file system is slow"
                )
            time.sleep(_POLL_S)


def _manifest(part: RolePart, records: list[dict[str, Any]]) -> Manifest:
    """Join what a role's ranks have written into one manifest.

    Raises:
        CheckpointError: They stand at different steps.
    """
    shapes = {tensor.name: tensor for tensor in part.spec.tensors}
    trained = {name for record in records for name in record["trained"]}
    states = {name: TensorEntry("fp32", tensor.shape) for name, tensor in shapes.items() if name in trained}
    tensors = {WEIGHT: {name: TensorEntry(tensor.dtype, tensor.shape) for name, tensor in shapes.items()}}
    if states:
        tensors |= {"exp_avg": states, "exp_avg_sq": states}
        masters = {name: entry for name, entry in states.items() if shapes[name].dtype != "fp32"}
        tensors |= {"master": masters} if masters else {}
    progress = {OptimizerProgress(*record["progress"]) for record in records if record["progress"] is not None}
    if len(progress) > 1:
        raise CheckpointError(f"ranks {list(part.ranks)} stand at different steps: {sorted(progress)}; save none")
    return Manifest(
        model=part.model,
        family=part.family,
        has_value_head=part.has_value_head,
        layout=part.layout,
        tensors=tensors,
        pieces=tuple(
            Piece(kind, tensor, tuple((start, stop) for start, stop in box), *rest)
            for record in records
            for kind, tensor, box, *rest in record["pieces"]
        ),
        file_bytes={record["file"]: record["num_bytes"] for record in records if "file" in record},
        progress=next(iter(progress), None),
    )
