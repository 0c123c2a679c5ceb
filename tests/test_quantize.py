"""`jaxserve quantize`: its output approximates the model, for every family, method and layout."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from unpacking import unpacked, write_plain

from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.commands.cli import main
from jaxserve.config import ConfigError
from jaxserve.convert.calibration import fuse, measure, read_windows
from jaxserve.convert.quantize import QuantizeConfig, _Run, quantize_model
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import load_params, read_model
from jaxserve.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "checkpoints" / "demo" / "calibration.txt"
SETTINGS = {"calibration": str(TEXT), "samples": 8, "length": 64}


def quantize(folder, out, **settings):
    quantize_model(str(folder), out, QuantizeConfig(**SETTINGS | settings), progress=False)
    return out


def logits(folder, ids):
    """A prompt's logits, float32 [tokens, vocab], by the engine's decoder and loader, with a plain attention."""
    config = read_model(folder)
    decoder = Decoder(config, config.num_kv_heads, config.vocab_size)
    params = load_params(decoder, folder, make_mesh(), progress=False)

    def attend(window, heads):
        q, k, v = decoder.ops.rotate(heads, config.norm_eps, jnp.float32)
        scores = jnp.einsum("tkgd,skd->tkgs", q, k) / np.float32(config.head_dim**0.5)
        distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
        hidden = (distance < 0) | (distance >= (window or len(ids)))
        return jnp.einsum("tkgs,skd->tkgd", jax.nn.softmax(jnp.where(hidden[:, None, None], -1e30, scores)), v)

    x, rope = decoder.apply({"params": params}, ids, jnp.arange(len(ids)), decoder.ops, method="begin")
    y = None
    for i in range(config.num_layers):
        attention = partial(attend, config.layers[i].attention.window)
        x, y = decoder.layer(config.layers[i]).apply(
            {"params": params[f"layers_{i}"]}, x, y, rope, attention, decoder.ops
        )
    hidden = decoder.apply({"params": params}, x, y, decoder.ops, method="finish")
    return np.asarray(decoder.apply({"params": params}, hidden, decoder.ops, method="logits"))


def distance(folder, out, tmp_path):
    """The relative difference between the logits of a model and of its quantized copy."""
    ids = np.random.default_rng(1).integers(5, 300, 48).astype(np.int32)
    right = logits(folder, ids)
    got = logits(write_plain(out, tmp_path / "plain"), ids)
    return np.sqrt(np.square(got - right).mean() / np.square(right - right.mean(1, keepdims=True)).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "method"),
    [
        ("llama2_mha", "rtn"),
        ("qwen2_group7", "gptq"),
        *((case, "awq") for case in ("llama_biases", "llama2_mha", "qwen2_group7", "qwen3_bfloat16", "mistral_window")),
    ],
)
def test_int8_is_the_same_model(case, method, model_folders, tmp_path):
    """Scales that AWQ moves from one tensor to another cancel, with biases, groups of heads and norms on them."""
    folder = model_folders(case)
    out = quantize(folder, tmp_path / "out", scheme="int8", method=method)
    assert distance(folder, out, tmp_path) < 0.05
    assert {path.name for path in out.iterdir()} == {
        *(f"model-{i + 1:05d}-of-{layers:05d}.safetensors" for layers in [shards(case)] for i in range(layers)),
        *("config.json", "model.safetensors.index.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = read_folder(out)
    assert index["weight_map"] == {name: info.path.name for name, info in tensors.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in tensors.values())
    assert unpacked(out).keys() == tiny_models.manifest(tiny_models.CASES[case].config).keys()


def shards(case):
    return tiny_models.CASES[case].config["num_hidden_layers"] + 1


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"scheme": "fp8"}, None),
        ({"symmetric": False, "group_size": 32}, 32),
        ({"layout": "awq", "symmetric": False}, 128),
        ({"quantize_head": True, "method": "gptq"}, 128),
        ({"group_size": 0, "method": "awq", "quantize_head": True}, None),
    ],
    ids=str,
)
def test_other_ways_to_store_it(settings, size, model_folders, tmp_path):
    folder = model_folders("tp_gqa")
    out = quantize(folder, tmp_path / "out", **settings)
    assert distance(folder, out, tmp_path) < (0.1 if settings.get("scheme") == "fp8" else 0.5)
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    if settings.get("layout") == "awq":
        assert quantization == {
            **{"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
            "modules_to_not_convert": ["lm_head"],
        }
        return
    assert quantization["ignore"] == ([] if settings.get("quantize_head") else ["lm_head"])
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert weights["symmetric"] == settings.get("symmetric", True)
    assert weights["group_size"] == size


@pytest.mark.slow
def test_calibrated_methods_lose_less_than_rounding(tmp_path):
    """Measured on other text of the same kind as the calibration's."""
    ids = np.array(load_tokenizer("checkpoints/demo").encode((TEXT.parent / "heldout.txt").read_text())[:256], np.int32)
    right = logits(TEXT.parent, ids)

    def divergence(method):
        out = quantize("demo", tmp_path / method, method=method, group_size=0, samples=16, length=256)
        got = logits(write_plain(out, tmp_path / f"{method}-plain"), ids)
        return float((jax.nn.softmax(right) * (jax.nn.log_softmax(right) - jax.nn.log_softmax(got))).sum(-1).mean())

    rtn, gptq, awq = map(divergence, ("rtn", "gptq", "awq"))
    assert gptq < 0.7 * rtn
    assert awq < 0.9 * rtn


