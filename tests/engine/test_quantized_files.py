"""Whole quantized checkpoints through the engine: the tokens of the same values in float32 files."""

import json

import jax
import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, request
from quantized_files import gptq
from safetensors.numpy import save_file

from jaxserve.pallas_kernels.cpu_panels import PanelType
from jaxserve.pallas_kernels.types import PanelArray, QuantArray

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"
GROUP = 32
RNG = np.random.default_rng(21)
PROMPTS = [RNG.integers(5, 500, n).tolist() for n in (2, 37)]
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}


def is_quantized(x) -> bool:
    return isinstance(x, QuantArray)


@pytest.fixture(scope="module", params=["one order", "orders that differ"])
def folders(request, tmp_path_factory, model_folders):
    """(the quantized checkpoint, the same values in float32)."""
    made = []
    for name in ("gptq", "float"):
        folder = tmp_path_factory.mktemp(name)
        tiny_models.build(CASE, folder)
        made.append(folder)
    quantized = {}
    plain = {}
    orders = {}
    for name, tensor in tiny_models.tensors(CASE):
        stem = name.removesuffix(".weight")
        module = name.split(".")[-2]
        if not module.endswith("_proj") or tensor.ndim == 1:
            quantized[name] = plain[name] = tensor
            continue
        shared = "in" if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else module
        key = (name.split(".")[2], shared if request.param == "one order" else module)
        if key not in orders:
            orders[key] = RNG.permutation(np.arange(tensor.shape[1], dtype=np.int32) // GROUP)
        tensors, plain[name] = gptq(tensor.astype(np.float32), orders[key])
        quantized |= {f"{stem}.{part}": value for part, value in tensors.items()}
    for folder, tensors in zip(made, (quantized, plain), strict=True):
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        save_file(tensors, folder / "model.safetensors")
    config = json.loads((made[0] / "config.json").read_text())
    (made[0] / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return made


def tokens_of(folder, **options) -> list[list[int]]:
    engine = make_engine(folder, rows=4, **options)
    kinds = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 5}}
    requests = [
        request(f"{i}-{kind}", prompt, max_tokens=16, **params)
        for i, prompt in enumerate(PROMPTS)
        for kind, params in kinds.items()
    ]
    return [completion.token_ids for completion in generate(engine, *requests)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_act_order(folders, devices):
    """Inputs in the order of their groups; where query, key and value have orders of their own they become floats."""
    quantized, plain = folders
    found = tokens_of(quantized, tensor_parallel_size=devices, quantization="gptq")
    assert found == tokens_of(plain)
    assert len({tuple(ids) for ids in found}) == len(found)


def test_dequantized_while_loading(folders):
    options = {"dequantize": True, "decode_steps": False}
    assert tokens_of(folders[0], **options) == tokens_of(folders[0], decode_steps=False)
    params = make_engine(folders[0], **options).runner.params
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantArray | PanelArray))
    assert not any(map(is_quantized, leaves))
    panels = [leaf for leaf in leaves if isinstance(leaf, PanelArray)]
    assert {kind for leaf in panels for kind in np.asarray(leaf.table)[:, 1].tolist()} <= {PanelType.F32}
    assert {leaf.dtype for leaf in leaves if not isinstance(leaf, PanelArray)} == {np.dtype(np.float32)}


def test_what_stays_quantized(folders, request):
    engine = make_engine(folders[0])
    layer = engine.runner.params["layers_0"]
    kept = {
        name: is_quantized(layer[part][name]["kernel"])
        for part, name in (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down"))
    }
    alike = "one order" in request.node.name
    assert kept == {"qkv": alike, "out": True, "gate_up": alike, "down": True}
    assert layer["mlp"]["down"]["kernel"].order is not None
