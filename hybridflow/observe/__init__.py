"""What a person sees: metrics, where the time went, the summary and the learning curve. Torch-free at import."""
