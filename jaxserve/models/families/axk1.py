"""A.X K1: DeepSeek-V3 with a norm behind each mixture. Published files lack the routers' correction bias, which is then
zero, and have the norm also in dense layers, which do not use it."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import DEEPSEEK_NAMES, read_deepseek, read_router
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.spec import LayerSpec, ModelConfig

BEHIND = "post_mlp_layernorm.weight"
AXK1_NAMES = DEEPSEEK_NAMES | {"mlp_out_norm.weight": f"model.layers.{{i}}.{BEHIND}", "correction.absent": "zeros"}


def _read(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("n_shared_experts", 1)
    router = read_router(hf, top_k=8, scale=2.5, groups=8, top_groups=4)
    plain = read_deepseek(hf, "axk1", router, 32768, dense_layers=1)

    def normed(layer: LayerSpec) -> LayerSpec:
        return layer if layer.experts is None else replace(layer, residual="normed_mlp")

    return replace(plain, layers=tuple(map(normed, plain.layers)))


FAMILY = Family("axk1", ("AXK1ForCausalLM",), _read, AXK1_NAMES, (*IGNORED, BEHIND), more_layers=True)
