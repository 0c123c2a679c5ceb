"""The shape of a model: a tuple of layers, each described by named choices. Nothing branches on a family's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from jaxserve.config import ConfigError
from jaxserve.pallas_kernels.routing import Router

RopeScaling = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its extensions to longer contexts.

    `factor` stretches positions: linear (Chen et al. 2023, arXiv:2306.15595), dynamic NTK, llama3 (Llama 3.1's
    piecewise rule) or yarn (Peng et al. 2023, arXiv:2309.00071). Lengths are in tokens.
    """

    theta: float = 10000.0
    scaling: RopeScaling = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ConfigError(f"rope_theta must be above 1, got {self.theta}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of one layer.

    Attributes:
      window: how many tokens back a token sees, itself included; None: all.
      rope: which of `ModelConfig.ropes` turns queries and keys.
      scale: what the products of queries and keys are multiplied with; None: head_dim ** -0.5.
      softcap: scores become softcap * tanh(score / softcap); None: they stay.
      qk_norm: an RMS norm on each head of queries and keys.
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
    qk_norm: bool = False

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
      experts: None: one MLP for all tokens.
    """

    size: int
    activation: Activation = "silu"
    bias: bool = False
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer: attention and MLP, each on the norm of the residual stream, to which it adds its result."""

    attention: AttentionSpec
    mlp: MLPSpec


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      family: for people to read; no code depends on it.
      layers: in their order. Equal ones are traced and compiled once.
      norm_eps: of every RMS norm.
      ropes: rotary embeddings by the names that layers know them by.
      max_position: the longest sequence in tokens that the model was made for.
      dtype: of the checkpoint.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    ropes: Mapping[str, RopeConfig] = field(hash=False)
    max_position: int
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ropes", MappingProxyType(dict(self.ropes)))
        shapes = {(a.num_heads, a.num_kv_heads, a.head_dim) for a in (layer.attention for layer in self.layers)}
        if len(shapes) != 1:
            raise ConfigError(f"all layers must have as many heads of the same size, got {sorted(shapes)}")
        if unknown := {layer.attention.rope for layer in self.layers} - set(self.ropes):
            raise ConfigError(f"layers use rotary embeddings {sorted(unknown)}; there are {sorted(self.ropes)}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of every layer."""
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of every layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a head in every layer."""
        return self.layers[0].attention.head_dim

    @property
    def window(self) -> int | None:
        """How many tokens back any layer sees, a token itself included; None: some layer sees all."""
        windows = [layer.attention.window for layer in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def has_windows(self) -> bool:
        return any(layer.attention.window is not None for layer in self.layers)


def sharded_kv_heads(config: ModelConfig, tensor_parallel_size: int) -> int:
    """KV heads as laid out over the mesh: each is repeated when there are more devices than heads.

    Raises ConfigError when the heads, the MLP or the vocabulary cannot be split evenly.
    """
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, tensor_parallel_size
    problems = []
    if size <= kv_heads:
        if kv_heads % size:
            problems.append(f"{kv_heads} key-value heads")
    elif size % kv_heads or heads % size:
        problems.append(f"{heads} query heads over {kv_heads} key-value heads")
    problems += [f"an MLP width of {width}" for width in sorted(_widths(config)) if width % size]
    if problems:
        allowed = [n for n in range(1, heads + 1) if _splits(config, n)]
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide {' and '.join(problems)}; this model allows {allowed}"
        )
    return max(kv_heads, size)


def _splits(config: ModelConfig, size: int) -> bool:
    kv = config.num_kv_heads
    heads_fit = kv % size == 0 if size <= kv else (size % kv == 0 and config.num_heads % size == 0)
    return heads_fit and not any(width % size for width in _widths(config))


def _widths(config: ModelConfig) -> set[int]:
    shared = {layer.mlp.experts.shared_size for layer in config.layers if layer.mlp.experts} - {0}
    return {layer.mlp.size for layer in config.layers} | shared
