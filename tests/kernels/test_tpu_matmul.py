"""The TPU matmul with quantized weights: interpreted, against float64 NumPy, and compiled for two kinds of TPU."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices import devices_of
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import experts
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.quant_matmul import tpu
from jaxserve.pallas_kernels.quant_matmul.tpu_codes import factor, numbers
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.tpu_dma import checking
from jaxserve.pallas_kernels.types import QuantArray

FP8 = jnp.float8_e4m3fn
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


@dataclass(frozen=True)
class Case:
    """A weight's format, and the tokens it is multiplied with."""

    codes: str = "int8"
    block: tuple[int, int] = (1, 128)
    out: int = 128
    inputs: int = 512
    tokens: int = 5
    zero: bool = False
    bias: bool = False
    scale: str = "float32"
    x: str = "bfloat16"
    experts: int | None = None
    gain: bool = False

    @property
    def dtype(self):
        return {"int4": jnp.int4, "int8": jnp.int8, "fp8": FP8, "fp4": jnp.float4_e2m1fn}[self.codes]

    def shapes(self) -> QuantArray:
        lead = () if self.experts is None else (self.experts,)
        codes = (*lead, self.out, self.inputs)
        scale = (*lead, -(-self.out // self.block[0]), -(-self.inputs // self.block[1]))

        def array(shape, dtype):
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        return QuantArray(
            array(codes, self.dtype),
            array(scale, self.scale),
            array(scale, "int8") if self.zero else None,
            array(scale, self.scale) if self.bias else None,
            self.block,
            gain=array((*codes[:-1], 1), "float32") if self.gain else None,
        )

    def make(self, seed: int = 0) -> tuple[jax.Array, QuantArray]:
        random = np.random.default_rng(seed)
        shapes = self.shapes()
        limit = {"int4": 8, "int8": 128}.get(self.codes, 0)
        shape = shapes.codes.shape
        codes = (
            random.integers(-limit, limit, shape) if limit else np.clip(random.standard_normal(shape) * 40, -448, 448)
        )
        scale = random.uniform(0.5, 1.5, shapes.scale.shape) / (limit or 64)
        if self.codes == "fp4":
            codes = random.integers(0, 16, shape, np.uint8).view(self.dtype)
            scale = random.uniform(0.2, 4, shapes.scale.shape)
        zero = random.integers(-8, 8, scale.shape)
        bias = random.standard_normal(scale.shape) * 0.3
        x = random.standard_normal((self.tokens, self.inputs))
        return jnp.asarray(x, self.x), QuantArray(
            jnp.asarray(codes, self.dtype),
            jnp.asarray(scale, self.scale),
            jnp.asarray(zero, jnp.int8) if self.zero else None,
            jnp.asarray(bias, self.scale) if self.bias else None,
            self.block,
            gain=jnp.asarray(random.uniform(0.5, 1.5, (*shape[:-1], 1)), jnp.float32) if self.gain else None,
        )


def dense(w: QuantArray) -> np.ndarray:
    """The weight in float64."""

    def spread(array):
        array = np.asarray(array.astype(jnp.float32), np.float64)
        rows = np.arange(w.shape[-2]) // w.block[0]
        inputs = np.arange(w.shape[-1]) // w.block[1]
        return array[..., rows, :][..., inputs]

    value = np.asarray(w.codes.astype(jnp.float32), np.float64)
    value = (value if w.zero is None else value - spread(w.zero)) * spread(w.scale)
    value = value if w.bias is None else value + spread(w.bias)
    return value if w.gain is None else value * np.asarray(w.gain, np.float64)


def check(got, x, weight, tolerance):
    """Errors stay below a part of the result's size without cancellation, |x| |w|."""
    x = np.asarray(x.astype(jnp.float32), np.float64)
    size = np.sqrt((x**2) @ (weight**2).T)
    error = np.abs(np.asarray(got, np.float64) - x @ weight.T) / size
    assert error.max() < tolerance, error.max()


EXACT = 1e-5  # sums in float32
ROUNDED = 8e-3  # weights rounded to bfloat16

FEW = [
    Case("int8", (1, 512), tokens=16),
    Case("int8", (1, 128), scale="bfloat16", out=140, tokens=64, bias=True),
    Case("int8", (1, 200), inputs=200, zero=True, bias=True, x="float16", scale="float16"),
    Case("int4", (1, 32), tokens=17, zero=True, bias=True, scale="bfloat16", inputs=320, out=130),
    Case("int4", (1, 64), inputs=256, zero=True, scale="float16"),
    Case("int4", (1, 128), bias=True),
    Case("int4", (1, 16), inputs=2048, zero=True),
    Case("fp8", (128, 512)),
    Case("fp8", (128, 128), out=200, inputs=400),
    Case("fp4", (1, 32), out=200, inputs=2880, scale="float8_e8m0fnu"),
    Case("fp4", (1, 16), out=130, inputs=400, scale="float8_e4m3fn", gain=True),
    Case("fp4", (1, 16), inputs=2048, scale="float8_e4m3fn", gain=True),
]
MANY = [
    Case("int8", (1, 512), tokens=80, out=300),
    Case("int8", (1, 256), tokens=80, inputs=256, zero=True),
    Case("int4", (1, 32), tokens=80, inputs=256, zero=True, bias=True),
    Case("int4", (1, 128), tokens=80, zero=True, x="float32"),
    Case("fp8", (128, 128), tokens=80, out=200, inputs=200),
    Case("int8", (32, 64), tokens=80, inputs=256, zero=True),
    Case("fp4", (1, 32), tokens=80, inputs=288, scale="float8_e8m0fnu"),
    Case("fp4", (1, 16), tokens=80, inputs=256, scale="float8_e4m3fn", gain=True, x="float32"),
]


def test_every_code_of_fp8_is_exact():
    """Denormal numbers and -0 too; and the same where rows are not whole tiles."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    for rows in (32, 8):
        block = np.resize(codes, (rows, 256))

        def kernel(codes, out):
            out[...] = numbers(codes[...], out.dtype)

        for dtype in (jnp.float32, jnp.bfloat16):
            call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(block.shape, dtype), interpret=INTERPRET)
            exact = block.astype(np.float32)
            np.testing.assert_array_equal(np.asarray(call(block), np.float32) * factor(block.dtype), exact)


def tolerance(plan):
    return ROUNDED if plan.rounds else EXACT


@pytest.mark.parametrize("case", FEW + MANY, ids=str)
def test_equals_numpy(case):
    x, w = case.make()
    with pltpu.force_tpu_interpret_mode(INTERPRET), checking():
        got = tpu.quant_matmul(x, w)
    assert got.shape == (case.tokens, case.out)
    assert got.dtype == jnp.float32
    check(got, x, dense(w), tolerance(tpu.make_plan(w, x.dtype, 16 if case in FEW else 512)))


@pytest.mark.parametrize(
    "case",
    [
        Case("int4", (1, 32), inputs=600, tokens=20, zero=True, scale="bfloat16"),
        Case("fp8", (128, 128), inputs=600, tokens=20, bias=True),
        Case("fp8", (1, 600), inputs=600, tokens=80),
        Case("fp8", (128, 128), inputs=600, tokens=80, zero=True),
        Case("fp4", (1, 32), inputs=544, tokens=20, scale="float8_e8m0fnu"),
        Case("fp4", (1, 16), inputs=544, tokens=80, scale="float8_e4m3fn", gain=True),
    ],
    ids=str,
)
def test_several_tiles_the_last_ones_ragged(case):
    """What lies beyond the arrays is NaN, where the dtype has one."""
    x, w = case.make()
    plan = tpu.make_plan(w, x.dtype, 32 if case.tokens > tpu.FEW_TOKENS else 16, 256, 128)
    if case.tokens > tpu.FEW_TOKENS:
        plan = replace(plan, scaling="end" if plan.groups == 1 else "weights", rounds=plan.groups > 1)
    assert plan.in_tiles == 3
    assert plan.ragged
    with pltpu.force_tpu_interpret_mode(INTERPRET):
        got = tpu.dense_call(x, w, plan)
    check(got, x, dense(w), tolerance(plan))


GROUPED = [
    (Case("int4", (1, 32), tokens=40, inputs=256, experts=3, zero=True, scale="bfloat16"), [0, 3, 30]),
    (Case("fp8", (128, 128), tokens=33, out=150, inputs=300, experts=3), [1, 0, 16]),
    (Case("int4", (1, 64), tokens=200, inputs=256, experts=2, bias=True), [70, 130]),
    (Case("int8", (1, 128), tokens=5, inputs=256, experts=4), [0, 0, 0, 0]),
    (Case("fp4", (1, 32), tokens=40, inputs=288, experts=3, scale="float8_e8m0fnu"), [0, 3, 30]),
    (Case("fp4", (1, 16), tokens=9, inputs=256, experts=2, scale="float8_e4m3fn", gain=True), [4, 4]),
]


@pytest.mark.parametrize(("case", "sizes"), GROUPED, ids=str)
def test_grouped_equals_numpy(case, sizes):
    x, w = case.make()
    with pltpu.force_tpu_interpret_mode(INTERPRET):
        got = tpu.grouped_quant_matmul(x, w, jnp.array(sizes, jnp.int32))
    weight = dense(w)
    ends = np.cumsum(sizes)
    for expert, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        if size:
            check(got[end - size : end], x[end - size : end], weight[expert], ROUNDED if case.tokens > 64 else EXACT)
    assert not np.asarray(got[ends[-1] :]).any()


@pytest.mark.parametrize(("tokens", "inputs"), [(40, 300), (200, 300), (200, 1408)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grouped_floats_equal_numpy(tokens, inputs, dtype):
    """Weights of experts in the dtype of x. Tiles of 1,024 do not divide 1,408 inputs."""
    rng = np.random.default_rng(2)
    sizes = [tokens // 2, 0, 7]
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((tokens, inputs), (3, 150, inputs)))
    with pltpu.force_tpu_interpret_mode(INTERPRET):
        got = np.asarray(tpu.grouped_quant_matmul(x, as_codes(w), jnp.array(sizes, jnp.int32)))
    expected = np.asarray(experts.grouped_matmul(x, w, jnp.array(sizes, jnp.int32)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(
    "sizes", [[3, 0, 40, 1, 0], [0, 0, 0, 0, 0], [64, 0, 0, 0, 0], [0, 16, 16, 16, 16], [1, 1, 1, 1, 1]]
)
def test_work_items_cover_each_row_once(sizes):
    tokens = 64
    tile_tokens = 16
    expert, tile, start, stop = (np.asarray(item) for item in tpu._work_items(jnp.array(sizes), tokens, tile_tokens))
    assert (np.diff(tile) >= 0).all()
    assert set(tile) == set(range(tokens // tile_tokens))
    owner = np.full(tokens, -1)
    for which in range(len(expert)):
        rows = np.arange(tokens)
        mine = (rows // tile_tokens == tile[which]) & (rows >= start[which]) & (rows < stop[which])
        assert (owner[mine] == -1).all()
        owner[mine] = expert[which]
    expected = np.repeat(np.arange(len(sizes)), sizes)
    assert (owner == np.append(expected, np.full(tokens - len(expected), -1))).all()


TPU = Device("tpu", "TPU v5 lite")
PROBLEM = MatmulProblem(jnp.dtype("bfloat16"), jnp.dtype("int8"), 4096, 4096, (1, 128))


@pytest.mark.parametrize(
    ("device", "change", "reason"),
    [
        (TPU, {}, None),
        (TPU, {"block": (4096, 4096)}, None),
        (TPU, {"block": (128, 128), "codes_dtype": jnp.dtype(FP8), "rows": 300}, None),
        (TPU, {"block": (1, 32), "codes_dtype": jnp.dtype(jnp.int4), "has_zero": True}, None),
        (Device("gpu", "H200", (9, 0)), {}, "gpu"),
        (Device("tpu", "TPU v3"), {}, "v3"),
        (TPU, {"block": (1, 96)}, "96"),
        (TPU, {"block": (48, 128)}, "48"),
        (TPU, {"codes_dtype": jnp.dtype("uint8")}, "uint8"),
        (TPU, {"x_dtype": jnp.dtype("int8")}, "int8"),
    ],
)
def test_refuses_with_the_reason(device, change, reason):
    got = tpu.why_not(device, replace(PROBLEM, **change))
    assert got is None if reason is None else reason in got


@pytest.fixture(scope="module", params=["v5e-4", "v6e-4"])
def devices(request):
    """Four TPUs that are only compiled for."""
    return np.array(devices_of(request.param))


FORMATS = {
    "int8 per channel": Case("int8", (1, 1 << 20), scale="bfloat16"),
    "int8 groups": Case("int8", (1, 128), bias=True),
    "int4 groups of 32": Case("int4", (1, 32), zero=True, scale="bfloat16"),
    "int4 groups of 128": Case("int4", (1, 128), zero=True, scale="float16"),
    "fp8 blocks": Case("fp8", (128, 128)),
    "fp8 per tensor": Case("fp8", (1 << 20, 1 << 20)),
    "MXFP4": Case("fp4", (1, 32), scale="float8_e8m0fnu"),
    "NVFP4": Case("fp4", (1, 16), scale="float8_e4m3fn", gain=True),
}
# Each format meets few tokens and many, and each shape and number of tokens some formats.
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]
COMPILED = [
    (name, *SHAPES[(row + column) % 3], tokens)
    for row, name in enumerate(FORMATS)
    for column, tokens in enumerate([(1, 1024), (16, 1024), (64, 1024)][row % 3])
]


def compile_on(mesh, function, *arguments):
    """`arguments`: pairs of abstract arrays and their partition specs."""

    def place(array, spec):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    placed = [jax.tree.map(lambda array, spec=spec: place(array, spec), tree) for tree, spec in arguments]
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*placed).compile()


def weight_bytes(case):
    return case.out * case.inputs * (0.5 if case.codes in ("int4", "fp4") else 1)


@pytest.mark.parametrize(("name", "out", "inputs", "tokens"), COMPILED, ids=str)
def test_compiles_without_a_copy_of_the_weights(devices, name, out, inputs, tokens):
    case = replace(FORMATS[name], out=out, inputs=inputs, tokens=tokens)
    case = replace(case, block=(min(case.block[0], out), min(case.block[1], inputs)))
    x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
    compiled = compile_on(Mesh(devices[:1], "x"), tpu.quant_matmul, (x, P()), (case.shapes(), P()))
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes(case) / 8


@pytest.mark.parametrize("experts", [None, 8])
@pytest.mark.parametrize("target", ["v5p-1", pytest.param("tpu7x-1", marks=pytest.mark.slow)])
def test_compiles_without_padding_to_lanes(target, experts):
    """A column of gains would take 128 lanes for each output, in these chips' main memory."""
    case = replace(FORMATS["NVFP4"], out=2048, inputs=4096, tokens=16, experts=experts)
    x = jax.ShapeDtypeStruct((16, case.inputs), jnp.bfloat16)
    mesh = Mesh(np.array(devices_of(target)[:1]), "x")
    arguments = [(x, P()), (case.shapes(), P())]
    multiply = tpu.quant_matmul
    if experts:
        arguments.append((jax.ShapeDtypeStruct((experts,), jnp.int32), P()))
        multiply = tpu.grouped_quant_matmul
    compiled = compile_on(mesh, multiply, *arguments)
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes(case) / 8


@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_compiles_sharded(devices, split, tokens):
    mesh = Mesh(devices, "tensor")
    case = Case("int4", (1, 128), 4096, 14336, zero=True, scale="bfloat16")
    x = jax.ShapeDtypeStruct((tokens, case.inputs), jnp.bfloat16)
    w_spec = P("tensor") if split == "outputs" else P(None, "tensor")
    x_spec = P() if split == "outputs" else P(None, "tensor")

    def product(x, w):
        y = tpu.quant_matmul(x, w)
        return y if split == "outputs" else jax.lax.psum(y, "tensor")

    out_spec = P(None, "tensor") if split == "outputs" else P()
    sharded = jax.shard_map(product, in_specs=(x_spec, w_spec), out_specs=out_spec, check_vma=False)
    compiled = compile_on(mesh, sharded, (x, x_spec), (case.shapes(), w_spec))
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes(case) / 8 + 8 * tokens * case.out


@pytest.mark.parametrize("tokens", [16, 2048])
def test_compiles_grouped(devices, tokens):
    case = Case("int4", (1, 128), 2048, 4096, experts=8, zero=True, scale="bfloat16")
    x = jax.ShapeDtypeStruct((tokens, case.inputs), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((case.experts,), jnp.int32)
    arguments = (x, P()), (case.shapes(), P()), (sizes, P())
    compiled = compile_on(Mesh(devices[:1], "x"), tpu.grouped_quant_matmul, *arguments)
    assert compiled.memory_analysis().temp_size_in_bytes < weight_bytes(case)  # of one expert
