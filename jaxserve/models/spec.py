"""The shape of a model: a tuple of layers, each described by named choices. Nothing branches on a family's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from jaxserve.config import ConfigError
from jaxserve.models.rope_spec import QueryScale as QueryScale
from jaxserve.models.rope_spec import RopeConfig as RopeConfig
from jaxserve.models.rope_spec import RopeScaling as RopeScaling
from jaxserve.pallas_kernels.routing import Router

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
Residual = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms", "post_ln"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the last axis.

    Attributes:
      kind: rms (Zhang & Sennrich 2019, arXiv:1910.07467) or layer (Ba et al. 2016, arXiv:1607.06450).
      scale, bias: whether it has one.
      offset: added to the scale as the file has it. Gemma's files hold w of a scale 1 + w. The sum is kept in float32.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    scale: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QKNormSpec:
    """Norms of queries and of keys.

    Attributes:
      over: head: of each head, with one scale [head_dim] for all heads; each_head: of each head, with a scale of its
        own [heads, head_dim]; width: of all heads together, with a scale [heads * head_dim].
      after_rope: whether queries and keys are rotated before.
    """

    norm: NormSpec = NormSpec()
    over: Literal["head", "each_head", "width"] = "head"
    after_rope: bool = False

    @property
    def fused(self) -> bool:
        """Whether the operations that rotate queries and keys also compute this norm (`Ops.rotate`)."""
        return self.over == "head" and not self.after_rope and self.norm.kind == "rms" and self.norm.scale


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of one layer.

    Attributes:
      window: how many tokens back a token sees, itself included; None: all.
      rope: which of `ModelConfig.ropes` turns queries and keys.
      scale: what the products of queries and keys are multiplied with; None: head_dim ** -0.5.
      softcap: scores become softcap * tanh(score / softcap); None: they stay.
      sinks: each query head has a learned logit that takes part in the softmax and has no value (gpt-oss).
      clip: queries, keys and values are limited to [-clip, clip]; None: they are not.
      out_gate: what a head's results are multiplied with, before the output projection: sigmoid of a further projection
        of the layer's input, which files keep behind each head's query (Qwen3-Next); None: nothing.
      qk_norm: norms of queries and keys; None: there are none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    rope: str = "default"
    scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    clip: float | None = None
    out_gate: Literal["sigmoid"] | None = None
    qk_norm: QKNormSpec | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim must be even and positive for rotary positions, got {self.head_dim}")

    @property
    def softmax_scale(self) -> float:
        """What products of queries and keys are multiplied with before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotated_dim(self) -> int:
        """Numbers of a head that rotary positions are for."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of one layer: keys and values of all heads are
    projected from one latent for each token, which the cache keeps beside a rotated key that all heads share.

    Attributes:
      rank: numbers of a latent.
      nope_dim, rope_dim: numbers of a head's query that meet a projected key, and the rotated one.
      v_dim: numbers of a head's value.
      q_rank: queries are projected from a latent of so many numbers; None: from the layer's input.
      norm: of both latents.
      bias: of the projections down, and of the output's.
      rope, scale: see `AttentionSpec`.
    """

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    norm: NormSpec
    bias: bool = False
    rope: str = "default"
    scale: float | None = None
    window: None = None

    def __post_init__(self) -> None:
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even and positive, got {self.rope_dim}")

    @property
    def num_kv_heads(self) -> int:
        """Each head has keys and values of its own."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a query."""
        return self.nope_dim + self.rope_dim

    @property
    def down_size(self) -> int:
        """Numbers that a token is projected down to: the latents, and the key that all heads share."""
        return (self.q_rank or 0) + self.rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """What products of queries and keys are multiplied with before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotated_dim(self) -> int:
        """Numbers of a head that rotary positions are for."""
        return self.rope_dim


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net (Yang et al. 2025, arXiv:2412.06464) in the place of attention: per sequence it keeps a matrix
    for each value head, whatever the sequence's length.

    Attributes:
      key_heads, value_heads: consecutive value heads share a key head.
      key_dim, value_dim: numbers of a head's queries and keys, and of its values.
      conv_width: tokens that the convolution before it sees, a token itself included.
      activation: after the convolution.
      norm: of each value head's results, which are then gated with the silu of a projection of the layer's input.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    activation: Activation = "silu"
    norm: NormSpec
    window: None = None

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_num_value_heads={self.value_heads} is no multiple of linear_num_key_heads={self.key_heads}"
            )
        if self.conv_width < 2:
            raise ConfigError(f"linear_conv_kernel_dim must be at least 2, got {self.conv_width}")

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution takes, for each key head: its query, its key, its group's values."""
        return 2 * self.key_dim + self.group * self.value_dim


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token goes through a few of several MLPs.

    Attributes:
      count: experts of a layer.
      router: how a token's experts are chosen and weighted.
      router_bias: the router's logits have a learned bias.
      limit: the activation is `ops.clamped_gate` with this limit (gpt-oss); None: it is `MLPSpec.activation`.
      shared_size: numbers between the two products of an MLP that every token goes through as well; 0: there is none.
      shared_gate: the result of the shared MLP is multiplied with the sigmoid of a product with the token (Qwen2-MoE).
    """

    count: int
    router: Router
    router_bias: bool = False
    limit: float | None = None
    shared_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if problem := self.router.problem(self.count):
            raise ConfigError(problem)


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A gated MLP, down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202), or several as experts.

    Attributes:
      size: numbers between the two products, of one expert where there are several.
      gated: False: down(activation(up(x))).
      experts: None: one MLP for all tokens.
    """

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer: attention, or what stands in its place, and MLP, each of which adds its result to the residual stream x.

    Attributes:
      norm: of every norm of the layer; `residual` says where they are.
      residual: what the layer makes of x, in which N is a norm, f the attention and then the MLP:
        pre: x + f(N(x)); post: x + N(f(x)) (OLMo 2); sandwich: x + N(f(N(x))) (Gemma 2); post_ln: N(x + f(x)) (the
        first transformers); parallel: x + attention(N(x)) + MLP(N(x)), of one norm or of two.
      residual_scale: multiplies what attention and MLP add.
    """

    attention: AttentionSpec | LatentAttentionSpec | GatedDeltaSpec
    mlp: MLPSpec
    norm: NormSpec = NormSpec()
    residual: Residual = "pre"
    residual_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A table [rows, hidden] of which row position + offset is added to the embedding of a token."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      family: for people to read; no code depends on it.
      layers: in their order. Equal ones are traced and compiled once.
      norm: after the last layer; None: there is none.
      ropes: rotary embeddings by the names that layers know them by.
      max_position: the longest sequence in tokens that the model was made for.
      dtype: of the checkpoint.
      embed_size: numbers of a token's embedding, which matrices bring to and from the hidden size; None: the same.
      embed_scale: multiplies embeddings.
      learned_positions: None: positions are known from the rotation alone.
      head_bias: the output head has one.
      logit_scale, logit_softcap: logits are multiplied; then they become softcap * tanh(logit / softcap).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    ropes: Mapping[str, RopeConfig] = field(hash=False)
    max_position: int
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    embed_size: int | None = None
    embed_scale: float = 1.0
    learned_positions: LearnedPositions | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ropes", MappingProxyType(dict(self.ropes)))
        attentions = self.attentions
        if len({spec for spec in self.specs if isinstance(spec, GatedDeltaSpec)}) > 1:
            raise ConfigError("all recurrent layers must have the same shape")
        shapes = {(type(a).__name__, a.num_heads, a.num_kv_heads, a.head_dim, a.rotated_dim) for a in attentions}
        if len(shapes) != 1:
            raise ConfigError(f"all attention layers must have as many heads of the same size, got {sorted(shapes)}")
        if unknown := {attention.rope for attention in attentions} - set(self.ropes):
            raise ConfigError(f"layers use rotary embeddings {sorted(unknown)}; there are {sorted(self.ropes)}")
        for rope in self.ropes.values():
            if (rope.rotary_dim or 0) > self.rotated_dim:
                raise ConfigError(f"{rope.rotary_dim} channels of a head cannot turn: it has {self.rotated_dim}")
            pairs = (self.rotated_dim if rope.rotary_dim is None else rope.rotary_dim) // 2
            counts = {len(rope.short_factors), len(rope.long_factors)}
            if rope.scaling == "longrope" and counts != {pairs}:
                raise ConfigError(
                    f"longrope needs a factor for each of {pairs} pairs of channels, got {sorted(counts)}"
                )

    def limited_to(self, length: int) -> ModelConfig:
        """The same for sequences of at most so many tokens. longrope has factors for sequences within the original
        context and others for longer ones. All sequences get the same, so that cached keys fit every sequence."""

        def limited(rope: RopeConfig) -> RopeConfig:
            factors = rope.short_factors if length <= rope.original_max_position else rope.long_factors
            return replace(rope, long_factors=factors) if rope.scaling == "longrope" else rope

        return replace(self, ropes={name: limited(rope) for name, rope in self.ropes.items()})

    @property
    def norm_eps(self) -> float:
        """Of the norm after the last layer."""
        return 0.0 if self.norm is None else self.norm.eps

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Of each layer that has experts; 0 where none has."""
        return max((layer.mlp.experts.count for layer in self.layers if layer.mlp.experts is not None), default=0)

    @property
    def specs(self) -> list[AttentionSpec | LatentAttentionSpec | GatedDeltaSpec]:
        """Each layer's attention, or what stands in its place."""
        return [layer.attention for layer in self.layers]

    @property
    def attentions(self) -> list[AttentionSpec | LatentAttentionSpec]:
        """The attention of those layers that have one; there is at least one such layer."""
        return [spec for spec in self.specs if not isinstance(spec, GatedDeltaSpec)]

    @property
    def recurrent(self) -> GatedDeltaSpec | None:
        """What the layers without attention are; None: there are none."""
        return next((spec for spec in self.specs if isinstance(spec, GatedDeltaSpec)), None)

    @property
    def num_recurrent(self) -> int:
        """Layers without attention."""
        return self.num_layers - len(self.attentions)

    @property
    def num_heads(self) -> int:
        """Query heads of every attention layer."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of every attention layer."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a head in every attention layer."""
        return self.attentions[0].head_dim

    @property
    def rotated_dim(self) -> int:
        """Numbers of a head that rotary positions are for, in every attention layer."""
        return self.attentions[0].rotated_dim

    @property
    def has_windows(self) -> bool:
        return any(layer.attention.window is not None for layer in self.layers)
