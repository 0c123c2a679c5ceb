"""LoRA adapters in plain XLA: each token's row gets the product with the matrices of its own adapter.

Batches with many adapters were described by Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285). Here one product
computes the low-rank results for all adapters in the pool, and those of other adapters than the token's become zero.
This needs neither sorting nor gathering, and XLA can split it over devices like other products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.lora.stacks import AdapterStack


def add_adapters(
    y: jax.Array, x: jax.Array, stack: AdapterStack, place: jax.Array, count: jax.Array | None = None
) -> jax.Array:
    """y [tokens, out] plus the product of x [tokens, in] with the adapter of each token, in the dtype of y.

    place: int32 [tokens], the place of each token's adapter; -1: none. count: int32 scalar, the number of leading rows
    that matter; the result is unspecified for others.
    """
    places, (tokens, out) = len(stack.a), y.shape
    mine = place[:, None] == jnp.arange(places)
    low = _dot(x, stack.a.reshape(-1, stack.a.shape[-1]).astype(x.dtype), 1)
    used = jnp.arange(stack.rank) < stack.ranks[:, : stack.parts, None]
    low = jnp.where(mine[:, :, None, None] & used, low.reshape(tokens, places, stack.parts, stack.rank), 0)
    b = stack.b.reshape(-1, out).astype(x.dtype)
    owner = part_of_outputs(stack.widths, out)
    delta = jnp.zeros((tokens, out), jnp.float32)
    for part in range(stack.parts):
        made = _dot(low[:, :, part].reshape(tokens, -1).astype(x.dtype), b, 0)
        delta = made if stack.parts == 1 else jnp.where(owner == part, made, delta)
    return (y.astype(jnp.float32) + delta).astype(y.dtype)


def part_of_outputs(widths: tuple[int, ...], out: int) -> jax.Array:
    """int32 [out]: the part of a fused weight that each output belongs to, see `AdapterStack.widths`."""
    turn = jnp.repeat(jnp.arange(len(widths)), jnp.array(widths), total_repeat_length=sum(widths))
    return jnp.tile(turn, out // sum(widths))


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """The product over the last axis of x and this axis of w, in float32."""
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
