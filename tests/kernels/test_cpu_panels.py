"""Weights in panels on CPU: what they hold is what the file holds, and products with them against float64 NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoints.formats.gguf_blocks import decode
from jaxserve.checkpoints.gguf import TYPES
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.cpu_panels import GGUF_TYPES, PanelType, Rows
from jaxserve.pallas_kernels.types import PanelArray, QuantArray

pytestmark = pytest.mark.skipif(not cpu_panels.available(), reason="no C++ compiler")

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 33]
BLOCK_TYPES = {kind.name: kind for kind in TYPES.values() if kind.name in GGUF_TYPES}


def blocks_of(name: str, out: int, inputs: int, code: int | None = None) -> np.ndarray:
    """Blocks of a GGUF type [out, bytes of a row], with scales of moderate size and of both signs. The other bytes are
    random, or all `code`."""
    kind = BLOCK_TYPES[name]
    rng = np.random.default_rng(inputs)
    data = rng.integers(0, 256, (out, inputs // kind.size, kind.nbytes), np.uint8)
    if code is not None:
        data[:] = code
    alone = {"Q8_0": 0, "Q4_0": 0, "Q5_0": 0, "Q6_K": 208, "Q3_K": 108, "IQ4_NL": 0, "IQ4_XS": 0}
    for at in [alone[name]] if name in alone else [80, 82] if name == "Q2_K" else [0, 2]:
        scale = (rng.uniform(0.2, 2, data.shape[:2]) * rng.choice([-1, 1], data.shape[:2]) / 64).astype(np.float16)
        data[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return data.reshape(out, -1)


def values_of(name: str, rows: np.ndarray, inputs: int) -> np.ndarray:
    return dequantize(decode(rows.reshape(-1), BLOCK_TYPES[name], (len(rows), inputs)))


def gguf(name: str, out: int, inputs: int, arithmetic: str, code: int | None = None) -> tuple[PanelArray, np.ndarray]:
    data = blocks_of(name, out, inputs, code)
    packed = cpu_panels.pack([Rows(GGUF_TYPES[name], data)], np.arange(out), inputs, arithmetic)
    return jax.tree.map(jnp.asarray, packed), values_of(name, data, inputs)


def inputs_of(tokens: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(tokens).standard_normal((tokens, inputs)).astype(np.float32)


def check(y, x: np.ndarray, values: np.ndarray, tolerance: float) -> None:
    """Errors below `tolerance` of the sum of the terms' sizes."""
    want = x.astype(np.float64) @ values.T.astype(np.float64)
    sizes = np.abs(x) @ np.abs(values.astype(np.float64)).T
    error = np.abs(np.asarray(y, np.float64) - want)
    assert (error <= tolerance * sizes).all(), f"off by {(error / sizes).max():.1e} of the sum of the terms' sizes"


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(("inputs", "out"), [(1, 1), (7, 5), (64, 129), (201, 80), (768, 96)])
def test_products_with_floats(dtype, inputs, out):
    values = np.random.default_rng(0).standard_normal((out, inputs)).astype(dtype)
    w = jax.tree.map(jnp.asarray, cpu_panels.pack_floats(values, "float32"))
    for tokens in COUNTS:
        x = inputs_of(tokens, inputs)
        check(jax.jit(cpu_panels.matmul)(x, w), x, values.astype(np.float32), 2e-6)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 64])
def test_16_bits_give_the_bits_of_float32(dtype, tokens):
    values = np.random.default_rng(1).standard_normal((200, 321)).astype(dtype)
    values[0, :2] = np.array([2.0**-24, -(2.0**-20)]).astype(dtype)  # subnormal numbers of float16
    short, wide = (
        jax.tree.map(jnp.asarray, cpu_panels.pack_floats(v, "float32")) for v in (values, values.astype(np.float32))
    )
    x = inputs_of(tokens, 321)
    assert short.data.nbytes < 0.51 * wide.data.nbytes
    np.testing.assert_array_equal(cpu_panels.matmul(x, short), cpu_panels.matmul(x, wide))
    ids = jnp.array([0, 7, 199, 1000, -3], jnp.int32)
    np.testing.assert_array_equal(cpu_panels.rows(short, ids), values.astype(np.float32)[[0, 7, 199, 199, 0]])


