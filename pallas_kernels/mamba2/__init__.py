"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) over states in the sequences' slots, with a file for each backend."""
