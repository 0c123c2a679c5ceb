"""What the compiler made of a step: the cache is updated in place, in every bucket, and temporaries stay small."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape
from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.types import KVPages

pytestmark = pytest.mark.compiles

PAGES = 997  # collides with no other dimension
BUCKETS = range(4)
UPKEEP = (
    AuxProgram("set_slots", 8),
    AuxProgram("count_tokens", 512),
    AuxProgram("update_tables"),
    AuxProgram("copy_pages"),
)


@pytest.fixture(scope="module")
def make(model_folders):
    def make(devices: int = 1, **options) -> Engine:
        config = EngineConfig(
            model=str(model_folders("llama3_gqa")),
            max_num_seqs=5,
            max_num_batched_tokens=72,
            kv_pages=PAGES,
            tensor_parallel_size=devices,
            **options,
        )
        return Engine.load(config, progress=False)

    return make


@pytest.fixture(scope="module")
def engine(make):
    return make()


def compile_as_the_runner_does(runner, name):
    name = runner.programs.largest(name) if isinstance(name, StepShape) else name
    function, donated, arguments, results = runner.signatures.of(name)
    with jax.default_matmul_precision(runner._precision):
        return jax.jit(function, donate_argnums=donated, out_shardings=results).lower(*arguments).compile()


def device_bytes(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def copies(compiled, elements: int) -> list[str]:
    """Instructions, in fusions too, that copy an array of at least so many elements."""
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(r"= \(?\w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(", line)
        if match and math.prod(map(int, filter(None, match[1].split(",")))) >= elements:
            found.append(line.strip())
    return found


def check(runner, name, donated) -> None:
    compiled = compile_as_the_runner_does(runner, name)
    layer = runner.cache[0].data.addressable_shards[0].data
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= device_bytes(donated)
    assert copies(compiled, layer.size // 2) == []
    assert memory.temp_size_in_bytes < 2 * layer.size  # half of it in float32


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_step_updates_cache_and_slots_in_place(engine, bucket):
    if bucket >= len(engine.shapes):
        pytest.skip("where the CPU kernels skip padding there is one bucket less")
    check(engine.runner, engine.shapes[bucket], (engine.runner.cache, engine.runner.slots))


def test_these_are_all_buckets(engine):
    assert len(BUCKETS) - 1 <= len(engine.shapes) <= len(BUCKETS)
    assert engine.shapes[0].rows == 1
    assert {shape.decode_only for shape in engine.shapes} == {True, False}


@pytest.mark.parametrize("name", UPKEEP)
def test_upkeep_happens_in_place(engine, name):
    check(engine.runner, name, engine.runner.cache if name.takes_cache else engine.runner.slots)


@pytest.mark.slow
def test_a_sharded_step_updates_cache_and_slots_in_place(make):
    engine = make(devices=2)
    assert device_bytes(engine.runner.cache) * 2 == sum(pages.data.nbytes for pages in engine.runner.cache)
    check(engine.runner, engine.shapes[0], (engine.runner.cache, engine.runner.slots))


@pytest.mark.parametrize("bucket", [0, -1])
def test_a_cache_with_scales_is_updated_in_place(make, bucket):
    engine = make(kv_cache_dtype="int8")
    check(engine.runner, engine.shapes[bucket], (engine.runner.cache, engine.runner.slots))


@pytest.mark.parametrize("bucket", [0, -1])
def test_an_indexer_s_keys_are_updated_in_place(bucket, model_folders):
    """In a step that may see all tokens, or those that an indexer chooses."""
    sizes: Any = {"max_num_seqs": 5, "max_num_batched_tokens": 72, "kv_pages": PAGES}
    engine = Engine.load(EngineConfig(model=str(model_folders("deepseek_v32_hub")), **sizes), progress=False)
    runner = engine.runner
    compiled = compile_as_the_runner_does(runner, engine.shapes[bucket])
    keys = runner.cache[0].index_keys
    assert compiled.memory_analysis().alias_size_in_bytes >= device_bytes((runner.cache, runner.slots))
    assert copies(compiled, keys.size // 2) == []


@pytest.mark.parametrize("bucket", [0, -1])
def test_pages_of_layers_whose_heads_differ_are_updated_in_place(bucket, model_folders):
    sizes: Any = {"max_num_seqs": 5, "max_num_batched_tokens": 72, "kv_pages": PAGES}
    engine = Engine.load(EngineConfig(model=str(model_folders("gemma4_sharing")), **sizes), progress=False)
    compiled = compile_as_the_runner_does(engine.runner, engine.shapes[bucket])
    assert copies(compiled, engine.runner.cache[0].data.size // 2) == []


def test_a_copy_would_be_found():
    """The same write into an array that is not donated has to copy it, and the search above sees that."""
    pages = KVPages(jnp.zeros((PAGES, 2, 2, 16, 16)))
    new = jnp.zeros((3, 2, 16))
    slots = jnp.arange(3)
    for donated in (True, False):
        jitted = jax.jit(write_kv, donate_argnums=(0,) if donated else ())
        compiled = jitted.lower(pages, new, new, slots).compile()
        assert (copies(compiled, pages.data.size) == []) is donated
        assert (compiled.memory_analysis().alias_size_in_bytes >= pages.data.nbytes) is donated
