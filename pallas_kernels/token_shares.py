"""Attention over a cache whose tokens several devices share: a device has every n-th token of each sequence.

Where a model has fewer key-value heads than there are devices, each head is on several of them. With shares these
devices keep different tokens of it, so that the cache holds n times as many. Token p of a sequence is on device p mod
n, at place p // n of its own tokens; so all shares are equally large, and block tables are the same on all devices.

Each device attends over its own tokens with the queries of all n devices. Its result is a part of theirs: the mean of
the values it has, and the logarithm of its sum of exponentials. From the logarithms of all parts follows the weight of
each (as of blocks of keys in FlashAttention, Dao et al. 2022, arXiv:2205.14135), and the results are the sums of the
weighted parts. Devices exchange queries, logarithms, and parts, which are added in the dtype of the queries.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.latent_attention.expanded import absorb, project_values
from jaxserve.pallas_kernels.operands import Heads, LatentHeads, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.reference import Share
from jaxserve.pallas_kernels.types import AttentionOptions, KVPages, LatentPages


def attend(
    ops: Ops, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...],
    first_page: jax.Array | int, *, axis: str, eps: float, dtype: Any, **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, KVPages]:  # fmt: skip
    """`Ops.attend`, called by each device of a mesh for its heads and its share of the tokens. The devices along `axis`
    of the mesh have the same key-value heads and different queries. `slots` are those of `own_slots`."""
    share = _share(axis)
    q, pages = ops.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
    every = lax.all_gather(q, axis, axis=2, tiled=True)  # [tokens, kv_heads, group of all devices, head_dim]
    made = reference.paged_attention(every, pages, *rows, first_page=first_page, share=share, **options)
    sinks = None
    if heads.sinks is not None:
        sinks = lax.all_gather(value_of(heads.sinks).astype(jnp.float32), axis, axis=1, tiled=True)
    return _merged(made, axis, 2, q.dtype, sinks), pages


def attend_latent(
    ops: Ops, heads: LatentHeads, pages: LatentPages, slots: jax.Array, rows: tuple[jax.Array, ...],
    first_page: jax.Array | int, *, axis: str, scale: float, decode_only: bool,
) -> tuple[jax.Array, LatentPages]:  # fmt: skip
    """`Ops.attend_latent` in the same way."""
    share = _share(axis)
    rank = heads.k_up.shape[-1]
    pages = ops.write_latent(pages, heads.row, slots, first_page, rank=rank)
    every = lax.all_gather(absorb(heads.q, heads.k_up), axis, axis=1, tiled=True)
    made = latent.latent_attention(
        every,
        pages,
        *rows,
        scale=scale,
        rank=rank,
        first_page=first_page,
        decode_only=decode_only,
        share=share,
    )
    sinks = None
    if heads.sinks is not None:
        sinks = lax.all_gather(value_of(heads.sinks).astype(jnp.float32), axis, tiled=True)
    return project_values(_merged(made, axis, 1, heads.q.dtype, sinks), heads.v_up), pages


def part_weights(logs: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """The weights of the parts of a softmax [parts, ...], from the logarithms of their sums of exponentials, in the
    same shape. `sinks` [...] are logits without values."""
    peak = logs.max(0) if sinks is None else jnp.maximum(logs.max(0), sinks)
    weights = jnp.exp(logs - peak)
    total = weights.sum(0) if sinks is None else weights.sum(0) + jnp.exp(sinks - peak)
    return weights / total


def _share(axis: str) -> Share:
    return Share(lax.axis_index(axis), lax.axis_size(axis))


def own_slots(slots: jax.Array, axis: str) -> jax.Array:
    """Where this device keeps tokens, int32 [tokens], and -1 for those that others keep; from their slots in pages of
    all devices' tokens (page * page_size + offset, or -1)."""
    share = _share(axis)
    return jnp.where((slots >= 0) & (slots % share.count == share.index), slots // share.count, -1)


def _merged(made: jax.Array, axis: str, heads: int, dtype: Any, sinks: jax.Array | None = None) -> jax.Array:
    """The result for this device's own queries, a part of the axis `heads` of what each device has made of all."""
    weights = part_weights(lax.all_gather(made[..., -1], axis), sinks)
    own = lax.dynamic_index_in_dim(weights, lax.axis_index(axis), keepdims=False)
    return lax.psum_scatter((made[..., :-1] * own[..., None]).astype(dtype), axis, scatter_dimension=heads, tiled=True)
