"""Checkpoints in published quantized formats, made by NumPy: a matrix's tensors, and its values in float64.

Each writer takes a matrix [out, in] and returns (tensors by their suffix, values), where the values follow the format's
published formula and are computed from the tensors, without this project's readers.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 32  # inputs that share a scale of AWQ and GPTQ
SMALL = 8  # the same where models are too small for more
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def pack_words(codes: np.ndarray) -> np.ndarray:
    """Codes of 0 to 15 [rows, columns] -> int32 [rows / 8, columns], the first of eight in the lowest bits."""
    eight = codes.astype(np.uint32).reshape(-1, 8, codes.shape[1])
    return sum(eight[:, i] << np.uint32(4 * i) for i in range(8)).view(np.int32)


def fp8_blocks(weight: np.ndarray, size: int = 128) -> tuple[Tensors, np.ndarray]:
    """DeepSeek-V3's: value = code * weight_scale_inv of its block of 128 x 128; the last blocks may be smaller."""
    out, inputs = weight.shape
    rows = np.arange(out) // size
    columns = np.arange(inputs) // size
    scale = np.zeros((rows[-1] + 1, columns[-1] + 1))
    np.maximum.at(scale, (rows[:, None], columns[None]), np.abs(weight))
    scale = (scale / 448).astype(np.float32)
    wide = scale.astype(np.float64)[rows][:, columns]
    codes = (weight / wide).astype(E4M3)
    return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float64) * wide


def _asymmetric(weight: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes and zero points of 4 bits, float16 scales, and values = (code - zero) * scale; [out, groups, size | 1]."""
    groups = weight.reshape(len(weight), -1, size)
    low = np.minimum(groups.min(-1, keepdims=True), 0)
    high = np.maximum(groups.max(-1, keepdims=True), 0)
    scale = np.maximum((high - low) / 15, 1e-6).astype(np.float16)
    wide = scale.astype(np.float64)
    zero = np.clip(np.round(-low / wide), 1, 15)
    codes = np.clip(np.round(groups / wide) + zero, 0, 15)
    return codes.reshape(weight.shape), zero[..., 0], scale[..., 0], ((codes - zero) * wide).reshape(weight.shape)


def gptq(weight: np.ndarray, size: int = GROUP) -> tuple[Tensors, np.ndarray]:
    """Eight codes of neighbouring inputs in a word; zero points stored less one."""
    codes, zero, scale, values = _asymmetric(weight, size)
    tensors = {
        "qweight": pack_words(codes.T), "qzeros": pack_words(zero - 1).T.copy(), "scales": scale.T.copy(),
        "g_idx": np.arange(weight.shape[1], dtype=np.int32) // size,
    }  # fmt: skip
    return tensors, values


def awq(weight: np.ndarray, size: int = GROUP) -> tuple[Tensors, np.ndarray]:
    """Eight codes of neighbouring outputs in a word, in the order 0 2 4 6 1 3 5 7."""
    codes, zero, scale, values = _asymmetric(weight, size)
    order = np.arange(len(weight)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    packed = {"qweight": pack_words(codes[order]).T.copy(), "qzeros": pack_words(zero[order]).T.copy()}
    return packed | {"scales": scale.T.copy()}, values


def int4_compressed(weight: np.ndarray, size: int = SMALL) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors' layout of symmetric int4, in groups: code + 8, eight of neighbouring inputs in a word."""
    groups = weight.reshape(len(weight), -1, size)
    scale = (np.abs(groups).max(-1) / 7.5).astype(np.float32)
    wide = scale.astype(np.float64)[..., None]
    codes = np.clip(np.round(groups / wide), -8, 7)
    packed = pack_words((codes.reshape(weight.shape) + 8).T).T.copy()
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_shape": np.array(weight.shape, np.int64)}
    return tensors, (codes * wide).reshape(weight.shape)


def _float4(scaled: np.ndarray) -> np.ndarray:
    """The nearest E2M1 codes."""
    return np.abs(scaled[..., None] - FLOAT4).argmin(-1).astype(np.uint8)


def _bytes(codes: np.ndarray) -> np.ndarray:
    """Two codes in a byte, the first in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, the groups' scales and the weight's scale, which multiplies."""
    groups = weight.reshape(len(weight), -1, 16)
    largest = np.abs(groups).max(-1)
    whole = np.float32(largest.max() / (6 * 448))
    scale = np.maximum(largest / 6 / whole, 2**-6).astype(E4M3)
    codes = _float4(groups / (scale.astype(np.float64)[..., None] * whole)).reshape(weight.shape)
    return codes, scale, whole


def nvfp4_modelopt(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    codes, scale, whole = _nvfp4(weight)
    values = FLOAT4[codes] * np.repeat(scale.astype(np.float64), 16, 1) * np.float64(whole)
    return {"weight": _bytes(codes), "weight_scale": scale, "weight_scale_2": np.array(whole)}, values


def nvfp4_compressed(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """The global scale divides."""
    codes, scale, whole = _nvfp4(weight)
    divisor = np.float32(1) / whole
    values = FLOAT4[codes] * np.repeat(scale.astype(np.float64), 16, 1) / np.float64(divisor)
    tensors = {"weight_packed": _bytes(codes), "weight_scale": scale, "weight_global_scale": np.array([divisor])}
    return tensors, values


def mxfp4(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors' layout: exponents of two as bytes, 127 for one."""
    groups = weight.reshape(len(weight), -1, 32)
    exponent = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), 1e-20) / 6))
    codes = _float4(groups / np.exp2(exponent)[..., None]).reshape(weight.shape)
    values = FLOAT4[codes] * np.repeat(np.exp2(exponent), 32, 1)
    return {"weight_packed": _bytes(codes), "weight_scale": (exponent + 127).astype(np.uint8)}, values


