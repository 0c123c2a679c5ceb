"""Options of XLA's compiler that the compiled steps are given, in one place, each with its reason."""

from __future__ import annotations

from typing import Any

import jax


def compiler_options(device: jax.Device) -> dict[str, Any] | None:
    """For `Lowered.compile` on a mesh of such devices; None where the defaults are right."""
    return None
