"""Builds the CPU kernels with the machine's C++ compiler, once. Light imports only, so that it can start early.

A library has the name of its source file, without suffix.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from jaxserve.pallas_kernels.cache_folder import is_ours, open_cache

KERNELS = "cpu_kernels"
ATTENTION = "cpu_attention"
PANELS = "cpu_panel_matmul"
LATENT = "cpu_latent"
LORA = "cpu_lora"
QUANT_MATMUL = "cpu_quant_matmul"
RECURRENT = "cpu_recurrent"
NAMES = KERNELS, ATTENTION, PANELS, LATENT, LORA, QUANT_MATMUL, RECURRENT
FOLDER = Path(__file__).parent
# Compile for this machine's vector instructions. Arm's compilers choose them by the processor.
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ["-O3", NATIVE, "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w"]


def load(name: str = KERNELS) -> ctypes.CDLL:
    """Returns the compiled library from the cache. Its file name depends on everything that it was built from.

    Without a private cache it is built for this process only. Raises OSError without a compiler, and
    subprocess.CalledProcessError if the compiler fails.
    """
    cache = _cache_folder()
    if cache is not None:
        return ctypes.CDLL(str(_build(name, cache)))
    with tempfile.TemporaryDirectory(prefix="jaxserve-kernels-") as folder:
        return ctypes.CDLL(str(_build(name, Path(folder))))


def possible(name: str = KERNELS) -> bool:
    """Whether `load` can be expected to succeed: there is a compiler, or the library is in the cache."""
    if _compiler() is not None:
        return True
    cache = _cache_folder()
    return cache is not None and is_ours(_library(name, cache))


def lacking() -> str | None:
    """Returns what prevents building the kernels here and what that costs, or None if nothing is known beforehand."""
    if _compiler() is not None:
        return None
    # Measured on two cores with 100 million parameters and 8 concurrent requests.
    cost = "plain XLA takes the kernels' place, 1.5 times slower with float32 weights, 5 times with quantized ones"
    return f"there is no C++ compiler: no {_compiler_name()!r} (CXX) on the PATH; {cost}. Install g++ or clang"


def begin() -> None:
    """Builds what every model needs in the background, unless this process will not use the CPU. Failures show when
    the library is needed."""

    def quietly(name: str) -> None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            if (cache := _cache_folder()) is not None:
                _build(name, cache)

    if "cpu" in os.environ.get("JAX_PLATFORMS", "cpu"):
        for name in (KERNELS, ATTENTION, PANELS):
            threading.Thread(target=quietly, args=(name,), name=name.replace("_", "-"), daemon=True).start()


def _build(name: str, folder: Path) -> Path:
    """Returns the library in `folder`. Compiles it if it is missing, or if others may have written it."""
    library = _library(name, folder)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another thread or process may be building it
        if not is_ours(library):
            compiler = _compiler()
            if compiler is None:
                raise FileNotFoundError(lacking())
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary) / "kernels.so"
                command = [compiler, *_flags(), f"-I{_headers()}", str(_source(name)), "-o", str(built)]
                # The temporary folder is also the working folder, since compilers search it for empty path entries.
                subprocess.run(command, check=True, capture_output=True, text=True, cwd=temporary)
                built.chmod(0o700)
                built.replace(library)
    return library


def _source(name: str) -> Path:
    return FOLDER / f"{name}.cc"


def _library(name: str, folder: Path) -> Path:
    return folder / f"{name}-{key(name)}.so"


def _compiler() -> str | None:
    """The compiler's absolute path. Relative entries of PATH are ignored, as they lead into the current folder."""
    folders = [folder for folder in os.get_exec_path() if os.path.isabs(folder)]
    found = shutil.which(_compiler_name(), path=os.pathsep.join(folders))
    return found and os.path.abspath(found)


def _compiler_name() -> str:
    return os.environ.get("CXX", "c++")


def _flags() -> list[str]:
    """JAXSERVE_CXXFLAGS come last, so that -march may name the oldest of several machines that share a cache. With
    -DJAXSERVE_CHECKED among them, kernels check the indices that they are given."""
    return [*FLAGS, *shlex.split(os.environ.get("JAXSERVE_CXXFLAGS", ""))]


def _headers() -> Path:
    """The folder of XLA's foreign function interface, like `jax.ffi.include_dir()`, but without importing JAX."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("jaxlib is not installed")
    return Path(spec.origin).parent / "include"


def key(name: str) -> str:
    """16 hexadecimal digits, hashed from everything that a library is built from and for."""
    return _key(name, _compiler_name(), *_flags())


@cache
def _key(name: str, *how: str) -> str:
    """`how`: the compiler and its flags."""
    sources = [path.read_text() for path in (*sorted(FOLDER.glob("cpu_*.h")), _source(name))]
    text = "\n".join([*sources, *how, importlib.metadata.version("jaxlib"), *processor()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def processor() -> list[str]:
    """Lines that tell this machine's processor and its features."""
    info = Path("/proc/cpuinfo")  # exists only on Linux
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else [platform.processor()]
    return [line for line in lines if line.startswith(("flags", "Features", "model name"))] or lines


def built(name: str) -> bytes | None:
    """The library from the cache, for another cache; None if it is not there."""
    cache = _cache_folder()
    library = None if cache is None else _library(name, cache)
    return library.read_bytes() if library is not None and is_ours(library) else None


def install(name: str, data: bytes) -> None:
    """Puts a library that was built elsewhere with the same `key` into the cache, unless it is there. `data` is code:
    its source must be trusted. Without a private cache nothing happens."""
    cache = _cache_folder()
    if cache is None or is_ours(library := _library(name, cache)):
        return
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        made = Path(temporary) / "kernels.so"
        made.write_bytes(data)
        made.chmod(0o700)
        made.replace(library)


def _cache_folder() -> Path | None:
    """The folder from which libraries may be loaded, or None if no folder is private."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = open_cache(Path(os.environ.get("JAXSERVE_CACHE") or user_cache / "jaxserve"))
    return cache.path if cache is not None and cache.is_private else None
