"""The persistent compilation cache: what one process compiled, the next one reads. And a count of both."""

from __future__ import annotations

import os
from pathlib import Path

import jax


class CompileCounter:
    """Counts every program that this process compiles from now on, whoever asks for it.

    Attributes:
      compilations: programs that XLA compiled.
      cache_hits: programs that were read from the persistent cache instead.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.cache_hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.cache_hits += 1
            self.compilations -= 1  # it is reported as a compilation too


def enable_compile_cache() -> Path | None:
    """Turns the cache on, in $JAXSERVE_CACHE or the user's cache folder, readable by the user alone.

    An empty JAXSERVE_CACHE turns it off. A cache folder that JAX's own settings name is left as it is.
    """
    if present := jax.config.values["jax_compilation_cache_dir"]:
        return Path(present)
    chosen = os.environ.get("JAXSERVE_CACHE")
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else base / "jaxserve" / "xla"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder
