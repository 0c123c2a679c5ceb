"""Matmul, norm, rotary positions, gate and arg max on CPU, in C++ (`cpu_kernels.cc`, `cpu_heads.h`). XLA's own matmul
uses little of the machine's speed. Its other operations compute padding too, and each call costs microseconds.

Grid: pieces of 48 outputs. XLA's threads take the next piece when they are free. Tiles within a piece are 3 rows x 4
  outputs or 4 x 3; from 40 rows on 6 rows x 16 outputs, against a transposed panel of the weight.
Traffic: the weight once; x once per piece, from the CPU's cache.
Pipeline: while a tile's or panel's weights are multiplied, the next ones are prefetched to the second-level cache, some
  in each pass over the current ones.

This machine's C++ compiler compiles the source once, into the user's cache folder. Products with quantized weights
(`cpu_quant_matmul.cc`) are compiled when the first one is needed. Without a compiler everything runs in plain XLA.
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
from jaxserve.pallas_kernels.cpu_build import (
    ATTENTION,
    KERNELS,
    LATENT,
    LORA,
    PANELS,
    QUANT_MATMUL,
    RECURRENT,
    lacking,
    load,
    possible,
)
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.operands import Heads, Partials, Row, value_of
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import DrawSettings, KVPages, PanelArray, QuantArray, QuantRows

log = logging.getLogger(__name__)

_building = threading.Lock()
MOST_TAPS = 16  # as in `cpu_recurrent.cc`
FUNCTIONS = {
    KERNELS: {
        "jaxserve_matmul": "Matmul",
        "jaxserve_rms_norm": "RmsNorm",
        "jaxserve_add_norm": "AddNorm",
        "jaxserve_rope": "Rope",
        "jaxserve_silu_gate": "SiluGate",
        "jaxserve_arg_max": "ArgMax",
        "jaxserve_log_softmax": "LogSoftmax",
        "jaxserve_filter": "Filter",
        "jaxserve_untouched": "Untouched",
        "jaxserve_zeros": "Zeros",
    },
    ATTENTION: {
        "jaxserve_paged_attention": "PagedAttention",
        "jaxserve_write_kv": "WriteKv",
        "jaxserve_rotate_and_write": "RotateAndWrite",
        "jaxserve_segment_attention": "SegmentAttention",
    },
    LATENT: {"jaxserve_latent_attention": "LatentAttention", "jaxserve_write_latent": "WriteLatent"},
    LORA: {
        "jaxserve_add_adapters": "AddAdapters",
        "jaxserve_adapted_matmul": "AdaptedMatmul",
        "jaxserve_add_to_embeddings": "AddToEmbeddings",
    },
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
    RECURRENT: {"jaxserve_short_conv": "ShortConv", "jaxserve_delta_net": "DeltaNet", "jaxserve_mamba2": "Mamba2"},
}


def available(name: str = KERNELS) -> bool:
    """Whether a library's kernels are available. The first call, from any thread, builds and registers them."""
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


_pools: list[int] = []  # the address of the first library's thread pool


def _share_threads(library: ctypes.CDLL) -> None:
    """Makes all libraries run their loops on the threads of the first one."""
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
    """Calls the kernel `target` with float32 arrays, of which `count` rows matter. Returns float32 `shape`. On other
    platforms, for other dtypes and without kernels it calls `plain`."""
    if any(x.dtype != jnp.float32 for x in arrays) or not available():
        return plain(*arrays)

    def native(*operands: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))(*operands, **attributes)

    count = jnp.int32(len(arrays[0])) if count is None else count
    return jax.lax.platform_dependent(*arrays, count, cpu=native, default=lambda *operands: plain(*operands[:-1]))


def untouched(shape: Sequence[int], dtype: Any, large_pages: bool = False) -> jax.Array:
    """An array with undefined contents. The system provides its memory page by page on the first write, with
    `large_pages` in pages of 2 MiB where it has them. Without the kernels it is zeros, written at once."""
    if not available():
        return jnp.zeros(shape, dtype)
    size = np.int64(np.prod(shape) * np.dtype(dtype).itemsize)
    call = jax.ffi.ffi_call("jaxserve_untouched", jax.ShapeDtypeStruct(shape, dtype))
    return call(bytes=size, large_pages=np.bool_(large_pages))


def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    """`jnp.zeros`, but the system provides the memory page by page on the first write."""
    if not available():
        return jnp.zeros(shape, dtype)
    size = np.int64(np.prod(shape) * np.dtype(dtype).itemsize)
    return jax.ffi.ffi_call("jaxserve_zeros", jax.ShapeDtypeStruct(shape, dtype))(bytes=size)


