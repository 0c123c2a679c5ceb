"""The model as a GGUF file, in its own dtype. Runs in any Python that has gguf and safetensors:

python write_gguf.py FOLDER FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
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
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}  # where they are not called as in config.json


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file, from its name in Hugging Face's."""
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, number, part = name.split(".", 2)
        return f"blk.{number}.{NAMES[part]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[name]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, in] so that rope turns neighbouring pairs, instead of one half against the other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    neighbours = config["model_type"] == "llama"  # which rope turns in pairs
    floats = {"float32": gguf.LlamaFileType.ALL_F32, "float16": gguf.LlamaFileType.MOSTLY_F16}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, use_temp_file="num_experts" in config)
    writer.add_name("compare")
    writer.add_file_type(floats[config["torch_dtype"]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    add_tokenizer(writer, folder, config)
    for file in sorted(folder.glob("model*.safetensors")):
        weights = load_file(file)
        for name in list(weights):
            if ".experts." in name:
                continue
            weight = weights.pop(name)
            if "q_proj" in name and neighbours:
                weight = interleave(weight, config["num_attention_heads"])
            elif "k_proj" in name and neighbours:
                weight = interleave(weight, config["num_key_value_heads"])
            if weight.ndim == 1 or name.endswith("mlp.gate.weight"):  # kept in float32, as by llama.cpp's converter
                weight = weight.astype(np.float32)
            writer.add_tensor(gguf_name(name), weight)
        add_experts(writer, weights, config.get("num_experts", 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_experts(writer: gguf.GGUFWriter, weights: dict[str, np.ndarray], count: int) -> None:
    """Experts' weights by Hugging Face's names, each kind of a layer as one stack [experts, out, in]."""
    for name in [name for name in weights if ".experts.0." in name]:
        _, _, number, *_, kind, _ = name.split(".")
        stack = np.stack([weights[name.replace(".experts.0.", f".experts.{e}.")] for e in range(count)])
        writer.add_tensor(f"blk.{number}.{NAMES[f'mlp.{kind}']}_exps.weight", stack)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    types = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ 0"])  # an empty list cannot be written; this one makes no token
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
