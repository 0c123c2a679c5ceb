"""The activation of a gated MLP at the end of Hopper's product, in registers, in Mosaic GPU.

Gates and ups alternate along the outputs. In the layout in which the product is stored, a register of a thread holds
two neighbouring outputs of a token, which are a gate and its up. So each thread computes activation(gate) * up of its
own registers, and stores half as many numbers. It rounds where the plain operations round, and `ACTIVATIONS` are the
instructions of Triton's `fused_triton.gate`, so that both give the same bits (tests/kernels/test_mosaic_gate.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxserve.pallas_kernels.ops import ACTIVATIONS as PLAIN

# PTX that computes an activation $0 of $1, both float32. Constants are 0f and their bits.
_OF_SIGMOID = "ex2.approx.f32 t, t; add.f32 t, t, 0f3F800000; div.full.f32 t, 0f3F800000, t; mul.f32 $0, t, $1;"
ACTIVATIONS = {
    "silu": "mul.f32 t, $1, 0fBFB8AA3B; " + _OF_SIGMOID,
    "gelu_tanh": "mul.f32 t, $1, 0f3D372713; mul.f32 t, t, $1; fma.rn.f32 t, t, $1, $1; mul.f32 t, t, 0fBFCC422A; "
    "mul.f32 t, t, 0f3FB8AA3B; " + _OF_SIGMOID,
}

# As WGMMA_TRANSPOSED, for half the rows: a thread's registers hold one number each.
HALVED = plgpu.Layout.TILED(
    Tiling(((32, 8), (8, 8), (4, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -2, -3), vector_dim=-1
)


def gated(product: jax.Array, activation: str, interpret: Any) -> jax.Array:
    """Gates and ups in turn [2 * outputs, tokens], in the layout WGMMA_TRANSPOSED -> activation(gate) * up [outputs,
    tokens] in the same dtype. JAX's interpreter runs no inline PTX."""
    (both, tokens), dtype = product.shape, product.dtype
    if interpret is not None:
        gate, up = (product.reshape(both // 2, 2, tokens)[:, i].astype(jnp.float32) for i in range(2))
        return (PLAIN[activation](gate).astype(dtype).astype(jnp.float32) * up).astype(dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_TRANSPOSED,),
        return_type=plgpu.ShapeDtypeStruct((both // 2, tokens), dtype, layout=HALVED),
    )
    def compute(_: Any, pairs: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = HALVED.to_mgpu()
        narrow = utils.dtype_to_ir_type(dtype)
        f32 = ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        single = ir.VectorType.get((1,), narrow)
        registers = np.empty(layout.registers_shape((both // 2, tokens)), dtype=object)

        def wide(value: Any) -> Any:
            return arith.extf(f32, value)

        for i, pair in enumerate(pairs.registers.flat):
            gate, up = (llvm.extractelement(pair, utils.c(half, i32)) for half in range(2))
            text = f"{{ .reg .f32 t; {ACTIVATIONS[activation]} }}"
            activated = llvm.inline_asm(f32, [wide(gate)], text, "=f,f")
            assert isinstance(activated, ir.Value)
            value = arith.mulf(wide(arith.truncf(narrow, activated)), wide(up))
            registers.flat[i] = vector.broadcast(single, arith.truncf(narrow, value))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return compute(product)
