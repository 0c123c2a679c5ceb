"""HY-V4: latent attention with indexers, sinks and a gate for each channel of results; DeepSeek-V3's experts, whose
gates are limited; and several residual streams, which are not mixed (`models.hyper`)."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import INDEXED_NAMES, read_deepseek, read_router, with_indexers
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.spec import HyperSpec, LatentAttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec

LAYER = "model.layers.{i}"
ATTENTION = f"{LAYER}.self_attn"
HYPER = {
    f"{part}_hyper_{kind}": f"{module}.hc_{short}"
    for part, module in (
        ("attention", f"{LAYER}.hc_pre.hc_attn_layer"), ("mlp", f"{LAYER}.hc_pre.hc_mlp_layer"),
        ("head", "model.hc_pre.hc_head.hc_head"),
    )
    for kind, short in (("mixing", "fn"), ("base", "base"), ("scale", "scale"))
}  # fmt: skip
HYPER = {role: name.replace("hc_head.hc_head.hc_", "hc_head.hc_head_") for role, name in HYPER.items()}
HY_NAMES = INDEXED_NAMES | HYPER | {
    "head_gate.weight": f"{ATTENTION}.linear_gate.weight",
    "sinks": f"{ATTENTION}.learnable_sink_param",
    # transformers gives the name of attention's gate to the gates of MLPs, too, when it writes files.
    "gate.weight": f"{LAYER}.mlp.linear_gate.weight",
    "shared_gate.weight": f"{LAYER}.mlp.shared_experts.linear_gate.weight",
    "expert_gate_up.weight": f"{LAYER}.mlp.experts.{{e}}.gate_up_proj",
    "expert_fused_down.weight": f"{LAYER}.mlp.experts.{{e}}.down_proj",
}  # fmt: skip


def _published(prefix: str) -> dict[str, str]:
    """Names of transformers -> those of files that it reads, in which a prefix of hyper-connections is elsewhere."""
    gates = {name: name.replace("linear_gate", "gate_proj") for name in HY_NAMES.values() if ".mlp." in name}
    return gates | {
        name: name.replace(".hc_pre.", ".").replace(".hc_attn_layer.", f".hc_attn_layer.{prefix}")
        .replace(".hc_mlp_layer.", f".hc_mlp_layer.{prefix}").replace(".hc_head.", f".hc_head.{prefix}")
        for name in HYPER.values()
    }  # fmt: skip


SIZES = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip


def _indexes(count: int) -> list[str]:
    """The usual kinds of the layers' indexers."""
    return ["shared" if i and (i - 1) % 4 else "full" for i in range(count)]


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore("learnable_sink_init")  # before training
    hf.values.setdefault("n_shared_experts", 1)
    hf.values.setdefault("rope_interleave", False)
    if hf.take("indexer_types", None) is None:
        hf.values["indexer_types"] = _indexes(hf.take("num_hidden_layers"))
    limit = float(hf.take("swiglu_limit", 10.0))
    if not limit:
        raise ConfigError(f"{hf.source}: swiglu_limit must be above 0, got {limit:g}")
    router = read_router(hf, top_k=8, scale=2.827)
    plain = read_deepseek(hf, "hy_v4", router, 262144, dense_layers=1, sizes=SIZES, eps=1e-5)
    norm = NormSpec(kind="layer", eps=plain.norm_eps, bias=True)
    indexed = with_indexers(hf, plain, heads=16, turned_last=True, norm=norm)
    hyper = HyperSpec(
        count=hf.take("hc_mult", 4),
        steps=0,
        eps=float(hf.take("hc_eps", 1e-6)),
        magnitude=float(hf.take("hc_magnitude", 2.0)),
    )

    def of_layer(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, LatentAttentionSpec)
        assert isinstance(layer.mlp, MLPSpec)
        mlp = layer.mlp if layer.experts is None else replace(layer.mlp, bound=limit, bound_first=True)
        attention = replace(attention, head_gate=True, channel_gates=True, sinks=True)
        return replace(layer, attention=attention, mlp=mlp, residual="hyper", hyper=hyper)

    return replace(indexed, layers=tuple(map(of_layer, indexed.layers)))


# The layers under "model.mtp_layers." predict further tokens; they are not read.
FAMILY = Family(
    "hy_v4",
    ("HYV4ForCausalLM",),
    _read,
    HY_NAMES,
    IGNORED,
    layouts=(_published("hc_pre."), _published("")),
    told_by="attention_hyper_base",
    unread=("model.mtp_layers.",),
)
