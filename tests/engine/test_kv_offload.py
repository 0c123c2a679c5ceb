"""KV pages in the host's memory and in files: answers are the same with and without them, also after a restart."""

import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import draft_heads
import numpy as np
import pytest
import tiny_models
from engines import drain, generate, make_engine, request

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.execution import runner_commands
from jaxserve.execution.signatures import AuxProgram

pytestmark = pytest.mark.compiles

PAGE = 8
FEW = {"rows": 4, "tokens": 32, "page_size": PAGE, "kv_pages": 40, "max_model_len": 120}
KINDS = {  # a test model, and settings
    "keys and values": ("tp_gqa", {}),
    "8 bits on two devices": ("tp_gqa", {"kv_cache_dtype": "int8", "tensor_parallel_size": 2}),
    "8-bit latents": ("deepseek_v2_lite", {"kv_cache_dtype": "int8"}),
    "windows": ("gemma3_layer_types", {"kv_pages": 80}),
    "chunks": ("llama4_chunks", {"kv_pages": 80}),
    "draft head": ("llama3_gqa", {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}),
}
TIERS = {"kv_offload_gib": 0.25}


def requests(count=24, families=6, tag=""):
    """Prompts that begin like one of a few texts, and end differently."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(5, 300, 80).tolist() for _ in range(families)]
    made = []
    for i in range(count):
        prompt = texts[rng.integers(families)][: rng.integers(20, 80)] + rng.integers(5, 300, 3).tolist()
        wish = {"temperature": 0.8, "seed": i} if i % 3 == 0 else {}
        made.append(request(f"{tag}{i}", prompt, max_tokens=int(rng.integers(2, 12)), **wish))
    return made


def answers(engine, made, arrivals=None):
    """The tokens of each request. With `arrivals`, a random generator, requests come while others run."""
    results = {}
    for one in made:
        engine.add_request(one)
        for _ in range(0 if arrivals is None else arrivals.integers(0, 6)):
            for update in engine.step():
                results.setdefault(update.request_id, []).extend(update.token_ids)
            engine.scheduler.check_integrity()
    for (name, _), completion in drain(engine).items():
        results.setdefault(name, []).extend(completion.token_ids)
    return results


def tidy(engine):
    while engine.idle():
        time.sleep(0.001)


def load_always(engine):
    """Whatever it costs, so that tests do not depend on the machine."""
    engine.blocks.tiers.costs = None
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same(kind, model_folders, tmp_path):
    case, settings = KINDS[kind]
    settings = {**FEW, **settings}
    if "speculative_config" in settings:
        draft = draft_heads.write_eagle(tmp_path / "draft", tiny_models.CASES[case].config)
        settings["speculative_config"] = settings["speculative_config"] | {"model": str(draft)}
    plain = make_engine(model_folders(case), **settings, prefix_caching=False)
    expected = answers(plain, requests())
    engine = make_engine(model_folders(case), **settings, **TIERS)
    for round_ in range(2):
        assert answers(engine, requests(), np.random.default_rng(round_)) == expected
    stats = engine.stats()
    assert stats.offload_hits > 300
    assert stats.offload_loaded_bytes >= 30 * engine.runner.layout.page_bytes
    engine.blocks.tiers.check_integrity()


@pytest.mark.slow
def test_nothing_compiles_once_it_is_ready(model_folders, caplog):
    caplog.set_level(logging.INFO)
    settings = {**FEW, "kv_pages": 30, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    engine = make_engine(model_folders("tp_gqa"), **settings, **TIERS, forbid_compile=True)
    engine.compile()
    assert engine.blocks.tiers.costs.token > 0
    assert "to load a page takes" in caplog.text
    before = engine.programs.compilations
    load_always(engine)
    for tag in "ab":
        answers(engine, requests(tag=tag))
    assert engine.stats().offload_hits > 100
    assert engine.programs.compilations == before


@pytest.mark.parametrize("devices", [1, 2])
def test_copies_take_no_copy_of_the_cache(devices, model_folders):
    settings = {**FEW, "kv_pages": 997, "tensor_parallel_size": devices}
    runner = make_engine(model_folders("tp_gqa"), **settings, **TIERS).runner
    contents = 4 * runner.layout.device_page_bytes(runner.mesh)
    read, write = (
        runner.lower(AuxProgram(kind, 4)).compile().memory_analysis() for kind in ("read_pages", "write_pages")
    )
    assert write.alias_size_in_bytes == runner.cache_bytes
    assert read.output_size_in_bytes <= contents + 64
    assert max(read.temp_size_in_bytes, write.temp_size_in_bytes) <= 3 * contents < runner.cache_bytes / 50


@pytest.mark.slow
def test_others_decode_while_pages_are_loaded(model_folders):
    """The loaded sequence starts with its pages, and until then each step serves the others."""
    settings = {**FEW, "kv_pages": 20, "latency_goal_ms": 0}  # one token a call
    engine = make_engine(model_folders("tp_gqa"), **settings, **TIERS)
    rng = np.random.default_rng(0)
    first, other = (rng.integers(5, 300, 81).tolist() for _ in range(2))
    (expected,) = generate(engine, request("first", first, max_tokens=4))
    generate(engine, request("other", other, max_tokens=4))  # takes the pages of the first
    runner = request("runner", rng.integers(5, 300, 9).tolist(), max_tokens=60)
    engine.add_request(runner)
    for _ in range(3):
        engine.step()
    while engine.copies._saves:  # pages can be loaded when they have arrived
        time.sleep(0.001)
        engine.copies._take_saves()
    collect = engine.copies._collect
    ready = threading.Event()
    engine.copies._collect = lambda read: ready.wait(20) and collect(read)
    engine.add_request(request("again", first, max_tokens=4))
    decoded = 0
    for _ in range(5):
        decoded += sum(len(update.token_ids) for update in engine.step() if update.request_id == "runner")
        assert [load.seq.request_id for load in engine.scheduler.loads.active] == ["again"]
        assert [seq.request_id for seq in engine.scheduler.running] == ["runner"]
    assert decoded >= 4
    ready.set()
    results = drain(engine)
    assert results["again", 0].token_ids == expected.token_ids
    assert results["again", 0].num_cached == 80


@pytest.mark.slow
def test_a_preempted_sequence_gets_its_pages_back(model_folders):
    settings = {**FEW, "kv_pages": 26, "prefix_caching": True}
    made = [request(f"r{i}", np.random.default_rng(i).integers(5, 300, 30).tolist(), max_tokens=60) for i in range(4)]
    expected = answers(make_engine(model_folders("tp_gqa"), **settings), made)
    engine = make_engine(model_folders("tp_gqa"), **settings, **TIERS)
    assert answers(engine, made) == expected
    stats = engine.stats()
    assert stats.preemptions > 1
    assert stats.offload_hits > 30, "what was preempted was computed again"


@pytest.mark.slow
def test_what_takes_longer_to_load_is_computed(model_folders):
    engine = make_engine(model_folders("tp_gqa"), **FEW, **TIERS)
    engine.copies.measure(engine.shapes)
    costs = engine.blocks.tiers.costs
    assert not costs.pay(tokens=1, host_pages=1000, file_pages=0)
    assert costs.pay(tokens=10**6, host_pages=1, file_pages=0)
    engine.blocks.tiers.costs = type(costs)(host_page=1.0, file_page=1.0, token=0.01, wait=0.0)
    for tag in "ab":
        answers(engine, requests(tag=tag))
    assert engine.stats().offload_hits == 0
    assert engine.stats().offload_stored_bytes > 0


@pytest.mark.slow
def test_a_tenant_does_not_find_another_s_pages(model_folders):
    engine = make_engine(model_folders("tp_gqa"), **{**FEW, "kv_pages": 24}, **TIERS)
    prompt, other = (np.random.default_rng(i).integers(5, 300, 81).tolist() for i in range(2))
    for salt, cached in (("a", 0), ("b", 0), ("a", 80), (None, 0), ("b", 80)):
        one = request(f"of {salt}", prompt, max_tokens=2)
        one.cache_salt = salt
        assert generate(engine, one)[0].num_cached == cached
        generate(engine, request("between", other, max_tokens=2))  # evicts it
        generate(engine, request("between", other[1:], max_tokens=2))


def test_forgetting_everything(model_folders, tmp_path):
    engine = make_engine(model_folders("tp_gqa"), **FEW, **TIERS, kv_offload_dir=str(tmp_path / "kv"))
    answers(engine, requests())
    tidy(engine)
    assert engine.blocks.tiers.num_held > 20
    assert len(list((tmp_path / "kv").glob("*/*"))) > 20
    engine.add_request(request("more", [7] * 100, max_tokens=3))
    engine.step()
    engine.reset_prefix_cache()
    drain(engine)
    while engine.copies._saves:
        engine.copies._take_saves()
    hits = engine.stats().offload_hits
    assert all(c.num_cached == 0 for c in generate(engine, requests(1, tag="again")[0]))
    assert engine.stats().offload_hits == hits


@pytest.mark.slow
def test_a_log_gives_the_same_pages_elsewhere(model_folders):
    settings = {**FEW, "kv_pages": 24, "tensor_parallel_size": 2, "dtype": "bfloat16"}
    first, second = (make_engine(model_folders("tp_gqa"), **settings, **TIERS) for _ in range(2))
    log = []
    first.runner.listener = lambda command: log.append(runner_commands.encode(command))
    for tag in "ab":
        answers(first, requests(12, tag=tag))
    kinds = set()
    for command in map(runner_commands.decode, log):
        second.runner.run(command)
        kinds.add(type(command).__name__)
    assert kinds >= {"ReadPages", "WritePages", "Step"}
    for one, other in zip(first.runner.cache, second.runner.cache, strict=True):
        np.testing.assert_array_equal(*(np.asarray(cache.data).view(np.uint16) for cache in (one, other)))


# Files


def with_files(folder, path, **settings):
    return load_always(make_engine(folder, **{**FEW, **TIERS, "kv_offload_dir": str(path), **settings}))


@pytest.mark.slow
def test_the_next_engine_finds_the_files(model_folders, tmp_path):
    folder = shutil.copytree(model_folders("tp_gqa"), tmp_path / "model")
    engine = with_files(folder, tmp_path / "kv")
    expected = answers(engine, requests())
    tidy(engine)
    stats = engine.stats()
    assert stats.offload_disk_written_bytes > 20 * engine.runner.layout.page_bytes
    again = with_files(folder, tmp_path / "kv")
    assert answers(again, requests()) == expected
    most = sum((len(one.prompt_token_ids) - 1) // PAGE * PAGE for one in requests())
    assert again.scheduler.prefix_hits == most, "all full pages of all prompts were in files"
    assert again.stats().offload_disk_read_bytes > 0
    # Other settings, and weights that have changed, are another model's.
    assert with_files(folder, tmp_path / "kv").copies.files.found > 20
    assert with_files(folder, tmp_path / "kv", kv_cache_dtype="int8").copies.files.found == 0
    weights = next(folder.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert with_files(folder, tmp_path / "kv").copies.files.found == 0


@pytest.mark.slow
def test_damaged_files_are_not_used(model_folders, tmp_path):
    folder = model_folders("tp_gqa")
    engine = with_files(folder, tmp_path / "kv")
    expected = answers(engine, requests())
    tidy(engine)
    rng = np.random.default_rng(0)
    paths = sorted((tmp_path / "kv").glob("*/*"))
    for path in paths[::2]:
        data = bytearray(path.read_bytes())
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
    again = with_files(folder, tmp_path / "kv")
    assert answers(again, requests()) == expected
    stats = again.stats()
    assert 0 < stats.offload_disk_damaged <= len(paths[::2])
    assert stats.offload_disk_read_bytes > 0


KILLED = """
import sys
sys.path[:0] = {paths!r}
from test_kv_offload import answers, requests, tidy, with_files
engine = with_files({folder!r}, {kv!r})
answers(engine, requests(12))
print("go", flush=True)
while True:
    tidy(engine)
    engine.copies.clear(engine.scheduler)
    engine.blocks.reset_prefix_cache()
    answers(engine, requests(12))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.03, 0.2])
