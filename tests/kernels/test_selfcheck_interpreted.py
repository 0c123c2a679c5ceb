"""The kernels of GPUs and TPUs pass the checks of a device, as far as their interpreters can tell: no false alarms."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import kv_write_tpu
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu, mosaic_gpu_decode_kernel, tpu
from jaxserve.pallas_kernels.registry import AttentionProblem, Device, MatmulProblem
from jaxserve.pallas_kernels.selfcheck import Finding, check_attention, check_matmul, check_write
from jaxserve.pallas_kernels.selfcheck_cases import Rows
from jaxserve.pallas_kernels.selfcheck_fused import check_write_and_attend

BF16 = np.dtype(jnp.bfloat16)
F16 = np.dtype(np.float16)
INT8 = np.dtype(np.int8)
# A row longer than a block of keys, another of one token; prompts that begin at offsets 2 and 3, one with a past.
ROWS = Rows((301, 1), ((9, 0), (17, 70)), empty=1)
hopper = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX's interpreter of Mosaic GPU kernels comes with JAX 0.11.2"
)


def all_right(found: list[Finding]) -> float:
    assert all(finding.right for finding in found), "\n".join(map(str, found))
    return max(finding.error for finding in found)


@hopper
@pytest.mark.parametrize(
    "problem",
    [AttentionProblem(BF16, BF16, 1, 4, 64, 16), AttentionProblem(F16, INT8, 1, 7, 64, 64, has_scale=True)],
    ids=["bf16", "int8"],
)
def test_hopper_attention(problem):
    assert mosaic_gpu.why_not(Device("gpu", "NVIDIA H200", (9, 0)), problem) is None
    attend = partial(mosaic_gpu.paged_attention, interpret=plgpu.InterpretGPUParams())
    all_right(check_attention(attend, problem, rows=ROWS, variants=("all",), repeats=0))


def without_the_last_part(merge, tile, arrays, work, first):
    """As if the last of a row's parts came too late."""
    return merge(tile, arrays, work._replace(parts=work.parts - 1), first)


def of_another_head(merge, tile, arrays, work, first):
    return merge(tile, arrays, work, first + 1 - 2 * work.head)


def one_too_early(arrive, *args, **scratch):
    """As if an addition had been counted twice: of three programs the second finds itself the last of a row."""
    return arrive(*args, **scratch) + 1


@hopper
@pytest.mark.parametrize(
    ("function", "wrong"),
    [("_merge", without_the_last_part), ("_merge", of_another_head), ("_arrive", one_too_early)],
)
def test_wrong_merges_of_hopper_decode_are_seen(function, wrong, monkeypatch):
    right = getattr(mosaic_gpu_decode_kernel, function)
    monkeypatch.setattr(mosaic_gpu_decode_kernel, function, partial(wrong, right))
    attend = partial(mosaic_gpu.paged_attention.__wrapped__, interpret=plgpu.InterpretGPUParams())
    problem = AttentionProblem(BF16, BF16, 2, 4, 64, 16)
    found = check_attention(attend, problem, rows=Rows((641, 1)), variants=("decode",), repeats=0)
    assert [finding.what for finding in found if not finding.right] == ["decode rows"]
    assert "row 0 of 641" in found[0].where or found[0].error == float("inf")


@hopper
@pytest.mark.parametrize("block", [(1, 256), (1, 64)], ids=["channel", "groups"])
def test_hopper_products(block):
    from jaxserve.pallas_kernels.quant_matmul import mosaic_gpu as products

    multiply = partial(products.quant_matmul, interpret=plgpu.InterpretGPUParams())
    problem = MatmulProblem(BF16, INT8, 64, 256, block, has_zero=block[1] < 256)
    assert products.why_not(Device("gpu", "NVIDIA H200", (9, 0)), problem) is None
    worst = all_right(check_matmul(multiply, problem, rows=(1, 17), repeats=0))
    assert worst < 1e-4, "products of codes are exact, and sums are in float32"


def on_tpu(function):
    """The function in interpret mode. The checks compile in threads, each of which must be told."""

    def interpreted(*args, **options):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
            return function(*args, **options)

    return interpreted


def test_tpu_attention_and_write():
    problem = AttentionProblem(BF16, BF16, 2, 4, 128, 16)
    all_right(check_attention(on_tpu(tpu.paged_attention), problem, rows=ROWS, variants=("all",), repeats=0))
    pltpu.reset_tpu_interpret_mode_state()
    all_right(check_write(on_tpu(kv_write_tpu.write_kv), problem, repeats=0))
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("kv", [None, INT8], ids=["bf16", "int8"])
def test_tpu_write_within_attention(kv):
    problem = AttentionProblem(BF16, kv or BF16, 2, 4, 128, 128, has_scale=kv is not None)
    fused = on_tpu(tpu.write_and_attend)
    attend = on_tpu(tpu.paged_attention)
    all_right(check_write_and_attend(fused, attend, problem, rows=Rows((301, 1, 128, 129)), repeats=0))
    pltpu.reset_tpu_interpret_mode_state()
