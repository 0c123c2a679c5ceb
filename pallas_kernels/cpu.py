"""Matmul, norm, rotary positions, gate and the likeliest token on CPU, in C++ (`cpu_kernels.cc`, `cpu_heads.h`). XLA's
own matmul is far from the machine's limits; the others compute padding too, and each call of XLA's costs microseconds.

Grid: pieces of 48 outputs, handed to XLA's threads as they come free; within one, tiles of 3 rows x 4 outputs or 4 x 3,
  or from 40 rows on of 6 rows x 16 outputs against a transposed panel of the weight.
Traffic: the weight once, x once per piece, from the cache.
Pipeline: while a tile's or a panel's weights are multiplied, the next ones come into the second-level cache, a share of
  them in each pass over the present ones.

The source is compiled for the machine at hand by its C++ compiler, once, into the user's cache folder; that of products
with quantized weights (`cpu_quant_matmul.cc`) when there are such. Without a compiler everything runs in plain XLA.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import ops
from jaxserve.pallas_kernels.cpu_build import ATTENTION, KERNELS, LATENT, PANELS, load
from jaxserve.pallas_kernels.parts import Heads, Parts, Row, value_of
from jaxserve.pallas_kernels.types import KVPages, QuantArray, QuantRows

log = logging.getLogger(__name__)

_building = threading.Lock()
QUANT_MATMUL = "cpu_quant_matmul"
FUNCTIONS = {
    KERNELS: {
        "jaxserve_matmul": "Matmul",
        "jaxserve_rms_norm": "RmsNorm",
        "jaxserve_add_norm": "AddNorm",
        "jaxserve_rope": "Rope",
        "jaxserve_silu_gate": "SiluGate",
        "jaxserve_arg_max": "ArgMax",
        "jaxserve_untouched": "Untouched",
        "jaxserve_zeros": "Zeros",
    },
    ATTENTION: {
        "jaxserve_paged_attention": "PagedAttention",
        "jaxserve_write_kv": "WriteKv",
        "jaxserve_rotate_and_write": "RotateAndWrite",
    },
    LATENT: {"jaxserve_latent_attention": "LatentAttention", "jaxserve_write_latent": "WriteLatent"},
    QUANT_MATMUL: {
        "jaxserve_quant_matmul": "QuantMatmul",
        "jaxserve_grouped_quant_matmul": "GroupedQuantMatmul",
        "jaxserve_int4_of_bytes": "Int4OfBytes",
    },
    PANELS: {
        "jaxserve_panel_matmul": "PanelMatmul",
        "jaxserve_panel_rows": "PanelRows",
        "jaxserve_panel_grouped_matmul": "PanelGroupedMatmul",
        "jaxserve_panel_experts": "PanelExperts",
    },
}


def available(name: str = KERNELS) -> bool:
    """Whether a library's kernels are there; builds and registers them when called first, from whichever thread."""
    with _building:
        return jax.default_backend() == "cpu" and _register(name)


@cache
def _register(name: str) -> bool:
    try:
        library = load(name)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("no CPU kernels, so steps run slower: %s", getattr(error, "stderr", None) or error)
        return False
    _share_threads(library)
    for target, symbol in FUNCTIONS[name].items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return True


_pools: list[int] = []  # the address of the first library's threads


def _share_threads(library: ctypes.CDLL) -> None:
    """All libraries run their loops on the threads of the first one."""
    library.jaxserve_pool.restype = ctypes.c_void_p
    if not _pools:
        _pools.append(library.jaxserve_pool())
    library.jaxserve_use_pool(ctypes.c_void_p(_pools[0]))


def _call(
    target: str,
    plain: Callable[..., jax.Array],
    shape: Sequence[int],
    arrays: Sequence[jax.Array],
    count: jax.Array | None,
    **attributes: Any,
) -> jax.Array:
    """What the kernel `target` makes of float32 arrays, of which `count` rows matter: float32 `shape`. Elsewhere, for
    other types and without kernels, what `plain` does."""
    if any(x.dtype != jnp.float32 for x in arrays) or not available():
        return plain(*arrays)

    def native(*operands: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))(*operands, **attributes)

    count = jnp.int32(len(arrays[0])) if count is None else count
    return jax.lax.platform_dependent(*arrays, count, cpu=native, default=lambda *operands: plain(*operands[:-1]))


