"""The residual streams of models that have several: the way from an embedding to them, and back."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.affine import AffineStreams
from jaxserve.models.altup import Streams
from jaxserve.models.gated_streams import GatedStreams
from jaxserve.models.hyper import HyperStreams
from jaxserve.models.spec import AffineSpec, AltUpSpec, GatedStreamsSpec, HyperSpec, MemorySpec, ModelConfig
from jaxserve.pallas_kernels.ops import Ops


class PlainStreams(nn.Module):
    """Streams of which nothing is learned. The first is the usual one."""

    layers: int
    begun: tuple[bool, ...]  # for each stream, whether it begins as the embedding; else as zeros

    def begin(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, hidden] -> the streams [tokens, count, hidden]."""
        return jnp.stack([x if begun else jnp.zeros_like(x) for begun in self.begun], axis=1)

    def tokens(self, token_ids: jax.Array, x: jax.Array, ops: Ops) -> jax.Array:
        """int32 [tokens] -> what the layers get beside the streams, [tokens, layers]: the tokens."""
        return jnp.broadcast_to(token_ids[:, None], (len(x), self.layers))

    def end(self, streams: jax.Array, ops: Ops) -> jax.Array:
        """The streams [tokens, count, hidden] -> [tokens, hidden]."""
        return streams[:, 0]


def streams_of(config: ModelConfig, dtype: Any) -> Any:
    """The module that makes the streams of a model that has several, and one of them in the end."""
    match config.streams:
        case AltUpSpec(count=count):
            return Streams(count, config.hidden_size, dtype)
        case HyperSpec() as spec:
            return HyperStreams(spec, config.hidden_size, config.layers[0].norm, config.num_layers)
        case GatedStreamsSpec() as gated:
            return GatedStreams(gated, config.hidden_size, config.layers[0].norm, config.num_layers, dtype)
        case MemorySpec():
            return PlainStreams(config.num_layers, (True, True, False))
        case AffineSpec():
            return AffineStreams(config.num_layers, config.hidden_size, dtype)
    return PlainStreams(config.num_layers, (True, False))
