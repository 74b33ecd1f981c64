"""How text is generated: sampling by counter-based noise, decoding with a key-value cache on the model in training."""
