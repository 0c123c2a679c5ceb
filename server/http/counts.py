"""Counts that limits are checked against: of one API server, or of all API servers of a server together."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxserve.server.http.keys import ApiKey

_HASHED = 2**16  # cells of an API server for names that are not known beforehand; see SharedCounts
_BYTES = 8  # of a cell, a signed number
CONNECTIONS = "connections"
BODY_BYTES = "body_bytes"
STREAMS = "streams"
BEATS = "beats"  # grows while an API server's event loop turns
LIMITED_PATHS = "/profile", "/reset_prefix_cache"  # their "counts" add up to the time of the latest call
KNOWN = "known"  # what an API server knows of the engine; see `ServerState.all_api_servers_know`


def requests_of(key: ApiKey) -> str:
    """The name of the count of requests under a key."""
    return f"requests {key.digest.hex()}"


def completions_of(key: ApiKey) -> str:
    return f"completions {key.digest.hex()}"


def names_of(keys: Sequence[ApiKey]) -> list[str]:
    """The names that get cells of their own in a server with these keys."""
    fixed = [CONNECTIONS, BODY_BYTES, STREAMS, BEATS, KNOWN, *LIMITED_PATHS]
    return list(dict.fromkeys([*fixed, *map(requests_of, keys), *map(completions_of, keys)]))


class Counts:
    """Counts by name, of a server's only API server."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int) -> None:
        """Adds `number`, which may be negative, to this API server's count."""
        self._counts[name] += number
        if not self._counts[name]:
            del self._counts[name]

    def total(self, name: str) -> int:
        """The sum of all API servers' counts."""
        return self._counts[name]

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other API servers from counting between a check and what follows from it. Nothing may wait inside."""
        return contextlib.nullcontext()

    def each(self, name: str) -> list[int]:
        """Every API server's count."""
        return [self._counts[name]]


class SharedCounts(Counts):
    """Counts by name, of several processes: a file in shared memory with a row of cells for each API server.

    An API server writes only to its own row; the row of an API server that was killed is cleared (`clear`). Names that
    are not in `names` share _HASHED cells, by a hash that clients cannot predict because it depends on the folder's
    random name: two of the at most some thousand clients' addresses rarely meet in a cell, and then count together."""

    def __init__(self, path: str, names: Sequence[str], row: int, rows: int):
        self._cells = {name: number for number, name in enumerate(names)}
        self._row = row
        self._rows = rows
        self._width = len(names) + _HASHED
        self._secret = hashlib.sha256(path.encode()).digest()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = rows * self._width * _BYTES
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._numbers = memoryview(mmap.mmap(self._file, size)).cast("q")

    def _cell(self, name: str) -> int:
        """A name's cell in each row."""
        if (cell := self._cells.get(name)) is None:
            digest = hashlib.blake2b(name.encode(), digest_size=2, key=self._secret).digest()
            cell = len(self._cells) + int.from_bytes(digest)
        return cell

    def add(self, name: str, number: int) -> None:
        self._numbers[self._row * self._width + self._cell(name)] += number

    def total(self, name: str) -> int:
        return sum(self.each(name))

    def each(self, name: str) -> list[int]:
        cell = self._cell(name)
        return [self._numbers[row * self._width + cell] for row in range(self._rows)]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # a process that is killed gives it back
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def clear(self, row: int) -> None:
        """Forgets the counts of an API server that has ended."""
        begin = row * self._width
        self._numbers[begin : begin + self._width] = memoryview(bytes(self._width * _BYTES)).cast("q")
