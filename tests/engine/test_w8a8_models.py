"""Models whose products round their inputs to 8 bits: near the exact ones, on one device and on several."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict

from jaxserve.checkpoints import orbax
from jaxserve.convert.convert import convert_model
from jaxserve.convert.quantize import QuantizeConfig, quantize_model
from jaxserve.devices.mesh import make_mesh
from jaxserve.devices.sharded_ops import quant_matmul_sharded
from jaxserve.models.quantized import Rounding, is_quantizable
from jaxserve.pallas_kernels.device_ops import matmul_of
from jaxserve.pallas_kernels.ops import quant_matmul
from jaxserve.pallas_kernels.quant_matmul import reference, w8a8
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import Activations, PanelArray, QuantArray

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"
PROMPT = np.random.default_rng(5).integers(5, 500, 40).tolist()
FP8 = "float8_e4m3fn"


@pytest.fixture(scope="module", params=["int8-dynamic", "fp8-dynamic"])
def folder(request, model_folders, tmp_path_factory):
    """A checkpoint that `jaxserve quantize` wrote."""
    out = tmp_path_factory.mktemp("w8a8") / request.param
    settings = QuantizeConfig(scheme=request.param)
    quantize_model(str(model_folders(CASE)), out, settings, progress=False)
    return out


def weights_of(engine) -> list:
    return [w for path, w in flatten_dict(engine.runner.params, sep="/").items() if is_quantizable(path)]


def likelihoods(folder, **options) -> np.ndarray:
    engine = make_engine(folder, **options)
    asked = request("0", PROMPT, max_tokens=1, prompt_logprobs=0)
    return np.array([entry.logprob for entry in generate(engine, asked)[0].prompt_logprobs[1:]])


def test_what_is_written(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    is_int = folder.name.startswith("int8")
    assert config["format"] == ("int-quantized" if is_int else "float-quantized")
    (group,) = config["config_groups"].values()
    inputs = group["input_activations"]
    assert inputs == {
        "num_bits": 8,
        "type": "int" if is_int else "float",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
    }


@pytest.mark.slow
def test_likelihoods(folder):
    """Rounding moves them, on several devices with scales of each device's part, and none has them exact."""
    exact = likelihoods(folder, activation_quantization="none", matmul_backend="cpu")
    assert np.array_equal(exact, likelihoods(folder, activation_quantization="checkpoint", matmul_backend="cpu"))
    rounded = likelihoods(folder, activation_quantization="checkpoint")
    moved = np.abs(rounded - exact).max()
    assert 1e-5 < moved < (0.2 if folder.name.startswith("int8") else 0.8)  # of random weights
    for devices in (2, 8):
        options = {"activation_quantization": "checkpoint", "tensor_parallel_size": devices}
        assert np.abs(likelihoods(folder, **options) - exact).max() < 2 * moved
    unrounded = likelihoods(folder, activation_quantization="none", tensor_parallel_size=2)
    np.testing.assert_allclose(unrounded, exact, atol=1e-4)


def test_what_a_cpu_does(folder):
    """int8 goes into panels, whose products round inputs in blocks of 32; fp8 is computed with inputs as they are."""
    kinds = {type(w) for w in weights_of(make_engine(folder))}
    assert kinds == ({PanelArray} if folder.name.startswith("int8") else {QuantArray})
    kept = weights_of(make_engine(folder, activation_quantization="checkpoint"))
    assert {w.activations for w in kept} == {Activations("int8" if folder.name.startswith("int8") else FP8)}


def test_orbax_keeps_it(folder, tmp_path):
    convert_model(str(folder), tmp_path / "orbax", "orbax")
    described = orbax.describe(tmp_path / "orbax")
    found = {w.activations for path, w in described.items() if is_quantizable(path)}
    assert found == {Activations("int8" if folder.name.startswith("int8") else FP8)}
    options = {"activation_quantization": "checkpoint"}
    np.testing.assert_allclose(likelihoods(tmp_path / "orbax", **options), likelihoods(folder, **options), atol=1e-5)


