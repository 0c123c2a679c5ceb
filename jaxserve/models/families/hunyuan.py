"""Hunyuan, dense: Llama with norms of queries and keys after the rotation. `alpha` stretches the rotary base."""

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
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import ModelConfig, QKNormSpec

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


def _read(hf: HFConfig) -> ModelConfig:
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
    layers = uniform_layers(hf, attention, read_mlp(hf, bias=bool(hf.take("mlp_bias", False))), norm=norm)
    rope = read_rope(hf, max_position, parameters=parameters)
    return ModelConfig(family="hunyuan", layers=layers, **read_shared(hf, norm=norm, ropes={"default": rope}))


FAMILY = Family("hunyuan", ("HunYuanDenseV1ForCausalLM",), _read, HUNYUAN_NAMES, IGNORED)
