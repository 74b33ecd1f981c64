"""What a person sees: metrics, where the time went, the summary. Torch-free at import."""
