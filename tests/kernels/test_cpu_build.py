"""A machine without a C++ compiler: everything runs in plain XLA, and says what is missing and what that costs."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.pallas_kernels import cpu_build

ROOT = Path(__file__).parents[2]
EVERYTHING = """
import logging
logging.basicConfig(format="%(message)s")
import jax, jax.numpy as jnp, numpy as np
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.device_ops import choose_ops
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import KVPages

for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
    scaled = jnp.dtype(dtype).itemsize == 1
    ops = choose_ops(Device("cpu", "cpu"), AttentionProblem(np.dtype("f4"), np.dtype(dtype), 2, 3, 8, 4, scaled))
    pages = KVPages(jnp.zeros((5, 2, 2, 4, 8), dtype), jnp.ones((5, 2, 2, 4)) if scaled else None)
    kv = jnp.ones((4, 2, 8))
    pages = ops.write_kv(pages, kv, kv * 3, jnp.arange(4, 8), jnp.int32(0))
    rows = jnp.ones((1, 3), jnp.int32), jnp.array([0, 4]), jnp.array([4]), jnp.int32(0)
    found = ops.paged_attention(jnp.ones((4, 2, 3, 8)), pages, *rows, scale=1.0)
    np.testing.assert_allclose(found, np.full(found.shape, 3.0), rtol=1e-2)
x = jnp.arange(6.0).reshape(2, 3)
np.testing.assert_allclose(ops.matmul(x, x), np.asarray(x) @ np.asarray(x).T)
np.testing.assert_array_equal(cpu.zeros((3,), jnp.int32), 0)
print("done")
"""


@pytest.fixture
def without_compiler(tmp_path):
    return os.environ | {"CXX": "/nonexistent", "JAXSERVE_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}


def test_everything_runs_in_plain_xla_and_says_so_once(without_compiler):
    command = [sys.executable, "-c", EVERYTHING]
    run = subprocess.run(command, cwd=ROOT, env=without_compiler, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == "done\n"
    assert run.stderr.count("there is no C++ compiler: no '/nonexistent' (CXX) on the PATH") == 1
    assert "times slower" in run.stderr


def test_kernels_command_names_what_is_missing(without_compiler):
    command = [sys.executable, "-m", "jaxserve", "kernels"]
    run = subprocess.run(command, cwd=ROOT, env=without_compiler, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    attention = run.stdout.split("\n\n")[1]
    assert "there is no C++ compiler" in attention
    assert "* xla" in attention


def test_flags_of_the_user_name_another_library(monkeypatch):
    """They come behind ours, so that the last -march counts."""
    monkeypatch.delenv("JAXSERVE_CXXFLAGS", raising=False)
    before = cpu_build.key(cpu_build.ATTENTION)
    monkeypatch.setenv("JAXSERVE_CXXFLAGS", "-march=x86-64-v3 -DA='b c'")
    assert cpu_build._flags()[-2:] == ["-march=x86-64-v3", "-DA=b c"]
    assert cpu_build.key(cpu_build.ATTENTION) != before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the machine code of x86")
@pytest.mark.parametrize("name", [cpu_build.PANELS, cpu_build.ATTENTION, cpu_build.LATENT])
def test_sums_stay_in_registers(name):
    """Loops of products keep their sums in AVX2's 16 registers. Stored in each turn, they cost three quarters of the
    speed (measured on Zen 3), and all results are still right."""
    flags = [*cpu_build.FLAGS, "-march=haswell", f"-I{cpu_build._headers()}", "-S", "-o", "-"]
    command = [cpu_build._compiler() or "c++", *flags, str(cpu_build._source(name))]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    labels = {line[:-1]: at for at, line in enumerate(code) if line.startswith(".L") and line.endswith(":")}

    def innermost(counts: Callable[[list[str]], bool]) -> list[list[str]]:
        """The loops that count and hold no other such loop."""
        found: dict[int, list[str]] = {}  # by their first line
        for at, line in enumerate(code):
            begin = labels.get(line.split()[-1], at) if line.startswith("\tj") else at
            if begin < at and counts(code[begin:at]) and not any(begin <= inner < at for inner in found):
                found[begin] = code[begin:at]
        return list(found.values())

    def check(products: list[list[str]], most: int) -> None:
        """At most so many vectors are stored in a turn of a loop."""
        stored = [sum(bool(re.match(r"\tvmov\w+\t%[xyz]mm\d+, .*%r[sb]p", line)) for line in one) for one in products]
        assert len(products) >= 5
        assert max(stored) <= most, "\n".join(products[stored.index(max(stored))])

    def of_integers(loop: list[str]) -> int:
        return sum("vpmaddubsw" in line for line in loop)

    # Accumulations; polynomials have other forms of the instruction.
    sums = [loop for loop in innermost(lambda loop: True) if sum("vfmadd231ps" in line for line in loop) >= 6]
    check([loop for loop in sums if not of_integers(loop)], 2)
    if name == cpu_build.PANELS:  # some loops hold two tiles, or unpack codes with masks in memory
        check(innermost(lambda loop: of_integers(loop) >= 32), 24)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86")
@pytest.mark.parametrize("machine", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_tiles_of_adapters_have_outputs(machine):
    """Tiles fit the registers. Where four tokens left no room for outputs, tiles of none of them never ended (AVX2)."""
    flags = [*cpu_build.FLAGS, f"-march={machine}", f"-I{cpu_build._headers()}", "-fsyntax-only"]
    command = [cpu_build._compiler() or "c++", *flags, str(cpu_build._source(cpu_build.LORA))]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


EMULATED = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, EMULATED)), reason=f"no {' or '.join(EMULATED)}")
@pytest.mark.parametrize("machine", ["armv8-a", "armv8.2-a+dotprod"])
def test_products_of_integers_on_an_emulated_arm(machine, tmp_path):
    flags = ["-O2", f"-march={machine}", "-ffp-contract=fast", "-std=c++17", "-static", "-w"]
    folders = [f"-I{cpu_build._headers()}", f"-I{cpu_build.FOLDER}"]
    program = tmp_path / "check"
    source = Path(__file__).parent / "check_products.cc"
    subprocess.run([EMULATED[0], *flags, *folders, str(source), "-o", str(program)], check=True)
    run = subprocess.run([EMULATED[1], "-cpu", "max", str(program)], capture_output=True, text=True, check=True)
    errors = dict(line.split() for line in run.stdout.splitlines())
    assert len(errors) == 16
    assert max(map(float, errors.values())) < 1e-6, errors
