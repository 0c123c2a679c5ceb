"""The shape of a model: a tuple of layers of named choices. Values that do not fit together raise ConfigError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from jaxserve.config import ConfigError
from jaxserve.models.alibi import CHANNELS as ALIBI_CHANNELS
from jaxserve.models.rope_spec import QueryScale as QueryScale
from jaxserve.models.rope_spec import RopeConfig as RopeConfig
from jaxserve.models.rope_spec import RopeScaling as RopeScaling
from jaxserve.pallas_kernels.expert_routing import Router
from jaxserve.pallas_kernels.types import ConvState, DeltaState, LightningState, MambaState, NgramState, ScanState

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
Residual = Literal[
    "pre", "post", "sandwich", "scaled_sandwich", "altup", "hyper", "parallel", "parallel_two_norms", "post_ln",
    "normed", "normed_mlp", "shortcut", "memory", "layer_scale", "affine", "gated_streams", "weighed_skip",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the last axis.

    Attributes:
      kind: rms (Zhang & Sennrich 2019, arXiv:1910.07467) or layer (Ba et al. 2016, arXiv:1607.06450).
      scale, bias: whether the norm has a learned scale, and a learned bias.
      offset: added to the scale that the file holds. Gemma's files hold w, and the norm multiplies by 1 + w. The sum is
        kept in float32.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    scale: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QKNormSpec:
    """The norms of queries and keys.

    Attributes:
      over: head: each head is normed by itself, and all share one scale [head_dim]. each_head: each head is normed by
        itself, with a scale of its own [heads, head_dim]. width: all heads together, with a scale [heads * head_dim].
      after_rope: whether the rotation comes before the norms.
    """

    norm: NormSpec = NormSpec()
    over: Literal["head", "each_head", "width"] = "head"
    after_rope: bool = False

    @property
    def fused(self) -> bool:
        """Whether the operations that rotate queries and keys also compute this norm (`Ops.rotate`)."""
        return self.over == "head" and not self.after_rope and self.norm.kind == "rms" and self.norm.scale


@dataclass(frozen=True, kw_only=True)
class BlockChoiceSpec:
    """Chooses the blocks of tokens that a layer's attention sees (MiniMax-M3), for each head of keys and values by
    itself. A query of its own for each such head is compared with one key per cached token; the best product with a
    token of a block is the block's score.

    Attributes:
      dim: channels of these queries and keys.
      turned: how many of them, the first, turn as those of the attention do.
      size: neighbouring tokens of a block.
      count: blocks that are chosen. A token sees all tokens as long as they are in no more blocks.
      local: of these, the block of the token itself and those right before it.
      norm: of the queries and of the keys.
    """

    dim: int
    turned: int
    size: int
    count: int
    local: int
    norm: NormSpec

    def __post_init__(self) -> None:
        if self.dim < self.turned:
            raise ConfigError(f"index_head_dim={self.dim} is below the {self.turned} channels that turn")
        if not 0 <= self.local <= self.count:
            raise ConfigError(f"index_local_blocks={self.local} must be from 0 to index_topk_blocks={self.count}")

    @property
    def tokens(self) -> int:
        """The most tokens that a token sees."""
        return self.size * self.count


@dataclass(frozen=True, kw_only=True)
class PooledChoiceSpec:
    """Chooses the blocks of tokens that all heads of a layer's attention see (Qwen4-Exp). A block has one key: the mean
    of its tokens' keys, which is normed and turns by the position of the block's first token. A block's score is the
    sum over a few queries of the product with its key, where this is positive. Blocks whose tokens are complete are
    chosen from. The tokens behind the last of these are seen in any case.

    Attributes:
      heads: queries per token.
      dim, turned: as in `BlockChoiceSpec`.
      size: neighbouring tokens of a block.
      count: complete blocks that are chosen. A token sees all tokens as long as there are no more.
      norm: of the queries, and of the blocks' keys.
      rope: the name of the rotary embedding of blocks' keys.
    """

    heads: int
    dim: int
    turned: int
    size: int
    count: int
    norm: NormSpec
    rope: str

    def __post_init__(self) -> None:
        if self.dim < self.turned:
            raise ConfigError(f"indexer_head_dim={self.dim} is below the {self.turned} channels that turn")

    @property
    def tokens(self) -> int:
        """The most tokens that a token sees."""
        return self.size * (self.count + 1) - 1


@dataclass(frozen=True, kw_only=True)
class LargestChoiceSpec:
    """Chooses the tokens that a layer's attention sees, for each head of keys and values by itself: those with the
    largest biases (`AttentionSpec.value_bias`).

    Attributes:
      dim: the number of heads of keys and values.
      count: tokens that are chosen. A token sees all tokens as long as there are no more.
    """

    dim: int
    count: int
    size: int = 1
    local: int = 0

    @property
    def tokens(self) -> int:
        """The most tokens that a token sees."""
        return self.count


BlocksSpec = BlockChoiceSpec | PooledChoiceSpec | LargestChoiceSpec


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of one layer.

    Attributes:
      window: tokens that a token sees, itself included; None: all tokens before it and itself.
      chunk: size of chunks in tokens; a token sees only earlier tokens of its own chunk, and itself; None: no chunks.
      rope: the name, in `ModelConfig.ropes`, of the rotary embedding of queries and keys.
      scale: factor of the products of queries and keys; None: head_dim ** -0.5.
      softcap: scores become softcap * tanh(score / softcap); None: scores stay as they are.
      sinks: each query head has a learned logit that takes part in the softmax and has no value (gpt-oss).
      alibi: for each query head, by how much a score falls with each token of distance (`alibi`); None: scores do not
        depend on distances.
      clip: queries, keys and values are limited to [-clip, clip], behind the norms; None: they are not limited.
      v_dim: channels of a head's value; None: head_dim. The cache keeps head_dim numbers of each value, of which the
        last are then zero.
      value_scale: multiplies values.
      out_gate: before the output projection, results are multiplied by the sigmoid or the softplus of a further
        projection of the layer's input. Files keep this projection behind each head's query (Qwen3-Next), or by itself
        (AFMoE). None: there is no gate.
      gate_bias: whether that projection has a bias.
      gate_per_head: a head has one gate for all its channels, instead of one for each.
      qk_norm: the norms of queries and keys; None: there are none.
      v_norm: the norm of each head's value, without a scale; None: there is none.
      out_norm: the norm of the results of all heads together, before the output projection (BitNet); None: there is
        none.
      v_is_k: values are the results of the projection of keys, before these are normed and rotated (Gemma 4).
      shares_kv: the layer has no keys and values of its own. It reads those of an earlier layer, see
        `ModelConfig.kv_sources`.
      blocks: how blocks of tokens are chosen; None: the layer sees all of them.
      experts: pairs of projections of queries and of results, of which a router chooses as many for each token as a
        head of keys and values has queries (`routed_attention`, JetMoE); 0: there is one such pair for all tokens.
      value_bias: scores grow by a learned function of the values of the key's token (`value_bias`, Doge).
      difference: results of pairs of heads are subtracted and normed: the share that is not learned, and the norm's
        epsilon (`differential`). Half of a head's channels have keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    rope: str = "default"
    scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    alibi: tuple[float, ...] | None = None
    clip: float | None = None
    v_dim: int | None = None
    value_scale: float = 1.0
    out_gate: Literal["sigmoid", "softplus"] | None = None
    gate_bias: bool = False
    gate_per_head: bool = False
    qk_norm: QKNormSpec | None = None
    v_norm: NormSpec | None = None
    out_norm: NormSpec | None = None
    v_is_k: bool = False
    shares_kv: bool = False
    blocks: BlocksSpec | None = None
    experts: int = 0
    value_bias: bool = False
    difference: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim must be even and positive for rotary positions, got {self.head_dim}")
        if self.value_dim > self.head_dim:
            raise ConfigError(f"v_head_dim={self.v_dim} must not be above head_dim={self.head_dim}")

    @property
    def value_dim(self) -> int:
        """Channels of a head's value."""
        return self.v_dim or self.head_dim

    @property
    def cached_dim(self) -> int:
        """Numbers of a head's key, and of its value, in the cache."""
        return self.head_dim + (ALIBI_CHANNELS if self.alibi is not None or self.value_bias else 0)

    @property
    def gate_channels(self) -> int:
        """Gates of a head's result."""
        return 1 if self.gate_per_head else self.value_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of products of queries and keys before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotated_dim(self) -> int:
        """Channels of a head to which the rotary embedding applies."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Chooses the tokens that each token's latent attention sees (DeepSeek Sparse Attention, arXiv:2512.02556). Queries
    of its own are compared with one key per cached token.

    Attributes:
      heads: queries per token.
      dim: channels of a query and of a key, of which the first turn as those of the attention do.
      turned_last: in files the last channels turn.
      top_k: tokens that are chosen. A token sees all tokens as long as there are no more.
      interleaved: files have the two channels of a rotated pair next to each other, and not half of the turning
        channels apart.
      norm: the norm of the keys.
      input_norm: queries are projected from the layer's input behind this norm; None: from the latent of the
        attention's queries.
      shared: the layer chooses nothing itself. It sees what the last layer before it that chooses has chosen.
    """

    heads: int
    dim: int
    top_k: int
    turned_last: bool = False
    interleaved: bool = False
    norm: NormSpec = NormSpec(kind="layer", eps=1e-6, bias=True)
    input_norm: NormSpec | None = None
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of one layer. For each token the cache keeps one
    latent, from which keys and values of all heads are projected, and one rotated key, which all heads share.

    Attributes:
      rank: size of the latent of keys and values.
      nope_dim, rope_dim: channels of a head's query for the projected key, and for the rotated key.
      v_dim: channels of a head's value.
      q_rank: size of the latent that queries are projected from; None: they are projected from the layer's input.
      norm: the norm of both latents.
      bias: whether the projections down to latents, and the output projection, have biases.
      head_gate: before the output projection, each head's result is multiplied by a sigmoid gate, projected from the
        layer's input.
      channel_gates: each channel of a head's result has a gate of its own.
      latent_twice: queries and gates are projected from the latent behind its norm and, beside it, before its norm
        (A.X K2). In files each head's query and its gates are one.
      sinks: as in `AttentionSpec`.
      rope, scale: see `AttentionSpec`.
      rotates: whether there are rotated keys; if not, all channels of a head's query are for the projected key.
      latent_scale: multiplies the normed latent of keys and values.
      learned_scale: queries, also those of the indexer, are multiplied by a learned line of log(position + 1), for each
        head; and angles by learned factors.
      indexer: chooses the tokens that a token sees; None: it sees all tokens before it and itself.
    """

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    norm: NormSpec
    bias: bool = False
    head_gate: bool = False
    channel_gates: bool = False
    latent_twice: bool = False
    sinks: bool = False
    rope: str = "default"
    scale: float | None = None
    rotates: bool = True
    latent_scale: float = 1.0
    learned_scale: bool = False
    indexer: IndexerSpec | None = None
    window: None = None

    def __post_init__(self) -> None:
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even and positive, got {self.rope_dim}")
        if self.indexer is not None and self.q_rank is None and self.indexer.input_norm is None:
            raise ConfigError("an indexer reads the latent of queries, but q_lora_rank is null")
        if self.indexer is not None and self.indexer.dim < self.rope_dim:
            raise ConfigError(f"index_head_dim={self.indexer.dim} is below qk_rope_head_dim={self.rope_dim}")

    @property
    def gates(self) -> int:
        """Gates of a head's result."""
        return self.v_dim if self.channel_gates else 1

    @property
    def chooses(self) -> bool:
        """Whether the layer has an indexer of its own."""
        return self.indexer is not None and not self.indexer.shared

    @property
    def num_kv_heads(self) -> int:
        """Equals the number of heads: each head has keys and values of its own."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def down_size(self) -> int:
        """Numbers per token that the projection down gives: the latents, and the key that all heads share."""
        return (self.q_rank or 0) + self.rank + self.turned_dim

    @property
    def turned_dim(self) -> int:
        """Channels of the layer's rotated key; `rope_dim` are those of the cache, which all layers share."""
        return self.rope_dim if self.rotates else 0

    @property
    def projected_dim(self) -> int:
        """Channels of a head's projected key."""
        return self.head_dim - self.turned_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of products of queries and keys before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotated_dim(self) -> int:
        """Channels of a head to which the rotary embedding applies."""
        return self.rope_dim


