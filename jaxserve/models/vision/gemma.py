"""The image encoders of Gemma 3 (SigLIP, Zhai et al. 2023, arXiv:2303.15343) and Gemma 4, and what follows them. Tokens
of a picture see each other in both directions."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.sources import Names
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, QKNormSpec
from jaxserve.models.vision.clipped import BOUNDS
from jaxserve.models.vision.settings import axial_theta
from jaxserve.models.vision.siglip import read_siglip, siglip_names
from jaxserve.models.vision.spec import EncoderConfig, Normed, Pooled, Projected, VisionConfig
from jaxserve.types import ImageTokens

_NAMES_3 = (
    siglip_names("vision_tower.")
    | named(pooled_norm="multi_modal_projector.mm_soft_emb_norm")
    | {"project.weight.T": "multi_modal_projector.mm_input_projection_weight"}
)
_LAYER_4 = "vision_tower.encoder.layers.{i}"
_PRODUCTS_4 = {
    **{role: f"{_LAYER_4}.self_attn.{role}_proj" for role in "qkvo"},
    **{role: f"{_LAYER_4}.mlp.{role}_proj" for role in ("gate", "up", "down")},
}
_NAMES_4 = (
    named(
        patch="vision_tower.patch_embedder.input_proj",
        attention_norm=f"{_LAYER_4}.input_layernorm",
        q_norm=f"{_LAYER_4}.self_attn.q_norm",
        k_norm=f"{_LAYER_4}.self_attn.k_norm",
        attention_out_norm=f"{_LAYER_4}.post_attention_layernorm",
        mlp_norm=f"{_LAYER_4}.pre_feedforward_layernorm",
        mlp_out_norm=f"{_LAYER_4}.post_feedforward_layernorm",
        project="embed_vision.embedding_projection",
        **{role: f"{name}.linear" for role, name in _PRODUCTS_4.items()},
    )
    | {f"{role}.{bound}": f"{name}.{bound}" for role, name in _PRODUCTS_4.items() for bound in BOUNDS}
    | {
        "table.weight": "vision_tower.patch_embedder.position_embedding_table",
        "standard_bias": "vision_tower.std_bias",
        "standard_scale": "vision_tower.std_scale",
    }
)

_NAMES_UNIFIED = named(
    patch_norm="vision_embedder.patch_ln1",
    patch="vision_embedder.patch_dense",
    before="vision_embedder.patch_ln2",
    norm="vision_embedder.pos_norm",
    project="embed_vision.embedding_projection",
) | {"table.weight": "vision_embedder.pos_embedding"}


def eyes_gemma3(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    vision.expect("model_type", "siglip_vision_model")
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
    encoder = _siglip(vision, across, tokens.side, config.hidden_size)
    joint = tuple(range(config.num_layers))
    vision_config = VisionConfig(encoder=encoder, tokens=tokens, names=_NAMES_3, joint=joint)
    return replace(config, vision=vision_config)


def _siglip(hf: HFConfig, across: int, side: int, out: int) -> EncoderConfig:
    """The encoder for pictures of `across` patches a side, with Gemma 3's projector to `out` channels."""
    fields = read_siglip(hf)
    hidden = fields["hidden_size"]
    norm = fields["layers"][0].norm
    projector = (
        Normed(name="norm", norm=norm, size=hidden),
        Pooled(count=side**2),
        Normed(name="pooled_norm", norm=NormSpec(eps=norm.eps, offset=1.0), size=hidden),
        Projected(name="project", inputs=hidden, outputs=out, bias=False),
    )
    return EncoderConfig(
        **fields,
        table=across,
        side=side,
        projector=projector,
        out_size=out,
    )


# What transformers assumes for keys that a vision_config does not have.
_DEFAULTS_4: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "rms_norm_eps": 1e-6, "pooling_kernel_size": 3, "patch_size": 16,
    "position_embedding_size": 10240, "use_clipped_linears": False, "standardize": False,
}  # fmt: skip


