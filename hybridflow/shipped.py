"""Files that come with the package: recipes in ``launch/`` and batch scripts in ``slurm/``. No torch."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def shipped(folder: str) -> Path:
    """Return where a folder of shipped files lies: inside an installed package, or beside it in a clone.

    Args:
        folder: ``"launch/recipes"`` or ``"slurm"``.
    """
    installed = PACKAGE / folder
    return installed if installed.is_dir() else PACKAGE.parent / folder
