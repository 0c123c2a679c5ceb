"""Model folders and tokenizers as GGUF files, written by the format's own package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.checkpoints.safetensors import read_folder

Kind = gguf.GGMLQuantizationType
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{role}_proj": f"ffn_{role}_shexp" for role in ("gate", "up", "down")},
}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file, from its name in Hugging Face's."""
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, number, part = stem.split(".", 3)
    if ".experts." in part:
        return f"blk.{number}.ffn_{EXPERTS[part.rsplit('.', 1)[1]]}_exps.{kind}"
    return f"blk.{number}.{PARTS[part]}.{kind}"


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, ...] with the halves of each head interleaved, as llama.cpp stores Llama's q and k."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    order = in_pairs(np.arange(len(rows)), heads)
    restored = np.empty_like(rows)
    restored[order] = rows
    return restored


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes [rows, bytes of a row], except that float16 scales are ordinary numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng([seed, kind])
    blocks = rng.integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    values = rng.normal(size=(len(blocks), 2)).astype(np.float16).view(np.uint8)
    name = kind.name
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        blocks[:, :4] = values
    elif name == "Q2_K":
        blocks[:, -4:] = values
    elif name in ("Q3_K", "Q6_K", "TQ1_0", "TQ2_0"):
        blocks[:, -2:] = values[:, :2]
    elif name == "IQ1_M":
        blocks[:, -7::2] &= 0x0F  # the scale is spread over the high halves; this makes it small
    elif name == "MXFP4":
        blocks[:, 0] %= 200  # exponents of two, subnormal scales included
        blocks[:3, 0] = 0, 1, 2
    else:
        blocks[:, :2] = values[:, :2]
    return blocks.reshape(rows, -1)


def write_gguf(folder: Path, path: Path, kind: Callable[[str], Kind] = lambda name: Kind.F32, **options: Any) -> Path:
    """Writes a model folder as a GGUF file; `kind` chooses a matrix's type by its Hugging Face name.

    Types that the package cannot quantize to get random blocks. `options` are GGUFWriter's.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"].replace("mistral", "llama").replace("mixtral", "llama").replace("_moe", "moe")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, family, **options)
    add_shape(writer, config, heads, kv_heads, head_dim)
    add_rope(writer, config, head_dim)
    if (folder / "tokenizer.json").exists():
        add_tokenizer(writer, folder)
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in read_folder(folder).items():
        values = tensor.read().astype(np.float32)
        stored = gguf_name(name)
        if "_exps" in stored:
            stacks.setdefault(stored, []).append(values)
            if len(stacks[stored]) < (config.get("num_experts") or config["num_local_experts"]):
                continue
            values = np.stack(stacks[stored])
        if family == "llama" and "_proj" in name and stored.split(".")[2] in ("attn_q", "attn_k"):
            values = in_pairs(values, heads if "attn_q" in stored else kv_heads)
        number = kind(name) if values.ndim > 1 else Kind.F32
        writer.add_tensor(stored, stored_as(values, number), raw_dtype=number)
    return write(writer, path)


def stored_as(values: np.ndarray, kind: Kind) -> np.ndarray:
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        rows = values.reshape(-1, values.shape[-1])
        return random_blocks(kind, *rows.shape).reshape(*values.shape[:-1], -1)


def write(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_shape(writer: gguf.GGUFWriter, config: dict, heads: int, kv_heads: int, head_dim: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("sliding_window") and config["model_type"] == "mistral":
        writer.add_sliding_window(config["sliding_window"])


def add_rope(writer: gguf.GGUFWriter, config: dict, head_dim: int) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or scaling.get("rope_theta")
    if theta:
        writer.add_rope_freq_base(theta)
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        divisors = [llama3_divisor(scaling, theta ** (-i / head_dim)) for i in range(0, head_dim, 2)]
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def llama3_divisor(scaling: dict, frequency: float) -> float:
    """The divisor of a frequency, in radians per position, by Llama 3.1's rule."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    if turns > high:
        return 1.0
    if turns < low:
        return scaling["factor"]
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Adds the byte-level BPE tokenizer of tokenizer.json and tokenizer_config.json."""
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    digits = any(step["type"] == "Digits" for step in state["pre_tokenizer"].get("pretokenizers", []))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in state["added_tokens"]}
    ids = state["model"]["vocab"] | {token["content"]: i for i, token in added.items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    normal = gguf.TokenType.NORMAL
    control = gguf.TokenType.CONTROL
    defined = gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if digits else "gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [(control if added[i]["special"] else defined) if i in added else normal for i in sorted(ids.values())]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[config["eos_token"]])
    if config.get("bos_token"):
        writer.add_bos_token_id(ids[config["bos_token"]])
        writer.add_add_bos_token(config.get("add_bos_token", False))
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.exists() else config["chat_template"])
