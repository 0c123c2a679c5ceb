"""Inputs on which kernels are tried, and exact answers. NumPy makes both on the host.

The oracle is NumPy, not XLA on the device: in float64 here, in float32 for products (`selfcheck_exact`). Unless told
otherwise, XLA's own matmuls round float32 to fewer bits on GPUs (TF32) and TPUs (bfloat16). And XLA would have to
compile it, for seconds, one little operation after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.quant_matmul import fragments
from jaxserve.pallas_kernels.registry import AttentionProblem, MatmulProblem
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray, KVPages, QuantArray

LAYER = 3  # first page of the layer that is checked; earlier pages belong to other layers
LOUD = 4.0  # factor of the values of a row's first and last token, so that the loss of one of them shows
CODES = 1 << 26  # maximum of a weight's codes; larger weights are tried with fewer outputs
PERIOD = 257  # rows of a weight after which its codes repeat (its scales do not)
LENGTHS = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest code of each type


@dataclass(frozen=True)
class Rows:
    """The contents of a batch.

    decodes: cached tokens of each row of one token, the new one included.
    prompts: for each other row its new tokens, and the tokens that were cached before.
    empty: rows of padding at the end.
    """

    decodes: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...] = ()
    empty: int = 2

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """For each row: new tokens, and cached tokens including the new ones."""
        return [(1, n) for n in self.decodes] + [(new, new + before) for new, before in self.prompts]

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.lengths)


# One decode row is longer than any ring of blocks in shared memory (6 x 128 tokens) and than the shortest part into
# which a kernel splits a row (256 tokens). The others end at, before and after the ends of pages and blocks. Every
# prompt has a multiple of 8 and one more token, so that prompts begin at every offset modulo 8. One prompt is longer
# than 700 tokens. Another is one token after many cached ones, like drafted tokens.
DECODES = (2311, 1, 16, 17, 63, 64, 65, 129, 255, 1025)
PROMPTS = ((705, 131), (9, 0), (41, 500), (137, 3), (25, 64), (1, 1999), (73, 0), (17, 700))
STARTUP = Rows(DECODES, PROMPTS)


class Batch(NamedTuple):
    """Arguments of `paged_attention` on the host, and the inputs of the oracle.

    keys, values: of each row, float64 [cached tokens, kv_heads, head_dim].
    """

    rows: Rows
    q: np.ndarray
    pages: np.ndarray
    scale: np.ndarray | None
    tables: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `paged_attention`, on the host."""
        new = [new for new, _ in self.rows.lengths] + [0] * self.rows.empty
        lengths = [length for _, length in self.rows.lengths] + [0] * self.rows.empty
        q_start = np.cumsum([0, *new]).astype(np.int32)
        arrays = self.tables, q_start, np.asarray(lengths, np.int32), np.int32(len(self.rows.decodes))
        cache: Any = self.pages, self.scale
        return self.q, KVPages(*cache), *arrays


