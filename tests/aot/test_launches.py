"""How many kernels the steps of an 8B shape launch on an H200, read from the compiled programs.

Each launch costs a GPU some two to four microseconds, so that twenty of them in each of 32 layers cost more than
reading the weights of an 8B model in int4. The aim is 9 in each layer and 20 outside; the bounds below are what is
reached, so that it cannot grow. The launches of a layer are printed (`pytest -s`).
"""

import jax
import pytest
from launches import Count, count, describe
from test_steps import make_runner

from jaxserve.execution.programs import StepProgram
from jaxserve.execution.steps import StepShape
from jaxserve.scheduling.sampler import Sampler

SHAPES = {
    "decode": StepShape.of(64, 64, 16, decode_only=True),
    "mixed": StepShape.of(1152, 64, 16, decode_only=False),
}
# (scheme, step) -> at most so many launches in each layer, and outside the layers.
BOUNDS = {
    ("bf16", "decode"): (9, 22),
    ("bf16", "mixed"): (13, 41),
    ("int4", "decode"): (9, 22),
    ("int4", "mixed"): (17, 41),  # of which four dequantize a weight each
    ("fp8", "decode"): (9, 22),
    ("fp8", "mixed"): (17, 41),
    ("fp8-dynamic", "decode"): (10, 22),  # what attention gives is rounded in a launch of its own
    ("fp8-dynamic", "mixed"): (14, 41),
}


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def launches_of_step(folder, scheme: str, shape: StepShape, sampler: Sampler = Sampler.GREEDY) -> Count:
    """Of rows that draw one token, from programs of two and of four layers."""
    texts = []
    for layers in (2, 4):
        runner, _ = make_runner(folder, "h200x1", "mosaic_gpu", 16, layers, scheme)
        texts.append(runner.lower(StepProgram(shape, sampler, 1, keeps_hidden=False)).compile().as_text())
    return count(*texts, layers=2)


@pytest.mark.parametrize(
    ("scheme", "step"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[0] == "fp8" or case == ("fp8-dynamic", "mixed") else [])
        for case in BOUNDS
    ],
)
def test_launches(scheme, step, tmp_path):
    found = launches_of_step(tmp_path, scheme, SHAPES[step])
    print(f"\n{scheme} {step}: {describe(found)}")
    layer, outside = BOUNDS[scheme, step]
    assert found.per_layer <= layer, describe(found)
    assert found.outside <= outside, describe(found)
    # Lists of work are the same for all layers, and made once.
    of_decode = [source for _, source in found.layer if "paged_attention" in source and step == "decode"]
    assert [source.split("/")[-2:] for source in of_decode] == [["paged_decode", "mpmd_map"]] * (step == "decode")


def test_filters_cost_one_launch(tmp_path):
    """Top-k, top-p and min-p are in the kernel that draws; their settings are packed for it in another."""
    found = launches_of_step(tmp_path, "bf16", SHAPES["decode"], Sampler.FILTERED)
    assert found.outside <= BOUNDS["bf16", "decode"][1] + 1, describe(found)
