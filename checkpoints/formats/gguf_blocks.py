"""The blocks of GGUF tensors as QuantArrays.

The layouts are those of ggml (ggml-common.h, ggml-quants.c); the values are, to the last bit of float32, those of the
`gguf` package's NumPy dequantization. So scales that the format multiplies (d * sc) become float32
products, and scales that are in the file stay float16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import PIECE_BYTES, exponents_of
from jaxserve.checkpoints.gguf import TYPES, BlockType
from jaxserve.checkpoints.int4 import FLOAT4, INT4, PackedInt4
from jaxserve.pallas_kernels.types import QuantArray

FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Values of the 4-bit codes of ggml's non-linear types.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# A decoder's result for the blocks of one type, a structured array [n]: codes [n, block size], scale [n, parts of a
# block], zero (one number for all) and bias (None or as scale).
Decoded = tuple[np.ndarray | PackedInt4, np.ndarray, int, np.ndarray | None]


def decode(data: np.ndarray, kind: BlockType, shape: tuple[int, ...]) -> QuantArray | np.ndarray:
    """Decodes a tensor's bytes [nbytes]: plain floats of any shape, or a QuantArray [out, in] for quantized types.

    Types that only the `gguf` package knows become float32. Raises CheckpointError if it is needed but not installed.
    """
    if kind.name in FLOATS:
        return data.view(FLOATS[kind.name]).reshape(shape)
    if needs_package(kind):
        return _by_package(data, kind, shape)
    fields, decoder = _DECODERS[kind.name]
    codes, scale, zero, bias = decoder(data.view(np.dtype(fields)))

    def in_rows(values: np.ndarray | PackedInt4) -> Any:
        if isinstance(values, PackedInt4):
            return values.with_rows(in_rows)
        return np.ascontiguousarray(values).reshape(int(np.prod(shape[:-1])), -1)

    scale = in_rows(scale)
    return QuantArray(
        codes=in_rows(codes),
        scale=scale,
        zero=in_rows(np.full(scale.shape, zero, np.int8)) if zero else None,
        bias=None if bias is None else in_rows(bias),
        block=(1, shape[-1] // scale.shape[1]),
    )


def needs_package(kind: BlockType) -> bool:
    """Whether only the `gguf` package knows a type. Raises CheckpointError if it is needed but not installed."""
    if kind.name in FLOATS or kind.name in _DECODERS:
        return False
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(f"tensors of type {kind.name} are read by the gguf package: pip install jaxserve[gguf]")
    return True


def _by_package(data: np.ndarray, kind: BlockType, shape: tuple[int, ...]) -> np.ndarray:
    import gguf

    number = next(number for number, known in TYPES.items() if known == kind)
    rows = data.reshape(*shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number)).reshape(shape)


def _nibbles(packed: np.ndarray, group: int) -> np.ndarray:
    """Bytes [n, m] -> 4-bit codes [n, 2 m]: for each `group` bytes the low halves, then the high halves."""
    packed = packed.reshape(len(packed), -1, group)
    codes = np.empty((*packed.shape[:2], 2, group), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(len(packed), -1)


def _int4(packed: np.ndarray, group: int) -> PackedInt4:
    """The codes of `_nibbles` minus 8, packed: neighbouring codes share a byte, instead of codes `group` apart."""
    codes = np.empty((len(packed), packed.shape[1] // group, 2, group // 2), np.uint8)
    step = max(1, PIECE_BYTES // packed.shape[1])  # intermediate arrays stay in the processor's cache
    for at in range(0, len(packed), step):
        both = np.ascontiguousarray(packed[at : at + step]).view(np.uint16)  # neighbours a and b, as 0xbbaa
        shifted = both >> 4
        low = both & 0x0F
        low |= shifted & 0xF0
        shifted &= 0x0F
        both >>= 8
        both &= 0xF0
        shifted |= both
        for half, values in enumerate((low, shifted)):
            values ^= 0x88
            codes[at : at + step, :, half] = values.reshape(len(values), -1, group // 2)
    return PackedInt4(codes.reshape(len(packed), -1))


def _bits(packed: np.ndarray, width: int, group: int) -> np.ndarray:
    """Bytes [n, m] -> codes of `width` bits: for each `group` bytes all lowest codes, then all next ones."""
    packed = packed.reshape(len(packed), -1, 1, group)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    codes = packed >> shifts
    codes &= 2**width - 1
    return codes.reshape(len(packed), -1)


def _less(codes: np.ndarray, offset: int) -> np.ndarray:
    """Unsigned codes minus `offset`, as int8, computed in place."""
    signed = codes.view(np.int8)
    signed -= np.int8(offset)
    return signed


def _joined(low: np.ndarray, high: np.ndarray, shift: int) -> np.ndarray:
    """low | high << shift, computed in place."""
    high <<= shift
    low |= high
    return low


def _looked_up(values: tuple[int, ...], codes: np.ndarray) -> np.ndarray:
    """values[codes] as int8; bytes.translate is ten times as fast as NumPy's indexing."""
    table = np.array(values, np.int8).tobytes().ljust(256)
    return np.frombuffer(codes.tobytes().translate(table), np.int8).reshape(codes.shape)


