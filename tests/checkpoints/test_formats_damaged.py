"""Quantized checkpoints that are damaged, lie or are unknown: one clear CheckpointError, at no cost in memory."""

import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_files import CASES, EXL2, WEIGHT, as_bytes, exl2, load, read, save

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats import find_format


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def test_no_quantization_is_no_format():
    assert find_format({"model_type": "llama"}, {}) is None
    assert find_format({"quantization_config": None}, {}) is None


@pytest.mark.parametrize("config", [{"quant_method": "hqq"}, {"bits": 4}, {"quant_method": 7}])
def test_an_unknown_method_names_those_that_are_known(config):
    with pytest.raises(CheckpointError, match="understood are awq, bitsandbytes, compressed-tensors, exl2, fbgemm_fp8"):
        find_format({"quantization_config": config}, {})
    with pytest.raises(CheckpointError, match="must be an object"):
        find_format({"quantization_config": [config]}, {})


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("awq", {"version": "gemv_fast"}, "layouts gemm and gemv"),
        ("awq", {"bits": 8}, "4 bits"),
        ("awq", {"group_size": 0}, "group_size is 0"),
        ("awq", {"group_size": 2**40}, "group_size is 1099511627776"),
        ("awq", {"group_size": 48}, "no whole groups of 48"),
        ("gptq_4", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq_4", {"group_size": -2}, "group_size is -2"),
        ("gptq_4", {"bits": 8}, r"'m.qweight' .* not 8 bits"),
        ("gptq_4", {"group_size": 16}, "'m.qzeros' has shape"),
        ("ct_w4", {"format": "sparse-24-bitmask"}, "sparse-24"),
        ("ct_w4", {"transform_config": {"a": {}}}, "transform_config"),
        ("ct_w4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("ct_w4", {"config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
        ("ct_w4", {"config_groups": {}}, "no config group"),
        ("fp8_block", {"weight_block_size": [128, 0]}, "weight_block_size is 0"),
        ("fp8_block", {"weight_block_size": 128}, "two numbers"),
        ("fp8_block", {"weight_block_size": [8, 64]}, "'m.weight_scale_inv' has shape"),
    ],
)
def test_settings_that_do_not_fit(case, changes, message, file):
    config, shape, arrays, _, _ = load(case)
    config["quantization_config"] |= changes
    with pytest.raises(CheckpointError, match=message):
        read(file, config, arrays, shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 5}, "num_bits"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 48}, "no whole groups"),
        ({"strategy": "channel"}, "'m.weight_scale' has shape"),
        ({"strategy": "token"}, "strategy"),
        ({"strategy": "block"}, "block_structure"),
        ({"type": "float"}, "MXFP4|'m.weight_packed' has dtype int32"),
        ({"symmetric": False}, "lacks tensor 'm.weight_zero_point'"),
    ],
)
def test_config_groups_that_do_not_fit(changes, message, file):
    config, shape, arrays, _, _ = load("ct_w4")
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(CheckpointError, match=message):
        read(file, config, arrays, shape)


@pytest.mark.parametrize("case", CASES)
def test_a_missing_part_is_named(case, file):
    config, shape, arrays, _, _ = load(case)
    needed = set(arrays) - {"m.g_idx", "m.weight_format", "m.weight_shape"}
    needed -= {name for name in arrays if "quant_state" in name}  # without it nothing is quantized
    for name in needed:
        reader = find_format(config, save(file, {n: a for n, a in arrays.items() if n != name}))
        said = WEIGHT if name == f"{WEIGHT}_packed" else name  # either would do
        assert said in reader.parts(WEIGHT) or said.endswith("zero_point")
        with pytest.raises(CheckpointError, match=f"lacks tensor '{said}'"):
            reader.read(WEIGHT, shape)


@pytest.mark.parametrize("case", CASES)
def test_wrong_dtypes_and_shapes_are_named(case, file):
    config, shape, arrays, _, _ = load(case)
    for name, array in arrays.items():
        for wrong in (array.astype(np.float64), np.stack([array, array]), array.reshape(-1)[:-1]):
            made = arrays | {name: wrong}
            if not find_format(config, save(file, made)).parts(WEIGHT):
                continue  # a plain weight
            with pytest.raises(CheckpointError, match=name.rsplit(".", 1)[0]):
                read(file, config, made, shape)


@pytest.mark.parametrize("case", CASES)
def test_another_shape_than_the_models_is_an_error(case, file):
    config, (out, inputs), arrays, _, _ = load(case)
    for shape in ((out + 8, inputs), (out, inputs + 32), (out + 1, inputs), (out, inputs + 1), (inputs, out)):
        with pytest.raises(CheckpointError, match=r"m[._]"):
            read(file, config, arrays, shape)


