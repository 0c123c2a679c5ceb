"""Whether a model can be split over a number of devices, and how often its key-value heads are then repeated."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.config import ConfigError
from jaxserve.models.spec import CompressedAttentionSpec, LatentAttentionSpec, ModelConfig


def sharded_kv_heads(
    config: ModelConfig,
    tensor_parallel_size: int,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    data_parallel_size: int = 1,
) -> int:
    """The number of KV heads over the `tensor_parallel_size` devices of a group. Each head is repeated when there are
    more devices than heads. Sets of devices, `expert_parallel_size` in number over all `data_parallel_size` groups,
    have different experts; the devices of a set share the width of each. Sets of `context_parallel_size` devices have
    different tokens of the same KV head.

    Raises ConfigError when heads, experts or the width of an MLP cannot be split evenly, or when not enough devices
    have the same KV head.
    """
    count = data_parallel_size
    splits = expert_parallel_size > 1
    if found := list(_problems(config, tensor_parallel_size, expert_parallel_size, tensor_parallel_size * count)):
        sizes = range(1, max(config.num_heads, 0 if config.recurrent is None else config.recurrent.results[0]) + 1)
        allowed = [n for n in sizes if not any(_problems(config, n, n * count if splits else 1, n * count))]
        groups = "" if data_parallel_size == 1 else f"data_parallel_size {data_parallel_size} x "
        raise ConfigError(
            f"{groups}tensor_parallel_size {tensor_parallel_size} does not divide {' and '.join(found)}; this model "
            f"allows {allowed}"
        )
    seen = [layer.most_seen for layer in config.layers if layer.most_seen is not None]
    if context_parallel_size > 1 and seen:
        raise ConfigError(
            f"decode_context_parallel_size must be 1, not {context_parallel_size}, for a model with indexers, unless "
            f"max_model_len is at most the {seen[0]} tokens that they choose"
        )
    if context_parallel_size > 1 and isinstance(config.attention, CompressedAttentionSpec):
        raise ConfigError(
            f"decode_context_parallel_size must be 1, not {context_parallel_size}, for compressed attention"
        )
    is_latent = any(isinstance(attention, LatentAttentionSpec) for attention in config.attentions)
    copies = tensor_parallel_size if is_latent else max(1, tensor_parallel_size // config.num_kv_heads)
    if copies % context_parallel_size:
        raise ConfigError(
            f"decode_context_parallel_size {context_parallel_size} must divide {copies}, the number of devices that "
            f"have the same key-value head of this model"
        )
    return max(config.num_kv_heads, tensor_parallel_size)


def _problems(config: ModelConfig, size: int, experts: int, everyone: int) -> Iterator[str]:
    """What `size` devices cannot share evenly, or `everyone`, in `experts` sets with different experts."""
    net = config.recurrent
    shapes = {(spec.num_heads, spec.num_kv_heads, getattr(spec, "experts", 0)) for spec in config.attentions}
    for heads, kv_heads, routed in sorted(shapes):
        if size <= kv_heads or routed:  # the queries of a key-value head that a router chooses stay together
            if kv_heads % size:
                yield f"{kv_heads} key-value heads"
        elif size % kv_heads or heads % size:
            yield f"{heads} query heads over {kv_heads} key-value heads"
    for pairs in sorted({one.num_kv_heads // 2 for one in config.attentions if getattr(one, "difference", None)}):
        if pairs % size:
            yield f"{pairs} pairs of key-value heads"
    for groups in sorted({getattr(attention, "out_groups", size) for attention in config.attentions}):
        if groups % size:
            yield f"{groups} groups of heads (o_groups)"
    if net is not None and (problem := net.cannot_share(size)):
        yield problem
    mlps = set(config.mlps)
    shared = {mlp.experts.shared_size for mlp in mlps if mlp.experts} - {0}
    for width in sorted({mlp.size for mlp in mlps if not mlp.experts} | shared):
        if width % size:
            yield f"an MLP width of {width}"
    for count, width in sorted({(mlp.experts.count, mlp.size) for mlp in mlps if mlp.experts}):
        if count % experts:
            yield f"{count} experts"
        if width % (everyone // experts):
            yield f"an expert's width of {width}"
