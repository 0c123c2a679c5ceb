"""Codes in the order of wgmma's operands: that plain XLA reads them, and that what runs on a device alone (inline PTX,
operands in registers) does what the interpreted kernel does."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")
from devices import mesh_of
from jax.experimental import mosaic
from jax.sharding import NamedSharding, PartitionSpec
from mosaic_resources import _kernel_calls, assembled_kernels, programs, traced_kernels
from test_mosaic_gpu_matmul import HOPPER, needs_interpreter
from test_quant_matmul import CODES, IN, OUT, check, make_weight, numbers, problem_of

from jaxserve.models.quantized import arranged
from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.quant_matmul import fragments, mosaic_gpu, mosaic_plan, reference, triton_gpu
from jaxserve.pallas_kernels.quant_matmul.mosaic_fragments import address, pair_ptx, tile_of
from jaxserve.pallas_kernels.registry import choose
from jaxserve.pallas_kernels.types import QuantArray

# --- plain XLA ---


@pytest.mark.parametrize("codes", CODES)
def test_order(codes):
    """As the module's table says; nothing is lost, also of experts."""
    rng = np.random.default_rng(0)
    w = make_weight(rng, (3, 16, 256), codes, (1, 32))
    shuffled = fragments.shuffle(w)
    assert shuffled.codes.dtype == w.codes.dtype
    back = fragments.in_order(shuffled)
    given = np.asarray(w.codes, np.float32)
    found = np.asarray(shuffled.codes, np.float32)
    np.testing.assert_array_equal(np.asarray(back.codes, np.float32), given)
    size = fragments.chunk(w.codes.dtype)
    parts = fragments.parts(4 if codes == "int4" else 8)
    for t, word, h, i in np.ndindex(4, 4, 2, parts):
        place = 8 * parts * t + 2 * parts * word + parts * h + i
        source = 8 * parts * word + 8 * i + 2 * t + h
        np.testing.assert_array_equal(found[..., place::size], given[..., source::size])
    read = fragments.codes_of_words(fragments.words(shuffled.codes)[1], w.codes.dtype)
    np.testing.assert_array_equal(read, given[1])


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("block", [(1, IN), (1, 32), (1, 64), (128, 128)], ids=str)
def test_plain_products_are_the_same_bits(codes, block, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 128 * 256 * 4)  # in blocks of rows
    rng = np.random.default_rng(1)
    x = numbers(rng, (5, 256), jnp.bfloat16)
    w = make_weight(rng, (256, 256), codes, block, zero=True)
    shuffled = fragments.shuffle(w)
    np.testing.assert_array_equal(reference.quant_matmul(x, shuffled), reference.quant_matmul(x, w))
    np.testing.assert_array_equal(reference.dequantize(shuffled), reference.dequantize(w))
    experts = jax.tree.map(lambda leaf: leaf[None], (w, shuffled))
    products = [reference.grouped_quant_matmul(x, one, jnp.asarray([4])) for one in experts]
    np.testing.assert_array_equal(*products)


# --- which weights ---


def test_who_wants_them():
    rng = np.random.default_rng(2)
    x = numbers(rng, (5, 256), jnp.bfloat16)
    w = make_weight(rng, (256, 256), "int4", (1, 64))
    problem = problem_of(x, w)
    shuffled = problem_of(x, fragments.shuffle(w))
    assert fragments.suits(HOPPER, problem, "auto")
    assert not fragments.suits(HOPPER, problem, "triton")
    assert not fragments.suits(HOPPER, problem_of(x.astype(jnp.float32), w), "auto")
    assert not fragments.suits(HOPPER, problem_of(x[:, :192], make_weight(rng, (256, 192), "int4", (1, 64))), "auto")
    assert not fragments.suits(HOPPER, problem_of(x, make_weight(rng, (256, 256), "fp8", (1, IN))), "auto")
    assert choose("matmul", HOPPER, shuffled) == "mosaic_gpu"
    assert "Hopper" in triton_gpu.why_not(HOPPER, shuffled)


