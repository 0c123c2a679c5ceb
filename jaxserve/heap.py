"""The C library's heap: what was freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Gives back what the C library keeps of freed memory for later. Loading and compiling leave hundreds of MiB of it
    behind, which serving will not ask for again. Does nothing where the library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
