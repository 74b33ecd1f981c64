"""Settings of the whole suite."""

import os

from hypothesis import settings

# Ranks share few cores; also read by what the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the command does; torch reads it when it is imported, which ranks that are forked from here do not do.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

# No deadline for an example: machines are shared, and a slow one is not a wrong one.
settings.register_profile("hybridflow", deadline=None, derandomize=True)
settings.load_profile("hybridflow")
