"""What a recipe says: one frozen dataclass for each section, by subject. No torch."""
