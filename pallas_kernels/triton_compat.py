"""Calls Triton kernels from JAX, and hides the differences between versions of jax-triton and Triton.

Lowering a kernel without a GPU needs:

  `compute_capability=`   otherwise `triton_call` asks the first GPU; here it comes from `target`.
  `TRITON_PTXAS_BLACKWELL_PATH`   Triton 3.9 writes PTX for sm_90 and newer in the version of its newest assembler,
      CUDA 13.4's. XLA assembles PTX with its own assembler, CUDA 12.9's or newer (with jax-triton 0.4 while XLA
      compiles, with 0.3 when the kernel is loaded), and refuses newer versions. Triton also has CUDA 12.9's assembler,
      and writes the version for it if this variable has its path before the first kernel is lowered.
  `jax.set_mesh(mesh)`    with a mesh of the topology's devices tells `target` which GPU to compile for.

XLA records only typed calls in command buffers (CUDA graphs). jax-triton 0.4 lowers such calls; 0.3, which is for
Triton up to 3.6, lowers calls of the old interface. jaxlib (0.10.2 and 0.11.2) has a typed handler of the same
message, so here 0.3 lowers typed calls, too.

jax-triton 0.4 renamed `out_shape` and `enable_fp_fusion`. Its aliased outputs have no parameter of their own. It passes
Python floats as float32 instead of float64, so sizes and options are compile-time constants (`tl.constexpr`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax_triton
import triton
from jax._src.lib import gpu_triton
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jaxserve.pallas_kernels import gpu_assembler

gpu_assembler.prefer()
if (_ASSEMBLER := gpu_assembler.of_triton()) is not None:
    os.environ.setdefault("TRITON_PTXAS_BLACKWELL_PATH", str(_ASSEMBLER))

_PARAMETERS = inspect.signature(jax_triton.triton_call).parameters
_RENAMED = "out_type" in _PARAMETERS
_TYPED = "triton_kernel_call_ffi"  # jaxlib's name of the typed handler

# Compute capability by a part of device_kind, for programs compiled without the device. The first match counts.
KINDS = {
    "RTX A": 86,  # RTX A1000, RTX A3000
    "A100": 80,
    "A800": 80,
    "A30": 80,
    "A10": 86,
    "A40": 86,
    "A16": 86,
    "RTX 30": 86,
    "L4": 89,  # also L40, L40S
    "RTX 40": 89,
    "Ada": 89,
    "H100": 90,
    "H200": 90,
    "H800": 90,
    "H20": 90,
    "B100": 100,
    "B200": 100,
    "B300": 103,
    "RTX 50": 120,
    "RTX PRO": 120,
}


class Target(NamedTuple):
    """The GPU to compile for: compute capability (90 is 9.0) and number of multiprocessors."""

    capability: int
    cores: int


def target() -> Target:
    """Returns the GPU of the mesh of `jax.set_mesh`, or the first local GPU if there is none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform != "cpu":
        for kind, capability in KINDS.items():
            if kind in device.device_kind:
                return Target(capability, device.num_cores)
    try:
        local = jax.local_devices(backend="gpu")[0]
    except RuntimeError as error:
        kind = "no mesh" if device is None else f"a mesh of {device.device_kind}"
        raise RuntimeError(
            f"which GPU to compile for is not known: {kind} is set and there is no GPU here. "
            "Lower inside jax.set_mesh(mesh of the topology's devices)."
        ) from error
    major, minor = str(local.compute_capability).split(".")
    return Target(int(major) * 10 + int(minor), getattr(local, "core_count", None) or 108)


def call(
    kernel: Any,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs `kernel` over `grid` with pointers to the arrays, then to the outputs. The constants are its constexprs.

    `aliases` maps inputs to the outputs that share their memory. The kernel must not use the parameters of those
    inputs.
    """
    options: dict[str, Any] = {
        "kernel": kernel,
        "grid": grid,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "compute_capability": target().capability,
        **constants,
    }
    aliases = aliases or {}
    if not _RENAMED:
        return jax_triton.triton_call(
            *arrays, out_shape=tuple(out), enable_fp_fusion=True, input_output_aliases=aliases, **options
        )
    # An aliased output has no parameter of its own here: the input is passed in the place of the output. Another array
    # is passed in the input's own place, which no kernel reads. (The input itself would be copied, because it is read.)
    other = next(array for i, array in enumerate(arrays) if i not in aliases)
    operands = [other if i in aliases else array for i, array in enumerate(arrays)]
    taken = {output: arrays[i] for i, output in aliases.items()}
    return jax_triton.triton_call(
        *operands,
        **{kernel.arg_names[len(arrays) + output]: array for output, array in taken.items()},
        out_type=tuple(out),
        backend_options={"enable_fp_fusion": True},
        input_output_aliases={len(arrays) + i: output for i, output in enumerate(sorted(taken))},
        **options,
    )


def is_typed() -> bool:
    """Whether kernels are lowered as typed calls, which XLA can record in command buffers."""
    registrations = getattr(getattr(gpu_triton, "_cuda_triton", None), "registrations", None)
    return _RENAMED or (registrations is not None and _TYPED in registrations())


def _lower_typed() -> None:
    """Has jax-triton 0.3 lower typed calls, whose attribute `opaque` is the message of the old ones."""
    from jax_triton import triton_lib

    def lower(ctx: Any, *operands: Any, **parameters: Any) -> Any:
        results = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, ctx, *operands, **parameters)
        call = results[0].owner.attributes
        call["call_target_name"] = ir.StringAttr.get(_TYPED)
        call["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
        call["backend_config"] = ir.DictAttr.get({"opaque": call["backend_config"]})
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower, platform="cuda")


if is_typed() and not _RENAMED:
    _lower_typed()


def pad(size: int, least: int = 1) -> int:
    """The next power of two, as Triton requires for blocks."""
    return max(least, triton.next_power_of_2(size))
