"""Targets: devices to compile for without having them, with names such as h200x8, v5e-4, v6e-8. Data sheets.

The compilers come with JAX's plugins (`pip install jaxserve[aot]`); neither driver nor device is needed.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from jax.experimental import topologies

from jaxserve.config import ConfigError


class Gpu(NamedTuple):
    """Properties of an NVIDIA GPU, for XLA's compiler and the plan of its memory."""

    kind: str
    capability: tuple[int, int]
    cores: int  # multiprocessors
    threads: int  # most threads of a multiprocessor
    shared: int  # KiB of shared memory of a multiprocessor, all but one of which a program may use
    cache: int  # MiB of L2 cache
    bandwidth: float  # bytes per second
    clock: float  # GHz
    memory: int  # bytes that the driver leaves free, approximately

    def config(self) -> str:
        """XLA's target_config, a protocol buffer in text form. Without a driver's version XLA takes the driver for one
        that is too old to record custom calls in command buffers."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32
              shared_memory_per_block: 49152  shared_memory_per_core: {self.shared << 10}
              shared_memory_per_block_optin: {self.shared - 1 << 10}
              threads_per_core_limit: {self.threads}  core_count: {self.cores}  fpus_per_core: 128
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth:.0f}  l2_cache_size: {self.cache << 20}
              clock_rate_ghz: {self.clock}  device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              driver_version: "13.0.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 9 patch: 0 }}
            device_description_str: "{self.kind}"
        """


# From NVIDIA's data sheets and tuning guides, as of late 2026; memory is rounded down, but for the H200.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 164, 40, 2.04e12, 1.41, 79 << 30),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 1536, 100, 48, 0.3e12, 2.04, 22 << 30),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 1536, 100, 96, 0.864e12, 2.52, 44 << 30),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 228, 50, 3.35e12, 1.98, 79 << 30),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 2048, 228, 60, 4.8e12, 1.98, 150_754_820_096),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 2048, 228, 126, 8.0e12, 1.96, 178 << 30),
}
GPUS_OF_HOST = 8  # targets of more GPUs, in multiples of this, are several hosts
# Number of devices -> topology. On a TPU7x half a chip is a device.
FLAT = {1: "2x2", 4: "2x2", 8: "2x4"}
TPUS = {"v5e": FLAT, "v6e": FLAT, "v5p": {1: "2x2x1", 4: "2x2x1"}, "tpu7x": {1: "2x2x1", 8: "2x2x1"}}
# GiB of memory for programs, which libtpu's compiler names when it refuses one that is larger.
TPU_MEMORY = {"TPU v5 lite": 15.75, "TPU v6 lite": 31.25, "TPU v5": 95.74, "TPU7x": 94.75}

# Bytes of memory by kind of device.
DEVICE_MEMORY = {gpu.kind: gpu.memory for gpu in GPUS.values()}
DEVICE_MEMORY |= {kind: int(gib * 2**30) for kind, gib in TPU_MEMORY.items()}


class Rates(NamedTuple):
    """A device's highest rates, by its maker's data sheet."""

    bandwidth: float  # bytes of device memory per second
    matmul: float  # floating-point operations per second, in dense bfloat16 products


# Keys are parts of a device_kind; the first match counts. From NVIDIA's data sheets (without sparsity) and Google
# Cloud's pages on each TPU version, as of late 2026.
RATES = {
    "B300": Rates(8.0e12, 2250e12),
    "B200": Rates(8.0e12, 2250e12),
    "H200": Rates(4.8e12, 989e12),
    "H100 PCIe": Rates(2.0e12, 756e12),
    "H100": Rates(3.35e12, 989e12),
    "A100": Rates(2.04e12, 312e12),
    "L40S": Rates(0.864e12, 362e12),
    "L4": Rates(0.3e12, 121e12),
    "TPU7x": Rates(3.69e12, 1153e12),  # of a device, which is half a chip
    "TPU v6 lite": Rates(1.64e12, 918e12),
    "TPU v6e": Rates(1.64e12, 918e12),
    "TPU v5 lite": Rates(0.819e12, 197e12),
    "TPU v5e": Rates(0.819e12, 197e12),
    "TPU v5": Rates(2.765e12, 459e12),
    "TPU v4": Rates(1.228e12, 275e12),
}
UNKNOWN_RATES = RATES["A100"]  # newer data-centre devices have at least as much arithmetic per byte


def rates(device: Any) -> Rates:
    """The rates of a device or a target's device; those of an A100 for unknown kinds."""
    return next((known for kind, known in RATES.items() if kind in device.device_kind), UNKNOWN_RATES)


def target_memory(device: Any) -> int:
    """Bytes of memory of a target's device."""
    return DEVICE_MEMORY[device.device_kind]


def target_devices(name: str) -> list[Any]:
    """The devices of a target. Raises ConfigError for an unknown name, or when its compiler is missing."""
    match = re.fullmatch(r"([a-z0-9]+?)[x-](\d+)", name)
    kind, count = (match[1], int(match[2])) if match else (name, 1)
    try:
        if kind in GPUS:
            hosts, rest = divmod(count, GPUS_OF_HOST)
            shape = f"1x{hosts}x{GPUS_OF_HOST}" if hosts and not rest else f"1x1x{count}"
            return list(
                topologies.get_topology_desc(
                    platform="cuda", topology_name="", target_config=GPUS[kind].config(), topology=shape
                ).devices
            )
        if count in TPUS.get(kind, {}):
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is used, so processes need no lock
            shape = f"{kind}:{TPUS[kind][count]}"
            return list(topologies.get_topology_desc(platform="tpu", topology_name=shape).devices)[:count]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"no compiler for {name} ({error}); install jaxserve[aot]") from None
    known = [f"{kind}x1, {kind}x8, …" for kind in GPUS] + [f"{kind}-{n}" for kind, sizes in TPUS.items() for n in sizes]
    raise ConfigError(f"there is no target {name!r}; known are {', '.join(known)}")
