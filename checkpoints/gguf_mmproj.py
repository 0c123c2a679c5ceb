"""The image encoder that llama.cpp keeps in a file of its own, beside the GGUF file of the language model.

Its architecture is "clip", and `clip.projector_type` tells whose encoder it is. Its settings are read as those of a
config.json, and its tensors get Hugging Face's names, so that the families of `jaxserve.models` read both.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
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
    "has_vision_encoder", "has_audio_encoder", "has_llava_projector", "projector_type", "vision.projector_type",
    "vision.projection_dim", "vision.feed_forward_length", "vision.attention.layer_norm_epsilon", "vision.image_size",
    "use_gelu", "use_silu", "vision.image_mean", "vision.image_std", "vision.image_min_pixels",
    "vision.image_max_pixels", "vision.preproc_image_size", "vision.preproc_min_tiles", "vision.preproc_max_tiles",
)  # fmt: skip
_UNREAD = ("v.token_embd.img_break",)  # a row of the embeddings
_SOUND = re.compile(r"(mm\.)?a\.")  # tensors of an encoder of sound, which is not read
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
      others: keys of further tokens in config.json -> their texts.
      read: the settings of the whole, with the encoder's under vision_config.
      text: from the settings of the text and those of its file, further ones, which matter only with pictures.
      processor: the settings of the image processor, with the keys of a preprocessor_config.json.
      names: a module's name in the file -> Hugging Face's; "{i}" is the layer. Modules with the same name there follow
        each other in one tensor.
      paired: rows of queries and keys are stored in pairs (see GGUFTensor).
      bare: modules whose only tensor has their own name at Hugging Face, without ".weight".
      made: module -> what Hugging Face's tensor is, made of the file's.
    """

    wholes: Mapping[str, tuple[str, str]]
    token: str
    read: Callable[[Keys], Config]
    processor: Callable[[Keys], Config]
    names: Mapping[str, str]
    paired: bool = False
    others: Mapping[str, str] = field(default_factory=dict)
    text: Callable[[Config, Config], Config] = lambda config, metadata: {}
    bare: tuple[str, ...] = ()
    made: Mapping[str, Callable[[GGUFTensor], GGUFTensor]] = field(default_factory=dict)


