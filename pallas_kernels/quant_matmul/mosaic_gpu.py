"""Products with quantized weights on NVIDIA Hopper, in Pallas Mosaic GPU. Compiled for the H200, not yet run on one.

The kernel computes the transpose, [out, tokens] = W [out, in] x^T. The weight is then wgmma's first operand, which may
come from registers: codes are loaded from shared memory to registers and converted there to the dtype of x.

  grid      (tiles of outputs, tiles of N tokens, splits of the inputs). A program is one warpgroup of M outputs. From 9
            to 64 tokens it may have two or three computing warpgroups that share x, and one that fetches for them. Two
            such programs share copies of x: each reads half of it and sends that to both (a cluster)
  pipeline  `stages` slots with each warpgroup's codes [M, K] and x [N, K], filled by TMA. A slot is refilled when its
            products are done. Two warpgroups or more share a multiprocessor, in one program or in several, so that one
            converts while another multiplies or waits
  traffic   codes once per tile of tokens, x once per tile of outputs (from L2), results once per split: in float32, or
            in the dtype of x where there is one split and the caller asks for it
  sizes     estimated, see `mosaic_plan`

One scale per row multiplies the sum. With groups, each group's product has an accumulator of its own, which is scaled
in float32 and added to the total. Neighbouring threads exchange results, so that they are stored by token. Zero points
and biases are constant within a group, so they multiply the group's sum of x in a small product outside the kernel.
Splits of the inputs keep all multiprocessors busy when there are few outputs; XLA adds them in a fixed order. With
experts, XLA lists the tiles of tokens, each of one expert. From about 500 tokens on, weights are dequantized first
(`dequantized`) if Triton is installed. The product of an MLP's gates and ups ends with the activation (`mosaic_gate`).
Weights that are not quantized can be multiplied for that: both operands then come from shared memory.

Integer codes are shuffled when they are loaded (`fragments`), so that a thread reads 16 bytes of its own at once. Other
codes, and shapes that cannot be shuffled, are read byte by byte. Instructions per scheduler for 128 x 128 weights in
groups of 128 and 1, 16, 64 tokens, by the machine code: int4 449, 469, 517 (shuffled 298, 307, 376); int8 528, 556, 526
(394, 396, 394); float8 417, 450, 414. Where warpgroups share x, a computing one takes 274, 291, 326 for int4 at 16, 32,
64 tokens and 322 for int8 at 64; the fetching one takes about 37 for each. Memory delivers these weights in 440 cycles
(int4) or 880. Estimate for a layer of Llama 3 8B in int4 at 16, 32, 64 tokens: 27, 33, 48 us (32, 44, 72 without
sharing x). Memory needs 25 us; the matrix unit needs 29 us for 64 tokens of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.quant_matmul import fragments, mosaic_gate
from jaxserve.pallas_kernels.quant_matmul.mosaic_fragments import load_operand
from jaxserve.pallas_kernels.quant_matmul.mosaic_plan import SWIZZLE_BITS, Plan, divided, measured, plan, step_size
from jaxserve.pallas_kernels.quant_matmul.reference import expand, per_row
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import QuantArray
from jaxserve.pallas_kernels.work_lists import expert_tiles

dequantized: Any
try:  # needs Triton
    from jaxserve.pallas_kernels.quant_matmul import dequantized
except ImportError:
    dequantized = None

HIGHEST = lax.Precision.HIGHEST


def why_not(device: Device, problem: MatmulProblem) -> str | None:
    if device.platform != "gpu" or device.capability != (9, 0):
        return "it needs an NVIDIA GPU of compute capability 9.0 (Hopper)"
    if problem.x_dtype not in (jnp.bfloat16, jnp.float16):
        return f"activations must be bfloat16 or float16, not {problem.x_dtype}"
    floats = problem.codes_dtype == problem.x_dtype and why_not_gated(problem) is None
    if problem.codes_dtype not in (jnp.int4, jnp.int8, jnp.float8_e4m3fn) and not floats:
        return f"codes must be int4, int8 or float8_e4m3fn, not {problem.codes_dtype}"
    if problem.rows < 64 or problem.rows % 8:
        return f"the number of outputs must be a multiple of 8 and 64 or more, not {problem.rows}"
    bits = jax.dtypes.itemsize_bits(problem.codes_dtype)
    if problem.inputs % (SWIZZLE_BITS // bits):
        return f"the number of inputs must be a multiple of {SWIZZLE_BITS // bits}, not {problem.inputs}"
    if problem.shuffled:
        return fragments.why_not(problem.inputs, problem.block[1], problem.codes_dtype)
    if step_size(problem.inputs, problem.block[1], bits, 128) is None:
        return f"groups must be multiples of 32 inputs that meet at multiples of 64 or 128, not {problem.block[1]}"
    return None


def quant_matmul(
    x: jax.Array, w: QuantArray, *, count: jax.Array | None = None, direct: bool = False, interpret: Any = None
) -> jax.Array:
    """x [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out].

    `count` is ignored. `direct`: no weight is dequantized first. `interpret`: plgpu.InterpretGPUParams of JAX 0.11.2 or
    newer, to run without a GPU.
    """
    if not direct and interpret is None and _dequantizes(x, w):
        return dequantized.product(x, w, jnp.float32)
    y = _product(x, w, jnp.float32, interpret).sum(0)
    if w.zero is not None or w.bias is not None:
        y = y + _constant_part(x, w, lambda sums, constant: jnp.matmul(sums, constant.T, precision=HIGHEST))
    return y


def quant_matmul_parts(
    x: jax.Array, w: QuantArray, *, count: jax.Array | None = None, direct: bool = False, interpret: Any = None
) -> jax.Array:
    """The product as `operands.Partials.sums`: float32 for each split of the inputs, or one part in the dtype of x."""
    if not direct and interpret is None and _dequantizes(x, w):
        return dequantized.product(x, w, x.dtype)[None]
    if w.zero is not None or w.bias is not None:
        return quant_matmul(x, w, count=count, direct=direct, interpret=interpret).astype(x.dtype)[None]
    return _product(x, w, x.dtype, interpret)


def gated_matmul(x: jax.Array, w: QuantArray, activation: str, *, interpret: Any = None) -> jax.Array:
    """activation(gate) * up [tokens, out / 2] in the dtype of x, of the product of x with a weight whose outputs are
    gates and ups in turn. The inputs are not split, and no weight is dequantized first. See `why_not_gated`."""
    return _product(x, w, x.dtype, interpret, activation)[0]


def why_not_gated(problem: MatmulProblem) -> str | None:
    """Returns why the activation of a gated MLP cannot join this product (`MatmulProblem.activation`), or None."""
    if problem.activation not in mosaic_gate.ACTIVATIONS:
        return f"the activation must be one of {', '.join(mosaic_gate.ACTIVATIONS)}, not {problem.activation}"
    constant = problem.has_zero or problem.has_bias
    return "zero points and biases are added to the sums afterwards" if constant else None


def suits_gate(x: jax.Array, w: QuantArray, *, direct: bool = False) -> bool:
    """Whether `gated_matmul` computes its product as `quant_matmul_parts` does: neither are the inputs split, nor is
    the weight dequantized first."""
    return _plan(x, w).splits == 1 and (direct or not _dequantizes(x, w))


def _dequantizes(x: jax.Array, w: QuantArray) -> bool:
    """Whether the weight should be dequantized first. See `dequantized`."""
    if dequantized is None:
        return False
    out, inputs = w.shape
    tuned = measured(len(x), (out, inputs), w.block, jax.dtypes.itemsize_bits(w.codes.dtype))
    return dequantized.pays(len(x), x.dtype, w, tuned.get("dequantize"))


def _plan(x: jax.Array, w: QuantArray, whole: bool = False) -> Plan:
    out, inputs = w.shape
    return plan(len(x), (out, inputs), w.block, jax.dtypes.itemsize_bits(w.codes.dtype), w.shuffled, whole)


def _product(x: jax.Array, w: QuantArray, dtype: jnp.dtype, interpret: Any, activation: str | None = None) -> jax.Array:
    """x times codes and scales, as parts [splits, tokens, out]: float32, or `dtype` for a single part. With an
    activation there is a single part, whose outputs become those of a gated MLP [1, tokens, out / 2]."""
    sizes = _plan(x, w, whole=activation is not None)
    padded = jnp.pad(x, ((0, -len(x) % sizes.n), (0, 0)))
    one = jax.tree.map(lambda array: array[None], w)
    dtype = jnp.float32 if sizes.splits > 1 else dtype
    return _call(sizes, one, padded, len(padded) // sizes.n, dtype, interpret, activation=activation)[:, : len(x)]


def grouped_quant_matmul(x: jax.Array, w: QuantArray, group_sizes: jax.Array, *, interpret: Any = None) -> jax.Array:
    """As `reference.grouped_quant_matmul`: rows of x, sorted by expert, each times its expert's weight.

    A tile has tokens of one expert, and room for the average number of tokens of an expert.
    """
    tokens, (experts, out, inputs) = len(x), w.shape
    bits = jax.dtypes.itemsize_bits(w.codes.dtype)
    sizes = plan(-(-tokens // experts), (out, inputs), w.block, bits, w.shuffled)
    items, column = expert_tiles(group_sizes, tokens, sizes.n)
    sizes = divided(sizes, (out, inputs), len(items), bits, sizes.n <= 64, {}, most=1)
    padded = jnp.pad(x, ((0, sizes.n + -tokens % 8), (0, 0)))  # to whole tiles of eight rows, which copies require
    y = _call(sizes, w, padded, len(items), jnp.float32, interpret, items).sum(0)[column]
    owner = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(tokens), side="right", method="compare_all")
    if w.zero is not None or w.bias is not None:

        def multiply(sums, constant):
            constant = constant.swapaxes(1, 2)
            return lax.ragged_dot(sums, constant, group_sizes, precision=HIGHEST, preferred_element_type=jnp.float32)

        y = y + _constant_part(x, w, multiply)
    return jnp.where((owner < experts)[:, None], y, 0.0)


def _drop_repeated(y: jax.Array, m: int, out: int) -> jax.Array:
    """[splits, tokens, tiles * m] -> [splits, tokens, out], without the outputs that the last tile computed again."""
    if y.shape[2] == out:
        return y
    whole = out // m * m
    return jnp.concatenate([y[:, :, :whole], y[:, :, whole - out :]], axis=2)


def _constant_part(x: jax.Array, w: QuantArray, multiply: Callable[..., jax.Array]) -> jax.Array:
    """The contribution of zero points and biases [tokens, out]: the sum of x over each group [tokens, groups] times the
    group's constant [..., blocks of rows, groups]."""
    (out, inputs), groups = w.shape[-2:], w.scale.shape[-1]
    constant = jnp.zeros(w.scale.shape, jnp.float32)
    if w.zero is not None:
        constant -= w.zero.astype(jnp.float32) * w.scale.astype(jnp.float32)
    if w.bias is not None:
        constant += w.bias.astype(jnp.float32)
    group = min(w.block[1], inputs)
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, groups * group - inputs)))
    sums = wide.reshape(len(x), groups, group).sum(-1)
    return expand(multiply(sums, constant), (1, w.block[0]), (len(x), out))


