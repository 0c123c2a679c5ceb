"""The check that a kernel passes before a device may use it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ops import Ops, checked, choose_ops
from pallas_kernels.paged_attention import cpu, reference
from pallas_kernels.registry import AttentionProblem, BackendError, Device
from pallas_kernels.selfcheck import attention_error, tolerance

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
