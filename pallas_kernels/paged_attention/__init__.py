"""Attention over the pages of the KV cache. `reference` defines it in plain XLA; the other modules are its backends."""