@dataclass(frozen=True, kw_only=True)
class CompressionSpec:
    """What a layer of compressed attention keeps of tokens beyond its window: one entry for every `rate` tokens, their
    mean, whose weights are learned for each channel.

    Attributes:
      rope: the name of the rotary embedding of entries, which turn by the position of the first of their tokens.
      overlaps: the mean is also over the `rate` tokens before these, with weights and values of their own.
      indexer: chooses the entries that a token sees. It has compressed keys of its own. None: a token sees all entries
        whose tokens are complete.
    """

    rate: int
    rope: str
    overlaps: bool = False
    indexer: IndexerSpec | None = None

    @property
    def series(self) -> int:
        """How many values a token has for entries: one for that of its own tokens, and one for the next."""
        return 2 if self.overlaps else 1

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return self.series * self.rate


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec:
    """Attention of one layer over a window of tokens and over compressed entries of all tokens (DeepSeek-V4). A token
    has one key, which all heads share and which is also its value.

    Attributes:
      rope_dim: the last channels of a head, which turn in pairs of neighbours. Those of results are turned back.
      q_rank: size of the latent that queries are projected from.
      window: as in `AttentionSpec`.
      out_groups, out_rank: the results of each group of heads are projected to a latent of this size; the output
        projection reads these latents.
      norm: of the latent, of keys and of entries. Queries have it without a scale.
      compression: None: the layer sees its window only.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    window: int
    out_groups: int
    out_rank: int
    norm: NormSpec
    rope: str
    compression: CompressionSpec | None = None

    def __post_init__(self) -> None:
        if self.rope_dim < 2 or self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ConfigError(f"of head_dim={self.head_dim} an even number of channels must turn, got {self.rope_dim}")
        if self.num_heads % self.out_groups:
            raise ConfigError(f"num_attention_heads={self.num_heads} is no multiple of o_groups={self.out_groups}")
        indexer = None if self.compression is None else self.compression.indexer
        if indexer is not None and indexer.dim < self.rope_dim:
            raise ConfigError(f"index_head_dim={indexer.dim} is below the {self.rope_dim} channels that turn")

    @property
    def num_kv_heads(self) -> int:
        """Equals the number of heads: each device has the key that all heads share."""
        return self.num_heads

    @property
    def kept(self) -> int:
        """How far back tokens are read, as a window: by attention, or for the entries that are made of them."""
        return max(self.window, 0 if self.compression is None else self.compression.span)

    @property
    def softmax_scale(self) -> float:
        """The factor of products of queries and keys before the softmax."""
        return self.head_dim**-0.5

    @property
    def rotated_dim(self) -> int:
        """Channels of a head to which the rotary embedding applies."""
        return self.rope_dim


@dataclass(frozen=True)
class StatePart:
    """One of the arrays that a recurrent layer keeps of a sequence.

    Attributes:
      shape: for one sequence.
      split: the axis of `shape` that devices share; None: each device has the whole array.
    """

    shape: tuple[int, ...]
    split: int | None = 0
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """A recurrent layer, which takes the place of attention. What it keeps of a sequence has a fixed size, whatever the
    sequence's length: the arrays of `state`, which one operation advances by a step's tokens
    (`execution.slot_states.advance`)."""

    window: None = None

    @property
    def state(self) -> Any:
        """What the layer keeps of a sequence: a NamedTuple of `StatePart`, of the class of which the operation takes
        and returns the layer's states."""
        raise NotImplementedError

    @property
    def results(self) -> tuple[int, ...]:
        """The shape of the operation's float32 results for a token. Devices share the first axis."""
        raise NotImplementedError

    def cannot_share(self, devices: int) -> str | None:
        """What this number of devices cannot share evenly; None: they can share the layer."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(RecurrentSpec):
    """A gated delta net (Yang et al. 2025, arXiv:2412.06464). Its state of a sequence has one matrix [key_dim,
    value_dim] per value head, and the convolution's last inputs.

    Attributes:
      key_heads, value_heads: the numbers of heads; each key head serves `group` consecutive value heads.
      key_dim, value_dim: channels of a head's query and of its key, and of its value.
      conv_width: tokens that the convolution over queries, keys and values sees, a token itself included.
      activation: applied to the results of the convolution.
      norm: of each value head's results, which are then multiplied by `gate` of a projection of the layer's input.
      ngrams: what is kept of a sequence for n-grams (`NgramSpec.kept`), with room in all layers of a model that has
        such; None: nothing.
      rate_scale: multiplies the rates, which are between 0 and 1. With 2 a state may change its sign (Grazzi et al.
        2025, arXiv:2411.12537).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    activation: Activation = "silu"
    norm: NormSpec
    gate: Literal["silu", "sigmoid"] = "silu"
    rate_scale: float = 1.0
    ngrams: tuple[StatePart, StatePart] | None = None

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
        """Channels per token and key head that enter the convolution: its query, its key, and its group's values."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def state(self) -> DeltaState | NgramState:
        matrix: Any = StatePart((self.key_heads, self.group, self.key_dim, self.value_dim))
        inputs: Any = StatePart((self.key_heads, (self.conv_width - 1) * self.channels))
        own = DeltaState(matrix, inputs)
        further: Any = self.ngrams
        return own if further is None else NgramState(own, *further)

    @property
    def results(self) -> tuple[int, ...]:
        return self.key_heads, self.group, self.value_dim

    def cannot_share(self, devices: int) -> str | None:
        return f"{self.key_heads} key heads of recurrent layers" if self.key_heads % devices else None


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec(RecurrentSpec):
    """Kimi delta attention (Kimi Team 2025, arXiv:2510.26692): a gated delta net in which each channel of a head's keys
    has a decay of its own. Its state of a sequence has one matrix [dim, dim] per head, and the convolution's last
    inputs.

    Attributes:
      dim: channels of a head's query, key and value.
      conv_width, activation: as in `GatedDeltaSpec`.
      norm: of each head's results, which are then multiplied by the sigmoid of a projection of the layer's input.
      rank: size of the latents through which decays and these gates are projected; None: they are projected from the
        layer's input.
      least_decay: the logarithm of a decay is this, a number below 0, times a sigmoid. None: it has no lower bound.
    """

    heads: int
    dim: int
    conv_width: int
    activation: Activation = "silu"
    norm: NormSpec
    rank: int | None = None
    least_decay: float | None = None

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise ConfigError(
                f"the convolution of Kimi delta attention must see at least 2 tokens, got {self.conv_width}"
            )

    @property
    def state(self) -> DeltaState:
        matrix: Any = StatePart((self.heads, self.dim, self.dim))
        inputs: Any = StatePart((self.heads, (self.conv_width - 1) * 3 * self.dim))
        return DeltaState(matrix, inputs)

    @property
    def results(self) -> tuple[int, ...]:
        return self.heads, self.dim

    def cannot_share(self, devices: int) -> str | None:
        return f"{self.heads} heads of recurrent layers" if self.heads % devices else None


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution (LFM2). Of the three projections of the layer's input, the first multiplies the third
    before a causal convolution of each channel, and the second multiplies its results. The state is the convolution's
    last inputs.

    Attributes:
      channels: of each of the three projections.
      width: tokens that the convolution sees, a token itself included.
      bias: whether the projections and the convolution have biases.
    """

    channels: int
    width: int
    bias: bool = False

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ConfigError(f"conv_L_cache must be at least 2, got {self.width}")

    @property
    def state(self) -> ConvState:
        inputs: Any = StatePart((self.width - 1, self.channels), split=1)
        return ConvState(inputs)

    @property
    def results(self) -> tuple[int, ...]:
        return (self.channels,)

    def cannot_share(self, devices: int) -> str | None:
        return f"{self.channels} channels of short convolutions" if self.channels % devices else None


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2 (Dao & Gu 2024, arXiv:2405.21060). Its state of a sequence has one matrix [head_dim, state_dim] per head,
    and the convolution's last inputs.

    Attributes:
      groups: equal groups of neighbouring heads. The heads of a group share the vectors B and C.
      conv_width: tokens that the convolution over x, B and C sees, a token itself included.
      conv_bias, bias, out_bias: whether the convolution, the projections of the layer's input and the output projection
        have biases.
      activation: applied to the results of the convolution.
      norm: over the results of a group's heads, with a scale for each channel, behind the gate, which is the silu of a
        projection of the layer's input. None: there is no norm.
      norm_first: the norm comes before the gate.
      least_step: steps are at least this.
      scales: multiply the projections of the layer's input: the gates, x, B, C and the steps before their bias.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    activation: Activation = "silu"
    norm: NormSpec | None = None
    norm_first: bool = False
    least_step: float = 0.0
    scales: tuple[float, float, float, float, float] = (1.0,) * 5

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ConfigError(f"{self.heads} heads of Mamba cannot form {self.groups} equal groups (n_groups)")
        if self.conv_width < 2:
            raise ConfigError(f"the convolution of Mamba must see at least 2 tokens, got {self.conv_width}")

    @property
    def per_group(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    @property
    def channels(self) -> int:
        """Channels of x, and of the gate, per token."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Numbers per token that the heads of a group share: B and C of all groups."""
        return 2 * self.groups * self.state_dim

    @property
    def state(self) -> MambaState:
        kept = self.conv_width - 1
        matrix: Any = StatePart((self.heads, self.head_dim, self.state_dim))
        inputs: Any = StatePart((kept, self.channels), split=1)
        shared: Any = StatePart((kept, self.shared), split=None)
        return MambaState(matrix, inputs, shared)

    @property
    def results(self) -> tuple[int, ...]:
        return self.heads, self.head_dim

    def cannot_share(self, devices: int) -> str | None:
        if self.heads % devices:
            return f"{self.heads} heads of Mamba"
        return f"{self.groups} groups of Mamba's heads" if self.groups % devices and devices % self.groups else None


@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """Mamba (Gu & Dao 2023, arXiv:2312.00752). Its state of a sequence has one vector [state_dim] per channel, and the
    convolution's last inputs.

    Attributes:
      rank: size of the latent from which the steps of all channels are projected.
      conv_width: tokens that the convolution sees, a token itself included.
      conv_bias, bias: whether the convolution has a bias, and whether the projections of the layer's input and of its
        results have.
      activation: applied to the results of the convolution.
      norm: of the latent, of B, and of C; None: they are not normed.
      heads: equal groups of neighbouring channels, of which each has projections of steps, B and C of its own (Zamba);
        None: these are of all channels together.
    """

    channels: int
    state_dim: int
    rank: int
    conv_width: int
    conv_bias: bool = True
    bias: bool = False
    activation: Activation = "silu"
    norm: NormSpec | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise ConfigError(f"the convolution of Mamba must see at least 2 tokens, got {self.conv_width}")
        if self.channels % (self.heads or 1):
            raise ConfigError(f"{self.channels} channels of Mamba cannot form {self.heads} equal heads (n_mamba_heads)")

    @property
    def state(self) -> ScanState:
        vectors: Any = StatePart((self.channels, self.state_dim))
        inputs: Any = StatePart((self.conv_width - 1, self.channels), split=1)
        return ScanState(vectors, inputs)

    @property
    def results(self) -> tuple[int, ...]:
        return (self.channels,)

    def cannot_share(self, devices: int) -> str | None:
        if self.channels % devices:
            return f"{self.channels} channels of Mamba"
        return f"{self.heads} heads of Mamba" if self.heads is not None and self.heads % devices else None


@dataclass(frozen=True, kw_only=True)
class LightningSpec(RecurrentSpec):
    """Lightning attention (Qin et al. 2024, arXiv:2405.17381), as in MiniMax-01. Its state of a sequence has one matrix
    [dim, dim] per head, which decays at a rate that is fixed.

    Attributes:
      dim: channels of a head's query, key and value.
      factor: multiplies the rates of all heads. It differs between layers.
      activation: applied to queries, keys and values.
      norm: of the results of all heads together, which are then multiplied by the sigmoid of a projection of the
        layer's input.
    """

    heads: int
    dim: int
    factor: float
    activation: Activation = "silu"
    norm: NormSpec

    @property
    def rates(self) -> list[float]:
        """Of each head: a token multiplies the head's matrix by exp(-rate)."""
        return [2.0 ** (-8.0 * (head + 1) / self.heads) * self.factor for head in range(self.heads)]

    @property
    def state(self) -> LightningState:
        matrix: Any = StatePart((self.heads, self.dim, self.dim))
        return LightningState(matrix)

    @property
    def results(self) -> tuple[int, ...]:
        return self.heads, self.dim

    def cannot_share(self, devices: int) -> str | None:
        return f"{self.heads} heads of recurrent layers" if self.heads % devices else None


@dataclass(frozen=True, kw_only=True)
class BesideSpec:
    """A recurrent layer that runs beside the attention of a layer (Falcon-H1): both read the same norm, and the sum of
    their results is added to x.

    Attributes:
      attention_in, attention_out: multiply the attention's input and its result.
      recurrent_in, recurrent_out: the same for the recurrent layer.
    """

    recurrent: RecurrentSpec
    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token goes through a few of several MLPs.

    Attributes:
      count: experts of a layer.
      router: how a token's experts are chosen and weighted.
      router_bias: whether the router's logits have a learned bias.
      latent_size: size of a latent that is projected from the token. Experts compute with latents, and a further matrix
        projects the sum of their results back. None: experts compute with tokens.
      shared_size: inner size of a shared MLP, which every token also goes through; 0: there is none.
      shared_gate: the shared MLP's result is multiplied by a sigmoid gate, projected from the token (Qwen2-MoE).
      shared_scale: multiplies the shared MLP's result.
      shared_bound: `MLPSpec.bound` of the shared MLP.
      own_norms: router, experts and shared MLP have norms of their own (`normed_experts`, Gemma 4).
      scaled: each expert's weights are multiplied by a learned number.
      zero: further experts, behind the others, which return their input (LongCat-Flash).
      hashed: rows of a table that tells the experts of each token of the vocabulary. Scores are then their weights
        only, and choose none. 0: there is no table.
      out_bias: a learned vector is added to the sum of the experts' results.
      skips: further experts, behind the others, that give nothing (ZAYA).
      router_size: numbers that the router reads, which the layer makes of a token; None: it reads the token.
    """

    count: int
    router: Router
    router_bias: bool = False
    latent_size: int | None = None
    shared_size: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    shared_bound: float | None = None
    own_norms: bool = False
    scaled: bool = False
    zero: int = 0
    hashed: int = 0
    out_bias: bool = False
    skips: int = 0
    router_size: int | None = None

    def __post_init__(self) -> None:
        if problem := self.router.problem(self.routed):
            raise ConfigError(problem)

    @property
    def routed(self) -> int:
        """Experts that the router chooses from."""
        return self.count + self.zero + self.skips


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """An MLP, or a mixture of MLPs as experts.

    Attributes:
      size: inner size of the MLP, or of each expert.
      gated: True: down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202). False: down(activation(up(x))).
        xielu, an activation with learned numbers, is for MLPs without a gate.
      limit: the activation is `ops.clamped_gate` with this limit (gpt-oss); None: it is `activation`. A shared MLP has
        the same.
      bound: activation(gate(x)) is at most this, and up(x) is within +-bound; None: they are not limited.
      bound_first: gate(x) is at most the bound, in the place of activation(gate(x)). A shared MLP has the same.
      gate_scale, out_scale: multiply the results of gate, before the activation, and those of down.
      inner_eps: epsilon of an RMS norm before down (BitNet); None: there is none.
      experts: the mixture; None: there is one MLP for all tokens.
      stored_size: inner size of each expert on the devices (`wide_experts`); None: `size`.
      sparsity: before the activation, gates lose what a normal distribution with their mean and deviation exceeds with
        the probability 1 - sparsity, and smaller ones become 0 (Gemma 3n); 0: gates stay as they are.
    """

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    limit: float | None = None
    bound: float | None = None
    bound_first: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    inner_eps: float | None = None
    experts: ExpertsSpec | None = None
    stored_size: int | None = None
    sparsity: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """Several residual streams, of which each layer computes with one (`altup`).

    Attributes:
      count, active: the number of streams, and the one that layers compute with.
      laurel_rank: of the low-rank path beside attention.
      scaled: the active stream has a learned scale before the layer's own vector is brought in.
    """

    count: int
    active: int
    laurel_rank: int
    scaled: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.count:
            raise ConfigError(f"altup_active_idx={self.active} must be one of {self.count} streams (altup_num_inputs)")


@dataclass(frozen=True, kw_only=True)
class HyperSpec:
    """Several residual streams (`hyper`). Each attention and each MLP reads a mixture of them, and adds to all.

    Attributes:
      count: the number of streams.
      steps: of the iteration that makes the matrix that mixes streams nearly doubly stochastic; 0: there is no such
        matrix, and streams are not mixed (HY-V4).
      eps: added to shares and to sums.
      magnitude: the largest share of a result that a stream gets.
    """

    count: int
    steps: int
    eps: float
    magnitude: float = 2.0


@dataclass(frozen=True, kw_only=True)
class GatedStreamsSpec:
    """Several residual streams (`gated_streams`). Each attention and each MLP reads the mean of the normed streams,
    whose channels are gated, and adds its result to all.

    Attributes:
      count: the number of streams.
      rank: size of the latent that the gates are projected from.
    """

    count: int
    rank: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ConfigError(f"hc_count must be above 1, got {self.count}")


@dataclass(frozen=True, kw_only=True)
class NgramSpec:
    """What a layer adds to its streams for the last few tokens (`ngrams`): embeddings of the hashes of n-grams.

    Attributes:
      longest: tokens of the longest n-grams; the shortest are pairs.
      heads: hashes of the n-grams of each length, each with rows of its own in the table of embeddings.
      dim: numbers of the embeddings of all hashes together.
      base: the rows of a hash are the next prime number from here on that no other hash has, also of layers before.
      divisor: the table's rows are a multiple of this.
      index: the number of such layers before.
      seed: of the numbers that tokens are multiplied with.
      vocab: tokens of the vocabulary.
      end: the token that n-grams do not reach across; it stands for those before the first one.
      width: tokens that the convolution over the results sees, of which `longest` - 1 are left out between two.
    """

    longest: int
    heads: int
    dim: int
    base: int
    divisor: int
    index: int
    seed: int
    vocab: int
    end: int
    width: int

    def __post_init__(self) -> None:
        if self.longest < 2 or self.width < 2:
            raise ConfigError(
                f"ngram_size={self.longest} and ple_conv_kernel_size={self.width} must both be at least 2"
            )
        if not 1 < self.base < 2**30:
            raise ConfigError(f"ngram_vocab_size_base={self.base} must be above 1 and below 2 ** 30")
        if self.dim % self.hashes:
            raise ConfigError(
                f"ple_embed_dim={self.dim} is no multiple of (ngram_size - 1) * heads_per_ngram = {self.hashes}"
            )
        if not 0 <= self.end < self.vocab:
            raise ConfigError(f"eos_token_id={self.end} is no token of the vocabulary of {self.vocab}")

    @property
    def hashes(self) -> int:
        """The number of hashes of a token, of n-grams of all lengths."""
        return (self.longest - 1) * self.heads

    def kept(self, channels: int) -> tuple[StatePart, StatePart]:
        """What the layer keeps of a sequence: the last tokens, and the last inputs of the convolution over this many
        channels."""
        tokens = StatePart((self.longest - 1,), split=None, dtype="int32")
        return tokens, StatePart(((self.width - 1) * self.longest, channels), split=None)


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """Blocks of attention and MLP that several places of a model share in turns (`memory`).

    Attributes:
      blocks: how many there are.
      attention_rank, mlp_rank: of the matrices that a place has of its own, beside those of queries, keys and values,
        and beside that of gates and ups; 0: there are none.
    """

    blocks: int
    attention_rank: int
    mlp_rank: int


@dataclass(frozen=True, kw_only=True)
class AffineSpec:
    """Attention whose queries and keys pass convolutions, and a router that reads those of the layers before it
    (`affine`, ZAYA).

    Attributes:
      widths: tokens that the two convolutions see, a token itself included: first of each channel, then of each head.
      carried: whether what the router of the layer before has read is added to what this one reads.
    """

    widths: tuple[int, int]
    carried: bool

    def __post_init__(self) -> None:
        if min(self.widths) < 1 or sum(self.widths) < 3:
            raise ConfigError(f"cca_time0 and cca_time1 must be positive and not both 1, got {self.widths}")

    @property
    def width(self) -> int:
        """Tokens that both convolutions together see."""
        return sum(self.widths) - 1


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer: attention, or a recurrent layer in its place, then an MLP. Both add their results to the stream x.

    Attributes:
      attention, mlp: None: the layer has only the other one, and one norm. `residual` is then pre.
      beside: what runs beside the attention; None: nothing. `residual` is pre where there is something.
      norm: the shape that all norms of the layer share; `residual` says where they are.
      residual: where the norms N are; f is the attention, and then the MLP. pre: x + f(N(x)). post: x + N(f(x))
        (OLMo 2). sandwich: x + N(f(N(x))) (Gemma 2). normed_mlp: pre for the attention, sandwich for the MLP (A.X K1).
        post_ln: N(x + f(x)) (the first transformers). parallel: x + attention(N(x)) + MLP(N(x)), with one norm for
        both. parallel_two_norms: the same with two norms. normed: kept * N(x) + share * f(N(x)), with the numbers of
        `shares` (MiniMax-01). layer_scale: x + s * f(N(x)) with a learned number s for each channel (Touvron et al.
        2021, arXiv:2103.17239). scaled_sandwich: sandwich, then what
        follows from the layer's part of `ModelConfig.per_layer`, all times a learned number (Gemma 4). altup: as
        `altup.AltUpLayer` says (Gemma 3n). hyper: as `hyper.HyperLayer` says (DeepSeek-V4). shortcut: as
        `shortcut.ShortcutLayer` says (LongCat-Flash). memory: as `memory.MemoryLayer` says (Zamba). affine: as
        `affine.AffineLayer` says (ZAYA). gated_streams: as `gated_streams.GatedStreamsLayer` says (Qwen4-Exp).
        weighed_skip: s * x + f(N(x)) with a learned number s for each channel (Doge).
      gated_norms: of the norms before attention and MLP, those whose results are multiplied by sigmoid gates, which are
        projected from these results through a latent of `gate_rank` numbers (A.X K2).
      residual_scale: multiplies what attention and MLP add to x.
      shares: for the attention, and for the MLP, the numbers (kept, share), if `residual` is normed.
      altup, hyper, gated: the streams, if `residual` is altup, hyper or gated_streams.
      ngrams: what the layer adds to its streams for n-grams, if `residual` is gated_streams; None: nothing.
      shortcut: the layer's part of a block, if `residual` is shortcut. The result of its MLP is held, or added; at the
        block's end what was held is added, too.
      memory: the model's shared blocks, if `residual` is memory.
      affine: the layer's convolutions and router, if `residual` is affine. The states of convolutions are `beside`.
    """

    attention: AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec | RecurrentSpec | None
    mlp: MLPSpec | None
    beside: BesideSpec | None = None
    norm: NormSpec = NormSpec()
    residual: Residual = "pre"
    gated_norms: tuple[str, ...] = ()
    gate_rank: int = 0
    residual_scale: float = 1.0
    shares: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 1.0), (1.0, 1.0))
    altup: AltUpSpec | None = None
    hyper: HyperSpec | None = None
    gated: GatedStreamsSpec | None = None
    ngrams: NgramSpec | None = None
    shortcut: Literal["begins", "between", "ends"] | None = None
    memory: MemorySpec | None = None
    affine: AffineSpec | None = None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The recurrent layer in the place of the attention or beside it."""
        if self.beside is not None:
            return self.beside.recurrent
        return self.attention if isinstance(self.attention, RecurrentSpec) else None

    @property
    def experts(self) -> ExpertsSpec | None:
        """The layer's mixture; None: it has no experts."""
        return None if self.mlp is None else self.mlp.experts

    @property
    def indexer(self) -> IndexerSpec | None:
        """The indexer that chooses what the layer's attention sees."""
        return self.attention.indexer if isinstance(self.attention, LatentAttentionSpec) else None

    @property
    def blocks(self) -> BlocksSpec | None:
        """How the blocks are chosen that the layer's attention sees."""
        return self.attention.blocks if isinstance(self.attention, AttentionSpec) else None

    @property
    def most_seen(self) -> int | None:
        """The most tokens that a token may see by what is chosen for it; None: it sees all."""
        return self.indexer.top_k if self.indexer is not None else self.blocks.tokens if self.blocks else None

    def without_indexer(self) -> LayerSpec:
        """The layer with attention that sees all tokens."""
        attention: Any = self.attention
        if self.blocks is not None:
            return replace(self, attention=replace(attention, blocks=None))
        return self if self.indexer is None else replace(self, attention=replace(attention, indexer=None))


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A learned table [rows, hidden]. Row `position + offset` is added to the embedding of the token at `position`.
    Without rows, it is sines, then cosines, of `position + offset` at frequencies from 1 to 1 / 10000 (XGLM)."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """Each layer gets a vector of its own for each token (Gemma 3n). It is the sum of an embedding of the token, and of
    a projection of the embedding that enters the first layer.

    Attributes:
      size: of a layer's vector.
      layers: of the whole model.
      rows: of the table of embeddings. Tokens beyond it have the embedding of token 0.
      norm: of the projected vectors.
      activation: of the projection of the stream that a layer multiplies its vector with.
    """

    size: int
    layers: int
    rows: int
    norm: NormSpec
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      family: the family's name, for messages; no code depends on it.
      layers: in the order in which they are applied. Equal layers are traced and compiled once.
      norm: the norm after the last layer; None: there is none.
      ropes: the rotary embeddings by name; `AttentionSpec.rope` names one of them.
      max_position: the config's limit of a sequence, in tokens; stretched positions may allow longer ones.
      dtype: the dtype of the checkpoint.
      embed_size: size of an embedding that a matrix projects to the hidden size, and another one back before the head.
      embed_scale: multiplies embeddings.
      embed_norm: the norm of embeddings, before the first layer; None: there is none.
      learned_positions: None: there is no table of positions.
      per_layer: None: layers have no inputs of their own.
      head_bias: whether the output head has a bias.
      logit_scale, logit_softcap: logits are multiplied; then they become softcap * tanh(logit / softcap).
      vision: a `models.vision.spec.VisionConfig`: how it sees; None: it reads text only.
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
    embed_norm: NormSpec | None = None
    learned_positions: LearnedPositions | None = None
    per_layer: PerLayerInputs | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    vision: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ropes", MappingProxyType(dict(self.ropes)))
        attentions = self.attentions
        if len({(type(spec), spec.state) for spec in self.specs if isinstance(spec, RecurrentSpec)}) > 1:
            raise ConfigError("all recurrent layers must have the same shape")
        if len({type(attention) for attention in attentions}) > 1:
            raise ConfigError("all attention layers must be of one kind")
        if self.several_shapes and not isinstance(self.attention, AttentionSpec):
            raise ConfigError("all layers of latent attention must have as many heads of the same size")
        if unknown := {attention.rope for attention in attentions} - set(self.ropes):
            raise ConfigError(f"layers use rotary embeddings {sorted(unknown)}; there are {sorted(self.ropes)}")
        for name, rope in self.ropes.items():
            dims = {attention.rotated_dim for attention in attentions if attention.rope == name}
            if len(dims) > 1:
                raise ConfigError(f"a rotary embedding is for heads of one size, got {sorted(dims)}")
            dim = self.rotated_dim(name)
            if (rope.rotary_dim or 0) > dim:
                raise ConfigError(f"{rope.rotary_dim} channels of a head cannot turn: it has {dim}")
            pairs = (dim if rope.rotary_dim is None else rope.rotary_dim) // 2
            counts = {len(rope.short_factors), len(rope.long_factors)}
            if rope.scaling == "longrope" and counts != {pairs}:
                raise ConfigError(
                    f"longrope needs a factor for each of {pairs} pairs of channels, got {sorted(counts)}"
                )

    def limited_to(self, length: int) -> ModelConfig:
        """The same model for sequences of at most `length` tokens, which chooses between longrope's two lists of
        factors. All sequences use the same list, so that they can share cached keys. Indexers that would choose all
        tokens are left out."""

        def limited(rope: RopeConfig) -> RopeConfig:
            factors = rope.short_factors if length <= rope.original_max_position else rope.long_factors
            return replace(rope, long_factors=factors) if rope.scaling == "longrope" else rope

        def seeing(layer: LayerSpec) -> LayerSpec:
            return layer if layer.most_seen is None or layer.most_seen < length else layer.without_indexer()

        ropes = {name: limited(rope) for name, rope in self.ropes.items()}
        return replace(self, ropes=ropes, layers=tuple(map(seeing, self.layers)))

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norm after the last layer; 0 if there is no such norm."""
        return 0.0 if self.norm is None else self.norm.eps

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Of each layer that has experts; 0 where none has."""
        return max((layer.experts.count for layer in self.layers if layer.experts is not None), default=0)

    @property
    def specs(self) -> list[AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec | RecurrentSpec]:
        """The attention, or the recurrent layer in its place, of the layers that have one. A recurrent layer that runs
        beside attention follows that."""
        pairs = [(layer.attention, None if layer.beside is None else layer.beside.recurrent) for layer in self.layers]
        return [spec for pair in pairs for spec in pair if spec is not None]

    @property
    def mlps(self) -> list[MLPSpec]:
        """The MLP of the layers that have one."""
        return [layer.mlp for layer in self.layers if layer.mlp is not None]

    @property
    def attentions(self) -> list[AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec]:
        """The attention of the layers that have attention."""
        return [spec for spec in self.specs if not isinstance(spec, RecurrentSpec)]

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The first recurrent layer, with which all others share the shape of states; None: the model has none."""
        return next((spec for spec in self.specs if isinstance(spec, RecurrentSpec)), None)

    @property
    def num_recurrent(self) -> int:
        """The number of recurrent layers, also of those beside attention."""
        return len(self.specs) - len(self.attentions)

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec:
        """The attention of the first layer that has attention; others may have other heads (`several_shapes`). For a
        model without attention, the smallest stands in: such a model keeps nothing in pages, but its sequences are
        still counted in pages, which thus take hardly any memory."""
        return next(iter(self.attentions), AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2))

    @property
    def num_heads(self) -> int:
        """Query heads of the attention layer that has the most."""
        return max(spec.num_heads for spec in self.attentions or [self.attention])

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of the attention layers that have the fewest."""
        return min(spec.num_kv_heads for spec in self.attentions or [self.attention])

    @property
    def head_dim(self) -> int:
        """Numbers of a head in the attention layers whose heads have the most."""
        return max(spec.head_dim for spec in self.attentions or [self.attention])

    @property
    def several_shapes(self) -> bool:
        """Whether attention layers differ in their heads of keys and values."""
        return len({(attention.num_kv_heads, attention.head_dim) for attention in self.attentions}) > 1

    def rotated_dim(self, rope: str) -> int:
        """Numbers of a head that this rotary embedding is for."""
        dims = [attention.rotated_dim for attention in self.attentions if attention.rope == rope]
        return dims[0] if dims else self.attention.rotated_dim

    @property
    def kv_sources(self) -> list[int]:
        """For each attention layer, counted among attention layers, the one whose keys and values it reads: its own, or
        those of the last layer before it that has its own, and is like it. Raises ConfigError if there is none."""
        found: list[int] = []
        for i, attention in enumerate(self.attentions):
            if getattr(attention, "shares_kv", False):
                like = [j for j in range(i) if _shares_with(attention, self.attentions[j])]
                if not like:
                    raise ConfigError(f"attention layer {i} shares keys and values, but no layer before it has such")
                found.append(like[-1])
            else:
                found.append(i)
        return found

    @property
    def shares_kv(self) -> bool:
        """Whether layers read keys and values of other layers."""
        return any(getattr(attention, "shares_kv", False) for attention in self.attentions)

    @property
    def passes_more(self) -> bool:
        """Whether layers take more from those before them than one vector for each token."""
        return self.shares_kv or self.enters

    @property
    def streams(self) -> AltUpSpec | HyperSpec | GatedStreamsSpec | MemorySpec | AffineSpec | str | None:
        """The residual streams; text: two, as `LayerSpec.shortcut` says; None: there is one."""
        first = self.layers[0]
        return first.altup or first.hyper or first.gated or first.memory or first.affine or first.shortcut

    @property
    def enters(self) -> bool:
        """Whether layers have several streams, or inputs of their own (`Decoder.enter`)."""
        return self.streams is not None or self.per_layer is not None

    @property
    def has_windows(self) -> bool:
        return any(spec.window is not None for spec in self.specs)


def _shares_with(attention: Any, other: Any) -> bool:
    """Whether a layer that has no keys and values can read those of the other layer."""
    if other.shares_kv:
        return False
    names = ("num_kv_heads", "head_dim", "window", "chunk", "rope")
    return all(getattr(attention, name) == getattr(other, name) for name in names)
