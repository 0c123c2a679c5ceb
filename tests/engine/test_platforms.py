"""The platform that JAX runs on: a CPU beside an accelerator serves only where it was asked for; and what kernels each
platform gets."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices import platforms
from jaxserve.devices.platforms import check_platform, device_files
from jaxserve.pallas_kernels import device_ops
from jaxserve.pallas_kernels.cpu import CpuOps
from jaxserve.pallas_kernels.lora import cpu as cpu_lora
from jaxserve.pallas_kernels.lora import reference as plain_lora
from jaxserve.pallas_kernels.lora import tpu as tpu_lora
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul import tpu as tpu_matmul
from jaxserve.pallas_kernels.registry import AttentionProblem, Device
from jaxserve.pallas_kernels.types import QuantArray

ROOT = Path(__file__).parents[2]
BOTH = {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
FAILING = """
from jaxlib import xla_client
def initialize():
    xla_client.generate_pjrt_gpu_plugin_options()
"""
CHECK = """
from jaxserve.config import EngineConfig
from jaxserve.devices.platforms import check_platform
check_platform(EngineConfig(model="demo"))
"""


@pytest.fixture
def facts(monkeypatch, tmp_path):
    """A machine without accelerators and plugins, where nobody asked for the CPU. Its files are in `dev`."""
    (tmp_path / "dev").mkdir()
    before = {name: jax.config.values[name] for name in ("jax_platforms", "jax_platform_name")}
    for name in before:
        jax.config.update(name, "")
    monkeypatch.setattr(platforms, "device_files", lambda: device_files(tmp_path / "dev", tmp_path / "pci"))
    monkeypatch.setattr(platforms, "plugins", list)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def check(platform: str = "auto") -> None:
    check_platform(EngineConfig(model="demo", platform=platform))


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "accel0", "vfio/3"])
def test_the_cpu_of_a_machine_with_an_accelerator_is_refused(facts, name):
    check()
    (facts / "pci" / "0000:00:04.0").mkdir(parents=True)
    (facts / "pci" / "0000:00:04.0" / "vendor").write_text("0x1ae0\n")
    (facts / "dev" / name).parent.mkdir(exist_ok=True)
    (facts / "dev" / name).touch()
    with pytest.raises(ConfigError, match=f"machine has {facts}/dev/{name}: .*--platform cpu or JAX_PLATFORMS=cpu"):
        check()
    check("cpu")


def test_files_of_other_devices_count_for_nothing(facts):
    """VFIO is for any device on PCI, and Linux has a folder /dev/accel for accelerators of laptops."""
    for name in ("vfio/vfio", "vfio/12", "accel/accel0", "nvidia-caps/nvidia-cap1"):
        (facts / "dev" / name).parent.mkdir(exist_ok=True)
        (facts / "dev" / name).touch()
    check()


@pytest.mark.parametrize(("asked", "refused"), [("cpu", False), ("cpu,cuda", False), ("cuda,cpu", True), ("", True)])
def test_jax_platforms_may_ask_for_the_cpu(facts, monkeypatch, asked, refused):
    monkeypatch.setattr(platforms, "plugins", lambda: ["libtpu 1.0"])
    jax.config.update("jax_platforms", asked)
    if refused:
        with pytest.raises(ConfigError, match=r"machine has libtpu 1\.0"):
            check()
    else:
        check()


def test_installed_plugins_are_found(monkeypatch):
    points = [EntryPoint("xla_cuda12", "jax_plugins.xla_cuda12", "jax_plugins")]
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: points)
    versions = {"jax-cuda13-plugin": "0.10.2"}

    def version(name: str) -> str:
        if name not in versions:
            raise platforms.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(platforms.importlib.metadata, "version", version)
    assert platforms.plugins() == ["jax-cuda13-plugin 0.10.2", "the JAX plugin xla_cuda12"]


def test_the_error_that_jax_recorded_is_told(facts, monkeypatch):
    monkeypatch.setattr(platforms, "plugins", lambda: ["the JAX plugin xla_cuda12"])

    def devices(platform: str) -> list:
        recorded = "Backend 'cuda' failed to initialize: the driver is too old" if platform == "cuda" else "Unknown tpu"
        raise RuntimeError(recorded)

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ConfigError, match=r"xla_cuda12: .*the driver is too old") as refusal:
        check()
    assert "Unknown tpu" not in str(refusal.value)


def test_a_platform_that_is_not_there_is_refused(facts):
    with pytest.raises(ConfigError, match=r"platform cuda .* was asked for: JAX runs on cpu in this process"):
        check("cuda")
    with pytest.raises(ConfigError, match="platform must be one of auto, cpu, cuda, tpu"):
        check("gpu")


def test_a_plugin_that_does_not_start_ends_the_start_with_its_error(tmp_path):
    """JAX's own plugin does this where both variables are set. Here a plugin stands for it, in a process of its own."""
    (tmp_path / "failing_plugin.py").write_text(FAILING)
    info = tmp_path / "failing_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jax_plugins]\nfailing = failing_plugin\n")
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", **BOTH}

    refused = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True)
    assert refused.returncode == 1
    message = refused.stderr.splitlines()[-1]
    assert "although this machine has the JAX plugin failing" in message
    assert "XLA_CLIENT_MEM_FRACTION is specified together with XLA_PYTHON_CLIENT_MEM_FRACTION" in message


