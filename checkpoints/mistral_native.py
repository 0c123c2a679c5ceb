"""Folders in Mistral's own format: params.json instead of config.json, and consolidated*.safetensors.

Keys and names are those of github.com/mistralai/mistral-inference, also of image encoders. That code's rotary positions
need the rows of queries and keys in pairs; here they are read in Hugging Face's order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import read_json
from jaxserve.checkpoints.safetensors import TensorInfo, read_folder

PARAMS = "params.json"
CLIP_COLOURS = {  # of the encoders of CLIP, as of all pictures that Mistral's models see
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
# Keys of params.json -> their names in config.json, where these differ.
_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "use_biases": "attention_bias",
}
_TOP = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
}
_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_ENCODER_LAYER = {
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    **{f"attention.w{role}": f"attention.{role}_proj" for role in "qkvo"},
    "feed_forward.w1": "feed_forward.gate_proj",
    "feed_forward.w2": "feed_forward.down_proj",
    "feed_forward.w3": "feed_forward.up_proj",
}
_ENCODER = "vision_encoder.transformer."
_NAME = re.compile(r"(?:(vision_encoder\.transformer\.)?layers\.(\d+)\.)?([\w.]+)\.(weight|bias)")


@dataclass(frozen=True)
class NativeModel:
    """config: as in config.json. tensors: by Hugging Face's names."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    source: str


@dataclass(frozen=True)
class PairedRows(TensorInfo):
    """A matrix whose rows are stored in pairs (0, half, 1, half + 1, ...) within each head."""

    head_dim: int

    @property
    def rows_at_once(self) -> int:
        return self.head_dim

    def _read(self, first: int, count: int) -> np.ndarray:
        return halves_of_pairs(super()._read(first, count).reshape(-1, self.shape[1]), self.head_dim).reshape(-1)


def halves_of_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads [n, ...] in pairs -> for each head the first rows of all pairs, then the second ones."""
    paired = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def is_native(folder: Path) -> bool:
    return (folder / PARAMS).is_file() and not (folder / "config.json").exists()


def read_params(folder: Path) -> dict[str, Any]:
    """params.json with the keys of a config.json. Unknown keys keep their names, and the reader of the config rejects
    them. Raises CheckpointError."""
    path = folder / PARAMS
    try:
        params = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(params, dict) or "hidden_dim" not in params:
        raise CheckpointError(
            f"{path} is not of Mistral's format, and there is no config.json: convert the model to Hugging Face format"
        )
    found: dict[str, Any] = params
    vision = found.pop("vision_encoder", None)
    window = found.pop("sliding_window", None) or found.pop("_sliding_window", None)
    yarn = found.pop("yarn", None)
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rope_theta": 10000.0 if window else 1e6,  # unless params.json has it
        **{_KEYS.get(key, key): value for key, value in found.items()},
        "model_type": "mistral",
        "sliding_window": window,
    }
    if isinstance(yarn, dict):
        config["rope_scaling"] = _yarn(yarn)
    elif yarn:
        raise CheckpointError(f"{path}: yarn must be an object, got {yarn!r:.80}")
    return _seeing(config, vision) if isinstance(vision, dict) else config


def _seeing(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that sees: Mistral 3 where squares of patches are joined, else Pixtral as LLaVA. Settings
    that neither has stay in the encoder's, and its reader refuses them."""
    joins = vision.get("mm_projector_id") == "patch_merge" and bool(vision.get("add_pre_mm_projector_layer_norm"))
    whole: dict[str, Any] = {
        "architectures": ["Mistral3ForConditionalGeneration" if joins else "LlavaForConditionalGeneration"],
        "image_token_id": vision.get("image_token_id", 10),
        "multimodal_projector_bias": vision.get("adapter_bias", True),
        "vision_feature_layer": -1,
        "text_config": text,
    }
    of_whole = ["image_token_id", "image_break_token_id", "image_end_token_id", "adapter_bias", "max_image_size"]
    if joins:
        of_whole += ["mm_projector_id", "add_pre_mm_projector_layer_norm", "spatial_merge_size"]
        whole["spatial_merge_size"] = vision.get("spatial_merge_size", 1)
    else:
        of_whole += ["spatial_merge_size"] if vision.get("spatial_merge_size") == 1 else []
        whole["vision_feature_select_strategy"] = "full"
    encoder = {key: value for key, value in vision.items() if key not in of_whole}
    encoder["image_size"] = vision.get("max_image_size") or vision.get("image_size") or 1024
    return whole | {"vision_config": {"hidden_act": "silu", "model_type": "pixtral", **encoder}}


