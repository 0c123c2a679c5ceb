"""GLM-5: DeepSeek-V3.2's layers with sizes of its own. Some layers may share what an indexer has chosen."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import INDEXED_NAMES, MTP, UNREAD, read_deepseek, read_router, with_indexers
from jaxserve.models.families.llama import IGNORED
from jaxserve.models.spec import ModelConfig

SIZES = {
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore("mlp_bias", "index_share_for_mtp_iteration")  # nothing reads the first; the second is for drafting
    hf.values.setdefault("n_shared_experts", 1)
    router = read_router(hf, top_k=8, scale=2.5)
    config = read_deepseek(hf, "glm_moe_dsa", router, 202752, dense_layers=3, sizes=SIZES, eps=1e-5)
    return with_indexers(hf, config, heads=32, interleaved=True)


FAMILY = Family(
    "glm_moe_dsa", ("GlmMoeDsaForCausalLM",), _read, INDEXED_NAMES, (*IGNORED, *UNREAD), more_layers=True, mtp=MTP
)
