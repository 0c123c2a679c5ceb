"""Quantizes single weights: rounding to nearest, GPTQ and AWQ.

A weight is float32 [out, in]. The calibrated methods need sums over the tokens of its inputs x [tokens, in]: the
Hessian xᵀx [in, in], whose scale does not matter, and for AWQ the sum of |x| [in]. A change `d` of the weight causes a
squared error of the outputs of trace(d · hessian · dᵀ).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.types import Activations, QuantArray

# Lowest and highest code, and the dtype that holds it.
KINDS: dict[str, tuple[float, float, Any]] = {
    "int8": (-128, 127, jnp.int8),
    "int4": (-8, 7, jnp.int4),
    "fp8": (-448, 448, jnp.float8_e4m3fn),
}
DYNAMIC = "-dynamic"  # suffix of a kind: products round their inputs to it as well, with a scale per token
COLUMNS = 128  # columns that GPTQ rounds before it corrects the remaining ones
_EXPONENTS = np.linspace(0, 0.95, 20)
_SHRINKS = np.linspace(1, 0.5, 21)


@dataclass(frozen=True)
class Scheme:
    """How weights are stored.

    kind: one of KINDS.
    group_size: neighbouring inputs that share a scale; must divide the number of inputs; None: all inputs.
    symmetric: without zero points; fp8 is always symmetric.
    scale_dtype: scales are rounded to it before the codes are chosen.
    """

    kind: str
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the scheme must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind == "fp8" and not (self.symmetric and self.group_size is None):
            raise ValueError("fp8 weights have one scale per output channel: neither groups nor zero points")


def activations_of(scheme: str) -> Activations | None:
    """How products round their inputs, for a scheme's name: one of KINDS, with or without DYNAMIC."""
    if not scheme.endswith(DYNAMIC):
        return None
    return Activations(jnp.dtype(KINDS[scheme.removesuffix(DYNAMIC)][2]).name)


def _quotient(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """x / divisor, rounded once, so that ties go to the same codes everywhere.

    XLA turns a division by a broadcast value into a product with its rounded inverse. The result may then be off by one
    unit in the last place, and weights in bfloat16 have many ties. The barrier hides the broadcast; it takes no memory.
    """
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(divisor, x.dtype), x.shape))


@partial(jax.jit, static_argnames="scheme")
def _grid(w: jax.Array, scheme: Scheme, shrink: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Scales and zero points, float32 [out, groups], that cover each group's range times `shrink`."""
    low, high, _ = KINDS[scheme.kind]
    groups = w.reshape(len(w), -1, scheme.group_size or w.shape[1])
    if scheme.symmetric:  # the largest value may be half a step beyond the highest code, and is clipped to it
        top = jnp.abs(groups).max(-1) * shrink
        bottom = -top
    else:
        top = groups.max(-1).clip(0) * shrink
        bottom = groups.min(-1).clip(max=0) * shrink
    scale = _quotient(top - bottom, high - low).astype(scheme.scale_dtype).astype(jnp.float32)
    scale = jnp.where(scale > 0, scale, 1)
    zero = jnp.zeros_like(scale) if scheme.symmetric else jnp.clip(jnp.round(low - _quotient(bottom, scale)), low, high)
    return scale, zero


def _encode(w: jax.Array, scale: jax.Array, zero: jax.Array, kind: str) -> jax.Array:
    """The nearest codes, as float32."""
    low, high, dtype = KINDS[kind]
    if kind == "fp8":
        return jnp.clip(_quotient(w, scale), low, high).astype(dtype).astype(jnp.float32)
    return jnp.clip(jnp.round(_quotient(w, scale)) + zero, low, high)


@partial(jax.jit, static_argnames="scheme")
def _codes(w: jax.Array, scale: jax.Array, zero: jax.Array, scheme: Scheme) -> jax.Array:
    return _encode(w, _columns(scale, w), _columns(zero, w), scheme.kind)


def _columns(values: jax.Array, w: jax.Array) -> jax.Array:
    """One value per group [out, groups] -> one per weight [out, in]."""
    return jnp.repeat(values, w.shape[1] // values.shape[1], axis=1)


@partial(jax.jit, static_argnames="scheme")
def _change(w: jax.Array, scale: jax.Array, zero: jax.Array, scheme: Scheme) -> jax.Array:
    """The rounded weight minus the weight, [out, in]."""
    return (_codes(w, scale, zero, scheme) - _columns(zero, w)) * _columns(scale, w) - w


def _array(codes: jax.Array, scale: jax.Array, zero: jax.Array, scheme: Scheme) -> QuantArray:
    """A QuantArray of NumPy arrays from codes, scales and zero points in float32."""
    made = QuantArray(
        codes=codes.astype(KINDS[scheme.kind][2]),
        scale=scale.astype(scheme.scale_dtype),
        zero=None if scheme.symmetric else zero.astype(jnp.int8),
        block=(1, codes.shape[1] // scale.shape[1]),
    )
    return jax.tree.map(np.asarray, made)


def rtn(weight: Any, scheme: Scheme) -> QuantArray:
    """Rounds to the nearest code of a grid that covers each group's whole range."""
    w = _checked(weight, scheme)
    scale, zero = _grid(w, scheme)
    return _array(_codes(w, scale, zero, scheme), scale, zero, scheme)


def _checked(weight: Any, scheme: Scheme) -> jax.Array:
    w = jnp.asarray(weight, jnp.float32)
    if scheme.group_size is not None and w.shape[1] % scheme.group_size:
        raise ValueError(f"groups of {scheme.group_size} do not divide {w.shape[1]} inputs")
    return w


def gptq(weight: Any, hessian: Any, scheme: Scheme, *, damping: float = 0.01, act_order: bool = True) -> QuantArray:
    """Rounds one column after another, correcting the later columns for each error (Frantar et al. 2022,
    arXiv:2210.17323).

    damping: added to the Hessian's diagonal, as a fraction of its mean.
    act_order: round columns with large inputs first. Groups are still neighbouring columns, and their scales are chosen
      before rounding, so the result does not depend on a stored order.
    """
    w = _checked(weight, scheme)
    hessian = jnp.asarray(hessian, jnp.float32)
    order = jnp.argsort(-jnp.diagonal(hessian)) if act_order else jnp.arange(w.shape[1])
    factor = _inverse_factor(hessian[order][:, order], damping)
    scale, zero = _grid(w, scheme)
    w = w[:, order]
    size = scheme.group_size
    ahead = act_order or size is None
    step = COLUMNS if size is None or ahead else size
    scales, zeros = (_columns(values, w)[:, order] for values in (scale, zero))
    done = []
    grids = []
    for first in range(0, w.shape[1], step):
        now = slice(first, first + step)
        if not ahead:  # choose the group's scales now, after the corrections of its columns
            grids.append(_grid(w[:, now], scheme))
            scales, zeros = (values.at[:, now].set(new) for values, new in zip((scales, zeros), grids[-1], strict=True))
        codes, error = _gptq_block(w[:, now], factor[now, now], scales[:, now], zeros[:, now], scheme.kind)
        w = w - error @ factor[now]
        done.append(codes)
    if grids:
        scale, zero = (jnp.concatenate(values, axis=1) for values in zip(*grids, strict=True))
    codes = jnp.concatenate(done, axis=1)[:, jnp.argsort(order)]
    return _array(codes, scale, zero, scheme)


def _inverse_factor(hessian: jax.Array, damping: float) -> jax.Array:
    """The upper triangular U with UᵀU = (hessian + damping)⁻¹; the damping is increased until U exists.

    The Cholesky factor of H with reversed rows and columns, reversed back, is an upper R with H = RRᵀ; U = R⁻¹.
    """
    mean = float(jnp.diagonal(hessian).mean()) or 1.0
    size = len(hessian)
    while True:
        lower = jnp.linalg.cholesky((hessian + damping * mean * jnp.eye(size))[::-1, ::-1])
        if jnp.isfinite(lower).all():
            upper = lower[::-1, ::-1]
            return jax.scipy.linalg.solve_triangular(upper, jnp.eye(size), lower=False)
        if damping > 1e3:
            raise ValueError("the Hessian is not finite: the calibration's activations have overflowed")
        damping = max(10 * damping, 1e-4)


@partial(jax.jit, static_argnames="kind")
def _gptq_block(
    w: jax.Array, factor: jax.Array, scale: jax.Array, zero: jax.Array, kind: str
) -> tuple[jax.Array, jax.Array]:
    """Codes of neighbouring columns, and their errors divided by the factor's diagonal; all [out, columns]."""

    def column(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        w, codes, errors = state
        code = _encode(w[:, i], scale[:, i], zero[:, i], kind)
        error = (w[:, i] - (code - zero[:, i]) * scale[:, i]) / factor[i, i]
        return w - error[:, None] * factor[i], codes.at[:, i].set(code), errors.at[:, i].set(error)

    empty = jnp.zeros_like(w)
    return jax.lax.fori_loop(0, w.shape[1], column, (w, empty, empty))[1:]


def awq_scales(weights: list[Any], hessian: Any, magnitude: Any, scheme: Scheme) -> np.ndarray:
    """AWQ's scales (Lin et al. 2023, arXiv:2306.00978): columns are multiplied by them before rounding, and inputs
    divided. They are the power of the inputs' mean magnitude with the least error of the outputs.

    weights: all that share the inputs. magnitude: sum or mean of |x|, float32 [in]. Returns float32 [in].
    """
    hessian = jnp.asarray(hessian, jnp.float32)
    magnitude = np.asarray(magnitude, np.float32)
    magnitude = np.maximum(magnitude / (magnitude.mean() or 1), 1e-4)
    arrays = [_checked(weight, scheme) for weight in weights]
    best = np.ones_like(magnitude)
    least = np.inf
    for exponent in _EXPONENTS:
        scales = magnitude**exponent
        scales /= np.sqrt(scales.max() * scales.min())
        cost = sum(float(_scaled_cost(w, hessian, scales, scheme)) for w in arrays)
        if cost < least:
            best = scales
            least = cost
    return best


@partial(jax.jit, static_argnames="scheme")
def _scaled_cost(w: jax.Array, hessian: jax.Array, scales: jax.Array, scheme: Scheme) -> jax.Array:
    change = _change(w * scales, *_grid(w * scales, scheme), scheme) / scales
    return jnp.sum((change @ hessian) * change)


def clipped(weight: Any, hessian: Any, scheme: Scheme) -> QuantArray:
    """As `rtn`, with each group's range shrunk to minimize the error of the outputs: AWQ's search for clipping."""
    w = _checked(weight, scheme)
    hessian = jnp.asarray(hessian, jnp.float32)
    size = scheme.group_size or w.shape[1]
    starts = range(0, w.shape[1], size)
    blocks = jnp.stack([hessian[first : first + size, first : first + size] for first in starts])
    scale, zero = _grid(w, scheme)
    least = jnp.full_like(scale, jnp.inf)
    for shrink in _SHRINKS:
        scale, zero, least = _clip_step(w, blocks, scheme, shrink, scale, zero, least)
    return _array(_codes(w, scale, zero, scheme), scale, zero, scheme)


@partial(jax.jit, static_argnames="scheme")
def _clip_step(
    w: jax.Array, blocks: jax.Array, scheme: Scheme, shrink: float, scale: jax.Array, zero: jax.Array, least: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The better of the current grid and that of `shrink` for each group; `least`: the current cost [out, groups]."""
    new_scale, new_zero = _grid(w, scheme, shrink)
    change = _change(w, new_scale, new_zero, scheme).reshape(*least.shape, -1)
    cost = jnp.einsum("ogi,gij,ogj->og", change, blocks, change)
    better = cost < least
    return jnp.where(better, new_scale, scale), jnp.where(better, new_zero, zero), jnp.where(better, cost, least)
