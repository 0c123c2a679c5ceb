"""Returns memory to the system that only start-up needed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4  # of Linux's mman.h
# A read-only mapping of a library in smaps, and what follows up to its last line.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \S+ +/\S*\.so[.0-9]*\n((?:[A-Za-z_]+:.*\n)*)", re.MULTILINE
)
_CHANGED = re.compile(r"^(?:Anonymous|Swap): +[1-9]", re.MULTILINE)


def freeze() -> None:
    """Called once after start-up: collects garbage, then returns freed memory and the libraries' pages. Objects that
    are alive now stay for good, so `gc.freeze` exempts them from later, slow collections."""
    gc.collect()
    gc.freeze()
    trim()
    leave_libraries()


def trim() -> None:
    """Returns the freed memory that the C library retains. Loading and compiling leave hundreds of MiB of it, which
    serving does not need again. Does nothing where the C library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def leave_libraries() -> None:
    """Drops this process's mapped pages of shared libraries; a page that is touched again comes back by itself.

    Linking, importing and compiling touch most of a library once: 100 MiB of XLA, of which serving needs 30. The pages
    belong to the system's file cache, and a page fault maps 16 of them again in a microsecond. Does nothing on a system
    without /proc/self/smaps.
    """
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _unwritten_libraries(Path("/proc/self/smaps").read_text()):
            madvise(start, end - start, _MADV_DONTNEED)


def _unwritten_libraries(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and end of the library mappings whose pages all equal the file. Others must be kept: dropping a page that
    the linker has written to, or that is swapped out, would lose its contents."""
    for found in _MAPPING.finditer(smaps):
        if "VmFlags:" in found[3] and not _CHANGED.search(found[3]):
            yield int(found[1], 16), int(found[2], 16)
