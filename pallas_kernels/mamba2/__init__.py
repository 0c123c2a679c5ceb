"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060)."""
