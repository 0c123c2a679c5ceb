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


def square_side(hf: HFConfig, key: str, default: int) -> int:
    """A size in pixels that is one number, or two equal ones. Raises ConfigError for anything else."""
    hf.ignore(key)  # `take` may allow one number only
    given = hf.values.get(key) or default
    sides = given if isinstance(given, list | tuple) else [given]
    if any(type(side) is not int or side < 1 or side != sides[0] for side in sides):
        raise ConfigError(f"{hf.source}: {key}={given!r} is not supported (only squares)")
    return int(sides[0])


def joined_side(hf: HFConfig, key: str) -> int:
    """The side of squares of patches that become one feature, whose inverse is the setting `key`. Raises ConfigError if
    there is no such number."""
    ratio = hf.take(key, 0.5)
    side = round(1 / ratio) if isinstance(ratio, int | float) and 0 < ratio <= 1 else 0
    if not side or side * ratio != 1:
        raise ConfigError(f"{hf.source}: {key}={ratio!r} must be one divided by a whole number")
    return side
