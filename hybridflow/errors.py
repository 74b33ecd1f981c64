"""Every exception that hybridflow raises for a user to read.

A message names what was given, what is allowed, and what to change. A bug of ours is an ``AssertionError``.
"""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question for the middle of a message, such as ``"did you mean grpo? "``; empty if no word is near."""
    # Comparing long words takes long.
    names = {name.lower(): name for name in known}
    asked = word[:200].lower()
    near = difflib.get_close_matches(asked, names)
    # A name of the same letters goes first: gpro is grpo, not gspo.
    near.sort(key=lambda name: sorted(name) != sorted(asked))
    return f"did you mean {names[near[0]]}? " if near else ""


class HybridflowError(Exception):
    """Base of all errors below; the command line prints its message without a traceback."""


class ConfigError(HybridflowError):
    """A recipe or an override has an unknown, missing or ill-typed key."""


class MissingFileError(ConfigError):
    """A file or directory that a recipe names is not there; on a cluster perhaps only on this node."""


class LayoutError(HybridflowError):
    """A parallel layout does not fit its ranks or its model."""


class GraphError(HybridflowError):
    """A dataflow graph reads a column that nothing writes, or writes one twice."""


class DataError(HybridflowError):
    """A prompt file, tokenizer or sample is malformed."""


class ContextError(DataError):
    """A prompt is too long for the model's context."""


class RewardError(HybridflowError):
    """A reward function raised, or returned something other than one finite number per sample."""


class ContractError(HybridflowError):
    """A user's own class does not keep to what it has to, as ``hybridflow.testing`` finds out."""


class EngineError(HybridflowError):
    """Another engine, in this process or a server, failed, or answered what cannot be right."""


class DivergedError(HybridflowError):
    """A gradient is not finite, so the weights would not be either."""


class ReshardError(HybridflowError):
    """A tensor cannot be described, or two ranks disagree about a plan."""


class CheckpointError(HybridflowError):
    """A checkpoint is missing, incomplete or does not belong to this run."""


class WriteError(CheckpointError):
    """A checkpoint cannot be written: no room, no permission, or something is there already."""


class DeadlineError(HybridflowError):
    """A wait for another rank passed its deadline, or a rank died."""


class StopError(HybridflowError):
    """A job stops before it has begun, so that there is nothing to save: a signal asked for it, or it cannot yet."""
