"""What a recipe says: one frozen dataclass for each section, by subject. No torch."""

auto_cache_clear = True
"""Whether each change of phase gives back the GPU memory that torch holds unused. A program may set it."""
