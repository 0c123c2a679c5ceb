"""Whether a model can be split over a number of devices, and how often its key-value heads are then repeated."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.spec import ModelConfig


def sharded_kv_heads(config: ModelConfig, tensor_parallel_size: int) -> int:
    """The number of KV heads over all devices. Each head is repeated when there are more devices than heads.

    Raises ConfigError when heads or the width of an MLP cannot be split evenly.
    """
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, tensor_parallel_size
    problems = []
    if size <= kv_heads:
        if kv_heads % size:
            problems.append(f"{kv_heads} key-value heads")
    elif size % kv_heads or heads % size:
        problems.append(f"{heads} query heads over {kv_heads} key-value heads")
    net = config.recurrent
    if net is not None and net.key_heads % size:
        problems.append(f"{net.key_heads} key heads of recurrent layers")
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
    net = config.recurrent
    heads_fit = heads_fit and (net is None or net.key_heads % size == 0)
    return heads_fit and not any(width % size for width in _widths(config))


def _widths(config: ModelConfig) -> set[int]:
    shared = {layer.mlp.experts.shared_size for layer in config.layers if layer.mlp.experts} - {0}
    return {layer.mlp.size for layer in config.layers} | shared