def test_bfloat16_products_in_chunks_of_inputs():
    values = np.random.default_rng(3).standard_normal((150, 5001)).astype(ml_dtypes.bfloat16)
    w = jax.tree.map(jnp.asarray, cpu_panels.pack_floats(values, "bfloat16"))
    x = inputs_of(20, 5001)
    y = cpu_panels.matmul(x, w)
    check(y, x, values, 2**-7)
    for row in (0, 19):
        np.testing.assert_array_equal(y[row : row + 1], cpu_panels.matmul(x[row : row + 1], w))


def test_bfloat16_products():
    values = np.random.default_rng(2).standard_normal((70, 99)).astype(ml_dtypes.bfloat16)
    w = jax.tree.map(jnp.asarray, cpu_panels.pack_floats(values, "bfloat16"))
    for tokens in COUNTS:
        x = inputs_of(tokens, 99)
        check(cpu_panels.matmul(x, w), x, values.astype(np.float32), 2**-8)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_panels_hold_what_the_file_holds(name):
    """To the last bit; in at most 3% more bytes than the file, for Q3_K's scales of 6 bits 6%."""
    inputs = 512
    w, values = gguf(name, 48, inputs, "float32")
    np.testing.assert_array_equal(cpu_panels.rows(w, jnp.arange(48, dtype=jnp.int32)), values)
    assert (
        w.data.nbytes
        <= (1.06 if name == "Q3_K" else 1.03) * 48 * inputs * BLOCK_TYPES[name].nbytes / BLOCK_TYPES[name].size
    )


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("inputs", [256, 1280])
def test_products_with_gguf(name, inputs):
    for arithmetic, tolerance in (("float32", 2e-6), ("int8", 4e-3)):
        w, values = gguf(name, 70, inputs, arithmetic)
        for tokens in COUNTS:
            x = inputs_of(tokens, inputs)
            check(jax.jit(cpu_panels.matmul)(x, w), x, values, tolerance)


def rounded(x: np.ndarray) -> np.ndarray:
    """x in steps of a 127th of the largest of each 32 inputs."""
    blocks = x.reshape(len(x), -1, 32).astype(np.float32)
    peak = np.abs(blocks).max(axis=2, keepdims=True)
    return (np.rint(blocks * (np.float32(127) / peak)) * (peak / np.float32(127))).reshape(x.shape)