def native_image_settings(folder: Path) -> dict[str, Any] | None:
    """What params.json says of the processing of pictures, with the keys of a preprocessor_config.json; None: the model
    does not see. Raises CheckpointError."""
    encoder = read_params(folder).get("vision_config")
    return None if encoder is None else pixtral_processor(encoder.get("patch_size", 16), encoder["image_size"])


def pixtral_processor(patch: int, longest_edge: int) -> dict[str, Any]:
    """The settings of Pixtral's image processor."""
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "size": {"longest_edge": longest_edge},
        "resample": 3,  # bicubic
        **CLIP_COLOURS,
    }


def _yarn(yarn: dict[str, Any]) -> dict[str, Any]:
    names = {"beta": "beta_fast", "alpha": "beta_slow"}
    scaling: dict[str, Any] = {names.get(key, key): value for key, value in yarn.items() if key != "apply_scale"}
    return {"rope_type": "yarn", **scaling} | ({} if yarn.get("apply_scale", True) else {"attention_factor": 1.0})


def open_native(folder: Path) -> NativeModel:
    """Reads the config and the tensors' headers, but no weights. Raises CheckpointError."""
    config = read_params(folder)
    head_dims = {
        _ENCODER: _head_dim(config.get("vision_config", {})),
        None: _head_dim(config.get("text_config", config)),
    }
    tensors = {}
    for name, stored in read_folder(folder).items():
        parsed = _NAME.fullmatch(name)
        if parsed is None:
            tensors[name] = stored
        else:
            turns = parsed[2] is not None and parsed[3] in ("attention.wq", "attention.wk") and parsed[4] == "weight"
            tensors[_hf_name(parsed)] = _paired(stored, head_dims[parsed[1]]) if turns else stored
    return NativeModel(config, tensors, str(folder / PARAMS))


def _head_dim(config: dict[str, Any]) -> Any:
    """Channels of a head. HFConfig reports wrong sizes."""
    sizes = [config.get(key) for key in ("hidden_size", "num_attention_heads")]
    hidden, heads = (size if type(size) is int and size > 0 else 1 for size in sizes)
    return config.get("head_dim") or hidden // heads


def _hf_name(parsed: re.Match[str]) -> str:
    """Hugging Face's name of a tensor with a name of `_NAME`; its own if that is not known."""
    encoder, layer, part, kind = parsed.groups()
    known = (_TOP if layer is None else _ENCODER_LAYER if encoder else _LAYER).get(part)
    before = "" if layer is None else f"{'vision_tower.transformer' if encoder else 'model'}.layers.{layer}."
    return parsed[0] if known is None else f"{before}{known}.{kind}"


def _paired(stored: TensorInfo, head_dim: Any) -> PairedRows:
    is_even = type(head_dim) is int and head_dim > 0 and head_dim % 2 == 0
    if not is_even or len(stored.shape) != 2 or stored.shape[0] % head_dim:
        raise CheckpointError(
            f"{stored.path.name}: tensor {stored.name!r} of {list(stored.shape)} has no whole heads of an even size "
            f"{head_dim!r:.80}"
        )
    return PairedRows(**vars(stored), head_dim=head_dim)
