"""EXAONE 4: norms after attention and MLP, and norms of queries and keys. In models with windows on some layers, the
other layers have no positions. K-EXAONE: the same with norms before, and DeepSeek-V3's experts."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import read_dense
from jaxserve.models.families.glm4_moe import SHARED, read_deepseek_experts, with_mixture
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
from jaxserve.models.families.olmo import POST_NAMES
from jaxserve.models.families.qwen2_moe import EXPERTS, MLP
from jaxserve.models.families.shared import KINDS, read_activation, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import LayerSpec, MLPSpec, ModelConfig, NormSpec, QKNormSpec, Residual


def _layers(hf: HFConfig, norm: NormSpec, mlp: MLPSpec, residual: Residual) -> tuple[LayerSpec, ...]:
    count = hf.take("num_hidden_layers")
    window = hf.take("sliding_window", None if "sliding_window" in hf.values else 4096)
    pattern = hf.values.get("sliding_window_pattern")
    if isinstance(pattern, str):  # for example "LLLG": three local layers, then a global one
        hf.values.setdefault("layer_types", [KINDS[pattern[i % len(pattern)] == "L"] for i in range(count)])
    # Without windows these have no effect. transformers writes a pattern of 0 then.
    hf.ignore("layer_types", "sliding_window_pattern")
    sliding = read_sliding(hf, 4) if window else [False] * count
    return uniform_layers(
        hf,
        read_attention(hf, qk_norm=QKNormSpec(norm=norm)),
        mlp,
        windows_of(sliding, window),
        ["default" if slides or not window else "none" for slides in sliding],
        norm=norm,
        residual=residual,
    )


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    layers = _layers(hf, norm, read_mlp(hf, activation=read_activation(hf, "silu")), "post")
    ropes = {"default": read_rope(hf, read_max_position(hf)), "none": UNTURNED}
    return ModelConfig(family="exaone4", layers=layers, **read_shared(hf, norm=norm, ropes=ropes))


def _read_moe(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("num_shared_experts", 1)
    hf.rename(num_experts="n_routed_experts", num_shared_experts="n_shared_experts")
    hf.ignore("num_nextn_predict_layers")  # layers that predict further tokens are not read
    norm = read_norm(hf, 1e-5)
    dense = read_mlp(hf)
    mixture = read_deepseek_experts(hf, dense.activation, scale=2.5)
    layers = with_mixture(_layers(hf, norm, dense, "pre"), mixture, read_dense(hf, 1))
    ropes = {"default": read_rope(hf, read_max_position(hf)), "none": UNTURNED}
    return ModelConfig(family="exaone_moe", layers=layers, **read_shared(hf, norm=norm, ropes=ropes))


MOE_NAMES = NAMES | EXPERTS | SHARED | {"correction": f"{MLP}.e_score_correction_bias"}
FAMILIES = (
    Family("exaone4", ("Exaone4ForCausalLM",), _read, POST_NAMES, IGNORED),
    # The layers under "mtp." predict further tokens; they are not read.
    Family("exaone_moe", ("ExaoneMoeForCausalLM",), _read_moe, MOE_NAMES, IGNORED, unread=("mtp.",)),
)
