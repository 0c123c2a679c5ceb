"""Processes, and how they start and end: the API server, the engine, several API servers for one engine, and batch
files."""