def test_weights_are_arranged():
    """On Hopper, and by each device its own part of the inputs."""
    mesh = mesh_of("h200x4")

    def weight(spec, inputs=4096, codes=jnp.int4):
        like = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        return QuantArray(like((1024, inputs), codes), like((1024, inputs // 32), jnp.bfloat16), block=(1, 32))

    tree = {
        "by outputs": weight(("tensor", None)),
        "by inputs": weight((None, "tensor")),
        "too narrow": weight((None, "tensor"), 4 * 192),
        "float8": weight((None, None), codes=jnp.float8_e4m3fn),
        "plain": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
    }
    found = arranged(tree, mesh, jnp.bfloat16, "auto")
    assert [name for name, w in found.items() if getattr(w, "shuffled", False)] == ["by inputs", "by outputs"]
    assert jax.tree.map(lambda a: a.shape, found["by inputs"].codes) == (1024, 4096)
    assert arranged(tree, mesh, jnp.bfloat16, "triton") == tree
    assert arranged(tree, mesh, jnp.float32, "auto") == tree


# --- interpreted ---


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "shape", "codes", "block", "options"),
    [
        (5, (128, 256), "int8", (1, IN), {}),
        (3, (128, 1024), "int8", (OUT, IN), {"bias": True}),  # the inputs are split
        (9, (136, 384), "int4", (1, 64), {"zero": True}),  # the last tile of outputs overlaps
        (17, (64, 256), "int4", (1, 32), {"zero": True, "scale": jnp.bfloat16}),
        (40, (128, 256), "int4", (1, 128), {"bias": True}),
        (64, (72, 128), "int4", (1, IN), {}),
        (1, (256, 256), "int8", (128, 128), {}),  # groups of several steps
        (33, (64, 192), "int8", (1, 32), {"zero": True}),
        (70, (64, 128), "int8", (1, 64), {}),  # two tiles of tokens
        (130, (64, 128), "int4", (1, IN), {}),
        (5, (64, 128), "fp8", (1, 64), {}),
    ],
)
def test_interpreted(tokens, shape, codes, block, options, capfd, monkeypatch):
    monkeypatch.setattr(mosaic_plan, "SLOT_BYTES", 0)  # two slots, so that they are filled again
    rng = np.random.default_rng(0)
    x = numbers(rng, (tokens, shape[1]), jnp.bfloat16)
    w = make_weight(rng, shape, codes, block, **options)
    shuffled = fragments.shuffle(w)
    assert mosaic_gpu.why_not(HOPPER, problem_of(x, shuffled)) is None
    with interpreter(detect_races=True) as interpret:
        check(mosaic_gpu.quant_matmul(x, shuffled, interpret=interpret), x, w)
    output = capfd.readouterr()
    assert "RACE" not in output.out + output.err


@needs_interpreter
def test_experts_interpreted():
    rng = np.random.default_rng(2)
    x = numbers(rng, (7, 256), jnp.float16)
    w = make_weight(rng, (2, 72, 256), "int4", (1, 64), zero=True)
    with interpreter() as interpret:
        y = mosaic_gpu.grouped_quant_matmul(x, fragments.shuffle(w), jnp.asarray([3, 4]), interpret=interpret)
    for mine, one in ((slice(0, 3), 0), (slice(3, 7), 1)):
        check(y[mine], x[mine], jax.tree.map(lambda leaf, one=one: leaf[one], w))


# --- what the interpreter leaves out ---


def run_ptx(text: str, word: np.ndarray, dtype: str) -> np.ndarray:
    """The two floats [..., 2] that `pair_ptx` makes of words: an interpreter of the instructions in it."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    values = {"$1": word.astype(np.uint32)}

    def value(name):
        return values[name] if name in values else np.full_like(word, int(name, 0), np.uint32)

    def floats(name):
        return np.ascontiguousarray(value(name)).view(kind).astype(np.float32)

    for line in text.strip("{ }").split(";"):
        operation, _, rest = line.strip().partition(" ")
        to, *of = [operand.strip() for operand in rest.split(",")]
        if operation == "mov.b32":
            values[to] = value(of[0])
        elif operation in ("shr.u32", "shl.b32"):
            count = np.uint32(int(of[1]))
            values[to] = value(of[0]) >> count if operation == "shr.u32" else value(of[0]) << count
        elif operation == "and.b32":
            values[to] = value(of[0]) & value(of[1])
        elif operation == "lop3.b32":
            a, b, c = map(value, of[:3])
            values[to] = {"0x6A": (a & b) ^ c, "0xEA": (a & b) | c}[of[3]]
        elif operation.split(".")[0] in ("sub", "mul"):
            a = floats(of[0])
            b = floats(of[1])
            result = (a - b if operation.startswith("sub") else a * b).astype(kind)
            values[to] = np.ascontiguousarray(result).view(np.uint32)
        else:
            assert operation in (".reg", ""), operation
    return floats("$0").reshape(*word.shape, 2)


def places_of(layout, rows: int, inputs: int) -> np.ndarray:
    """One of JAX's layouts: [128 threads, …, numbers of a register] -> row * inputs + input."""
    array = np.arange(rows * inputs).reshape(rows, inputs)
    for tile in layout.tiling.tiles:
        lead = array.shape[: array.ndim - len(tile)]
        n = array.ndim - len(tile)
        split = [part for size, t in zip(array.shape[n:], tile, strict=True) for part in (size // t, t)]
        array = array.reshape(*lead, *split)
        order = [n + 2 * i for i in range(len(tile))] + [n + 2 * i + 1 for i in range(len(tile))]
        array = array.transpose(*range(n), *order)
    chosen = [d % array.ndim for d in (*layout.warp_dims, *layout.lane_dims)]
    rest = [d for d in range(array.ndim) if d not in chosen]
    array = array.transpose(*chosen, *rest)
    return array.reshape(128, *array.shape[len(chosen) :])


def places_of_operand(rows: int, inputs: int) -> np.ndarray:
    """JAX's own layout of wgmma's first operand: [128 threads, blocks of 64 rows, tiles of 8 inputs, halves, 2] ->
    row * inputs + input."""
    return places_of(mosaic.gpu.WGMMA_LAYOUT, rows, inputs).reshape(128, rows // 64, inputs // 8, 2, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codes", CODES)
def test_registers(codes, dtype):
    """What each thread reads and converts is the code that JAX's layout of the operand has at that place."""
    rng = np.random.default_rng(3)
    rows = 128
    w = make_weight(rng, (rows, fragments.chunk(CODES[codes])), codes, (1, IN))
    inputs = w.shape[1]
    name = jnp.dtype(CODES[codes]).name
    bits = 4 if codes == "int4" else 8
    words = np.asarray(fragments.words(fragments.shuffle(w).codes)).view(np.uint32)
    places = places_of_operand(rows, inputs)
    expected = np.asarray(w.codes, np.float32)
    row, column = address(np.arange(128))
    seen = 0
    for block, half, word in np.ndindex(rows // 64, 2, 4):
        read = words[row + 64 * block + 8 * half, column + word]
        for part in range(fragments.parts(bits)):
            pair = run_ptx(pair_ptx(name, part, dtype), read, dtype)
            np.testing.assert_array_equal(pair, expected.reshape(-1)[places[:, block, tile_of(word, part, bits), half]])
            seen += pair.size
    assert seen == w.codes.size


def test_every_code_converts():
    for dtype in ("bfloat16", "float16"):
        for codes, name in (("int4", "int4"), ("int8", "int8"), ("fp8", "float8_e4m3fn")):
            bits = 4 if codes == "int4" else 8
            every = np.arange(1 << bits, dtype=np.uint32)
            if codes == "fp8":
                every = every[(every & 0x7F) != 0x7F]  # NaN
                exact = every.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            else:
                exact = ((every.astype(np.int32) ^ (1 << bits - 1)) - (1 << bits - 1)).astype(np.float32)
            for part in range(fragments.parts(bits)):
                shift = np.uint32(bits * part)
                rest = np.uint32(0xFFFFFFFF) ^ np.uint32((1 << bits) - 1) << shift
                for others in (np.uint32(0), np.uint32(0xFFFFFFFF) & ~np.uint32(0x7F007F00)):
                    word = every << shift | others & rest & np.uint32(0xFFFF) | every << (shift + np.uint32(16))
                    np.testing.assert_array_equal(
                        run_ptx(pair_ptx(name, part, dtype), word, dtype), np.stack([exact, exact], -1)
                    )


@needs_interpreter
@pytest.mark.parametrize(
    ("codes", "block"), [("int4", (1, 32)), ("int4", (1, 128)), ("int8", (1, IN)), ("fp8", (128, 128))]
)
@pytest.mark.parametrize("tokens", [5, 64])
def test_the_lowered_kernel_is_the_interpreted_one(codes, block, tokens):
    """But for the operand, which the interpreter needs in shared memory: primitives and shapes one by one."""
    rng = np.random.default_rng(4)
    x = numbers(rng, (tokens, 256), jnp.bfloat16)
    w = make_weight(rng, (128, 256), codes, block)

    def primitives(interpret):
        def steps(jaxpr):
            for eqn in jaxpr.eqns:
                yield eqn.primitive.name, tuple(str(getattr(v.aval, "shape", "")) for v in eqn.outvars)
                for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                    if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                        yield from steps(getattr(inner, "jaxpr", inner))

        traced = jax.make_jaxpr(partial(mosaic_gpu.quant_matmul, interpret=interpret))(x, w)
        (call,) = _kernel_calls(traced.jaxpr)
        return list(steps(call.params["jaxprs"][0]))

    with interpreter() as interpret:
        interpreted = primitives(interpret)
    lowered = primitives(None)
    staging = [step for step in interpreted if step[0] in ("swap", "commit_smem")]
    pieces = 256 // mosaic_gpu.plan(tokens, w.shape, w.block, 4 if codes == "int4" else 8).group
    assert staging
    without = [step for step in interpreted if step[0] not in ("swap", "commit_smem", "pure_callback")]
    assert without == [step for step in lowered if step[0] not in ("swap", "commit_smem")]
    assert sum(step[0] == "wgmma" for step in lowered) <= pieces


# --- compiled ahead of time ---


@pytest.mark.parametrize(
    ("codes", "block", "tokens"),
    [
        *(
            (codes, block, n)
            for n in (16, 64)
            for codes, block in (("int4", (1, 128)), ("int4", (1, 32)), ("int8", (1, IN)))
        ),
        ("int4", (1, 128), 32),  # three warpgroups
    ],
    ids=str,
)
def test_compiled(codes, block, tokens, monkeypatch, capfd):
    """Operands are read 16 bytes at once and converted by the instructions above; at least two programs share a
    multiprocessor. Spills, in bytes a thread, stay what they are known to be."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh, (out, inputs) = mesh_of("h200x1"), (4224, 14336)  # sizes of its own: a kernel that is known leaves no log
    block = block[0], block[1] or inputs
    like = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    w = QuantArray(like((out, inputs), CODES[codes]), like((out, inputs // block[1]), jnp.bfloat16), block=block)
    (w,) = arranged([w], mesh, jnp.bfloat16, "auto")
    assert w.shuffled
    arguments = like((tokens, inputs), jnp.bfloat16), w
    with jax.set_mesh(mesh):
        jax.jit(mosaic_gpu.quant_matmul_parts).lower(*arguments).compile()
    log = "".join(capfd.readouterr())
    found = assembled_kernels(log)["quant_matmul"]
    assert found.spilled <= (80 if block[1] == 32 and tokens == 64 else 0)
    kernel = traced_kernels(mosaic_gpu.quant_matmul_parts, *arguments)["quant_matmul"]
    assert programs(kernel, found.registers) * max(kernel.threads // 128 - 1, 1) >= 2, "warpgroups that compute"
    assert "C75" not in log, "ptxas leaves wgmma or setmaxnreg as it finds them"
    rows = 128
    parts = fragments.parts(4 if codes == "int4" else 8)
    reads = r"ld\.shared\.(?:b|u)32" if block[1] == 32 else r"ld\.shared\.v4\.(?:b|u)32"
    assert len(re.findall(reads, log)) == rows // 64 * 2 * (4 if block[1] == 32 else 1)
    assert log.count("sub.bf16x2") == rows // 64 * 2 * 4 * parts
