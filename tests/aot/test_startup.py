"""What a start of an 8B shape compiles for a device that is not here, with 256 sequences and steps of 8,192 tokens."""

import sys
from pathlib import Path

import jax
import pytest
from devices import devices_of

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))

import startup

MOST = 16  # programs that run the model or its output head
# Processor seconds of all programs together: to trace and lower them, and to compile them with two of the layers. What
# was measured is in benchmarks/LOG.md. Processors differ, and a busy machine's count for more.
LOWERED = {"bf16": 35, "int4": 50}
COMPILED = {"bf16": 100, "int4": 100}


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.parametrize("target", ["h200x1", "v6e-1"])
@pytest.mark.parametrize("quantization", ["bf16", "int4"])
def test_programs_are_few(target, quantization, tmp_path):
    devices_of(target)
    made = startup.planned(tmp_path, target, quantization, 2)
    names = made.runner.names(made.shapes)
    assert sum(map(startup.is_forward, names)) <= MOST
    assert len({str(name) for name in names}) == len(names) <= MOST + 7


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quantization", ["bf16", "int4"])
def test_a_start_compiles_little(quantization, tmp_path):
    devices_of("h200x1")
    found = list(startup.costs(startup.planned(tmp_path, "h200x1", quantization, 2)))
    for one in found:
        print(one)
    assert sum(one.trace + one.lower for one in found) <= LOWERED[quantization]
    assert sum(one.compile for one in found) <= COMPILED[quantization]