def untouched(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array of any contents, whose memory the system hands out page by page as it is first written; zeros, written
    at once, without the kernels."""
    if not available():
        return jnp.zeros(shape, dtype)
    return jax.ffi.ffi_call("jaxserve_untouched", jax.ShapeDtypeStruct(shape, dtype))()


def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    """As `jnp.zeros`, but memory is taken page by page as it is first written."""
    if not available():
        return jnp.zeros(shape, dtype)
    size = np.int64(np.prod(shape) * np.dtype(dtype).itemsize)
    return jax.ffi.ffi_call("jaxserve_zeros", jax.ShapeDtypeStruct(shape, dtype))(bytes=size)


def arg_max(x: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """The place of the largest number in each row of float32 x [rows, size], the first of several -> int32 [rows]; of
    the first `count` rows, where that is given. On CPU, with kernels."""
    call = jax.ffi.ffi_call("jaxserve_arg_max", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    return call(x, jnp.int32(len(x)) if count is None else count)


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """As `ops.matmul`."""
    return _call("jaxserve_matmul", ops.matmul, (x.shape[0], w.shape[0]), (x, w), count)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, count: jax.Array | None = None) -> jax.Array:
    """As `ops.rms_norm`."""
    plain = partial(ops.rms_norm, eps=eps)
    return _call("jaxserve_rms_norm", plain, x.shape, (x, scale), count, eps=np.float32(eps))


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """As `ops.rope`."""
    return _call("jaxserve_rope", ops.rope, x.shape, (x, cos, sin), count)


def gate(gate_up: jax.Array, activation: str, count: jax.Array | None = None) -> jax.Array:
    """As `ops.gate`; by the kernel where the activation is silu."""
    plain = partial(ops.gate, activation=activation)
    if activation != "silu":
        return plain(gate_up)
    return _call("jaxserve_silu_gate", plain, gate_up.shape[:-1], (gate_up,), count)


@dataclass(frozen=True)
class CpuOps(ops.Ops):
    """The operations of a CPU with kernels: what lies between two products is one call, as each costs microseconds of
    XLA and passes over memory."""

    @property
    def arg_max(self) -> Callable[[jax.Array], jax.Array] | None:
        return partial(arg_max, count=self.count) if available() else None

    def add_norm(
        self, x: jax.Array, y: Parts | None, scale: jax.Array | Row, eps: float, reader: QuantArray | None = None
    ) -> tuple[jax.Array, jax.Array | QuantRows]:
        """As `Ops.add_norm`; the sum, too, of those rows alone that matter. Nothing is rounded for a `reader`."""
        if y is None or len(y.sums) > 1 or x.dtype != jnp.float32 or not available():
            return super().add_norm(x, y, scale, eps)
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        call = jax.ffi.ffi_call("jaxserve_add_norm", (shape, shape))
        arrays = x, y.sums[0].astype(jnp.float32), _floats(y.bias), _floats(scale)
        total, normed = call(*arrays, self._count(x), eps=np.float32(eps))
        return total, normed

    def rotate_and_write(
        self, heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
    ) -> tuple[jax.Array, KVPages]:
        """As `Ops.rotate_and_write`."""
        from jaxserve.pallas_kernels.paged_attention import cpu as attention  # which needs the functions above

        ours = self.write_kv is attention.write_kv and available(ATTENTION)
        if not ours or len(heads.qkv.sums) > 1 or dtype != jnp.float32:
            return super().rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        qkv = heads.qkv.sums[0].astype(jnp.float32)
        tokens, kv_heads, parts, dim = qkv.shape
        kv = pages.data, _floats(pages.scale)
        shapes = [jax.ShapeDtypeStruct((tokens, kv_heads, parts - 2, dim), jnp.float32)]
        shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kv]
        call = jax.ffi.ffi_call("jaxserve_rotate_and_write", shapes, input_output_aliases={6: 1, 7: 2})
        norms = _floats(heads.q_norm), _floats(heads.k_norm)
        where = slots, jnp.int32(first_page), self._count(qkv)
        q, data, scale = call(
            qkv, _floats(heads.qkv.bias), heads.cos, heads.sin, *norms, *kv, *where, eps=np.float32(eps)
        )
        return q, KVPages(data, None if pages.scale is None else scale)

    def _count(self, x: jax.Array) -> jax.Array:
        return jnp.int32(len(x)) if self.count is None else self.count


def _floats(x: jax.Array | Row | None) -> jax.Array:
    """In float32; an empty array for None."""
    return jnp.zeros(0, jnp.float32) if x is None else value_of(x).astype(jnp.float32)
