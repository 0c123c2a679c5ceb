"""Devices to compile for, in tests that need no such device."""

import importlib.util
import os

import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.devices.targets import target_devices

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # without a driver, the CUDA compiler loads only with this
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is used, so processes need no lock


def devices_of(target: str) -> list:
    """The devices of a target. Skips the test if its compiler is not installed, but fails if it is broken."""
    packages = ("libtpu",) if target.startswith(("v", "tpu")) else ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(package) for package in packages):
        pytest.skip(f"{' or '.join(packages)}, the compiler for {target}, is not installed")
    return target_devices(target)


def mesh_of(target: str, axis: str = "tensor") -> Mesh:
    return Mesh(np.array(devices_of(target)), (axis,))