def with_mmproj(path: Path, mmproj: Path) -> Path:
    """The model's GGUF file in a folder of links where `mmproj` is the only file with an image encoder beside it. The
    folder is in the user's cache folder, and the same at every start. Raises CheckpointError if it cannot be made."""
    stem = re.fullmatch(r"(.*-)00001(-of-\d+\.gguf)", path.name)
    parts = sorted(path.parent.glob(f"{glob.escape(stem[1])}*{stem[2]}")) if stem else [path]
    links = {part.name: part.resolve() for part in parts} | {"mmproj.gguf": mmproj.resolve()}
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "jaxserve" / "mmproj" / hashlib.sha256(repr(links).encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, target in links.items():
            with contextlib.suppress(FileExistsError):  # of an earlier start
                (folder / name).symlink_to(target)
    except OSError as error:
        raise CheckpointError(
            f"{folder}, where {mmproj} would be linked, cannot be written ({error.strerror}): put it beside {path}"
        ) from None
    return folder / path.name


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


def read_mmproj(model: GGUFFile, config: Config, ignored: Collection[str], *, must: bool = False) -> Eyes | None:
    """The eyes of a model whose text has these settings; None: there is no file with them, or it is not understood,
    which the log tells. Raises CheckpointError for damaged files; `must`: in the place of None."""
    file = find_mmproj(model.path)
    if file is None:
        if must:
            given = ", ".join(str(one.resolve()) for one in encoders_beside(model.path))
            raise CheckpointError(f"{given} is no encoder for {model.path.resolve()}: their embeddings differ in width")
        return None
    try:
        return _eyes(file, model, config, ignored)
    except CheckpointError as error:
        if must:
            raise
        log.warning("pictures are not read: %s", error)
        return None


def _eyes(file: GGUFFile, model: GGUFFile, config: Config, ignored: Collection[str]) -> Eyes:
    keys, row = _opened(file, ignored)
    (text,) = config["architectures"]
    if text not in row.wholes:
        raise keys.refuse(f"its encoder is for {', '.join(row.wholes)}, not for {text}")
    vision = row.read(keys)
    row.processor(Keys(file, (CLIP,), ignored))
    tensors = _tensors(file, row, vision["vision_config"])
    keys.left = {key: x for key, x in keys.left.items() if key not in _HARMLESS and not key.startswith("audio.")}
    keys.finish()
    name, kind = row.wholes[text]
    whole: Config = {"architectures": [name], **vision}
    texts = model.metadata.get("tokenizer.ggml.tokens") or ()
    marks = {"image_token_id": row.token, **row.others}
    whole |= {key: texts.index(text) for key, text in marks.items() if text in texts}
    of_text: Config = {"model_type": kind, "sliding_window": config.get("sliding_window")}
    of_text |= row.text(config, model.metadata)
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
    swapped = _swaps(file)
    read = [stored for stored in file.tensors.values() if not _SOUND.match(stored.name)]
    tensors = [(*_module(stored, swapped), stored) for stored in read]
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
        name = row.names[module].format(i=index)
        if module not in row.bare:
            name += f".{kind}"
        pairs = 0
        if row.paired and module in ("v.blk.{i}.attn_q", "v.blk.{i}.attn_k"):
            pairs = vision["hidden_size"] // vision["num_attention_heads"]
            if not pairs or pairs % 2 or stored.shape[0] % pairs:
                raise CheckpointError(f"{file.path}: tensor {stored.name!r} has no whole heads of an even size {pairs}")
        dtype = FLOATS.get(stored.type.name, np.dtype(np.float32))
        tensor = GGUFTensor(name, stored.path, dtype, stored.shape, stored.start, stored.type, pairs)
        if module in row.made:
            tensor = row.made[module](tensor)
        parts.setdefault(name, []).append(tensor)
    return {name: _one(name, some) for name, some in parts.items()}


def _swaps(file: GGUFFile) -> bool:
    """Whether the two products of layers without gates have each other's names, as in older files."""
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    hidden = file.metadata.get(f"{CLIP}.vision.embedding_length")
    if up is None or down is None or "v.blk.0.ffn_gate.weight" in file.tensors:
        return False
    return len(up.shape) == len(down.shape) == 2 and up.shape[0] == hidden != down.shape[0]


def _module(stored: StoredTensor, swapped: bool = False) -> tuple[str, tuple[int, str]]:
    """The name of a tensor's module, with "{i}" for the layer; the layer, or 0, and "weight" or "bias"."""
    parsed = _NAME.fullmatch(stored.name)
    name, kind = (stored.name, "weight") if parsed is None else (parsed[1], parsed[2])
    if swapped and (role := name.rpartition(".ffn_")[2]) in ("up", "down"):
        name = name.removesuffix(role) + ("down" if role == "up" else "up")
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


def _inner(keys: Keys) -> int:
    """Channels between the two products of a layer."""
    return _shape(keys, f"v.blk.0.ffn_{'down' if _swaps(keys.file) else 'up'}.weight")[0]


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
        "intermediate_size": _inner(keys),
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
            "intermediate_size": _inner(keys),
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


# SigLIP: Gemma 3, Idefics3 and SmolVLM, LFM2-VL


def _siglip(keys: Keys, kind: str) -> Config:
    if keys.flag("use_silu", False) or not keys.flag("use_gelu", True):
        raise keys.refuse("clip.use_gelu must be true")
    patch = keys.size("vision.patch_size")
    side = isqrt(_shape(keys, "v.position_embd.weight")[-2])
    return {
        "model_type": kind,
        "hidden_size": keys.size("vision.embedding_length"),
        "intermediate_size": _inner(keys),
        "num_hidden_layers": keys.size("vision.block_count"),
        "num_attention_heads": keys.size("vision.attention.head_count"),
        "image_size": side * patch,
        "patch_size": patch,
        "layer_norm_eps": keys.real("vision.attention.layer_norm_epsilon", 1e-6),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _siglip_names(start: str) -> dict[str, str]:
    layer = f"{start}encoder.layers.{{i}}"
    return {
        "v.patch_embd": f"{start}embeddings.patch_embedding",
        "v.position_embd": f"{start}embeddings.position_embedding",
        "v.post_ln": f"{start}post_layernorm",
        "v.blk.{i}.ln1": f"{layer}.layer_norm1",
        "v.blk.{i}.ln2": f"{layer}.layer_norm2",
        **{f"v.blk.{{i}}.attn_{role}": f"{layer}.self_attn.{role}_proj" for role in "qkv"},
        "v.blk.{i}.attn_out": f"{layer}.self_attn.out_proj",
        "v.blk.{i}.ffn_up": f"{layer}.mlp.fc1",
        "v.blk.{i}.ffn_down": f"{layer}.mlp.fc2",
    }


def _gemma3(keys: Keys) -> Config:
    vision = _siglip(keys, "siglip_vision_model")
    across = vision["image_size"] // vision["patch_size"] // keys.size("vision.projector.scale_factor", 4)
    return {"mm_tokens_per_image": across**2, "vision_config": vision}


def _of_gemma3(keys: Keys) -> Config:
    size = dict.fromkeys(("height", "width"), keys.size("vision.image_size"))
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size, "resample": 2, **_colours(keys)}


def _less_one(tensor: GGUFTensor) -> GGUFTensor:
    """Of a norm that the file has with 1 added."""
    return replace(tensor, offset=-1.0)


def _idefics3(keys: Keys) -> Config:
    vision = _siglip(keys, "idefics3_vision")
    return {"scale_factor": keys.size("vision.projector.scale_factor", 2), "vision_config": vision}


def _of_idefics3(keys: Keys) -> Config:
    tile = keys.size("vision.image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": keys.size("vision.preproc_image_size", 4 * tile)},
        "max_image_size": {"longest_edge": tile},
        "resample": 1,  # Lanczos
        **_colours(keys),
    }


