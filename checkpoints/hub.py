"""From a model's name to a folder on disk."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from jaxserve.checkpoints.errors import CheckpointError

DEMO = "demo"
# In a bundle: the manifest, the folder of config and tokenizer, and in this folder both as a GGUF file without weights.
BUNDLE = "bundle.json"
BUNDLE_MODEL = "model"
BUNDLE_GGUF = "model.gguf"
BUNDLED = (DEMO, "demo-vision", "demo-eagle3", "demo-draft")  # folders beside this file: models, and drafts for one
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?")
# Files of configuration and tokenizer; never code. Subfolders hold copies of the weights in other formats.
# Of sentence-transformers' modules, each in a folder of its own.
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model*", "*.tiktoken")
HUB_SECONDS = 10  # without the hub's answer after this time, the files in its local cache are used
_TEMPLATES = "additional_chat_templates/"


def resolve_model(
    model: str, *, weights: bool = True, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The folder of a local path, a hub id (downloaded when needed) or one of BUNDLED; or the path of a GGUF file.
    `revision` is a hub id's branch, tag or commit; the id may contain it too: "org/name@main". Downloads are kept in
    `download_dir`, or else in the hub's own cache.

    Raises CheckpointError when there is no such model.
    """
    found = None if _is_local(model) else _HUB_ID.fullmatch(model)
    if found:
        own = found["revision"]
        if own and revision not in (None, own):
            raise CheckpointError(f"{model!r} names the revision {own!r}, but {revision!r} was asked for beside it")
        return _download(found["repo"], own or revision, weights, download_dir)
    if revision is not None:
        raise CheckpointError(f"{model!r} is no hub id like 'org/name', so it has no revision {revision!r}")
    path = Path(os.path.expanduser(model))
    if model in BUNDLED and not path.is_dir():
        return Path(__file__).parent / model
    if model and os.path.isdir(path):
        return (bundled_model(path) if (path / BUNDLE).is_file() else path).resolve()
    if model and os.path.exists(path):
        if path.suffix == ".gguf":
            return path.resolve()
        raise CheckpointError(
            f"{model} is a file; give the folder that holds config.json and the .safetensors files, or a .gguf file"
        )
    raise CheckpointError(
        f"no such model: {model!r} is neither an existing folder, nor a hub id like 'org/name', nor 'demo' or "
        "'demo-vision'"
    )


def bundled_model(bundle: Path) -> Path:
    """A bundle's folder of config and tokenizer, or its GGUF file with both."""
    file = bundle / BUNDLE_MODEL / BUNDLE_GGUF
    return file if file.exists() else file.parent


def resolve_tokenizer(tokenizer: str | None, model: Path, download_dir: str | None = None) -> Path:
    """The tokenizer's path, as `resolve_model` finds it; for None that of the model."""
    return model if tokenizer is None else resolve_model(tokenizer, weights=False, download_dir=download_dir)


def local_folder(model: str) -> Path | None:
    """The model's folder if it is local, else None; does not ask the hub."""
    try:
        return None if not _is_local(model) and _HUB_ID.fullmatch(model) else resolve_model(model)
    except CheckpointError:
        return None


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" else None


def wanted_files(files: Sequence[str], weights: bool = True) -> list[str]:
    """The files of a repository to download. Consolidated weights are skipped if there are others."""
    top = [name for name in files if "/" not in name or name.startswith(_TEMPLATES)]
    shards = [name for name in top if name.endswith(".safetensors")]
    usual = [name for name in shards if name.startswith("model")]
    modules = [name for name in files if _MODULE.fullmatch(name) and (weights or name.endswith(".json"))]
    return [name for name in top if any(fnmatch(name, pattern) for pattern in _FILES)] + (
        [*(usual or shards), *modules] if weights else modules
    )


def _is_local(model: str) -> bool:
    return os.path.exists(os.path.expanduser(model))


def _download(repo: str, revision: str | None, weights: bool, download_dir: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    def failed(*errors: Exception | None) -> CheckpointError:
        at = f" at revision {revision!r}" if revision else ""
        why = "; ".join(str(error) for error in errors if error)
        return CheckpointError(
            f"could not get {repo!r}{at} from the hub, and there is no local folder of that name: {why}"
        )

    unreachable: Exception | None = None
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise failed(error) from error
    except Exception as error:  # use whichever files are in the cache
        unreachable = error
        wanted = ["-"]
    else:
        files = [file.rfilename for file in info.siblings or ()]
        wanted = [glob.escape(name) for name in wanted_files(files, weights)]
        if weights and not any(name.endswith(".safetensors") for name in wanted):
            others = [name for name in files if name.endswith((".bin", ".pth", ".pt", ".gguf", ".safetensors"))]
            raise CheckpointError(
                f"{repo!r} holds no .safetensors files, only {', '.join(sorted(others)[:3]) or 'other ones'}. Pickles "
                "(.bin, .pt, .pth) can run code and are never loaded; a .gguf file can be downloaded and served by path"
            )
    where = None if download_dir is None else os.path.expanduser(download_dir)
    cached = unreachable is not None
    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=wanted, cache_dir=where, local_files_only=cached
        )
        return Path(found)
    except Exception as error:  # the library raises many unrelated types
        raise failed(unreachable, error) from error


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
