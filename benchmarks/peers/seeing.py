"""Models that see, for comparisons: the image encoders of published ones with random weights in float16, before a
language model of a few layers. Each is a folder in Hugging Face's form, and two GGUF files with the same weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

MARKS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<fake_token_around_image>", "<global-img>", "\n\n",  # the last four: of SmolVLM
)  # fmt: skip
VOCABULARY = 256 + len(MARKS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "PICTURE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "do_normalize": True}


@dataclass(frozen=True)
class Shape:
    """A model: its config.json, the settings of its image processor, and its image token as the template has it."""

    config: dict[str, Any]
    processor: dict[str, Any]
    image: str
    architecture: str  # of the language model in GGUF
    projector: str  # of the encoder in GGUF
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the encoder


def _text(
    kind: str, hidden: int, heads: int, kv_heads: int, head_dim: int, size: int, layers: int = 2
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": size, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _siglip(hidden: int, size: int, layers: int, heads: int, picture: int, patch: int) -> dict[str, Any]:
    return {
        "model_type": "smolvlm_vision", "hidden_size": hidden, "intermediate_size": size, "num_hidden_layers": layers,
        "num_attention_heads": heads, "image_size": picture, "patch_size": patch,
    }  # fmt: skip


def _smolvlm(text: dict[str, Any], vision: dict[str, Any], joined: int) -> Shape:
    """A picture is one tile."""
    picture, patch = vision["image_size"], vision["patch_size"]
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "text_config": text,
        "vision_config": vision, "scale_factor": joined, "image_token_id": 256 + MARKS.index("<image>"),
        "tie_word_embeddings": True,
    }  # fmt: skip
    processor = COLOURS | {
        "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "resample": 1,
        "size": {"longest_edge": picture}, "max_image_size": {"longest_edge": picture},
    }  # fmt: skip
    hidden, size = vision["hidden_size"], vision["intermediate_size"]
    tensors = {
        "model.vision_model.embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
        "model.vision_model.embeddings.patch_embedding.bias": (hidden,),
        "model.vision_model.embeddings.position_embedding.weight": ((picture // patch) ** 2, hidden),
        **_norm("model.vision_model.post_layernorm", hidden),
        "model.connector.modality_projection.proj.weight": (text["hidden_size"], hidden * joined**2),
    }
    for i in range(vision["num_hidden_layers"]):
        layer = f"model.vision_model.encoder.layers.{i}"
        tensors |= _norm(f"{layer}.layer_norm1", hidden) | _norm(f"{layer}.layer_norm2", hidden)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= _linear(f"{layer}.self_attn.{name}", hidden, hidden)
        tensors |= _linear(f"{layer}.mlp.fc1", size, hidden) | _linear(f"{layer}.mlp.fc2", hidden, size)
    return Shape(config, processor, "<image>", "llama", "idefics3", tensors)


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any]) -> Shape:
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "vision_config": vision,
        "text_config": text | {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        "image_token_id": 256 + MARKS.index("<|image_pad|>"), "tie_word_embeddings": True,
    }  # fmt: skip
    processor = COLOURS | {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": vision["patch_size"], "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 1048576},
    }  # fmt: skip
    hidden, size, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch, wide = vision["patch_size"], 4 * vision["hidden_size"]
    tensors = {
        "model.visual.patch_embed.proj.weight": (hidden, 3, 2, patch, patch),
        "model.visual.patch_embed.proj.bias": (hidden,),
        "model.visual.pos_embed.weight": (vision["num_position_embeddings"], hidden),
        **_norm("model.visual.merger.norm", hidden),
        **_linear("model.visual.merger.linear_fc1", wide, wide),
        **_linear("model.visual.merger.linear_fc2", out, wide),
    }
    for i in range(len(vision["deepstack_visual_indexes"])):
        tap = f"model.visual.deepstack_merger_list.{i}"
        tensors |= _norm(f"{tap}.norm", wide) | _linear(f"{tap}.linear_fc1", wide, wide)
        tensors |= _linear(f"{tap}.linear_fc2", out, wide)
    for i in range(vision["depth"]):
        layer = f"model.visual.blocks.{i}"
        tensors |= _norm(f"{layer}.norm1", hidden) | _norm(f"{layer}.norm2", hidden)
        tensors |= _linear(f"{layer}.attn.qkv", 3 * hidden, hidden) | _linear(f"{layer}.attn.proj", hidden, hidden)
        tensors |= _linear(f"{layer}.mlp.linear_fc1", size, hidden) | _linear(f"{layer}.mlp.linear_fc2", hidden, size)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return Shape(config, processor, image, "qwen3vl", "qwen3vl_merger", tensors)


def _linear(name: str, out: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, inputs), f"{name}.bias": (out,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


# By the names of the models whose encoders these are.
SHAPES = {
    "SmolVLM-500M": _smolvlm(_text("llama", 960, 15, 5, 64, 2560), _siglip(768, 3072, 12, 12, 512, 16), 4),
    "SmolVLM-2.2B": _smolvlm(_text("llama", 2048, 32, 32, 64, 8192), _siglip(1152, 4304, 27, 16, 384, 14), 3),
    "Qwen3-VL-2B": _qwen3_vl(
        _text("qwen3_vl_text", 2048, 16, 8, 128, 6144, layers=4),  # one more than there are taps
        {
            "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "patch_size": 16, "spatial_merge_size": 2, "out_hidden_size": 2048, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17], "hidden_act": "gelu_pytorch_tanh",
        },
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Writes a model into `folder`, unless it is there: Hugging Face's files, model.gguf and mmproj.gguf."""
    if (folder / "done").exists():
        return folder
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(_weights(shape.tensors | _text_tensors(shape.config["text_config"])))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = shape.config | {"torch_dtype": "float16", "eos_token_id": 256, "bos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps(shape.processor, indent=1))
    _write_tokenizer(folder, shape)
    _write_text(folder, shape)
    _write_encoder(folder, shape)
    (folder / "done").touch()
    return folder


def _text_tensors(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, size, dim = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    start = "model.text_model" if text["model_type"] == "llama" else "model.language_model"
    tensors: dict[str, tuple[int, ...]] = {
        f"{start}.embed_tokens.weight": (VOCABULARY, hidden), f"{start}.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(text["num_hidden_layers"]):
        layer = f"{start}.layers.{i}"
        queries, keys = (text[key] * dim for key in ("num_attention_heads", "num_key_value_heads"))
        tensors |= {
            f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden), f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (size, hidden), f"{layer}.mlp.up_proj.weight": (size, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, size),
        }  # fmt: skip
        if text["model_type"] != "llama":
            tensors |= {f"{layer}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    return tensors


def _weights(tensors: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for name, shape in tensors.items():
        if len(shape) == 1:
            yield name, np.full(shape, name.endswith("weight"), np.float16)
        else:
            scale = np.float32(1 / np.sqrt(np.prod(shape[1:])))
            yield name, (scale * rng.standard_normal(shape, np.float32)).astype(np.float16)


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("PICTURE", shape.image)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKS[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _write_text(folder: Path, shape: Shape) -> None:
    import gguf

    from peers.write_gguf import NAMES, interleave

    text = shape.config["text_config"]
    writer = gguf.GGUFWriter(folder / "model.gguf", shape.architecture)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_rope_freq_base(text["rope_theta"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    if shape.architecture == "qwen3vl":
        writer.add_rope_dimension_sections([24, 20, 20, 0])
        writer.add_num_deepstack_layers(len(shape.config["vision_config"]["deepstack_visual_indexes"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_letters(), *MARKS])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(MARKS))
    writer.add_token_merges(["Ġ 0"])  # an empty list cannot be written; this one makes no token
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)
    for name, values in load_file(folder / "model.safetensors").items():
        found = re.fullmatch(r"model\.(?:text_model|language_model)\.(?:layers\.(\d+)\.)?(.*)\.weight", name)
        if found is None:
            continue
        layer, part = found.groups()
        if shape.architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleave(values, len(values) // text["head_dim"])
        known = {"embed_tokens": "token_embd", "norm": "output_norm"}
        stem = known[part] if layer is None else f"blk.{layer}.{NAMES[part]}"
        writer.add_tensor(f"{stem}.weight", values.astype(np.float32) if values.ndim == 1 else values)
    _finish(writer)


def _write_encoder(folder: Path, shape: Shape) -> None:
    import gguf

    vision = shape.config["vision_config"]
    layers = vision.get("depth") or vision["num_hidden_layers"]
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(shape.projector)
    writer.add_vision_projection_dim(shape.config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(vision.get("num_heads") or vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean(shape.processor["image_mean"])
    writer.add_vision_image_std(shape.processor["image_std"])
    writer.add_vision_image_size(vision.get("image_size", 768))
    writer.add_vision_use_gelu(True)
    if shape.projector == "idefics3":
        writer.add_vision_projector_scale_factor(shape.config["scale_factor"])
    else:
        taps = vision["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([i in taps for i in range(layers)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.startswith(("model.vision_model.", "model.connector.", "model.visual.")):
            continue
        values = values.astype(np.float32) if values.ndim == 1 or "pos" in name else values
        if name.endswith("patch_embed.proj.weight"):
            for frame, end in enumerate(("", ".1")):
                writer.add_tensor(f"v.patch_embd.weight{end}", np.ascontiguousarray(values[:, :, frame]))
            continue
        stem, _, kind = name.removeprefix("model.").rpartition(".")
        chosen = {
            "visual.merger.linear_fc1": "mm.0",
            "visual.merger.linear_fc2": "mm.2",
            "visual.merger.norm": "v.post_ln",
        }
        chosen["connector.modality_projection.proj"] = "mm.model.fc"
        if tap := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)", stem):
            found = f"v.deepstack.{vision['deepstack_visual_indexes'][int(tap[1])]}.{tap[2]}"
        else:
            found = chosen.get(stem) or names.get_name(stem) or names.get_name(f"model.{stem}")
        assert found is not None, name
        writer.add_tensor(f"{found}.{kind}", values)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
