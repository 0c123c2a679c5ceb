"""Benchmarks: of any OpenAI-compatible server, of the engine in process, of a server's start."""
