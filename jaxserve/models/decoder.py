"""The decoder of all model families: embeddings, layers of attention and MLP, final norm, output head.

Attention over cached tokens is an argument (`AttentionFn`), so that the model knows neither pages nor kernels.
`jaxserve.execution.forward` closes it over the KV cache and the batch's block tables.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.affine import AffineLayer
from jaxserve.models.altup import AltUpLayer
from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.gated_streams import GatedStreamsLayer
from jaxserve.models.hyper import HyperLayer
from jaxserve.models.layer_parts import attention_of, mlp_of, norm_of
from jaxserve.models.layers import Embedding, LearnedPositions, Linear, reader, weighed
from jaxserve.models.memory import MemoryLayer
from jaxserve.models.norms import Norm
from jaxserve.models.per_layer import PerLayerVectors, ScaledSandwich
from jaxserve.models.rope import rope_angles
from jaxserve.models.shortcut import ShortcutLayer
from jaxserve.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, ModelConfig
from jaxserve.models.stages import Part, Stage
from jaxserve.models.stand_in import stand_in
from jaxserve.models.streams import streams_of
from jaxserve.models.weighed_skip import WeighedSkipLayer
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops


def angles(config: ModelConfig, positions: jax.Array) -> Ropes:
    """The angles of each of a model's rotary embeddings at positions int32 [tokens], by its name in `config.ropes`."""
    return {name: rope_angles(rope, config.rotated_dim(name), positions) for name, rope in config.ropes.items()}


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream x [tokens, hidden], as `LayerSpec.residual` says.

    The layer does not add its last result, y, to x. It returns both, and the next layer's norm adds them, so that one
    operation computes the sum and the norm.
    """

    spec: LayerSpec
    hidden_size: int
    kv_heads: int
    dtype: Any

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms of queries and keys (`Ops.rotate`)."""
        attention = self.spec.attention
        chosen = attention.qk_norm if isinstance(attention, AttentionSpec) else None
        return self.spec.norm.eps if chosen is None else chosen.norm.eps

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, Partials | None]:
        """Returns (x, y). The argument `y` is None in the first layer, and where the layer before returned None."""
        attention_module = attention_of(self.spec, self.hidden_size, self.kv_heads, self.dtype)
        mlp_module = mlp_of(self.spec, self.hidden_size, self.dtype)
        scale = self.spec.residual_scale

        def norm(name: str, x: jax.Array, y: Partials | None = None, reader: Any = None) -> tuple[jax.Array, Any]:
            return norm_of(self.spec, name, self.hidden_size, self.dtype, x, ops, y, reader)

        def normed(name: str, y: Partials) -> Partials:
            return scaled(Partials(norm(name, y.reduce(x.dtype))[1][None]))

        def scaled(y: Partials) -> Partials:
            return y if scale == 1.0 else Partials((y.reduce(x.dtype) * jnp.asarray(scale, x.dtype))[None])

        def attention(x: Any) -> Partials:
            return attention_module(x, ropes, attend, ops)

        def mlp(x: Any) -> Partials:
            return mlp_module(x, ops)

        of_qkv = reader(self, ops, "attention", self._only_reader)
        of_mlp = reader(self, ops, "mlp", "gate_up" if self.spec.mlp is None or self.spec.mlp.gated else "up")
        match self.spec.residual:
            case "pre" | "normed_mlp":
                if self.spec.attention is not None:
                    x, inputs = norm("attention_norm", x, y, of_qkv)
                    y = scaled(attention(inputs))
                if self.spec.mlp is not None:
                    x, inputs = norm("mlp_norm", x, y, of_mlp)
                    y = scaled(mlp(inputs)) if self.spec.residual == "pre" else normed("mlp_out_norm", mlp(inputs))
                return x, y
            case "sandwich":
                x, inputs = norm("attention_norm", x, y, of_qkv)
                x, inputs = norm("mlp_norm", x, normed("attention_out_norm", attention(inputs)), of_mlp)
                return x, normed("mlp_out_norm", mlp(inputs))
            case "post":
                x = added(x, y)
                x = added(x, normed("attention_out_norm", attention(x)))
                return x, normed("mlp_out_norm", mlp(x))
            case "post_ln":
                x = added(x, y)
                x = norm("attention_norm", x, scaled(attention(x)))[1]
                return norm("mlp_norm", x, scaled(mlp(x)))[1], None
            case "normed":
                x, y = weighed(norm("attention_norm", x, y)[1], attention, self.spec.shares[0])
                return weighed(norm("mlp_norm", x, y)[1], mlp, self.spec.shares[1])
            case _:  # parallel, parallel_two_norms
                x, inputs = norm("attention_norm", x, y)
                others = inputs if self.spec.residual == "parallel" else norm("mlp_norm", x)[1]
                return x, scaled(Partials((attention(inputs).reduce(x.dtype) + mlp(others).reduce(x.dtype))[None]))

    @property
    def _only_reader(self) -> str:
        """The name of the projection for which the norm may round its result, because nothing else reads it. Empty if
        several projections read it."""
        match self.spec:
            case LayerSpec(attention=LatentAttentionSpec(chooses=False, head_gate=False)):
                return "down"
            case LayerSpec(attention=AttentionSpec(out_gate=None, blocks=None, experts=0), beside=None):
                return "qkv"
        return ""


def added(x: jax.Array, y: Partials | None) -> jax.Array:
    """x + y: the residual stream, plus the result that a layer left for the next one. None adds nothing."""
    return x if y is None else x + y.reduce(x.dtype)


class Decoder(nn.Module):
    """The weights around the layers, and the order of computation: `begin`, each `layer`, `finish`, `logits`.

    The caller applies the layers one by one (`layer`, on the parameters of "layers_0", "layers_1", …), so that equal
    layers are traced once.

    Attributes:
      kv_heads: heads of keys and values, in layers that have the fewest. There are more than the model's own when the
        mesh has more devices than heads: heads are then repeated.
      stage: the part of the model that a group of devices holds or a program runs; None: all of it.
      vocab_rows: rows of the embedding table. There are more than the vocabulary has when the mesh cannot split it
        evenly: the further rows are zero.
    """

    config: ModelConfig
    kv_heads: int
    vocab_rows: int
    dtype: Any = jnp.float32
    ops: Ops = Ops()
    stage: Stage | Part | None = None

    def setup(self) -> None:
        config = self.config
        hidden = self.config.hidden_size
        size = self.config.embed_size
        self.embed = Embedding(self.vocab_rows, size or hidden, self.dtype)
        if size is not None:
            self.project_in = Linear((size,), (hidden,), ("embed", "embed"), dtype=self.dtype)
            self.project_out = Linear((hidden,), (size,), ("embed", "embed"), dtype=self.dtype)
        if (learned := config.learned_positions) is not None:
            self.positions = LearnedPositions(learned.rows, learned.offset, hidden, self.dtype)
        if config.embed_norm is not None:
            self.embed_norm = Norm(config.embed_norm, hidden, self.dtype)
        if config.per_layer is not None:
            self.per_layer = PerLayerVectors(config.per_layer, hidden, self.dtype)
        if config.streams is not None:
            self.streams = streams_of(config, self.dtype)
        self.layers = [self.layer(spec) for spec in config.layers]
        if config.norm is not None:
            self.norm = Norm(config.norm, hidden, self.dtype)
        if not config.tie_embeddings:
            shape = (self.vocab_rows,)
            axes = ("vocab", "embed")
            self.head = Linear((size or hidden,), shape, axes, config.head_bias, self.dtype, jnp.float32)

    @property
    def own_layers(self) -> range:
        """The numbers of the layers that these devices run."""
        return range(self.config.num_layers) if self.stage is None else self.stage.layers

    @nn.nowrap
    def layer(self, spec: LayerSpec) -> Any:
        """A layer of this shape. Outside of `setup` it is unbound, to be applied to given parameters."""
        kv_heads = max(self.kv_heads, getattr(spec.attention, "num_kv_heads", 0))
        common = spec, self.config.hidden_size, kv_heads, self.dtype
        others: dict[str, Any] = {
            "scaled_sandwich": ScaledSandwich, "altup": AltUpLayer, "hyper": HyperLayer, "shortcut": ShortcutLayer,
            "memory": MemoryLayer, "affine": AffineLayer, "gated_streams": GatedStreamsLayer,
            "weighed_skip": WeighedSkipLayer,
        }  # fmt: skip
        if spec.residual in others:
            return others[spec.residual](*common, self.config.per_layer)
        return DecoderLayer(*common)

    def begin(self, token_ids: jax.Array, positions: jax.Array, ops: Ops) -> tuple[jax.Array, Ropes]:
        """token_ids and positions, int32 [tokens] each -> the first layer's input [tokens, hidden], and the angles."""
        config = self.config
        x = self.embed(token_ids, ops)
        if config.embed_scale != 1.0:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        if config.embed_size is not None:
            x = self.project_in(x, ops)
        if config.learned_positions is not None:
            x = x + self.positions(positions)
        if config.embed_norm is not None:
            x = self.embed_norm(x, ops)[1]
        return x, angles(config, positions)

    def enter(self, token_ids: jax.Array, x: jax.Array, ops: Ops) -> tuple[jax.Array, jax.Array]:
        """(the first layer's input, the layers' own inputs [tokens, layers, ...]), from the tokens and what `begin`
        makes of them; for models whose layers have such. Without vectors of their own they get the tokens."""
        own = self.streams.tokens if self.config.per_layer is None else self.per_layer
        return (x if self.config.streams is None else self.streams.begin(x, ops)), own(token_ids, x, ops)

    def finish(self, x: jax.Array, y: Partials | None, ops: Ops) -> jax.Array:
        """The last layer's (x, y) -> final hidden states [tokens, hidden], after the last norm."""
        if self.config.streams is not None:
            x = self.streams.end(x, ops)
        return added(x, y) if self.config.norm is None else self.norm(x, ops, y)[1]

    def logits(self, hidden: jax.Array, ops: Ops) -> jax.Array:
        """hidden [rows, hidden] -> float32 [rows, vocab_rows]. Columns beyond the vocabulary have no meaning."""
        config = self.config
        if config.embed_size is not None:
            hidden = self.project_out(hidden, ops)
        if config.tie_embeddings:
            of_head = self.variables.get("params", {}).get("head", {}).get("lora")
            logits = self.embed.logits(hidden, ops, of_head)
        else:
            logits = self.head(hidden, ops)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        return logits

    def init_all(self, token_ids: jax.Array) -> jax.Array:
        """Uses every weight once, so that flax declares all parameters. Only shapes matter, not the result."""
        x, ropes = self.begin(token_ids, token_ids, self.ops)
        y: Any = None
        own: tuple[jax.Array, ...] = ()
        if self.config.enters:
            x, inputs = self.enter(token_ids, x, self.ops)
            own = (inputs[:, 0],)
        for layer in self.layers:
            x, y = layer(x, y, ropes, partial(stand_in, layer.spec, self.dtype), self.ops, *own)
        return self.logits(self.finish(x, y, self.ops), self.ops)
