"""The Triton kernel of attention within segments: interpreted, in a process of its own as in `test_triton`, and
compiled ahead of time for the heads of several encoders."""

import os
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_triton import INTERPRET, compiled, interpreted

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.registry import Device, SegmentProblem
from jaxserve.pallas_kernels.segment_attention import triton_gpu
from jaxserve.pallas_kernels.selfcheck_segments import check_segments


@compiled
def test_interpreted():
    test_triton.run_interpreted(__file__, "not slow")


@interpreted
def test_the_check_of_a_device(monkeypatch):
    assert INTERPRET
    test_triton.repair_interpreter(monkeypatch)
    monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
    problem = SegmentProblem(np.dtype(np.float32), 1, 24)
    with jax.disable_jit(), np.errstate(over="ignore", invalid="ignore"):
        found = list(check_segments(triton_gpu.segment_attention, problem, repeats=1))
    assert [str(finding) for finding in found if not finding.right] == []


@compiled
@pytest.mark.parametrize(
    "head_dim", [64, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (72, 80, 96, 104, 128))]
)
def test_compiles_for_h200(head_dim, tmp_path, monkeypatch):
    """One launch beside the spans; nothing spills."""
    monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
    mesh = mesh_of("h200x1")
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((4096, 16, head_dim), jnp.bfloat16, sharding=everywhere)
    segment = jax.ShapeDtypeStruct((4096,), jnp.int32, sharding=everywhere)
    with jax.set_mesh(mesh):
        attend = jax.jit(lambda *given: triton_gpu.segment_attention(*given, head_dim**-0.5))
        program = attend.lower(x, x, x, segment).compile()
    assert program.as_text().count(" custom-call(") == 1
    assert program.memory_analysis().temp_size_in_bytes < 2**20  # no scores
    (kernel,) = tmp_path.rglob("*.ptx")
    assembler = [os.environ["TRITON_PTXAS_BLACKWELL_PATH"], "-v", "-arch=sm_90a", kernel, "-o", os.devnull]
    said = subprocess.run(assembler, check=True, capture_output=True, text=True).stderr
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]


def test_why_not():
    h200 = Device("gpu", "NVIDIA H200", (9, 0))
    problem = SegmentProblem(np.dtype(jnp.bfloat16), 16, 72)
    assert triton_gpu.why_not(h200, problem) is None
    assert "at most 128, not 160" in triton_gpu.why_not(h200, SegmentProblem(problem.dtype, 16, 160))
    assert "compute capability 8.0" in triton_gpu.why_not(Device("gpu", "T4", (7, 5)), problem)
