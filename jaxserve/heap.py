"""Memory that start-up leaves behind goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4  # of Linux's mman.h
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \S+ +(/\S*\.so[.0-9]*)$")  # read-only, of a library


def settle() -> None:
    """After start-up, what it alone needed: Python's garbage, freed memory, and the pages of libraries. What is left
    stays: the garbage collector need not hold up anybody to look at it again."""
    gc.collect()
    gc.freeze()
    trim()
    leave_libraries()


def trim() -> None:
    """Gives back what the C library keeps of freed memory for later. Loading and compiling leave hundreds of MiB of it
    behind, which serving will not ask for again. Does nothing where the library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def leave_libraries() -> None:
    """Takes the pages of shared libraries out of this process, which gets those back that it touches again.

    Linking, importing and compiling touch most of a library once: of XLA's 100 MiB that they leave, serving needs 30.
    The pages are the system's own copy of the files, which it would take when short of memory; a fault brings back 16
    of them in a microsecond. Does nothing where the system does not tell what is mapped.
    """
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _unwritten_libraries(Path("/proc/self/smaps").read_text()):
            madvise(start, end - start, _MADV_DONTNEED)


def _unwritten_libraries(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and end of mappings of libraries that hold nothing but the file's own bytes: where the linker has put
    addresses into a page, or it is swapped out, that page would be lost."""
    found: re.Match[str] | None = None
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if not value or not name.isidentifier():  # the head of the next mapping
            found = _MAPPING.match(line)
        elif name in ("Anonymous", "Swap") and value.split()[0] != "0":
            found = None
        elif name == "VmFlags" and found is not None:  # a mapping's last line
            yield int(found[1], 16), int(found[2], 16)
