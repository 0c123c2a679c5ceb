"""Attention over the pages of the KV cache: `reference` says what it is, the other modules are its backends."""
