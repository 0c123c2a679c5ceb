"""What `triton_compat` hides of a machine: which assembler its kernels get, and which GPU they are compiled for."""

import os
import re
import subprocess
import sys
import zlib

import jax
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

from devices import devices_of, mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir.ir import WalkResult

from jaxserve.hosts.start_jax import leave_out_source_files
from jaxserve.pallas_kernels import draw_triton

OLD = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 12.4, V12.4.131" && exit 0
echo "Unsupported .version 8.8; current version is '8.4'" && exit 1
"""
COMPILE = """
import jax, jax.numpy as jnp
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from jaxserve.pallas_kernels import draw_triton
mesh = mesh_of("h200x1")
with jax.set_mesh(mesh):
    logits = jax.ShapeDtypeStruct((2, 300), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    text = jax.jit(lambda x: draw_triton.draw(x, None)).lower(logits).compile().as_text()
assert "triton_kernel_call" in text
"""


def test_an_older_toolkit_beside_jax(tmp_path):
    """An assembler in PATH that is too old for Triton's PTX is not used."""
    devices_of("h200x1")
    (tmp_path / "ptxas").write_text(OLD)
    (tmp_path / "ptxas").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.path.dirname(devices_of.__code__.co_filename),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="reads calls of Triton in the form of earlier versions")
def test_kernels_of_several_hosts_name_no_source_files(monkeypatch):
    """Hosts with these files in other folders would have other programs. By default they are in the PTX."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    assert b"draw_triton.py" in source_files(vocab=301)
    try:
        leave_out_source_files()
        assert source_files(vocab=302) == set()
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def source_files(vocab: int) -> set[bytes]:
    """The files that the kernel for rows of so many tokens names. Each is compiled once in a process."""
    mesh = mesh_of("h200x1")
    logits = jax.ShapeDtypeStruct((2, vocab), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        module = jax.jit(lambda x: draw_triton.draw(x, None)).lower(logits).compiler_ir()
    found: list[bytes] = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            config = op.attributes["backend_config"]
            found.append(zlib.decompress(config.value_bytes))
        return WalkResult.ADVANCE

    module.operation.walk(visit)
    assert found
    return {name for config in found for name in re.findall(rb"[\w.]+\.py\b", config)}
