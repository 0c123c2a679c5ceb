"""Steps that never wait for the host where command buffers have no conditionals (`command_buffers.why_static`), by the
programs that the real compilers make for devices that are not here.

XLA:GPU copies the predicate of a conditional, and of a loop whose length it does not know, to the host, which waits for
it in the middle of a step. Under tensor parallelism the logits are exchanged by rows, 16 bytes at most of anything else
that is as wide as the vocabulary. With two layers; no kernel runs here.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_steps import PAGES, cache_copies, make_runner

from jaxserve.devices.mesh import replicated
from jaxserve.execution.programs import LENGTHS, StepProgram
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.step_plan import Sampler

ROWS = 64
VOCAB = 128256
KINDS = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1}


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def text_of(runner, name) -> str:
    return runner.lower(name).compile().as_text()


def host_waits(text: str) -> list[str]:
    """Instructions of a compiled program at which XLA:GPU has the host wait for a predicate."""
    open_loops = [line for line in text.splitlines() if re.search(r" while\(", line) and "known_trip_count" not in line]
    return open_loops + [line for line in text.splitlines() if re.search(r" conditional\(", line)]


def sorts(text: str) -> list[str]:
    """Sorts of whole rows; small ones, as of a few indices, do no harm."""
    return [line for line in text.splitlines() if re.search(rf"\[[\d,]*{VOCAB}\].* sort\(", line)]


def exchanged(text: str) -> list[tuple[str, int, str]]:
    """(dtype, elements, operation) of each array that devices send to each other."""
    found = []
    for line in text.splitlines():
        if match := re.search(r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter)(?:-start)?\(", line):
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                found.append((dtype, math.prod(map(int, filter(None, dims.split(",")))), match[2]))
    return found


def cases():
    for sampler in (Sampler.GREEDY, Sampler.PLAIN, Sampler.FILTERED):
        for steps in LENGTHS:
            usual = (sampler, steps) in ((Sampler.GREEDY, 1), (Sampler.FILTERED, 8))
            yield pytest.param(sampler, steps, marks=[] if usual else [pytest.mark.slow])
    yield Sampler.FULL, 1


@pytest.mark.parametrize(("sampler", "steps"), cases())
def test_the_host_waits_nowhere_in_a_decode_step_on_a_gpu(sampler, steps, tmp_path):
    runner, _ = make_runner(tmp_path, "h200x1", "mosaic_gpu", 16, 2, static=True)
    shape = StepShape.of(ROWS, ROWS, 16, decode_only=True)
    text = text_of(runner, StepProgram(shape, sampler, steps, keeps_hidden=False))
    assert host_waits(text) == []
    assert sorts(text) == []
    loops = re.findall(r'known_trip_count":\{"n":"(\d+)"', text)
    assert loops.count(str(steps)) == (steps > 1), "one loop, of so many tokens"


@pytest.mark.parametrize("keeps_hidden", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_host_waits_nowhere_in_a_mixed_step_on_a_gpu(keeps_hidden, tmp_path):
    runner, _ = make_runner(tmp_path, "h200x1", "mosaic_gpu", 16, 2, static=True)
    shape = StepShape.of(1152, ROWS, 16, decode_only=False)
    text = text_of(runner, StepProgram(shape, Sampler.FULL, 1, keeps_hidden))
    assert host_waits(text) == []
    assert sorts(text) == []
    results = re.search(r"->\s*\((.*)\) \{", text[text.index("ENTRY") :])[1]
    assert ("bf16[1152,4096]" in results) is keeps_hidden


@pytest.mark.parametrize(
    "name",
    [
        AuxProgram("update_tables"),
        AuxProgram("sample_deferred", ROWS),
        AuxProgram("score_prompt", 1152),
        AuxProgram("count_tokens", 8192),
    ],
)
def test_the_host_waits_nowhere_around_the_steps_either(name, tmp_path):
    runner, _ = make_runner(tmp_path, "h200x1", "mosaic_gpu", 16, 2, static=True)
    text = text_of(runner, name)
    assert host_waits(text) == []
    assert sorts(text) == []


@pytest.mark.parametrize(
    ("tokens", "decode"),
    [(2048, True), pytest.param(2048 + 512, False, marks=pytest.mark.slow)],
    ids=["decode", "mixed"],
)
def test_many_slots_and_long_contexts(tokens, decode, tmp_path):
    """2,048 slots with contexts of 131,072 tokens, whose block tables have 16.8 million entries."""
    context = 131072
    slots = 2048
    runner, _ = make_runner(
        tmp_path,
        "h200x1",
        "mosaic_gpu",
        16,
        2,
        slots=slots,
        context=context,
        max_position_embeddings=context,
        static=True,
    )
    shape = StepShape.of(tokens, slots, 16, decode_only=decode)
    program = runner.programs.choose(shape, Sampler.FILTERED, 1, scores=False)
    compiled = runner.lower(program).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    cache = PAGES * runner.layout.page_bytes
    assert host_waits(text) == []
    assert memory.alias_size_in_bytes >= cache
    assert cache_copies(text, cache // 4) == []
    assert memory.temp_size_in_bytes < 2**31  # 2,048 rows of logits in float32 take 1 GB


def test_what_is_searched_for_would_be_found(tmp_path):
    """The first in the program that decides at run time, which CPUs and TPUs run."""
    runner, _ = make_runner(tmp_path, "h200x1", "mosaic_gpu", 16, 2, static=True)
    shape = StepShape.of(ROWS, ROWS, 16, decode_only=True)
    assert len(host_waits(text_of(runner, StepProgram(shape, Sampler.ANY, None, keeps_hidden=False)))) >= 6
    logits = jax.ShapeDtypeStruct((ROWS, VOCAB), jnp.float32, sharding=replicated(runner.mesh))
    assert len(sorts(jax.jit(partial(lax.top_k, k=20)).lower(logits).compile().as_text())) >= 1


@pytest.mark.parametrize(
    ("target", "backend", "page_size"),
    [("h200x8", "mosaic_gpu", 16), pytest.param("v5e-8", "mosaic_tpu", 128, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("sampler", [Sampler.FILTERED, pytest.param(Sampler.FULL, marks=pytest.mark.slow)])
def test_logits_are_exchanged_by_rows(target, backend, page_size, sampler, tmp_path):
    """Each of eight devices receives its rows of the logits once, and no other array is nearly as large."""
    runner, _ = make_runner(tmp_path, target, backend, page_size, 2)
    shape = StepShape.of(ROWS, ROWS, page_size, decode_only=True)
    arrays = exchanged(text_of(runner, runner.programs.choose(shape, sampler, 1, scores=False)))
    logits = [(dtype, size) for dtype, size, name in arrays if name == "all-to-all"]
    assert logits
    assert sum(size for dtype, size in logits if dtype == "f32") <= 2 * ROWS * VOCAB // 8  # a start names both sides
    others = [KINDS[dtype] * size for dtype, size, name in arrays if name != "all-to-all"]
    assert max(others) <= 4 * ROWS * 4096, "activations are the largest that is reduced or gathered"
    gathered = [size for dtype, size, name in arrays if name == "all-gather" and dtype in ("f32", "bf16")]
    assert gathered == [], "only tokens and scores are gathered"
