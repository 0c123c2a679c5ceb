"""Start-up on an accelerator: the KV pages that weights, slots and the compiled programs leave room for.

The engine is a real one on CPU; what its device and its compiler report is what a GPU's would.
"""

import math
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from engines import generate, request
from jaxlib import xla_client

from jaxserve import jax_pools
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution import memory, programs, runner
from jaxserve.execution.cost import StepCost
from jaxserve.execution.device_groups import calls
from jaxserve.execution.memory import Budget, Needs
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram
from jaxserve.execution.step_shape import StepShape

pytestmark = pytest.mark.compiles

MIB = 2**20


def figures(temporaries: int = 0, results: int = 0, code: int = 0, cache: int = 10**6) -> SimpleNamespace:
    """As `Compiled.memory_analysis` has them."""
    return SimpleNamespace(
        temp_size_in_bytes=temporaries,
        output_size_in_bytes=cache + results,
        alias_size_in_bytes=cache,
        generated_code_size_in_bytes=code,
    )


class Program:
    """A compiled program with figures of its own."""

    def __init__(self, compiled, said):
        self._compiled = compiled
        self._said = said

    def __call__(self, *arguments):
        return self._compiled(*arguments)

    def memory_analysis(self):
        return self._said


@dataclass
class Gpu:
    """What the fake device reports: its memory, and of each program that is compiled for it what it needs."""

    total: int = 400 * MIB
    code: int = 4 * MIB  # of each program
    temporaries: int = 20 * MIB
    surprising_code: int = 0  # of `update_tables`, in place of `code`
    compiled: list[str] = field(default_factory=list)

    def budget(self, config, device, devices, weights, slots, states) -> Budget:
        return Budget(self.total, config.memory_utilization, weights, slots, 8 * MIB, None, True, states)

    def program(self, name, compiled):
        self.compiled.append(str(name))
        code = self.surprising_code if str(name) == "update_tables" and self.surprising_code else self.code
        return Program(compiled, figures(self.temporaries, MIB, code))


@pytest.fixture
def start(monkeypatch, model_folders):
    """Loads an engine on such a device."""

    def start(gpu: Gpu, **options) -> Engine:
        compile_one = runner.ModelRunner._compile

        def compile_and_report(self, name, lowered):
            compile_one(self, name, lowered)
            self.executables[name] = gpu.program(name, self.executables[name])

        monkeypatch.setattr(memory, "budget", gpu.budget)
        monkeypatch.setattr(runner.ModelRunner, "_compile", compile_and_report)
        defaults = {"max_num_seqs": 2000, "max_num_batched_tokens": 64, "forbid_compile": True}
        config = EngineConfig(model=str(model_folders("llama3_gqa")), **defaults | options)
        return Engine.load(config, progress=False)

    return start


def used(engine: Engine, gpu: Gpu) -> float:
    """The share of the memory that may be used which is used, by the figures of all programs."""
    budget = engine._sizing.budget
    needs = engine.runner.needs(engine.shapes)
    used = budget.weights + budget.slots + budget.reserve + needs.total + engine.runner.cache_bytes
    assert budget.holds(needs, engine.runner.cache_bytes) == (used <= int(gpu.total * 0.9))
    return used / (gpu.total * 0.9)


def check_serves(engine: Engine) -> None:
    (completion,) = generate(engine, request("a", [1, 2, 3], max_tokens=4))
    assert len(completion.token_ids) == 4


