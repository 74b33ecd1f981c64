"""What checkpoints look like on disk: each format as a source of logical tensors, and as a target."""
