"""The persistent compilation cache, and a counter of compilations and cache hits."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.devices.jax_versions import JAX
from jaxserve.pallas_kernels.cache_folder import open_cache

KEPT = "/jaxserve/kept_program"  # the event that a compiled program was read from a file


class CompileCounter:
    """Counts the programs that this process compiles from now on.

    Attributes:
      compilations: programs that XLA compiled.
      cache_hits: programs that were read from the persistent cache instead, or from `bundles.program_cache`.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.cache_hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_: object) -> None:
        self.cache_hits += event == KEPT
        if event == "/jax/compilation_cache/cache_hits":
            self.cache_hits += 1
            self.compilations -= 1  # JAX reports a cache hit as a compilation too


@cache
def of_this_process() -> CompileCounter:
    """A counter of the programs that this process compiles."""
    return CompileCounter()


def enable_compile_cache() -> Path | None:
    """Turns the cache on, in $JAXSERVE_CACHE or the user's cache folder. Returns its folder; None where it is off.

    JAX's own setting of the folder goes first. An empty JAXSERVE_CACHE turns the cache off. Compiled programs are
    machine code, so a folder that other users can write to is not used (see `cache_folder`). A folder that this user
    cannot write to is only read.
    """
    present = jax.config.values["jax_compilation_cache_dir"]
    if present and "://" in present:
        return Path(present)
    chosen = present or os.environ.get("JAXSERVE_CACHE")
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = open_cache(Path(chosen) if chosen else base / "jaxserve" / "xla")
    jax.config.update("jax_compilation_cache_dir", None if cache is None else str(cache.path))
    if cache is None:
        return None
    if not present:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if cache.is_private else math.inf)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # XLA:GPU fails to compile where it cannot write the results of its autotuner. This is part of JAX 0.10's keys, so
    # that it would find no program.
    if not cache.is_private and JAX >= (0, 11):
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return cache.path


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Compiles anew meanwhile. XLA:CPU (jax 0.10 and 0.11) cannot serialize a program again that it has read from the
    cache: the bytes lack functions, which shows when the program runs."""
    before = jax.config.values["jax_enable_compilation_cache"]

    def enable(value: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", value)
        compilation_cache.reset_cache()  # JAX decides once per process whether it uses the cache

    enable(False)
    try:
        yield
    finally:
        enable(before)
