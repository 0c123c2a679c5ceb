"""bitsandbytes checkpoints: LLM.int8(), nf4 and fp4.

Defined by bitsandbytes (github.com/bitsandbytes-foundation/bitsandbytes, functional.py). int8
(`int8_vectorwise_dequant`): value = weight * SCB / 127. bitsandbytes multiplies twice; here SCB / 127 is the
scale, so the last bit of a float32 may differ. 4 bit (`dequantize_4bit`): the weight is one row of codes, the upper
half of a byte first; value = quant_map[code] * absmax, of its block (usually 64). With double quantization absmax is
coded: absmax = nested_quant_map[code] * nested_absmax of its block of 256 + nested_offset. The quant_state is JSON in a
uint8 tensor.

The 4-bit values are not equally spaced. `decode` returns them exactly; `read` rounds them to int8 with a scale per
block, with an error of at most 1/254 of the block's largest value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import FLOATS, Tensors, block_size, fetch, find, method, quant_config, unpack
from jaxserve.checkpoints.quantized import expand
from jaxserve.pallas_kernels.types import QuantArray

METHODS = ("bitsandbytes",)
KINDS = ("nf4", "fp4")
MAX_STATE_BYTES = 2**16
INVERSE_127 = np.float32(7.874015718698502e-3)


def open_format(config: Mapping[str, Any], tensors: Tensors) -> BitsAndBytes | None:
    if method(config) not in METHODS:
        return None
    settings = quant_config(config)
    four = settings.get("load_in_4bit") or settings.get("_load_in_4bit")
    kind = f"{settings.get('bnb_4bit_quant_type', 'fp4')}, rounded to int8 with a scale per block" if four else "int8"
    return BitsAndBytes(tensors, f"bitsandbytes {kind}")


@dataclass
class BitsAndBytes:
    tensors: Tensors
    description: str
    name: str = "bitsandbytes"

    def parts(self, weight: str) -> tuple[str, ...]:
        module = weight.removesuffix(".weight")
        states = [f"{weight}.quant_state.bitsandbytes__{kind}" for kind in KINDS]
        if states := [name for name in states if name in self.tensors]:
            nested = [f"{weight}.nested_{part}" for part in ("absmax", "quant_map")]
            nested = nested if any(name in self.tensors for name in nested) else []
            return (weight, states[0], f"{weight}.absmax", f"{weight}.quant_map", *nested)
        is_int8 = weight in self.tensors and self.tensors[weight].dtype == np.int8
        if is_int8 or f"{module}.SCB" in self.tensors:
            return (weight, f"{module}.SCB", *(x for x in (f"{module}.weight_format",) if x in self.tensors))
        return ()

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray | np.ndarray:
        """int8 codes; but the exact values in float32 for a 4-bit weight whose rows are not whole blocks."""
        if len(self.parts(weight)) < 4:
            codes = fetch(self.tensors, weight, ("int8",), shape)
            scb = fetch(self.tensors, self.parts(weight)[1], FLOATS, (shape[0],))
            self._check_layout(self.parts(weight)[2:])
            return QuantArray(codes, scb.astype(np.float32)[:, None] * INVERSE_127, block=(1, shape[1]))
        numbers, absmax, size = self._load(weight, shape)
        if shape[1] % size:
            return self.decode(weight, shape)
        rounded = np.rint(numbers * np.float32(127)).astype(np.int8)
        codes = self._codes(weight, shape, rounded)
        return QuantArray(codes, absmax.reshape(shape[0], -1) * INVERSE_127, block=(1, size))

    def decode(self, weight: str, shape: tuple[int, int]) -> np.ndarray:
        """The exact values of a 4-bit weight, float32 [out, in]."""
        numbers, absmax, size = self._load(weight, shape)
        values = numbers[self._codes(weight, shape)].reshape(1, -1)
        row = (1, math.prod(shape))
        return (values * expand(absmax[None], (1, size), row)).reshape(shape)

    def _check_layout(self, names: tuple[str, ...]) -> None:
        for name in names:
            if fetch(self.tensors, name, ("uint8",), ()) != 0:
                raise CheckpointError(f"tensor {name!r} asks for another layout of int8 than by rows (0)")

    def _codes(self, weight: str, shape: tuple[int, int], table: np.ndarray | None = None) -> np.ndarray:
        """The codes, uint8 [out, in], or their values in `table`. The file may store the bytes in a wider dtype."""
        stored = find(self.tensors, weight)
        if stored.nbytes * 2 != math.prod(shape):
            raise CheckpointError(f"{stored.path.name}: tensor {weight!r} has {stored.nbytes} bytes, not {shape} / 2")
        raw = stored.read().reshape(-1).view(np.uint8)
        rows = (raw << 4 | raw >> 4).reshape(math.gcd(shape[0], raw.size), -1)
        return unpack(rows, 4, table).reshape(shape)

    def _load(self, weight: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
        """The values of the codes, float32 [16]; the absmax of each block, float32 [blocks]; the block's size."""
        _, state_name, absmax_name, map_name, *nested = self.parts(weight)
        state = self._state(state_name)
        size = block_size(state.get("blocksize"), f"blocksize ({state_name})")
        kind = state_name.rsplit("__")[-1]
        if state.get("shape") != list(shape) or state.get("quant_type") != kind:
            raise CheckpointError(
                f"tensor {state_name!r} speaks of {state.get('quant_type')!r:.100} with shape "
                f"{state.get('shape')!r:.100}, but the weight is {kind} with shape {list(shape)}"
            )
        numbers = fetch(self.tensors, map_name, ("float32",), (16,))
        if not (np.abs(numbers) <= 1).all():
            raise CheckpointError(f"tensor {map_name!r} has numbers outside of -1 to 1")
        blocks = -(-math.prod(shape) // size)
        if not nested:
            return numbers, fetch(self.tensors, absmax_name, ("float32",), (blocks,)), size
        outer = state.get("nested_blocksize")
        offset = state.get("nested_offset")
        outer = block_size(outer, f"nested_blocksize ({state_name})")
        if not isinstance(offset, int | float) or not math.isfinite(offset):
            raise CheckpointError(f"tensor {state_name!r} has the nested_offset {offset!r:.100}")
        table = fetch(self.tensors, nested[1], ("float32",), (256,))
        scale = fetch(self.tensors, nested[0], ("float32",), (-(-blocks // outer),))
        codes = fetch(self.tensors, absmax_name, ("uint8",), (blocks,))
        absmax = table[codes][None] * expand(scale[None], (1, outer), (1, blocks))
        return numbers, absmax[0] + np.float32(offset), size

    def _state(self, name: str) -> dict[str, Any]:
        tensor = find(self.tensors, name)
        if tensor.dtype != np.uint8 or len(tensor.shape) != 1 or tensor.nbytes > MAX_STATE_BYTES:
            raise CheckpointError(f"{tensor.path.name}: tensor {name!r} is no quant_state of bytes")
        try:
            state = json.loads(tensor.read().tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{tensor.path.name}: tensor {name!r} is not valid JSON: {error}") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{tensor.path.name}: tensor {name!r} is no JSON object")
        return state
