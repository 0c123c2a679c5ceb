"""Lowers a Mosaic GPU kernel of one shape once a process, always to the same bytes.

JAX lowers equal kernels of one program once, but again in each program; a kernel takes 0.1 to 0.5 s of Python. Here the
custom call that a kernel has become is kept, for programs that contain the same kernel. Kernels are the same if they
have the same jaxpr, by identity: they must be called through a jitted function, whose trace JAX keeps. Entries go when
JAX drops the jaxpr.

A kernel that reads only the first rows of an array gets them as `first_rows`. Then it is the same kernel whatever the
array's length is, and it reads the array in place.

JAX 0.11 numbers the kernels of a process in their modules, for the names of dumps. So the bytes of a program, and its
key in the compilation cache, depend on what was lowered before, which threads change from start to start. The number
and the lines of the source are removed.

To convert numbers of few bits, JAX asks the assembler for its version, in a process of its own each time (50 ms). Here
it asks once.

`keep` replaces private rules of JAX 0.11; with other versions it does nothing.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.extend
from jax import lax

JAX = jax.__version__.rpartition(".")[0]
TARGET = "mosaic_gpu_v2"
CONFIG = "mhlo.backend_config"
DUMPED = "mosaic_gpu.dump_basename"


@dataclass(frozen=True)
class KernelCall:
    """A custom call outside of MLIR contexts: types and attributes as text, strings of its configuration as bytes."""

    results: tuple[str, ...]
    attributes: dict[str, str]
    config: dict[str, str | bytes]

    @staticmethod
    def of(outs: Sequence[Any], operands: Sequence[Any]) -> KernelCall | None:
        """The call that makes `outs` from `operands`. None: it is not a single one of a kernel."""
        from jax._src.lib.mlir import ir

        calls = {out.owner for out in outs if isinstance(out, ir.OpResult)}
        call = calls.pop() if len(calls) == 1 else None
        if call is None or list(call.results) != list(outs) or list(call.operands) != list(operands):
            return None
        attributes = {name: call.attributes[name] for name in call.attributes}
        if attributes.get("call_target_name") != ir.StringAttr.get(TARGET, call.context):
            return None
        config = {}
        entries: Any = ir.DictAttr(attributes.pop(CONFIG))
        for entry in entries:
            is_string = isinstance(entry.attr, ir.StringAttr)
            config[entry.name] = ir.StringAttr(entry.attr).value_bytes if is_string else str(entry.attr)
        texts = {name: str(value) for name, value in attributes.items()}
        return KernelCall(tuple(str(out.type) for out in outs), texts, config)

    def emit(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of the same call in the current MLIR context."""
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import hlo

        attributes = {name: ir.Attribute.parse(text) for name, text in self.attributes.items()}
        types = [ir.Type.parse(text) for text in self.results]
        call = hlo.CustomCallOp.build_generic(results=types, operands=list(operands), attributes=attributes)
        config = {name: _attribute(value) for name, value in self.config.items()}
        call.operation.attributes[CONFIG] = ir.DictAttr.get(config)
        return call.results


def _attribute(value: str | bytes) -> Any:
    from jax._src.lib.mlir import ir

    return ir.StringAttr.get(value) if isinstance(value, bytes) else ir.Attribute.parse(value)


_TRACED: dict[Any, Any] = {}  # closed jaxprs, by the function, its arguments' types, and devices


def traced_once(launch: partial[jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls a function of arrays whose other arguments are hashable. Calls with equal arguments and types have one
    trace, whose operations become those of the caller: unlike in a jitted function, its operands can be seen there."""
    types = tuple(jax.typeof(array) for array in arrays)
    key = launch.func, launch.args, types, jax.sharding.get_abstract_mesh()
    if key not in _TRACED:
        _TRACED[key] = jax.make_jaxpr(launch)(*arrays)
    return jax.extend.core.jaxpr_as_fun(_TRACED[key])(*arrays)[0]


def first_rows(x: jax.Array, rows: int) -> jax.Array:
    """The first rows of an argument of a kernel, which must not write to it; maybe all, where they would be copied."""
    return lax.slice_in_dim(x, 0, rows) if JAX == "0.11" else x


def _read_in_place(operand: Any) -> Any:
    """The array of which an operand is the first rows; otherwise the operand. A kernel needs only the beginning of its
    memory, while XLA would copy the rows."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    op = operand.owner.opview if isinstance(operand, ir.OpResult) else None
    if not isinstance(op, hlo.SliceOp):
        return operand
    shape = ir.RankedTensorType(op.operand.type).shape
    ends = [0, *shape[1:]]
    is_first = not any(op.start_indices) and all(step == 1 for step in op.strides)
    return op.operand if is_first and [0, *list(op.limit_indices)[1:]] == ends else operand


_KEPT: weakref.WeakKeyDictionary[Any, dict[Any, KernelCall]] = weakref.WeakKeyDictionary()  # by a kernel's jaxpr


def _keeping(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule of `mpmd_map`, which looks for a kept call first."""

    def rule(ctx: Any, *operands: Any, jaxprs: Any, **params: Any) -> Any:
        module = ctx.module_context
        if tuple(module.platforms) != ("cuda",) or len(jaxprs) != 1 or params.get("interpret"):
            return lower(ctx, *operands, jaxprs=jaxprs, **params)
        types = tuple(ctx.avals_in), tuple(ctx.avals_out)
        devices = jax.sharding.get_abstract_mesh(), module.axis_context, ctx.is_forward_compat()
        key = tuple(sorted(params.items())), types, devices
        kept = _KEPT.setdefault(jaxprs[0], {})
        read = [_read_in_place(operand) for operand in operands]
        if key not in kept:
            outs = lower(ctx, *operands, jaxprs=jaxprs, **params)
            call = KernelCall.of(outs, operands)
            if call is None:
                return outs
            kept[key] = call
            if read == list(operands):
                return outs
            outs[0].owner.erase()
        return kept[key].emit(read)

    return rule


def _same_bytes(serialize: Callable[..., Any]) -> Callable[..., Any]:
    """`_run_serde_pass` without what depends on other kernels and on the program."""

    def serialized(module: Any, **passes_options: object) -> Any:
        from jax._src.lib.mlir import ir, passmanager

        passes = passmanager.PassManager.parse("builtin.module(strip-debuginfo)", module.context)
        passes.run(module.operation)
        made = serialize(module, **passes_options)
        attributes = made.operation.attributes
        if DUMPED in attributes:
            name = ir.StringAttr(attributes[DUMPED]).value
            attributes[DUMPED] = ir.StringAttr.get(re.sub(r"_\d+$", "", name), made.context)
        return made

    return serialized


def keep() -> None:
    """Lets this process keep lowered kernels from now on."""
    if JAX != "0.11":
        return
    from jax._src.custom_batching import custom_vmap_p
    from jax._src.interpreters import mlir
    from jax._src.pallas import mpmd
    from jax.experimental.mosaic.gpu import core, fragmented_array

    lower = mlir._lowerings[mpmd.mpmd_map_p].rule
    if getattr(lower, "__module__", None) != __name__:
        # Cached rules are lowered as functions of their own, in which operands are parameters.
        mlir.register_lowering(mpmd.mpmd_map_p, _keeping(lower), cacheable=False)
        mlir._uncacheable_primitives.add(custom_vmap_p)  # wraps each kernel
        core._run_serde_pass = _same_bytes(core._run_serde_pass)
        if (assembler := fragmented_array.mgpu_lib) is not None:
            of_assembler: Any = assembler._mosaic_gpu_ext
            of_assembler._get_ptxas_isa_version = cache(of_assembler._get_ptxas_isa_version)
