"""Command buffers: what XLA:GPU records as a CUDA graph, which the host launches at once.

A step of a 32-layer model is some 300 kernels, and on an H200 the host took 13 us to launch each. A recorded step is
one launch. In programs compiled for an H200, not yet run on one, XLA (jaxlib 0.10 and 0.11) records all kernels if

  - custom calls have typed handlers (`pallas_kernels.triton_compat` lowers such calls),
  - loops and conditionals are allowed in command buffers (`compiler_options`), for which CUDA needs driver 12.3,
  - devices exchange nothing: XLA does not record collectives unless it is asked to.

Then a program may decide on the device what it computes. Outside of a command buffer the host waits for the predicate
of each conditional, in the middle of the step; so otherwise the host chooses among programs without any (`why_static`).

Where devices do exchange something, XLA records what lies between. There a program may decide what a device computes by
itself, such as which sampler its rows need, but not how often the model runs.

A recording has the addresses of arrays in it. By XLA's source, before it runs again XLA compares them with those of the
call's arrays, and records those operations again that use an array which lies elsewhere (all those with temporaries,
which are one array). So that these are few:

  - Weights stay, and cache and slots are donated, so that their results are the same memory.
  - Other results are small: tokens and log-probabilities. Only the largest bucket returns hidden states.
  - Few operations read the host's buffer (`tests/aot/test_command_buffers.py` counts them: 6 of a decode step, 14 of a
    mixed one). A ring of buffers for it, or for results, would not help, since XLA compares with the last call only.
  - `xla_gpu_command_buffer_update_mode=SKIP_TEMP` (jaxlib 0.11.2) would keep the temporaries' addresses by mapping
    memory to reserved ones. It needs another allocator for all of XLA, whose cost is not known, and is not set.

`first_light` counts what is recorded again in each step.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

from jax.sharding import Mesh

LEAST_DRIVER = 12030  # CUDA 12.3, as cuDriverGetVersion says it
OPTIONS: dict[str, str | bool] = {
    # Products are cuBLAS's. XLA's own, in Triton, are compiled in many sizes to be timed at each start; on an H200 a
    # decode step of 32 rows took 7.4 ms with them and 7.2 without.
    "xla_gpu_enable_triton_gemm": False,
    # Fusions are not compiled in several ways to be timed: that takes half of the time to compile a step for an H200
    # elsewhere. What a start chooses then depends on no timing, so that equal starts give equal bits.
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
# What XLA may record: its default, and conditionals and loops. As an option of one program the setting has no form that
# adds to the default.
RECORDED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


def exchanges(mesh: Mesh) -> bool:
    """Whether these are GPUs that exchange something within a step."""
    return mesh.devices.size > 1 and mesh.devices.flat[0].platform not in ("cpu", "tpu")


def why_static(mesh: Mesh) -> str | None:
    """Why programs for these devices must not decide on the device; None: they may, except for what is exchanged."""
    if mesh.devices.flat[0].platform in ("cpu", "tpu"):
        return None
    driver = driver_version()
    if driver is not None and driver < LEAST_DRIVER:
        return f"the driver is of CUDA {driver // 1000}.{driver % 1000 // 10}, and graphs with conditionals need 12.3"
    if importlib.util.find_spec("jax_triton") is None:
        return None  # then there are no such calls
    from jaxserve.pallas_kernels import triton_compat  # imports Triton

    return None if triton_compat.is_typed() else "this jaxlib has no typed call of Triton kernels"


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """XLA's options for programs that run on these devices."""
    if mesh.devices.flat[0].platform in ("cpu", "tpu"):
        return {}
    return OPTIONS | ({} if why_static(mesh) else {"xla_gpu_enable_command_buffer": RECORDED})


@cache
def driver_version() -> int | None:
    """The newest CUDA that this machine's driver supports, 12030 for 12.3; None where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        return version.value if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except OSError:
        return None
