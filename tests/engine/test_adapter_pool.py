"""More adapters than places: who waits, who takes whose place, and what stays in the host's memory."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from null_device import PIECES, VOCAB
from simulation import TOKENS_PER_CALL, Simulation

from jaxserve.adapters.registry import MAX_ADAPTERS, AdapterError, Registry
from jaxserve.config import ConfigError, EngineConfig, LoRAModule

NAMES = [f"adapter {i}" for i in range(64)]


def running(simulation: Simulation) -> list[str | None]:
    return [seq.adapter.name if seq.adapter else None for seq in simulation.scheduler.running]


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
def test_64_adapters_in_8_places(overlapped, speculates):
    """The device asserts, for each row of each step, that its place holds all of its adapter and nothing else."""
    events: Counter[str] = Counter()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        simulation = Simulation(num_pages=22, page_size=4, max_num_seqs=12, budget=24, places=8)
        kinds = ["beams", "masked", "scored", *["plain"] * 5]
        for _ in range(150):
            kind = str(rng.choice(kinds))
            adapter = rng.choice(NAMES) if rng.random() < 0.9 else None
            prompt = [0] * int(rng.integers(0, 12)) + rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()
            options = {} if kind == "plain" else {kind: True}
            name = simulation.add(
                prompt, n=int(rng.integers(1, 3)), max_tokens=int(rng.integers(1, 12)), adapter=adapter, **options
            )
            if rng.random() < 0.1:
                simulation.abort(name if rng.random() < 0.5 else f"r{rng.integers(len(simulation.jobs))}")
            for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 3)).tolist():
                if speculates:
                    simulation.propose(3, int(rng.integers(0, 4)))
                simulation.overlapped_step(tokens_per_call) if overlapped else simulation.step(tokens_per_call)
        simulation.drain(overlapped=overlapped)
        events += simulation.events
    least = {"evicted adapters": 100, "rows with adapters": 1500, "prefix hits": 50, "preemptions": 5, "beams": 20}
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events


def test_who_waits_for_a_place_holds_up_nobody():
    simulation = Simulation(places=1, max_num_seqs=4)
    simulation.add([1, 2], max_tokens=20, adapter="a")
    while running(simulation) != ["a"]:
        simulation.step()
    simulation.add([1, 2], max_tokens=2, adapter="b")
    simulation.add([1, 2], max_tokens=9)
    simulation.add([1, 2], max_tokens=2)
    for _ in range(3):
        simulation.step()
    assert running(simulation) == ["a", None]
    assert len(simulation.scheduler.waiting) == 1
    simulation.drain()


def test_an_adapter_that_is_asked_for_all_the_time_lets_others_in():
    """New requests for a place that another adapter waits for wait behind it."""
    simulation = Simulation(places=2, max_num_seqs=4)
    for name in ("a", "b"):
        simulation.add([1, 2], max_tokens=6, adapter=name)
    for _ in range(8):
        simulation.step()
    late = simulation.add([1, 2], max_tokens=2, adapter="c")
    steps = 0
    while (late, 0) not in simulation.reasons:
        for name in ("a", "b"):
            simulation.add([1, 2], max_tokens=6, adapter=name)
        simulation.step()
        steps += 1
        assert steps < 30
    simulation.drain()


def test_all_who_wait_by_then_have_a_turn_together():
    """Adapters take turns, not requests: otherwise each request of a mix would need an upload."""
    simulation = Simulation(places=1, max_num_seqs=8)
    for _ in range(6):
        for name in "abc":
            simulation.add([1, 2], max_tokens=3, adapter=name)
    simulation.drain()
    assert simulation.adapters.pool.loads == 3
    assert simulation.events["uploads"] == 3 * PIECES


def test_the_place_that_nobody_used_for_longest_is_given_away():
    simulation = Simulation(places=3)
    for name in ("a", "b", "c", "a", "d"):
        simulation.add([1, 2], max_tokens=2, adapter=name)
        simulation.drain()
    assert {place.adapter.name for place in simulation.adapters.pool.places} == {"a", "c", "d"}


def test_a_paused_request_holds_no_place():
    simulation = Simulation(places=1)
    slow = simulation.add([1, 2], max_tokens=20, adapter="a")
    while running(simulation) != ["a"]:
        simulation.step()
    simulation.pause(slow, True)
    other = simulation.add([1, 2], max_tokens=3, adapter="b")
    while (other, 0) not in simulation.reasons:
        simulation.step()
    assert not simulation.scheduler.has_work
    simulation.drain()


def test_siblings_join_the_first_one_in_a_closed_place():
    simulation = Simulation(places=1, max_num_seqs=2)
    simulation.add([1, 2, 3], n=4, max_tokens=4, adapter="a")
    simulation.add([1, 2, 3], max_tokens=4, adapter="b")
    simulation.drain()
    assert simulation.adapters.pool.loads == 2


def test_requests_end_when_their_adapter_is_lost():
    simulation = Simulation(places=1)
    simulation.disk.lost.add("digest of b")
    kept = simulation.add([1, 2], adapter="a")
    lost = simulation.add([1, 2], n=2, adapter="b")
    simulation.drain()
    assert (kept, 0) in simulation.reasons
    assert {(lost, 0), (lost, 1)} <= simulation.aborted


def test_prefixes_are_found_by_content():
    simulation = Simulation(places=2, num_pages=100)
    prompt = [1, 2, 3, 4] * 5
    hits = []
    for adapter in ("a", "b", None, "a", "b", None):
        before = simulation.scheduler.prefix_hits
        simulation.add(prompt, adapter=adapter)
        simulation.drain()
        hits.append(simulation.scheduler.prefix_hits - before)
    assert hits == [0, 0, 0, 16, 16, 16]


# The host's memory


@dataclass(frozen=True)
class Content:
    """As much of an Adapter as the registry looks at."""

    name: str
    digest: bytes


class Files:
    """Adapters by path; `reads` counts how often each was read."""

    def __init__(self, **contents: bytes):
        self.contents, self.reads = contents, Counter[str]()

    def load(self, path: Path, name: str) -> Content:
        self.reads[str(path)] += 1
        if str(path) not in self.contents:
            raise FileNotFoundError(f"{path} is gone")
        return Content(name, self.contents[str(path)])


def registry_of(files: Files, most: int) -> Registry:
    registry = Registry(files.load, most)
    for path in files.contents:
        registry.add(registry.read(path, path).result(), path)
    return registry


def weights(registry: Registry, *names: str):
    return registry.weights([registry.find(name) for name in names], patience=None)


def test_weights_that_were_not_used_for_longest_leave_the_memory():
    files = Files(a=b"1", b=b"2", c=b"3")
    registry = registry_of(files, 2)
    assert weights(registry, "b").digest == b"2"
    assert weights(registry, "a").digest == b"1"
    assert weights(registry, "b").digest == b"2"
    assert files.reads == {"a": 2, "b": 1, "c": 1}


def test_the_next_one_is_read_ahead():
    files = Files(a=b"1", b=b"2", c=b"3")
    registry = registry_of(files, 1)
    assert weights(registry, "a", "b").digest == b"1"
    deadline = time.monotonic() + 5
    while files.reads["b"] < 2:
        assert time.monotonic() < deadline
    assert weights(registry, "b").digest == b"2"
    assert files.reads["b"] == 2


def test_a_thread_reads():
    files = Files(a=b"1", b=b"2")
    registry = registry_of(files, 1)
    assert registry.weights([registry.find("a")]) is None
    deadline = time.monotonic() + 5
    while (found := registry.weights([registry.find("a")])) is None:
        assert time.monotonic() < deadline
    assert found.digest == b"1"


def test_files_that_have_changed_are_not_taken_for_the_same():
    files = Files(a=b"1", b=b"2")
    registry = registry_of(files, 1)
    files.contents["a"] = b"other"
    with pytest.raises(AdapterError, match="changed"):
        weights(registry, "a")
    del files.contents["a"]
    with pytest.raises(AdapterError, match="a is gone"):
        weights(registry, "a")
    files.contents["a"] = b"1"
    assert weights(registry, "a").digest == b"1"


def test_names():
    files = Files(a=b"1")
    registry = registry_of(files, 1)
    old = registry.find("a")
    new = registry.add(Content("a", b"2"), "elsewhere", "parent")
    assert (registry.find("a"), new.digest, new.parent) == (new, b"2".hex(), "parent")
    assert old.digest != new.digest
    registry.remove("a")
    assert registry.find("a") is None
    with pytest.raises(AdapterError, match="no adapter 'a'"):
        registry.remove("a")
    for i in range(MAX_ADAPTERS):
        registry.add(Content(str(i), b"1"), "a")
    with pytest.raises(AdapterError, match="already"):
        registry.add(Content("one more", b"1"), "a")


# Settings


def test_modules_in_every_form():
    given = ["a=b/c=d", {"name": "x", "path": "y", "base_model_name": "z"}, ["m", "n"]]
    config = EngineConfig(model="m", enable_lora=True, lora_modules=given)
    assert config.lora_modules == (LoRAModule("a", "b/c=d"), LoRAModule("x", "y", "z"), LoRAModule("m", "n"))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lora_modules": ["a=b"]}, "enable_lora"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "needs a path"),
        ({"enable_lora": True, "lora_modules": ["a,b=c"]}, "name must consist"),
        ({"enable_lora": True, "lora_modules": ["a=b", "a=c"]}, "'a' twice"),
        ({"enable_lora": True, "lora_modules": [{"name": "a", "path": "b", "rank": 1}]}, "'rank'"),
        ({"enable_lora": True, "lora_modules": "a=b"}, "must be a list"),
        ({"max_loras": 0}, "max_loras must be between 1 and 256"),
        ({"max_loras": 8, "max_cpu_loras": 7}, "max_cpu_loras must be between 8"),
        ({"max_lora_rank": True}, "max_lora_rank"),
        ({"lora_dtype": "float8"}, "lora_dtype"),
    ],
)
def test_settings_that_are_refused(settings, what):
    with pytest.raises(ConfigError, match=what):
        EngineConfig(model="m", **settings)
