"""DeepSeek V4. All layers have windows, and most of them compressed entries of the tokens beyond: many, of which an
indexer chooses some, or few, of which all are seen (`models.compressed`). Several residual streams are mixed around
each attention and each mixture (`models.hyper`). In the first layers a table tells each token's experts.

Published files have other names than those of transformers, and blocks that predict further tokens, which are not read.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_max_position, read_norm, read_shared
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope, rope_settings, rotary_dim
from jaxserve.models.spec import (
    CompressedAttentionSpec,
    CompressionSpec,
    ExpertsSpec,
    HyperSpec,
    IndexerSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    RopeConfig,
)
from jaxserve.pallas_kernels.expert_routing import Router

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}  # unless the config says otherwise
OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # in `compress_ratios`, whatever the rates
HASHED_LAYERS = 3  # the first ones, unless the config says otherwise
ROTATED = 64 / 512  # share of a head's channels, unless the config says otherwise

LAYER = "model.layers.{i}"
ATTENTION = f"{LAYER}.self_attn"
ENTRIES = f"{ATTENTION}.compressor"
KEYS = f"{ENTRIES}.indexer"
MLP = f"{LAYER}.mlp"
# Role -> its name in transformers, and in published files.
BOTH_NAMES = {
    "embed.weight": ("model.embed_tokens.weight", "embed.weight"),
    "norm.weight": ("model.norm.weight", "norm.weight"),
    "head.weight": ("lm_head.weight", "head.weight"),
    "attention_norm.weight": (f"{LAYER}.input_layernorm.weight", "layers.{i}.attn_norm.weight"),
    "mlp_norm.weight": (f"{LAYER}.post_attention_layernorm.weight", "layers.{i}.ffn_norm.weight"),
    "q_a.weight": (f"{ATTENTION}.q_a_proj.weight", "layers.{i}.attn.wq_a.weight"),
    "q_norm.weight": (f"{ATTENTION}.q_a_norm.weight", "layers.{i}.attn.q_norm.weight"),
    "q_b.weight": (f"{ATTENTION}.q_b_proj.weight", "layers.{i}.attn.wq_b.weight"),
    "kv.weight": (f"{ATTENTION}.kv_proj.weight", "layers.{i}.attn.wkv.weight"),
    "kv_norm.weight": (f"{ATTENTION}.kv_norm.weight", "layers.{i}.attn.kv_norm.weight"),
    "sinks": (f"{ATTENTION}.sinks", "layers.{i}.attn.attn_sink"),
    "o_a.weight": (f"{ATTENTION}.o_a_proj.weight", "layers.{i}.attn.wo_a.weight"),
    "o.weight": (f"{ATTENTION}.o_b_proj.weight", "layers.{i}.attn.wo_b.weight"),
    "index_q.weight": (f"{KEYS}.q_b_proj.weight", "layers.{i}.attn.indexer.wq_b.weight"),
    "index_weights.weight": (f"{KEYS}.scorer.weights_proj.weight", "layers.{i}.attn.indexer.weights_proj.weight"),
    "router.weight": (f"{MLP}.gate.weight", "layers.{i}.ffn.gate.weight"),
    "correction": (f"{MLP}.gate.e_score_correction_bias", "layers.{i}.ffn.gate.bias"),
    "expert_table": (f"{MLP}.gate.tid2eid", "layers.{i}.ffn.gate.tid2eid"),
    "expert_gate_up.weight": (f"{MLP}.experts.{{e}}.gate_up_proj", f"{MLP}.experts.{{e}}.gate_up_proj"),
    "expert_fused_down.weight": (f"{MLP}.experts.{{e}}.down_proj", f"{MLP}.experts.{{e}}.down_proj"),
}  # fmt: skip
for role, ours, published in (("entry", ENTRIES, "compressor"), ("key", KEYS, "indexer.compressor")):
    BOTH_NAMES |= {
        f"{role}_{name}": (f"{ours}.{theirs}", f"layers.{{i}}.attn.{published}.{short}")
        for name, theirs, short in (
            ("kv.weight", "kv_proj.weight", "wkv.weight"), ("gate.weight", "gate_proj.weight", "wgate.weight"),
            ("bias", "position_bias", "ape"), ("norm.weight", "kv_norm.weight", "norm.weight"),
        )
    }  # fmt: skip
for role, short in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
    for kind, within in (("expert", "experts.{e}"), ("shared", "shared_experts")):
        BOTH_NAMES[f"{kind}_{role}.weight"] = (
            f"{MLP}.{within}.{role}_proj.weight", f"layers.{{i}}.ffn.{within}.{short}.weight",
        )  # fmt: skip
for name, short in (("mixing", "fn"), ("base", "base"), ("scale", "scale")):
    BOTH_NAMES |= {
        f"attention_hyper_{name}": (f"{LAYER}.attn_hc.{short}", f"layers.{{i}}.hc_attn_{short}"),
        f"mlp_hyper_{name}": (f"{LAYER}.ffn_hc.{short}", f"layers.{{i}}.hc_ffn_{short}"),
        f"head_hyper_{name}": (f"model.hc_head.hc_{short}", f"hc_head_{short}"),
    }
V4_NAMES = {role: name for role, (name, _) in BOTH_NAMES.items()}
PUBLISHED = {ours: published for ours, published in BOTH_NAMES.values() if ours != published}
# As transformers writes them: of the names without a layer it changes that of the head only, and the norm of keys loses
# a part of its name.
SAVED = {ours: f"model.{published}" for ours, published in PUBLISHED.items() if ours.startswith(LAYER)}
SAVED |= {"lm_head.weight": "head.weight", V4_NAMES["kv_norm.weight"]: "model.layers.{i}.attn.norm.weight"}


def _kinds(hf: HFConfig, key: str, usual: list[str], known: tuple[str, ...]) -> list[str]:
    """The kind of each layer: by the key, or the usual ones."""
    count = hf.take("num_hidden_layers")
    kinds = list(hf.take(key, None) or usual)[:count]
    if len(kinds) != count:
        raise ConfigError(f"{hf.source}: {key} has {len(kinds)} entries, num_hidden_layers is {count}")
    if unknown := set(kinds) - set(known):
        raise ConfigError(f"{hf.source}: {key} {sorted(unknown)} are not supported (only {sorted(known)})")
    return kinds


def _attention_kinds(hf: HFConfig) -> list[str]:
    """For each layer what its attention sees. Published configs have rates in the place of names, also for blocks
    behind the last layer."""
    usual = [HEAVY] * 2 + [SPARSE if i % 2 else HEAVY for i in range(hf.take("num_hidden_layers") - 2)]
    hf.ignore("compress_ratios")
    if hf.take("layer_types", None) is None and (ratios := hf.take("compress_ratios", None)) is not None:
        if not isinstance(ratios, list) or any(ratio not in OF_RATIO for ratio in ratios):
            raise ConfigError(f"{hf.source}: compress_ratios must be of {sorted(OF_RATIO)}, got {ratios!r:.80}")
        usual = [OF_RATIO[ratio] for ratio in ratios]
    return _kinds(hf, "layer_types", usual, (SLIDING, SPARSE, HEAVY))


def _hashed(hf: HFConfig) -> list[bool]:
    """For each layer, whether a table tells its experts."""
    first = hf.take("num_hash_layers", HASHED_LAYERS)
    usual = ["hash_moe" if i < first else "moe" for i in range(hf.take("num_hidden_layers"))]
    return [kind == "hash_moe" for kind in _kinds(hf, "mlp_layer_types", usual, ("hash_moe", "moe"))]


def _rates(hf: HFConfig) -> dict[str, int]:
    """Tokens of an entry, by the kind of attention."""
    rates = RATES | (hf.take("compress_rates", None) or {})
    rates[SPARSE] = hf.take("compress_rate_csa", rates[SPARSE])
    rates[HEAVY] = hf.take("compress_rate_hca", rates[HEAVY])
    if set(rates) != set(RATES) or any(type(rate) is not int or rate < 1 for rate in rates.values()):
        raise ConfigError(f"{hf.source}: compress_rates must be positive integers of {sorted(RATES)}, got {rates}")
    return rates


def _ropes(hf: HFConfig, max_position: int) -> dict[str, RopeConfig]:
    """The rotary embeddings "main", of layers without entries, and "compress", of those with entries. A single object
    of settings is for the second; it stretches angles, and leaves their size as it is."""
    settings = rope_settings(hf)
    head_dim = hf.take("head_dim", 512)
    main, compress = settings.get("main"), settings.get("compress")
    if isinstance(main, dict) and isinstance(compress, dict):
        hf.ignore("compress_rope_theta", "qk_rope_head_dim")
        if "partial_rotary_factor" in main and "partial_rotary_factor" in compress:
            hf.values.pop("partial_rotary_factor", None)  # has no effect beside them
    else:
        usual = hf.take("qk_rope_head_dim", head_dim * ROTATED) / head_dim
        turned = {"partial_rotary_factor": hf.take("partial_rotary_factor", usual)}
        main = {"rope_theta": hf.take("rope_theta", 10000.0)} | turned
        compress = settings | {"rope_theta": hf.take("compress_rope_theta", 160000.0)} | turned
        if "yarn" in (settings.get("rope_type"), settings.get("type")):
            compress.setdefault("attention_factor", 1.0)
    return {
        name: read_rope(hf, max_position, parameters=parameters, partial=1.0, head_dim=head_dim)
        for name, parameters in (("main", main), ("compress", compress))
    }


def _read_attention(hf: HFConfig, norm: NormSpec, ropes: dict[str, RopeConfig]) -> CompressedAttentionSpec:
    """The attention of a layer without entries."""
    head_dim = hf.take("head_dim", 512)
    dims = {rotary_dim(rope, head_dim) for rope in ropes.values()}
    if len(dims) > 1:
        raise ConfigError(f"{hf.source}: as many channels of a head must turn in all layers, got {sorted(dims)}")
    return CompressedAttentionSpec(
        num_heads=hf.take("num_attention_heads", 64),
        head_dim=head_dim,
        rope_dim=dims.pop(),
        q_rank=hf.take("q_lora_rank", 1024),
        window=hf.take("sliding_window", 128),
        out_groups=hf.take("o_groups", 8),
        out_rank=hf.take("o_lora_rank", 1024),
        norm=norm,
        rope="main",
    )


def _read_mixtures(hf: HFConfig) -> tuple[MLPSpec, MLPSpec]:
    """The mixtures of layers whose router chooses, and of those with a table."""
    hf.expect("mlp_bias", False)
    hf.expect("scoring_func", "sqrtsoftplus", "sigmoid")
    router = Router(
        top_k=hf.take("num_experts_per_tok", 6),
        score=hf.take("scoring_func", "sqrtsoftplus"),
        sum_offset=1e-20,
        scale=float(hf.take("routed_scaling_factor", 1.5)),
    )
    size = hf.take("moe_intermediate_size", 2048)
    limit = float(hf.take("swiglu_limit", 10.0))
    experts = ExpertsSpec(count=hf.take("n_routed_experts", 256), router=router, shared_size=size, shared_bound=limit)
    mlp = MLPSpec(size=size, activation=read_activation(hf, "silu"), bound=limit, bound_first=True, experts=experts)
    chosen = replace(experts, router=replace(router, corrected=True))
    hashed = replace(experts, hashed=hf.take("vocab_size"))
    return replace(mlp, experts=chosen), replace(mlp, experts=hashed)


def _read(hf: HFConfig) -> ModelConfig:
    # The model's code does not read these, whatever they are.
    hf.ignore("attention_bias", "n_shared_experts", "norm_topk_prob", "topk_method", "num_key_value_heads",
              "num_nextn_predict_layers", "expert_dtype")  # fmt: skip
    hf.rename(intermediate_size="moe_intermediate_size", num_local_experts="n_routed_experts")
    max_position = read_max_position(hf, 1048576)
    norm = read_norm(hf)
    ropes = _ropes(hf, max_position)
    attention = _read_attention(hf, norm, ropes)
    rates = _rates(hf)
    indexer = IndexerSpec(
        heads=hf.take("index_n_heads", 64), dim=hf.take("index_head_dim", 128), top_k=hf.take("index_topk", 512)
    )
    entries = {kind: f"entries of {rate}" for kind, rate in rates.items()}
    attentions = {
        SLIDING: attention,
        SPARSE: replace(
            attention,
            rope="compress",
            compression=CompressionSpec(rate=rates[SPARSE], rope=entries[SPARSE], overlaps=True, indexer=indexer),
        ),
        HEAVY: replace(attention, rope="compress", compression=CompressionSpec(rate=rates[HEAVY], rope=entries[HEAVY])),
    }
    ropes |= {entries[kind]: replace(ropes["compress"], stride=rate) for kind, rate in rates.items()}
    hyper = HyperSpec(
        count=hf.take("hc_mult", 4), steps=hf.take("hc_sinkhorn_iters", 20), eps=float(hf.take("hc_eps", 1e-6))
    )
    mixtures = _read_mixtures(hf)
    layers = tuple(
        LayerSpec(attention=attentions[kind], mlp=mixtures[hashed], norm=norm, residual="hyper", hyper=hyper)
        for kind, hashed in zip(_attention_kinds(hf), _hashed(hf), strict=True)
    )
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="deepseek_v4", layers=layers, **shared)


FAMILY = Family(
    "deepseek_v4",
    ("DeepseekV4ForCausalLM",),
    _read,
    V4_NAMES,
    IGNORED,
    layouts=(PUBLISHED, SAVED),
    told_by="kv_norm.weight",
    unread=("mtp.",),
)
