"""Checkpoints with float8_e4m3fn weights: one scale per tensor, per output or per block (128x128, say).

Defined by DeepSeek-V3's weight_dequant and transformers (`Fp8Dequantize` of integrations/finegrained_fp8.py), and by
NVIDIA's ModelOpt ("modelopt", modelopt/torch/export): value = weight * scale, in float32. The scale is called
weight_scale or weight_scale_inv (which is not an inverse). Modules that config.json lists as not converted have plain
weights without scale. `activations.of_fp8` tells how products round their inputs; input_scale applies to all tokens.

In DeepSeek-V4 scales are called scale, and weights of experts are MXFP4 as in `mxfp4`, in bytes with a sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.activations import Wanted, describe, input_scale_name, of_fp8, with_scale
from jaxserve.checkpoints.formats.mxfp4 import GROUP, decode
from jaxserve.checkpoints.formats.nvfp4 import is_nvfp4
from jaxserve.checkpoints.formats.packing import (
    EXPONENTS,
    Tensors,
    block_size,
    fetch,
    fetch_scale,
    find,
    method,
    quant_config,
)
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("fp8", "fbgemm_fp8", "modelopt")
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # of ModelOpt
FP8 = "float8_e4m3fn"
FP4 = "int8"  # each has two numbers of 4 bits


def open_format(config: Mapping[str, Any], tensors: Tensors) -> NativeFP8 | None:
    if method(config) not in METHODS or is_nvfp4(config):
        return None
    if method(config) == "modelopt" and (given := quant_config(config).get("quant_algo")) not in ALGORITHMS:
        raise CheckpointError(f"ModelOpt is read with quant_algo {', '.join(ALGORITHMS)} or NVFP4, not {given!r:.100}")
    key = "weight_block_size"
    settings = quant_config(config)
    block = settings.get(key)
    if block is None:
        return NativeFP8(tensors, (), of_fp8(method(config), settings, None))
    if not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(f"config.json: quantization_config's {key} is {block!r:.100}, not two numbers")
    sizes = block_size(block[0], key), block_size(block[1], key)
    return NativeFP8(tensors, (sizes,), of_fp8(method(config), settings, sizes))


@dataclass
class NativeFP8:
    tensors: Tensors
    blocks: tuple[tuple[int, int], ...]
    wanted: Wanted = (None, "")
    name: str = "fp8"

    @property
    def description(self) -> str:
        return ("fp8 in blocks of {}x{}".format(*self.blocks[0]) if self.blocks else "fp8") + describe(self.wanted)

    def parts(self, weight: str) -> tuple[str, ...]:
        stored = self.tensors[weight].dtype.name if weight in self.tensors else ""
        known = [f"{weight}_scale_inv", f"{weight}_scale"]
        known += [f"{weight.removesuffix('.weight')}.scale"] if stored in (FP8, FP4) else []
        names = [name for name in known if name in self.tensors]
        if not names and stored == FP8:
            names = [f"{weight}_scale_inv" if self.blocks else f"{weight}_scale"]
        if not names:
            return ()
        of_inputs = input_scale_name(weight)
        return (weight, names[0], of_inputs) if of_inputs in self.tensors else (weight, names[0])

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        scale_name = self.parts(weight)[1]
        if find(self.tensors, weight).dtype.name == FP4:
            out, inputs = shape
            packed = fetch(self.tensors, weight, (FP4,), (out, inputs // 2))
            exponents = fetch(self.tensors, scale_name, EXPONENTS, (out, inputs // GROUP))
            return decode(packed.view(np.uint8), exponents, scale_name)
        codes = fetch(self.tensors, weight, (FP8,), shape)
        scale, block = fetch_scale(self.tensors, scale_name, shape, shape, (1, shape[1]), *self.blocks)
        return QuantArray(codes, scale, block=block, **with_scale(self.tensors, weight, self.wanted[0]))
