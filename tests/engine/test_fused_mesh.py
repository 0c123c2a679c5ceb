"""Fused kernels on several devices: each runs them on its own heads and its own part of the MLP, with the same tokens.

The kernels stand in as plain operations that keep the same contract (`fused_triton`): products come in several parts,
and inputs of rounding weights as codes. What the kernels themselves compute is tested in `tests/kernels`.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request

from jaxserve.convert.quantize import QuantizeConfig, quantize_model
from jaxserve.pallas_kernels import device_ops
from jaxserve.pallas_kernels.operands import Row
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.types import QuantRows

pytestmark = pytest.mark.compiles

PROMPT = np.random.default_rng(7).integers(5, 500, 40).tolist()


class Kernels:
    """As the module `fused_triton`; remembers the shapes that each function was given."""

    def __init__(self):
        self.seen = {}

    def rounding_reader(self, reader):
        return reader

    def add_norm(self, x, y, scale, eps, reader=None):
        self.seen["add_norm"] = x.shape, type(scale)
        total, normed = Ops().add_norm(x, y, scale, eps)
        return total, normed if reader is None else w8a8.quantize(normed, reader)

    def gate(self, y, activation, dtype, reader=None):
        self.seen["gate"] = y.sums.shape
        gated = Ops().gated(y, activation, dtype)
        return gated if reader is None else w8a8.quantize(gated, reader)

    def rotate_and_write(self, heads, *rest):
        self.seen["rotate_and_write"] = heads.qkv.sums.shape
        return Ops().rotate_and_write(heads, *rest)

    def quantize(self, x, w):
        self.seen["quantize"] = x.shape
        return w8a8.quantize(x, w)

    def product(self, x, w):
        self.seen["product"] = w.shape
        tokens, (out, inputs) = len(x), w.shape
        return jnp.einsum("tsk,osk->sto", x.reshape(tokens, 2, inputs // 2), w.reshape(out, 2, inputs // 2))


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    """Kernels that models on several devices run with from now on."""
    found = Kernels()
    monkeypatch.setattr(device_ops, "_with_triton", lambda plain, *_: replace(plain, fused=found))
    return found


def answer(folder, devices: int, **options) -> SimpleNamespace:
    engine = make_engine(folder, tensor_parallel_size=devices, dtype="float32", **options)
    asked = request("0", PROMPT, max_tokens=12, prompt_logprobs=0)
    done = generate(engine, asked)[0]
    return SimpleNamespace(
        tokens=done.token_ids,
        likelihoods=np.array([entry.logprob for entry in done.prompt_logprobs[1:]]),
        fused=engine.runner.model.ops.fused,
    )


# Repeated KV heads; biases, which are Rows of one array; norms of queries and keys with the head tied; operations that
# no fused kernel knows beside some that they know.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("tp_gqa", 8),
        ("llama_biases", 2),
        ("qwen3_tied", 2),
        ("gemma3_older", 2),
        ("cohere_qk_norm", 4),
        ("opt_350m", 2),
    ],
)
def test_same_answer(case, devices, model_folders, kernels, monkeypatch):
    folder = model_folders(case)
    found = answer(folder, devices)
    assert found.fused.kernels is kernels
    with monkeypatch.context() as plain:
        plain.setattr(device_ops, "_with_triton", lambda plain, *_: plain)
        expected = answer(folder, devices)
    assert expected.fused is None
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.likelihoods, expected.likelihoods, atol=1e-4)


def test_each_device_has_its_part(model_folders, kernels):
    """8 query heads of 32 over 2 KV heads, each of these on four devices; an MLP of 256; hidden states of 128."""
    answer(model_folders("tp_gqa"), 8, decode_steps=False)
    assert set(kernels.seen) == {"add_norm", "gate", "rotate_and_write", "product"}
    assert kernels.seen["add_norm"] == ((64, 128), Row)
    assert kernels.seen["gate"] == (2, 64, 2 * 256 // 8)
    assert kernels.seen["rotate_and_write"] == (2, 64, 1, 3, 32)
    assert kernels.seen["product"] == (2 * 256 // 8, 128)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8-dynamic", "fp8-dynamic"])
def test_rounded_inputs(scheme, model_folders, tmp_path, kernels, monkeypatch):
    """They are codes between the kernel that rounds them and the product, with scales of each device's part."""
    quantize_model(str(model_folders("tp_gqa")), tmp_path / scheme, QuantizeConfig(scheme=scheme), progress=False)
    options = {"activation_quantization": "checkpoint"}
    multiplied = []
    multiply = w8a8.emulated

    def spied(rows: QuantRows, *rest) -> jax.Array:
        multiplied.append((rows.codes.dtype, rows.shape[1], rows.scale.shape[1]))
        return multiply(rows, *rest)

    monkeypatch.setattr(w8a8, "emulated", spied)
    found = answer(tmp_path / scheme, 8, **options)
    assert set(kernels.seen) == {"add_norm", "gate", "rotate_and_write", "quantize"}
    codes = jnp.dtype("int8" if scheme.startswith("int8") else "float8_e4m3fn")
    assert {kind for kind, _, _ in multiplied} == {codes}
    assert {(inputs, scales) for _, inputs, scales in multiplied} == {(128, 1), (256 // 8, 1)}
    with monkeypatch.context() as plain:
        plain.setattr(device_ops, "_with_triton", lambda plain, *_: plain)
        expected = answer(tmp_path / scheme, 8, **options)
        exact = answer(tmp_path / scheme, 8, activation_quantization="none")
    moved = np.abs(expected.likelihoods - exact.likelihoods).max()
    assert np.abs(found.likelihoods - expected.likelihoods).max() < moved / 4
