"""`deterministic`: a request's tokens and log-probabilities are the same bits, whatever else runs.

Each result of a row must be a sum in an order that follows from the row's own position alone. On a CPU the C++ kernels
do this: panels add products in the order of the inputs, norms and softmax go through a row from its first number on,
and attention does so with `one_order`. Nothing else does so for certain: XLA may add in another order in a program for
another number of rows. What this module cannot vouch for is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import is_split
from jaxserve.models.decoder import Decoder
from jaxserve.models.panels import is_matrix
from jaxserve.models.spec import AttentionSpec, ModelConfig
from jaxserve.pallas_kernels import cpu, cpu_build, cpu_panels
from jaxserve.pallas_kernels.paged_attention import cpu as cpu_attention
from jaxserve.pallas_kernels.types import MixedArray, PanelArray


def ordered(decoder: Decoder, config: EngineConfig, mesh: Mesh, *, pools: bool) -> Decoder:
    """The decoder, with operations that keep the promise. `pools`: the model embeds or scores. Raises ConfigError, with
    all reasons, if the promise cannot be kept with these settings."""
    if reasons := list(_reasons(decoder, config, mesh, pools)):
        raise ConfigError(f"deterministic must be False: {'; '.join(reasons)}")
    attention = partial(cpu_attention.paged_attention, one_order=True)
    return decoder.clone(ops=replace(decoder.ops, paged_attention=attention))


def _reasons(decoder: Decoder, config: EngineConfig, mesh: Mesh, pools: bool) -> Iterator[str]:
    platform = mesh.devices.flat[0].platform
    if platform != "cpu":
        yield (
            f"the same bits are promised on one CPU only; on a {platform.upper()}, products in plain XLA may differ "
            "with the number of rows"
        )
        return
    if is_split(mesh):
        yield "several devices add their parts in plain XLA, in no promised order (tensor_parallel_size must be 1)"
    elif not (cpu.available() and cpu.available(cpu_build.ATTENTION) and cpu_panels.available()):
        yield cpu_build.lacking() or "the C++ kernels could not be built, see the log"
    if decoder.ops.paged_attention is not cpu_attention.paged_attention:
        yield _other_attention(decoder.config, config)
    if config.matmul_backend not in ("auto", "cpu"):
        yield f"matmul_backend must be auto or cpu, got {config.matmul_backend}"
    if config.dtype == "float16":
        yield "dtype float16 is not tested for it (auto, float32 and bfloat16 are)"
    if pools:
        yield "models that embed or score add their tokens' states in plain XLA"
    if config.enable_lora:
        yield "products of adapters are not tested for it (enable_lora)"
    if config.speculative_config is not None and config.speculative_config.method not in ("ngram", "suffix"):
        yield f"speculation by {config.speculative_config.method} is not tested for it (ngram and suffix are allowed)"
    if any(getattr(layer.attention, "v_norm", None) for layer in decoder.config.layers):
        yield "norms of values add in plain XLA"
    if any(getattr(layer.attention, "out_norm", None) for layer in decoder.config.layers):
        yield "norms of the results of attention and within MLPs add in plain XLA"
    if any(spec.value_bias or spec.difference for spec in decoder.config.attentions if isinstance(spec, AttentionSpec)):
        yield "biases by values and differences of heads add in plain XLA"
    if any(layer.blocks is not None for layer in decoder.config.layers):
        yield "attention over chosen blocks adds in plain XLA"
    if any(layer.norm.kind != "rms" or not layer.norm.scale or layer.norm.bias for layer in decoder.config.layers):
        yield "only RMS norms with a scale are C++ kernels; other norms add in plain XLA"
    norms = {spec.qk_norm for spec in decoder.config.attentions if isinstance(spec, AttentionSpec)} - {None}
    if any(norm is not None and not norm.fused for norm in norms):
        yield "norms of queries and keys that are not RMS norms of each head before the rotation add in plain XLA"
    if decoder.config.recurrent is not None:
        yield "recurrent layers compute prompts in another way than decodes"


def _other_attention(model: ModelConfig, config: EngineConfig) -> str:
    if not all(isinstance(spec, AttentionSpec) for spec in model.attentions):
        return "latent attention computes prompts in another way than decodes"
    return f"attention_backend must be auto or cpu, got {config.attention_backend}"


def check_weights(params: Any) -> None:
    """Raises ConfigError if a matrix is not in panels: other products add differently for other numbers of rows."""

    def is_weight(x: Any) -> bool:
        return not isinstance(x, dict)

    def in_panels(x: Any) -> bool:
        return all(map(in_panels, x.parts)) if isinstance(x, MixedArray) else isinstance(x, PanelArray)

    flat = flatten_dict(params, is_leaf=lambda _, x: is_weight(x), sep="/")
    others = [name for name, x in flat.items() if is_matrix(name) and not in_panels(x)]
    if others:
        kind = type(jax.tree.leaves(flat[others[0]], is_leaf=is_weight)[0]).__name__
        raise ConfigError(
            f"deterministic must be False for these weights: {len(others)} matrices, {others[0]} first, are not in "
            f"panels on this CPU but in the form {kind}. Formats with groups of 64 inputs and more, GGUF and floats "
            "become panels; --dequantize makes floats of any"
        )
