"""SigLIP (Zhai et al. 2023, arXiv:2303.15343), the image encoder of several families."""

from __future__ import annotations

from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from jaxserve.models.vision.settings import head_dim_of


def siglip_names(start: str) -> dict[str, str]:
    """Role -> name of the encoder's tensors, all of which begin with `start`."""
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


def read_siglip(
    hf: HFConfig, *, hidden: int = 768, heads: int = 12, patch: int = 16, intermediate: int = 3072, layers: int = 12
) -> dict[str, Any]:
    """The fields of EncoderConfig that follow from a `vision_config`. The numbers stand for settings that are not
    there."""
    hf.expect("num_channels", 3)
    hidden = hf.take("hidden_size", hidden)
    heads = hf.take("num_attention_heads", heads)
    dim = head_dim_of(hf, hidden, heads, "num_attention_heads")
    patch = hf.take("patch_size", patch)
    activation = read_activation(hf, "gelu_pytorch_tanh")
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim, qkv_bias=True, out_bias=True),
        mlp=MLPSpec(size=hf.take("intermediate_size", intermediate), activation=activation, gated=False, bias=True),
        norm=NormSpec(kind="layer", eps=float(hf.take("layer_norm_eps", 1e-6)), bias=True),
    )
    count = hf.take("num_hidden_layers", layers)
    return {"hidden_size": hidden, "patch_shape": (3, patch, patch), "patch_bias": True, "layers": (layer,) * count}
