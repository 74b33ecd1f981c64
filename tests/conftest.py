"""Settings of the whole suite."""

import os

from hypothesis import settings

# Ranks share few cores; also read by what the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline for an example: machines are shared, and a slow one is not a wrong one.
settings.register_profile("hybridflow", deadline=None, derandomize=True)
settings.load_profile("hybridflow")
