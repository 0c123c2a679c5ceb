"""What checkpoints say of the inputs of their products."""

import numpy as np
import pytest
from quantized_files import GOLDENS, WEIGHT, load, save

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import find_format
from jaxserve.checkpoints.formats.activations import of_compressed, of_fp8
from jaxserve.checkpoints.quantized import common_form
from jaxserve.pallas_kernels.types import Activations

FP8 = "float8_e4m3fn"
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (None, None),
        (TOKEN, Activations("int8")),
        (TOKEN | {"type": "float"}, Activations(FP8)),
        (TOKEN | {"type": "float", "strategy": "tensor"}, Activations(FP8)),
        (TOKEN | {"type": "float", "strategy": "tensor", "dynamic": False}, Activations(FP8, static=True)),
        (TOKEN | {"type": "float", "strategy": "group", "group_size": 128}, Activations(FP8, group=128)),
    ],
)
def test_compressed(settings, wanted):
    assert of_compressed(settings) == (wanted, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"symmetric": False}, "zero points"),
        ({"num_bits": 4}, "with 4 bits"),
        ({"dynamic": "local", "strategy": "tensor_group"}, "tensor_group"),
        ({"dynamic": False}, "strategy 'token' with dynamic False"),
    ],
)
def test_what_is_left_as_it_is(changes, why):
    wanted, reason = of_compressed(TOKEN | changes)
    assert wanted is None
    assert why in reason


def test_fp8():
    assert of_fp8("fp8", {"activation_scheme": "dynamic"}, (128, 128))[0] == Activations(FP8, group=128)
    assert of_fp8("fp8", {}, None)[0] == Activations(FP8)
    assert of_fp8("fp8", {"activation_scheme": "static"}, None)[0] == Activations(FP8, static=True)
    assert of_fp8("fp8", {"activation_scheme": "static"}, (128, 128))[0] is None
    assert of_fp8("fbgemm_fp8", {"activation_scale_ub": 900}, None)[0] == Activations(FP8, ceiling=900.0)
    assert of_fp8("fbgemm_fp8", {}, None)[0] == Activations(FP8, ceiling=1200.0)
    assert of_fp8("modelopt", {"quant_algo": "FP8"}, None)[0] == Activations(FP8, static=True)
    assert of_fp8("modelopt", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, None)[0] == Activations(FP8)
    with pytest.raises(CheckpointError, match="activation_scale_ub is 'x'"):
        of_fp8("fbgemm_fp8", {"activation_scale_ub": "x"}, None)


def open_case(tmp_path, case: str, inputs: dict | None, extra: dict | None = None):
    config, shape, arrays, *_ = load(case)
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"] = inputs
    return find_format(config, save(tmp_path / "model.safetensors", arrays | (extra or {}))), shape


def test_int8_weight(tmp_path):
    reader, shape = open_case(tmp_path, "ct_int8", TOKEN)
    w = reader.read(WEIGHT, shape)
    assert (w.activations, w.input_scale) == (Activations("int8"), None)
    assert "activations int8 per token" in reader.description


def test_asymmetric_activations_are_told_of(tmp_path):
    reader, shape = open_case(tmp_path, "ct_int8", TOKEN | {"symmetric": False})
    assert reader.read(WEIGHT, shape).activations is None
    assert "activations as they are (zero points are not read)" in reader.description


def test_static_scale(tmp_path):
    static = TOKEN | {"type": "float", "strategy": "tensor", "dynamic": False}
    name = f"{WEIGHT.removesuffix('.weight')}.input_scale"
    scale = {name: np.array([0.25], np.float32)}
    reader, shape = open_case(tmp_path, "ct_fp8", static, scale)
    assert name in reader.parts(WEIGHT)
    w = reader.read(WEIGHT, shape)
    assert w.activations == Activations(FP8, static=True)
    assert w.input_scale.tolist() == [[0.25]]
    lacking, _ = open_case(tmp_path, "ct_fp8", static)
    assert lacking.read(WEIGHT, shape).activations is None
    wrong, _ = open_case(tmp_path, "ct_fp8", static, {name: np.array([np.nan], np.float32)})
    with pytest.raises(CheckpointError, match="input_scale' is nan, not a positive number"):
        wrong.read(WEIGHT, shape)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("fp8_block", Activations(FP8, group=32)),
        ("fp8_fbgemm", Activations(FP8, ceiling=1200.0)),
    ],
)
def test_goldens_of_fp8(tmp_path, case, wanted):
    assert (GOLDENS / f"{case}.safetensors").exists()
    reader, shape = open_case(tmp_path, case, None)
    assert reader.read(WEIGHT, shape).activations == wanted


def test_groups_that_differ(tmp_path):
    """Where two config groups store weights alike, but round inputs differently, nobody knows which it is."""
    config, shape, arrays, *_ = load("ct_int8")
    group = next(iter(config["quantization_config"]["config_groups"].values()))
    config["quantization_config"]["config_groups"] = {
        "a": group | {"input_activations": TOKEN},
        "b": group | {"input_activations": None},
    }
    reader = find_format(config, save(tmp_path / "model.safetensors", arrays))
    assert reader.read(WEIGHT, shape).activations is None


def test_parts_of_one_weight(tmp_path):
    """Query, key and value have the same inputs: the largest of their scales is for all."""
    static = TOKEN | {"type": "float", "strategy": "tensor", "dynamic": False}
    parts = []
    for scale in (0.25, 0.5, 0.125):
        name = f"{WEIGHT.removesuffix('.weight')}.input_scale"
        reader, shape = open_case(tmp_path, "ct_fp8", static, {name: np.array([scale], np.float32)})
        parts.append(reader.read(WEIGHT, shape))
    joined = common_form(parts)
    assert all(part.input_scale.tolist() == [[0.5]] for part in joined)
    reader, shape = open_case(tmp_path, "ct_fp8", TOKEN | {"type": "float"})
    joined = common_form([*parts, reader.read(WEIGHT, shape)])
    assert all(part.activations is None and part.input_scale is None for part in joined)
