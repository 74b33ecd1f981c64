"""The checks of gpu_kit.py, a process each: python -m gpu_checks.NAME [ARGUMENT] [--dry-run]."""
