"""Records what the compressed-tensors package reads from weights that `jaxserve.checkpoints.export` has packed.

pip install torch compressed-tensors numpy ml_dtypes safetensors jax tqdm
python tests/goldens/record_compressed.py
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from jaxserve.checkpoints.export import compress, quantization_config  # noqa: E402
from jaxserve.pallas_kernels.types import QuantArray  # noqa: E402

GOLDENS = Path(__file__).parent / "compressed_tensors.npz"
# outputs that fill no int32
OUT = 20
IN = 96


def cases() -> dict[str, QuantArray]:
    """Weights of every kind that is written, from integers alone; scales are bfloat16."""
    counts = np.arange(OUT * IN).reshape(OUT, IN)
    codes = ((counts * counts * 7 + 13 * counts) // 5) % 256 - 128

    def made(codes, groups, zero=False):
        scale = ((1 + np.arange(OUT * groups).reshape(OUT, groups) % 11) / 64).astype(ml_dtypes.bfloat16)
        zeros = (np.arange(OUT * groups).reshape(OUT, groups) % 16 - 8).astype(np.int8) if zero else None
        return QuantArray(codes=codes, scale=scale, zero=zeros, block=(1, IN // groups))

    int4 = (codes // 16).astype(ml_dtypes.int4)
    return {
        "int4": made(int4, 3),
        "int4_zero": made(int4, 3, zero=True),
        "int4_channel": made(int4, 1),
        "int8": made(codes.astype(np.int8), 1),
        "int8_group": made(codes.astype(np.int8), 3),
        "fp8": made(codes.astype(np.float32).astype(ml_dtypes.float8_e4m3fn), 1),
    }


def main() -> None:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    def tensor(values: np.ndarray) -> torch.Tensor:
        kinds = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.int8, torch.float8_e4m3fn)}
        as_stored, dtype = kinds.get(values.dtype.name, (values.dtype, None))
        made = torch.from_numpy(np.ascontiguousarray(values).view(as_stored))
        return made if dtype is None else made.view(dtype)

    results = {}
    for name, weight in cases().items():
        config = QuantizationConfig.model_validate(quantization_config({"m": weight}, []))
        (scheme,) = config.config_groups.values()
        state = {key.removeprefix("m."): tensor(values) for key, values in compress("m", weight).items()}
        read = BaseCompressor.get_value_from_registry(config.format).decompress(state, scheme)["weight"]
        results[name] = read.float().numpy()
    np.savez_compressed(GOLDENS, **results)


if __name__ == "__main__":
    main()
