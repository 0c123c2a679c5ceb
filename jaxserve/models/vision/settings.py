"""Reads settings that the encoders of several families write in the same way."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig


def head_dim_of(hf: HFConfig, hidden_size: int, heads: int, key: str = "num_heads") -> int:
    """Channels of a head. `key` names the setting of `heads`. Raises ConfigError for widths that heads do not divide,
    or into so many channels that rows and columns do not turn whole pairs."""
    dim, rest = divmod(hidden_size, heads)
    if rest or dim % 4:
        raise ConfigError(f"{hf.source}: hidden_size={hidden_size} must be {key}={heads} times a multiple of 4")
    return dim


def axial_theta(hf: HFConfig, kinds: tuple[str, ...] = ("axial", "default")) -> float | None:
    """The base of the angles by rows and columns in `rope_parameters`; None: it is not there. Raises ConfigError for a
    rope_type that is not one of `kinds`."""
    rope = hf.take("rope_parameters", None) or {}
    if rope.get("rope_type", "axial") not in kinds:
        raise ConfigError(f"{hf.source}: rope_type={rope['rope_type']!r} is not supported (only 'axial')")
    return float(rope["rope_theta"]) if rope.get("rope_theta") else None
