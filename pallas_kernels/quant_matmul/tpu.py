"""Matmul with quantized weights on TPU (Mosaic). Weights are read in their stored form and dequantized in VMEM.

Grid: (token tiles, output tiles, input tiles), the inputs innermost. Products are accumulated in float32 in scratch.
  The grouped variant's grid is (output tiles, work items, input tiles). A work item is a token tile and an expert that
  has rows in it; `_work_items` lists them in SMEM.
Traffic: codes and scales once per token tile, x once per output tile, the result once. Up to 64 tokens are one token
  tile, so each weight is read once. Scales are transposed to [groups, out], which is XLA's own layout of them anyway.
  XLA first converts float16 scales to float32, since Mosaic loads no float16.
Pipeline: pallas_call's double buffering. For few tokens, whose limit is the DMA, tiles have about 1 MiB of codes.
  Otherwise the MXU is the limit, and tiles are 512 x 1024 x 1024.

Dequantization, by `Plan.scaling`:
  "parts"    few tokens: each group's partial product is scaled, in float32. Groups of less than 128 inputs share one
             MXU pass: x is fed once per group, with the other groups' inputs set to zero.
  "weights"  many tokens: codes * scale is computed in float32 and rounded to x's dtype.
  "end"      many tokens and one scale per output: the sum is scaled.
`tpu_codes.numbers` converts codes. Where its numbers are too small by a factor, the scales in VMEM are larger by it.
Zero points and biases never touch the weights: sums start with (sums of x over groups) @ (bias - zero * scale).

Compiled for v5e and v6e, interpreted on CPU; not yet run on a TPU.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.quant_matmul.tpu_codes import numbers
from jaxserve.pallas_kernels.quant_matmul.tpu_plan import FEW_TOKENS, LANES, TOKENS, Plan, make_plan
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.tpu_dma import aligned, block
from jaxserve.pallas_kernels.types import QuantArray

OUTS_STEP = 256  # outputs of a tile that are multiplied at a time, which bounds the size of the program
VMEM_LIMIT = 48 << 20
CODES = ("int4", "int8", "float8_e4m3fn", "float4_e2m1fn")
FINITE = ("int4", "int8", "float4_e2m1fn")  # of others, what lies beyond the inputs may be NaN, and NaN * 0 is NaN


def why_not(device: Device, problem: MatmulProblem) -> str | None:
    """Returns the reason why this kernel cannot run the problem on the device, or None where it can."""
    if device.platform != "tpu":
        return f"Mosaic TPU kernels run on TPUs, this is a {device.platform} device"
    if any(old in device.kind for old in ("v2", "v3", "v4")):
        return f"its tiles need more than the 16 MiB of VMEM of a {device.kind}; v5e, v5p and v6e are supported"
    codes = jnp.dtype(problem.codes_dtype).name
    x = jnp.dtype(problem.x_dtype).name
    if codes not in CODES:
        return f"codes must be one of {', '.join(CODES)}, these are {codes}"
    if x not in ("bfloat16", "float16", "float32"):
        return f"x must be bfloat16, float16 or float32, it is {x}"
    rows, inputs = problem.block
    if inputs < problem.inputs and not (inputs in (16, 32, 64) or (inputs % LANES == 0 and inputs <= 1024)):
        return f"groups must have 16, 32, 64 or a multiple of 128 up to 1024 inputs, or all; they have {inputs}"
    if 1 < rows < problem.rows and not (LANES % rows == 0 or (rows % LANES == 0 and rows <= 1024)):
        return f"blocks must have 1 output, a divisor of 128, a multiple of it up to 1024, or all; they have {rows}"
    return None


def quant_matmul(x: jax.Array, w: QuantArray, *, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] @ dequantized w [out, in].T -> float32 [tokens, out]. `count` is ignored."""
    del count
    return dense_call(x, w, make_plan(w, x.dtype, min(_padded(x.shape[0]), TOKENS)))


