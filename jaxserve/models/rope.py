"""Rotary position embeddings and their long-context extensions.

The rules are those of transformers' `modeling_rope_utils`, with one difference in dynamic NTK. Here the sequence length
is that of the token itself, position + 1; transformers takes the longest of the batch. So a token's keys do not depend
on how its prompt was cut into chunks. Both give the same angles while a prompt fits the original context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.spec import RopeConfig

_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_OLD_NAMES = {"su": "longrope", "mrope": "default"}  # in the first Phi-3 configs, and in those of Qwen2-VL
UNTURNED = RopeConfig(rotary_dim=0)  # for layers without rotary positions
DISTANCES = RopeConfig(rotary_dim=0, with_positions=True)  # for layers with biases by distance


class Unlearned(NamedTuple):
    """What learned factors and lines multiply.

    radians: float32 [tokens, head_dim / 2], angles before their learned factors.
    size: factor of cosines and sines.
    log_position: float32 [tokens], logarithms of positions that begin with 1.
    """

    radians: jax.Array
    size: float
    log_position: jax.Array


class Angles(NamedTuple):
    """The angles of a rotary embedding at the positions of a step's tokens.

    cos, sin: float32 [tokens, head_dim / 2], of the angles by which the pairs of channels i and i + head_dim / 2 turn.
    query_scale: float32 [tokens], factors of the queries; None: all are 1.
    positions: int32 [tokens]; None: nothing but the angles depends on them.
    unlearned: for layers with learned factors of the angles; None: there are none.
    """

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None
    positions: jax.Array | None = None
    unlearned: Unlearned | None = None


def read_rope(
    hf: HFConfig,
    max_position: int,
    *,
    parameters: Mapping[str, Any] | None = None,
    theta: float = 10000.0,
    partial: float | None = None,
    head_dim: int | None = None,
    absent: Mapping[str, Any] | None = None,
    **choices: Any,
) -> RopeConfig:
    """RopeConfig from either style of config.json: `rope_parameters`, or `rope_theta` beside `rope_scaling`.

    Args:
      parameters: read in the place of `rope_parameters` and `rope_scaling`, for configs that have several of them.
      theta: the family's default base.
      partial: the family's default share of a head's channels that turn; None: all channels turn, and the config must
        not say otherwise.
      head_dim: channels of a head, for families where no key gives it.
      absent: what the family assumes in the place of `rope_parameters` if the config has neither object.
      choices: other fields of RopeConfig.

    Raises ConfigError for settings that are unknown or contradict each other.
    """
    own_theta = hf.take("rope_theta", None)
    scaling = rope_settings(hf) or dict(absent or {})
    if parameters is not None:
        scaling = dict(parameters)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    kind = _OLD_NAMES.get(kind, kind)
    scaling.pop("type", None)
    for key in ("mrope_section", "mrope_interleaved"):
        scaling.pop(key, None)  # they tell which of three positions turns a channel; in text all three are equal
    if kind not in _SCALINGS:
        raise ConfigError(f"{hf.source}: rope scaling {kind!r} is not supported (only {', '.join(_SCALINGS)})")
    if kind == "proportional":
        choices["turning"] = _number(hf, scaling, "partial_rotary_factor", 1.0)
        scaling.setdefault("factor", 1.0)
    theta = scaling.pop("rope_theta", None) or own_theta or theta
    turned = hf.take("partial_rotary_factor", None)
    turned = scaling.pop("partial_rotary_factor", None) or turned or partial or 1.0
    if partial is None and turned != 1.0:
        raise ConfigError(f"{hf.source}: partial_rotary_factor={turned} is not supported (only 1.0)")
    if turned != 1.0:
        head_dim = hf.take("head_dim", None) or head_dim or hf.take("hidden_size") // hf.take("num_attention_heads")
        choices["rotary_dim"] = int(head_dim * turned)
    original = scaling.pop("original_max_position_embeddings", None)
    original = hf.take("original_max_position_embeddings", None) or original
    values: dict[str, Any] = {
        "theta": float(theta),
        "scaling": kind,
        "original_max_position": int(original or max_position),
        **choices,
    }
    if kind == "longrope":
        values |= _read_longrope(hf, scaling, values["original_max_position"], max_position)
    elif kind != "default":
        values["factor"] = _number(hf, scaling, "factor", None)
        if kind == "yarn" and original and values["factor"] is None:
            values["factor"] = max_position / original
        if not values["factor"] or values["factor"] < 1.0:
            raise ConfigError(f"{hf.source}: rope scaling {kind!r} needs a factor >= 1, got {values['factor']!r}")
    if kind == "dynamic":
        values["original_max_position"] = max_position  # transformers measures the growth against this length
    if kind == "llama3":
        values["low_freq_factor"] = _number(hf, scaling, "low_freq_factor", 1.0)
        values["high_freq_factor"] = _number(hf, scaling, "high_freq_factor", 4.0)
    if kind == "yarn":
        values |= _read_yarn(hf, scaling, values["factor"])
        scaling.pop("finetuned", None)  # has no effect on inference
    left = {key: value for key, value in scaling.items() if value is not None}
    if left:
        raise ConfigError(
            f"{hf.source}: rope scaling {kind!r} has settings that are not understood: {left}. Where you know that "
            f"they do not change what the model computes: --ignore-config-keys {','.join(sorted(left))}"
        )
    return RopeConfig(**values)


def rope_settings(hf: HFConfig) -> dict[str, Any]:
    """The config's object of rotary settings: `rope_scaling`, or without it `rope_parameters`, as in transformers."""
    old = hf.take("rope_scaling", None)
    new = hf.take("rope_parameters", None)
    return dict(old or new or {})


