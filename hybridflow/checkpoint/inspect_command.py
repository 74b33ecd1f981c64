"""The commands that look into checkpoints: ``hybridflow inspect`` and ``hybridflow diff``. Light at import."""

from __future__ import annotations

import argparse
import functools
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.exit_status import DIFFERENT, DONE, SOURCE, Ended, exit_status
from hybridflow.families.hub_cache import find_model
from hybridflow.observe.console import complain, format_bytes, print_out, signals_raise
from hybridflow.parallel.process import allow_many_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridflow.checkpoint.contents import Contents
    from hybridflow.checkpoint.differences import Compared, Differences
    from hybridflow.checkpoint.formats.source import Source

_WORST = 10
_REPORT_EVERY_S = 5.0

_INSPECT_EXAMPLES = """examples:
  hybridflow inspect runs/x
  hybridflow inspect runs/x/checkpoints/step_000010/actor --tensors
  hybridflow inspect models/llama --verify
  hybridflow inspect models/llama --json | jq .num_parameters

exit status: 0 the checkpoint is there; 2 the request is wrong; 3 the checkpoint is missing, damaged or incomplete;
  1 hybridflow itself failed; 128 + n ended by signal n
"""

_DIFF_EXAMPLES = """examples:
  hybridflow diff models/llama converted/llama-tp2
  hybridflow diff runs/x/checkpoints/step_000010/actor exported/actor --json
  hybridflow diff runs/x/checkpoints/step_000010/actor runs/y/checkpoints/step_000010/actor --optimizer

exit status: 0 equal bit for bit; 5 different; 2 the request is wrong; 3 a checkpoint is missing, damaged or incomplete;
  1 hybridflow itself failed; 128 + n ended by signal n
"""


def add_inspect_and_diff(commands: Any) -> None:
    """Add ``inspect`` and ``diff`` to the sub-commands of a parser."""
    inspect = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Print format, family, settings, layout, progress and tensors of a checkpoint of any format, a "
        "step of a run, or a run. Read only headers.",
        epilog=_INSPECT_EXAMPLES,
    )
    inspect.add_argument("path", type=find_model, metavar="PATH", help="checkpoint, step, or directory of a run")
    inspect.add_argument("--verify", action="store_true", help="read everything, and check hashes if there are any")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, including the optimizer's")
    inspect.add_argument(
        "--base", type=find_model, metavar="DIR", help="base model of an adapter whose base is not found"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=functools.partial(_run, _inspect))
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare two checkpoints of any formats and layouts tensor by tensor, bit for bit, in bounded "
        "memory. Print the worst tensors with max|a - b|, absolute and relative to the largest magnitude in either.",
        epilog=_DIFF_EXAMPLES,
    )
    diff.add_argument("one", type=find_model, metavar="A", help="checkpoint")
    diff.add_argument("other", type=find_model, metavar="B", help="other checkpoint")
    diff.add_argument("--all", action="store_true", help=f"list every tensor that differs, not the {_WORST} worst")
    diff.add_argument(
        "--optimizer",
        action="store_true",
        help="compare moments and master weights too; A and B must be checkpoints of runs",
    )
    diff.add_argument("--base", type=find_model, metavar="DIR", help="base model of adapters whose base is not found")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=functools.partial(_run, _diff))


