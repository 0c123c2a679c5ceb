"""Quantized repositories with settings in files of their own, AWQ's other layout, ModelOpt's fp8, scales of a cache."""

import json
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from flax.traverse_util import flatten_dict
from quantized_files import FP8, WEIGHT, exl2, load, save
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import find_format
from jaxserve.checkpoints.formats.beside import with_settings
from jaxserve.checkpoints.quantized import INT4, dequantize
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.load import Checkpoint, load_params, make_decoder, read_model

ALIASES = {"group_size": "q_group_size", "bits": "w_bit"}


def beside(folder, file, settings, arrays):
    """The reader of a folder whose config.json says nothing of quantization."""
    (folder / file).write_text(json.dumps(settings))
    return find_format(with_settings({"model_type": "llama"}, folder), save(folder / "model.safetensors", arrays))


@pytest.mark.parametrize(
    ("case", "file", "renamed"),
    [
        ("gptq_4", "quantize_config.json", False),
        ("gptq_8_act_order", "quantize_config.json", False),
        ("awq", "quant_config.json", True),
        ("awq", "quantize_config.json", True),
    ],
)
def test_settings_beside_config_json(case, file, renamed, tmp_path):
    config, shape, arrays, rows, expected = load(case)
    settings = config["quantization_config"]
    settings = {ALIASES.get(k, k) if renamed else k: v for k, v in settings.items() if k != "quant_method"}
    reader = beside(tmp_path, file, settings | ({"version": "GEMM"} if renamed else {}), arrays)
    assert reader.name == case.split("_")[0]
    np.testing.assert_array_equal(dequantize(reader.read(WEIGHT, shape))[rows], expected)


def test_config_json_comes_first(tmp_path):
    (tmp_path / "quantize_config.json").write_text('{"bits": 3}')
    config = {"quantization_config": {"quant_method": "awq"}}
    assert with_settings(config, tmp_path) == config


def test_settings_of_the_text_of_a_model_with_images(tmp_path):
    config, shape, arrays, rows, expected = load("awq")
    reader = find_format({"text_config": config}, save(tmp_path / "model.safetensors", arrays))
    np.testing.assert_array_equal(dequantize(reader.read(WEIGHT, shape))[rows], expected)


