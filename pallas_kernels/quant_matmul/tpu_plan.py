"""Tiles of the TPU's quantized matmul."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.quant_matmul.tpu_codes import factor
from jaxserve.pallas_kernels.types import QuantArray

LANES = 128
FEW_TOKENS = 64  # up to here the traffic of the weights is the limit
FEW_CODES = 1 << 20  # bytes of codes in a tile, with at most FEW_TOKENS
FEW_INPUTS = 8192  # maximum of inputs in a tile, with at most FEW_TOKENS
# maximum sizes of a tile with more tokens
TOKENS = 512
OUTS = 1024
INPUTS = 1024


@dataclass(frozen=True)
class Plan:
    """The static parameters of a kernel.

    tokens, outs, ins: sizes of a tile; in_tiles of them cover `inputs`. rows, group: outputs and inputs that share a
    scale. groups: scales along the inputs. scaling: see `tpu`. rounds: weights are rounded to bfloat16.
    factor: see `tpu_codes`.
    """

    tokens: int
    outs: int
    ins: int
    in_tiles: int
    inputs: int
    rows: int
    group: int
    groups: int
    scaling: str
    has_zero: bool
    has_bias: bool
    has_gain: bool
    rounds: bool
    factor: float

    @property
    def ragged(self) -> bool:
        """Whether the last input tile extends beyond the inputs."""
        return self.ins * self.in_tiles > self.inputs

    @property
    def tile_groups(self) -> int:
        return 1 if self.groups == 1 else -(-self.ins // self.group)

    @property
    def outs_first(self) -> bool:
        """Whether XLA lays scales out as [outs, groups]. It chooses [groups, outs] where that would need padding."""
        return self.rows == 1 and self.groups % LANES == 0

    @property
    def has_offset(self) -> bool:
        return self.has_zero or self.has_bias

    @property
    def scratch_shape(self) -> tuple[int, int, int]:
        """Shape of the scales: [input tiles, groups in a tile, outputs]."""
        return (1 if self.groups == 1 else self.in_tiles, -(-self.tile_groups // 8) * 8, self.outs)


def make_plan(
    w: QuantArray, x_dtype, tile_tokens: int, most_inputs: int | None = None, most_outs: int | None = None
) -> Plan:
    """The plan for codes [..., out, in] and `tile_tokens` tokens per tile. Tiles are as large as is good, or as the
    limits allow.
    """
    out, inputs = w.codes.shape[-2:]
    few = tile_tokens <= FEW_TOKENS
    groups = w.scale.shape[-1]
    group = w.block[1] if groups > 1 else inputs
    rows = min(w.block[0], out)
    unit = LANES if groups == 1 else math.lcm(group, LANES)
    tuned = tuning.lookup(
        "matmul", "mosaic_tpu", codes=w.codes.dtype.name, group=group, out=out, inputs=inputs, tokens=tile_tokens
    )
    ins = _tile(inputs, unit, most_inputs or tuned.get("inputs") or (FEW_INPUTS if few else INPUTS))
    most_outs = most_outs or tuned.get("outs") or OUTS
    code_bits = jax.dtypes.itemsize_bits(w.codes.dtype)
    outs = min(FEW_CODES * 8 // (code_bits * ins), most_outs) if few else most_outs
    outs_unit = LANES if w.scale.shape[-2] == 1 else math.lcm(rows, LANES)
    outs = max(outs // outs_unit, 1) * outs_unit
    offset = w.zero is not None or w.bias is not None
    scaling = "parts" if few else "end" if groups == 1 and not offset else "weights"
    return Plan(
        tokens=tile_tokens,
        outs=min(outs, out),
        ins=ins,
        in_tiles=pl.cdiv(inputs, ins),
        inputs=inputs,
        rows=rows,
        group=group,
        groups=groups,
        scaling=scaling,
        has_zero=w.zero is not None,
        has_bias=w.bias is not None,
        has_gain=w.gain is not None,
        rounds=scaling == "weights" and x_dtype == jnp.bfloat16,
        factor=factor(w.codes.dtype),
    )


def _tile(size: int, unit: int, most: int) -> int:
    """A tile in multiples of `unit`: all of `size`; else its largest divisor if that is large; else `most`, with a
    ragged last tile.
    """
    if size <= most:
        return size
    candidates = range(most // unit * unit, most // 2 - 1, -unit)
    return next((tile for tile in candidates if size % tile == 0), most // unit * unit)
