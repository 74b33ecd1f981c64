"""The command ``hybridflow convert``. Light at import; what a conversion needs is imported when it begins."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.exit_status import FAILURE, Ended, exit_status
from hybridflow.families.hub_cache import find_model
from hybridflow.observe.console import complain, format_bytes, format_seconds, print_out, signals_raise
from hybridflow.parallel.process import allow_many_files
from hybridflow.parallel.start import Start, find_start, rank_hint

if TYPE_CHECKING:
    from hybridflow.checkpoint.convert.engine import Summary
    from hybridflow.checkpoint.convert.progress import Progress
    from hybridflow.checkpoint.formats.source import Source, Target

TARGETS = ("hf", "megatron", "hdf5", "megatron-dist", "peft")
SOURCES = (*TARGETS, "megatron-legacy")
_DTYPES = ("fp32", "bf16", "fp16")
_AFTER_PEER_S = 1.0
_LINE_EVERY_S = 10.0

EXAMPLES = """examples:
  hybridflow convert models/llama out/llama-tp2 --to megatron --layout tp2.pp2
  hybridflow convert out/llama-tp2 out/llama-hf --to hf --dtype bf16
  hybridflow convert models/llama out/llama.h5 --to hdf5
  hybridflow convert models/llama out/llama-h5 --to hdf5 --layout tp2
  hybridflow convert models/llama out/merged --to hf --merge-lora adapters/math
  hybridflow convert models/llama out/llama-tp4 --to megatron --layout tp4 --dry-run
  srun hybridflow convert models/llama out/llama-tp8 --to megatron --layout tp8.pp4 --json

exit status: 0 done; 2 the request is wrong (arguments, an unknown family); 3 the source is damaged, incomplete, hostile
  or cannot be read; 4 the target cannot be written or exists already; 1 hybridflow itself failed, or a rank was lost;
  128 + n ended by signal n