def test_exl2_without_any_settings(tmp_path):
    tensors, expected = exl2([(4, 128), (3, 64)], 32)
    reader = find_format({"model_type": "llama"}, save(tmp_path / "output.safetensors", tensors))
    assert reader.name == "exl2"
    np.testing.assert_array_equal(dequantize(reader.read(WEIGHT, (32, expected.shape[1]))), expected)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_of_settings_that_is_broken_is_named(text, tmp_path):
    (tmp_path / "quant_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"quant_config\.json"):
        with_settings({}, tmp_path)


# AWQ's other layout


def words(codes):
    """Eight codes to a word, the first in its lowest bits: [rows, n] -> int32 [rows, ceil(n / 8)]."""
    made = np.zeros((len(codes), -(-codes.shape[1] // 8)), np.uint64)
    for i in range(codes.shape[1]):
        made[:, i // 8] |= codes[:, i].astype(np.uint64) << np.uint64(4 * (i % 8))
    return made.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize(
    ("group", "inputs", "width"), [(128, 1280, 2), (128, 256, 1), (64, 256, 2), (32, 1280, 8), (-1, 256, 1)]
)
def test_awq_gemv(group, inputs, width, tmp_path):
    rng = np.random.default_rng(inputs)
    out = 16
    size = inputs if group == -1 else group
    count = inputs // size
    codes = rng.integers(0, 16, (out, inputs))
    zeros = rng.integers(0, 16, (out, count))
    scale = rng.uniform(0.001, 0.01, (out, count)).astype(np.float16)
    padded = np.zeros((out, 8 * width), np.float16)
    padded[:, :count] = scale
    qzeros = np.zeros((out, width), np.int32)
    qzeros[:, : -(-count // 8)] = words(zeros)
    arrays = {"m.qweight": words(codes), "m.qzeros": qzeros, "m.scales": padded}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv", "zero_point": True}
    reader = find_format({"quantization_config": settings}, save(tmp_path / "model.safetensors", arrays))
    w = reader.read(WEIGHT, (out, inputs))
    assert (w.codes.dtype, w.block) == (INT4, (1, size))
    values = dequantize(w)
    for o in range(out):
        for i in range(inputs):
            wanted = np.float32(int(codes[o, i]) - int(zeros[o, i // size])) * np.float32(scale[o, i // size])
            assert values[o, i] == wanted
    with pytest.raises(CheckpointError, match=r"'m\.qweight' has shape"):
        reader.read(WEIGHT, (out, 2 * inputs))


# ModelOpt


def modelopt(folder, settings, by_file, per_channel=False, cache=()):
    """A small Llama in fp8 as ModelOpt exports it; returns its values in float32 by name."""
    tiny_models.build("tp_gqa", folder)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    tensors = {}
    values = {}
    for name, tensor in tiny_models.tensors("tp_gqa"):
        if not name.endswith("_proj.weight"):
            tensors[name] = values[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        weight = np.asarray(tensor, np.float32)
        largest = np.abs(weight).max(1) if per_channel else np.abs(weight).max()
        scale = np.asarray(largest / 448, np.float32)
        codes = (weight / (scale[:, None] if per_channel else scale)).astype(FP8)
        tensors |= {name: codes, f"{stem}.weight_scale": scale, f"{stem}.input_scale": np.float32(0.5).reshape(())}
        values[name] = codes.astype(np.float32) * (scale[:, None] if per_channel else scale)
        if stem.endswith(cache):
            tensors[f"{stem}.{stem[-6]}_scale"] = np.float32(0.1).reshape(())
    save(folder / "model.safetensors", {name: np.asarray(x) for name, x in tensors.items()})
    config = json.loads((folder / "config.json").read_text())
    if by_file:
        made = {"producer": {"name": "modelopt", "version": "0.27.1"}, "quantization": settings}
        (folder / "hf_quant_config.json").write_text(json.dumps(made))
    else:
        config["quantization_config"] = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, **settings}
        (folder / "config.json").write_text(json.dumps(config))
    return values


def params(folder):
    mesh = make_mesh(1)
    decoder = make_decoder(read_model(folder), mesh, jnp.dtype("float32"))
    return flatten_dict(load_params(decoder, folder, mesh, progress=False), sep="/")


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_modelopt_fp8(by_file, algorithm, tmp_path, caplog):
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    values = modelopt(tmp_path, settings, by_file, per_channel=algorithm != "FP8")
    with caplog.at_level(logging.INFO):
        loaded = params(tmp_path)
    assert "quantized weights: fp8" in caplog.text
    assert "unused tensors" not in caplog.text
    for layer in range(2):
        down = loaded[f"layers_{layer}/mlp/down/kernel"]
        assert down.codes.dtype == ml_dtypes.float8_e4m3fn
        np.testing.assert_array_equal(dequantize(down), values[f"model.layers.{layer}.mlp.down_proj.weight"])


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "MIXED_PRECISION"])
def test_what_else_modelopt_writes_is_refused_by_name(algorithm, tmp_path):
    modelopt(tmp_path, {"quant_algo": algorithm}, True)
    with pytest.raises(CheckpointError, match=f"quant_algo FP8, FP8_PER_CHANNEL_PER_TOKEN or NVFP4, not '{algorithm}'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("names", [("k_proj", "v_proj"), ()])
def test_scales_of_a_cache_are_spoken_of(names, tmp_path, caplog):
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8" if names else None}
    modelopt(tmp_path, settings, True, cache=names or ("nothing",))
    params(tmp_path)
    told = "4 tensor(s): model.layers.0.self_attn.k_proj.k_scale, model.layers.0.self_attn.v_proj.v_scale and 2 more"
    reason = "made for a KV cache in fp8 with fixed scales, are not used: with --kv-cache-dtype fp8"
    assert (f"{told}, {reason}" in caplog.text) == bool(names)
    assert "unused tensors" not in caplog.text


def test_scales_of_a_cache_in_floats(tmp_path, caplog):
    """As llm-compressor writes them: beside the projections, and where the weights need not be quantized."""
    tiny_models.build("tp_gqa", tmp_path)
    more = {f"model.layers.0.self_attn.{part}_scale": np.ones(1, np.float32) for part in "kv"}
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file({name: np.asarray(x) for name, x in tiny_models.tensors("tp_gqa")} | more, tmp_path / "model.safetensors")
    params(tmp_path)
    assert "2 tensor(s): model.layers.0.self_attn.k_scale, model.layers.0.self_attn.v_scale, made for a" in caplog.text


def test_a_stale_index_of_the_model_before(tmp_path):
    tiny_models.build("tp_gqa", tmp_path)
    single = next(tmp_path.glob("*.safetensors"))
    single.rename(tmp_path / "output.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "norm/scale" in params(tmp_path)
