"""Devices that this machine does not have, to compile for: names such as h200x8, v5e-4, v6e-8.

The compilers come with JAX's plugins (`pip install jaxserve[aot]`); no driver and no device is needed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from jax.experimental import topologies

from jaxserve.config import ConfigError

# One H200 as XLA's compiler sees it.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""
GPUS = {"h200": H200}
TPUS = {"v5e": {1: "2x2", 4: "2x2", 8: "2x4"}, "v6e": {1: "2x2", 4: "2x2", 8: "2x4"}}  # devices -> topology


MEMORY = {"NVIDIA H200": 150_754_820_096, "TPU v5 lite": 16 << 30, "TPU v6 lite": 32 << 30}  # bytes by kind


class Rates(NamedTuple):
    """What a device does at most, by its maker's datasheet."""

    bandwidth: float  # bytes a second, of its memory
    matmul: float  # floating-point operations a second, of dense products in bfloat16


# By what device_kind contains; the first match counts. NVIDIA's datasheets (without sparsity) and Google Cloud's pages
# about each version of TPU, as of late 2026.
RATES = {
    "B300": Rates(8.0e12, 2250e12),
    "B200": Rates(8.0e12, 2250e12),
    "H200": Rates(4.8e12, 989e12),
    "H100 PCIe": Rates(2.0e12, 756e12),
    "H100": Rates(3.35e12, 989e12),
    "A100": Rates(2.04e12, 312e12),
    "L40S": Rates(0.864e12, 362e12),
    "L4": Rates(0.3e12, 121e12),
    "TPU v6 lite": Rates(1.64e12, 918e12),
    "TPU v5 lite": Rates(0.819e12, 197e12),
    "TPU v5": Rates(2.765e12, 459e12),
    "TPU v4": Rates(1.228e12, 275e12),
}
UNKNOWN_RATES = RATES["A100"]  # nothing newer has less arithmetic for each byte, but for workstations


def rates(device: Any) -> Rates:
    """Of one device, of a target or at hand; of kinds that are not known those of an A100."""
    return next((known for kind, known in RATES.items() if kind in device.device_kind), UNKNOWN_RATES)


def target_memory(device: Any) -> int:
    """Bytes of one device of a target."""
    return MEMORY[device.device_kind]


def target_devices(name: str) -> list[Any]:
    """The devices of a target. Raises ConfigError for one that is not known, or without its compiler."""
    match = re.fullmatch(r"([a-z0-9]+?)[x-](\d+)", name)
    kind, count = (match[1], int(match[2])) if match else (name, 1)
    try:
        if kind in GPUS:
            shape = f"1x1x{count}"
            return list(
                topologies.get_topology_desc(
                    platform="cuda", topology_name="", target_config=GPUS[kind], topology=shape
                ).devices
            )
        if count in TPUS.get(kind, {}):
            shape = f"{kind}:{TPUS[kind][count]}"
            return list(topologies.get_topology_desc(platform="tpu", topology_name=shape).devices)[:count]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"no compiler for {name} ({error}); install jaxserve[aot]") from None
    known = [f"{kind}x1, {kind}x8, …" for kind in GPUS] + [f"{kind}-{n}" for kind, sizes in TPUS.items() for n in sizes]
    raise ConfigError(f"there is no target {name!r}; known are {', '.join(known)}")
