"""Steps at the sizes that TPUs are bought for: 2,048 slots, contexts of 128k tokens, tensor parallelism over 4 and 8.

By the real compilers of v5e and v6e, with two layers of a Llama-3-8B shape and pages of 128 tokens; none runs here.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from test_steps import cache_copies, make_runner

from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

LAYERS = 2
CONTEXT = 131_072
SLOTS = 2048
PAGE = 128


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def compile_step(folder, target, shape, **options):
    runner, _ = make_runner(
        folder, target, "mosaic_tpu", PAGE, LAYERS, slots=SLOTS, context=CONTEXT,
        max_position_embeddings=CONTEXT, **options,
    )  # fmt: skip
    programs = runner.programs
    assert len({programs.choose(shape, sampler, 1, scores=False) for sampler in list(Sampler)[:-1]}) == 1
    return runner, runner.lower(programs.choose(shape, Sampler.GREEDY, 1, scores=False)).compile()


def launches(text: str) -> int:
    return text.count('custom_call_target="tpu_custom_call"')


def body_of(text: str, name: str) -> str:
    """The instructions of one computation of a compiled program."""
    found = text[re.search(rf"^{re.escape(name)} \(", text, re.MULTILINE).start() :]
    return found[: found.index("\n}")]


def check(runner, compiled, *, kernels: int, loops: int) -> None:
    """Bounded temporaries, the cache in place, so many kernels in each layer, and around them so many loops, which
    conditionals with the sampler's costlier parts may add to."""
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    cache = runner.layout.num_pages * runner.layout.page_bytes // runner.mesh.size
    assert memory.alias_size_in_bytes >= cache
    assert cache_copies(text, cache // LAYERS // 2) == []
    around = body_of(text, re.search(r"^ENTRY %[\w.-]+", text, re.MULTILINE)[0])
    bodies = re.findall(r" while\(.*body=(%[\w.-]+)", around)
    assert len(bodies) == loops
    of_layers = body_of(text, bodies[0]) if loops else around
    assert launches(of_layers) == launches(text) == kernels * LAYERS
    assert " while(" not in of_layers
    assert memory.temp_size_in_bytes < 13 * 2**27  # of 2,048 rows, five arrays of a fourth of their logits in float32


@pytest.mark.parametrize("target", ["v5e-8", pytest.param("v6e-4", marks=pytest.mark.slow)])
def test_a_few_decodes(target, tmp_path):
    """Any number of tokens a call and any sampler: one loop around the layers, with one kernel in each."""
    shape = StepShape.of(8, 8, PAGE, decode_only=True)
    check(*compile_step(tmp_path, target, shape), kernels=1, loops=1)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, pytest.param(jnp.int8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "target", ["v5e-8", *(pytest.param(other, marks=pytest.mark.slow) for other in ("v6e-4", "v5p-4", "tpu7x-8"))]
)
def test_all_slots_decode(target, kv_dtype, tmp_path):
    shape = StepShape.of(SLOTS, SLOTS, PAGE, decode_only=True)
    check(*compile_step(tmp_path, target, shape, kv_dtype=kv_dtype), kernels=1, loops=1)


@pytest.mark.parametrize("target", ["v6e-4", pytest.param("v5e-8", marks=pytest.mark.slow)])
def test_all_slots_beside_a_prompt(target, tmp_path):
    """Three kernels in each layer: the prompts' write, decodes, prompts. No loop around them."""
    shape = StepShape.of(SLOTS + 1024, SLOTS, PAGE, decode_only=False)
    check(*compile_step(tmp_path, target, shape), kernels=3, loops=0)
