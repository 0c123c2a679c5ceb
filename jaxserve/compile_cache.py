"""The persistent compilation cache: what one process compiled, the next one reads."""

from __future__ import annotations

import os
from pathlib import Path

import jax


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
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder
