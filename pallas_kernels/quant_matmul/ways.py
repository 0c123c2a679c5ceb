"""The ways to multiply by a weight, and which of them was measured to be the fastest on a device.

  a backend   its kernel converts the codes as it reads them, for any number of rows
  dequantize  a kernel writes the weight in the dtype of x, which a plain product then reads (`dequantized`)
  dot         XLA's own product of x and the dequantized weight: where XLA can fuse that, it converts the codes as it
              reads them, else it writes the weight first

A weight that is not quantized is XLA's (`dot`). Only where a product is followed by the gate of an MLP there is another
way: the kernel for quantized weights with such codes, which computes the gate in the same launch (`gated_product`).

Weights are arranged once for all numbers of rows, when they are loaded: for Hopper's kernel their codes are shuffled
(`fragments`), and then Triton's kernel and `dot` cannot read them. `tuning.products` measures the ways. Where nothing
was measured, `registry` and `dequantized.pays` decide.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.pallas_kernels import registry, tuning
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.quant_matmul import fragments, reference
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import QuantArray

WAYS = {
    "gpu": ("mosaic_gpu", "triton", "dequantize", "dot"),
    "tpu": ("mosaic_tpu", "dot"),
    "cpu": ("cpu", "xla", "dot"),
}
CODES = ("int4", "int8", "float8_e4m3fn")
FEW_MEASURED = 512  # rows; where fewer were measured, an estimate decides for twice as many rows and more


def key(problem: MatmulProblem) -> str | None:
    """The problem's name in tables; None for forms that are not measured."""
    if is_float(problem):
        return tuning.problem_key(
            x=problem.x_dtype.name, out=problem.rows, inputs=problem.inputs, activation=problem.activation
        )
    if problem.kind or problem.activations is not None or problem.codes_dtype.name not in CODES:
        return None
    group = min(problem.block[1], problem.inputs)
    return tuning.problem_key(
        x=problem.x_dtype.name, codes=problem.codes_dtype.name, block=f"{problem.block[0]}x{group}", out=problem.rows,
        inputs=problem.inputs, zero=int(problem.has_zero), bias=int(problem.has_bias),
    )  # fmt: skip


def is_float(problem: MatmulProblem) -> bool:
    """Whether it is a gated product with a weight that is not quantized."""
    return bool(problem.activation) and problem.codes_dtype == problem.x_dtype


def form(problem: MatmulProblem) -> QuantArray:
    """A weight of the problem, as shapes."""
    blocks = -(-problem.rows // problem.block[0]), -(-problem.inputs // problem.block[1])
    scale = jax.ShapeDtypeStruct(blocks, problem.x_dtype)
    zero = jax.ShapeDtypeStruct(blocks, jnp.int8) if problem.has_zero else None
    codes = jax.ShapeDtypeStruct((problem.rows, problem.inputs), problem.codes_dtype)
    bias = scale if problem.has_bias else None
    return QuantArray(codes, scale, zero, bias, problem.block, shuffled=problem.shuffled)


def why_not(way: str, device: Device, problem: MatmulProblem) -> str | None:
    """Why a device cannot multiply by a weight of this form in this way; None: it can."""
    if way not in WAYS.get(device.platform, ()):
        return f"it is not for {device.platform}"
    if way == "dot":
        return "codes are shuffled" if problem.shuffled else None
    if is_float(problem) and way != "mosaic_gpu":
        return "it is for quantized weights"
    if way != "dequantize":
        return registry.explain("matmul", device, problem)[way]
    try:
        module = _dequantized()
    except ImportError as error:
        return f"{error.name} is not installed"
    return None if module.fits(problem.x_dtype, form(problem)) else "the kernel does not know this form"


def candidates(device: Device, problem: MatmulProblem) -> list[tuple[str, bool]]:
    """The ways that are worth measuring for weights of this form, each with whether codes are shuffled for it."""
    shuffled = fragments.suits(device, problem, "auto")
    every = [(way, moved) for moved in (True, False) for way in WAYS.get(device.platform, ())]
    return [
        (way, moved)
        for way, moved in every
        if (shuffled or not moved)
        and not (way == "mosaic_gpu" and shuffled and not moved)  # reads codes in the inputs' order byte by byte
        and why_not(way, device, replace(problem, shuffled=moved)) is None
    ]


def is_shuffled(device: Device, problem: MatmulProblem) -> bool | None:
    """Whether codes of this form are to be shuffled by what was measured; None: it was not."""
    found = _measured(device, problem)
    return None if found is None else found.shuffled


def fastest(device: Device, problem: MatmulProblem, rows: int) -> str | None:
    """The way for `rows` rows by what was measured; None: it was not, or the weights are arranged otherwise."""
    found = _measured(device, problem)
    if found is None or found.shuffled != problem.shuffled:
        return None
    most = found.ways[-1][0]
    way = found.way(rows)
    if most < FEW_MEASURED and rows > 2 * most:
        if is_float(problem):
            way = "dot"
        elif why_not("dequantize", device, problem) is None:
            way = "dequantize" if _dequantized().pays(rows, problem.x_dtype, form(problem)) else way
    return way if why_not(way, device, problem) is None else None


def kernels(device: Device, problem: MatmulProblem) -> list[str]:
    """The backends whose kernels multiply by weights of this form with some number of rows, by what was measured; empty
    if it was not."""
    found = _measured(device, problem)
    if found is None or found.shuffled != problem.shuffled:
        return []
    return sorted({way for _, way in found.ways if way in registry.BACKENDS})


def _measured(device: Device, problem: MatmulProblem) -> tuning.Product | None:
    name = key(problem)
    return None if name is None else tuning.product(device.kind, name)


def product(way: str, x: jax.Array, w: Any, count: jax.Array | None = None, partials: bool = False) -> jax.Array:
    """x [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out], or with `partials` as
    `operands.Partials.sums`. `count` as in `ops.matmul`."""
    dtype = x.dtype if partials else jnp.float32
    if way in ("dequantize", "dot"):
        y = _dequantized().product(x, w, dtype) if way == "dequantize" else dot(x, w, dtype)
        return y[None] if partials else y
    module = registry.load("matmul", way)
    options = {"direct": True} if way in ("mosaic_gpu", "triton") else {}
    if partials and hasattr(module, "quant_matmul_parts"):
        return module.quant_matmul_parts(x, w, count=count, **options)
    y = module.quant_matmul(x, w, count=count, **options)
    return y.astype(dtype)[None] if partials else y


def gated_product(way: str, x: jax.Array, w: QuantArray, activation: str) -> jax.Array:
    """`Ops.gated_matmul` for a weight in floats, given as `experts.as_codes`."""
    if way == "dot":
        fused = importlib.import_module("jaxserve.pallas_kernels.fused_triton")  # needs Triton
        return fused.gate(Partials(fused.product(x, w.codes)), activation, x.dtype)
    return registry.load("matmul", way).gated_matmul(x, w, activation)


def dot(x: jax.Array, w: QuantArray, dtype: Any) -> jax.Array:
    """x times the transposed weight in one product of XLA's, in `dtype`. The weight is rounded to the dtype of x."""
    weight = reference.dequantize(w).astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == np.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision, preferred_element_type=dtype)


def _dequantized() -> Any:  # needs Triton
    return importlib.import_module(f"{__package__}.dequantized")
