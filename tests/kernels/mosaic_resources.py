"""What a Mosaic GPU kernel takes of a multiprocessor: shared memory as JAX reckons, registers and spills by ptxas."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src import core
from jax._src.pallas.mosaic_gpu import lowering

REGISTERS = 64 * 1024  # of a multiprocessor
SHARED_MEMORY = 228 * 1024  # bytes of a multiprocessor; each program reserves 1 KiB of it for the system


class Kernel(NamedTuple):
    """A kernel as it is traced: bytes of shared memory and threads of a program."""

    shared_memory: int
    threads: int


def traced_kernels(function: Callable[..., Any], *arguments: Any) -> dict[str, Kernel]:
    """The Mosaic GPU kernels of a function, by their names. By JAX's own estimate, before anything is compiled."""
    return {eqn.params["name"]: _kernel(eqn) for eqn in _kernel_calls(jax.make_jaxpr(function)(*arguments).jaxpr)}


def _kernel_calls(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield eqn
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if isinstance(inner, core.ClosedJaxpr):
                yield from _kernel_calls(inner.jaxpr)
            elif isinstance(inner, core.Jaxpr):
                yield from _kernel_calls(inner)


def _kernel(eqn: Any) -> Kernel:
    (mesh,), (jaxpr,), parameters = eqn.params["meshes"], eqn.params["jaxprs"], eqn.params["compiler_params"]
    context = lowering.ResourceEstimatorContext(
        reduction_scratch_bytes=parameters.reduction_scratch_bytes,
        axis_names=lowering._AxisNames(mesh.grid_names, mesh.cluster_names, mesh.thread_name),
        lowering_semantics=parameters.lowering_semantics,
    )
    resources = lowering._estimate_resources(context, jaxpr)
    barriers = sum(barrier.num_barriers for barrier in resources.barriers)
    return Kernel(resources.smem_scratch_bytes + 8 * barriers, 128 * (mesh.num_threads or 1))


class Assembled(NamedTuple):
    """What ptxas says of a kernel: registers of a thread, and bytes that a thread stores for want of more."""

    registers: int
    spilled: int


def assembled_kernels(log: str) -> dict[str, Assembled]:
    """From what the compiler prints where the environment has MOSAIC_GPU_DUMP_PTXAS=1, by the kernels' names."""
    pattern = r"Function properties for (\w+)_mosaic_gpu_kernel\s+.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = re.findall(pattern, log, re.DOTALL)
    return {name: Assembled(int(registers), int(spilled)) for name, spilled, registers in found}


def programs(kernel: Kernel, registers: int | None = None) -> int:
    """That fit a multiprocessor together, by shared memory and, where known, registers of a thread."""
    fit = SHARED_MEMORY // (kernel.shared_memory + 1024)
    return fit if registers is None else min(fit, REGISTERS // (-(-registers // 8) * 8 * kernel.threads))
