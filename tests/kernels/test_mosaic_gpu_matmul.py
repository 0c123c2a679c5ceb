"""The Mosaic GPU kernel for quantized weights: interpreted against float64 NumPy, and compiled for H200."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from test_quant_matmul import CODES, IN, OUT, check, make_weight, numbers, problem_of

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.quant_matmul import fragments, mosaic_gpu, mosaic_plan
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.types import QuantArray

HOPPER = Device("gpu", "NVIDIA H200", (9, 0))
# --- interpreted ---

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2"
)


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "shape", "codes", "block", "options"),
    [
        (5, (128, 256), "int8", (1, IN), {}),
        (3, (128, 1024), "int8", (OUT, IN), {"bias": True}),  # the inputs are split
        (9, (136, 384), "int4", (1, 64), {"zero": True}),  # the last tile of outputs overlaps
        (2, (64, 192), "int4", (1, 32), {"zero": True, "scale": jnp.bfloat16}),  # one row of 32 codes is too short
        (1, (256, 256), "fp8", (128, 128), {}),  # one scale for a whole tile
        (4, (72, 160), "fp8", (128, 128), {"bias": True}),
        (70, (64, 64), "int8", (1, 32), {}),  # two tiles of tokens
    ],
)
def test_interpreted(tokens, shape, codes, block, options, capfd, monkeypatch):
    monkeypatch.setattr(mosaic_plan, "SLOT_BYTES", 0)  # two slots, so that they are filled again
    rng = np.random.default_rng(0)
    x = numbers(rng, (tokens, shape[1]), jnp.bfloat16)
    w = make_weight(rng, shape, codes, block, **options)
    assert mosaic_gpu.why_not(HOPPER, problem_of(x, w)) is None
    with interpreter(detect_races=True) as interpret:
        check(mosaic_gpu.quant_matmul(x, w, interpret=interpret), x, w)
    output = capfd.readouterr()
    assert "RACE" not in output.out + output.err


@needs_interpreter
@pytest.mark.parametrize("shuffled", [False, True], ids=["", "shuffled"])
@pytest.mark.parametrize(
    ("warpgroups", "splits", "tokens", "shape", "codes", "block", "options"),
    [
        (2, 2, 13, (264, 640), "int8", (1, IN), {}),  # splits of different lengths; the last tile of outputs overlaps
        (3, 1, 24, (384, 512), "int4", (1, 64), {"zero": True}),
        (2, 1, 35, (256, 384), "int4", (1, 128), {"scale": jnp.bfloat16}),
        (2, 2, 64, (512, 512), "fp8", (128, 128), {"bias": True}),  # one scale for each warpgroup's outputs
    ],
)
def test_warpgroups_that_share_x(warpgroups, splits, tokens, shape, codes, block, options, shuffled, capfd):
    rng = np.random.default_rng(3)
    x = numbers(rng, (tokens, shape[1]), jnp.bfloat16)
    w = make_weight(rng, shape, codes, block, **options)
    given = fragments.shuffle(w) if shuffled else w
    with tuning.trial("matmul", "mosaic_gpu", {"warpgroups": warpgroups, "splits": splits, "stages": 2}):
        sizes = mosaic_gpu.plan(tokens, shape, given.block, 4 if codes == "int4" else 8, shuffled)
        assert (sizes.warpgroups, sizes.splits, sizes.stages) == (warpgroups, splits, 2)
        assert sizes.cluster == (2 if sizes.n % 16 == 0 and shape[0] % (2 * sizes.outputs) == 0 else 1)
        with interpreter(detect_races=True) as interpret:
            check(mosaic_gpu.quant_matmul(x, given, interpret=interpret), x, w)
    output = capfd.readouterr()
    assert "RACE" not in output.out + output.err


@needs_interpreter
def test_interpreted_in_float16():
    rng = np.random.default_rng(1)
    x = numbers(rng, (3, 128), jnp.float16)
    w = make_weight(rng, (64, 128), "fp8", (1, 64))
    with interpreter() as interpret:
        check(mosaic_gpu.quant_matmul(x, w, interpret=interpret), x, w)


@needs_interpreter
@pytest.mark.parametrize(
    ("sizes", "tokens", "shape", "codes", "block", "options"),
    [
        ((3, 0, 9, 1), 15, (128, 256), "int8", (1, IN), {}),  # an expert with two tiles, tokens of nobody
        ((0, 2, 0), 2, (72, 128), "int4", (1, 64), {"zero": True, "scale": jnp.bfloat16}),
        ((5, 6), 11, (200, 160), "fp8", (128, 128), {"bias": True}),
        ((0, 0), 3, (64, 64), "int8", (1, 32), {}),
        ((0, 1, 0, 0), 1, (128, 1024), "int8", (OUT, IN), {"zero": True}),  # the inputs are split
    ],
)
def test_grouped_interpreted(sizes, tokens, shape, codes, block, options, capfd):
    rng = np.random.default_rng(2)
    x = np.asarray(numbers(rng, (tokens, shape[1]), jnp.bfloat16)).copy()
    x[sum(sizes) :] = np.nan
    w = make_weight(rng, (len(sizes), *shape), codes, block, **options)
    with interpreter(detect_races=True) as interpret:
        y = mosaic_gpu.grouped_quant_matmul(jnp.asarray(x), w, jnp.asarray(sizes, jnp.int32), interpret=interpret)
        y = jax.block_until_ready(y)
    start = 0
    for expert, size in enumerate(sizes):
        mine = slice(start, start + size)
        check(y[mine], x[mine], jax.tree.map(lambda leaf, e=expert: leaf[e], w))
        start += size
    assert not np.asarray(y[start:]).any()
    output = capfd.readouterr()
    assert "RACE" not in output.out + output.err


# --- compiled ahead of time ---


@pytest.fixture(scope="module")
def mesh():
    return mesh_of("h200x1", "device")


def compile_for(mesh, tokens, shape, codes, block, dtype=jnp.bfloat16, scale=jnp.bfloat16, zero=False):
    block = (block[0] or shape[0], block[1] or shape[1])
    blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    w = QuantArray(
        array(shape, CODES[codes]), array(blocks, scale), array(blocks, jnp.int8) if zero else None, None, block
    )
    x = array((tokens, shape[1]), dtype)
    assert mosaic_gpu.why_not(Device.of(mesh.devices[0]), problem_of(x, w)) is None
    with jax.set_mesh(mesh):
        return jax.jit(mosaic_gpu.quant_matmul).lower(x, w).compile(), w


SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]  # Llama 3 8B
FORMATS = [("int8", (1, IN)), ("int4", (1, 128)), ("fp8", (1, IN))]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        pytest.param(shape, tokens, marks=[] if shape == (14336, 4096) and tokens in (16, 384) else pytest.mark.slow)
        for shape in SHAPES
        for tokens in (1, 16, 64, 384)
    ],
    ids=str,
)
@pytest.mark.parametrize(("codes", "block"), FORMATS, ids=str)
def test_compiles_without_a_dequantized_copy(mesh, shape, tokens, codes, block):
    compiled, w = compile_for(mesh, tokens, shape, codes, block)
    assert "quant_matmul" in compiled.as_text()
    sizes = mosaic_gpu.plan(tokens, w.shape, w.block, 4 if codes == "int4" else 8)
    padded = -(-tokens // sizes.n) * sizes.n
    partial_results = sizes.splits * padded * shape[0] * 4
    x = padded * shape[1] * 2
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp <= partial_results + x + 65536
    assert temp < shape[0] * shape[1] * 2  # bytes of a copy in bfloat16


def test_layers_share_a_kernel(mesh):
    """Products of one shape are traced once a process, and lowered once a program, whatever their weights."""
    weight = QuantArray(jnp.zeros((256, 512), jnp.int8), jnp.ones((256, 4), jnp.bfloat16), block=(1, 128))
    place = NamedSharding(mesh, PartitionSpec())
    like = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place))
    x, layers = like((jnp.zeros((16, 512), jnp.bfloat16), [weight] * 3))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x, layers: [mosaic_gpu.quant_matmul(x, w) for w in layers]).lower(x, layers)
    assert program.as_text().count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("tokens", "shape", "codes", "block", "options"),
    [
        (16, (4096, 4096), "fp8", (128, 128), {"scale": jnp.float32}),
        (16, (4096, 4096), "fp8", (OUT, IN), {}),
        (300, (4096, 4096), "int4", (1, 32), {"zero": True}),
        (16, (4096, 4096), "int4", (1, 64), {"dtype": jnp.float16, "zero": True}),
        (16, (1024, 4096), "fp8", (1, IN), {"dtype": jnp.float16}),
        (300, (1024, 4096), "int8", (1, IN), {"dtype": jnp.float16}),
        (5, (72, 96), "int8", (1, 32), {}),
        (5, (200, 160), "fp8", (128, 128), {}),
        (5, (4096, 11008 // 4), "int8", (1, IN), {}),  # a shard of Llama 2 7B: 43 times 64 inputs
    ],
)
def test_compiles(mesh, tokens, shape, codes, block, options):
    compiled, _ = compile_for(mesh, tokens, shape, codes, block, **options)
    assert "quant_matmul" in compiled.as_text()


@pytest.mark.parametrize(
    ("tokens", "codes", "block", "zero"),
    [
        (16, "int4", (1, 128), True),
        (15, "int8", (1, 4096), False),
        (2048, "int8", (1, 4096), False),
        (64, "fp8", (128, 128), False),
    ],
)
def test_grouped_compiles(mesh, tokens, codes, block, zero):
    experts = 8
    shape = (2048, 4096)
    blocks = (experts, shape[0] // block[0], shape[1] // block[1])

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    zeros = array(blocks, jnp.int8) if zero else None
    w = QuantArray(array((experts, *shape), CODES[codes]), array(blocks, jnp.bfloat16), zeros, block=block)
    x = array((tokens, shape[1]), jnp.bfloat16)
    sizes = array((experts,), jnp.int32)
    with jax.set_mesh(mesh):
        compiled = jax.jit(mosaic_gpu.grouped_quant_matmul).lower(x, w, sizes).compile()
    assert "grouped_quant_matmul" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < max(shape[0] * shape[1], 32 * tokens * shape[0])


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_compiles_under_shard_map(devices):
    """Column-parallel: each device has some of the outputs."""
    mesh = mesh_of(f"h200x{devices}", "device")

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    w = QuantArray(array((14336, 4096), jnp.int4, "device"), array((14336, 32), jnp.bfloat16, "device"))
    x = array((16, 4096), jnp.bfloat16)
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("device")), "out_specs": PartitionSpec(None, "device")}
    step = jax.shard_map(mosaic_gpu.quant_matmul, mesh=mesh, check_vma=False, **specs)
    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(x, w).compile().as_text()
    assert "quant_matmul" in text
    assert "all-gather" not in text


# --- refusals ---


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (Device("gpu", "NVIDIA A100", (8, 0)), {}, "Hopper"),
        (Device("gpu", "NVIDIA B200", (10, 0)), {}, "Hopper"),
        (Device("tpu", "TPU v5e"), {}, "Hopper"),
        (HOPPER, {"x_dtype": np.dtype(np.float32)}, "float32"),
        (HOPPER, {"codes_dtype": np.dtype(np.int16)}, "int16"),
        (HOPPER, {"rows": 60}, "60"),
        (HOPPER, {"rows": 100}, "100"),
        (HOPPER, {"inputs": 4112}, "4112"),
        (HOPPER, {"inputs": 4128, "codes_dtype": np.dtype(jnp.int4)}, "64"),
        (HOPPER, {"block": (1, 48)}, "48"),
        (HOPPER, {"block": (1, 16)}, "16"),
    ],
)
def test_refusals(device, changes, reason):
    fields = {"x_dtype": np.dtype(jnp.bfloat16), "codes_dtype": np.dtype(np.int8), "rows": 4096, "inputs": 4096}
    assert mosaic_gpu.why_not(HOPPER, MatmulProblem(**fields, block=(1, 4096))) is None
    problem = MatmulProblem(**{**fields, "block": (1, 4096), **changes})
    assert reason in mosaic_gpu.why_not(device, problem)
