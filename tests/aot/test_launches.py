"""How many kernels the steps of an 8B shape launch on an H200, read from the compiled programs.

Each launch costs a GPU some two to four microseconds, so that twenty of them in each of 32 layers cost more than
reading the weights of an 8B model in int4. The bounds below are what is reached, so that it cannot grow. The launches
of a layer are printed (`pytest -s`).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from test_steps import make_runner

from jaxserve.devices.launches import Count, count, describe
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.quant_matmul import ways
from jaxserve.pallas_kernels.registry import MatmulProblem
from jaxserve.pallas_kernels.tuning import Product, Table
from jaxserve.scheduling.step_plan import Sampler

SHAPES = {
    "decode": StepShape.of(64, 64, 16, decode_only=True),
    "mixed": StepShape.of(1152, 64, 16, decode_only=False),
}
# (target, scheme, step) -> at most so many launches in each layer, and outside the layers. On eight devices two of a
# layer's launches add up over the devices; outside there are four such exchanges, and the turning of what they bring.
BOUNDS = {
    ("h200x1", "bf16", "decode"): (9, 12),
    ("h200x1", "bf16", "mixed"): (11, 18),
    ("h200x1", "int4", "decode"): (8, 12),  # the gate is in the kernel of its product
    ("h200x1", "int4", "mixed"): (15, 18),  # of which four dequantize a weight each
    ("h200x1", "fp8", "decode"): (8, 12),
    ("h200x1", "fp8", "mixed"): (15, 18),
    ("h200x1", "fp8-dynamic", "decode"): (10, 12),  # what attention gives is rounded in a launch of its own
    ("h200x1", "fp8-dynamic", "mixed"): (12, 18),
    ("h200x8", "bf16", "decode"): (12, 17),  # one adds up the parts into which XLA splits a product
    ("h200x8", "bf16", "mixed"): (13, 23),
    ("h200x8", "int4", "decode"): (12, 17),  # one adds up the parts into which the kernel splits the short product
    ("h200x8", "int4", "mixed"): (18, 23),
    ("h200x8", "fp8-dynamic", "decode"): (13, 17),
}
USUAL = {  # the others run in the slow group
    ("h200x1", "bf16", "decode"),
    ("h200x1", "bf16", "mixed"),
    ("h200x1", "int4", "decode"),
    ("h200x1", "int4", "mixed"),
    ("h200x1", "fp8-dynamic", "decode"),
    ("h200x8", "bf16", "decode"),
    ("h200x8", "int4", "decode"),
}


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def launches_of_step(folder, target: str, scheme: str, shape: StepShape, sampler: Sampler = Sampler.GREEDY) -> Count:
    """Of rows that draw one token, from programs of two and of four layers."""
    texts = []
    for layers in (2, 4):
        runner, _ = make_runner(folder, target, "mosaic_gpu", 16, layers, scheme)
        texts.append(runner.lower(StepProgram(shape, sampler, 1, keeps_hidden=False)).compile().as_text())
    return count(*texts, layers=2)


@pytest.mark.parametrize(
    ("target", "scheme", "step"),
    [pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.slow]) for case in BOUNDS],
)
def test_launches(target, scheme, step, tmp_path):
    found = launches_of_step(tmp_path, target, scheme, SHAPES[step])
    print(f"\n{target} {scheme} {step}: {describe(found)}")
    layer, outside = BOUNDS[target, scheme, step]
    assert found.per_layer <= layer, describe(found)
    assert found.outside <= outside, describe(found)
    # Lists of work are the same for all layers, and made once.
    of_decode = [source for _, source in found.layer if "paged_attention" in source and step == "decode"]
    assert [source.split("/")[-2:] for source in of_decode] == [["paged_decode", "mpmd_map"]] * (step == "decode")


def test_bf16_with_the_gate_in_the_product(tmp_path):
    """Where the kernel for both was measured to be faster than cuBLAS and the gate."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 4096), (28672, 4096)))
    problem = replace(MatmulProblem.of(x, jax.eval_shape(as_codes, w)), activation="silu")
    faster = {ways.key(problem): Product(False, ((1, "mosaic_gpu"), (256, "mosaic_gpu")))}
    tuning.use("NVIDIA H200", Table(products=faster))
    try:
        found = launches_of_step(tmp_path, "h200x1", "bf16", SHAPES["decode"])
    finally:
        tuning.clear()
    layer, outside = BOUNDS["h200x1", "bf16", "decode"]
    assert found.per_layer == layer - 1, describe(found)
    assert found.outside <= outside, describe(found)


def test_drawing_with_filters_costs_two_launches(tmp_path):
    """Top-k, top-p and min-p are in the kernel that draws. Their settings are packed in a launch, and the keys of
    random numbers in another."""
    found = launches_of_step(tmp_path, "h200x1", "bf16", SHAPES["decode"], Sampler.FILTERED)
    assert found.outside <= BOUNDS["h200x1", "bf16", "decode"][1] + 2, describe(found)