@partial(jax.jit, static_argnames=("sizes", "columns", "dtype", "interpret", "activation"))
def _call(
    sizes: Plan, w: QuantArray, x: jax.Array, columns: int, dtype, interpret: Any, items: jax.Array | None = None,
    activation: str | None = None,
):  # fmt: skip
    """Launches the kernel: weights [experts, out, in] times `columns` tiles of x [tokens, in]. Returns parts of `dtype`
    [splits, columns * n, out], of an MLP that is gated by an activation [1, columns * n, out / 2]. `items` is from
    `expert_tiles`; without it tiles follow each other."""
    out = w.shape[1]
    floats = w.codes.dtype == x.dtype  # a weight that is not quantized, whose scale is 1
    if w.block[0] > 1 and (w.block[0] % sizes.m or out % sizes.outputs) and not floats:
        w = per_row(w)
    tiles = -(-out // sizes.outputs)
    several = sizes.warpgroups > 1
    each = 1 if activation is None else 2
    codes_bits = jax.dtypes.itemsize_bits(w.codes.dtype)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    slots = sizes.stages, sizes.warpgroups, sizes.m
    codes_smem = _tiles((*slots, sizes.k), w.codes.dtype, max(sizes.group * codes_bits, SWIZZLE_BITS))
    if w.shuffled:
        codes_smem = plgpu.SMEM((*slots, fragments.WORDS), jnp.int32)
    scratch = {
        "w_smem": codes_smem,
        "x_smem": _tiles((sizes.stages, sizes.n, sizes.k), x.dtype, sizes.group * bits),
        "full": plgpu.Barrier(num_arrivals=1 + sizes.warpgroups, num_barriers=sizes.stages),
    }
    if several:
        # A slot is free when the warpgroups of all programs that share x have read it.
        free: dict[str, Any] = {"num_arrivals": sizes.warpgroups, "num_barriers": sizes.stages}
        paired = sizes.cluster > 1
        scratch["free"] = plgpu.ClusterBarrier(collective_axes=("pair",), **free) if paired else plgpu.Barrier(**free)
    if interpret is not None and not floats:
        scratch["a_smem"] = _tiles((sizes.warpgroups, sizes.m, sizes.group), x.dtype, sizes.group * bits)
    given: dict[str, jax.Array] = {} if floats else {"scale_gmem": w.scale}
    if items is not None:
        given["items_gmem"] = items

    def body(w_gmem, x_gmem, *refs, **scratch):
        named = dict(zip(given, refs[:-1], strict=True))
        _kernel(w_gmem, x_gmem, refs[-1], sizes, w, interpret=interpret, activation=activation, **named, **scratch)

    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((sizes.splits, columns * sizes.n, tiles * sizes.outputs // each), dtype),
        grid=(tiles // sizes.cluster, columns, sizes.splits),
        grid_names=("outputs", "tokens", "split"),
        cluster=(sizes.cluster,) if sizes.cluster > 1 else (),
        cluster_names=("pair",) if sizes.cluster > 1 else (),
        num_threads=sizes.warpgroups + 1 if several else None,
        thread_name="warpgroup" if several else None,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="gated_matmul" if activation else "quant_matmul" if items is None else "grouped_quant_matmul",
    )(fragments.words(w.codes) if w.shuffled else w.codes, x, *given.values())
    return _drop_repeated(y, sizes.outputs // each, out // each)


def _tiles(shape: tuple[int, ...], dtype: jnp.dtype, row_bits: int):
    """Shared memory in the swizzled layout of wgmma and TMA. `row_bits`: bits of a row's smallest slice in use."""
    swizzle = plgpu.find_swizzle(row_bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // jax.dtypes.itemsize_bits(dtype)))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _kernel(w_gmem, x_gmem, out_gmem, sizes: Plan, w: QuantArray, scale_gmem=None, items_gmem=None, **scratch):
    column = lax.axis_index("tokens")
    if items_gmem is None:
        _tile(w_gmem, x_gmem, out_gmem, sizes, w, 0, column * sizes.n, scale_gmem, **scratch)
        return
    expert = items_gmem[column, 0]

    @pl.when(expert >= 0)
    def _():
        start = pl.multiple_of(items_gmem[column, 1], 8)
        _tile(w_gmem, x_gmem, out_gmem, sizes, w, expert, start, scale_gmem, **scratch)


def _tile(w_gmem, x_gmem, out_gmem, sizes: Plan, w: QuantArray, expert, token, scale_gmem, *,
          interpret, activation, full, free=None, w_smem, x_smem, a_smem=None):  # fmt: skip
    """A tile of outputs for n tokens from `token`, a multiple of eight. Only shapes and settings of w are used."""
    out = w.shape[1]
    # Where tiles do not divide the outputs, the last tile recomputes some outputs of the one before it.
    first = jnp.minimum(sizes.tile_of_program() * sizes.outputs, out - sizes.outputs)
    start, steps = sizes.steps_of(lax.axis_index("split"), w.shape[2])

    def fetch(step, slot):
        inputs = Span((start + step) * sizes.k, sizes.k, multiple=sizes.k)
        columns = inputs
        if w.shuffled:
            columns = Span((start + step) * fragments.WORDS, fragments.WORDS, multiple=fragments.WORDS)
        for group in range(sizes.warpgroups):
            weights = expert, Span(first + group * sizes.m, sizes.m, multiple=math.gcd(sizes.m, out)), columns
            hopper_rules.fetch(w_gmem, weights, w_smem, (slot, group), full.at[slot], interpret=interpret)
        tokens = Span(token, sizes.n, multiple=8), inputs
        shared = {"shared_by": "pair"} if sizes.cluster > 1 else {}
        hopper_rules.fetch(x_gmem, tokens, x_smem, (slot,), full.at[slot], interpret=interpret, **shared)

    def compute(group, done):
        """Computes a warpgroup's outputs. done(step, slot) is called when the slot has been read."""
        refs = out_gmem, scale_gmem, w_smem, x_smem, a_smem if a_smem is None else a_smem.at[group]
        place = expert, first + group * sizes.m, start, steps
        _compute(sizes, w, place, group, *refs, full, done, interpret, activation)

    if free is None:

        def refill(step, slot):
            @pl.when(step + sizes.stages < steps)
            def _():
                fetch(step + sizes.stages, slot)

        for step in range(sizes.stages):
            fetch(step, step)
        compute(0, refill)
        return

    group = lax.axis_index("warpgroup")

    @pl.when(group == sizes.warpgroups)
    def fetch_all():
        plgpu.set_max_registers(sizes.registers[0], action="decrease")

        def bring(step, _):
            slot = lax.rem(step, jnp.int32(sizes.stages))

            @pl.when(step >= sizes.stages)
            def await_slot():
                plgpu.barrier_wait(free.at[slot])

            fetch(step, slot)

        lax.fori_loop(0, steps, bring, None)
        for i in range(sizes.stages):  # waits for the remaining arrivals
            plgpu.barrier_wait(free.at[lax.rem(steps + i, jnp.int32(sizes.stages))])

    @pl.when(group < sizes.warpgroups)
    def compute_all():
        plgpu.set_max_registers(sizes.registers[1], action="increase")
        compute(group, lambda _, slot: plgpu.barrier_arrive(free.at[slot]))


def _compute(sizes: Plan, w: QuantArray, place, warpgroup, out_gmem, scale_gmem, w_smem, x_smem, a_smem, full, done,
             interpret, activation):  # fmt: skip
    """Writes the sums of m outputs from `first`, or what the activation makes of them, to global memory. place: expert,
    first, first step, steps."""
    (expert, first, start, steps), block, total_inputs = place, w.block, w.shape[2]
    rows = pl.ds(first, sizes.m)
    pieces = range(sizes.k // sizes.group)

    def shuffled_operand(slot, piece):
        """The codes of a piece, stored in fragments' order, in the dtype of x."""
        if interpret is None:
            return load_operand(w_smem.at[slot, warpgroup], sizes.m, piece, len(pieces), w.codes.dtype, x_smem.dtype)
        codes = fragments.codes_of_words(w_smem[slot, warpgroup], w.codes.dtype).astype(x_smem.dtype)
        return codes[:, piece * sizes.group : (piece + 1) * sizes.group]

    def multiply(acc, slot, piece):
        """acc += codes x^T for one piece of `group` inputs."""
        inputs = pl.ds(piece * sizes.group, sizes.group)
        if scale_gmem is None:
            a = w_smem.at[slot, warpgroup]
        elif w.shuffled:
            a = shuffled_operand(slot, piece)
        elif sizes.group * jax.dtypes.itemsize_bits(w_smem.dtype) >= SWIZZLE_BITS:
            a = _convert(w_smem[slot, warpgroup, :, inputs], x_smem.dtype)
        else:  # a row that is too short to be a slice of a tile
            a = _convert(w_smem[slot, warpgroup], x_smem.dtype)[:, piece * sizes.group : (piece + 1) * sizes.group]
        if a_smem is not None:  # the interpreter knows wgmma only with both operands in shared memory
            a_smem[...] = a
            plgpu.commit_smem()
            a = a_smem
        plgpu.wgmma(acc, a, plgpu.transpose_ref(x_smem.at[slot, :, inputs], (1, 0)))

    def scales_of(step):
        """The scales of each group of a step: one, or one for each output."""
        scales = []
        for piece in pieces:
            group = ((start + step) * sizes.k + piece * sizes.group) // block[1]
            if block[0] > 1:
                scales.append(scale_gmem[expert, first // block[0], group])
            else:
                scales.append(plgpu.load(scale_gmem, (expert, rows, group), optimized=False))
        return tuple(scales)

    def times(product, scale):
        scale = scale.astype(jnp.float32)
        return product * (lax.broadcast_in_dim(scale, product.shape, (0,)) if scale.shape else scale)

    def loop(body, total):
        """Runs body(step, slot, total) -> total for each step, once the slot's tiles are in shared memory."""

        def one(step, carry):
            slot, total = carry
            plgpu.barrier_wait(full.at[slot])
            total = body(step, slot, total)

            done(step, slot)
            return jnp.where(slot == sizes.stages - 1, 0, slot + 1), total

        return lax.fori_loop(0, steps, one, (jnp.int32(0), total))[1]

    acc_type = plgpu.ACC((sizes.m, sizes.n), jnp.float32)

    def whole(acc):
        def body(step, slot, total):
            for piece in pieces:
                multiply(acc, slot, piece)
            plgpu.wgmma_wait(0)
            return total

        loop(body, None)
        return acc[...]

    def grouped(step, slot, carry):
        total, scales = carry
        following = scales_of(jnp.minimum(step + 1, steps - 1))  # in flight during this step
        for piece in pieces:

            def product(acc, piece=piece):
                multiply(acc, slot, piece)
                return acc[...]

            total = total + times(pl.run_scoped(product, acc_type), scales[piece])
        return total, following

    if scale_gmem is None:
        result = pl.run_scoped(whole, acc_type)
    elif block[1] < total_inputs:
        zeros = jnp.zeros((sizes.m, sizes.n), jnp.float32)
        result, _ = loop(grouped, (zeros, scales_of(jnp.int32(0))))
    else:
        (scale,) = scales_of(jnp.int32(0))  # in flight during the loop
        result = times(pl.run_scoped(whole, acc_type), scale)
    # In this layout a thread holds neighbouring outputs of a token, which it stores together.
    result = plgpu.layout_cast(result.astype(out_gmem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    each = 1
    if activation is not None:
        each = 2
        result = mosaic_gate.gated(result, activation, interpret)
    outputs = sizes.tile_of_program() * (sizes.outputs // each) + warpgroup * (sizes.m // each)
    tokens = pl.ds(lax.axis_index("tokens") * sizes.n, sizes.n)
    place = out_gmem.at[lax.axis_index("split"), tokens, pl.ds(outputs, sizes.m // each)]
    plgpu.transpose_ref(place, (1, 0))[...] = result


def _convert(codes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts codes exactly to the dtype of x. Hopper converts float8 only to float16."""
    if codes.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:
        return codes.astype(jnp.float16).astype(jnp.float32).astype(dtype)
    return codes.astype(dtype)
