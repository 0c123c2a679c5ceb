"""Loading real families' checkpoints: every number in its place, on every mesh, with little memory beside them."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.load import READ_BYTES
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.load import load_params, make_decoder, read_model

ROOT = Path(__file__).parent.parent.parent


def load(folder, devices=1, dtype="float32"):
    mesh = make_mesh(devices)
    decoder = make_decoder(read_model(folder), mesh, jnp.dtype(dtype))
    return flatten_dict(load_params(decoder, folder, mesh, progress=False), sep="/")


def expected(case, devices):
    """The same parameters, by plain indexing of the checkpoint's tensors."""
    config = tiny_models.CASES[case].config
    file = dict(tiny_models.tensors(case))
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    own = config.get("num_key_value_heads", heads)
    dim = config.get("head_dim") or hidden // heads
    copies = max(own, devices) // own  # of each key-value head
    kv_heads = own * copies
    group = heads // (own * copies)
    pad = -config["vocab_size"] % devices

    def vocab_rows(name):
        return np.pad(file[name], [(0, pad), (0, 0)])

    def qkv(prefix, kind):
        q, k, v = (file[f"{prefix}.{x}_proj.{kind}"] for x in "qkv")
        q = q.reshape(heads, dim, -1)
        k = k.reshape(own, dim, -1)
        v = v.reshape(own, dim, -1)
        made = [
            [q[head * group + i] for i in range(group)] + [k[head // copies], v[head // copies]]
            for head in range(kv_heads)
        ]
        made = np.asarray(made)  # [kv_heads, group + 2, dim, hidden or 1]
        return made[..., 0] if kind == "bias" else made.reshape(-1, hidden)

    params = {"embed/table": vocab_rows("model.embed_tokens.weight"), "norm/scale": file["model.norm.weight"]}
    if not config["tie_word_embeddings"]:
        params["head/kernel"] = vocab_rows("lm_head.weight")
    for i in range(config["num_hidden_layers"]):
        there = f"model.layers.{i}"
        here = f"layers_{i}"
        attention = f"{there}.self_attn"
        mlp = f"{there}.mlp"
        gate = file[f"{mlp}.gate_proj.weight"]
        up = file[f"{mlp}.up_proj.weight"]
        params |= {
            f"{here}/attention_norm/scale": file[f"{there}.input_layernorm.weight"],
            f"{here}/mlp_norm/scale": file[f"{there}.post_attention_layernorm.weight"],
            f"{here}/attention/qkv/kernel": qkv(attention, "weight"),
            f"{here}/attention/out/kernel": file[f"{attention}.o_proj.weight"],
            f"{here}/mlp/gate_up/kernel": np.stack([gate, up], axis=1).reshape(-1, hidden),
            f"{here}/mlp/down/kernel": file[f"{mlp}.down_proj.weight"],
        }
        if f"{attention}.q_proj.bias" in file:
            params[f"{here}/attention/qkv/bias"] = qkv(attention, "bias")
        if f"{attention}.o_proj.bias" in file:
            params[f"{here}/attention/out/bias"] = file[f"{attention}.o_proj.bias"]
        if f"{mlp}.down_proj.bias" in file:
            gate = file[f"{mlp}.gate_proj.bias"]
            up = file[f"{mlp}.up_proj.bias"]
            params |= {
                f"{here}/mlp/gate_up/bias": np.stack([gate, up], axis=1),
                f"{here}/mlp/down/bias": file[f"{mlp}.down_proj.bias"],
            }
        for norm in ("q_norm", "k_norm"):
            if f"{attention}.{norm}.weight" in file:
                params[f"{here}/attention/{norm}/scale"] = file[f"{attention}.{norm}.weight"]
    return params


def assert_same(params, wanted, dtype="float32"):
    assert params.keys() == wanted.keys()
    for path, values in wanted.items():
        assert params[path].dtype == dtype, path
        np.testing.assert_array_equal(np.asarray(params[path]), values.astype(dtype), err_msg=path)


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("tp_gqa", 1),
        ("tp_gqa", 2),
        ("tp_gqa", 8),  # each of two key-value heads on four devices
        ("tp_mha", 8),  # with biases on query, key and value
        ("llama_biases", 2),
        ("llama2_mha", 4),
        ("llama_mqa", 2),
        ("llama_vocab1003", 2),  # one empty row
        ("qwen2_group7", 2),
        ("qwen3_bfloat16", 2),  # tied
        ("llama_float16", 1),
    ],
)
def test_every_weight_lands_in_its_place(model_folders, case, devices):
    assert_same(load(model_folders(case), devices), expected(case, devices))


def test_each_device_holds_its_share(model_folders):
    params = load(model_folders("tp_gqa"), 8)
    split = {
        "embed/table": 0,
        "head/kernel": 0,
        "qkv/kernel": 0,
        "out/kernel": 1,
        "gate_up/kernel": 0,
        "down/kernel": 1,
    }
    for path, values in params.items():
        axis = next((axis for name, axis in split.items() if path.endswith(name)), None)
        share = list(values.shape)
        if axis is not None:
            share[axis] //= 8
        assert {shard.data.shape for shard in values.addressable_shards} == {tuple(share)}, path
        assert len(values.addressable_shards) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_computation_s_dtype(model_folders, dtype):
    assert_same(load(model_folders("tp_gqa"), 2, dtype), expected("tp_gqa", 2), dtype)


