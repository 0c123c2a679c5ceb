"""Folders of compiled code. Who can write to one can have us run what they like, so it must be ours alone."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("jaxserve.cache")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheFolder(NamedTuple):
    """A folder whose files nobody but this user or root has written.

    Attributes:
      is_private: it is this user's, who may also write to it. Native libraries are loaded from such a folder alone.
    """

    path: Path
    is_private: bool


def open_cache(path: Path) -> CacheFolder | None:
    """The cache at `path`, which is created where it is missing, together with its parents, all with mode 0700.

    In a folder that others can write to, or that is another user's, a folder `user-UID` takes its place. A folder that
    cannot be written to is taken as it is where root or this user owns it. None, and a warning, where there is no
    folder that can be trusted.
    """
    try:
        _make(path)
        found = path.stat()
        own, read_only = found.st_uid == os.geteuid(), not _is_writable(path, found)
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
    """Whether a file or folder is there and is this user's, and nobody else may write to it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def _is_writable(path: Path, found: os.stat_result) -> bool:
    """Also root does not write to a folder without write permissions."""
    return bool(found.st_mode & (stat.S_IWUSR | _OTHERS_WRITE)) and os.access(path, os.W_OK | os.X_OK)


def _make(path: Path) -> None:
    for folder in (*reversed(path.absolute().parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
