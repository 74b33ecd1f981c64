"""``python -m hybridflow``: the same as the ``hybridflow`` command."""

import sys

from hybridflow.cli import main

sys.exit(main())
