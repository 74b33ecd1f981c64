#!/usr/bin/env python3
"""Write a checkpoint in another format or layout: ``hybridflow convert`` for pipelines that call scripts.

Examples:
  python tools/convert_checkpoint.py models/llama out/llama-tp2 --to megatron --layout tp2.pp2
  python tools/convert_checkpoint.py out/llama-tp2 out/llama-hf --to hf --dtype bf16 --json

Options and exit status: those of ``hybridflow convert --help``.
"""

import argparse
import sys

from hybridflow.checkpoint.convert.command import add_arguments, run


def main() -> int:
    """Read the arguments, and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
