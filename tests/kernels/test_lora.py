"""Products with LoRA adapters: the plain operations equal float64 NumPy, and each kernel equals them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import cpu as cpu_kernels
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.cpu_build import LORA
from jaxserve.pallas_kernels.lora import cpu, reference
from jaxserve.pallas_kernels.lora.stacks import AdapterStack

PLACES = 5
RANK = 8
INPUTS = 75
WIDTHS = [((96,), 96), ((32, 8, 8), 96), ((1, 1), 70), ((40, 20), 120), ((37,), 37)]
BACKENDS = {
    "reference": (reference.add_adapters, reference.add_expert_adapters),
    "cpu": (cpu.add_adapters, cpu.add_expert_adapters),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "cpu" and not cpu_kernels.available(LORA):
        pytest.skip("no C++ compiler")
    return BACKENDS[request.param]


def draw(rng, widths: tuple[int, ...], out: int, tokens: int, dtype, experts: tuple[int, ...] = ()):
    """(stack, y, x) of random numbers; rows beyond an adapter's rank are not zero, and must not matter."""
    ranks = jnp.asarray(rng.integers(0, RANK + 1, (PLACES, 3)), jnp.int32)
    a = jnp.asarray(rng.normal(size=(PLACES, *experts, len(widths) * RANK, INPUTS)), dtype)
    b = jnp.asarray(rng.normal(size=(PLACES, *experts, RANK, out)), dtype)
    y, x = (jnp.asarray(rng.normal(size=(tokens, size)), jnp.float32) for size in (out, INPUTS))
    return AdapterStack(a, b, ranks, widths), y, x


def draw_pool(*args):
    """As `draw`, but with zeros beyond each adapter's rank, as in the pool."""
    stack, y, x = draw(*args)
    parts = stack.parts
    ranks = np.asarray(stack.ranks)[:, : stack.parts]
    of_a = (np.arange(RANK) < ranks[:, :, None]).reshape(PLACES, parts * RANK, 1)
    of_b = (np.arange(RANK) < ranks.max(axis=1)[:, None])[:, :, None]
    return AdapterStack(jnp.where(of_a, stack.a, 0), jnp.where(of_b, stack.b, 0), stack.ranks, stack.widths), y, x


def expected(stack: AdapterStack, y, x, place, expert=None) -> np.ndarray:
    """In float64, one token after the other."""
    made = np.asarray(y, np.float64)
    owner = np.asarray(reference.part_of_outputs(stack.widths, y.shape[1]))
    a, b = (np.asarray(array, np.float64) for array in (stack.a, stack.b))
    for token, where in enumerate(np.asarray(place)):
        if where < 0:
            continue
        of = (where,) if expert is None else (where, int(expert[token]))
        low = a[of].reshape(stack.parts, RANK, -1) @ np.asarray(x[token], np.float64)
        for part in range(stack.parts):
            low[part, int(stack.ranks[where, part]) :] = 0
            made[token] += (low[part] @ b[of]) * (owner == part)
    return made


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("widths", "out"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_add_adapters(backend, widths, out, tokens, dtype):
    rng = np.random.default_rng(tokens)
    stack, y, x = draw(rng, widths, out, tokens, dtype)
    place = jnp.asarray(rng.integers(-1, PLACES, tokens), jnp.int32)
    with jax.default_matmul_precision("highest"):
        made = jax.jit(backend[0])(y, x, stack, place)
    np.testing.assert_allclose(made, expected(stack, y, x, place), atol=1e-4)


def test_rows_that_matter(backend):
    """Rows beyond the count may hold anything, and nobody's rows stay as they are."""
    rng = np.random.default_rng(1)
    stack, y, x = draw(rng, (96,), 96, 9, jnp.float32)
    place = jnp.asarray([0, 1, 2, 3, 4, -1, 99, 0, 0], jnp.int32)
    with jax.default_matmul_precision("highest"):
        made = jax.jit(backend[0])(y, x.at[7:].set(jnp.inf), stack, place, jnp.int32(7))
    wanted = expected(stack, y[:6], x[:6], place[:6])
    np.testing.assert_allclose(made[:6], wanted, atol=1e-4)
    np.testing.assert_array_equal(made[5:7], y[5:7])


@pytest.mark.parametrize(("widths", "out"), WIDTHS)
def test_experts(backend, widths, out):
    rng = np.random.default_rng(3)
    experts = 4
    rows = 21
    stack, y, x = draw(rng, widths, out, rows, jnp.float32, (experts,))
    expert = np.sort(rng.integers(0, experts, rows - 2))
    sizes = jnp.asarray(np.bincount(expert, minlength=experts), jnp.int32)
    place = jnp.asarray(rng.integers(-1, PLACES, rows), jnp.int32)
    expert = np.append(expert, [experts, experts])  # padding
    with jax.default_matmul_precision("highest"):
        made = jax.jit(backend[1])(y, x, stack, place, jnp.asarray(expert, jnp.int32), sizes)
    wanted = expected(stack, y[:-2], x[:-2], place[:-2], expert)
    np.testing.assert_allclose(made[:-2], wanted, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("which", ["reference", "cpu"])
def test_embeddings(which, dtype):
    if which == "cpu" and not cpu_kernels.available(LORA):
        pytest.skip("no C++ compiler")
    rng = np.random.default_rng(4)
    vocab = 50
    hidden = 37
    tokens = 20
    a, b = (jnp.asarray(rng.normal(size=(PLACES, *shape)), dtype) for shape in ((vocab, RANK), (RANK, hidden)))
    ranks = rng.integers(0, RANK + 1, (PLACES, 3))
    stack = AdapterStack(a, b, jnp.asarray(ranks, jnp.int32), (vocab,))
    ids = rng.integers(0, vocab, tokens)
    place = rng.integers(-1, PLACES, tokens)
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), jnp.float32)
    wanted, (a, b) = np.asarray(x, np.float64), (np.asarray(array, np.float64) for array in (a, b))
    for token, where in enumerate(place):
        if where >= 0:
            rank = ranks[where, 0]
            wanted[token] += a[where, ids[token], :rank] @ b[where, :rank]
    add = {"reference": reference, "cpu": cpu}[which].add_to_embeddings
    with jax.default_matmul_precision("highest"):
        made = jax.jit(add)(x, jnp.asarray(ids, jnp.int32), stack, jnp.asarray(place, jnp.int32))
    np.testing.assert_allclose(made, wanted, atol=1e-4)


