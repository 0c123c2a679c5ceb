"""OLMoE: experts, a norm over all queries of a token, and one over all its keys. FlexOlmo: the same with norms after
attention and experts, as in OLMo 2."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.olmo import POST_NAMES
from jaxserve.models.families.qwen2_moe import EXPERTS
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ExpertsSpec, ModelConfig, NormSpec, QKNormSpec, Residual
from jaxserve.pallas_kernels.expert_routing import Router


def _read(
    hf: HFConfig,
    family: str,
    norm: NormSpec,
    residual: Residual,
    theta: float,
    default_experts: tuple[int, int],
    clip: float | None = None,
) -> ModelConfig:
    """`default_experts`: of a layer, and of a token."""
    count, top_k = default_experts
    bias = bool(hf.take("attention_bias", False))
    qk_norm = QKNormSpec(norm=norm, over="width")
    attention = read_attention(hf, clip=clip, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    router = Router(top_k=hf.take("num_experts_per_tok", top_k), normalized=bool(hf.take("norm_topk_prob", False)))
    mixture = read_mlp(hf, experts=ExpertsSpec(count=hf.take("num_experts", count), router=router))
    max_position = read_max_position(hf, 4096)
    rope = read_rope(hf, max_position, theta=theta)
    return ModelConfig(
        family=family,
        layers=uniform_layers(hf, attention, mixture, norm=norm, residual=residual),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


def _read_olmoe(hf: HFConfig) -> ModelConfig:
    return _read(hf, "olmoe", read_norm(hf, 1e-5), "pre", 10000.0, (64, 8), hf.take("clip_qkv", None))


def _read_flex(hf: HFConfig) -> ModelConfig:
    return _read(hf, "flex_olmo", read_norm(hf), "post", 500000.0, (7, 5))


FAMILIES = (
    Family("olmoe", ("OlmoeForCausalLM",), _read_olmoe, NAMES | EXPERTS, IGNORED),
    Family("flex_olmo", ("FlexOlmoForCausalLM",), _read_flex, POST_NAMES | EXPERTS, IGNORED),
)
