"""What is installed here: versions of packages, and digests of code."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, for those of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def digest(tops: Mapping[str, Path], suffixes: Collection[str]) -> str:
    """The SHA-256 of the files with these suffixes, which lie below folders, or are files, of these names."""
    found = hashlib.sha256()
    for name, top in tops.items():
        inside = [top] if top.is_file() else top.rglob("*")
        for path in sorted(path for path in inside if path.suffix in suffixes):
            data = path.read_bytes()
            found.update(f"{name}/{path.relative_to(top)} {len(data)}\n".encode() + data)
    return found.hexdigest()
