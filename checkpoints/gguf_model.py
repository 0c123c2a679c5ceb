"""A GGUF file as a Hugging Face checkpoint: its metadata as a config.json, its tensors under Hugging Face's names.

The metadata keys and tensor names are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of
llama.cpp, whose architecture "llama" is both Llama and Mistral.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.gguf_blocks import FLOATS, decode, needs_package
from jaxserve.checkpoints.gguf import BlockType, GGUFFile, StoredTensor, end_ids, known_gguf
from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.mistral_native import in_halves
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.pallas_kernels.types import QuantArray

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Names that an architecture's Hugging Face model has in the place of those in _LAYER. A stack of experts [experts, out,
# in] has the name of an expert's tensor without the expert's number (see `stacks`).
_OTHER_LAYER = {
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.w1",
        "ffn_up_exps": "block_sparse_moe.experts.w3",
        "ffn_down_exps": "block_sparse_moe.experts.w2",
    }
}
_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GGUFTensor(TensorInfo):
    """A tensor that `read` and `read_rows` return as plain floats, in float32 if it is quantized.

    For Llama's queries and keys, llama.cpp stores the rows of each head in pairs (0, half, 1, half + 1, ...). With
    `head_dim`, such rows are read in Hugging Face's order.
    """

    type: BlockType
    head_dim: int = 0

    @property
    def rows_at_once(self) -> int:
        return self.head_dim or 1

    def entry(self, index: int, name: str) -> Self:
        """As in TensorInfo. The bytes in the file are counted, since `nbytes` is the size as floats here."""
        whole = StoredTensor(self.name, self.path, self.type, self.shape, self.start)
        return replace(
            self, name=name, shape=self.shape[1:], start=self.start + index * (whole.nbytes // self.shape[0])
        )

    def read_blocks(self) -> QuantArray | np.ndarray:
        """The whole tensor; quantized if its type is one that `decode` keeps quantized."""
        return self._decode(0, self.shape)

    def read_bytes(self) -> np.ndarray:
        """The bytes of the whole tensor, uint8 [rows, bytes of a row], with the rows in Hugging Face's order."""
        rows = self._bytes(0, self.shape).reshape(self.shape[0], -1)
        return np.ascontiguousarray(self._in_halves(rows)) if self.head_dim else rows

    def _read(self, first: int, count: int) -> np.ndarray:
        row = self.shape[-1]
        value = self._decode(first, (count // row, row) if len(self.shape) > 1 else (count,))
        return (dequantize(value) if isinstance(value, QuantArray) else value).reshape(-1)

    def _bytes(self, first: int, shape: tuple[int, ...]) -> np.ndarray:
        stored = StoredTensor(self.name, self.path, self.type, shape, self.start)
        return self._numbers(np.dtype(np.uint8), stored.nbytes, first // self.type.size * self.type.nbytes)

    def _decode(self, first: int, shape: tuple[int, ...]) -> QuantArray | np.ndarray:
        value = decode(self._bytes(first, shape), self.type, shape)
        if not self.head_dim:
            return value
        if not isinstance(value, QuantArray):
            return self._in_halves(value)
        codes, scale, zero, bias = map(self._in_halves, (value.codes, value.scale, value.zero, value.bias))
        return replace(value, codes=codes, scale=scale, zero=zero, bias=bias)

    def _in_halves(self, rows: Any) -> Any:
        if rows is None:
            return None
        if isinstance(rows, PackedInt4):
            return rows.with_rows(self._in_halves)
        return in_halves(rows, self.head_dim)


@dataclass(frozen=True)
class GGUFReader:
    """The QuantReader of a GGUF file (see `jaxserve.checkpoints.formats`)."""

    tensors: Mapping[str, GGUFTensor]
    description: str
    name: str = "gguf"

    def parts(self, weight: str) -> tuple[str, ...]:
        tensor = self.tensors.get(weight)
        return (weight,) if tensor is not None and tensor.type.name not in FLOATS else ()

    def read(self, weight: str, shape: tuple[int, ...]) -> QuantArray | np.ndarray:
        """Any weight of the file; quantized if its type is one that `decode` keeps quantized."""
        return self._tensor(weight, shape).read_blocks()

    def type_of(self, weight: str) -> str | None:
        """The name of a weight's GGUF type; None if the file has no such weight."""
        return self.tensors[weight].type.name if weight in self.tensors else None

    def read_bytes(self, weight: str, shape: tuple[int, ...]) -> np.ndarray:
        """The bytes in the file: uint8 [rows, bytes of a row], with the rows in Hugging Face's order."""
        return self._tensor(weight, shape).read_bytes()

    def _tensor(self, weight: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = self.tensors.get(weight)
        if tensor is None or tensor.shape != tuple(shape):
            has = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise CheckpointError(f"tensor {weight!r} {has}, but the model asks for {list(shape)}")
        return tensor


@dataclass(frozen=True)
class GGUFModel:
    """config: as in config.json. tensors: by Hugging Face's names. metadata: of the GGUF file."""

    config: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    reader: GGUFReader
    metadata: dict[str, Any]


def open_gguf(path: str | Path, ignored: Collection[str] = ()) -> GGUFModel:
    """Reads the headers of a file and of its further parts, but no weights. `ignored` settings of the architecture
    ("logit_scale", or "llama.logit_scale") count as absent.

    Raises CheckpointError for damaged files, and for unsupported settings and tensors.
    """
    file = known_gguf(Path(path))
    keys = _Keys(file, ignored)
    config = _config(file, keys)
    head_dim = config["head_dim"]
    tensors = {}
    for stored in file.tensors.values():
        if stored.name != _ROPE_FACTORS:
            tensor = _tensor(stored, head_dim if keys.architecture == "llama" else 0, keys.architecture)
            tensors[tensor.name] = tensor
    kinds = {tensor.type for tensor in tensors.values()}
    if others := sorted(kind.name for kind in kinds if needs_package(kind)):
        log.warning("%s: weights of type %s are dequantized to floats as they are read", path, ", ".join(others))
    description = "GGUF " + ", ".join(sorted(kind.name for kind in kinds))
    return GGUFModel(config, tensors, GGUFReader(tensors, description), file.metadata)


class _Keys:
    """The metadata of a file's architecture. `left` holds the keys that were not read yet; `finish` rejects them."""

    def __init__(self, file: GGUFFile, ignored: Collection[str]):
        self.file = file
        given = file.metadata.get("general.architecture")
        if not isinstance(given, str) or given not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise self.refuse(f"general.architecture {given!r:.80} is not supported (only {known})")
        self.architecture, prefix = given, f"{given}."
        mine = {key.removeprefix(prefix): x for key, x in file.metadata.items() if key.startswith(prefix)}
        self.left = {key: x for key, x in mine.items() if not {key, prefix + key} & set(ignored)}

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {why}")

    def take(self, key: str, allowed: Callable[[Any], bool], default: Any = None) -> Any:
        """A value, or the common value of an array (one per layer). The key must exist if `default` is None."""
        value = self.left.pop(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray | list) or value is None or not allowed(value):
            raise self.refuse(f"{self.architecture}.{key}={value!r:.80} is not supported")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return self.take(key, lambda value: type(value) is int and 0 < value < 2**31, default)

    def count(self, key: str) -> int:
        """A size that may be 0; a missing key means 0, too."""
        return self.take(key, lambda value: type(value) is int and 0 <= value < 2**31, 0)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number: the shortest decimal that rounds to the file's float32, such as 1e-05."""
        value = self.take(key, lambda value: type(value) in (int, float) and 0 < value < 1e30, default)
        return float(str(np.float32(value)))

    def expect(self, key: str, *allowed: Any) -> None:
        """Checks that the key is absent or one of `allowed`; other values are not supported."""
        self.take(key, lambda value: value in allowed, allowed[0])

    def finish(self) -> None:
        """Rejects keys that were not read, unless their value is 0 or false, which means that a feature is absent."""
        left = {key: x for key, x in self.left.items() if not isinstance(x, int | float) or x}
        if left:
            listed = ", ".join(f"{self.architecture}.{key}={value!r:.80}" for key, value in sorted(left.items()))
            raise self.refuse(
                f"settings that are not understood: {listed}. Where you know that they do not change what the model "
                f"computes: --ignore-config-keys {','.join(sorted(left))}"
            )


def _config(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise keys.refuse("there is no matrix token_embd.weight")
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[keys.architecture]],
        "model_type": keys.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype({tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(file.metadata),
    }
    if scaling := _rope_scaling(file, keys, config):
        config["rope_scaling"] = scaling
    if keys.architecture not in ("qwen2", "qwen2moe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if keys.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if keys.left.get("attention.sliding_window"):
            config |= {"architectures": ["MistralForCausalLM"], "sliding_window": keys.size("attention.sliding_window")}
    if experts := keys.count("expert_count"):
        config |= _experts(keys, experts)
    keys.expect("attention.value_length", head_dim)
    keys.expect("rope.dimension_count", head_dim)
    keys.expect("attention.causal", True)
    for harmless in ("vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned"):
        keys.left.pop(harmless, None)
    keys.finish()
    return config


def _experts(keys: _Keys, count: int) -> dict[str, Any]:
    """Settings of a mixture of experts. Those that are not in the file follow from llama.cpp's code."""
    top_k = keys.size("expert_used_count")
    if keys.architecture == "llama":
        return {"architectures": ["MixtralForCausalLM"], "num_local_experts": count, "num_experts_per_tok": top_k}
    made = {"num_experts": count, "num_experts_per_tok": top_k, "norm_topk_prob": keys.architecture == "qwen3moe"}
    made["moe_intermediate_size"] = keys.size("expert_feed_forward_length", _inputs_of(keys, "ffn_down_exps"))
    if keys.architecture == "qwen2moe":
        shared = keys.size("expert_shared_feed_forward_length", _inputs_of(keys, "ffn_down_shexp"))
        made["shared_expert_intermediate_size"] = shared
    return made


def _inputs_of(keys: _Keys, part: str) -> int:
    """The number of inputs of a tensor of the first layer, for older files that lack the key."""
    tensor = keys.file.tensors.get(f"blk.0.{part}.weight")
    if tensor is None or len(tensor.shape) < 2:
        raise keys.refuse(f"there is no tensor blk.0.{part}.weight")
    return tensor.shape[-1]


def _dtype(kinds: set[str]) -> str:
    """The model's original dtype; bfloat16, the most common one, where matrices are quantized."""
    return {frozenset(["F16"]): "float16", frozenset(["F32"]): "float32"}.get(frozenset(kinds), "bfloat16")


def _rope_scaling(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = keys.take("rope.scaling.type", lambda value: value in ("none", "linear", "yarn"), "linear")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    original = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    if _ROPE_FACTORS in file.tensors:
        if kind == "yarn" or factor != 1.0:
            raise keys.refuse(f"{_ROPE_FACTORS} beside rope.scaling.type {kind!r} by {factor} is not supported")
        return _llama3_scaling(file, keys, config["rope_theta"], config["head_dim"])
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    if kind == "yarn":
        betas = {
            key: keys.real(f"rope.scaling.yarn_{key}", at) for key, at in (("beta_fast", 32.0), ("beta_slow", 1.0))
        }
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
        attention = keys.real("rope.scaling.attn_factor", 1.0) * keys.real("rope.scaling.yarn_attn_factor", 1.0)
        return scaling if attention == 1.0 else scaling | {"attn_factor": attention}
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.expect("rope.scaling.yarn_attn_factor", 1.0)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None


def _llama3_scaling(file: GGUFFile, keys: _Keys, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Finds the parameters of Llama 3.1's rope scaling. The file has only the frequencies' divisors [head_dim / 2].

    In all known models the low and high frequency factors are 1 and 4, and the context length is a power of two.
    """
    stored = file.tensors[_ROPE_FACTORS]
    if stored.shape != (head_dim // 2,) or stored.type.name != "F32":
        raise keys.refuse(
            f"tensor {_ROPE_FACTORS!r} is {stored.type.name} {list(stored.shape)}, not F32 [{head_dim // 2}]"
        )
    divisors = _floats(stored, stored.name).read().astype(np.float64)
    factor = float(divisors.max())
    if (divisors == 1).all():
        return None
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # per position
    for original in (2**n for n in range(4, 24 if 1 < factor < 1e6 else 0)):
        smooth = np.clip((original * turns - 1.0) / (4.0 - 1.0), 0, 1)
        if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise keys.refuse(f"{_ROPE_FACTORS} holds no scaling of Llama 3.1's kind: {divisors.tolist()}")


def _tensor(stored: StoredTensor, head_dim: int, architecture: str) -> GGUFTensor:
    """A tensor under its Hugging Face name. `head_dim` is 0 unless queries and keys are stored in pairs of rows."""
    parsed = _NAME.fullmatch(stored.name)
    layer, part, kind = parsed.groups() if parsed else (None, "", "")
    name = (_LAYER | _OTHER_LAYER.get(architecture, {}) if layer else _TOP).get(part)
    if name is None:
        raise CheckpointError(f"{stored.path}: tensor {stored.name!r} is of a kind that is not supported")
    if stored.type.name not in FLOATS and len(stored.shape) != (3 if part in _STACKS else 2):
        raise CheckpointError(f"{stored.path}: tensor {stored.name!r} is quantized, but no matrix")
    pairs = head_dim if part in ("attn_q", "attn_k") else 0
    if pairs and (pairs % 2 or stored.shape[0] % pairs):
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name!r} of {list(stored.shape)} has no whole heads of an even size {pairs}"
        )
    return _floats(stored, f"model.layers.{layer}.{name}.{kind}" if layer else f"{name}.{kind}", pairs)


def _floats(stored: StoredTensor, name: str, head_dim: int = 0) -> GGUFTensor:
    dtype = FLOATS.get(stored.type.name, np.dtype(np.float32))
    return GGUFTensor(name, stored.path, dtype, stored.shape, stored.start, stored.type, head_dim)
