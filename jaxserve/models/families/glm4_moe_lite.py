"""GLM-4.7-Flash: DeepSeek-V3's layers with sizes of its own."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import DEEPSEEK_NAMES, MTP, read_deepseek, read_router
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.spec import ModelConfig

SIZES = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip


def _read(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("n_shared_experts", 1)
    router = read_router(hf, top_k=4, scale=1.8)
    return read_deepseek(hf, "glm4_moe_lite", router, 202752, dense_layers=1, sizes=SIZES, eps=1e-5)


FAMILY = Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), _read, DEEPSEEK_NAMES, IGNORED, more_layers=True, mtp=MTP)
