"""Stage `device`: describes this machine, and measures its peak rates."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax

from jaxserve.bench import report
from jaxserve.pallas_kernels.registry import BACKENDS, Device, load
from jaxserve.pallas_kernels.tuning import timing
from light.record import Record

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "jax-triton", "triton", "torch",
            "flashinfer-python", "transformers", "flax", "numpy", "msgspec", "llguidance")  # fmt: skip
QUERY = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
         "power.limit", "temperature.gpu", "ecc.mode.current", "mig.mode.current")  # fmt: skip


def run(record: Record) -> None:
    device = jax.devices()[0]
    record.note(**report.machine(device=True), versions=versions(), **nvidia(), **tools(), backends=backends(device))
    stats = device.memory_stats() or {}
    record.note(
        platform_name=Device.of(device).platform,
        capability=list(Device.of(device).capability or ()),
        memory_bytes=stats.get("bytes_limit"),
        cores=getattr(device, "core_count", None),
        backend_version=str(device.client.platform_version).split("\n")[0],
    )
    if record.take("ceilings"):
        with record.row("ceilings") as row:
            row |= timing.ceilings(Device.of(device).platform)
    if device.platform == "gpu" and record.take("ceilings, torch"):
        with record.row("ceilings, torch") as row:
            row |= torch_ceilings()


def torch_ceilings() -> dict[str, float]:
    """The same rates with torch, whose copy is the driver's and whose product is cuBLAS's."""
    import torch
    from peers.kernel_backends import TorchWork

    if not torch.cuda.is_available():
        raise RuntimeError("this torch sees no GPU")

    def best(call: Callable[[], Any], calls: int) -> float:
        return timing.least_seconds(TorchWork(torch, [call] * calls, lambda x: x))

    x = torch.randint(2**31 - 1, (timing.COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    copy = best(lambda: y.copy_(x), 1)
    a, b, c = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    product = best(lambda: torch.mm(a, b, out=c), timing.CHAIN)
    return {"bytes_per_s": 2 * timing.COPY_BYTES / copy, "flops_per_s": 2 * 8192**3 / product}


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def backends(device: jax.Device) -> dict[str, str]:
    """Reports for each backend whether its modules can be imported here."""
    found = {}
    for name in BACKENDS:
        for operation in ("attention", "matmul"):
            try:
                load(operation, name)
                found[f"{operation} {name}"] = "imports"
            except Exception as error:  # an incompatible package may raise anything
                found[f"{operation} {name}"] = f"{type(error).__name__}: {error}"[:200]
    return found


def nvidia() -> dict[str, Any]:
    """The output of a query to nvidia-smi, which changes no setting; empty without nvidia-smi."""
    said = _output("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader")
    if said is None:
        return {}
    return {"nvidia_smi": dict(zip(QUERY, (x.strip() for x in said.splitlines()[0].split(",")), strict=False))}


def tools() -> dict[str, Any]:
    """The assemblers and disassemblers on the path, with their versions."""
    found = {}
    for name in ("ptxas", "cuobjdump", "nvdisasm", "nvcc", "ncu"):
        if shutil.which(name):
            said = (_output(name, "--version") or "").strip().splitlines()
            found[name] = said[-1] if said else "present"
    return {"tools": found}


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
