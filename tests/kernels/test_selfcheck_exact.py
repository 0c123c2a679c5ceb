"""NumPy's exact answers of the checks equal plain XLA's, and a check compiles nothing but what it checks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_selfcheck import LLAMA
from test_selfcheck_products import BF16, F16, F32, FP8, INT4, INT8, MATMULS, rounded_weight

from jaxserve.devices.compile_cache import CompileCounter
from jaxserve.pallas_kernels import kv_write, selfcheck_exact, selfcheck_fused
from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.lora import reference as lora
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference as attention
from jaxserve.pallas_kernels.quant_matmul import reference, w8a8
from jaxserve.pallas_kernels.registry import LatentProblem, MatmulProblem
from jaxserve.pallas_kernels.selfcheck import check_attention, check_grouped, check_matmul, check_parts, check_write
from jaxserve.pallas_kernels.selfcheck_cases import Rows, activations, make_weight
from jaxserve.pallas_kernels.selfcheck_draw import check_draw
from jaxserve.pallas_kernels.selfcheck_latent import check_latent, check_write_latent
from jaxserve.pallas_kernels.selfcheck_lora import CASES, check_adapters
from jaxserve.pallas_kernels.types import BLOCK_KINDS, Activations

INT8_ROWS = MATMULS["int8 channel"]
FORMS = MATMULS | {
    **{kind: MatmulProblem(BF16, np.dtype(np.uint8), 70, 512, (1, 256), kind=kind) for kind in BLOCK_KINDS},
    "int4 shuffled": MatmulProblem(BF16, INT4, 1100, 256, (1, 64), has_zero=True, shuffled=True),
    "int8 shuffled": MatmulProblem(F16, INT8, 64, 256, (1, 256), shuffled=True),
    "int8 partial blocks": MatmulProblem(BF16, INT8, 90, 200, (128, 128), has_bias=True),
    "int8 dynamic": replace(INT8_ROWS, activations=Activations("int8")),
    "int8 static": replace(INT8_ROWS, activations=Activations("int8", static=True)),
    "int8 in parts": replace(INT8_ROWS, block=(1, 64), activations=Activations("int8", group=64)),
    "fp8 ceiling": replace(INT8_ROWS, codes_dtype=FP8, activations=Activations(FP8.name, ceiling=2.0)),
    "fp8 blocks dynamic": replace(MATMULS["fp8 blocks"], activations=Activations(FP8.name, group=128)),
}


@pytest.mark.parametrize("name", FORMS)
def test_products_equal_plain_xla(name):
    """Every form of weights: the values, products, and products by expert."""
    problem = FORMS[name]
    w = make_weight(problem)
    x = activations(problem, 33)
    assert all(isinstance(array, np.ndarray) for array in jax.tree.leaves(w))
    plain = w
    given = x
    experts = make_weight(problem, 3)
    sizes = np.array([20, 0, 11], np.int32)
    if problem.activations is not None:
        plain = w8a8.ignored(w)
        experts = w8a8.ignored(experts)
        given = selfcheck_exact.rounded(x, w)
        rows = jax.jit(w8a8.quantize)(x, w)
        off = np.abs(given - w8a8.dequantize(rows)) > 1e-5 * np.abs(given)  # by one code, where x is between two
        assert off.mean() < 1e-3
    values, whole, grouped = jax.jit(expected)(given, plain, x, experts, sizes)
    rows = w.shape[0]
    np.testing.assert_allclose(selfcheck_exact.values(w, 0, rows), values, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(selfcheck_exact.values(w, rows - 37, rows), values[-37:], rtol=1e-6, atol=1e-6)
    close(selfcheck_exact.product(x, w), whole)
    close(selfcheck_exact.grouped_product(x, experts, sizes), grouped)


def expected(x, w, rows, experts, sizes):
    return (
        reference.dequantize(w),
        reference.quant_matmul(x, w),
        reference.grouped_quant_matmul(rows, experts, sizes),
    )


def close(found: np.ndarray, expected: jax.Array) -> None:
    """Sums of float32 in another order."""
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


class Plain:
    """Fused kernels that are plain operations."""

    @staticmethod
    def add_norm(x, y, scale, eps, reader=None):
        total, normed = Ops().add_norm(x, y, scale, eps)
        return total, normed if reader is None else w8a8.quantize(normed, reader)

    @staticmethod
    def gate(y, activation, dtype, reader=None):
        gated = Ops().gated(y, activation, dtype)
        return gated if reader is None else w8a8.quantize(gated, reader)

    rotate_and_write = staticmethod(Ops().rotate_and_write)


def rows_and_write(q, k, v, pages, slots, *rows, first_page, **options):
    pages = kv_write.write_kv(pages, k, v, slots, first_page)
    return attention.paged_attention(q, pages, *rows, first_page=first_page, **options), pages


SOME = Rows((20, 1), ((9, 3),))
LATENT = LatentProblem(BF16, np.dtype(np.int8), 4, 64, 16, 16, has_scale=True)
FP4_BLOCKS = MATMULS["NVFP4"]
CHECKS = {  # the check, and the programs of kernels that it runs
    "attention": (lambda: check_attention(attention.paged_attention, LLAMA, rows=SOME, repeats=1), 3),
    "write": (lambda: check_write(kv_write.write_kv, LLAMA, repeats=1), 1),
    "products": (lambda: check_matmul(rounded_weight, FORMS["int4 shuffled"], rows=(1, 17), repeats=1), 2),
    "rounding": (lambda: check_matmul(rounding, FORMS["int8 dynamic"], rows=(1, 17), repeats=1), 2),
    "parts": (lambda: check_parts(lambda *a, **b: rounded_weight(*a, **b)[None], FP4_BLOCKS, repeats=1), 3),
    "experts": (lambda: check_grouped(reference.grouped_quant_matmul, FORMS["Q4_K"], repeats=1), 3),
    "latent": (lambda: check_latent(latent.latent_attention, LATENT, rows=SOME, repeats=1), 2),
    "latent write": (lambda: check_write_latent(latent.write_latent, LATENT, repeats=1), 1),
    "fused": (lambda: selfcheck_fused.check_fused(Plain, replace(LLAMA, q_dtype=F32, kv_dtype=F32)), 9),
    "both": (
        lambda: selfcheck_fused.check_write_and_attend(
            rows_and_write, attention.paged_attention, LLAMA, rows=SOME, repeats=1
        ),
        2,
    ),
    "draw": (lambda: check_draw(lambda logits, _: jnp.argmax(logits, -1).astype(jnp.int32), 512), 3),
    "adapters": (lambda: check_adapters(lora.add_adapters, BF16), len(CASES)),
}


def rounding(x, w, **_):
    return rounded_weight(w8a8.dequantize(w8a8.quantize(x, w)).astype(x.dtype), w8a8.ignored(w))


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_compiles_only_its_kernels(name):
    """Programs compute neither its inputs nor its answers: on a device each would take a tenth of a second or more."""
    check, programs = CHECKS[name]
    counter = CompileCounter()
    found = list(check())
    assert counter.compilations + counter.cache_hits == programs
    assert name == "draw" or all(finding.right for finding in found), "\n".join(map(str, found))