def eyes_gemma4(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`. In larger models the tokens of a picture see each other
    in layers with windows."""
    return _seeing(hf, config, _gemma4(vision, config.hidden_size), _NAMES_4, None)


def eyes_unified(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The same without an encoder: features are projections of large patches."""
    return _seeing(hf, config, _unified(vision, config.hidden_size), _NAMES_UNIFIED, "vision")


def _seeing(hf: HFConfig, config: ModelConfig, encoder: EncoderConfig, names: Names, usual: str | None) -> ModelConfig:
    """usual: where the config does not say, which tokens see each other."""
    text = hf.values.get("text_config") or {}
    joint: tuple[int, ...] = ()
    if text.get("use_bidirectional_attention", usual) == "vision":
        joint = tuple(i for i, layer in enumerate(config.layers) if getattr(layer.attention, "window", None))
    tokens = ImageTokens(
        _token(hf, "image", 258880),
        encoder.patch_shape[-1],
        encoder.side,
        around=(_token(hf, "boi", 255999), _token(hf, "eoi", 258882)),
        whole=bool(joint),
    )
    padding = text.get("pad_token_id") or 0
    return replace(
        config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=names, joint=joint, padding=padding)
    )


def _gemma4(hf: HFConfig, out: int) -> EncoderConfig:
    """The encoder, with its projector to `out` channels."""
    given = {key: hf.take(key, default) for key, default in _DEFAULTS_4.items()}
    hf.expect("attention_bias", False)
    hf.ignore("max_position_embeddings")
    hidden, heads, kv_heads, dim = (
        given[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if dim % 4 or heads % kv_heads:
        raise ConfigError(
            f"{hf.source}: head_dim={dim} must be a multiple of 4, and num_attention_heads={heads} of "
            f"num_key_value_heads={kv_heads}"
        )
    norm = NormSpec(eps=given["rms_norm_eps"])
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=1.0,
            qk_norm=QKNormSpec(norm=norm),
            v_norm=norm,
        ),
        mlp=MLPSpec(
            size=given["intermediate_size"], activation=read_activation(hf, "gelu_pytorch_tanh", "hidden_activation")
        ),
        norm=norm,
        residual="sandwich",
    )
    side = given["pooling_kernel_size"]
    standard = "standard" if given["standardize"] else ""
    projector = (
        Pooled(count=side**2, factor=hidden**0.5, standard=standard, size=hidden),
        Normed(name="pooled_norm", norm=replace(norm, scale=False), size=hidden),
        Projected(name="project", inputs=hidden, outputs=out, bias=False),
    )
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, given["patch_size"], given["patch_size"]),
        centred=True,
        colours_last=True,
        layers=(layer,) * given["num_hidden_layers"],
        clipped=given["use_clipped_linears"],
        rope_theta=axial_theta(hf, ("axial",)) or 100.0,
        rope_halves=True,
        table=given["position_embedding_size"],
        interpolation="sum",
        side=side,
        projector=projector,
        out_size=out,
    )


def _unified(hf: HFConfig, out: int) -> EncoderConfig:
    patch = hf.take("patch_size", 16) * hf.take("pooling_kernel_size", 3)
    hf.expect("model_patch_size", patch)
    hidden = hf.take("mm_embed_dim", 3840)
    hf.expect("output_proj_dims", hidden)
    norm = NormSpec(kind="layer", eps=1e-5, bias=True)
    pooled = NormSpec(eps=hf.take("rms_norm_eps", 1e-6), scale=False)
    projector = (
        Normed(name="norm", norm=norm, size=hidden),
        Normed(name="pooled_norm", norm=pooled, size=hidden),
        Projected(name="project", inputs=hidden, outputs=out, bias=False),
    )
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        colours_last=True,
        patch_norm=norm,
        patch_bias=True,
        layers=(),
        table=hf.take("mm_posemb_size", 1120),
        interpolation="sum",
        in_pairs=True,
        before=norm,
        table_last=True,
        side=1,
        projector=projector,
        out_size=out,
    )


def _token(hf: HFConfig, name: str, default: int) -> int:
    """A token's id, under the older or the newer name of the setting."""
    found: int = hf.take(f"{name}_token_index", None) or hf.take(f"{name}_token_id", default)
    return found
