"""Quantized checkpoints of others: exactly the values of the formats' own tools, and one clear error for bad ones."""

import json
import math
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoints.errors import CheckpointError
from checkpoints.formats import find_format
from checkpoints.formats.packing import unpack
from checkpoints.quantized import INT4, dequantize
from checkpoints.safetensors import DTYPES, read_header

GOLDENS = Path(__file__).parent.parent / "goldens" / "formats"
INT8, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
# case: codes, scales that share a block, zero points, act-order, the reader's name
CASES = {
    "awq": (INT4, (1, 32), True, False, "awq"),
    "gptq_4": (INT4, (1, 32), False, False, "gptq"),
    "gptq_4_act_order": (INT4, (1, 32), True, True, "gptq"),
    "gptq_4_asymmetric": (INT4, (1, 32), True, False, "gptq"),
    "gptq_4_v2": (INT4, (1, 32), True, False, "gptq"),
    "gptq_8": (INT8, (1, 64), False, False, "gptq"),
    "gptq_8_act_order": (INT8, (1, 32), True, True, "gptq"),
    "gptq_3": (INT4, (1, 32), True, False, "gptq"),
    "gptq_2": (INT4, (1, 32), True, False, "gptq"),
    "ct_w4": (INT4, (1, 32), False, False, "compressed-tensors"),
    "ct_w4_asymmetric": (INT4, (1, 32), True, False, "compressed-tensors"),
    "ct_w4_channel": (INT4, (1, 100), True, False, "compressed-tensors"),
    "ct_w8": (INT8, (1, 128), False, False, "compressed-tensors"),
    "ct_int8": (INT8, (1, 128), False, False, "compressed-tensors"),
    "ct_int8_asymmetric": (INT8, (1, 64), True, False, "compressed-tensors"),
    "ct_int8_tensor": (INT8, (16, 128), True, False, "compressed-tensors"),
    "ct_fp8": (FP8, (1, 128), False, False, "compressed-tensors"),
    "ct_fp8_tensor": (FP8, (16, 128), False, False, "compressed-tensors"),
    "ct_fp8_block": (FP8, (8, 64), False, False, "compressed-tensors"),
    "ct_mxfp4": (INT8, (1, 32), False, False, "compressed-tensors"),
    "fp8_block": (FP8, (8, 32), False, False, "fp8"),
    "fp8_block_bfloat16": (FP8, (8, 32), False, False, "fp8"),
    "fp8_tensor": (FP8, (32, 64), False, False, "fp8"),
    "fp8_fbgemm": (FP8, (1, 64), False, False, "fp8"),
    "bnb_int8": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_nf4": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_nf4_nested": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_fp4": (INT8, (1, 64), False, False, "bitsandbytes"),
    "bnb_fp4_nested": (INT8, (1, 64), False, False, "bitsandbytes"),
    "mxfp4": (INT8, (1, 32), False, False, "mxfp4"),
}
WEIGHT = "m.weight"


def load(case):
    """(config, shape, tensors of the checkpoint as arrays, rows, expected) of a golden file."""
    path = GOLDENS / f"{case}.safetensors"
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = {name: info.read() for name, info in read_header(path).items()}
    rows, expected = arrays.pop("rows"), arrays.pop("expected")
    return json.loads(metadata["config"]), tuple(json.loads(metadata["shape"])), arrays, rows, expected


