"""Benchmarks of any OpenAI-compatible server, of the engine in this process, of a server's start, and of kernels."""
