"""Rotary position embeddings and their long-context extensions.

The same rules as transformers' `modeling_rope_utils`, with one difference: dynamic NTK depends on the position of the
token alone (its sequence length is position + 1), not on what else is in the batch, so that a token's keys do not
depend on how its prompt was chunked. The two agree whenever the prompt fits the original context.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.spec import RopeConfig

_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rope(hf: HFConfig, max_position: int) -> RopeConfig:
    """RopeConfig from either style of config.json: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    theta = hf.take("rope_theta", None)
    parameters = hf.take("rope_parameters", None)
    scaling = dict(hf.take("rope_scaling", None) or parameters or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _SCALINGS:
        raise ConfigError(f"{hf.source}: rope scaling {kind!r} is not supported (only {', '.join(_SCALINGS)})")
    theta = scaling.pop("rope_theta", None) or theta or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or hf.take("partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        raise ConfigError(f"{hf.source}: partial_rotary_factor={partial} is not supported (only 1.0)")
    original = scaling.pop("original_max_position_embeddings", None)
    original = hf.take("original_max_position_embeddings", None) or original
    values: dict[str, Any] = {
        "theta": float(theta),
        "scaling": kind,
        "original_max_position": int(original or max_position),
    }
    if kind != "default":
        values["factor"] = _number(hf, scaling, "factor", None)
        if kind == "yarn" and original and values["factor"] is None:
            values["factor"] = max_position / original
        if not values["factor"] or values["factor"] < 1.0:
            raise ConfigError(f"{hf.source}: rope scaling {kind!r} needs a factor >= 1, got {values['factor']!r}")
    if kind == "dynamic":
        values["original_max_position"] = max_position  # what transformers measures growth against
    if kind == "llama3":
        values["low_freq_factor"] = _number(hf, scaling, "low_freq_factor", 1.0)
        values["high_freq_factor"] = _number(hf, scaling, "high_freq_factor", 4.0)
    if kind == "yarn":
        values |= _read_yarn(hf, scaling, values["factor"])
        scaling.pop("finetuned", None)  # tells only how the model came to be
    left = {key: value for key, value in scaling.items() if value is not None}
    if left:
        raise ConfigError(
            f"{hf.source}: rope scaling {kind!r} has settings that are not understood: {left}. Where you know that "
            f"they do not change what the model computes: --ignore-config-keys {','.join(sorted(left))}"
        )
    return RopeConfig(**values)


def _read_yarn(hf: HFConfig, scaling: dict[str, Any], factor: float) -> dict[str, Any]:
    """`attn_factor` is of YaRN's own code, where it multiplies what follows from the factor; `attention_factor` and
    the two `mscale` are of transformers, where they replace it."""

    def magnitude(scale: float, mscale: float) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention = _number(hf, scaling, "attention_factor", None)
    mscale, mscale_all = _number(hf, scaling, "mscale", None), _number(hf, scaling, "mscale_all_dim", None)
    if attention is None:
        if mscale and mscale_all:
            attention = magnitude(factor, mscale) / magnitude(factor, mscale_all)
        else:
            attention = magnitude(factor, 1.0)
        attention *= _number(hf, scaling, "attn_factor", None) or 1.0
    return {
        "attention_factor": attention,
        "beta_fast": _number(hf, scaling, "beta_fast", None) or 32.0,
        "beta_slow": _number(hf, scaling, "beta_slow", None) or 1.0,
        "truncate": bool(scaling.pop("truncate", True)),
    }


def _number(hf: HFConfig, scaling: dict[str, Any], key: str, default: float | None) -> Any:
    value = scaling.pop(key, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{hf.source}: rope scaling {key} must be a number, got {value!r}")
    return float(value)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position for each pair of channels, float32 [head_dim / 2]; dynamic NTK's before its growth."""
    base = (1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)
    if rope.scaling == "linear":
        return base / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(rope, base)
    if rope.scaling == "yarn":
        return _yarn(rope, base, head_dim)
    return base


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * np.pi / base
    low, high = rope.original_max_position / rope.low_freq_factor, rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    return np.where(wavelength > low, base / rope.factor, np.where(wavelength < high, base, between)).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    def channel(rotations: float) -> float:
        """The channel pair that turns so many times over the original context."""
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [tokens, head_dim / 2], for int32 positions [tokens]."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    where = positions.astype(jnp.float32)[:, None]
    if rope.scaling == "dynamic":
        length = jnp.maximum(where + 1, rope.original_max_position)
        growth = (rope.factor * length / rope.original_max_position - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
        exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        frequencies = 1.0 / (rope.theta * growth) ** exponent
    angles = where * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
