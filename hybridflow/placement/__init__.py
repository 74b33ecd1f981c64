"""A model on a mesh: its weights, its training state, and what a program gave in its place."""
