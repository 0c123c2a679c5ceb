"""How byte-level BPE writes bytes as text."""

from __future__ import annotations


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte: visible Latin-1 stands for itself, and U+0100, U+0101, … for the other bytes in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in visible}
    hidden = [value for value in range(256) if value not in set(visible)]
    return alphabet | {chr(0x100 + i): value for i, value in enumerate(hidden)}
