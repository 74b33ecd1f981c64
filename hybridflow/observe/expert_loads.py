"""How much every expert of the actor had to do: ``expert_loads.jsonl``, a line for each step. Torch-free.

A file of its own, since a model has thousands of experts: too many for a line of metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hybridflow.observe.files import replace_by_pieces, writing

EXPERT_LOADS_FILE = "expert_loads.jsonl"
_STATISTIC = "expert_load/"
_WHOLE_LINE = re.compile(rb'\{"step":([0-9]{1,18}),"loads":\{[^{}]*\}\}\n')

Loads = Mapping[int, Sequence[float]]
"""Layer -> each expert's tokens over the mean of its layer. Layers without experts are left out."""


def as_statistics(loads: Loads) -> dict[str, list[float]]:
    """Return loads as statistics of a role, see ``Role.sample_stats``."""
    return {f"{_STATISTIC}{layer}": list(shares) for layer, shares in loads.items()}


def from_statistics(ranks: Iterable[Mapping[str, Sequence[float]]]) -> Loads:
    """Return the loads that are among the statistics of any rank; ranks that have them tell the same."""
    return {
        int(name.removeprefix(_STATISTIC)): values
        for statistics in ranks
        for name, values in statistics.items()
        if name.startswith(_STATISTIC)
    }


class ExpertLoadsFile:
    """Records loads; kept by one rank. A run without experts has no such file.

    Args:
        run_dir: Directory of the run.
        resumed_step: As for ``MetricsLog``: lines after it are dropped, and all of them if it is None.

    Raises:
        WriteError: The file system refuses.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        self._path = run_dir / EXPERT_LOADS_FILE
        with writing(self._path):
            if not self._path.exists():
                return
            replace_by_pieces(self._path, self._lines_up_to(0 if resumed_step is None else resumed_step))

    def write(self, step: int, loads: Loads) -> None:
        """Add a step's loads, if there are any.

        Raises:
            WriteError: The file system refuses.
        """
        if not loads:
            return
        rounded = {str(layer): [round(share, 4) for share in shares] for layer, shares in sorted(loads.items())}
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loads": rounded}, separators=(",", ":")) + "\n")

    def _lines_up_to(self, last: int) -> Iterator[bytes]:
        """Yield the lines of the steps up to one, as they are; a line that a kill has cut short is left out."""
        with self._path.open("rb") as file:
            for line in file:
                match = _WHOLE_LINE.fullmatch(line)
                if match is not None and int(match[1]) <= last:
                    yield line
