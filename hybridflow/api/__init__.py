"""The Python API: what a program says in a few lines becomes a recipe, and is run as one."""
