"""hybridflow: RL post-training of language models on HPC clusters.

Importing the package is light: no torch, no MPI, no GPU library. What needs them imports them itself.
"""

__version__ = "0.1.0"
