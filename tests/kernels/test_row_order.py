"""The kernels for TPUs and Hopper GPUs, interpreted: a row has the same bits whatever rows are beside it, and wherever
it stands. Which of them keep this in batches with room for more, and in other chunks of a prompt, too.

XLA's compiler for CPUs contracts a product and a sum into one operation in a block without a mask, and not in one with
a mask. So these tests run in a process whose processor has no such operation (`test_interpreted`).
"""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_tpu_matmul
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from row_order import (
    Attention,
    Chunk,
    Sequences,
    also_slow,
    bits,
    check_in_any_company,
    exact_product,
    same_in_other_numbers,
)
from test_lora import PLACES, draw_pool
from test_quant_matmul import make_weight

from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.hopper_rules import interpreter
from jaxserve.pallas_kernels.latent_attention import mosaic_gpu as latent_mosaic
from jaxserve.pallas_kernels.latent_attention import tpu as latent_tpu
from jaxserve.pallas_kernels.latent_attention import tpu_plan as latent_plan
from jaxserve.pallas_kernels.lora import tpu as lora_tpu
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu, tpu, tpu_plan
from jaxserve.pallas_kernels.quant_matmul import mosaic_gpu as mosaic_matmul
from jaxserve.pallas_kernels.quant_matmul import tpu as tpu_matmul

BFLOAT16 = ml_dtypes.bfloat16
UNFUSED = "--xla_cpu_max_isa=AVX"
HERE = UNFUSED in os.environ.get("XLA_FLAGS", "")
interpreted = pytest.mark.skipif(not HERE, reason="runs in a process of its own, by test_interpreted")
needs_mosaic = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2"
)


SLOW = pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])  # Mosaic GPU is interpreted slowly


@pytest.mark.skipif(HERE, reason="starts the other process")
@pytest.mark.parametrize("group", ["not slow", SLOW])
def test_interpreted(group):
    """Runs the other tests of this file where a product and a sum are two operations."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", group, __file__]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {UNFUSED}"
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


# --- TPU ---


def dot_general(a, b, dimension_numbers, **_):
    """`lax.dot_general` of matrices by `exact_product`."""
    ((left,), (right,)), batch = dimension_numbers
    assert (a.ndim, b.ndim, *map(len, batch)) == (2, 2, 0, 0)
    shape = jax.ShapeDtypeStruct((a.shape[1 - left], b.shape[1 - right]), jnp.float32)

    def multiply(a, b):
        return exact_product(np.moveaxis(a, left, 1), np.moveaxis(b, right, 0))

    return jax.pure_callback(multiply, shape, a, b)


@pytest.fixture
def on_tpu(monkeypatch):
    """A function that runs another one in TPU's interpret mode, with small tiles and blocks."""
    for module in (jax.lax, jax._src.lax.lax):  # `jnp.dot` calls the latter
        monkeypatch.setattr(module, "dot_general", dot_general)
    monkeypatch.setattr(tpu_plan, "BLOCK", 128)
    monkeypatch.setattr(tpu_plan, "TILE", 16)
    monkeypatch.setattr(latent_plan, "BLOCK", 128)
    monkeypatch.setattr(latent_plan, "TILE", 128)

    def run(function):
        def interpret(*arguments, decode_only=False):
            with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
                return jax.block_until_ready(function(*arguments))

        return interpret

    yield run
    jax.clear_caches()


ATTENTION = {
    "float32": (tpu.paged_attention, Sequences.make(3, 300, (1, 4), 64, 16, np.float32), {}),
    "int8, window": (tpu.paged_attention, Sequences.make(3, 300, (2, 2), 128, 128, BFLOAT16, np.int8), {"window": 70}),
    "latent": (latent_tpu.latent_attention, Sequences.make(3, 300, (4,), 160, 16, BFLOAT16), {"rank": 128}),
}


@interpreted
@pytest.mark.parametrize("name", ["float32", *also_slow("int8, window", "latent")])
def test_attention_on_tpu(name, on_tpu):
    function, sequences, options = ATTENTION[name]
    attention = Attention(on_tpu(partial(function, scale=0.1, **options)), sequences, tokens=32, rows=4)
    attention.check_in_any_company()
    assert attention.same_in_other_chunks([270, 277, 278, 290, 300])
    if name == "float32":  # two kernels; with rounded results they had the same bits here
        assert not attention.same_in_other_chunks([297, 298, 299, 300], decode=True)
    else:
        assert attention.same_in_other_batches(tokens=64, rows=8, width=attention.sequences.table.shape[1] + 9)


PRODUCTS = {
    "int4": test_tpu_matmul.Case("int4", (1, 32), inputs=320, out=140, tokens=80, zero=True, bias=True),
    "int8": test_tpu_matmul.Case("int8", (1, 512), out=140, tokens=80),
    "fp8": test_tpu_matmul.Case("fp8", (128, 128), tokens=80),
    "fp4": test_tpu_matmul.Case("fp4", (1, 16), inputs=256, tokens=80, scale="float8_e4m3fn", gain=True),
}


@interpreted
@pytest.mark.parametrize("name", ["int4", *also_slow("int8", "fp8", "fp4")])
def test_products_on_tpu(name, on_tpu):
    """Up to 64 tokens, and more than 64, are two ways to scale; within each, the number does not matter."""
    x, w = PRODUCTS[name].make()
    x, product = np.asarray(x), on_tpu(lambda x: tpu_matmul.quant_matmul(jnp.asarray(x), w))
    check_in_any_company(product, x[:40])
    assert same_in_other_numbers(product, x[:40], counts=(17,))
    if name == "int4":  # whose other half is tested with other codes
        return
    check_in_any_company(product, x)
    assert same_in_other_numbers(product, x, counts=(70,))
    if name != "int8":  # one scale for all inputs: the same sums
        assert not same_in_other_numbers(product, x, counts=(64,))


