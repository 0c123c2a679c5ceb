"""Whether a row's results are the same bits in any company: what the tests of accelerators' kernels share.

The processor's matrix products add in an order that depends on where a row stands among others. A matrix unit computes
each element from its own row and column. So interpreted kernels get products whose sums are taken in float64 and then
rounded, which makes their order irrelevant (`exact_product`). What is left is the order of the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.types import KVPages, LatentPages


def also_slow(*names: str) -> list:
    """Parameters of a test that only run with the slow ones."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def bits(x) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [m, k] times b [k, n] in float32."""
    return (np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)).astype(np.float32)


def check_in_any_company(function: Callable, *rows: np.ndarray, seed: int = 0) -> None:
    """Compares `function` of arrays [rows, …] with its results in another order, and beside other rows of that number:
    the rows of the later half become those of the first one, a thousand times as large where they are floats."""
    random = np.random.default_rng(seed)
    count = len(rows[0])
    whole = np.asarray(function(*rows))
    order = random.permutation(count)
    moved = np.asarray(function(*(x[order] for x in rows)))
    np.testing.assert_array_equal(bits(moved), bits(whole[order]), err_msg="in another order")
    half = count // 2
    others = [x.copy() for x in rows]
    for x in others:
        factor = 1000 if jnp.issubdtype(x.dtype, jnp.floating) else 1
        x[half:] = (x[: count - half] * factor).astype(x.dtype)
    beside = np.asarray(function(*others))
    np.testing.assert_array_equal(bits(beside[:half]), bits(whole[:half]), err_msg="beside other rows")
    assert not np.array_equal(bits(beside[half:]), bits(whole[half:]))


def same_in_other_numbers(function: Callable, *rows: np.ndarray, counts: Sequence[int]) -> bool:
    """Whether the first rows have the same bits where `function` gets only `counts` of them."""
    whole = np.asarray(function(*rows))
    return all(np.array_equal(bits(function(*(x[:n] for x in rows))), bits(whole[:n])) for n in counts)


class Chunk(NamedTuple):
    """`count` query tokens of sequence `row`, the first at `position`."""

    row: int
    position: int
    count: int = 1


@dataclass
class Sequences:
    """Sequences with the queries and cached keys and values of all their tokens. Every batch is cut from the same.

    q: [sequences, tokens, …]; data and scale: as in `KVPages` or `LatentPages`; table: int32 [sequences, pages].
    """

    q: np.ndarray
    data: np.ndarray
    scale: np.ndarray | None
    table: np.ndarray

    @classmethod
    def make(cls, count: int, tokens: int, heads: tuple[int, ...], dim: int, page: int, dtype, kv_dtype=None):
        """heads: (kv_heads, group), or the number of heads over latents of `dim` numbers."""
        random = np.random.default_rng(tokens)
        kv_dtype = kv_dtype or dtype
        each = -(-tokens // page)
        shape = (1 + count * each, 2, heads[0], page, dim) if len(heads) == 2 else (1 + count * each, page, dim)
        data = random.standard_normal(shape)
        scale = None
        if kv_dtype == np.int8:
            data = 30 * data
            scale = random.uniform(0.01, 0.1, shape[:-1]).astype(np.float32)
        table = 1 + random.permutation(count * each).reshape(count, each).astype(np.int32)
        q = random.standard_normal((count, tokens, *heads, dim)).astype(dtype)
        return cls(q, data.astype(kv_dtype), scale, table)

    def batch(self, chunks: Sequence[Chunk], tokens: int, rows: int, decodes: int, width: int | None = None) -> tuple:
        """The arguments of `paged_attention`: a batch of these chunks with room for `tokens` and `rows`, of which the
        first `decodes` go to the kernel for decodes. Tables have room for `width` pages."""
        q = np.zeros((tokens, *self.q.shape[2:]), self.q.dtype)
        table = np.zeros((rows, width or self.table.shape[1]), np.int32)
        starts = np.zeros(rows + 1, np.int32)
        lengths = np.zeros(rows, np.int32)
        for i, (row, position, count) in enumerate(chunks):
            q[starts[i] : starts[i] + count] = self.q[row, position : position + count]
            table[i, : self.table.shape[1]] = self.table[row]
            starts[i + 1 :] = starts[i] + count
            lengths[i] = position + count
        make = KVPages if self.data.ndim == 5 else LatentPages
        pages = make(jnp.asarray(self.data), None if self.scale is None else jnp.asarray(self.scale))
        return jnp.asarray(q), pages, *map(jnp.asarray, (table, starts, lengths)), jnp.int32(decodes)


@dataclass
class Attention:
    """A kernel, the sequences it attends over, and the room of its batches."""

    function: Callable  # as `paged_attention`, with all options but decode_only
    sequences: Sequences
    tokens: int
    rows: int

    def __call__(self, *chunks: Chunk, decodes: int = 0, tokens: int = 0, rows: int = 0, width: int | None = None):
        """The results of each chunk."""
        room = tokens or self.tokens, rows or self.rows
        arguments = self.sequences.batch(chunks, *room, decodes, width)
        out = np.asarray(self.function(*arguments, decode_only=decodes == len(chunks)))
        ends = np.cumsum([chunk.count for chunk in chunks])
        return [out[end - chunk.count : end] for chunk, end in zip(chunks, ends, strict=True)]

    def check_in_any_company(self) -> None:
        """Decodes and a prompt's chunk: in another order, beside other sequences, and beside shorter ones."""
        last = self.sequences.q.shape[1] - 1
        one = Chunk(0, last)
        two = Chunk(1, 3)
        three = Chunk(2, last // 2)
        decode = self(one, two, three, decodes=3)
        for chunks in ((three, one, two), (one, Chunk(2, last), Chunk(1, 0)), (Chunk(2, 1), one)):
            found = self(*chunks, decodes=len(chunks))
            np.testing.assert_array_equal(
                bits(found[chunks.index(one)]), bits(decode[0]), err_msg=f"decode in {chunks}"
            )
        chunk = Chunk(1, last - 12, 13)
        first = self(one, chunk, Chunk(2, 0, 5), decodes=1)[1]
        for chunks, decodes in (((chunk,), 0), ((two, one, Chunk(2, 7, 6), chunk), 2), ((Chunk(2, 9, 9), chunk), 0)):
            found = self(*chunks, decodes=decodes)[chunks.index(chunk)]
            np.testing.assert_array_equal(bits(found), bits(first), err_msg=f"prompt in {chunks}")

    def same_in_other_batches(self, tokens: int, rows: int, width: int) -> bool:
        """Whether decodes have the same bits in a batch with room for more."""
        last = self.sequences.q.shape[1] - 1
        chunks = Chunk(0, last), Chunk(1, last // 2), Chunk(2, 1)
        usual = self(*chunks, decodes=3)
        larger = self(*chunks, decodes=3, tokens=tokens, rows=rows, width=width)
        return all(np.array_equal(bits(a), bits(b)) for a, b in zip(usual, larger, strict=True))

    def same_in_other_chunks(self, cuts: Sequence[int], decode: bool = False) -> bool:
        """Whether a sequence's last tokens have the same bits when they are computed in chunks that end at `cuts`.
        decode: chunks of one token go to the kernel for decodes."""
        whole = self(Chunk(0, cuts[0], cuts[-1] - cuts[0]))[0]
        parts = []
        for first, end in pairwise(cuts):
            parts += self(Chunk(0, first, end - first), decodes=int(decode and end - first == 1))
        return np.array_equal(bits(np.concatenate(parts)), bits(whole))
