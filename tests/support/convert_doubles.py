"""The plainest source and target of a conversion, and conversions in processes of their own that can be killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from hybridflow.checkpoint.convert.engine import Place, convert
from hybridflow.checkpoint.convert.ranks import PeerError
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.model_dir import write_bytes
from hybridflow.checkpoint.tensor_file import TensorFile, TensorFileWriter
from hybridflow.errors import CheckpointError
from hybridflow.exit_status import exit_status
from hybridflow.families.model import ModelConfig

PEER_FAILED = 77


def make_tensors(path: Path, num_tensors: int = 12, rows: int = 8, columns: int = 64) -> dict[str, torch.Tensor]:
    """Random fp32 tensors in a plain safetensors file."""
    torch.manual_seed(0)
    tensors = {f"t{index:02}": torch.randn(rows, columns) for index in range(num_tensors)}
    save_file(tensors, path)
    return tensors


class PlainSource(Source):
    """Each tensor of a safetensors file is a logical one."""

    format, family, has_value_head, layout = "plain", None, False, None
    model = ModelConfig(num_layers=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=1, max_context=1)

    def __init__(self, path: Path, damaged: str | None = None) -> None:
        self.path, self._damaged = path, damaged
        self._file = TensorFile(path)
        self.tensors = self._file.entries

    def read(self, tensor: str) -> torch.Tensor:
        if tensor == self._damaged:
            raise CheckpointError(f"{self.path}: {tensor}: is damaged")
        return self._file.read(tensor)

    def release(self) -> None:
        self._file.release()

    def assets(self) -> dict[str, bytes]:
        return {}

    def identity(self) -> str:
        found = self.path.stat()
        return hashlib.sha256(f"{found.st_size} {found.st_mtime_ns}".encode()).hexdigest()


class RowsTarget:
    """Equal parts of each tensor's rows, one part in each file; a note of every part that is written."""

    def __init__(
        self,
        source: PlainSource,
        num_files: int = 2,
        *,
        dtype: str | None = None,
        can_go_on: bool = True,
        is_single_file: bool = False,
        log: Path | None = None,
        before_write: Callable[[str, str], None] = lambda file, key: None,
    ) -> None:
        self.can_go_on, self.is_single_file = can_go_on, is_single_file
        self._log, self._before_write = log, before_write
        self.files = {
            f"rows-{index}.safetensors": {
                name: TensorEntry(dtype or entry.dtype, (entry.shape[0] // num_files, *entry.shape[1:]))
                for name, entry in source.tensors.items()
            }
            for index in range(num_files)
        }

    def places(self, tensor):
        return [(file, tensor) for file in self.files]

    def parts(self, tensor, values):
        return values.chunk(len(self.files))

    def open(self, path, file):
        if not self.can_go_on:
            assert not path.exists(), f"{path} is gone on with"
        return _LoggedWriter(path, file, self.files[file], self._log, self._before_write)

    def finish(self, folder, hashes):
        if not self.is_single_file:
            write_bytes(folder / "hashes.json", json.dumps(hashes).encode())


class _LoggedWriter(TensorFileWriter):
    def __init__(self, path, file, entries, log, before_write):
        super().__init__(path, entries)
        self._name, self._log, self._before_write = file, log, before_write

    def write(self, key, tensor):
        self._before_write(self._name, key)
        if self._log is not None:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"{self._name} {key}\n".encode())
            os.close(descriptor)
        return super().write(key, tensor)


def run_plain(source_path: Path, out: Path, *, place: Place | None = None, restart: bool = False, what=None, **target):
    """A conversion between the doubles."""
    damaged = target.pop("damaged", None)
    source = PlainSource(source_path, damaged)
    asked = {"to": "rows"} if what is None else what
    return convert(source, RowsTarget(source, **target), out, what=asked, place=place, restart=restart)


def fork(case: Callable[[], object]) -> int:
    """Run a case in a process of its own, which ends with the status that the command would have; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        case()
        status = 0
    except PeerError:
        status = PEER_FAILED
    except Exception as error:
        traceback.print_exception(error)
        status = exit_status(error)
    finally:
        os._exit(status)


def wait_for(children: list[int], within_s: float = 200.0) -> list[int]:
    """Their statuses; the negative signal where one ended a child."""
    end, found = time.monotonic() + within_s, {}
    while len(found) < len(children):
        for child in children:
            done, status = (0, 0) if child in found else os.waitpid(child, os.WNOHANG)
            if done:
                found[child] = os.waitstatus_to_exitcode(status)
            elif child not in found and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [found[child] for child in children]