def save(path, arrays):
    """The tensors of a new safetensors file with these arrays."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, at = {}, 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        at += array.nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(a.tobytes() for a in arrays.values()))
    return read_header(path)


def read(path, config, arrays, shape, weight=WEIGHT):
    reader = find_format(config, save(path, arrays))
    assert set(reader.parts(weight)) <= arrays.keys()
    return reader.read(weight, shape)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


# Right values


def test_each_golden_file_is_a_case():
    assert {path.stem for path in GOLDENS.glob("*.safetensors")} == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_formats_own_tools(case, file):
    config, shape, arrays, rows, expected = load(case)
    dtype, block, has_zero, has_order, name = CASES[case]
    reader = find_format(config, save(file, arrays))
    assert reader.name == name
    assert set(reader.parts(WEIGHT)) == arrays.keys()
    assert reader.parts("other.weight") == ()
    w = reader.read(WEIGHT, shape)
    assert (w.codes.dtype, w.shape, w.block) == (dtype, shape, block)
    assert (w.zero is not None, w.order is not None) == (has_zero, has_order)
    values = dequantize(w)[rows]
    if case == "bnb_int8":  # multiplies once where the reference does twice
        np.testing.assert_allclose(values, expected, rtol=2**-22)
    elif case.startswith("bnb"):
        np.testing.assert_array_equal(reader.decode(WEIGHT, shape)[rows], expected)
        largest = np.abs(expected).reshape(len(rows), -1, 64).max(2).repeat(64, 1)
        assert (np.abs(values - expected) <= largest * (1 / 254 + 1e-6)).all()
    else:
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_unpacked_from_the_lowest_bits_on(bits):
    words = np.random.default_rng(bits).integers(0, 2**32, (3, 2 * bits), np.uint32)
    for row, codes in zip(words, unpack(words, bits), strict=True):
        number = sum(int(word) << (32 * i) for i, word in enumerate(row))
        assert codes.tolist() == [number >> (bits * i) & (2**bits - 1) for i in range(64)]


def bit_rows(codes, bits):
    """ExLlamaV2's pack_columns, one Python number per column: codes [in, out] -> int32 [in * bits / 32, out]."""
    rows = len(codes) * bits // 32
    made = np.empty((rows, codes.shape[1]), np.uint32)
    for column in range(codes.shape[1]):
        number = sum(int(code) << (bits * i) for i, code in enumerate(codes[:, column]))
        made[:, column] = [number >> (32 * i) & 0xFFFFFFFF for i in range(rows)]
    return made.view(np.int32)


def exl2(groups, out, seed=0):
    """An EXL2 weight of (bits, inputs) groups: its tensors, and its values by ExLlamaV2's formulas, one by one."""
    rng = np.random.default_rng(seed)
    inputs, padded = sum(size for _, size in groups), -(-out // 32) * 32
    place = rng.permutation(inputs)  # of each input
    root = rng.integers(0, 16, (len(groups), padded))
    # Small enough for float16 to lose bits below its normal numbers.
    largest = rng.uniform(0.001, 0.02, len(groups)).astype(np.float16)
    packed, table, sorted_values, first = [], [], np.empty((inputs, out), np.float32), 0
    for i, (bits, size) in enumerate(groups):
        codes = rng.integers(0, 2**bits, (size, padded))
        table += [bits, sum(map(len, packed))]
        packed.append(bit_rows(codes, bits))
        for o in range(out):
            scale = np.float16((int(root[i, o]) + 1) ** 2) * np.float16(largest[i] / np.float16(256))
            for k in range(size):
                sorted_values[first + k, o] = np.float32(int(codes[k, o]) - 2 ** (bits - 1)) * np.float32(scale)
        first += size
    tensors = {
        "m.q_weight": np.concatenate(packed),
        "m.q_scale": np.concatenate([bit_rows(root[i][:, None], 4).T for i in range(len(groups))]),
        "m.q_scale_max": largest,
        "m.q_groups": np.array(table, np.int16),
        "m.q_invperm": place.astype(np.int32),
    }
    return tensors, np.stack([sorted_values[place[j]] for j in range(inputs)], 1)


EXL2 = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}


@pytest.mark.parametrize(
    ("groups", "out", "dtype", "common"),
    [
        ([(4, 128), (4, 128), (3, 64), (2, 32)], 64, INT4, 32),
        ([(8, 32), (6, 96), (5, 64), (5, 64), (4, 32), (3, 32), (2, 64)], 40, INT8, 32),
        ([(6, 128), (6, 64)], 32, INT8, 64),
    ],
)
def test_exl2(groups, out, dtype, common, file):
    tensors, expected = exl2(groups, out)
    w = read(file, EXL2, tensors, (out, expected.shape[1]))
    assert (w.codes.dtype, w.block) == (dtype, (1, common))
    np.testing.assert_array_equal(dequantize(w), expected)


def test_compressed_tensors_with_act_order(file):
    config, (out, inputs), arrays, _, _ = load("ct_w4_asymmetric")
    group = np.random.default_rng(0).permutation(inputs) // 32
    plain = read(file, config, arrays, (out, inputs))
    arrays["m.weight_g_idx"] = group.astype(np.int32)
    values = dequantize(read(file, config, arrays, (out, inputs)))
    for j in range(inputs):
        codes, g = plain.codes[:, j].astype(np.float32), group[j]
        np.testing.assert_array_equal(
            values[:, j], (codes - plain.zero[:, g].astype(np.float32)) * plain.scale[:, g].astype(np.float32)
        )
    arrays["m.weight_g_idx"] = np.full(inputs, -1, np.int32)  # there is none
    np.testing.assert_array_equal(dequantize(read(file, config, arrays, (out, inputs))), dequantize(plain))


