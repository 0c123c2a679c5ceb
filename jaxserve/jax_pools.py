"""The memory that JAX reserves on GPUs, and pins for them on the host; JAX reads it when it starts devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# Environment variables: the share of GPU memory that JAX reserves. It does not start with both; the second is older.
FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
USUAL_FRACTION = 0.75  # its default
HOST_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # environment variable: GiB of host memory that JAX pins for GPUs
USUAL_HOST_POOL = 64  # its default


def fraction(environment: Mapping[str, str] = os.environ) -> float:
    """The share of GPU memory that JAX reserves."""
    return next((float(environment[name]) for name in FRACTIONS if environment.get(name)), USUAL_FRACTION)


def reserve(share: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has JAX reserve this share of GPU memory, unless the environment tells it how much."""
    if not any(environment.get(name) for name in FRACTIONS):
        environment[FRACTIONS[0]] = str(share)