def _read_longrope(hf: HFConfig, scaling: dict[str, Any], original: int, max_position: int) -> dict[str, Any]:
    factor = _number(hf, scaling, "factor", None) or max_position / original
    attention = _number(hf, scaling, "attention_factor", None)
    if attention is None and factor > 1:
        if original < 2:
            raise ConfigError(f"{hf.source}: original_max_position_embeddings must be at least 2, got {original}")
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {f"{which}_factors": tuple(scaling.pop(f"{which}_factor", None) or ()) for which in ("short", "long")}
    if not all(factors.values()):
        raise ConfigError(f"{hf.source}: rope scaling 'longrope' needs short_factor and long_factor")
    return {"attention_factor": 1.0 if attention is None else attention, "factor": factor, **factors}


def _read_yarn(hf: HFConfig, scaling: dict[str, Any], factor: float) -> dict[str, Any]:
    """The fields of a RopeConfig for YaRN.

    YaRN scales attention by an amount that follows from `factor`. `attn_factor`, from YaRN's own code, multiplies this
    amount. `attention_factor` and the two `mscale` keys, from transformers, replace it.
    """

    def magnitude(scale: float, mscale: float) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention = _number(hf, scaling, "attention_factor", None)
    mscale = _number(hf, scaling, "mscale", None)
    mscale_all = _number(hf, scaling, "mscale_all_dim", None)
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


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """The number of channels of a head that turn."""
    return head_dim if rope.rotary_dim is None else rope.rotary_dim