@partial(jax.jit, static_argnames="plan")
def dense_call(x: jax.Array, w: QuantArray, plan: Plan) -> jax.Array:
    tokens = x.shape[0]
    out = w.shape[0]
    x = _kernel_input(x)
    side = _side_inputs(w, plan)
    sums = _group_sums(x, plan)
    grid = (pl.cdiv(x.shape[0], plan.tokens), pl.cdiv(out, plan.outs), plan.in_tiles)
    result = jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32)
    return pl.pallas_call(
        partial(_dense_kernel, plan),
        grid=grid,
        in_specs=[
            block(x, (plan.tokens, plan.ins), lambda i, j, k: (i, k)),
            block(w.codes, (plan.outs, plan.ins), lambda i, j, k: (j, k)),
            *(_side_spec(array, plan, lambda i, j, k: (0, j)) for array in side),
            *(block(array, (plan.tokens, plan.groups), lambda i, j, k: (i, 0)) for array in sums),
        ],
        out_specs=block(result, (plan.tokens, plan.outs), lambda i, j, k: (i, j)),
        out_shape=result,
        scratch_shapes=_scratch(plan),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=_cost(x, w),
        name="quant_matmul",
    )(x, w.codes, *side, *sums)[:tokens]


def _dense_kernel(plan: Plan, x, codes, *refs):
    *side, out, total, scales = refs
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
        _begin(plan, side, scales, total)

    _accumulate(plan, k, x, codes, scales, total)

    @pl.when(k == plan.in_tiles - 1)
    def _():
        out[...] = _finish(plan, total, scales)


def grouped_quant_matmul(x: jax.Array, w: QuantArray, group_sizes: jax.Array) -> jax.Array:
    """Rows of x [tokens, in], sorted by expert, each times its expert's dequantized weight -> float32 [tokens, out].

    w has a leading dimension of experts. group_sizes: int32 [experts], rows of each; rows beyond their sum give 0.
    """
    # A tile has the average size of an expert's share: a tile of several experts is multiplied once for each of them.
    share = max(pl.next_power_of_2(pl.cdiv(x.shape[0], w.shape[0])), 16)
    return grouped_call(x, w, group_sizes, make_plan(w, x.dtype, min(_padded(x.shape[0]), share, TOKENS)))


@partial(jax.jit, static_argnames="plan")
def grouped_call(x: jax.Array, w: QuantArray, group_sizes: jax.Array, plan: Plan) -> jax.Array:
    tokens = x.shape[0]
    out = w.shape[1]
    x = _kernel_input(x)
    side = _side_inputs(w, plan)
    sums = _group_sums(x, plan)
    items = _work_items(group_sizes, x.shape[0], plan.tokens)

    def step(item, k, start, stop):
        """The input tile to fetch. Items without work stay on the last one, so that nothing is fetched for them."""
        return jnp.where(start[item] < stop[item], k, plan.in_tiles - 1)

    def x_index(j, item, k, expert, tile, start, stop):
        return tile[item], step(item, k, start, stop)

    def codes_index(j, item, k, expert, tile, start, stop):
        return expert[item], j, step(item, k, start, stop)

    result = jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32)
    return pl.pallas_call(
        partial(_grouped_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(pl.cdiv(out, plan.outs), items[0].shape[0], plan.in_tiles),
            in_specs=[
                block(x, (plan.tokens, plan.ins), x_index),
                block(w.codes, (None, plan.outs, plan.ins), codes_index),
                *(_side_spec(array, plan, lambda j, item, k, expert, *_: (expert[item], j)) for array in side),
                *(
                    block(array, (plan.tokens, plan.groups), lambda j, item, k, _, tile, *__: (tile[item], 0))
                    for array in sums
                ),
            ],
            out_specs=block(result, (plan.tokens, plan.outs), lambda j, item, k, expert, tile, *_: (tile[item], j)),
            scratch_shapes=_scratch(plan),
        ),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=_cost(x, w),
        name="grouped_quant_matmul",
    )(*items, x, w.codes, *side, *sums)[:tokens]


