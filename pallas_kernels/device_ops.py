"""Chooses which implementation of each operation a device runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_panels, experts, tuning
from jaxserve.pallas_kernels.experts import ExpertWeights, MixtureOptions
from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.lora import cpu as lora_cpu
from jaxserve.pallas_kernels.lora import reference as lora
from jaxserve.pallas_kernels.operands import ConvInputs, DeltaHeads, MambaInputs, Partials
from jaxserve.pallas_kernels.ops import Gate, Ops
from jaxserve.pallas_kernels.quant_matmul import w8a8, ways
from jaxserve.pallas_kernels.registry import (
    BACKENDS,
    AttentionProblem,
    Device,
    LatentProblem,
    MatmulProblem,
    RecurrentProblem,
    SegmentProblem,
    choose,
    explain,
    has_gated_matmul,
    load,
)
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import (
    BlockArray,
    DeltaState,
    KVPages,
    MambaState,
    PagedOptions,
    PanelArray,
    QuantArray,
    QuantRows,
    RecurrentOptions,
    State,
)

log = logging.getLogger(__name__)
RECURRENT = ("delta_net", "mamba2", "short_conv")  # the operations of recurrent layers that have kernels
KernelInputs = DeltaHeads | ConvInputs | MambaInputs  # their inputs


def matmul_of(device: Device, backend: str = "auto", *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """Returns `multiply` of `quant_matmul` for `device`. It raises BackendError for a weight that the backend cannot
    do.

    With `partials` it returns `Partials.sums`. `auto` takes the way that was measured to be the fastest, where one was
    (`quant_matmul.ways`). Where a weight says how its inputs are rounded, `auto` uses 8-bit products if the device has
    them; otherwise rounded inputs become floats again.
    """

    def multiply(
        x: Any, w: QuantArray | BlockArray, count: jax.Array | None = None, partials: bool = False
    ) -> jax.Array:
        if isinstance(w, QuantArray) and w.activations is not None:
            rows = x if isinstance(x, QuantRows) else w8a8.quantize(x, w)
            if backend == "auto" and w8a8.why_not(device, MatmulProblem.of(rows, w, partitioned)) is None:
                return w8a8.quant_matmul_parts(rows, w) if partials else w8a8.quant_matmul(rows, w)
            y = w8a8.emulated(rows, w, partial(multiply, count=count))
            return y.astype(rows.dtype)[None] if partials else y
        problem = MatmulProblem.of(x, w, partitioned)
        if backend == "auto" and isinstance(w, QuantArray) and (way := ways.fastest(device, problem, len(x))):
            return ways.product(way, x, w, count, partials)
        module = load("matmul", choose("matmul", device, problem, backend))
        if not partials:
            return module.quant_matmul(x, w, count=count)
        if hasattr(module, "quant_matmul_parts"):
            return module.quant_matmul_parts(x, w, count=count)
        return module.quant_matmul(x, w, count=count).astype(x.dtype)[None]

    return multiply


def gated_matmul_of(
    device: Device, backend: str = "auto", *, partitioned: bool = False
) -> Callable[..., jax.Array] | None:
    """Returns `multiply` of `quant_matmul` for `Ops.gated_matmul` on `device`; None where no backend has such a kernel.

    The backend that multiplies by a weight also computes the activation, if its kernel can. Of weights that are not
    quantized XLA computes the product, unless a kernel that does both was measured to be faster
    (`quant_matmul.ways`)."""
    if device.platform != "gpu":
        return None
    multiply = matmul_of(device, backend, partitioned=partitioned)

    def gated(x: jax.Array, w: Any, count: jax.Array | None = None, *, activation: str) -> jax.Array:
        from jaxserve.pallas_kernels import fused_triton

        made = _in_one_launch(device, backend, partitioned, x, w, activation)
        if made is not None:
            return made
        is_quantized = isinstance(w, QuantArray | BlockArray)
        sums = multiply(x, w, count=count, partials=True) if is_quantized else fused_triton.product(x, w)
        y = fused_triton.gate(Partials(sums), activation, x.dtype)
        assert isinstance(y, jax.Array)
        return y

    return gated


def _in_one_launch(
    device: Device, backend: str, partitioned: bool, x: jax.Array, w: Any, activation: str
) -> jax.Array | None:
    """`gated_matmul` of the backend that multiplies x by w; None if it has none for them."""
    if isinstance(w, BlockArray) or (isinstance(w, QuantArray) and w.activations is not None):
        return None
    is_quantized = isinstance(w, QuantArray)
    codes: QuantArray = w if is_quantized else experts.as_codes(w)
    problem = replace(MatmulProblem.of(x, codes, partitioned), activation=activation)
    measured = ways.fastest(device, problem, len(x)) if backend == "auto" else None
    way = measured or (choose("matmul", device, problem, backend) if is_quantized else "dot")
    module: Any = load("matmul", way) if way in BACKENDS else None
    if not has_gated_matmul(module, problem):
        return None
    suits = not is_quantized or module.suits_gate(x, codes, direct=measured is not None)
    return module.gated_matmul(x, codes, activation) if suits else None


def grouped_matmul_of(device: Device, backend: str = "auto", *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """Returns `experts.grouped_matmul` for `device`. The backend of a single weight also multiplies quantized stacks of
    its form, if it supports stacks; otherwise plain XLA does. `xla` multiplies stacks of floats with plain XLA, too."""

    def multiply(x: jax.Array, w: Any, group_sizes: jax.Array) -> jax.Array:
        if isinstance(w, PanelArray):
            return cpu_panels.grouped_matmul(x, w, group_sizes)
        if isinstance(w, QuantArray) and w.order is not None:
            expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(x)), side="right", method="compare_all")
            order = w.order[jnp.minimum(expert, len(w.order) - 1)]
            x = jnp.take_along_axis(x, order, axis=1)
            w = replace(w, order=None)
        if isinstance(w, QuantArray | BlockArray):
            module = load("matmul", choose("matmul", device, MatmulProblem.of(x, w, partitioned), backend))
            if hasattr(module, "grouped_quant_matmul"):
                return module.grouped_quant_matmul(x, w, group_sizes)
        elif x.dtype == w.dtype and (floats := grouped_floats(device, x.dtype, backend)) is not None:
            return floats(x, experts.as_codes(w), group_sizes)
        return experts.grouped_matmul(x, w, group_sizes)

    return multiply


def grouped_floats(device: Device, dtype: Any, backend: str = "auto") -> Callable[..., jax.Array] | None:
    """A device's kernel for grouped products of x and weights in this dtype, given as `experts.as_codes`. XLA would
    transpose the weights first in each step. None: there is no kernel."""
    name = {"gpu": "triton", "tpu": "mosaic_tpu"}.get(device.platform)
    if name is None or backend == "xla" or (device.platform == "tpu" and dtype == jnp.float16):
        return None  # Mosaic loads no float16
    try:
        module = load("matmul", name)
    except ImportError:  # of jax_triton, which `_with_triton` tells
        return None
    probe = MatmulProblem(np.dtype("bfloat16"), np.dtype("int8"), 128, 128, (1, 128))
    return None if module.why_not(device, probe) is not None else module.grouped_quant_matmul


def adapters_of(device: Device, *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """Returns `lora.reference.add_adapters` for `device`. XLA splits the plain operations of `partitioned` models."""
    if partitioned:
        return lora.add_adapters
    if device.platform == "cpu":
        return lora_cpu.add_adapters
    if device.platform == "tpu":
        from jaxserve.pallas_kernels.lora import tpu

        return lora.add_adapters if tpu.why_not(device) else tpu.add_adapters
    try:
        from jaxserve.pallas_kernels.lora import triton
    except ImportError as error:
        log.warning("%s is not installed, so steps read all adapters of the pool", error.name)
        return lora.add_adapters
    return lora.add_adapters if triton.why_not(device) else triton.add_adapters


def mixture_of(device: Device, backend: str = "auto", *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """Returns `experts.mixture` for `device`."""
    multiply = grouped_matmul_of(device, backend, partitioned=partitioned)
    own = device.platform == "cpu" and not partitioned
    add_adapters = lora_cpu.add_expert_adapters if own else lora.add_expert_adapters

    def mixture(
        x: jax.Array, chosen: jax.Array, weights: jax.Array, w: ExpertWeights, **options: Unpack[MixtureOptions]
    ) -> jax.Array:
        # The kernel has no room for adapters between its products, and knows gated experts without a bound only.
        gate = cast(Gate, options["gate"])
        fused = options.get("stacks") is None and w.gated and gate.bound is None
        if fused and isinstance(w.gate_up, PanelArray) and isinstance(w.down, PanelArray):
            count = options.get("count")
            weighs = options.get("weighs_inputs", False)
            return cpu_panels.mixture(x, chosen, weights, w, gate=gate, count=count, weighs_inputs=weighs)
        return experts.mixture(x, chosen, weights, w, multiply=multiply, add_adapters=add_adapters, **options)

    return mixture


def recurrent_problem(inputs: KernelInputs, state: State, options: RecurrentOptions) -> RecurrentProblem:
    """The problem of an operation of recurrent layers with these arguments."""
    dtype = np.dtype(inputs[0].dtype)
    channels, width = inputs.conv.shape[-2:]
    silu = options.get("activation", jax.nn.silu) is jax.nn.silu
    if isinstance(state, DeltaState):
        _, heads, group, rows, columns = state.matrix.shape
        return RecurrentProblem(dtype, heads, group, rows, columns, channels, width, silu)
    if isinstance(state, MambaState):
        _, heads, rows, columns = state.matrix.shape
        return RecurrentProblem(dtype, heads, options["per_group"], rows, columns, channels, width, silu)
    return RecurrentProblem(dtype, 1, 0, 0, 0, channels, width)


def run_recurrent(
    device: Device,
    operation: str,
    inputs: KernelInputs,
    state: State,
    rows: StateRows,
    first: jax.Array | int = 0,
    **options: Unpack[RecurrentOptions],
) -> tuple[jax.Array, State]:
    """An operation of recurrent layers, by the first backend that can run it on `device`."""
    problem = recurrent_problem(inputs, state, options)
    module = load(operation, choose(operation, device, problem))
    return getattr(module, operation)(inputs, state, rows, first, **options)


def run_segments(
    device: Device, q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float
) -> jax.Array:
    """`segment_attention` by the first backend that can run it on `device`."""
    problem = SegmentProblem(np.dtype(q.dtype), *q.shape[1:])
    module = load("segment_attention", choose("segment_attention", device, problem))
    return module.segment_attention(q, k, v, segment, scale)


def choose_ops(
    device: Device, attention: AttentionProblem | LatentProblem, *, backend: str = "auto", partitioned: bool = False
) -> Ops:
    """Returns the operations for a model on `device`. `backend` is the one requested for attention. Raises
    BackendError.

    XLA splits `partitioned` models over devices, but can split only its own dense operations. So the caller must run
    kernels, those of `fused` included, on each device's own part.
    """
    kinds: dict[str, Any]
    if isinstance(attention, LatentProblem):
        module = load("latent", choose("latent", device, attention, backend))
        kinds = {"latent_attention": module.latent_attention, "write_latent": module.write_latent}
    else:
        module = load("attention", choose("attention", device, attention, backend))
        kinds = {"paged_attention": module.paged_attention}
        kinds["write_kv"] = getattr(module, "write_kv", write_kv)
        kinds["write_and_attend"] = getattr(module, "write_and_attend", None)
        if backend == "auto" and (other := _decoding(device, attention, module)) is not None:
            kinds["paged_attention"] = partial(_attend, module.paged_attention, other.paged_attention)
    if device.platform != "cpu" or not partitioned:
        kinds |= {name: partial(run_recurrent, device, name) for name in RECURRENT}
        kinds["segment_attention"] = partial(run_segments, device)
    if device.platform == "cpu" and not partitioned:
        return cpu.CpuOps(matmul=cpu.matmul, rms_norm=cpu.rms_norm, rope=cpu.rope, gate=cpu.gate, **kinds)
    return _with_triton(Ops(**kinds), device, attention.q_dtype)


def with_shape(ops: Ops, other: Ops, problem: AttentionProblem | LatentProblem) -> Ops:
    """The operations, with attention by `other` for the heads of this problem: a model's layers may differ in them."""
    assert isinstance(problem, AttentionProblem)
    if ops.paged_attention is other.paged_attention and ops.write_kv is other.write_kv:
        return ops
    shape = problem.kv_heads, problem.head_dim

    def attend(q: jax.Array, pages: KVPages, *rows: jax.Array, **options: Unpack[PagedOptions]) -> jax.Array:
        chosen = other if (q.shape[1], q.shape[3]) == shape else ops
        return chosen.paged_attention(q, pages, *rows, **options)

    def write(pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, first_page: jax.Array | int = 0) -> KVPages:
        chosen = other if (pages.kv_heads, pages.head_dim) == shape else ops
        return chosen.write_kv(pages, k, v, slots, first_page)

    return replace(ops, paged_attention=attend, write_kv=write)


