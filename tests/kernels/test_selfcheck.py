"""The check that a kernel passes before a device may use it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops as operations
from pallas_kernels.ops import Ops, checked, checked_matmul, choose_ops
from pallas_kernels.paged_attention import cpu, reference
from pallas_kernels.quant_matmul import reference as quantized
from pallas_kernels.registry import AttentionProblem, BackendError, Device, MatmulProblem
from pallas_kernels.selfcheck import attention_error, matmul_error, matmul_tolerance, tolerance

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)
PROBLEMS = [
    AttentionProblem(F32, F32, 2, 4, 64, 16),
    AttentionProblem(BF16, BF16, 1, 7, 96, 64, softcap=True),
    AttentionProblem(BF16, np.dtype(np.int8), 2, 1, 128, 32, has_scale=True, sinks=True),
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_reference_passes(problem):
    assert attention_error(reference.paged_attention, problem) <= tolerance(problem)


def test_another_implementation_passes():
    if cpu.why_not(Device("cpu", "cpu"), PROBLEMS[0]):
        pytest.skip("no C++ compiler")
    error = attention_error(cpu.paged_attention, PROBLEMS[0])
    assert 0 < error < tolerance(PROBLEMS[0])


def late(q, pages, tables, q_start, kv_len, num_decodes, **options):
    """Sees one token too few."""
    return reference.paged_attention(q, pages, tables, q_start, kv_len - 1, num_decodes, **options)


def poisoned(*args, **options):
    return reference.paged_attention(*args, **options).at[3].set(jnp.nan)


@pytest.mark.parametrize("wrong", [late, poisoned])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_wrong_kernels_do_not(wrong, problem):
    assert attention_error(wrong, problem) > tolerance(problem)


def test_a_wrong_kernel_is_not_used(caplog):
    plain = choose_ops(Device("cpu", "cpu"), PROBLEMS[0], backend="xla")
    assert checked(plain, PROBLEMS[0], "xla") is plain
    wrong = Ops(paged_attention=late)
    assert checked(wrong, PROBLEMS[0], "auto").paged_attention is reference.paged_attention
    assert "plain XLA" in caplog.text
    with pytest.raises(BackendError, match="mosaic_gpu"):
        checked(wrong, PROBLEMS[0], "mosaic_gpu")


INT8, INT4 = np.dtype(np.int8), np.dtype(jnp.int4)
MATMULS = [
    MatmulProblem(BF16, INT8, 96, 256, (1, 256)),
    MatmulProblem(F32, INT4, 64, 256, (1, 128), has_zero=True, has_bias=True),
]


def one_row_off(x, w, *, count=None):
    return jnp.roll(quantized.quant_matmul(x, w), 1, axis=1)


@pytest.mark.parametrize("problem", MATMULS)
def test_products(problem):
    assert matmul_error(quantized.quant_matmul, problem) <= matmul_tolerance(problem)
    assert matmul_error(one_row_off, problem) > matmul_tolerance(problem)


def test_a_wrong_product_is_not_used(monkeypatch, caplog):
    class Wrong:
        quant_matmul = staticmethod(one_row_off)

    device = Device("gpu", "some GPU", (9, 0))
    monkeypatch.setattr(operations, "choose", lambda operation, device, problem, backend: "triton")
    monkeypatch.setattr(operations, "load", lambda operation, backend: Wrong)
    assert checked_matmul(device, MATMULS, "auto") == "xla"
    assert "plain XLA takes its place" in caplog.text
    with pytest.raises(BackendError, match="the matmul backend triton differs from plain XLA"):
        checked_matmul(device, MATMULS, "triton")
    monkeypatch.setattr(operations, "load", lambda operation, backend: quantized)
    assert checked_matmul(device, MATMULS, "triton") == "triton"
