"""Rotary settings of architectures whose layers with a window have a rotary embedding of their own."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoints.gguf_keys import Keys, read_rope_scaling, shortest
from jaxserve.checkpoints.gguf_settings import Config, share_of


def two_ropes(keys: Keys, config: Config) -> Config:
    """Layers without a window may be stretched. The converter writes attention_factor, the whole factor of YaRN's
    attention, as yarn_attn_factor."""
    head_dim = config["head_dim"]
    turned = keys.size("rope.dimension_count", head_dim)
    of_sliding = keys.size("rope.dimension_count_swa", turned)
    attention = keys.left.pop("rope.scaling.yarn_attn_factor", None)
    full = _rope(keys, "rope.freq_base", turned, head_dim)
    sliding = _rope(keys, "rope.freq_base_swa", of_sliding, head_dim)
    full |= read_rope_scaling(keys, config | full, turned) or {}
    if type(attention) is float:
        full["attention_factor"] = shortest(attention)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def step35_positions(keys: Keys, config: Config) -> Config:
    """Half of a head's channels turn in layers without a window, and all in the others; llama.cpp's code says so. The
    divisors of frequencies in the file are those for a head whose channels all turn."""
    head_dim = config["head_dim"]
    keys.expect("rope.dimension_count", head_dim)
    full = _rope(keys, "rope.freq_base", head_dim // 2, head_dim)
    full |= read_rope_scaling(keys, config | full, head_dim) or {}
    sliding = _rope(keys, "rope.freq_base_swa", head_dim, head_dim)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _rope(keys: Keys, base: str, turned: int, head_dim: int) -> dict[str, Any]:
    share = share_of(keys, turned, head_dim)
    return {"rope_type": "default", "rope_theta": keys.real(base, 10000.0), "partial_rotary_factor": share}
