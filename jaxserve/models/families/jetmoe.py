"""JetMoE: each layer has a mixture of attentions (`models.routed_attention`) and one of MLPs, with as many experts
each. The norms of layers have an epsilon of their own, whatever the config says."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_shared
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
ATTENTION = f"{LAYER}.self_attention"
EXPERTS = f"{ATTENTION}.experts"
OWN_NAMES = {role: NAMES[role] for role in ("embed.weight", "norm.weight", "head.weight")} | {
    "attention_norm.weight": NAMES["attention_norm.weight"],
    "mlp_norm.weight": NAMES["mlp_norm.weight"],
    "attention_router.weight": f"{EXPERTS}.router.layer.weight",
    "q.weight": f"{EXPERTS}.{{e}}.input_linear.weight",
    "o.weight": f"{EXPERTS}.{{e}}.output_linear.weight",
    "kv.weight": f"{ATTENTION}.kv_proj.weight",
    "attention_bias": f"{EXPERTS}.bias",
    "router.weight": f"{LAYER}.mlp.router.layer.weight",
    "expert_gate_up.weight": f"{LAYER}.mlp.{{e}}.input_linear.weight",
    "expert_fused_down.weight": f"{LAYER}.mlp.{{e}}.output_linear.weight",
    "expert_out_bias": f"{LAYER}.mlp.bias",
}


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(moe_num_experts="num_local_experts", moe_top_k="num_experts_per_tok", head_dim="kv_channels")
    hf.ignore("aux_loss_coef")
    count, top_k = hf.take("num_local_experts", 8), hf.take("num_experts_per_tok", 2)
    if top_k > count:
        raise ConfigError(f"{hf.source}: num_experts_per_tok={top_k} is above num_local_experts={count}")
    kv_heads, head_dim = hf.take("num_key_value_heads", 16), hf.take("kv_channels", 128)
    hf.expect("num_attention_heads", kv_heads * top_k)
    attention = AttentionSpec(num_heads=kv_heads * top_k, num_kv_heads=kv_heads, head_dim=head_dim, experts=count)
    mlp = MLPSpec(
        size=hf.take("intermediate_size", 5632),
        activation=read_activation(hf, "silu", "activation_function"),
        experts=ExpertsSpec(count=count, router=Router(top_k=top_k), out_bias=True),
    )
    layer = LayerSpec(attention=attention, mlp=mlp, norm=NormSpec(eps=1e-6))
    rope = read_rope(hf, hf.take("max_position_embeddings", 4096), head_dim=head_dim)
    shared = read_shared(hf, tied=True, longest=4096, ropes={"default": rope})
    return ModelConfig(family="jetmoe", layers=(layer,) * hf.take("num_hidden_layers"), **shared)


FAMILY = Family("jetmoe", ("JetMoeForCausalLM",), _read, OWN_NAMES, IGNORED)
