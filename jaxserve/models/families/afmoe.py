"""Trinity (AFMoE): gates of attention's results, norms before and after attention and experts, windows on three of four
layers, and no positions on the fourth. Behind the first layers experts with a sigmoid router beside shared ones."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.glm4_moe import SHARED, with_mixture
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
from jaxserve.models.families.shared import read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ExpertsSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
AFMOE_NAMES = (
    NAMES
    | EXPERTS
    | SHARED
    | {
        "out_gate.weight": f"{LAYER}.self_attn.gate_proj.weight",
        "router.weight": f"{MLP}.router.gate.weight",
        "correction": f"{MLP}.expert_bias",
        "attention_out_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
        "mlp_norm.weight": f"{LAYER}.pre_mlp_layernorm.weight",
        "mlp_out_norm.weight": f"{LAYER}.post_mlp_layernorm.weight",
    }
)
# Keys in published configs that transformers does not read, and the values that agree with what is computed.
WRITTEN = {
    "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
    "num_limited_groups": 1,
}  # fmt: skip


def _read(hf: HFConfig) -> ModelConfig:
    for key, only in WRITTEN.items():
        hf.expect(key, only)
    hf.ignore("load_balance_coeff", "use_grouped_mm")  # for training, and of transformers' own code
    hf.expect("attention_bias", False)
    norm = read_norm(hf, 1e-5)
    attention = read_attention(hf, head_dim=128, qk_norm=QKNormSpec(norm=norm), out_gate="sigmoid")
    dense = read_mlp(hf)
    scale = float(hf.take("route_scale", 1.0))
    router = Router(top_k=hf.take("num_experts_per_tok", 6), score="sigmoid", corrected=True, scale=scale)
    size = hf.take("moe_intermediate_size", 1408)
    shared_size = size * hf.take("num_shared_experts", 2)
    experts = ExpertsSpec(count=hf.take("num_experts", 64), router=router, shared_size=shared_size)
    mixture = MLPSpec(size=size, activation=dense.activation, experts=experts)
    sliding = read_sliding(hf, 4, "global_attn_every_n_layers")
    windows = windows_of(sliding, hf.take("sliding_window", 1024))
    ropes = ["turned" if slides else "none" for slides in sliding]
    plain = uniform_layers(hf, attention, dense, windows, ropes, norm=norm, residual="sandwich")
    first = hf.take("num_dense_layers", 1)
    max_position = read_max_position(hf, 16384)
    return ModelConfig(
        family="afmoe",
        layers=with_mixture(plain, mixture, [i < first for i in range(len(plain))]),
        embed_scale=hf.take("hidden_size") ** 0.5 if hf.take("mup_enabled", False) else 1.0,
        **read_shared(
            hf, norm=norm, max_position=max_position, ropes={"turned": read_rope(hf, max_position), "none": UNTURNED}
        ),
    )


FAMILY = Family("afmoe", ("AfmoeForCausalLM",), _read, AFMOE_NAMES, IGNORED)
