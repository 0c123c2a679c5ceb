"""Draft heads: one layer that reads a target model's hidden states and proposes its next tokens.

A head computes an entry for each token but a sequence's first: from the *feature* of the token before, which the
target's hidden states give, and from the token's embedding. The layer attends over the entries so far, and its result
predicts the token that follows. That result also is the feature of the token, as long as the target has not computed it
yet; so a head proposes several tokens one after the other.

There are two kinds. EAGLE-3 (Li et al. 2025, arXiv:2503.01840) reads hidden states of three layers, concatenates
feature and embedding in front of its attention, and has a vocabulary of its own. Heads for multi-token prediction
(DeepSeek-V3, arXiv:2412.19437, section 2.2) read the target's final hidden states, project feature and embedding
together, and run a whole layer of the target's kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import Attention, AttentionFn, Ropes
from jaxserve.models.decoder import DecoderLayer, added, angles
from jaxserve.models.layers import MLP, Embedding, Linear
from jaxserve.models.norms import Norm
from jaxserve.models.spec import LayerSpec, ModelConfig
from jaxserve.models.stand_in import stand_in
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops


@dataclass(frozen=True)
class DraftSpec:
    """What kind of head it is.

    Attributes:
      layers: EAGLE-3: the target's layers whose inputs it reads; the number of layers stands for the last one's output.
        Empty: it is a head for multi-token prediction, which reads the target's final hidden states.
      target_hidden: size of the target's hidden states.
      own_embed: whether it has embeddings of its own; else it uses the target's.
      own_head: whether it has an output head of its own; else it uses the target's.
      norms_residual: EAGLE-3: the layer adds its results to the normed feature, not to the feature itself.
      normed: a head for multi-token prediction: the features that it computes are normed, as the target's are.
    """

    layers: tuple[int, ...]
    target_hidden: int
    own_embed: bool = False
    own_head: bool = False
    norms_residual: bool = False
    normed: bool = False


class EagleLayer(nn.Module):
    """The layer of an EAGLE-3 head. Its attention reads the normed embedding and the normed feature side by side, and
    its results are added to the feature."""

    spec: LayerSpec
    hidden_size: int
    kv_heads: int
    dtype: Any
    norms_residual: bool
    norm_eps: float = 0.0  # queries and keys have no norms

    @nn.compact
    def __call__(
        self, x: jax.Array, embedded: jax.Array, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, Partials | None]:
        def norm(name: str, x: jax.Array, y: Partials | None = None) -> tuple[jax.Array, Any]:
            return Norm(self.spec.norm, self.hidden_size, self.dtype, name=name)(x, ops, y)

        attention: Any = self.spec.attention
        mlp: Any = self.spec.mlp
        normed = norm("hidden_norm", x)[1]
        both = jnp.concatenate([norm("embed_norm", embedded)[1], normed], axis=-1)
        reading = Attention(
            attention, self.hidden_size, self.kv_heads, self.dtype, 2 * self.hidden_size, name="attention"
        )
        y = reading(both, ropes, attend, ops)
        x, inputs = norm("mlp_norm", normed if self.norms_residual else x, y)
        return x, MLP(mlp, self.hidden_size, self.dtype, name="mlp")(inputs, ops)


class Drafter(nn.Module):
    """A draft head. `config` has its one layer and its vocabulary; the other fields are as in `Decoder`.

    Its parameters may lack the embeddings and the output head, which are then the target's; see `DraftSpec`.
    """

    spec: DraftSpec
    config: ModelConfig
    kv_heads: int
    vocab_rows: int
    target_vocab: int
    embed_rows: int  # of the table of embeddings, which is for the target's vocabulary
    dtype: Any = jnp.float32
    ops: Ops = Ops()

    def setup(self) -> None:
        config = self.config
        hidden = self.config.hidden_size
        assert config.norm is not None
        norm = partial(Norm, config.norm, hidden, self.dtype)
        linear = partial(Linear, axes=("embed", "embed"), dtype=self.dtype)
        self.embed = Embedding(self.embed_rows, hidden, self.dtype)
        if self.spec.layers:
            self.fc = linear((len(self.spec.layers) * self.spec.target_hidden,), (hidden,))
        else:
            self.embed_norm, self.hidden_norm = norm(), norm()
            self.fc = linear((2 * hidden,), (hidden,))
        self.layers = [self.layer(spec) for spec in config.layers]
        self.norm = norm()
        axes = ("vocab", "embed")
        self.head = Linear((hidden,), (self.vocab_rows,), axes, False, self.dtype, jnp.float32)

    @nn.nowrap
    def layer(self, spec: LayerSpec) -> Any:
        """An EagleLayer or DecoderLayer. Outside of `setup` it is unbound."""
        common = spec, self.config.hidden_size, self.kv_heads, self.dtype
        return EagleLayer(*common, self.spec.norms_residual) if self.spec.layers else DecoderLayer(*common)

    def features(self, hidden: list[jax.Array], ops: Ops) -> jax.Array:
        """The target's hidden states, each [tokens, target_hidden] -> features [tokens, hidden]."""
        return self.fc(jnp.concatenate(hidden, axis=-1), ops) if self.spec.layers else hidden[0]

    def entries(
        self, features: jax.Array, tokens: jax.Array, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        """Computes entries from the features before tokens, [tokens, hidden], and from the tokens, int32 [tokens].
        Returns the tokens' own features, and the hidden states for `logits`, both [tokens, hidden]."""
        return self._entries(features, self.embed(tokens, ops), ropes, attend, ops)

    def _entries(
        self, features: jax.Array, embedded: jax.Array, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        if self.spec.layers:
            x, y = self.layers[0](features, embedded, ropes, attend, ops)
        else:
            both = [self.embed_norm(embedded, ops)[1], self.hidden_norm(features, ops)[1]]
            x, y = self.layers[0](self.fc(jnp.concatenate(both, axis=-1), ops), None, ropes, attend, ops)
        x = added(x, y)
        normed = self.norm(x, ops)[1]
        return normed if self.spec.normed else x, normed

    def logits(self, hidden: jax.Array, ops: Ops) -> jax.Array:
        """hidden [rows, hidden] -> float32 [rows, vocab_rows], with the head of its own."""
        return self.head(hidden, ops)

    def init_all(self, token_ids: jax.Array) -> jax.Array:
        """Uses every weight of its own once, so that flax declares all parameters. Only shapes matter."""
        count = len(token_ids)
        spec = self.spec
        config = self.config
        hidden = jnp.zeros((count, spec.target_hidden), self.dtype)
        features = self.features([hidden] * max(len(spec.layers), 1), self.ops)
        embedded = jnp.zeros((count, config.hidden_size), self.dtype)
        if spec.own_embed:
            embedded = self.embed(token_ids, self.ops)
        attend = partial(stand_in, self.layers[0].spec, self.dtype)
        _, normed = self._entries(features, embedded, angles(config, token_ids), attend, self.ops)
        return self.logits(normed, self.ops) if spec.own_head else normed
