"""Training steps of several trainers, measured side by side; see ``bench_step.py``."""
