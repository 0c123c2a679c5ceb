"""Texts for the bundled demo model, for training and held out: the Python standard library's source."""

import hashlib
import sysconfig
from pathlib import Path

EOT = "<|endoftext|>"
HELDOUT_PERCENT = 3


def read_sources() -> dict[str, str]:
    """The standard library's own source by relative path, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "entities.py"}
    sources = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if skipped & set(name.split("/")) or name.startswith(("_sysconfigdata", "config-")):
            continue
        text = path.read_text("utf-8", errors="replace")
        if text.strip() and "decoding_table" not in text and EOT not in text:
            sources[name] = text
    return sources


def is_heldout(name: str) -> bool:
    """Whether a file is kept out of training: a property of its name alone, so that every run agrees."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELDOUT_PERCENT


def by_hash(texts: dict[str, str]) -> list[tuple[str, str]]:
    """The files in an order that depends only on their names."""
    return sorted(texts.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