def _product(scale: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """[n] x [n, parts] -> float32 [n, parts]."""
    return scale.astype(np.float32)[:, None] * factors.astype(np.float32)


def _fifth_bits(b: np.ndarray) -> np.ndarray:
    """The codes 0 to 31 of Q5_0 and Q5_1."""
    return _joined(_nibbles(b["qs"], 16), np.unpackbits(b["qh"], axis=1, bitorder="little"), 4)


def _q4_0(b: np.ndarray) -> Decoded:
    return _int4(b["qs"], 16), b["d"], 0, None


def _q4_1(b: np.ndarray) -> Decoded:
    return _int4(b["qs"], 16), b["d"], -8, b["m"]


def _q5_0(b: np.ndarray) -> Decoded:
    return _less(_fifth_bits(b), 16), b["d"], 0, None


def _q5_1(b: np.ndarray) -> Decoded:
    return _less(_fifth_bits(b), 0), b["d"], 0, b["m"]


def _q8_0(b: np.ndarray) -> Decoded:
    return b["qs"], b["d"], 0, None


def _q2_k(b: np.ndarray) -> Decoded:
    codes = _bits(b["qs"], 2, 32).astype(INT4)
    return codes, _product(b["d"], b["scales"] & 15), 0, -_product(b["dmin"], b["scales"] >> 4)


def _q3_k(b: np.ndarray) -> Decoded:
    low = b["scales"][:, :8]
    high = b["scales"][:, 8:]
    scales = _joined(_nibbles(low, 8), _bits(high, 2, 4), 4)
    codes = _joined(_bits(b["qs"], 2, 32), _bits(b["hmask"], 1, 32), 2)
    return _less(codes, 4).astype(INT4), _product(b["d"], _less(scales, 32)), 0, None


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima, [n, 8] each, of Q4_K and Q5_K. The first four are the low six bits of a byte; the others are
    split between the low or high half of a byte and the upper two bits of another."""
    scale = packed[:, :4]
    minimum = packed[:, 4:8]
    rest = packed[:, 8:]
    scales = np.concatenate([scale & 63, (rest & 15) | ((scale >> 6) << 4)], axis=1)
    return scales, np.concatenate([minimum & 63, (rest >> 4) | ((minimum >> 6) << 4)], axis=1)


def _q4_k(b: np.ndarray) -> Decoded:
    scales, minima = six_bits(b["scales"])
    codes = _int4(b["qs"], 32)
    return codes, _product(b["d"], scales), -8, -_product(b["dmin"], minima)


def _q5_k(b: np.ndarray) -> Decoded:
    scales, minima = six_bits(b["scales"])
    codes = _joined(_nibbles(b["qs"], 32), _bits(b["qh"], 1, 32), 4)
    return _less(codes, 0), _product(b["d"], scales), 0, -_product(b["dmin"], minima)


def _q6_k(b: np.ndarray) -> Decoded:
    codes = _joined(_nibbles(b["ql"], 64), _bits(b["qh"], 2, 32), 4)
    return _less(codes, 32), _product(b["d"], b["scales"]), 0, None


def _iq4_nl(b: np.ndarray) -> Decoded:
    return _looked_up(_NONLINEAR, _nibbles(b["qs"], 16)), b["d"], 0, None


def _iq4_xs(b: np.ndarray) -> Decoded:
    low = _nibbles(b["low"], 1)
    high = (b["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    return _looked_up(_NONLINEAR, _nibbles(b["qs"], 16)), _product(b["d"], _less(_joined(low, high, 4), 32)), 0, None


def _tq1_0(b: np.ndarray) -> Decoded:
    """A byte holds five base-3 digits of a fraction of 256: digit i is (byte * 3**i mod 256) * 3 // 256."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [b["qs"][:, :32], b["qs"][:, 32:], b["qh"]]
    digits = [(p[:, None] * powers[:count]).reshape(len(b), -1) for p, count in zip(parts, (5, 5, 4), strict=True)]
    codes = ((np.concatenate(digits, axis=1).astype(np.uint16) * 3) >> 8).astype(np.uint8)
    return _less(codes, 1).astype(INT4), b["d"], 0, None


def _tq2_0(b: np.ndarray) -> Decoded:
    return _less(_bits(b["qs"], 2, 32), 1).astype(INT4), b["d"], 0, None


def _mxfp4(b: np.ndarray) -> Decoded:
    codes = _int4(b["qs"], 16).data
    codes ^= 0x88  # undoes the offset that `_int4` has applied
    return PackedInt4(codes, FLOAT4), exponents_of(b["e"], "of blocks of MXFP4"), 0, None


_D = ("d", "<f2")
_M = ("m", "<f2")
_DMIN = ("dmin", "<f2")
_DECODERS: dict[str, tuple[list, Callable[[np.ndarray], Decoded]]] = {
    "Q4_0": ([_D, ("qs", "u1", 16)], _q4_0),
    "Q4_1": ([_D, _M, ("qs", "u1", 16)], _q4_1),
    "Q5_0": ([_D, ("qh", "u1", 4), ("qs", "u1", 16)], _q5_0),
    "Q5_1": ([_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)], _q5_1),
    "Q8_0": ([_D, ("qs", "i1", 32)], _q8_0),
    "Q2_K": ([("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN], _q2_k),
    "Q3_K": ([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D], _q3_k),
    "Q4_K": ([_D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)], _q4_k),
    "Q5_K": ([_D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)], _q5_k),
    "Q6_K": ([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D], _q6_k),
    "IQ4_NL": ([_D, ("qs", "u1", 16)], _iq4_nl),
    "IQ4_XS": ([_D, ("high", "<u2"), ("low", "u1", 4), ("qs", "u1", 128)], _iq4_xs),
    "TQ1_0": ([("qs", "u1", 48), ("qh", "u1", 4), _D], _tq1_0),
    "TQ2_0": ([("qs", "u1", 64), _D], _tq2_0),
    "MXFP4": ([("e", "u1"), ("qs", "u1", 16)], _mxfp4),
}