@pytest.mark.parametrize("name", jax_pools.FRACTIONS)
def test_the_share_of_gpu_memory_that_jax_reserves(monkeypatch, name):
    """JAX does not start if both variables are set."""
    for one in jax_pools.FRACTIONS:
        monkeypatch.setenv(one, "")
    assert jax_pools.fraction() == 0.75
    jax_pools.reserve(0.9, environment := {})
    assert jax_pools.fraction(environment) == 0.9
    monkeypatch.setenv(name, "0.5")
    jax_pools.reserve(0.9)
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 40 * MIB})
    found = memory.budget(EngineConfig(model="demo"), device, 1, weights=0, slots=0)
    assert (found.total, found.utilization) == (80 * MIB, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 60 * MIB // 10])
@pytest.mark.parametrize("temporaries", [1 * MIB, 150 * MIB])
def test_pages_are_what_all_programs_leave(start, code, temporaries):
    """With 60 MiB of code in ten programs, of which only some are compiled before the pages are chosen."""
    gpu = Gpu(code=code, temporaries=temporaries)
    engine = start(gpu)
    pages = engine.runner.layout.num_pages
    early = len(gpu.compiled)
    engine.compile()
    assert engine.runner.layout.num_pages == pages == engine.blocks.capacity + 1
    assert 0.9 < used(engine, gpu) <= 1
    assert early < len(gpu.compiled), "some are compiled after the pages were chosen"
    check_serves(engine)


@pytest.mark.slow
def test_the_cache_leaves_its_memory_to_the_compiler(start, monkeypatch):
    """XLA:GPU tries products while it compiles them, with operands as large as the output head."""
    engine = start(Gpu())
    seen = []
    compile_one = runner.ModelRunner._compile

    def compile_and_look(self, name, lowered):
        seen.append((name, "cache" in vars(self)))
        compile_one(self, name, lowered)

    monkeypatch.setattr(runner.ModelRunner, "_compile", compile_and_look)
    monkeypatch.setattr(engine.runner, "_on_cpu", False)
    engine.compile()
    assert [name for name, has_cache in seen if has_cache] == []
    assert any(isinstance(name, programs.StepProgram) for name, _ in seen)
    check_serves(engine)


@pytest.mark.slow
def test_an_engine_starts_with_an_accelerator_s_buckets(start, monkeypatch):
    """More than twice as many programs as are compiled before the pages are chosen; then nothing compiles any more."""
    monkeypatch.setattr(StepCost, "of", lambda *_, **__: StepCost(weights=0.003, token=2e-4))
    gpu = Gpu(total=150 * MIB, code=3 * MIB)
    engine = start(gpu, max_num_seqs=200, max_num_batched_tokens=101)
    pages = engine.runner.layout.num_pages
    early = len(set(gpu.compiled))
    engine.compile()
    assert len(set(gpu.compiled)) == engine.runner.num_executables > 2 * early
    assert engine.runner.layout.num_pages == pages
    assert 0.85 < used(engine, gpu) <= 1, "the allowance is a quarter of the code"
    completions = generate(engine, *(request(str(n), [n % 500] * n, max_tokens=3) for n in range(1, 120, 7)))
    assert all(len(completion.token_ids) == 3 for completion in completions)


@pytest.mark.slow
def test_a_good_guess_compiles_nothing_twice(start, monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr("jaxserve.engine.sizing.Sizing.guess", lambda self: Needs(gpu.temporaries, 2 * MIB, 44 * MIB))
    engine = start(gpu)
    engine.compile()
    assert sorted(gpu.compiled) == sorted(set(gpu.compiled))
    assert 0.95 < used(engine, gpu) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("guess", [0, 10**12])
def test_a_bad_guess_is_corrected(start, monkeypatch, guess):
    """And what does not depend on the number of pages is compiled once."""
    gpu = Gpu()
    monkeypatch.setattr("jaxserve.engine.sizing.Sizing.guess", lambda self: Needs(guess))
    engine = start(gpu)
    engine.compile()
    assert 0.95 < used(engine, gpu) <= 1
    twice = {name for name in gpu.compiled if gpu.compiled.count(name) > 1}
    bounding = engine.runner.programs.bounding(engine.shapes)
    largest = engine.shapes[-1], max((s for s in engine.shapes if s.decode_only), key=lambda s: s.rows)
    assert {engine.runner.programs.largest(shape) for shape in largest} == set(bounding[:2])
    assert twice == {str(program) for program in bounding}


@pytest.mark.slow
def test_programs_that_need_more_than_was_allowed_for_make_the_cache_smaller(start, caplog):
    gpu = Gpu(surprising_code=60 * MIB)
    engine = start(gpu)
    pages = engine.runner.layout.num_pages
    with caplog.at_level("INFO"):
        engine.compile()
    assert engine.runner.layout.num_pages < pages
    assert engine.blocks.capacity + 1 == engine.counters.pages_total + 1 == engine.runner.layout.num_pages
    assert f"{engine.runner.layout.num_pages} KV pages, not {pages}" in caplog.text
    assert 0.95 < used(engine, gpu) <= 1
    assert gpu.compiled.count("set_slots_8") == 1
    check_serves(engine)


def test_slots_are_filled_by_calls_of_about_their_number():
    """Nine new requests in 2,048 slots sent 8 MiB, which took the host 3 ms to gather."""
    sizes = [ModelRunner.slot_sizes.fget(SimpleNamespace(_on_cpu=False, num_slots=n)) for n in (4, 8, 64, 256, 2048)]
    assert sizes == [[8], [8], [8, 64], [8, 64, 256], [8, 64, 512, 2048]]
    assert [size for _, size in calls(9, sizes[-1])] == [64]
    assert [size for _, size in calls(513, sizes[-1])] == [2048]
    assert ModelRunner.slot_sizes.fget(SimpleNamespace(_on_cpu=True, num_slots=256)) == [8]


@pytest.mark.slow
def test_what_does_not_fit_is_told_in_figures(start):
    """Pages that were asked for are not made fewer."""
    gpu = Gpu(surprising_code=60 * MIB)
    engine = start(gpu, kv_pages=80_000)
    with pytest.raises(ConfigError, match=r"the model does not fit: memory per device: 400 MiB x 0.9 = 360 MiB") as e:
        engine.compile()
    assert re.search(r"temporaries of the largest step 20 MiB \+ results of steps in flight 2 MiB", str(e.value))
    assert re.search(r"code of all programs \d+ MiB \+ reserve 8 MiB \+ KV cache .*Lower --kv-pages", str(e.value))
    with pytest.raises(ConfigError, match="but only 0 fit; give more memory"):
        start(Gpu(temporaries=500 * MIB), max_model_len=64)


def test_what_programs_need():
    """The most temporaries, the results of two steps in flight, and the code of all, with that of those to come."""
    some = [figures(5, 7, 100), figures(9, 3, 20), figures(0, 0, 0)]
    assert Needs.of(some) == Needs(temporaries=9, results=14, code=120)
    assert Needs.of(some, [100, 20]) == Needs(temporaries=9, results=14, code=120 + 150)
    assert Needs.of([]).total == 0


def test_code_is_bounded_by_larger_programs():
    """Of each program to come, by the smallest compiled one that is larger in every respect."""
    shapes = [StepShape.of(n, n, 128, decode_only=True) for n in (1, 4, 16, 64, 256)]
    sizes = (16, 32, 128, 512, 2048)
    shapes += [StepShape.of(n, min(n, 256), 128, decode_only=False, scored=n == 2048) for n in sizes]
    chosen = programs.StepPrograms(static=True)
    bounding = chosen.bounding(shapes)
    assert list(map(str, bounding)) == [
        "decode_256_full", "mixed_2048x256_full_hidden", "decode_4_filtered_x8", "mixed_128x128_full",
    ]  # fmt: skip
    deferred = AuxProgram("sample_deferred", 256)
    figures_of = dict(zip((*bounding, deferred), [figures(0, 0, code) for code in (100, 200, 10, 20, 5)], strict=True))
    names = [deferred, AuxProgram("set_slots", 8), *chosen.all(shapes)]
    pending = 5 + 12 * 100 + 15 * 10 + 6 * 200 + 8 * 20  # upkeep, decodes by two bounds, prompts by two bounds
    assert runner.needs_of(names, figures_of).code == 335 + math.ceil(1.25 * pending)
    in_order = [figures_of[name] for name in figures_of if name in bounding]
    assert runner.needs_of(bounding, dict(zip(bounding, in_order, strict=True))).code == 330
    assert runner.needs_of(names, {}).total == 0
    only = {bounding[0]: figures(0, 0, 7)}
    assert runner.needs_of([*bounding, deferred], only).code == 7 + 1.25 * 4 * 7


def test_plans_ask_what_the_check_asks():
    """Whatever the programs need, the pages that are chosen beside it pass, and a page of the grid more does not."""
    config = EngineConfig(model="x", page_size=16, max_num_seqs=60_000)
    budget = Budget(10**9, 0.9, 300, 20, 30, None, counts_programs=True)
    for needs in (Needs(), Needs(temporaries=1), Needs(10**8, 10**7, 6 * 10**7), Needs(code=899_000_000)):
        pages, _ = memory.plan_pages(config, 32_000, 16, 10, budget, needs)
        budget.check(needs, pages * 10)
        step = 1 << (pages.bit_length() - memory.PAGE_GRID.bit_length())
        with pytest.raises(ConfigError, match="does not fit"):
            budget.check(needs, (pages + step) * 10)
        assert pages * 10 >= 0.99 * budget.left(needs)


def test_restarts_on_a_cpu_find_their_programs():
    """Steps are compiled for a number of pages, and the memory that is free is never the same."""
    found = set()
    for free in np.linspace(20, 22, 50):
        budget = Budget(int(free * 2**30), 0.9, 0, 0, 0, most_cache=int(free * 2**29))
        pages, _ = memory.plan_pages(EngineConfig(model="x"), 4096, 16, 3_670_016, budget, Needs())
        assert 0.87 <= pages * 3_670_016 / budget.most_cache <= 1
        found.add(pages)
    assert len(found) <= 2


@pytest.mark.parametrize(
    ("cores", "free", "count", "on_cpu", "expected"),
    [(64, 256, 75, False, 16), (8, 256, 75, False, 8), (64, 5.5, 75, False, 5), (64, 256, 3, False, 3),
     (64, 0.5, 75, False, 1), (64, 256, 9, True, 4), (2, 24, 9, True, 2), (1, 24, 9, True, 1)],
)  # fmt: skip
def test_programs_that_are_compiled_at_a_time(monkeypatch, cores, free, count, on_cpu, expected):
    monkeypatch.setattr(programs.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setattr(programs, "available_host_bytes", lambda: int(free * 2**30))
    assert programs.compile_threads(count, on_cpu=on_cpu) == expected


def test_few_pages_are_all_used():
    budget = Budget(1000, 0.9, 300, 20, 30, None, counts_programs=True)
    assert memory.plan_pages(EngineConfig(model="x"), 32, 16, 10, budget, Needs(100, 20, 30)) == (40, 32)
    budget.check(Needs(100, 20, 30), 400)
    with pytest.raises(ConfigError, match=r"temporaries of the largest step 101 B .* = 901 B. Lower --kv-pages"):
        budget.check(Needs(101, 20, 30), 400)


def test_states_that_take_the_memory_are_named():
    budget = Budget(1000, 0.9, 300, 20, 30, None, counts_programs=True, states=500)
    config = EngineConfig(model="x", max_model_len=32)
    with pytest.raises(ConfigError, match="or lower --max-num-seqs: states of recurrent layers take 500 B"):
        memory.plan_pages(config, 32, 16, 10, budget, Needs(100, 20, 30))
