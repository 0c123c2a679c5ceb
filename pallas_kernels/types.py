"""What kernels read beside plain arrays: quantized weights, and the pages of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax


class KVPages(NamedTuple):
    """One layer's KV cache.

    data: [pages, 2 (key, value), kv_heads, page_size, head_dim], so that what a kernel reads of a head in a page is one
      piece; float32, bfloat16, float16, float8_e4m3fn or int8.
    scale: float32 [pages, 2, kv_heads, page_size], which the data is to be multiplied with; None is 1.
    """

    data: jax.Array
    scale: jax.Array | None = None

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def head_dim(self) -> int:
        return self.data.shape[4]


@dataclass(frozen=True)
class Activations:
    """How products with a quantized weight round their inputs x first: x = codes * scale, symmetric.

    dtype: of the codes, "int8" or "float8_e4m3fn".
    group: neighbouring inputs of a token that share a scale; None: all of them.
    static: the scale is `QuantArray.input_scale`, the same for all tokens; otherwise it makes the largest magnitude
      that it stands for the largest code.
    ceiling: larger magnitudes do not count for the scale, and saturate (FBGEMM's activation_scale_ub); None: all count.
    """

    dtype: str
    group: int | None = None
    static: bool = False
    ceiling: float | None = None

    def __str__(self) -> str:
        per = "per tensor" if self.static else "per token" if self.group is None else f"per {self.group} of a token"
        return f"{'int8' if self.dtype == 'int8' else 'fp8'} {per}"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "zero", "bias", "order", "input_scale"],
    meta_fields=["block", "activations"],
)
@dataclass(frozen=True)
class QuantArray:
    """A quantized weight [out, in]: value = (codes - zero) * scale + bias, in float32.

    Kernels know no `order`: whoever calls them brings the inputs into it first.

    codes: int4, int8 or float8_e4m3fn [out, in].
    block: rows and inputs that share a scale: (1, in) per channel, (1, 128) groups of 128, (out, in) per tensor, (128,
      128) blocks. Sizes need not be multiples; the last block is then smaller.
    scale: float32, bfloat16 or float16 [ceil(out / rows), ceil(in / inputs)].
    zero: int8, as scale, in the units of the codes; None is 0. Formats with codes from 0 to 15 and zero points store
      both less 8.
    bias: as scale; None is 0.
    order: int32 [in], the input that each column belongs to (act-order formats sort columns by group); None: in order.
    activations: how its products round their inputs (`quant_matmul.w8a8`); None: not at all.
    input_scale: float32 [1, 1], that of static activations.
    """

    # Arrays of JAX or NumPy, or what stands for them in a pytree of the same form: shapes, shardings.
    codes: Any
    scale: Any
    zero: Any = None
    bias: Any = None
    block: tuple[int, int] = (1, 128)
    order: Any = None
    input_scale: Any = None
    activations: Activations | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["dtype"])
@dataclass(frozen=True)
class QuantRows:
    """Inputs of a product, rounded as the weight's `activations` say: x [tokens, in] = codes * scale.

    codes: int8 or float8_e4m3fn [tokens, in].
    scale: float32 [tokens, ceil(in / group)], or [1, 1] for all.
    dtype: what x was in, and the product is to be rounded to.
    """

    codes: Any
    scale: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


@partial(jax.tree_util.register_dataclass, data_fields=["data", "table"], meta_fields=["shape", "arithmetic"])
@dataclass(frozen=True)
class PanelArray:
    """A weight [out, in] as the CPU's kernels read it (`cpu_panels.h`): panels of 16 rows, each in a type of its own.

    data: uint8 [bytes / 64, 64], the panels.
    table: int32 [panels, 3]: where each begins in data, its type, and the blocks in a record of it.
    arithmetic: what products with quantized or bfloat16 panels are computed in, of `cpu_panels.ARITHMETIC`.
    """

    data: Any
    table: Any
    shape: tuple[int, int]
    arithmetic: str = "float32"
