"""The image encoder of Pixtral (Agrawal et al. 2024, arXiv:2410.07073), of Mistral Small 3.1 and later, and of
LightOnOCR, which join squares of patches. Of all but LightOnOCR, the tokens of a picture's rows have a further token
behind them."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.sources import Names
from jaxserve.models.spec import Activation, AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import axial_theta, head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, Step, VisionConfig
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
_LIGHTON_NAMES = {
    role: name.replace("vision_tower", "vision_encoder").replace("multi_modal_projector", "vision_projection")
    for role, name in _NAMES.items()
}


def eyes_llava(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """As `eyes_mistral3`, without squares: each patch is an embedding."""
    hf.values = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", **hf.values}
    hf.expect("vision_feature_layer", -1)
    hf.expect("vision_feature_select_strategy", "full")
    encoder = _read(vision, 1, config.hidden_size)
    bias = bool(hf.take("multimodal_projector_bias", True))
    projector = _products(encoder, bias, read_activation(hf, "gelu", "projector_hidden_act"))
    return _seeing(hf, config, replace(encoder, projector=projector), _NAMES, 32000)


def eyes_mistral3(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    hf.expect("vision_feature_layer", -1)
    encoder = _read(vision, hf.take("spatial_merge_size", 2), config.hidden_size)
    bias = bool(hf.take("multimodal_projector_bias", False))
    products = _products(encoder, bias, read_activation(hf, "gelu", "projector_hidden_act"))
    projector = (*_squares(encoder, config), *products)
    return _seeing(hf, config, replace(encoder, projector=projector), _NAMES, IMAGE_TOKEN)


def eyes_lighton(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """As `eyes_mistral3`, with nothing behind the tokens of a row."""
    encoder = _read(vision, hf.take("spatial_merge_size", 2), config.hidden_size)
    projector = (*_squares(encoder, config), *_products(encoder, False, "gelu"))
    return _seeing(hf, config, replace(encoder, projector=projector), _LIGHTON_NAMES, 151655, in_rows=False)


def _squares(encoder: EncoderConfig, config: ModelConfig) -> tuple[Step, ...]:
    """The steps of a projector that make one row of a square of patches."""
    hidden = encoder.hidden_size
    wide = hidden * encoder.joined
    return (
        Normed(name="norm", norm=NormSpec(eps=config.norm_eps), size=hidden),
        Joined(count=encoder.joined),
        Projected(name="merge", inputs=wide, outputs=hidden, bias=False, alternating=encoder.joined),
    )


def _products(encoder: EncoderConfig, bias: bool, activation: Activation) -> tuple[Step, ...]:
    """The steps of a projector from rows to embeddings."""
    hidden, out = encoder.hidden_size, encoder.out_size
    return (
        Projected(name="fc1", inputs=hidden, outputs=out, bias=bias, activation=activation),
        Projected(name="fc2", inputs=out, outputs=out, bias=bias),
    )


def _seeing(
    hf: HFConfig, config: ModelConfig, encoder: EncoderConfig, names: Names, token: int, *, in_rows: bool = True
) -> ModelConfig:
    """The language model with this encoder. `token` stands for pictures where the config does not say. in_rows: there
    are further tokens behind those of rows."""
    token = hf.take("image_token_index", None) or hf.take("image_token_id", token)
    layout, texts = ("rows", TEXTS) if in_rows else ("plain", {})
    tokens = ImageTokens(token, encoder.patch_shape[-1], encoder.side, layout=layout, texts=texts)
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=names))


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