"""


def add_convert(commands: Any) -> None:
    """Add the sub-command to those of a parser."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another format or layout",
        description="Write a checkpoint in another format or layout, tensor by tensor in bounded memory. OUT is "
        "complete or absent. After an interruption the same command continues. Under srun, mpirun or torchrun each "
        "rank writes its own files.",
        epilog=EXAMPLES,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a conversion is told."""
    parser.add_argument(
        "source",
        type=find_model,
        metavar="SOURCE",
        help="checkpoint, one role of a run's checkpoint, or a name in Hugging Face's cache",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="path of the result, which must not exist yet")
    parser.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        help="format to write: megatron is hybridflow's model directory, megatron-dist is what Megatron loads",
    )
    parser.add_argument("--from", dest="source_format", choices=SOURCES, help="format of SOURCE (default: detected)")
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="layout to write, such as tp2.pp2; HDF5 gets one file per model-parallel rank and one that joins them "
        "(default: not cut)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="number format, rounded to nearest (default: the source's)")
    parser.add_argument("--max-shard-gb", type=float, metavar="GB", help="largest file of --to hf (default: 5)")
    parser.add_argument("--family", metavar="NAME", help="Hugging Face family, if the source does not name its own")
    parser.add_argument("--merge-lora", type=Path, metavar="DIR", help="add the updates of an adapter to the weights")
    parser.add_argument(
        "--base",
        type=find_model,
        metavar="DIR",
        help="where the base model is if SOURCE is an adapter, or the original if SOURCE is the language model of a "
        "vision-language model; needed if it is not found",
    )
    parser.add_argument("--restart", action="store_true", help="discard what an earlier attempt left in OUT.part")
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="longest wait for a rank without progress, in seconds (default: 600)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print which tensor would go where; write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    rank: int | None = None
    allow_many_files()
    try:
        with signals_raise():
            start = find_start()
            rank = start.rank
            arguments.out = Path(os.path.abspath(arguments.out))
            return _run(arguments, start)
    except Ended as ended:
        _end(ended, arguments.out)
    except Exception as error:
        return _explain(error, rank_hint() if rank is None else rank)


def _run(arguments: argparse.Namespace, start: Start) -> int:
    # Read when torch first allocates: large tensors come and go, and most of their cost is the kernel's small pages.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from hybridflow.checkpoint.convert.engine import Place, convert
    from hybridflow.checkpoint.convert.ranks import refusing

    if not 0 < arguments.deadline < math.inf:
        raise ConfigError(f"--deadline {arguments.deadline:g}: expected a number above 0, in seconds")
    with refusing(arguments.out, start.rank):
        source, target, what = _open(arguments)
    if arguments.dry_run:
        if start.rank == 0:
            print_out(_as_json(arguments, source, target) if arguments.json else _mapping(source, target))
        return 0
    show = _Show(sys.stderr.isatty(), silent=arguments.quiet or start.rank != 0)
    place = Place(rank=start.rank, size=start.size, deadline_s=arguments.deadline)
    try:
        summary = convert(source, target, arguments.out, what=what, place=place, restart=arguments.restart, show=show)
    finally:
        show.end()
    if summary is not None and arguments.json:
        print_out(_as_json(arguments, source, target, summary))
    elif summary is not None:
        print_out(_table(arguments, source, summary))
    elif not arguments.quiet and start.rank >= len(target.files):
        print(f"hybridflow: rank {start.rank}: {len(target.files)} file(s) need no more ranks", file=sys.stderr)
    return 0


def _open(arguments: argparse.Namespace) -> tuple[Source, Target, dict[str, object]]:
    """Open source and target of the request, and return them with the request in words."""
    from hybridflow.checkpoint.formats.registry import (
        OF_ADAPTERS,
        READABLE,
        for_export,
        make_target,
        open_merged,
        open_source,
        with_base,
    )
    from hybridflow.checkpoint.formats.sharded import find_base
    from hybridflow.checkpoint.formats.whole import is_part
    from hybridflow.families.config_json import describe
    from hybridflow.families.tables import FAMILIES
    from hybridflow.layout.parallel_layout import ParallelLayout

    wanted = arguments.source_format
    if wanted in READABLE:
        source = READABLE[wanted].open(arguments.source)
    else:
        source = open_source(arguments.source, base=arguments.base)
    if wanted not in (None, source.format):
        raise ConfigError(f"--from {wanted}: {arguments.source} is of format {source.format}; leave --from out")
    if arguments.family is not None:
        if arguments.family not in FAMILIES:
            raise ConfigError(f"--family {arguments.family}: not known; expected one of {', '.join(FAMILIES)}")
        # A name that goes with no such model would be found out by whoever reads the result.
        describe(source.model, family=arguments.family, has_value_head=source.has_value_head)
        source.family = arguments.family
    if arguments.to not in OF_ADAPTERS and find_base(source.path) is not None:
        source = with_base(source)
    if arguments.merge_lora is not None:
        arguments.merge_lora = Path(os.path.abspath(arguments.merge_lora))
        source = open_merged(source, arguments.merge_lora)
    is_completed = arguments.to == "hf" and is_part(source)
    if arguments.base is not None and source.format != "peft" and not is_completed:
        raise ConfigError(f"--base {arguments.base}: {arguments.source} is of format {source.format}; leave --base out")
    if is_completed:
        source = for_export(source, original=arguments.base)
    shard = arguments.max_shard_gb
    if shard is not None and not 1 <= shard * 1e9 < math.inf:
        raise ConfigError(f"--max-shard-gb {shard:g}: expected a number of at least 1e-09, a byte")
    target = make_target(
        arguments.to,
        source,
        dtype=arguments.dtype,
        layout=None if arguments.layout is None else ParallelLayout.parse(arguments.layout),
        max_shard_bytes=None if shard is None else int(shard * 1e9),
    )
    names = ("to", "layout", "dtype", "max_shard_gb", "family", "merge_lora", "base")
    asked = {name: getattr(arguments, name) for name in names}
    return source, target, {name: None if value is None else str(value) for name, value in asked.items()}


def _end(ended: Ended, out: Path) -> NoReturn:
    from hybridflow.checkpoint.convert.journal import part_folder

    name = signal.Signals(ended.signal).name
    kept = f"; {part_folder(out)} is kept, and the same command goes on where it was" * part_folder(out).exists()
    complain(f"ended by {name}{kept}")
    # No interpreter shutdown: it would wait for threads, and they for the disk.
    os._exit(exit_status(ended))


def _explain(error: Exception, rank: int) -> int:
    """Say on one rank what went wrong, and return the exit status."""
    from hybridflow.checkpoint.convert.ranks import PeerError

    if isinstance(error, PeerError):
        # It says itself what it met, if no launcher ends it before because of this one.
        time.sleep(_AFTER_PEER_S)
        return error.status
    status = exit_status(error)
    # An OSError names its file.
    if status == FAILURE and not isinstance(error, (HybridflowError, OSError)):
        traceback.print_exception(error)
        error = RuntimeError("failed, see above; this is an error of hybridflow's own")
    complain(f"{f'rank {rank}: ' if rank else ''}{error}")
    return status


class _Show:
    """Progress on stderr: a line that is rewritten on a terminal, else one now and then."""

    def __init__(self, is_terminal: bool, *, silent: bool) -> None:
        self._is_terminal, self._silent = is_terminal, silent
        self._last_s = time.monotonic()
        self._is_open = False

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._silent or not (self._is_terminal or now - self._last_s >= _LINE_EVERY_S):
            return
        self._last_s = now
        left = "" if progress.left_s is None else f", {format_seconds(progress.left_s)} left"
        line = (
            f"{progress.parts} of {progress.num_parts} tensors, {format_bytes(progress.done_bytes)} of "
            f"{format_bytes(progress.total_bytes)}, {progress.bytes_per_s / 1e6:.0f} MB/s{left}"
        )
        self._is_open = self._is_terminal
        head, end = ("\r\033[K", "") if self._is_terminal else ("", "\n")
        # That nobody watches any more is no reason to end.
        with contextlib.suppress(OSError):
            print(f"{head}{line}", end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line that was rewritten."""
        if self._is_open:
            print(file=sys.stderr)


