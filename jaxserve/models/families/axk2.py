"""A.X K2: DeepSeek-V3.2 with gates of the norms before attention and experts, and of each channel of attention's
results. The latter, and queries, are projected from the latent of queries and from its norm."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import INDEXED_NAMES, read_deepseek, read_router, with_indexers
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.sources import Names
from jaxserve.models.spec import LatentAttentionSpec, LayerSpec, ModelConfig

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
AXK2_NAMES = INDEXED_NAMES | {
    f"{role}_gate_{way}.weight": f"model.layers.{{i}}.{norm}.W_{way}.weight"
    for role, norm in NORMS.items()
    for way in ("down", "up")
}
SIZES = {
    "q_lora_rank": 384, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


def _variant(config: ModelConfig) -> Names:
    """The names of norms with gates."""
    return {
        f"{i}/{role}.weight": f"model.layers.{{i}}.{NORMS[role]}.norm.weight"
        for i, layer in enumerate(config.layers)
        for role in layer.gated_norms
    }


def _read(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("n_shared_experts", 1)
    # transformers does not leave out groups whose corrected scores are all below 0.
    for key in ("n_group", "topk_group"):
        hf.expect(key, 1)
    rank = hf.take("gated_norm_rank", 16)
    router = read_router(hf, top_k=8, scale=2.5)
    plain = read_deepseek(hf, "axk2", router, 131072, dense_layers=1, sizes=SIZES)
    indexed = with_indexers(hf, plain, heads=16)

    def gated(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, LatentAttentionSpec)
        attention = replace(layer.attention, head_gate=True, channel_gates=True, latent_twice=True)
        norms = ("attention_norm", "mlp_norm") if layer.experts is not None else ("attention_norm",)
        return replace(layer, attention=attention, gated_norms=norms, gate_rank=rank)

    return replace(indexed, layers=tuple(map(gated, indexed.layers)))


FAMILY = Family("axk2", ("AXK2ForCausalLM",), _read, AXK2_NAMES, IGNORED, more_layers=True, variant=_variant)
