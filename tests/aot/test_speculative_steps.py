"""Steps that check proposals, compiled for devices that are not here, with two layers of an 8B shape."""

import re

import jax
import pytest
from test_host_free_steps import VOCAB, host_waits, sorts
from test_steps import cache_copies, make_runner

from jaxserve.execution.programs import StepProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.sampler import Sampler

ROWS, PROPOSALS, TOKENS = 64, 4, 384


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.parametrize(
    ("target", "backend", "page_size", "sampler"),
    [
        ("h200x1", "mosaic_gpu", 16, Sampler.FULL),
        pytest.param("h200x1", "mosaic_gpu", 16, Sampler.GREEDY, marks=pytest.mark.slow),
        pytest.param("h200x1", "mosaic_gpu", 16, Sampler.FILTERED, marks=pytest.mark.slow),
        pytest.param("h200x8", "mosaic_gpu", 16, Sampler.FULL, marks=pytest.mark.slow),
        pytest.param("v6e-1", "mosaic_tpu", 128, Sampler.GREEDY, marks=pytest.mark.slow),
        pytest.param("v6e-8", "mosaic_tpu", 128, Sampler.FULL, marks=pytest.mark.slow),
    ],
)
def test_proposals_are_checked_in_one_pass(target, backend, page_size, sampler, tmp_path):
    """One pass of two layers, logits for the draws alone, and nothing that waits for the host."""
    runner, _ = make_runner(tmp_path, target, backend, page_size, 2)
    shape = StepShape.of(TOKENS, ROWS, page_size, decode_only=False)
    program = StepProgram(shape, sampler, 1, keeps_hidden=False, proposals=PROPOSALS)
    text = runner.lower(program).compile().as_text()
    if target.startswith("h200"):
        assert host_waits(text) == []
    assert sorts(text) == []
    cache = runner.layout.num_pages * runner.layout.page_bytes // runner.mesh.size
    assert cache_copies(text, cache // 2 // 2) == []
    draws = ROWS * (PROPOSALS + 1)
    logits = {int(n) for n in re.findall(rf"f32\[(\d+),{VOCAB}\]", text)}
    assert logits <= {draws, ROWS, draws // runner.mesh.size, ROWS // runner.mesh.size}
    assert draws // runner.mesh.size in logits
