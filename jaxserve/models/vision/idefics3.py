"""The image encoder of Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) and SmolVLM (Marafioti et al. 2025,
arXiv:2504.05299): SigLIP (Zhai et al. 2023, arXiv:2303.15343), and a product over squares of its patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 128257
# Of the processing of pictures, whose own settings count, and of older code.
_UNUSED = ("max_image_size", "size", "use_base_siglip", "tie_word_embeddings", "model_type")


def siglip_names(start: str) -> dict[str, str]:
    """Role -> name of the tensors of a SigLIP encoder, all of which begin with `start`."""
    layer = f"{start}encoder.layers.{{i}}"
    return named(
        patch=f"{start}embeddings.patch_embedding",
        table=f"{start}embeddings.position_embedding",
        attention_norm=f"{layer}.layer_norm1",
        q=f"{layer}.self_attn.q_proj",
        k=f"{layer}.self_attn.k_proj",
        v=f"{layer}.self_attn.v_proj",
        o=f"{layer}.self_attn.out_proj",
        mlp_norm=f"{layer}.layer_norm2",
        up=f"{layer}.mlp.fc1",
        down=f"{layer}.mlp.fc2",
        norm=f"{start}post_layernorm",
    )


def read_siglip(hf: HFConfig, *, heads: int, patch: int, intermediate: int) -> dict[str, Any]:
    """The fields of EncoderConfig that follow from the settings of a SigLIP encoder. The arguments are the values for
    settings that are not there."""
    hf.expect("num_channels", 3)
    hidden = hf.take("hidden_size")
    heads = hf.take("num_attention_heads", heads)
    dim = head_dim_of(hf, hidden, heads, "num_attention_heads")
    patch = hf.take("patch_size", patch)
    activation = read_activation(hf, "gelu_pytorch_tanh")
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim, qkv_bias=True, out_bias=True),
        mlp=MLPSpec(size=hf.take("intermediate_size", intermediate), activation=activation, gated=False, bias=True),
        norm=NormSpec(kind="layer", eps=float(hf.take("layer_norm_eps", 1e-6)), bias=True),
    )
    layers = (layer,) * hf.take("num_hidden_layers", 12)
    return {"hidden_size": hidden, "patch_shape": (3, patch, patch), "patch_bias": True, "layers": layers}


def eyes(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    side = hf.take("scale_factor", 2)
    vision.ignore(*_UNUSED)
    vision.values.setdefault("hidden_size", 1152)
    fields = read_siglip(vision, heads=16, patch=32, intermediate=3072)
    hidden = fields["hidden_size"]
    patch = fields["patch_shape"][-1]
    encoder = EncoderConfig(
        **fields,
        table=vision.take("image_size", 224) // patch,
        interpolation="nearest",
        side=side,
        projector=(
            Normed(name="norm", norm=fields["layers"][0].norm, size=hidden),
            Joined(count=side**2),
            Projected(name="fc", inputs=hidden * side**2, outputs=config.hidden_size, bias=False),
        ),
        out_size=config.hidden_size,
    )
    tokens = ImageTokens(hf.take("image_token_id", IMAGE_TOKEN), patch, side, layout="numbered_tiles")
    names = siglip_names("vision_model.") | {"fc.weight": "connector.modality_projection.proj.weight"}
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=names))
