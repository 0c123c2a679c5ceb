"""Byte-level BPE's way to write bytes as text."""

from __future__ import annotations


def byte_level_alphabet() -> dict[str, int]:
    """Printable stand-ins: visible Latin-1 is itself, the other bytes count up from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in visible}
    hidden = [value for value in range(256) if value not in set(visible)]
    return alphabet | {chr(0x100 + i): value for i, value in enumerate(hidden)}