def by_expert(product):
    """`product` of rows sorted by expert, as a function of rows and their experts."""

    def function(x, expert):
        order = np.argsort(expert, kind="stable")
        sizes = np.bincount(expert, minlength=3).astype(np.int32)
        return np.asarray(product(jnp.asarray(x[order]), jnp.asarray(sizes)))[np.argsort(order)]

    return function


EXPERTS = np.random.default_rng(1).integers(0, 3, 40)


@interpreted
def test_products_by_expert_on_tpu(on_tpu):
    x, w = test_tpu_matmul.Case("int4", (1, 64), inputs=256, tokens=40, experts=3).make()
    run = on_tpu(lambda x, sizes: tpu_matmul.grouped_quant_matmul(x, w, sizes))
    check_in_any_company(by_expert(run), np.asarray(x), EXPERTS)


@interpreted
def test_adapters_on_tpu(on_tpu):
    random = np.random.default_rng(0)
    stack, y, x = draw_pool(random, (32, 8, 8), 96, 24, jnp.float32)
    place = random.integers(-1, PLACES, 24).astype(np.int32)
    add = on_tpu(lambda y, x, place: lora_tpu.add_adapters(y, x, stack, place))
    check_in_any_company(add, np.asarray(y), np.asarray(x), place)


# --- Hopper GPUs ---


class _NumPy:
    """NumPy for the interpreter's products."""

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        assert dtype == np.float32
        return exact_product(a, b)


@pytest.fixture
def on_hopper(monkeypatch):
    """A function that runs another one with its `interpret`."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(gpu_callbacks, "np", _NumPy())

    def run(function):
        def interpret(*arguments, **options):
            with interpreter() as params:
                return np.asarray(function(*arguments, interpret=params, **options))

        return interpret

    return run


HOPPER = {"int4": ((1, 64), {"zero": True}), "int8": ((1, 512), {}), "fp8": ((128, 128), {"bias": True})}
FIXED = {"n": 16, "m": 64, "k": 64, "splits": 2, "warpgroups": 1}


@interpreted
@needs_mosaic
@pytest.mark.parametrize("codes", ["int8", *also_slow("int4", "fp8")])
def test_products_on_hopper(codes, on_hopper):
    """Plans depend on the number of tokens. With fixed sizes the number does not matter."""
    random = np.random.default_rng(0)
    block, options = HOPPER[codes]
    w = make_weight(random, (128, 512), codes, block, **options)
    x = random.standard_normal((24, 512)).astype(BFLOAT16)
    product = on_hopper(lambda x, interpret: mosaic_matmul.quant_matmul(jnp.asarray(x), w, interpret=interpret))
    check_in_any_company(product, x)
    with tuning.trial("matmul", "mosaic_gpu", FIXED):
        assert same_in_other_numbers(product, x, counts=(5,))
    with tuning.trial("matmul", "mosaic_gpu", FIXED | {"splits": 1}):
        other = product(x)
    with tuning.trial("matmul", "mosaic_gpu", FIXED):
        assert not np.array_equal(bits(other), bits(product(x))), "splits must be fixed, too"


@interpreted
@needs_mosaic
@pytest.mark.slow
def test_products_by_expert_on_hopper(on_hopper):
    random = np.random.default_rng(0)
    members = [make_weight(random, (64, 256), "int8", (1, 128)) for _ in range(3)]
    w = jax.tree.map(lambda *parts: jnp.stack(parts), *members)
    run = on_hopper(lambda x, sizes, interpret: mosaic_matmul.grouped_quant_matmul(x, w, sizes, interpret=interpret))
    check_in_any_company(by_expert(run), random.standard_normal((40, 256)).astype(BFLOAT16), EXPERTS)


@interpreted
@needs_mosaic
@pytest.mark.slow
def test_latent_decodes_on_hopper(on_hopper):
    """Other kernels of attention for Hopper are compared in `test_mosaic_gpu_attention`."""
    sequences = Sequences.make(3, 600, (4,), 192, 16, BFLOAT16)
    attention = Attention(on_hopper(partial(latent_mosaic.latent_attention, scale=0.1, rank=128)), sequences, 4, 4)
    chunks = Chunk(0, 599), Chunk(1, 3), Chunk(2, 300)
    first = attention(*chunks, decodes=3)
    for others in ((chunks[2], chunks[0]), (Chunk(1, 599), Chunk(2, 0), chunks[0])):
        found = attention(*others, decodes=len(others))
        np.testing.assert_array_equal(bits(found[-1]), bits(first[0]))
    assert attention.same_in_other_batches(tokens=8, rows=8, width=50)


@interpreted
@needs_mosaic
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["latent", "plain"])
def test_prompts_on_hopper(kind, on_hopper):
    """Chunks by the kernel for prompts have the same bits; that for decodes adds in other blocks. (A long row is
    divided by the number of its new tokens, which matters from 512 cached tokens on.)"""
    function = partial(latent_mosaic.latent_attention, rank=128) if kind == "latent" else mosaic_gpu.paged_attention
    heads, dim = ((4,), 192) if kind == "latent" else ((1, 4), 64)
    sequences = Sequences.make(2, 150, heads, dim, 16, BFLOAT16)
    attention = Attention(on_hopper(partial(function, scale=0.1)), sequences, tokens=24, rows=4)
    assert attention.same_in_other_chunks([147, 148, 150])
