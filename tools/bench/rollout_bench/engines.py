"""Processes of the engines, as this one sees them: started, asked, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, HybridflowError
from rollout_bench.cases import SIZES

TOOLS = Path(__file__).parents[1]
_START_S, _ANSWER_S, _MAKE_S, _END_S = 900.0, 3600.0, 900.0, 20.0
_TOLD_LINES = 12


class EngineError(HybridflowError):
    """The process of an engine failed, or did not answer in time."""


class Engine:
    """The process of one engine, which sleeps until it is asked.

    Args:
        name: ``ours``, ``transformers`` or ``vllm``.
        python: The interpreter of its environment.
        checkpoint: Folder of the model.
        settings: As its process takes them.
        log: File for what it prints.
        module: What it runs, with arguments that come before the checkpoint; None: the one that generates.

    Raises:
        EngineError: It did not come up.
    """

    def __init__(
        self,
        name: str,
        python: str,
        checkpoint: Path,
        settings: dict[str, Any],
        log: Path,
        module: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._unread = b""
        if module is None:
            module = ["rollout_bench.ours"] if name == "ours" else ["rollout_bench.peers", name]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-m", *module, str(checkpoint), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=_environment(name, int(settings["threads"])),
                # Ctrl-C reaches it through us.
                start_new_session=True,
            )
        try:
            self.versions: dict[str, str] = self._answer(_START_S)["versions"]
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What a method of the engine answers.

        Raises:
            EngineError: It failed, or took too long.
        """
        stdin = self._process.stdin
        assert stdin is not None, "opened as a pipe"
        try:
            stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None
        return self._answer(_ANSWER_S)

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "opened as a pipe"
            pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, within_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None, "opened as a pipe"
        end_s = time.monotonic() + within_s
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise self._failure(f"did not answer within {within_s:g} s")
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                raise self._failure("has ended")
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure(self, what: str) -> EngineError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TOLD_LINES:]
        return EngineError("\n  ".join([f"the process of {self.name} {what}; the last that it printed:", *lines]))


def make_checkpoint(
    python: str, size: str, dtype: str, folder: Path, module: Sequence[str] = ("rollout_bench.peers", "make")
) -> Path:
    """A random model in the format of Hugging Face, unless it is there already.

    Args:
        python: Of an environment with transformers.
        size: Key of ``SIZES``.
        dtype: Of torch.
        folder: Where checkpoints are kept.
        module: What makes it, with arguments that come before the folder.

    Raises:
        ConfigError: The interpreter is not there.
        EngineError: Making it failed.
    """
    made = folder / f"{size}-{dtype}"
    if (made / "config.json").is_file():
        return made
    told = {"shape": SIZES[size].llama_config(), "dtype": dtype}
    unfinished = folder / f"{made.name}.tmp"
    command = [python, "-m", *module, str(unfinished), json.dumps(told)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=_environment("make", 1), timeout=_MAKE_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{python}: no such interpreter; name one with transformers and vLLM by --rivals-python: "
            "tests/support/vllm.sh makes .venv-vllm/bin/python"
        ) from None
    if done.returncode:
        raise EngineError(f"{python} could not make the model {size}:\n{done.stderr[-2000:]}")
    unfinished.rename(made)
    return made


def _environment(name: str, threads: int) -> dict[str, str]:
    """The rivals' environments see this folder, and none of our packages."""
    ours = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ and name == "ours" else []
    # So that hybridflow is found where it is not installed.
    paths: Sequence[str] = [str(TOOLS), *ours, *([str(TOOLS.parents[1])] if name == "ours" else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def default_python(name: str, rivals_python: str) -> str:
    """The interpreter of an engine."""
    return sys.executable if name == "ours" else rivals_python
