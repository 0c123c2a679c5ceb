"""The image encoder of Pixtral (Agrawal et al. 2024, arXiv:2410.07073) and of Mistral Small 3.1 and later, which joins
squares of patches. Tokens of a picture's rows have a further token behind them."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import axial_theta, head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 10
TEXTS = {"row_end": "[IMG_BREAK]", "end": "[IMG_END]"}
_LAYER = "vision_tower.transformer.layers.{i}"
_NAMES = named(
    patch="vision_tower.patch_conv",
    before="vision_tower.ln_pre",
    attention_norm=f"{_LAYER}.attention_norm",
    q=f"{_LAYER}.attention.q_proj",
    k=f"{_LAYER}.attention.k_proj",
    v=f"{_LAYER}.attention.v_proj",
    o=f"{_LAYER}.attention.o_proj",
    mlp_norm=f"{_LAYER}.ffn_norm",
    gate=f"{_LAYER}.feed_forward.gate_proj",
    up=f"{_LAYER}.feed_forward.up_proj",
    down=f"{_LAYER}.feed_forward.down_proj",
    norm="multi_modal_projector.norm",
    merge="multi_modal_projector.patch_merger.merging_layer",
    fc1="multi_modal_projector.linear_1",
    fc2="multi_modal_projector.linear_2",
)


def eyes_mistral3(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    hf.expect("vision_feature_layer", -1)
    side = hf.take("spatial_merge_size", 2)
    bias = bool(hf.take("multimodal_projector_bias", False))
    activation = read_activation(hf, "gelu", "projector_hidden_act")
    encoder = _read(vision, side, config.hidden_size)
    hidden = encoder.hidden_size
    out = config.hidden_size
    projector = (
        Normed(name="norm", norm=NormSpec(eps=config.norm_eps), size=hidden),
        Joined(count=side**2),
        Projected(name="merge", inputs=hidden * side**2, outputs=hidden, bias=False, alternating=side**2),
        Projected(name="fc1", inputs=hidden, outputs=out, bias=bias, activation=activation),
        Projected(name="fc2", inputs=out, outputs=out, bias=bias),
    )
    token = hf.take("image_token_index", None) or hf.take("image_token_id", IMAGE_TOKEN)
    tokens = ImageTokens(token, encoder.patch_shape[-1], side, layout="rows", texts=TEXTS)
    seeing = VisionConfig(encoder=replace(encoder, projector=projector), tokens=tokens, names=_NAMES)
    return replace(config, vision=seeing)


def _read(hf: HFConfig, side: int, out_size: int) -> EncoderConfig:
    """The encoder without its projector."""
    hf.expect("model_type", "pixtral")
    hf.expect("num_channels", 3)
    hf.ignore("image_size", "vocab_size")  # pictures are as large as the processor's settings say
    hidden = hf.take("hidden_size", 1024)
    heads = hf.take("num_attention_heads", 16)
    dim = head_dim_of(hf, hidden, heads, "num_attention_heads")
    hf.expect("head_dim", dim)
    patch = hf.take("patch_size", 16)
    norm = NormSpec(eps=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim),
        mlp=MLPSpec(size=hf.take("intermediate_size", 4096), activation=read_activation(hf, "gelu")),
        norm=norm,
    )
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        layers=(layer,) * hf.take("num_hidden_layers", 24),
        rope_theta=axial_theta(hf) or float(hf.take("rope_theta", 10000.0)),
        columns_between=True,
        before=norm,
        side=side,
        projector=(),
        out_size=out_size,
    )
