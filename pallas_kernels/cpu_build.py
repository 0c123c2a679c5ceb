"""Builds the CPU kernels with the machine's C++ compiler, once. Imports nothing heavy, so that it can begin early.

A library is named by its source, without suffix.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

KERNELS = "cpu_kernels"
FOLDER = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w"]


def build(name: str = KERNELS) -> Path:
    """The compiled library, from the cache where it is there; it is named by all that it depends on.

    Raises OSError without a compiler, subprocess.CalledProcessError when it fails.
    """
    library = _library(name)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another thread or process may be at it
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                built = Path(folder) / "kernels.so"
                command = [_compiler(), *FLAGS, f"-I{_headers()}", str(_source(name)), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, text=True)
                built.replace(library)
    return library


def possible(name: str = KERNELS) -> bool:
    """Whether `build` can be expected to succeed: there is a compiler, or the library is there."""
    return shutil.which(_compiler()) is not None or _library(name).exists()


def begin() -> None:
    """Has `build` run in the background, unless this process will not use the CPU; failures show when it is needed."""

    def quietly() -> None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            build()

    if "cpu" in os.environ.get("JAX_PLATFORMS", "cpu"):
        threading.Thread(target=quietly, name="cpu-kernels", daemon=True).start()


def _source(name: str) -> Path:
    return FOLDER / f"{name}.cc"


def _library(name: str) -> Path:
    return _cache_folder() / f"{name}-{_key(name)}.so"


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _headers() -> Path:
    """Of XLA's foreign function interface; as `jax.ffi.include_dir()`."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("jaxlib is not installed")
    return Path(spec.origin).parent / "include"


def _key(name: str) -> str:
    info = Path("/proc/cpuinfo")  # of Linux alone
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else [platform.processor()]
    cpu = [line for line in lines if line.startswith(("flags", "Features", "model name"))] or lines
    sources = [path.read_text() for path in (*sorted(FOLDER.glob("cpu_*.h")), _source(name))]
    key = "\n".join([*sources, _compiler(), *FLAGS, importlib.metadata.version("jaxlib"), *cpu])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("JAXSERVE_CACHE") or user_cache / "jaxserve")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
