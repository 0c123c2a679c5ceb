"""Reads quantized checkpoints one code at a time, by the formats' documentation: slow, independent of our readers."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.checkpoints.safetensors import read_folder


def nibbles(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [rows, n] -> unsigned values [rows, n * 32 / bits] as float32, lowest bits first."""
    raw = np.ascontiguousarray(words).astype("<i4").view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return raw.astype(np.float32)
    return np.stack([raw & 15, raw >> 4], -1).reshape(len(words), -1).astype(np.float32)


def unpack(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    """The weight of a module, float32 [out, in]."""
    own = {name.removeprefix(module + "."): x for name, x in tensors.items() if name.startswith(module + ".")}
    if "qweight" in own:  # AWQ: [in, out / 8], neighbours in the order 0 2 4 6 1 3 5 7
        place = [0, 4, 1, 5, 2, 6, 3, 7]
        scale = own["scales"].astype(np.float32)

        def rows(words):
            values = nibbles(words, 4)
            return values.reshape(len(values), -1, 8)[:, :, place].reshape(values.shape)

        codes = rows(own["qweight"])
        zeros = rows(own["qzeros"])
        size = len(codes) // len(scale)
        return ((codes - np.repeat(zeros, size, 0)) * np.repeat(scale, size, 0)).T
    scale = own["weight_scale"].astype(np.float32)
    if "weight_packed" not in own:
        assert own["weight"].dtype == ml_dtypes.float8_e4m3fn
        return own["weight"].astype(np.float32) * scale
    out, inputs = own["weight_shape"].tolist()
    packed = own["weight_packed"]
    bits = 32 * packed.shape[1] // inputs
    codes = nibbles(packed, bits)[:, :inputs] - (1 << bits - 1)
    zeros = np.zeros_like(scale)
    if "weight_zero_point" in own:
        zeros = nibbles(own["weight_zero_point"].T, bits).T[:out] - (1 << bits - 1)
    size = inputs // scale.shape[1]
    return (codes - np.repeat(zeros, size, 1)) * np.repeat(scale, size, 1)


def unpacked(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder under its plain name, the quantized ones as float32."""
    tensors = {name: info.read() for name, info in read_folder(folder).items()}
    signs = (".weight_scale", ".qweight")
    modules = {name.removesuffix(sign) for name in tensors for sign in signs if name.endswith(sign)}
    plain = {name: x for name, x in tensors.items() if name.rsplit(".", 1)[0] not in modules or name.endswith(".bias")}
    return plain | {f"{module}.weight": unpack(tensors, module) for module in modules}


def write_plain(folder: Path, out: Path) -> Path:
    """Writes the same model without quantization."""
    from safetensors.numpy import save_file

    out.mkdir(parents=True)
    for path in (*folder.glob("token*"), *folder.glob("generation_config.json")):
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    kinds = {name: x.dtype if x.dtype.kind in "iu" else np.float32 for name, x in unpacked(folder).items()}
    tensors = {name: np.ascontiguousarray(x, kinds[name]) for name, x in unpacked(folder).items()}
    save_file(tensors, out / "model.safetensors")
    return out
