"""The shape of a rotary position embedding, which is part of a model's shape (`spec`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config import ConfigError

RopeScaling = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Multiplies queries by 1 + slope * log(1 + floor((position + shift) / period)), so that attention stays sharp over
    long contexts. Llama 4 calls the settings attn_scale and floor_scale, Ministral llama_4_scaling_beta."""

    slope: float
    period: float
    shift: int = 0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its extensions to longer contexts.

    `factor` stretches positions in one of these ways: linear (Chen et al. 2023, arXiv:2306.15595), dynamic NTK, llama3
    (Llama 3.1's piecewise rule) or yarn (Peng et al. 2023, arXiv:2309.00071). longrope (Ding et al. 2024,
    arXiv:2402.13753) divides each frequency by a factor of its own. It has two lists of factors, of which
    `ModelConfig.limited_to` chooses one. proportional divides all frequencies like linear, and only the pairs of
    channels with the highest frequencies turn (Gemma 4). Lengths are in tokens.

    Attributes:
      rotary_dim: the number of leading channels of a head that turn; None: all; 0: none.
      interleaved: in the checkpoint, channel 2i is paired with 2i + 1 instead of i with i + rotary_dim / 2. Loading
        reorders the weights (`rope.head_order`), so that the operations need to know one pairing only.
      turning: proportional's share of a head's pairs of channels that turn.
      halves: in the checkpoint, the first half of a head's channels turns by a patch's column, the second half by its
        row. Loading reorders the weights, rows first.
      backwards: pairs turn the other way (NanoChat). Loading swaps the channels of each pair.
      query_scale: None: queries are not scaled by their position.
      with_positions: the angles come with the positions, which `alibi` needs.
      learned: layers multiply the angles by learned factors (`rope.learned_angles`).
      sections: pairs of channels that turn by a token's position in time, by its row and by its column; (): a token has
        one position.
      sections_alternate: see `rope.position_axes`.
      stride: the angles at a position are those of the first of the `stride` positions to which it belongs.
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
    rotary_dim: int | None = None
    turning: float = 1.0
    interleaved: bool = False
    halves: bool = False
    backwards: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_scale: QueryScale | None = None
    with_positions: bool = False
    learned: bool = False
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False
    stride: int = 1

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ConfigError(f"rope_theta must be above 1, got {self.theta}")
        if self.rotary_dim is not None and (self.rotary_dim < 0 or self.rotary_dim % 2):
            raise ConfigError(f"the rotated part of a head must have an even number of channels, not {self.rotary_dim}")
        if not 0 <= self.turning <= 1:
            raise ConfigError(f"partial_rotary_factor must be from 0 to 1, got {self.turning:g}")
        if self.low_freq_factor > self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor={self.low_freq_factor} must not be above high_freq_factor={self.high_freq_factor}"
            )
