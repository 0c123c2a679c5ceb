"""Random LoRA adapters of models like Llama, in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

DEMO = Path(__file__).parent.parent / "checkpoints" / "demo"


MODULES = ("q_proj", "v_proj", "down_proj")


def save_adapter(
    folder: Path,
    seed: int,
    *,
    model: Path = DEMO,
    rank: int = 4,
    modules: Sequence[str] = MODULES,
    size: float = 0.2,
) -> Path:
    """Writes a random adapter of a model; returns its folder. `size`: standard deviation of B A."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head = config.get("head_dim") or hidden // heads
    heads = heads * head
    kv = config["num_key_value_heads"] * head
    shapes = {
        "q_proj": ("self_attn", hidden, heads),
        "k_proj": ("self_attn", hidden, kv),
        "v_proj": ("self_attn", hidden, kv),
        "o_proj": ("self_attn", heads, hidden),
        "gate_proj": ("mlp", hidden, inner),
        "up_proj": ("mlp", hidden, inner),
        "down_proj": ("mlp", inner, hidden),
    }
    rng = np.random.default_rng(seed)
    tensors = {}
    wanted = [
        (f"model.layers.{layer}.{shapes[name][0]}.{name}", *shapes[name][1:])
        for layer in range(config["num_hidden_layers"])
        for name in modules
        if name in shapes
    ]
    if "lm_head" in modules:
        wanted.append(("lm_head", hidden, config["vocab_size"]))
    for module, inputs, outputs in wanted:
        a = rng.normal(size=(rank, inputs))
        b = rng.normal(size=(outputs, rank))
        tensors[f"base_model.model.{module}.lora_A.weight"] = (a / np.sqrt(rank)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = (b * size).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
