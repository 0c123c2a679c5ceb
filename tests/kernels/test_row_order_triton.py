"""The Triton kernels, interpreted: a row has the same bits whatever rows are beside it, and wherever it stands. Sizes
of tiles and numbers of splits follow from the number of rows, so other numbers of rows need sizes that are fixed.

As in `test_triton`, the interpreted tests run in a process of their own.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_triton
from row_order import Attention, Sequences, check_in_any_company, exact_product, same_in_other_numbers
from test_lora import PLACES, draw_pool
from test_triton import INTERPRET, compiled, interpreted, quantized_weight

from jaxserve.pallas_kernels import draw_triton, fused_triton, triton_compat, tuning
from jaxserve.pallas_kernels.latent_attention import triton_gpu as latent
from jaxserve.pallas_kernels.lora import triton as lora
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.paged_attention import triton_gpu as attention_kernels
from jaxserve.pallas_kernels.quant_matmul import triton_blocks
from jaxserve.pallas_kernels.quant_matmul import triton_gpu as matmul
from jaxserve.pallas_kernels.types import DrawSettings

BFLOAT16 = ml_dtypes.bfloat16
TARGET = triton_compat.Target(90, 4)  # few multiprocessors, and still some splits


@compiled
@pytest.mark.parametrize("group", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(group):
    """Runs this file's interpreted tests where Triton interprets."""
    test_triton.run_interpreted(__file__, group)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not INTERPRET:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    test_triton.repair_interpreter(monkeypatch)
    cast_and_multiply = InterpreterBuilder.create_dot

    def multiply(self, a, b, d, *rest):
        """With a sum of zero, then the sum: `exact_product` instead of NumPy's."""
        with monkeypatch.context() as patch:
            patch.setattr(np, "matmul", lambda a, b, dtype: exact_product(a, b).astype(dtype))
            return cast_and_multiply(self, a, b, d, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply)
    monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
    monkeypatch.setattr(triton_compat, "target", lambda: TARGET)
    for module in (matmul, triton_blocks):
        monkeypatch.setattr(module, "PTX", False)
    with jax.disable_jit(), np.errstate(all="ignore"):
        yield


FIXED = {"tokens": 16, "outputs": 32, "step": 64, "warps": 4, "stages": 2, "splits": 2, "dequantize": 1}


@interpreted
@pytest.mark.parametrize("codes", ["int4", "int8"])
def test_products(codes):
    random = np.random.default_rng(0)
    w, _ = quantized_weight(random, 40, 1024, codes, (1, 64), zero=codes == "int4")
    x = random.standard_normal((24, 1024)).astype(BFLOAT16)
    product = lambda x: matmul.quant_matmul(jnp.asarray(x), w)  # noqa: E731
    check_in_any_company(product, x)
    with tuning.trial("matmul", "triton", FIXED):
        assert same_in_other_numbers(product, x, counts=(5,))
    if codes == "int4":  # others happen to have as many splits for both numbers
        assert not same_in_other_numbers(product, np.tile(x, (3, 1)), counts=(24,)), "other splits"


@interpreted
@pytest.mark.slow
def test_products_by_expert():
    random = np.random.default_rng(0)
    w, _ = quantized_weight(random, 3 * 40, 256, "int4", (1, 64))
    w = jax.tree.map(lambda x: x.reshape(3, 40, -1), w)
    x = random.standard_normal((20, 256)).astype(BFLOAT16)
    expert = random.integers(0, 3, 20)

    def product(x, expert):
        order = np.argsort(expert, kind="stable")
        sizes = np.bincount(expert, minlength=3).astype(np.int32)
        made = matmul.grouped_quant_matmul(jnp.asarray(x[order]), w, jnp.asarray(sizes))
        return np.asarray(made)[np.argsort(order)]

    check_in_any_company(product, x, expert)


@interpreted
@pytest.mark.parametrize(
    "kind", ["float32", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "latent"))]
)
def test_attention(kind):
    if kind == "latent":
        function = latent.latent_attention
        options = {"rank": 32}
        sequences = Sequences.make(3, 600, (4,), 48, 16, BFLOAT16)
    else:
        function = attention_kernels.paged_attention
        options = {"window": 300 if kind == "int8" else None}
        dtypes = (BFLOAT16, np.int8) if kind == "int8" else (np.float32,)
        sequences = Sequences.make(3, 600, (1, 4), 32, 16, *dtypes)
    attention = Attention(partial(function, scale=0.1, **options), sequences, tokens=24, rows=4)
    attention.check_in_any_company()
    assert attention.same_in_other_chunks([580, 587, 588, 600])
    if kind == "float32":
        assert not attention.same_in_other_chunks([597, 598, 600], decode=True), "decodes are split, prompts are not"
        assert not attention.same_in_other_batches(24, rows=16, width=38), "other splits"
        with tuning.trial("decode", "triton", {"splits": 2}):  # of the width of the table
            assert attention.same_in_other_batches(24, rows=16, width=38)


@interpreted
def test_between_products():
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((9, 200)).astype(BFLOAT16) for _ in range(2))
    scale = jnp.asarray(random.standard_normal(200), BFLOAT16)

    def add_norm(x, y):
        return jnp.concatenate(fused_triton.add_norm(jnp.asarray(x), Partials(jnp.asarray(y)[None]), scale, 1e-5), 1)

    check_in_any_company(add_norm, x, y)
    assert same_in_other_numbers(add_norm, x, y, counts=(1, 4))
    gate = lambda y: fused_triton.gate(Partials(jnp.asarray(y)[None]), "silu", jnp.bfloat16)  # noqa: E731
    check_in_any_company(gate, y)
    assert same_in_other_numbers(gate, y, counts=(1, 4))


@interpreted
def test_drawn_tokens():
    random = np.random.default_rng(0)
    logits = 3 * random.standard_normal((6, 700)).astype(np.float32)
    keys = random.integers(0, 2**32, (6, 2), np.uint32)
    temperature, top_p = (random.uniform(0.5, high, 6).astype(np.float32) for high in (2, 1))
    settings = temperature, random.integers(0, 50, 6).astype(np.int32), top_p, np.zeros(6, np.float32)

    def draw(logits, keys, *settings):
        return draw_triton.draw(jnp.asarray(logits), DrawSettings(*map(jnp.asarray, (*settings, keys)), None))

    check_in_any_company(draw, logits, keys, *settings)
    assert same_in_other_numbers(draw, logits, keys, *settings, counts=(2,))


@interpreted
def test_adapters():
    random = np.random.default_rng(0)
    stack, y, x = draw_pool(random, (32, 8, 8), 96, 20, jnp.float32)
    place = random.integers(-1, PLACES, 20).astype(np.int32)
    add = lambda y, x, place: lora.add_adapters(jnp.asarray(y), jnp.asarray(x), stack, jnp.asarray(place))  # noqa: E731
    check_in_any_company(add, np.asarray(y), np.asarray(x), place)