def arg_max(x: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Index of the first largest number in each row of float32 x [rows, size] -> int32 [rows]. If given, only the first
    `count` rows are computed. Requires a CPU with kernels."""
    call = jax.ffi.ffi_call("jaxserve_arg_max", jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
    return call(x, jnp.int32(len(x)) if count is None else count)


def log_softmax(x: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """`jax.nn.log_softmax` of float32 x [rows, size]; `count` as in `arg_max`. A row's result does not depend on other
    rows, nor on their number. Requires a CPU with kernels."""
    call = jax.ffi.ffi_call("jaxserve_log_softmax", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, jnp.int32(len(x)) if count is None else count)


def filter_logits(x: jax.Array, settings: DrawSettings, excluded: float, count: jax.Array | None = None) -> jax.Array:
    """`execution.filters.filter_logits` of float32 x [rows, vocab]; dropped tokens become `excluded`. Sums are in
    double, in an order of the row's own; `count` as in `arg_max`. Requires a CPU with kernels."""
    call = jax.ffi.ffi_call("jaxserve_filter", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    count = jnp.int32(len(x)) if count is None else count
    limits = settings.top_k.astype(jnp.int32), settings.top_p, settings.min_p
    return call(x, *limits, count, excluded=np.float32(excluded))


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """See `ops.matmul`."""
    return _call("jaxserve_matmul", ops.matmul, (x.shape[0], w.shape[0]), (x, w), count)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, count: jax.Array | None = None) -> jax.Array:
    """See `ops.rms_norm`."""
    plain = partial(ops.rms_norm, eps=eps)
    return _call("jaxserve_rms_norm", plain, x.shape, (x, scale), count, eps=np.float32(eps))


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """See `ops.rope`."""
    return _call("jaxserve_rope", ops.rope, x.shape, (x, cos, sin), count)


def why_not_recurrent(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why the kernels of recurrent layers cannot be used, or None."""
    if device.platform != "cpu":
        return "it is for CPUs"
    if not problem.silu:
        return "the convolution must be followed by silu"
    if problem.width > MOST_TAPS:
        return f"the convolution's width may be at most {MOST_TAPS}, not {problem.width}"
    return None if possible(RECURRENT) else lacking()


def advance_states(
    target: str,
    shape: Sequence[int],
    arrays: Sequence[jax.Array | None],
    state: Sequence[jax.Array],
    rows: StateRows,
    first: jax.Array | int,
) -> Sequence[jax.Array]:
    """Calls the kernel `target` of a recurrent layer with its inputs; None: a bias that it does not have. Returns the
    results, float32 `shape`, and the arrays of the states, which it changes in place."""
    given = [_floats(x) if x is None or x.dtype != jnp.int32 else x for x in arrays]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)]
    aliases = {len(given) + i: 1 + i for i in range(len(state))}
    where = rows.source, rows.target, rows.fresh.astype(jnp.int32), rows.q_start, jnp.int32(first)
    return jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)(*given, *state, *where)


def gate(gate_up: jax.Array, activation: str, count: jax.Array | None = None) -> jax.Array:
    """See `ops.gate`. The kernel supports silu; other activations are plain XLA."""
    plain = partial(ops.gate, activation=activation)
    if activation != "silu":
        return plain(gate_up)
    return _call("jaxserve_silu_gate", plain, gate_up.shape[:-1], (gate_up,), count)


@dataclass(frozen=True)
class CpuOps(ops.Ops):
    """The operations of a CPU with kernels. All that lies between two products is one call, since each call of XLA
    costs microseconds and a pass over memory."""

    @property
    def arg_max(self) -> Callable[[jax.Array], jax.Array] | None:
        return partial(arg_max, count=self.count) if available() else None

    @property
    def filter_logits(self) -> Callable[..., jax.Array] | None:
        return partial(filter_logits, count=self.count) if available() else None

    @property
    def log_softmax(self) -> Callable[[jax.Array], jax.Array]:
        return partial(log_softmax, count=self.count) if available() else super().log_softmax

    def add_norm(
        self, x: jax.Array, y: Partials | None, scale: jax.Array | Row, eps: float, reader: QuantArray | None = None
    ) -> tuple[jax.Array, jax.Array | QuantRows]:
        """See `Ops.add_norm`. Only rows that matter are added. Nothing is rounded for a `reader`."""
        if y is None or len(y.sums) > 1 or x.dtype != jnp.float32 or not available():
            return super().add_norm(x, y, scale, eps)
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        call = jax.ffi.ffi_call("jaxserve_add_norm", (shape, shape))
        arrays = x, y.sums[0].astype(jnp.float32), _floats(y.bias), _floats(scale)
        total, normed = call(*arrays, self._count(x), eps=np.float32(eps))
        return total, normed

    def adapted(
        self,
        x: jax.Array | QuantRows,
        w: ops.Weight,
        stack: AdapterStack | None,
        axes: tuple[str | None, str | None],
        as_partials: bool = False,
    ) -> jax.Array:
        """See `Ops.adapted`. With a weight in panels it is one call."""
        from jaxserve.pallas_kernels.lora import cpu as lora  # imports this module

        if isinstance(x, QuantRows) or not isinstance(w, PanelArray) or stack is None or self.places is None:
            return super().adapted(x, w, stack, axes, as_partials)
        if not lora.supports(x, stack):
            return super().adapted(x, w, stack, axes, as_partials)
        y = lora.matmul(x, w, stack, self.places, self.count)
        return y[None] if as_partials else y

    def embedded(self, x: jax.Array, ids: jax.Array, stack: AdapterStack | None) -> jax.Array:
        """See `Ops.embedded`."""
        from jaxserve.pallas_kernels.lora import cpu as lora

        if stack is None or self.places is None:
            return x
        return lora.add_to_embeddings(x, ids, stack, self.places, self.count)

    def rotate_and_write(
        self, heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
    ) -> tuple[jax.Array, KVPages]:
        """See `Ops.rotate_and_write`."""
        from jaxserve.pallas_kernels.paged_attention import cpu as attention  # imports this module

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
    """Converts to float32; None becomes an empty array."""
    return jnp.zeros(0, jnp.float32) if x is None else value_of(x).astype(jnp.float32)
