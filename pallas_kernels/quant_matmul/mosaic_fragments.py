"""Codes in `fragments`' order from shared memory into the registers of wgmma's first operand, in Pallas Mosaic GPU.

Each thread reads 16 bytes at once (4 or 8 where groups of 32 or 64 inputs are multiplied apart) and converts pairs of
codes with a few instructions (`pair_ptx`), of which none moves data between threads. JAX's interpreter runs neither
inline PTX nor operands in registers: `fragments.codes_of_words` stands in for this there. tests/kernels/
test_fragments.py runs the PTX, and compares where each code goes with where JAX's own layout has it.
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

AND_XOR, AND_OR = "0x6A", "0xEA"  # of lop3: (a & b) ^ c, (a & b) | c


def pair_ptx(codes: str, part: int, dtype: str) -> str:
    """PTX that makes two floats in $0 of what lies at the `part`-th code of both halves of the word $1.

    int4 and float16 of int8: offset by 8 or 128 a code is a natural number, and adds itself when put into the low bits
      of a float that is 128 (bfloat16) or 1024; the offset and that number are subtracted.
    bfloat16 of int8: seven bits find room beside 128; the eighth makes 256 of another 128, which is subtracted.
    float8: its bits are moved to where the float has its own, and the exponents' bias corrected by a product. No NaN.
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
    """The row of an operand's first 64, and the word of a row, that a warpgroup's thread begins to read at."""
    return thread // 32 * 16 + thread % 32 // 4, thread % 4 * 4


def tile_of(word: int, part: int, bits: int) -> int:
    """Which eight inputs, counted from those of the first word, a word's pair belongs to."""
    return parts(bits) * word + part


def load_operand(words: Any, rows: int, piece: int, pieces: int, codes: jnp.dtype, dtype: jnp.dtype) -> jax.Array:
    """From words int32 [rows, WORDS] in shared memory, as they are in global memory: the codes [rows, inputs] in
    `dtype` as wgmma's first operand, of one of 1, 2 or 4 pieces that the chunk's inputs are cut into."""
    bits, size = jax.dtypes.itemsize_bits(codes), 4 // pieces  # words of a thread
    inputs = 32 // bits * WORDS // pieces
    names = jnp.dtype(codes).name, jnp.dtype(dtype).name

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((rows, inputs), dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, source: Any) -> mgpu.FragmentedArray:
        i32, layout = ir.IntegerType.get_signless(32), mgpu.WGMMA_LAYOUT
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
    """`address` of this thread, as instructions."""
    thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
    of_warp = arith.muli(arith.divui(thread, utils.c(32, i32)), utils.c(16, i32))
    of_lane = arith.divui(arith.remui(thread, utils.c(32, i32)), utils.c(4, i32))
    return arith.addi(of_warp, of_lane), arith.muli(arith.remui(thread, utils.c(4, i32)), utils.c(4, i32))
