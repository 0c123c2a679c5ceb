"""Experts that devices store wider than they are, as TPUs do to keep groups whole: the same tokens."""

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from devices import devices_of
from engines import make_engine
from flax.traverse_util import flatten_dict
from test_models_with_experts import answers, form, mxfp4_folders, stacks

from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.config import ConfigError
from jaxserve.convert.convert import convert_model
from jaxserve.devices.mesh import make_mesh
from jaxserve.models import wide_experts
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.config import HFConfig
from jaxserve.models.families import read_model_config
from jaxserve.pallas_kernels.types import QuantArray


@pytest.fixture
def padding(monkeypatch):
    monkeypatch.setattr(wide_experts, "PLATFORMS", ("cpu",))


def checked(folder, devices, size, expected, **options):
    """An engine whose experts have so many inner numbers on the devices, as planned, and whose answers are these."""
    engine = make_engine(folder, tensor_parallel_size=devices, **options)
    shapes = {path.rsplit("/", 1)[1]: w.shape for path, w in stacks(engine).items()}
    assert (shapes["experts_gate_up"][1], shapes["experts_down"][2]) == (2 * size, size)
    if "quantization" not in options:
        planned = abstract_weights(engine.runner.model, folder, engine.runner.mesh, engine.config)
        loaded = flatten_dict(engine.runner.params, sep="/")
        assert {name: form(x) for name, x in planned.items()} == {name: form(x) for name, x in loaded.items()}
    assert answers(engine, 4) == expected
    return engine


@pytest.mark.slow
def test_mxfp4(tmp_path, model_folders, padding, monkeypatch):
    """gpt-oss, biases included: 16 of 64 inner numbers on a device become 32 of 128."""
    monkeypatch.setattr(wide_experts, "LEAST", 32)
    folders = mxfp4_folders("gpt_oss_sinks", model_folders("gpt_oss_sinks"), tmp_path)
    expected = answers(make_engine(folders[1]), 4)
    engine = checked(folders[0], 4, 128, expected)
    down = next(w for path, w in stacks(engine).items() if path.endswith("down"))
    assert (down.block, down.scale.shape[2]) == ((1, 32), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "devices", "size", "scheme"),
    [
        ("mixtral_experts", 8, 256, "auto"),
        *(("ernie4_5_moe_mixed", 2, 64, scheme) for scheme in ("auto", "int8", "fp8")),
    ],
)
def test_other_forms(case, devices, size, scheme, model_folders, monkeypatch):
    folder = model_folders(case)
    one = {"quantization": scheme, "matmul_backend": "xla"} if scheme != "auto" else {}
    expected = answers(make_engine(folder, tensor_parallel_size=devices, **one), 4)
    monkeypatch.setattr(wide_experts, "PLATFORMS", ("cpu",))
    checked(folder, devices, size, expected, **one)


def test_orbax(tmp_path, model_folders, padding):
    convert_model(str(model_folders("ernie4_5_moe_mixed")), tmp_path / "orbax", "orbax", 1)
    with pytest.raises(ConfigError, match="is padded; serve it on fewer, or from safetensors"):
        make_engine(tmp_path / "orbax", tensor_parallel_size=2)


def test_sizes():
    """gpt-oss on eight TPUs; other models, devices and numbers of them keep the experts' own size."""

    def stored(target, count, size):
        config = tiny_models.CASES["gpt_oss_sinks"].config | {"intermediate_size": size}
        model = read_model_config(HFConfig(config, "config.json"))
        mesh = make_mesh(count, devices_of(target))
        return {layer.mlp.stored_size for layer in wide_experts.with_whole_groups(model, mesh).layers}

    assert stored("v6e-8", 8, 2880) == {3072}
    for other in (("v6e-8", 4, 2880), ("v6e-8", 1, 2880), ("v6e-8", 8, 768), ("v6e-8", 8, 1408)):
        assert stored(*other) == {None}


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["float32", "int8", "int4", "zeros", "blocks", "mxfp4"])
@pytest.mark.parametrize("shape", [(72, 160), (48, 192)])
def test_zeros(kind, shape):
    """What was there stays, and all else is 0."""
    rng, (out, inputs) = np.random.default_rng(1), (48, 160)
    values = rng.standard_normal((out, inputs)).astype(np.float32)
    host = values
    if kind in ("int8", "int4"):
        host = rtn(values, Scheme(kind, 32 if kind == "int4" else None))
    elif kind == "zeros":
        codes = rng.integers(-8, 8, (out, inputs)).astype(np.int8)
        zero = rng.integers(-8, 8, (out, 5)).astype(np.int8)
        host = QuantArray(codes, rng.random((out, 5), np.float32), zero, block=(1, 32))
    elif kind == "blocks":
        host = QuantArray(values.astype(ml_dtypes.float8_e4m3fn), rng.random((3, 3), np.float32), block=(16, 64))
    elif kind == "mxfp4":
        codes = PackedInt4(rng.integers(0, 256, (out, inputs // 2), np.uint8), np.dtype(ml_dtypes.float4_e2m1fn))
        scale = rng.integers(120, 130, (out, inputs // 32), np.uint8).view(ml_dtypes.float8_e8m0fnu)
        host = QuantArray(codes, scale, block=(1, 32))
    made = wide_experts.filled("layers_0/mlp/experts_down", host, jax.ShapeDtypeStruct(shape, np.float32))
    assert made.shape == shape
    before, after = (dequantize(w) if isinstance(w, QuantArray) else w for w in (host, made))
    np.testing.assert_array_equal(after[:out, :inputs], before)
    assert not after[out:].any()
    assert not after[:, inputs:].any()
    assert wide_experts.filled("layers_0/mlp/down/kernel", host, jax.ShapeDtypeStruct(shape, np.float32)) is host
