"""The image encoder: from patches to embeddings of the language model. Its layers are those of decoders."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.decoder import DecoderLayer, added
from jaxserve.models.layer_parts import attention_of, mlp_of
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import Norm
from jaxserve.models.rope import Angles
from jaxserve.models.spec import LayerSpec
from jaxserve.models.stand_in import stand_in
from jaxserve.models.vision.clipped import ClippedLayer
from jaxserve.models.vision.spec import EncoderConfig, Gated, Joined, Normed, Pooled, Projected, Step
from jaxserve.pallas_kernels.operands import Heads, Partials, value_of
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops


class Patches(NamedTuple):
    """The patches of several pictures, laid out by `image_packing`, as arrays of NumPy or JAX. Padding is behind them.

    values: [patches, numbers of a patch].
    place: int32 [patches, 2], row and column in the picture.
    picture: int32 [patches], the number of the picture; -1 for padding.
    window: the same with a number for each window.
    corner: int32 [patches, EncoderConfig.corners], rows of the table of positions.
    share: float32 [patches, EncoderConfig.shares], their shares.
    """

    values: Any
    place: Any
    picture: Any
    window: Any
    corner: Any
    share: Any


class Projector(nn.Module):
    """The steps of a projector, [rows, channels] -> [fewer rows, other channels]. `count` rows are no padding."""

    steps: tuple[Step, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, count: Any, ops: Ops) -> jax.Array:
        for step in self.steps:
            counting = ops.counting(count)
            match step:
                case Joined(count=joined):
                    x = x[: len(x) // joined * joined].reshape(len(x) // joined, -1)  # what is left is padding
                    count = count // joined
                case Pooled(count=joined):
                    mean = x.reshape(len(x) // joined, joined, -1).astype(jnp.float32).mean(axis=1) * step.factor
                    if step.standard:
                        bias, scale = self._standard(step)
                        mean = (mean - bias) * scale
                    x = mean.astype(x.dtype)
                    count = count // joined
                case Normed():
                    x = Norm(step.norm, step.size, self.dtype, name=step.name)(x, counting)[1]
                    x = x if step.activation is None else ACTIVATIONS[step.activation](x)
                case Gated():
                    gates, ups = (self._product(step, name, False)(x, counting) for name in (step.gate, step.up))
                    x = ACTIVATIONS[step.activation](gates) * ups
                case _:
                    x = self._product(step, step.name, step.bias)(x, counting)
                    x = x if step.activation is None else ACTIVATIONS[step.activation](x)
        return x

    def _standard(self, step: Pooled) -> list[jax.Array]:
        inits = {"bias": nn.initializers.zeros, "scale": nn.initializers.ones}
        return [
            value_of(weight(self, f"{step.standard}_{name}", init, (None,), (step.size,), jnp.float32))
            for name, init in inits.items()
        ]

    def _product(self, step: Projected | Gated, name: str, bias: bool) -> Linear:
        return Linear((step.inputs,), (step.outputs,), (None, "embed"), bias, self.dtype, name=name)


class LayerWithScales(DecoderLayer):
    """A layer whose `residual` is layer_scale."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, Partials | None]:
        def norm(name: str, x: jax.Array, y: Partials | None) -> tuple[jax.Array, Any]:
            return Norm(self.spec.norm, self.hidden_size, self.dtype, name=name)(x, ops, y)

        def scaled(name: str, y: Partials) -> Partials:
            scale = weight(self, name, nn.initializers.ones, ("embed",), (self.hidden_size,), self.dtype)
            return Partials((y.reduce(x.dtype) * value_of(scale))[None])

        attention = attention_of(self.spec, self.hidden_size, self.kv_heads, self.dtype)
        x, inputs = norm("attention_norm", x, y)
        x, inputs = norm("mlp_norm", x, scaled("attention_scale", attention(inputs, ropes, attend, ops)))
        return x, scaled("mlp_scale", mlp_of(self.spec, self.hidden_size, self.dtype)(inputs, ops))


