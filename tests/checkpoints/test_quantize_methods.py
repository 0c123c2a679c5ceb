"""Rounding, GPTQ and AWQ against their definitions, and the files that others read."""

import ml_dtypes
import numpy as np
import pytest
import quantized_forms
from goldens.record_compressed import GOLDENS, cases
from unpacking import unpack

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.export import compress, quantization_config
from jaxserve.checkpoints.quantize import Scheme, awq_scales, clipped, gptq, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.pallas_kernels.types import QuantArray

SCHEMES = [
    Scheme("int8"),
    Scheme("int8", 64, scale_dtype=ml_dtypes.bfloat16),
    Scheme("int4", 64, scale_dtype=np.float16),
    Scheme("int4", 32, symmetric=False, scale_dtype=ml_dtypes.bfloat16),
    Scheme("int4", None, symmetric=False),
    Scheme("fp8"),
]


def name(scheme):
    size = scheme.group_size or "channel"
    return f"{scheme.kind}-{size}{'' if scheme.symmetric else '-asymmetric'}"


@pytest.fixture(scope="module")
def layer():
    """A weight [48, 192], and inputs [1500, 192] that go together, some of them large."""
    rng = np.random.default_rng(0)
    mix = 2 * np.eye(192) + 0.3 * rng.normal(size=(192, 192))
    x = rng.normal(size=(1500, 192)) @ mix * np.exp(rng.normal(size=192))
    return rng.normal(size=(48, 192)).astype(np.float32), x.astype(np.float32)


