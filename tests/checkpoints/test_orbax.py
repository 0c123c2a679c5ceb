"""Orbax checkpoints: any mesh reads what any other has written, and the way back to Hugging Face's names."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from unpacking import unpacked

from jaxserve.checkpoints import orbax
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.commands.cli import main
from jaxserve.convert.convert import _read, take
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.families.llama import NAMES
from jaxserve.models.load import load_params, make_decoder, read_model
from jaxserve.models.weights import abstract_params, weight_pieces
from jaxserve.pallas_kernels.types import QuantArray


def weights():
    """Every kind of parameter on the host."""
    values = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    int4 = rtn(values, Scheme("int4", 32, symmetric=False, scale_dtype=ml_dtypes.bfloat16))
    return {
        "embed/table": values[:30].astype(ml_dtypes.bfloat16),
        "norm/scale": values[0],
        "layers_0/mlp/down/kernel": int4,
        "layers_0/mlp/gate_up/kernel": rtn(values, Scheme("int8")),
        "layers_0/attention/out/kernel": rtn(values, Scheme("fp8")),
        "layers_0/attention/qkv/kernel": QuantArray(
            codes=int4.codes,
            scale=int4.scale,
            bias=values[:, :3].astype(np.float16),
            order=np.arange(96, dtype=np.int32)[::-1].copy(),
            block=(1, 32),
        ),
    }


def placed(values, devices):
    """Matrices split by rows where these are multiples of 8, as the tensor axis of a mesh splits them."""
    mesh = make_mesh(devices)

    def place(x):
        split = x.ndim == 2 and x.shape[0] % 8 == 0
        return NamedSharding(mesh, PartitionSpec("tensor" if split else None))

    return jax.tree.map(lambda x: (x, place(x)), values, is_leaf=lambda x: hasattr(x, "ndim"))


def on_devices(values, devices):
    is_pair = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda pair: jax.device_put(*pair), placed(values, devices), is_leaf=is_pair)


def wanted(values, devices):
    def abstract(pair):
        return jax.ShapeDtypeStruct(pair[0].shape, pair[0].dtype, sharding=pair[1])

    return jax.tree.map(abstract, placed(values, devices), is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 2), (2, 1)])
def test_another_mesh(before, after, tmp_path):
    values = weights()
    orbax.save(tmp_path, on_devices(values, before))
    assert jax.tree.structure(orbax.describe(tmp_path)) == jax.tree.structure(values)
    got = orbax.restore(tmp_path, wanted(orbax.describe(tmp_path), after))
    assert jax.tree.structure(got) == jax.tree.structure(values)
    for found, expected in zip(jax.tree.leaves(got), jax.tree.leaves(values), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found), expected)
    codes = got["layers_0/mlp/down/kernel"].codes
    assert [shard.data.shape for shard in codes.addressable_shards] == [(64 // after, 96)] * after


def test_rows_and_types_that_differ(tmp_path):
    values = weights()
    orbax.save(tmp_path, on_devices(values, 1))
    asked = wanted(orbax.describe(tmp_path), 8)
    table = jax.ShapeDtypeStruct((32, 96), np.float32, sharding=asked["layers_0/mlp/down/kernel"].codes.sharding)
    asked["embed/table"] = table
    with pytest.raises(CheckpointError, match=r"embed/table is saved with shape \[30, 96\], but \[32, 96\] is needed"):
        orbax.restore(tmp_path, asked)
    got = orbax.restore(tmp_path, asked, {"embed/table"})["embed/table"]
    assert (got.dtype, len(got.addressable_shards)) == (np.float32, 8)
    np.testing.assert_array_equal(got[:30], values["embed/table"].astype(np.float32))
    assert not np.any(got[30:])


def test_what_does_not_fit(tmp_path):
    with pytest.raises(CheckpointError, match="no readable Orbax checkpoint"):
        orbax.describe(tmp_path)
    orbax.save(tmp_path, on_devices(weights(), 1))
    asked = wanted(orbax.describe(tmp_path), 1)
    dense = asked | {"layers_0/mlp/down/kernel": asked["embed/table"]}
    with pytest.raises(CheckpointError, match="layers_0/mlp/down/kernel/block=1x32/codes"):
        orbax.restore(tmp_path, dense)
    del asked["norm/scale"]
    with pytest.raises(CheckpointError, match=r"1 arrays are saved but not asked for.*: norm/scale"):
        orbax.restore(tmp_path, asked)


@pytest.mark.parametrize(
    ("case", "devices"),
    [("llama_biases", 1), ("qwen3_bfloat16", 1), ("qwen2_group7", 1), ("tp_gqa", 8), ("llama_vocab1003", 2)],
)
def test_there_and_back(case, devices, model_folders, tmp_path):
    """The same tensors under the same names, with heads that were repeated and rows that were added on the way."""
    folder = str(model_folders(case))
    there = tmp_path / "there"
    back = tmp_path / "back"
    flags = ["--tensor-parallel-size", str(devices)]
    assert main(["convert", folder, str(there), "--format", "orbax", *flags]) == 0
    assert not list(there.glob("*.safetensors*"))
    assert main(["convert", str(there), str(back), "--format", "safetensors"]) == 0
    original = dict(tiny_models.tensors(case))
    tensors = read_folder(back)
    assert tensors.keys() == original.keys()
    for name, values in original.items():
        assert tensors[name].dtype == values.dtype
        np.testing.assert_array_equal(tensors[name].read(), values)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((back / name).read_text()) == json.loads((model_folders(case) / name).read_text())


def test_latents_are_read_back(model_folders, tmp_path):
    """Layers with latent attention have no fused queries, keys and values whose rows would tell the heads."""
    folder = model_folders("deepseek_v2_lite")
    there = tmp_path / "there"
    assert main(["convert", str(folder), str(there), "--format", "orbax"]) == 0
    decoder, params = _read(there, 1)
    expected_decoder, expected = _read(folder, 1)
    assert decoder.kv_heads == expected_decoder.kv_heads
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[path]), np.asarray(value))


def test_the_engines_parameters(model_folders, tmp_path):
    """What was saved on one device is what eight would have loaded from the model itself."""
    folder = model_folders("tp_mha")
    mesh = make_mesh(8)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--format", "orbax"]) == 0
    decoder = make_decoder(read_model(folder), mesh, jnp.float32)
    got = orbax.restore(tmp_path / "out", abstract_params(decoder, mesh), {"embed/table", "head/kernel"})
    loaded = flatten_dict(load_params(decoder, folder, mesh, progress=False), sep="/")
    assert got.keys() == loaded.keys()
    for path, values in loaded.items():
        assert got[path].sharding == values.sharding
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(values))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_parameters_become_quantized_tensors(kind, model_folders, tmp_path):
    """Queries, keys and values are cut out of their one matrix, with the repeated heads of eight devices."""
    folder = model_folders("tp_gqa")
    there = tmp_path / "there"
    back = tmp_path / "back"
    assert main(["convert", str(folder), str(tmp_path / "plain"), "--format", "orbax", "-tp", "8"]) == 0
    stored = orbax.describe(tmp_path / "plain")
    place = NamedSharding(make_mesh(), PartitionSpec())
    asked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), stored)
    params = orbax.restore(tmp_path / "plain", asked)
    scheme = Scheme(kind, 64 if kind == "int4" else None)
    kernels = [path for path in params if path.startswith("layers_") and path.endswith("/kernel")]
    quantized = params | {path: rtn(params[path], scheme) for path in kernels}
    there.mkdir()
    for path in folder.glob("*.json"):
        (there / path.name).write_bytes(path.read_bytes())
    orbax.save(there, quantized)
    assert main(["convert", str(there), str(back), "--format", "safetensors"]) == 0
    decoder = make_decoder(read_model(folder), make_mesh(8), jnp.float32)
    tensors = unpacked(back)
    for path, pieces in weight_pieces(decoder, NAMES).items():
        whole = quantized[path]
        plain = dequantize(whole) if isinstance(whole, QuantArray) else np.asarray(whole)
        for piece in pieces:
            np.testing.assert_array_equal(tensors[piece.name], take(plain, piece))
    assert json.loads((back / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_mistakes(model_folders, tmp_path, capsys):
    folder = str(model_folders("tp_gqa"))
    assert main(["convert", folder, str(tmp_path), "--format", "orbax", "-tp", "3"]) == 1
    assert "this model allows [1, 2, 4, 8]" in capsys.readouterr().err
    (tmp_path / "something").write_text("")
    assert main(["convert", folder, str(tmp_path), "--format", "orbax"]) == 1
    assert "is not empty" in capsys.readouterr().err
