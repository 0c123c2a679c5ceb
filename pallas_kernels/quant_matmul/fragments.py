"""The order of codes that suits Hopper's matrix unit: a permutation of a weight's inputs.

wgmma's first operand: of the rows r and r + 8, and of each 16 inputs, a thread holds the inputs 2 t, 2 t + 1, 2 t + 8
and 2 t + 9, where t is its index among the four threads that share r. In the original order these are scattered bytes,
which are read one by one. `shuffle` permutes each chunk of 64 bytes of a row, so that each thread's codes are 16
adjacent bytes. A thread reads these at once, without bank conflicts, as four words of 32 bits. The two halves of a word
are the two neighbours of a pair, so that the codes at the same bits of both halves become two 16-bit floats together:

  input in its chunk = 8 parts w + 8 i + 2 t + h, at 8 parts t + 2 parts w + parts h + i, where
  t   index of the thread among four, 16 bytes each
  w   index of the word among the thread's four
  h   half of the word
  i   index of the code in the half, of `parts`: 4 of int4, the lowest bits first, 2 of 8 bits

A chunk is 128 inputs of int4, or 64 of 8 bits. Scales, groups and rows stay in place.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.registry import Device, MatmulProblem, load
from jaxserve.pallas_kernels.types import QuantArray

CHUNK_BITS = 512
WORDS = 16  # of 32 bits in a chunk of a row


def chunk(dtype: jnp.dtype) -> int:
    """Inputs of one chunk, within which codes are permuted."""
    return CHUNK_BITS // jax.dtypes.itemsize_bits(dtype)


def parts(bits: int) -> int:
    """Codes of `bits` bits in half a word."""
    return 16 // bits


def why_not(inputs: int, group: int, dtype: jnp.dtype) -> str | None:
    """Returns why codes in groups of `group` inputs cannot be shuffled, or None where they can."""
    size = chunk(dtype)
    if inputs % size:
        return f"the number of inputs must be a multiple of {size}, not {inputs}"
    whole = group >= inputs or group % size == 0 or (size % group == 0 and group % 32 == 0)
    return None if whole else f"groups must be 32 or 64 inputs or multiples of {size}, not {group}"


def suits(device: Device, problem: MatmulProblem, backend: str) -> bool:
    """Whether codes should be shuffled when they are loaded, for products by `backend`.

    float8 is excluded: converting two codes takes half the instructions of int8 anyway, and shuffling saves none. So
    are weights whose products round their inputs (`w8a8`), which read codes in the inputs' order.
    """
    if device.platform != "gpu" or backend not in ("auto", "mosaic_gpu") or problem.shuffled or problem.activations:
        return False
    integers = problem.codes_dtype in (jnp.int4, jnp.int8)
    fits = integers and load("matmul", "mosaic_gpu").why_not(device, problem) is None
    return fits and why_not(problem.inputs, problem.block[1], problem.codes_dtype) is None


def shuffle(w: QuantArray) -> QuantArray:
    """Returns the weight [..., out, in] with its codes in fragments' order."""
    return replace(w, codes=shuffled_codes(w.codes), shuffled=True)


def shuffled_codes(codes: jax.Array) -> jax.Array:
    """Returns codes [..., out, in] in fragments' order."""
    return _moved(codes, (4, parts(jax.dtypes.itemsize_bits(codes.dtype)), 4, 2), (2, 0, 3, 1))


def in_order(w: QuantArray) -> QuantArray:
    """Returns the weight [..., out, in] with its codes in the inputs' order. Shuffled int4 codes become int8."""
    if not w.shuffled:
        return w
    sizes = 4, 4, 2, parts(jax.dtypes.itemsize_bits(w.codes.dtype))
    return replace(w, codes=_moved(w.codes, sizes, (1, 3, 0, 2), keep=False), shuffled=False)


def _moved(codes: jax.Array, sizes: tuple[int, ...], axes: tuple[int, ...], keep: bool = True) -> jax.Array:
    """Permutes the axes within a chunk of the inputs, viewed as [chunks, *sizes]. int4 becomes int8 for this."""
    wide = codes.astype(jnp.int8) if codes.dtype == jnp.int4 else codes
    leading = *codes.shape[:-1], codes.shape[-1] // chunk(codes.dtype)
    chunks = wide.reshape(*leading, *sizes)
    n = len(leading)
    moved = chunks.transpose(*range(n), *(n + axis for axis in axes)).reshape(codes.shape)
    return moved.astype(codes.dtype) if keep else moved


def words(codes: jax.Array) -> jax.Array:
    """Views shuffled codes [..., out, in] as int32 [..., out, in / codes in a word], without a copy."""
    per = 32 // jax.dtypes.itemsize_bits(codes.dtype)
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per), jnp.int32)


def codes_of_words(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts words [rows, 16 n] of shuffled codes of `dtype` to float32 [rows, inputs], in the inputs' order."""
    bits = jax.dtypes.itemsize_bits(dtype)
    count = parts(bits)
    shape = array.shape[0], array.shape[1] // WORDS, 4, 4  # chunks, threads, words
    shifts = 16 * jnp.arange(2)[:, None] + bits * jnp.arange(count)[None]
    values = lax.shift_right_logical(array.reshape(*shape, 1, 1), jnp.broadcast_to(shifts, (*shape, 2, count)))
    values = values.transpose(0, 1, 3, 5, 2, 4).reshape(array.shape[0], -1)
    if dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type((values & 0xFF).astype(jnp.uint8), dtype).astype(jnp.float32)
    high = 1 << (bits - 1)
    return ((values & (2 * high - 1) ^ high) - high).astype(jnp.float32)