def make_batch(problem: AttentionProblem, rows: Rows, window: int | None = None, seed: int = 0) -> Batch:
    """A batch of normally distributed queries, keys and values. Memory that no row owns is NaN: other layers, the
    layer's own first page, the rest of each row's last page, and pages before the window of all its new tokens. Entries
    of the table beyond a row's pages are stale: they name arbitrary pages of the layer."""
    rng = np.random.default_rng(seed)
    size = problem.page_size
    needed = [-(-length // size) for _, length in rows.lengths]
    count = sum(needed) + 1
    shape = (LAYER + count, 2, problem.kv_heads, size, problem.head_dim)
    pages = np.full(shape, 77 if problem.kv_dtype == np.int8 else np.nan, problem.kv_dtype)
    scale = np.full(shape[:-1], np.nan, np.float32) if problem.has_scale else None
    tables = rng.integers(0, count, (len(needed) + rows.empty, max(needed))).astype(np.int32)
    owned = 1 + rng.permutation(count - 1).astype(np.int32)
    keys = []
    values = []
    start = 0
    for row, ((new, length), used) in enumerate(zip(rows.lengths, needed, strict=True)):
        mine = owned[start : start + used]
        tables[row, :used] = mine
        start = start + used
        kv = rng.standard_normal((used * size, 2, problem.kv_heads, problem.head_dim), np.float32)
        kv[[0, length - 1], 1] *= LOUD
        codes, own = quantize(kv, problem.kv_dtype) if problem.has_scale else (kv.astype(problem.kv_dtype), None)
        behind = 0 if window is None else max(length - new - window + 1, 0) // size * size
        pages[LAYER + mine] = _paged(codes, size, behind, length)
        exact = codes[:length].astype(np.float64)
        if scale is not None:
            assert own is not None
            scale[LAYER + mine] = _paged(own, size, behind, length)
            exact *= own[:length, ..., None]
        keys.append(exact[:, 0])
        values.append(exact[:, 1])
    tokens = -(-rows.tokens // 8) * 8  # the engine's buckets are multiples of 8
    q = rng.standard_normal((tokens, problem.kv_heads, problem.group, problem.head_dim), np.float32)
    return Batch(rows, q.astype(problem.q_dtype), pages, scale, tables, keys, values)


def _paged(kv: np.ndarray, size: int, begin: int, end: int) -> np.ndarray:
    """[tokens, 2, kv_heads, ...] -> [pages, 2, kv_heads, size, ...], NaN (77 in int8) before `begin` and from `end`."""
    kv = kv.copy()
    kv[:begin] = kv[end:] = 77 if kv.dtype == np.int8 else np.nan
    return np.moveaxis(kv.reshape(-1, size, *kv.shape[1:]), 1, 3)


def quantize(x: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """`kv_write.quantize` on the host."""
    largest = np.float32(LENGTHS[np.dtype(dtype).name])
    x = x.astype(np.float32)
    peak = np.abs(x).max(-1)
    scale = np.where(peak > 0, peak / largest, np.float32(1.0)).astype(np.float32)
    codes = x / scale[..., None]
    return (np.round(codes) if dtype == np.int8 else codes).astype(dtype), scale


class Options(NamedTuple):
    """Keyword arguments of `paged_attention`, with sinks on the host."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    decode_only: bool = False


def options(problem: AttentionProblem, *, window: bool = False, softcap: bool = False, sinks: bool = False) -> Options:
    """The window is a little longer than three blocks of 64 tokens. Sinks of successive heads are 7,
    5, 3 and 1: they weigh as much as 1,100, 150, 20 and 3 tokens."""
    weights = 7.0 - 2.0 * (np.arange(problem.kv_heads * problem.group, dtype=np.float32) % 4)
    return Options(
        problem.head_dim**-0.5,
        window=200 if window else None,
        softcap=3.0 if softcap or problem.softcap else None,
        sinks=weights.reshape(problem.kv_heads, problem.group) if sinks or problem.sinks else None,
    )


def exact_attention(batch: Batch, chosen: Options) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields the tokens of each row, and their results, float64 [tokens, kv_heads, group, head_dim]."""
    start = 0
    for (new, length), keys, values in zip(batch.rows.lengths, batch.keys, batch.values, strict=True):
        tokens = slice(start, start + new)
        start += new
        if chosen.decode_only and new > 1:
            return
        newest = np.arange(length - new, length)[:, None]
        first = 0 if chosen.window is None else max(length - new - chosen.window + 1, 0)
        position = np.arange(first, length)
        hidden = position > newest
        if chosen.window is not None:
            hidden |= position <= newest - chosen.window
        q = batch.q[tokens].astype(np.float64) * chosen.scale
        out = np.empty(q.shape)
        for head in range(q.shape[1]):
            scores = np.moveaxis(q[:, head], 1, 0) @ keys[first:, head].T  # [group, tokens, keys]
            if chosen.softcap is not None:
                scores = chosen.softcap * np.tanh(scores / chosen.softcap)
            np.copyto(scores, -np.inf, where=hidden)
            peak = scores.max(-1, keepdims=True)
            np.exp(np.subtract(scores, peak, out=scores), out=scores)
            total = scores.sum(-1)
            if chosen.sinks is not None:
                total = total + np.exp(chosen.sinks[head][:, None] - peak[..., 0])
            out[:, head] = np.moveaxis(scores @ values[first:, head] / total[..., None], 0, 1)
        yield tokens, out


# The write of new keys and values


class Write(NamedTuple):
    """Arguments of `write_kv` on the host: pages and scales before, new keys and values, and slots."""

    pages: np.ndarray
    scale: np.ndarray | None
    k: np.ndarray
    v: np.ndarray
    slots: np.ndarray

    def arguments(self) -> tuple[Any, ...]:
        cache: Any = self.pages, self.scale
        return KVPages(*cache), self.k, self.v, self.slots, np.int32(LAYER)


def make_write(problem: AttentionProblem) -> Write:
    """A write with all difficult cases: a prompt's tokens that begin and end within pages; single tokens far apart,
    some in one tile of 8, 16 or 32 tokens with tokens that are kept or written later; padding between them and at the
    end; and a token of zeros, whose scale must not make it NaN."""
    rng = np.random.default_rng(2)
    size = problem.page_size
    pages = 24 + 64 // size
    shape = (LAYER + pages + 1, 2, problem.kv_heads, size, problem.head_dim)
    before = rng.standard_normal(shape, np.float32)
    data, scale = quantize(before, problem.kv_dtype) if problem.has_scale else (before.astype(problem.kv_dtype), None)
    run = size + 3 + np.arange(61 + size)  # from page 1 on
    beyond = np.arange((run[-1] // size + 1) * size, pages * size)
    alone = rng.choice(beyond, min(48, len(beyond) // 2), replace=False)
    slots = np.concatenate([run, alone[:24], [-1] * 5, alone[24:]])
    slots = np.concatenate([slots, np.full(8 + -len(slots) % 8, -1)]).astype(np.int32)
    k, v = rng.standard_normal((2, len(slots), problem.kv_heads, problem.head_dim), np.float32).astype(problem.q_dtype)
    k[5] = v[5] = 0
    return Write(data, scale, k, v, slots)


# Products with quantized weights


def make_blocks(problem: MatmulProblem, experts: int = 0) -> BlockArray:
    """A weight in blocks of the problem's kind, on the host; with fewer outputs if it would have more than CODES
    codes."""
    rng = np.random.default_rng(0)
    kind = BLOCK_KINDS[problem.kind]
    lead = (experts,) if experts else ()
    rows = _fewer_rows(problem, experts)
    blocks = problem.inputs // kind.block

    def random(count: int, dtype: Any = np.uint8) -> Any:
        base = rng.integers(0, 256, (*lead, min(rows, PERIOD), blocks * count), np.uint8).view(dtype)
        return np.take(base, np.arange(rows) % base.shape[-2], axis=-2) if count else None

    high = random(kind.high, np.int32 if kind.block == 32 else np.uint8)
    factors = rng.uniform(0.5, 1.0, (*lead, rows, blocks * kind.factors)).astype(np.float16)
    return BlockArray(random(kind.low), high, random(4 * kind.words, np.int32), factors, problem.kind)


def _fewer_rows(problem: MatmulProblem, experts: int) -> int:
    """Outputs of a weight that is tried: those of the problem, or fewer."""
    fewer = CODES // max(experts, 1) // problem.inputs
    return problem.rows if problem.rows <= fewer else max(fewer // 1024 * 1024, 1024) + problem.rows % 1024


def make_weight(problem: MatmulProblem, experts: int = 0) -> QuantArray | BlockArray:
    """A weight of the problem's form, on the host, with fewer outputs if it would have more than CODES codes.

    Codes take all values of their type; of int8 and float8 half the range, as in weights with outliers. Floats of 16
    and 32 bits are normally distributed. Scales are float32. 4-bit floats have the problem's type of scales, with a
    gain where files have one.
    """
    if problem.kind:
        return make_blocks(problem, experts)
    rng = np.random.default_rng(0)
    lead = (experts,) if experts else ()
    rows = _fewer_rows(problem, experts)
    shape = (rows, problem.inputs)
    blocks = tuple(-(-size // min(block, size)) for size, block in zip(shape, problem.block, strict=True))
    base = (*lead, min(rows, PERIOD), problem.inputs)
    name = problem.codes_dtype.name
    if name == "float4_e2m1fn":
        codes = rng.integers(0, 16, base, np.uint8).view(problem.codes_dtype)
    elif jnp.issubdtype(problem.codes_dtype, jnp.floating):
        codes = rng.standard_normal(base, np.float32) * 50
    else:
        codes = rng.integers(*((-8, 8) if name == "int4" else (-127, 128)), base, np.int8)
    codes = np.take(codes.astype(problem.codes_dtype), np.arange(rows) % base[-2], axis=-2)

    def values(low: float, high: float) -> Any:
        return rng.uniform(low, high, (*lead, *blocks)).astype(problem.scale_dtype or np.float32)

    zero = rng.integers(-8, 8, (*lead, *blocks), np.int8) if problem.has_zero else None
    bias = values(-1.0, 1.0) if problem.has_bias else None
    nvfp4 = problem.scale_dtype is not None and problem.scale_dtype.name == "float8_e4m3fn"
    gain = rng.uniform(0.5, 1.0, (*lead, rows, 1)).astype(np.float32) if nvfp4 else None
    static = problem.activations is not None and problem.activations.static
    of_inputs = np.full((1, 1), 0.01, np.float32) if static else None  # suits normally distributed x
    arrays = codes, values(0.03, 0.1), zero, bias
    more: dict[str, Any] = {"gain": gain, "input_scale": of_inputs, "activations": problem.activations}
    w = QuantArray(*arrays, problem.block, **more)
    return fragments.shuffle(w) if problem.shuffled else w


def activations(problem: MatmulProblem, rows: int) -> np.ndarray:
    """Normally distributed x [rows, inputs], on the host."""
    return np.random.default_rng(1).standard_normal((rows, problem.inputs), np.float32).astype(problem.x_dtype)


def of_one_sign(w: QuantArray) -> QuantArray:
    """A weight in float8 without the signs of its codes. Their sign is the highest bit."""
    return replace(w, codes=(w.codes.view(np.uint8) & 0x7F).view(w.codes.dtype))