def _grouped_kernel(plan: Plan, expert, tile, start, stop, x, codes, *refs):
    *side, out, total, scales = refs
    item = pl.program_id(1)
    k = pl.program_id(2)

    @pl.when(start[item] < stop[item])
    def _():
        @pl.when(k == 0)
        def _():
            _begin(plan, side, scales, total)

        _accumulate(plan, k, x, codes, scales, total)

    @pl.when(k == plan.in_tiles - 1)
    def _():
        first = (item == 0) | (tile[item] != tile[jnp.maximum(item - 1, 0)])
        row = tile[item] * plan.tokens + lax.broadcasted_iota(jnp.int32, out.shape, 0)
        others = jnp.where(first, 0.0, out[...])
        out[...] = jnp.where((row >= start[item]) & (row < stop[item]), _finish(plan, total, scales), others)


def _work_items(sizes: jax.Array, tokens: int, tile_tokens: int) -> tuple[jax.Array, ...]:
    """Expert, token tile, first row and end of rows of each work item, int32 [items]. Tiles do not decrease.

    Rows beyond the last expert's rows get items too, with `start` not below `stop`. These items only write zeros.
    """
    experts = sizes.shape[0]
    count = pl.cdiv(tokens, tile_tokens) + experts
    ends = jnp.append(jnp.cumsum(sizes.astype(jnp.int32)), jnp.int32(tokens))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tiles = jnp.where(ends > starts, (ends + tile_tokens - 1) // tile_tokens - starts // tile_tokens, 0)
    item_ends = jnp.cumsum(tiles)
    item = jnp.arange(count, dtype=jnp.int32)
    chosen = jnp.minimum(item, item_ends[-1] - 1)
    group = jnp.searchsorted(item_ends, chosen, side="right", method="compare_all").astype(jnp.int32)
    tile = starts[group] // tile_tokens + chosen - (item_ends - tiles)[group]
    idle = (group == experts) | (item > chosen)
    last_expert = jnp.max(jnp.where(sizes > 0, jnp.arange(experts, dtype=jnp.int32), 0))
    start = jnp.where(idle, tokens, starts[group])
    return jnp.where(idle, last_expert, group), tile, start, jnp.where(idle, tokens, ends[group])


def _padded(tokens: int) -> int:
    """Pads few tokens to a multiple of 16, which fills bfloat16 registers."""
    return tokens + (-tokens % 16 if tokens <= FEW_TOKENS else 0)


def _kernel_input(x: jax.Array) -> jax.Array:
    """Returns x padded, in a dtype that Mosaic loads."""
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
    return jnp.pad(x, ((0, _padded(x.shape[0]) - x.shape[0]), (0, 0)))


def _side_inputs(w: QuantArray, plan: Plan) -> list[jax.Array]:
    """Scale, and zero, bias and gain if present: [experts or 1, output tiles or 1, groups, outs or row blocks].

    With `plan.outs_first`: [experts or 1, 1, outs, groups], except the gain [experts or 1, 1, 1, outs], which XLA would
    pad to 128 lanes for each output.
    """

    def arrange(array: jax.Array) -> jax.Array:
        array = array.astype(jnp.float32) if array.dtype == jnp.float16 else array
        array = array[None] if array.ndim == 2 else array
        if plan.outs_first:
            return array[:, None]
        if plan.rows == 1 or array.shape[1] == 1:
            return jnp.swapaxes(array, 1, 2)[:, None]
        per_tile = pl.cdiv(plan.outs, plan.rows)
        array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % per_tile), (0, 0)))
        return jnp.swapaxes(array.reshape(array.shape[0], -1, per_tile, array.shape[2]), 2, 3)

    gain = [] if w.gain is None else [jnp.swapaxes(w.gain.reshape(-1, *w.gain.shape[-2:]), 1, 2)[:, None]]
    return [arrange(array) for array in (w.scale, w.zero, w.bias) if array is not None] + gain


