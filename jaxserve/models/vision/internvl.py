"""The image encoder of InternVL (Chen et al. 2024, arXiv:2312.14238) in transformers' form and in that of its authors.
It reads tiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, QKNormSpec
from jaxserve.models.vision.settings import head_dim_of, joined_side, square_side
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, Step, VisionConfig
from jaxserve.types import ImageTokens

CHAT = "InternVLChatModel"  # the architecture in the authors' files
IMAGE_TOKEN = 151667
TEXTS = {"begin": "<img>", "end": "</img>"}
_LAYER = "vision_tower.encoder.layer.{i}"
_NAMES = named(
    patch="vision_tower.embeddings.patch_embeddings.projection",
    attention_norm=f"{_LAYER}.layernorm_before",
    q=f"{_LAYER}.attention.q_proj",
    k=f"{_LAYER}.attention.k_proj",
    v=f"{_LAYER}.attention.v_proj",
    q_norm=f"{_LAYER}.attention.q_norm",
    k_norm=f"{_LAYER}.attention.k_norm",
    o=f"{_LAYER}.attention.projection_layer",
    mlp_norm=f"{_LAYER}.layernorm_after",
    up=f"{_LAYER}.mlp.fc1",
    down=f"{_LAYER}.mlp.fc2",
    last="vision_tower.layernorm",
    norm="multi_modal_projector.layer_norm",
    fc1="multi_modal_projector.linear_1",
    fc2="multi_modal_projector.linear_2",
) | {
    "table.weight": "vision_tower.embeddings.position_embeddings",
    "class_token": "vision_tower.embeddings.cls_token",
    "attention_scale": f"{_LAYER}.lambda_1",
    "mlp_scale": f"{_LAYER}.lambda_2",
}
_CHAT_LAYER = "vision_model.encoder.layers.{i}"
_CHAT_NAMES = named(
    patch="vision_model.embeddings.patch_embedding",
    attention_norm=f"{_CHAT_LAYER}.norm1",
    qkv=f"{_CHAT_LAYER}.attn.qkv",
    q_norm=f"{_CHAT_LAYER}.attn.q_norm",
    k_norm=f"{_CHAT_LAYER}.attn.k_norm",
    o=f"{_CHAT_LAYER}.attn.proj",
    mlp_norm=f"{_CHAT_LAYER}.norm2",
    up=f"{_CHAT_LAYER}.mlp.fc1",
    down=f"{_CHAT_LAYER}.mlp.fc2",
    norm="mlp1.0",
    fc1="mlp1.1",
    fc2="mlp1.3",
) | {
    "table.weight": "vision_model.embeddings.position_embedding",
    "class_token": "vision_model.embeddings.class_embedding",
    "attention_scale": f"{_CHAT_LAYER}.ls1",
    "mlp_scale": f"{_CHAT_LAYER}.ls2",
}
# Of training, and of experts, which no published encoder has.
_CHAT_UNUSED = (
    "capacity_factor", "drop_path_rate", "eval_capacity_factor", "laux_allreduce", "moe_coeff_ratio",
    "moe_intermediate_size", "moe_output_scale", "noisy_gate_policy", "num_experts", "num_routed_experts",
    "num_shared_experts", "shared_expert_intermediate_size", "tie_word_embeddings", "use_residual", "use_rts",
    "use_weighted_residual",
)  # fmt: skip
_NORMS = {"layer_norm": "layer", "rms_norm": "rms"}


def eyes_internvl(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    if CHAT in hf.values.get("architectures", ()):
        return _eyes_chat(hf, vision, config)
    hf.expect("vision_feature_layer", -1)
    hf.expect("vision_feature_select_strategy", "default")
    side = joined_side(hf, "downsample_ratio")
    encoder = _read(vision, side, config.hidden_size)
    wide = encoder.hidden_size * side**2
    out = config.hidden_size
    projector: tuple[Step, ...] = (
        Joined(count=side**2),
        Normed(name="norm", norm=NormSpec(kind="layer", eps=1e-5, bias=True), size=wide),
        Projected(name="fc1", inputs=wide, outputs=out, activation=read_activation(hf, "gelu", "projector_hidden_act")),
        Projected(name="fc2", inputs=out, outputs=out),
    )
    token = hf.take("image_token_id", IMAGE_TOKEN)
    tokens = ImageTokens(token, encoder.patch_shape[-1], side, layout="enclosed", texts=TEXTS)
    encoder = replace(encoder, projector=encoder.projector + projector)
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=_NAMES))


def _eyes_chat(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The same for files that have the authors' own names of settings and tensors. The id of the token that stands for
    features is in added_tokens.json."""
    hf.expect("select_layer", -1)
    hf.expect("ps_version", "v2")  # the order of joined channels
    hf.expect("use_thumbnail", True)
    vision.rename(qkv_bias="attention_bias", qk_normalization="use_qk_norm")
    vision.expect("use_moe", False)
    vision.ignore(*_CHAT_UNUSED)
    whole = HFConfig(
        {"downsample_ratio": hf.take("downsample_ratio", 0.5), "image_token_id": _added_token(hf.source)}, hf.source
    )
    seeing = eyes_internvl(whole, vision, config)
    return replace(seeing, vision=replace(seeing.vision, names=_CHAT_NAMES))


def _added_token(source: str) -> int:
    try:
        found = json.loads(Path(source).with_name("added_tokens.json").read_text(encoding="utf-8"))["<IMG_CONTEXT>"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return IMAGE_TOKEN
    return found if type(found) is int else IMAGE_TOKEN


def _read(hf: HFConfig, side: int, out_size: int) -> EncoderConfig:
    """The encoder, with what comes before its projector."""
    hf.expect("model_type", "internvl_vision", "intern_vit_6b")
    hf.expect("num_channels", 3)
    hf.expect("use_absolute_position_embeddings", True)
    hf.expect("norm_type", *_NORMS)
    hf.ignore("use_mask_token", "projection_dropout", "layer_scale_init_value")  # of training
    hidden = hf.take("hidden_size", 1024)
    heads = hf.take("num_attention_heads", 16)
    size = square_side(hf, "image_size", 448)
    patch = square_side(hf, "patch_size", 14)
    kind: Any = _NORMS[hf.take("norm_type", "layer_norm")]
    norm = NormSpec(kind=kind, eps=hf.take("layer_norm_eps", 1e-6), bias=kind == "layer")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim_of(hf, hidden, heads, "num_attention_heads"),
        qkv_bias=hf.take("attention_bias", False),
        out_bias=True,
        qk_norm=QKNormSpec(over="width") if hf.take("use_qk_norm", False) else None,
    )
    mlp = MLPSpec(
        size=hf.take("intermediate_size", 4096), activation=read_activation(hf, "gelu"), gated=False, bias=True
    )
    last = Normed(name="last", norm=replace(norm, kind="layer", bias=True), size=hidden)
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        patch_bias=True,
        layers=(LayerSpec(attention=attention, mlp=mlp, norm=norm, residual="layer_scale"),)
        * hf.take("num_hidden_layers", 24),
        table=size // patch,
        interpolation="bicubic",
        class_token="first",
        side=side,
        projector=() if hf.take("use_mean_pooling", True) else (last,),
        out_size=out_size,
    )
