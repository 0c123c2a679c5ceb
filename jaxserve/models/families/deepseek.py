"""DeepSeek V2, V3 and R1, and models built like them (Kimi K2).

They have latent attention, a dense MLP in the first layers, and experts beside a shared MLP in the others. V2's router
takes the softmax of its logits. V3's takes sigmoids, adds a correction bias for the choice only, and limits the choice
to groups of experts.

Layers behind the last one predict further tokens; they are not read. V3.2 and GLM-5 have indexers, which choose the
tokens that attention sees. In V3.2's the rotated pairs of channels are half of them apart, as DeepSeek's own code of
November 2025 corrects it, although those of its attention are next to each other; in GLM-5's they are, too. In some
layers of GLM-5 attention sees what the last indexer before it has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, NAMES, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import (
    ExpertsSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
)
from jaxserve.pallas_kernels.expert_routing import Router

ATTENTION = "model.layers.{i}.self_attn"
MLP = "model.layers.{i}.mlp"
LATENT_NAMES = {
    "q.weight": f"{ATTENTION}.q_proj.weight",
    "q_norm.weight": f"{ATTENTION}.q_a_layernorm.weight",
    "q_b.weight": f"{ATTENTION}.q_b_proj.weight",
    "kv_norm.weight": f"{ATTENTION}.kv_a_layernorm.weight",
    "kv_b.weight": f"{ATTENTION}.kv_b_proj.weight",
    **{f"q_a.{kind}": f"{ATTENTION}.q_a_proj.{kind}" for kind in ("weight", "bias")},
    **{f"kv_a.{kind}": f"{ATTENTION}.kv_a_proj_with_mqa.{kind}" for kind in ("weight", "bias")},
}
EXPERTS = {
    "router.weight": f"{MLP}.gate.weight",
    "correction": f"{MLP}.gate.e_score_correction_bias",
    **{f"expert_{role}.weight": f"{MLP}.experts.{{e}}.{role}_proj.weight" for role in ("gate", "up", "down")},
    **{f"shared_{role}.weight": f"{MLP}.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")},
}
MTP = {  # the layer behind the last one predicts further tokens
    "fc.weight": "model.layers.{i}.eh_proj.weight",
    "embed_norm.weight": "model.layers.{i}.enorm.weight",
    "hidden_norm.weight": "model.layers.{i}.hnorm.weight",
    "norm.weight": "model.layers.{i}.shared_head.norm.weight",
}
INDEXER = {
    "index_q.weight": f"{ATTENTION}.indexer.wq_b.weight",
    "index_k.weight": f"{ATTENTION}.indexer.wk.weight",
    "index_k_norm.weight": f"{ATTENTION}.indexer.k_norm.weight",
    "index_k_norm.bias": f"{ATTENTION}.indexer.k_norm.bias",
    "index_weights.weight": f"{ATTENTION}.indexer.weights_proj.weight",
}
UNREAD = tuple(name.removeprefix(f"{ATTENTION}.") for name in INDEXER.values())  # by models for short sequences

# The sizes of latent attention that transformers assumes for keys which a config does not have.
SIZES = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def read_latent_attention(hf: HFConfig, sizes: Mapping[str, int | None] = SIZES) -> LatentAttentionSpec:
    """Reads the attention of a config. Keys that follow from others (`qk_head_dim`, `head_dim`, `num_key_value_heads`)
    are ignored. `sizes` are the family's defaults."""
    hf.ignore("qk_head_dim", "head_dim", "num_key_value_heads")
    nope = hf.take("qk_nope_head_dim", sizes["qk_nope_head_dim"])
    rope = hf.take("qk_rope_head_dim", sizes["qk_rope_head_dim"])
    scaling = rope_settings(hf)
    scale = (nope + rope) ** -0.5
    everywhere = scaling.get("mscale_all_dim")
    if everywhere and (scaling.get("factor") or 1.0) > 1.0:
        scale *= (0.1 * everywhere * math.log(scaling["factor"]) + 1.0) ** 2
    return LatentAttentionSpec(
        num_heads=hf.take("num_attention_heads"),
        rank=hf.take("kv_lora_rank", sizes["kv_lora_rank"]),
        q_rank=hf.take("q_lora_rank", None if "q_lora_rank" in hf.values else sizes["q_lora_rank"]),
        nope_dim=nope,
        rope_dim=rope,
        v_dim=hf.take("v_head_dim", sizes["v_head_dim"]),
        norm=NormSpec(eps=1e-6),  # fixed; `rms_norm_eps` is for the other norms
        bias=bool(hf.take("attention_bias", False)),
        scale=scale,
    )


