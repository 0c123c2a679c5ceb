"""The image encoder that llama.cpp keeps in a file of its own, beside the GGUF file of the language model.

Its architecture is "clip", and `clip.projector_type` tells whose encoder it is. Its settings are read as those of a
config.json, and its tensors get Hugging Face's names, so that the families of `jaxserve.models` read both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.gguf_blocks import FLOATS
from jaxserve.checkpoints.gguf import HEADER_ONLY, GGUFFile, StoredTensor, encoders_beside, known_gguf, read_gguf
from jaxserve.checkpoints.gguf_keys import Keys, shortest
from jaxserve.checkpoints.gguf_settings import Config
from jaxserve.checkpoints.gguf_tensor import ComputedTensor, GGUFTensor
from jaxserve.checkpoints.mistral_native import pixtral_processor

log = logging.getLogger(__name__)

CLIP = "clip"
# Settings that say what others, or the tensors' shapes, say as well, or that llama.cpp alone needs. The epsilon is that
# of the language model in most files, where transformers has a constant.
_HARMLESS = (
    "has_vision_encoder", "has_llava_projector", "projector_type", "vision.projector_type", "vision.projection_dim",
    "vision.feed_forward_length", "vision.attention.layer_norm_epsilon", "vision.image_size", "use_gelu", "use_silu",
    "vision.image_mean", "vision.image_std", "vision.image_min_pixels", "vision.image_max_pixels",
)  # fmt: skip
_UNREAD = ("v.token_embd.img_break",)  # a row of the embeddings
_NAME = re.compile(r"([\w.]+?)\.(weight|bias)(?:\.(\d+))?")
_INDEX = re.compile(r"\.(\d+)\.")


class Eyes(NamedTuple):
    """whole: settings of the model that sees, beside those of its text. text: settings to be added to these. tensors:
    the encoder's, by Hugging Face's names."""

    whole: Config
    text: Config
    tensors: dict[str, GGUFTensor]


@dataclass(frozen=True)
class Projector:
    """What a `clip.projector_type` is.

    Attributes:
      wholes: architecture of the language model in config.json -> that of the model that sees, and its text's
        model_type.
      token: text of the token in whose place features stand.
      read: the settings of the whole, with the encoder's under vision_config.
      processor: the settings of the image processor, with the keys of a preprocessor_config.json.
      names: a module's name in the file -> Hugging Face's; "{i}" is the layer. Modules with the same name there follow
        each other in one tensor.
      paired: rows of queries and keys are stored in pairs (see GGUFTensor).
    """

    wholes: Mapping[str, tuple[str, str]]
    token: str
    read: Callable[[Keys], Config]
    processor: Callable[[Keys], Config]
    names: Mapping[str, str]
    paired: bool = False


def find_mmproj(path: Path) -> GGUFFile | None:
    """The header of the file with the image encoder of the model in the GGUF file `path`: one in its folder whose name
    has "mmproj" in it, and whose features are as wide as the model's embeddings; the largest, if there are several.
    None: there is none, or the model's file is a bundle's. Raises CheckpointError for damaged files."""
    given = known_gguf(path).metadata
    if HEADER_ONLY in given:
        return None
    width = given.get(f"{given.get('general.architecture')}.embedding_length")
    found = [read_gguf(one) for one in encoders_beside(path)]
    widths = [one.metadata.get(f"{CLIP}.vision.projection_dim") for one in found]
    fitting = [one for one, own in zip(found, widths, strict=True) if type(own) is type(width) is int and own == width]
    if found and not fitting:
        names = ", ".join(one.path.name for one in found)
        log.info("pictures are not read: no encoder in %s is as wide as the embeddings of %s, %s", names, path, width)
    return max(fitting, key=lambda one: sum(tensor.nbytes for tensor in one.tensors.values()), default=None)


def read_mmproj(model: GGUFFile, config: Config, ignored: Collection[str]) -> Eyes | None:
    """The eyes of a model whose text has these settings; None: there is no file with them, or it is not understood,
    which the log tells. Raises CheckpointError for damaged files."""
    file = find_mmproj(model.path)
    if file is None:
        return None
    try:
        keys, row = _opened(file, ignored)
        (text,) = config["architectures"]
        if text not in row.wholes:
            raise keys.refuse(f"its encoder is for {', '.join(row.wholes)}, not for {text}")
        vision = row.read(keys)
        row.processor(Keys(file, (CLIP,), ignored))
        tensors = _tensors(file, row, vision["vision_config"])
        for harmless in _HARMLESS:
            keys.left.pop(harmless, None)
        keys.finish()
    except CheckpointError as error:
        log.warning("pictures are not read: %s", error)
        return None
    name, kind = row.wholes[text]
    whole: Config = {"architectures": [name], **vision}
    if row.token in (texts := model.metadata.get("tokenizer.ggml.tokens") or ()):
        whole["image_token_id"] = texts.index(row.token)
    of_text: Config = {"model_type": kind, "sliding_window": config.get("sliding_window")}
    sections = model.metadata.get(f"{config['model_type']}.rope.dimension_sections")
    if isinstance(sections, np.ndarray):
        rope = config.get("rope_scaling") or {"rope_type": "default"}
        of_text["rope_scaling"] = rope | {"mrope_section": sections[:3].tolist()}
    return Eyes(whole, of_text, tensors)


def image_settings(path: Path) -> Config | None:
    """What the file beside a GGUF file says of the processing of pictures, with the keys of a preprocessor_config.json;
    None: there is no such file. Raises CheckpointError."""
    file = find_mmproj(path)
    if file is None:
        return None
    keys, row = _opened(file, ())
    return row.processor(keys)


def _opened(file: GGUFFile, ignored: Collection[str]) -> tuple[Keys, Projector]:
    keys = Keys(file, (CLIP,), ignored)
    kind = keys.left.get("vision.projector_type", keys.left.get("projector_type"))
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise keys.refuse(f"clip.projector_type={kind!r:.80} is not supported (only {', '.join(PROJECTORS)})")
    return keys, PROJECTORS[kind]


def _tensors(file: GGUFFile, row: Projector, vision: Config) -> dict[str, GGUFTensor]:
    parts: dict[str, list[GGUFTensor]] = {}
    order = list(row.names)
    tensors = [(*_module(stored), stored) for stored in file.tensors.values()]
    known = [(order.index(module), name, stored) for module, name, stored in tensors if module in row.names]
    if unknown := sorted(stored.name for module, _, stored in tensors if module not in (*row.names, *_UNREAD)):
        raise CheckpointError(f"{file.path}: tensor {unknown[0]!r} is of a kind that is not supported")
    taps = vision.get("deepstack_visual_indexes", [])
    for place, (index, kind), stored in sorted(known):
        module = order[place]
        if module.startswith("v.deepstack."):
            if index not in taps:
                raise CheckpointError(f"{file.path}: tensor {stored.name!r} is of a layer that is not read")
            index = taps.index(index)
        name = f"{row.names[module].format(i=index)}.{kind}"
        pairs = 0
        if row.paired and module in ("v.blk.{i}.attn_q", "v.blk.{i}.attn_k"):
            pairs = vision["hidden_size"] // vision["num_attention_heads"]
            if not pairs or pairs % 2 or stored.shape[0] % pairs:
                raise CheckpointError(f"{file.path}: tensor {stored.name!r} has no whole heads of an even size {pairs}")
        dtype = FLOATS.get(stored.type.name, np.dtype(np.float32))
        tensor = GGUFTensor(name, stored.path, dtype, stored.shape, stored.start, stored.type, pairs)
        parts.setdefault(name, []).append(tensor)
    return {name: _one(name, some) for name, some in parts.items()}


def _module(stored: StoredTensor) -> tuple[str, tuple[int, str]]:
    """The name of a tensor's module, with "{i}" for the layer; the layer, or 0, and "weight" or "bias"."""
    parsed = _NAME.fullmatch(stored.name)
    name, kind = (stored.name, "weight") if parsed is None else (parsed[1], parsed[2])
    layer = _INDEX.search(name)
    return _INDEX.sub(".{i}.", name, count=1), (int(layer[1]) if layer else 0, kind)