def test_kernels_of_devices_that_are_not_here():
    """Each kind of device adds adapters by its own kernels, and splits of a model by plain operations; a TPU multiplies
    stacks of floats by its kernel, but for float16, which Mosaic does not load."""
    here = Device("cpu", "cpu")
    new = Device("tpu", "TPU v6 lite")
    old = Device("tpu", "TPU v4")
    assert device_ops.adapters_of(here) is cpu_lora.add_adapters
    assert device_ops.adapters_of(new) is tpu_lora.add_adapters
    for device, partitioned in ((old, False), (here, True), (new, True)):
        assert device_ops.adapters_of(device, partitioned=partitioned) is plain_lora.add_adapters
    gpu = device_ops.adapters_of(Device("gpu", "NVIDIA H200", (9, 0)))
    assert gpu.__module__.endswith("lora.triton" if find_spec("jax_triton") else "lora.reference")
    assert device_ops.grouped_floats(new, jnp.bfloat16) is tpu_matmul.grouped_quant_matmul
    assert device_ops.grouped_floats(new, jnp.float16) is None
    assert device_ops.grouped_floats(here, jnp.float32) is None
    problem = AttentionProblem(np.dtype("bfloat16"), np.dtype("bfloat16"), 2, 4, 128, 16)
    ops = device_ops.choose_ops(Device("gpu", "NVIDIA H200", (9, 0)), problem)
    assert (ops.fused is None) == (find_spec("jax_triton") is None)
    assert isinstance(device_ops.choose_ops(here, problem), CpuOps)
    assert type(device_ops.choose_ops(here, problem, partitioned=True)) is Ops


def test_products_of_stacks_in_plain_xla():
    """Each row times the weight of its expert, whose inputs may be in an order of their own."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, 8)).astype(np.float32)
    codes = rng.integers(-9, 9, (3, 4, 8)).astype(np.int8)
    scale = rng.random((3, 4, 1)).astype(np.float32)
    order = np.stack([rng.permutation(8) for _ in range(3)]).astype(np.int32)
    expert = [0, 0, 2, 2, 2, 2]
    sorted_rows = np.take_along_axis(x, order[expert], axis=1)
    stack = QuantArray(jnp.asarray(codes), jnp.asarray(scale), block=(1, 8))
    multiply = device_ops.grouped_matmul_of(Device("cpu", "cpu"), "xla")
    for rows, weight in ((x, jnp.asarray(codes * scale)), (sorted_rows, replace(stack, order=jnp.asarray(order)))):
        want = np.einsum("ri,roi->ro", rows, (codes * scale)[expert])
        found = multiply(jnp.asarray(x), weight, jnp.array([2, 0, 4], jnp.int32))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