def _side_spec(array: jax.Array, plan: Plan, index) -> pl.BlockSpec:
    """The block of one array of `_side_inputs`. `index` maps the grid to an expert and an output tile."""
    _, tiles, groups, width = array.shape
    if plan.outs_first and groups > 1:  # not the gain
        shape, place = (None, None, plan.outs, width), lambda expert, j: (expert, 0, j, 0)
    elif plan.rows == 1:
        shape, place = (None, None, groups, plan.outs), lambda expert, j: (expert, 0, 0, j)
    else:
        shape, place = (None, None, groups, width), lambda expert, j: (expert, j if tiles > 1 else 0, 0, 0)
    return block(array, shape, lambda *grid: place(*index(*grid)))


def _scratch(plan: Plan) -> list:
    """Float32 sums [tokens, outs], and scales [input tiles, groups in a tile, outs]."""
    return [pltpu.VMEM(shape, jnp.float32) for shape in ((plan.tokens, plan.outs), plan.scratch_shape)]


def _group_sums(x: jax.Array, plan: Plan) -> list[jax.Array]:
    """The sum of x over each group, float32 [tokens, groups], if zero or bias need it."""
    if not plan.has_offset:
        return []
    # A product with ones and zeros: to reshape x to groups, XLA would rearrange it in memory.
    group = lax.div(lax.broadcasted_iota(jnp.int32, (plan.groups, plan.inputs), 1), plan.group)
    own = group == lax.broadcasted_iota(jnp.int32, group.shape, 0)
    return [_dot(x, own.astype(jnp.float32).astype(x.dtype))]


def _begin(plan: Plan, side, scales, total) -> None:
    """Fills the scratch of scales, and starts the sums with the contribution of zero and bias."""
    count = 1 + plan.has_zero + plan.has_bias
    arrays = [_expand(plan, ref[...].astype(jnp.float32)) for ref in side[:count]]
    scale = arrays[0]
    if plan.has_gain:
        scale *= side[count][...]
    for tile in range(scales.shape[0]):
        first = tile * plan.tile_groups
        count = min(plan.tile_groups, plan.groups - first)
        scales[tile, :count] = scale[first : first + count] * plan.factor
        if count < scales.shape[1]:
            scales[tile, count:] = jnp.zeros((scales.shape[1] - count, plan.outs), jnp.float32)
    if not plan.has_offset:
        total[...] = jnp.zeros_like(total)
        return
    offset = arrays[-1] if plan.has_bias else jnp.zeros_like(scale)
    if plan.has_zero:
        offset -= arrays[1] * scale
    sums = side[-1][...]
    if plan.groups == 1:
        total[...] = sums * offset
    elif not plan.rounds:
        total[...] = jnp.dot(sums, offset, precision=lax.Precision.HIGHEST)
    else:
        (sums, low_sums), (offset, low_offset) = _split(sums), _split(offset)
        left = jnp.concatenate([sums, low_sums, sums], 1)
        right = jnp.concatenate([offset, offset, low_offset])
        total[...] = jnp.dot(left, right, preferred_element_type=jnp.float32, precision=lax.Precision.DEFAULT)


