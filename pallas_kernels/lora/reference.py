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
    y: jax.Array,
    x: jax.Array,
    stack: AdapterStack,
    place: jax.Array,
    count: jax.Array | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """y [rows, out] plus the product of x [tokens, in] with the adapter of each token, in the dtype of y. Rows of y
    beyond the tokens stay as they are.

    place: int32 [tokens], the place of each token's adapter; -1: none. count: int32 scalar, the number of leading rows
    that matter; the result is unspecified for others. `axes` names the weight's axes, for an implementation that splits
    it over devices.
    """
    places = len(stack.a)
    tokens = len(x)
    out = y.shape[1]
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
    added = (y[:tokens].astype(jnp.float32) + delta).astype(y.dtype)
    return added if len(y) == tokens else y.at[:tokens].set(added)


def add_to_embeddings(x: jax.Array, ids: jax.Array, stack: AdapterStack, place: jax.Array) -> jax.Array:
    """Embeddings x [tokens, hidden] of the tokens ids, int32 [tokens], plus what adapters add. The stack's a is
    [places, vocab, rank], of which a token's row is looked up."""
    places = len(stack.a)
    rank = stack.rank
    low = stack.a[jnp.maximum(place, 0), ids].astype(x.dtype)
    mine = (place[:, None] == jnp.arange(places))[:, :, None] & (jnp.arange(rank) < stack.ranks[:, :1])
    low = jnp.where(mine, low[:, None], 0).reshape(len(ids), -1)
    return x + _dot(low, stack.b.reshape(places * rank, -1).astype(x.dtype), 0).astype(x.dtype)


def add_expert_adapters(
    y: jax.Array, x: jax.Array, stack: AdapterStack, place: jax.Array, expert: jax.Array, sizes: jax.Array
) -> jax.Array:
    """`add_adapters` for the products of a mixture's experts. y [rows, out] and x [rows, in] are sorted by expert.

    place, expert: int32 [rows], the place of each row's adapter, or -1, and its expert. sizes: int32 [experts], the
    rows of each expert; rows beyond their sum stay as they are.
    """
    parts, rank, (rows, out) = stack.parts, stack.rank, y.shape
    owner = part_of_outputs(stack.widths, out)
    delta = jnp.zeros((rows, out), jnp.float32)
    for number in range(len(stack.a)):
        mine = (place == number)[:, None]
        low = grouped_product(jnp.where(mine, x, 0), stack.a[number].astype(x.dtype), sizes, 2)
        used = jnp.arange(rank) < stack.ranks[number, :parts, None]
        low = jnp.where(used, low.reshape(rows, parts, rank), 0).astype(x.dtype)
        for part in range(parts):
            made = grouped_product(low[:, part], stack.b[number].astype(x.dtype), sizes, 1)
            delta = delta + jnp.where(owner == part, made, 0)
    return y + delta.astype(y.dtype)


def grouped_product(x: jax.Array, w: jax.Array, sizes: jax.Array, axis: int) -> jax.Array:
    """Rows of x, sorted by group, each times its group's matrix in w [groups, …], over this axis of w; in float32.
    Rows beyond all groups give 0."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (axis,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    made = jax.lax.ragged_dot_general(x, w, sizes, dimensions, preferred_element_type=jnp.float32)
    # XLA:TPU (libtpu 0.0.42 and 0.0.48) does not compute rows of no group, which then hold anything.
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), made, 0)


def part_of_outputs(widths: tuple[int, ...], out: int) -> jax.Array:
    """int32 [out]: the part of a fused weight that each output belongs to, see `AdapterStack.widths`."""
    turn = jnp.repeat(jnp.arange(len(widths)), jnp.array(widths), total_repeat_length=sum(widths))
    return jnp.tile(turn, out // sum(widths))


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """The product over the last axis of x and this axis of w, in float32."""
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