def _decoding(device: Device, problem: AttentionProblem, module: ModuleType) -> ModuleType | None:
    """The backend of attention that was measured to be the fastest in steps that only decode, if it is not `module`."""
    name = tuning.everything(device.kind).decode.get(attention_key(problem)) if device.platform != "cpu" else None
    if name is None or explain("attention", device, problem)[name] is not None:
        return None
    found = load("attention", name)
    return None if found is module or hasattr(module, "write_and_attend") else found


def attention_key(problem: AttentionProblem) -> str:
    """The name of a problem in tables."""
    return tuning.problem_key(
        q=problem.q_dtype.name, kv=problem.kv_dtype.name, heads=problem.kv_heads, group=problem.group,
        head_dim=problem.head_dim, page_size=problem.page_size,
    )  # fmt: skip


def _attend(
    attend: Callable[..., jax.Array],
    decode: Callable[..., jax.Array],
    q: jax.Array,
    pages: KVPages,
    *rows: jax.Array,
    **options: Unpack[PagedOptions],
) -> jax.Array:
    """Attention by `decode` in steps that only decode, by `attend` in others."""
    return (decode if options.get("decode_only") else attend)(q, pages, *rows, **options)


def _with_triton(ops: Ops, device: Device, dtype: Any) -> Ops:
    """Adds the kernels that do several operations in one launch, if `device` can use them."""
    if device.platform != "gpu":
        return ops
    try:
        from jaxserve.pallas_kernels import draw_triton, fused_triton
    except ImportError as error:
        log.warning("%s is not installed, so steps launch more kernels", error.name)
        return ops
    if draw_triton.why_not(device) is None:
        ops = replace(ops, draw=draw_triton.draw)
    return ops if fused_triton.why_not(device, dtype) else replace(ops, fused=fused_triton)
