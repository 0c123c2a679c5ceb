"""The encoders of tiny models that see as llama.cpp's converter writes them: a GGUF file beside that of the text.

Names of tensors are those of the package's own tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import Kind, in_pairs, write

from jaxserve.checkpoints.safetensors import read_folder

PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "llava": "pixtral", "mistral3": "pixtral",
    "lighton_ocr": "lightonocr", "glm4v": "glm4v", "glm4v_moe": "glm4v", "gemma3": "gemma3", "idefics3": "idefics3",
    "internvl": "internvl", "lfm2_vl": "lfm2", "gemma4": "gemma4v", "gemma4_unified": "gemma4uv",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3vl_merger"),
}  # fmt: skip
TILED = "gemma3", "gemma4", "gemma4_unified", "idefics3", "internvl", "lfm2_vl"
# Special tokens from id 505 on, by the beginning of a case's name; of others those of Qwen.
QWEN = "<|image_pad|>", "<|video_pad|>"
MARKS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), "glm4v": ("<|image|>", "<|video|>"),
    "idefics3": ("<image>",), "internvl": ("<IMG_CONTEXT>",), "lfm2": ("<image>",), "llava": ("[IMG]",),
    "mistral3": ("[IMG]",), "gemma4": ("<|image|>", "<|video|>", "<|audio|>", "<|image>", "<image|>"),
}  # fmt: skip
TENSOR = gguf.MODEL_TENSOR
# Where the converter itself chooses a name, of Qwen3-VL.
CHOSEN = {
    "visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2",
    "visual.merger.norm": gguf.TENSOR_NAMES[TENSOR.V_POST_NORM],
    "multi_modal_projector.mm_soft_emb_norm": gguf.TENSOR_NAMES[TENSOR.V_MM_SOFT_EMB_NORM],
    "multi_modal_projector.mm_input_projection": gguf.TENSOR_NAMES[TENSOR.V_MM_INP_PROJ],
    # Of Gemma 4 without an encoder, which the package's tables lack.
    "model.vision_embedder.patch_ln1": "v.patch_norm.1", "model.vision_embedder.patch_ln2": "v.patch_norm.2",
    "model.vision_embedder.pos_norm": "v.patch_norm.3",
    "model.vision_embedder.patch_dense": gguf.TENSOR_NAMES[TENSOR.V_ENC_EMBD_PATCH],
    "model.vision_embedder.pos_embedding": gguf.TENSOR_NAMES[TENSOR.V_ENC_EMBD_POS],
}  # fmt: skip


def write_mmproj(folder: Path, path: Path) -> Path:
    """`folder` has a preprocessor_config.json. All tensors are float32."""
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    vision = config["vision_config"]
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    if kind.startswith("gemma4"):  # with sound
        writer.add_clip_vision_projector_type(PROJECTORS[kind])
        writer.add_clip_has_audio_encoder(True)
        writer.add_clip_audio_projector_type("gemma4a")
        for name in ("a.blk.0.ln1.weight", "mm.a.input_projection.weight"):
            writer.add_tensor(name, np.ones((4, 4), np.float32))
    else:
        writer.add_clip_projector_type(PROJECTORS[kind])
    text = config.get("text_config", config)
    writer.add_vision_projection_dim(text["hidden_size"])
    patch = vision["patch_size"]
    writer.add_vision_patch_size(patch[0] if isinstance(patch, list) else patch)
    bare = kind == "gemma4_unified"  # no encoder
    hidden = vision.get("embed_dim") or vision.get("hidden_size") or vision["mm_embed_dim"]
    writer.add_vision_embedding_length(hidden)
    writer.add_vision_feed_forward_length(0 if bare else vision.get("intermediate_size") or hidden)
    writer.add_vision_block_count(0 if bare else vision.get("depth") or vision["num_hidden_layers"])
    writer.add_vision_head_count(0 if bare else vision.get("num_heads") or vision["num_attention_heads"])
    if kind.startswith("gemma4"):
        eps = vision.get("rms_norm_eps", 1e-6)
    elif kind in TILED:
        eps = vision.get("layer_norm_eps", 1e-6)
    else:
        eps = vision.get("rms_norm_eps", 1e-5) if kind.startswith("glm") else text["rms_norm_eps"]
    writer.add_vision_attention_layernorm_eps(eps)
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    if kind.startswith(("qwen", "glm")):
        writer.add_vision_image_size(560)
        writer.add_vision_min_pixels(processor["size"]["shortest_edge"])
        writer.add_vision_max_pixels(processor["size"]["longest_edge"])
        _add_choices(writer, kind, vision)
    elif kind in TILED:
        writer.add_vision_use_gelu(True)
        writer.add_vision_image_size((processor.get("max_image_size") or {}).get("longest_edge") or 16)
        _add_tiles(writer, kind, config, processor)
    else:
        writer.add_vision_image_size(processor["size"]["longest_edge"])
        writer.add_vision_use_silu(vision["hidden_act"] == "silu")
        if theta := vision.get("rope_theta"):  # of Mistral's own files; the others have the usual one
            writer.add_rope_freq_base(theta)
        if side := config.get("spatial_merge_size"):
            writer.add_vision_spatial_merge_size(side)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    tensors = _of_tiled(folder, kind) if kind in TILED else _tensors(folder, vision)
    for name, values in tensors:
        stem, _, end = name.rpartition(".")
        whole = names.get_name(name) or f"{CHOSEN.get(stem) or names.get_name(stem) or stem}.{end}"
        writer.add_tensor(whole, np.ascontiguousarray(values), raw_dtype=Kind.F32)
    return write(writer, path)


def _add_tiles(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any], processor: dict[str, Any]) -> None:
    if kind == "gemma3":
        vision = config["vision_config"]
        across = int(config["mm_tokens_per_image"] ** 0.5)
        writer.add_vision_image_size(processor["size"]["height"])
        writer.add_vision_projector_scale_factor(vision["image_size"] // vision["patch_size"] // across)
    elif kind.startswith("gemma4"):
        side = processor["pooling_kernel_size"]
        writer.add_vision_projector_scale_factor(side)
        writer.add_vision_max_pixels(processor["max_soft_tokens"] * (side * processor["patch_size"]) ** 2)
    elif kind == "idefics3":
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_uint32("clip.vision.preproc_image_size", processor["size"]["longest_edge"])
    elif kind == "lfm2_vl":
        writer.add_vision_projector_scale_factor(config["downsample_factor"])
    else:
        writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
        writer.add_uint32("clip.vision.preproc_max_tiles", processor["max_patches"])


def _add_choices(writer: gguf.GGUFWriter, kind: str, vision: dict[str, Any]) -> None:
    if kind.startswith("glm"):
        writer.add_vision_use_silu(True)
    elif kind == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision.get("fullatt_block_indexes", [7])[0] + 1)
        writer.add_vision_window_size(vision["window_size"])
    elif kind == "qwen2_vl" and vision.get("hidden_act") == "gelu":
        writer.add_vision_use_gelu(True)
    elif kind.startswith("qwen3"):
        writer.add_vision_use_gelu(True)
        taps = vision.get("deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([i in taps for i in range(vision["depth"])])


def _tensors(folder: Path, vision: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, values) with the names of Hugging Face's modules, changed as by the converter."""
    for name, tensor in read_folder(folder).items():
        name = name.removeprefix("model.")
        name = name.replace("vision_encoder.", "vision_tower.").replace("vision_projection.", "multi_modal_projector.")
        if not name.startswith(("visual.", "vision_tower.", "multi_modal_projector.")):
            continue
        values = tensor.read().astype(np.float32)
        if "vision_tower" in name and ("q_proj" in name or "k_proj" in name):
            yield name, in_pairs(values, vision["num_attention_heads"])
        elif ".qkv." in name and "num_position_embeddings" not in vision and "image_size" not in vision:
            for part, rows in zip("qkv", np.split(values, 3), strict=True):
                yield name.replace("qkv", part), rows
        elif name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        elif tap := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name):
            layer = vision["deepstack_visual_indexes"][int(tap[1])]
            yield f"v.deepstack.{layer}.{tap[2]}.{tap[3]}", values
        else:
            yield name, values


