"""`jaxserve quantize` of mixtures of experts, latent attention and other families than Llama's."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import trained_models
from flax.traverse_util import flatten_dict
from unpacking import unpack, unpacked, write_plain

from jaxserve.checkpoints.quantize import rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_folder, read_header
from jaxserve.config import ConfigError
from jaxserve.convert.calibration import FEWEST, Measured, fuse, measure
from jaxserve.convert.products import Product, products
from jaxserve.convert.quantize import QuantizeConfig, _Run, quantize_model
from jaxserve.devices.mesh import make_mesh
from jaxserve.llm import LLM
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import load_params, read_model
from jaxserve.pallas_kernels.ops import Ops

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import perplexity

TEXT = trained_models.DEMO / "calibration.txt"
GOLDEN = json.loads((trained_models.TRAINED / "perplexity.json").read_text())
EXPERTS = ("mixtral_experts", "qwen3_moe_step", "deepseek_v3_groups", "qwen2_moe_shared")
OTHERS = (
    "gemma2_caps",
    "neox_parallel",
    "phi3_window",
    "falcon_40b",
    "opt_350m",
    "glm4_sandwich",
    "qwen3_next_odd",
    "qwen3_5_groups",
)
NEWEST = (
    "axk1_hub", "kolibri_hub", "persimmon_plain", "biogpt_untied", "xglm_untied", "bitnet_hub", "codegen_hub",
    "deepseek_v4_hub", "doge_saved", "diffllama_hub", "qwen4_exp_types",
)  # fmt: skip
PLAIN = (
    "output_projection",
    "gate",
    "kv_b_proj",
    "shared_expert_gate",
    "lm_head",
    "project_in",
    "project_out",
    "embed_out",
    "head",  # DeepSeek V4's names
    "wo_a",
    "input_mix_weight_down",
    "input_mix_weight_up",
    *(f"shard_{i}" for i in range(5)),  # of a table
)
TABLES = ("embed", "transformer.wte")


def quantize(folder, out, **settings):
    given = {"group_size": 0, "calibration": str(TEXT), "samples": 8, "length": 64}
    quantize_model(str(folder), out, QuantizeConfig(**given | settings), progress=False)
    return out


def params(folder):
    config = read_model(folder)
    decoder = Decoder(config, config.num_kv_heads, config.vocab_size)
    return flatten_dict(load_params(decoder, folder, make_mesh(), dequantize=True, progress=False), sep="/")


def check_same_weights(out, tmp_path):
    """Our loader reads what a plain reader of the layout reads, and puts it where that of a plain model goes."""
    got = params(out)
    right = params(write_plain(out, tmp_path / "plain"))
    assert got.keys() == right.keys()
    for path, value in right.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        *((case, {"scheme": "int8"}) for case in (*EXPERTS, *OTHERS)),
        *(pytest.param(case, {"scheme": "int8"}, marks=pytest.mark.slow) for case in NEWEST),
        ("mixtral_experts", {"symmetric": False}),
        ("deepseek_v3_groups", {"scheme": "fp8"}),
        ("qwen3_moe_step", {"layout": "awq"}),
    ],
    ids=str,
)
def test_rounds_every_matrix_of_the_layers(case, settings, model_folders, tmp_path):
    folder = model_folders(case)
    out = quantize(folder, tmp_path / "out", **settings)
    before = {name: info.read() for name, info in read_folder(folder).items()}
    after = unpacked(out)
    assert after.keys() == before.keys()
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    plain = quantization["modules_to_not_convert" if "layout" in settings else "ignore"]
    assert {name.rpartition(".")[2] for name in plain} <= set(PLAIN)
    steps = {"int8": 255, "fp8": 16}.get(settings.get("scheme", ""), 15)  # fp8: half a step at the largest value
    rounded = 0
    for name, right in before.items():
        module = name.removesuffix(".weight")
        table = any(table in name.replace("embed_out", "") for table in TABLES)
        if right.ndim != 2 or module == name or table or module in plain:
            np.testing.assert_array_equal(after[name], right, err_msg=name)
            continue
        rounded += 1
        most = np.abs(right).max(1, keepdims=True)
        assert (np.abs(after[name] - right) <= 1.02 * most / steps).all(), name
        assert (after[name] != right).any(), name
    assert rounded
    check_same_weights(out, tmp_path)


def score(folder, **options):
    llm = LLM(str(folder), dtype="float32", kv_cache_dtype="auto", max_model_len=512, kv_pages=64,
              matmul_backend="cpu", activation_quantization="none", **options)  # fmt: skip
    return perplexity.score(llm, trained_models.text(), trained_models.WINDOW)["perplexity"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int8-dynamic", "int4"])
@pytest.mark.parametrize("model", trained_models.MODELS)
def test_perplexity_is_that_of_the_rounded_weights(model, scheme, tmp_path):
    """By transformers' recorded figures, or for groups of another size by this engine with the plain values."""
    stored, _ = trained_models.write(model, scheme if scheme in ("int8", "fp8") else "float32", tmp_path)
    out = quantize(stored, tmp_path / "out", scheme=scheme, group_size=None)
    found = score(out)
    kind = scheme.removesuffix("-dynamic")
    right = score(write_plain(out, tmp_path / "same")) if kind == "int4" else GOLDEN[model][kind]
    print(f"{model} {scheme}: {found:.4f}, right {right:.4f}")
    assert found == pytest.approx(right, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", trained_models.MODELS)
def test_gptq_loses_less_than_rounding(model, tmp_path):
    """The squared errors of the outputs on the calibration's text are smaller for each matrix of the first layer."""
    stored, _ = trained_models.write(model, "float32", tmp_path)
    settings = {"group_size": 0, "calibration": str(TEXT), "samples": 16, "length": 128}
    run = _Run(stored, tmp_path / "out", QuantizeConfig(method="gptq", **settings))
    run.begin()
    pieces = run.of(0)
    tensors = {name: run.tensors[name].read() for name in run.names(0)}
    shapes = {path: run.shapes[f"layers_0/{path}"] for path in pieces}
    seen = measure(run.decoder, 0, fuse(pieces, shapes, tensors), run.activations(0))
    run.layer(0)
    stored_tensors = {name: info.read() for name, info in read_header(run.file(0)).items()}
    ratios = {}
    for name, product in products(pieces).items():
        hessian = np.asarray(seen.of(product).hessian, np.float64)
        right = tensors[name].astype(np.float32)
        made = unpack(stored_tensors, name.removesuffix(".weight")), dequantize(rtn(right, run.scheme))
        errors = [np.trace((w - right) @ hessian @ (w - right).T) for w in made]
        ratios[name] = errors[0] / errors[1]
    print(model, {name: round(float(ratio), 3) for name, ratio in ratios.items()})
    assert max(ratios.values()) < 1
    assert np.mean(list(ratios.values())) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe_step", "deepseek_v3_groups", "gemma2_caps"])
def test_gptq_of_other_layers(case, model_folders, tmp_path):
    """Every matrix is written close to its values."""
    folder = model_folders(case)
    out = quantize(folder, tmp_path / "out", scheme="int8", method="gptq", samples=4, length=32)
    after = unpacked(out)
    for name, info in read_folder(folder).items():
        right = info.read()
        most = np.abs(right).max() if right.size else 0
        assert np.abs(after[name] - right).max(initial=0) <= 0.2 * most, name
    check_same_weights(out, tmp_path)


def routed(chosen, seed=0):
    """What experts of random weights see of random tokens."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((len(chosen), 8)).astype(np.float32)
    gate_up = jnp.asarray(rng.standard_normal((3, 2 * 4, 8)), jnp.float32)
    return Measured({}, x, np.asarray(chosen)[:, None], gate_up, Ops().gate_of("silu"))


def test_statistics_of_an_expert_are_of_its_tokens():
    chosen = np.arange(900) % 2
    seen = routed(chosen)
    x = seen.tokens[chosen == 1].astype(np.float64)
    np.testing.assert_allclose(seen.of(Product("mlp/experts_gate_up", 1)).hessian, x.T @ x, rtol=1e-3, atol=1e-2)
    gate, up = np.moveaxis((x @ np.asarray(seen.gate_up[1], np.float64).T).reshape(len(x), 4, 2), -1, 0)
    h = gate / (1 + np.exp(-gate)) * up
    got = seen.of(Product("mlp/experts_down", 1))
    np.testing.assert_allclose(got.hessian, h.T @ h, rtol=1e-3, atol=0.2)
    np.testing.assert_allclose(got.magnitude, np.abs(h).sum(0), rtol=1e-3)


@pytest.mark.parametrize("own", [0, 3])
def test_an_expert_with_few_tokens_is_measured_on_others_too(own):
    chosen = np.zeros(900, int)
    chosen[100 : 100 + own] = 2
    seen = routed(chosen)
    magnitude = np.asarray(seen.of(Product("mlp/experts_gate_up", 2)).magnitude)
    others = np.flatnonzero(chosen == 0)
    spread = others[np.linspace(0, len(others) - 1, FEWEST - own).round().astype(int)]
    taken = seen.tokens[[*range(100, 100 + own), *spread]]
    np.testing.assert_allclose(magnitude, np.abs(taken).sum(0), rtol=1e-5)
    few = replace(seen, tokens=seen.tokens[:100], chosen=seen.chosen[:100], _last=None)
    np.testing.assert_allclose(
        few.of(Product("mlp/experts_gate_up", 2)).magnitude, np.abs(few.tokens).sum(0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("case", "method", "message"),
    [
        ("granite_moe_stacked", "rtn", "they stack the matrices of all experts in one tensor"),
        ("granite_moe_swa_older", "rtn", "they stack the matrices of all experts in one tensor"),
        ("hy_v4_hub", "rtn", "they stack the matrices of all experts in one tensor"),
        ("lara_mini_types", "rtn", "they stack the matrices of all experts in one tensor"),
        ("aria_text_hub", "rtn", "they stack the matrices of all experts in one tensor"),
        ("minimax_m3_text", "rtn", "they stack the matrices of all experts in one tensor"),
        ("dbrx_hub", "rtn", "their matrices are stored transposed"),
        ("gpt2_scaled", "rtn", "their matrices are stored transposed"),
        ("longcat_hub", "rtn", "several of their layers have the same tensors; serve the model with --quantization"),
        ("zamba2_hub", "rtn", "several of their layers have the same tensors"),
        ("qwen3_next_odd", "gptq", "gptq cannot measure the layers of the family qwen3_next"),
        ("mixtral_experts", "awq", "in layers like Llama's only, not in those of mixtral"),
        ("phi3_window", "awq", "not in those of phi3"),
    ],
)
def test_refusals(case, method, message, model_folders, tmp_path):
    with pytest.raises(ConfigError, match=message):
        quantize(model_folders(case), tmp_path / "out", scheme="int8", method=method)
    assert not (tmp_path / "out").exists()
