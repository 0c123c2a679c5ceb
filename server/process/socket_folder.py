"""A folder for the engine's socket. It is removed with the process that made it, or later if that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "jaxserve-"
_LOCK = "lock"
_SOCKET = "engine.sock"
_SHARED = "shared"
_LONGEST = 100  # bytes of a socket's path; operating systems allow 104 to 108


class SocketFolder:
    """A new folder that only this user may enter. This process holds a lock on a file in it for as long as it lives.
    Creating a folder removes those that killed processes left: their locks are free.

    Attributes:
      socket_path: where the engine is to listen.
      shared: a folder for files that several API servers share; it does not exist yet.
    """

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)  # mode 0700
        self.socket_path = os.path.join(self._folder, _SOCKET)
        self.shared = Path(self._folder, _SHARED)
        taken = os.path.join(self._folder, _LOCK)
        self._lock = os.open(taken + ".new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(taken + ".new", taken)  # under its final name the file is locked from the first moment

    def remove(self) -> None:
        _remove(Path(self._folder))
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _base() -> str:
    """The folder for temporary files, or one with a shorter name if a socket's path would be too long there."""
    usual = tempfile.gettempdir()
    for folder in (usual, os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp", "/dev/shm"):
        if folder and _length(folder) <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(f"the folder for temporary files has too long a name for a socket: {usual}; set TMPDIR to another")


def _length(base: str) -> int:
    """Length in bytes of a socket's path below `base`."""
    return len(os.fsencode(os.path.join(base, _PREFIX + "12345678", _SOCKET)))


def _sweep(base: str) -> None:
    """Removes the folders that killed processes of this user left in `base`."""
    for folder in _left_behind(base):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(lock)


def _left_behind(base: str) -> Iterator[Path]:
    with os.scandir(base) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # its process removes it at this moment
                ours = entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
                if ours and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    yield Path(entry.path)


def _remove(folder: Path) -> None:
    """Removes the socket, the shared files, the lock and then the folder, which stays if it holds anything else."""
    shutil.rmtree(folder / _SHARED, ignore_errors=True)
    for name in (_SOCKET, _LOCK):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
