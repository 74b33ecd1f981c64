"""How much memory may be taken for a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_ROOT = Path("/")


def cache_bytes(cache_memory: float, device: torch.device, ranks_per_node: int) -> int:
    """Return the most memory that this rank's key-value cache may take.

    Args:
        cache_memory: In bytes, or, below 1, a share of what is free.
        device: Where the cache is to be.
        ranks_per_node: Ranks that share the memory of the node.
    """
    return int(cache_memory if cache_memory >= 1 else cache_memory * free_bytes(device, ranks_per_node))


def free_bytes(device: torch.device, ranks_per_node: int, root: Path = _ROOT) -> int:
    """Return the unused memory of a device; on a node, whose ranks share memory, this rank's part.

    Args:
        device: Where the cache is to be.
        ranks_per_node: Ranks that share the memory of the node.
        root: Where ``proc`` and ``sys`` are.
    """
    if device.type == "cuda":
        # Of what torch holds unused only whole segments are room for something large. Given back, they count as free.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return free
    least = min([_available_bytes(root), *_free_of_groups(root)])
    return max(least, 0) // ranks_per_node


def _available_bytes(root: Path) -> int:
    text = (root / "proc/meminfo").read_text(encoding="ascii")
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(found["MemAvailable"].split()[0]) * 1024


def _free_of_groups(root: Path) -> Iterator[int]:
    """Yield the memory left within the limits of this process's control groups, version 1 or 2."""
    for folder, limit, used in _memory_groups(root):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None:
            yield most - now + _cached_bytes(folder)


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield folder and file names of each control group that this process is in, and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be one of the host, of which only the top is seen.
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield top / part, *names


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if the file is absent or says that there is no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached_bytes(folder: Path) -> int:
    """Return the file cache, in bytes, that counts as used but can be reclaimed."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))
