"""The TPU kernels of LoRA adapters: interpreted on CPU against float64, and compiled ahead of time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import mesh_of
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from test_lora import PLACES, WIDTHS, draw_pool, expected
from test_selfcheck_interpreted import on_tpu
from test_tpu_attention import interpreted

from jaxserve.pallas_kernels import selfcheck_lora
from jaxserve.pallas_kernels.device_ops import adapters_of
from jaxserve.pallas_kernels.lora import reference, tpu
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.registry import Device


def added(*given):
    return np.asarray(interpreted(jax.jit(tpu.add_adapters), *given))


@pytest.mark.parametrize(("widths", "out"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_adds_what_adapters_add(widths, out, tokens):
    rng = np.random.default_rng(tokens)
    stack, y, x = draw_pool(rng, widths, out, tokens, jnp.float32)
    place = jnp.asarray(rng.integers(-1, PLACES, tokens), jnp.int32)
    np.testing.assert_allclose(added(y, x, stack, place), expected(stack, y, x, place), atol=1e-4)


def test_many_tokens_and_outputs(monkeypatch):
    """Tiles with other adapters each, one without any, and several blocks of outputs. Rows beyond the count stay as
    they are, as do rows of y beyond the tokens. (All tiles are full: the interpreter would pad aliased arrays.)"""
    monkeypatch.setattr(tpu, "TOKENS", 32)
    monkeypatch.setattr(tpu, "OUTPUTS", 32 * 128)
    rng = np.random.default_rng(5)
    stack, y, x = draw_pool(rng, (256, 64, 64), 384, 160, jnp.float32)
    place = jnp.asarray([*[2] * 40, *[-1] * 60, *rng.integers(-1, PLACES, 60)], jnp.int32)
    made = added(jnp.concatenate([y, y[:7]]), x, stack, place, jnp.int32(147))
    np.testing.assert_allclose(made[:147], expected(stack, y[:147], x[:147], place[:147]), atol=1e-4)
    np.testing.assert_array_equal(made[147:160], y[147:])
    np.testing.assert_array_equal(made[160:], y[:7])


def test_nobody_has_an_adapter():
    stack, y, x = draw_pool(np.random.default_rng(3), (96,), 96, 5, jnp.float32)
    np.testing.assert_array_equal(added(y, x, stack, jnp.full(5, -1, jnp.int32)), y)


def test_16_bits():
    rng = np.random.default_rng(6)
    stack, y, x = draw_pool(rng, (64, 32), 96, 20, jnp.bfloat16)
    y = y.astype(jnp.bfloat16)
    x = x.astype(jnp.bfloat16)
    place = jnp.asarray(rng.integers(-1, PLACES, 20), jnp.int32)
    made = added(y, x, stack, place).astype(np.float32)
    wanted = expected(stack, y.astype(jnp.float32), x.astype(jnp.float32), place)
    np.testing.assert_allclose(made, wanted, rtol=2e-2, atol=0.5)  # the sums are up to 100, rounded to 8 bits twice
    np.testing.assert_array_equal(made[np.asarray(place) < 0], np.asarray(y, np.float32)[np.asarray(place) < 0])


def test_only_adapters_of_the_batch_are_read():
    """Those that no token uses are NaN, which would spread from a product with zeros."""
    rng = np.random.default_rng(8)
    stack, y, x = draw_pool(rng, (96,), 96, 9, jnp.float32)
    place = jnp.asarray([3, 1, -1, 3, 3, 1, 1, 3, 1], jnp.int32)
    unused = jnp.asarray([0, 2, 4])
    hidden = AdapterStack(stack.a.at[unused].set(jnp.nan), stack.b.at[unused].set(jnp.nan), stack.ranks, stack.widths)
    np.testing.assert_allclose(added(y, x, hidden, place), expected(stack, y, x, place), atol=1e-4)


def test_the_check_of_a_device(monkeypatch):
    monkeypatch.setattr(selfcheck_lora, "REPEATS", 1)
    monkeypatch.setattr(selfcheck_lora, "CASES", [(min(n, 40), min(k, 640), w) for n, k, w in selfcheck_lora.CASES])
    found = list(selfcheck_lora.check_adapters(on_tpu(tpu.add_adapters), np.dtype(np.float32)))
    assert [finding for finding in found if not finding.right] == []
    pltpu.reset_tpu_interpret_mode_state()


def test_devices():
    assert adapters_of(Device("tpu", "TPU v5 lite")) is tpu.add_adapters
    assert adapters_of(Device("tpu", "TPU v4")) is reference.add_adapters
    assert "v5e" in tpu.why_not(Device("gpu", "NVIDIA H200", (9, 0)))


@pytest.mark.parametrize(
    "target", ["v5e-1", "v6e-1", *(pytest.param(x, marks=pytest.mark.slow) for x in ("v5p-1", "tpu7x-1"))]
)
@pytest.mark.parametrize(
    ("tokens", "inputs", "widths", "rank"),
    [
        (1, 4096, (4096, 1024, 1024), 16), (32, 14336, (4096,), 8), (24, 4096, (4096, 1024, 1024), 64),
        (2000, 14336, (4096,), 16), (8192, 4096, (1, 1), 16),
    ],
)  # fmt: skip
def test_compiles(target, tokens, inputs, widths, rank):
    """Two kernels, and y in its place."""
    mesh = mesh_of(target)
    places = 32
    out = 28672 if widths == (1, 1) else sum(widths)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    a = array(places, len(widths) * rank, inputs)
    b = array(places, rank, out)
    stack = AdapterStack(a, b, array(places, 3, dtype=jnp.int32), widths)
    for kind in (jnp.bfloat16, jnp.float32):
        given = array(tokens, out, dtype=kind), array(tokens, inputs), stack, array(tokens, dtype=jnp.int32)
        with jax.set_mesh(mesh):
            lowered = jax.jit(tpu.add_adapters, donate_argnums=0).lower(*given, array(dtype=jnp.int32))
            program = lowered.compile()
        assert len(re.findall("tpu_custom_call", program.as_text())) == 2
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * tokens * out
        assert memory.temp_size_in_bytes <= 4 * tokens * max(len(widths) * rank, 128) * 2 + 2**20
