"""Loads codes in `fragments`' order from shared memory to the registers of wgmma's first operand, in Mosaic GPU.

Each thread reads 16 bytes at once (4 or 8 where groups of 32 or 64 inputs are multiplied separately). It converts pairs
of codes with a few instructions (`pair_ptx`), none of which moves data between threads. JAX's interpreter runs neither
inline PTX nor operands in registers, so `fragments.codes_of_words` replaces this code there.
tests/kernels/test_fragments.py runs the PTX, and compares each code's place with the place in JAX's own layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxserve.pallas_kernels.quant_matmul.fragments import WORDS, parts

# truth tables of lop3: (a & b) ^ c, (a & b) | c
AND_XOR = "0x6A"
AND_OR = "0xEA"


def pair_ptx(codes: str, part: int, dtype: str) -> str:
    """PTX that converts the `part`-th codes of both halves of the word $1 to two floats in $0.

    int4, and int8 to float16: plus 8 or 128 a code is a natural number. Put into the low bits of a float that is 128
      (bfloat16) or 1024 (float16), it is added to it. The offset and that number are subtracted.
    int8 to bfloat16: the low bits of 128 have room for seven bits. The eighth bit makes 256 of another 128, which is
      subtracted.
    float8: the bits are moved to their place in the float, and a product corrects the exponent's bias. No NaN.
    """
    wide = dtype == "bfloat16"
    subtract = "sub.bf16x2 $0, t, u;" if wide else "sub.f16x2 $0, t, u;"
    if codes == "int4":
        one = "0x43084308" if wide else "0x64086408"
        shift, source = (f"shr.u32 t, $1, {4 * part};", "t") if part else ("", "$1")
        body = f"{shift} lop3.b32 t, {source}, 0x000F000F, {one}, {AND_XOR}; mov.b32 u, {one}; {subtract}"
    elif codes == "int8":
        shift, source = ("shr.u32 s, $1, 8;", "s") if part else ("", "$1")
        if wide:
            body = f"{shift} lop3.b32 t, {source}, 0x007F007F, 0x43004300, {AND_OR}; "
            body += f"lop3.b32 u, {source}, 0x00800080, 0x43004300, {AND_OR}; {subtract}"
        else:
            body = f"{shift} lop3.b32 t, {source}, 0x00FF00FF, 0x64806480, {AND_XOR}; mov.b32 u, 0x64806480; {subtract}"
    else:
        shift, source = ("", "$1") if part else ("shl.b32 s, $1, 8;", "s")
        down, mask, scale, suffix = (4, "0x07F007F0", "0x7B807B80", "bf16x2") if wide else (
            1, "0x3F803F80", "0x5C005C00", "f16x2")  # fmt: skip
        body = f"{shift} and.b32 u, {source}, 0x80008000; shr.u32 t, {source}, {down}; "
        body += f"lop3.b32 t, t, {mask}, u, {AND_OR}; mov.b32 u, {scale}; mul.{suffix} $0, t, u;"
    return f"{{ .reg .b32 s, t, u; {body} }}"


def address(thread: Any) -> tuple[Any, Any]:
    """Returns where a warpgroup's thread begins to read: a row of an operand's first 64, and a word of that row."""
    return thread // 32 * 16 + thread % 32 // 4, thread % 4 * 4


def tile_of(word: int, part: int, bits: int) -> int:
    """Returns which eight inputs, counted from those of the first word, the pair of a word belongs to."""
    return parts(bits) * word + part


def load_operand(words: Any, rows: int, piece: int, pieces: int, codes: jnp.dtype, dtype: jnp.dtype) -> jax.Array:
    """Loads codes as wgmma's first operand [rows, inputs], in `dtype`.

    words: int32 [rows, WORDS] in shared memory, in the order of global memory. The chunk's inputs are cut into 1, 2 or
    4 pieces, of which one is loaded.
    """
    bits = jax.dtypes.itemsize_bits(codes)
    size = 4 // pieces  # words of a thread
    inputs = 32 // bits * WORDS // pieces
    names = jnp.dtype(codes).name, jnp.dtype(dtype).name

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((rows, inputs), dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, source: Any) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        layout = mgpu.WGMMA_LAYOUT
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        several = ir.VectorType.get((size,), i32)
        registers = np.empty(layout.registers_shape((rows, inputs)), dtype=object)
        start, (row, column) = utils.memref_ptr(source), _address_values(i32)
        thread_offset = arith.addi(arith.muli(row, utils.c(WORDS, i32)), column)
        for block, half in np.ndindex(rows // 64, 2):
            first = (64 * block + 8 * half) * WORDS + piece * size
            offset = arith.addi(thread_offset, utils.c(first, i32))
            read = llvm.load(several, utils.getelementptr(start, [offset], i32))
            for word in range(size):
                value = llvm.extractelement(read, utils.c(word, i32))
                for part in range(parts(bits)):
                    both = llvm.inline_asm(i32, [value], pair_ptx(names[0], part, names[1]), "=r,r")
                    assert isinstance(both, ir.Value)
                    tile = tile_of(word, part, bits)
                    registers[block, tile, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(both, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(words)


def _address_values(i32: Any) -> tuple[Any, Any]:
    """The instructions that compute `address` of this thread."""
    thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
    of_warp = arith.muli(arith.divui(thread, utils.c(32, i32)), utils.c(16, i32))
    of_lane = arith.divui(arith.remui(thread, utils.c(32, i32)), utils.c(4, i32))
    return arith.addi(of_warp, of_lane), arith.muli(arith.remui(thread, utils.c(4, i32)), utils.c(4, i32))
