"""What is computed: megatron-core GPT models, attention, heads, log-probabilities, micro-batches, the training step."""