def draw_panels(rng, dtype, out: int, arithmetic: str):
    w = rng.normal(size=(out, INPUTS)).astype(np.float32)
    return jax.tree.map(jnp.asarray, cpu_panels.pack_floats(w.astype(jnp.dtype(dtype)), arithmetic))


@pytest.mark.skipif(not cpu_kernels.available(LORA), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("widths", "out"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_products_in_one_call(widths, out, tokens, dtype):
    """A product in panels and its adapters are what the two products are one after the other; in bfloat16 x is rounded
    for both. No row depends on the others or on their number."""
    rng = np.random.default_rng(tokens)
    stack, _, x = draw(rng, widths, out, tokens, dtype)
    place = jnp.asarray(rng.integers(-1, PLACES, tokens), jnp.int32)
    w = draw_panels(rng, dtype, out, dtype)
    made = np.asarray(jax.jit(cpu.matmul)(x, w, stack, place))
    read = [x.astype(jnp.bfloat16).astype(jnp.float32)] if dtype == "bfloat16" else []
    errors = [
        np.abs(made - expected(stack, cpu_panels.matmul(one, w), one, place)).max() for one in [x, *read]
    ]  # without the processor's products of pairs, x is not rounded
    assert min(errors) < 1e-4
    for token in range(tokens):
        alone = jax.jit(cpu.matmul)(x[token : token + 1], w, stack, place[token : token + 1])
        np.testing.assert_array_equal(alone[0], made[token])
    same = jnp.full(tokens, 2, jnp.int32)  # one adapter for all, in tiles of several tokens
    shared = np.asarray(jax.jit(cpu.matmul)(x, w, stack, same))
    for token in range(tokens):
        alone = jax.jit(cpu.matmul)(x[token : token + 1], w, stack, same[:1])
        np.testing.assert_array_equal(alone[0], shared[token])


@pytest.mark.skipif(not cpu_kernels.available(LORA), reason="no C++ compiler")
def test_rows_of_a_product_that_matter():
    rng = np.random.default_rng(2)
    stack, _, x = draw(rng, (96,), 96, 9, jnp.float32)
    place = jnp.asarray([0, 1, -1, 3, 4, 99, 0, 0, 0], jnp.int32)
    w = draw_panels(rng, "float32", 96, "float32")
    made = jax.jit(cpu.matmul)(x.at[6:].set(jnp.inf), w, stack, place, jnp.int32(6))
    wanted = expected(stack, cpu_panels.matmul(x, w), x, jnp.where(place == 99, -1, place))
    np.testing.assert_allclose(made[:6], wanted[:6], atol=1e-4)
