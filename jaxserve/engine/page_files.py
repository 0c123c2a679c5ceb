"""Contents of KV pages in files, which outlive the engine: the lowest tier (see `jaxserve.scheduling.page_tiers`).

A file holds one page. Its name is the page's key in hexadecimal, and it lies in a subfolder named by the fingerprint of
the model and of all settings that change what is computed, so that other models never see it. The format:

  8 bytes     MAGIC
  32 bytes    BLAKE2b (RFC 7693) of the subfolder's name, the key and all that follows
  the rest    the page's arrays, see `CacheLayout.contents`, one after the other

A file is written under another name and then renamed. Nothing is synced: after a crash of the machine a file may be
incomplete, and its digest tells. A file that is not whole is deleted when it is read.

The text of conversations can be recovered from their KV pages. So only this user may enter the folder, and a folder
that others may enter is refused. Two engines may share a folder; each then counts only the files that it knows of.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import ConfigError

log = logging.getLogger(__name__)

MAGIC = b"jaxskv1\n"
DIGEST_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{66}")
_TEMPORARY = ".new-"


class PageFiles:
    """The files of one folder. Threads may call everything."""

    def __init__(self, folder: Path, fingerprint: str, shapes: Sequence[jax.ShapeDtypeStruct], most_bytes: int):
        """`shapes`: the arrays of one page. Files take at most `most_bytes`, those of other fingerprints included; the
        least recently used ones are deleted first. Raises ConfigError for a folder that cannot be used."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._most = most_bytes
        self._shapes = [(x.shape, np.dtype(x.dtype)) for x in shapes]
        self._page_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes)
        self._sizes: OrderedDict[str, int] = OrderedDict()  # path in the folder -> bytes; least recently used first
        self.bytes = 0  # of all files
        self.found = 0  # files of this fingerprint at the start
        self.evictions = self.damaged = self.written = self.read_pages = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._complained = False
        self._clears = 0
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"kv_offload_dir: {folder} cannot be used: {error}") from error

    def _open(self) -> None:
        folder = self._folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"kv_offload_dir: {folder} must be this user's, and closed to others (chmod 700), because the text of "
                "conversations can be recovered from KV pages"
            )
        (folder / self._fingerprint).mkdir(mode=0o700, exist_ok=True)
        files = []
        for path in folder.glob("*/*"):
            if path.name.startswith(_TEMPORARY):
                path.unlink(missing_ok=True)
            elif _NAME.fullmatch(path.name):
                stat = path.stat()
                files.append((stat.st_mtime, f"{path.parent.name}/{path.name}", stat.st_size))
        for _, name, size in sorted(files):
            self._sizes[name] = size
            self.bytes += size
        self._shrink()
        self.found = sum(name.startswith(f"{self._fingerprint}/") for name in self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._sizes

    def _name(self, key: bytes) -> str:
        return f"{self._fingerprint}/{key.hex()}"

    def touch(self, key: bytes) -> None:
        """A content was used; this engine deletes it later than others."""
        with self._lock:
            if (name := self._name(key)) in self._sizes:
                self._sizes.move_to_end(name)

    def write(self, key: bytes, page: Sequence[np.ndarray]) -> bool:
        """Writes the arrays of a page unless its file is there. Returns whether the file is there; a failure is
        logged."""
        if key in self:
            self.touch(key)
            return True
        clears = self._clears
        name = self._name(key)
        temporary = self._folder / self._fingerprint / f"{_TEMPORARY}{os.getpid()}"
        temporary = temporary.with_name(f"{temporary.name}-{next(self._numbers)}")
        body = b"".join(np.ascontiguousarray(x).view(np.uint8).data for x in page)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for part in (MAGIC + self._digest(key, body), body):
                    if file.write(part) != len(part):
                        raise OSError("the file system is full")
            os.replace(temporary, self._folder / name)
        except OSError as error:
            if not self._complained:
                log.warning("a KV page could not be written to %s; others may follow: %s", self._folder, error)
            self._complained = True
            temporary.unlink(missing_ok=True)
            return False
        with self._lock:
            self.bytes += len(MAGIC) + DIGEST_BYTES + len(body) - self._sizes.pop(name, 0)
            self._sizes[name] = len(MAGIC) + DIGEST_BYTES + len(body)
            self.written += 1
            if clears != self._clears:
                self._delete(name)
            self._shrink()
        return True

    def read(self, key: bytes) -> list[np.ndarray] | None:
        """The arrays of a page; None if its file is gone, or not what was written."""
        path = self._folder / self._name(key)
        try:
            data = path.read_bytes()
            os.utime(path)  # the time of the last use decides what a later engine deletes first
        except OSError:
            self._forget(key)
            return None
        head = len(MAGIC) + DIGEST_BYTES
        body = memoryview(data)[head:]
        if len(body) != self._page_bytes or data[:head] != MAGIC + self._digest(key, body):
            log.warning("%s is damaged and not used", path)
            self.damaged += 1
            path.unlink(missing_ok=True)
            self._forget(key)
            return None
        self.touch(key)
        self.read_pages += 1
        arrays = []
        at = 0
        for shape, dtype in self._shapes:
            size = math.prod(shape) * dtype.itemsize
            arrays.append(np.frombuffer(body[at : at + size], dtype).reshape(shape))
            at += size
        return arrays

    def clear(self) -> None:
        """Deletes all files of this model and these settings."""
        with self._lock:
            self._clears += 1
            for name in [name for name in self._sizes if name.startswith(f"{self._fingerprint}/")]:
                self._delete(name)

    def seconds_to_read(self) -> float:
        """Seconds in which a page is read and checked that the system does not have in memory."""
        key = b"\0" * 33
        page = [np.zeros(shape, dtype) for shape, dtype in self._shapes]
        self.write(key, page)
        path = self._folder / self._name(key)
        try:
            with path.open("rb") as file:
                os.fsync(file)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return math.inf  # it could not be written
        start = time.perf_counter()
        self.read(key)
        seconds = time.perf_counter() - start
        with self._lock:
            self._delete(self._name(key))
        return seconds

    def _digest(self, key: bytes, body: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(self._fingerprint.encode() + key, digest_size=DIGEST_BYTES)
        digest.update(body)
        return digest.digest()

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self.bytes -= self._sizes.pop(self._name(key), 0)

    def _shrink(self) -> None:
        while self.bytes > self._most:
            self._delete(next(iter(self._sizes)))
            self.evictions += 1

    def _delete(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name, 0)
        (self._folder / name).unlink(missing_ok=True)
