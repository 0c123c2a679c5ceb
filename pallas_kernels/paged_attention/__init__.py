"""Attention over pages: `paged_attention` takes the fastest way that the platform, shapes and dtypes allow."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import cpu
from pallas_kernels.paged_attention import reference


def paged_attention(
    q, pages, block_tables, q_start, kv_len, num_decodes, *, scale: float, window: int | None, decode_only: bool
) -> jax.Array:
    """See `reference.paged_attention`."""

    def xla(q, pages, block_tables, q_start, kv_len, num_decodes):
        options = {"scale": scale, "window": window, "decode_only": decode_only}
        return reference.paged_attention(q, pages, block_tables, q_start, kv_len, num_decodes, **options)

    def native(q, pages, block_tables, q_start, kv_len, num_decodes):
        return cpu.paged_attention(q, pages, block_tables, q_start, kv_len, scale=scale, window=window)

    arguments = (q, pages, block_tables, q_start, kv_len, num_decodes)
    if q.shape[-1] % 8 or {q.dtype, pages.dtype} != {jnp.dtype("float32")} or not cpu.available():
        return xla(*arguments)
    return jax.lax.platform_dependent(*arguments, cpu=native, default=xla)
