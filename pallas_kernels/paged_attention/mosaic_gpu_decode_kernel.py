"""The Hopper decode kernel. `mosaic_gpu_decode` launches it and explains it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxserve.pallas_kernels import hopper_rules
from jaxserve.pallas_kernels.hopper_rules import Span
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_fetch import (
    COLUMN,
    Arrays,
    Work,
    fetch,
    following,
    items_of,
    queries_of,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_gpu_decode_tile import DecodeTile
from jaxserve.pallas_kernels.paged_attention.reference import MASKED

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA


def kernel(tile: DecodeTile, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    """names: the fields of Arrays that the refs are, in order."""
    arrays = Arrays(**dict.fromkeys(Arrays._fields) | dict(zip(names, refs, strict=True)))
    program = lax.axis_index("program")
    group = lax.axis_index("warpgroup")
    items = items_of(tile, arrays, program)

    @pl.when(items.end > items.start)
    def _():
        # Each warpgroup reads the first item again. If it were read once, above, a kernel for codes would need more
        # registers than two programs on a multiprocessor allow.
        @pl.when(group == 1)
        def _():
            fetch(tile, arrays, items_of(tile, arrays, program), **scratch)

        @pl.when(group == 0)
        def _():
            _compute(tile, arrays, items_of(tile, arrays, program), **scratch)


class State(NamedTuple):
    """The running softmax over the keys seen so far."""

    values: Any  # float32 [head_dim, columns], relative to exp2(peak)
    peak: Any  # float32 [columns]
    total: Any  # float32 [block, columns] per key, [columns] at the end: sums of probabilities relative to exp2(peak)


def _across(x: jax.Array, rows: int) -> jax.Array:
    """Broadcasts [columns] to [rows, columns]."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def _start(tile: DecodeTile, rows: int) -> State:
    def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    total = full((rows, tile.columns), 0.0, WGMMA) if rows else full((tile.columns,), 0.0, COLUMN)
    return State(full((tile.head_dim, tile.columns), 0.0, WGMMA), full((tile.columns,), MASKED, COLUMN), total)


def _multiply(a: Any, b: Any, values: jax.Array | None = None) -> jax.Array:
    """Returns a @ b, added to `values` if given. b is in shared memory, and a too if it is a ref.

    `values` is only for compiled kernels: the interpreter does not support an accumulator with an initial value.
    """
    if values is not None:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(values))

    def accumulate(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _numbers(tile: DecodeTile, codes: Any) -> jax.Array:
    """Reads codes from shared memory and converts them exactly to the queries' dtype."""
    values = plgpu.load(codes, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if tile.codes != jnp.int8:
        values = values.astype(jnp.float16)
        values = values if tile.dtype == jnp.float16 else values.astype(jnp.float32)
    return values.astype(tile.dtype)


def _compute(tile, arrays, items, *, q_smem, q_full, q_free, **scratch):
    start, end, first = items
    counters = arrays.spans.shape[0] - arrays.length.shape[0] * tile.kv_heads  # where they begin

    def compute_item(item, carry):
        done, *columns = carry
        work = Work(*columns)
        turn = lax.rem(item - start, jnp.int32(2))
        next_work = following(tile, arrays, work)  # read long before it is needed
        plgpu.barrier_wait(q_full.at[turn])
        step = partial(_step, tile, work, done - work.first, q_smem.at[turn], **scratch)
        state = State(*lax.fori_loop(work.first, work.last, step, tuple(_start(tile, tile.block))))
        plgpu.barrier_arrive(q_free.at[turn])
        state = state._replace(total=state.total.sum(axis=0))

        @pl.when(work.parts == 1)
        def whole():
            _finish(tile, arrays, work, state, **scratch)

        @pl.when(work.parts > 1)
        def part():
            arrays.values.at[item][...] = state.values
            arrays.sums.at[item, 0][...] = state.peak
            arrays.sums.at[item, 1][...] = state.total
            counter = arrays.spans.at[pl.ds(counters + work.row * tile.kv_heads + work.head, 1)]
            before = _arrive(tile, counter, **scratch)

            @pl.when(before == work.parts - 1)
            def last():
                counter[0] = jnp.int32(0)
                _finish(tile, arrays, work, _merge(tile, arrays, work, item - work.part * tile.kv_heads), **scratch)

        return done + work.last - work.first, *next_work

    lax.fori_loop(start, end, compute_item, (jnp.int32(0), *first))
    plgpu.wait_smem_to_gmem(0)


def _step(tile, work, offset, q, block, state, *, kv_smem, p_smem, full, free, scale_smem=None, v_smem=None, **rest):
    """Adds a block of keys and values. q: [columns, head_dim]. block + offset: blocks that this program did before."""
    values, peak, total = state
    slot = lax.rem(block + offset, jnp.int32(tile.slots))
    plgpu.barrier_wait(full.at[2 * slot])
    k_scale = scale_smem.at[slot, 0] if tile.codes else None
    scores = _scores(tile, kv_smem.at[slot, 0], k_scale, q, **rest)
    plgpu.barrier_arrive(free.at[2 * slot])
    if tile.softcap:
        tanh = 2.0 / (1.0 + jnp.exp2(scores * (-2.0 * LOG2E * tile.scale / tile.softcap))) - 1.0
        scores = tanh * (tile.softcap * LOG2E)  # the hardware's approximate tanh is exact to 11 bits
    else:
        scores = scores * (tile.scale * LOG2E)
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA) + block * tile.block
    seen = key < work.length
    if tile.window:
        seen &= key >= work.length - tile.window
    scores = jnp.where(seen, scores, MASKED)
    # The first block of an item has an unmasked key, so the peak is always that of a real score.
    higher = jnp.maximum(peak, scores.max(axis=0))
    keep = jnp.exp2(peak - higher)
    p = jnp.exp2(scores - _across(higher, tile.block))
    total = total * _across(keep, tile.block) + p
    plgpu.barrier_wait(full.at[2 * slot + 1])
    v = kv_smem.at[slot, 1]
    if tile.codes:
        scale = plgpu.load(scale_smem.at[slot, 1], (), layout=WGMMA.reduce(1), optimized=False)
        p = jnp.where(seen, p * lax.broadcast_in_dim(scale, p.shape, (0,)), 0.0)
        _convert_values(tile, v, v_smem.at[0], work.length - block * tile.block)
        v = v_smem.at[0]
    else:

        @pl.when((block + 1) * tile.block > work.length)
        def clear():
            _clear_values(tile, v, work.length - block * tile.block)

    p_mine = plgpu.transpose_ref(p_smem.at[0], (1, 0))
    p_mine[...] = plgpu.layout_cast(p.astype(tile.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    if tile.codes:
        plgpu.barrier_arrive(free.at[2 * slot + 1])
    values = values * _across(keep, tile.head_dim)
    v = plgpu.transpose_ref(v, (1, 0))
    if tile.interpret:  # the interpreter knows no accumulator with an initial value
        values = values + _multiply(v, p_mine)
    else:
        values = _multiply(v, p_mine, values)
    if not tile.codes:
        plgpu.barrier_arrive(free.at[2 * slot + 1])
    return values, higher, total


def _scores(tile, k, scale, q, *, k_smem=None, **_):
    """Returns K Q^T [block, columns]. Codes are converted in registers; scales multiply the products."""
    q = plgpu.transpose_ref(q, (1, 0))
    if not tile.codes:
        return _multiply(k, q)
    numbers = _numbers(tile, k)
    if tile.interpret:  # the interpreter knows no operands in registers
        k_smem[0] = numbers
        plgpu.commit_smem()
        scores = _multiply(k_smem.at[0], q)
    else:
        scores = _multiply(plgpu.layout_cast(numbers, WGMMA), q)
    scale = plgpu.load(scale, (), layout=WGMMA.reduce(1), optimized=False)
    return scores * lax.broadcast_in_dim(scale, scores.shape, (0,))


def _convert_values(tile, codes, to, valid):
    """Writes codes as numbers to `to`, with zeros from row `valid` on. Works in pieces to save registers. The caller
    commits the writes.
    """
    width = min(codes.shape[1], 128 if codes.shape[1] % 128 == 0 else 64)
    row = plgpu.broadcasted_iota(jnp.int32, (tile.block, width), 0, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    for left in range(0, tile.head_dim, width):
        part = pl.ds(0, tile.block), pl.ds(left, width)
        to[part] = jnp.where(row < valid, _numbers(tile, codes.at[part]), 0)


def _clear_values(tile, v_smem, valid):
    """Writes zeros from row `valid` on. The values there may be NaN, and a probability of 0 times NaN is NaN."""
    width = 64
    row = plgpu.broadcasted_iota(jnp.int32, (tile.block, width), 0, layout=WGMMA)
    for left in range(0, tile.head_dim, width):
        part = v_smem.at[:, pl.ds(left, width)]
        part[...] = jnp.where(row < valid, plgpu.load(part, (), layout=WGMMA), 0)
    plgpu.commit_smem()


def _arrive(tile, counter, *, arrived_smem, **_):
    """Adds one to the counter, a ref of one int32 in global memory, and returns its value before.

    The program that reads (parts of the row) - 1 may read what all other parts have written. The proof, in the terms of
    PTX's memory consistency model (PTX ISA, section 8):

    - Release: a thread's writes come before its `fence.acq_rel.gpu`, and that before `bar.sync`, which synchronizes the
      threads of the warpgroup. Thread 0 then does the atomic addition. As causality order is transitive, fence and
      addition are a release pattern (8.8) at GPU scope for all writes of the warpgroup.
    - Additions to one counter are morally strong, and each reads the value that the one before it wrote. The last one
      therefore observes all of them.
    - Acquire: the last addition and the fence after it are an acquire pattern. The second `bar.sync` and each thread's
      own fence extend it to the threads that read. Their reads may not return older values; the fence also invalidates
      the multiprocessor's L1 cache.

    Partial results are written and read by ordinary instructions, not by the copy engine, so no proxy fence is needed.
    The compiler moves no access across assembly that declares a memory clobber. An ordinary store resets the counter to
    zero: no program reads it again before the next launch, which begins after this one has ended.
    """
    if tile.interpret:  # the interpreter runs one program after the other
        before = counter[0]
        counter[0] = before + 1
        return before

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add(_, counter_ref, arrived_ref):
        def ptx(text: str, *arguments: ir.Value, constraints: str = "") -> None:
            clobbers = ",".join(filter(None, [constraints, "~{memory}"]))
            llvm.inline_asm(ir.Type.parse("!llvm.void"), list(arguments), text, clobbers, has_side_effects=True)

        ptx("fence.acq_rel.gpu;")
        mosaic.warpgroup_barrier()
        ptx(
            "{ .reg .pred p; .reg .u32 t, old;"
            " mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
            " @p atom.acq_rel.gpu.global.add.u32 old, [$0], 1;"
            " @p st.shared.u32 [$1], old; }",
            mosaic.memref_ptr(counter_ref),
            mosaic.memref_ptr(arrived_ref),
            constraints="l,r",
        )
        mosaic.warpgroup_barrier()
        ptx("fence.acq_rel.gpu;")

    add(counter, arrived_smem)
    return arrived_smem[0]


def _merge(tile, arrays, work, first) -> State:
    """Merges the parts of a row for one head, in the row's order, several at a time to share the latency of a read.

    first: the number of the item with the row's first part and this head.
    """
    room = 4096 if tile.columns == 8 else 2048  # numbers in registers: 128 registers a thread allow two programs
    count = max(min(room // (tile.head_dim * tile.columns), 4), 1)

    def merge(step, state):
        values, peak, total = state
        which = [step * count + i for i in range(count)]
        items = [first + jnp.minimum(i, work.parts - 1) * tile.kv_heads for i in which]
        load = partial(plgpu.load, optimized=False)
        parts = [load(arrays.values.at[item], (), layout=WGMMA) for item in items]
        peaks = [load(arrays.sums.at[item, 0], (), layout=COLUMN) for item in items]
        totals = [load(arrays.sums.at[item, 1], (), layout=COLUMN) for item in items]
        higher = peak
        for other in peaks:  # places beyond the last part repeat the last part
            higher = jnp.maximum(higher, other)
        keep = jnp.exp2(peak - higher)
        values = values * _across(keep, tile.head_dim)
        total = total * keep
        for i, part, one, its_total in zip(which, parts, peaks, totals, strict=True):
            weight = jnp.exp2(one - higher) * jnp.where(i < work.parts, 1.0, 0.0)
            values = values + part * _across(weight, tile.head_dim)
            total = total + its_total * weight
        return values, higher, total

    steps = lax.div(work.parts + count - 1, jnp.int32(count))
    return State(*lax.fori_loop(0, steps, merge, tuple(_start(tile, 0))))


def _finish(tile, arrays, work, state, *, out_smem, **_):
    """Divides the values of the group's heads by their sums and writes them to `out`."""
    values, peak, total = state
    start, offset = queries_of(tile, work, arrays.q.shape[0])
    if arrays.sinks is not None:
        sink = plgpu.load(arrays.sinks.at[pl.ds(start, tile.columns)], (), layout=COLUMN, optimized=False)
        higher = jnp.maximum(peak, sink)
        keep = jnp.exp2(peak - higher)
        total = total * keep + jnp.exp2(sink - higher)
        values = values * _across(keep, tile.head_dim)
    result = values * _across(1.0 / jnp.maximum(total, 1e-30), tile.head_dim)  # zeros for a row without tokens
    result = plgpu.layout_cast(result.astype(tile.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until the previous results have left
    plgpu.transpose_ref(out_smem.at[0], (1, 0))[...] = result
    plgpu.commit_smem()
    place = 0, Span(offset, tile.group, multiple=math.gcd(tile.group, 8))
    mine = (work.row * tile.kv_heads + work.head) * tile.group
    window = (Span(mine, tile.group, multiple=tile.group),)
    hopper_rules.store(out_smem, place, arrays.out, window, interpret=tile.interpret)