def read_layers(
    hf: HFConfig, router: Router, norm: NormSpec, dense_layers: int, sizes: Mapping[str, int | None]
) -> tuple[LayerSpec, ...]:
    """Reads the layers. `dense_layers` is the default number of layers with a dense MLP, which come first."""
    hf.expect("moe_layer_freq", 1)
    dense = read_mlp(hf)
    size = hf.take("moe_intermediate_size")
    shared = hf.take("n_shared_experts", None) or 0
    experts = ExpertsSpec(count=hf.take("n_routed_experts"), router=router, shared_size=size * shared)
    mixture = MLPSpec(size=size, activation=dense.activation, experts=experts)
    layer = LayerSpec(attention=read_latent_attention(hf, sizes), mlp=mixture, norm=norm)
    return tuple(replace(layer, mlp=dense) if is_dense else layer for is_dense in read_dense(hf, dense_layers))


def read_dense(hf: HFConfig, first: int) -> list[bool]:
    """For each layer, whether it has a dense MLP: by `mlp_layer_types`; without this key the first layers have one."""
    count = hf.take("num_hidden_layers")
    types = hf.take("mlp_layer_types", None)
    hf.ignore("first_k_dense_replace")
    if not types:
        first = hf.take("first_k_dense_replace", first)
        return [i < first for i in range(count)]
    if set(types) - {"dense", "sparse"} or len(types) != count:
        raise ConfigError(f"mlp_layer_types must be {count} times 'dense' or 'sparse', got {types!r:.80}")
    return [kind == "dense" for kind in types]


def read_deepseek(
    hf: HFConfig,
    family: str,
    router: Router,
    longest: int,
    dense_layers: int = 0,
    sizes: Mapping[str, int | None] = SIZES,
    eps: float = 1e-6,
) -> ModelConfig:
    """Reads a model with latent attention and this router. The other arguments are the family's defaults."""
    hf.ignore("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "index_n_heads",
              "index_head_dim", "index_topk")  # fmt: skip
    # "indexed_attention" is V3.2's with the indexer, which is not read.
    if others := set(hf.take("layer_types", None) or ()) - {"indexed_attention", "full_attention"}:
        raise ConfigError(f"{hf.source}: layer_types {sorted(others)} are not supported")
    max_position = read_max_position(hf, longest)
    interleaved = bool(hf.take("rope_interleave", True))
    ropes = {"default": read_rope(hf, max_position, interleaved=interleaved)}
    norm = read_norm(hf, eps)
    layers = read_layers(hf, router, norm, dense_layers, sizes)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family=family, layers=layers, **shared)


def with_indexers(
    hf: HFConfig, config: ModelConfig, *, heads: int, interleaved: bool = False, **choices: Any
) -> ModelConfig:
    """The model with the indexers of its config. `heads` and `interleaved` are the family's defaults; `choices` are
    further fields of `IndexerSpec`."""
    indexer = IndexerSpec(
        heads=hf.take("index_n_heads", heads),
        dim=hf.take("index_head_dim", 128),
        top_k=hf.take("index_topk", 2048),
        interleaved=bool(hf.take("indexer_rope_interleave", interleaved)),
        **choices,
    )
    shared = _read_shared_choices(hf, config.num_layers)
    layers = []
    for layer, shares in zip(config.layers, shared, strict=True):
        assert isinstance(layer.attention, LatentAttentionSpec)
        attention = replace(layer.attention, indexer=replace(indexer, shared=shares))
        layers.append(replace(layer, attention=attention))
    return replace(config, layers=tuple(layers))


