"""Steps at the sizes that TPUs are bought for: 2,048 slots, contexts of 128k tokens, tensor parallelism over 4 and 8.

By the real compilers of v5e and v6e, with two layers of a Llama-3-8B shape and pages of 128 tokens; none runs here.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from test_steps import cache_copies, make_runner

from jaxserve.execution.programs import LENGTHS, StepProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.sampler import Sampler

LAYERS, CONTEXT, SLOTS, PAGE = 2, 131_072, 2048, 128


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def compile_step(folder, target, shape, sampler, steps, **options):
    runner, _ = make_runner(
        folder, target, "mosaic_tpu", PAGE, LAYERS, slots=SLOTS, context=CONTEXT,
        max_position_embeddings=CONTEXT, **options,
    )  # fmt: skip
    return runner, runner.lower(StepProgram(shape, sampler, steps, keeps_hidden=False)).compile()


def launches(text: str) -> int:
    return text.count('custom_call_target="tpu_custom_call"')


def loop_lengths(text: str) -> list[int | None]:
    """Of each loop in a compiled program: its turns, where it ends by a counter that reaches a constant."""
    lengths = []
    for condition in re.findall(r" while\(.*condition=%([\w.-]+)", text):
        body = text[text.index(f"\n%{condition} (") :]
        body = body[: body.index("\n}")]
        bound = re.search(r"ROOT .* compare\(%[\w.-]+, %([\w.-]+)\), direction=LT", body)
        constant = bound and re.search(rf"%{re.escape(bound[1])} = s32\[\]\S* constant\((\d+)\)", body)
        lengths.append(int(constant[1]) if constant else None)
    return lengths


def check(runner, compiled, *, kernels: int, loops: list[int]) -> None:
    """Bounded temporaries, the cache in place, so many kernels in each layer, and only loops of these lengths."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cache = runner.layout.num_pages * runner.layout.page_bytes // runner.mesh.size
    assert memory.alias_size_in_bytes >= cache
    assert cache_copies(text, cache // LAYERS // 2) == []
    assert " conditional(" not in text
    assert loop_lengths(text) == loops
    assert launches(text) == kernels * LAYERS
    assert memory.temp_size_in_bytes < 2**30


def slow_unless(*usual):
    """Parameters (target, k): those that are not usual are in the slow group."""
    for target in ("v5e-8", "v6e-4"):
        for steps in LENGTHS:
            yield pytest.param(target, steps, marks=[] if (target, steps) in usual else [pytest.mark.slow])


@pytest.mark.parametrize(("target", "steps"), slow_unless(("v5e-8", 8)))
def test_decodes_of_every_length(target, steps, tmp_path):
    """Small batches draw several tokens a call: one loop of a known length, and one kernel in each layer."""
    shape = StepShape.of(8, 8, PAGE, decode_only=True)
    check(
        *compile_step(tmp_path, target, shape, Sampler.FILTERED, steps), kernels=1, loops=[steps] if steps > 1 else []
    )


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, pytest.param(jnp.int8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["v5e-8", pytest.param("v6e-4", marks=pytest.mark.slow)])
def test_all_slots_decode(target, kv_dtype, tmp_path):
    shape = StepShape.of(SLOTS, SLOTS, PAGE, decode_only=True)
    check(*compile_step(tmp_path, target, shape, Sampler.GREEDY, 1, kv_dtype=kv_dtype), kernels=1, loops=[])


@pytest.mark.parametrize("target", ["v6e-4", pytest.param("v5e-8", marks=pytest.mark.slow)])
def test_all_slots_beside_a_prompt(target, tmp_path):
    """Three kernels in each layer: the prompts' write, decodes, prompts. No loop."""
    shape = StepShape.of(SLOTS + 1024, SLOTS, PAGE, decode_only=False)
    check(*compile_step(tmp_path, target, shape, Sampler.GREEDY, 1), kernels=3, loops=[])
