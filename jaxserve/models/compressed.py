"""DeepSeek-V4's attention (`pallas_kernels.compressed_attention`): one key for all heads, which is also their value, a
window, compressed entries beyond it, and an output projection by groups of heads."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import Norm, normalize
from jaxserve.models.rope import Angles
from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import CompressedAttentionSpec, CompressionSpec, NormSpec
from jaxserve.pallas_kernels.compressed_attention import turned
from jaxserve.pallas_kernels.operands import CompressedHeads, EntryInputs, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class Entries(nn.Module):
    """What tokens add to entries of `dim` channels."""

    spec: CompressionSpec
    dim: int
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, angles: Angles, ops: Ops) -> EntryInputs:
        """x: the layer's input. angles: of entries."""
        width = self.spec.series * self.dim
        project = Linear((self.hidden_size,), (2 * width,), (None, "embed"), False, self.dtype, name="projection")
        bias = weight(self, "bias", nn.initializers.zeros, (None, None), (self.spec.rate, width), jnp.float32)
        scale = value_of(weight(self, "scale", nn.initializers.ones, (None,), (self.dim,), jnp.float32))
        return EntryInputs(project(x, ops), bias, scale, angles.cos, angles.sin)


class CompressedAttention(nn.Module):
    """The projections around `compressed_attention.attend`. Devices share the heads in whole groups. Each computes the
    keys, the entries, and the choice of entries, which is for all heads."""

    spec: CompressedAttentionSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        heads = (spec.num_heads, spec.head_dim)
        hidden = self.hidden_size
        assert not isinstance(x, QuantRows), "rounded before all projections read it, see `DecoderLayer`"

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple, **how: Any) -> Linear:
            return Linear(in_shape, out_shape, axes, False, self.dtype, name=name, **how)

        def norm(name: str, x: jax.Array) -> jax.Array:
            normed: jax.Array = Norm(spec.norm, x.shape[-1], self.dtype, name=name)(x, ops)[1]
            return normed

        down = linear("down", (hidden,), (spec.q_rank + spec.head_dim,), (None, "embed"))(x, ops)
        of_queries, key = jnp.split(down, [spec.q_rank], axis=-1)
        of_queries = norm("q_norm", of_queries)
        q = linear("q_up", (spec.q_rank,), heads, ("kv_heads", None, None))(of_queries, ops)
        q = normalize(q, NormSpec(eps=spec.norm.eps, scale=False), None, None)
        angles = ropes[spec.rope]
        sinks = weight(self, "sinks", nn.initializers.normal(1.0), ("kv_heads",), (spec.num_heads,), jnp.float32)
        given = CompressedHeads(
            q=turned(q, angles.cos, angles.sin),
            row=turned(norm("kv_norm", key), angles.cos, angles.sin),
            sinks=value_of(sinks),
        )
        out = attend(self._with_entries(given, x, of_queries, ropes, ops))
        out = turned(out, angles.cos, -angles.sin)
        groups = (spec.out_groups, spec.out_rank)
        grouped = out.reshape(len(out), spec.out_groups, -1)
        shape = (*groups, grouped.shape[-1])
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2, batch_axis=0)
        out_down = weight(self, "out_down", init, ("kv_heads", None, None), shape, self.dtype)
        latents = jnp.einsum("tgd,grd->tgr", grouped, out_down)
        return linear("out", groups, (hidden,), ("embed", "kv_heads", None), as_partials=True)(latents, ops)

    def _with_entries(
        self, given: CompressedHeads, x: jax.Array, of_queries: jax.Array, ropes: Ropes, ops: Ops
    ) -> CompressedHeads:
        """The inputs with those of entries, and of their indexer, if the layer has such. of_queries: [tokens, q_rank],
        the normed latent of queries."""
        made = self.spec.compression
        if made is None:
            return given
        hidden = self.hidden_size
        entries = Entries(made, self.spec.head_dim, hidden, self.dtype, name="entries")(x, ropes[made.rope], ops)
        given = given._replace(entries=entries)
        if (indexer := made.indexer) is None:
            return given

        def linear(name: str, inputs: int, out_shape: tuple[int, ...], out_dtype: Any = None) -> Linear:
            axes = (*(None,) * len(out_shape), "embed")
            return Linear((inputs,), out_shape, axes, False, self.dtype, out_dtype, name=name)

        keys = Entries(made, indexer.dim, hidden, self.dtype, name="index_keys")(x, ropes[made.rope], ops)
        angles = ropes[self.spec.rope]
        index_q = linear("index_q", self.spec.q_rank, (indexer.heads, indexer.dim))(of_queries, ops)
        weights = linear("index_weights", hidden, (indexer.heads,), jnp.float32)(x, ops)
        return given._replace(keys=keys, index_q=turned(index_q, angles.cos, angles.sin), index_weights=weights)


def compressed_sources(spec: CompressedAttentionSpec, hidden: int) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up. The roles are q_a, q_norm, q_b, kv, kv_norm, sinks, o_a
    and o; of entries entry_kv, entry_gate, entry_bias and entry_norm; and of their indexer index_q, index_weights, and
    the same four with key in the place of entry."""
    width = spec.num_heads * spec.head_dim
    latents = spec.out_groups * spec.out_rank
    per_group = width // spec.out_groups
    split = (spec.out_groups, spec.out_rank, per_group)
    found = {
        "down/kernel": [
            Source("q_a.weight", (spec.q_rank, hidden), rows(0, spec.q_rank)),
            Source("kv.weight", (spec.head_dim, hidden), rows(spec.q_rank, spec.head_dim)),
        ],
        "q_norm/scale": [Source("q_norm.weight", (spec.q_rank,), whole)],
        "q_up/kernel": [Source("q_b.weight", (width, spec.q_rank), whole)],
        "kv_norm/scale": [Source("kv_norm.weight", (spec.head_dim,), whole)],
        "sinks": [Source("sinks", (spec.num_heads,), whole)],
        "out_down": [Source("o_a.weight", (latents, per_group), whole, split)],
        "out/kernel": [Source("o.weight", (hidden, latents), whole)],
    }
    if (made := spec.compression) is not None:
        found |= _entry_sources("entries", "entry", made, spec.head_dim, hidden)
        if (indexer := made.indexer) is not None:
            found |= _entry_sources("index_keys", "key", made, indexer.dim, hidden)
            found["index_q/kernel"] = [Source("index_q.weight", (indexer.heads * indexer.dim, spec.q_rank), whole)]
            found["index_weights/kernel"] = [Source("index_weights.weight", (indexer.heads, hidden), whole)]
    return {f"attention/{path}": some for path, some in found.items()}


def _entry_sources(path: str, role: str, spec: CompressionSpec, dim: int, hidden: int) -> dict[str, list[Source]]:
    """The same of an `Entries`."""
    width = spec.series * dim
    kinds = ("kv", 0), ("gate", width)
    return {
        f"{path}/projection/kernel": [
            Source(f"{role}_{name}.weight", (width, hidden), rows(first, width)) for name, first in kinds
        ],
        f"{path}/bias": [Source(f"{role}_bias", (spec.rate, width), whole)],
        f"{path}/scale": [Source(f"{role}_norm.weight", (dim,), whole)],
    }
