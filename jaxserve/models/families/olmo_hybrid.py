"""OLMo Hybrid: gated delta nets, with norms before them and before their MLPs, beside layers of OLMo 3. Published
models have no rotary positions."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_attention, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.families.olmo import POST_NAMES
from jaxserve.models.families.qwen3_next import read_recurrent
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import UNTURNED, read_rope, rope_settings
from jaxserve.models.spec import GatedDeltaSpec, LayerSpec, ModelConfig, NormSpec, QKNormSpec, RopeConfig

DELTA = "model.layers.{i}.linear_attn"
MODULES = {
    "qkv_q": "q_proj", "qkv_k": "k_proj", "qkv_v": "v_proj", "z": "g_proj", "b": "b_proj", "a": "a_proj",
    "conv_q": "q_conv1d", "conv_k": "k_conv1d", "conv_v": "v_conv1d", "norm": "o_norm", "out": "o_proj",
}  # fmt: skip
NAMES = POST_NAMES | {
    "attention_norm.weight": "model.layers.{i}.attention_layer_norm.weight",
    "mlp_norm.weight": "model.layers.{i}.feedforward_layer_norm.weight",
    "delta_a_log": f"{DELTA}.A_log",
    "delta_dt_bias": f"{DELTA}.dt_bias",
    **{f"delta_{role}.weight": f"{DELTA}.{module}.weight" for role, module in MODULES.items()},
}
# transformers writes the norm after attention under this name.
LAYOUTS = ({"model.layers.{i}.post_attention_layernorm.": "model.layers.{i}.feedforward_layer_norm."},)
# Settings of random weights.
OF_INIT = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*OF_INIT)
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    qk_norm = QKNormSpec(norm=norm, over="width")
    attention = read_attention(hf, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    key_heads = hf.take("linear_num_key_heads", attention.num_heads)
    key_dim = hf.take("linear_key_head_dim", int(0.75 * hf.take("hidden_size") / key_heads))
    delta = GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=hf.take("linear_num_value_heads", attention.num_heads),
        key_dim=key_dim,
        value_dim=hf.take("linear_value_head_dim", 2 * key_dim),
        conv_width=hf.take("linear_conv_kernel_dim", 4),
        activation=mlp.activation,
        norm=NormSpec(eps=1e-5),
        rate_scale=2.0 if hf.take("linear_allow_neg_eigval", True) else 1.0,
    )
    count = hf.take("num_hidden_layers")
    if not hf.take("layer_types", None) and count < 4:
        hf.values["layer_types"] = ["linear_attention"] * (count - 1) + ["full_attention"]
    recurrent_layer = LayerSpec(attention=delta, mlp=mlp, norm=norm)
    attention_layer = LayerSpec(attention=attention, mlp=mlp, norm=norm, residual="post")
    layers = tuple(recurrent_layer if recurrent else attention_layer for recurrent in read_recurrent(hf))
    max_position = read_max_position(hf, 65536)
    ropes = {"default": _read_rope(hf, max_position)}
    return ModelConfig(
        family="olmo_hybrid", layers=layers, **read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    )


def _read_rope(hf: HFConfig, max_position: int) -> RopeConfig:
    """There are no rotary positions if their base is null. If the file does not mention it, it is 10,000."""
    rope = read_rope(hf, max_position)
    given = next((given for given in (rope_settings(hf), hf.values) if "rope_theta" in given), {"rope_theta": 1e4})
    return UNTURNED if given["rope_theta"] is None else rope


FAMILY = Family(
    "olmo_hybrid",
    ("OlmoHybridForCausalLM",),
    _read,
    NAMES,
    IGNORED,
    layouts=LAYOUTS,
    told_by="attention_out_norm.weight",
)
