"""NVFP4 checkpoints: E2M1 numbers, 16 of which share an e4m3 scale, and a float32 scale for all of a weight.

The layout is that of NVIDIA's ModelOpt (modelopt/torch/quantization/qtensor/nvfp4_tensor.py, quant_algo "NVFP4"):
weight uint8 [out, in / 2], the lower half of a byte first; weight_scale float8_e4m3fn [out, in / 16]; weight_scale_2
float32; value = code * weight_scale * weight_scale_2. input_scale is not used: activations stay in 16 bits.
compressed-tensors ("nvfp4-pack-quantized") calls the codes weight_packed and divides by weight_global_scale instead.

Here the product of code and scale, exact in bfloat16, is multiplied with the float32 scale. The formats' own tools
multiply or divide the scale first, so the last bit of a float32 may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import Tensors, fetch, groups, method, quant_config
from jaxserve.checkpoints.int4 import FLOAT4, PackedInt4
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("modelopt", "modelopt_fp4")
GROUP = 16


def is_nvfp4(config: Mapping[str, Any]) -> bool:
    return method(config) in METHODS and quant_config(config).get("quant_algo") == "NVFP4"


def open_format(config: Mapping[str, Any], tensors: Tensors) -> NVFP4 | None:
    if not is_nvfp4(config):
        return None
    if (size := quant_config(config).get("group_size", GROUP)) != GROUP:
        raise CheckpointError(f"NVFP4 is read in groups of {GROUP}, not {size!r:.100}")
    return NVFP4(tensors)


def decode(
    tensors: Tensors, codes: str, scale: str, whole: str, shape: tuple[int, int], *, divides: bool = False
) -> QuantArray:
    """A weight of this shape from its tensors: codes, the groups' scales, and the scale of the whole weight, which
    multiplies or `divides`."""
    out, inputs = shape
    groups(GROUP, codes, inputs)
    packed = fetch(tensors, codes, ("uint8",), (out, inputs // 2))
    scales = fetch(tensors, scale, ("float8_e4m3fn",), (out, inputs // GROUP))
    factor = fetch(tensors, whole, ("float32",), (), (1,)).reshape(())
    if not (np.isfinite(factor) and factor > 0):
        raise CheckpointError(f"tensor {whole!r} is {factor}, no scale")
    gain = np.float32(1) / factor if divides else factor
    return QuantArray(PackedInt4(packed, FLOAT4), scales, block=(1, GROUP), gain=np.full((out, 1), gain, np.float32))


@dataclass
class NVFP4:
    tensors: Tensors
    name: str = "nvfp4"
    description: str = "NVFP4 in groups of 16"

    def parts(self, weight: str) -> tuple[str, ...]:
        needed = (weight, f"{weight}_scale", f"{weight}_scale_2")
        if weight in self.tensors and self.tensors[weight].dtype != np.uint8:
            return ()
        unneeded = f"{weight.removesuffix('.weight')}.input_scale"
        found = needed if any(name in self.tensors for name in needed) else ()
        return (*found, unneeded) if found and unneeded in self.tensors else found

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        codes, scale, whole = self.parts(weight)[:3]
        return decode(self.tensors, codes, scale, whole, shape)
