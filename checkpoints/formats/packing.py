"""Shared by the formats: reading settings, reading and checking tensors, and unpacking codes from words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.int4 import INT4, halves
from jaxserve.checkpoints.safetensors import TensorInfo

FLOATS = ("float16", "bfloat16", "float32")
EXPONENTS = ("float8_e8m0fnu", "uint8")  # powers of two
MAX_BLOCK = 2**20
PIECE_BYTES = 2**16  # unpacked at a time, so that intermediate arrays stay in the processor's cache
SETTINGS = ("quantization_config", "compression_config")  # keys of config.json

Tensors = Mapping[str, TensorInfo]


def quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings of config.json; empty if it has none. A model with images may have those of its text
    (Kimi K2.5)."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    found: Any = next((x for place in places for key in SETTINGS if (x := place.get(key))), {})
    if not isinstance(found, dict):
        raise CheckpointError(f"config.json: quantization_config must be an object, not {found!r:.100}")
    return found


def method(config: Mapping[str, Any]) -> str:
    """The quant_method of config.json in lower case; "" if it has none."""
    return str(quant_config(config).get("quant_method", "")).lower()


def block_size(value: object, key: str) -> int:
    """Checks the size of a group or block. Raises CheckpointError."""
    if type(value) is not int or not 1 <= value <= MAX_BLOCK:
        raise CheckpointError(f"config.json: quantization_config's {key} is {value!r:.100}, not from 1 to {MAX_BLOCK}")
    return value


def group_size(settings: Mapping[str, Any], default: int | None = None) -> int | None:
    """Inputs that share a scale; None is all inputs (in files -1)."""
    value = settings.get("group_size", default)
    return None if value is None or value == -1 else block_size(value, "group_size")


def groups(size: int | None, weight: str, inputs: int, partial: bool = False) -> tuple[int, int]:
    """(number of groups, inputs in each). Raises if a group is not full, unless the last one may be `partial`."""
    size = inputs if size is None else size
    if inputs % size and not partial:
        raise CheckpointError(f"{weight} has {inputs} inputs, which are no whole groups of {size}")
    return -(-inputs // size), min(size, inputs)


def words(count: int, bits: int, name: str) -> int:
    """The number of 32-bit words of `count` codes. Raises if the last word is not full."""
    if count * bits % 32:
        raise CheckpointError(f"tensor {name!r}: {count} codes of {bits} bits fill no whole words")
    return count * bits // 32


def part_names(tensors: Tensors, weight: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a weight's tensors, module + suffix; empty if the checkpoint has none of them."""
    names = tuple(weight.removesuffix(".weight") + suffix for suffix in suffixes)
    return names if any(name in tensors for name in names) else ()


def find(tensors: Tensors, name: str) -> TensorInfo:
    if name not in tensors:
        raise CheckpointError(f"the checkpoint lacks tensor {name!r}, which its quantization_config asks for")
    return tensors[name]


