"""What is computed: megatron-core GPT models, their attention, heads, log-probabilities, micro-batches and training step."""
