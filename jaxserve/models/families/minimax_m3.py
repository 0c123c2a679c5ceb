"""MiniMax M3: attention over blocks of tokens that each head of keys and values chooses for itself; experts with a
sigmoid router and a correction bias beside a shared one; clamped gates; norms whose files hold w of 1 + w."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import read_dense
from jaxserve.models.families.glm4_moe import with_mixture
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.mixtral import MIXTRAL_NAMES, MOE
from jaxserve.models.families.qwen2_moe import MLP, STACKED
from jaxserve.models.families.within import Text, by_either, family_within
from jaxserve.models.rope import read_rope, rotary_dim
from jaxserve.models.spec import BlockChoiceSpec, ExpertsSpec, MLPSpec, ModelConfig, NormSpec, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router
from jaxserve.pallas_kernels.ops import CLAMPED_ALPHA

SHARED = {f"shared_{role}.weight": f"{MOE}.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")}
ATTENTION = "model.layers.{i}.self_attn"
CHOICE = ("q_proj", "k_proj", "q_norm", "k_norm")
# The roles of what chooses blocks, and the names of their modules.
ROLES = dict(zip(("index_q", "index_k", "index_q_norm", "index_k_norm"), CHOICE, strict=True))
HUB_NAMES = (
    MIXTRAL_NAMES
    | SHARED
    | {"correction": f"{MOE}.e_score_correction_bias"}
    | {f"{role}.weight": f"{ATTENTION}.index_{name}.weight" for role, name in ROLES.items()}
)
TEXT_NAMES = (  # as transformers writes the language model by itself
    NAMES
    | STACKED
    | {
        "router.weight": f"{MLP}.gate.weight",
        "correction": f"{MLP}.gate.e_score_correction_bias",
        "gate_up.weight": f"{MLP}.gate_up_proj.weight",
        "shared_gate_up.weight": f"{MLP}.shared_experts.gate_up_proj.weight",
        "shared_down.weight": f"{MLP}.shared_experts.down_proj.weight",
        **{f"{role}.weight": f"{ATTENTION}.indexer.{name}.weight" for role, name in ROLES.items()},
    }
)
OLD_NAMES = {  # of settings in sparse_attention_config
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}


def _read_sparse(hf: HFConfig, count: int) -> list[bool]:
    """For each layer, whether it chooses blocks. Settings in an older form get their new names."""
    older = hf.take("sparse_attention_config", None) or {}
    hf.values.update({new: older[old] for old, new in OLD_NAMES.items() if old in older})
    types = hf.take("layer_types", None)
    if types is None:
        types = ["minimax_m3_sparse" if one else "full_attention" for one in older.get("sparse_attention_freq", [])]
        types = types or ["full_attention"] * count
    if len(types) != count or set(types) - {"minimax_m3_sparse", "full_attention"}:
        raise ConfigError(
            f"layer_types must be {count} times 'minimax_m3_sparse' or 'full_attention', got {types!r:.80}"
        )
    return [one == "minimax_m3_sparse" for one in types]


def _read_choice(hf: HFConfig, kv_heads: int, turned: int, norm: NormSpec) -> BlockChoiceSpec:
    heads = hf.take("index_n_heads", 4)
    if heads != kv_heads:
        raise ConfigError(f"index_n_heads={heads} must be num_key_value_heads={kv_heads}, whose heads choose blocks")
    return BlockChoiceSpec(
        dim=hf.take("index_head_dim", 128),
        turned=turned,
        size=hf.take("index_block_size", 128),
        count=hf.take("index_topk_blocks", 16),
        local=hf.take("index_local_blocks", 1),
        norm=norm,
    )


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("swiglu_alpha", CLAMPED_ALPHA)
    # The activation is fixed, and partial_rotary_factor tells how many channels turn.
    hf.ignore("hidden_act", "rotary_dim")
    count = hf.take("num_hidden_layers")
    freq = hf.take("moe_layer_freq", None) or [1] * count
    if not isinstance(freq, list):
        raise ConfigError(f"moe_layer_freq must be a list, got {freq}")
    hf.values.setdefault("mlp_layer_types", ["sparse" if one else "dense" for one in freq])
    norm = read_norm(hf, offset=1.0)
    attention = read_attention(hf, head_dim=128, kv_heads=4, qk_norm=QKNormSpec(norm=norm))
    limit = float(hf.take("swiglu_limit", 7.0))
    scale = float(hf.take("routed_scaling_factor", 2.0))
    router = Router(top_k=hf.take("num_experts_per_tok", 4), score="sigmoid", corrected=True, scale=scale)
    shared_size = hf.take("shared_intermediate_size", 3072)
    experts = ExpertsSpec(count=hf.take("num_local_experts", 128), router=router, shared_size=shared_size)
    dense = MLPSpec(size=hf.take("dense_intermediate_size", 12288), limit=limit)
    mixture = MLPSpec(size=hf.take("intermediate_size", 3072), limit=limit, experts=experts)
    max_position = read_max_position(hf, 524288)
    rope = read_rope(hf, max_position, theta=5e6, partial=1.0, head_dim=attention.head_dim)
    layers = with_mixture(uniform_layers(hf, attention, dense, norm=norm), mixture, read_dense(hf, 0))
    sparse = _read_sparse(hf, count)
    choice: Any = None
    if any(sparse):
        choice = _read_choice(hf, attention.num_kv_heads, rotary_dim(rope, attention.head_dim), norm)
    hf.ignore(*OLD_NAMES.values())
    choosing = replace(attention, blocks=choice)
    layers = tuple(
        replace(layer, attention=choosing) if chooses else layer for layer, chooses in zip(layers, sparse, strict=True)
    )
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope})
    return ModelConfig(family="minimax_m3", layers=layers, **shared)


def _read_within(hf: HFConfig) -> ModelConfig:
    return replace(_read(hf), family="minimax_m3 with images")


FAMILIES = (
    Family("minimax_m3", ("MiniMaxM3VLForCausalLM",), _read, TEXT_NAMES, IGNORED),
    family_within(
        "minimax_m3",
        "MiniMaxM3SparseForConditionalGeneration",
        {"minimax_m3_vl_text": Text(_read_within)},
        HUB_NAMES,
        by_either,
    ),
)
