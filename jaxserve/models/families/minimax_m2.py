"""MiniMax M2: experts with a sigmoid router and a correction bias; one norm over all queries of a token, and one over
all its keys; a part of each head is rotated."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.mixtral import MIXTRAL_NAMES, MOE
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ExpertsSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

# Keys in published configs that transformers does not read, and the values that agree with what is computed.
WRITTEN = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
    **{f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
}


def _read(hf: HFConfig) -> ModelConfig:
    for key, only in WRITTEN.items():
        hf.expect(key, only)
    hf.expect("attn_type_list", [1] * hf.take("num_hidden_layers"))
    # Of layers that predict further tokens, which are not read, and of shared experts, of which there are none.
    hf.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp", "mlp_intermediate_size", "shared_moe_mode")
    norm = read_norm(hf)
    attention = read_attention(hf, head_dim=128, kv_heads=8, qk_norm=QKNormSpec(norm=norm, over="width"))
    router = Router(top_k=hf.take("num_experts_per_tok", 8), score="sigmoid", corrected=True)
    experts = ExpertsSpec(count=hf.take("num_local_experts", 256), router=router)
    layers = uniform_layers(hf, attention, read_mlp(hf, experts=experts), norm=norm)
    max_position = read_max_position(hf, 196608)
    turned = hf.take("rotary_dim", attention.head_dim) / attention.head_dim
    rope = read_rope(hf, max_position, theta=5e6, partial=turned, head_dim=attention.head_dim)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="minimax_m2", layers=layers, **shared)


FAMILY = Family(
    "minimax_m2",
    ("MiniMaxM2ForCausalLM",),
    _read,
    MIXTRAL_NAMES | {"correction": f"{MOE}.e_score_correction_bias"},
    IGNORED,
)