def test_large_tensors_are_read_in_parts(model_folders, monkeypatch):
    monkeypatch.setattr("jaxserve.checkpoints.load.READ_BYTES", 1000)
    assert_same(load(model_folders("tp_gqa")), expected("tp_gqa", 1))


def test_sharded_files(tmp_path):
    assert_same(load(tiny_models.build("tp_gqa", tmp_path, shards=3)), expected("tp_gqa", 1))


# What can be wrong

CASE = "qwen2_tied"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def changed(tmp_path):
    """A function that writes CASE with some tensors replaced (None: left out) and config values changed."""

    def write(tensors, **config):
        folder = tiny_models.build(CASE, tmp_path)
        kept = {
            name: values for name, values in (dict(tiny_models.tensors(CASE)) | tensors).items() if values is not None
        }
        save_file(kept, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(tiny_models.CASES[CASE].config | config))
        return folder

    return write


def test_missing_tensors(changed):
    with pytest.raises(CheckpointError, match=rf"lacks 2 tensor\(s\): {DOWN}, model\.norm\.weight, which its config"):
        load(changed({DOWN: None, "model.norm.weight": None}))


def test_more_layers_than_the_files_have(changed):
    with pytest.raises(CheckpointError, match=r"lacks 1200 tensor\(s\): model.layers.10.* and 1192 more"):
        load(changed({}, num_hidden_layers=102))


def test_unused_tensors_are_named(changed, caplog):
    load(changed({"model.layers.0.extra": np.ones(3, np.float32)}))
    assert [r.message for r in caplog.records] == [
        "unused tensors in the checkpoint: 1 tensor(s): model.layers.0.extra"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_tensors_that_carry_nothing_are_not(changed, caplog):
    one = np.ones(3, np.float32)
    load(changed({"lm_head.weight": one, "model.layers.0.self_attn.rotary_emb.inv_freq": one}))
    assert not caplog.records


def test_shapes_that_the_config_does_not_ask_for(changed):
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight' has shape \[160, 64\].*asks for \[128, 64\]"):
        load(changed({}, intermediate_size=128))


def test_transposed_tensor(changed):
    values = dict(tiny_models.tensors(CASE))[DOWN]
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{DOWN}' has shape \[160, 64\]"):
        load(changed({DOWN: np.ascontiguousarray(values.T)}))


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn, np.uint8, np.bool_, np.complex64], ids=str)
def test_tensors_that_are_no_plain_floats(changed, dtype):
    values = dict(tiny_models.tensors(CASE))[DOWN]
    with pytest.raises(CheckpointError, match=rf"'{DOWN}' has dtype {np.dtype(dtype).name}, not a plain float"):
        load(changed({DOWN: values.real.astype(dtype)}))


def test_float64_is_rounded(changed):
    values = dict(tiny_models.tensors(CASE))[DOWN].astype(np.float64) * (1 + 1e-10)
    params = load(changed({DOWN: values}))
    np.testing.assert_array_equal(np.asarray(params["layers_1/mlp/down/kernel"]), values.astype(np.float32))


# Memory

MEASURE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.load import load_params, make_decoder, read_model

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

folder, devices = Path(sys.argv[1]), int(sys.argv[2])
mesh = make_mesh(devices)
decoder = make_decoder(read_model(folder), mesh, jnp.dtype("float32"))
jax.block_until_ready(jax.device_put(jnp.ones(8), mesh.devices.flat[-1]))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = kilobytes("VmRSS")
params = load_params(decoder, folder, mesh, progress=False)
leaves = jax.tree.leaves(params)
held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
print((kilobytes("VmHWM") - before) * 1024, held, max(leaf.nbytes for leaf in leaves))
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """150 million weights in bfloat16, which take twice the file's 300 MB as float32."""
    folder = tmp_path_factory.mktemp("large")
    config = tiny_models.CASES["llama3_gqa"].config | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "vocab_size": 60_000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tiny_models.manifest(config)
    save_file({n: np.ones(shape, ml_dtypes.bfloat16) for n, shape in shapes.items()}, folder / "model.safetensors")
    yield folder
    (folder / "model.safetensors").unlink()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("devices", [1, 2])
def test_peak_of_host_memory(large_folder, devices):
    """Beside the weights on the devices: no more than the largest, and less than READ_BYTES of all else."""
    command = [sys.executable, "-c", MEASURE, str(large_folder), str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    peak, held, largest = map(int, done.stdout.split())
    print(f"peak {peak / 2**20:.0f} MiB, held {held / 2**20:.0f} MiB, largest {largest / 2**20:.0f} MiB")
    assert held > 600e6
    assert peak - held < largest + READ_BYTES // 2
