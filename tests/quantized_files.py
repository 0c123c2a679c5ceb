"""Small quantized checkpoints for tests: the golden files, and EXL2 weights packed here."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from quantized_forms import pack_words
from safetensors import safe_open

from jaxserve.checkpoints.formats import find_format
from jaxserve.checkpoints.int4 import FLOAT4
from jaxserve.checkpoints.quantized import INT4
from jaxserve.checkpoints.safetensors import DTYPES, read_header

GOLDENS = Path(__file__).parent / "goldens" / "formats"
INT8 = np.dtype(np.int8)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# case: codes, scales that share a block, zero points, act-order, the reader's name
CASES = {
    "awq": (INT4, (1, 32), True, False, "awq"),
    "gptq_4": (INT4, (1, 32), False, False, "gptq"),
    "gptq_4_act_order": (INT4, (1, 32), True, True, "gptq"),
    "gptq_4_asymmetric": (INT4, (1, 32), True, False, "gptq"),
    "gptq_4_v2": (INT4, (1, 32), True, False, "gptq"),
    "gptq_8": (INT8, (1, 64), False, False, "gptq"),
    "gptq_8_act_order": (INT8, (1, 32), True, True, "gptq"),
    "gptq_3": (INT4, (1, 32), True, False, "gptq"),
    "gptq_2": (INT4, (1, 32), True, False, "gptq"),
    "ct_w4": (INT4, (1, 32), False, False, "compressed-tensors"),
    "ct_w4_asymmetric": (INT4, (1, 32), True, False, "compressed-tensors"),
    "ct_w4_channel": (INT4, (1, 100), True, False, "compressed-tensors"),
    "ct_w8": (INT8, (1, 128), False, False, "compressed-tensors"),
    "ct_int8": (INT8, (1, 128), False, False, "compressed-tensors"),
    "ct_int8_asymmetric": (INT8, (1, 64), True, False, "compressed-tensors"),
    "ct_int8_tensor": (INT8, (16, 128), True, False, "compressed-tensors"),
    "ct_fp8": (FP8, (1, 128), False, False, "compressed-tensors"),
    "ct_fp8_tensor": (FP8, (16, 128), False, False, "compressed-tensors"),
    "ct_fp8_block": (FP8, (8, 64), False, False, "compressed-tensors"),
    "ct_mxfp4": (FLOAT4, (1, 32), False, False, "compressed-tensors"),
    "fp8_block": (FP8, (8, 32), False, False, "fp8"),
    "fp8_block_bfloat16": (FP8, (8, 32), False, False, "fp8"),
    "fp8_tensor": (FP8, (32, 64), False, False, "fp8"),
    "fp8_fbgemm": (FP8, (1, 64), False, False, "fp8"),
    "bnb_int8": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_nf4": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_nf4_nested": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_fp4": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_fp4_nested": (INT8, (1, 64), False, False, "bitsandbytes"),
    "mxfp4": (FLOAT4, (1, 32), False, False, "mxfp4"),
}
WEIGHT = "m.weight"


def load(case):
    """(config, shape, tensors of the checkpoint as arrays, rows, expected) of a golden file."""
    path = GOLDENS / f"{case}.safetensors"
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = {name: info.read() for name, info in read_header(path).items()}
    rows = arrays.pop("rows")
    expected = arrays.pop("expected")
    return json.loads(metadata["config"]), tuple(json.loads(metadata["shape"])), arrays, rows, expected


def save(path, arrays):
    """The tensors of a new safetensors file with these arrays."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header = {}
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(a.tobytes() for a in arrays.values()))
    return read_header(path)


def read(path, config, arrays, shape, weight=WEIGHT):
    reader = find_format(config, save(path, arrays))
    assert set(reader.parts(weight)) <= arrays.keys()
    return reader.read(weight, shape)


def as_bytes(state):
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def gptq(weight: np.ndarray, group_of: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A weight [out, in] rounded to GPTQ's tensors, of which input i belongs to group_of[i]; and their values."""
    groups = group_of.max() + 1
    low, high = (np.stack([f(weight[:, group_of == g], axis=1) for g in range(groups)]) for f in (np.min, np.max))
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.clip(np.round(-low / scale), 1, 15)  # [groups, out]; stored less one
    codes = np.clip(np.round(weight.T / scale[group_of] + zero[group_of]), 0, 15)
    values = ((codes - zero[group_of]) * scale[group_of].astype(np.float32)).T
    tensors = {
        "qweight": pack_words(codes),
        "qzeros": pack_words(zero.T - 1).T.copy(),
        "scales": scale,
        "g_idx": group_of,
    }
    return tensors, np.ascontiguousarray(values, np.float32)


def bit_rows(codes, bits):
    """ExLlamaV2's pack_columns, one Python number per column: codes [in, out] -> int32 [in * bits / 32, out]."""
    rows = len(codes) * bits // 32
    made = np.empty((rows, codes.shape[1]), np.uint32)
    for column in range(codes.shape[1]):
        number = sum(int(code) << (bits * i) for i, code in enumerate(codes[:, column]))
        made[:, column] = [number >> (32 * i) & 0xFFFFFFFF for i in range(rows)]
    return made.view(np.int32)


def exl2(groups, out, seed=0):
    """An EXL2 weight of (bits, inputs) groups: its tensors, and its values by ExLlamaV2's formulas, one by one."""
    rng = np.random.default_rng(seed)
    inputs = sum(size for _, size in groups)
    padded = -(-out // 32) * 32
    place = rng.permutation(inputs)  # of each input
    root = rng.integers(0, 16, (len(groups), padded))
    # Small enough for float16 to lose bits below its normal numbers.
    largest = rng.uniform(0.001, 0.02, len(groups)).astype(np.float16)
    packed = []
    table = []
    sorted_values = np.empty((inputs, out), np.float32)
    first = 0
    for i, (bits, size) in enumerate(groups):
        codes = rng.integers(0, 2**bits, (size, padded))
        table += [bits, sum(map(len, packed))]
        packed.append(bit_rows(codes, bits))
        for o in range(out):
            scale = np.float16((int(root[i, o]) + 1) ** 2) * np.float16(largest[i] / np.float16(256))
            for k in range(size):
                sorted_values[first + k, o] = np.float32(int(codes[k, o]) - 2 ** (bits - 1)) * np.float32(scale)
        first += size
    tensors = {
        "m.q_weight": np.concatenate(packed),
        "m.q_scale": np.concatenate([bit_rows(root[i][:, None], 4).T for i in range(len(groups))]),
        "m.q_scale_max": largest,
        "m.q_groups": np.array(table, np.int16),
        "m.q_invperm": place.astype(np.int32),
    }
    return tensors, np.stack([sorted_values[place[j]] for j in range(inputs)], 1)


EXL2 = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}
