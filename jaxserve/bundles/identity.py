"""What a model's files are, by their SHA-256."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxserve.bundles.container import hashed
from jaxserve.checkpoints.hub import BUNDLE

FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.gguf", "*.tiktoken", "*.txt")
TOKENIZER = ("tokenizer*", "tekken.json", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")


def model_files(model: Path) -> dict[str, str]:
    """Name -> SHA-256 of the files of a model that answers depend on: weights, config, tokenizer, templates. `model` is
    a folder or a GGUF file. Of an Orbax checkpoint these are all of its files. Raises BundleError for one that cannot
    be read."""
    if model.is_file():
        part = model.name.rpartition("-00001-of-")
        found = sorted(model.parent.glob(f"{part[0]}-*-of-{part[2]}")) if part[1] else [model]
    elif (model / BUNDLE).is_file():
        found = [model / BUNDLE]
    else:
        found = sorted({p for pattern in (*FILES, "orbax/**/*") for p in model.glob(pattern) if p.is_file()})
    root = model.parent if model.is_file() else model
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        digests = pool.map(lambda path: hashed(path)[1], found)
        return {str(path.relative_to(root)): digest for path, digest in zip(found, digests, strict=True)}
