"""What a layer of Qwen4-Exp adds to its residual streams for the last few tokens: embeddings of hashed n-grams, which
each stream gates, and a convolution over these."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn
from jaxserve.models.layers import Embedding, Linear, weight
from jaxserve.models.norms import StreamNorm
from jaxserve.models.sources import Names, Source, name_of, rows, whole
from jaxserve.models.spec import NgramSpec, NormSpec
from jaxserve.pallas_kernels.ngrams import hashes, multipliers, primes
from jaxserve.pallas_kernels.operands import RecentTokens, SpacedInputs
from jaxserve.pallas_kernels.ops import Ops

EVENLY = 5040  # rows of the table on devices are a multiple of this, which many numbers of devices divide
MOST_PARTS = 2**12  # of a table in files
LEAST_GATE = 1e-6


def table_sizes(spec: NgramSpec) -> tuple[int, ...]:
    """The rows of each hash in the table of embeddings."""
    return primes(spec.base, spec.index * spec.hashes, spec.hashes)


def table_rows(spec: NgramSpec) -> int:
    """All rows of the table."""
    return -(-sum(table_sizes(spec)) // spec.divisor) * spec.divisor


class NgramMemory(nn.Module):
    """The table of embeddings, and the way from these to the streams. Devices share the table's rows; each computes all
    of the rest."""

    spec: NgramSpec
    sizes: tuple[int, int]  # number of streams, and their channels
    norm: NormSpec
    dtype: Any

    @nn.compact
    def __call__(self, streams: jax.Array, tokens: jax.Array, attend: AttentionFn, ops: Ops) -> jax.Array:
        """streams [tokens, count, hidden] and tokens int32 [tokens] -> what is added to the streams."""
        spec = self.spec
        count, hidden = self.sizes
        each = table_sizes(spec)
        orders = [each[i : i + spec.heads] for i in range(0, spec.hashes, spec.heads)]
        factors = multipliers(spec.vocab, spec.longest, spec.index, spec.seed)
        first = np.cumsum([0, *each[:-1]]).astype(np.int32)
        of_token = hashes(tokens, attend(RecentTokens(tokens)), spec.end, factors, orders) + first
        table = Embedding(-(-table_rows(spec) // EVENLY) * EVENLY, spec.dim // spec.hashes, self.dtype, name="embed")
        embedded = table(of_token.reshape(-1), ops).reshape(-1, spec.dim)

        def linear(name: str, outputs: tuple[int, ...]) -> jax.Array:
            axes = (*(None,) * len(outputs), "embed")
            made: jax.Array = Linear((spec.dim,), outputs, axes, False, self.dtype, name=name)(embedded, ops)
            return made

        def norm(name: str, x: jax.Array) -> jax.Array:
            made: jax.Array = StreamNorm(self.norm, self.sizes, self.dtype, name=name)(x)
            return made

        keys, queries = norm("key_norm", linear("key", self.sizes)), norm("query_norm", streams)
        score = jnp.sum(keys.astype(jnp.float32) * queries.astype(jnp.float32), axis=-1) / math.sqrt(hidden)
        gate = jax.nn.sigmoid(jnp.sqrt(jnp.maximum(jnp.abs(score), LEAST_GATE)) * jnp.sign(score))
        gated = gate.astype(self.dtype)[..., None] * linear("value", (hidden,))[:, None]
        shape = (count * hidden, spec.width)
        conv = weight(self, "conv", nn.initializers.normal(0.5), (None, None), shape, self.dtype)
        mixed = attend(SpacedInputs(norm("conv_norm", gated).reshape(len(gated), -1), conv))
        return gated + jax.nn.silu(mixed).astype(self.dtype).reshape(gated.shape)


def ngram_sources(
    spec: NgramSpec, sizes: tuple[int, int], norm: NormSpec, names: Names, layer: int, has: Callable[[str], bool]
) -> dict[str, list[Source]]:
    """Path within the layer -> the tensors of an `NgramMemory`. The roles are ngram_key, ngram_value, ngram_conv, those
    of norms, ngram_key_norm, ngram_query_norm and ngram_conv_norm, and ngram_table: parts that have equally many rows,
    but the last one. `has`, which tells whether the files have a tensor, says how many there are."""
    count, hidden = sizes
    all_rows, dim = table_rows(spec), spec.dim // spec.hashes
    name = name_of(names, "ngram_table.weight", layer)
    parts = next(n for n in range(1, MOST_PARTS + 1) if n == MOST_PARTS or not has(name.format(i=layer, h=n)))
    each = -(-all_rows // parts)
    found = {
        "embed/table": [
            Source("ngram_table.weight", (n, dim), rows(start, n), head=part)
            for part, start in enumerate(range(0, all_rows, each))
            for n in [min(each, all_rows - start)]
        ],
        "key/kernel": [Source("ngram_key.weight", (count * hidden, spec.dim), whole)],
        "value/kernel": [Source("ngram_value.weight", (hidden, spec.dim), whole)],
        "conv": [Source("ngram_conv.weight", (count * hidden, 1, spec.width), whole, (count * hidden, spec.width))],
    }
    for role in ("key", "query", "conv"):
        found[f"{role}_norm/scale"] = [stream_norm_source(f"ngram_{role}_norm.weight", norm, sizes)]
    return {f"ngrams/{path}": some for path, some in found.items()}


def stream_norm_source(role: str, norm: NormSpec, shape: tuple[int, int]) -> Source:
    """The scales of a `StreamNorm`, which files have one stream after the other."""

    def take(t: np.ndarray) -> np.ndarray:
        return t.astype(np.float32) + norm.offset

    return Source(role, (shape[0] * shape[1],), whole, shape, take=take)