def _run(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command, tell which signal or file ended it, and give the exit status."""
    allow_many_files()
    try:
        with signals_raise():
            return command(arguments)
    except Ended as ended:
        complain(f"ended by {signal.Signals(ended.signal).name}")
        return exit_status(ended)
    except OSError as error:
        # The file is of a checkpoint; cli.main takes it for one of a job.
        complain(error)
        return exit_status(error)


def _inspect(arguments: argparse.Namespace) -> int:
    from hybridflow.checkpoint.contents import is_damaged, look, verified
    from hybridflow.checkpoint.contents_text import as_text

    def verify(found: Contents) -> Contents:
        progress = _Progress(f"{found.path}: checked", format_bytes)
        return verified(found, base=arguments.base, progress=progress) if arguments.verify else found

    found = look(arguments.path, base=arguments.base, verify=verify)
    if arguments.json:
        print_out(json.dumps(found.to_dict(), indent=1))
    else:
        print_out(as_text(found, every_tensor=arguments.tensors))
    return SOURCE if is_damaged(found) else DONE


def _diff(arguments: argparse.Namespace) -> int:
    from hybridflow.checkpoint.differences import AllKinds, compare, differing_settings
    from hybridflow.checkpoint.formats.registry import open_source

    one, other = (open_source(path, base=arguments.base) for path in (arguments.one, arguments.other))
    settings = differing_settings(one, other)
    pair: tuple[Source | AllKinds, Source | AllKinds] = one, other
    if arguments.optimizer:
        pair = AllKinds(one.path), AllKinds(other.path)
    found = compare(*pair, settings, _Progress("compared", "{:,}".format))
    if arguments.json:
        print_out(json.dumps({"one": str(one.path), "other": str(other.path), **found.to_dict()}, indent=1))
    else:
        print_out(_as_text(found, one.path, other.path, len(found.compared) if arguments.all else _WORST))
    return DONE if found.is_equal else DIFFERENT


def _as_text(found: Differences, one: Path, other: Path, most: int) -> str:
    count = f"{found.num_tensors} tensors, {found.num_parameters:,} parameters"
    if found.is_equal:
        return f"equal: {count}"
    if found.is_equal_but_for_dtype:
        pairs = sorted({f"{each.one.dtype} and {each.other.dtype}" for each in found.compared})
        return f"equal but for dtype: {count}; {len(found.compared)} of these tensors are {', '.join(pairs)}"
    lines = [
        f"different: A is {one}, B is {other}",
        f"  {count} in both, {len(found.compared)} of these tensors differ",
    ]
    lines += [f"  setting {key}: {_value(mine)} in A, {_value(theirs)} in B" for key, mine, theirs in found.settings]
    for names, side in ((found.only_one, "A"), (found.only_other, "B")):
        lines += [f"  only in {side}: {name}" for name in names[:most]]
        lines += [f"  only in {side}: {len(names) - most} more"] if len(names) > most else []
    lines += [f"  shapes: {name}: {list(mine)} in A, {list(theirs)} in B" for name, mine, theirs in found.shapes[:most]]
    lines += [f"  shapes: {len(found.shapes) - most} more"] if len(found.shapes) > most else []
    if found.compared:
        lines += ["", *_table(found.compared[:most])]
    if len(found.compared) > most:
        lines.append(f"  and {len(found.compared) - most} more: --all lists them")
    return "\n".join(lines)


def _value(value: object) -> str:
    return "not set" if value is None else json.dumps(value)


def _table(compared: tuple[Compared, ...]) -> list[str]:
    width = max(len(each.name) for each in compared)
    lines = [f"  {'the worst tensors':<{width}}  {'max|a-b|':>9}  {'relative':>9}  unequal"]
    for each in compared:
        size = math.prod(each.one.shape)
        told = f"{each.num_unequal:,} of {size:,}" if each.num_unequal else "no value, but bits"
        if each.one.dtype != each.other.dtype:
            told += f"; {each.one.dtype} and {each.other.dtype}"
        if each.num_not_finite:
            told += f"; {each.num_not_finite:,} where one is NaN or infinite"
        lines.append(f"  {each.name:<{width}}  {each.max_abs:9.3g}  {each.relative:9.3g}  {told}")
    return lines


class _Progress:
    """Says on stderr how far a long reading is, every few seconds; nothing where it is short."""

    def __init__(self, what: str, text: Callable[[int], str]) -> None:
        self._what, self._text = what, text
        self._told_s: float | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._told_s is None:
            self._told_s = time.monotonic()
        if time.monotonic() - self._told_s >= _REPORT_EVERY_S:
            self._told_s = time.monotonic()
            print(f"{self._what} {self._text(done)} of {self._text(total)}", file=sys.stderr, flush=True)