def _split(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits float32 into a sum of two bfloat16."""
    high = array.astype(jnp.bfloat16)
    return high, (array - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _expand(plan: Plan, array: jax.Array) -> jax.Array:
    """Repeats [groups, row blocks] to [groups, outs]."""
    if plan.outs_first:
        return array.T
    if plan.rows == 1:
        return array
    if array.shape[1] == 1:
        return jnp.broadcast_to(array, (array.shape[0], plan.outs))
    block = lax.broadcasted_iota(jnp.int32, (array.shape[1], plan.outs), 0)
    column = lax.broadcasted_iota(jnp.int32, (array.shape[1], plan.outs), 1)
    return jnp.dot(array, (column // plan.rows == block).astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _accumulate(plan: Plan, k, x, codes, scales, total) -> None:
    """Adds this input tile's part of the result, OUTS_STEP outputs at a time. With "end" it is not scaled yet."""
    left = plan.inputs - k * plan.ins  # inputs from this tile's first to the end; may be less than a tile
    tile = 0 if plan.groups == 1 else k
    product = {"parts": _parts, "weights": _scaled_weights, "end": _plain_weights}[plan.scaling]
    step = OUTS_STEP if plan.outs % OUTS_STEP == 0 else plan.outs

    def add(n, carry):
        outs = pl.ds(aligned(n * step, step), step)
        total[:, outs] += product(plan, left, x, codes.at[outs], scales.at[tile, :, outs])
        return carry

    if step == plan.outs:
        add(0, 0)
    else:
        lax.fori_loop(0, plan.outs // step, add, 0)


def _plain_weights(plan: Plan, left, x, codes, scales) -> jax.Array:
    """The product for many tokens, float32 [tokens, outs], not scaled."""
    weights = _inside(plan, left, numbers(codes[...], x.dtype), only=codes.dtype.name not in FINITE)
    return _dot(_inside(plan, left, x[...]), weights)


def _scaled_weights(plan: Plan, left, x, codes, scales) -> jax.Array:
    """The product for many tokens, float32 [tokens, outs]. The MXU repeats scales for each input: it multiplies them
    by a matrix of ones and zeros.
    """
    weights = _inside(plan, left, numbers(codes[...], jnp.float32), only=codes.dtype.name not in FINITE)
    if plan.groups == 1:
        weights *= scales[...].T[:, :1]
    else:
        scale = scales[...]  # [groups, outs]
        if plan.rounds:  # weights are rounded to bfloat16, so scales need only twice its bits
            scale = jnp.concatenate(_split(scale))
        group = lax.broadcasted_iota(jnp.int32, (scale.shape[0], plan.ins), 0) % scales.shape[0]
        own = lax.broadcasted_iota(jnp.int32, group.shape, 1) // plan.group == group
        weights *= _dot(scale, own.astype(jnp.float32).astype(x.dtype), contract=0)
    return _dot(_inside(plan, left, x[...]), weights.astype(x.dtype))


def _inside(plan: Plan, left, tile: jax.Array, only: bool = True) -> jax.Array:
    """Returns the tile [_, inputs] with zeros beyond the `left` inputs that exist, if `only` holds."""
    if not (plan.ragged and only):
        return tile
    return jnp.where(lax.broadcasted_iota(jnp.int32, tile.shape, 1) < left, tile, jnp.zeros_like(tile))


def _dot(a: jax.Array, b: jax.Array, contract: int = 1) -> jax.Array:
    """Multiplies a [tokens, inputs] by b [outs, inputs] in float32, over dimension `contract` of both."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _parts(plan: Plan, left, x, codes, scales) -> jax.Array:
    """The product for few tokens: scaled partial products of groups, summed to float32 [tokens, outs]."""
    total = jnp.zeros((plan.tokens, codes.shape[0]), jnp.float32)
    width = LANES if plan.group < LANES else 512 if plan.groups == 1 else math.gcd(plan.group, 512)
    for start in range(0, plan.ins, width):
        stop = min(start + width, plan.ins)
        piece = _inside(plan, left - start, x[:, start:stop])
        weights = numbers(codes[:, start:stop], x.dtype)
        weights = _inside(plan, left - start, weights, only=codes.dtype.name not in FINITE)
        first = start // plan.group
        end = -(-stop // plan.group)
        if end - first > 1:
            group = lax.broadcasted_iota(jnp.int32, piece.shape, 1) // plan.group
            piece = jnp.concatenate([jnp.where(group == n, piece, jnp.zeros_like(piece)) for n in range(end - first)])
        part = _dot(piece, weights)
        for n in range(end - first):
            total += part[n * plan.tokens : (n + 1) * plan.tokens] * scales[first + n : first + n + 1]
    return total


def _finish(plan: Plan, total, scales) -> jax.Array:
    return total[...] * scales[0, :1] if plan.scaling == "end" else total[...]


def _cost(x: jax.Array, w: QuantArray) -> pl.CostEstimate:
    tokens, (out, inputs) = x.shape[0], w.shape[-2:]
    read = sum(array.size * jax.dtypes.itemsize_bits(array.dtype) // 8 for array in jax.tree.leaves((x, w)))
    return pl.CostEstimate(flops=2 * tokens * out * inputs, bytes_accessed=read + 4 * tokens * out, transcendentals=0)