def _as_json(arguments: argparse.Namespace, source: Source, target: Target, summary: Summary | None = None) -> str:
    """Return a JSON summary of what was done; without a summary, of what would be."""
    head: dict[str, object] = {
        "source": {
            "path": str(source.path),
            "format": source.format,
            "family": source.family,
            "layout": source.layout,
            "adapter": _adapter(source),
        },
        "target": {
            "path": str(arguments.out),
            "format": arguments.to,
            "layout": arguments.layout,
            "dtype": arguments.dtype,
        },
        "small_files": _names(source, arguments.to),
    }
    if summary is None:
        found = list(_rows(source, target))
        num_bytes = sum(at["bytes"] for _, _, places in found for at in places)
        rows = [{"tensor": name, "from": names, "to": places} for name, names, places in found]
        return json.dumps({**head, "bytes": num_bytes, "tensors": rows}, indent=2)
    done = {
        "num_tensors": summary.num_tensors,
        "num_cast": summary.num_cast,
        "bytes": summary.total_bytes,
        "found_parts": summary.found_parts,
        "found_bytes": summary.found_bytes,
        "seconds": summary.seconds,
        "mb_per_s": summary.mb_per_s,
        "peak_rss_anon_bytes": summary.peak_rss_anon_bytes,
    }
    files = {file: {"sha256": hashes} for file, hashes in summary.hashes.items()}
    return json.dumps({**head, **done, "files": files}, indent=2)


def _table(arguments: argparse.Namespace, source: Source, summary: Summary) -> str:
    adapter = _adapter(source)
    alone = "; --to peft writes it alone" if arguments.merge_lora is None else ""
    rows = {
        "from": f"{source.format} {source.path}" + (f", {source.layout}" if source.layout else ""),
        "to": f"{arguments.to} {arguments.out}" + (f", {arguments.layout}" if arguments.layout else ""),
        **({} if adapter is None else {"adapter": f"{adapter}, added to the weights{alone}"}),
        "tensors": f"{summary.num_tensors}, of which {summary.num_cast} cast to another dtype",
        "written": f"{format_bytes(summary.total_bytes)} in {len(summary.hashes)} file(s)",
    }
    rows["small files"] = _small_files(source, arguments.to)
    if summary.found_parts:
        rows["found"] = f"{format_bytes(summary.found_bytes)} complete, left by an earlier attempt"
    rows["time"] = f"{format_seconds(summary.seconds)}, {summary.mb_per_s:.0f} MB/s"
    rows["memory"] = f"{format_bytes(summary.peak_rss_anon_bytes)} at the peak of RssAnon"
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _adapter(source: Source) -> str | None:
    """Return the path of the adapter that is merged into the source's weights; None: there is none."""
    return None if source.adapter_path is None else str(source.adapter_path)


def _names(source: Source, to: str) -> list[str]:
    """Return the names of the small files that come along."""
    from hybridflow.checkpoint.formats.peft_dir import small_files

    assets = source.assets()
    return sorted(small_files(assets) if to == "peft" else assets)


def _small_files(source: Source, to: str) -> str:
    """Return the names of the small files that came along, and what to do where the tokenizer is not among them."""
    from hybridflow.checkpoint.formats.lora import is_adapter
    from hybridflow.families.assets import VOCABULARIES, ends_in

    assets = source.assets()
    found = ", ".join(_names(source, to)) or "none"
    # An adapter has that of its base.
    if is_adapter(source) or any(name in assets for name in VOCABULARIES):
        return found
    remedy = "copy it beside" if ends_in(assets).eos_ids else "copy it beside, and set eos_token_id in config.json"
    return f"{found}; no tokenizer: {remedy}"


def _mapping(source: Source, target: Target) -> str:
    """Show which tensors of the source make which of the target, for a person."""
    lines, num_bytes = [], 0
    for name, names, places in _rows(source, target):
        num_bytes += sum(at["bytes"] for at in places)
        lines.append(name + (f"  <- {', '.join(names)}" if names != [name] else ""))
        lines += [f"    {at['file']}  {at['key']}  {at['dtype']} {at['shape']}  {at['bytes']} B" for at in places]
    told = f"{len(source.tensors)} tensors, {format_bytes(num_bytes)} in {len(target.files)} file(s)"
    merged = "" if _adapter(source) is None else f", with the adapter {_adapter(source)} added"
    lines.append(f"{told}{merged}; nothing was written")
    return "\n".join(lines)


def _rows(source: Source, target: Target) -> Iterator[tuple[str, list[str], list[dict[str, Any]]]]:
    """Yield logical name, the source's names of its parts, and where they go."""
    for name in source.tensors:
        places = []
        for file, key in target.places(name):
            entry = target.files[file][key]
            at = {"dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.num_bytes}
            places.append({"file": file, "key": key, **at})
        yield name, source.names(name), places
