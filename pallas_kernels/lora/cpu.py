"""LoRA adapters on CPU, in C++ (`cpu_lora.cc`).

Grid: of A, four rows and the tokens of one adapter; of B, 512 outputs and the tokens of one adapter. Threads take
  equal numbers of these.
Traffic: the matrices of the adapters in the batch, once, up to their ranks; x once per piece, from the CPU's cache.
Pipeline: none; the processor fetches matrices ahead, because they are read in their order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.cpu_build import LORA
from jaxserve.pallas_kernels.lora import reference
from jaxserve.pallas_kernels.lora.stacks import AdapterStack

MOST_PARTS = 3


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    stack: AdapterStack,
    place: jax.Array,
    count: jax.Array | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """See `reference.add_adapters`, which is called for what the kernel does not support."""
    floats = y.dtype == x.dtype == jnp.float32 and stack.a.dtype in (jnp.float32, jnp.bfloat16)
    if not floats or len(y) != len(x) or stack.parts > MOST_PARTS or not cpu.available(LORA):
        return reference.add_adapters(y, x, stack, place, count, axes)
    widths = (*stack.widths, 0, 0)[:MOST_PARTS]
    sizes = {name: np.int64(width) for name, width in zip(("first", "second", "third"), widths, strict=True)}
    shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_add_adapters", shape, input_output_aliases={0: 0})
    rows = jnp.int32(len(y)) if count is None else count
    return call(y, x, stack.a, stack.b, place, stack.ranks, rows, **sizes)


def add_expert_adapters(
    y: jax.Array, x: jax.Array, stack: AdapterStack, place: jax.Array, expert: jax.Array, sizes: jax.Array
) -> jax.Array:
    """See `reference.add_expert_adapters`. To the kernel each adapter's expert is an adapter of its own."""
    experts = stack.a.shape[1]
    where = jnp.where(place >= 0, place * experts + expert, -1)
    return add_adapters(y.astype(jnp.float32), x, stack.of_experts(), where, jnp.sum(sizes))
