"""The image encoders of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191), Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923)
and Qwen3-VL (arXiv:2511.21631)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.sources import Names
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import axial_theta, head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, Step, Tap, VisionConfig
from jaxserve.types import ImageTokens, VideoTokens

Sections = tuple[tuple[int, ...], bool]
IMAGE_TOKEN = 151655
_VIDEO_2, _VIDEO_3 = (f"Qwen{version}VLVideoProcessor" for version in "23")
# The values that transformers assumes for keys that a vision_config does not have.
_2: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "mlp_ratio": 4, "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14,
}  # fmt: skip
_2_5: dict[str, Any] = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
    "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31], "patch_size": 14,
}  # fmt: skip
_3: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 3584,
    "patch_size": 16, "num_position_embeddings": 2304,
}  # fmt: skip
_OF_ALL = named(
    attention_norm="visual.blocks.{i}.norm1",
    mlp_norm="visual.blocks.{i}.norm2",
    qkv="visual.blocks.{i}.attn.qkv",
    o="visual.blocks.{i}.attn.proj",
    patch="visual.patch_embed.proj",
)
_MERGER = named(norm="visual.merger.ln_q", fc1="visual.merger.mlp.0", fc2="visual.merger.mlp.2")
_NAMES_2 = _OF_ALL | _MERGER | named(up="visual.blocks.{i}.mlp.fc1", down="visual.blocks.{i}.mlp.fc2")
_NAMES_2_5 = (
    _OF_ALL
    | _MERGER
    | named(
        gate="visual.blocks.{i}.mlp.gate_proj",
        up="visual.blocks.{i}.mlp.up_proj",
        down="visual.blocks.{i}.mlp.down_proj",
    )
)
_NAMES_3 = _OF_ALL | named(
    up="visual.blocks.{i}.mlp.linear_fc1",
    down="visual.blocks.{i}.mlp.linear_fc2",
    table="visual.pos_embed",
    norm="visual.merger.norm",
    fc1="visual.merger.linear_fc1",
    fc2="visual.merger.linear_fc2",
    tap_norm="visual.deepstack_merger_list.{i}.norm",
    tap_fc1="visual.deepstack_merger_list.{i}.linear_fc1",
    tap_fc2="visual.deepstack_merger_list.{i}.linear_fc2",
)


def _taken(hf: HFConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings of an encoder's config, with transformers' defaults."""
    given = {key: hf.take(key, default) for key, default in defaults.items()}
    hf.expect("in_channels", 3)
    hf.expect("in_chans", 3)  # the name in the first files
    hf.expect("temporal_patch_size", 2)
    given["side"] = hf.take("spatial_merge_size", 2)
    given["theta"] = axial_theta(hf, ("axial",)) or 10000.0
    given["head_dim"] = head_dim_of(hf, given["hidden_size"], given["num_heads"])
    hf.ignore("tokens_per_second", "spatial_patch_size", "model_type")  # of videos; another name of patch_size
    return given


def _layer(given: dict[str, Any], norm: NormSpec, mlp: MLPSpec) -> LayerSpec:
    heads = given["num_heads"]
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=given["head_dim"], qkv_bias=True, out_bias=True
    )
    return LayerSpec(attention=attention, mlp=mlp, norm=norm)


def _projector(
    given: dict[str, Any], norm: NormSpec, name: str = "", *, joined_first: bool = False
) -> tuple[Step, ...]:
    """A norm, then two products, over squares of patches. `joined_first`: the norm is over a square, not a patch."""
    wide = given["hidden_size"] * given["side"] ** 2
    normed = Normed(name=f"{name}norm", norm=norm, size=wide if joined_first else given["hidden_size"])
    joined = Joined(count=given["side"] ** 2)
    first = Projected(name=f"{name}fc1", inputs=wide, outputs=wide, activation="gelu")
    last = Projected(name=f"{name}fc2", inputs=wide, outputs=given["out_hidden_size"])
    return (joined, normed, first, last) if joined_first else (normed, joined, first, last)


def _encoder(given: dict[str, Any], layer: LayerSpec, **more: Any) -> EncoderConfig:
    return EncoderConfig(
        hidden_size=given["hidden_size"],
        patch_shape=(3, 2, given["patch_size"], given["patch_size"]),
        layers=(layer,) * given["depth"],
        rope_theta=given["theta"],
        side=given["side"],
        out_size=given["out_hidden_size"],
        **more,
    )


