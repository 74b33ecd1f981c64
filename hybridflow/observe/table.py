"""Tables of text. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], *, num_left: int | None = None) -> list[str]:
    """Format one line for each row, with cells aligned in columns.

    Args:
        rows: Equally many cells each; at least one row.
        num_left: So many columns stand at the left of their width, the others at the right; None: all at the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_left = len(widths) if num_left is None else num_left
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:num_left], widths[:num_left], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[num_left:], widths[num_left:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