def _one(name: str, parts: list[GGUFTensor]) -> GGUFTensor:
    """A tensor of parts. Encoders compute in floats, so that quantized ones are decoded."""
    first = parts[0]
    if len(parts) == 1 and first.type.name in FLOATS:
        return first
    frames = len(parts) > 1 and len(first.shape) == 4
    if any(part.shape[0 if frames else 1 :] != first.shape[0 if frames else 1 :] for part in parts):
        raise CheckpointError(f"{first.path}: the parts of {name} differ in their shapes")
    if frames:
        shape = (*first.shape[:2], len(parts), *first.shape[2:])
        return ComputedTensor.of(name, shape, tuple(parts), _side_by_side)
    rows = sum(part.shape[0] for part in parts)
    return ComputedTensor.of(name, (rows, *first.shape[1:]), tuple(parts), _one_after_another)


def _side_by_side(*frames: np.ndarray) -> np.ndarray:
    return np.stack(frames, axis=2)


def _one_after_another(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate(rows)


def _shape(keys: Keys, tensor: str) -> tuple[int, ...]:
    stored = keys.file.tensors.get(tensor)
    if stored is None or len(stored.shape) < 2:
        raise keys.refuse(f"there is no matrix {tensor}")
    return stored.shape


def _colours(keys: Keys) -> Config:
    """Mean and deviation of each colour."""
    found = {f"image_{name}": keys.left.get(f"vision.image_{name}") for name in ("mean", "std")}
    for name, value in found.items():
        if not isinstance(value, np.ndarray) or value.shape != (3,) or value.dtype.kind != "f":
            raise keys.refuse(f"clip.vision.{name}={value!r:.80} must be three numbers")
    return {name: [shortest(x) for x in value] for name, value in found.items()}  # type: ignore[union-attr]


def _activation(keys: Keys, usual: str, gelu: str = "gelu") -> str:
    named = {"use_silu": "silu", "use_gelu": gelu}
    return next((name for key, name in named.items() if keys.left.get(key) is True), usual)


# Qwen and GLM


def _qwen(keys: Keys, usual: str, gelu: str = "gelu") -> Config:
    """What all these encoders have."""
    return {
        "depth": keys.size("vision.block_count"),
        "hidden_size": keys.size("vision.embedding_length"),
        "num_heads": keys.size("vision.attention.head_count"),
        "patch_size": keys.size("vision.patch_size"),
        "spatial_merge_size": keys.size("vision.spatial_merge_size", 2),
        "out_hidden_size": keys.size("vision.projection_dim"),
        "intermediate_size": _shape(keys, "v.blk.0.ffn_up.weight")[0],
        "hidden_act": _activation(keys, usual, gelu),
    }


def _qwen2(keys: Keys) -> Config:
    given = _qwen(keys, "quick_gelu")
    hidden = given["embed_dim"] = given.pop("hidden_size")
    given |= {"hidden_size": given.pop("out_hidden_size"), "mlp_ratio": given.pop("intermediate_size") / hidden}
    return {"vision_config": given}


def _qwen2_5(keys: Keys) -> Config:
    given = _qwen(keys, "silu")
    every = keys.count("vision.n_wa_pattern")
    given["fullatt_block_indexes"] = [i for i in range(given["depth"]) if not every or (i + 1) % every == 0]
    given["window_size"] = keys.size("vision.window_size", 112)
    return {"vision_config": given}


def _qwen3(keys: Keys) -> Config:
    given = _qwen(keys, "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    given["num_position_embeddings"] = _shape(keys, "v.position_embd.weight")[0]
    taps = keys.left.pop("vision.is_deepstack_layers", np.zeros(0))
    if not isinstance(taps, np.ndarray):
        raise keys.refuse(f"clip.vision.is_deepstack_layers={taps!r:.80} must be a list")
    given["deepstack_visual_indexes"] = np.flatnonzero(taps).tolist()
    return {"vision_config": given}


def _glm4v(keys: Keys) -> Config:
    given = _qwen(keys, "silu")
    given["attention_bias"] = keys.has("v.blk.0.attn_qkv.bias")
    given["intermediate_size"] = _shape(keys, "mm.up.weight")[0]  # that of layers is the width of features
    given["rms_norm_eps"] = keys.real("vision.attention.layer_norm_epsilon", 1e-5)
    side = isqrt(_shape(keys, "v.position_embd.weight")[0])
    return {"vision_config": given | {"image_size": side * given["patch_size"]}}


def _of_qwen(least: int, most: int, kind: str = "Qwen2VLImageProcessor") -> Callable[[Keys], Config]:
    """Settings of a processor. `least` and `most`: pixels, as the model's own settings say."""

    def processor(keys: Keys) -> Config:
        return {
            "image_processor_type": kind,
            "patch_size": keys.size("vision.patch_size"),
            "merge_size": keys.size("vision.spatial_merge_size", 2),
            "temporal_patch_size": 2,
            "size": {
                "shortest_edge": keys.size("vision.image_min_pixels", least),
                "longest_edge": keys.size("vision.image_max_pixels", most),
            },
            "resample": 3,  # bicubic
            **_colours(keys),
        }

    return processor


_QWEN_LAYER = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.blk.{i}.ln1": "visual.blocks.{i}.norm1",
    "v.blk.{i}.ln2": "visual.blocks.{i}.norm2",
    **{f"v.blk.{{i}}.attn_{role}": "visual.blocks.{i}.attn.qkv" for role in ("q", "k", "v", "qkv")},
    "v.blk.{i}.attn_out": "visual.blocks.{i}.attn.proj",
}
_QWEN_MERGER = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}