def output_error(x, weight, w):
    return np.square(x @ (dequantize(w) - weight).T).mean() / np.square(x @ weight.T).mean()


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_rtn_is_within_half_a_step(layer, scheme):
    weight = layer[0].copy()
    weight[3] = 0
    weight[5] *= 1e4
    w = rtn(weight, scheme)
    size = scheme.group_size or 192
    assert w.block == (1, size)
    assert w.scale.shape == (48, 192 // size)
    assert w.scale.dtype == np.dtype(scheme.scale_dtype)
    assert (w.zero is None) == scheme.symmetric
    change = np.abs(dequantize(w) - weight)
    assert not change[3].any()
    step = np.repeat(w.scale.astype(np.float32), size, 1)
    # A scale that was rounded down leaves the ends of the range out.
    levels = 256 if scheme.kind == "int8" else 16
    slack = 1 + levels * float(ml_dtypes.finfo(scheme.scale_dtype).eps) / 2 + 1e-4
    if scheme.kind == "fp8":
        assert (change <= np.maximum(np.abs(weight) / 16, step * 2**-10) * 1.001).all()
    else:
        assert (change <= step / 2 * slack).all()
        assert change.max() > step.min() / 4


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_ties_are_rounded_as_numpy_rounds_them(kind):
    """Scales and quotients of float32 are rounded once. Quotients of bfloat16 weights often lie between two codes."""
    weight = np.random.default_rng(4).normal(size=(64, 256)).astype(ml_dtypes.bfloat16).astype(np.float32)
    made = rtn(weight, Scheme(kind, 128 if kind == "int4" else None))
    found = np.asarray(made.codes).astype(np.float32) * np.repeat(made.scale, made.block[1], axis=1)
    np.testing.assert_allclose(found, quantized_forms.rounded(weight, kind), rtol=1e-6)


def test_fp8_codes_are_those_of_the_type(layer):
    weight, _ = layer
    w = rtn(weight, Scheme("fp8"))
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(w.codes, (weight / scale).astype(ml_dtypes.float8_e4m3fn))


def paper_gptq(weight, hessian, scheme, damping):
    """Frantar et al.'s equations (2) and (3), column by column in float64, each followed by its elimination."""
    w = weight.astype(np.float64)
    size = w.shape[1]
    inverse = np.linalg.inv(hessian + damping * np.diag(hessian).mean() * np.eye(size))
    codes = np.zeros(w.shape)
    for i in range(size):
        if i % scheme.group_size == 0:
            grid = rtn(w[:, i : i + scheme.group_size], scheme)
        scale = grid.scale[:, 0].astype(np.float64)
        zero = 0 if grid.zero is None else grid.zero[:, 0].astype(np.float64)
        codes[:, i] = np.clip(np.round(w[:, i] / scale) + zero, -8, 7)
        error = (w[:, i] - (codes[:, i] - zero) * scale) / inverse[i, i]
        w -= np.outer(error, inverse[i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_follows_the_paper(layer, symmetric):
    weight, x = layer
    scheme = Scheme("int4", 64, symmetric)
    hessian = x.T.astype(np.float64) @ x
    w = gptq(weight, hessian, scheme, act_order=False)
    expected = paper_gptq(weight, hessian, scheme, 0.01)
    same = w.codes.astype(np.float64) == expected
    assert same.mean() > 0.99  # the rest are ties that float32 breaks otherwise, and what follows from them


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_methods_beat_rounding_on_correlated_inputs(layer, scheme):
    weight, x = layer
    hessian = x.T @ x
    magnitude = np.abs(x).sum(0)
    plain = output_error(x, weight, rtn(weight, scheme))
    assert output_error(x, weight, gptq(weight, hessian, scheme, act_order=False)) < 0.85 * plain
    assert output_error(x, weight, gptq(weight, hessian, scheme)) < 0.6 * plain
    assert output_error(x, weight, clipped(weight, hessian, scheme)) < plain
    scales = awq_scales([weight], hessian, magnitude, scheme)
    assert output_error(x / scales, weight * scales, rtn(weight * scales, scheme)) < 0.85 * plain


def test_awq_scales_leave_even_inputs_alone(layer):
    weight, _ = layer
    np.testing.assert_array_equal(awq_scales([weight], np.eye(192), np.full(192, 7.0), Scheme("int4", 64)), 1)


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_takes_any_hessian(layer, act_order):
    """None at all is rounding; one of a single token cannot be inverted without damping."""
    weight, x = layer
    scheme = Scheme("int4", 64)
    nothing = gptq(weight, np.zeros((192, 192)), scheme, act_order=act_order)
    np.testing.assert_array_equal(nothing.codes, rtn(weight, scheme).codes)
    one = 1e3 * x[:1]
    w = gptq(weight, one.T @ one, scheme, damping=0.0, act_order=act_order)
    assert output_error(x[:1], weight, w) < 0.1 * output_error(x[:1], weight, rtn(weight, scheme))
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, np.full((192, 192), np.nan), scheme)


def test_impossible_schemes(layer):
    with pytest.raises(ValueError, match="groups of 128 do not divide 192 inputs"):
        rtn(layer[0], Scheme("int4", 128))
    with pytest.raises(ValueError, match="int8, int4, fp8, got 'int3'"):
        Scheme("int3")
    with pytest.raises(ValueError, match="neither groups nor zero points"):
        Scheme("fp8", 64)


@pytest.mark.parametrize("case", cases())
def test_files_are_what_compressed_tensors_reads(case):
    """The package rounds what it reads to the scales' bfloat16."""
    weight = cases()[case]
    golden = np.load(GOLDENS)[case]
    np.testing.assert_array_equal(dequantize(weight).astype(ml_dtypes.bfloat16).astype(np.float32), golden)
    np.testing.assert_array_equal(unpack(compress("m", weight), "m"), dequantize(weight))


@pytest.mark.parametrize("zero", [False, True])
def test_awq_layout(zero):
    weight = cases()["int4_zero" if zero else "int4"]
    rows = {name: getattr(weight, name)[:16] for name in ("codes", "scale")}
    weight = QuantArray(**rows, zero=weight.zero[:16] if zero else None, block=weight.block)
    tensors = compress("m", weight, "awq")
    shapes = {name: (values.shape, values.dtype) for name, values in tensors.items()}
    assert shapes == {
        "m.qweight": ((96, 2), np.int32),
        "m.qzeros": ((3, 2), np.int32),
        "m.scales": ((3, 16), np.float16),
    }
    np.testing.assert_array_equal(unpack(tensors, "m"), dequantize(weight))
    first = weight.codes[:8, 0].astype(int) + 8
    lowest_first = sum(first[output] << 4 * i for i, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]))
    assert tensors["m.qweight"][0, 0].view(np.uint32) == lowest_first


def test_what_a_layout_cannot_hold():
    weight = cases()["int4"]
    with pytest.raises(CheckpointError, match="multiples of 8 outputs, not 20"):
        compress("m", weight, "awq")
    ordered = QuantArray(codes=weight.codes, scale=weight.scale, order=np.arange(96), block=weight.block)
    with pytest.raises(CheckpointError, match="column order"):
        compress("m", ordered)
    with pytest.raises(CheckpointError, match="cannot mix float-quantized and pack-quantized"):
        quantization_config({"a": weight, "b": cases()["fp8"]}, [])
    groups = quantization_config({"a": weight, "b": cases()["int8"]}, [])["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["a"], ["b"]]
