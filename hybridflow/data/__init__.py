"""What comes in: tokenizers, prompts and their order, made-up problems."""