def _of_tiled(folder: Path, kind: str) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in read_folder(folder).items():
        of_encoder = (
            "vision_tower", "vision_model", "vision_embedder", "embed_vision", "multi_modal_projector", "connector"
        )  # fmt: skip
        name = name if name.startswith("model.") else f"model.{name}"
        if name.removeprefix("model.").split(".")[0] not in of_encoder:
            continue
        values = tensor.read().astype(np.float32)
        if kind == "internvl":
            name = re.sub(r"model\.multi_modal_projector\.(layer_norm|linear_\d)", _of_mlp1, name)
            if "lambda_" in name or name.endswith(("cls_token", "position_embeddings")):
                name += ".weight"
        elif kind == "gemma3":
            name = name.removeprefix("model.").replace("_weight", ".weight")
            if "soft_emb_norm" in name:
                values = values + 1
        elif kind.startswith("gemma4"):
            name, values = _of_gemma4(name, values)
        elif kind == "lfm2_vl":
            name = name.removeprefix("model.")
            if "patch_embedding.weight" in name:
                values = _colours_first(values)
        if kind in ("gemma3", "lfm2_vl") and name.startswith("vision_tower.") and "vision_model" not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        yield name, values


def _of_mlp1(found: re.Match[str]) -> str:
    return f"mlp1.{('layer_norm', 'linear_1', '', 'linear_2').index(found[1])}"


def _colours_first(matrix: np.ndarray) -> np.ndarray:
    """A matrix over pixels that have their colours together, as a convolution."""
    side = int((matrix.shape[1] // 3) ** 0.5)
    return matrix.reshape(len(matrix), side, side, 3).transpose(0, 3, 1, 2)


def _of_gemma4(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("pos_embedding"):
        return f"{name}.weight", values.transpose(1, 0, 2)
    if name.endswith("position_embedding_table"):
        return f"{name}.weight", values
    if name.endswith("input_proj.weight"):
        return name, _colours_first(values)
    if name.endswith(("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")):
        matrix = values.reshape(-1, values.shape[-1])
        return name, _colours_first(matrix).reshape(values.shape)
    return name, values[None] if values.ndim == 0 else values
