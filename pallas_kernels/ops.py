"""Dense operations in plain XLA, and the set of those that a model runs with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import experts
from jaxserve.pallas_kernels.experts import ExpertWeights
from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.parts import Heads, Parts, Row, value_of
from jaxserve.pallas_kernels.quant_matmul import reference as quantized
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.registry import AttentionProblem, Device, MatmulProblem, choose, load
from jaxserve.pallas_kernels.routing import Router, route
from jaxserve.pallas_kernels.types import BlockArray, KVPages, MixedArray, PanelArray, QuantArray, QuantRows

if TYPE_CHECKING:  # which is imported where a device is tried
    pass

log = logging.getLogger(__name__)


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] times w [out, in], transposed -> float32 [tokens, out].

    `count`, an int32 scalar, says how many leading rows matter; what the others hold is unspecified.
    """
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, ..., size] over the root of its mean square, times scale [size]; computed in float32.

    Zhang & Sennrich 2019, arXiv:1910.07467. `count` as in `matmul`.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if scale.dtype != x.dtype:  # a scale that is kept in float32 multiplies before the result is rounded
        return (scale.astype(jnp.float32) * wide).astype(x.dtype)
    return scale * wide.astype(x.dtype)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Rotates x [tokens, ..., head_dim], pairing channel i with i + head_dim / 2, by angles of which cos and sin are
    [tokens, head_dim / 2]; computed in float32.

    Su et al. 2021, arXiv:2104.09864. `count` as in `matmul`.
    """
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(jnp.asarray(1.702, x.dtype) * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # of gates in fused kernels


def gate(gate_up: jax.Array, activation: str, count: jax.Array | None = None) -> jax.Array:
    """gate_up [tokens, size, 2] -> activation(gate) * up [tokens, size], of a gated MLP; `count` as in `matmul`.

    Shazeer 2020, arXiv:2002.05202.
    """
    return ACTIVATIONS[activation](gate_up[..., 0]) * gate_up[..., 1]


CLAMPED_ALPHA = 1.702


def clamped_gate(gate_up: jax.Array, limit: float, count: jax.Array | None = None) -> jax.Array:
    """gate_up [tokens, size, 2] -> (up + 1) * gate * sigmoid(1.702 * gate) [tokens, size], with the gate at most
    `limit` and up within +-limit; `count` as in `matmul`. gpt-oss (arXiv:2508.10925)."""
    wide = gate_up.astype(jnp.float32)
    gate, up = jnp.minimum(wide[..., 0], limit), jnp.clip(wide[..., 1], -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(CLAMPED_ALPHA * gate)).astype(gate_up.dtype)


@dataclass(frozen=True)
class Gate:
    """The activation of a gated MLP as a function of gate_up [tokens, size, 2] and `count`, and what it is.

    `limit`: `clamped_gate` with it takes the place of the activation; None: `compute` has the activation.
    """

    activation: str
    limit: float | None
    compute: Callable[..., jax.Array]

    def __call__(self, gate_up: jax.Array, count: jax.Array | None = None) -> jax.Array:
        if self.limit is not None:
            return clamped_gate(gate_up, self.limit)
        return self.compute(gate_up, self.activation, count=count)


def quant_matmul(
    x: jax.Array | QuantRows,
    w: QuantArray | BlockArray,
    axes: tuple[str | None, str | None] = (None, None),
    count: jax.Array | None = None,
    *,
    multiply: Callable[..., jax.Array] = quantized.quant_matmul,
    **options: bool,
) -> jax.Array:
    """x [tokens, in], or the same rounded as the weight says (QuantRows), times a quantized weight [out, in],
    transposed -> float32 [tokens, out]; `count` as in `matmul`.

    `axes` names the weight's own, for an implementation that splits it over devices; `multiply`, which gets the
    options, knows no order.
    """
    if isinstance(w, QuantArray) and w.order is not None:
        assert not isinstance(x, QuantRows), "rounded before its columns were brought into order"
        x, w = jnp.take(x, w.order, axis=1), replace(w, order=None)
    return multiply(x, w, count=count, **options)


def panel_matmul(x: jax.Array, w: PanelArray, count: jax.Array | None = None) -> jax.Array:
    """x float32 [tokens, in] times a weight in panels [out, in], transposed -> float32 [tokens, out]; `count` as in
    `matmul`. On CPU alone."""
    from jaxserve.pallas_kernels import cpu_panels  # which needs the functions above

    return cpu_panels.matmul(x, w, count)


def rows_in_turn(w: MixedArray, products: Sequence[jax.Array]) -> jax.Array:
    """Products with the parts of w, [tokens, out of the part] each -> the product with w, [tokens, out]."""
    tokens = len(products[0])
    periods = [y.reshape(tokens, -1, width) for y, width in zip(products, w.widths, strict=True)]
    return jnp.concatenate(periods, axis=2).reshape(tokens, -1)


def embed(table: jax.Array | QuantArray | BlockArray | PanelArray, ids: jax.Array) -> jax.Array:
    """Rows ids int32 [tokens] of table [vocab, hidden]; of a quantized one, in blocks of one row, in float32."""
    if isinstance(table, PanelArray):
        from jaxserve.pallas_kernels import cpu_panels

        return cpu_panels.rows(table, ids)
    rows = jax.tree.map(lambda x: jnp.take(x, ids, axis=0, mode="clip"), table)
    return quantized.dequantize(rows) if isinstance(rows, QuantArray | BlockArray) else rows


Weight = jax.Array | QuantArray | BlockArray | PanelArray | MixedArray


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation, with the signatures of the plain ones.

    `draw`: tokens from logits in one launch, as `draw_triton.draw`, or None.
    `fused`: a module like `fused_triton`, whose kernels do several operations in one launch each, or None.
    `mixture`: as `experts.mixture`.
    `write_and_attend`, where there is one, takes the place of `write_kv` and `paged_attention`.
    `split_matmul`, where there is one, takes the place of `matmul` for weights that are split over devices; it is also
    given their axes.
    """

    matmul: Callable[..., jax.Array] = matmul
    split_matmul: Callable[..., jax.Array] | None = None
    quant_matmul: Callable[..., jax.Array] = quant_matmul
    panel_matmul: Callable[..., jax.Array] = panel_matmul
    rms_norm: Callable[..., jax.Array] = rms_norm
    rope: Callable[..., jax.Array] = rope
    gate: Callable[..., jax.Array] = gate
    embed: Callable[..., jax.Array] = embed
    mixture: Callable[..., jax.Array] = experts.mixture
    paged_attention: Callable[..., jax.Array] = reference.paged_attention
    write_kv: Callable[..., KVPages] = write_kv
    write_and_attend: Callable[..., tuple[jax.Array, KVPages]] | None = None
    draw: Callable[..., jax.Array] | None = None
    fused: Any = None
    count: jax.Array | None = None  # see `counting`

    @property
    def arg_max(self) -> Callable[[jax.Array], jax.Array] | None:
        """The place of the largest number in each row, float32 [rows, size], that counts; None without a kernel."""
        return None

    def linear(self, x: Any, w: Weight, axes: tuple[str | None, str | None]) -> jax.Array:
        """x [tokens, in] times a weight of any kind; see `matmul`, `quant_matmul` and `panel_matmul`. The result is
        float32, or as x where it was added up over devices."""
        if isinstance(w, MixedArray):
            return rows_in_turn(w, [self.linear(x, part, axes) for part in w.parts])
        if isinstance(w, PanelArray):
            return self.panel_matmul(x, w)
        if isinstance(w, QuantArray | BlockArray):
            return self.quant_matmul(x, w, axes)
        return self.matmul(x, w) if self.split_matmul is None else self.split_matmul(x, w, axes)

    def product(self, x: jax.Array | QuantRows, w: Weight, axes: tuple[str | None, str | None]) -> jax.Array:
        """The same as `Parts.sums` [parts, tokens, out], of which whoever reads them makes the dtype of x."""
        if self.fused is None:
            return self.linear(x, w, axes).astype(x.dtype)[None]
        if isinstance(w, MixedArray):  # their kernels may have split the inputs into different numbers of parts
            products = [Parts(self.product(x, part, axes)).whole(x.dtype) for part in w.parts]
            return rows_in_turn(w, products)[None]
        if not isinstance(w, QuantArray | BlockArray):
            return self.fused.product(x, w, axes)
        if isinstance(w, QuantArray) and w.activations is not None and not isinstance(x, QuantRows):
            x = self.fused.quantize(x, w, axes)
        return self.quant_matmul(x, w, axes, parts=True)

    def add_norm(
        self, x: jax.Array, y: Parts | None, scale: jax.Array | Row, eps: float, reader: QuantArray | None = None
    ) -> tuple[jax.Array, jax.Array | QuantRows]:
        """x [tokens, size], plus y where there is one; and the same after `rms_norm`, for a product with `reader`:
        fused kernels round it as that weight says."""
        if self.fused is not None:
            return self.fused.add_norm(x, y, scale, eps, reader)
        total = x if y is None else x + y.whole(x.dtype)
        return total, self.rms_norm(total, value_of(scale), eps)

    def gated(self, y: Parts, activation: str, dtype: Any, reader: QuantArray | None = None) -> jax.Array | QuantRows:
        """`gate` of y, whose sums are [parts, tokens, 2 * size] with gates and ups in turns -> [tokens, size]; `reader`
        as in `add_norm`."""
        if self.fused is not None and activation in FUSED_ACTIVATIONS:
            return self.fused.gate(y, activation, dtype, reader)
        whole = y.whole(dtype)
        return self.gate(whole.reshape(len(whole), -1, 2), activation)

    def activated(self, y: Parts, activation: str, dtype: Any) -> jax.Array:
        """The activation of y, of an MLP without a gate: sums [parts, tokens, size] -> [tokens, size]."""
        return ACTIVATIONS[activation](y.whole(dtype))

    def experts(
        self,
        x: jax.Array,
        logits: jax.Array,
        w: ExpertWeights,
        router: Router,
        gate: Gate,
        *,
        correction: jax.Array | None = None,
        down_bias: jax.Array | None = None,
    ) -> jax.Array:
        """`mixture` of the experts that a router chooses by its logits, float32 [tokens, experts]; see `route`.

        down_bias: [experts, out], added to each expert's result; None: 0.
        """
        chosen, weights = route(logits, router, correction)
        y = self.mixture(x, chosen, weights, w, gate=gate, count=self.count, weighs_inputs=router.weighs_inputs)
        if down_bias is None:
            return y
        shares = jnp.ones_like(weights) if router.weighs_inputs else weights
        return y + experts.chosen_biases(chosen, shares, down_bias)

    def gate_of(self, activation: str, limit: float | None = None) -> Gate:
        """`gate` with an activation, or `clamped_gate` with a limit."""
        return Gate(activation, limit, self.gate)

    def rotate(self, heads: Heads, eps: float, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [tokens, kv_heads, group, head_dim] and k, v [tokens, kv_heads, head_dim] for attention."""
        qkv = heads.qkv.whole(dtype)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if heads.q_norm is not None and heads.k_norm is not None:
            q = self.rms_norm(q, value_of(heads.q_norm), eps)
            k = self.rms_norm(k, value_of(heads.k_norm), eps)
        return self.rope(q, heads.cos, heads.sin), self.rope(k, heads.cos, heads.sin), v

    def rotate_and_write(
        self, heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
    ) -> tuple[jax.Array, KVPages]:
        """The queries, and the pages with keys and values in them: `rotate`, then `write_kv`."""
        if self.fused is not None:
            return self.fused.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        q, k, v = self.rotate(heads, eps, dtype)
        return q, self.write_kv(pages, k, v, slots, first_page)

    def attend(
        self, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...], first_page: jax.Array | int,
        *, eps: float, dtype: Any, **options: Any,
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """Writes a layer's new keys and values to the pages, and attends; `rows` and the options are those of
        `paged_attention`."""
        if heads.sinks is not None:
            options["sinks"] = value_of(heads.sinks).astype(jnp.float32)
        if self.write_and_attend is not None:
            q, k, v = self.rotate(heads, eps, dtype)
            return self.write_and_attend(q, k, v, pages, slots, *rows, first_page=first_page, **options)
        q, pages = self.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        return self.paged_attention(q, pages, *rows, first_page=first_page, **options), pages

    def counting(self, count: jax.Array) -> Ops:
        """The same, for inputs of which only so many leading rows matter (int32 scalar)."""
        counted = ("matmul", "quant_matmul", "panel_matmul", "rms_norm", "rope", "gate")
        return replace(self, count=count, **{name: partial(getattr(self, name), count=count) for name in counted})


def matmul_of(device: Device, backend: str = "auto", *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """The product with quantized weights that `device` runs, `multiply` of `quant_matmul`. It raises BackendError for a
    weight that the backend cannot do. With `parts` it gives `Parts.sums`. Where a weight says how to round its inputs,
    auto has a product of its own for that, if the device has; the others compute with rounded inputs as floats."""

    def multiply(x: Any, w: QuantArray | BlockArray, count: jax.Array | None = None, parts: bool = False) -> jax.Array:
        if isinstance(w, QuantArray) and w.activations is not None:
            rows = x if isinstance(x, QuantRows) else w8a8.quantize(x, w)
            if backend == "auto" and w8a8.why_not(device, MatmulProblem.of(rows, w, partitioned)) is None:
                return w8a8.quant_matmul_parts(rows, w) if parts else w8a8.quant_matmul(rows, w)
            y = w8a8.emulated(rows, w, partial(multiply, count=count))
            return y.astype(rows.dtype)[None] if parts else y
        module = load("matmul", choose("matmul", device, MatmulProblem.of(x, w, partitioned), backend))
        if not parts:
            return module.quant_matmul(x, w, count=count)
        if hasattr(module, "quant_matmul_parts"):
            return module.quant_matmul_parts(x, w, count=count)
        return module.quant_matmul(x, w, count=count).astype(x.dtype)[None]

    return multiply


def grouped_matmul_of(device: Device, backend: str = "auto", *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """`experts.grouped_matmul` as `device` runs it. Quantized stacks are multiplied by the backend that single weights
    of their form are multiplied by, where it knows stacks, else in plain XLA."""

    floats = _grouped_floats(device)

    def multiply(x: jax.Array, w: Any, group_sizes: jax.Array) -> jax.Array:
        if isinstance(w, PanelArray):
            from jaxserve.pallas_kernels import cpu_panels

            return cpu_panels.grouped_matmul(x, w, group_sizes)
        if isinstance(w, QuantArray) and w.order is not None:
            expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(x)), side="right", method="compare_all")
            order = w.order[jnp.minimum(expert, len(w.order) - 1)]
            x, w = jnp.take_along_axis(x, order, axis=1), replace(w, order=None)
        if isinstance(w, QuantArray | BlockArray):
            module = load("matmul", choose("matmul", device, MatmulProblem.of(x, w, partitioned), backend))
            if hasattr(module, "grouped_quant_matmul") and not isinstance(w, BlockArray):
                return module.grouped_quant_matmul(x, w, group_sizes)
        elif floats is not None and x.dtype == w.dtype:
            return floats(x, w, group_sizes)
        return experts.grouped_matmul(x, w, group_sizes)

    return multiply


def _grouped_floats(device: Device) -> Callable[..., jax.Array] | None:
    """A device's kernel for grouped products with floats in the dtype of x, which XLA would transpose first in each
    step; None: there is none."""
    name = {"gpu": "triton", "tpu": "mosaic_tpu"}.get(device.platform)
    try:
        module = None if name is None else load("matmul", name)
    except ImportError:  # of jax_triton, which `_with_triton` tells
        return None
    probe = MatmulProblem(np.dtype("bfloat16"), np.dtype("int8"), 128, 128, (1, 128))
    if module is None or module.why_not(device, probe) is not None:
        return None
    return lambda x, w, group_sizes: module.grouped_quant_matmul(x, experts.as_codes(w), group_sizes)


def mixture_of(device: Device, backend: str = "auto", *, partitioned: bool = False) -> Callable[..., jax.Array]:
    """`experts.mixture` as `device` runs it."""
    multiply = grouped_matmul_of(device, backend, partitioned=partitioned)

    def mixture(x: jax.Array, chosen: jax.Array, weights: jax.Array, w: ExpertWeights, **options: Any) -> jax.Array:
        if isinstance(w.gate_up, PanelArray) and isinstance(w.down, PanelArray):
            from jaxserve.pallas_kernels import cpu_panels

            return cpu_panels.mixture(x, chosen, weights, w, **options)
        return experts.mixture(x, chosen, weights, w, multiply=multiply, **options)

    return mixture


def choose_ops(device: Device, attention: AttentionProblem, *, backend: str = "auto", partitioned: bool = False) -> Ops:
    """What a model on `device` runs with; `backend` is asked for attention. Raises BackendError.

    `partitioned` models are split over devices by XLA, which can split none but its own dense operations: whoever
    asks sees to it that each device runs the kernels, those of `fused` included, on its own part.
    """
    from jaxserve.pallas_kernels import cpu  # which needs the functions above

    module = load("attention", choose("attention", device, attention, backend))
    kinds: dict[str, Any] = {"paged_attention": module.paged_attention}
    kinds["write_kv"] = getattr(module, "write_kv", write_kv)
    kinds["write_and_attend"] = getattr(module, "write_and_attend", None)
    if device.platform == "cpu" and not partitioned:
        return cpu.CpuOps(matmul=cpu.matmul, rms_norm=cpu.rms_norm, rope=cpu.rope, gate=cpu.gate, **kinds)
    return _with_triton(Ops(**kinds), device, attention.q_dtype)


def _with_triton(ops: Ops, device: Device, dtype: Any) -> Ops:
    """The same, with the kernels that do several operations in one launch, where `device` can use them."""
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