def test_fp8_blocks_need_not_divide_the_weight(file):
    rng = np.random.default_rng(0)
    weight, scale = rng.normal(size=(20, 50)).astype(FP8), rng.random((3, 2), np.float32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 32]}}
    values = dequantize(read(file, config, {WEIGHT: weight, f"{WEIGHT}_scale_inv": scale}, (20, 50)))
    for i in range(20):
        for j in range(50):
            assert values[i, j] == np.float32(weight[i, j]) * scale[i // 8, j // 32]


def test_scales_as_powers_of_two(file):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}}
    weight, exponent = np.ones((2, 64), FP8), np.array([[127, 130], [0, 254]], np.uint8)
    for stored in (exponent, exponent.view(ml_dtypes.float8_e8m0fnu)):
        w = read(file, config, {WEIGHT: weight, f"{WEIGHT}_scale_inv": stored}, (2, 64))
        assert dequantize(w)[:, ::32].tolist() == [[1, 8], [2.0**-127, 2.0**127]]


def test_a_4_bit_weight_whose_rows_are_no_whole_blocks_comes_exactly(file):
    config, (out, inputs), arrays, rows, expected = load("bnb_nf4")
    state = json.loads(bytes(arrays[f"{WEIGHT}.quant_state.bitsandbytes__nf4"]))
    shape = (out * 4, inputs // 4)
    arrays[f"{WEIGHT}.quant_state.bitsandbytes__nf4"] = as_bytes(state | {"shape": list(shape)})
    values = read(file, config, arrays, shape)
    assert isinstance(values, np.ndarray)
    np.testing.assert_array_equal(values.reshape(out, inputs)[rows], expected)


def test_gptq_modules_of_their_own_bits_and_groups(file):
    config, shape, arrays, rows, expected = load("gptq_8")
    config["quantization_config"] |= {"bits": 4, "group_size": 16, "dynamic": {"+:.*down.*": {"bits": 8}}}
    np.testing.assert_array_equal(dequantize(read(file, config, arrays, shape))[rows], expected)


@pytest.mark.parametrize("order", [1, -1])
def test_compressed_tensors_finds_the_config_group_by_the_tensors(order, file):
    groups = {}
    for case in ("ct_w4", "ct_w4_asymmetric", "ct_w8", "ct_fp8_block", "ct_int8"):
        groups[case] = load(case)[0]["quantization_config"]["config_groups"]["group_0"]
    groups = dict(list(groups.items())[::order])
    for case in groups:
        config, shape, arrays, rows, expected = load(case)
        config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
        np.testing.assert_array_equal(dequantize(read(file, config, arrays, shape))[rows], expected)


def test_plain_weights_beside_quantized_ones_are_left_alone(file):
    for case in CASES:
        config, _, arrays, _, _ = load(case)
        plain = {"lm_head.weight": np.ones((2, 2), ml_dtypes.bfloat16), "m.bias": np.ones(2, np.float32)}
        reader = find_format(config, save(file, arrays | plain))
        assert reader.parts("lm_head.weight") == ()
        assert reader.parts("m.bias") == ()


# Bad ones


def as_bytes(state):
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


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
        ("awq", {"version": "gemv"}, "gemm layout"),
        ("awq", {"bits": 8}, "4 bits"),
        ("awq", {"group_size": 0}, "group_size is 0"),
        ("awq", {"group_size": 2**40}, "group_size is 1099511627776"),
        ("awq", {"group_size": 48}, "no whole groups of 48"),
        ("gptq_4", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq_4", {"group_size": -2}, "group_size is -2"),
        ("gptq_4", {"bits": 8}, r"'m.qweight' .* not 8 bits"),
        ("gptq_4", {"group_size": 16}, "'m.qzeros' has shape"),
        ("ct_w4", {"format": "nvfp4-pack-quantized"}, "nvfp4"),
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
        ({"strategy": "tensor_group"}, "strategy"),
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