def in_steps(tokens: int, inputs: int) -> np.ndarray:
    """Inputs that are whole steps of their blocks of 32, and so are not moved by rounding to signed bytes."""
    rng = np.random.default_rng(tokens)
    codes = rng.integers(-127, 128, (tokens, inputs)).astype(np.float32)
    codes[:, ::32] = 127
    steps = np.repeat(2.0 ** rng.integers(-8, 3, (tokens, -(-inputs // 32))), 32, axis=1)[:, :inputs]
    return codes * steps.astype(np.float32)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_integer_products_are_exact_but_for_the_rounding_of_x(name):
    w, values = gguf(name, 64, 512, "int8")
    for tokens in (1, 3, 4, 9):
        x = inputs_of(tokens, 512)
        check(cpu_panels.matmul(x, w), rounded(x), values, 3e-6)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("code", [0x00, 0x7F, 0x80, 0xFF])
def test_no_sum_of_integers_overflows(name, code):
    """The largest codes times the largest inputs: processors add up some of these products in 16 bits. An overflow
    changes the sum of a block by 65,536 times its scale. The tolerance is for processors that multiply unsigned codes:
    128 is added to codes of 8 bits, and taking it off again in float32 loses some of its precision."""
    w, values = gguf(name, 16, 256, "int8", code)
    for tokens in (1, 3, 4, 9, 12):
        x = np.full((tokens, 256), 127, np.float32)
        x[1::3] = -127
        x[2::3, 1::2] = -127
        check(cpu_panels.matmul(x, w), x, values, 1e-5)


@pytest.mark.parametrize("name", [*BLOCK_TYPES, "bfloat16"])
@pytest.mark.parametrize("arithmetic", ["float32", "int8", "bfloat16"])
def test_a_row_s_result_does_not_depend_on_its_neighbours(name, arithmetic):
    if name == "bfloat16":
        values = np.random.default_rng(3).standard_normal((112, 1280)).astype(name)
        w = jax.tree.map(jnp.asarray, cpu_panels.pack_floats(values, arithmetic))
    else:
        w, _ = gguf(name, 112, 1280, arithmetic)
    x = inputs_of(40, 1280)
    together = np.asarray(cpu_panels.matmul(x, w))
    for count in (1, 2, 3, 4, 5, 7, 8, 20):
        np.testing.assert_array_equal(cpu_panels.matmul(x[:count], w), together[:count])


@pytest.mark.parametrize("count", [0, 1, 3, 7, 20, 1000])
def test_only_the_rows_that_matter(count):
    w, values = gguf("Q4_K", 64, 256, "int8")
    x = inputs_of(20, 256)
    x[count:] = np.nan
    y = np.asarray(jax.jit(cpu_panels.matmul)(x, w, jnp.int32(count)))[:count]
    check(y, x[:count], values, 4e-3)


def test_what_is_no_number_stays_none():
    w, _ = gguf("Q8_0", 32, 64, "int8")
    x = inputs_of(3, 64)
    x[0, 40] = np.nan
    x[1, 3] = np.inf
    y = np.asarray(cpu_panels.matmul(x, w))
    assert np.isnan(y[:2]).all()
    assert np.isfinite(y[2]).all()


def test_rows_of_several_types_and_none():
    """Partials in an order of their own, each panel of one type; a row that nothing goes to is zero."""
    q4 = blocks_of("Q4_K", 48, 512)
    q6 = blocks_of("Q6_K", 16, 512)
    source = np.concatenate([np.arange(47, 31, -1), 48 + np.arange(16), np.arange(32), [-1]])
    values = np.concatenate([values_of("Q4_K", q4, 512), values_of("Q6_K", q6, 512), np.zeros((1, 512), np.float32)])
    parts = [Rows(GGUF_TYPES["Q4_K"], q4), Rows(GGUF_TYPES["Q6_K"], q6)]
    packed = cpu_panels.pack(parts, source, 512, "float32")
    assert packed is not None
    assert packed.shape == (65, 512)
    for tokens in (1, 9):
        x = inputs_of(tokens, 512)
        check(cpu_panels.matmul(x, jax.tree.map(jnp.asarray, packed)), x, values[source], 2e-6)
    assert cpu_panels.pack(parts, np.arange(40, 56) - np.arange(16) % 2, 512, "float32") is None


@pytest.mark.parametrize("codes", [ml_dtypes.int4, np.int8], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (1, 200), (4, 64)], ids=str)
@pytest.mark.parametrize("offsets", [False, True])
def test_other_quantized_weights(codes, block, offsets):
    rng = np.random.default_rng(4)
    out = 50
    inputs = 200
    shape = (-(-out // block[0]), -(-inputs // block[1]))
    top = 8 if codes == ml_dtypes.int4 else 128
    w = QuantArray(
        rng.integers(-top, top, (out, inputs)).astype(np.int8).astype(codes),
        rng.uniform(0.2, 2, shape).astype(np.float16),
        rng.integers(-8, 8, shape).astype(np.int8) if offsets else None,
        rng.standard_normal(shape).astype(np.float16) if offsets else None,
        block,
    )
    packed = cpu_panels.pack_quantized(w, "int8")
    kind = cpu_panels.PanelType.GROUPED_4 if codes == ml_dtypes.int4 else cpu_panels.PanelType.GROUPED_8
    like = cpu_panels.abstract((out, inputs), kind, "int8", block[1])
    assert (like.data.shape, like.table.shape) == (packed.data.shape, packed.table.shape)
    for tokens in (1, 3, 8):
        x = inputs_of(tokens, inputs)
        values = dequantize(w)
        check(cpu_panels.matmul(x, jax.tree.map(jnp.asarray, packed)), x, values, 1e-2)
    np.testing.assert_allclose(
        cpu_panels.rows(jax.tree.map(jnp.asarray, packed), jnp.arange(out, dtype=jnp.int32)), values, rtol=0, atol=1e-4
    )


def test_what_panels_have_no_type_for():
    codes = np.zeros((16, 64), np.int8)
    scale = np.ones((16, 4), np.float32)
    assert cpu_panels.type_of(QuantArray(codes, scale, block=(1, 16))) is None
    assert cpu_panels.type_of(QuantArray(codes, scale, block=(1, 32))) == PanelType.GROUPED_8
    floats = codes.astype(ml_dtypes.float8_e4m3fn)
    assert cpu_panels.type_of(QuantArray(floats, scale[:, :1], block=(1, 64))) is None
    small = codes.view(np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert cpu_panels.type_of(QuantArray(small, scale.astype(E8M0), block=(1, 16))) is None
    assert cpu_panels.type_of(QuantArray(small, scale.astype(E4M3), block=(1, 16))) == PanelType.NVFP4
    assert cpu_panels.type_of(QuantArray(small, scale[:, :2].astype(E8M0), block=(1, 32))) == PanelType.MXFP4


# 4-bit floats: the type of their scales, inputs that share one, and bytes of scales that are moderate.
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT4 = {PanelType.MXFP4: (E8M0, 32, np.arange(118, 130)), PanelType.NVFP4: (E4M3, 16, np.arange(1, 0x60))}


def float4(kind: PanelType, out: int, inputs: int, arithmetic: str = "float32") -> tuple[PanelArray, np.ndarray]:
    dtype, group, some = FLOAT4[kind]
    rng = np.random.default_rng(inputs)
    codes = rng.integers(0, 16, (out, inputs), np.uint8).view(ml_dtypes.float4_e2m1fn)
    scale = rng.choice(some.astype(np.uint8), (out, -(-inputs // group))).view(dtype)
    gain = rng.uniform(0.01, 2, (out, 1)).astype(np.float32) if kind == PanelType.NVFP4 else None
    w = QuantArray(codes, scale, block=(1, group), gain=gain)
    return jax.tree.map(jnp.asarray, cpu_panels.pack_quantized(w, arithmetic)), dequantize(w)


@pytest.mark.parametrize("kind", FLOAT4, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("out", "inputs"), [(48, 512), (5, 16), (33, 200), (16, 2880)])
def test_4_bit_floats_stay_as_they_are(kind, out, inputs):
    """To the last bit, in the file's 4.25 and 4.5 bits where 128 inputs and 16 rows fill records and panels."""
    w, values = float4(kind, out, inputs)
    np.testing.assert_array_equal(cpu_panels.rows(w, jnp.arange(out, dtype=jnp.int32)), values)
    gains = 4 * out if kind == PanelType.NVFP4 else 0
    if (out, inputs) == (48, 512):
        assert w.data.nbytes == out * inputs * (4 + 8 / FLOAT4[kind][1]) / 8 + gains
    if (out, inputs) == (16, 2880):
        assert w.data.nbytes <= 1.03 * out * inputs * (4 + 8 / FLOAT4[kind][1]) / 8 + gains
    like = cpu_panels.abstract((out, inputs), kind, "float32")
    assert (like.data.shape, like.table.shape) == (w.data.shape, w.table.shape)


@pytest.mark.parametrize("kind", FLOAT4, ids=lambda kind: kind.name)
def test_every_4_bit_float_with_every_scale(kind):
    """But for NaN, and powers of two whose products are no normal floats, or none at all."""
    dtype, group, _ = FLOAT4[kind]
    bytes_ = np.arange(2, 253) if kind == PanelType.MXFP4 else np.concatenate([np.arange(0x7F), 0x80 + np.arange(0x7F)])
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(bytes_), group // 16)).view(ml_dtypes.float4_e2m1fn)
    w = QuantArray(codes, bytes_.astype(np.uint8)[:, None].view(dtype), block=(1, group))
    packed = jax.tree.map(jnp.asarray, cpu_panels.pack_quantized(w, "float32"))
    np.testing.assert_array_equal(cpu_panels.rows(packed, jnp.arange(len(bytes_), dtype=jnp.int32)), dequantize(w))


@pytest.mark.parametrize("kind", FLOAT4, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("out", "inputs"), [(70, 256), (16, 48), (96, 2880)])
def test_products_with_4_bit_floats(kind, out, inputs):
    for arithmetic in ("float32", "int8"):
        w, values = float4(kind, out, inputs, arithmetic)
        for tokens in COUNTS:
            x = in_steps(tokens, inputs) if arithmetic == "int8" else inputs_of(tokens, inputs)
            check(jax.jit(cpu_panels.matmul)(x, w), x, values, 2e-6)


@pytest.mark.parametrize("kind", FLOAT4, ids=lambda kind: kind.name)
@pytest.mark.parametrize("arithmetic", ["float32", "int8"])
def test_rows_times_4_bit_floats_do_not_depend_on_their_neighbours(kind, arithmetic):
    w, _ = float4(kind, 112, 1280, arithmetic)
    x = inputs_of(40, 1280)
    together = np.asarray(cpu_panels.matmul(x, w))
    for count in (1, 2, 3, 4, 5, 7, 8, 20):
        np.testing.assert_array_equal(cpu_panels.matmul(x[:count], w), together[:count])
