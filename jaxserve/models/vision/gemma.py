"""The image encoders of Gemma 3 (SigLIP, Zhai et al. 2023, arXiv:2303.15343) and what follows them. Tokens of a picture
see each other in both directions."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Normed, Pooled, Projected, VisionConfig
from jaxserve.types import ImageTokens

_LAYER = "vision_tower.encoder.layers.{i}"
_NAMES_3 = named(
    patch="vision_tower.embeddings.patch_embedding",
    table="vision_tower.embeddings.position_embedding",
    attention_norm=f"{_LAYER}.layer_norm1",
    q=f"{_LAYER}.self_attn.q_proj",
    k=f"{_LAYER}.self_attn.k_proj",
    v=f"{_LAYER}.self_attn.v_proj",
    o=f"{_LAYER}.self_attn.out_proj",
    mlp_norm=f"{_LAYER}.layer_norm2",
    up=f"{_LAYER}.mlp.fc1",
    down=f"{_LAYER}.mlp.fc2",
    norm="vision_tower.post_layernorm",
    pooled_norm="multi_modal_projector.mm_soft_emb_norm",
) | {"project.weight.T": "multi_modal_projector.mm_input_projection_weight"}

_LAYOUTS_3 = {"vision_tower.": "vision_tower.vision_model."}, {"": "model."}  # first as published


def eyes_gemma3(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    vision.expect("model_type", "siglip_vision_model")
    vision.expect("num_channels", 3)
    vision.ignore("vision_use_head", "attention_dropout")  # of a result that is not read
    count = hf.take("mm_tokens_per_image", 256)
    size = vision.take("image_size", 224)
    patch = vision.take("patch_size", 16)
    across = size // patch
    root = isqrt(count)
    if size % patch or root**2 != count or across % root:
        raise ConfigError(
            f"{hf.source}: mm_tokens_per_image={count} must be a square whose root divides the number of patches of a "
            f"side, image_size={size} / patch_size={patch}"
        )
    begin, end = _token(hf, "boi", 255999), _token(hf, "eoi", 256000)
    tokens = ImageTokens(
        _token(hf, "image", 262144),
        patch,
        across // root,
        placeholder=begin,
        around=(begin, end),
        newlines=2,
        fixed=size,
        whole=True,
    )
    encoder = _siglip(vision, patch, across, tokens.side, config.hidden_size)
    joint = tuple(range(config.num_layers))
    names = {"names": _NAMES_3, "layouts": _LAYOUTS_3}
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, joint=joint, **names))


def _siglip(hf: HFConfig, patch: int, across: int, side: int, out: int) -> EncoderConfig:
    """The encoder for pictures of `across` patches a side, with Gemma 3's projector to `out` channels."""
    hidden = hf.take("hidden_size", 768)
    heads = hf.take("num_attention_heads", 12)
    dim = head_dim_of(hf, hidden, heads, "num_attention_heads")
    norm = NormSpec(kind="layer", eps=hf.take("layer_norm_eps", 1e-6), bias=True)
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim, qkv_bias=True, out_bias=True),
        mlp=MLPSpec(
            size=hf.take("intermediate_size", 3072),
            activation=read_activation(hf, "gelu_pytorch_tanh"),
            gated=False,
            bias=True,
        ),
        norm=norm,
    )
    projector = (
        Normed(name="norm", norm=norm, size=hidden),
        Pooled(count=side**2),
        Normed(name="pooled_norm", norm=NormSpec(eps=norm.eps, offset=1.0), size=hidden),
        Projected(name="project", inputs=hidden, outputs=out, bias=False),
    )
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        patch_bias=True,
        layers=(layer,) * hf.take("num_hidden_layers", 12),
        table=across,
        side=side,
        projector=projector,
        out_size=out,
    )


def _token(hf: HFConfig, name: str, default: int) -> int:
    """A token's id, under the older or the newer name of the setting."""
    found: int = hf.take(f"{name}_token_index", None) or hf.take(f"{name}_token_id", default)
    return found
