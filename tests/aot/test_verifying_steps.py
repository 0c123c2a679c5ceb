"""The one step of `deterministic_mode` "verify" and the programs that decode ahead, compiled for devices that are not
here, with two layers of an 8B shape."""

import re

import jax
import pytest
from flax.traverse_util import unflatten_dict
from test_host_free_steps import VOCAB, host_waits, sorts
from test_steps import cache_copies, make_runner

from jaxserve.config import EngineConfig
from jaxserve.engine.verify_mode import buckets
from jaxserve.execution.cost import StepCost
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.pallas_kernels.paged_attention import mosaic_gpu_prompt

SEQS, PROPOSALS, HIDDEN = 64, 15, 4096


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def verifying(folder, target: str, backend: str, page_size: int) -> tuple[VerifyingRunner, ModelRunner, list]:
    """A runner that verifies, the usual one, and the buckets of the first for a model of 32 layers."""
    usual, params = make_runner(folder, target, backend, page_size, 2, slots=SEQS)
    mesh, layout, tree = usual.mesh, usual.layout, unflatten_dict(params, sep="/")
    cost = StepCost(weights=16 * 0.23e-3, token=16 * 1.1e-6)  # of 32 layers on an H200
    shapes = buckets(EngineConfig(model="x", max_num_seqs=SEQS), layout, cost)
    options = {"penalty_rows": 64, "proposals": PROPOSALS, "tokens": shapes[-1].tokens}
    runner = VerifyingRunner(usual.model, tree, mesh, SEQS, **options)
    runner.set_cache_size(layout, 8192 // page_size)
    return runner, usual, shapes


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
    """One program samples tokens that count, in one pass, with logits for all of its tokens. Nothing waits for the host,
    no cache is copied, and no long row is divided. More than two devices add their parts in their own order."""
    runner, usual, shapes = verifying(tmp_path, target, backend, page_size)
    divided, launch = [], mosaic_gpu_prompt.launch
    monkeypatch.setattr(mosaic_gpu_prompt, "launch", lambda tile, slots, *rest: divided.append(slots) or launch(tile, slots, *rest))
    (step,) = [name for name in runner.names(shapes) if isinstance(name, StepProgram)]
    tokens, devices = step.shape.tokens, runner.mesh.size
    assert tokens == 256
    greedy = [name for name in runner.draft_programs(shapes) if name.sampler == 0 and name.size == SEQS]
    cache = runner.layout.num_pages * runner.layout.page_bytes // devices
    for name in [step, *greedy]:
        text = runner.lower(name).compile().as_text()
        if target.startswith("h200"):
            assert host_waits(text) == [], name
        assert sorts(text) == [], name
        assert cache_copies(text, cache // 2 // 2) == [], name
        rows = tokens if name is step else SEQS
        sums = re.findall(rf"(?:bf16|f32)\[(?:1,)?{rows},{HIDDEN}\]\S* all-reduce(?:-start)?\(", text)
        sums += re.findall(rf"\((?:bf16|f32)\[(?:1,)?{rows},{HIDDEN}\][^)]*\) all-reduce-start\(", text)
        assert bool(sums) == (devices > 1 and name is not step), name
        if name is step:
            assert divided == [0] * len(divided)
            logits = {int(n) for n in re.findall(rf"f32\[(\d+),{VOCAB}\]", text)}
            assert logits <= {tokens, tokens // devices}
            assert tokens // devices in logits
