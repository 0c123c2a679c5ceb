"""Folders of compiled code. Whoever can write to such a folder can run code as this user, so only this user may."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("jaxserve.cache")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheFolder(NamedTuple):
    """A folder whose files were written only by this user or root.

    Attributes:
      is_private: the folder is this user's, who may write to it. Native libraries are loaded only from such a folder.
    """

    path: Path
    is_private: bool


def open_cache(path: Path) -> CacheFolder | None:
    """Opens the cache at `path`. Creates it and its parents with mode 0700 if they are missing.

    If others can write to the folder, or another user owns it, its subfolder `user-UID` is used instead. A read-only
    folder is used if root or this user owns it. Returns None, with a warning, if no folder can be trusted.
    """
    try:
        _make(path)
        found = path.stat()
        own = found.st_uid == os.geteuid()
        read_only = not is_writable(path)
        if not found.st_mode & _OTHERS_WRITE and (own or (read_only and found.st_uid == 0)):
            return CacheFolder(path, is_private=not read_only)
        mine = path / f"user-{os.geteuid()}"
        _make(mine)
        if is_ours(mine):
            log.info("%s is open to others; compiled code goes to %s", path, mine)
            return CacheFolder(mine, is_private=True)
        reason = f"{mine} is another user's, or others may write to it"
    except OSError as error:
        reason = str(error)
    log.warning("compiled code is not kept, which makes starts slower: %s", reason)
    return None


def is_ours(path: Path) -> bool:
    """Whether a file or folder exists, is this user's, and nobody else may write to it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def is_writable(path: Path) -> bool:
    """Whether this user may write to a folder. Root is held to the permissions of the folder, too."""
    return bool(path.stat().st_mode & (stat.S_IWUSR | _OTHERS_WRITE)) and os.access(path, os.W_OK | os.X_OK)


def _make(path: Path) -> None:
    for folder in (*reversed(path.absolute().parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
