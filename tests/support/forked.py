"""What all forked ranks share: imports that are made once, before the fork, and no learning curve."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import tensorboard.summary.writer.record_writer  # noqa: F401

import hybridflow.parallel.watch  # noqa: F401
import hybridflow.trainer.trainer  # noqa: F401
from hybridflow.trainer import record

with contextlib.suppress(ImportError):  # .venv-cuda has none
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def begin_rank() -> None:
    """Prepare this process, which was just forked, to be a rank."""
    # The collector would look at, and so copy, all that the parent has.
    gc.freeze()
    # A third of a tiny run's time; test_start.py has it drawn by ranks that a launcher starts.
    record.draw_learning_curve = _no_curve


def _no_curve(run_dir: Path) -> None:
    """Draw nothing."""
