"""From a recipe to a checked job description: loading, checks across sections, and meshes. No torch."""
