"""What layers hand to the kernels: partial sums, heads, vectors that are rows of an array. Much of it is unfinished, so
that a GPU launches one kernel for two operations."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Row(NamedTuple):
    """One row of an array. Kernels read it in place, where XLA would copy it for them."""

    array: jax.Array  # [rows, size]
    place: jax.Array  # int32 scalar

    def value(self) -> jax.Array:
        return lax.dynamic_index_in_dim(self.array, self.place, keepdims=False)


def value_of(vector: jax.Array | Row) -> jax.Array:
    return vector.value() if isinstance(vector, Row) else vector


class Partials(NamedTuple):
    """A linear layer's result as partial sums of a split inner dimension (split-K): sums [splits, tokens, …]. They are
    added and rounded to the dtype of the activations; then the bias [size or …] is added in that dtype. A single one
    may have that dtype itself; several are float32.
    """

    sums: jax.Array
    bias: jax.Array | Row | None = None

    def reduce(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the result [tokens, …] in `dtype`."""
        y = (self.sums[0] if len(self.sums) == 1 else self.sums.sum(0)).astype(dtype)
        return y if self.bias is None else y + value_of(self.bias)


class ChoiceInputs(NamedTuple):
    """New tokens' inputs of a choice of blocks (MiniMax-M3), after norms and rotary positions.

    q: [tokens, kv_heads, dim].
    key: [tokens, dim].
    """

    q: jax.Array
    key: jax.Array


class PooledInputs(NamedTuple):
    """New tokens' inputs of a choice of blocks by the means of their keys (Qwen4-Exp).

    q: [tokens, heads, dim], after norm and rotary positions.
    key: [tokens, dim], as projected.
    scale: [dim], of the norm of a block's mean.
    cos, sin: float32 [tokens, pairs], of the angles of the token's own block.
    """

    q: jax.Array
    key: jax.Array
    scale: jax.Array
    cos: jax.Array
    sin: jax.Array


class Heads(NamedTuple):
    """Queries, keys and values of new tokens before norms and rotary positions.

    qkv: its sums are [splits, tokens, kv_heads, group + 2, head_dim], in the order of the group's queries, the key, the
      value. Its bias is [kv_heads, group + 2, head_dim].
    cos, sin: float32 [tokens, head_dim / 2].
    q_norm, k_norm: scales [head_dim] of RMS norms, or None.
    sinks: logits [kv_heads, group], one for each query head, that join the softmax's denominator; or None.
    choice: what chooses the blocks of tokens that the queries see; None: they see all.
    """

    qkv: Partials
    cos: jax.Array
    sin: jax.Array
    q_norm: jax.Array | Row | None = None
    k_norm: jax.Array | Row | None = None
    sinks: jax.Array | Row | None = None
    choice: ChoiceInputs | PooledInputs | None = None


class IndexInputs(NamedTuple):
    """New tokens' inputs of an indexer (DeepSeek Sparse Attention, arXiv:2512.02556), after rotary positions.

    q: [tokens, heads, dim].
    weights: float32 [tokens, heads]. The score of a cached token is the sum over the heads of the weight, times the
      product of query and key if it is positive.
    key: [tokens, dim].
    """

    q: jax.Array
    weights: jax.Array
    key: jax.Array


class LatentHeads(NamedTuple):
    """New tokens' inputs of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), after norms and rotary
    positions.

    q: [tokens, heads, nope + rope].
    row: [tokens, rank + rope], a latent and the rotated key, which all heads share.
    k_up, v_up: [heads, nope, rank] and [heads, v_dim, rank], which map latents to a head's keys and values.
    indexer: inputs of the layer's indexer; None: it has none of its own.
    sinks: float32 [heads], logits that join the softmax's denominator; or None.
    """

    q: jax.Array
    row: jax.Array
    k_up: jax.Array
    v_up: jax.Array
    indexer: IndexInputs | None = None
    sinks: jax.Array | Row | None = None


class EntryInputs(NamedTuple):
    """What new tokens add to compressed entries (DeepSeek-V4), or to the compressed keys of an indexer.

    both: [tokens, 2 * series * dim], values, and then gates. A softmax of gates over an entry's tokens makes shares.
      The first of two series is for the entry behind the token's own, the second for its own.
    bias: float32 [rate, series * dim], added to the gates of an entry's tokens, in their order.
    scale: [dim], of the RMS norm of entries.
    cos, sin: float32 [tokens, pairs], of the angles of the token's own entry.
    """

    both: jax.Array
    bias: jax.Array
    scale: jax.Array
    cos: jax.Array
    sin: jax.Array


