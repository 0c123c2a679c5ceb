"""Reads files that somebody else may have written: only regular ones, never more than a limit, and with any error of
their contents as a CheckpointError that names the file."""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.errors import CheckpointError

MAX_JSON_BYTES = 2**24  # of a file with settings; the largest known ones name each tensor of a large model
MAX_JSON_CONTAINERS = 2**18  # objects and lists, each of which costs a hundred times its bytes
MAX_SHOWN = 120  # characters of a name or value from a file in a message
MAX_MESSAGE = 2000
# What code raises that was given values which it does not expect. Devices raise RuntimeError, so it is not one of them.
_UNEXPECTED = (
    ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, MemoryError, RecursionError,
    TypeError, ValueError, struct.error,
)  # fmt: skip

_SHOWN = reprlib.Repr()
_SHOWN.maxlist = _SHOWN.maxdict = _SHOWN.maxtuple = MAX_SHOWN // 4
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = MAX_SHOWN


def open_regular(path: str | Path) -> FileIO:
    """Opens a file to read it, without waiting: a pipe without a writer would block for good, and a device may have no
    end. Raises OSError for what is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, most: int | None = MAX_JSON_BYTES) -> bytes:
    """The contents of a regular file. Raises OSError if it has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
        data = file.read(size + 1)
    if len(data) > size:
        raise OSError(errno.EBUSY, "it grew while it was read", str(path))
    return data


def read_text(path: str | Path, most: int | None = MAX_JSON_BYTES) -> str:
    """As `read_bytes`. Raises ValueError for text that is not UTF-8."""
    return read_bytes(path, most).decode()


def read_json(path: str | Path, most: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file. Raises OSError, and ValueError or RecursionError for what is not JSON or too large."""
    data = read_bytes(path, most)
    if (count := data.count(b"[") + data.count(b"{")) > MAX_JSON_CONTAINERS:
        raise ValueError(f"it has {count} objects and lists, and at most {MAX_JSON_CONTAINERS} are read")
    return json.loads(data.decode())


def shown(value: Any, most: int = MAX_SHOWN) -> str:
    """A name or a value from a file, for a message."""
    if isinstance(value, str | bytes):
        return shortened(repr(value[: most + 1]), most)
    return shortened(_SHOWN.repr(value), most)


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def clipped(message: str) -> str:
    """A message that may repeat what a file holds, cut to a length that can be read."""
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


@contextmanager
def contents_of(path: str | Path, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Turns errors that the contents of a file or folder have caused, of whatever type, into those of `kind`. Errors
    that jaxserve has written for users stay as they are."""
    try:
        yield
    except MemoryError as error:
        raise kind(f"{path} cannot be used: its contents would take too much memory") from error
    except (*_UNEXPECTED, OSError) as error:
        if isinstance(error, ValueError) and type(error).__module__.startswith("jaxserve."):
            raise
        why = clipped(f"{type(error).__name__}: {error}")
        raise kind(f"{path} cannot be used, its contents are damaged or wrong: {why}") from error
