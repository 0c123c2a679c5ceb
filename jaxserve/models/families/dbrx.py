"""DBRX: experts in all layers, LayerNorms without biases, and queries, keys and values that are limited.

Files have the matrices of all experts of a layer as one: the rows of one expert behind those of another. The base of
rotary positions is in `attn_config`. transformers 5 does not read it there, and so computes with another one than the
published models were trained with; it also writes that beside `attn_config`.
"""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_attention, read_max_position, read_shared, uniform_layers
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "transformer.blocks.{i}"
EXPERT = f"{LAYER}.ffn.experts.mlp.{{e}}"
DBRX_NAMES = {
    "embed.weight": "transformer.wte.weight",
    "norm.weight": "transformer.norm_f.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": f"{LAYER}.norm_attn_norm.norm_1.weight",
    "mlp_norm.weight": f"{LAYER}.norm_attn_norm.norm_2.weight",
    "qkv.weight": f"{LAYER}.norm_attn_norm.attn.Wqkv.weight",
    "o.weight": f"{LAYER}.norm_attn_norm.attn.out_proj.weight",
    "router.weight": f"{LAYER}.ffn.router.layer.weight",
    "expert_gate.weight": f"{EXPERT}.w1",
    "expert_up.weight": f"{EXPERT}.v1",
    "expert_down.weight.T": f"{EXPERT}.w2",
}


def _inner(hf: HFConfig, key: str) -> HFConfig:
    """The object under `key`, as a config of its own."""
    return HFConfig(hf.take(key, None) or {}, f"{hf.source}: {key}")


def _experts(hf: HFConfig) -> int:
    """The number of experts of a layer."""
    count: int = _inner(hf, "ffn_config").take("moe_num_experts", 4)
    return count


def _read_mixture(hf: HFConfig) -> MLPSpec:
    inner = _inner(hf, "ffn_config")
    inner.ignore("hidden_size", "moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment")
    inner.expect("moe_normalize_expert_weights", 1)
    router = Router(
        top_k=inner.take("moe_top_k", 1),
        normalized=inner.values.get("moe_normalize_expert_weights", 1) is not None,  # null: weights stay as they are
    )
    activation = _inner(inner, "ffn_act_fn")
    mixture = MLPSpec(
        size=inner.take("ffn_hidden_size", 3584),
        activation=read_activation(activation, "silu", "name"),
        experts=ExpertsSpec(count=_experts(hf), router=router),
    )
    inner.take("moe_num_experts", None)
    activation.finish()
    inner.finish()
    return mixture


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(
        d_model="hidden_size", n_heads="num_attention_heads", n_layers="num_hidden_layers",
        max_seq_len="max_position_embeddings",
    )  # fmt: skip
    inner = _inner(hf, "attn_config")
    inner.ignore("attn_pdrop")
    theta = inner.take("rope_theta", None)
    beside = rope_settings(hf).get("rope_theta")
    if theta and beside and theta != beside:
        raise ConfigError(
            f"{inner.source}: rope_theta={theta} contradicts rope_theta={beside} of rope_parameters. Leave out the "
            "one that the model was not trained with; in published models the first is right"
        )
    norm = NormSpec(kind="layer", eps=1e-5)
    hf.values["num_key_value_heads"] = inner.take("kv_n_heads", 1)  # what transformers writes beside it is not read
    attention = read_attention(hf, clip=inner.take("clip_qkv", None))
    inner.finish()
    layers = uniform_layers(hf, attention, _read_mixture(hf), norm=norm)
    max_position = read_max_position(hf, 2048)
    ropes = {"default": read_rope(hf, max_position, theta=theta or 10000.0)}
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="dbrx", layers=layers, **shared)


FAMILY = Family("dbrx", ("DbrxForCausalLM",), _read, DBRX_NAMES, IGNORED, joined=_experts)
