"""Shell scripts in the place of a system's programs."""

from __future__ import annotations

from pathlib import Path


def put_program(path: Path, text: str) -> None:
    """Write a program of bash; the folder is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