def _read_shared_choices(hf: HFConfig, count: int) -> list[bool]:
    """For each layer, whether it sees what the last indexer before it has chosen: by `indexer_types`, by
    `index_topk_pattern` with a letter for each layer, or from a layer on all but every n-th."""
    pattern = hf.take("index_topk_pattern", None)
    every = max(hf.take("index_topk_freq", 1), 1)
    first = hf.take("index_skip_topk_offset", 2)
    types = hf.take("indexer_types", None)
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if types is None:
        types = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(count)]
    if set(types) - {"full", "shared"} or len(types) != count or types[0] != "full":
        raise ConfigError(f"indexer_types must be {count} times 'full' or 'shared', 'full' first, got {types!r:.80}")
    return [kind == "shared" for kind in types]


def _read_second(hf: HFConfig) -> ModelConfig:
    method = hf.take("topk_method", "greedy")
    options = {}
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method={method!r} is not supported (only 'greedy', 'group_limited_greedy')")
    hf.expect("scoring_func", "softmax")
    hf.ignore("norm_topk_prob")  # the model's own code does not read it
    groups = _read_groups(hf, 1, 1)
    if method == "group_limited_greedy":
        options = groups
    scale = float(hf.take("routed_scaling_factor", 1.0))
    router = Router(top_k=hf.take("num_experts_per_tok"), normalized=False, scale=scale, **options)
    return read_deepseek(hf, "deepseek_v2", router, 2048)


def _read_third(hf: HFConfig) -> ModelConfig:
    hf.ignore("mlp_bias")  # V3.2's configs have it, and no version of V3 reads it
    router = read_router(hf, top_k=8, scale=2.5, groups=8, top_groups=4)
    if hf.take("architectures", None) != ["DeepseekV32ForCausalLM"]:
        return read_deepseek(hf, "deepseek_v3", router, 4096, dense_layers=3)
    return with_indexers(hf, read_deepseek(hf, "deepseek_v3", router, 163840, dense_layers=3), heads=64)


def read_router(
    hf: HFConfig,
    *,
    top_k: int | None = None,
    normalized: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    **choices: Any,
) -> Router:
    """V3's router. The named arguments are the family's defaults; without `top_k` the config must say it. `choices` are
    fields of the Router that differ from V3's."""
    hf.expect("topk_method", "noaux_tc")
    fields: dict[str, Any] = {"score": "sigmoid", "corrected": True, "group_score": "top2"}
    fields |= _read_groups(hf, groups, top_groups) | choices
    hf.expect("scoring_func", fields["score"])
    return Router(
        top_k=hf.take("num_experts_per_tok") if top_k is None else hf.take("num_experts_per_tok", top_k),
        normalized=bool(hf.take("norm_topk_prob", normalized)),
        scale=float(hf.take("routed_scaling_factor", scale)),
        **fields,
    )


def _read_groups(hf: HFConfig, groups: int, top_groups: int) -> dict[str, Any]:
    """Fields of a Router. `groups` and `top_groups` are the defaults for configs without the keys; null means 1."""
    defaults = {"n_group": groups, "topk_group": top_groups}
    groups, top_groups = (hf.take(key, 1 if key in hf.values else usual) for key, usual in defaults.items())
    return {"groups": groups, "top_groups": top_groups}


DEEPSEEK_NAMES = NAMES | LATENT_NAMES | EXPERTS
INDEXED_NAMES = DEEPSEEK_NAMES | INDEXER
FAMILIES = [
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), _read_second, DEEPSEEK_NAMES, IGNORED),
    Family(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
        _read_third,
        INDEXED_NAMES,
        (*IGNORED, *UNREAD),
        more_layers=True,
        mtp=MTP,
    ),
]
