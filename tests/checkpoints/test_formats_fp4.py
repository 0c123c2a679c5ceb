"""4-bit floats from files: every code with every scale, the layouts of NVFP4, and how they come to devices."""

import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from quantized_files import WEIGHT, read

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import mxfp4
from jaxserve.checkpoints.int4 import FLOAT4, PackedInt4
from jaxserve.checkpoints.quantized import common_form, dequantize, refine, with_bytes
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.quantized import put
from jaxserve.pallas_kernels.types import QuantArray

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([E2M1, -E2M1])  # OCP Microscaling Formats 1.0, table 4
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def test_every_code_with_every_scale_is_exact():
    exponents = np.arange(255, dtype=np.uint8)
    packed = np.tile(np.arange(0, 16, 2, dtype=np.uint8) * 17 + 16, (255, 2))  # 0 and 1 in a byte, 2 and 3, ...
    w = mxfp4.decode(packed, exponents[:, None], "scales")
    assert w.codes.dtype == FLOAT4
    assert w.scale.dtype == E8M0
    want = np.tile(VALUES, 2) * 2.0 ** (exponents[:, None].astype(np.float64) - 127)
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)  # six times the largest scales are more than it holds
        np.testing.assert_array_equal(dequantize(w).view(np.int32), want.view(np.int32))
    with pytest.raises(CheckpointError, match="no numbers"):
        mxfp4.decode(packed[:1], np.full((1, 1), 255, np.uint8), "scales")


def nvfp4(layout, out=6, inputs=48):
    """(config, tensors, values by the layout's own formula in float32) of a random weight."""
    rng = np.random.default_rng(3)
    packed = rng.integers(0, 256, (out, inputs // 2), np.uint8)
    scale = rng.integers(0, 127, (out, inputs // 16), np.uint8).view(E4M3)
    whole = np.float32(0.037)
    codes = VALUES.astype(np.float32)[np.stack([packed & 15, packed >> 4], -1).reshape(out, inputs)]
    if layout == "modelopt":
        tensors = {WEIGHT: packed, f"{WEIGHT}_scale": scale, f"{WEIGHT}_scale_2": np.array(whole)}
        tensors |= {"m.input_scale": np.array(whole)}
        factor = scale.astype(np.float32) * whole
        config = MODELOPT
    else:
        tensors = {f"{WEIGHT}_packed": packed, f"{WEIGHT}_scale": scale, f"{WEIGHT}_global_scale": np.array([whole])}
        tensors |= {"m.input_global_scale": np.array([whole])}
        factor = scale.astype(np.float32) / whole
        config = COMPRESSED
    return {"quantization_config": config}, tensors, codes * np.repeat(factor, 16, 1)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_nvfp4(tmp_path, layout):
    config, tensors, want = nvfp4(layout)
    w = read(tmp_path / "model.safetensors", config, tensors, want.shape)
    assert (w.codes.dtype, w.scale.dtype, w.block, w.gain.shape) == (FLOAT4, E4M3, (1, 16), (6, 1))
    np.testing.assert_allclose(dequantize(w), want, rtol=3e-7)
    bytes_ = with_bytes(w)
    assert bytes_.codes.dtype == np.int8
    np.testing.assert_allclose(dequantize(bytes_), want, rtol=3e-7)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_nvfp4_that_is_damaged(tmp_path, layout):
    config, tensors, want = nvfp4(layout)
    whole = f"{WEIGHT}_scale_2" if layout == "modelopt" else f"{WEIGHT}_global_scale"
    for value in (0.0, np.nan):
        broken = tensors | {whole: np.full_like(tensors[whole], value)}
        with pytest.raises(CheckpointError, match="no scale"):
            read(tmp_path / "model.safetensors", config, broken, want.shape)
    scale = tensors[f"{WEIGHT}_scale"]
    with pytest.raises(CheckpointError, match="shape"):
        read(tmp_path / "model.safetensors", config, tensors | {f"{WEIGHT}_scale": scale[:, :2]}, (6, 64))
    if layout == "modelopt":
        with pytest.raises(CheckpointError, match="groups of 16"):
            read(tmp_path / "m", {"quantization_config": MODELOPT | {"group_size": 32}}, tensors, want.shape)
        with pytest.raises(CheckpointError, match="NVFP4_AWQ"):
            read(tmp_path / "m", {"quantization_config": MODELOPT | {"quant_algo": "NVFP4_AWQ"}}, tensors, want.shape)


def random_mxfp4(out=16, inputs=2880, seed=5):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (out, inputs // 2), np.uint8)
    return mxfp4.decode(packed, rng.integers(110, 130, (out, inputs // 32)).astype(np.uint8), "scales")


def test_parts_are_joined_as_they_are(tmp_path):
    plain, (config, tensors, _) = random_mxfp4(inputs=48 * 2), nvfp4("modelopt", inputs=96)
    with_gain = read(tmp_path / "m", config, tensors, (6, 96))
    other = QuantArray(with_gain.codes, with_gain.scale, block=(1, 16))
    first, second = common_form([with_gain, other])
    assert (first.codes.dtype, second.scale.dtype) == (FLOAT4, E4M3)
    assert (second.gain == 1).all()
    mixed = common_form([plain, with_gain])
    for found, w in zip(mixed, (plain, with_gain), strict=True):
        np.testing.assert_array_equal(dequantize(found), dequantize(w))
    eight = QuantArray(np.ones((2, 96), np.int8), np.ones((2, 3), np.float32), block=(1, 32))
    assert common_form([plain, eight]) is None


def test_codes_travel_in_half_bytes():
    """To four devices, along either axis; 2,880 inputs over 8 devices leave groups of 8."""
    mesh = make_mesh(4)
    w = random_mxfp4()
    assert isinstance(w.codes, PackedInt4)
    for spec in (PartitionSpec("tensor"), PartitionSpec(None, "tensor")):
        codes = put(w.codes, NamedSharding(mesh, spec))
        assert (codes.dtype, codes.shape) == (FLOAT4, w.shape)
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), np.asarray(w.codes).view(np.uint8))
    np.testing.assert_array_equal(dequantize(refine(w, (1, 8))), dequantize(w))
