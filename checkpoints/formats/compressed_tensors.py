"""compressed-tensors checkpoints (llm-compressor): packed and plain integers, fp8, MXFP4, NVFP4, MXFP8.

Defined by compressed-tensors (github.com/vllm-project/compressed-tensors, `decompress` of its compressors and
quantization/lifecycle/forward.py, `_dequantize`): value = (q - z) * scale, in the scale's dtype; here in float32, where
it is exact. Codes of a row, and zero points of a column, are packed into words from the lowest bits on. weight_g_idx,
if there is one, is the group of each input.

The names, shapes and dtypes of a weight's tensors tell its config group, and whether it is ignored. So `targets` and
`ignore` are not evaluated: their regular expressions could take forever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import mxfp4, nvfp4
from jaxserve.checkpoints.formats.activations import Wanted, describe, input_scale_name, of_compressed, with_scale
from jaxserve.checkpoints.formats.packing import (
    Tensors,
    block_size,
    fetch,
    fetch_scale,
    find,
    group_order,
    group_size,
    groups,
    method,
    quant_config,
    signed,
    unpack,
)
from jaxserve.checkpoints.int4 import PackedInt4, signed_bytes
from jaxserve.pallas_kernels.types import Activations, QuantArray

METHODS = ("compressed-tensors",)
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
           "nvfp4-pack-quantized", "mxfp8-quantized", "mixed-precision")  # fmt: skip
PLAIN = {"int": "int8", "float": "float8_e4m3fn"}


@dataclass(frozen=True)
class Scheme:
    """How a config group stores weights. block: rows and inputs that share a scale; None is all. inputs: how the
    products round their inputs."""

    kind: str  # "int" or "float"
    bits: int
    symmetric: bool
    block: tuple[int | None, int | None]
    inputs: Wanted = (None, "")

    def __str__(self) -> str:
        rows, inputs = (size or "all" for size in self.block)
        return f"{self.kind}{self.bits} in blocks of {rows}x{inputs}{describe(self.inputs)}"


def open_format(config: Mapping[str, Any], tensors: Tensors) -> CompressedTensors | None:
    if method(config) not in METHODS:
        return None
    settings = quant_config(config)
    sparsity = settings.get("sparsity_config") or {}
    if settings.get("transform_config") or not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise CheckpointError("compressed-tensors is read without transform_config and without sparsity_config")
    config_groups = settings.get("config_groups")
    if not isinstance(config_groups, dict) or not all(isinstance(group, dict) for group in config_groups.values()):
        raise CheckpointError("config.json: quantization_config's config_groups must be an object of objects")
    for found in (settings, *config_groups.values()):
        if (found.get("format") or FORMATS[0]) not in FORMATS:
            raise CheckpointError(f"compressed-tensors is read as {', '.join(FORMATS)}, not {found['format']!r:.100}")
    schemes = [
        _scheme(group["weights"], of_compressed(group.get("input_activations")))
        for group in config_groups.values()
        if group.get("weights")
    ]
    return CompressedTensors(tensors, schemes)


def _scheme(weights: object, inputs: Wanted = (None, "")) -> Scheme:
    def refuse(key: str, allowed: str) -> CheckpointError:
        return CheckpointError(f"config.json: a config group's weights have {key} {weights!r:.300}; {allowed}")

    if not isinstance(weights, dict):
        raise refuse("settings", "an object was expected")
    kind = weights.get("type", "int")
    bits = weights.get("num_bits", 8)
    if (kind, bits) not in (("int", 2), ("int", 4), ("int", 8), ("float", 4), ("float", 8)):
        raise refuse("type and num_bits", "int with 2, 4 or 8, and float with 4 or 8 are read")
    size = group_size(weights)
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    if strategy == "tensor_group":  # a scale per group, and one for the tensor
        strategy = "group"
    block: tuple[int | None, int | None]
    if strategy in ("tensor", "channel", "group"):
        block = {"tensor": (None, None), "channel": (1, None), "group": (1, size)}[strategy]
    elif strategy == "block":
        found = weights.get("block_structure")
        if not isinstance(found, list) or len(found) != 2:
            raise refuse("block_structure", "two numbers were expected")
        block = (block_size(found[0], "block_structure"), block_size(found[1], "block_structure"))
    else:
        raise refuse("strategy", "tensor, channel, group and block are read")
    if (kind, bits) == ("float", 4) and block not in ((1, mxfp4.GROUP), (1, nvfp4.GROUP)):
        raise refuse("groups", "float with 4 bits is read in groups of 32 (MXFP4) and 16 (NVFP4)")
    return Scheme(kind, bits, weights.get("symmetric", True) is not False, block, inputs)


@dataclass
class CompressedTensors:
    tensors: Tensors
    schemes: list[Scheme]
    name: str = "compressed-tensors"

    @property
    def description(self) -> str:
        return f"compressed-tensors {', '.join(dict.fromkeys(map(str, self.schemes)))}"

    def parts(self, weight: str) -> tuple[str, ...]:
        stored = self.tensors.get(weight)
        packed = f"{weight}_packed" in self.tensors
        is_plain = f"{weight}_scale" not in self.tensors if stored is None else stored.dtype.name not in PLAIN.values()
        if is_plain and not packed:
            return ()
        optional = [f"{weight}_{part}" for part in ("zero_point", "shape", "g_idx", "global_scale")]
        optional += [
            input_scale_name(weight).replace("input_scale", of_inputs)
            for of_inputs in ("input_scale", "input_zero_point", "input_global_scale")
        ]
        return (
            f"{weight}_packed" if packed else weight,
            f"{weight}_scale",
            *(name for name in optional if name in self.tensors),
        )

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray:
        (scheme, activations), (out, inputs) = self._scheme(weight, shape), shape
        codes_name, scale_name = self.parts(weight)[:2]
        self._check_shape(f"{weight}_shape", shape)
        if (scheme.kind, scheme.bits, scheme.block[1]) == ("float", 4, nvfp4.GROUP):
            return nvfp4.decode(self.tensors, codes_name, scale_name, f"{weight}_global_scale", shape, divides=True)
        if (scheme.kind, scheme.bits) == ("float", 4):
            packed = fetch(self.tensors, codes_name, ("uint8",), (out, inputs // 2))
            groups(mxfp4.GROUP, weight, inputs)
            return mxfp4.decode(packed, fetch(self.tensors, scale_name, ("uint8",), (out, inputs // 32)), scale_name)
        codes = self._codes(codes_name, scheme, shape)
        if scheme.block[0] == 1:
            groups(scheme.block[1], weight, inputs)
        wanted = (scheme.block[0] or out, scheme.block[1] or inputs)
        scale, block = fetch_scale(self.tensors, scale_name, shape, wanted)
        zero = None if scheme.symmetric else self._zero(weight, scheme, out, scale.shape)
        order = self._order(f"{weight}_g_idx", inputs, scale.shape[1], block[1])
        if order is not None:
            codes = np.take(np.asarray(codes), order, axis=1)
        of_inputs = with_scale(self.tensors, weight, activations)
        return QuantArray(codes, scale, zero, order=order, block=block, **of_inputs)

    def _scheme(self, weight: str, shape: tuple[int, int]) -> tuple[Scheme, Activations | None]:
        """The config group that fits the weight's tensors, and how its products round their inputs. If none fits, the
        first, so that its checks name the mismatch. If several fit that round differently, inputs are not rounded."""
        if not self.schemes:
            raise CheckpointError(f"{weight} is quantized, but no config group of quantization_config has weights")
        codes, scale = (find(self.tensors, name) for name in self.parts(weight)[:2])
        asymmetric, (out, inputs) = f"{weight}_zero_point" in self.tensors, shape

        def fits(s: Scheme) -> bool:
            dtype = PLAIN[s.kind]
            width = inputs
            if codes.name.endswith("_packed"):
                dtype = "uint8" if s.kind == "float" else "int32"
                width = -(-inputs * s.bits // 32) * 4
            scales = -(-out // (s.block[0] or out)) * -(-inputs // (s.block[1] or inputs))
            return (codes.dtype.name, codes.nbytes, math.prod(scale.shape)) == (dtype, out * width, scales)

        found = [s for s in self.schemes if fits(s)] or self.schemes
        found = [s for s in found if s.symmetric != asymmetric] or found[:1]
        return found[0], found[0].inputs[0] if len({s.inputs[0] for s in found}) == 1 else None

    def _codes(self, name: str, scheme: Scheme, shape: tuple[int, int]) -> np.ndarray | PackedInt4:
        if not name.endswith("_packed"):
            return fetch(self.tensors, name, (PLAIN[scheme.kind],), shape)
        dtype = "int32" if scheme.kind == "int" else PLAIN[scheme.kind]
        packed = fetch(self.tensors, name, (dtype,), (shape[0], -(-shape[1] * scheme.bits // 32)))
        if scheme.bits == 4 and packed.shape[1] * 8 == shape[1]:
            return signed_bytes(packed)
        return signed(np.ascontiguousarray(unpack(packed, scheme.bits)[:, : shape[1]]), scheme.bits)

    def _zero(self, weight: str, scheme: Scheme, out: int, counts: tuple[int, ...]) -> np.ndarray:
        name = f"{weight}_zero_point"
        per_tensor = scheme.block[0] is None
        if per_tensor or f"{weight}_packed" not in self.tensors:
            # As for scales: those of rows may lack the second axis, and a single one may be a scalar.
            shorter = [counts[:1]] * (counts[1] == 1) + [()] * (counts == (1, 1))
            return fetch(self.tensors, name, ("int8",), counts, *shorter).reshape(counts)
        packed = fetch(self.tensors, name, ("int32",), (-(-out * scheme.bits // 32), counts[1]))
        return signed(np.ascontiguousarray(unpack(packed.T, scheme.bits)[:, :out].T), scheme.bits, np.dtype(np.int8))

    def _check_shape(self, name: str, shape: tuple[int, int]) -> None:
        if name in self.tensors and tuple(stored := fetch(self.tensors, name, ("int64", "int32"), (2,))) != shape:
            raise CheckpointError(f"tensor {name!r} says {stored.tolist()}, but the weight is {list(shape)}")

    def _order(self, name: str, inputs: int, count: int, size: int) -> np.ndarray | None:
        if name not in self.tensors:
            return None
        group = fetch(self.tensors, name, ("int32", "int64"), (inputs,))
        return None if (group == -1).all() else group_order(group, name, count, size)
