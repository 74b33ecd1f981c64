#!/usr/bin/env python3
"""Make two JSONL files of addition problems, one to train on and one held out.

Examples:
  python tools/make_arithmetic.py --train train.jsonl --held-out held_out.jsonl
  python tools/make_arithmetic.py --train train.jsonl --held-out held_out.jsonl --num-train 100 --dry-run
"""

import argparse
import sys

from hybridflow.config.data import ArithmeticConfig
from hybridflow.data.arithmetic import ensure_files, make_problems, to_jsonl
from hybridflow.errors import HybridflowError
from hybridflow.sections import read_section


def main() -> int:
    """Read the command line; write the files, or show what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="JSONL file to make")
    parser.add_argument("--held-out", required=True, help="JSONL file to make")
    parser.add_argument("--num-train", type=int, default=4000, help="problems to train on (default: %(default)s)")
    parser.add_argument("--num-held-out", type=int, default=256, help="problems held out (default: %(default)s)")
    parser.add_argument("--max-operand", type=int, default=99, help="largest operand (default: %(default)s)")
    parser.add_argument(
        "--mistake-share",
        type=float,
        default=0.0,
        help="share of wrong solutions among training problems with a carry (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="another seed, other problems (default: %(default)s)")
    parser.add_argument("--preferences", action="store_true", help="pairs of a right answer and a wrong carry")
    parser.add_argument("--dry-run", action="store_true", help="write nothing; show the first rows")
    options = vars(parser.parse_args())
    train, held_out, dry_run = options.pop("train"), options.pop("held_out"), options.pop("dry_run")
    has_preferences = options.pop("preferences")
    try:
        spec = read_section(ArithmeticConfig, options, source="arithmetic")
        if not dry_run:
            ensure_files(spec, train=train, held_out=held_out, has_preferences=has_preferences)
        problems = make_problems(spec, has_preferences=has_preferences)
        for path, rows in zip((train, held_out), problems, strict=True):
            print(f"{path}: {len(rows)} problems{', not written; they begin:' if dry_run else ''}")
            print(to_jsonl(rows[:3]) if dry_run else "", end="")
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
