"""Replicas of the engine on a Ray cluster, by Ray Serve: `jaxserve ray deploy`, or `serve run jaxserve.ray:app`.

Importing this package imports neither Ray nor JAX.
"""

from __future__ import annotations

from typing import Any


def app(settings: dict[str, Any]) -> Any:
    """Builds the application for `serve run jaxserve.ray:app model=demo` and for Serve's own config files, which give
    RaySettings as `args`. Raises ValueError for settings that are unknown or wrong."""
    from jaxserve.ray.application import build
    from jaxserve.ray.settings import RaySettings

    return build(RaySettings.of(settings))
