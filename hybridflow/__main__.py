"""The command ``hybridflow``, also as ``python -m hybridflow``."""

import signal
import sys


def main() -> int:
    """Run a command and return the exit status."""
    try:
        # It imports for half a second, in which somebody who sees a mistake in the command presses Ctrl-C.
        from hybridflow.cli import main as run
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