class ImageEncoder(nn.Module):
    """The weights around the layers, and the order of computation: `begin`, each layer, `finish`."""

    config: EncoderConfig
    kv_heads: int
    dtype: Any = jnp.float32
    ops: Ops = Ops()

    def setup(self) -> None:
        config = self.config
        hidden = config.hidden_size
        if config.patch_norm is not None:
            self.patch_norm = Norm(config.patch_norm, config.patch, self.dtype)
        self.patch = Linear((config.patch,), (hidden,), (None, "embed"), config.patch_bias, self.dtype)
        if config.table is not None:
            shape = (config.entries, hidden)
            self.table = weight(self, "table", nn.initializers.normal(0.1), (None, "embed"), shape, self.dtype)
        if config.class_token is not None:
            made = nn.initializers.normal(0.1)
            self.class_token = weight(self, "class_token", made, ("embed",), (hidden,), self.dtype)
        if config.before is not None:
            self.before = Norm(config.before, hidden, self.dtype)
        if config.newline:
            made = nn.initializers.normal(0.1)
            self.newline = weight(self, "newline", made, ("embed",), (config.out_size,), self.dtype)
        self.layers = [self.layer(spec) for spec in config.layers]
        self.projector = Projector(config.projector, self.dtype)
        self.taps = [Projector(tap.steps, self.dtype) for tap in config.taps]

    @nn.nowrap
    def layer(self, spec: LayerSpec) -> DecoderLayer | ClippedLayer:
        """A layer of this shape. Outside of `setup` it is unbound."""
        kind: Any = ClippedLayer if self.config.clipped else DecoderLayer
        if spec.residual == "layer_scale":
            kind = LayerWithScales
        return kind(spec, self.config.hidden_size, self.kv_heads, self.dtype)

    def begin(self, patches: Patches, ops: Ops) -> jax.Array:
        """The first layer's input [patches, hidden]."""
        config = self.config
        x = patches.values.astype(self.dtype)
        if config.patch_norm is not None:
            x = self.patch_norm(x, ops)[1]
        x = self.patch(x, ops)
        if config.class_token is not None:
            x = jnp.where(patches.corner[:, :1] == config.entries - 1, value_of(self.class_token), x)
        if config.before is not None and config.table_last:
            x = self.before(x, ops)[1]
        if config.table is not None:
            x = x + self._learned(patches).astype(x.dtype)
        return x if config.before is None or config.table_last else self.before(x, ops)[1]

    def _learned(self, patches: Patches) -> jax.Array:
        """The learned vectors of the patches' positions."""
        table = value_of(self.table)
        if self.config.corners:
            return (table[patches.corner] * patches.share[:, :, None].astype(self.dtype)).sum(axis=1)
        row, column = jnp.split(patches.share, 2, axis=1)
        share = (row[:, :, None] * column[:, None, :]).reshape(len(row), -1)
        return share @ table.astype(share.dtype)

    def finish(self, x: jax.Array, read: list[jax.Array], count: Any, ops: Ops) -> jax.Array:
        """The last layer's result, and what the layers of the taps have computed, each [patches, hidden] -> features
        [patches / joined, width]: the embeddings, then the features of each tap. `count` patches are no padding."""
        taps = [tap(x, count, ops) for tap, x in zip(self.taps, read, strict=True)]
        projected = [self.projector(x, count, ops), *taps]
        return jnp.concatenate(projected, axis=-1)

    def init_all(self, token_ids: jax.Array) -> jax.Array:
        """Uses every weight once, so that flax declares all parameters. Only shapes matter, not the result."""
        config = self.config
        count = config.joined
        place = jnp.zeros((count, 2), jnp.int32)
        number = place[:, 0]
        values, corner, share = (jnp.zeros((count, n)) for n in (config.patch, config.corners, config.shares))
        patches = Patches(values, place, number, number, corner.astype(jnp.int32), share)
        ropes = turned(config, patches.place)
        x = self.begin(patches, self.ops)
        y: Any = None
        for layer in self.layers:
            x, y = layer(x, y, ropes, partial(stand_in, layer.spec, self.dtype), self.ops)
        return self.finish(added(x, y), [x] * len(config.taps), count, self.ops)


def turned(config: EncoderConfig, place: jax.Array) -> dict[str, Angles]:
    """The angles of queries and keys at rows and columns int32 [patches, 2], by the name of `EncoderConfig.ropes`."""
    if not config.layers:
        return {}
    dim = config.layers[0].attention.head_dim  # type: ignore[union-attr]
    if config.rope_theta is None:
        none = jnp.zeros((len(place), dim // 2), jnp.float32)
        return {"default": Angles(none + 1, none)}
    exponent = jnp.arange(0, dim // 2, 2, dtype=jnp.float32) / (dim // 2)
    exponent = jnp.stack([exponent, exponent + 2 / dim * config.columns_between])  # of rows, and of columns
    if config.columns_first:
        place = place[:, ::-1]
    angles = place.astype(jnp.float32)[:, :, None] * (1.0 / config.rope_theta**exponent)
    if config.columns_alternate:
        angles = angles[:, ::-1].swapaxes(1, 2)
    angles = angles.reshape(len(place), -1)
    return {"default": Angles(jnp.cos(angles), jnp.sin(angles))}


def scaled(config: EncoderConfig, values: jax.Array) -> jax.Array:
    """Numbers of pixels, uint8 [patches, numbers of a patch], as the encoder reads them, float32."""
    scaling = config.scaling
    mean, std = (np.repeat(np.asarray(one, np.float32), config.patch // 3) for one in (scaling.mean, scaling.std))

    def rounded(x: Any) -> jax.Array:  # casts to bfloat16 and back may be compiled away
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if scaling.rounds else x

    given = rounded(values.astype(jnp.float32) * np.float32(scaling.factor))
    x = rounded(rounded(given - rounded(mean)) / rounded(std))
    return 2 * x - 1 if config.centred else x


def encode(encoder: ImageEncoder, params: Any, patches: Patches, count: jax.Array) -> jax.Array:
    """Features [patches / joined, width] of patches, of which `count` are no padding."""
    config = encoder.config
    ops = encoder.ops.counting(count)
    patches = patches._replace(values=scaled(config, patches.values))
    ropes = turned(config, patches.place)
    x: Any = encoder.apply({"params": params}, patches, ops, method="begin")
    y = None
    read = []

    def run(spec: LayerSpec, weights: Any, x: jax.Array, y: Any, segment: jax.Array) -> Any:
        module = encoder.layer(spec)

        def attend(heads: Heads) -> jax.Array:
            attention: Any = spec.attention
            q, k, v = ops.rotate(heads, module.norm_eps, encoder.dtype)
            assert q.shape[2] == 1  # each key has one query
            return ops.segment_attention(q[:, :, 0], k, v, segment, attention.softmax_scale)[:, :, None]

        return module.apply({"params": weights}, x, y, ropes, attend, ops)

    kinds = {spec: jax.jit(partial(run, spec)) for spec in set(config.layers)}  # equal layers are traced once
    taps = [tap.layer for tap in config.taps]
    for i, spec in enumerate(config.layers):
        segment = patches.window if i in config.windowed else patches.picture
        x, y = kinds[spec](params[f"layers_{i}"], x, y, segment)
        if i in taps:
            read.append(added(x, y))
    given = added(x, y), read, count, encoder.ops
    return cast(jax.Array, encoder.apply({"params": params}, *given, method="finish"))
