"""A bundle for an H200, made here, of a model that sees. Nothing runs."""

import jax
import numpy as np
import pytest
from devices import devices_of

from jaxserve.bundles.container import ENCODER, PROGRAMS, Bundle, BundleError
from jaxserve.bundles.stored_programs import Program
from jaxserve.bundles.stored_weights import StoredWeights
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.commands.bundling import make_bundle
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.engine.engine import Engine
from jaxserve.models.load import find_files

SMALL = {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64, "dtype": "bfloat16"}


def numbers_of(arrays) -> np.ndarray:
    """All numbers in order of size: kernels may order those of a weight in their own way."""
    return np.sort(np.concatenate([np.asarray(x, np.float32).reshape(-1) for x in arrays]))


@pytest.mark.slow
def test_the_encoder_is_in_it(tmp_path):
    devices_of("h200x1")
    config = EngineConfig(model="demo-vision", **SMALL)
    make_bundle(config, tmp_path / "bundle", target="h200x1")
    bundle = Bundle.open(tmp_path / "bundle")
    described = bundle.json(PROGRAMS, dict[str, Program])
    encoders = [name for name in described if name.startswith("encode_")]
    assert encoders
    for name in encoders:
        assert len(bundle.read(described[name].file)) > 1 << 14
    mesh = make_mesh(1, jax.devices("cpu"))
    held = StoredWeights(bundle, ENCODER).arrays(mesh)
    tensors = read_folder(find_files(config)[0]).items()
    published = [tensor.read() for name, tensor in tensors if name.startswith("model.visual.")]
    assert np.array_equal(*(numbers_of(arrays) for arrays in (held, published)))
    with pytest.raises(BundleError, match="made for other devices"):
        Engine.load(EngineConfig(model=str(tmp_path / "bundle"), **SMALL), progress=False)
