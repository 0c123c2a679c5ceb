"""The model that all engines are given: random weights of one shape, with a tokenizer that hides nothing.

Every token's text is a space and the token's number, so that the tokens of a greedy answer can be read off its text,
whichever server sent it. Token 0 stands for everything special; its embedding is zero, so that with tied embeddings
its logit is zero too, and no greedy answer ever holds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _shape(**changes: Any) -> dict[str, Any]:
    return SHAPE | changes


# The shapes of published models, with tied embeddings; by the names that --shape takes.
SHAPES: dict[str, dict[str, Any]] = {
    "100M": SHAPE,
    "SmolLM2-360M": _shape(
        hidden_size=960, num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5, intermediate_size=2560,
        vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0,
    ),
    "Qwen3-0.6B": _shape(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072, vocab_size=151936,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0,
    ),
    "Llama-3.2-1B": _shape(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
    ),
    # Qwen3-30B-A3B with 4 of its 48 layers, and a vocabulary in the same proportion.
    "Qwen3-30B-A3B-4L": _shape(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144, vocab_size=12672,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        torch_dtype="float16",
    ),
}  # fmt: skip


def parameters(config: Mapping[str, Any]) -> int:
    """How many numbers the model has."""
    return sum(int(np.prod(shape)) for _, shape in _tensors(config))


def make_model(folder: Path, config: Mapping[str, Any] = SHAPE) -> Path:
    """Writes the model into `folder`, unless it is there already; returns the folder.

    `config` is a config.json of a Llama, Qwen3 or Qwen3-MoE with tied embeddings, in float32 or float16. The tensors of
    each layer of experts are in a file of their own, so that no more than one such layer is in memory.
    """
    text = json.dumps(dict(config), indent=1)
    path = folder / "config.json"
    if path.is_file() and path.read_text() == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if config.get("num_experts"):
        _write_shards(folder, config)
    else:
        save_file(dict(_weights(config)), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    path.write_text(text)  # last: it says that the rest is whole
    return folder


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes [out, in], as in Hugging Face's files."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        if experts := config.get("num_experts"):
            size = config["moe_intermediate_size"]
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
            for e in range(experts):
                yield f"{layer}.mlp.experts.{e}.gate_proj.weight", (size, hidden)
                yield f"{layer}.mlp.experts.{e}.up_proj.weight", (size, hidden)
                yield f"{layer}.mlp.experts.{e}.down_proj.weight", (hidden, size)
            continue
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)


def _weights(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Norms of ones, the rest normal; layers twice as strong as when training starts, so that they are heard."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(config["torch_dtype"])
    for name, shape in _tensors(config):
        if len(shape) == 1:
            yield name, np.ones(shape, dtype)
            continue
        scale = 0.02 if "embed" in name else 2 / np.sqrt(shape[1])
        weight = np.float32(scale) * rng.standard_normal(shape, np.float32)
        if "embed" in name:
            weight[0] = 0
        yield name, weight.astype(dtype, copy=False)


def _write_shards(folder: Path, config: Mapping[str, Any]) -> None:
    """A file for what no layer owns and one for each layer, with the index that names each tensor's file."""

    def file_of(item: tuple[str, np.ndarray]) -> str:
        parts = item[0].split(".")
        return f"model-{int(parts[2]) + 1 if parts[1] == 'layers' else 0:05d}.safetensors"

    places = {}
    for file, tensors in groupby(_weights(config), file_of):
        some = dict(tensors)
        save_file(some, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(some, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def token_texts(vocab_size: int) -> list[str]:
    """Each token as a byte-level BPE writes it; `Ġ` is a space."""
    width = len(str(vocab_size - 1))
    return ["<special>", *(f"Ġ{i:0{width}}" for i in range(1, vocab_size))]


def tokens_of(text: str) -> list[int]:
    """The tokens that an answer's text stands for."""
    return [int(word) for word in text.split()]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts = token_texts(vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[], unk_token=texts[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(texts[0], special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts[0],
        "eos_token": texts[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