def read_qwen2(hf: HFConfig) -> EncoderConfig:
    """The encoder of a `vision_config`, whose hidden_size is that of the language model."""
    hf.rename(hidden_size="out_hidden_size", embed_dim="hidden_size")
    given = _taken(hf, _2)
    norm = NormSpec(kind="layer", eps=1e-6, bias=True)
    size = int(given["hidden_size"] * given["mlp_ratio"])
    mlp = MLPSpec(size=size, activation=read_activation(hf, "quick_gelu"), gated=False, bias=True)
    return _encoder(given, _layer(given, norm, mlp), projector=_projector(given, norm))


def read_qwen2_5(hf: HFConfig) -> EncoderConfig:
    """The encoder of a `vision_config`."""
    given = _taken(hf, _2_5)
    norm = NormSpec(eps=1e-6)
    mlp = MLPSpec(size=given["intermediate_size"], activation=read_activation(hf, "silu"), bias=True)
    whole = given["fullatt_block_indexes"]
    return _encoder(
        given,
        _layer(given, norm, mlp),
        windowed=tuple(i for i in range(given["depth"]) if i not in whole),
        window=given["window_size"] // given["patch_size"] // given["side"] * given["side"],
        projector=_projector(given, norm),
    )


def read_qwen3(hf: HFConfig, taps: tuple[int, ...]) -> EncoderConfig:
    """The encoder of a `vision_config`. `taps`: the layers of further features, where it does not say."""
    given = _taken(hf, _3)
    norm = NormSpec(kind="layer", eps=1e-6, bias=True)
    mlp = MLPSpec(
        size=given["intermediate_size"], activation=read_activation(hf, "gelu_pytorch_tanh"), gated=False, bias=True
    )
    side = int(given["num_position_embeddings"] ** 0.5)
    if side**2 != given["num_position_embeddings"]:
        raise ConfigError(f"{hf.source}: num_position_embeddings={given['num_position_embeddings']} is no square")
    taps = hf.take("deepstack_visual_indexes", taps)
    return _encoder(
        given,
        _layer(given, norm, mlp),
        patch_bias=True,
        table=side,
        projector=_projector(given, norm),
        taps=tuple(Tap(layer=i, steps=_projector(given, norm, "tap_", joined_first=True)) for i in taps),
    )


def on_grid(
    hf: HFConfig,
    config: ModelConfig,
    encoder: EncoderConfig,
    names: Names,
    usual: Sections,
    video: str,
    *,
    token: int = IMAGE_TOKEN,
    per_second: float = 0.0,
) -> ModelConfig:
    """The language model with eyes, whose pictures lie on a grid of positions. `video` and `per_second` are fields of
    VideoTokens. Where the config does not say: `usual` are its sections of channels, and whether they alternate;
    `token` stands for pictures, and the next one for videos."""
    sections, alternate = usual
    text = hf.take("text_config", None) or hf.values
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section") or sections)
    name, own = next(iter(config.ropes.items()))
    pairs = config.rotated_dim(name) // 2 if own.rotary_dim is None else own.rotary_dim // 2
    if len(sections) != 3 or sum(sections) != pairs:
        raise ConfigError(f"{hf.source}: mrope_section={list(sections)} must be three numbers that add up to {pairs}")
    if encoder.out_size != config.hidden_size:
        raise ConfigError(
            f"{hf.source}: vision_config.out_hidden_size={encoder.out_size} is not the text's hidden_size, "
            f"{config.hidden_size}"
        )
    ropes = {name: replace(own, sections=sections, sections_alternate=alternate)}
    place = hf.values.get("video_token_id", token + 1)
    tokens = ImageTokens(
        hf.take("image_token_id", token),
        encoder.patch_shape[-1],
        encoder.side,
        has_three_positions=True,
        video=VideoTokens(place, video, per_second) if place in range(config.vocab_size) else None,
    )
    vision = VisionConfig(encoder=encoder, tokens=tokens, names=names)
    return replace(config, ropes=ropes, vision=vision)


def eyes_2(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    return on_grid(hf, config, read_qwen2(vision), _NAMES_2, ((16, 24, 24), False), _VIDEO_2)


def eyes_2_5(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    per_second = float(vision.values.get("tokens_per_second", 4))
    usual = (16, 24, 24), False
    return on_grid(hf, config, read_qwen2_5(vision), _NAMES_2_5, usual, _VIDEO_2, per_second=per_second)


def eyes_3(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    return on_grid(hf, config, read_qwen3(vision, (8, 16, 24)), _NAMES_3, ((24, 20, 20), True), _VIDEO_3)


def eyes_3_5(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    return on_grid(hf, config, read_qwen3(vision, ()), _NAMES_3, ((11, 11, 10), True), _VIDEO_3, token=248056)