# Pixtral


def _pixtral(keys: Keys) -> Config:
    """Mistral 3 where squares of patches are joined, else Pixtral as LLaVA."""
    hidden = keys.size("vision.embedding_length")
    whole: Config = {
        "multimodal_projector_bias": keys.has("mm.1.bias"),
        "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": hidden,
            "intermediate_size": _shape(keys, "v.blk.0.ffn_up.weight")[0],
            "num_hidden_layers": keys.size("vision.block_count"),
            "num_attention_heads": keys.size("vision.attention.head_count"),
            "patch_size": keys.size("vision.patch_size"),
            "rope_theta": keys.real("rope.freq_base", 10000.0),
            "hidden_act": _activation(keys, "silu"),
        },
    }
    if not keys.has("mm.patch_merger.weight"):
        keys.expect("vision.spatial_merge_size", 1)
        return whole | {
            "architectures": ["LlavaForConditionalGeneration"], "vision_feature_select_strategy": "full",
        }  # fmt: skip
    joined = isqrt(_shape(keys, "mm.patch_merger.weight")[1] // hidden)
    keys.expect("vision.spatial_merge_size", joined)
    return whole | {"spatial_merge_size": joined}


def _of_pixtral(keys: Keys) -> Config:
    patch, edge = (keys.size(f"vision.{name}_size") for name in ("patch", "image"))
    return pixtral_processor(patch, edge) | _colours(keys)


def _pixtral_names(encoder: str, projector: str) -> dict[str, str]:
    layer = f"{encoder}.transformer.layers.{{i}}"
    return {
        "v.patch_embd": f"{encoder}.patch_conv",
        "v.pre_ln": f"{encoder}.ln_pre",
        "v.blk.{i}.ln1": f"{layer}.attention_norm",
        "v.blk.{i}.ln2": f"{layer}.ffn_norm",
        **{f"v.blk.{{i}}.attn_{role}": f"{layer}.attention.{role}_proj" for role in "qkv"},
        "v.blk.{i}.attn_out": f"{layer}.attention.o_proj",
        **{f"v.blk.{{i}}.ffn_{role}": f"{layer}.feed_forward.{role}_proj" for role in ("gate", "up", "down")},
        "mm.input_norm": f"{projector}.norm",
        "mm.patch_merger": f"{projector}.patch_merger.merging_layer",
        "mm.1": f"{projector}.linear_1",
        "mm.2": f"{projector}.linear_2",
    }


MISTRAL3 = "Mistral3ForConditionalGeneration"
PROJECTORS: dict[str, Projector] = {
    "glm4v": Projector(
        {
            "Glm4ForCausalLM": ("Glm4vForConditionalGeneration", "glm4v_text"),
            "Glm4MoeForCausalLM": ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text"),
        },
        "<|image|>",
        _glm4v,
        _of_qwen(112**2, 9633792, "Glm4vImageProcessor"),
        {
            **_QWEN_LAYER,
            "v.norm_embd": "visual.post_conv_layernorm",
            "v.position_embd": "visual.embeddings.position_embedding",
            **{f"v.blk.{{i}}.ffn_{role}": f"visual.blocks.{{i}}.mlp.{role}_proj" for role in ("gate", "up", "down")},
            "v.post_ln": "visual.post_layernorm",
            "mm.patch_merger": "visual.downsample",
            "mm.model.fc": "visual.merger.proj",
            "mm.post_norm": "visual.merger.post_projection_norm",
            **{f"mm.{role}": f"visual.merger.{role}_proj" for role in ("gate", "up", "down")},
        },
    ),
    "lightonocr": Projector(
        {"Qwen3ForCausalLM": ("LightOnOcrForConditionalGeneration", "qwen3")},
        "<|image_pad|>",
        _pixtral,
        _of_pixtral,
        _pixtral_names("vision_encoder", "vision_projection"),
        paired=True,
    ),
    "pixtral": Projector(
        {
            "LlamaForCausalLM": (MISTRAL3, "mistral"),
            "MistralForCausalLM": (MISTRAL3, "mistral"),
            "Ministral3ForCausalLM": (MISTRAL3, "ministral3"),
            "Mistral4ForCausalLM": (MISTRAL3, "mistral4"),
        },
        "[IMG]",
        _pixtral,
        _of_pixtral,
        _pixtral_names("vision_tower", "multi_modal_projector"),
        paired=True,
    ),
    "qwen2vl_merger": Projector(
        {"Qwen2ForCausalLM": ("Qwen2VLForConditionalGeneration", "qwen2_vl_text")},
        "<|image_pad|>",
        _qwen2,
        _of_qwen(56**2, 16384 * 28**2),
        {
            **_QWEN_LAYER,
            **_QWEN_MERGER,
            "v.blk.{i}.ffn_up": "visual.blocks.{i}.mlp.fc1",
            "v.blk.{i}.ffn_down": "visual.blocks.{i}.mlp.fc2",
        },
    ),
    "qwen2.5vl_merger": Projector(
        {"Qwen2ForCausalLM": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text")},
        "<|image_pad|>",
        _qwen2_5,
        _of_qwen(56**2, 16384 * 28**2),
        {
            **_QWEN_LAYER,
            **_QWEN_MERGER,
            **{f"v.blk.{{i}}.ffn_{role}": f"visual.blocks.{{i}}.mlp.{role}_proj" for role in ("gate", "up", "down")},
        },
    ),
    "qwen3vl_merger": Projector(
        {
            "Qwen3ForCausalLM": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
            "Qwen3MoeForCausalLM": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
            "Qwen3_5ForCausalLM": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
            "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
        },
        "<|image_pad|>",
        _qwen3,
        _of_qwen(64 * 32**2, 16384 * 32**2),
        {
            **_QWEN_LAYER,
            "v.position_embd": "visual.pos_embed",
            "v.blk.{i}.ffn_up": "visual.blocks.{i}.mlp.linear_fc1",
            "v.blk.{i}.ffn_down": "visual.blocks.{i}.mlp.linear_fc2",
            "v.post_ln": "visual.merger.norm",
            "mm.0": "visual.merger.linear_fc1",
            "mm.2": "visual.merger.linear_fc2",
            "v.deepstack.{i}.norm": "visual.deepstack_merger_list.{i}.norm",
            "v.deepstack.{i}.fc1": "visual.deepstack_merger_list.{i}.linear_fc1",
            "v.deepstack.{i}.fc2": "visual.deepstack_merger_list.{i}.linear_fc2",
        },
    ),
}
