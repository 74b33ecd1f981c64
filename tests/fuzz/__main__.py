"""Fuzz readers of files.

python -m tests.fuzz pickle --cases 10000 --keep found
python -m tests.fuzz all --cases 10000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.harness import fuzz, say
from tests.fuzz.targets import TARGETS, seeds


def main() -> int:
    """Fuzz one reader or all; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz readers of files.")
    parser.add_argument("reader", choices=[*TARGETS, "all"])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write files that failed there, as seeds/ has them")
    arguments = parser.parse_args()
    num_failed = 0
    for name in TARGETS if arguments.reader == "all" else [arguments.reader]:
        report, failed = fuzz(TARGETS[name], arguments.cases, seed=arguments.seed, extra=seeds(name))
        say(name, report)
        for (number, detail), case in zip(report.failures.items(), failed, strict=True):
            print(f"  case {number}, {case.name}: {detail.strip()}")
            if arguments.keep is not None:
                folder = arguments.keep / name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number}--{case.name.replace('/', '+')}").write_bytes(case.content)
        num_failed += len(failed)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