def test_an_engine_that_is_killed_while_it_writes(seconds, model_folders, tmp_path):
    folder = model_folders("tp_gqa")
    kv = tmp_path / "kv"
    paths = [str(Path(__file__).parent), *sys.path]
    script = KILLED.format(paths=paths, folder=str(folder), kv=str(kv))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    time.sleep(seconds)
    process.kill()
    process.wait()
    engine = with_files(folder, kv)
    assert answers(engine, requests(12)) == answers(make_engine(folder, **FEW), requests(12))
    assert engine.stats().offload_disk_damaged == 0


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_gib": -1}, "kv_offload_gib must be between 0"),
        ({"kv_offload_gib": "1"}, "kv_offload_gib must be between 0"),
        ({"kv_offload_dir": "/x"}, "kv_offload_dir needs kv_offload_gib"),
        ({"kv_offload_gib": 1, "kv_offload_dir": ""}, "kv_offload_dir must be a folder"),
        ({"kv_offload_gib": 1, "kv_offload_dir_gib": 0}, "kv_offload_dir_gib must be between"),
        ({"kv_offload_gib": 1, "prefix_caching": False}, "needs the prefix cache"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_models_and_sizes_that_are_refused(model_folders):
    with pytest.raises(ConfigError, match="recurrent layers, whose states are not in pages"):
        make_engine(model_folders("qwen3_next_groups"), **TIERS)
    with pytest.raises(ConfigError, match="models that embed or score"):
        make_engine(model_folders("tp_gqa"), **TIERS, task="embed", decode_steps=False)
    with pytest.raises(ConfigError, match="at most the free memory"):
        make_engine(model_folders("tp_gqa"), kv_offload_gib=100_000.0)
    with pytest.raises(ConfigError, match="holds no page"):
        make_engine(model_folders("tp_gqa"), kv_offload_gib=1e-6)
