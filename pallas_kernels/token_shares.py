"""Attention over a cache whose tokens several devices share: a device has every n-th token of each sequence.

Where a model has fewer key-value heads than there are devices, each head is on several of them. With shares these
devices keep different tokens of it, so that the cache holds n times as many. Token p of a sequence is on device p mod
n, at place p // n of its own tokens; so all shares are equally large, and block tables are the same on all devices.

Each device attends over its own tokens with the queries of all n devices. Its result is a part of theirs: the mean of
the values it has, and the logarithm of its sum of exponentials, with which parts are merged exactly, as blocks of keys
are in FlashAttention (Dao et al. 2022, arXiv:2205.14135). Two exchanges are needed, of queries and of parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.latent_attention.expanded import absorb, project_values
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.reference import Share
from jaxserve.pallas_kernels.parts import Heads, LatentHeads, value_of
from jaxserve.pallas_kernels.types import KVPages, LatentPages


def attend(
    ops: Ops, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...],
    first_page: jax.Array | int, *, axis: str, eps: float, dtype: Any, **options: Any,
) -> tuple[jax.Array, KVPages]:  # fmt: skip
    """`Ops.attend`, called by each device of a mesh for its heads and its share of the tokens. The devices along `axis`
    of the mesh have the same key-value heads and different queries. `slots` are those of `own_slots`."""
    share = _share(axis)
    q, pages = ops.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
    every = lax.all_gather(q, axis, axis=2, tiled=True)  # [tokens, kv_heads, group of all devices, head_dim]
    made = reference.paged_attention(every, pages, *rows, first_page=first_page, share=share, **options)
    sinks = None if heads.sinks is None else value_of(heads.sinks).astype(jnp.float32)
    return merge(_exchanged(made, share, axis, 2), sinks).astype(q.dtype), pages


def attend_latent(
    ops: Ops, heads: LatentHeads, pages: LatentPages, slots: jax.Array, rows: tuple[jax.Array, ...],
    first_page: jax.Array | int, *, axis: str, scale: float, decode_only: bool,
) -> tuple[jax.Array, LatentPages]:  # fmt: skip
    """`Ops.attend_latent` in the same way."""
    share, rank = _share(axis), heads.k_up.shape[-1]
    pages = ops.write_latent(pages, heads.row, slots, first_page, rank=rank)
    every = lax.all_gather(absorb(heads.q, heads.k_up), axis, axis=1, tiled=True)
    options: Any = {"scale": scale, "rank": rank, "decode_only": decode_only}
    made = latent.latent_attention(every, pages, *rows, first_page=first_page, share=share, **options)
    merged = merge(_exchanged(made, share, axis, 1)).astype(heads.q.dtype)
    return project_values(merged, heads.v_up), pages


def merge(parts: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Merges the parts of a softmax, float32 [parts, ..., width + 1], into its result [..., width]. The last number of
    a part is the logarithm of its sum of exponentials. `sinks` [...] are logits without values."""
    values, logs = parts[..., :-1], parts[..., -1]
    peak = logs.max(0) if sinks is None else jnp.maximum(logs.max(0), sinks)
    weights = jnp.exp(logs - peak)
    total = weights.sum(0) if sinks is None else weights.sum(0) + jnp.exp(sinks - peak)
    return (values * (weights / total)[..., None]).sum(0)


def _share(axis: str) -> Share:
    return Share(lax.axis_index(axis), lax.axis_size(axis))


def own_slots(slots: jax.Array, axis: str) -> jax.Array:
    """Where this device keeps tokens, int32 [tokens], and -1 for those that others keep; from their slots in pages of
    all devices' tokens (page * page_size + offset, or -1)."""
    share = _share(axis)
    return jnp.where((slots >= 0) & (slots % share.count == share.index), slots // share.count, -1)


def _exchanged(made: jax.Array, share: Share, axis: str, heads: int) -> jax.Array:
    """Sends each device the parts for its own queries, which are a part of the axis `heads`: [parts, ...]."""
    split = made.reshape(*made.shape[:heads], share.count, -1, *made.shape[heads + 1 :])
    return lax.all_to_all(split, axis, split_axis=heads, concat_axis=0, tiled=False)
