"""The activation at the end of Hopper's product: interpreted against the plain operations, bit by bit; which numbers a
thread holds; its instructions beside those of the Triton kernel that it replaces; and compiled for H200."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental import mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from mosaic_resources import assembled_kernels, programs, traced_kernels
from test_fragments import places_of
from test_mosaic_gpu_matmul import HOPPER, needs_interpreter
from test_quant_matmul import CODES, IN, make_weight, numbers

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.device_ops import gated_matmul_of
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import ACTIVATIONS
from jaxserve.pallas_kernels.quant_matmul import fragments, mosaic_gate, mosaic_gpu, ways
from jaxserve.pallas_kernels.registry import MatmulProblem
from jaxserve.pallas_kernels.selfcheck import check_gated
from jaxserve.pallas_kernels.tuning import Product, Table
from jaxserve.pallas_kernels.types import QuantArray


def plainly_gated(y: jax.Array, activation: str) -> jax.Array:
    """Gates and ups in turn [tokens, 2 * size], rounded, as the kernels between products gate them."""
    gate = y[:, ::2].astype(jnp.float32)
    up = y[:, 1::2].astype(jnp.float32)
    return (ACTIVATIONS[activation](gate).astype(y.dtype).astype(jnp.float32) * up).astype(y.dtype)


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "shape", "codes", "block", "activation", "sizes"),
    [
        (5, (128, 256), "int8", (1, IN), "silu", {}),
        (9, (136, 384), "int4", (1, 64), "gelu_tanh", {}),  # the last tile of outputs overlaps
        (35, (256, 384), "int4", (1, 128), "silu", {"warpgroups": 2, "stages": 2}),
        (24, (384, 512), "fp8", (128, 128), "silu", {"warpgroups": 3, "stages": 2}),
        (70, (64, 128), "int8", (1, 32), "silu", {}),  # two tiles of tokens
        (3, (192, 256), None, None, "silu", {}),  # a weight that is not quantized
        (40, (512, 192), None, None, "gelu_tanh", {"warpgroups": 2, "stages": 2}),  # two programs share x
    ],
)
def test_interpreted(tokens, shape, codes, block, activation, sizes, capfd):
    """The bits of the product and of the gate one after the other."""
    rng = np.random.default_rng(0)
    x = numbers(rng, (tokens, shape[1]), jnp.bfloat16)
    w = as_codes(numbers(rng, shape, jnp.bfloat16)) if codes is None else make_weight(rng, shape, codes, block)
    x = (x.astype(jnp.float32) / (np.asarray(w.codes[0], np.float32).std() * shape[1] ** 0.5)).astype(jnp.bfloat16)
    w = fragments.shuffle(w) if codes in ("int4", "int8") and shape[1] % fragments.chunk(CODES[codes]) == 0 else w
    with tuning.trial("matmul", "mosaic_gpu", {**sizes, "splits": 1}), interpreter(detect_races=True) as interpret:
        product = mosaic_gpu._product(x, w, x.dtype, interpret)[0]
        found = mosaic_gpu.gated_matmul(x, w, activation, interpret=interpret)
    assert (found.shape, found.dtype) == ((tokens, shape[0] // 2), jnp.bfloat16)
    expected = plainly_gated(product, activation)
    assert 0.2 < float(jnp.std(expected.astype(jnp.float32))) < 5, "gates where the activation bends"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    output = capfd.readouterr()
    assert "RACE" not in output.out + output.err


@needs_interpreter
def test_check_on_a_device():
    """The check passes the kernel, and sees one without its activation, with another, or with gate and up swapped."""
    problem = MatmulProblem(np.dtype(jnp.bfloat16), np.dtype(np.int8), 128, 256, (1, 256), activation="silu")
    right = partial(mosaic_gpu.gated_matmul, interpret=plgpu.InterpretGPUParams())
    floats = replace(problem, codes_dtype=problem.x_dtype, block=(128, 256))
    for one in (problem, replace(problem, activation="gelu_tanh"), floats):
        found = check_gated(right, one, rows=(1, 17), repeats=0)
        assert [finding.what for finding in found] == ["gate of 1 rows", "gate of 17 rows"]
        assert all(finding.right for finding in found), found

    def swapped(x, w, activation):
        order = jnp.arange(128) ^ 1
        return right(x, replace(w, codes=w.codes[order], scale=w.scale[order]), activation)

    def another(x, w, activation):
        return right(x, w, "gelu_tanh")

    def none(x, w, activation):
        y = mosaic_gpu._product(x, w, x.dtype, right.keywords["interpret"])[0]
        return y[:, ::2] * y[:, 1::2]

    for wrong in (swapped, another, none):
        assert not any(finding.right for finding in check_gated(wrong, problem, rows=(1, 17), repeats=0))


def test_a_thread_holds_a_gate_and_its_up():
    """A register of the product has outputs 2 i and 2 i + 1 of a token; in the same place the result has its i."""
    outputs = 256
    tokens = 24
    pairs = places_of(mosaic.gpu.WGMMA_TRANSPOSED_LAYOUT, outputs, tokens).reshape(128, -1, 2)
    results = places_of(mosaic_gate.HALVED.to_mgpu(), outputs // 2, tokens).reshape(128, -1)
    output, token = np.divmod(results, tokens)
    np.testing.assert_array_equal(pairs, np.stack([2 * output * tokens + token, (2 * output + 1) * tokens + token], -1))


# --- compiled ahead of time ---


@pytest.fixture(scope="module")
def mesh():
    return mesh_of("h200x1")


def like(mesh, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def weight_like(mesh, shape, codes, *, zero=False, shuffled=True) -> QuantArray:
    blocks = shape[0], shape[1] // 128
    zeros = like(mesh, blocks, jnp.int8) if zero else None
    return QuantArray(like(mesh, shape, codes), like(mesh, blocks, jnp.bfloat16), zeros, shuffled=shuffled)


BF16 = jnp.bfloat16
GATE_UP = 28672, 4096  # Llama 3 8B


def test_what_computes_the_gate(mesh):
    """One kernel where the product has one part; otherwise a product, and the kernel between products."""
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")

    def found(rows: int, w, activation="silu", backend="auto"):
        gated = gated_matmul_of(HOPPER, backend)
        with jax.set_mesh(mesh):
            return set(traced_kernels(partial(gated, activation=activation), like(mesh, (rows, w.shape[1]), BF16), w))

    int4 = weight_like(mesh, GATE_UP, jnp.int4)
    for rows in (1, 32, 64):
        assert found(rows, int4) == {"gated_matmul"}
        assert found(rows, int4, "gelu") == {"quant_matmul"}, "an activation that the kernel does not know"
        assert found(rows, weight_like(mesh, GATE_UP, jnp.int4, zero=True)) == {"quant_matmul"}
    assert found(32, int4, backend="xla") == set()
    assert found(32, weight_like(mesh, (1024, 14336), jnp.int4)) == {"quant_matmul"}, "the inputs are split"
    assert found(2048, int4) == set(), "the weight is dequantized first"

    floats = like(mesh, GATE_UP, jnp.bfloat16)
    problem = replace(MatmulProblem.of(floats, as_codes(floats)), activation="silu")
    assert ways.candidates(HOPPER, problem) == [("mosaic_gpu", False), ("dot", False)]
    assert found(32, floats) == set(), "nothing was measured"
    tuning.use(HOPPER.kind, Table(products={ways.key(problem): Product(False, ((1, "mosaic_gpu"), (64, "dot")))}))
    try:
        assert found(1, floats) == {"gated_matmul"}
        assert found(1, floats, "gelu_tanh") == set(), "another product"
        assert found(64, floats) == found(1, floats, backend="xla") == set()
        tuning.use(HOPPER.kind, Table(products={ways.key(problem): Product(False, ((1, "dot"), (64, "mosaic_gpu")))}))
        assert found(100, floats) == {"gated_matmul"}
        assert found(1024, floats) == set(), "far from what was measured"
    finally:
        tuning.clear()


@pytest.mark.parametrize("tokens", [1, 32, 64])
@pytest.mark.parametrize("codes", ["int4", "int8", "fp8", "bf16"])
def test_compiled(mesh, codes, tokens, monkeypatch, capfd):
    """As the product without the gate: at least two computing warpgroups on a multiprocessor, and no spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = GATE_UP[0] - 768, GATE_UP[1]  # a size of its own: a kernel that is known leaves no log
    if codes == "bf16":
        w: QuantArray = as_codes(like(mesh, shape, jnp.bfloat16))
    else:
        w = weight_like(mesh, shape, CODES[codes], shuffled=codes != "fp8")
    arguments = like(mesh, (tokens, shape[1]), jnp.bfloat16), w
    gated = partial(mosaic_gpu.gated_matmul, activation="silu")
    with jax.set_mesh(mesh):
        jax.jit(gated).lower(*arguments).compile()
    log = "".join(capfd.readouterr())
    found = assembled_kernels(log)["gated_matmul"]
    kernel = traced_kernels(gated, *arguments)["gated_matmul"]
    assert found.spilled == 0
    assert programs(kernel, found.registers) * max(kernel.threads // 128 - 1, 1) >= 2
    # With both operands in shared memory ptxas adds a wait for the accumulator's registers, which is only said.
    assert not re.search(r"C751[0-8]", log), "ptxas leaves wgmma or setmaxnreg as it finds them"


def instructions(text: str) -> Counter:
    """The floating-point instructions of PTX with their constants, but for those that move and round numbers."""
    lines = re.findall(r"\b((?:mul|add|sub|fma|ex2|div|neg|rcp|min|max)\.[\w.]*f32)\s([^;]*);", text)
    return Counter((name, tuple(re.findall(r"0f[0-9A-F]{8}", operands))) for name, operands in lines)


@pytest.mark.parametrize("activation", mosaic_gate.ACTIVATIONS)
def test_instructions(mesh, activation, monkeypatch, tmp_path):
    """An activation has the instructions of Triton's kernel, so that the gate has the same bits in both."""
    library = pytest.importorskip("jax_triton.triton_lib", reason="jax-triton is not installed")
    from jaxserve.pallas_kernels import fused_triton

    monkeypatch.setattr(library, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    sums = like(mesh, (1, 4, 2 * 192), BF16)  # a size of its own: a kernel that is known leaves no text
    with jax.set_mesh(mesh):
        jax.jit(lambda sums: fused_triton.gate(Partials(sums), activation, BF16)).lower(sums)
    (text,) = (path.read_text() for path in tmp_path.rglob("*.ptx"))
    # The 1 of "1 / (1 + x)" is in a register there.
    ours = instructions(mosaic_gate.ACTIVATIONS[activation].replace("t, 0f3F800000, t;", "t, one, t;"))
    each = text.count("ex2.approx")  # numbers of a thread
    assert instructions(text) == Counter({one: each * count for one, count in ours.items()})
