"""Measures loading a checkpoint of about 1 GB from the page cache to the devices, beside reading the same file.

    python benchmarks/loading.py [--kinds int4 awq ...] [--layers 48] [--repeat 5] [--json FILE]

Makes checkpoints of one Llama shape in a temporary folder: float32, bfloat16, fp8, and int4 as it is in
compressed-tensors, GPTQ, AWQ and GGUF. Each is read once first; then reading the whole file into fresh memory
and loading it are measured in turns.
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

from jaxserve.devices.mesh import make_mesh
from jaxserve.models.load import load_params, make_decoder, read_model

HIDDEN = 2048
WIDTH = 5632
LAYERS = 6
HEADS = 16
KV_HEADS = 8
VOCAB = 8192
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
KINDS = ("float32", "bfloat16", "fp8", "int4", "gptq", "awq", "gguf-q4_0", "gguf-q4_k", "gguf-q8_0")
GROUP = 128
GROUPS = {"bits": 4, "group_size": GROUP}
SETTINGS = {
    "fp8": {"quant_method": "fp8"},
    "gptq": {"quant_method": "gptq", "sym": True, "desc_act": False, **GROUPS},
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True, **GROUPS},
}
SETTINGS["int4"] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
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


def parts(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The tensors of a quantized weight [out, in], by the ends of their names; values are random."""
    out, inputs = shape

    def words(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**31, shape, np.int32)

    def scales(*shape: int) -> np.ndarray:
        return rng.uniform(0.01, 0.02, shape).astype(np.float16)

    if kind == "fp8":
        codes = rng.integers(0, 120, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales(out, 1).astype(np.float32)}
    if kind == "int4":
        return {
            "weight_packed": words(out, inputs // 8),
            "weight_scale": scales(out, inputs // GROUP),
            "weight_shape": np.array(shape, np.int64),
        }
    columns = (out, out // 8) if kind == "gptq" else (out // 8, out // 8)
    groups = inputs // GROUP
    rows = inputs // 8 if kind == "gptq" else inputs
    return {"qweight": words(rows, columns[0]), "qzeros": words(groups, columns[1]), "scales": scales(groups, out)}


def make(folder: Path, kind: str, layers: int) -> Path:
    """Writes a checkpoint and returns its file, which for GGUF is also the model's path."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(np.float32) if kind == "float32" else np.dtype(ml_dtypes.bfloat16)
    folder.mkdir()
    if kind.startswith("gguf"):
        return make_gguf(folder / "model.gguf", kind.removeprefix("gguf-").upper(), layers, rng)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes(layers).items():
        if kind in SETTINGS and "_proj" in name:
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": values for part, values in parts(kind, shape, rng).items()}
        else:
            tensors[name] = rng.random(shape, np.float32).astype(dtype)
    config: dict[str, Any] = CONFIG | {"num_hidden_layers": layers, "torch_dtype": dtype.name}
    quantized = {"quantization_config": SETTINGS[kind]} if kind in SETTINGS else {}
    (folder / "config.json").write_text(json.dumps(config | quantized))
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def make_gguf(path: Path, kind: str, layers: int, rng: np.random.Generator) -> Path:
    """Writes random blocks of a GGUF type, without tokenizer."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    size, nbytes = gguf.GGML_QUANT_SIZES[number]
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, shape in shapes(layers).items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if "_proj" in name:
            blocks = rng.integers(0, 60, (shape[0], shape[1] // size * nbytes), np.uint8)
            writer.add_tensor(theirs, blocks, raw_dtype=number)
        else:
            writer.add_tensor(
                theirs, rng.random(shape, np.float32).astype(np.float16 if len(shape) > 1 else np.float32)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seconds(call: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measure(kind: str, repeat: int, layers: int) -> dict[str, Any]:
    """Medians of MB/s of the file, read and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / kind, kind, layers or LAYERS * {"float32": 1, "bfloat16": 2, "fp8": 4}.get(kind, 8))
        model = path if path.suffix == ".gguf" else path.parent
        mesh = make_mesh(1)
        dtype = np.float32 if kind == "float32" else ml_dtypes.bfloat16
        decoder = make_decoder(read_model(model), mesh, dtype)
        reads = []
        loads = []
        for turn in range(repeat + 1):
            read = seconds(path.read_bytes)
            load = seconds(lambda: load_params(decoder, model, mesh, progress=False))
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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of checkpoint")
    parser.add_argument("--repeat", type=int, default=5, help="measured turns")
    parser.add_argument("--layers", type=int, default=0, help="of each checkpoint; 0: as many as make about 1 GB")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    results = []
    print(f"{'checkpoint':12} {'MB':>6} {'read MB/s':>10} {'load MB/s':>10} {'ratio':>6}")
    for kind in args.kinds:
        figures = measure(kind, args.repeat, args.layers)
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