def test_orbax_says_all_of_it(tmp_path):
    wanted = Activations(FP8, group=64, ceiling=1200.0), Activations(FP8, static=True), None
    params = {
        f"layers_{i}/mlp/down/kernel": QuantArray(
            jnp.zeros((4, 128), FP8),
            jnp.ones((4, 2)),
            block=(1, 64),
            activations=one,
            input_scale=jnp.ones((1, 1)) if one and one.static else None,
        )
        for i, one in enumerate(wanted)
    }
    orbax.save(tmp_path, params)
    assert tuple(w.activations for _, w in sorted(orbax.describe(tmp_path).items())) == wanted


@pytest.mark.slow
def test_dummy_weights(model_folders):
    options = {"load_format": "dummy", "quantization": "int8-dynamic", "activation_quantization": "checkpoint"}
    assert {w.activations for w in weights_of(make_engine(model_folders(CASE), **options))} == {Activations("int8")}


def weight(wanted: Activations, out: int, inputs: int) -> QuantArray:
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(-100, 101, (out, inputs)), jnp.float32).astype(wanted.dtype)
    scale = jnp.asarray(rng.uniform(0.001, 0.02, (out, -(-inputs // (wanted.group or inputs)))), jnp.float32)
    given = jnp.full((1, 1), 0.01, jnp.float32) if wanted.static else None
    return QuantArray(codes, scale, block=(1, wanted.group or inputs), input_scale=given, activations=wanted)


@pytest.mark.parametrize(
    "wanted",
    [Activations("int8"), Activations(FP8), Activations(FP8, static=True), Activations(FP8, group=32)],
    ids=str,
)
def test_eight_devices(wanted):
    """Where the outputs are split the products are one device's; where the inputs are, each device's scales are at
    least as fine. TPUs' products, which are plain dots, run here as well."""
    mesh = make_mesh(8)
    w = weight(wanted, 64, 512)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 512)), jnp.float32)
    rows = w8a8.quantize(x, w)
    one = np.asarray(w8a8.emulated(rows, w, reference.quant_matmul))
    native = Device("tpu", "TPU v5 lite") if w8a8.why_not(Device("tpu", ""), MatmulProblem.of(x, w)) is None else None
    multiply = matmul_of(native or Device("cpu", "cpu"), "auto" if native else "xla", partitioned=True)

    def product(*axes: str) -> np.ndarray:
        return np.asarray(
            jax.jit(
                lambda x, w: quant_matmul_sharded(mesh, lambda *a: quant_matmul(*a, multiply=multiply), x, w, axes)
            )(x, w)
        )

    np.testing.assert_allclose(product("mlp", "embed"), one, atol=1e-5 * np.abs(one).max())
    split = product("embed", "mlp")
    if wanted.static or wanted.group:
        np.testing.assert_allclose(split, one, atol=1e-5 * np.abs(one).max())
        return
    exact = np.asarray(reference.quant_matmul(x, w8a8.ignored(w)))
    of_one, of_eight = (np.sqrt(np.square(y - exact).mean()) for y in (one, split))
    assert 0 < of_eight < 1.1 * of_one


def test_rounding_is_decided_and_told(caplog):
    """Of each weight, by what was asked for and what the device has."""
    h200 = Device("gpu", "NVIDIA H200", (9, 0))
    wanted = Activations(FP8)
    w = weight(wanted, 8, 64)
    path = "layers_0/mlp/down/kernel"
    bf16 = jnp.dtype("bfloat16")
    caplog.set_level("INFO")
    assert Rounding("auto", h200, bf16)(path, w).activations == wanted
    cpu = Rounding("auto", Device("cpu", "cpu"), bf16)
    assert cpu(path, w).activations is None
    assert cpu(path, w).activations is None
    assert Rounding("checkpoint", Device("cpu", "cpu"), bf16)(path, w).activations == wanted
    assert Rounding("none", h200, bf16)(path, w).activations is None
    assert Rounding("auto", h200, bf16)("embed/table", w).activations is None
    odd = replace(w, activations=Activations("int8"))
    assert Rounding("checkpoint", h200, bf16)(path, odd).activations is None
    said = [record.message for record in caplog.records]
    assert sum("no products of fp8 per token on CPUs" in message for message in said) == 1
    assert any("asked for by --activation-quantization none" in message for message in said)
    assert any("weights are float8_e4m3fn" in message for message in said)
