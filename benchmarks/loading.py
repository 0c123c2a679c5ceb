"""How fast a checkpoint of about 1 GB comes from the page cache onto the devices, beside reading the same file.

    python benchmarks/loading.py [--repeat 5] [--json FILE]

Makes checkpoints of one Llama shape in a temporary folder: float32, bfloat16, and GPTQ-like int4 as compressed-tensors.
Each is read once before anything is measured; then reading the whole file into fresh memory and loading it take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.mesh import make_mesh
from jaxserve.models.load import load_params, make_decoder, read_model

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 5632, 6, 16, 8, 8192
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
    "ignore": ["lm_head"],
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes of the weights."""
    kv = HIDDEN // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDTH),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            found[f"{layer}.{name}.weight"] = shape
    return found


def make(folder: Path, kind: str) -> Path:
    """Writes a checkpoint of about 1 GB and returns its file."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(np.float32) if kind == "float32" else np.dtype(ml_dtypes.bfloat16)
    layers = {"float32": LAYERS, "bfloat16": 2 * LAYERS, "int4": 8 * LAYERS}[kind]
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes(layers).items():
        if kind == "int4" and "_proj" in name:
            stem, (out, inputs) = name.removesuffix(".weight"), shape
            tensors[f"{stem}.weight_packed"] = rng.integers(0, 2**31, (out, inputs // 8), np.int32)
            tensors[f"{stem}.weight_scale"] = rng.uniform(0.01, 0.02, (out, inputs // 128)).astype(dtype)
            tensors[f"{stem}.weight_shape"] = np.array(shape, np.int64)
        else:
            tensors[name] = rng.random(shape, np.float32).astype(dtype)
    folder.mkdir()
    config: dict[str, Any] = CONFIG | {"num_hidden_layers": layers, "torch_dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": INT4} if kind == "int4" else {})))
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def seconds(call: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measure(kind: str, repeat: int) -> dict[str, Any]:
    """Medians of MB/s of the file, read and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / kind, kind)
        mesh = make_mesh(1)
        dtype = np.float32 if kind == "float32" else ml_dtypes.bfloat16
        decoder = make_decoder(read_model(path.parent), mesh, dtype)
        reads, loads = [], []
        for turn in range(repeat + 1):
            read = seconds(path.read_bytes)
            load = seconds(lambda: load_params(decoder, path.parent, mesh, progress=False))
            if turn:
                reads.append(read)
                loads.append(load)
        megabytes = path.stat().st_size / 1e6
    read_speed, load_speed = (megabytes / statistics.median(times) for times in (reads, loads))
    return {
        "checkpoint": kind,
        "megabytes": round(megabytes),
        "read_mb_per_s": round(read_speed),
        "load_mb_per_s": round(load_speed),
        "ratio": round(load_speed / read_speed, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int4"], help="of checkpoint")
    parser.add_argument("--repeat", type=int, default=5, help="measured turns")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    results = []
    print(f"{'checkpoint':12} {'MB':>6} {'read MB/s':>10} {'load MB/s':>10} {'ratio':>6}")
    for kind in args.kinds:
        figures = measure(kind, args.repeat)
        results.append(figures)
        print(
            f"{kind:12} {figures['megabytes']:6} {figures['read_mb_per_s']:10} {figures['load_mb_per_s']:10} "
            f"{figures['ratio']:6.2f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