def head_order(rope: RopeConfig, head_dim: int) -> np.ndarray | None:
    """The order in which the operations need the channels of a head: int64 [head_dim], each a channel's index in the
    checkpoint. None: the checkpoint's own order is right.

    The operations turn the pairs of channels i and i + head_dim / 2 by head_dim / 2 angles. Channels that do not turn
    are paired with each other and get the angle zero. Products of queries and keys do not depend on the order.
    """
    if rope.halves:
        columns, further_columns, rows, further_rows = np.split(np.arange(head_dim), 4)
        return np.concatenate([rows, columns, further_rows, further_columns])
    turned = rotary_dim(rope, head_dim)
    if turned == 0 or (turned == head_dim and not rope.interleaved and not rope.backwards):
        return None
    pairs = np.arange(turned)
    rest = np.arange(turned, head_dim)
    first, second = (pairs[::2], pairs[1::2]) if rope.interleaved else np.split(pairs, 2)
    if rope.backwards:
        first, second = second, first
    return np.concatenate([first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]])


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position for each pair of channels, float32 [rotary_dim / 2]. For dynamic NTK these hold within the
    original context."""
    turned = rotary_dim(rope, head_dim)
    exponent = np.arange(0, turned, 2, dtype=np.float64) / max(turned, 1)
    base = (1.0 / rope.theta**exponent).astype(np.float32)
    if rope.scaling == "proportional":
        turning = int(rope.turning * head_dim // 2)
        return np.where(np.arange(len(base)) < turning, base / np.float32(rope.factor), np.float32(0))
    if rope.scaling == "linear":
        return base / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(rope, base)
    if rope.scaling == "yarn":
        return _yarn(rope, base, turned)
    if rope.scaling == "longrope":
        return (1.0 / (np.asarray(rope.long_factors, np.float64) * rope.theta**exponent)).astype(np.float32)
    return base


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones stay, those between are interpolated."""
    wavelength = 2 * np.pi / base
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    if low == high:  # Llama 4 Scout: no wavelength lies between the two limits
        return np.where(wavelength > low, base / rope.factor, base).astype(np.float32)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    return np.where(wavelength > low, base / rope.factor, np.where(wavelength < high, base, between)).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    def channel(rotations: float) -> float:
        """The index, as a float, of the channel pair that turns `rotations` times over the original context."""
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = channel(rope.beta_fast)
    high = channel(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> Angles:
    """The angles at positions int32 [tokens], or [3, tokens] for tokens with three positions."""
    turned = rotary_dim(rope, head_dim)
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    positions = positions if rope.stride == 1 else positions // rope.stride * rope.stride
    where = positions.astype(jnp.float32)[..., None]
    if positions.ndim == 2:
        where = where[position_axes(rope, turned // 2), :, 0].T
    if rope.scaling == "dynamic":
        length = jnp.maximum(where + 1, rope.original_max_position)
        growth = (rope.factor * length / rope.original_max_position - (rope.factor - 1)) ** (turned / (turned - 2))
        exponent = jnp.arange(0, turned, 2, dtype=jnp.float32) / turned
        frequencies = 1.0 / (rope.theta * growth) ** exponent
    angles = where * frequencies
    cos = jnp.cos(angles) * rope.attention_factor
    sin = jnp.sin(angles) * rope.attention_factor
    if turned < head_dim:
        still = ((0, 0), (0, (head_dim - turned) // 2))
        cos = jnp.pad(cos, still, constant_values=1.0)
        sin = jnp.pad(sin, still)
    unlearned = Unlearned(angles, rope.attention_factor, jnp.log1p(where[:, 0])) if rope.learned else None
    return Angles(cos, sin, _query_scale(rope, positions), positions if rope.with_positions else None, unlearned)


def position_axes(rope: RopeConfig, pairs: int) -> np.ndarray:
    """Which of a token's three positions turns each pair of channels, int64 [pairs]: those of time, then of rows, then
    of columns (Qwen2-VL); or one after the other, and those of time where the others have ended (Qwen3-VL)."""
    time, rows, columns = rope.sections
    if not rope.sections_alternate:
        return np.repeat([0, 1, 2], [time, rows, columns])
    axes = np.zeros(pairs, np.int64)
    axes[1 : 3 * rows : 3] = 1
    axes[2 : 3 * columns : 3] = 2
    return axes


def learned_angles(unlearned: Unlearned, logs: jax.Array) -> Angles:
    """The angles times learned factors (Mistral Large 4). `logs`: of the factors, float32 [head_dim / 2]."""
    radians = unlearned.radians * jnp.exp(logs)
    return Angles(jnp.cos(radians) * unlearned.size, jnp.sin(radians) * unlearned.size, unlearned=unlearned)


def _query_scale(rope: RopeConfig, positions: jax.Array) -> jax.Array | None:
    if (scale := rope.query_scale) is None:
        return None
    periods = jnp.floor((positions + scale.shift).astype(jnp.float32) / scale.period)
    return 1.0 + scale.slope * jnp.log1p(periods)
