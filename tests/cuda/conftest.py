"""These tests run in an environment with torch's CUDA build: tests/e2e/test_cuda_build.py starts them there."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*"]
