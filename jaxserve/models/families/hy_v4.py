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
HY_NAMES = INDEXED_NAMES | {
    "head_gate.weight": f"{ATTENTION}.linear_gate.weight",
    "sinks": f"{ATTENTION}.learnable_sink_param",
}
for kind, short in (("mixing", "fn"), ("base", "base"), ("scale", "scale")):
    HY_NAMES |= {
        f"attention_hyper_{kind}": f"{LAYER}.hc_attn_layer.hc_{short}",
        f"mlp_hyper_{kind}": f"{LAYER}.hc_mlp_layer.hc_{short}",
        f"head_hyper_{kind}": f"model.hc_head.hc_head_{short}",
    }
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
FAMILY = Family("hy_v4", ("HYV4ForCausalLM",), _read, HY_NAMES, IGNORED, unread=("model.mtp_layers.",))
