"""Command-A+: Command-R7B's layers with experts, in the first layers with one MLP. Results of experts and of shared
ones are added, or averaged."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import read_dense
from jaxserve.models.families.glm4_moe import SHARED, with_mixture
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_layer_norm,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.qwen2_moe import EXPERTS
from jaxserve.models.families.shared import KINDS, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router


def _read_mixture(hf: HFConfig, dense: MLPSpec) -> MLPSpec:
    hf.expect("expert_selection_fn", "softmax", "sigmoid")
    hf.expect("shared_expert_combination_strategy", "average", "sum")
    normalized = bool(hf.take("norm_topk_prob", True))
    shared = hf.take("num_shared_experts", 0)
    averaged = shared > 0 and hf.take("shared_expert_combination_strategy", "average") == "average"
    scale = 0.5 if averaged else 1.0
    top_k = hf.take("num_experts_per_tok", 2)
    if hf.take("expert_selection_fn", "softmax") == "softmax":
        router = Router(top_k=top_k, scale=scale)  # the softmax over the chosen experts
    else:
        router = Router(top_k=top_k, score="sigmoid", normalized=normalized, scale=scale)
    experts = ExpertsSpec(
        count=hf.take("num_experts", 8), router=router, shared_size=dense.size * shared, shared_scale=scale
    )
    return replace(dense, experts=experts)


def _read_sliding(hf: HFConfig, dense: int) -> list[bool]:
    """For each layer, whether it has a window. Without `layer_types` the dense layers, which come first, have a pattern
    of their own."""
    if hf.take("layer_types", None) is None:
        counts = (dense, hf.take("num_hidden_layers") - dense)
        patterns = (hf.take("prefix_dense_sliding_window_pattern", 1), hf.take("sliding_window_pattern", 4))
        if type(patterns[1]) is not int:
            raise ConfigError(f"{hf.source}: sliding_window_pattern must be a positive integer, got {patterns[1]!r}")
        kinds = [
            KINDS[(i + 1) % pattern != 0] for count, pattern in zip(counts, patterns, strict=True) for i in range(count)
        ]
        hf.values["layer_types"] = kinds
    return read_sliding(hf, 4)


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("rope_scaling")  # transformers' class has it and does nothing with it
    bias = bool(hf.take("attention_bias", False))
    has_rms = hf.take("rms_norm_eps", None) is not None
    norm = read_norm(hf) if has_rms else read_layer_norm(hf, bias=False)
    hf.ignore("layer_norm_eps")
    experts_like = read_mlp(hf)
    is_dense = read_dense(hf, 0)
    sliding = _read_sliding(hf, hf.take("first_k_dense_replace", 0))
    forced = hf.take("prefix_dense_sliding_window_pattern", 1) == 1  # dense layers always have positions
    turned = [slides or (dense and forced) for slides, dense in zip(sliding, is_dense, strict=True)]
    plain = uniform_layers(
        hf,
        read_attention(hf, head_dim=128, qkv_bias=bias, out_bias=bias),
        replace(experts_like, size=hf.take("prefix_dense_intermediate_size", experts_like.size)),
        windows_of(sliding, hf.take("sliding_window", 4096)),
        ["turned" if turns else "none" for turns in turned],
        norm=norm,
        residual="parallel",
    )
    ropes = {"turned": read_rope(hf, read_max_position(hf, 8192), interleaved=True), "none": UNTURNED}
    return ModelConfig(
        family="cohere2_moe",
        layers=with_mixture(plain, _read_mixture(hf, experts_like), is_dense),
        logit_scale=hf.take("logit_scale", 0.0625),
        **read_shared(hf, tied=True, longest=8192, norm=norm, ropes=ropes),
    )


FAMILY = Family("cohere2_moe", ("Cohere2MoeForCausalLM",), _read, NAMES | EXPERTS | SHARED, IGNORED)
