"""LoRA adapters on CPU, in C++ (`cpu_lora.h`, `cpu_lora.cc`).

Grid: of A, up to 16 rows and the tokens of one adapter; of B, 512 outputs of all tokens, or the tokens one by one if
  many of them have an adapter of their own. Threads take equal numbers of these.
Traffic: the matrices of the adapters in the batch, once, up to their ranks; x once per piece, from the CPU's cache.
Pipeline: with a weight in panels, one call does the whole product (`matmul`). While a thread multiplies a piece of a
  weight of floats, it prefetches the rows of A that it multiplies next. With several rows the weight keeps the
  arithmetic units busy and memory idle, so that A costs little more than its multiplications. B of tokens that are
  alone is read eight rows at a time, from one end to the other, as memory delivers best.

A row's results do not depend on the other rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_panels
from jaxserve.pallas_kernels.cpu_build import LORA
from jaxserve.pallas_kernels.lora import reference
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.types import PanelArray

MOST_PARTS = 3


def supports(x: jax.Array, stack: AdapterStack) -> bool:
    """Whether the kernels multiply x with the matrices of a stack."""
    types = x.dtype == jnp.float32 and stack.a.dtype in (jnp.float32, jnp.bfloat16)
    return types and stack.parts <= MOST_PARTS and cpu.available(LORA)


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    stack: AdapterStack,
    place: jax.Array,
    count: jax.Array | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """See `reference.add_adapters`, which is called for what the kernel does not support."""
    if y.dtype != jnp.float32 or len(y) != len(x) or not supports(x, stack):
        return reference.add_adapters(y, x, stack, place, count, axes)
    call = jax.ffi.ffi_call("jaxserve_add_adapters", _like(y), input_output_aliases={0: 0})
    return call(y, x, _rows(x, count), *_arrays(stack, place), **_widths(stack))


def matmul(
    x: jax.Array, w: PanelArray, stack: AdapterStack, place: jax.Array, count: jax.Array | None = None
) -> jax.Array:
    """`cpu_panels.matmul` with what adapters add. Requires `supports`."""
    shape = jax.ShapeDtypeStruct((len(x), w.shape[0]), jnp.float32)
    sizes = {"out": np.int64(w.shape[0]), "inputs": np.int64(w.shape[1])}
    sizes["arithmetic"] = np.int64(cpu_panels.ARITHMETIC[w.arithmetic])
    call = jax.ffi.ffi_call("jaxserve_adapted_matmul", shape)
    return call(x, w.data, w.table, _rows(x, count), *_arrays(stack, place), **sizes, **_widths(stack))


def add_to_embeddings(
    x: jax.Array, ids: jax.Array, stack: AdapterStack, place: jax.Array, count: jax.Array | None = None
) -> jax.Array:
    """See `reference.add_to_embeddings`, which is called for what the kernel does not support."""
    if not supports(x, stack):
        return reference.add_to_embeddings(x, ids, stack, place)
    call = jax.ffi.ffi_call("jaxserve_add_to_embeddings", _like(x), input_output_aliases={0: 0})
    return call(x, ids, _rows(x, count), *_arrays(stack, place), **_widths(stack))


def add_expert_adapters(
    y: jax.Array, x: jax.Array, stack: AdapterStack, place: jax.Array, expert: jax.Array, sizes: jax.Array
) -> jax.Array:
    """See `reference.add_expert_adapters`. To the kernel each adapter's expert is an adapter of its own."""
    experts = stack.a.shape[1]
    where = jnp.where(place >= 0, place * experts + expert, -1)
    return add_adapters(y.astype(jnp.float32), x, stack.of_experts(), where, jnp.sum(sizes))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _rows(x: jax.Array, count: jax.Array | None) -> jax.Array:
    return jnp.int32(len(x)) if count is None else count


def _arrays(stack: AdapterStack, place: jax.Array) -> tuple[jax.Array, ...]:
    return stack.a, stack.b, place, stack.ranks


def _widths(stack: AdapterStack) -> dict[str, np.int64]:
    widths = (*stack.widths, 0, 0)[:MOST_PARTS]
    return {name: np.int64(width) for name, width in zip(("first", "second", "third"), widths, strict=True)}
