"""Small random draft heads in the published layouts, for tests."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
from safetensors.numpy import load_file, save_file


def eagle_shapes(config: Mapping[str, Any], *, target_hidden: int, own_embed: bool = False) -> dict[str, tuple]:
    """Tensor -> shape of an EAGLE-3 draft as SafeAILab and SpecForge publish it, beside its maps of vocabularies."""
    hidden = config["hidden_size"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    shapes = {
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (config["intermediate_size"], hidden),
        "midlayer.mlp.up_proj.weight": (config["intermediate_size"], hidden),
        "midlayer.mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * target_hidden),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    return shapes | ({"embed_tokens.weight": (config["vocab_size"], hidden)} if own_embed else {})


def eagle_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config of a draft for a target with this config, whose head has a third of the vocabulary."""
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "head_dim")
    common = {key: target[key] for key in kept if key in target}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"] // 3,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True},
    }
    return config | common | changes


def vocabulary(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The maps of a draft with a random part of the target's vocabulary, in ascending order."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(config["vocab_size"])[: config["draft_vocab_size"]])
    kept = np.zeros(config["vocab_size"], bool)
    kept[ids] = True
    return {"d2t": (ids - np.arange(len(ids))).astype(np.int64), "t2d": kept}


def write_eagle(
    folder: Path, target: Mapping[str, Any], *, own_embed: bool = False, speculators: bool = False, **changes: Any
) -> Path:
    """Writes a random draft for a target with this config. `speculators`: in the layout of vLLM's speculators."""
    config = eagle_config(target, **changes)
    shapes = eagle_shapes(config, target_hidden=target["hidden_size"], own_embed=own_embed)
    tensors = {name: random(name, shape) for name, shape in shapes.items()} | vocabulary(config)
    if speculators:
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
        config = as_speculators(config, target["hidden_size"], [0, 1, 2])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_speculators(config: Mapping[str, Any], target_hidden: int, layers: list[int]) -> dict[str, Any]:
    """A draft's config as vLLM's speculators write it."""
    own = ("draft_vocab_size", "architectures", "eagle_config", "norm_before_residual", "num_local_experts")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "transformer_layer_config": {key: value for key, value in config.items() if key not in own},
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "target_hidden_size": target_hidden,
        "eagle_aux_hidden_state_layer_ids": layers,
    }


def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that depend on the tensor's name alone: a norm's are about 1."""
    values = tiny_models.normal(tiny_models.stream("draft", name), shape)
    return (values / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.2 * values).astype(np.float32)


def add_mtp(source: Path, folder: Path) -> Path:
    """Copies a model's folder and adds a random head for multi-token prediction, as its family's files have it."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    kind = config["model_type"]
    made = _qwen_head if kind.startswith("qwen") else _nemotron_head if kind == "nemotron_h" else _deepseek_head
    added = made(config.get("text_config", config), tensors)
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})
    if not kind.startswith("qwen"):
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def _like(tensors: Mapping[str, np.ndarray], mark: str, new: str) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape of a layer `new` that is like the last one with a tensor `mark`."""
    last = max((name.removesuffix(mark) for name in tensors if name.endswith(mark)), key=lambda name: (len(name), name))
    return {new + name.removeprefix(last): x.shape for name, x in tensors.items() if name.startswith(last)}


def _qwen_head(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    hidden = config["hidden_size"]
    shapes = _like(tensors, "self_attn.q_proj.weight", "mtp.layers.0.") | {"mtp.fc.weight": (hidden, 2 * hidden)}
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    return {name: random(name, shape) for name, shape in shapes.items()}


def _nemotron_head(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    hidden = config["hidden_size"]
    shapes = _like(tensors, "mixer.q_proj.weight", "mtp.layers.0.") | _like(
        tensors, "mixer.gate.weight", "mtp.layers.1."
    )
    norms = ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm")
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in norms}
    shapes["mtp.layers.0.eh_proj.weight"] = (hidden, 2 * hidden)
    return {name: random(name, shape) for name, shape in shapes.items()}


def _deepseek_head(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A layer like the last one behind it, with copies of the embeddings and the output head."""
    count = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    last = f"model.layers.{count - 1}."
    new = f"model.layers.{count}."
    made = {name.replace(last, new): x for name, x in tensors.items() if name.startswith(last)}
    added = {name: random(name, x.shape).astype(x.dtype) for name, x in made.items()}
    shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
    added |= {f"{new}{name}.weight": random(name, shape) for name, shape in shapes.items()}
    added[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    added[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"]
    return added