def fetch(tensors: Tensors, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> np.ndarray:
    """Reads a tensor, which must have one of these dtypes and shapes."""
    tensor = find(tensors, name)
    if tensor.dtype.name not in dtypes:
        raise CheckpointError(
            f"{tensor.path.name}: tensor {name!r} has dtype {tensor.dtype.name}, not {' or '.join(dtypes)}"
        )
    if tensor.shape not in shapes:
        raise CheckpointError(
            f"{tensor.path.name}: tensor {name!r} has shape {list(tensor.shape)}, "
            f"which does not fit its weight: {' or '.join(str(list(s)) for s in shapes)} would"
        )
    return tensor.read()


def fetch_scale(
    tensors: Tensors, name: str, shape: tuple[int, int], *blocks: tuple[int, int]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Reads a weight's scales: ([ceil(out / rows), ceil(in / inputs)], their block (rows, inputs)).

    The block is the one of `blocks` that fits the tensor's shape. A single scale may be a scalar, and scales per row
    may lack the second axis.
    """
    forms: dict[tuple[int, ...], tuple[int, int]] = {}
    for block in blocks:
        block = (min(block[0], shape[0]), min(block[1], shape[1]))
        counts = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        forms[counts] = block
        if counts[1] == 1:
            forms[counts[:1]] = block
        if counts == (1, 1):
            forms[()] = block
    scale = fetch(tensors, name, (*FLOATS, *EXPONENTS), *forms)
    block = forms[scale.shape]
    scale = exponents_of(scale, name).astype(ml_dtypes.bfloat16) if scale.dtype.name in EXPONENTS else scale
    return scale.reshape(scale.shape if scale.ndim == 2 else (-1, 1)), block


def exponents_of(stored: np.ndarray, name: str) -> np.ndarray:
    """Scales stored as e8m0 (https://www.opencompute.org, Microscaling Formats 1.0), 2^(e - 127), as float8_e8m0fnu."""
    if (stored.view(np.uint8) == 255).any():
        raise CheckpointError(f"tensor {name!r} has scales that are no numbers (255)")
    return stored.view(ml_dtypes.float8_e8m0fnu)


def unpack(words: np.ndarray, bits: int, table: np.ndarray | None = None) -> np.ndarray:
    """Words [..., n] with codes packed from the lowest bits on -> the codes, uint8 [..., 8 n' / bits].

    n' is the number of bytes, which must be a multiple of `bits` for 3, 5 and 6 bits. With a `table` of at most 256
    bytes, and bits up to 6, its entries for the codes are returned.
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    rows = raw.reshape(-1, raw.shape[-1])
    made = np.empty((len(rows), rows.shape[1] * 8 // bits), np.uint8 if table is None else table.dtype)
    step = max(1, PIECE_BYTES // max(1, rows.shape[1]))
    for at in range(0, len(rows), step):
        codes = _spread(rows[at : at + step], bits)
        if table is not None:  # faster than indexing, which converts each code to int64
            found = codes.tobytes().translate(table.tobytes().ljust(256))
            codes = np.frombuffer(found, table.dtype).reshape(codes.shape)
        made[at : at + step] = codes
    return made.reshape(*raw.shape[:-1], made.shape[1])


def _spread(raw: np.ndarray, bits: int) -> np.ndarray:
    """Bytes [rows, n] -> the codes of `bits` bits, a byte each, uint8 [rows, 8 n / bits]."""
    if bits == 4:
        return halves(raw)
    pieces = raw.reshape(len(raw), -1, bits)  # eight codes each
    stream = np.zeros(pieces.shape[:-1], np.uint64)
    for byte in range(bits):
        stream |= pieces[..., byte].astype(np.uint64) << np.uint64(8 * byte)
    for count in (4, 2, 1):  # of each 2 * count codes, moves the upper half to its final bytes
        low = np.uint64(sum((2 ** (count * bits) - 1) << at for at in range(0, 64, 16 * count)))
        high = stream & ~low
        high <<= np.uint64(count * (8 - bits))
        stream &= low
        stream |= high
    return stream.view(np.uint8)


def signed(codes: np.ndarray, bits: int, dtype: np.dtype | None = None) -> np.ndarray:
    """Unsigned codes (uint8, overwritten) minus half their range; default dtype: int4 up to four bits, else int8."""
    dtype = dtype or (INT4 if bits <= 4 else np.dtype(np.int8))
    codes -= np.uint8(2 ** (bits - 1))
    if dtype == INT4:  # NumPy's int4 takes a byte, with its upper half zero
        codes &= 15
    return codes.view(dtype)


def group_order(g_idx: np.ndarray, name: str, count: int, size: int) -> np.ndarray | None:
    """The group of each input [in] -> the inputs sorted by group, int32 [in]; None if they are sorted already.

    All groups but the last must have `size` inputs.
    """
    if g_idx.min() < 0 or g_idx.max() >= count:
        raise CheckpointError(f"tensor {name!r} names groups from {g_idx.min()} to {g_idx.max()}; there are {count}")
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    place = np.arange(len(g_idx), dtype=np.int32)
    if (g_idx[order] != place // size).any():
        raise CheckpointError(f"tensor {name!r} does not give each group {size} inputs")
    return None if (order == place).all() else order