def test_statistics_are_of_what_the_layers_see(model_folders, tmp_path):
    """The inputs of the first layer's queries are the normed embeddings, of all windows equally."""
    folder = model_folders("llama2_mha")
    run = _Run(folder, tmp_path / "out", QuantizeConfig(method="gptq", **SETTINGS))
    run.begin()
    tensors = {name: info.read() for name, info in run.tensors.items()}
    pieces = {path.removeprefix("layers_0/"): p for path, p in run.pieces.items() if path.startswith("layers_0/")}
    shapes = {path: run.shapes[f"layers_0/{path}"] for path in pieces}
    seen = measure(run.decoder, 0, fuse(pieces, shapes, tensors), run.activations(0)).statistics
    ids = read_windows(TEXT, load_tokenizer(folder), 8, 64)
    assert ids.shape == (8, 64)
    x = tensors["model.embed_tokens.weight"][ids.ravel()].astype(np.float64)
    x /= np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-5)
    x *= tensors["model.layers.0.input_layernorm.weight"]
    hessian, magnitude = seen["attention/qkv/kernel"]
    np.testing.assert_allclose(hessian, x.T @ x, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(magnitude, np.abs(x).sum(0), rtol=1e-5)
    assert {path: len(s.magnitude) for path, s in seen.items()} == {
        **{"attention/qkv/kernel": 64, "attention/out/kernel": 64, "mlp/gate_up/kernel": 64, "mlp/down/kernel": 160}
    }


KILLED = """
import os, signal
from jaxserve.convert import quantize
write = quantize.write_shard
def dies(path, tensors):
    if path.name.startswith("model-00002"):
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, tensors)
quantize.write_shard = dies
"""


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_a_killed_run_goes_on(model_folders, tmp_path):
    folder = model_folders("mistral_window")
    out = tmp_path / "out"
    given = f"quantize_model({str(folder)!r}, Path({str(out)!r}), QuantizeConfig(method='gptq', **{SETTINGS!r}))"
    script = f"{KILLED}\nfrom pathlib import Path\nfrom jaxserve.convert.quantize import *\n{given}"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == -signal.SIGKILL
    assert not (out / "config.json").exists()  # an unfinished folder must not look like a model
    first = out / "model-00001-of-00004.safetensors"
    before = first.stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"begun with other settings \(method: 'gptq', now 'rtn'"):
        quantize(folder, out)
    quantize(folder, out, method="gptq")
    assert first.stat().st_mtime_ns == before
    whole = quantize(folder, tmp_path / "whole", method="gptq")
    assert digests(out) == digests(whole)


MEASURED = """
import resource, sys
from functools import partial
from pathlib import Path
from jaxserve.convert.quantize import *
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
quantize_model(sys.argv[1], Path(sys.argv[2]), QuantizeConfig(scheme="int8"), progress=False)
before = peak()
quantize_model(sys.argv[3], Path(sys.argv[4]), QuantizeConfig(scheme="int8"), progress=False)
print(peak() - before)
"""


def sparse_model(folder, layers):
    """A model of zeros that takes no space on disk, 21 MiB a layer."""
    case = tiny_models._case("llama", hidden=512, layers=layers, intermediate=3072, vocab=64)
    tiny_models._write_json(tiny_models.Path(folder / "config.json"), case.config)
    header = {}
    at = 0
    for name, shape in tiny_models.manifest(case.config).items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return at


@pytest.mark.slow
def test_memory_holds_one_layer(tmp_path):
    """A model of 16 layers takes no more than one of 2."""
    folders = [tmp_path / str(layers) for layers in (2, 16)]
    for folder in folders:
        folder.mkdir()
    small, large = (sparse_model(folder, int(folder.name)) for folder in folders)
    arguments = [str(path) for folder in folders for path in (folder, folder / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", MEASURED, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 0.15 * (large - small)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "gptq"], "name a file with --calibration"),
        (["--scheme", "fp8", "--group-size", "64"], "fp8 has one scale per output channel"),
        (["--scheme", "int8", "--layout", "awq"], "the awq layout holds int4 only, not int8"),
        (["--group-size", "128"], r"group_size 128 does not divide inputs of [64, 160]; [32, 0] do"),
        (["--method", "awq", "--calibration", "nowhere.txt"], "nowhere.txt is no calibration text"),
        (["--method", "awq", "--calibration", str(TEXT), "--length", "500", "--samples", "0"], "must be positive"),
        (["--group-size", "48"], "group_size must be 0 or one of (128, 64, 32), got 48"),
    ],
)
def test_mistakes(flags, message, model_folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantize", str(model_folders("llama2_mha")), str(out), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_folders_that_hold_something_else(model_folders, tmp_path, capsys):
    folder = str(model_folders("llama2_mha"))
    out = tmp_path / "out"
    assert main(["quantize", folder, str(out)]) == 0
    assert main(["quantize", folder, str(out)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["quantize", str(out), str(tmp_path / "again")]) == 1
    assert "is quantized already" in capsys.readouterr().err


def test_calibration_texts(tmp_path):
    tokenizer = load_tokenizer(TEXT.parent)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"text": f"def f_{i}(x): return {i}"}) for i in range(50)))
    assert read_windows(lines, tokenizer, 128, 64).shape[1] == 64
    lines.write_text('{"prompt": 1}')
    with pytest.raises(ConfigError, match='with a "text" each: KeyError'):
        read_windows(lines, tokenizer, 128, 64)
    short = tmp_path / "short.txt"
    short.write_text("def f(x):")
    with pytest.raises(ConfigError, match=r"has \d tokens; one calibration sample is 64"):
        read_windows(short, tokenizer, 128, 64)