def test_g_idx_that_names_no_group_or_uneven_ones(file):
    config, shape, arrays, _, _ = load("gptq_4_act_order")
    for change, message in ((2, "from 0 to 2; there are 2"), (-1, "from -1"), (None, "each group 32 inputs")):
        g_idx = arrays["m.g_idx"].copy()
        g_idx[5] = 1 - g_idx[5] if change is None else change
        with pytest.raises(CheckpointError, match=f"'m.g_idx'.*{message}"):
            read(file, config, arrays | {"m.g_idx": g_idx}, shape)


@pytest.mark.parametrize(
    "changes",
    [
        {"blocksize": 0},
        {"blocksize": 2**40},
        {"blocksize": 128},
        {"blocksize": True},
        {"shape": [1, 2**40]},
        {"shape": "much"},
        {"quant_type": "fp4"},
        {"nested_blocksize": -1},
        {"nested_blocksize": 1},
        {"nested_offset": math.inf},
        {"nested_offset": "0"},
    ],
    ids=str,
)
def test_a_quant_state_that_lies(changes, file):
    config, shape, arrays, _, _ = load("bnb_nf4_nested")
    name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(arrays[name]))
    with pytest.raises(CheckpointError, match=r"m\.weight"):
        read(file, config, arrays | {name: as_bytes(state | changes)}, shape)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 60_000, b"[1]", b"\xff", b" " * 70_000])
def test_a_quant_state_that_is_none(text, file):
    config, shape, arrays, _, _ = load("bnb_nf4")
    name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
    with pytest.raises(CheckpointError, match="quant_state"):
        read(file, config, arrays | {name: np.frombuffer(text, np.uint8)}, shape)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("m.q_groups", [7, 0, 4, 8]),
        ("m.q_groups", [4, 1, 4, 8]),
        ("m.q_groups", [4, 0, 4, 0]),
        ("m.q_groups", [4, 0, 4, 9]),
        ("m.q_groups", [4, 0, 2, 8]),
        ("m.q_groups", [4, 8, 4, 0]),
        ("m.q_groups", [4, 0, 4, -1]),
        ("m.q_invperm", [0] * 128),
        ("m.q_invperm", [*range(127), 2**30]),
    ],
)
def test_exl2_tables_that_lie(name, value, file):
    tensors, _ = exl2([(4, 64), (4, 64)], 32)
    wrong = np.array(value, tensors[name].dtype)
    with pytest.raises(CheckpointError, match=name):
        read(file, EXL2, tensors | {name: wrong}, (32, 128))


def test_scales_that_are_no_numbers(file):
    config, shape, arrays, _, _ = load("mxfp4")
    arrays["m_scales"].flat[3] = 255
    with pytest.raises(CheckpointError, match="m_scales"):
        read(file, config, arrays, shape)


ABSURD = st.sampled_from([0, -1, -7, 1, 3, 2**40, 1e308, math.nan, True, None, "", "re:(a+)+$", [], [0], {}, [[]]])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_damaged_is_refused_or_read_in_little_memory(tmp_path, data):
    config, shape, arrays, _, _ = load(data.draw(st.sampled_from(sorted(CASES))))
    quantization = config["quantization_config"]
    groups = quantization.get("config_groups", {}).values()
    target = data.draw(st.sampled_from([quantization, *(group["weights"] for group in groups)]))
    if data.draw(st.booleans()):
        target[data.draw(st.sampled_from(sorted(target)))] = data.draw(ABSURD)
    name = data.draw(st.sampled_from(sorted(arrays)))
    damage = data.draw(st.sampled_from(["bytes", "shape", "dtype", "drop"]))
    raw = arrays[name].reshape(-1)
    if damage == "drop":
        del arrays[name]
    elif damage == "bytes":
        noise = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, raw.nbytes, np.uint8)
        arrays[name] = noise.view(raw.dtype).reshape(arrays[name].shape)
    elif damage == "shape":
        arrays[name] = raw[: data.draw(st.integers(0, raw.size))].reshape(data.draw(st.sampled_from([(-1,), (1, -1)])))
    else:
        arrays[name] = np.zeros(arrays[name].shape, data.draw(st.sampled_from([np.int8, np.int32, np.float16])))
    tensors = save(tmp_path / "model.safetensors", arrays)
    tracemalloc.start()
    try:
        reader = find_format(config, tensors)
        if reader is not None and reader.parts(WEIGHT):
            assert reader.read(WEIGHT, shape).shape == shape
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * 2**20
