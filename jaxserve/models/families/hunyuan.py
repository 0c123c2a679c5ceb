"""Hunyuan: Llama with norms of queries and keys after the rotation. `alpha` stretches the rotary base. Hunyuan-A13B has
experts beside a shared MLP."""

from __future__ import annotations

from dataclasses import replace

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
from jaxserve.models.families.qwen2_moe import EXPERTS, MLP
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

HUNYUAN_NAMES = NAMES | {
    "q_norm.weight": "model.layers.{i}.self_attn.query_layernorm.weight",
    "k_norm.weight": "model.layers.{i}.self_attn.key_layernorm.weight",
}
# Other rotary settings in published configs. Beside alpha they have no effect.
BESIDE = (
    "cla_share_factor", "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id",
    "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id", "class_num",
)  # fmt: skip
UNUSED = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")


def _read(hf: HFConfig, family: str, mlp: MLPSpec) -> ModelConfig:
    hf.ignore(*BESIDE)
    hf.expect("attention_head_dim", hf.take("head_dim", None) or hf.take("attention_head_dim", None))
    hf.expect("norm_type", "rms")
    hf.expect("use_rotary_pos_emb", True)
    hf.expect("use_qk_norm", True)
    hf.expect("use_cla", False)
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("attention_bias", False))
    qk_norm = QKNormSpec(norm=norm, after_rope=True)
    head_dim = hf.take("attention_head_dim", None)
    attention = read_attention(hf, head_dim=head_dim, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    max_position = read_max_position(hf)
    parameters = rope_settings(hf)
    if (alpha := parameters.pop("alpha", None)) and attention.head_dim > 2:
        theta = parameters.pop("rope_theta", None) or hf.take("rope_theta", None) or 10000.0
        stretched = theta * alpha ** (attention.head_dim / (attention.head_dim - 2))
        kept = {key: value for key, value in parameters.items() if key not in (*UNUSED, "type", "rope_type")}
        parameters = {"rope_theta": stretched} | kept
    layers = uniform_layers(hf, attention, mlp, norm=norm)
    rope = read_rope(hf, max_position, parameters=parameters)
    return ModelConfig(family=family, layers=layers, **read_shared(hf, norm=norm, ropes={"default": rope}))


def _read_dense(hf: HFConfig) -> ModelConfig:
    return _read(hf, "hunyuan", read_mlp(hf, bias=bool(hf.take("mlp_bias", False))))


def _read_moe(hf: HFConfig) -> ModelConfig:
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        value = hf.values.get(key)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            hf.values[key] = value[0]  # one number for each layer
    for key, only in MOE_WRITTEN.items():
        hf.expect(key, only)
    hf.ignore("capacity_factor", *LATENT)  # for training, and for attention that no published model has
    mlp = read_mlp(hf)
    hf.expect("moe_intermediate_size", mlp.size)
    router = Router(top_k=hf.take("moe_topk", 1))
    experts = ExpertsSpec(count=hf.take("num_experts", 1), router=router, shared_size=mlp.size)
    return _read(hf, "hunyuan_moe", replace(mlp, experts=experts))


# Keys in published configs that transformers does not read, and the values that agree with what is computed.
MOE_WRITTEN = {
    "norm_topk_prob": True, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_mla": False, "mlp_bias": False,
}  # fmt: skip
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_NAMES = (
    HUNYUAN_NAMES
    | EXPERTS
    | {
        "router.weight": f"{MLP}.gate.wg.weight",
        **{f"shared_{role}.weight": f"{MLP}.shared_mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
)
FAMILIES = (
    Family("hunyuan", ("HunYuanDenseV1ForCausalLM",), _read_dense, HUNYUAN_NAMES, IGNORED),
    Family("hunyuan_moe", ("HunYuanMoEV1ForCausalLM",), _read_moe, MOE_NAMES, IGNORED),
)
