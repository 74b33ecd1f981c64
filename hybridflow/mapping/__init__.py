"""What a placement costs: bytes on each rank. No torch, so that a login node can tell."""