def _compressed(form: str, size: int) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if size == 16 else "group", "group_size": size}
    scheme |= {"symmetric": True, "dynamic": False}
    group = {"weights": scheme, "targets": ["Linear"], "input_activations": None, "format": form}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def _awq(size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}


def _gptq(size: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": False}


def _int4(size: int) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
    group = {"weights": scheme, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


# form -> (writer, config.json's quantization_config)
WRITERS: dict[str, tuple[Callable[[np.ndarray], tuple[Tensors, np.ndarray]], dict[str, Any]]] = {
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
                                "fmt": "e4m3"}),
    "gptq": (gptq, _gptq(GROUP)),
    "gptq-small": (partial(gptq, size=SMALL), _gptq(SMALL)),
    "awq": (awq, _awq(GROUP)),
    "awq-small": (partial(awq, size=SMALL), _awq(SMALL)),
    "int4-compressed": (int4_compressed, _int4(SMALL)),
    "mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", 32)),
    "nvfp4-modelopt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "nvfp4-compressed": (nvfp4_compressed, _compressed("nvfp4-pack-quantized", 16)),
}  # fmt: skip


def rounded(weight: np.ndarray, scheme: str) -> np.ndarray:
    """The values that `--quantization SCHEME` keeps: the nearest of a grid over an output's inputs, or over a group of
    int4. Scales are float32."""
    low, high = {"int8": (-128, 127), "int4": (-8, 7), "fp8": (-448, 448)}[scheme]
    size = next(s for s in (128, 64, 32) if weight.shape[1] % s == 0) if scheme == "int4" else weight.shape[1]
    groups = weight.astype(np.float32).reshape(len(weight), -1, size)
    top = np.abs(groups).max(-1, keepdims=True)
    scale = (top + top) / np.float32(high - low)
    codes = np.clip(groups / scale, low, high).astype(E4M3) if scheme == "fp8" else None
    codes = np.clip(np.round(groups / scale), low, high) if codes is None else codes
    return (codes.astype(np.float64) * scale).reshape(weight.shape)


def is_matrix(name: str) -> bool:
    """Whether published checkpoints quantize a tensor: projections of attention, MLPs and experts, but no router."""
    return "_proj" in name and name.endswith(".weight")


def write(
    form: str,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    quantized: Path,
    plain: Path,
    chosen: Callable[[str], bool] = is_matrix,
    **further: Any,
) -> None:
    """Writes a model in a form, and its values in float32, to two new folders. `chosen` tells which tensors are
    quantized; `further` are settings of quantization_config."""
    writer, settings = WRITERS[form]
    settings = settings | further
    stored = {}
    values = {}
    for name, tensor in tensors:
        if not chosen(name):
            stored[name] = values[name] = np.ascontiguousarray(tensor, np.float32)
            continue
        parts, exact = writer(tensor.astype(np.float64))
        stem = name.removesuffix("weight")
        stored |= {stem + suffix: np.ascontiguousarray(part) for suffix, part in parts.items()}
        values[name] = np.ascontiguousarray(exact, np.float32)
    write_folder(quantized, config | {"quantization_config": settings}, stored)
    write_folder(plain, config, values)


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A model folder, whose floats compute in float32."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "dtype": "float32"}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
