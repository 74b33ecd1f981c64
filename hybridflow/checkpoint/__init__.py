"""What stays: checkpoints that are complete or absent, and resuming from them."""
