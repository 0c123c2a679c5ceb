"""Sizes of Hopper's kernel for quantized weights (`mosaic_gpu`): tiles, computing warpgroups, stages, splits.

Sizes in the tables of `tuning` come first. Others follow from an estimate in cycles, of which nothing has been
measured. A step of the loop over the inputs multiplies 128 x 128 weights for each warpgroup with n tokens:

  conversion  instructions of a scheduler for a warpgroup's step, by machine code: 300 + n for int4, 400 for 8 bits;
              about 60 for weights of 16 bits, which are not converted
  products    8 n cycles of the matrix unit, which makes 2,048 products of 16 bits a cycle
  computing   the larger of the two sums over a multiprocessor's warpgroups, as one warpgroup converts while another
              multiplies; at least conversion plus products of one warpgroup
  memory      the codes, once
  L2 cache    the codes once per tile of tokens; x [n, k] for each step of each program, or of each cluster
  parts       float32 sums of each split, written by this kernel and read by the one that adds them

With n = 32, the x of a step is as large as 128 x 128 codes of int4, so the L2 cache limits programs of 128 outputs.
Several warpgroups of a program, 128 outputs each, share one x. The 65,536 registers of a multiprocessor allow two such
warpgroups with 64 tokens, three with 32. Two such programs form a cluster, where each copies half of x and sends it to
both. Products limit int4 from about 55 tokens on: 64 tokens take 7.9 us at
1.755 GHz for a [14336, 4096] weight, which memory delivers in 6.8 us.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.quant_matmul import fragments

PROCESSORS = 132  # multiprocessors of an H200
SLOT_BYTES = 72 << 10  # of shared memory for a program's slots with few tokens: three programs fit a multiprocessor
WIDE_SLOT_BYTES = 104 << 10  # with many tokens: two programs fit
SHARED_SLOT_BYTES = 216 << 10  # of a program with several computing warpgroups: one program fits
SWIZZLE_BITS = 256  # minimum width of a row in shared memory
MIN_STEPS = 4  # minimum of steps of the loop over the inputs in a split
FEW = 64  # tokens
MEMORY_RATE = 2450  # bytes per cycle: 4.3 TB/s at 1.755 GHz
CACHE_RATE = 3130  # bytes per cycle: 5.5 TB/s
LONELY = 1.5  # cycles per instruction of a scheduler's only warp, which waits for its own results; a guess


class Plan(NamedTuple):
    """Sizes of the kernel."""

    m: int  # outputs per warpgroup
    n: int  # tokens per program
    k: int  # inputs per step
    group: int  # inputs per accumulator, at most k
    stages: int = 1
    splits: int = 1
    steps: int = 1  # steps of the longest split
    warpgroups: int = 1  # computing warpgroups; if there are several, one more fetches for them
    cluster: int = 1  # programs of neighbouring outputs that share copies of x

    @property
    def outputs(self) -> int:
        """Outputs of a program."""
        return self.m * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a fetching thread and of a computing one, where several warpgroups compute."""
        return (40, 232) if self.warpgroups == 2 else (32, 160)

    def tile_of_program(self) -> Any:
        """The tile of outputs of the kernel's program that calls this."""
        tile = lax.axis_index("outputs")
        return tile if self.cluster == 1 else tile * self.cluster + lax.axis_index("pair")

    def steps_of(self, split: Any, inputs: int) -> tuple[Any, Any]:
        """Returns a split's first step and number of steps. Some splits have one less than others."""
        total = inputs // self.k
        if total % self.splits == 0:
            return split * self.steps, self.steps
        first = lax.div(split * total, jnp.int32(self.splits))
        return first, lax.div((split + 1) * total, jnp.int32(self.splits)) - first


def plan(
    tokens: int, shape: tuple[int, int], block: tuple[int, int], bits: int, shuffled: bool = False, whole: bool = False
) -> Plan:
    """The sizes for x [tokens, in] and a weight of `shape` [out, in] with codes of `bits` bits. whole: the inputs are
    not split."""
    out, inputs = shape
    grouped = block[1] < inputs
    few = tokens <= FEW
    tuned = measured(tokens, shape, block, bits)
    if whole:
        tuned = {**tuned, "splits": 1}
    m = tuned.get("m") or (128 if out >= 128 else 64)
    n = tuned.get("n") or _even_tile(tokens, FEW if grouped else 2 * FEW)
    k: int | None = fragments.CHUNK_BITS // bits
    if not shuffled:
        k = step_size(inputs, block[1], bits, tuned.get("k") or (128 if bits < 16 and (few or grouped) else 64))
    assert k is not None, "why_not refuses what has no step size"
    sizes = Plan(m, n, k, min(block[1], k) if grouped else k)
    return divided(sizes, shape, -(-tokens // n), bits, few, tuned)


def divided(
    sizes: Plan,
    shape: tuple[int, int],
    columns: int,
    bits: int,
    few: bool,
    tuned: Mapping[str, int],
    most: int = 3,
) -> Plan:
    """Completes the sizes: at most `most` warpgroups, and splits, such that `columns` tiles of tokens take the fewest
    cycles; and as many stages as shared memory has room for."""
    every = []
    steps = shape[1] // sizes.k
    most = _most_warpgroups(sizes, shape[0], few, most)
    for warpgroups in _range(tuned.get("warpgroups"), most, most):
        one = sizes._replace(warpgroups=warpgroups)
        for splits in _range(tuned.get("splits"), _most_splits(one, shape, columns), steps):
            every.append(one._replace(splits=splits, steps=-(-steps // splits), cluster=_cluster(one, shape[0])))
    best = min(every, key=lambda one: cycles(one, shape, columns, bits))
    slot = best.outputs * best.k * bits // 8 + best.n * best.k * 2
    room = SHARED_SLOT_BYTES if best.warpgroups > 1 else SLOT_BYTES if few else WIDE_SLOT_BYTES
    stages = tuned.get("stages") or min(max(room // slot, 2), 12)
    return best._replace(stages=min(stages, steps // best.splits))


def _range(chosen: int | None, most: int, limit: int) -> Iterable[int]:
    """Candidates: 1 to `most`, or only `chosen`; at most `limit`."""
    return range(1, most + 1) if chosen is None else (min(chosen, limit),)


def _most_warpgroups(sizes: Plan, out: int, few: bool, most: int) -> int:
    """Upper limit by registers and by what copies of x save: one with eight tokens or with more than 64."""
    if sizes.m < 128 or not few or sizes.n > FEW or sizes.n <= 8:
        return 1
    return min(3 if sizes.n <= 32 else 2, out // sizes.m, most)


def _cluster(sizes: Plan, out: int) -> int:
    """Two programs share x if each has several warpgroups, whose fetching one waits for both programs, and if x and the
    outputs have halves: x is divided at multiples of eight tokens."""
    return 2 if sizes.warpgroups > 1 and sizes.n % 16 == 0 and out % (2 * sizes.outputs) == 0 else 1


def _most_splits(sizes: Plan, shape: tuple[int, int], columns: int) -> int:
    """Upper limit: as many splits as run at once, with at least MIN_STEPS steps each."""
    programs = -(-shape[0] // sizes.outputs) * columns
    at_once = 2 * PROCESSORS if sizes.warpgroups == 1 else PROCESSORS
    return max(min(at_once // programs, shape[1] // sizes.k // MIN_STEPS), 1)


def cycles(sizes: Plan, shape: tuple[int, int], columns: int, bits: int) -> float:
    """Estimated cycles of the kernel with `columns` tiles of tokens, and of adding its parts."""
    (out, inputs), tiles = shape, -(-shape[0] // sizes.outputs)
    programs = tiles * columns * sizes.splits
    share = sizes.m * sizes.k / (128 * 128)
    conversion = share * {4: 300 + sizes.n, 8: 400, 16: 60}[bits]
    products = share * 8 * sizes.n
    together = min(-(-programs // PROCESSORS), 2) if sizes.warpgroups == 1 else sizes.warpgroups
    waves = -(-programs * sizes.warpgroups // (PROCESSORS * together))
    computing = waves * sizes.steps * max(together * max(conversion, products), LONELY * conversion + products)
    codes = out * inputs * bits / 8
    x = 2 * sizes.n * inputs / sizes.cluster
    cache = columns * (codes + tiles * x) / CACHE_RATE
    parts = 2 * 4 * sizes.splits * columns * sizes.n * out / CACHE_RATE if sizes.splits > 1 else 0
    return max(computing, codes / MEMORY_RATE, cache) + parts


def _even_tile(tokens: int, most: int) -> int:
    """Tokens per tile, a multiple of eight, such that all tiles are about equally full."""
    tiles = -(-tokens // most)
    return -(-tokens // (8 * tiles)) * 8


def step_size(inputs: int, group: int, bits: int, most: int) -> int | None:
    """Inputs per step of the pipeline: whole groups, or a part of a group that is a multiple of wgmma's own size."""
    for k in (128, 64, 32):
        one_scale = group >= inputs or group % k == 0
        whole_groups = k % group == 0 and group % 32 == 0
        if k <= most and inputs % k == 0 and k * bits >= SWIZZLE_BITS and (one_scale or whole_groups):
            return k
    return None


def measured(tokens: int, shape: tuple[int, int], block: tuple[int, int], bits: int) -> Mapping[str, int]:
    """The sizes that were measured for a problem."""
    group, (out, inputs) = block[1] if block[1] < shape[1] else 0, shape
    return tuning.lookup("matmul", "mosaic_gpu", bits=bits, group=group, out=out, inputs=inputs, tokens=tokens)
