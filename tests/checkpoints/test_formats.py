"""Quantized checkpoints of others have exactly the values of the formats' own tools."""

import json

import ml_dtypes
import numpy as np
import pytest
from quantized_files import CASES, EXL2, FP8, GOLDENS, INT8, WEIGHT, as_bytes, exl2, load, read, save

from jaxserve.checkpoints.formats import find_format
from jaxserve.checkpoints.formats.packing import unpack
from jaxserve.checkpoints.quantized import INT4, dequantize


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


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
        codes = plain.codes[:, j].astype(np.float32)
        g = group[j]
        np.testing.assert_array_equal(
            values[:, j], (codes - plain.zero[:, g].astype(np.float32)) * plain.scale[:, g].astype(np.float32)
        )
    arrays["m.weight_g_idx"] = np.full(inputs, -1, np.int32)  # there is none
    np.testing.assert_array_equal(dequantize(read(file, config, arrays, (out, inputs))), dequantize(plain))


def test_fp8_blocks_need_not_divide_the_weight(file):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(20, 50)).astype(FP8)
    scale = rng.random((3, 2), np.float32)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 32]}}
    values = dequantize(read(file, config, {WEIGHT: weight, f"{WEIGHT}_scale_inv": scale}, (20, 50)))
    for i in range(20):
        for j in range(50):
            assert values[i, j] == np.float32(weight[i, j]) * scale[i // 8, j // 32]


def test_scales_as_powers_of_two(file):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}}
    weight = np.ones((2, 64), FP8)
    exponent = np.array([[127, 130], [0, 254]], np.uint8)
    for stored in (exponent, exponent.view(ml_dtypes.float8_e8m0fnu)):
        w = read(file, config, {WEIGHT: weight, f"{WEIGHT}_scale_inv": stored}, (2, 64))
        assert dequantize(w)[:, ::32].tolist() == [[1, 8], [2.0**-127, 2.0**127]]


def test_weights_of_deepseek_v4(file):
    """fp8 in blocks, beside experts in MXFP4 whose bytes are integers with a sign."""
    rng = np.random.default_rng(0)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 32], "scale_fmt": "ue8m0"}}
    exponents = rng.integers(120, 134, (2, 2)).astype(np.uint8)
    stored = exponents.view(ml_dtypes.float8_e8m0fnu)
    weight = rng.normal(size=(16, 64)).astype(FP8)
    values = dequantize(read(file, config, {WEIGHT: weight, "m.scale": stored}, (16, 64)))
    expected = weight.astype(np.float32).reshape(2, 8, 2, 32) * (2.0 ** (exponents - 127.0))[:, None, :, None]
    np.testing.assert_array_equal(values, expected.reshape(16, 64))
    packed = rng.integers(0, 256, (2, 32)).astype(np.uint8)
    values = dequantize(read(file, config, {WEIGHT: packed.view(np.int8), "m.scale": stored}, (2, 64)))
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(2, 64)
    np.testing.assert_array_equal(values, e2m1[codes] * np.repeat(2.0 ** (exponents - 127.0), 32, axis=1))


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