def _lfm2(keys: Keys) -> Config:
    vision = _siglip(keys, "siglip2_vision_model")
    return {
        "downsample_factor": keys.size("vision.projector.scale_factor", 2),
        "projector_hidden_size": _shape(keys, "mm.1.weight")[0],
        "projector_bias": keys.has("mm.1.bias"),
        "projector_use_layernorm": keys.has("mm.input_norm.weight"),
        "vision_config": vision | {"num_patches": (vision.pop("image_size") // vision["patch_size"]) ** 2},
    }


def _of_lfm2(keys: Keys) -> Config:
    return {"image_processor_type": "Lfm2VlImageProcessor", **_colours(keys)}


def _colours_last(tensor: GGUFTensor) -> GGUFTensor:
    """Of a convolution [channels, colours, height, width]: a matrix of pixels that have their colours together."""
    if len(tensor.shape) != 4:
        return tensor
    shape = tensor.shape[0], tensor.shape[1] * tensor.shape[2] * tensor.shape[3]
    return ComputedTensor.of(tensor.name, shape, (tensor,), lambda x: x.transpose(0, 2, 3, 1).reshape(shape))


# Gemma 4, also the models without an encoder, whose features are projections of large patches


_GEMMA4_LAYER = "vision_tower.encoder.layers.{i}"
_GEMMA4_PRODUCTS = {
    **{f"v.blk.{{i}}.attn_{role}": f"{_GEMMA4_LAYER}.self_attn.{role}_proj" for role in "qkv"},
    "v.blk.{i}.attn_out": f"{_GEMMA4_LAYER}.self_attn.o_proj",
    **{f"v.blk.{{i}}.ffn_{role}": f"{_GEMMA4_LAYER}.mlp.{role}_proj" for role in ("gate", "up", "down")},
}
_GEMMA4_BOUNDS = {
    f"{stored}.{bound}": f"{name}.{bound}"
    for stored, name in _GEMMA4_PRODUCTS.items()
    for bound in ("input_min", "input_max", "output_min", "output_max")
}


def _gemma4(keys: Keys) -> Config:
    heads = keys.size("vision.attention.head_count")
    return {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": keys.size("vision.embedding_length"),
            "intermediate_size": _inner(keys),
            "num_hidden_layers": keys.size("vision.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": _shape(keys, "v.blk.0.attn_q.weight")[0] // heads,
            "rms_norm_eps": keys.real("vision.attention.layer_norm_epsilon", 1e-6),
            "pooling_kernel_size": keys.size("vision.projector.scale_factor", 3),
            "patch_size": keys.size("vision.patch_size"),
            "position_embedding_size": _shape(keys, "v.position_embd.weight")[-2],
            "use_clipped_linears": keys.has("v.blk.0.attn_q.input_min"),
            "standardize": keys.has("v.std_bias"),
        }
    }


def _gemma4_unified(keys: Keys) -> Config:
    for unused in ("block_count", "attention.head_count"):
        keys.expect(f"vision.{unused}", 0)
    table = _shape(keys, "v.position_embd.weight")
    keys.expect("vision.embedding_length", table[-1])
    return {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": keys.size("vision.patch_size"),
            "pooling_kernel_size": keys.size("vision.projector.scale_factor", 3),
            "mm_embed_dim": table[-1],
            "output_proj_dims": table[-1],
            "mm_posemb_size": table[-2],
            "rms_norm_eps": keys.real("vision.attention.layer_norm_epsilon", 1e-6),
        }
    }


def _of_gemma4(kind: str) -> Callable[[Keys], Config]:
    """Settings of a processor."""

    def processor(keys: Keys) -> Config:
        patch, side = keys.size("vision.patch_size"), keys.size("vision.projector.scale_factor", 3)
        return {
            "image_processor_type": kind,
            "patch_size": patch,
            "pooling_kernel_size": side,
            "max_soft_tokens": keys.size("vision.image_max_pixels", 280 * (patch * side) ** 2) // (patch * side) ** 2,
            "do_normalize": True,
            **_colours(keys),
        }

    return processor


def _gemma4_text(config: Config, metadata: Config) -> Config:
    """Tokens of a picture see each other, but not in the models whose layers have inputs of their own."""
    return {
        "use_bidirectional_attention": None if config.get("hidden_size_per_layer_input") else "vision",
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", 0),
    }


def _scalar(tensor: GGUFTensor) -> GGUFTensor:
    return replace(tensor, shape=()) if tuple(tensor.shape) == (1,) else tensor


def _colours_together(tensor: GGUFTensor) -> GGUFTensor:
    """Of weights for the numbers of patches, whose last axis has all of one colour, then those of the next: with the
    colours of a pixel together."""
    *outputs, inputs = tensor.shape
    if inputs % 3:
        return tensor

    def turned(x: np.ndarray) -> np.ndarray:
        return x.reshape(*outputs, 3, inputs // 3).swapaxes(-1, -2).reshape(tensor.shape)

    return ComputedTensor.of(tensor.name, tuple(tensor.shape), (tensor,), turned)


def _rows_first(tensor: GGUFTensor) -> GGUFTensor:
    """Of a table [axes, positions, channels]."""
    if len(tensor.shape) != 3:
        return tensor
    axes, rows, channels = tensor.shape
    return ComputedTensor.of(tensor.name, (rows, axes, channels), (tensor,), lambda x: x.swapaxes(0, 1))


# InternVL


def _internvl(keys: Keys) -> Config:
    patch = keys.size("vision.patch_size")
    vision = {
        "model_type": "internvl_vision",
        "hidden_size": keys.size("vision.embedding_length"),
        "intermediate_size": _inner(keys),
        "num_hidden_layers": keys.size("vision.block_count"),
        "num_attention_heads": keys.size("vision.attention.head_count"),
        "image_size": isqrt(_shape(keys, "v.position_embd.weight")[-2] - 1) * patch,
        "patch_size": patch,
        "layer_norm_eps": keys.real("vision.attention.layer_norm_epsilon", 1e-6),
        "norm_type": "layer_norm" if keys.has("v.blk.0.ln1.bias") else "rms_norm",
        "attention_bias": keys.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("v.blk.0.attn_q_norm.weight"),
        "hidden_act": _activation(keys, "gelu"),
    }
    return {"downsample_ratio": 1 / keys.size("vision.projector.scale_factor", 2), "vision_config": vision}


def _of_internvl(keys: Keys) -> Config:
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": dict.fromkeys(("height", "width"), keys.size("vision.image_size")),
        "max_patches": keys.size("vision.preproc_max_tiles", 12),
        "resample": 3,  # bicubic
        **_colours(keys),
    }


def _with_ones(tensor: GGUFTensor) -> GGUFTensor:
    """Of a tensor with three axes, of which the first ones may be missing in files: they are one."""
    shape = tuple(tensor.shape)
    while shape[:1] == (1,):
        shape = shape[1:]
    return replace(tensor, shape=(1,) * (3 - len(shape)) + shape)


_INTERN_LAYER = "vision_tower.encoder.layer.{i}"
_QWEN_MARKS = {"video_token_id": "<|video_pad|>"}
_GEMMA4_MARKS = {"boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
MISTRAL3 = "Mistral3ForConditionalGeneration"
PROJECTORS: dict[str, Projector] = {
    "gemma3": Projector(
        {"Gemma3ForCausalLM": ("Gemma3ForConditionalGeneration", "gemma3_text")},
        "<image_soft_token>",
        _gemma3,
        _of_gemma3,
        {
            **_siglip_names("vision_tower."),
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
        },
        others={"boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"},
        bare=("mm.input_projection",),
        made={"mm.soft_emb_norm": _less_one},
    ),
    "gemma4v": Projector(
        {"Gemma4ForCausalLM": ("Gemma4ForConditionalGeneration", "gemma4_text")},
        "<|image|>",
        _gemma4,
        _of_gemma4("Gemma4ImageProcessor"),
        {
            "v.patch_embd": "vision_tower.patch_embedder.input_proj",
            "v.position_embd": "vision_tower.patch_embedder.position_embedding_table",
            "v.std_bias": "vision_tower.std_bias",
            "v.std_scale": "vision_tower.std_scale",
            "v.blk.{i}.ln1": f"{_GEMMA4_LAYER}.input_layernorm",
            "v.blk.{i}.ln2": f"{_GEMMA4_LAYER}.pre_feedforward_layernorm",
            "v.blk.{i}.attn_post_norm": f"{_GEMMA4_LAYER}.post_attention_layernorm",
            "v.blk.{i}.ffn_post_norm": f"{_GEMMA4_LAYER}.post_feedforward_layernorm",
            **{f"v.blk.{{i}}.attn_{role}_norm": f"{_GEMMA4_LAYER}.self_attn.{role}_norm" for role in "qk"},
            **{stored: f"{name}.linear" for stored, name in _GEMMA4_PRODUCTS.items()},
            **_GEMMA4_BOUNDS,
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        others=_GEMMA4_MARKS,
        text=_gemma4_text,
        bare=("v.position_embd", "v.std_bias", "v.std_scale", *_GEMMA4_BOUNDS),
        made={"v.patch_embd": _colours_last, **dict.fromkeys(_GEMMA4_BOUNDS, _scalar)},
    ),
    "gemma4uv": Projector(
        {"Gemma4ForCausalLM": ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text")},
        "<|image|>",
        _gemma4_unified,
        _of_gemma4("Gemma4UnifiedImageProcessor"),
        {
            "v.patch_embd": "vision_embedder.patch_dense",
            "v.patch_norm.1": "vision_embedder.patch_ln1",
            "v.patch_norm.2": "vision_embedder.patch_ln2",
            "v.patch_norm.3": "vision_embedder.pos_norm",
            "v.position_embd": "vision_embedder.pos_embedding",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        others=_GEMMA4_MARKS,
        text=_gemma4_text,
        bare=("v.position_embd",),
        made={
            **dict.fromkeys(("v.patch_embd", "v.patch_norm.1"), _colours_together),
            "v.position_embd": _rows_first,
        },
    ),
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
        others={"video_token_id": "<|video|>"},
    ),
    "idefics3": Projector(
        {"LlamaForCausalLM": ("SmolVLMForConditionalGeneration", "llama")},
        "<image>",
        _idefics3,
        _of_idefics3,
        {**_siglip_names("vision_model."), "mm.model.fc": "connector.modality_projection.proj"},
    ),
    "internvl": Projector(
        {
            "LlamaForCausalLM": ("InternVLForConditionalGeneration", "llama"),
            "Qwen2ForCausalLM": ("InternVLForConditionalGeneration", "qwen2"),
            "Qwen3ForCausalLM": ("InternVLForConditionalGeneration", "qwen3"),
            "Qwen3MoeForCausalLM": ("InternVLForConditionalGeneration", "qwen3_moe"),
        },
        "<IMG_CONTEXT>",
        _internvl,
        _of_internvl,
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd": "vision_tower.embeddings.position_embeddings",
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.blk.{i}.ln1": f"{_INTERN_LAYER}.layernorm_before",
            "v.blk.{i}.ln2": f"{_INTERN_LAYER}.layernorm_after",
            **{f"v.blk.{{i}}.attn_{role}": f"{_INTERN_LAYER}.attention.{role}_proj" for role in "qkv"},
            **{f"v.blk.{{i}}.attn_{role}_norm": f"{_INTERN_LAYER}.attention.{role}_norm" for role in "qk"},
            "v.blk.{i}.attn_out": f"{_INTERN_LAYER}.attention.projection_layer",
            "v.blk.{i}.ffn_up": f"{_INTERN_LAYER}.mlp.fc1",
            "v.blk.{i}.ffn_down": f"{_INTERN_LAYER}.mlp.fc2",
            "v.blk.{i}.ls1": f"{_INTERN_LAYER}.lambda_1",
            "v.blk.{i}.ls2": f"{_INTERN_LAYER}.lambda_2",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        bare=("v.position_embd", "v.class_embd", "v.blk.{i}.ls1", "v.blk.{i}.ls2"),
        made={"v.position_embd": _with_ones, "v.class_embd": _with_ones},
    ),
    "lfm2": Projector(
        {"Lfm2ForCausalLM": ("Lfm2VlForConditionalGeneration", "lfm2")},
        "<image>",
        _lfm2,
        _of_lfm2,
        {
            **_siglip_names("vision_tower."),
            "mm.input_norm": "multi_modal_projector.layer_norm",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        made={"v.patch_embd": _colours_last},
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
        others=_QWEN_MARKS,
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
        others=_QWEN_MARKS,
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
        others=_QWEN_MARKS,
    ),
}
