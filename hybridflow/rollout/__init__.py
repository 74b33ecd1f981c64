"""How text is generated: sampling by counter-based noise, and decoding with a key-value cache on the training model's own modules."""
