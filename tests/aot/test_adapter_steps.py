"""Decode steps of an 8B shape with LoRA adapters, compiled for an H200 and a TPU: what they add to launches and
temporaries."""

import jax
import jax.numpy as jnp
import pytest
from test_host_free_steps import host_waits
from test_launches import BOUNDS
from test_steps import make_runner

from jaxserve.devices.launches import count, describe
from jaxserve.execution.adapter_stacks import AdapterStacks
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.adapter_targets import PoolSizes
from jaxserve.scheduling.step_plan import Sampler

pytest.importorskip("jax_triton", reason="jax-triton is not installed")

ROWS = 32
RANK = 16
PRODUCTS = 4  # queries, keys and values; attention's output; gate and up; down


@pytest.fixture(autouse=True)
def no_arrays(monkeypatch):
    """The pool's arrays are shapes, as there is no device."""
    monkeypatch.setattr(AdapterStacks, "create", lambda self: self.abstract)
    jax.config.update("jax_enable_compilation_cache", False)


def compiled(folder, layers: int, places: int, target: tuple[str, str, int] = ("h200x1", "mosaic_gpu", 16)):
    sizes = PoolSizes(places, RANK, jnp.dtype(jnp.bfloat16))
    runner, _ = make_runner(folder, *target, layers, adapters=sizes, static=True)
    shape = StepShape.of(ROWS, ROWS, target[2], decode_only=True)
    return runner, runner.lower(runner.programs.choose(shape, Sampler.GREEDY, 1, scores=False)).compile()


@pytest.mark.parametrize("places", [32, pytest.param(8, marks=pytest.mark.slow)])
def test_launches_and_bytes(places, tmp_path):
    texts = []
    temporaries = []
    pools = []
    for layers in (2, 4):
        runner, program = compiled(tmp_path, layers, places)
        texts.append(program.as_text())
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
        pools.append(sum(x.size * x.dtype.itemsize for x in runner.stacks.abstract[1:]))
    assert host_waits(texts[0]) == []
    found = count(*texts, layers=2)
    print(f"\n{places} places: {describe(found)}")
    assert found.per_layer <= BOUNDS["h200x1", "bf16", "decode"][0] + 2 * PRODUCTS, describe(found)
    of_layer = (pools[1] - pools[0]) // 2
    assert of_layer == places * RANK * 2 * ((3 * 4096 + 6144) + (4096 + 4096) + (2 * 4096 + 28672) + (14336 + 4096))
    assert temporaries[1] - temporaries[0] < of_layer / 4, "no stack of the pool is copied"


@pytest.mark.slow
def test_the_host_waits_nowhere_in_a_mixed_step(tmp_path):
    sizes = PoolSizes(32, RANK, jnp.dtype(jnp.bfloat16))
    runner, _ = make_runner(tmp_path, "h200x1", "mosaic_gpu", 16, 2, adapters=sizes, static=True)
    shape = StepShape.of(576, ROWS, 16, decode_only=False)
    program = runner.programs.choose(shape, Sampler.FULL, 1, scores=False)
    assert host_waits(runner.lower(program).compile().as_text()) == []


@pytest.mark.slow
def test_on_a_tpu(tmp_path):
    """Two kernels for each product, and no copy of the pool."""
    programs = []
    pools = []
    for layers in (1, 2):
        runner, program = compiled(tmp_path, layers, 32, ("v6e-1", "mosaic_tpu", 128))
        programs.append(program)
        pools.append(sum(x.size * x.dtype.itemsize for x in runner.stacks.abstract[1:]))
    calls = [program.as_text().count('custom_call_target="tpu_custom_call"') for program in programs]
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert calls[1] - calls[0] == 1 + 2 * PRODUCTS, "attention, which writes the cache, and the adapters"
    assert temporaries[1] - temporaries[0] < (pools[1] - pools[0]) / 4