class CompressedHeads(NamedTuple):
    """New tokens' inputs of attention over a window and compressed entries, after norms and rotary positions.

    q: [tokens, heads, dim].
    row: [tokens, dim], the key, which is also the value, of all heads.
    sinks: float32 [heads], logits that join the softmax's denominator.
    entries: None: the layer has none.
    keys: of the indexer that chooses entries; None: there is none.
    index_q, index_weights: its queries and weights, see `IndexInputs`.
    """

    q: jax.Array
    row: jax.Array
    sinks: jax.Array
    entries: EntryInputs | None = None
    keys: EntryInputs | None = None
    index_q: jax.Array | None = None
    index_weights: jax.Array | None = None


class DeltaHeads(NamedTuple):
    """New tokens' inputs of a gated delta net (Yang et al. 2025, arXiv:2412.06464), or of Kimi delta attention
    (`delta_net.kimi`), which has one value head for each key head.

    qkv: [tokens, key_heads, channels], before the convolution: a key head's query and key, then the values of its group
      of value heads.
    decay: float32 [tokens, key_heads, group], the logarithm of what a head's matrix is multiplied with; at most 0. Of
      Kimi delta attention: [tokens, heads, key_dim], one for each row of the matrix.
    rate: float32 [tokens, key_heads, group], the share of its error that a value replaces, from 0 to 1; to 2 in
      OLMo Hybrid. Of Kimi delta attention: [tokens, heads].
    conv: [key_heads, channels, width], the convolution's weights, of which the last is a token's own.
    """

    qkv: jax.Array
    decay: jax.Array
    rate: jax.Array
    conv: jax.Array


class ConvInputs(NamedTuple):
    """New tokens' inputs of a short convolution.

    x: [tokens, channels].
    conv: [channels, width], the convolution's weights, of which the last is a token's own.
    bias: [channels], or None.
    """

    x: jax.Array
    conv: jax.Array
    bias: jax.Array | None


class MambaInputs(NamedTuple):
    """New tokens' inputs of a Mamba-2 layer (Dao & Gu 2024, arXiv:2405.21060).

    x: [tokens, heads * head_dim], before the convolution.
    bc: [tokens, 2 * groups * state_dim], B of all groups, then C, before the convolution.
    step: float32 [tokens, heads], at least 0.
    a: float32 [heads], below 0. The decay of a head's matrix is exp(step * a).
    d: float32 [heads], the share of x that is added to the result.
    group: int32 [heads], the group of each head.
    conv, conv_bc: [channels, width], the convolution's weights for x, and for B and C.
    conv_bias, conv_bc_bias: [channels], or None.
    """

    x: jax.Array
    bc: jax.Array
    step: jax.Array
    a: jax.Array
    d: jax.Array
    group: jax.Array
    conv: jax.Array
    conv_bias: jax.Array | None
    conv_bc: jax.Array
    conv_bc_bias: jax.Array | None


class ScanInputs(NamedTuple):
    """New tokens' inputs of a selective scan (Mamba; Gu & Dao 2023, arXiv:2312.00752), all float32.

    x: [tokens, channels], behind the convolution.
    step: [tokens, channels], at least 0.
    b, c: [tokens, state_dim]; or [tokens, heads, state_dim] of equal groups of neighbouring channels.
    a: [channels, state_dim], below 0. The decays of a channel's vector are exp(step * a).
    d: [channels], the share of x that is added to the result.
    """

    x: jax.Array
    step: jax.Array
    b: jax.Array
    c: jax.Array
    a: jax.Array
    d: jax.Array


class LightningHeads(NamedTuple):
    """New tokens' inputs of lightning attention (Qin et al. 2024, arXiv:2405.17381).

    qkv: [tokens, heads, 3 * dim]: a head's query, key and value.
    decay: float32 [heads], the logarithm of what a head's matrix is multiplied with at each token.
    """

    qkv: jax.Array
    decay: jax.Array


class RecentTokens(NamedTuple):
    """New tokens, of which n-grams need those before (`ngrams`).

    tokens: int32 [tokens].
    """

    tokens: jax.Array


class SpacedInputs(NamedTuple):
    """New tokens' inputs of a convolution that leaves tokens out (`ngrams`).

    x: [tokens, channels].
    conv: [channels, width], the convolution's weights, of which the last is a token's own.
    """

    x: jax.Array
    conv: jax.Array


# Of recurrent layers: the first array has one entry per token.
StateInputs = DeltaHeads | ConvInputs | MambaInputs | ScanInputs | LightningHeads | RecentTokens | SpacedInputs
