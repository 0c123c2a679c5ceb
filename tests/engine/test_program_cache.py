"""Programs that an earlier start has left in the user's cache."""

import os
import subprocess
import sys

import jax
import pytest
from engines import generate, make_engine, request

from jaxserve.bundles import program_cache


@pytest.fixture
def start(model_folders, monkeypatch, tmp_path):
    """Starts an engine with a cache of its own. Returns the engine, what it says, and the programs that it lowered."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(program_cache.OFF)
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)

    def begin(case: str = "llama3_gqa", **settings):
        lowered = []
        engine = make_engine(model_folders(case), **settings)
        lower = engine.runner.lower
        monkeypatch.setattr(engine.runner, "lower", lambda name: (lowered.append(str(name)), lower(name))[1])
        engine.compile()
        (said,) = generate(engine, request("a", [5, 6, 7], max_tokens=9))
        return engine, said.token_ids, lowered

    yield begin
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_second_start_lowers_nothing(start, tmp_path, caplog):
    _, said, lowered = start()
    assert {"decode_4", "set_slots_8"} < set(lowered)
    engine, again, lowered = start()
    assert (again, lowered) == (said, [])
    files = sorted((tmp_path / "cache").glob("programs/*/*"))
    assert len(files) >= 5
    assert engine.programs.cache_hits >= len(files)

    damaged = next(path for path in files if path.name.startswith("decode_4-"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    _, again, lowered = start()
    assert (again, lowered) == (said, ["decode_4"])
    assert "the kept program decode_4 is compiled anew: it is damaged" in caplog.text

    _, _, lowered = start(prefill_chunk=7)  # programs do not depend on it, but nothing says so
    assert len(lowered) == len(files)


def test_what_programs_are_made_from(start, monkeypatch):
    """Another model, and kernels that are chosen by a variable, have programs of their own."""
    first, _, _ = start()
    assert start("qwen3_tied")[2]
    folder = first.runner.kept.folder
    monkeypatch.setenv("XLA_SOMETHING", "1")
    other, _, lowered = start()
    assert lowered
    assert other.runner.kept.folder != folder


def test_only_the_latest_kinds_of_engines_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(program_cache, "MOST_FOLDERS", 2)
    for name in ("one", "two", "three"):
        folder = tmp_path / name
        folder.mkdir()
        program_cache.forget_old(tmp_path, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["three", "two"]


def test_where_others_can_write_a_folder_of_our_own_is_used(start, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    engine, _, lowered = start()
    assert lowered
    assert all(path.parent.name.startswith("user-") for path in (tmp_path / "cache").glob("**/programs"))
    assert engine.runner.kept is None or (tmp_path / "cache") in engine.runner.kept.folder.parents


START = """
import logging, sys
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
logging.basicConfig(level=logging.WARNING)
engine = Engine.load(EngineConfig(model=sys.argv[1], max_num_seqs=2, max_model_len=64, kv_pages=40), progress=False)
engine.compile()
print(engine.runner.num_executables, engine.programs.cache_hits, engine.programs.compilations)
"""


@pytest.mark.slow
def test_another_process_takes_them(model_folders, tmp_path):
    """Whose C++ kernels nobody has registered by lowering a program that calls them."""
    env = {**os.environ, "JAXSERVE_CACHE": str(tmp_path), "XLA_FLAGS": ""}
    env.pop(program_cache.OFF)
    said = []
    for _ in range(2):
        command = [sys.executable, "-c", START, str(model_folders("llama3_gqa"))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
        assert "anew" not in done.stderr
        said.append([int(word) for word in done.stdout.split()[-3:]])
    (programs, hits, compiled), (again, found, left) = said
    assert programs == again
    assert hits < found
    assert found >= programs - 2  # those that create cache and slots are JAX's cache's
    assert left < compiled
