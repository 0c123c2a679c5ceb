"""Scatters new keys and values into the pages of the cache, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.types import KVPages

TINY = 1e-30  # smaller peaks count as zero: their scales could be subnormal, hence 0 on some devices, and 0 / 0 is NaN


def write_kv(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0) -> KVPages:
    """Writes k, v [tokens, kv_heads, head_dim] at slots int32 [tokens] (page * page_size + offset; -1 is padding).

    Pages count from `first_page`, int32 scalar: where one array holds the pages of several layers, it is the layer's
    first page. No sequence owns this page, and padding may be written to it. `pages` is donated by the caller and
    returned updated. Where pages have scales, a token's head gets the scale that maps its largest number to the largest
    code.
    """
    slots = jnp.maximum(slots, 0)
    page = slots // pages.page_size + first_page
    offset = slots % pages.page_size
    new = jnp.stack([k, v], axis=1)  # [tokens, 2, kv_heads, head_dim]
    new = jnp.pad(new, [(0, 0)] * 3 + [(0, pages.head_dim - new.shape[-1])])
    scale = pages.scale
    if scale is not None:
        new, own = quantize(new, pages.data.dtype)
        scale = scale.at[page, :, :, offset].set(own, mode="promise_in_bounds")
    data = pages.data.at[page, :, :, offset].set(new.astype(pages.data.dtype), mode="promise_in_bounds")
    return KVPages(data, scale)


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Rounds x [..., head_dim] to codes of int8 or float8_e4m3fn. Returns codes and their scales, float32 [...]."""
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.where(peak > TINY, peak / largest, 1.0)
    codes = wide / scale[..., None]
    return (jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype), scale
