"""Which backend a device uses, and what is said of the others."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.devices.kernel_report import describe
from jaxserve.devices.targets import ConfigError, target_devices
from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.registry import AttentionProblem, BackendError, Device, MatmulProblem, choose, explain

F32 = np.dtype(np.float32)
BF16 = np.dtype(jnp.bfloat16)
CPU = Device("cpu", "cpu")
H200 = Device("gpu", "NVIDIA H200", (9, 0))
A100 = Device("gpu", "NVIDIA A100", (8, 0))
V5E = Device("tpu", "TPU v5 lite")
LLAMA = AttentionProblem(BF16, BF16, 8, 4, 128, 64)


def test_what_devices_use():
    assert choose("attention", H200, LLAMA) == "mosaic_gpu"
    assert choose("attention", V5E, LLAMA) == "mosaic_tpu"
    assert choose("attention", CPU, LLAMA) == ("cpu" if cpu.available(cpu.ATTENTION) else "xla")
    reasons = explain("attention", A100, LLAMA)
    assert "9.0" in reasons["mosaic_gpu"]
    assert reasons["xla"] is None
    assert reasons["triton"] is None or "not installed" in reasons["triton"]


def test_quantized_weights():
    problem = MatmulProblem(BF16, np.dtype(jnp.int4), 4096, 4096, (1, 128))
    assert choose("matmul", H200, problem) == "mosaic_gpu"
    assert choose("matmul", V5E, problem) == "mosaic_tpu"
    assert explain("matmul", CPU, problem)["cpu"] == "it computes in float32, not in bfloat16"


def test_quantized_weights_on_cpu():
    problem = MatmulProblem(F32, np.dtype(jnp.int4), 4096, 4096, (1, 128))
    assert choose("matmul", CPU, problem) == ("cpu" if cpu.available(cpu.QUANT_MATMUL) else "xla")
    for change, said in (
        ({"partitioned": True}, "one device"),
        ({"inputs": 4097}, "must be even"),
        ({"block": (1, 100)}, "multiples of 8"),
    ):
        reasons = explain("matmul", CPU, replace(problem, **change))
        assert said in reasons["cpu"]
        assert reasons["xla"] is None


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    problem = MatmulProblem(F32, np.dtype(jnp.int8), 64, 64, (1, 64))
    assert "no C++ compiler" in explain("matmul", CPU, problem)["cpu"]
    assert choose("matmul", CPU, problem) == "xla"


def test_an_explicit_choice_that_cannot_run_fails_with_the_reason():
    with pytest.raises(BackendError, match=r"mosaic_tpu cannot run on NVIDIA H200: .*TPU"):
        choose("attention", H200, LLAMA, "mosaic_tpu")
    with pytest.raises(BackendError, match="there is no attention backend 'cuda'"):
        choose("attention", H200, LLAMA, "cuda")


def test_a_device_from_jax():
    class Card:
        platform = "cuda"
        device_kind = "NVIDIA H200"
        compute_capability = "9.0"

    assert Device.of(Card()) == H200


@pytest.mark.parametrize("device", [CPU, H200, V5E])
def test_the_table_names_what_is_used(device):
    text = "\n".join(describe(device))
    assert text.startswith(device.kind)
    sections = text.split("\n\n")[1:]
    if device is CPU:
        assert "in panels" in sections.pop()
    rounding = [sections.pop() for _ in range(4)]  # W8A8
    assert all("--activation-quantization" in section and section.count("\n") == 1 for section in rounding)
    assert len(sections) == {CPU: 13, H200: 16, V5E: 15}[device]
    for section in sections:
        assert section.count("  * ") == 1
        assert section.count("\n") == 5


def test_unknown_targets():
    for name in ("h300x1", "v5e-3", "nonsense", ""):
        with pytest.raises(ConfigError, match="there is no target"):
            target_devices(name)
