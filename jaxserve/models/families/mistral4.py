"""Mistral 4: DeepSeek's latent attention and experts, with a softmax router, and Ministral 3's scale of queries, which
grows with the position."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import DEEPSEEK_NAMES, MLP, read_latent_attention
from jaxserve.models.families.glm4_moe import dense_first, read_deepseek_experts, with_mixture
from jaxserve.models.families.llama import IGNORED, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import LayerSpec, ModelConfig, QueryScale, RopeConfig

MISTRAL4_NAMES = DEEPSEEK_NAMES | {
    "expert_gate_up.weight": f"{MLP}.experts.{{e}}.gate_up_proj",
    "expert_fused_down.weight": f"{MLP}.experts.{{e}}.down_proj",
}
SIZES = {
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
ROPE = {  # assumed if the config has no rope_parameters
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _read_rotary(hf: HFConfig, max_position: int, head_dim: int, rope_dim: int) -> RopeConfig:
    parameters = rope_settings(hf)
    parameters.pop("max_position_embeddings", None)  # says the same as the config's own
    slope = parameters.pop("llama_4_scaling_beta", None)
    period = parameters.get("original_max_position_embeddings")
    if slope is None or period is None:
        raise ConfigError(
            f"{hf.source}: rope_parameters need llama_4_scaling_beta and original_max_position_embeddings"
        )
    turned = parameters.pop("partial_rotary_factor", None)
    if turned is not None and int(head_dim * turned) != rope_dim:
        raise ConfigError(
            f"{hf.source}: partial_rotary_factor={turned} of {head_dim} channels is not qk_rope_head_dim={rope_dim}"
        )
    return read_rope(
        hf,
        max_position,
        parameters=parameters,
        interleaved=bool(hf.take("rope_interleave", True)),
        query_scale=QueryScale(slope=slope, period=period),
    )


def read_mistral4(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("n_shared_experts", 1)
    if not rope_settings(hf):
        hf.values["rope_parameters"] = dict(ROPE)
    attention = read_latent_attention(hf, SIZES)
    norm = read_norm(hf)
    dense = read_mlp(hf)
    mixture = read_deepseek_experts(hf, dense.activation, score="softmax", corrected=False, top_k=4)
    layer = LayerSpec(attention=attention, mlp=dense, norm=norm)
    max_position = read_max_position(hf, 1048576)
    rope = _read_rotary(hf, max_position, attention.head_dim, attention.rope_dim)
    return ModelConfig(
        family="mistral4",
        layers=with_mixture((layer,) * hf.take("num_hidden_layers"), mixture, dense_first(hf, 0)),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILY = Family("mistral4", ("Mistral4ForCausalLM",), read_mistral4, MISTRAL4_NAMES, IGNORED)
