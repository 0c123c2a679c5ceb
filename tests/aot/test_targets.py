"""Steps of an 8B shape compiled for NVIDIA GPUs of each generation, with the kernels that an engine would choose there.

Older and newer GPUs than Hopper run Triton's kernels. A program that asks for more shared memory than its GPU has is
refused when it is launched, not when it is compiled, so that is asserted here.
"""

import jax
import pytest
from test_steps import make_runner

from jaxserve.devices.targets import GPUS
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

STEPS = StepShape.of(64, 64, 16, decode_only=True), StepShape.of(1152, 64, 16, decode_only=False)


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture
def shared(monkeypatch) -> list[int]:
    """Bytes of shared memory of each Triton kernel that is compiled."""
    library = pytest.importorskip("jax_triton.triton_lib", reason="jax-triton is not installed")
    result = library.CompilationResult
    found = []

    def record(*args, **options):
        made = result(*args, **options)
        found.append(made.shared_mem_bytes)
        return made

    monkeypatch.setattr(library, "CompilationResult", record)
    return found


USUAL = {("a100x1", "bf16"), ("b200x1", "fp8")}  # others: the slow group


@pytest.mark.parametrize(
    ("target", "scheme"),
    [
        pytest.param(target, scheme, marks=[] if (target, scheme) in USUAL else [pytest.mark.slow])
        for target in ("a100x1", "l40sx1", "b200x1", "a100x8")
        for scheme in ("bf16", "int4", "fp8")
    ],
)
def test_steps_of_other_generations(target, scheme, shared, tmp_path):
    runner, _ = make_runner(tmp_path, target, "auto", 16, 2, scheme)
    for shape in STEPS:
        text = runner.lower(StepProgram(shape, Sampler.FILTERED, 1, keeps_hidden=False)).compile().as_text()
        assert "triton_kernel_call" in text
        assert "mosaic_gpu" not in text
    assert shared
    assert max(shared) <= GPUS[target.split("x")[0]].shared - 1 << 10


@pytest.mark.parametrize("target", ["a100x1", pytest.param("a100x8", marks=pytest.mark.slow)])
def test_inputs_rounded_to_a_type_that_triton_lacks(target, tmp_path):
    """As `--activation-quantization checkpoint` asks for with float8, which Triton has from capability 8.9 on."""
    runner, _ = make_runner(tmp_path, target, "auto", 16, 2, "fp8-dynamic")
    runner.lower(StepProgram(STEPS[0], Sampler.GREEDY, 1, keeps_hidden=False)).compile()
