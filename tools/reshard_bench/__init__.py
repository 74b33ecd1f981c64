"""What ``tools/bench_reshard.py`` is made of: the pairs of layouts, the rivals, what is measured, and the report."""
