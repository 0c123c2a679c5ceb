"""The Triton kernels of LoRA adapters: interpreted against float64 NumPy, and compiled ahead of time. As in
`test_triton`, the interpreted tests run in a process of their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import test_lora
import test_triton
from devices import mesh_of
from jax.sharding import NamedSharding, PartitionSpec
from test_lora import PLACES, WIDTHS, draw_pool, expected
from test_triton import INTERPRET, compiled, interpreted

from jaxserve.pallas_kernels import selfcheck_lora, triton_compat
from jaxserve.pallas_kernels.lora import reference, triton
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.registry import Device


@compiled
def test_interpreted():
    """Runs this file's interpreted tests where Triton interprets."""
    test_triton.run_interpreted(__file__)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if INTERPRET:
        test_triton.repair_interpreter(monkeypatch)
        monkeypatch.setattr(triton_compat, "call", test_triton.interpret)
        with jax.disable_jit():
            yield
    else:
        yield


@interpreted
@pytest.mark.parametrize(("widths", "out"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_adds_what_adapters_add(widths, out, tokens):
    rng = np.random.default_rng(tokens)
    stack, y, x = draw_pool(rng, widths, out, tokens, jnp.float32)
    place = jnp.asarray(rng.integers(-1, PLACES, tokens), jnp.int32)
    np.testing.assert_allclose(triton.add_adapters(y, x, stack, place), expected(stack, y, x, place), atol=1e-4)


@interpreted
def test_many_inputs_and_tokens(monkeypatch):
    """Several pieces of the inputs for few tokens; several tiles for many. Rows beyond the count stay as they are."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr(test_lora, "INPUTS", 2100)
    for tokens in (5, 130):
        stack, y, x = draw_pool(rng, (32, 8, 8), 96, tokens, jnp.float32)
        place = jnp.asarray(rng.integers(-1, PLACES, tokens), jnp.int32)
        made = np.asarray(triton.add_adapters(y, x, stack, place, jnp.int32(tokens - 3)))
        wanted = expected(stack, y[:-3], x[:-3], place[:-3])
        np.testing.assert_allclose(made[:-3], wanted, atol=1e-3)
        np.testing.assert_array_equal(made[-3:], y[-3:])


@interpreted
def test_16_bits():
    rng = np.random.default_rng(6)
    stack, y, x = draw_pool(rng, (64, 32), 96, 20, jnp.bfloat16)
    y = y.astype(jnp.bfloat16)
    x = x.astype(jnp.bfloat16)
    place = jnp.asarray(rng.integers(-1, PLACES, 20), jnp.int32)
    made = np.asarray(triton.add_adapters(y, x, stack, place), np.float32)
    wanted = expected(stack, y.astype(jnp.float32), x.astype(jnp.float32), place)
    np.testing.assert_allclose(made, wanted, rtol=2e-2, atol=0.5)  # the sums are up to 100, rounded to 8 bits twice
    np.testing.assert_array_equal(made[np.asarray(place) < 0], np.asarray(y, np.float32)[np.asarray(place) < 0])


@interpreted
def test_the_check_of_a_device(monkeypatch):
    monkeypatch.setattr(selfcheck_lora, "REPEATS", 1)
    monkeypatch.setattr(selfcheck_lora, "CASES", [(min(n, 40), min(k, 640), w) for n, k, w in selfcheck_lora.CASES])
    found = list(selfcheck_lora.check_adapters(triton.add_adapters, np.dtype(np.float32)))
    assert [finding for finding in found if not finding.right] == []


@compiled
@pytest.mark.parametrize("wrong", [False, True])
def test_the_check_sees_mistakes(wrong):
    """Plain operations are right, and wrong with the neighbour's adapter."""

    def add(y, x, stack, place):
        with jax.default_matmul_precision("highest"):
            return reference.add_adapters(y, x, stack, jnp.where(place == 2, 3, place) if wrong else place)

    found = list(selfcheck_lora.check_adapters(add, np.dtype(np.float32)))
    assert all(finding.right for finding in found) is not wrong


def test_devices():
    assert triton.why_not(Device("gpu", "NVIDIA H200", (9, 0))) is None
    assert "8.0 or newer" in triton.why_not(Device("gpu", "T4", (7, 5)))
    assert "NVIDIA" in triton.why_not(Device("tpu", "TPU v5e"))


@compiled
@pytest.mark.parametrize(
    ("tokens", "inputs", "widths"), [(32, 4096, (4096, 1024, 1024)), (32, 14336, (4096,)), (8192, 4096, (1, 1))]
)
def test_compiles_for_h200(tokens, inputs, widths):
    """Two launches, and y in its place."""
    mesh = mesh_of("h200x1")
    places = 32
    rank = 16
    out = 28672 if widths == (1, 1) else sum(widths)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    a = array(places, len(widths) * rank, inputs)
    b = array(places, rank, out)
    stack = AdapterStack(a, b, array(places, 3, dtype=jnp.int32), widths)
    given = array(tokens, out), array(tokens, inputs), stack, array(tokens, dtype=jnp.int32), array(dtype=jnp.int32)
    with jax.set_mesh(mesh):
        program = jax.jit(triton.add_adapters, donate_argnums=0).lower(*given).compile()
    assert len(re.findall(" custom-call", program.as_text())) == 2
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * tokens * out
    assert memory.temp_size_in_bytes <= 4 * triton.MOST_PIECES * tokens * len(widths) * rank + 2**16
