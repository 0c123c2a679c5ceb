"""The one step of `deterministic_mode` "verify" and the programs that decode ahead, compiled for devices that are not
here, with two layers of an 8B shape."""

import re
from typing import Any

import jax
import pytest
from flax.traverse_util import unflatten_dict
from test_host_free_steps import VOCAB, exchanged, host_waits, sorts
from test_steps import cache_copies, make_runner

from jaxserve.config import EngineConfig
from jaxserve.engine.verify_mode import buckets
from jaxserve.execution.cost import StepCost
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu_prompt

SEQS = 64
PROPOSALS = 15
HIDDEN = 4096


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def verifying(folder, target: str, backend: str, page_size: int) -> tuple[VerifyingRunner, list[StepShape]]:
    """A runner that verifies, and its buckets, as of a model of 32 layers."""
    usual, params = make_runner(folder, target, backend, page_size, 2, slots=SEQS)
    mesh = usual.mesh
    layout = usual.layout
    tree = unflatten_dict(params, sep="/")
    cost = StepCost(weights=16 * 0.23e-3, token=16 * 1.1e-6)  # of 32 layers on an H200
    shapes = buckets(EngineConfig(model="x", max_num_seqs=SEQS), layout, cost)
    options: Any = {"penalty_rows": 64, "proposals": PROPOSALS, "tokens": shapes[-1].tokens}
    runner = VerifyingRunner(usual.model, tree, mesh, SEQS, **options)
    runner.set_cache_size(layout, 8192 // page_size)
    return runner, shapes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "backend", "page_size"),
    [
        ("h200x1", "mosaic_gpu", 16),
        pytest.param("h200x8", "mosaic_gpu", 16, marks=pytest.mark.slow),
        pytest.param("h200x1", "triton", 16, marks=pytest.mark.slow),
        pytest.param("v6e-1", "mosaic_tpu", 128, marks=pytest.mark.slow),
        pytest.param("v6e-4", "mosaic_tpu", 128, marks=pytest.mark.slow),
    ],
)
def test_one_step_counts(target, backend, page_size, tmp_path, monkeypatch):
    """One program samples tokens that count, in one pass, with logits for all of its tokens. Nothing waits for the
    host, no cache is copied, and no long row is divided. More than two devices add their parts in their own order:
    only the embeddings, of which all parts but one are zero, are left to an all-reduce."""
    runner, shapes = verifying(tmp_path, target, backend, page_size)
    divided = []
    launch = mosaic_gpu_prompt.launch

    def noted(tile, slots, *rest):
        divided.append(slots)
        return launch(tile, slots, *rest)

    monkeypatch.setattr(mosaic_gpu_prompt, "launch", noted)
    (step,) = [name for name in runner.names(shapes) if isinstance(name, StepProgram)]
    tokens = step.shape.tokens
    devices = runner.mesh.size
    assert tokens == 256
    greedy = [name for name in runner.draft_programs(shapes) if name.sampler == 0 and name.size == SEQS]
    cache = runner.layout.num_pages * runner.layout.page_bytes // devices
    for name in [step, *greedy]:
        text = runner.lower(name).compile().as_text()
        if target.startswith("h200") and runner.programs.static:
            assert host_waits(text) == [], name
        assert sorts(text) == [], name
        assert cache_copies(text, cache // 2 // 2) == [], name
        wide = (tokens if name is step else SEQS) * HIDDEN
        sums = [size for _, size, operation in exchanged(text) if operation == "all-reduce" and size >= wide]
        assert len(sums) in ((0,) if devices == 1 else (1,) if name is step else range(2, 99)), (name, sums)
        if name is step:
            assert bool(divided) == (backend == "mosaic_gpu")
            assert not any(divided)
            logits = {int(n) for n in re.findall(rf"f32\[(\d+),{VOCAB}\]", text)}
            assert logits <= {tokens, tokens // devices}
            assert tokens // devices in logits
