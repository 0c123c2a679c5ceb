"""Compiled code comes from folders that are ours alone; planted libraries are not loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxserve.devices.compile_cache import enable_compile_cache
from jaxserve.devices.jax_versions import JAX
from jaxserve.pallas_kernels import cpu_build
from jaxserve.pallas_kernels.cache_folder import CacheFolder, open_cache

ROOT = Path(__file__).parent.parent.parent
USER = f"user-{os.geteuid()}"


@pytest.fixture
def builds(monkeypatch, tmp_path) -> Path:
    """A stand-in for the compiler, which links a library from an empty source in no time, and notes where it ran."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    compiler = tmp_path / "bin" / "fast-c++"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\npwd >> {tmp_path}/builds\nwhile [ "$1" != "-o" ]; do shift; done\n'
        f'echo "int built;" | c++ -x c++ -shared -fPIC - -o "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return tmp_path / "builds"


def plant(folder: Path) -> Path:
    """A library in the kernels' place, whose loading leaves a mark; the mark's path."""
    mark = folder.parent / "planted-ran"
    source = f'#include <cstdio>\n__attribute__((constructor)) void run() {{ std::fopen("{mark}", "w"); }}\n'
    for place in (folder, folder / USER):
        if place.is_dir():
            library = cpu_build._library(cpu_build.KERNELS, place)
            command = ["c++", "-x", "c++", "-shared", "-fPIC", "-", "-o", str(library)]
            subprocess.run(command, input=source, text=True, check=True)
    return mark


def test_all_of_a_new_cache_is_private(tmp_path):
    umask = os.umask(0)
    try:
        made = open_cache(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(umask)
    assert made == CacheFolder(tmp_path / "a" / "b" / "c", is_private=True)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}


def test_an_existing_private_cache_keeps_its_mode(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    assert open_cache(folder) == CacheFolder(folder, is_private=True)
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_shared_cache_gets_a_folder_of_our_own(tmp_path, mode):
    tmp_path.chmod(mode)
    assert open_cache(tmp_path) == CacheFolder(tmp_path / USER, is_private=True)
    assert (tmp_path / USER).stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_mode & 0o7777 == mode


def test_a_planted_folder_of_that_name_is_not_used(tmp_path, caplog):
    tmp_path.chmod(0o777)
    (tmp_path / USER).mkdir()
    (tmp_path / USER).chmod(0o777)
    assert open_cache(tmp_path) is None
    assert "not kept" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_folders_of_another_user(tmp_path):
    os.chown(tmp_path, 12345, -1)
    assert open_cache(tmp_path) == CacheFolder(tmp_path / USER, is_private=True)
    os.chown(tmp_path / USER, 12345, -1)
    assert open_cache(tmp_path) is None


def test_a_cache_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert open_cache(tmp_path / "file" / "cache") is None
    assert "not kept" in caplog.text


def test_a_read_only_cache_is_read_and_nothing_is_run_from_it(tmp_path, monkeypatch, builds):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("JAXSERVE_CACHE", str(folder))
    mark = plant(folder)
    folder.chmod(0o555)
    assert open_cache(folder) == CacheFolder(folder, is_private=False)
    library = cpu_build.load()
    assert hasattr(library, "built")
    assert not mark.exists()
    assert [path.suffix for path in folder.iterdir()] == [".so"]  # the planted one
    assert not Path(library._name).exists()  # the folder it was built in is gone


@pytest.mark.skipif(JAX < (0, 11), reason="JAX 0.10 would find no program in the cache then")
def test_xla_writes_nothing_to_a_read_only_cache(tmp_path):
    """XLA:GPU's autotuner would, and would fail."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"
    before = {name: jax.config.values[name] for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert enable_compile_cache() == tmp_path
        assert jax.config.values[names[1]] == before[names[1]]
        tmp_path.chmod(0o555)
        assert enable_compile_cache() == tmp_path
        assert jax.config.values[names[1]] == "none"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("shared", ["folder", "file"])
def test_a_planted_library_is_not_loaded(tmp_path, monkeypatch, builds, shared):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("JAXSERVE_CACHE", str(folder))
    mark = plant(folder)
    if shared == "folder":
        folder.chmod(0o777)
    else:
        cpu_build._library(cpu_build.KERNELS, folder).chmod(0o777)
    assert hasattr(cpu_build.load(), "built")
    assert not mark.exists()
    assert len(builds.read_text().splitlines()) == 1
    cpu_build.load()
    assert len(builds.read_text().splitlines()) == 1  # it was kept


def test_the_compiler_does_not_come_from_the_current_folder(tmp_path, monkeypatch, builds):
    here = tmp_path / "here"
    here.mkdir()
    (here / "decoy-c++").write_text(f"#!/bin/sh\ntouch {tmp_path}/decoy-ran\n")
    (here / "decoy-c++").chmod(0o755)
    monkeypatch.chdir(here)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", os.environ["PATH"]]))
    cpu_build.load()
    assert Path(builds.read_text().strip()) != here  # an empty entry of CPATH would mean that folder
    monkeypatch.setenv("CXX", "decoy-c++")
    assert not cpu_build.possible("cpu_quant_matmul")
    with pytest.raises(FileNotFoundError, match="CXX"):
        cpu_build.load("cpu_quant_matmul")
    assert not (tmp_path / "decoy-ran").exists()


COMPILES = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from jaxserve.devices.compile_cache import CompileCounter, enable_compile_cache
import jax
print(enable_compile_cache())
counter = CompileCounter()
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
print(counter.cache_hits)
"""


def compile_once(folder: Path, variable: str = "JAXSERVE_CACHE") -> list[str]:
    """The cache that a process uses, and how many programs it found there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(folder)}
    environment |= {variable: str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "rror" not in done.stderr, done.stderr
    return done.stdout.split()


def test_compiled_programs_of_others_are_not_run(tmp_path):
    folder = tmp_path / "cache"
    assert compile_once(folder) == [str(folder), "0"]
    folder.chmod(0o555)
    count = len(list(folder.iterdir()))
    path, hits = compile_once(folder)
    assert path == str(folder)
    assert int(hits) >= 1  # read
    assert len(list(folder.iterdir())) == count  # and not written to
    folder.chmod(0o777)
    assert compile_once(folder) == [str(folder / USER), "0"]
    assert compile_once(folder, "JAX_COMPILATION_CACHE_DIR")[0] == str(folder / USER)
