"""What all forked ranks share: imports that are made once, before the fork."""

from __future__ import annotations

import gc

import tensorboard.summary.writer.record_writer  # noqa: F401

import hybridflow.parallel.watch  # noqa: F401
import hybridflow.trainer.trainer  # noqa: F401


def begin_rank() -> None:
    """Prepare this process, which was just forked, to be a rank."""
    # The collector would look at, and so copy, all that the parent has.
    gc.freeze()
