"""Folders in Mistral's own format: params.json instead of config.json, and consolidated*.safetensors.

Keys and names are those of github.com/mistralai/mistral-inference. That code's rotary positions need the rows of
queries and keys in pairs; here they are read in Hugging Face's order.
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
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
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
_NAME = re.compile(r"(?:layers\.(\d+)\.)?([\w.]+)\.weight")


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
    return config


def _yarn(yarn: dict[str, Any]) -> dict[str, Any]:
    names = {"beta": "beta_fast", "alpha": "beta_slow"}
    scaling: dict[str, Any] = {names.get(key, key): value for key, value in yarn.items() if key != "apply_scale"}
    return {"rope_type": "yarn", **scaling} | ({} if yarn.get("apply_scale", True) else {"attention_factor": 1.0})


def open_native(folder: Path) -> NativeModel:
    """Reads the config and the tensors' headers, but no weights. Raises CheckpointError."""
    config = read_params(folder)
    sizes = [config.get(key) for key in ("hidden_size", "num_attention_heads")]
    hidden, heads = (size if type(size) is int and size > 0 else 1 for size in sizes)  # HFConfig reports wrong sizes
    head_dim = config.get("head_dim") or hidden // heads
    tensors = {}
    for name, stored in read_folder(folder).items():
        parsed = _NAME.fullmatch(name)
        layer, part = (parsed[1], str(parsed[2])) if parsed else (None, "")
        known = (_LAYER if layer else _TOP).get(part)
        hf_name = (f"model.layers.{layer}.{known}.weight" if layer else f"{known}.weight") if known else name
        tensors[hf_name] = _paired(stored, head_dim) if part in ("attention.wq", "attention.wk") else stored
    return NativeModel(config, tensors, str(folder / PARAMS))


def _paired(stored: TensorInfo, head_dim: Any) -> PairedRows:
    is_even = type(head_dim) is int and head_dim > 0 and head_dim % 2 == 0
    if not is_even or len(stored.shape) != 2 or stored.shape[0] % head_dim:
        raise CheckpointError(
            f"{stored.path.name}: tensor {stored.name!r} of {list(stored.shape)} has no whole heads of an even size "
            f"{head_dim!r:.80}"
        )
    return PairedRows(**vars(stored), head_dim=head_dim)
