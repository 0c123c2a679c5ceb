"""A quantized model gives the tokens of the same values in float32, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxserve.checkpoints.quantize import DYNAMIC
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.execution.memory import stored_bytes
from jaxserve.execution.packed_params import bundle
from jaxserve.models.quantized import SCHEMES, is_quantizable
from jaxserve.models.weights import abstract_params
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.types import PanelArray, QuantArray

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(5, 500, n).tolist() for n in (3, 40)]
EXACT = ("cpu", "auto")  # the backend with products of the values as they are, on one device and on several


def is_quantized(x) -> bool:
    return isinstance(x, QuantArray)


def floats_of(x) -> np.ndarray:
    """The values of a weight in any form."""
    if isinstance(x, PanelArray):
        return np.asarray(cpu_panels.rows(x, jnp.arange(x.shape[0], dtype=jnp.int32)))
    return dequantize(jax.tree.map(np.asarray, x)) if is_quantized(x) else np.asarray(x)


def tokens_of(engine) -> list[list[int]]:
    sampled = {"temperature": 0.8, "seed": 5}
    kinds = {"greedy": {}, "sampled": sampled}
    requests = [
        request(f"{i}-{kind}", prompt, max_tokens=20, **params)
        for i, prompt in enumerate(PROMPTS)
        for kind, params in kinds.items()
    ]
    return [completion.token_ids for completion in generate(engine, *requests)]


def in_floats(engine) -> None:
    """Puts the values of the quantized weights in their place, sharded as plain ones are."""
    runner = engine.runner
    params = flatten_dict(runner.params, sep="/")
    plain = {}
    for path, like in abstract_params(runner.model, runner.mesh).items():
        plain[path] = jax.device_put(floats_of(params[path]), like.sharding)
    runner._arrays, runner._unbundle = bundle(unflatten_dict(plain, sep="/"))
    runner.executables.clear()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_tokens_as_in_floats(model_folders, scheme, devices):
    if devices == 8 and scheme != "int4":
        pytest.skip("one scheme is enough there")
    folder = model_folders(CASE)
    options = {"load_format": "dummy", "rows": 4, "matmul_backend": EXACT[devices > 1]}
    engine = make_engine(folder, quantization=scheme, tensor_parallel_size=devices, **options)
    kernels = [w for w in flatten_dict(engine.runner.params).values() if is_quantized(w)]
    assert len(kernels) == 4 * engine.model.num_layers
    assert all(len(w.codes.sharding.device_set) == devices for w in kernels)
    found = tokens_of(engine)

    in_floats(engine)
    assert found == tokens_of(engine)
    assert len({tuple(ids) for ids in found}) == len(found)


@pytest.mark.slow
def test_bytes_on_the_device(model_folders):
    """No copy in floats: what the weights take is the sum of their quantized parts."""
    sizes = {}
    for scheme in ("auto", *SCHEMES):
        engine = make_engine(model_folders(CASE), quantization=scheme, load_format="dummy", matmul_backend="cpu")
        leaves = jax.tree.leaves(engine.runner.params)
        assert engine.runner.weight_bytes == sum(stored_bytes(x) for x in leaves)
        kernels = [x for path, x in flatten_dict(engine.runner.params, sep="/").items() if is_quantizable(path)]
        sizes[scheme] = sum(stored_bytes(x.codes if is_quantized(x) else getattr(x, "data", x)) for x in kernels)
    assert sizes["auto"] == 4 * sizes["int8"] == 4 * sizes["fp8"] == 8 * sizes["int4"]


@pytest.mark.slow
@pytest.mark.skipif(not cpu_panels.available(), reason="no C++ compiler")
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_integer_products_by_default(model_folders, scheme):
    """On one CPU x is rounded to 8 bits; likelihoods of the same text stay close to those of the values themselves."""

    def likelihoods(**options) -> np.ndarray:
        engine = make_engine(model_folders(CASE), quantization=scheme, **options)
        kinds = {type(w) for path, w in flatten_dict(engine.runner.params, sep="/").items() if is_quantizable(path)}
        assert kinds == {QuantArray if options else PanelArray}
        asked = request("0", PROMPTS[1], max_tokens=1, prompt_logprobs=0)
        return np.array([entry.logprob for entry in generate(engine, asked)[0].prompt_logprobs[1:]])

    found = likelihoods()
    exact = likelihoods(matmul_backend="cpu")
    assert 0 < np.abs(found - exact).max() < 0.1


def test_a_matmul_backend_that_cannot_run(model_folders):
    with pytest.raises(ValueError, match="matmul backend mosaic_gpu cannot run on cpu: it needs an NVIDIA GPU"):
        tokens_of(
            make_engine(model_folders(CASE), quantization="int8", load_format="dummy", matmul_backend="mosaic_gpu")
        )


def test_insisting_on_a_quantization_that_is_not_there(model_folders):
    with pytest.raises(ConfigError, match=r"quantization awq was asked for, but .* is not quantized"):
        make_engine(model_folders(CASE), quantization="awq")
    with pytest.raises(
        ConfigError,
        match="can be quantized to int8, int4, fp8, int8-dynamic, fp8-dynamic, mxfp4, nvfp4, not to 'awq'",
    ):
        make_engine(model_folders(CASE), quantization="awq", load_format="dummy")
    with pytest.raises(ConfigError, match="matmul_backend must be one of auto, "):
        EngineConfig(model="demo", matmul_backend="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_floats_are_rounded_while_they_are_loaded(model_folders, scheme):
    """As `jaxserve quantize --method rtn` does; the tokens are those of the rounded values."""
    engine = make_engine(model_folders(CASE), quantization=scheme, matmul_backend="cpu")
    kernels = [x for path, x in flatten_dict(engine.runner.params, sep="/").items() if is_quantizable(path)]
    assert all(is_quantized(w) for w in kernels)
    assert {w.block for w in kernels} == {(1, 128 if scheme == "int4" else w.shape[1]) for w in kernels}
    found = tokens_of(engine)
    in_floats(engine)
    assert found == tokens_of(engine)
    plain = flatten_dict(make_engine(model_folders(CASE)).runner.params, sep="/")
    for rounded, exact in zip(kernels, (x for path, x in plain.items() if is_quantizable(path)), strict=True):
        error = np.abs(floats_of(rounded) - floats_of(exact)).max()
        largest = np.abs(floats_of(exact)).max()
        assert 0 < error < largest * {"int8": 1 / 250, "int4": 1 / 14, "fp8": 1 / 16}[scheme.removesuffix(DYNAMIC)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_an_orbax_checkpoint(model_folders, tmp_path, devices):
    """Converted, a model gives the same tokens, on one device and on two; also a quantized one."""
    from jaxserve.convert.convert import convert_model

    convert_model(str(model_folders(CASE)), tmp_path / "orbax", "orbax")
    expected = tokens_of(make_engine(model_folders(CASE)))
    assert tokens_of(make_engine(tmp_path / "orbax", tensor_parallel_size=devices)) == expected
    with pytest.raises(ConfigError, match="leave out --quantization"):
        make_engine(tmp_path / "orbax", quantization="int8")
