"""From a model's name to a folder on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from checkpoints.errors import CheckpointError

DEMO = "demo"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# Weights, configuration and tokenizer; never code.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """The folder of a local path, a hub id (downloaded to the hub's cache when needed) or the bundled "demo"; or the
    path of a GGUF file.

    Raises CheckpointError when there is no such model.
    """
    if model == DEMO and not Path(model).is_dir():
        return Path(__file__).parent / DEMO
    path = Path(os.path.expanduser(model))
    if model and os.path.isdir(path):
        return path.resolve()
    if model and os.path.exists(path):
        if path.suffix == ".gguf":
            return path.resolve()
        raise CheckpointError(
            f"{model} is a file; give the folder that holds config.json and the .safetensors files, or a .gguf file"
        )
    if not _HUB_ID.match(model):
        raise CheckpointError(
            f"no such model: {model!r} is neither an existing folder, nor a hub id like 'org/name', nor 'demo'"
        )
    return _download(model, [pattern for pattern in _FILES if weights or pattern != "*.safetensors"])


def local_folder(model: str) -> Path | None:
    """The model's folder where it is known without asking the hub."""
    try:
        return resolve_model(model) if model == DEMO or not _HUB_ID.match(model) or Path(model).is_dir() else None
    except CheckpointError:
        return None


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the library raises many unrelated types; the message is what helps
        raise CheckpointError(
            f"could not get {model!r} from the hub, and there is no local folder of that name: {error}"
        ) from error


def list_models(folders: Iterable[Path] = ()) -> list[tuple[str, Path]]:
    """(name, folder) of the bundled model, of those in the hub's cache, and of those in or below `folders`."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    found = [(DEMO, Path(__file__).parent / DEMO)]
    for folder in folders:
        if not folder.is_dir():
            raise CheckpointError(f"no such folder: {folder}")
        found += [(str(path.parent), path.parent) for path in sorted(folder.glob("**/config.json"))]
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return found
    for repo in sorted(repos, key=lambda r: r.repo_id):
        for revision in repo.revisions:
            if repo.repo_type == "model" and (revision.snapshot_path / "config.json").exists():
                found.append((repo.repo_id, revision.snapshot_path))
    return found
