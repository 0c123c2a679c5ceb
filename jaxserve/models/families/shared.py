"""Reads settings that several families write in the same way, beside those that they share with Llama."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import Activation, RopeConfig

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
KINDS = ("full_attention", "sliding_attention")


def named(**roles: str) -> dict[str, str]:
    """Role -> name for the weight and the bias of each module; `roles` maps a role to the name of its module."""
    return {f"{role}.{kind}": f"{name}.{kind}" for role, name in roles.items() for kind in ("weight", "bias")}


def read_activation(hf: HFConfig, default: str, key: str = "hidden_act") -> Activation:
    """The activation under `key`. Raises ConfigError for one that is not known."""
    hf.expect(key, *ACTIVATIONS)
    return ACTIVATIONS[hf.take(key, default)]


def read_sliding(hf: HFConfig, pattern: int, key: str = "sliding_window_pattern") -> list[bool]:
    """For each layer, whether it has a window: by `layer_types`. Without this key every layer has one, except every
    n-th, where n is the setting `key`, by default `pattern`."""
    count = hf.take("num_hidden_layers")
    hf.ignore(f"_{key}", key)
    types = hf.take("layer_types", None)
    if types is None:
        pattern = hf.take(key, pattern)
        if type(pattern) is not int or pattern < 1:
            raise ConfigError(f"{hf.source}: {key} must be a positive integer, got {pattern!r}")
        return [(i + 1) % pattern != 0 for i in range(count)]
    if unknown := set(types) - set(KINDS):
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {sorted(KINDS)})")
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers is {count}")
    return [kind == "sliding_attention" for kind in types]


def windows_of(sliding: Sequence[bool], window: int | None) -> list[int | None]:
    return [window if slides else None for slides in sliding]


def read_ropes(
    hf: HFConfig,
    max_position: int,
    *,
    theta: float = 10000.0,
    local_theta: float | None = None,
    partial: float | None = None,
    head_dim: int | None = None,
) -> dict[str, RopeConfig]:
    """The rotary embeddings "full", of layers without a window, and "sliding", of layers with one.

    Files of transformers 5 have an object for each kind of layer. In older files `rope_scaling` and `rope_theta` are
    for full layers, and `rope_local_base_freq` is for sliding layers, which are not stretched. `theta` and
    `local_theta` are the default bases of the two kinds. With `local_theta` None both have the same base. `partial`
    and `head_dim`: see `read_rope`.
    """
    read = functools.partial(read_rope, hf, max_position, partial=partial, head_dim=head_dim)
    own_theta = hf.take("rope_theta", None)
    nested = hf.take("rope_parameters", None) or {}
    local_theta = hf.take("rope_local_base_freq", None) or local_theta or own_theta or theta
    if not nested.keys() & set(KINDS):
        full = read(theta=theta)
        return {"full": full, "sliding": read(parameters={"rope_theta": local_theta})}
    hf.expect("rope_scaling")
    thetas = (theta, local_theta)
    full, sliding = (
        read(parameters=nested.get(kind) or {}, theta=default) for kind, default in zip(KINDS, thetas, strict=True)
    )
    return {"full": full, "sliding": sliding}
