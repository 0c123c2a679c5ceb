"""Random weights are made by one program for each form, and checks of products begin while weights load."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxserve.config import EngineConfig
from jaxserve.devices.compile_cache import CompileCounter
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.load import check_kernels, make_decoder, make_params, read_model
from jaxserve.models.weights import abstract_params, dummy_params
from jaxserve.pallas_kernels.checked_ops import Trials
from jaxserve.pallas_kernels.types import QuantArray


def deep(folder, layers, mesh):
    """A decoder with so many equal layers."""
    model = read_model(folder)
    return make_decoder(replace(model, layers=model.layers[:1] * layers), mesh, jnp.float32)


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_as_many_programs_for_many_layers_as_for_two(model_folders, scheme):
    mesh = make_mesh(2)
    programs = {}
    for layers in (2, 32):
        decoder = deep(model_folders("llama3_gqa"), layers, mesh)
        counter = CompileCounter()
        flat = flatten_dict(dummy_params(decoder, mesh, 0, scheme), sep="/")
        programs[layers] = counter.compilations + counter.cache_hits
    assert programs[2] == programs[32] < len(flat) / 4
    abstract = abstract_params(decoder, mesh)
    assert flat.keys() == abstract.keys()
    for path, like in abstract.items():
        whole = flat[path].codes if isinstance(flat[path], QuantArray) else flat[path]
        assert (whole.shape, whole.sharding) == (like.shape, like.sharding), path
    kernels = [flat[f"layers_{i}/mlp/down/kernel"] for i in range(32)]
    assert len({np.asarray(getattr(w, "codes", w)).tobytes() for w in kernels}) == 32


def test_random_weights_depend_on_the_seed_alone(model_folders):
    """On CPUs, however many there are."""
    found = []
    for devices, seed in ((1, 0), (2, 0), (1, 1)):
        mesh = make_mesh(devices)
        flat = flatten_dict(dummy_params(deep(model_folders("llama3_gqa"), 2, mesh), mesh, seed), sep="/")
        found.append({path: np.asarray(w) for path, w in flat.items()})
    same, split, other = found
    for path, w in same.items():
        np.testing.assert_array_equal(w, split[path])
        assert path.endswith("norm/scale") == np.array_equal(w, other[path]), path


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama3_gqa", {"load_format": "dummy", "quantization": "int4"}),
        ("llama3_gqa", {"quantization": "int8"}),
        ("mixtral_experts", {}),
    ],
)
def test_checks_of_products_begin_while_weights_load(model_folders, case, options):
    """What is asked for once all weights are there has begun before."""
    begun = []

    class Recorded(Trials):
        def products(self, device, problem, backend, *, grouped=False):
            begun.append((problem, grouped))
            return []

    mesh = make_mesh(2)
    folder = model_folders(case)
    decoder = make_decoder(read_model(folder), mesh, jnp.float32)
    decoder = decoder.clone(ops=replace(decoder.ops, trials=Recorded()))
    config = EngineConfig(model=str(folder), tensor_parallel_size=2, **options)
    params = make_params(decoder, folder, mesh, config, progress=False)
    while_loading = set(begun)
    begun.clear()
    decoder, _ = check_kernels(decoder, params, mesh, "auto")
    assert set(begun) == while_loading != set()
    assert decoder.ops.trials is None
    assert {grouped for _, grouped in begun} == {case == "mixtral_experts"}
