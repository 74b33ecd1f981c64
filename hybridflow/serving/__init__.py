"""Generating for others: prompts of a file answered in a batch, and an endpoint over HTTP."""
