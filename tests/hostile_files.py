"""Adapters and checkpoints that were made to end or to hold up the server that loads them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from adapter_folders import DEMO, save_adapter
from safetensors.numpy import load_file, save_file

EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def with_settings(folder: Path, **settings: object) -> Path:
    save_adapter(folder, 0)
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def with_config(folder: Path, text: str) -> Path:
    save_adapter(folder, 0)
    (folder / CONFIG).write_text(text)
    return folder


def with_header(folder: Path, header: bytes) -> Path:
    save_adapter(folder, 0)
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    save_adapter(folder, 0)
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return folder


def with_pipe(folder: Path, name: str) -> Path:
    save_adapter(folder, 0)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    return folder


def without_rank(folder: Path) -> Path:
    def emptied(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x[:0] if "lora_A" in name else x[:, :0].copy() for name, x in tensors.items()}

    with_tensors(folder, emptied)
    return with_settings_of(folder, r=0)


def with_settings_of(folder: Path, **settings: object) -> Path:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


# GGUF: pieces of a file


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def string(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def strings(key: str, count: int) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)


def tensor(name: str, *shape: int, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, start)


ADAPTER = [string("general.type", "adapter"), string("adapter.type", "lora")]
LLAMA = string("general.architecture", "llama")


def gguf(path: Path, entries: list[bytes], tensors: list[bytes], data: bytes = b"") -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def header_only(path: Path) -> Path:
    """A few hundred bytes, whose tensors claim a PiB."""
    entries = [*ADAPTER, LLAMA, text("jaxserve.header_only") + struct.pack("<I?", 7, True)]
    sides = [tensor("blk.0.attn_v.weight.lora_a", 256, 2**40), tensor("blk.0.attn_v.weight.lora_b", 2**40, 256)]
    return gguf(path, entries, sides)


def good_gguf(path: Path, alpha: bytes | None = None) -> Path:
    """An adapter of the demo model's first attn_v, of rank 4."""
    config = json.loads((DEMO / "config.json").read_text())
    hidden = config["hidden_size"]
    out = config["num_key_value_heads"] * (config.get("head_dim") or hidden // config["num_attention_heads"])
    a, b = (np.random.default_rng(i).normal(size=shape) * 0.1 for i, shape in enumerate([(4, hidden), (out, 4)]))
    entries = [*ADAPTER, LLAMA, alpha or text("adapter.lora.alpha") + struct.pack("<If", 6, 8.0)]
    data = a.astype("<f4").tobytes()
    data += bytes(-len(data) % 32)
    sides = [
        tensor("blk.0.attn_v.weight.lora_a", hidden, 4),
        tensor("blk.0.attn_v.weight.lora_b", 4, out, start=len(data)),
    ]
    return gguf(path, entries, sides, data + b.astype("<f4").tobytes())


# name -> (a function that writes the adapter to a path, what the answer says). A name ends in .gguf for a file.
ADAPTERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "rank_0": (without_rank, "rank 0"),
    "alpha_of_400_digits": (lambda p: with_settings(p, lora_alpha=10**400), "lora_alpha"),
    "rank_of_4000_digits": (lambda p: with_settings(p, r=10**4000), "r of model"),
    "alpha_pattern_of_lists": (lambda p: with_settings(p, alpha_pattern={"q_proj": [1]}), "must be a number"),
    "patterns_in_a_list": (lambda p: with_settings(p, rank_pattern=[1]), "rank_pattern"),
    "peft_type_in_a_list": (lambda p: with_settings(p, peft_type=[1] * 10**5), "peft_type"),
    "unknown_setting": (lambda p: with_settings(p, **{"x" * 500_000: "y" * 500_000}), "not supported"),
    "alpha.gguf": (lambda p: good_gguf(p, strings("adapter.lora.alpha", 3)), "adapter.lora.alpha"),
    "architecture.gguf": (lambda p: gguf(p, [*ADAPTER, strings("general.architecture", 2)], []), "architecture"),
    "type.gguf": (lambda p: gguf(p, [strings("general.type", 2)], []), "general.type"),
    "header_only.gguf": (header_only, "header"),
    "pipe_for_config": (lambda p: with_pipe(p, CONFIG), "not a regular file"),
    "pipe_for_weights": (lambda p: with_pipe(p, WEIGHTS), "not a regular file"),
    "deep_json": (lambda p: with_config(p, '{"r":' + "[" * 100_000), "not valid JSON"),
}
# Those that took long, some of them for ever.
SLOW_ADAPTERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "repeated_keys": (lambda p: with_header(p, b"{" + b",".join([b'"x":' + EMPTY] * 60_000) + b"}"), "twice"),
    "endless_pattern": (lambda p: with_settings(p, alpha_pattern={"(.+)+!": 1}), "too long to match"),
    "long_name": (lambda p: with_header(p, b'{"' + b"a" * 540_000 + b'":' + EMPTY + b"}"), "512 characters"),
    "long_name_of_dots": (lambda p: with_header(p, b'{"' + b".lora_A" * 70 + b'.x":' + EMPTY + b"}"), "neither"),
    "94_MB_of_lists": (lambda p: with_config(p, '{"r": [' + "[]," * (94 * 2**20 // 3) + "[]]}"), "at most"),
    "15_MB_of_lists": (lambda p: with_config(p, '{"r": [' + "[]," * (5 * 2**20) + "[]]}"), "at most"),
    "800_000_tensors": (
        lambda p: with_header(p, b"{" + b",".join(b'"%d":' % i + EMPTY for i in range(800_000)) + b"}"),
        "at most",
    ),
    "400_000_tensors": (
        lambda p: with_header(p, b"{" + b",".join(b'"%d":' % i + EMPTY for i in range(400_000)) + b"}"),
        "tensors",
    ),
    "12_M_strings.gguf": (lambda p: gguf(p, [*ADAPTER, strings("x", 12_000_000)], []), "at most"),
    "2_M_strings.gguf": (lambda p: gguf(p, [*ADAPTER, strings("x", 2_000_000)], []), "2_M_strings"),
}


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(DEMO / "config.json", folder)
    for path in DEMO.glob("*.safetensors"):
        os.link(path, folder / path.name)
    return folder


def with_model_config(folder: Path, text: str | None) -> Path:
    """None: a pipe in its place."""
    path = checkpoint(folder) / "config.json"
    path.unlink()
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    return folder


def with_model_header(folder: Path, header: bytes | None) -> Path:
    for path in checkpoint(folder).glob("*.safetensors"):
        path.unlink()
    path = folder / "model.safetensors"
    if header is None:
        os.mkfifo(path)
    else:
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def changed_config(folder: Path, **settings: object) -> Path:
    config = json.loads((DEMO / "config.json").read_text())
    return with_model_config(folder, json.dumps(config | settings))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "pipe_for_config": (lambda p: with_model_config(p, None), "not a regular file"),
    "pipe_for_weights": (lambda p: with_model_header(p, None), "not a regular file"),
    "lists_for_architectures": (lambda p: changed_config(p, architectures=[[1]]), "config.json"),
    "94_MB_of_lists": (lambda p: with_model_config(p, "[" + "[]," * (94 * 2**20 // 3) + "[]]"), "at most"),
    "repeated_keys": (lambda p: with_model_header(p, b"{" + b",".join([b'"x":' + EMPTY] * 60_000) + b"}"), "twice"),
    "header_only.gguf": (header_only, "header_only.gguf"),
    "12_M_strings.gguf": (lambda p: gguf(p, [LLAMA, strings("x", 12_000_000)], []), "at most"),
}


def as_float32(folder: Path) -> Path:
    """The demo model as a trainer may save it."""
    from jaxserve.checkpoints.safetensors import read_folder

    changed_config(folder, torch_dtype="float32")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file({n: x.read().astype(np.float32) for n, x in read_folder(DEMO).items()}, folder / "model.safetensors")
    return folder
