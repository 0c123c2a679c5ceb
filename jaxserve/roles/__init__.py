"""Prefill and decode apart: what servers with these roles tell each other, and the threads that do so."""
