"""Parts of ``tools/bench/bench_reshard.py``: the pairs of layouts, the rivals, the measurements, and the report."""
